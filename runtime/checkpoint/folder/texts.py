"""The folder's files beside weights and config.json, as metadata: tokenizer, chat template, generation settings.

The tokenizer's own files are passed on as they are (`tokenizer.huggingface.*`); runtime/tokenizer makes sense of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infer.runtime.checkpoint.folder.config import ConfigReader
from infer.runtime.checkpoint.json_file import read_bytes, read_object
from infer.runtime.checkpoint.printable import shown_path
from infer.runtime.errors import CheckpointError

_MAX_TOKENIZER = 1 << 27  # bytes; a vocabulary of 262,144 tokens has 33 million
_MAX_TEXT = 1 << 24
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATE = "tokenizer.chat_template"
#: generation_config.json → general.sampling.*
_SAMPLING = {
    "temperature": "temp", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat",
}  # fmt: skip


@dataclass
class Texts:
    """metadata under full names, and the files that it comes from."""

    metadata: dict[str, object] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)


def read_texts(folder: Path, names: Collection[str], config: Mapping[str, object]) -> Texts:
    """config: what config.json holds. Raises CheckpointError."""
    texts = Texts()

    def path_of(name: str) -> Path | None:
        if name not in names:
            return None
        texts.files.append(folder / name)
        return folder / name

    def objects(name: str) -> dict[str, object]:
        path = path_of(name)
        return {} if path is None else read_object(path, _MAX_TEXT)

    metadata = texts.metadata
    settings = objects(_TOKENIZER_CONFIG)
    if path := path_of("tokenizer.json"):
        metadata["tokenizer.ggml.model"] = "tokenizer.json"
        metadata["tokenizer.huggingface.json"] = read_object(path, _MAX_TOKENIZER)
    elif path := path_of("tokenizer.model"):
        metadata["tokenizer.ggml.model"] = "tokenizer.model"
        metadata["tokenizer.huggingface.model"] = str(path)
        metadata["tokenizer.huggingface.added"] = objects("added_tokens.json")
    metadata["tokenizer.huggingface.config"] = {**objects("special_tokens_map.json"), **settings}
    generation = objects("generation_config.json")
    _add_templates(texts, path_of("chat_template.jinja"), objects("chat_template.json") or settings)
    _add_sampling(texts, ConfigReader(generation, shown_path(folder / "generation_config.json")))
    _add_ends(texts, folder, config, generation)
    return texts


def _add_templates(texts: Texts, path: Path | None, settings: Mapping[str, object]) -> None:
    """A file of its own comes before the settings, where one text or a list of named ones stands."""
    found = settings.get("chat_template")
    if path is not None:
        try:
            found = read_bytes(path, _MAX_TEXT).decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{shown_path(path)}: is not UTF-8 text; download it again") from None
    if isinstance(found, list):
        for entry in found:
            if isinstance(entry, dict) and isinstance(name := entry.get("name"), str):
                texts.metadata[_TEMPLATE if name == "default" else f"{_TEMPLATE}.{name}"] = entry.get(
                    "template"
                )
    elif found is not None:
        texts.metadata[_TEMPLATE] = found


def _add_sampling(texts: Texts, generation: ConfigReader) -> None:
    for key, name in _SAMPLING.items():
        if key in generation:
            texts.metadata[f"general.sampling.{name}"] = generation.number(key, low=-1.0)
    if "top_k" in generation:
        texts.metadata["general.sampling.top_k"] = generation.integer("top_k", low=0)
    if "do_sample" in generation and not generation.flag("do_sample", True):
        texts.metadata["general.sampling.temp"] = 0.0


def _add_ends(
    texts: Texts, folder: Path, config: Mapping[str, object], generation: Mapping[str, object]
) -> None:
    """Ids that begin and end texts; generation_config.json comes first, and may name several ends."""
    begin, ends = generation.get("bos_token_id"), generation.get("eos_token_id")
    begin = config.get("bos_token_id") if begin is None else begin
    ends = config.get("eos_token_id") if ends is None else ends
    if type(begin) is int:
        texts.metadata["tokenizer.huggingface.bos_token_id"] = begin
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(end) is int for end in listed):
        raise CheckpointError(f"{shown_path(folder)}: eos_token_id is no integer or list of integers")
    texts.metadata["tokenizer.huggingface.eos_token_ids"] = listed
