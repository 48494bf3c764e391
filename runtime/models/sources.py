"""Tensors of a checkpoint as rows that torch decodes, for what no kernel takes straight from the file."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from infer.quant.base import PlanarFormat, QuantFormat, get_format
from infer.quant.kernels.source import WeightSource
from infer.runtime.checkpoint.base import Checkpoint, RawTensor
from infer.runtime.errors import CheckpointError, UnsupportedModelError


class WeightSources:
    """threads: for torch to decode with. Every method raises CheckpointError or UnsupportedModelError that names the
    tensor, the first also when rows are read that the file no longer has."""

    def __init__(self, checkpoint: Checkpoint, threads: int) -> None:
        torch.set_num_threads(threads)
        self._checkpoint = checkpoint
        self.torch_version = str(torch.__version__)

    def matrix(self, tensor: RawTensor, first: int, rows: int, quant: str | None) -> WeightSource:
        """Rows [first, first + rows) of a matrix, or of matrices one after another. quant: as WeightSource has it."""
        name, columns = tensor.name, tensor.shape[-1]
        try:
            form = get_format(tensor.type)
            form.row_bytes(columns)
        except ValueError as error:
            raise UnsupportedModelError(f"{self._checkpoint.path}: tensor {name}: {error}") from None

        read = self._rows(tensor, form, (math.prod(tensor.shape[:-1]), columns))
        return WeightSource(
            name, (rows, columns), form, lambda start, stop: read(first + start, first + stop), quant
        )

    def transposed(self, tensor: RawTensor, first: int, rows: int) -> WeightSource:
        """Those rows as columns of a float32 matrix."""
        values = self.matrix(tensor, first, rows, None).dequantize(0, rows).T.contiguous()

        def read(start: int, stop: int) -> torch.Tensor:
            return values[start:stop].reshape(-1).view(torch.uint8)

        return WeightSource(tensor.name, (tensor.shape[-1], rows), get_format("F32"), read)

    def bytes(self, tensor: RawTensor, count: int) -> npt.NDArray[np.uint8]:
        """The `count` numbers of a plain tensor whose parts lie apart, put together."""
        return self._rows(tensor, get_format(tensor.type), (count, 1))(0, count).numpy()

    def _rows(
        self, tensor: RawTensor, form: QuantFormat, shape: tuple[int, int]
    ) -> Callable[[int, int], torch.Tensor]:
        """A reader of the rows [start, stop) of a tensor, seen as a matrix of that shape."""
        if tensor.planes and isinstance(form, PlanarFormat):
            planes = {part: partial(self._read, plane) for part, plane in tensor.planes.items()}
            try:
                return form.open(planes, tensor.settings, shape)
            except ValueError as error:
                raise CheckpointError(f"{self._checkpoint.path}: tensor {tensor.name}: {error}") from None
        width = form.row_bytes(shape[1])
        return lambda start, stop: self._read(tensor, start * width, (stop - start) * width)

    def _read(self, tensor: RawTensor, start: int, count: int) -> torch.Tensor:
        buffer = np.empty(count, dtype=np.uint8)
        self._checkpoint.read_into(tensor, buffer.data, start)
        return torch.from_numpy(buffer)
