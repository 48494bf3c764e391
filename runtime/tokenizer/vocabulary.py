"""What a GGUF file says about its vocabulary, checked once, whatever the kind of tokenizer.

Keys and token types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md ("tokenizer.ggml.*").
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from infer.runtime.checkpoint.arrays import NumberArray, TextArray
from infer.runtime.errors import TokenizerError
from infer.runtime.tokenizer.token_index import TokenIndex

PREFIX = "tokenizer.ggml."
MAX_TOKENS = 1 << 22

# Names under which vocabularies hold the token that ends a turn or a text; fill-in-the-middle and padding
# tokens end neither.
END_NAMES = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|end|>",
        "<end_of_turn>",
        "<turn|>",
        "</s>",
        "<eos>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|end_of_turn|>",
        "<|eot|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|endofturn|>",
        "<|role_end|>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
        "<|end▁of▁sentence|>",
    }
)

# Ordinary texts hold these too, so they count only where the file types them as control tokens.
_ORDINARY_LOOKING = frozenset({"</s>", "<eos>", "[EOT]", "[EOS]"})

_AGAIN = "convert the model again"

T = TypeVar("T", int, float, str, bool)


class TokenType(enum.IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """tokens[i] is the piece of id i, ids its inverse; types[i] is its TokenType value.

    add_bos/add_eos are None where the file does not say. stop_ids: every id that ends a turn.
    """

    tokens: TextArray
    ids: TokenIndex
    types: Sequence[int]
    bos_id: int | None
    eos_id: int | None
    add_bos: bool | None
    add_eos: bool | None
    stop_ids: frozenset[int]
    warnings: tuple[str, ...]

    def ids_by_type(self) -> dict[int, frozenset[int]]:
        """Ids of the tokens of each type but NORMAL."""
        import numpy as np

        found: dict[int, list[int]] = {}
        for position in np.flatnonzero(np.asarray(self.types) != TokenType.NORMAL).tolist():
            found.setdefault(self.types[position], []).append(position)
        return {kind: frozenset(positions) for kind, positions in found.items()}


def read_vocabulary(metadata: Mapping[str, object]) -> Vocabulary:
    """The vocabulary of a GGUF file's metadata. Raises TokenizerError where it contradicts itself."""
    warnings: list[str] = []
    tokens = _read_tokens(metadata)
    index = TokenIndex(tokens)
    # Nothing matches an empty piece; the names only keep pieces distinct.
    empty = tokens.empty() if index.find(b"") >= 0 else []
    if empty:
        warnings.append(f"{len(empty)} tokens are empty (the first is {empty[0]}); they stay unused")
        names = list(tokens)
        for position in empty:
            names[position] = f"[EMPTY_{position}]"
        tokens = TextArray.of(names)
        index = TokenIndex(tokens)
    _check_distinct(tokens, index)
    types = _read_types(metadata, len(tokens), warnings)
    for position in empty:
        types[position] = TokenType.UNUSED
    bos_id = _read_id(metadata, "bos_token_id", len(tokens))
    eos_id = _read_id(metadata, "eos_token_id", len(tokens))
    stop_ids = {eos_id, *(_read_id(metadata, key, len(tokens)) for key in ("eot_token_id", "eom_token_id"))}
    stop_ids.update(
        _in_range("eos_token_ids", token_id, len(tokens))
        for token_id in read_list(metadata, PREFIX + "eos_token_ids", int) or ()
    )
    stop_ids.update(_end_tokens(index, types))
    stops = frozenset(token_id for token_id in stop_ids if token_id is not None)
    for token_id in sorted(stops if bos_id is None else stops | {bos_id}):
        if types[token_id] not in (TokenType.CONTROL, TokenType.UNKNOWN):
            types[token_id] = TokenType.CONTROL
            warnings.append(
                f"token {token_id} {_shown(tokens[token_id])} begins or ends texts: it is used as a control"
                " token though the file does not type it as one"
            )
    return Vocabulary(
        tokens=tokens,
        ids=index,
        types=types,
        bos_id=bos_id,
        eos_id=eos_id,
        add_bos=read_scalar(metadata, PREFIX + "add_bos_token", bool),
        add_eos=read_scalar(metadata, PREFIX + "add_eos_token", bool),
        stop_ids=stops,
        warnings=tuple(warnings),
    )


def read_scalar(metadata: Mapping[str, object], key: str, kind: type[T]) -> T | None:
    """The value of `key`, None where the file has none. Raises TokenizerError for another type."""
    value = metadata.get(key)
    if value is None:
        return None
    if type(value) is not kind:
        raise TokenizerError(f"{key} is of type {type(value).__name__}, not {kind.__name__}; {_AGAIN}")
    return value


