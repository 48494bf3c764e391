"""SentencePiece's model file, written and read here, so that the library never sees a byte it did not write.

A protocol buffer (https://protobuf.dev/programming-guides/encoding/): a message is a run of fields, each a
varint key `number << 3 | wire type`, then a varint (wire type 0), 8 bytes (1), a varint length and as many
bytes (2), or 4 bytes (5). Field numbers, from sentencepiece_model.proto of google/sentencepiece:

    ModelProto      1 pieces (message, repeated) · 2 trainer_spec · 3 normalizer_spec · 5 denormalizer_spec
    SentencePiece   1 piece (text) · 2 score (float32) · 3 type (TokenType; absent: NORMAL)
    TrainerSpec     3 model_type (1 unigram, 2 BPE) · 24 treat_whitespace_as_suffix · 35 byte_fallback ·
                    46 bos_piece · 47 eos_piece
    NormalizerSpec  2 precompiled_charsmap · 3 add_dummy_prefix · 4 remove_extra_whitespaces ·
                    5 escape_whitespaces
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

UNIGRAM, BPE = 1, 2
MAX_PIECES = 1 << 22

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_pack_end = struct.Struct("<BfBB").pack  # a piece after its text: score and type, keys included
_unpack_score = struct.Struct("<f").unpack_from


@dataclass(frozen=True)
class ModelProto:
    """pieces, scores and types (TokenType values) by id. bos_piece and eos_piece: names, there or not."""

    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    model_type: int
    byte_fallback: bool
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    whitespace_as_suffix: bool = False
    denormalizes: bool = False
    bos_piece: str = "<s>"
    eos_piece: str = "</s>"


def serialize(model: ModelProto) -> bytes:
    """The bytes the library loads; all fields but the last five.

    Raises ValueError for a score that is no finite float32 or a type outside 0 to 127.
    """
    texts = [piece.encode() for piece in model.pieces]
    # The same few lengths come again and again: their keys and lengths are put together once.
    heads = {
        size: b"\x0a" + _varint(size + len(_varint(size)) + 8) + b"\x0a" + _varint(size)
        for size in set(map(len, texts))
    }
    try:
        pieces = b"".join(
            [
                heads[len(text)] + text + _pack_end(0x15, score, 0x18, kind)
                for text, score, kind in zip(texts, model.scores, model.types, strict=True)
            ]
        )
    except (struct.error, OverflowError) as error:
        raise ValueError(str(error)) from None
    trainer = _number(3, model.model_type) + _number(35, model.byte_fallback)
    normalizer = (
        _text(2, model.charsmap)
        + _number(3, model.add_dummy_prefix)
        + _number(4, model.remove_extra_whitespaces)
        + _number(5, True)
    )
    return pieces + _text(2, trainer) + _text(3, normalizer)


def parse(data: bytes) -> ModelProto:
    """The model in a `tokenizer.model` file. Raises ValueError where it is not one."""
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    specs: dict[int, dict[int, int | bytes]] = {2: {}, 3: {}, 5: {}}
    position = 0
    while position < len(data):
        position = _plain_pieces(data, position, pieces, scores, types)
        for number, wire, start, end in islice(_fields(data, position, len(data)), 1):
            position = end
            if number == 1 and wire == _BYTES:
                text, score, kind = _piece(data, start, end)
                pieces.append(text)
                scores.append(score)
                types.append(kind)
            elif number in specs and wire == _BYTES:
                specs[number].update(_values(data, start, end))
            elif number in (1, 2, 3, 5):
                raise ValueError(f"field {number} is of wire type {wire}")
        if len(pieces) > MAX_PIECES:
            raise ValueError(f"it has more than {MAX_PIECES} pieces")
    trainer, normalizer = specs[2], specs[3]
    return ModelProto(
        pieces=pieces,
        scores=scores,
        types=types,
        model_type=_int(trainer, 3, UNIGRAM),
        byte_fallback=bool(_int(trainer, 35, 0)),
        charsmap=_bytes(normalizer, 2, b""),
        add_dummy_prefix=bool(_int(normalizer, 3, 1)),
        remove_extra_whitespaces=bool(_int(normalizer, 4, 1)),
        escape_whitespaces=bool(_int(normalizer, 5, 1)),
        whitespace_as_suffix=bool(_int(trainer, 24, 0)),
        denormalizes=bool(_bytes(specs[5], 2, b"")),
        bos_piece=_bytes(trainer, 46, b"<s>").decode(),
        eos_piece=_bytes(trainer, 47, b"</s>").decode(),
    )


def _plain_pieces(
    data: bytes, position: int, pieces: list[str], scores: list[float], types: list[int]
) -> int:
    """Reads pieces laid out as writers lay them out: short text, score, type or none. Where the first other
    field begins. Three times as fast as `_piece` for a quarter of a million of them."""
    last = len(data) - 0x80 - 2  # a short field that begins before this ends within the data
    while position < last and data[position] == 0x0A and len(pieces) <= MAX_PIECES:
        size, text = data[position + 1], position + 4
        end = position + 2 + size
        score = text + data[position + 3]
        if size > 0x7F or data[position + 2] != 0x0A or end - score not in (5, 7) or data[score] != 0x15:
            break
        kind = 1
        if end - score == 7:
            kind = data[score + 6]
            if data[score + 5] != 0x18 or kind > 0x7F:
                break
        pieces.append(data[text:score].decode())
        scores.append(_unpack_score(data, score + 1)[0])
        types.append(kind)
        position = end
    return position


def _piece(data: bytes, start: int, end: int) -> tuple[str, float, int]:
    text, score, kind = b"", 0.0, 1
    for number, wire, first, last in _fields(data, start, end):
        if (number, wire) == (1, _BYTES):
            text = data[first:last]
        elif (number, wire) == (2, _FIXED32):
            score = _unpack_score(data, first)[0]
        elif (number, wire) == (3, _VARINT):
            kind = _read_varint(data, first, last)[0]
        elif number in (1, 2, 3):
            raise ValueError(f"field {number} of a piece is of wire type {wire}")
    return text.decode(), score, kind


def _values(data: bytes, start: int, end: int) -> dict[int, int | bytes]:
    """Integers and byte strings by field number; of several with one number the last."""
    found: dict[int, int | bytes] = {}
    for number, wire, first, last in _fields(data, start, end):
        if wire == _VARINT:
            found[number] = _read_varint(data, first, last)[0]
        elif wire == _BYTES:
            found[number] = data[first:last]
    return found


def _fields(data: bytes, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(field number, wire type, start, end) of each value in data[position:end]."""
    while position < end:
        key, position = _read_varint(data, position, end)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise ValueError(f"a field at byte {position} has the number 0")
        start = position
        if wire == _VARINT:
            position = _read_varint(data, position, end)[1]
        elif wire == _BYTES:
            size, start = _read_varint(data, position, end)
            position = start + size
        elif wire in (_FIXED32, _FIXED64):
            position += 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"a field at byte {position} is of wire type {wire}")
        if position > end:
            raise ValueError(f"a field at byte {start} goes on after the end")
        yield number, wire, start, position


def _read_varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """The number and where it ends; at most ten bytes of seven bits, the lowest first."""
    value = 0
    for shift, byte in zip(range(0, 70, 7), data[position : min(end, position + 10)], strict=False):
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + shift // 7 + 1
    raise ValueError(f"a number at byte {position} has no end")


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(int(value))


def _text(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _int(values: Mapping[int, int | bytes], number: int, default: int) -> int:
    value = values.get(number, default)
    if not isinstance(value, int):
        raise ValueError(f"field {number} is not a number")
    return value


def _bytes(values: Mapping[int, int | bytes], number: int, default: bytes) -> bytes:
    value = values.get(number, default)
    if not isinstance(value, bytes):
        raise ValueError(f"field {number} is not a text")
    return value
