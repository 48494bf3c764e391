"""A model that answers what it is told, one byte a token, for tests of the command line without torch.

As a program it runs one command line of `infer` with that model in place of a loaded one:
`python scripted_model.py SCRIPT_JSON ARGUMENTS…`
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BOS, EOS, VOCABULARY = 256, 257, 258


def stub_engine(monkeypatch: Any = None) -> None:
    """`infer.runtime.generation` names Engine as a type only: keep it from importing torch.

    With a monkeypatch, both modules are as they were after the test.
    """
    module = types.ModuleType("infer.runtime.engine")
    module.Engine = object  # type: ignore[attr-defined]
    if monkeypatch is None:
        sys.modules["infer.runtime.engine"] = module
        return
    import infer.runtime

    monkeypatch.setitem(sys.modules, "infer.runtime.engine", module)
    monkeypatch.delitem(sys.modules, "infer.runtime.generation", raising=False)
    generation = importlib.import_module("infer.runtime.generation")
    monkeypatch.setattr(infer.runtime, "generation", generation, raising=False)


@dataclass
class Script:
    """text: the answer, `repeat` times. delay: seconds a token. ctx: positions.

    hang_after: tokens after which steps bring nothing. fail_after: tokens after which a step raises
    NumericalError. warn_after: tokens after which the runtime warns of a full disk. template: a Jinja
    source, None for a base model. marker: a file that appears once the model loads slowly or hangs, or a
    session is written slowly (save_delay: seconds). control: more control tokens, which count in the text.
    """

    text: str = "Hello there."
    delay: float = 0.0
    load_delay: float = 0.0
    hang_after: int | None = None
    fail_after: int | None = None
    warn_after: int | None = None
    repeat: int = 1
    ctx: int = 512
    eos: bool = True
    template: str | None = None
    defaults: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    marker: str | None = None
    save_delay: float = 0.0
    control: tuple[str, ...] = ()

    def mark(self) -> None:
        if self.marker is not None:
            Path(self.marker).touch()


def make_tokenizer(control: Sequence[str] = ()) -> Any:
    """A token for each byte; then BOS, EOS and the control tokens."""
    from infer.runtime.tokenizer.base import Tokenizer

    names = {"<bos>": BOS, "<eos>": EOS, **{name: VOCABULARY + i for i, name in enumerate(control)}}
    pieces = {token_id: name for name, token_id in names.items()}
    special_names = re.compile("(" + "|".join(map(re.escape, ["<eos>", *control])) + ")")

    class ByteTokenizer(Tokenizer):
        vocab_size = VOCABULARY + len(control)
        bos_id, eos_id = BOS, EOS
        add_bos, add_eos = True, False
        stop_ids = frozenset({EOS})
        kind = "bytes"

        def encode(self, text: str, *, special: bool = False) -> list[int]:
            ids: list[int] = []
            for index, part in enumerate(special_names.split(text) if special else [text]):
                ids += [names[part]] if index % 2 else list(part.encode())
            return ids

        def token_bytes(self, token_id: int) -> bytes:
            if not 0 <= token_id < self.vocab_size:
                raise IndexError(token_id)
            return bytes([token_id]) if token_id < 256 else b""

        def piece(self, token_id: int) -> str:
            return pieces.get(token_id) or chr(token_id)

        def is_control(self, token_id: int) -> bool:
            return token_id >= 256

        def decode(self, ids: Sequence[int]) -> str:
            return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    return ByteTokenizer()


class ScriptedEngine:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.ctx = script.ctx
        self.requests: list[Any] = []
        self.cancelled: list[str] = []
        tokens = make_tokenizer(script.control).encode(script.text, special=bool(script.control))
        self._tokens = tokens * script.repeat + ([EOS] if script.eos else [])
        self._sent = 0

    def add(self, request: Any) -> None:
        self.requests.append(request)
        self._sent = 0

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def cache_use(self, request_id: str) -> Any:
        from infer.runtime.stats import CacheUse

        return CacheUse(tokens=3)

    def step(self) -> list[Any]:
        from infer.runtime.errors import NumericalError
        from infer.runtime.request import FinishReason, RequestOutput, TokenLogprob

        request, script = self.requests[-1], self.script
        if script.hang_after is not None and self._sent >= script.hang_after:
            script.mark()
            time.sleep(0.01)
            return []
        if self._sent == script.warn_after:
            logging.getLogger("infer.runtime").warning("the prompt cache is off: disk full")
        if script.fail_after is not None and self._sent >= script.fail_after:
            raise NumericalError("the logits are NaN")
        if request.sampling.max_tokens == 0:
            return [RequestOutput(request.request_id, (), FinishReason.LENGTH)]
        time.sleep(script.delay)
        token = self._tokens[self._sent]
        self._sent += 1
        logprobs: tuple[Any, ...] = ()
        if request.sampling.logprobs is not None:
            logprobs = (TokenLogprob(token, -0.5, ((token, -0.5), (1, float("-inf")))),)
        if token in request.stop_ids and not request.sampling.ignore_eos:
            return [RequestOutput(request.request_id, (token,), FinishReason.STOP, token, logprobs)]
        limit = request.sampling.max_tokens
        if self._sent == len(self._tokens) or (limit is not None and self._sent >= limit):
            return [RequestOutput(request.request_id, (token,), FinishReason.LENGTH, None, logprobs)]
        return [RequestOutput(request.request_id, (token,), None, None, logprobs)]


class ScriptedModel:
    """The attributes of `infer.runtime.loader.LoadedModel`."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.engine = ScriptedEngine(script)
        self.tokenizer = make_tokenizer(script.control)
        self.chat_template = None
        if script.template is not None:
            from infer.runtime.tokenizer.chat_template import ChatTemplate

            self.chat_template = ChatTemplate(script.template, control_tokens=script.control)
        self.config = types.SimpleNamespace(architecture="llama", context_length=script.ctx)
        self.sampling_defaults = script.defaults
        self.name, self.fingerprint, self.quantization = "scripted", "f" * 64, "Q4_1"
        self.device, self.kernel, self.exact, self.load_s = "cpu", "scripted", True, 0.25
        self.warnings = script.warnings
        self.closed = False

    @property
    def prompts(self) -> list[str]:
        """The texts it was asked to go on from, without BOS and EOS."""
        return [
            b"".join(
                bytes([token]) if token < BOS else self.tokenizer.piece(token).encode()
                for token in request.prompt_ids
                if token not in (BOS, EOS)
            ).decode()
            for request in self.engine.requests
        ]

    def close(self) -> None:
        self.closed = True


def install(model: ScriptedModel, set_attribute: Any = setattr) -> None:
    """Put the model behind `cli.session`; set_attribute is setattr or a monkeypatch's."""
    from infer.cli import session

    @contextlib.contextmanager
    def open_model(path: Path, engine: Any, **options: Any) -> Iterator[ScriptedModel]:
        if model.script.load_delay:
            model.script.mark()
            time.sleep(model.script.load_delay)
        model.engine_config = engine
        for warning in model.warnings:
            options["notes"].warning(warning)
        try:
            yield model
        finally:
            model.close()

    set_attribute(session, "open_model", open_model)
    set_attribute(session, "locate", lambda options, notes: Path(options.model or "default.gguf"))


if __name__ == "__main__":
    from infer.cli.main import main

    stub_engine()
    scripted = ScriptedModel(Script(**json.loads(sys.argv[1])))
    if scripted.script.save_delay:
        real_fsync = os.fsync

        def slow_fsync(descriptor: int) -> None:
            scripted.script.mark()
            time.sleep(scripted.script.save_delay)
            real_fsync(descriptor)

        os.fsync = slow_fsync
    install(scripted)
    sys.argv = ["infer", *sys.argv[2:]]
    main()
