"""One entry on disk: a header of 160 bytes, then the payload to the end of the file. Integers are little-endian.

    offset  size
         0     8   magic 89 'I' 'K' 'V' 0D 0A 1A 0A
         8     4   format version
        12     4   header length, 160
        16    32   key: SHA-256 chain over the ids up to the end of this block
        48    32   key of the block to the left, or the root key of the model
        80    32   fingerprint of everything that decides a KV value
       112     4   tokens in this block, 1 … 64
       116     4   tokens in a full block, 64
       120     8   payload length in bytes: tokens × bytes per token
       128    16   checksum of the payload
       144    16   first half of SHA-256 over bytes 0 … 143
       160         payload: K and V as they lie in memory

Every version keeps magic, version and header length where they are and ends its header with that hash, so that an
entry of a version to come is told from a damaged one, and left alone.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass

MAGIC = b"\x89IKV\r\n\x1a\n"
VERSION = 1
HEADER_BYTES = 160
BLOCK_TOKENS = 64
VERSION_FOLDER = f"kv-v{VERSION}"
TEMPORARY_PREFIX = "tmp-"
MODEL_FOLDER = re.compile(r"[0-9a-f]{32}")

_FIELDS = struct.Struct("<8sII32s32s32sIIQ16s")
_FRAME = struct.Struct("<8sII")
_HASH_BYTES = 16
_ENTRY_NAME = re.compile(r"([0-9a-f]{32})-([1-9][0-9]?)-([0-9a-f]{64})\.kv")


@dataclass(frozen=True)
class Header:
    """key, parent, fingerprint: 32 bytes each. checksum: of the payload, 16 bytes."""

    key: bytes
    parent: bytes
    fingerprint: bytes
    tokens: int
    payload_bytes: int
    checksum: bytes

    def encode(self) -> bytes:
        """HEADER_BYTES bytes."""
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            HEADER_BYTES,
            self.key,
            self.parent,
            self.fingerprint,
            self.tokens,
            BLOCK_TOKENS,
            self.payload_bytes,
            self.checksum,
        )
        return fields + hashlib.sha256(fields).digest()[:_HASH_BYTES]


def parse_header(data: bytes) -> Header | None:
    """The header, or None when any of its bits is not as `encode` would write it."""
    if len(data) != HEADER_BYTES:
        return None
    fields = _FIELDS.unpack_from(data)
    header = Header(fields[3], fields[4], fields[5], fields[6], fields[8], fields[9])
    return header if header.encode() == data else None


def is_foreign(data: bytes) -> bool:
    """Whether the first bytes of a file are an intact header of another format version.

    data: at least the header, if the file is that long; 4,096 bytes are enough for any version.
    """
    if len(data) < _FRAME.size:
        return False
    magic, version, length = _FRAME.unpack_from(data)
    if magic != MAGIC or version == VERSION or not _FRAME.size + _HASH_BYTES <= length <= len(data):
        return False
    body = length - _HASH_BYTES
    return hashlib.sha256(data[:body]).digest()[:_HASH_BYTES] == data[body:length]


def model_folder(fingerprint: bytes) -> str:
    return fingerprint[:16].hex()


def short_key(key: bytes) -> str:
    """How names refer to a parent: the first 16 bytes in hex."""
    return key[:16].hex()


def entry_name(parent: bytes, tokens: int, key: bytes) -> str:
    """Name of an entry in its model's folder."""
    return f"{short_key(parent)}-{tokens}-{key.hex()}.kv"


def parse_entry_name(name: str) -> tuple[str, int, str] | None:
    """(short key of the parent, tokens, key in hex), or None when no entry is called that."""
    match = _ENTRY_NAME.fullmatch(name)
    if match is None or int(match[2]) > BLOCK_TOKENS:
        return None
    return match[1], int(match[2]), match[3]
