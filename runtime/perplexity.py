"""How well a model predicts a text, measured as llama.cpp's `llama-perplexity` does without a stride.

The text is tokenized as a whole and cut into windows of `ctx` tokens; what is left over is not used. Each window is
computed on its own, its first token replaced by BOS where the model asks for one, and the tokens behind its first
half are scored: positions ctx // 2 + 1 to the last, each from all tokens before it in the window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from infer.runtime.engine import Engine
from infer.runtime.errors import UsageError
from infer.runtime.request import Request
from infer.runtime.tokenizer.base import Tokenizer
from infer.samplers.params import SamplingParams

SHORTEST = 3  # tokens of a window whose second half has one to score

Window = tuple[int, ...]


@dataclass(frozen=True)
class PerplexityEstimate:
    """What the windows so far say. tokens: scored ones. nll: their mean negative log-likelihood, in nats; nll_stderr
    its standard error, nan for fewer than two tokens."""

    windows: int
    tokens: int
    nll: float
    nll_stderr: float

    @property
    def perplexity(self) -> float:
        """exp(nll); inf where that is more than a float can hold."""
        try:
            return math.exp(self.nll)
        except OverflowError:
            return math.inf

    @property
    def stderr(self) -> float:
        """Standard error of the perplexity, to first order."""
        return self.perplexity * self.nll_stderr


def cut_windows(tokenizer: Tokenizer, text: str, ctx: int, limit: int | None = None) -> list[Window]:
    """The text's windows of ctx tokens, at most `limit` of them.

    Control tokens written in the text are plain text. Raises UsageError when ctx is too small to score anything or
    the text too short for one window. (llama.cpp asks for two; with one the figure is the same, its error larger.)
    """
    if ctx < SHORTEST:
        raise UsageError(f"a window of {ctx} tokens leaves nothing to score: use --ctx {SHORTEST} or more")
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    ids = bos + tokenizer.encode(text)
    if len(ids) < ctx:
        raise UsageError(
            f"the text has {len(ids)} tokens, a window needs {ctx}: give a longer file or a smaller --ctx"
        )
    count = len(ids) // ctx if limit is None else min(limit, len(ids) // ctx)
    return [(*bos, *ids[i * ctx + len(bos) : (i + 1) * ctx]) for i in range(count)]


def scored_from(window: Sequence[int]) -> int:
    """The first position of a window whose token is scored."""
    return len(window) // 2 + 1


def window_logprobs(engine: Engine, window: Window) -> list[float]:
    """Log-probabilities, in nats, of the scored tokens of one window, computed by itself.

    Raises ContextLengthError when it is longer than the engine's context, and NumericalError.
    """
    request = Request("perplexity", window, SamplingParams(max_tokens=0), score_from=scored_from(window))
    engine.add(request)
    found: list[float] = []
    try:
        while engine.has_unfinished():
            for output in engine.step():
                found += output.prompt_logprobs
    finally:
        engine.cancel(request.request_id)
    return found


def measure_perplexity(engine: Engine, windows: Sequence[Window]) -> Iterator[PerplexityEstimate]:
    """An estimate after each window. Raises as `window_logprobs` does."""
    count, total, squares = 0, 0.0, 0.0
    for index, window in enumerate(windows):
        scores = window_logprobs(engine, window)
        count += len(scores)
        total -= math.fsum(scores)
        squares += math.fsum(score * score for score in scores)
        mean = total / count
        # llama.cpp's: the mean square about the mean, not its unbiased estimate, over count - 1
        variance = max(0.0, squares / count - mean * mean)
        error = math.sqrt(variance / (count - 1)) if count > 1 else math.nan
        yield PerplexityEstimate(index + 1, count, mean, error)
