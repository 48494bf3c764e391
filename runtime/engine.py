"""The step loop: scheduler picks, runner computes, sampler draws. Token ids in, token ids out."""

from __future__ import annotations

import time
from dataclasses import replace

from infer.runtime.batch import OutputRows, build_batch, output_rows
from infer.runtime.errors import ContextLengthError, NumericalError, UsageError
from infer.runtime.kvcache.tier import DiskTier, PrefillRate
from infer.runtime.model_runner import ModelRunner
from infer.runtime.request import FinishReason, Request, RequestOutput, Sequence, TokenLogprob
from infer.runtime.scheduler import Scheduler
from infer.runtime.scoring import token_logprobs
from infer.runtime.stats import CacheUse
from infer.samplers.chain import SamplerChain, SampleRow, sample
from infer.samplers.errors import InvalidLogitsError, SamplingError
from infer.samplers.logit_rows import Logits


class Engine:
    """Runs any number of requests together; `run` gives it one. Not thread-safe: one thread drives it.

    ctx: positions a sequence may have. vocab_size: ids must be below it. rate: kept up to date. tier: the disk cache.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        *,
        ctx: int,
        vocab_size: int,
        rate: PrefillRate,
        tier: DiskTier | None = None,
    ) -> None:
        self.ctx = ctx
        self.vocab_size = vocab_size
        self._runner = runner
        self._scheduler = scheduler
        self._sequences: dict[str, Sequence] = {}
        self._chains: dict[str, SamplerChain] = {}
        self._rate = rate
        self._tier = tier
        self._ended: dict[str, Sequence] = {}

    @property
    def runner(self) -> ModelRunner:
        """For those who measure the model itself."""
        return self._runner

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises UsageError for an empty prompt, an id out of range or an id in use, ContextLengthError when
        the prompt is longer than the context.
        """
        prompt = request.prompt_ids
        if not prompt:
            raise UsageError("the prompt has no tokens; give some text")
        if request.request_id in self._sequences:
            raise UsageError(f"request {request.request_id!r} is already running; use another id")
        if len(prompt) > self.ctx:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens but the context holds {self.ctx}; "
                "shorten it, raise --ctx, or cut it with --truncate head|tail"
            )
        bad = next((token for token in prompt if not 0 <= token < self.vocab_size), None)
        if bad is not None:
            raise UsageError(f"token id {bad} is outside the vocabulary of {self.vocab_size}")
        try:
            self._chains[request.request_id] = SamplerChain(request.sampling, self.vocab_size, prompt)
        except ValueError as error:
            raise UsageError(str(error)) from None
        seq = Sequence(request, list(prompt))
        self._sequences[request.request_id] = seq
        self._scheduler.add(seq)

    def cancel(self, request_id: str) -> None:
        """Drop a request in whatever state; unknown and finished ones are ignored."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            self._finish(seq, FinishReason.CANCELLED)

    def close(self) -> None:
        """Drop every request, the weights and the cache; the engine cannot be used afterwards."""
        for request_id in list(self._sequences):
            self.cancel(request_id)
        if self._tier is not None:
            self._tier.close()
        self._runner.close()

    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def cached_tokens(self, request_id: str) -> int:
        """Prompt tokens of a request that came from the prefix cache; known until the next request of that id."""
        return self.cache_use(request_id).tokens

    def cache_use(self, request_id: str) -> CacheUse:
        """What the prefix cache did for a request; known until the next request ends."""
        seq = self._sequences.get(request_id) or self._ended.get(request_id)
        if seq is None:
            return CacheUse()
        restored = min(seq.restored_tokens, seq.num_cached)
        saved = seq.num_cached * self._rate.token_s - seq.loaded_s
        return CacheUse(seq.num_cached, restored, seq.loaded_bytes, seq.loaded_s, max(0.0, saved))

    def step(self) -> list[RequestOutput]:
        """Compute one batch. One output per request that got a token or scores or ended; [] when there is nothing to
        do or only prompts advanced.

        Raises NumericalError when logits are NaN or infinite, UsageError when a request's logit_bias leaves it no
        token; that request is dropped, the others compute this step again.
        """
        plan = self._scheduler.schedule()
        scheduled = plan.scheduled
        for source, target in plan.copies:
            self._runner.cache.copy(source, target)
        if not scheduled:
            return []
        started = time.perf_counter()
        logits = self._runner.forward(build_batch(scheduled))
        self._rate.measured(sum(count for _, count in scheduled), time.perf_counter() - started)
        rows = output_rows(scheduled)
        ready = [row for row in rows if row.last is not None and row.seq.request.sampling.max_tokens != 0]
        scores = {row.seq.request.request_id: self._score(logits, row) for row in rows if row.scores}
        sampled = self._sample(logits, ready)
        # From here on the step counts; before, nothing has changed and an error leaves it to be done again.
        for seq, count in scheduled:
            seq.next_scored += len(seq.scored(count))
            self._scheduler.computed(seq, count)
            if self._tier is not None:
                self._tier.save(seq)
        outputs: list[RequestOutput] = []
        for seq, _, last in rows:
            request_id = seq.request.request_id
            if request_id in sampled:
                output = self._append(seq, *sampled[request_id])
            elif last is not None:
                output = self._finish(seq, FinishReason.LENGTH)
            else:
                output = RequestOutput(request_id, ())
            if request_id in scores:
                output = replace(output, prompt_logprobs=scores[request_id])
            if output != RequestOutput(request_id, ()):
                outputs.append(output)
        return outputs

    def _score(self, logits: Logits, rows: OutputRows) -> tuple[float, ...]:
        first = rows.seq.next_scored
        tokens = rows.seq.request.prompt_ids[first : first + len(rows.scores)]
        try:
            return tuple(token_logprobs(logits[rows.scores.start : rows.scores.stop], tokens))
        except InvalidLogitsError as error:
            raise self._bad_logits(rows.seq, first - 1 + error.row) from None

    def _sample(
        self, logits: Logits, ready: list[OutputRows]
    ) -> dict[str, tuple[int, tuple[TokenLogprob, ...]]]:
        """request id → its next token and the report on it."""
        wanted = [row.last for row in ready if row.last is not None]
        if wanted != list(range(len(logits))):
            logits = logits[wanted]
        chains = [SampleRow(self._chains[seq.request.request_id], len(seq.token_ids)) for seq, _, _ in ready]
        try:
            result = sample(logits, chains)
        except InvalidLogitsError as error:
            seq = ready[error.row].seq
            raise self._bad_logits(seq, len(seq.token_ids) - 1) from None
        except SamplingError as error:
            self._finish(ready[error.row].seq, FinishReason.CANCELLED)
            raise UsageError(str(error)) from None
        found: dict[str, tuple[int, tuple[TokenLogprob, ...]]] = {}
        for row, token, report in zip(ready, result.token_ids, result.logprobs, strict=True):
            told = () if report is None else (TokenLogprob(token, report.logprob, report.top),)
            found[row.seq.request.request_id] = (token, told)
        return found

    def _bad_logits(self, seq: Sequence, position: int) -> NumericalError:
        self._finish(seq, FinishReason.CANCELLED)
        return NumericalError(
            f"the logits at token position {position} are NaN or infinite; "
            "the model file is damaged or does not suit this precision (try --kv-type f32)"
        )

    def _append(self, seq: Sequence, token: int, logprobs: tuple[TokenLogprob, ...]) -> RequestOutput:
        seq.token_ids.append(token)
        request = seq.request
        self._chains[request.request_id].append(token)
        limit = request.sampling.max_tokens
        if token in request.stop_ids and not request.sampling.ignore_eos:
            reason, stop = FinishReason.STOP, int(token)
        elif (limit is not None and seq.num_decoded >= limit) or len(seq.token_ids) > self.ctx:
            reason, stop = FinishReason.LENGTH, None
        else:
            return RequestOutput(request.request_id, (token,), logprobs=logprobs)
        self._finish(seq, reason)
        return RequestOutput(request.request_id, (token,), reason, stop, logprobs)

    def _finish(self, seq: Sequence, reason: FinishReason) -> RequestOutput:
        request_id = seq.request.request_id
        if self._tier is not None:
            self._tier.finish(seq)
        self._scheduler.finish(seq, reason)
        self._ended = {request_id: seq}
        del self._sequences[request_id], self._chains[request_id]
        return RequestOutput(request_id, (), reason)
