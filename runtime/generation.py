"""One prompt to text: drives `Engine.step()`, decodes ids as they come and watches for stop strings.

The engine sees ids only; this is the one place between it and the commands where ids become text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from infer.runtime.engine import Engine
from infer.runtime.request import FinishReason, Request, RequestOutput, TokenLogprob
from infer.runtime.stats import GenerationStats
from infer.runtime.tokenizer.base import Tokenizer
from infer.runtime.tokenizer.channels import Channels
from infer.runtime.tokenizer.detokenizer import IncrementalDetokenizer
from infer.runtime.tokenizer.thinking import Tags
from infer.samplers.params import SamplingParams


@dataclass
class Generation:
    """One answer as it grows. `text` is the concatenation of all deltas, `ids` every decoded token (the
    end-of-turn token included), stop_reason the stop string or the id of the token that ended it.

    thinking: what a reasoning model said to itself first; its tokens count among `ids`.
    """

    text: str = ""
    thinking: str = ""
    ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: GenerationStats = field(default_factory=GenerationStats)


@dataclass(frozen=True)
class Thinking:
    """How the thinking of an answer is told from it. budget: the tokens after which it is closed; None: no bound."""

    tags: Tags | Channels
    budget: int | None = None


class TextStream:
    """Iterator over the text deltas of one request; iterate it to the end, or `cancel()` it.

    A delta is empty only where the thinking grew. After exhaustion `generation` is complete. On KeyboardInterrupt or
    any other exception inside `next`, the request is cancelled in the engine and `generation` holds the partial answer.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        request: Request,
        *,
        continues: bool = False,
        thinking: Thinking | None = None,
    ) -> None:
        """continues: the answer goes on where the prompt's text stops, so that a space at its start belongs to it.

        thinking: None for a model that does not think.
        """
        self.generation = Generation()
        self._engine = engine
        self._tokenizer = tokenizer
        self._request = request
        self._id = request.request_id
        self._stops = request.stop_ids if not request.sampling.ignore_eos else frozenset[int]()
        self._thinking = thinking
        self._splitter = thinking.tags.splitter(tokenizer, request.prompt_ids) if thinking else None
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            stop=request.sampling.stop,
            strip_leading_space=False if continues else None,
            shown=thinking.tags.shown(tokenizer) if thinking else {},
        )
        self._started = time.perf_counter()
        self._first: float | None = None
        self._thought = 0
        self.generation.stats.prompt_tokens = len(request.prompt_ids)
        engine.add(request)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        generation = self.generation
        while generation.finish_reason is None:
            length, thought = len(generation.text), len(generation.thinking)
            self.step()
            if len(generation.text) > length or len(generation.thinking) > thought:
                return generation.text[length:]
        raise StopIteration

    def step(self) -> None:
        """One step of the engine, which may bring no text."""
        try:
            outputs = self._engine.step()
        except BaseException:
            self.cancel()
            raise
        for output in outputs:
            if output.request_id == self._id:
                self._take(output)

    def cancel(self) -> str:
        """Stop now. Returns the text that was held back (part of a stop string, of a character or of a tag)."""
        length = len(self.generation.text)
        if self.generation.finish_reason is None:
            self._engine.cancel(self._id)
            self._grow(self._detokenizer.finish())
            self._end(FinishReason.CANCELLED)
        return self.generation.text[length:]

    def _take(self, output: RequestOutput) -> None:
        generation = self.generation
        for index, token in enumerate(output.new_ids):
            if self._first is None:
                self._first = time.perf_counter()
                generation.stats.add_cache_use(self._engine.cache_use(self._id))
            generation.ids.append(token)
            if output.logprobs:
                generation.logprobs.append(output.logprobs[index])
            if token not in self._stops:
                self._grow(self._detokenizer.push(token))
            if self._detokenizer.stopped is not None:
                if output.finish_reason is None:
                    self._engine.cancel(self._id)
                generation.stop_reason = self._detokenizer.stopped
                self._end(FinishReason.STOP)
                return
        if output.finish_reason is not None:
            self._grow(self._detokenizer.finish())
            stopped = self._detokenizer.stopped
            generation.stop_reason = output.stop_reason if stopped is None else stopped
            self._end(output.finish_reason if stopped is None else FinishReason.STOP)
        elif self._thinking is not None and self._splitter is not None and self._splitter.inside:
            self._thought += len(output.new_ids)
            budget = self._thinking.budget
            if budget is not None and self._thought >= budget:
                self._close_thinking(self._thinking.tags.closing)

    def _grow(self, text: str) -> None:
        thinking, answer = ("", text) if self._splitter is None else self._splitter.push(text)
        self.generation.thinking += thinking
        self.generation.text += answer

    def _close_thinking(self, closing: str) -> None:
        """Put the tag where the model did not, and let it go on from there: a new request, whose prompt is cached."""
        generation, request = self.generation, self._request
        self._engine.cancel(self._id)
        for token in self._tokenizer.encode(closing, special=True):
            generation.ids.append(token)
            self._grow(self._detokenizer.push(token))
        limit = request.sampling.max_tokens
        left = None if limit is None else limit - len(generation.ids)
        prompt = (*request.prompt_ids, *generation.ids)
        if (left is not None and left <= 0) or len(prompt) > self._engine.ctx:
            self._end(FinishReason.LENGTH)
            return
        sampling = replace(request.sampling, max_tokens=left)
        self._engine.add(replace(request, prompt_ids=prompt, sampling=sampling))

    def _end(self, reason: FinishReason) -> None:
        if self._splitter is not None:
            thinking, answer = self._splitter.finish()
            self.generation.thinking += thinking
            self.generation.text += answer
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
