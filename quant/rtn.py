"""Round-to-nearest quantization of float weights on load (`--quant int8|int4`).

int8: symmetric, w ≈ scale · (code - 128), |code - 128| ≤ 127; scale is the group's largest magnitude / 127.
int4: asymmetric, w ≈ scale · code + minimum; scale is the distance from minimum to largest weight / 15.

Scales and minimums are stored as float16 and rounded before the codes are chosen: the minimum downwards, the
scale to nearest, or upwards where the nearest one could not reach the largest weight. So every weight is off
by at most scale / 2 and the rounding of the float32 arithmetic. Quantizing the result again changes nothing
as long as scales are normal float16 numbers and, for int4, a group's weights do not all have one sign.
"""

from __future__ import annotations

import torch

from infer.quant.base import QuantizedTensor, pack_nibbles

# Quantized at once; a float32 copy and a few temporaries of that size live meanwhile.
_CHUNK_WEIGHTS = 1 << 18


def quantize_rtn(weight: torch.Tensor, bits: int, group: int = 32) -> QuantizedTensor:
    """weight: floating point [N, K] with K a multiple of `group`; bits: 8 or 4.

    Returns float16 scales (and minimums for 4 bits). Raises ValueError for another bit width, a shape that
    does not fit, or weights that are not finite or whose scale or minimum exceeds float16.
    """
    if bits not in (4, 8):
        raise ValueError(f"weights can be rounded to 8 or 4 bits, not {bits}")
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"a floating-point matrix is needed, not {weight.dtype} {list(weight.shape)}")
    n, k = weight.shape
    if group < 2 or group % 2 or k % group:
        raise ValueError(f"{k} columns do not divide into groups of {group}, which must be even")
    codes = weight.new_empty((n, k * bits // 8), dtype=torch.uint8)
    scales = weight.new_empty((n, k // group), dtype=torch.float16)
    mins = torch.empty_like(scales) if bits == 4 else None
    step = max(1, _CHUNK_WEIGHTS // max(1, k))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        grouped = weight[rows].to(torch.float32).reshape(-1, k // group, group)
        if mins is None:
            codes[rows], scales[rows] = _symmetric(grouped)
        else:
            codes[rows], scales[rows], mins[rows] = _asymmetric(grouped)
    if not (scales.isfinite().all() and (mins is None or mins.isfinite().all())):
        raise ValueError("the weights hold values that are not finite or too large for float16 scales")
    return QuantizedTensor((n, k), bits, group, 128 if bits == 8 else 0, codes, scales, mins)


def _symmetric(grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = _reaching(grouped.abs().amax(-1), 127)
    codes = (grouped / _divisor(scales)).round_().clamp_(-127, 127).add_(128)
    return codes.to(torch.uint8).flatten(1), scales


def _asymmetric(grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    low = grouped.amin(-1)
    mins = low.to(torch.float16)
    mins = torch.where(mins.to(torch.float32) > low, _neighbour_below(mins), mins)
    above = grouped - mins.to(torch.float32).unsqueeze(-1)
    scales = _reaching(above.amax(-1), 15)
    codes = above.div_(_divisor(scales)).round_().clamp_(0, 15).to(torch.uint8).flatten(1)
    return pack_nibbles(codes), scales, mins


def _reaching(distance: torch.Tensor, steps: int) -> torch.Tensor:
    """float16 scale nearest to distance / steps, or the next one if that ends over half a step early."""
    scales = (distance / steps).to(torch.float16)
    short = scales.to(torch.float32) * (steps + 0.5) < distance
    return torch.where(short, (scales.view(torch.int16) + 1).view(torch.float16), scales)


def _neighbour_below(x: torch.Tensor) -> torch.Tensor:
    """The next smaller float16 number: apart from the sign, float16 bits count up with the magnitude."""
    bits = x.view(torch.int16)
    below_zero = torch.full_like(bits, 0x0001 - 0x8000)  # the smallest negative number
    below = torch.where(x > 0, bits - 1, torch.where(x < 0, bits + 1, below_zero))
    return below.view(torch.float16)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """float32 [N, groups, 1] to divide by: 1 where the scale is 0, since such a group is all zeros."""
    return torch.where(scales == 0, 1, scales.to(torch.float32)).unsqueeze(-1)
