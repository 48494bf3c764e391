"""The console entry point: `infer` itself, and how every way of ending becomes an exit code.

0 done · 1 failed while running · 2 usage · 3 model cannot be loaded · 4 prompt does not fit the context ·
130 interrupted · 141 reader went away · 143 terminated. A failure is one line on stderr; with INFER_DEBUG=1
the traceback comes before it.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from infer.cli.commands import COMMANDS, CommandGroup, with_commands
from infer.cli.output import ClosedStdout, ReaderGone
from infer.cli.render import say
from infer.cli.signals import INTERRUPTED, READER_GONE, TERMINATED, Terminated, install, leave
from infer.runtime.errors import InferError, did_you_mean

DISTRIBUTION = "infer-local"
DEBUG = "INFER_DEBUG"
_OUT_OF_MEMORY = "out of memory: use a smaller model, a smaller --ctx or --kv-type int8"
# How torch's allocators, C++ and threads say it in a RuntimeError.
_NO_MEMORY_WORDS = ("can't allocate memory", "out of memory", "bad_alloc", "can't start new thread")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


app = typer.Typer(
    cls=CommandGroup,
    name="infer",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"infer {version(DISTRIBUTION)}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run language models locally: quantized weights, exact results, nothing computed twice."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """`infer`: run the command line and end the process."""
    install()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    if sys.stdout is None:
        sys.stdout = ClosedStdout()
    code = invoke(sys.argv[1:])
    if code in (INTERRUPTED, READER_GONE, TERMINATED):
        leave(code)
    sys.exit(code)


def invoke(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; what went wrong has been said on stderr."""
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except (KeyboardInterrupt, typer.Abort):
        say("infer: interrupted")
        return INTERRUPTED
    except Terminated:
        say("infer: terminated")
        return TERMINATED
    except (ReaderGone, BrokenPipeError):
        _discard_stdout()
        return READER_GONE
    except InferError as error:
        return _fail(str(error), error.exit_code)
    except OSError as error:
        _discard_stdout()
        if error.errno == errno.ENOMEM:
            return _fail(_OUT_OF_MEMORY, 1)
        # Help is written by typer; whatever else writes names its file.
        unnamed = "stdout: cannot write: " if error.errno in _NO_ROOM else ""
        where = unnamed if error.filename is None else f"{error.filename}: "
        return _fail(f"{where}{error.strerror or error}", 1)
    except MemoryError:
        return _fail(_OUT_OF_MEMORY, 1)
    except ImportError as error:
        return _fail(f"a library cannot be loaded: {error}; check memory limits, or install infer again", 1)
    except Exception as error:  # noqa: BLE001 (the last line of defence: no traceback for the user)
        if hasattr(error, "format_message"):  # typer's usage errors, whose class it does not export
            return _fail(_usage_message(error), getattr(error, "exit_code", 2))
        if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _NO_MEMORY_WORDS):
            return _fail(_OUT_OF_MEMORY, 1)
        text = f"{type(error).__name__}: {error}"
        return _fail(f"unexpected {text}; this is a bug: run with {DEBUG}=1 and report what it prints", 1)


def _dispatch(arguments: Sequence[str]) -> int:
    try:
        command = with_commands(app, COMMANDS, "infer")
        result = command.main(args=list(arguments), prog_name="infer", standalone_mode=False)
    except SystemExit as end:
        # Shell completion ends this way, and so does typer when stdout breaks, which it takes for a failure.
        if isinstance(end.__context__, OSError) and end.__context__.errno == errno.EPIPE:
            raise ReaderGone("stdout") from None
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    if result == INTERRUPTED:
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0


def _usage_message(error: Exception) -> str:
    """typer's words, with what was meant, if something comes close, and where to read more."""
    context = getattr(error, "ctx", None)
    text: str = error.format_message()  # type: ignore[attr-defined]
    if context is not None and hasattr(error, "possibilities") and hasattr(error, "option_name"):
        words = [word for item in context.command.get_params(context) for word in item.opts]
        text = f"No such option: {error.option_name}{did_you_mean(error.option_name, words)}"
    text = re.sub(r"\. Did you mean (.*)\?$", r" (did you mean \1?)", text)
    return f"{text.rstrip('.')}; see `{getattr(context, 'command_path', 'infer')} --help`"


def _fail(message: str, code: int) -> int:
    if os.environ.get(DEBUG) == "1":
        traceback.print_exc()
    say(f"infer: error: {message}")
    return code


def _discard_stdout() -> None:
    """What Python still holds for a stdout that broke must not fail again at interpreter exit."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
