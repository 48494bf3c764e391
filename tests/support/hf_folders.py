"""Checkpoint folders of tiny random models, as `transformers` and `tokenizers` write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_models import CHAT_TEMPLATE, tokenizer_metadata
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = "<|endoftext|>", "<|im_end|>"


def write_folder(path: Path, model: Any, *, dtype: Any = None, **saving: Any) -> Path:
    """A model of `hf_to_gguf.build_model` with a tokenizer of as many tokens. saving: for save_pretrained."""
    vocab = model.config.vocab_size
    tokenizer = byte_level_tokenizer(vocab)
    ends = {"bos_token_id": tokenizer.token_to_id(BOS), "eos_token_id": tokenizer.token_to_id(EOS)}
    for settings in (model.config, model.generation_config):
        for key, value in ends.items():
            setattr(settings, key, value)
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(path, **saving)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def byte_level_tokenizer(vocab: int = 512) -> Tokenizer:
    """The vocabulary of `tiny_models`, its special tokens added under the same ids."""
    keys = tokenizer_metadata(vocab)
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in keys["tokenizer.ggml.merges"]]
    plain = {token: number for number, token in enumerate(tokens) if types[number] not in (3, 4)}
    tokenizer = Tokenizer(models.BPE(vocab=plain, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    for number, kind in enumerate(types):
        if kind == 3:
            tokenizer.add_special_tokens([tokens[number]])
        elif kind == 4:
            tokenizer.add_tokens([AddedToken(tokens[number], special=False, normalized=False)])
    return tokenizer


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object; `...` removes one."""
    found = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            found.pop(key, None)
        else:
            found[key] = value
    path.write_text(json.dumps(found))
