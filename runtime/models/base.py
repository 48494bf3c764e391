"""What a model family provides, and how its weights come in: one tensor at a time, each accounted for."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from infer.quant.kernels.base import WeightKernel
from infer.quant.kernels.device import Device
from infer.quant.kernels.strips import NativeWeight
from infer.quant.kernels.weight import PackedWeight
from infer.runtime.checkpoint.base import Checkpoint, RawTensor
from infer.runtime.config import EngineConfig, ModelConfig
from infer.runtime.errors import CheckpointError, UnsupportedModelError
from infer.runtime.models.hparams import HyperParameters
from infer.runtime.models.ops import Linear, Norm, Ops, Value, Vector

if TYPE_CHECKING:
    from infer.quant.kernels.source import WeightSource
    from infer.runtime.models.sources import WeightSources

Progress = Callable[[int, int], None]


class Model(abc.ABC):
    """A family: `read_config` turns metadata into its shape, the constructor takes the weights out of a loader,
    `forward` is its maths. positions: length of the rope tables, the context in use."""

    config: ModelConfig

    @staticmethod
    @abc.abstractmethod
    def read_config(params: HyperParameters, vocab_size: int) -> ModelConfig: ...

    @abc.abstractmethod
    def __init__(self, config: ModelConfig, loader: WeightLoader, positions: int) -> None: ...

    @abc.abstractmethod
    def forward(self, ops: Ops) -> Value:
        """Logits [R, vocab] of the current batch's output rows."""


