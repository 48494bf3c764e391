"""The models in a `tokenizer.json`, BPE and unigram, as the `tokenizers` library needs them: text never becomes a piece
that is silent."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from infer.runtime.checkpoint.printable import shown
from infer.runtime.errors import TokenizerError
from infer.runtime.tokenizer.vocabulary import MAX_TOKENS

if TYPE_CHECKING:
    import tokenizers

WHERE = "tokenizer.json"
_MAX_SCORE = 1e30  # magnitude; those in use are logarithms of probabilities
_UNIGRAM = {"type", "vocab", "unk_id", "byte_fallback"}


def read_pieces(model: object) -> dict[str, int]:
    """The model's pieces and their ids. Raises TokenizerError for a model of another type or without a vocabulary."""
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    if not isinstance(model, dict) or kind not in ("BPE", "Unigram"):
        raise TokenizerError(
            f"{WHERE}: its model is of type {shown(str(kind))}; this version reads BPE and Unigram"
        )
    return _unigram_pieces(model) if kind == "Unigram" else _bpe_pieces(model)


def build_model(model: object, pieces: Mapping[str, int], silent: set[int]) -> tokenizers.models.Model:
    """pieces: of read_pieces. silent: ids that no text becomes; their pieces get names that nothing leads to, and so do
    ids without a piece: the library numbers added tokens from the size of the vocabulary on. Raises TokenizerError."""
    if not isinstance(model, dict):
        raise TypeError("not a model of read_pieces")
    chance = secrets.token_hex(8)  # a text may hold any name that it can know
    build = _unigram if model.get("type") == "Unigram" else _bpe
    return build(model, pieces, silent, lambda token_id: f"\0unused {token_id} {chance}\0")


def _unigram_pieces(model: Mapping[str, object]) -> dict[str, int]:
    vocab = model.get("vocab")
    if not isinstance(vocab, list) or not 0 < len(vocab) <= MAX_TOKENS:
        raise TokenizerError(
            f"{WHERE}: its model has no vocabulary of 1 to {MAX_TOKENS} pieces; download it again"
        )
    pieces: dict[str, int] = {}
    for token_id, entry in enumerate(vocab):
        piece, score = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if not (isinstance(piece, str) and isinstance(score, int | float) and abs(score) < _MAX_SCORE):
            raise TokenizerError(f"{WHERE}: entry {token_id} of its vocabulary is no piece with a score")
        if pieces.setdefault(piece, token_id) != token_id:
            raise TokenizerError(f"{WHERE}: its vocabulary holds the piece {shown(piece)} twice")
    return pieces


def _unigram(
    model: Mapping[str, object], pieces: Mapping[str, int], silent: set[int], name: Callable[[int], str]
) -> tokenizers.models.Model:
    from tokenizers import models

    unknown = model.get("unk_id")
    if type(unknown) is not int or not 0 <= unknown < len(pieces):
        raise TokenizerError(f"{WHERE}: unk_id is {shown(str(unknown))}, no id of its {len(pieces)} pieces")
    if odd := {key for key, value in model.items() if value} - _UNIGRAM:
        raise TokenizerError(
            f"{WHERE}: its model has a {shown(min(odd))}, which this version does not support"
        )
    scores: list[tuple[str, float]] = model["vocab"]  # type: ignore[assignment]
    vocab = [
        (name(token_id) if token_id in silent else piece, float(score))
        for token_id, (piece, score) in enumerate(scores)
    ]
    with the_library("no model comes of its vocabulary"):
        return models.Unigram(vocab, unk_id=unknown, byte_fallback=bool(model.get("byte_fallback")))


def _bpe_pieces(model: Mapping[str, object]) -> dict[str, int]:
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not vocab:
        raise TokenizerError(f"{WHERE}: its model has no vocabulary; download it again")
    if not all(type(token_id) is int and 0 <= token_id < MAX_TOKENS for token_id in vocab.values()):
        raise TokenizerError(f"{WHERE}: its vocabulary holds ids that are not from 0 to {MAX_TOKENS - 1}")
    if len(set(vocab.values())) != len(vocab):
        raise TokenizerError(f"{WHERE}: its vocabulary gives one id to two tokens; download it again")
    return vocab


def _bpe(
    model: Mapping[str, object], pieces: Mapping[str, int], silent: set[int], name: Callable[[int], str]
) -> tokenizers.models.Model:
    from tokenizers import models

    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise TokenizerError(f"{WHERE}: its model has a {key}, which this version does not support")
    muted = {piece for piece, token_id in pieces.items() if token_id in silent}
    vocab = {piece: token_id for piece, token_id in pieces.items() if piece not in muted}
    size = max(pieces.values()) + 1
    for token_id in set(range(size)) - set(vocab.values()):
        vocab[name(token_id)] = token_id
    merges = list(_merges(model.get("merges")))
    if muted:
        merges = [pair for pair in merges if muted.isdisjoint((*pair, "".join(pair)))]
    unknown = model.get("unk_token")
    if isinstance(unknown, str) and unknown in muted:
        unknown = name(pieces[unknown])
    with the_library("its merges do not fit its vocabulary"):
        return models.BPE(
            vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=bool(model.get("fuse_unk")),
            byte_fallback=bool(model.get("byte_fallback")), ignore_merges=bool(model.get("ignore_merges")),
        )  # fmt: skip


def _merges(given: object) -> Iterator[tuple[str, str]]:
    """Pairs, or texts with a space between."""
    if not isinstance(given, list):
        raise TokenizerError(f"{WHERE}: its model has no merges; download it again")
    for merge in given:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(piece, str) for piece in pair):
            raise TokenizerError(
                f"{WHERE}: the merge {shown(str(merge))} is not two tokens; download it again"
            )
        yield pair[0], pair[1]


@contextmanager
def the_library(refusal: str) -> Iterator[None]:
    """Raises TokenizerError for whatever fails in the block, the library's panics included, which are no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{WHERE}: {refusal}: {' '.join(str(error).split())[:200]}") from None
