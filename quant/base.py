"""The internal form of a quantized weight, and the registry of formats that become it.

A weight matrix has N rows (outputs) and K columns (inputs). It is stored as unsigned integer codes and, per
group of `group` consecutive columns, a scale and maybe a minimum:

    w[n, k] = scale[n, k // group] * (code[n, k] - zero) + minimum[n, k // group]

`zero` is one integer per format (8 for Q4_0, 128 for Q8_0); formats with a minimum have zero = 0.
K-quants store scale = super_scale * integer: both factors are kept, since their product does not fit half
precision without loss:

    scale[n, g]   = super_scale[n, k // 256] * scales[n, g]        scales int8 (Q6_K) or uint8
    minimum[n, g] = -super_min[n, k // 256] * mins[n, g]           mins uint8

Other formats have float16 (or float32) `scales` and `mins` and no super tensors.
"""

from __future__ import annotations

import abc
import importlib
from dataclasses import dataclass

import torch

#: type name in a file → module of this package that registers it
_FORMATS = {
    "F32": "plain", "F16": "plain", "BF16": "plain",
    "Q4_0": "legacy", "Q4_1": "legacy", "Q5_0": "legacy", "Q5_1": "legacy", "Q8_0": "legacy",
    "Q4_K": "kquant", "Q5_K": "kquant", "Q6_K": "kquant",
}  # fmt: skip

SUPER = 256  # columns that share a super scale in K-quants


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized [N, K] weight in the internal form (see the module).

    codes: uint8, row-major planes. bits 4: [N, K // 2], byte j of a row holds column 2j in its low nibble and
    column 2j + 1 in its high nibble. bits 5, 6 and 8: [N, K], one code per byte.
    scales: [N, K // group]; float16/float32, or uint8/int8 with super_scales [N, K // 256] float16.
    mins, super_mins: the same shapes, or None when the format has no minimum.
    """

    shape: tuple[int, int]
    bits: int
    group: int
    zero: int
    codes: torch.Tensor
    scales: torch.Tensor
    mins: torch.Tensor | None = None
    super_scales: torch.Tensor | None = None
    super_mins: torch.Tensor | None = None

    def unpacked_codes(self) -> torch.Tensor:
        """uint8 [N, K], one code per byte."""
        if self.bits != 4:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).reshape(self.shape)

    def group_scales(self) -> torch.Tensor:
        """float32 [N, K // group]."""
        return _spread(self.scales, self.super_scales)

    def group_mins(self) -> torch.Tensor | None:
        """float32 [N, K // group], or None."""
        if self.mins is None:
            return None
        mins = _spread(self.mins, self.super_mins)
        return mins if self.super_mins is None else -mins

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K], with the operations in the order in which `gguf` and ggml do them (bit-equal)."""
        n, k = self.shape
        grouped = (self.unpacked_codes().to(torch.float32) - self.zero).reshape(n, k // self.group, self.group)
        weight = grouped * self.group_scales().unsqueeze(-1)
        mins = self.group_mins()
        if mins is not None:
            weight = weight + mins.unsqueeze(-1)
        return weight.reshape(n, k)

    def rows(self, start: int, stop: int) -> QuantizedTensor:
        """Rows [start, stop) as views of the same storage."""

        def cut(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else t[start:stop]

        return QuantizedTensor(
            (stop - start, self.shape[1]), self.bits, self.group, self.zero, self.codes[start:stop],
            self.scales[start:stop], cut(self.mins), cut(self.super_scales), cut(self.super_mins),
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.mins, self.super_scales, self.super_mins)
        return sum(t.nbytes for t in parts if t is not None)


def _spread(fine: torch.Tensor, coarse: torch.Tensor | None) -> torch.Tensor:
    if coarse is None:
        return fine.to(torch.float32)
    per_super = fine.shape[1] // coarse.shape[1]
    return (fine.to(torch.float32).unflatten(1, (-1, per_super)) * coarse.to(torch.float32).unsqueeze(-1)).flatten(1)


class QuantFormat(abc.ABC):
    """How one type of a file stores a matrix: `block` weights in `type_size` bytes, row after row."""

    name: str
    block: int
    type_size: int
    bits: int  # of a code; 16 or 32 for plain floats

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row. Raises ValueError when the columns do not fill whole blocks."""
        if columns % self.block:
            raise ValueError(f"{columns} columns are not a multiple of {self.name}'s block of {self.block}")
        return columns // self.block * self.type_size

    @abc.abstractmethod
    def decode(self, raw: torch.Tensor, shape: tuple[int, int]) -> QuantizedTensor | torch.Tensor:
        """raw: uint8 [N * row_bytes(K)], contiguous. Quantized formats give the internal form, plain ones a tensor
        [N, K] of their own dtype."""


def get_format(name: str) -> QuantFormat:
    """The format of that type name. Raises ValueError with the supported ones."""
    if name not in _FORMATS:
        raise ValueError(f"quantization type {name} is not supported; supported: {', '.join(_FORMATS)}")
    module = importlib.import_module(f"infer.quant.{_FORMATS[name]}")
    found: QuantFormat = module.FORMATS[name]
    return found
