"""Plain reads from one regular file, opened without ever blocking."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from infer.runtime.checkpoint.printable import shown_path
from infer.runtime.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError

# One read call: below the 2 GiB at which Linux cuts a read short and macOS refuses it.
_LONGEST_READ = 1 << 30


class ModelFile:
    """A regular file open for reading. Reads are safe from several threads; closing while one runs is not.

    size is the length in bytes when the file was opened.
    """

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises ModelNotFoundError (no such path), UnsupportedModelError (a folder) or CheckpointError (a pipe,
        socket or device, no permission, any other failure of the system).
        """
        self.path = path
        try:
            # A device or pipe is not even opened: opening one can block or act on the device. The flag covers
            # a path that changes between the two calls.
            _require_regular(path, os.stat(path).st_mode)
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise _open_error(path, error) from None
        try:
            status = os.fstat(self._fd)
            _require_regular(path, status.st_mode)
        except BaseException:
            os.close(self._fd)
            raise
        self.size = status.st_size

    @property
    def descriptor(self) -> int:
        """Of the open file; negative once it is closed."""
        return self._fd

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset`; CheckpointError when the file ends before them."""
        buffer = bytearray(count)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the writable, contiguous byte buffer from `offset` on.

        CheckpointError when the file ends before or cannot be read; ValueError after close.
        """
        if self._fd < 0:
            raise ValueError(f"{shown_path(self.path)} is closed")
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done : done + _LONGEST_READ]], offset + done)
            except OSError as error:
                text = error.strerror or str(error)
                raise CheckpointError(
                    f"{shown_path(self.path)}: reading at byte {offset + done} failed: {text}"
                ) from None
            if count == 0:
                raise CheckpointError(
                    f"{shown_path(self.path)}: ended at byte {offset + done} while it was read: "
                    f"it had {self.size} bytes when it was opened; restore the file and start again"
                )
            done += count

    def close(self) -> None:
        """Close the file. May be called again; a read after it raises ValueError."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _require_regular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise UnsupportedModelError(f"{shown_path(path)}: is a folder; give the model file inside it")
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{shown_path(path)}: is a pipe, socket or device; give a regular file")


def _open_error(path: Path, error: OSError | ValueError) -> ModelError:
    # ValueError: a NUL in the path.
    if isinstance(error, ValueError) or error.errno in (errno.ENOENT, errno.ENOTDIR):
        return ModelNotFoundError(f"{shown_path(path)}: no such file; check the path")
    if isinstance(error, PermissionError):
        return CheckpointError(f"{shown_path(path)}: no permission to read it; check its owner and mode")
    return CheckpointError(f"{shown_path(path)}: cannot be opened: {error.strerror or error}")
