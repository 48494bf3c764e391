"""`infer` beside llama.cpp on the same file: prefill, decode, time to the first token, peak memory. Prints Markdown.

Each run starts one process of `infer bench` and one of `llama-bench`, in turn, so that both meet the same weather;
a ratio (infer / llama.cpp) is taken within each pair, and the table has the medians. Both use random tokens, a KV
cache of half precision and chunks of 512, and warm up first. Leave the machine alone meanwhile: OpenMP, which
llama.cpp uses, stalls when a core is busy elsewhere.

    python benchmarks/compare_llama_cpp.py --llama-bin DIR -m model.gguf [-m other.gguf] --threads 2 --depth 0,4096
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INFER = [sys.executable, "-c", "from infer.cli.start import main; main()"]
INSTRUCTION_SETS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
    "sve",
)
PROMPT = "Once upon a time"


@dataclass(frozen=True)
class Program:
    """What a finished process said and used. rss: peak resident bytes."""

    stdout: str
    wall_s: float
    rss: int


def execute(command: Sequence[str]) -> Program:
    """Run a command to its end. Ends this program when it fails."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            last = err.read().decode(errors="replace").strip().splitlines()[-1:]
            sys.exit(f"{shlex.join(command)}: exit code {process.returncode}: {''.join(last)}")
        unit = 1 if sys.platform == "darwin" else 1024
        return Program(out.read().decode(errors="replace"), wall, usage.ru_maxrss * unit)


@dataclass(frozen=True)
class Row:
    """One test of one model: tokens per second of each run."""

    model: str
    test: str
    infer: list[float]
    llama: list[float]

    def markdown(self) -> str:
        ratios = [mine / theirs for mine, theirs in zip(self.infer, self.llama, strict=True)]
        cells = (
            self.model,
            self.test,
            f"{statistics.median(self.infer):.1f}",
            f"{statistics.median(self.llama):.1f}",
            f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})",
        )
        return "| " + " | ".join(cells) + " |"


def infer_command(options: argparse.Namespace, name: str, model: Path, *rest: str) -> list[str]:
    common = [
        "-m",
        str(model),
        "--threads",
        str(options.threads),
        "--kernel",
        options.kernel,
        "--device",
        "cpu",
    ]
    return [*INFER, name, *common, *rest]


def llama_command(options: argparse.Namespace, name: str, model: Path, *rest: str) -> list[str]:
    return [str(options.llama_bin / name), "-m", str(model), "-t", str(options.threads), "-ngl", "0", *rest]


def speed_rows(options: argparse.Namespace, model: Path, versions: dict[str, str]) -> list[Row]:
    """Prefill and decode at every depth, the two programs in turn."""
    names = {"prefill_tok_s": f"prefill {options.prefill}", "decode_tok_s": f"decode {options.decode}"}
    tests = [key for key, tokens in zip(names, (options.prefill, options.decode), strict=True) if tokens]
    rows: list[Row] = []
    for depth in options.depth:
        suffix = f" at depth {depth}" if depth else ""
        by_test = {key: Row(model.name, names[key] + suffix, [], []) for key in tests}
        sizes = [
            "-p",
            str(options.prefill),
            "-n",
            str(options.decode),
            "-d",
            str(depth),
            "-r",
            str(options.repetitions),
        ]
        for _ in range(options.runs):
            mine = json.loads(execute(infer_command(options, "bench", model, *sizes, "--json")).stdout)
            theirs = json.loads(
                execute(llama_command(options, "llama-bench", model, *sizes, "-o", "json")).stdout
            )
            versions["infer kernel"] = f"{mine['kernel']}, exact: {str(mine['exact']).lower()}"
            versions["llama.cpp"] = f"build {theirs[0]['build_number']} ({theirs[0]['build_commit']})"
            for key, row in by_test.items():
                row.infer.append(mine[key])
                row.llama.append(llama_rate(theirs, prefill=key == "prefill_tok_s"))
        rows += by_test.values()
    return rows


def llama_rate(found: list[dict[str, Any]], *, prefill: bool) -> float:
    """Median tokens per second of the one test of that kind in llama-bench's JSON."""
    test = next(one for one in found if bool(one["n_prompt"]) == prefill and bool(one["n_gen"]) != prefill)
    return statistics.median(test["samples_ts"])