class WeightLoader:
    """Hands tensors of a checkpoint to a kernel. Every method raises CheckpointError that names the tensor when it is
    missing or has another shape, UnsupportedModelError when its type is unknown; `finish` when some were not asked for.

    ready: tensors that have been packed already, each as one matrix. The others are read through torch, which is
    imported for the first of them. expanded: the types whose codes are wider in memory than in the file, with their
    bytes there and here.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        kernel: WeightKernel,
        config: EngineConfig,
        progress: Progress,
        threads: int,
        ready: Mapping[str, NativeWeight] = MappingProxyType({}),
    ) -> None:
        self._checkpoint = checkpoint
        self._kernel = kernel
        self._quant = config.quant
        self._progress = progress
        self._threads = threads
        self._ready = ready
        self._left = dict(checkpoint.tensors)
        self._done, self._total = 0, checkpoint.nbytes
        self.expanded: dict[str, tuple[int, int]] = {}
        self._decoded = False

    @cached_property
    def _sources(self) -> WeightSources:
        """Comes with torch, whose import takes longer than loading a small model, and 200 MB."""
        from infer.runtime.models.sources import WeightSources

        return WeightSources(self._checkpoint, self._threads)

    @property
    def torch_version(self) -> str:
        """Of the torch that decoded weights; "" when there was nothing to decode."""
        return self._sources.torch_version if self._decoded else ""

    @property
    def device(self) -> Device:
        return self._kernel.device

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint.tensors

    def matrix(self, name: str, rows: int, columns: int) -> PackedWeight:
        """A weight [rows, columns] in the kernel's layout."""
        tensor = self._take(name, (rows, columns))
        packed = self._pack(tensor, 0, rows)
        self._advance(tensor)
        return packed

    def matrices(self, name: str, count: int, rows: int, columns: int) -> tuple[PackedWeight, ...]:
        """The weights [rows, columns] that lie one after another in a tensor [count, rows, columns]."""
        tensor = self._take(name, (count, rows, columns))
        packed = tuple(self._pack(tensor, index * rows, rows) for index in range(count))
        self._advance(tensor)
        return packed

    def pieces(
        self, name: str, rows: int, columns: int, pieces: Iterable[tuple[int, int, bool]]
    ) -> tuple[PackedWeight, ...]:
        """Parts of a tensor [rows, columns]: (first row, rows, whether to transpose) of each. A transposed one is held
        as float32, since the groups of a quantized matrix do not survive it."""
        tensor = self._take(name, (rows, columns))
        packed = tuple(
            self._pack(tensor, first, count) if not turn else self._pack_transposed(tensor, first, count)
            for first, count, turn in pieces
        )
        self._advance(tensor)
        return packed

    def router(self, name: str, experts: int, columns: int) -> Linear:
        """`linear`, as it is stored: `--quant` leaves a router alone, since a rounded score may be another choice."""
        tensor = self._take(f"{name}.weight", (experts, columns))
        weight = self._pack(tensor, 0, experts, as_stored=True)
        self._advance(tensor)
        return Linear(weight, self.optional_vector(f"{name}.bias", experts))

    def vector(self, name: str, *shape: int) -> Vector:
        """float32 of that shape, where the kernel wants it."""
        return self._kernel.vector(self.values(name, *shape))

    def values(self, name: str, *shape: int) -> npt.NDArray[np.float32]:
        """A plain tensor of that shape."""
        tensor = self._take(name, shape)
        if tensor.type not in ("F32", "F16", "BF16"):
            raise UnsupportedModelError(
                f"{self._checkpoint.path}: tensor {name} is {tensor.type}; vectors must be F32, F16 or BF16"
            )
        count = math.prod(shape)
        if tensor.planes:
            stored = self._sources.bytes(tensor, count)
        else:
            stored = np.empty(tensor.nbytes, dtype=np.uint8)
            self._checkpoint.read_into(tensor, stored.data)
        self._advance(tensor)
        values = _floats(stored, tensor.type).reshape(shape)
        return values + np.float32(tensor.shift) if tensor.shift else values

    def linear(self, name: str, rows: int, columns: int) -> Linear:
        """`name`.weight and, where the file has it, `name`.bias."""
        weight = self.matrix(f"{name}.weight", rows, columns)
        bias = f"{name}.bias"
        return Linear(weight, self.vector(bias, rows) if bias in self else None)

    def split(self, name: str, sizes: tuple[int, ...], columns: int) -> tuple[Linear, ...]:
        """The layers whose rows lie one after another in `name`.weight (and `name`.bias), `sizes` rows each."""
        tensor = self._take(f"{name}.weight", (sum(sizes), columns))
        bias = f"{name}.bias"
        values = self.values(bias, sum(sizes)) if bias in self else None
        layers = []
        for index, size in enumerate(sizes):
            first = sum(sizes[:index])
            part = None if values is None else self._kernel.vector(values[first : first + size].copy())
            layers.append(Linear(self._pack(tensor, first, size), part))
        self._advance(tensor)
        return tuple(layers)

    def norm(self, name: str, width: int, eps: float) -> Norm:
        return Norm(self.vector(f"{name}.weight", width), eps)

    def optional_vector(self, name: str, *shape: int) -> Vector | None:
        return self.vector(name, *shape) if name in self else None

    def finish(self) -> None:
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(
                f"{self._checkpoint.path}: unexpected tensors {', '.join(names[:3])}{more}; "
                "the file is of another architecture than it says, or newer than this version of infer"
            )

    def _pack(self, tensor: RawTensor, first: int, rows: int, *, as_stored: bool = False) -> PackedWeight:
        """Rows [first, first + rows) of a matrix, or of matrices one after another."""
        whole = self._ready.get(tensor.name)
        if whole is not None and (part := whole.part(first, rows)) is not None:
            stored = tensor.nbytes * rows // whole.shape[0]
            if math.prod(part.shape) * part.kind.bits > 8 * stored:
                self._expands(tensor.type, stored, part.nbytes)
            return part
        return self._packed(self._sources.matrix(tensor, first, rows, None if as_stored else self._quant))

    def _pack_transposed(self, tensor: RawTensor, first: int, rows: int) -> PackedWeight:
        self._decoded = True
        return self._packed(self._sources.transposed(tensor, first, rows))

    def _packed(self, source: WeightSource) -> PackedWeight:
        self._decoded = self._decoded or self._kernel.decodes(source)
        try:
            packed = self._kernel.pack(source)
        except ValueError as error:
            raise CheckpointError(f"{self._checkpoint.path}: tensor {source.name}: {error}") from None
        if source.format.expands and not source.requantized:
            stored = math.prod(source.shape) // source.format.block * source.format.type_size
            self._expands(source.format.name, stored, packed.nbytes)
        return packed

    def _expands(self, kind: str, stored: int, held: int) -> None:
        before = self.expanded.get(kind, (0, 0))
        self.expanded[kind] = before[0] + stored, before[1] + held

    def _take(self, name: str, shape: tuple[int, ...]) -> RawTensor:
        tensor = self._left.pop(name, None)
        if tensor is None:
            raise CheckpointError(f"{self._checkpoint.path}: tensor {name} is missing; get the file again")
        if tensor.shape != shape:
            raise CheckpointError(
                f"{self._checkpoint.path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        return tensor

    def _advance(self, tensor: RawTensor) -> None:
        self._done += tensor.nbytes
        self._progress(self._done, self._total)


def _floats(stored: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[np.float32]:
    """Little-endian F32, F16 or BF16 (the upper half of a float32) as float32."""
    if kind == "BF16":
        return (stored.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return stored.view("<f4" if kind == "F32" else "<f2").astype(np.float32, copy=False)
