"""FP8 in blocks of 128 x 128 with a scale each, as DeepSeek V3 was trained with (arXiv 2412.19437, 3.3.2).

    codes     float8 e4m3fn [N, K]: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities
    scales    float32 or bfloat16 [N / 128, K / 128], rounded up; of several matrices one after another, each its own
    w = bfloat16(code · scale), the product in float32: what DeepSeek's conversion makes of them

No group of such codes is a run of integers, so the weights are held as BF16: twice the bytes of the file, and a
rounding of 2^-9 where the codes were rounded by 2^-4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from infer.quant.base import PlanarFormat, Plane, QuantFormat
from infer.quant.plain import FORMATS as PLAIN

BLOCK = 128


class BlockFP8(PlanarFormat):
    """Its rows are read as BF16. settings: rows of one matrix, bytes of a scale."""

    name, block, type_size, bits = "F8_E4M3", 1, 1, 16

    @property
    def rows_as(self) -> str:
        return "BF16"

    def row_bytes(self, columns: int) -> int:
        return 2 * columns

    def decode(self, raw: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        found = PLAIN["BF16"].decode(raw, shape)
        if not isinstance(found, torch.Tensor):
            raise TypeError("BF16 is a plain format")
        return found

    def open(
        self, planes: Mapping[str, Plane], settings: Mapping[str, float], shape: tuple[int, int]
    ) -> Callable[[int, int], torch.Tensor]:
        columns, rows, scale_bytes = shape[1], int(settings["rows"]), int(settings["scale_bytes"])
        down, across = -(-rows // BLOCK), -(-columns // BLOCK)
        dtype = torch.float32 if scale_bytes == 4 else torch.bfloat16

        def read(start: int, stop: int) -> torch.Tensor:
            codes = planes["codes"](start * columns, (stop - start) * columns).view(torch.float8_e4m3fn)
            index = torch.arange(start, stop)
            index = index // rows * down + index % rows // BLOCK
            first, count = int(index[0]), int(index[-1] - index[0]) + 1
            width = across * scale_bytes
            scales = planes["scales"](first * width, count * width).view(dtype).float().view(count, across)
            spread = scales[index - first].repeat_interleave(BLOCK, dim=1)[:, :columns]
            values = codes.float().view(-1, columns) * spread
            return values.to(torch.bfloat16).view(torch.uint8).flatten()

        return read


FORMATS: dict[str, QuantFormat] = {"F8_E4M3": BlockFP8()}
