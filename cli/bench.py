"""`infer bench`: how fast a model runs on this machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from infer.cli import report, session
from infer.cli.config import Exclusion
from infer.cli.measuring import without_disk_cache
from infer.cli.options import EngineOptions, JsonOptions, NoteOptions, takes
from infer.cli.output import Writer, json_line, open_writer
from infer.cli.render import Notes, one_line
from infer.runtime.config import EngineConfig
from infer.runtime.errors import ContextLengthError, UsageError

if TYPE_CHECKING:
    from infer.runtime.bench import BenchConfig, MemoryRead, Rates
    from infer.runtime.loader import LoadedModel


@dataclass(frozen=True, kw_only=True)
class BenchOptions(JsonOptions, EngineOptions, NoteOptions):
    """Every flag of `infer bench`."""

    flags_only = ("prefill",)
    exclusions: ClassVar[tuple[Exclusion, ...]] = (Exclusion("no_cache", "depth"),)

    prefill: Annotated[
        int, typer.Option("-p", "--prefill", metavar="N", help="Prompt tokens to prefill; 0: skip.")
    ] = 512
    decode: Annotated[int, typer.Option("-n", "--decode", metavar="N", help="Tokens to decode; 0: skip.")] = (
        128
    )
    depth: Annotated[
        int, typer.Option("-d", "--depth", metavar="N", help="Tokens of context before either begins.")
    ] = 0
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", metavar="N", help="Repetitions; the median is told.")
    ] = 3


@dataclass(frozen=True)
class Measurement:
    """What was measured. Rates in tokens per second, None for what was left out; bandwidth in bytes per second, of
    plain reads, for comparison."""

    config: BenchConfig
    threads: int
    prefill: Rates | None
    decode: Rates | None
    read: MemoryRead | None
    bandwidth: float | None

    @property
    def read_rate(self) -> float | None:
        """Bytes a second that decoding reads."""
        return None if self.read is None or self.decode is None else self.read.total * self.decode.median

    @property
    def share(self) -> float | None:
        """The part of the bandwidth that decoding reaches."""
        return None if self.read_rate is None or not self.bandwidth else self.read_rate / self.bandwidth


@takes(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Measure prefill and decode in tokens per second, and the memory that decoding reads.

    Prompts are random tokens. Decoding reads all weights, keys and values once a token: how close that comes to
    the speed of plain memory reads is the share of bandwidth.

    Examples:
      infer bench -m qwen2.5-coder-1.5b-instruct
      infer bench -p 2048 -n 0 --depth 4096
      infer bench --json -r 5 | jq .decode_tok_s
    """
    writer = open_writer(None)
    notes = Notes(quiet=options.quiet, verbose=options.verbose)
    engine = without_disk_cache(session.engine_config(options), options, notes)
    with session.logging_to(notes):
        config = bench_config(options)
        engine = fitted(engine, config, options)
        path = session.locate(options, notes)
        if options.ctx is None:
            check_context(path, config)
        with session.open_model(path, engine, chat_template=False, pre=options.pre, notes=notes) as model:
            found = measure(model, engine, config, notes)
            if options.json:
                writer.queue(json_line(report_object(model, found)))
            else:
                writer.queue("".join(f"{one_line(line)}\n" for line in report_lines(model, found)).encode())
    finish(writer)


def finish(writer: Writer) -> None:
    """Write what is queued. Raises OutputError."""
    writer.drain()
    writer.close()


def bench_config(options: BenchOptions) -> BenchConfig:
    """Raises UsageError naming the flag, variable or key of a value out of range."""
    from infer.runtime.bench import BenchConfig

    try:
        return BenchConfig(
            prefill=options.prefill,
            decode=options.decode,
            depth=options.depth,
            repetitions=options.repetitions,
        )
    except ValueError as error:
        field, _, rest = str(error).partition(" ")
        raise UsageError(f"{options.origin(field)} {rest}") from None


def fitted(engine: EngineConfig, config: BenchConfig, options: BenchOptions) -> EngineConfig:
    """The engine with a context that holds the measurement. Raises UsageError when --ctx forbids it."""
    if engine.ctx is not None and engine.ctx < config.ctx:
        raise UsageError(
            f"{options.origin('ctx')} {engine.ctx} is less than the {config.ctx} tokens of the measurement: "
            "drop it, or use a smaller -p, -n or --depth"
        )
    return dataclasses.replace(engine, ctx=engine.ctx or config.ctx, prefix_cache=bool(config.depth))


