"""The tokenizer of a model file, by `tokenizer.ggml.model`, and of a `tokenizer.model` file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from infer.runtime.errors import TokenizerError
from infer.runtime.tokenizer.base import Tokenizer
from infer.runtime.tokenizer.folder_vocabulary import FOLDER, FolderFiles
from infer.runtime.tokenizer.vocabulary import PREFIX, Vocabulary, read_scalar, read_vocabulary

if TYPE_CHECKING:
    from infer.runtime.tokenizer.chat_template import ChatTemplate

Loader = Callable[[Mapping[str, object], Vocabulary, "str | None"], Tokenizer]


def _bpe(metadata: Mapping[str, object], vocabulary: Vocabulary, pre: str | None) -> Tokenizer:
    from infer.runtime.tokenizer.bpe import load_bpe

    return load_bpe(metadata, vocabulary, pre)


def _sentencepiece_bpe(metadata: Mapping[str, object], vocabulary: Vocabulary, pre: str | None) -> Tokenizer:
    from infer.runtime.tokenizer.model_proto import BPE

    return _sentencepiece(metadata, vocabulary, pre, BPE)


def _unigram(metadata: Mapping[str, object], vocabulary: Vocabulary, pre: str | None) -> Tokenizer:
    from infer.runtime.tokenizer.model_proto import UNIGRAM

    return _sentencepiece(metadata, vocabulary, pre, UNIGRAM)


def _sentencepiece(
    metadata: Mapping[str, object], vocabulary: Vocabulary, pre: str | None, model_type: int
) -> Tokenizer:
    from infer.runtime.tokenizer.sentencepiece import load_sentencepiece

    tokenizer = load_sentencepiece(metadata, vocabulary, model_type)
    if pre is not None:
        tokenizer.warnings += (
            f"--pre {pre[:60]} changes nothing: a SentencePiece vocabulary has no pre-tokenizer",
        )
    return tokenizer


_LOADERS: Mapping[str, Loader] = {"gpt2": _bpe, "llama": _sentencepiece_bpe, "t5": _unigram}


def _json(metadata: Mapping[str, object], pre: str | None) -> Tokenizer:
    from infer.runtime.tokenizer.tokenizer_json import load_tokenizer_json

    tokenizer: Tokenizer = load_tokenizer_json(FolderFiles(metadata))
    if pre is not None:
        tokenizer.warnings += (
            f"--pre {pre[:60]} changes nothing: tokenizer.json has a pre-tokenizer of its own",
        )
    return tokenizer


def _model(metadata: Mapping[str, object], pre: str | None) -> Tokenizer:
    from infer.runtime.tokenizer.tokenizer_model import read_folder_model

    return load_tokenizer(read_folder_model(FolderFiles(metadata)), pre=pre)


# Kinds that a folder's files give.
_FILES: Mapping[str | None, Callable[[Mapping[str, object], str | None], Tokenizer]] = {
    "tokenizer.json": _json, "tokenizer.model": _model,
}  # fmt: skip


def load_tokenizer(metadata: Mapping[str, object], *, pre: str | None = None) -> Tokenizer:
    """The tokenizer that the metadata of a GGUF file or a folder describes.

    pre: a pre-tokenizer name in place of the file's (`--pre`). Raises TokenizerError where the kind is not
    supported, the vocabulary contradicts itself, or the pre-tokenizer is unknown.
    """
    kind = read_scalar(metadata, PREFIX + "model", str)
    if kind in _FILES:
        return _FILES[kind](metadata, pre)
    if kind is None and FOLDER + "config" in metadata:
        raise TokenizerError(
            "the folder holds neither tokenizer.json nor tokenizer.model; download one into it"
        )
    if kind is None:
        raise TokenizerError(f"{PREFIX}model is missing: the file holds no tokenizer; use another file")
    loader = _LOADERS.get(kind)
    if loader is None:
        raise TokenizerError(
            f"tokenizer kind {kind[:60]!r} is not supported by this version, which reads: "
            + ", ".join(_LOADERS)
        )
    return loader(metadata, read_vocabulary(metadata), pre)


def load_tokenizer_model(path: Path) -> Tokenizer:
    """The tokenizer in a `tokenizer.model` file: `load_tokenizer` of `read_tokenizer_model`.

    Raises TokenizerError where it is not one, and CheckpointError or ModelNotFoundError where it cannot be read.
    """
    from infer.runtime.checkpoint.printable import shown_path
    from infer.runtime.tokenizer.tokenizer_model import read_tokenizer_model

    metadata = read_tokenizer_model(path)
    try:
        return load_tokenizer(metadata)
    except TokenizerError as error:
        raise TokenizerError(f"{shown_path(path)}: {error}") from error


def load_chat_template(
    metadata: Mapping[str, object], tokenizer: Tokenizer, override: str | None = None
) -> ChatTemplate | None:
    """The template of the file, or the one asked for, ready to render; None where there is none.

    override: a built-in name or the path of a Jinja file. Raises UsageError or ChatTemplateError.
    """
    from infer.runtime.tokenizer.builtin_templates import resolve_template
    from infer.runtime.tokenizer.chat_template import ChatTemplate, control_pieces

    found = resolve_template(metadata, override)
    if found is None:
        return None
    bos, eos = (
        "" if token is None else tokenizer.piece(token) for token in (tokenizer.bos_id, tokenizer.eos_id)
    )
    control = control_pieces(tokenizer)
    return ChatTemplate(found.source, bos_token=bos, eos_token=eos, control_tokens=control, name=found.name)
