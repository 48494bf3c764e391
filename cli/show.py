"""`infer show`: what a model is, from its file's metadata; no weights are read and torch is not imported."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli import render
from infer.cli.config import data_dirs
from infer.cli.options import JsonOptions, complete_model, takes
from infer.runtime.errors import ModelError, UsageError
from infer.runtime.store.files import human_size

if TYPE_CHECKING:
    from infer.runtime.store.catalog import CatalogEntry
    from infer.runtime.store.paths import DataDirs
    from infer.runtime.store.resolve import ModelSource


@takes(JsonOptions)
def show(
    options: JsonOptions,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A .gguf path, a catalog name or hf:org/repo[:file].",
            autocompletion=complete_model,
        ),
    ],
    template: Annotated[bool, typer.Option("--template", help="Print the chat template, all of it.")] = False,
) -> None:
    """Show what a model is: sizes, quantization, tokenizer, license, fingerprint."""
    from infer.runtime.store.pull import is_pulled
    from infer.runtime.store.resolve import CatalogModel, resolve

    if template and options.json:
        raise UsageError(
            f"--template and {options.origin('json')} exclude each other: --json holds the template"
        )
    dirs = data_dirs()
    source = resolve(model, dirs)
    if isinstance(source, CatalogModel) and not is_pulled(source.entry, dirs):
        if template:
            raise ModelError(f"{source} is not on this machine: `infer pull {source}` first")
        facts = _catalog_facts(source.entry)
    else:
        facts = _file_facts(source, dirs)
    if template:
        _print_template(facts)
    elif options.json:
        render.emit(json.dumps(facts))
    else:
        for line in _lines(facts):
            render.emit(line)


def _catalog_facts(entry: CatalogEntry) -> dict[str, Any]:
    """What is known before the download: the same keys as of a file, null where only the file knows."""
    from infer.runtime.store.pull import describe_source

    return {
        "name": entry.name,
        "pulled": False,
        "path": None,
        "file_size": entry.size,
        "architecture": entry.architecture,
        "supported": _is_supported(entry.architecture),
        "kernel": None,
        "quantization": entry.quantization,
        **dict.fromkeys(_FROM_FILE_ONLY),
        "license": entry.license,
        "source": " | ".join(describe_source(source) for source in entry.sources),
        "fingerprint": entry.sha256,
    }


def _file_facts(source: ModelSource, dirs: DataDirs) -> dict[str, Any]:
    from infer.quant.kernels.status import cpu_kernel
    from infer.runtime.checkpoint.open import open_checkpoint
    from infer.runtime.store.fingerprint import fingerprint
    from infer.runtime.store.hub import HubModel
    from infer.runtime.store.manifest import read_manifest
    from infer.runtime.store.pull import PullOptions, ensure_local
    from infer.runtime.store.resolve import CatalogModel
    from infer.runtime.store.summary import summarize

    with render.progress("hashing") as bar:

        def hashed(done: int, total: int, _: str) -> None:
            bar(done, total)

        path = ensure_local(source, dirs, PullOptions(progress=hashed, notify=render.say, offline=True))
        with open_checkpoint(path) as checkpoint:
            summary = summarize(checkpoint)
            files = list(dict.fromkeys([path, *(tensor.file for tensor in checkpoint.tensors.values())]))
        digest = fingerprint(files, dirs.cache, progress=hashed)
    manifest = read_manifest(path)
    return {
        "name": source.entry.name if isinstance(source, CatalogModel) else summary.name or path.name,
        "pulled": True,
        "path": str(path),
        "file_size": sum(file.stat().st_size for file in files),
        "architecture": summary.architecture,
        "supported": _is_supported(summary.architecture),
        "kernel": cpu_kernel(),
        "quantization": summary.quantization,
        **{key: getattr(summary, key) for key in _FROM_FILE_ONLY if key != "mix"},
        "mix": [asdict(share) for share in summary.mix],
        "license": manifest.license if manifest else summary.license,
        "source": manifest.source if manifest else str(source) if isinstance(source, HubModel) else None,
        "fingerprint": digest,
    }


_FROM_FILE_ONLY = (
    "parameters",
    "tensor_bytes",
    "bits_per_weight",
    "mix",
    "context_length",
    "block_count",
    "embedding_length",
    "head_count",
    "head_count_kv",
    "vocab_size",
    "tokenizer",
    "chat_template",
)


def _is_supported(architecture: str | None) -> bool:
    """Whether this version can run models of the architecture."""

    from infer.runtime.models.registry import ARCHITECTURES

    return architecture in ARCHITECTURES


def _lines(facts: Mapping[str, Any]) -> list[str]:
    """The facts as `label  value` lines; what is unknown is left out."""
    supported = "" if facts["supported"] else " (this version cannot run it)"
    rows: list[tuple[str, str | None]] = [
        ("name", facts["name"]),
        ("architecture", f"{facts['architecture'] or 'not given'}{supported}"),
        ("parameters", _count(facts["parameters"])),
        ("size", human_size(facts["file_size"])),
        ("quantization", facts["quantization"]),
    ]
    if facts["pulled"]:
        rows += [
            ("bits per weight", f"{facts['bits_per_weight']:.2f}"),
            *(("  " + share["type"], _share(share, facts["tensor_bytes"])) for share in facts["mix"]),
            ("context", _unit(facts["context_length"], "tokens")),
            ("layers", _unit(facts["block_count"])),
            ("embedding", _unit(facts["embedding_length"])),
            ("heads", _heads(facts["head_count"], facts["head_count_kv"])),
            ("vocabulary", _unit(facts["vocab_size"], "tokens")),
            ("tokenizer", facts["tokenizer"]),
            ("chat template", _template_line(facts["chat_template"])),
        ]
    rows += [
        ("kernel", facts.get("kernel")),
        ("license", facts["license"] or "not given"),
        ("source", facts["source"]),
        ("path", facts["path"] or f"not on this machine: infer pull {facts['name']}"),
        ("fingerprint", facts["fingerprint"]),
    ]
    return [f"{label:<16} {value}" for label, value in rows if value]


def _count(number: int | None) -> str | None:
    if number is None:
        return None
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return str(number)


def _unit(number: int | None, unit: str = "") -> str | None:
    return None if number is None else f"{number} {unit}".rstrip()


def _share(share: Mapping[str, Any], total: int) -> str:
    percent = 100 * share["nbytes"] / total if total else 0.0
    tensors = "tensor" if share["tensors"] == 1 else "tensors"
    return f"{share['tensors']} {tensors}, {human_size(share['nbytes'])}, {percent:.1f} %"


def _heads(heads: int | None, kv_heads: int | None) -> str | None:
    if heads is None:
        return None
    return str(heads) if kv_heads is None else f"{heads}, {kv_heads} of keys and values"


def _template_line(template: str | None) -> str:
    if template is None:
        return "none"
    lines = template.strip().splitlines() or [""]
    first = lines[0] if len(lines[0]) <= 60 else lines[0][:60] + "…"
    return f"{first}   ({len(template)} characters; --template prints it)"


def _print_template(facts: Mapping[str, Any]) -> None:
    """Sanitized on a terminal, elsewhere byte for byte as the file holds it."""
    template = facts["chat_template"]
    if template is None:
        raise ModelError(f"{facts['name']} has no chat template")
    if render.is_terminal(sys.stdout):
        typer.echo(render.sanitize(template))
    else:
        typer.echo(template.encode("utf-8", "surrogateescape"), nl=False)
