"""Reads an architecture's hyperparameters from GGUF metadata, and accounts for every key under its name."""

from __future__ import annotations

from collections.abc import Mapping

from infer.runtime.checkpoint.base import ValueType
from infer.runtime.checkpoint.metadata import get_bool, get_float, get_int, get_list, get_str, value_type
from infer.runtime.config import ModelConfig, MoEConfig, RopeConfig
from infer.runtime.errors import CheckpointError, UnsupportedModelError

#: keys that say nothing about the maths
DESCRIPTIVE = {"vocab_size", "attention.causal", "tensor_data_layout", "rope.scaling.finetuned"}
#: `expert_gating_func` → MoEConfig.gate
GATES = {1: "softmax", 2: "sigmoid", 3: "chosen_softmax"}
SCALINGS = ("none", "linear", "dynamic", "yarn", "llama3", "longrope")


class HyperParameters:
    """`<architecture>.<key>` of a file. Reading marks a key as known; `finish` refuses the ones nobody read."""

    def __init__(self, metadata: Mapping[str, object], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture
        self._known = {f"{architecture}.{key}" for key in DESCRIPTIVE}

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 24) -> int:
        """Raises CheckpointError when missing without a default, of another type, or outside low … high."""
        name = self._mark(key)
        value = (
            get_int(self.metadata, name) if default is None else get_int(self.metadata, name, default=default)
        )
        if not low <= value <= high:
            raise CheckpointError(
                f"metadata key {name} is {value}, expected {low} to {high}; use another file"
            )
        return value

    def number(self, key: str, default: float | None = None, *, low: float = 0.0) -> float:
        """A finite float above `low`. Raises as `integer`."""
        name = self._mark(key)
        value = (
            get_float(self.metadata, name)
            if default is None
            else get_float(self.metadata, name, default=default)
        )
        if not value > low:
            raise CheckpointError(
                f"metadata key {name} is {value}, expected more than {low}; use another file"
            )
        return value

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if f"{self.architecture}.{key}" in self.metadata else None

    def text(self, key: str, default: str) -> str:
        return get_str(self.metadata, self._mark(key), default=default)

    def flag(self, key: str, default: bool) -> bool:
        return get_bool(self.metadata, self._mark(key), default=default)

    def windows(self, layers: int, *, period: int, default: int = 0) -> tuple[int, ...]:
        """`attention.sliding_window` of every layer: 0 (all positions) for each period-th one, for none if period is 0.

        The file's `attention.sliding_window_pattern` comes before `period`: such a number, or a flag per layer that
        says whether it has a window. default: the window where the file has none, 0 for no windows.
        """
        size = self.integer("attention.sliding_window", default, low=0)
        name = self._mark("attention.sliding_window_pattern")
        if name in self.metadata and value_type(self.metadata[name]) is ValueType.ARRAY:
            local = get_list(self.metadata, name, bool)
            if len(local) < layers:
                raise CheckpointError(
                    f"metadata key {name} covers {len(local)} of {layers} layers; use another file"
                )
        else:
            period = self.integer("attention.sliding_window_pattern", period, low=0)
            local = [period == 0 or layer % period < period - 1 for layer in range(layers)]
        return tuple(size if local[layer] else 0 for layer in range(layers)) if size else ()

    def finish(self) -> None:
        """Raise UnsupportedModelError naming the keys under this architecture that were not read."""
        prefix = f"{self.architecture}."
        unknown = sorted(key for key in self.metadata if key.startswith(prefix) and key not in self._known)
        if unknown:
            raise UnsupportedModelError(
                f"metadata key {unknown[0]} is not known to this version of infer"
                f"{f' ({len(unknown) - 1} more)' if len(unknown) > 1 else ''}; running without it would be a guess"
            )

    def rope(self, dim: int, pairing: str, *, base: float = 10000.0) -> RopeConfig:
        """The `rope.*` keys; `rope.scale_linear` is the older spelling of linear scaling, `yarn_attn_factor`
        comes before `attn_factor`."""
        legacy = self.optional_number("rope.scale_linear")
        scaling = self.text("rope.scaling.type", "none" if legacy in (None, 1.0) else "linear")
        if scaling not in SCALINGS:
            raise UnsupportedModelError(
                f"rope scaling {scaling!r} is not supported; supported: {', '.join(SCALINGS)}"
            )
        original = self.integer("rope.scaling.original_context_length", 0, low=0)
        magnitude = self.optional_number("rope.scaling.attn_factor")
        yarn_magnitude = self.optional_number("rope.scaling.yarn_attn_factor")
        config = RopeConfig(
            dim=dim,
            base=self.number("rope.freq_base", base),
            pairing=self._pairing(pairing),
            scaling=scaling,
            factor=self.number("rope.scaling.factor", legacy or 1.0),
            original_context=original or None,
            attention_factor=magnitude if yarn_magnitude is None else yarn_magnitude,
            beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0),
            low_freq_factor=self.number("rope.scaling.low_freq_factor", 1.0),
            high_freq_factor=self.number("rope.scaling.high_freq_factor", 4.0),
        )
        if scaling in ("yarn", "llama3", "longrope") and config.original_context is None:
            raise CheckpointError(
                f"metadata key {self.architecture}.rope.scaling.original_context_length is missing; "
                f"rope scaling {scaling!r} needs it"
            )
        return config

    def _pairing(self, default: str) -> str:
        """`rope.pairing`, where a reader knows that the file's order is not the usual one of GGUF."""
        found = self.text("rope.pairing", default)
        if found not in ("adjacent", "halves"):
            raise CheckpointError(
                f"metadata key {self.architecture}.rope.pairing is {found!r}, expected adjacent or halves"
            )
        return found

    def moe(self, layers: int, *, gate: str = "softmax", normalize: bool = True) -> MoEConfig | None:
        """The `expert_*` keys; None where the file has no experts. gate, normalize: where it does not say."""
        experts = self.integer("expert_count", 0, low=0, high=4096)
        used = self.integer("expert_used_count", 0, low=0, high=4096)
        inner = self.integer("expert_feed_forward_length", self.integer("feed_forward_length"))
        default = next(number for number, name in GATES.items() if name == gate)
        number = self.integer("expert_gating_func", default, low=0)
        groups = max(1, self.integer("expert_group_count", 1, low=0, high=4096))
        groups_used = self.integer("expert_group_used_count", groups, low=0, high=4096) or groups
        config = MoEConfig(
            experts=experts,
            used=used,
            inner=inner,
            shared=inner * self.integer("expert_shared_count", 0, low=0, high=4096),
            leading_dense=self.integer("leading_dense_block_count", 0, low=0, high=layers),
            gate=GATES.get(number, ""),
            normalize=self.flag("expert_weights_norm", normalize),
            scale=self.number("expert_weights_scale", 1.0),
            groups=groups,
            groups_used=groups_used,
        )
        if not experts:
            return None
        if not config.gate:
            raise UnsupportedModelError(
                f"metadata key {self.architecture}.expert_gating_func is {number}; "
                f"supported: {', '.join(f'{n} ({name})' for n, name in GATES.items())}"
            )
        if experts % groups or groups_used > groups or not 1 <= used <= experts // groups * groups_used:
            raise CheckpointError(
                f"{used} of {experts} experts from {groups_used} of {groups} groups cannot be; use another file"
            )
        return config

    def _mark(self, key: str) -> str:
        name = f"{self.architecture}.{key}"
        self._known.add(name)
        return name


