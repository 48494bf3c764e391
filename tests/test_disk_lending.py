"""Blocks that are lent to the store: whatever becomes of them, what is published is what was computed."""

from __future__ import annotations

import gc
import os
import random
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from disk_faults import Gate, join_writers
from disk_store import (
    BLOCK,
    PER_TOKEN,
    check_chain,
    files_in,
    ids_of,
    load,
    open_store,
    payload_of,
)

from infer.runtime.config import EngineConfig, ModelConfig, RopeConfig
from infer.runtime.errors import ModelError
from infer.runtime.kvcache.block_pool import BlockPool
from infer.runtime.kvcache.disk import admin, publish
from infer.runtime.kvcache.disk.format import parse_entry_name, short_key
from infer.runtime.kvcache.disk.stats import StoreStats
from infer.runtime.kvcache.disk.store import PrefixStore
from infer.runtime.kvcache.disk.write_queue import PendingEntry, WriteQueue
from infer.runtime.kvcache.paged import PagedKVCache
from infer.runtime.kvcache.prefix import PrefixCache
from infer.runtime.kvcache.tier import DiskTier, PrefillRate
from infer.runtime.loader import LoadedModel, load_model
from infer.runtime.request import Request, Sequence
from infer.samplers.params import SamplingParams

FOUR = ids_of(1, 4 * BLOCK)


class Blocks:
    """Memory that is lent block by block, like a cache's."""

    def __init__(self, store: PrefixStore, count: int) -> None:
        self.memory = [bytearray(BLOCK * PER_TOKEN) for _ in range(count)]
        self.lent: list[PendingEntry | None] = [None] * count
        self._store = store

    def fill(self, block: int, parent: bytes, ids: list[int], at: int) -> bytes:
        """Use a block for ids[at : at + 64], and lend it; its key."""
        key = self._store.key(parent, ids[at : at + BLOCK])
        self.reuse(block)
        self.memory[block][:] = payload_of(ids, at, at + BLOCK)
        if self._store.needs(key, 0):
            self.lent[block] = self._store.lend(parent, ids[at : at + BLOCK], memoryview(self.memory[block]))
        return key

    def reuse(self, block: int) -> None:
        entry, self.lent[block] = self.lent[block], None
        if entry is not None:
            self._store.revoke(entry)
        self.memory[block][:] = b"\xff" * (BLOCK * PER_TOKEN)

    def chain(self, ids: list[int]) -> list[bytes]:
        """The keys of ids, lent in the first blocks."""
        keys = [self._store.root]
        for block in range(len(ids) // BLOCK):
            keys.append(self.fill(block, keys[-1], ids, block * BLOCK))
        return keys[1:]


def check_no_holes(root: Path, first: bytes) -> None:
    """Every entry is whole and can be found: its parent is there, or it is a first one."""
    assert not admin.verify(root).damaged
    names = [name for path in files_in(root) if (name := parse_entry_name(path.name)) is not None]
    short = {key[:32] for _, _, key in names} | {short_key(first)}
    assert {parent for parent, _, _ in names} <= short


@pytest.mark.parametrize("revoked", range(4))
def test_a_block_used_again_while_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revoked: int
) -> None:
    """The first is being written then, the others wait behind it."""
    gate = Gate(monkeypatch)
    store = open_store(tmp_path)
    blocks = Blocks(store, 4)
    keys = blocks.chain(FOUR)
    assert gate.reached.wait(20)
    blocks.reuse(revoked)
    # nothing of this waited for the writer, and the others still wait
    assert [store.needs(key, 0) for key in keys] == [0 < revoked == place for place in range(4)]
    gate.open()
    assert store.flush(20)
    assert len(files_in(tmp_path)) == revoked
    assert store.stats.dropped_entries == 4 - revoked
    assert store.find([*FOUR, 1]).tokens == revoked * BLOCK
    assert [store.needs(key, 0) for key in keys] == [place >= revoked for place in range(4)]
    # what was dropped is taken when it is offered once more, children at once after their parents
    assert blocks.chain(FOUR) == keys
    assert store.flush(20)
    check_chain(store.find(FOUR), FOUR)
    assert store.stats.written_entries == 4
    store.close()
    check_no_holes(tmp_path, store.root)
    assert load(tmp_path, FOUR).tokens == 4 * BLOCK - 1


