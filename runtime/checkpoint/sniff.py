"""What a file is, from its first bytes: a known container, or one line that says what else."""

from __future__ import annotations

from infer.runtime.checkpoint.files import ModelFile
from infer.runtime.checkpoint.printable import shown, shown_path
from infer.runtime.errors import CheckpointError, ModelError, UnsupportedModelError

_HEAD = 256

_AGAIN = "download it again"
_CONVERT = "use a .gguf of the same model"

# First bytes → (error, what it is, what to do). GGML's own magics are 32-bit numbers, so they lie reversed.
_MAGICS: tuple[tuple[bytes, type[ModelError], str, str], ...] = (
    (b"PK\x03\x04", UnsupportedModelError, "a zip archive or PyTorch checkpoint (pickle)", _CONVERT),
    (b"PK\x05\x06", UnsupportedModelError, "an empty zip archive", _CONVERT),
    (b"\x1f\x8b", UnsupportedModelError, "gzip data", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", UnsupportedModelError, "zstd data", "unpack it first"),
    (b"\xfd7zXZ\x00", UnsupportedModelError, "xz data", "unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", UnsupportedModelError, "a 7z archive", "unpack it first"),
    (b"\x89HDF\r\n", UnsupportedModelError, "an HDF5 file", _CONVERT),
    (b"\x93NUMPY", UnsupportedModelError, "a NumPy array", _CONVERT),
    (b"lmgg", UnsupportedModelError, "a GGML file from before GGUF", _CONVERT),
    (b"fmgg", UnsupportedModelError, "a GGMF file from before GGUF", _CONVERT),
    (b"tjgg", UnsupportedModelError, "a GGJT file from before GGUF", _CONVERT),
    (b"algg", UnsupportedModelError, "a GGLA adapter from before GGUF", _CONVERT),
    (
        b"version https://git-lfs",
        CheckpointError,
        "a Git LFS pointer, not the file",
        "run `git lfs pull` in its folder",
    ),
)
_MARKUP = (b"<!doctype", b"<html", b"<head", b"<?xml")
_PICKLE_PROTOCOLS = range(2, 6)


def container_of(file: ModelFile) -> str:
    """ "gguf" or "safetensors".

    Raises UnsupportedModelError for model files and archives of other kinds, CheckpointError for what is no
    model at all: an empty file, a web page, a Git LFS pointer, text, unknown bytes.
    """
    head = file.read(0, min(file.size, _HEAD))
    where = shown_path(file.path)
    if head.startswith(b"GGUF"):
        return "gguf"
    if _is_safetensors(head, file.size):
        return "safetensors"
    for magic, error, what, advice in _MAGICS:
        if head.startswith(magic):
            raise error(f"{where}: is {what}; {advice}")
    if len(head) > 1 and head[0] == 0x80 and head[1] in _PICKLE_PROTOCOLS:
        raise UnsupportedModelError(f"{where}: is a PyTorch checkpoint (pickle); {_CONVERT}")
    if not head:
        raise CheckpointError(f"{where}: is empty; {_AGAIN}")
    if b"GGUF".startswith(head):
        raise CheckpointError(f"{where}: truncated: a GGUF file that ends at byte {file.size}; {_AGAIN}")
    if not any(head):
        raise CheckpointError(
            f"{where}: starts with zero bytes, like a download that never finished; {_AGAIN}"
        )
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(_MARKUP):
        raise CheckpointError(
            f"{where}: is a web page, not a model; {_AGAIN} from the link of the file itself"
        )
    # A character cut in two at the end of the head does not make it binary.
    text = head.decode("utf-8", "ignore")
    if len(head) - len(text.encode()) < 4 and all(char.isprintable() or char.isspace() for char in text):
        line = " ".join(text.split())[:60]
        raise CheckpointError(f"{where}: is text that starts with {shown(line)}, not a model; {_AGAIN}")
    raise CheckpointError(
        f"{where}: is no model file: it starts with the bytes {head[:8].hex(' ')}; check the path"
    )


def _is_safetensors(head: bytes, size: int) -> bool:
    """An 8-byte little-endian header length that fits the file, then a JSON object."""
    return len(head) > 8 and head[8] == ord("{") and 2 <= int.from_bytes(head[:8], "little") <= size - 8
