"""The torch kernel on the CPU: few rows and many, against exact products, and what its weights take."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from random_blocks import HALVES_AT, OTHER_SCALES, block_size, random_blocks

from infer.quant.base import get_format
from infer.quant.kernels.nibbles import NibbleWeight
from infer.quant.kernels.source import WeightSource
from infer.quant.kernels.torch_kernel import create

#: Q1_0: `gguf` cannot read what would have to be scaled
NAMES = sorted({*HALVES_AT, *OTHER_SCALES} - {"Q1_0"})
KERNEL = create(torch.device("cpu"), 1)


def random_source(name: str, rows: int, columns: int) -> WeightSource:
    raw = torch.from_numpy(random_blocks(name, (rows, columns), 0.1, np.random.default_rng(0)))
    return WeightSource(
        name, (rows, columns), get_format(name), lambda start, stop: raw[start:stop].reshape(-1)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [0, 1, 4, 9])
def test_products_are_close_to_the_exact_ones(name: str, count: int) -> None:
    source = random_source(name, 70, 512)
    weight = KERNEL.pack(source)
    x = torch.randn(count, 512, generator=torch.Generator().manual_seed(count)).to(KERNEL.dtype)
    exact = source.dequantize(0, 70).double()
    found = KERNEL.matmul(x, weight)
    assert found.shape == (count, 70)
    size = x.double().norm(dim=1, keepdim=True) * exact.norm(dim=1)
    assert bool(((found - x.double() @ exact.T).abs() < 0.02 * size).all())


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_the_files(name: str) -> None:
    source = random_source(name, 70, 512)
    ids = torch.tensor([0, 69, 31, 32, 63, 64, 0])
    exact = source.dequantize(0, 70)[ids]
    assert bool(((KERNEL.rows(KERNEL.pack(source), ids) - exact).abs() <= 0.02 * exact.abs().max()).all())


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"])
def test_weights_take_little_more_than_in_the_file(name: str) -> None:
    weight = KERNEL.pack(random_source(name, 256, 512))
    weights, size = block_size(name)
    assert isinstance(weight, NibbleWeight)
    assert weight.nbytes <= 1.12 * 256 * 512 // weights * size
