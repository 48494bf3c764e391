"""ggml's block formats of 32 weights with one float16 scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

A block is these parts without gaps (format: the block structs of ggml-common.h):

    Q4_0  d:2              q:16        18 bytes    w = d · (q - 8)
    Q4_1  d:2  m:2         q:16        20          w = d · q + m
    Q5_0  d:2        h:4   q:16        22          w = d · (q - 16)
    Q5_1  d:2  m:2   h:4   q:16        24          w = d · q + m
    Q8_0  d:2              q:32        34          w = d · q

    d, m  float16 scale and minimum
    q     4 and 5 bits: byte i holds column i in its low nibble and column i + 16 in its high nibble;
          8 bits: byte i is column i as int8
    h     bit i of the little-endian word is bit 4 of column i

In the internal form an int8 code is stored plus 128, its `zero`.
"""

from __future__ import annotations

import functools

import torch

from infer.quant.base import QuantFormat, QuantizedTensor, decode_codes, field, interleave_nibbles

_GROUP = 32


class LegacyFormat(QuantFormat):
    block = _GROUP

    def __init__(self, name: str, bits: int, has_min: bool) -> None:
        self.name = name
        self.bits = bits
        self.has_min = has_min
        self.zero = 0 if has_min else 1 << (bits - 1)
        self._high_at = 4 if has_min else 2
        self._codes_at = self._high_at + (4 if bits == 5 else 0)
        self._codes_size = 32 if bits == 8 else 16
        self.type_size = self._codes_at + self._codes_size

    def decode(self, raw: torch.Tensor, shape: tuple[int, int]) -> QuantizedTensor:
        blocks = self.blocks(raw, shape)
        codes = decode_codes(blocks, 16 if self.bits == 4 else 32, self._codes)
        rows = shape[0]
        return QuantizedTensor(
            shape, self.bits, _GROUP, self.zero, codes.reshape(rows, -1),
            scales=field(blocks, 0, 2, torch.float16).reshape(rows, -1),
            mins=field(blocks, 2, 2, torch.float16).reshape(rows, -1) if self.has_min else None,
        )  # fmt: skip

    def _codes(self, blocks: torch.Tensor) -> torch.Tensor:
        if self.bits == 8:
            return blocks[:, self._codes_at :] ^ 0x80
        if self.bits == 4:
            return interleave_nibbles(field(blocks, self._codes_at, 16, torch.int16))
        split = field(blocks, self._codes_at, 16, torch.uint8)
        high = _fifth_bits().index_select(0, field(blocks, self._high_at, 4, torch.uint8).flatten().int())
        return torch.cat((split & 0x0F, split >> 4), dim=1).bitwise_or_(
            high.view(torch.uint8).reshape(-1, 32)
        )


@functools.cache
def _fifth_bits() -> torch.Tensor:
    """int64 [256]: for each byte, eight bytes that hold 16 where its bits 0 to 7 are set."""
    values = torch.arange(256).unsqueeze(1)
    spread = ((values >> torch.arange(8)) & 1) << 4
    return spread.to(torch.uint8).view(torch.int64).flatten()


FORMATS: dict[str, QuantFormat] = {
    "Q4_0": LegacyFormat("Q4_0", bits=4, has_min=False),
    "Q4_1": LegacyFormat("Q4_1", bits=4, has_min=True),
    "Q5_0": LegacyFormat("Q5_0", bits=5, has_min=False),
    "Q5_1": LegacyFormat("Q5_1", bits=5, has_min=True),
    "Q8_0": LegacyFormat("Q8_0", bits=8, has_min=False),
}
