"""The step loop: scheduler picks, runner computes, sampler draws. Token ids in, token ids out."""

from __future__ import annotations

from infer.runtime.batch import build_batch
from infer.runtime.errors import ContextLengthError, NumericalError, UsageError
from infer.runtime.model_runner import ModelRunner
from infer.runtime.request import FinishReason, Request, RequestOutput, Sequence, TokenLogprob
from infer.runtime.scheduler import Scheduler
from infer.samplers.chain import SampleRow, SamplerChain, sample
from infer.samplers.errors import InvalidLogitsError


class Engine:
    """Runs any number of requests together; `run` gives it one. Not thread-safe: one thread drives it.

    ctx: positions a sequence may have. vocab_size: ids must be below it.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, *, ctx: int, vocab_size: int) -> None:
        self.ctx = ctx
        self.vocab_size = vocab_size
        self._runner = runner
        self._scheduler = scheduler
        self._sequences: dict[str, Sequence] = {}
        self._chains: dict[str, SamplerChain] = {}
        self._cached: dict[str, int] = {}

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
        self._runner.close()

    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def cached_tokens(self, request_id: str) -> int:
        """Prompt tokens of a request that came from the prefix cache; known until the next request of that id."""
        seq = self._sequences.get(request_id)
        return seq.num_cached if seq is not None else self._cached.get(request_id, 0)

    def step(self) -> list[RequestOutput]:
        """Compute one batch. One output per request that got a token or ended; [] when there is nothing to do
        or only prompts advanced.

        Raises NumericalError when logits are NaN or infinite; the request is dropped, others can go on.
        """
        scheduled = self._scheduler.schedule().scheduled
        if not scheduled:
            return []
        logits = self._runner.forward(build_batch(scheduled))
        for seq, count in scheduled:
            self._scheduler.computed(seq, count)
        outputs: list[RequestOutput] = []
        complete = [seq for seq, _ in scheduled if seq.num_computed == len(seq.token_ids)]
        ready = [seq for seq in complete if seq.request.sampling.max_tokens != 0]
        if len(ready) < len(complete):
            logits = logits[[index for index, seq in enumerate(complete) if seq in ready]]
            outputs = [self._finish(seq, FinishReason.LENGTH) for seq in complete if seq not in ready]
        rows = [SampleRow(self._chains[seq.request.request_id], len(seq.token_ids)) for seq in ready]
        try:
            result = sample(logits, rows)
        except InvalidLogitsError as error:
            seq = ready[error.row]
            self._finish(seq, FinishReason.CANCELLED)
            raise NumericalError(
                f"the logits at token position {len(seq.token_ids) - 1} are NaN or infinite; "
                "the model file is damaged or does not suit this precision (try --kv-type f32)"
            ) from None
        except ValueError as error:
            raise UsageError(str(error)) from None
        for index, seq in enumerate(ready):
            found = result.logprobs[index]
            token = result.token_ids[index]
            report = () if found is None else (TokenLogprob(token, found.logprob, found.top),)
            outputs.append(self._append(seq, token, report))
        return outputs

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
        self._scheduler.finish(seq, reason)
        self._cached = {request_id: seq.num_cached}
        del self._sequences[request_id], self._chains[request_id]
        return RequestOutput(request_id, (), reason)