def test_a_block_used_again_after_it_was_stored(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    blocks = Blocks(store, 4)
    keys = blocks.chain(FOUR)
    assert store.flush(20)
    for block in range(4):
        blocks.reuse(block)
    assert not any(store.needs(key, 0) for key in keys)
    store.close()
    for block in range(4):
        blocks.reuse(block)
    assert store.stats.dropped_entries == 0
    assert load(tmp_path, FOUR).tokens == 4 * BLOCK - 1


@pytest.mark.parametrize("again", [False, True])
def test_a_parent_offered_again_before_its_dropped_children_are_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """The old children wait before the new parent: they must not be stored for its sake."""
    gate = Gate(monkeypatch)
    store = open_store(tmp_path)
    other, blocks = Blocks(store, 1), Blocks(store, 6)
    other.chain(ids_of(2, BLOCK))
    assert gate.reached.wait(20)
    keys = blocks.chain(FOUR)
    blocks.reuse(0)
    assert blocks.fill(4, store.root, FOUR, 0) == keys[0]
    longer = FOUR[:BLOCK] + ids_of(3, BLOCK)
    blocks.fill(5, keys[0], longer, BLOCK)
    if again:
        blocks.reuse(4)
    gate.open()
    assert store.flush(20)
    assert len(files_in(tmp_path)) == (1 if again else 3)
    assert store.find(FOUR).tokens == (0 if again else BLOCK)
    check_chain(store.find(longer), longer)
    store.close()
    check_no_holes(tmp_path, store.root)


def test_what_is_lent_takes_no_room_and_what_is_copied_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    store = open_store(tmp_path, queue_bytes=BLOCK * PER_TOKEN)
    keys = Blocks(store, 4).chain(FOUR)
    store.offer(keys[3], [1], bytes(PER_TOKEN))
    assert store.needs(b"new", 63)
    assert not store.needs(b"new", 64)
    assert store.needs(b"new", 0)
    gate.open()
    assert store.flush(20)
    assert store.needs(b"new", 64)
    store.close()
    assert len(files_in(tmp_path)) == 5


@pytest.mark.parametrize("seed", range(4))
def test_random_histories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A slow disk, few blocks, prompts with common beginnings, two stores on one folder."""
    rng = random.Random(seed)
    real = os.write

    def slow(descriptor: int, data: Any) -> int:
        time.sleep(0.0005)
        return real(descriptor, data[: 1 + len(data) // 2])

    monkeypatch.setattr(publish.os, "write", slow)
    stores = [open_store(tmp_path) for _ in range(2)]
    blocks = [Blocks(store, 6) for store in stores]
    base = ids_of(1, 8 * BLOCK)
    prompts = [base[: cut * BLOCK] + ids_of(cut + 2, (8 - cut) * BLOCK) for cut in range(4)]
    for _ in range(60):
        number, ids = rng.randrange(2), rng.choice(prompts)
        store, key = stores[number], stores[number].root
        store.set_busy(rng.random() < 0.3)
        for at in range(0, rng.randrange(1, 9) * BLOCK, BLOCK):
            key = blocks[number].fill(rng.randrange(6), key, ids, at)
        if rng.random() < 0.3:
            assert store.flush(30)
        if rng.random() < 0.3:
            check_chain(store.find(ids), ids)
    for store in stores:
        store.close(30)
    assert sum(store.stats.dropped_entries for store in stores) > 0
    for ids in prompts:
        load(tmp_path, ids)
    check_no_holes(tmp_path, stores[0].root)


# The tier


def _tier(store: PrefixStore, blocks: int) -> tuple[DiskTier, BlockPool, PagedKVCache]:
    shape = ModelConfig(
        architecture="llama", vocab_size=9, context_length=256, embedding_length=16, block_count=1,
        feed_forward_length=16, head_count=2, head_count_kv=2, head_dim=8, norm_eps=1e-5, rope=RopeConfig(dim=8),
    )  # fmt: skip
    pool, cache = BlockPool(blocks), PagedKVCache(shape, blocks, "f16", torch.device("cpu"))
    assert cache.bytes_per_token == PER_TOKEN
    opened: Future[PrefixStore] = Future()
    opened.set_result(store)
    return DiskTier(opened, pool, PrefixCache(pool), cache, PrefillRate(1.0)), pool, cache


def _sequence(ids: list[int]) -> Sequence:
    return Sequence(Request("a", tuple(ids), SamplingParams()), list(ids))


def _compute(seq: Sequence, end: int, pool: BlockPool, cache: PagedKVCache) -> None:
    """What an engine does to get from num_computed, where a block begins, to `end`."""
    for start in range(seq.num_computed, end, BLOCK):
        block = pool.allocate()
        assert block is not None
        seq.block_table.append(block)
        part = bytearray(payload_of(seq.token_ids, start, min(start + BLOCK, end)))
        cache.write(block, len(part) // PER_TOKEN, np.frombuffer(part, np.uint8))
    seq.num_computed = end


@pytest.mark.parametrize("steps", [(2 * BLOCK, len(FOUR)), (len(FOUR),)], ids=["in two steps", "in one"])
def test_a_sequence_that_is_computed_anew_offers_its_blocks_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...]
) -> None:
    gate = Gate(monkeypatch)
    store = open_store(tmp_path)
    tier, pool, cache = _tier(store, 4)
    seq = _sequence(FOUR)
    _compute(seq, len(FOUR), pool, cache)
    tier.save(seq)
    assert gate.reached.wait(20)
    for block in seq.block_table:
        pool.release(block, keep=False)
    seq.block_table, seq.num_computed = [], 0
    others = [pool.allocate() for _ in range(4)]
    for block in others:
        assert block is not None
        cache.block(block)[:] = 255
        pool.release(block, keep=False)
    assert store.stats.dropped_entries == 3
    gate.open()
    assert store.flush(20)
    assert files_in(tmp_path) == []
    for end in steps:
        _compute(seq, end, pool, cache)
        tier.save(seq)
    tier.finish(seq)
    tier.close(20)
    assert load(tmp_path, FOUR).tokens == 4 * BLOCK - 1


def test_what_another_process_stored_is_a_parent_again() -> None:
    stats = StoreStats()
    queue = WriteQueue(1 << 20, stats)
    parent, child = (PendingEntry(key, b"r", 64, memoryview(b"")) for key in (b"p", b"c"))
    child.parent = b"p"
    assert queue.add(parent)
    assert queue.take() is parent
    queue.done(parent, stored=False)
    queue.found([b"p"], ())
    assert queue.add(child)
    assert queue.take() is child
    assert stats.dropped_entries == 1


def test_an_engine_whose_store_could_not_be_opened_closes() -> None:
    failed: Future[PrefixStore] = Future()
    failed.set_exception(ModelError("the weights cannot be read"))
    pool = BlockPool(2)
    tier = DiskTier(failed, pool, PrefixCache(pool), mock.Mock(), PrefillRate(1.0))
    tier.close()
    assert len(pool.on_allocate) == 1  # the prefix cache's


def test_full_blocks_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    tier, pool, cache = _tier(store, 5)
    lengths: list[int] = []
    real = cache.read
    monkeypatch.setattr(cache, "read", lambda block, length: lengths.append(length) or real(block, length))
    ids = [*FOUR, 1, 2, 3]
    seq = _sequence(ids)
    _compute(seq, len(ids), pool, cache)
    tier.save(seq)
    tier.save(seq)
    assert lengths == [3]
    tier.finish(seq)
    tier.close(20)
    assert load(tmp_path, ids).tokens == len(ids) - 1


# The engine


Tiny = Callable[..., Path]


def _load(path: Path, folder: Path | None, memo: Path, **settings: Any) -> LoadedModel:
    defaults = {"device": "cpu", "threads": 1, "ctx": 256, "cache_dir": folder}
    model = load_model(path, EngineConfig(**{**defaults, **settings}), memo_dir=memo)
    if folder is not None:
        model.engine._tier._pending.result(30)
    return model


def _request(name: str, prompt: tuple[int, ...], count: int = 6) -> Request:
    sampling = SamplingParams(temperature=0.9, seed=5, max_tokens=count, ignore_eos=True, logprobs=0)
    return Request(name, prompt, sampling)


def _answer(model: LoadedModel, request: Request) -> list[tuple[int, float]]:
    model.engine.add(request)
    found: list[tuple[int, float]] = []
    while model.engine.has_unfinished():
        found += [(p.token_id, p.logprob) for output in model.engine.step() for p in output.logprobs]
    return found


@pytest.mark.parametrize("seed", range(2))
def test_engines_under_pressure_store_what_an_unhindered_one_does(
    tiny_llama: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Two engines, few blocks, preemption, cancellation, a slow disk; every entry byte for byte that of a quiet run."""
    rng = random.Random(seed)
    path = tiny_llama(quant="Q8_0")
    base = tuple(rng.choices(range(300), k=180))
    prompts = [base[: 40 * cut] + tuple(rng.choices(range(300), k=150 - 30 * cut)) for cut in range(5)]
    quiet, cold = tmp_path / "quiet", []
    model = _load(path, quiet, tmp_path)
    for prompt in prompts:
        cold.append(_answer(model, _request("a", prompt)))
        assert model.engine._tier._pending.result().flush(30)
    model.close()

    real, busy = os.write, tmp_path / "busy"

    def slow(descriptor: int, data: Any) -> int:
        time.sleep(0.002)
        return real(descriptor, data[: 1 + len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(publish.os, "write", slow)
        engines = [_load(path, busy, tmp_path, kv_blocks=5, prefill_chunk=40).engine for _ in range(2)]
        got: list[dict[str, list[tuple[int, float]]]] = [{}, {}]
        for round_ in range(250):
            for engine, answers in zip(engines, got, strict=True):
                if round_ < 150 and rng.random() < 0.25:
                    name = f"{round_} {rng.randrange(5)}"
                    answers[name] = []
                    engine.add(_request(name, prompts[int(name[-1])]))
                if rng.random() < 0.02 and answers:
                    engine.cancel(rng.choice(sorted(answers)))
                for output in engine.step():
                    answers[output.request_id] += [(p.token_id, p.logprob) for p in output.logprobs]
        for engine in engines:
            for name in got[engines.index(engine)]:
                engine.cancel(name)
            stats = engine._tier._pending.result().stats
            engine.close()
            assert stats.dropped_entries > 0
        join_writers()
    for answers in got:
        for name, answer in answers.items():
            assert answer == cold[int(name[-1])][: len(answer)]
    expected = {file.name: file.read_bytes() for file in files_in(quiet)}
    found = {file.name: file.read_bytes() for file in files_in(busy)}
    common = expected.keys() & found.keys()
    assert len(common) > 2
    assert all(found[name] == expected[name] for name in common)
    assert not admin.verify(busy).damaged
    for prompt, answer in zip(prompts, cold, strict=True):
        model = _load(path, busy, tmp_path)
        assert _answer(model, _request("a", prompt)) == answer
        model.close()


def test_a_disk_that_hangs_while_the_engine_goes(
    tiny_llama: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer still reads a lent block when the cache it lies in is gone; nobody waited for it."""
    prompt = tuple(random.Random(3).choices(range(300), k=200))
    gate = Gate(monkeypatch)
    model = _load(tiny_llama(quant="Q8_0"), tmp_path / "cache", tmp_path)
    answer = _answer(model, _request("a", prompt))
    assert gate.reached.wait(20)
    model.close()
    del model
    gc.collect()
    gate.open()
    join_writers()
    monkeypatch.undo()
    assert not admin.verify(tmp_path / "cache").damaged
    for _ in range(2):
        again = _load(tiny_llama(quant="Q8_0"), tmp_path / "cache", tmp_path)
        assert _answer(again, _request("a", prompt)) == answer
        again.close()


def test_the_cache_goes_with_its_engine(tiny_llama: Tiny, tmp_path: Path) -> None:
    model = _load(tiny_llama(quant="Q8_0"), tmp_path / "cache", tmp_path)
    _answer(model, _request("a", tuple(range(100, 300))))
    cache = weakref.ref(model.engine.runner.cache)
    gc.collect()
    gc.disable()
    try:
        model.close()
        del model
        assert cache() is None
    finally:
        gc.enable()
