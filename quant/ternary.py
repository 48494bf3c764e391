"""ggml's formats of weights that are -d, 0 or d: TQ1_0, TQ2_0; and Q1_0, without the 0.

A block is these parts without gaps (format: the block structs of ggml-common.h):

    TQ1_0  q:48  h:4  d:2    54 bytes   256 weights   w = d · (t - 1)
    TQ2_0  q:64  d:2         66         256           w = d · (t - 1)
    Q1_0   d:2  q:16         18         128           w = d · (2t - 1)

TQ2_0: t is 2 bits; columns come in halves of 128, and bits 2k and 2k + 1 of byte i of a half are column 32k + i.
Q1_0: t is 1 bit, the lowest of a byte first.
TQ1_0: a byte is five digits in base 3 as a fraction of 256: 3 · byte carries the first digit into bit 8, and so on with
the rest. Digit k of byte i of a run is column size · k + i of the run's; the runs are 32 and 16 bytes with five
digits, then 4 with four.
"""

from __future__ import annotations

import abc

import torch

from infer.quant.base import (
    SUPER,
    QuantFormat,
    QuantizedTensor,
    decode_codes,
    field,
    pack_nibbles,
    two_bit_codes,
)


class TernaryFormat(QuantFormat, abc.ABC):
    """The internal groups are of 128, the largest there are: both halves of a block of 256 have its scale.

    The internal zero is 8, the middle of 4 bits: torch's int4 products round an offset of any other code to bfloat16,
    and over a group of 128 that would add up.
    """

    bits = 4
    scale_at: int

    def decode(self, raw: torch.Tensor, shape: tuple[int, int]) -> QuantizedTensor:
        blocks = self.blocks(raw, shape)
        rows = shape[0]
        codes = decode_codes(blocks, self.block // 2, lambda some: pack_nibbles(self.unpack(some) + 7))
        scales = field(blocks, self.scale_at, 2, torch.float16).repeat_interleave(self.block // 128, dim=1)
        return QuantizedTensor(shape, self.bits, 128, 8, codes.reshape(rows, -1), scales.reshape(rows, -1))

    @abc.abstractmethod
    def unpack(self, blocks: torch.Tensor) -> torch.Tensor:
        """uint8 [blocks, block]: what d is multiplied with, plus 1."""


class TQ10(TernaryFormat):
    name, block, type_size, scale_at = "TQ1_0", SUPER, 54, 52

    def unpack(self, blocks: torch.Tensor) -> torch.Tensor:
        runs = []
        for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
            powers = torch.tensor([1, 3, 9, 27, 81][:digits], dtype=torch.uint8).unsqueeze(1)
            rest = blocks[:, None, start:stop] * powers  # modulo 256
            runs.append(((rest.short() * 3) >> 8).flatten(1))
        return torch.cat(runs, dim=1).to(torch.uint8)


class TQ20(TernaryFormat):
    name, block, type_size, scale_at = "TQ2_0", SUPER, 66, 64

    def unpack(self, blocks: torch.Tensor) -> torch.Tensor:
        return two_bit_codes(blocks[:, :64])


class Q10(TernaryFormat):
    name, block, type_size, scale_at = "Q1_0", 128, 18, 0

    def unpack(self, blocks: torch.Tensor) -> torch.Tensor:
        bits = (blocks[:, 2:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        return bits.flatten(1) << 1


FORMATS: dict[str, QuantFormat] = {kind.name: kind() for kind in (TQ10, TQ20, Q10)}
