"""What the tokenizer files of a checkpoint folder say about its vocabulary, checked once, as a Vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infer.runtime.checkpoint.metadata import get_int, get_str
from infer.runtime.checkpoint.printable import shown
from infer.runtime.errors import TokenizerError
from infer.runtime.tokenizer.vocabulary import MAX_TOKENS, PREFIX, TokenType

logger = logging.getLogger(__name__)

FOLDER = "tokenizer.huggingface."
_MAX_CONTENT = 1024  # characters of an added token


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched in the text, not merged. single_word: only where no letter touches it. lstrip, rstrip:
    blanks before, after it are its own. normalized: it is looked for in the normalized text. special: a control
    token."""

    id: int
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool

    @classmethod
    def control(cls, token_id: int, content: str) -> AddedToken:
        """A control token without further wishes."""
        return cls(token_id, content, False, False, False, False, True)


class FolderFiles:
    """The tokenizer's files of a folder, from metadata: `tokenizer.huggingface.*`."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.json = self._object("json")
        self._config = self._object("config")
        architecture = get_str(metadata, "general.architecture")
        self._rows = get_int(metadata, f"{architecture}.vocab_size")

    @property
    def model(self) -> Path:
        """Of a tokenizer.model."""
        return Path(get_str(self._metadata, FOLDER + "model"))

    def tell_own_code(self, place: int, used: str) -> None:
        """One warning where tokenizer_config.json names a class of the repository's own for what `used`, a file, stands
        for. place: in auto_map's pair of classes, 0 of the one that reads tokenizer.model, 1 of tokenizer.json."""
        code = self._config.get("auto_map")
        named = code.get("AutoTokenizer") if isinstance(code, dict) else code
        pair = named if isinstance(named, list) else [named]
        if len(pair) > place and isinstance(name := pair[place], str):
            logger.warning(
                "tokenizer_config.json names code of the repository's own, %s, which is never run; used is %s alone",
                shown(name),
                used,
            )

    def added_tokens(self) -> dict[int, AddedToken]:
        """By id: those of tokenizer.json, then of tokenizer_config.json, then of added_tokens.json. Raises
        TokenizerError for tokens that contradict each other or are none."""
        found: dict[int, AddedToken] = {}
        listed = self.json.get("added_tokens", [])
        if not isinstance(listed, list):
            raise TokenizerError("tokenizer.json: added_tokens is no list; download it again")
        for entry in listed:
            _add(found, entry.get("id") if isinstance(entry, dict) else None, entry, "tokenizer.json")
        decoder = self._config.get("added_tokens_decoder", {})
        if not isinstance(decoder, dict):
            raise TokenizerError(
                "tokenizer_config.json: added_tokens_decoder is no object; download it again"
            )
        for number, entry in decoder.items():
            _add(found, int(number) if number.isdecimal() else None, entry, "tokenizer_config.json")
        names = {token.content for token in found.values()}
        for content, number in self._object("added").items():
            if content not in names:
                _add(found, number, {"content": content}, "added_tokens.json")
        ends = [self._text("bos_token"), self._text("eos_token")]
        beyond = [token for token in found.values() if token.id >= self._rows]
        # Gemma's text models have the tokens of images, without a row in the embedding.
        if beyond and all(token.special and token.content not in ends for token in beyond):
            logger.warning("the model has no embedding for %s: such tokens cannot be used", beyond[0].content)
            return {token_id: token for token_id, token in found.items() if token_id < self._rows}
        return found

    def keys(
        self,
        pieces: Mapping[str, int],
        added: Mapping[int, AddedToken],
        *,
        types: Mapping[int, int] | None = None,
        template: tuple[list[int], list[int]] | None = None,
    ) -> dict[str, object]:
        """The vocabulary as `tokenizer.ggml.*` keys, one token for each row of the model's embedding.

        pieces: of the model, to their ids. types: of those that are not normal. template: what the tokenizer itself
        puts before and after a text, None where it leaves that to tokenizer_config.json. Raises TokenizerError where
        the tokens do not fit the embedding or one another.
        """
        size = max([*pieces.values(), *added], default=-1) + 1
        if size > self._rows:
            raise TokenizerError(
                f"the tokenizer has {size} tokens, the model's embedding {self._rows} rows: they are not of one model"
            )
        tokens = [f"[PAD{token_id}]" for token_id in range(self._rows)]
        kinds: list[int] = [TokenType.UNUSED] * self._rows
        for piece, token_id in pieces.items():
            tokens[token_id], kinds[token_id] = piece, TokenType.NORMAL
        for token_id, kind in (types or {}).items():
            kinds[token_id] = kind
        for token_id, token in added.items():
            if pieces.get(token.content, token_id) != token_id:
                raise TokenizerError(
                    f"the added token {shown(token.content)} is id {token_id}, in the model {pieces[token.content]}"
                )
            tokens[token_id] = token.content
            kinds[token_id] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
        before, after = template or ([], [])
        ids = {token: token_id for token_id, token in enumerate(tokens)}
        ends = self._ends()
        begin = self._metadata.get(FOLDER + "bos_token_id") if not self._config else None
        bos = [*before, self._named("bos_token", ids), begin]
        eos = [self._named("eos_token", ids), *after, *ends]
        found: dict[str, object] = {
            "tokens": tokens,
            "token_type": list(map(int, kinds)),
            "bos_token_id": next((token_id for token_id in bos if token_id is not None), None),
            "eos_token_id": next((token_id for token_id in eos if token_id is not None), None),
            "eos_token_ids": ends,
            "add_bos_token": self._flag("add_bos_token", None if template is None else bool(before)),
            "add_eos_token": self._flag("add_eos_token", None if template is None else bool(after)),
        }
        return {PREFIX + key: value for key, value in found.items() if value is not None}

    def _ends(self) -> list[int]:
        """Ids that end an answer, of those that config.json and generation_config.json name."""
        given = self._metadata.get(FOLDER + "eos_token_ids")
        listed = given if isinstance(given, list) else []
        strays = [end for end in listed if not 0 <= end < self._rows]
        if strays:
            logger.warning(
                "eos_token_id %s is outside the vocabulary of %s tokens: not used", strays[0], self._rows
            )
        return [end for end in listed if end not in strays]

    def _named(self, key: str, ids: Mapping[str, int]) -> int | None:
        """The id of a token that tokenizer_config.json names, as a text or an object with its content."""
        value = self._text(key)
        return None if value is None else ids.get(value)

    def _text(self, key: str) -> str | None:
        value = self._config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None

    def _flag(self, key: str, default: bool | None) -> bool | None:
        value = self._config.get(key)
        return value if isinstance(value, bool) else default

    def _object(self, name: str) -> dict[str, object]:
        value = self._metadata.get(FOLDER + name, {})
        return value if isinstance(value, dict) else {}


def _add(found: dict[int, AddedToken], number: object, entry: object, where: str) -> None:
    if type(number) is not int or not 0 <= number < MAX_TOKENS or not isinstance(entry, dict):
        raise TokenizerError(
            f"{where}: an added token has no id from 0 to {MAX_TOKENS - 1}; download it again"
        )
    content = entry.get("content")
    if not isinstance(content, str) or not 0 < len(content) <= _MAX_CONTENT:
        raise TokenizerError(f"{where}: added token {number} is no text of 1 to {_MAX_CONTENT} characters")
    flags = {name: entry.get(name, False) for name in ("single_word", "lstrip", "rstrip", "special")}
    normalized = entry.get("normalized", not flags["special"])
    if not all(isinstance(flag, bool) for flag in (*flags.values(), normalized)):
        raise TokenizerError(
            f"{where}: added token {shown(content)} has a flag that is neither true nor false"
        )
    if number in found:
        if found[number].content != content:
            raise TokenizerError(
                f"{where}: added token {number} is {shown(content)} here and {shown(found[number].content)} elsewhere"
            )
        return
    found[number] = AddedToken(number, content, normalized=normalized, **flags)
