"""open_checkpoint: what a path that is no GGUF file is told to be, and never a hang."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from infer.runtime.checkpoint.files import ModelFile
from infer.runtime.checkpoint.gguf import open_gguf
from infer.runtime.checkpoint.open import open_checkpoint
from infer.runtime.errors import CheckpointError, InferError, ModelNotFoundError, UnsupportedModelError

EMPTY_GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def safetensors(size: int = 4) -> bytes:
    head = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(size)


def message_of(path: Path, kind: type[InferError]) -> str:
    with pytest.raises(InferError) as caught:
        open_checkpoint(path).close()
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert message.isprintable()
    assert caught.value.exit_code == 3
    return message


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"", CheckpointError, "is empty; download it again"),
        (b"GG", CheckpointError, "truncated"),
        (bytes(1000), CheckpointError, "starts with zero bytes"),
        (b"\n <!DOCTYPE html><html>", CheckpointError, "is a web page"),
        (b"\xef\xbb\xbf<HTML>", CheckpointError, "is a web page"),
        (b'<?xml version="1.0"?><Error>', CheckpointError, "is a web page"),
        (LFS, CheckpointError, "Git LFS pointer, not the file; run `git lfs pull`"),
        (b"Entry not found", CheckpointError, "is text that starts with 'Entry not found'"),
        (b'{"error":\n"gated"}', CheckpointError, "is text that starts with"),
        ("é".encode() * 200, CheckpointError, "is text that starts with"),
        (b"a" + "é".encode() * 200, CheckpointError, "is text that starts with"),
        (b"\x01\x02\x03\x04evil\x1b[2J\n", CheckpointError, "starts with the bytes 01 02 03 04 65"),
        (safetensors(), UnsupportedModelError, "is a safetensors file"),
        (pickle.dumps({"a": 1}, 2), UnsupportedModelError, "PyTorch checkpoint (pickle)"),
        (pickle.dumps({"a": 1}, 5), UnsupportedModelError, "PyTorch checkpoint (pickle)"),
        (b"tjgg\x03\x00\x00\x00", UnsupportedModelError, "GGJT file from before GGUF"),
        (b"\x1f\x8b\x08\x00", UnsupportedModelError, "gzip"),
    ],
)
def test_what_the_file_is(tmp_path: Path, content: bytes, kind: type[InferError], message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert message in message_of(path, kind)
    with pytest.raises(kind):
        open_gguf(path)


def test_a_gguf_file_opens_under_any_name(tmp_path: Path) -> None:
    path = tmp_path / "sha256-0123"
    path.write_bytes(EMPTY_GGUF)
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.container, checkpoint.path) == ("gguf", path)


def test_zip_checkpoint(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    assert "PyTorch checkpoint (pickle)" in message_of(tmp_path / "pytorch_model.bin", UnsupportedModelError)


def test_no_such_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path / "no\nne", tmp_path / "file" / "below", Path("a\0b"), Path("\udcff")):
        assert "no such file" in message_of(path, ModelNotFoundError)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "no such file" in message_of(tmp_path / "dangling", ModelNotFoundError)


def test_paths_the_system_refuses(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "cannot be opened" in message_of(tmp_path / "loop", CheckpointError)
    assert "cannot be opened" in message_of(tmp_path / ("x" * 300), CheckpointError)


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "m.gguf"
    path.write_bytes(EMPTY_GGUF)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)  # root may read everything, so a mode would not do
        message = message_of(path, CheckpointError)
    assert "no permission to read it" in message


def test_pipes_sockets_and_devices_do_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)  # socket paths are short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        for path in (tmp_path / "fifo", Path("socket"), Path("/dev/null"), Path("/dev/zero")):
            assert "pipe, socket or device" in message_of(path, CheckpointError)


def test_a_pipe_that_takes_the_place_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    regular = tmp_path / "regular"
    regular.write_bytes(EMPTY_GGUF)
    os.mkfifo(tmp_path / "fifo")
    before = set(os.listdir("/proc/self/fd"))
    status = os.stat(regular)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda _: status)
        with pytest.raises(CheckpointError, match="pipe, socket or device"):
            ModelFile(tmp_path / "fifo")
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "a folder without a model"),
        (["config.json", "a.gguf", "b.gguf"], "is a folder of 2 models"),
        (["a.gguf", "config.json"], "give the file: {}/a.gguf"),
        (["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], "give the file: {}/a-00001-of-00002.gguf"),
        (["a-00002-of-00002.gguf"], "give the file: {}/a-00002-of-00002.gguf"),
        (
            ["b.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf"],
            "2 models; give one of 'a-00001-of-00002.gguf', 'b",
        ),
        (
            [f"{n}.gguf" for n in range(7)],
            "7 models; give one of '0.gguf', '1.gguf', '2.gguf', '3.gguf', '4.gguf' and 2 more",
        ),
        (["a\n.gguf"], r"\n.gguf'"),
    ],
)
def test_folders(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(EMPTY_GGUF)
    assert message.format(tmp_path) in message_of(tmp_path, UnsupportedModelError)
    with pytest.raises(UnsupportedModelError, match="is a folder"):
        open_gguf(tmp_path)


def test_reading_does_not_import_torch_or_numpy(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(EMPTY_GGUF)
    code = (
        "import sys; from pathlib import Path; from infer.runtime.checkpoint.open import open_checkpoint\n"
        "open_checkpoint(Path(sys.argv[1])).close(); print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
