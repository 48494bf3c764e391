"""What a model computes for a prompt, position by position."""

from __future__ import annotations

import random

import numpy as np
import torch

from infer.runtime.batch import build_batch
from infer.runtime.config import BLOCK_SIZE
from infer.runtime.loader import LoadedModel
from infer.runtime.request import Request, Sequence
from infer.samplers.logit_rows import Logits
from infer.samplers.params import SamplingParams


def prompt_ids(length: int, seed: int = 1) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(500) for _ in range(length))


def as_tensor(logits: Logits) -> torch.Tensor:
    """A copy, which the next step leaves as it is."""
    return torch.tensor(logits) if isinstance(logits, np.ndarray) else logits.clone()


def logits_of(model: LoadedModel, ids: tuple[int, ...], steps: list[int]) -> torch.Tensor:
    """[len(ids), vocab]: the logits of every position, computed in steps of so many tokens each."""
    blocks = list(range(-(-len(ids) // BLOCK_SIZE)))
    seq = Sequence(Request("0", ids, SamplingParams()), list(ids), block_table=blocks)
    found = []
    for count in steps:
        batch = build_batch([(seq, count)])
        object.__setattr__(batch, "output_rows", np.arange(count, dtype=np.int32))
        found.append(as_tensor(model.engine._runner.forward(batch)))
        seq.num_computed += count
    return torch.cat(found)
