"""Settings of the engine and facts of a model: frozen, resolved once, passed down."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BLOCK_SIZE = 64  # tokens per KV block


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How to run a model, as the command line resolved it.

    device: "auto", "cpu", "cuda" or "cuda:N". threads None: the physical cores this process may use.
    ctx: tokens of context, None for the model's own. kv_type: "auto" (f16 on CPU, bf16 on CUDA), "f16", "bf16", "f32",
    "int8". prefill_chunk: most prompt tokens computed in one step, 0 for all at once. quant: "int8", "int4" or "nf4" to
    quantize float weights on load. kernel: "auto", "native" (compiled, exact), "torch"
    (inexact), "reference" (slow, exact), "float32" (dequantized) or
    "bnb" (bitsandbytes' own for its formats, inexact). isa: instruction set of the native kernel.
    prefix_cache: reuse KV blocks of earlier prompts in this process. kv_blocks: blocks of 64 positions to hold,
    None for one sequence of full context, or for what it needs of it where all layers have windows. cache_dir: folder
    of the disk cache, None for none. cache_limit: most bytes it may take, None for its own default. cache_read_only:
    reuse what it holds, write and delete nothing.
    """

    device: str = "auto"
    threads: int | None = None
    ctx: int | None = None
    kv_type: str = "auto"
    prefill_chunk: int = 512
    quant: str | None = None
    kernel: str = "auto"
    isa: str | None = None
    prefix_cache: bool = True
    max_sequences: int = 64
    kv_blocks: int | None = None
    cache_dir: Path | None = None
    cache_limit: int | None = None
    cache_read_only: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError naming the field and what it accepts."""
        checks = (
            ("threads", self.threads is None or 1 <= self.threads <= 1024, "between 1 and 1024"),
            ("ctx", self.ctx is None or self.ctx >= 1, "at least 1"),
            (
                "kv_type",
                self.kv_type in ("auto", "f16", "bf16", "f32", "int8"),
                "auto, f16, bf16, f32 or int8",
            ),
            ("prefill_chunk", self.prefill_chunk >= 0, "0 (all at once) or more"),
            ("quant", self.quant in (None, "int8", "int4", "nf4"), "int8, int4 or nf4"),
            ("kv_blocks", self.kv_blocks is None or self.kv_blocks >= 1, "at least 1"),
            ("cache_limit", self.cache_limit is None or self.cache_limit >= 1, "at least 1 byte"),
            ("max_sequences", 1 <= self.max_sequences <= 4096, "between 1 and 4096"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"{name} must be {expected}, not {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864) and its context extensions.

    dim: rotated dimensions per head. scaling: "none", "linear" (positions divided by factor),
    "dynamic" (none up to the context length; from there on a text's length decides, which no engine here does), "yarn"
    (arXiv 2309.00071), "llama3" (Llama 3.1's wavelength bands) or "longrope" (arXiv 2402.13753: a divisor per
    frequency, from the file). original_context: positions seen in training. factors: which of longrope's two sets is
    in use, "short" or "long"; the context length decides when the weights are loaded, never the length of a text.
    truncate: YaRN's ramp between the two betas begins and ends at whole dimensions, as its authors' code has it.
    attention_factor: magnitude of the rotated vectors, None for the scaling's own.
    pairing: "adjacent" rotates (x0, x1), (x2, x3), …: the order GGUF stores llama in; "halves" rotates
    (x0, x[d/2]), …
    """

    dim: int
    base: float = 10000.0
    pairing: str = "adjacent"
    scaling: str = "none"
    factor: float = 1.0
    original_context: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    factors: str = ""
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts: which layers have one, and how a row's experts are chosen.

    experts, used: of a layer, and how many of them a row goes to. inner: width of one expert's gate. shared: the same
    of the expert that every row goes to, 0 for none. leading_dense: layers before the first with experts. gate: scores
    are a "softmax" or "sigmoid" of the router's logits, or the logits, and then weights are a softmax over the chosen
    ("chosen_softmax"). normalize: the weights of the chosen are made to sum to one. scale: their factor. groups,
    groups_used: experts are chosen from the best groups only, a group counting its best expert (softmax, arXiv
    2405.04434) or its two best (sigmoid, arXiv 2412.19437).
    """

    experts: int
    used: int
    inner: int
    shared: int = 0
    leading_dense: int = 0
    gate: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Latent attention (MLA, arXiv 2405.04434). The cache holds one key for all heads and no values: `rank` dimensions
    of latent, which are also the value, and the rotated part after them. query_rank: of the queries' own down
    projection, 0 for none. key_dim: of a head's key before the rotated part; value_dim: of a head's value.
    """

    rank: int
    query_rank: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer, read from file metadata only.

    windows: positions each layer's queries see, themselves included, 0 for all; empty where no layer has a window.
    Where all layers have one, a sequence keeps no block behind the widest; where any has none, it keeps all.
    local_rope: rotation in layers with a window, None for the same as in the others. nope_interval: every n-th layer
    does not rotate, 0 for none. attention_scale: factor of q k^T, None for head_dim^-0.5. residual_scale: factor of
    what each branch adds. logit_scale: factor of the logits. Soft caps bound x to cap * tanh(x / cap), 0 for off.
    """

    architecture: str
    vocab_size: int
    context_length: int
    embedding_length: int
    block_count: int
    feed_forward_length: int
    head_count: int
    head_count_kv: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    moe: MoEConfig | None = None
    latent: LatentConfig | None = None
    name: str = ""
    activation: str = "silu"
    windows: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None
    nope_interval: int = 0
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0

    def window(self, layer: int) -> int:
        """Positions that layer's queries see, 0 for all."""
        return self.windows[layer] if self.windows else 0

    @property
    def cache_window(self) -> int:
        """Positions behind which no layer looks, 0 where some layer sees all."""
        return max(self.windows) if self.windows and all(self.windows) else 0

    @property
    def latent_dim(self) -> int:
        """Dimensions of a key that are its value as well; 0 where the cache has values."""
        return self.latent.rank if self.latent is not None else 0

    @property
    def kv_layout(self) -> str:
        """What the cache holds of one position: "16 layers of 8 heads of 64", with latent attention "27 layers of 1
        heads of 576, values its first 512"."""
        values = f", values its first {self.latent_dim}" if self.latent else ""
        return f"{self.block_count} layers of {self.head_count_kv} heads of {self.head_dim}{values}"
