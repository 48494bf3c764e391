"""`tokenizer.model` files as metadata in GGUF's words, so that one path leads from there to a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from infer.runtime.checkpoint.files import ModelFile
from infer.runtime.checkpoint.printable import shown_path
from infer.runtime.errors import TokenizerError
from infer.runtime.tokenizer.folder_vocabulary import FolderFiles
from infer.runtime.tokenizer.model_proto import BPE, UNIGRAM, ModelProto, parse
from infer.runtime.tokenizer.vocabulary import PREFIX, TokenType

MAX_FILE = 1 << 28  # bytes; a vocabulary of 262,144 pieces has 5 million

_KINDS: Mapping[int, str] = {BPE: "llama", UNIGRAM: "t5"}


def read_tokenizer_model(path: Path) -> dict[str, object]:
    """The `tokenizer.ggml.*` keys that a converter would write for this file, without BOS and EOS flags.

    Raises TokenizerError where the file is damaged or asks for what is not supported, and CheckpointError or
    ModelNotFoundError where it cannot be read.
    """
    file = ModelFile(path)
    try:
        if file.size > MAX_FILE:
            raise TokenizerError(
                f"{shown_path(path)}: has {file.size} bytes; {MAX_FILE} is the most that is read"
            )
        data = file.read(0, file.size)
    finally:
        file.close()
    try:
        model = parse(data)
    except ValueError as error:
        raise TokenizerError(
            f"{shown_path(path)}: is no SentencePiece model, or a damaged one: {error}; fetch it again"
        ) from error
    if reason := _unsupported(model):
        raise TokenizerError(
            f"{shown_path(path)}: {reason}, which this version does not support; use another model"
        )
    found: dict[str, object] = {
        "model": _KINDS[model.model_type],
        "tokens": list(model.pieces),
        "scores": list(model.scores),
        "token_type": list(model.types),
        "add_space_prefix": model.add_dummy_prefix,
        "remove_extra_whitespaces": model.remove_extra_whitespaces,
    }
    ends = {"bos_token_id": model.bos_piece, "eos_token_id": model.eos_piece}
    for token_id, (piece, kind) in enumerate(zip(model.pieces, model.types, strict=True)):
        if kind == TokenType.UNKNOWN:
            found.setdefault("unknown_token_id", token_id)
        elif kind == TokenType.CONTROL:
            found.update({key: token_id for key, name in ends.items() if name == piece})
    if model.charsmap:
        found["precompiled_charsmap"] = model.charsmap
    return {PREFIX + key: value for key, value in found.items()}


def read_folder_model(files: FolderFiles) -> dict[str, object]:
    """The keys for a folder's tokenizer.model together with the tokens that other files add. Raises TokenizerError."""
    files.tell_own_code(0, "tokenizer.model")
    found = read_tokenizer_model(files.model)
    tokens, scores, types = (
        cast(list[Any], found[PREFIX + key]) for key in ("tokens", "scores", "token_type")
    )
    keys = files.keys(
        {token: token_id for token_id, token in enumerate(tokens)},
        files.added_tokens(),
        types=dict(enumerate(types)),
    )
    more = len(cast(list[str], keys[PREFIX + "tokens"])) - len(tokens)
    return {**found, **keys, PREFIX + "scores": [*scores, *[0.0] * more]}


def _unsupported(model: ModelProto) -> str | None:
    if model.model_type not in _KINDS:
        return f"its model is of type {model.model_type}, neither unigram (1) nor BPE (2)"
    if model.whitespace_as_suffix:
        return "its words end, not begin, with a space"
    if not model.escape_whitespaces:
        return "its pieces hold spaces as they are"
    if model.denormalizes:
        return "it rewrites the text that it decodes"
    return None
