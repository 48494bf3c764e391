"""Why a row of a step gives no token.

All are ValueErrors: this package knows nothing of the runtime, which turns them into its own errors and adds
the request and the position.
"""

from __future__ import annotations


class SamplingError(ValueError):
    """Base. `row` is the index into the rows of the call.

    Sampling changes no state, so the caller may drop that row and sample the others again.
    """

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


class InvalidLogitsError(SamplingError):
    """The model gave NaN or ±infinity. Bans come from logit_bias alone, so raw −infinity is an error too."""

    def __init__(self, row: int) -> None:
        super().__init__(row, f"the logits of row {row} contain NaN or infinity")


class NoTokenLeftError(SamplingError):
    """logit_bias of −infinity (or a +infinity elsewhere) left nothing to choose from."""

    def __init__(self, row: int) -> None:
        super().__init__(row, f"every token is banned in row {row}: remove some of its logit_bias")
