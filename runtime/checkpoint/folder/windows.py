"""Which layers of a model have a sliding window, as config.json says it in several ways."""

from __future__ import annotations

from collections.abc import Callable

from infer.runtime.checkpoint.folder.config import MAX_LAYERS, ConfigReader
from infer.runtime.checkpoint.folder.rope import Values
from infer.runtime.errors import UnsupportedModelError


def windowed(config: ConfigReader, keys: Values, sliding: Callable[[int], bool]) -> None:
    """`layer_types`, else `sliding` of each layer's index, says which layers have the window."""
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    size = config.integer("sliding_window", 0, low=0)
    kinds = config.items("layer_types")
    if kinds is None:
        pattern = [sliding(layer) for layer in range(layers)]
    elif len(kinds) < layers or not set(map(str, kinds)) <= {"sliding_attention", "full_attention"}:
        raise UnsupportedModelError(
            f"{config.where}: layer_types is not one of sliding_attention, full_attention for each of {layers} layers"
        )
    else:
        pattern = [kind == "sliding_attention" for kind in kinds[:layers]]
    keys["attention.sliding_window"] = size
    keys["attention.sliding_window_pattern"] = pattern


def everywhere(config: ConfigReader, keys: Values) -> None:
    windowed(config, keys, lambda layer: True)


def if_used(config: ConfigReader, keys: Values) -> None:
    first = config.integer("max_window_layers", 28, low=0)
    if config.flag("use_sliding_window", False):
        windowed(config, keys, lambda layer: layer >= first)
    else:
        config.ignore({"sliding_window", "layer_types"})
