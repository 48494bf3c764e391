"""Rotary embedding of config.json as `rope.*` keys: `rope_parameters` as transformers 5 writes it, and `rope_theta`,
`rope_scaling` as its older versions did. Semantics: transformers, modeling_rope_utils.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

from infer.runtime.checkpoint.folder.config import ConfigReader
from infer.runtime.errors import CheckpointError, UnsupportedModelError

Values = dict[str, object]
SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_NESTED = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Rope:
    """keys: below `<architecture>.rope.`. factors: longrope's divisors, by tensor name. partial: share of a head that
    is rotated."""

    keys: Values
    factors: dict[str, list[float]]
    partial: float


def read_rope(
    config: ConfigReader,
    *,
    context: int,
    theta: float,
    local_theta: float | None = None,
    truncate: bool = True,
) -> Rope:
    """theta: base where the file gives none. local_theta: the same for layers with a window, which then have a base of
    their own; None where a family's layers are all alike. truncate: what YaRN's key of that name has to say."""
    old_theta = config.number("rope_theta", theta, low=1.0)
    old_partial = config.number("partial_rotary_factor", 1.0)
    original = None
    if "original_max_position_embeddings" in config:  # beside the rope's own keys it comes first
        original = config.integer("original_max_position_embeddings")
    outer = _chosen(config)
    full, local = outer, None
    if outer is not None and any(name in outer for name in _NESTED):
        full, local = (outer.section(name) for name in _NESTED)  # what lies beside them has no effect
    if full is not None and full.flag("truncate", True) is not truncate and _kind(full) == "yarn":
        raise UnsupportedModelError(
            f"{full.where}: truncate is '{not truncate}'; this version runs {truncate} only"
        )
    rope = _scaled(full or ConfigReader({}, config.where), context, old_theta, old_partial, original)
    if local_theta is None:
        return rope
    base = config.number("rope_local_base_freq", local_theta, low=1.0)
    if local is not None:
        local.require("rope_type", "default")
        local.require("type", "default")
        local.require("partial_rotary_factor", 1.0, 1)
        base = local.number("rope_theta", base, low=1.0)
        local.finish()
    rope.keys["rope.freq_base_swa"] = base
    return rope


def _chosen(config: ConfigReader) -> ConfigReader | None:
    old, new = config.section("rope_scaling"), config.section("rope_parameters")
    return new if old is None else old


def _kind(rope: ConfigReader) -> str:
    kind = rope.text("rope_type", rope.text("type", "default"))
    return {"su": "longrope"}.get(kind, kind)


def _scaled(rope: ConfigReader, context: int, theta: float, partial: float, given: int | None) -> Rope:
    kind = _kind(rope)
    if kind not in SCALINGS:
        raise UnsupportedModelError(
            f"{rope.where}: rope type {kind[:40]!r} is not supported; supported: {', '.join(SCALINGS)}"
        )
    partial = rope.number("partial_rotary_factor", partial)
    keys: Values = {"rope.freq_base": rope.number("rope_theta", theta, low=1.0)}
    factors: dict[str, list[float]] = {}
    original = given or context
    rope.ignore({"original_max_position_embeddings"})
    if kind == "default":
        rope.ignore({"factor"})
    else:
        keys["rope.scaling.type"] = kind
    if kind in ("llama3", "yarn", "longrope"):
        original = rope.integer("original_max_position_embeddings", context) if given is None else given
        keys["rope.scaling.original_context_length"] = original
    if kind == "longrope":
        factor = rope.number("factor", context / original)
        factors = {
            f"rope_factors_{name}.weight": rope.numbers(f"{name}_factor") for name in ("short", "long")
        }
        keys["rope.scaling.attn_factor"] = rope.number("attention_factor", _longrope_factor(factor, original))
    elif kind == "yarn":
        factor = rope.number("factor", context / original)
        keys["rope.scaling.factor"] = factor
        keys["rope.scaling.attn_factor"] = rope.number("attention_factor", _yarn_factor(rope, factor))
        keys["rope.scaling.yarn_beta_fast"] = rope.number("beta_fast", 32.0)
        keys["rope.scaling.yarn_beta_slow"] = rope.number("beta_slow", 1.0)
    elif kind != "default":
        keys["rope.scaling.factor"] = rope.number("factor")
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise CheckpointError(
                f"{rope.where}: low_freq_factor {low:g} is not below high_freq_factor {high:g}"
            )
        keys |= {"rope.scaling.low_freq_factor": low, "rope.scaling.high_freq_factor": high}
    rope.finish()
    return Rope(keys, factors, partial)


def _longrope_factor(factor: float, original: int) -> float:
    return math.sqrt(1 + math.log(factor) / math.log(max(original, 2))) if factor > 1 else 1.0


def _yarn_factor(rope: ConfigReader, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale, everywhere = (rope.number(key, 0.0, low=-1.0) for key in ("mscale", "mscale_all_dim"))
    return magnitude(scale) / magnitude(everywhere) if scale and everywhere else magnitude(1.0)
