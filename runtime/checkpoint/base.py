"""What every model file gives: metadata and raw tensors. Torch-free and numpy-free."""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


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
    file and offset: where the bytes begin.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int
    file: Path
    offset: int


class Checkpoint(abc.ABC):
    """An open model. Metadata values are Python int, float, bool, str or list of one of these."""

    path: Path
    container: str  # "gguf", "safetensors"
    metadata: Mapping[str, object]
    tensors: Mapping[str, RawTensor]

    @abc.abstractmethod
    def read_into(self, tensor: RawTensor, buffer: memoryview, start: int = 0) -> None:
        """Fill a writable byte buffer with len(buffer) bytes of the tensor's data from byte `start` on.

        Plain reads, never a mapping: a file that shrinks under a mapping kills the process.
        Raises CheckpointError when the file ends early. Safe to call from several threads.
        """

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
