"""Compiles the C++ sources under `cpu/` into the shared library that `native` loads.

`setup.py` calls it for a wheel and for an editable install; `python -m infer.quant.kernels.build` rebuilds in place.
It needs nothing but the standard library and a C++17 compiler, and names no instruction set: the sources hold all of
them and choose at run time.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIBRARY = "_infer_cpu.so"
SOURCES = Path(__file__).resolve().parent / "cpu"

# The C driver, since the C++ one would add the C++ runtime library, which the sources do not use.
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-ffp-contract=off",
    "-fvisibility=hidden",
)  # fmt: skip


class BuildError(Exception):
    """There is no compiler, or it failed; the message is one line."""


def find_compiler() -> str:
    """A compiler on the path that knows C++. Raises BuildError."""
    for name in COMPILERS:
        found = shutil.which(name)
        if found and _succeeds([found, "-x", "c++", "-std=c++17", "-fsyntax-only", os.devnull]):
            return found
    raise BuildError(f"no C++17 compiler found (looked for {', '.join(COMPILERS)})")


def build(target: Path, compiler: str | None = None, extra: Sequence[str] = ()) -> Path:
    """Compiles every source and links `target`, which appears whole or not at all.

    extra: more flags for compiling and linking. Raises BuildError.
    """
    if sysconfig.get_platform().startswith("win"):
        raise BuildError("the native kernels need a POSIX system")
    compiler = compiler or find_compiler()
    sources = sorted(SOURCES.glob("*.cpp"))
    if not sources:
        raise BuildError(f"no sources in {SOURCES}")
    with tempfile.TemporaryDirectory(prefix="infer-build-") as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]

        def compile_one(source: Path, output: Path) -> None:
            _run(
                [
                    compiler,
                    *FLAGS,
                    *target_flags(source, compiler),
                    *extra,
                    "-c",
                    str(source),
                    "-o",
                    str(output),
                ]
            )

        with ThreadPoolExecutor(os.cpu_count() or 1) as workers:
            list(workers.map(compile_one, sources, objects))
        linked = Path(folder) / LIBRARY
        _run([compiler, "-shared", *extra, "-o", str(linked), *map(str, objects), "-lpthread", "-lm"])
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            shutil.copy2(linked, staged)
            staged.replace(target)
        finally:
            staged.unlink(missing_ok=True)
    return target


def target_flags(source: Path, compiler: str) -> list[str]:
    """clang ignores `#pragma GCC target`: the same as options for this one file, if it is for this processor."""
    asked = re.search(r'#pragma GCC target\("([^"]*)"\)', source.read_text(encoding="utf-8"))
    if asked is None or not _is_clang(compiler):
        return []
    arm = asked[1].startswith("arch=")
    if arm != (platform.machine() in ("aarch64", "arm64")):
        return []
    return [f"-m{feature}" for feature in asked[1].split(",")]


def _is_clang(compiler: str) -> bool:
    try:
        return (
            "clang"
            in subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
        )
    except OSError:
        return False


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as e:
        raise BuildError(f"{command[0]} cannot be run: {e.strerror}") from e
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{Path(command[0]).name} failed: {lines[0] if lines else 'no message'}")


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def main(arguments: Sequence[str]) -> int:
    """Builds beside this file; arguments are more compiler flags. Returns the exit code."""
    try:
        built = build(Path(__file__).resolve().with_name(LIBRARY), extra=arguments)
    except BuildError as e:
        sys.stderr.write(f"{e}\n")
        return 1
    sys.stdout.write(f"{built}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
