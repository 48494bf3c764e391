"""The content hash of a model and the memo that saves computing it again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from fake_wheels import CONTENT, PIECES, sha256

from infer.runtime.errors import ModelError, ModelNotFoundError
from infer.runtime.store import fingerprint


def settled(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    time.sleep(0.06)
    return path


def test_a_fingerprint_is_the_sha256_and_is_computed_once(tmp_path: Path) -> None:
    path = settled(tmp_path / "model.gguf", CONTENT)
    steps: list[tuple[int, int, str]] = []
    for _ in range(2):
        digest = fingerprint.fingerprint([path], tmp_path / "memo", progress=lambda *step: steps.append(step))
        assert digest == sha256(CONTENT)
    assert steps[-1] == (len(CONTENT), len(CONTENT), "hashing model.gguf")
    assert len([done for done, _, _ in steps if done == len(CONTENT)]) == 1


def test_shards_have_one_fingerprint_that_depends_on_their_order(tmp_path: Path) -> None:
    paths = []
    for number, piece in enumerate(PIECES):
        paths.append(tmp_path / str(number))
        paths[-1].write_bytes(piece)
    expected = sha256("".join(f"{sha256(piece)}\n" for piece in PIECES).encode())
    assert fingerprint.fingerprint(paths, tmp_path / "memo") == expected
    assert fingerprint.fingerprint(paths[::-1], tmp_path / "memo") != expected


def test_a_change_that_keeps_size_and_time_is_seen(tmp_path: Path) -> None:
    path = settled(tmp_path / "model", b"before")
    assert fingerprint.fingerprint([path], tmp_path / "memo") == sha256(b"before")
    status = path.stat()
    settled(path, b"after!")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fingerprint.fingerprint([path], tmp_path / "memo") == sha256(b"after!")
    other = settled(tmp_path / "other", b"third!")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)
    assert fingerprint.fingerprint([path], tmp_path / "memo") == sha256(b"third!")


def test_a_file_changed_a_moment_ago_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "model"
    for number in range(50):
        content = b"%06d" % number
        path.write_bytes(content)
        assert fingerprint.fingerprint([path], tmp_path / "memo") == sha256(content)


@pytest.mark.parametrize(
    "memo",
    [b"", b"{", b"[]", b'{"a": 1}', b"\xff\xfe", b"[" * 100_000, b'{"KEY": "../../etc"}', b'{"KEY": "AB"}'],
)
def test_a_broken_memo_is_ignored_and_replaced(memo: bytes, tmp_path: Path) -> None:
    path = settled(tmp_path / "model", b"content")
    status = path.stat()
    key = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
    (tmp_path / fingerprint.MEMO_NAME).write_bytes(memo.replace(b"KEY", key.encode()))
    assert fingerprint.fingerprint([path], tmp_path) == sha256(b"content")
    assert fingerprint.remembered(path, tmp_path) == sha256(b"content")


def test_a_memo_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    path = settled(tmp_path / "model", b"content")
    assert fingerprint.fingerprint([path], path) == sha256(b"content")
    fingerprint.remember(path, sha256(b"content"), path)
    assert fingerprint.remembered(path, path) is None


def test_the_memo_stays_small(tmp_path: Path) -> None:
    path = settled(tmp_path / "model", b"content")
    many = {str(number): "0" * 64 for number in range(2000)}
    (tmp_path / fingerprint.MEMO_NAME).write_text(json.dumps(many))
    fingerprint.fingerprint([path], tmp_path)
    assert len(json.loads((tmp_path / fingerprint.MEMO_NAME).read_text())) <= 512
    assert fingerprint.remembered(path, tmp_path) == sha256(b"content")


def test_no_file_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        fingerprint.fingerprint([tmp_path / "gone"], tmp_path)
    with pytest.raises(ModelError, match="cannot be read"):
        fingerprint.fingerprint([tmp_path], tmp_path)