def decoder_config(
    params: HyperParameters, vocab_size: int, *, pairing: str, latent: bool = False
) -> ModelConfig:
    """The keys every llama-like family has. vocab_size: rows of the embedding table. latent: heads are the caller's to
    work out, and values need not be as wide as keys."""
    heads = params.integer("attention.head_count", high=4096)
    width = params.integer("embedding_length")
    kv_heads = params.integer("attention.head_count_kv", heads, high=4096)
    if heads % kv_heads:
        raise CheckpointError(
            f"{heads} attention heads cannot share {kv_heads} key-value heads; use another file"
        )
    if width % heads and f"{params.architecture}.attention.key_length" not in params.metadata:
        raise CheckpointError(
            f"embedding length {width} does not divide into {heads} heads; use another file"
        )
    head_dim = params.integer("attention.key_length", max(1, width // heads), high=4096)
    value_dim = params.integer("attention.value_length", head_dim, high=4096)
    if value_dim != head_dim and not latent:
        raise UnsupportedModelError(
            f"heads of {head_dim} for keys and {value_dim} for values are not supported"
        )
    rotated = params.integer("rope.dimension_count", head_dim, high=head_dim)
    if rotated % 2 or head_dim % 2:
        raise CheckpointError(f"heads of {head_dim} with {rotated} rotated dimensions; both must be even")
    return ModelConfig(
        architecture=params.architecture,
        vocab_size=vocab_size,
        context_length=params.integer("context_length", high=1 << 27),
        embedding_length=width,
        block_count=params.integer("block_count", high=4096),
        feed_forward_length=params.integer("feed_forward_length"),
        head_count=heads,
        head_count_kv=kv_heads,
        head_dim=head_dim,
        norm_eps=params.number("attention.layer_norm_rms_epsilon"),
        rope=params.rope(rotated, pairing),
        name=get_str(params.metadata, "general.name", default=""),
    )