def read_list(metadata: Mapping[str, object], key: str, kind: type[T]) -> Sequence[T] | None:
    """The values of the array `key`, None where the file has none. Raises TokenizerError for other types."""
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple | NumberArray | TextArray):
        raise TokenizerError(f"{key} is of type {type(value).__name__}, not an array; {_AGAIN}")
    values: Any = value
    found = {value.kind} if isinstance(value, NumberArray) and len(value) else set(map(type, values))
    if others := found - {kind}:
        name = min(other.__name__ for other in others)
        raise TokenizerError(f"{key} holds values of type {name}, not {kind.__name__}; {_AGAIN}")
    return values if isinstance(value, NumberArray) else list(values)


def numbers(values: Sequence[T]) -> Iterable[T]:
    """Values as the constructor of an array takes them best: it copies another array many times faster."""
    return values.values if isinstance(values, NumberArray) else values


def read_texts(metadata: Mapping[str, object], key: str) -> TextArray | None:
    """`read_list` of texts, which all are UTF-8."""
    value = metadata.get(key)
    if not isinstance(value, TextArray):
        texts = read_list(metadata, key, str)
        if texts is None:
            return None
        try:
            return TextArray.of(texts)
        except UnicodeEncodeError:
            pass
    elif value.is_utf8:
        return value
    raise TokenizerError(f"{key} holds text that is not UTF-8; {_AGAIN}")


def _read_tokens(metadata: Mapping[str, object]) -> TextArray:
    key = PREFIX + "tokens"
    tokens = read_texts(metadata, key)
    if not tokens:
        raise TokenizerError(f"{key} is missing or empty: the file holds no vocabulary; use another file")
    if len(tokens) > MAX_TOKENS:
        raise TokenizerError(
            f"{key} holds {len(tokens)} tokens, more than the {MAX_TOKENS} this version reads"
        )
    return tokens


def _check_distinct(tokens: TextArray, index: TokenIndex) -> None:
    crowded = index.crowded
    twice = _repeated(tokens) if crowded else index.repeated()
    if twice is not None:
        raise TokenizerError(f"{PREFIX}tokens: {_shown(twice)} is there twice; {_AGAIN}")
    if crowded:
        raise TokenizerError(
            f"{PREFIX}tokens: the tokens are chosen so that looking one up takes long; use another file"
        )


def _repeated(tokens: TextArray) -> str | None:
    seen: set[str] = set()
    for token in tokens:
        if token in seen:
            return token
        seen.add(token)
    return None


def _read_types(metadata: Mapping[str, object], size: int, warnings: list[str]) -> array[int]:
    key = PREFIX + "token_type"
    types = read_list(metadata, key, int)
    if types is None:
        warnings.append(f"{key} is missing: only the tokens that begin or end texts count as control tokens")
        types = [int(TokenType.NORMAL)] * size
    if len(types) != size:
        raise TokenizerError(f"{key} has {len(types)} entries for {size} tokens; {_AGAIN}")
    try:
        return array("i", numbers(types))
    except OverflowError:
        raise TokenizerError(f"{key} holds numbers that are no type of token; {_AGAIN}") from None


def _read_id(metadata: Mapping[str, object], name: str, size: int) -> int | None:
    token_id = read_scalar(metadata, PREFIX + name, int)
    # Converters write -1, or its 32-bit form, for "none".
    if token_id is None or token_id in (-1, 0xFFFFFFFF):
        return None
    return _in_range(name, token_id, size)


def _in_range(name: str, token_id: int, size: int) -> int:
    if not 0 <= token_id < size:
        raise TokenizerError(
            f"{PREFIX}{name} is {token_id}, outside the vocabulary of {size} tokens; {_AGAIN}"
        )
    return token_id


def _end_tokens(index: Mapping[str, int], types: Sequence[int]) -> set[int]:
    found = set()
    for name in END_NAMES & index.keys():
        token_id = index[name]
        typed = types[token_id] == TokenType.CONTROL
        if typed or (types[token_id] != TokenType.UNUSED and name not in _ORDINARY_LOOKING):
            found.add(token_id)
    # In a vocabulary with <|return|> and <|call|>, <|end|> closes one message of several in the same turn.
    if {"<|return|>", "<|call|>"} <= index.keys():
        found.discard(index.get("<|end|>", -1))
    return found


def _shown(token: str) -> str:
    return repr(token if len(token) <= 40 else token[:40] + "…")