def start_line(options: argparse.Namespace, model: Path) -> str:
    """Wall time and peak memory of a process that loads the model and answers with one token, beside one that imports
    torch and does nothing else."""
    commands = {
        "torch": [sys.executable, "-c", "import torch"],
        "infer": infer_command(
            options, "run", model, "--raw", "--no-cache", "-q", "-n", "1", "--temp", "0", PROMPT
        ),
    }
    if (options.llama_bin / "llama-completion").is_file():
        commands["llama.cpp"] = llama_command(
            options, "llama-completion", model, "-p", PROMPT, "-n", "1", "-no-cnv"
        )
    runs: dict[str, list[Program]] = {name: [] for name in commands}
    for _ in range(options.runs):
        for name, command in commands.items():
            runs[name].append(execute(command))
    wall = {name: statistics.median(run.wall_s for run in found) for name, found in runs.items()}
    peak = {name: statistics.median(run.rss for run in found) for name, found in runs.items()}
    size = model.stat().st_size
    ratio, theirs = "", ""
    if "llama.cpp" in runs:
        pairs = [
            mine.wall_s / other.wall_s for mine, other in zip(runs["infer"], runs["llama.cpp"], strict=True)
        ]
        ratio = f"**{statistics.median(pairs):.2f}** ({min(pairs):.2f} to {max(pairs):.2f})"
        theirs = f"{wall['llama.cpp']:.2f} | {ratio}"
    own = f"{peak['infer'] / 2**20:.0f}, {peak['infer'] / size:.2f} × the file"
    other = f"{peak['llama.cpp'] / 2**20:.0f}" if "llama.cpp" in peak else ""
    return (
        f"| {model.name} ({size / 2**20:.0f} MiB) | {wall['infer']:.2f} | {theirs or ' | '} "
        f"| {own} | {other} | {wall['torch']:.2f} s, {peak['torch'] / 2**20:.0f} MiB |"
    )


def machine() -> str:
    name, flags = platform.processor() or platform.machine(), set[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
    except OSError:
        pass
    found = ", ".join(flag for flag in INSTRUCTION_SETS if flag in flags)
    return f"{name}, {os.cpu_count()} processors ({found}), {platform.system()} {platform.release()}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--llama-bin", type=Path, required=True, help="folder of llama-bench (and llama-completion)"
    )
    parser.add_argument(
        "-m", "--model", type=Path, action="append", required=True, help="GGUF file; repeatable"
    )
    parser.add_argument("-p", "--prefill", type=int, default=512)
    parser.add_argument("-n", "--decode", type=int, default=128)
    parser.add_argument(
        "-r", "--repetitions", type=int, default=1, help="within each process, after its warm-up"
    )
    parser.add_argument("--runs", type=int, default=5, help="pairs of processes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernel", default="auto", help="infer's --kernel")
    parser.add_argument("--depth", default="0", help="tokens of context before a test, several with commas")
    parser.add_argument("--no-speed", action="store_true", help="leave out prefill and decode")
    parser.add_argument("--no-start", action="store_true", help="leave out time to first token and memory")
    options = parser.parse_args()
    options.depth = [int(depth) for depth in options.depth.split(",")]
    for model in options.model:
        if not model.is_file():
            parser.error(f"{model} is not a file")
    if not (options.llama_bin / "llama-bench").is_file():
        parser.error(f"{options.llama_bin} holds no llama-bench")

    versions = {name: importlib.metadata.version(name) for name in ("infer-local", "torch")}
    if not options.no_speed:
        rows = [row for model in options.model for row in speed_rows(options, model, versions)]
        print(
            f"\n| model | test | infer, tok/s | llama.cpp, tok/s | infer / llama.cpp, {options.runs} pairs |"
        )
        print("|---|---|---:|---:|---:|")
        for row in rows:
            print(row.markdown())
    if not options.no_start:
        print("\nFrom the start of the process to its end after one token:\n")
        print(
            "| model | infer, s | llama.cpp, s | infer / llama.cpp | infer, MiB | llama.cpp, MiB | import torch |"
        )
        print("|---|---:|---:|---:|---:|---:|---:|")
        for model in options.model:
            print(start_line(options, model))
    print(f"\nMachine: {machine()}; {options.threads} threads.")
    print("Versions: " + ", ".join(f"{name} {value}" for name, value in versions.items()) + ".")
    shown = [Path(word).name if os.sep in word else word for word in sys.argv]
    print(f"Command: `{shlex.join(shown)}`")


if __name__ == "__main__":
    main()
