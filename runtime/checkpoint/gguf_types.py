"""Tensor types of GGUF: id → name, elements per block, bytes per block.

Source: ggml.h (enum ggml_type) and ggml-common.h (the block structs) of the ggml project.
Ids are never reused.
"""

from __future__ import annotations

from typing import NamedTuple


class TensorType(NamedTuple):
    name: str
    block: int  # elements of the first (fastest) dimension stored together
    nbytes: int  # size of one block


TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 2 + 16),
    3: TensorType("Q4_1", 32, 2 + 2 + 16),
    6: TensorType("Q5_0", 32, 2 + 4 + 16),
    7: TensorType("Q5_1", 32, 2 + 2 + 4 + 16),
    8: TensorType("Q8_0", 32, 2 + 32),
    9: TensorType("Q8_1", 32, 2 + 2 + 32),
    10: TensorType("Q2_K", 256, 16 + 64 + 2 + 2),
    11: TensorType("Q3_K", 256, 32 + 64 + 12 + 2),
    12: TensorType("Q4_K", 256, 2 + 2 + 12 + 128),
    13: TensorType("Q5_K", 256, 2 + 2 + 12 + 32 + 128),
    14: TensorType("Q6_K", 256, 128 + 64 + 16 + 2),
    15: TensorType("Q8_K", 256, 4 + 256 + 32),
    16: TensorType("IQ2_XXS", 256, 2 + 64),
    17: TensorType("IQ2_XS", 256, 2 + 64 + 8),
    18: TensorType("IQ3_XXS", 256, 2 + 96),
    19: TensorType("IQ1_S", 256, 2 + 32 + 16),
    20: TensorType("IQ4_NL", 32, 2 + 16),
    21: TensorType("IQ3_S", 256, 2 + 64 + 8 + 32 + 4),
    22: TensorType("IQ2_S", 256, 2 + 64 + 8 + 8),
    23: TensorType("IQ4_XS", 256, 2 + 2 + 4 + 128),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 32 + 16 + 8),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 48 + 4 + 2),
    35: TensorType("TQ2_0", 256, 64 + 2),
    39: TensorType("MXFP4", 32, 1 + 16),
    40: TensorType("NVFP4", 64, 4 + 32),
    41: TensorType("Q1_0", 128, 2 + 16),
}

# Ids that files once used and that ggml has withdrawn.
REMOVED_TENSOR_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
