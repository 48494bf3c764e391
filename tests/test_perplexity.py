"""Scores of prompt tokens, and perplexity: against transformers, and the same bits in chunks, company and caches."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from command_line import Infer
from logits import as_tensor
from tiny_models import CORPUS

from infer.runtime.config import BLOCK_SIZE
from infer.runtime.errors import NumericalError, UsageError
from infer.runtime.loader import LoadedModel
from infer.runtime.perplexity import cut_windows, measure_perplexity, scored_from, window_logprobs
from infer.runtime.request import FinishReason, Request, RequestOutput
from infer.runtime.scoring import token_logprobs
from infer.samplers.errors import InvalidLogitsError
from infer.samplers.params import SamplingParams

Load = Callable[..., LoadedModel]
PREFILL_ONLY = SamplingParams(max_tokens=0)


@pytest.fixture
def load(tiny_llama: Callable[..., Path], open_model: Load) -> Load:
    """Loads a tiny model with the exact kernel and the given engine settings."""

    def load_tiny(path: Path | None = None, **settings: object) -> LoadedModel:
        return open_model(path or tiny_llama(quant="Q8_0"), **{"kernel": "reference", **settings})

    return load_tiny


def _prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(300), k=length))


def _outputs(model: LoadedModel, *requests: Request) -> dict[str, list[RequestOutput]]:
    for request in requests:
        model.engine.add(request)
    found: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    while model.engine.has_unfinished():
        for output in model.engine.step():
            found[output.request_id].append(output)
    return found


def _scores(outputs: list[RequestOutput]) -> list[float]:
    return [score for output in outputs for score in output.prompt_logprobs]


def _alone(model: LoadedModel, prompt: tuple[int, ...], score_from: int) -> list[float]:
    return _scores(_outputs(model, Request("alone", prompt, PREFILL_ONLY, score_from=score_from))["alone"])


def test_chunk_size_changes_no_score(load: Load) -> None:
    prompt = _prompt(1, 150)
    found = [
        _alone(load(prefill_chunk=chunk, prefix_cache=False), prompt, start)
        for start in (0, 76)
        for chunk in (0, 1, 7, 64, 149)
    ]
    assert len(found[0]) == 149
    assert all(scores == found[0] for scores in found[:5])
    assert all(scores == found[0][75:] for scores in found[5:])


def test_company_preemption_and_decoding_change_no_score(load: Load) -> None:
    prompts = {str(i): _prompt(i, 100 + i) for i in range(4)}
    expected = {name: _alone(load(), prompt, 40) for name, prompt in prompts.items()}
    sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    free = {
        name: [t for o in _outputs(load(), Request(name, prompt, sampling))[name] for t in o.new_ids]
        for name, prompt in prompts.items()
    }
    for settings in ({}, {"kv_blocks": 4, "prefill_chunk": 37}, {"kv_blocks": 4, "prefix_cache": False}):
        model = load(ctx=192, **settings)
        requests = [Request(name, prompt, sampling, score_from=40) for name, prompt in prompts.items()]
        found = _outputs(model, *requests)
        assert {name: _scores(outputs) for name, outputs in found.items()} == expected
        assert {name: [t for o in outputs for t in o.new_ids] for name, outputs in found.items()} == free
        pool = model.engine._scheduler._pool
        pool.check()
        assert pool.available == pool.size


@pytest.mark.parametrize("score_from", [0, 1, 64, 65, 128, 129, 190, 197, 500])
def test_a_prefix_cache_never_skips_a_score(load: Load, score_from: int) -> None:
    prompt = _prompt(3, 3 * BLOCK_SIZE + 6)
    model = load()
    expected = _alone(model, prompt, score_from)
    assert len(expected) == max(0, len(prompt) - max(1, score_from))
    assert model.engine.cached_tokens("alone") == 0
    assert _alone(model, prompt, score_from) == expected
    # the logits before the first scored token are computed; less than a block more may be
    usable = min(max(1, score_from), len(prompt)) - 1
    assert usable - BLOCK_SIZE < model.engine.cached_tokens("alone") <= usable


def test_scores_come_with_the_step_that_computed_them(load: Load) -> None:
    model = load(prefill_chunk=16)
    outputs = _outputs(model, Request("a", _prompt(4, 40), PREFILL_ONLY, score_from=10))["a"]
    assert [len(output.prompt_logprobs) for output in outputs] == [7, 16, 7]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]
    assert _outputs(model, Request("b", _prompt(4, 40), PREFILL_ONLY))["b"][-1].prompt_logprobs == ()


def test_nan_logits_name_the_position_and_others_go_on(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = load(), _prompt(5, 20)
    expected = _alone(load(), prompt, 1)
    forward = model.engine.runner.forward

    def spoiled(batch: Any) -> torch.Tensor:
        logits = as_tensor(forward(batch))
        if len(batch.context_lens) == 2:  # the second sequence's rows come last
            logits[-3] = float("nan")
        return logits

    monkeypatch.setattr(model.engine.runner, "forward", spoiled)
    model.engine.add(Request("good", prompt, PREFILL_ONLY, score_from=1))
    model.engine.add(Request("bad", _prompt(6, 30), PREFILL_ONLY, score_from=1))
    with pytest.raises(NumericalError, match="position 27 "):
        model.engine.step()
    (output,) = model.engine.step()
    assert (output.request_id, list(output.prompt_logprobs)) == ("good", expected)
    assert not model.engine.has_unfinished()


@pytest.mark.parametrize("vocab", [1, 7, 3 << 20])
def test_token_logprobs_are_the_log_softmax(vocab: int) -> None:
    rows = 3 if vocab > 1000 else 40
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, vocab, generator=generator) * 5 + 1000
    tokens = torch.randint(0, vocab, (rows,), generator=generator)
    expected = torch.log_softmax(logits.double(), dim=1)[torch.arange(rows), tokens]
    assert token_logprobs(logits, tokens.tolist()) == pytest.approx(expected.tolist(), abs=1e-9)
    logits[rows - 1, 0] = float("inf")
    with pytest.raises(InvalidLogitsError) as caught:
        token_logprobs(logits, tokens.tolist())
    assert caught.value.row == rows - 1


def _transformers_logprobs(path: Path, windows: list[list[int]]) -> np.ndarray:
    """Log-probability of every token of each window but the first: [windows, ctx - 1]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ids = torch.tensor(windows)
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(ids).logits.double(), dim=2)
    return logprobs[:, :-1].gather(2, ids[:, 1:, None])[:, :, 0].numpy()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("ctx", "add_bos"), [(32, False), (33, True)])
