"""Normalization rules that lead a reader astray are refused."""

from __future__ import annotations

import struct

import pytest
from charsmaps import units

from infer.runtime.errors import TokenizerError
from infer.runtime.tokenizer.charsmap import check_charsmap


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "trie has 0 bytes"),
        (b"\0\0\0\0x", "trie has 0 bytes"),
        (b"\xff\xff\xff\xff" + b"\0" * 64, "trie has 4294967295 bytes"),
        (struct.pack("<I", 1024) + b"\0" * 1024, "trie has 1024 bytes of 1028"),
        (units(replacements=b"\xff\0"), "not UTF-8"),
        (units(replacements=b"x"), "no end"),
        (units(replacements=b"x" * 1000 + b"\0"), "no end"),
        (units((0, 1 << 20)), "leads out"),
        (units((128 ^ 97, 97 | 1 << 20)), "leads out"),
        (units((128 ^ 97, 97 | 97 << 10)), "more than 256 bytes"),
        (units((128 ^ 97, 97 | 1 << 8 | 1 << 10), (128 ^ 97 ^ 1, 0x80000002)), "no replacement"),
        (units((128 ^ 97, 97 | 1 << 8 | 1 << 10), (128 ^ 97 ^ 1, 0x80000001),
               replacements="é\0".encode()), "no replacement"),
    ],
)  # fmt: skip
def test_normalization_rules_that_lead_astray_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        check_charsmap(data, "x")
