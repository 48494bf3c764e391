"""bitsandbytes' formats: NF4 and FP4 (4-bit codes into a table of 16 floats) and the weights of LLM.int8.

Sources: Dettmers et al. 2023 (QLoRA, arXiv 2305.14314), 2022 (LLM.int8, arXiv 2208.07339); bitsandbytes.functional.
Their files keep codes and scales apart:

    NF4, FP4   codes: byte i holds weight 2i in its high nibble and 2i + 1 in its low one, the matrix read row after row
               map: the table
               absmax: of every 64 (or more) consecutive weights, float32; or, quantized twice, uint8 into nested_map
               times nested_absmax (of every 256 of them) plus an offset
               w = table[code] · absmax
    INT8       codes: int8 [N, K]; scb: float32 [N]          w = code · scb / 127

Here a row is its codes, then its float32 scales: one per group of min(64, largest power of two that divides K) for NF4
and FP4, one for INT8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from infer.quant.base import PlanarFormat, Plane, QuantizedTensor, pack_nibbles

BLOCK = 64
# The quantiles of a normal distribution (QLoRA, appendix E), and sign, 2-bit exponent, 1-bit mantissa.
TABLES: Mapping[str, tuple[float, ...]] = {
    "NF4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "FP4": (
        0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25,
        -0.0, -0.005208333333, -0.66666667, -1.0, -0.33333333, -0.5, -0.16666667, -0.25,
    ),
}  # fmt: skip
_INT8_STEP = 1 / 127
_CHUNK_WEIGHTS = 1 << 18


def table_of(name: str) -> torch.Tensor:
    """float32 [16]: what a code stands for."""
    return torch.tensor(TABLES[name], dtype=torch.float32)


class TableFormat(PlanarFormat):
    """NF4 and FP4."""

    block = 2
    type_size = 1
    bits = 4

    def __init__(self, name: str) -> None:
        self.name = name

    def row_bytes(self, columns: int) -> int:
        return columns // 2 + 4 * (columns // _group(columns))

    def decode(self, raw: torch.Tensor, shape: tuple[int, int]) -> QuantizedTensor:
        columns = shape[1]
        raw = self.rows_of(raw, shape)
        codes = raw[:, : columns // 2]
        scales = raw[:, columns // 2 :].contiguous().view(torch.float32)
        return QuantizedTensor(
            shape, 4, _group(columns), 0, codes << 4 | codes >> 4, scales, table=table_of(self.name)
        )

    def open(
        self, planes: Mapping[str, Plane], settings: Mapping[str, float], shape: tuple[int, int]
    ) -> Callable[[int, int], torch.Tensor]:
        rows, columns = shape
        if not torch.allclose(
            planes["map"](0, 64).view(torch.float32), table_of(self.name), rtol=0, atol=1e-6
        ):
            raise ValueError(f"its quant_map is not the table of {self.name}")
        block = int(settings["blocksize"])
        absmax = _absmax(planes, settings, -(-rows * columns // block))
        group = _group(columns)
        first = torch.arange(0, columns, group)

        def read(start: int, stop: int) -> torch.Tensor:
            codes = planes["codes"](start * columns // 2, (stop - start) * columns // 2)
            scales = absmax[(torch.arange(start, stop).unsqueeze(1) * columns + first) // block]
            return torch.cat((codes.view(stop - start, -1), scales.view(torch.uint8)), dim=1).flatten()

        return read


class Int8Format(PlanarFormat):
    name = "INT8"
    block = 1
    type_size = 1
    bits = 8

    def row_bytes(self, columns: int) -> int:
        return columns + 4

    def decode(self, raw: torch.Tensor, shape: tuple[int, int]) -> QuantizedTensor:
        columns = shape[1]
        raw = self.rows_of(raw, shape)
        group = math.gcd(columns, 128)
        if group < 16:
            raise ValueError(f"{columns} columns are not a multiple of 16")
        scales = raw[:, columns:].contiguous().view(torch.float32) * _INT8_STEP
        return QuantizedTensor(
            shape, 8, group, 128, raw[:, :columns] ^ 0x80, scales.repeat(1, columns // group)
        )

    def open(
        self, planes: Mapping[str, Plane], settings: Mapping[str, float], shape: tuple[int, int]
    ) -> Callable[[int, int], torch.Tensor]:
        columns = shape[1]

        def read(start: int, stop: int) -> torch.Tensor:
            codes = planes["codes"](start * columns, (stop - start) * columns).view(stop - start, -1)
            scales = planes["scb"](4 * start, 4 * (stop - start)).view(stop - start, -1)
            return torch.cat((codes, scales), dim=1).flatten()

        return read


def quantize_table(weight: torch.Tensor, name: str = "NF4") -> QuantizedTensor:
    """A float matrix [N, K], K a multiple of 64, rounded to the nearest entries of a sorted table (NF4).

    Raises ValueError for weights that are not finite.
    """
    n, k = weight.shape
    table = table_of(name)
    between = (table[1:] + table[:-1]) / 2
    codes = torch.empty((n, k // 2), dtype=torch.uint8)
    scales = torch.empty((n, k // BLOCK), dtype=torch.float32)
    step = max(1, _CHUNK_WEIGHTS // max(1, k))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        grouped = weight[rows].to(torch.float32).reshape(-1, k // BLOCK, BLOCK)
        scales[rows] = grouped.abs().amax(-1)
        scaled = grouped * (1 / scales[rows].clamp(min=1e-38)).unsqueeze(-1)
        found = torch.bucketize(scaled, between, out_int32=True).to(torch.uint8).flatten(1)
        codes[rows] = pack_nibbles(found)
    if not scales.isfinite().all():
        raise ValueError("the weights hold values that are not finite")
    return QuantizedTensor((n, k), 4, BLOCK, 0, codes, scales, table=table)


def _group(columns: int) -> int:
    group = math.gcd(columns, BLOCK)
    if group < 16:
        raise ValueError(f"{columns} columns are not a multiple of 16")
    return group


def _absmax(planes: Mapping[str, Plane], settings: Mapping[str, float], count: int) -> torch.Tensor:
    """float32 [count], with bitsandbytes' operations in their order."""
    if "nested_map" not in planes:
        return planes["absmax"](0, 4 * count).view(torch.float32)
    block = int(settings["nested_blocksize"])
    table = planes["nested_map"](0, 4 * 256).view(torch.float32)
    outer = planes["nested_absmax"](0, 4 * -(-count // block)).view(torch.float32)
    inner = table[planes["absmax"](0, count).int()]
    return inner * outer.repeat_interleave(block)[:count] + settings["nested_offset"]


FORMATS = {"NF4": TableFormat("NF4"), "FP4": TableFormat("FP4"), "INT8": Int8Format()}
