"""What every model file gives: metadata and raw tensors. Torch-free and numpy-free."""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from infer.runtime.checkpoint.printable import shown, shown_path
from infer.runtime.errors import CheckpointError


class ValueType(enum.Enum):
    """Type of a metadata value, as far as the file states one."""

    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    STR = "str"
    ARRAY = "array"


@dataclass(frozen=True)
class RawTensor:
    """One tensor as it lies in the file.

    shape is row-major with the outermost dimension first, as torch has it (GGUF stores it reversed).
    type is the format's own name: F32, F16, BF16, Q4_K, …; nbytes = exact size of the stored data.
    file and offset: where the bytes begin. shift: to be added to every value, where a file stores them less that.
    planes: parts of a matrix that lie apart (codes, scales, …), by what they are; nbytes counts them all, and they are
    read one by one. settings: numbers that go with them.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int
    file: Path
    offset: int
    shift: float = 0.0
    planes: Mapping[str, RawTensor] = field(default_factory=dict)
    settings: Mapping[str, float] = field(default_factory=dict)


class Checkpoint(abc.ABC):
    """An open model. Metadata values are Python int, float, bool, str or an array of one of these: a list, or what
    `arrays` has in place of a long one.

    files: everything the model is made of, in a fixed order; their bytes are its identity.
    """

    path: Path
    files: tuple[Path, ...]
    container: str  # "gguf", "safetensors"
    metadata: Mapping[str, object]
    tensors: Mapping[str, RawTensor]

    @abc.abstractmethod
    def read_into(self, tensor: RawTensor, buffer: memoryview, start: int = 0) -> None:
        """Fill a writable byte buffer with len(buffer) bytes of the tensor's data from byte `start` on.

        Plain reads, never a mapping: a file that shrinks under a mapping kills the process.
        Raises CheckpointError when the file ends early or the range is not inside the tensor, ValueError for a tensor
        of another checkpoint and a buffer that is read-only or not contiguous. Safe to call from several threads.
        """

    @abc.abstractmethod
    def descriptor(self, tensor: RawTensor) -> int | None:
        """An open file that holds the tensor's data from `tensor.offset` on; None where it is put together from parts.
        It is closed with the checkpoint."""

    @staticmethod
    def _check_range(tensor: RawTensor, buffer: memoryview, start: int) -> None:
        """Raise what `read_into` raises for a buffer or range that does not fit."""
        if buffer.readonly or not buffer.c_contiguous:
            raise ValueError("the buffer must be writable and contiguous")
        if start < 0 or start + buffer.nbytes > tensor.nbytes:
            raise CheckpointError(
                f"{shown_path(tensor.file)}: tensor {shown(tensor.name)} has {tensor.nbytes} bytes, "
                f"but bytes {start} to {start + buffer.nbytes} were asked for; its shape is not the model's"
            )

    @abc.abstractmethod
    def close(self) -> None: ...

    @property
    def nbytes(self) -> int:
        """Size of all tensor data in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