def test_perplexity_equals_transformers(
    load: Load, tiny_llama: Callable[..., Path], ctx: int, add_bos: bool
) -> None:
    path = tiny_llama(metadata={"tokenizer.ggml.add_bos_token": add_bos})
    model = load(path, kernel="float32", kv_type="f32", prefill_chunk=20)
    ids = model.tokenizer.encode(CORPUS)
    bos = model.tokenizer.bos_id
    assert bos is not None
    if add_bos:
        ids.insert(0, bos)
    cut = [ids[i * ctx : (i + 1) * ctx] for i in range(len(ids) // ctx)]
    if add_bos:
        cut = [[bos, *window[1:]] for window in cut]
    # the logits at ctx // 2 and later score the token that follows each
    expected = -_transformers_logprobs(path, cut)[:, ctx // 2 :]
    windows = cut_windows(model.tokenizer, CORPUS, ctx)
    *_, found = measure_perplexity(model.engine, windows)
    assert windows == [tuple(window) for window in cut]
    assert (found.windows, found.tokens) == (len(cut), expected.size)
    assert found.perplexity == pytest.approx(np.exp(expected.mean()), rel=1e-4)
    error = np.exp(expected.mean()) * np.sqrt(expected.var() / (expected.size - 1))
    assert found.stderr == pytest.approx(error, rel=1e-3)


def test_estimates_grow_and_limits_cut(load: Load) -> None:
    model = load()
    windows = cut_windows(model.tokenizer, CORPUS, 40, 3)
    found = list(measure_perplexity(model.engine, windows))
    assert [(one.windows, one.tokens) for one in found] == [(1, 19), (2, 38), (3, 57)]
    scores = [score for window in windows for score in window_logprobs(model.engine, window)]
    assert found[-1].nll == pytest.approx(-np.mean(scores))
    assert scored_from(windows[0]) == 21
    assert len(cut_windows(model.tokenizer, CORPUS, 40, 10**6)) > 3
    smallest = next(measure_perplexity(model.engine, cut_windows(model.tokenizer, CORPUS, 3, 1)))
    assert smallest.tokens == 1
    assert np.isnan(smallest.stderr)


def test_texts_too_short_are_refused_with_the_numbers(load: Load) -> None:
    tokenizer = load().tokenizer
    ids = len(tokenizer.encode(CORPUS))
    assert len(cut_windows(tokenizer, CORPUS, ids)) == 1
    with pytest.raises(UsageError, match=rf"has {ids} tokens, a window needs {ids + 1}:"):
        cut_windows(tokenizer, CORPUS, ids + 1)
    with pytest.raises(UsageError, match="window of 2 tokens"):
        cut_windows(tokenizer, CORPUS, 2)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": [
        "perplexity",
        "stderr",
        "tokens",
        "chunks",
        "ctx",
        "tok_s",
        "model",
        "kernel",
        "device",
        "exact",
    ],
    "properties": {
        "perplexity": {"type": ["number", "null"]},
        "stderr": {"type": ["number", "null"]},
        "tokens": {"type": "integer"},
        "chunks": {"type": "integer"},
        "ctx": {"type": "integer"},
        "tok_s": {"type": "number", "exclusiveMinimum": 0},
        "model": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "required": ["name", "fingerprint", "architecture", "quantization"],
        },
        "kernel": {"type": "string"},
        "device": {"type": "string"},
        "exact": {"type": "boolean"},
    },
}