def check_context(path: Path, config: BenchConfig) -> None:
    """Raise ContextLengthError where the model was not made for that many positions, and ModelError."""
    from infer.runtime.checkpoint.open import open_checkpoint
    from infer.runtime.models.registry import resolve_model

    with open_checkpoint(path) as checkpoint:
        context = resolve_model(checkpoint)[1].context_length
    if config.ctx > context:
        raise ContextLengthError(
            f"the measurement needs {config.ctx} tokens of context, {path.name} was made for {context}: use a "
            f"smaller -p, -n or --depth, or --ctx {config.ctx} to go past that"
        )


def measure(model: LoadedModel, engine: EngineConfig, config: BenchConfig, notes: Notes) -> Measurement:
    """Everything the configuration asks for, one after the other; each repetition is a detail."""
    from infer.runtime.bandwidth import measure_bandwidth
    from infer.runtime.bench import Bench
    from infer.runtime.device import available_cores, resolve_device

    threads = engine.threads or available_cores()
    runner = Bench(model.engine, config)
    prefill = decode = read = bandwidth = None
    if config.prefill:
        prefill = runner.prefill(lambda rate: notes.detail(f"prefill {rate:.1f} tok/s"))
    if config.decode:
        decode = runner.decode(lambda rate: notes.detail(f"decode {rate:.1f} tok/s"))
        read = runner.memory_read()
        bandwidth = measure_bandwidth(resolve_device(model.device), threads)
    return Measurement(config, threads, prefill, decode, read, bandwidth)


def report_object(model: LoadedModel, found: Measurement) -> dict[str, object]:
    """What `--json` prints: rates in tokens and bandwidths in 10^9 bytes a second; null for what was left out."""

    def rates(name: str, values: Rates | None) -> dict[str, object]:
        return {
            f"{name}_tok_s": None if values is None else values.median,
            f"{name}_min_tok_s": None if values is None else min(values.values),
            f"{name}_max_tok_s": None if values is None else max(values.values),
        }

    def giga(value: float | None) -> float | None:
        return None if value is None else value / 1e9

    config, read = found.config, found.read
    return {
        **rates("prefill", found.prefill),
        **rates("decode", found.decode),
        "prefill_tokens": config.prefill,
        "decode_tokens": config.decode,
        "depth": config.depth,
        "repetitions": config.repetitions,
        "weight_bytes_per_token": None if read is None else read.weights,
        "kv_bytes_per_token": None if read is None else round(read.kv),
        "gb_s": giga(found.read_rate),
        "bandwidth_gb_s": giga(found.bandwidth),
        "bandwidth_share": found.share,
        "model": report.model_object(model),
        "kernel": model.kernel,
        "device": model.device,
        "threads": found.threads,
        "exact": model.exact,
    }


def report_lines(model: LoadedModel, found: Measurement) -> list[str]:
    """The same for people: one fact a line, name first."""
    config = found.config

    def rates(tokens: int, values: Rates) -> str:
        several = (
            f", {min(values.values):.1f} to {max(values.values):.1f} in {len(values.values)} repetitions"
        )
        depth = f" behind {config.depth}" if config.depth else ""
        return (
            f"{values.median:.1f} tok/s ({tokens} tokens{depth}{several if len(values.values) > 1 else ''})"
        )

    facts = {"model": f"{model.name} ({model.config.architecture}, {model.quantization})"}
    if found.prefill is not None:
        facts["prefill"] = rates(config.prefill, found.prefill)
    if found.decode is not None:
        facts["decode"] = rates(config.decode, found.decode)
    if found.read is not None and found.read_rate is not None:
        facts["read"] = (
            f"{found.read_rate / 1e9:.1f} GB/s ({found.read.weights / 1e6:.1f} MB of weights and "
            f"{found.read.kv / 1e6:.1f} MB of keys and values per token)"
        )
    if found.bandwidth is not None and found.share is not None:
        cached = " (more than all: the caches hold part of the weights)" if found.share > 1 else ""
        facts["bandwidth"] = (
            f"{found.bandwidth / 1e9:.1f} GB/s measured, {found.share * 100:.0f} % used{cached}"
        )
    facts["device"] = (
        f"{model.device}, {found.threads} threads, kernel {model.kernel}, exact: {str(model.exact).lower()}"
    )
    return [f"{name + ':':<13}{value}" for name, value in facts.items()]
