"""Tiny random models in GGUF, written with the `gguf` package: shaped like real ones, small enough for tests.

Weights are scaled so that attention, MLP and logits all have a spread of order one: a greedy answer wanders
over the vocabulary instead of repeating one token. The vocabulary is a byte-level BPE learned from `CORPUS`.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from random_blocks import block_size, random_blocks

CORPUS = (
    "The quick brown fox jumps over the lazy dog. A language model reads the text from left to right "
    "and gives each next token a probability. When the weather is good, the people of the town walk "
    "along the river, talk about the harvest and the price of bread, and come home before the night. "
    "There are seven days in the week; the first one starts with a long list of things to do. She said "
    "that nothing was wrong with the machine, but the numbers it printed were not the numbers they had "
    "expected.\n"
    "\n"
    "def main(argument):\n"
    "    return argument + 1\n"
    "for index in range(10):\n"
    "    print(index, main(index))\n"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = "<|tool|>"
NORMAL_TYPE, CONTROL_TYPE, USER_DEFINED_TYPE, UNUSED_TYPE = 1, 3, 4, 5


@dataclass(frozen=True)
class TinyOptions:
    """What `write_tiny` can be told.

    quant: type of every matrix; `types` maps name patterns ("output.weight", "*.attn_v.weight") to others.
    embd and ff default to the smallest sizes that fit the types: 64 and 128, with super blocks 256 and 512.
    rope_scaling: {"type": "linear", "factor": 4.0, …}, written as {arch}.rope.scaling.*.
    metadata: key → value (int is written as uint32 or int32, float as float32), (value, GGUFValueType), or
    None to leave a key out. drop: name patterns of tensors to leave out. add: further tensors by name, an
    array written as float32 or (array, type).
    """

    arch: str = "llama"
    layers: int = 2
    embd: int | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    ff: int | None = None
    vocab: int = 512
    ctx: int = 512
    quant: str = "F32"
    types: Mapping[str, str] = field(default_factory=dict)
    tied: bool = False
    rope_freqs: bool = False
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    drop: Collection[str] = ()
    add: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def width(self) -> int:
        return self.embd or (256 if self._has_super_blocks else 64)

    @property
    def ff_width(self) -> int:
        return self.ff or 2 * self.width

    @property
    def _has_super_blocks(self) -> bool:
        return any(block_size(name)[0] > 64 for name in (self.quant, *self.types.values()))


def write_tiny(path: Path, options: TinyOptions) -> Path:
    """Write the model. Raises ValueError for sizes that do not fit the quantization types."""
    writer = gguf.GGUFWriter(path, options.arch)
    merged = {**_model_metadata(options), **tokenizer_metadata(options.vocab), **options.metadata}
    for key, value in merged.items():
        if value is None:
            writer.kv_data[0].pop(key, None)
        else:
            _add_metadata(writer, key, value)
    rng = np.random.default_rng(options.seed)
    for name, values in _tensors(options, rng).items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in options.drop):
            _add_tensor(writer, name, values, _type_of(name, values, options), rng)
    for name, added in options.add.items():
        values, qtype = added if isinstance(added, tuple) else (np.asarray(added, dtype=np.float32), "F32")
        _add_tensor(writer, name, values, qtype, rng)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _model_metadata(options: TinyOptions) -> dict[str, Any]:
    arch, head_dim = options.arch, options.head_dim or options.width // options.heads
    metadata: dict[str, Any] = {
        "general.type": "model",
        "general.name": f"Tiny {arch}",
        f"{arch}.block_count": options.layers,
        f"{arch}.context_length": options.ctx,
        f"{arch}.embedding_length": options.width,
        f"{arch}.feed_forward_length": options.ff_width,
        f"{arch}.attention.head_count": options.heads,
        f"{arch}.attention.head_count_kv": options.kv_heads,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.vocab_size": options.vocab,
        f"{arch}.rope.dimension_count": head_dim,
        "general.quantization_version": 2,
    }
    if options.head_dim is not None:
        metadata[f"{arch}.attention.key_length"] = metadata[f"{arch}.attention.value_length"] = head_dim
    for key, value in options.rope_scaling.items():
        metadata[f"{arch}.rope.scaling.{key}"] = value
    return metadata


def _tensors(options: TinyOptions, rng: np.random.Generator) -> dict[str, np.ndarray]:
    embd, ff = options.width, options.ff_width
    head_dim = options.head_dim or embd // options.heads
    q_width, kv_width = options.heads * head_dim, options.kv_heads * head_dim

    def matrix(rows: int, columns: int, gain: float = 1.5) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(embd)).astype(np.float32)

    # A tied output gives the current token a logit that grows with its embedding: small ones avoid repeats.
    spread = 0.2 if options.tied else 1.0
    tensors = {"token_embd.weight": matrix(options.vocab, embd, gain=spread * np.sqrt(embd))}
    for layer in range(options.layers):
        block = f"blk.{layer}."
        tensors[block + "attn_norm.weight"] = norm()
        for part, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
            tensors[f"{block}attn_{part}.weight"] = matrix(width, embd)
            if options.arch == "qwen2":
                tensors[f"{block}attn_{part}.bias"] = (0.5 * rng.standard_normal(width)).astype(np.float32)
        tensors[block + "attn_output.weight"] = matrix(embd, q_width)
        tensors[block + "ffn_norm.weight"] = norm()
        tensors[block + "ffn_gate.weight"] = matrix(ff, embd)
        tensors[block + "ffn_up.weight"] = matrix(ff, embd)
        tensors[block + "ffn_down.weight"] = matrix(embd, ff)
    tensors["output_norm.weight"] = norm()
    if not options.tied:
        tensors["output.weight"] = matrix(options.vocab, embd)
    if options.rope_freqs:
        tensors["rope_freqs.weight"] = np.linspace(1, 8, head_dim // 2, dtype=np.float32)
    return tensors


def _type_of(name: str, values: np.ndarray, options: TinyOptions) -> str:
    if values.ndim < 2:
        return "F32"
    return next((t for pattern, t in options.types.items() if fnmatch.fnmatch(name, pattern)), options.quant)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, values: np.ndarray, qtype: str, rng: np.random.Generator
) -> None:
    if values.shape[-1] % block_size(qtype)[0]:
        raise ValueError(f"{name}: {values.shape[-1]} columns do not fill blocks of {qtype}")
    try:
        data = gguf.quants.quantize(values, GGMLQuantizationType[qtype])
    except NotImplementedError:
        data = random_blocks(qtype, values.shape, float(values.std()), rng)
    writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[qtype])


def _add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, tuple):
        value, kind = value
    elif isinstance(value, int) and not isinstance(value, bool):
        kind = GGUFValueType.UINT32 if value >= 0 else GGUFValueType.INT32
    else:
        kind = GGUFValueType.get_type(value)
    writer.kv_data[0].pop(key, None)
    writer.add_key_value(key, value, kind)


def tokenizer_metadata(vocab: int = 512) -> dict[str, Any]:
    """The tokenizer.* keys: 256 bytes, merges learned from `CORPUS`, unused padding, special tokens."""
    special = [*CONTROL, USER_DEFINED]
    merges = learn_merges()[: vocab - 256 - len(special)]
    if vocab < 256 + len(special):
        raise ValueError(f"a vocabulary of {vocab} has no room for bytes and special tokens")
    tokens = [*byte_symbols(), *("".join(pair) for pair in merges)]
    types = [NORMAL_TYPE] * len(tokens)
    unused = vocab - len(tokens) - len(special)
    tokens += [f"[PAD{i}]" for i in range(unused)] + special
    types += [UNUSED_TYPE] * unused + [CONTROL_TYPE] * len(CONTROL) + [USER_DEFINED_TYPE]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


@cache
def byte_symbols() -> tuple[str, ...]:
    """The printable character that GPT-2's byte-level BPE writes for each byte."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return tuple(chr(byte) if byte in kept else chr(256 + moved.index(byte)) for byte in range(256))


@cache
def learn_merges() -> list[tuple[str, str]]:
    """Byte-pair merges in the order of their rank, until no pair of symbols occurs twice."""
    symbols = byte_symbols()
    words = Counter(
        tuple(symbols[byte] for byte in word.encode())
        for word in re.findall(r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", CORPUS)
    )
    merges: list[tuple[str, str]] = []
    while True:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        if not pairs or max(pairs.values()) < 2:
            return merges
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        words = Counter({_merged(word, best): count for word, count in words.items()})


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return tuple(out)