@pytest.fixture
def run(tiny_infer: Infer) -> Infer:
    """run(*arguments, stdin=b"") runs `infer perplexity` on a tiny model."""
    return partial(tiny_infer, "perplexity")


def test_the_command_prints_one_line_or_one_object(run: Infer, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(CORPUS, encoding="utf-8")
    code, out, err = run("-f", str(text), "--ctx", "64", "--chunks", "2", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    jsonschema.validate(found, SCHEMA)
    assert (found["tokens"], found["chunks"], found["ctx"]) == (62, 2, 64)
    code, out, err = run("-f", "-", "--ctx", "64", "--chunks", "2", "-v", stdin=CORPUS.encode())
    assert code == 0
    value = f"perplexity {found['perplexity']:.4f}"
    assert out.startswith(f"{value} ± {found['stderr']:.4f}; 62 tokens scored in 2 windows of 64, ")
    assert out.count("\n") == 1
    assert f"window 2/2: {value}" in err
    assert run("-f", str(text), "--ctx", "3", "--chunks", "1")[1].endswith(" tok/s\n")


def test_bad_calls_are_one_line(run: Infer, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"too short")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xff")
    for arguments, message in (
        ((), "give -f FILE"),
        (("-f", str(text)), "a window needs 512"),
        (("-f", str(text), "--ctx", "2"), "--ctx 3 or more"),
        (("-f", str(text), "--ctx", "0"), "--ctx must be at least 1"),
        (("-f", str(text), "--chunks", "0"), "--chunks must be at least 1"),
        (("-f", str(tmp_path / "none")), "no such file"),
        (("-f", str(binary)), "not UTF-8"),
    ):
        code, out, err = run(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
