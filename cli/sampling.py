"""Sampling flags to `SamplingParams`: what was given, else the model's own default, else the library's."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Mapping, Sequence

from infer.cli.config import flag
from infer.cli.input import checked_argument
from infer.cli.options import SamplingOptions
from infer.runtime.errors import ModelError, UsageError
from infer.samplers.params import SamplingParams

# Field of SamplingParams → option, where the two differ.
_OPTION = {"temperature": "temp", "order": "samplers"}
_BIAS = re.compile(r"\s*(\d+)\s*(?:=\s*([+-]?.+)|([+-].+))", re.DOTALL)


def draw_seed() -> int:
    """A seed for an answer nobody asked to be repeatable; it is reported, so that it can be repeated."""
    return secrets.randbits(64)


def sampling_params(
    options: SamplingOptions, defaults: Mapping[str, float | int], *, seed: int, logprobs: int | None = None
) -> SamplingParams:
    """defaults: the model's own, by field name of `SamplingParams`; names it does not have are ignored.

    Raises UsageError naming the flag, variable or key of a value out of range, ModelError for such a default.
    """
    values: dict[str, object] = {"seed": seed, "logprobs": logprobs, "ignore_eos": options.ignore_eos}
    for field in dataclasses.fields(SamplingParams):
        given = getattr(options, _OPTION.get(field.name, field.name), None)
        if given is not None and field.name not in ("logit_bias", "stop", "order", *values):
            values[field.name] = given
    from_model = {
        field.name: defaults[field.name]
        for field in dataclasses.fields(SamplingParams)
        if field.name in defaults and field.name not in values
    }
    if options.stop:
        values["stop"] = tuple(checked_argument(options.origin("stop"), text) for text in options.stop)
    if options.logit_bias:
        values["logit_bias"] = parse_logit_bias(options.logit_bias, options.origin("logit_bias"))
    if options.samplers is not None:
        values["order"] = tuple(name.strip() for name in options.samplers.split(",") if name.strip())
    try:
        SamplingParams(**values)  # type: ignore[arg-type]
    except ValueError as error:
        raise UsageError(_named(options, str(error))) from None
    try:
        return SamplingParams(**from_model, **values)  # type: ignore[arg-type]
    except ValueError as error:
        raise ModelError(f"the model's own sampling defaults are out of range: {error}") from None


def _named(options: SamplingOptions, message: str) -> str:
    """A ValueError of SamplingParams begins with the field's name; the user knows the flag."""
    field, _, rest = message.partition(" ")
    name = _OPTION.get(field, field)
    return f"{options.origin(name)} {rest}" if hasattr(options, name) or name == "logprobs" else message


def parse_logit_bias(texts: Sequence[str], origin: str | None = None) -> dict[int, float]:
    """`["5=-1.5", "7+2", "7-inf"]` → {5: -1.5, 7: -inf}; the last one of an id wins. Raises UsageError."""
    biases = {}
    for text in texts:
        match = _BIAS.fullmatch(text)
        try:
            if match is None:
                raise ValueError
            biases[int(match[1])] = float(match[2] or match[3])
        except ValueError:
            where = origin or flag("logit_bias")
            raise UsageError(f"{where}: must be ID=VALUE, ID+VALUE or ID-VALUE, not {text!r}") from None
    return biases
