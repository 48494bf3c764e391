"""What one step computes, as arrays: all that passes from the engine's world of sequences to the model's."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from infer.runtime.config import BLOCK_SIZE
from infer.runtime.request import Sequence


@dataclass(frozen=True)
class ForwardBatch:
    """T rows, runs of consecutive positions of S sequences; R of the rows want logits.

    ids, positions int32 [T]; slots int64 [T] (where K and V of a row go); query_start int32 [S + 1];
    context_lens int32 [S] (positions in the cache after the step); block_tables int32 [S, longest];
    output_rows int32 [R].
    """

    ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    output_rows: npt.NDArray[np.int32]


def build_batch(scheduled: List[tuple[Sequence, int]]) -> ForwardBatch:
    """scheduled: sequences with how many of their tokens, from num_computed on, this step computes (≥ 1 each).

    Logits are wanted, sequence by sequence, of the positions before those it scores, and of its last token when the
    step reaches it.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    outputs: list[int] = []
    longest = max(len(seq.block_table) for seq, _ in scheduled)
    for seq, count in scheduled:
        first, last = seq.num_computed, seq.num_computed + count
        outputs += [len(ids) + scored - 1 - first for scored in seq.scored(count)]
        ids += seq.token_ids[first:last]
        positions += range(first, last)
        table = seq.block_table
        slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(first, last)]
        starts.append(len(ids))
        if seq.completes(count):
            outputs.append(len(ids) - 1)
    tables = [seq.block_table + [0] * (longest - len(seq.block_table)) for seq, _ in scheduled]
    return ForwardBatch(
        ids=np.array(ids, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        slots=np.array(slots, dtype=np.int64),
        query_start=np.array(starts, dtype=np.int32),
        context_lens=np.array([seq.num_computed + count for seq, count in scheduled], dtype=np.int32),
        block_tables=np.array(tables, dtype=np.int32),
        output_rows=np.array(outputs, dtype=np.int32),
    )


class OutputRows(NamedTuple):
    """What of a step's logits belongs to one sequence: the rows that score its prompt (those of
    `seq.scored`), and the row that its next token is sampled from, None when the step does not get there."""

    seq: Sequence
    scores: range
    last: int | None


def output_rows(scheduled: List[tuple[Sequence, int]]) -> list[OutputRows]:
    """How the logits [R, vocab] of `build_batch(scheduled)` are shared out. Ask before anything is recorded as
    computed."""
    found: list[OutputRows] = []
    row = 0
    for seq, count in scheduled:
        scores = range(row, row + len(seq.scored(count)))
        row = scores.stop + seq.completes(count)
        found.append(OutputRows(seq, scores, scores.stop if seq.completes(count) else None))
    return found
