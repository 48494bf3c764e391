"""The disk cache's bytes: header, names, keys and checksum against their written definitions."""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.runtime.kvcache.disk import checksum
from infer.runtime.kvcache.disk.checksum import ROW_BYTES, PayloadHash, payload_digest
from infer.runtime.kvcache.disk.format import (
    HEADER_BYTES,
    Header,
    entry_name,
    is_foreign,
    parse_entry_name,
    parse_header,
)
from infer.runtime.kvcache.keys import block_key, prefix_keys, root_key

HEADER = Header(
    key=bytes(range(32)),
    parent=bytes(range(32, 64)),
    fingerprint=bytes(range(64, 96)),
    tokens=17,
    payload_bytes=17 * 23040,
    checksum=bytes(range(16)),
)


def test_header_layout() -> None:
    body = (
        b"\x89IKV\r\n\x1a\n"
        + (1).to_bytes(4, "little")
        + (160).to_bytes(4, "little")
        + HEADER.key
        + HEADER.parent
        + HEADER.fingerprint
        + (17).to_bytes(4, "little")
        + (64).to_bytes(4, "little")
        + (17 * 23040).to_bytes(8, "little")
        + HEADER.checksum
    )
    assert HEADER.encode() == body + hashlib.sha256(body).digest()[:16]
    assert parse_header(HEADER.encode()) == HEADER


def test_every_header_bit_matters() -> None:
    data = HEADER.encode()
    for bit in range(8 * HEADER_BYTES):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        assert parse_header(bytes(changed)) is None
        assert not is_foreign(bytes(changed))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_header(data: bytes) -> None:
    assert parse_header(data) is None
    assert not is_foreign(data)


def framed(version: int, length: int, rest: bytes) -> bytes:
    body = (struct.pack("<8sII", b"\x89IKV\r\n\x1a\n", version, length) + rest)[: length - 16].ljust(
        length - 16, b"x"
    )
    return body + hashlib.sha256(body).digest()[:16]


def test_entries_of_other_versions_are_recognized() -> None:
    assert is_foreign(framed(2, 200, b"anything") + b"payload")
    assert is_foreign(framed(7, 64, b""))
    assert not is_foreign(framed(1, 160, b"anything"))
    assert not is_foreign(framed(2, 200, b"anything")[:-1])


def test_names_round_trip_and_nothing_else_is_one() -> None:
    name = entry_name(HEADER.parent, 5, HEADER.key)
    assert parse_entry_name(name) == (HEADER.parent.hex()[:32], 5, HEADER.key.hex())
    for other in (
        name.upper(),
        name + "x",
        name.replace("-5-", "-0-"),
        name.replace("-5-", "-65-"),
        "tmp-1",
        "",
        "\n",
    ):
        assert parse_entry_name(other) is None


def test_keys_are_the_documented_chain() -> None:
    root = root_key(1, HEADER.fingerprint)
    assert root == hashlib.sha256(b"infer-kv\x01\0\0\0" + HEADER.fingerprint).digest()
    ids = [1, 0, 2**31, 49151]
    packed = b"".join(token.to_bytes(8, "little") for token in ids)
    assert block_key(root, ids) == hashlib.sha256(root + packed + b"\4\0\0\0").digest()
    assert dict(prefix_keys(root, ids)) == {n: block_key(root, ids[:n]) for n in range(1, 5)}


@pytest.mark.parametrize("native", [True, False])
def test_checksum_is_the_documented_one(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same sums in Python's integers, with the library (where it is) and without."""
    if not native:
        monkeypatch.setattr(checksum, "_library", lambda: None)
    data = random.Random(1).randbytes(2 * ROW_BYTES + 8 * 5 + 3)
    stream = hashlib.shake_256(b"infer-kv multilinear multipliers").digest(2 * ROW_BYTES)
    words = [word | 1 for word in struct.unpack(f"<{ROW_BYTES // 4}Q", stream)]
    a, b = words[: ROW_BYTES // 8], words[ROW_BYTES // 8 :]
    sums = hashlib.sha256()
    rows = [data[:ROW_BYTES], data[ROW_BYTES : 2 * ROW_BYTES], data[2 * ROW_BYTES : -3], data[-3:] + bytes(5)]
    for row in rows:
        values = struct.unpack(f"<{len(row) // 8}Q", row)
        s = sum(x * w for x, w in zip(a, values, strict=False)) % 2**64
        t = sum(x * (w >> 32) for x, w in zip(b, values, strict=False)) % 2**64
        sums.update(struct.pack("<QQ", s, t))
    sums.update(struct.pack("<Q", len(data)))
    assert payload_digest(data) == sums.digest()[:16]


def test_checksum_in_pieces_is_the_same() -> None:
    data = random.Random(2).randbytes(3 * ROW_BYTES + 77)
    pieces = PayloadHash()
    pieces.update(data[: 2 * ROW_BYTES])
    pieces.update(data[2 * ROW_BYTES :])
    assert pieces.digest() == payload_digest(data) == payload_digest(np.frombuffer(data, np.uint8))
    with pytest.raises(ValueError, match="before the last"):
        pieces.update(b"more")


@pytest.mark.parametrize("base", ["random", "zero"])
def test_checksum_sees_damage(base: str) -> None:
    rng = random.Random(3)
    size = 2 * ROW_BYTES + 640
    data = rng.randbytes(size) if base == "random" else bytes(size)
    seen = {payload_digest(data)}

    def differs(changed: bytes) -> None:
        digest = payload_digest(changed)
        assert digest not in seen
        seen.add(digest)

    for _ in range(1000):
        changed = bytearray(data)
        changed[rng.randrange(size)] ^= 1 << rng.randrange(8)
        if bytes(changed) != data:
            digest = payload_digest(bytes(changed))
            assert digest != payload_digest(data)
    # two flipped top bits, of words and of halves: what a plain multilinear sum modulo 2^64 does not see
    for top in (7, 3):
        changed = bytearray(data)
        changed[top] ^= 0x80
        changed[top + 8 * 1000] ^= 0x80
        differs(bytes(changed))
    differs(data[:-1])
    differs(data + b"\0")
    differs(b"")
    if base == "random":
        differs(data[ROW_BYTES : 2 * ROW_BYTES] + data[:ROW_BYTES] + data[2 * ROW_BYTES :])
        differs(data[8:16] + data[:8] + data[16:])
        differs(data[: size // 2] + bytes(size - size // 2))
        differs(bytes(size))
