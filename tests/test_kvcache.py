"""Block pool and prefix cache against a slow model of what they must do."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.runtime.config import BLOCK_SIZE, LatentConfig, ModelConfig, RopeConfig
from infer.runtime.kvcache.block_pool import BlockPool
from infer.runtime.kvcache.keys import block_key
from infer.runtime.kvcache.paged import PagedKVCache
from infer.runtime.kvcache.prefix import ROOT, PrefixCache


def test_a_pool_gives_each_block_once_and_then_none() -> None:
    pool = BlockPool(3)
    assert sorted(filter(lambda b: b is not None, (pool.allocate() for _ in range(4)))) == [0, 1, 2]
    assert pool.available == 0


def test_kept_blocks_are_given_out_last_and_oldest_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    told: list[int] = []
    pool.on_allocate.append(told.append)
    pool.release(blocks[1], keep=True)
    pool.release(blocks[0], keep=True)
    pool.release(blocks[2], keep=False)
    assert [pool.allocate() for _ in range(3)] == [blocks[2], blocks[1], blocks[0]]
    assert told == [blocks[2], blocks[1], blocks[0]]


def test_releasing_too_often_and_sharing_a_free_block_are_refused() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release(block, keep=False)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(block, keep=False)
    with pytest.raises(ValueError, match="is free"):
        pool.hold(block)
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_random_use_keeps_every_block_in_one_state(seed: int, size: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(size)
    held: list[int] = []
    kept: set[int] = set()
    pool.on_allocate.append(kept.discard)
    for _ in range(200):
        action = rng.random()
        if action < 0.4:
            block = pool.allocate()
            assert (block is None) == (len(set(held)) == size)
            if block is not None:
                assert block not in held
                held.append(block)
        elif action < 0.6 and (held or kept):
            block = rng.choice(sorted(set(held) | kept))
            pool.hold(block)
            kept.discard(block)
            held.append(block)
        elif held:
            block = held.pop(rng.randrange(len(held)))
            keep = rng.random() < 0.5
            pool.release(block, keep=keep)
            if keep and block not in held:
                kept.add(block)
        pool.check()
        assert pool.available == size - len(set(held))


def _ids(seed: int, count: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(50000) for i in range(count)]


def _fill(pool: BlockPool, cache: PrefixCache, ids: list[int]) -> list[int]:
    table: list[int] = []
    key = ROOT
    for start in range(0, len(ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        block = pool.allocate()
        assert block is not None
        key = cache.insert(block, key, ids[start : start + BLOCK_SIZE])
        table.append(block)
    return table


def _match(cache: PrefixCache, ids: list[int]) -> tuple[list[int], tuple[int, int] | None]:
    found = cache.match(ids)
    return found.blocks[found.first :], found.partial


def test_a_prefix_of_whole_blocks_is_found_and_one_token_is_left_over() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool)
    ids = _ids(1, 3 * BLOCK_SIZE)
    table = _fill(pool, cache, ids)
    for length in range(1, 3 * BLOCK_SIZE + 1):
        found = _match(cache, ids[:length])
        whole, rest = divmod(length - 1, BLOCK_SIZE)
        assert found == (table[:whole], (table[whole], rest) if rest else None)
    assert _match(cache, [*ids[:70], ids[70] + 1, *ids[71:]]) == (table[:1], (table[1], 6))
    assert _match(cache, [ids[0] + 1, *ids[1:]]) == ([], None)


def test_a_block_that_was_never_full_lends_what_it_has() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool)
    ids = _ids(5, BLOCK_SIZE + 20)
    whole = _fill(pool, cache, ids)[0]
    short, long = pool.allocate(), pool.allocate()
    key = cache.match(ids).keys[-1]
    pool.release(whole, keep=True)
    cache.insert(short, key, ids[BLOCK_SIZE : BLOCK_SIZE + 8])
    cache.insert(long, key, [*ids[BLOCK_SIZE : BLOCK_SIZE + 15], 1, 2])
    assert _match(cache, ids) == ([whole], (long, 15))
    assert _match(cache, ids[: BLOCK_SIZE + 6]) == ([whole], (long, 5))
    for _ in range(2):
        pool.release(long, keep=True)
    pool.release(long, keep=True)
    assert pool.allocate() is not None
    assert pool.allocate() == long
    assert _match(cache, ids) == ([whole], (short, 8))


def test_an_evicted_block_is_no_longer_found() -> None:
    pool = BlockPool(2)
    cache = PrefixCache(pool)
    ids = _ids(2, 2 * BLOCK_SIZE + 1)
    for block in reversed(_fill(pool, cache, ids)):
        pool.release(block, keep=block in cache)
    assert len(cache.match(ids).blocks) == 2
    pool.release(1, keep=True)
    pool.release(0, keep=True)
    assert pool.allocate() is not None
    assert len(cache.match(ids).blocks) in (0, 1)


def test_equal_text_elsewhere_keeps_the_first_block() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool)
    ids = _ids(3, BLOCK_SIZE + 1)
    first = _fill(pool, cache, ids)[0]
    second = pool.allocate()
    key = cache.insert(second, ROOT, ids[:BLOCK_SIZE])
    assert second not in cache
    assert _match(cache, ids) == ([first], None)
    third = pool.allocate()
    cache.insert(third, key, ids[:BLOCK_SIZE])
    assert _match(cache, [*ids[:BLOCK_SIZE], *ids]) == ([first, third], None)


def test_keys_depend_on_every_id_and_on_the_parent() -> None:
    ids = _ids(4, BLOCK_SIZE)
    key = block_key(b"", ids)
    assert key != block_key(b"x", ids)
    assert all(key != block_key(b"", [*ids[:i], ids[i] ^ 1, *ids[i + 1 :]]) for i in range(BLOCK_SIZE))


@pytest.mark.parametrize("latent", [0, 6])
@pytest.mark.parametrize("kv_type", ["f16", "bf16", "f32", "int8"])
def test_a_block_can_be_read_and_written_back_in_part_or_whole(kv_type: str, latent: int) -> None:
    rope = RopeConfig(dim=8)
    mla = LatentConfig(rank=latent, query_rank=0, key_dim=8, value_dim=8) if latent else None
    config = ModelConfig(
        architecture="llama", vocab_size=9, context_length=256, embedding_length=32, block_count=3,
        feed_forward_length=32, head_count=4, head_count_kv=2, head_dim=8, norm_eps=1e-5, rope=rope,
        latent=mla,
    )  # fmt: skip
    cache = PagedKVCache(config, 3, kv_type, torch.device("cpu"))
    values = torch.randn(3, 2, BLOCK_SIZE, 2, 8, generator=torch.Generator().manual_seed(1))
    for layer in range(3):
        cache.tensors.store(
            layer, torch.arange(BLOCK_SIZE), values[layer, 0], None if latent else values[layer, 1]
        )
    for tokens in (1, 17, BLOCK_SIZE):
        payload = cache.read(0, tokens)
        assert payload.nbytes == tokens * cache.bytes_per_token
        cache.write(1, tokens, payload)
        for layer in range(3):
            found = cache.tensors.gather(layer, torch.tensor([1]), tokens)
            wanted = cache.tensors.gather(layer, torch.tensor([0]), tokens)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
            assert torch.allclose(found[0].float().permute(2, 0, 1), values[layer, 0, :tokens], atol=0.02)
            value = values[layer, 0, :tokens, :, :latent] if latent else values[layer, 1, :tokens]
            assert torch.allclose(found[1].float().transpose(0, 1), value, atol=0.02)
    cache.copy(1, 2)
    assert bytes(cache.read(2, BLOCK_SIZE)) == bytes(cache.read(1, BLOCK_SIZE))
    with pytest.raises(ValueError, match="are not 5 tokens"):
        cache.write(0, 5, cache.read(0, 4))
