"""Takes the weights of a mixture of experts out of a loader, under the names that GGUF gives them."""

from __future__ import annotations

from infer.runtime.config import ModelConfig, MoEConfig
from infer.runtime.errors import UnsupportedModelError
from infer.runtime.models.base import WeightLoader
from infer.runtime.models.layers import GatedMLP, MoE
from infer.runtime.models.ops import Experts, Router


def load_mlp(loader: WeightLoader, name: str, width: int, inner: int, activation: str) -> GatedMLP:
    """name: of the tensors, with {} for gate, up and down."""
    gate, up = (loader.linear(name.format(part), inner, width) for part in ("gate", "up"))
    return GatedMLP(gate, up, loader.linear(name.format("down"), width, inner), activation)


def load_moe(loader: WeightLoader, index: int, config: ModelConfig, moe: MoEConfig) -> MoE:
    """Layer `index`'s router, its experts (each projection of all of them one tensor) and the shared expert. Raises as
    WeightLoader does."""
    block, width, count, inner = f"blk.{index}.", config.embedding_length, moe.experts, moe.inner
    if f"{block}ffn_gate.0.weight" in loader:
        raise UnsupportedModelError(
            f"tensor {block}ffn_gate.0.weight: a tensor for each expert, as files had before April 2024, is not "
            "supported; get a newer conversion of the model"
        )
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    weights = {
        part: loader.matrices(f"{block}ffn_{part}_exps.weight", count, *shape)
        for part, shape in shapes.items()
    }
    biases = (
        loader.optional_vector(f"{block}ffn_{part}_exps.bias", count, rows)
        for part, (rows, _) in shapes.items()
    )
    router = Router(
        loader.router(f"{block}ffn_gate_inp", count, width),
        moe,
        loader.optional_vector(f"{block}exp_probs_b.bias", count),
    )
    shared = None
    if moe.shared:
        shared = load_mlp(loader, block + "ffn_{}_shexp", width, moe.shared, config.activation)
    return MoE(
        router, Experts(weights["gate"], weights["up"], weights["down"], config.activation, *biases), shared
    )
