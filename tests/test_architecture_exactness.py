"""Every family on the native path: the same bits whatever cuts the work up, whoever shares it and wherever keys and
values come from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from families import CASES, WINDOW, Families, answer, same
from logits import prompt_ids

from infer.quant.kernels import native
from infer.runtime.config import BLOCK_SIZE, EngineConfig
from infer.runtime.loader import LoadedModel, load_model
from infer.runtime.request import Request
from infer.samplers.params import SamplingParams

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
    expected = answer(opened(path, prefill_chunk=512), PROMPT)
    assert len(expected[1]) == 5
    for chunk in (1, 7):
        assert same(answer(opened(path, prefill_chunk=chunk), PROMPT), expected)
    assert same(answer(opened(path, threads=2), PROMPT), expected)

    warm = opened(path, prefix_cache=True)
    answer(warm, (*PROMPT[:-1], 501))
    assert same(answer(warm, PROMPT), expected)
    assert warm.engine.cached_tokens("a") >= 2 * BLOCK_SIZE > WINDOW

    disk = {"prefix_cache": True, "cache_dir": tmp_path / "prefix"}
    config = EngineConfig(device="cpu", threads=1, kernel="native", ctx=512, **disk)
    with closing(load_model(path, config, memo_dir=tmp_path)) as first:
        answer(first, PROMPT)
    again = opened(path, **disk)
    assert same(answer(again, PROMPT), expected)
    assert again.engine.cached_tokens("a") == len(PROMPT) - 1


@pytest.mark.parametrize("case", ["mixtral", "deepseek3", "gpt-oss"])
def test_the_reference_is_as_exact(written: Families, opened: Open, case: str) -> None:
    path, _ = written(case, "Q8_0")
    expected = answer(opened(path, kernel="reference"), PROMPT[:80], 2)
    for chunk in (1, 33):
        assert same(answer(opened(path, kernel="reference", prefill_chunk=chunk), PROMPT[:80], 2), expected)


@pytest.mark.parametrize("case", CASES)
def test_company_changes_no_token(written: Families, opened: Open, case: str) -> None:
    path, _ = written(case, "Q8_0")
    expected, _ = answer(opened(path), PROMPT)
    model = opened(path, kv_blocks=40, prefill_chunk=100, threads=2)
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=5, ignore_eos=True)
    prompts = {str(i): prompt_ids(5 + 31 * i, seed=50 + i) for i in range(5)} | {"a": PROMPT}
    for name, prompt in prompts.items():
        model.engine.add(Request(name, prompt, sampling))
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    while model.engine.has_unfinished():
        for output in model.engine.step():
            tokens[output.request_id] += output.new_ids
    assert tokens["a"] == expected


@pytest.mark.parametrize("case", CASES)
def test_every_instruction_set_gives_the_same_bits(written: Families, opened: Open, case: str) -> None:
    path, _ = written(case, "Q8_0")
    library = native.load()
    used = library.infer_isa().decode()
    try:
        answers = [answer(opened(path, isa=isa), PROMPT[:70], 2) for isa in native.offered(library)]
    finally:
        native.load(used)
    assert all(same(other, answers[0]) for other in answers)
