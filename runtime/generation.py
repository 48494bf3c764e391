"""One prompt to text: drives `Engine.step()`, decodes ids as they come and watches for stop strings.

The engine sees ids only; this is the one place between it and the commands where ids become text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from infer.runtime.engine import Engine
from infer.runtime.request import FinishReason, Request, RequestOutput, TokenLogprob
from infer.runtime.stats import GenerationStats
from infer.runtime.tokenizer.base import Tokenizer
from infer.runtime.tokenizer.detokenizer import IncrementalDetokenizer
from infer.samplers.params import SamplingParams


@dataclass
class Generation:
    """One answer as it grows. `text` is the concatenation of all deltas, `ids` every decoded token (the
    end-of-turn token included), stop_reason the stop string or the id of the token that ended it."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: GenerationStats = field(default_factory=GenerationStats)


class TextStream:
    """Iterator over the text deltas of one request; iterate it to the end, or `cancel()` it.

    Deltas are never empty. After exhaustion `generation` is complete. On KeyboardInterrupt or any other
    exception inside `next`, the request is cancelled in the engine and `generation` holds the partial answer.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, request: Request, *, continues: bool = False
    ) -> None:
        """continues: the answer goes on where the prompt's text stops, so that a space at its start belongs to it."""
        self.generation = Generation()
        self._engine = engine
        self._id = request.request_id
        self._stops = request.stop_ids if not request.sampling.ignore_eos else frozenset[int]()
        strip = False if continues else None
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, stop=request.sampling.stop, strip_leading_space=strip
        )
        self._started = time.perf_counter()
        self._first: float | None = None
        self.generation.stats.prompt_tokens = len(request.prompt_ids)
        engine.add(request)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while self.generation.finish_reason is None:
            try:
                outputs = self._engine.step()
            except BaseException:
                self.cancel()
                raise
            text = "".join(self._take(output) for output in outputs if output.request_id == self._id)
            if text:
                self.generation.text += text
                return text
        raise StopIteration

    def cancel(self) -> str:
        """Stop now. Returns the text that was held back (part of a stop string or of a character)."""
        if self.generation.finish_reason is not None:
            return ""
        self._engine.cancel(self._id)
        rest = self._detokenizer.finish()
        self.generation.text += rest
        self._end(FinishReason.CANCELLED)
        return rest

    def _take(self, output: RequestOutput) -> str:
        generation = self.generation
        parts = []
        for index, token in enumerate(output.new_ids):
            if self._first is None:
                self._first = time.perf_counter()
                generation.stats.add_cache_use(self._engine.cache_use(self._id))
            generation.ids.append(token)
            if output.logprobs:
                generation.logprobs.append(output.logprobs[index])
            if token not in self._stops:
                parts.append(self._detokenizer.push(token))
            if self._detokenizer.stopped is not None:
                if output.finish_reason is None:
                    self._engine.cancel(self._id)
                generation.stop_reason = self._detokenizer.stopped
                self._end(FinishReason.STOP)
                return "".join(parts)
        if output.finish_reason is not None:
            parts.append(self._detokenizer.finish())
            stopped = self._detokenizer.stopped
            generation.stop_reason = output.stop_reason if stopped is None else stopped
            self._end(output.finish_reason if stopped is None else FinishReason.STOP)
        return "".join(parts)

    def _end(self, reason: FinishReason) -> None:
        now = time.perf_counter()
        stats = self.generation.stats
        self.generation.finish_reason = reason
        stats.completion_tokens = len(self.generation.ids)
        first = now if self._first is None else self._first
        stats.prefill_s = stats.ttft_s = first - self._started
        stats.decode_s = now - first


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    sampling: SamplingParams,
    *,
    request_id: str = "0",
    on_text: Callable[[str], None] = lambda _: None,
) -> Generation:
    """Run one prompt to its end; on_text sees each delta."""
    request = Request(request_id, tuple(prompt_ids), sampling, tokenizer.stop_ids)
    stream = TextStream(engine, tokenizer, request)
    for delta in stream:
        on_text(delta)
    return stream.generation
