"""Every error a user can meet, and the exit code it ends with.

    InferError                      1  failed while running
    ├── UsageError                  2  flags or arguments that make no sense together
    ├── ModelError                  3  the model cannot be loaded
    │   ├── ModelNotFoundError      3  no such path, catalog name or repository
    │   ├── DownloadError           3  a source failed, or its bytes are not the promised ones
    │   ├── CheckpointError         3  the file is not what its format says it must be
    │   ├── UnsupportedModelError   3  a well-formed file this version cannot run
    │   ├── TokenizerError          3  vocabulary missing, broken or of an unknown kind
    │   └── ChatTemplateError       3  the template raised, ran too long or grew too large
    ├── ContextLengthError          4  the prompt does not fit the context
    ├── NumericalError              1  NaN or infinite logits
    ├── SessionError                1  a kept conversation is damaged, in use, or cannot be written
    ├── LogError                    1  the log of answers cannot be read or written
    └── OutputError                 1  the answer could not be written

A message is one line that says what failed, where, and what to do. `cli.main` prints it and exits;
a traceback appears only with INFER_DEBUG=1. Packages below the runtime (`quant`, `samplers`) raise
ValueError, which the runtime turns into one of these with the place added.
"""

from __future__ import annotations

from collections.abc import Iterable


class InferError(Exception):
    """Base of all errors meant for the user. `str(error)` is the whole one-line message."""

    exit_code = 1


class UsageError(InferError):
    exit_code = 2


class ModelError(InferError):
    exit_code = 3


class ModelNotFoundError(ModelError):
    pass


class DownloadError(ModelError):
    pass


class CheckpointError(ModelError):
    pass


class UnsupportedModelError(ModelError):
    pass


class TokenizerError(ModelError):
    pass


class ChatTemplateError(ModelError):
    pass


class ContextLengthError(InferError):
    exit_code = 4


class NumericalError(InferError):
    pass


class SessionError(InferError):
    pass


class LogError(InferError):
    pass


class OutputError(InferError):
    pass


def did_you_mean(word: str, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """ " (did you mean NAME or NAME?)" with what comes close to a word that is none of the names, else ""."""
    import difflib

    spelled = {name.casefold(): name for name in names}
    close = difflib.get_close_matches(word.casefold(), spelled, n=2, cutoff=cutoff)
    return f" (did you mean {' or '.join(spelled[name] for name in close)}?)" if close else ""
