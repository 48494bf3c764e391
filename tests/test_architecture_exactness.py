"""Every family on the native path: the same bits whatever cuts the work up, whoever shares it and wherever keys and
values come from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from families import CASES, WINDOW, Families
from logits import prompt_ids
from traces import Trace, traced

from infer.quant.kernels import native
from infer.runtime.config import BLOCK_SIZE, EngineConfig
from infer.runtime.loader import LoadedModel, load_model

pytestmark = [
    pytest.mark.native,
    pytest.mark.filterwarnings("ignore"),
]
Open = Callable[..., LoadedModel]
PROMPT = prompt_ids(2 * BLOCK_SIZE + 20)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"))


@pytest.fixture
def opened(open_model: Open) -> Open:
    return partial(open_model, kernel="native", ctx=512, prefix_cache=False)


@pytest.mark.parametrize("case", CASES)
def test_nothing_changes_a_bit(written: Families, opened: Open, case: str, tmp_path: Path) -> None:
    path, _ = written(case, "Q8_0")
    expected = _alone(opened(path))
    assert expected.first == 0
    assert [part.shape[1] for part in expected.kv(0)] == [len(PROMPT) + 4] * len(expected.kv(0))
    for chunk in (1, 7, 64):
        assert _alone(opened(path, prefill_chunk=chunk)) == expected
    assert _alone(opened(path, threads=2)) == expected

    warm = opened(path, prefix_cache=True)
    _alone(warm, (*PROMPT[:-1], 501))
    assert _alone(warm) == expected
    assert warm.engine.cached_tokens("a") >= 2 * BLOCK_SIZE > WINDOW

    disk = {"prefix_cache": True, "cache_dir": tmp_path / "prefix"}
    config = EngineConfig(device="cpu", threads=1, kernel="native", ctx=512, **disk)
    with closing(load_model(path, config, memo_dir=tmp_path)) as first:
        _alone(first)
    again = opened(path, **disk)
    assert _alone(again) == expected
    assert again.engine.cached_tokens("a") == len(PROMPT) - 1


@pytest.mark.parametrize("case", ["mixtral", "deepseek3", "gpt-oss"])
def test_the_reference_is_as_exact(written: Families, opened: Open, case: str) -> None:
    path, _ = written(case, "Q8_0")
    expected = _alone(opened(path, kernel="reference"), PROMPT[:70], 2)
    for chunk in (5, 33):
        assert _alone(opened(path, kernel="reference", prefill_chunk=chunk), PROMPT[:70], 2) == expected


@pytest.mark.parametrize("case", CASES)
def test_company_changes_no_bit(written: Families, opened: Open, case: str) -> None:
    path, _ = written(case, "Q8_0")
    expected = _alone(opened(path))
    for size, threads in ((2, 1), (3, 2), (8, 1)):
        model = opened(path, kv_blocks=40, prefill_chunk=150, threads=threads)
        others = {str(i): prompt_ids(5 + 17 * i, seed=50 + i) for i in range(size - 1)}
        together = traced(model, {**others, "a": PROMPT})
        assert together["a"] == expected
    assert together["2"] == _alone(opened(path), others["2"])


@pytest.mark.parametrize("case", CASES)
def test_every_instruction_set_gives_the_same_bits(written: Families, opened: Open, case: str) -> None:
    path, _ = written(case, "Q8_0")
    library = native.load()
    used = library.infer_isa().decode()
    try:
        traces = [_alone(opened(path, isa=isa), PROMPT[:70], 2) for isa in native.offered(library)]
    finally:
        native.load(used)
    assert all(trace == traces[0] for trace in traces)


def _alone(model: LoadedModel, prompt: tuple[int, ...] = PROMPT, count: int = 5) -> Trace:
    return traced(model, {"a": prompt}, count)["a"]
