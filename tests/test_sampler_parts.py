"""What the sampler chain is made of: the ranking, the random numbers, the counts of seen tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.samplers import ranking
from infer.samplers.draw import philox4x32, uniform
from infer.samplers.penalties import TokenCounts


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1, 5, 8191, 8192, 9000, 20_481]),
    width=st.sampled_from([1, 2, 40, 256, 512, 513, 4000]),
    levels=st.sampled_from([1, 3, 50, None]),
)
def test_leading_tokens_are_those_of_a_full_stable_sort(seed, size, width, levels):
    rng = np.random.default_rng(seed)
    values = rng.integers(-levels, levels, size) if levels else rng.standard_normal(size) * 1e4
    row = values.astype(np.float32)
    row[rng.integers(0, size, size // 10)] = -0.0
    row[rng.integers(0, size, size // 20)] = -np.inf
    ids, logits = ranking.unpack(ranking.leading(row, min(width, size)))
    want = np.lexsort((np.arange(size), -row.astype(np.float64)))[:width]
    assert ids.tolist() == want.tolist()
    assert (logits == row[want]).all()


PUBLISHED = [  # Random123, tests/kat_vectors, philox4x32 with 10 rounds
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_philox_known_answers(counter, key, words):
    assert philox4x32(counter, key) == words


def test_uniform_numbers():
    numbers = np.array([uniform(seed, position) for seed in (0, 2**64 - 1) for position in range(5000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(set(numbers.tolist())) == 10_000
    assert abs(numbers.mean() - 0.5) < 0.01
    assert np.abs(np.histogram(numbers, 10, (0, 1))[0] - 1000).max() < 120
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    assert uniform(1, 2**64 - 1) != uniform(1, 2**32 - 1)


def test_token_counts_grow_without_recounting():
    counts = TokenCounts([5, 5, 7])
    for token in range(1000):
        counts.append(token % 300)
    assert counts.ids[:2].tolist() == [5, 7]
    assert sorted(counts.ids.tolist()) == list(range(300))
    by_id = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert by_id == {t: len(range(t, 1000, 300)) for t in range(300)}
    assert counts.seen.all()
