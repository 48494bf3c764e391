"""`infer` as a stage of a shell pipeline, with a real engine: every row is a bash script on a tiny model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
JQ = "jq ." if shutil.which("jq") else f"{sys.executable} -m json.tool"
C_LOCALE = "env LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"
CRON = 'env -i PATH="$PATH" INFER_MODEL="$INFER_MODEL" XDG_DATA_HOME="$PWD" XDG_STATE_HOME="$PWD"'
CRON += ' XDG_CACHE_HOME="$PWD" XDG_CONFIG_HOME="$PWD"'
FLAGS = "--no-cache --threads 1 --temp 0 --ignore-eos -n 12"
TEXT = "python3 -c 'import json, sys; print(json.load(sys.stdin)[\"text\"])'"


@dataclass(frozen=True)
class Row:
    """script: `$R` answers the prompt behind it. out: what it prints, `{A}` being the answer. err: lines on stderr."""

    script: str
    out: str = "{A}"
    err: int = 0


ROWS: Mapping[str, Row] = {
    "json | jq": Row(f"$R --json fox | {JQ} | {TEXT}", "{A}\n"),
    # 0 where the pipe had taken all before its reader left.
    "jsonl | head -1": Row(
        "$R --jsonl fox | head -1 | cut -c-9; case ${PIPESTATUS[0]} in 0 | 141) echo well;; esac",
        '{"delta":\nwell\n',
    ),
    "xargs -P 4": Row("printf '%s\\n' a b c d | xargs -P 4 -I_ $R -o out-_ fox; cat out-*", "{A}{A}{A}{A}"),
    "find -exec": Row("printf fox | tee 1 > 2; find . -type f -exec $R -f {} \\;", "{A}{A}"),
    "here-document": Row("$R <<EOF\nfox\nEOF"),
    "here-string": Row("$R - <<< fox"),
    "process substitution": Row("$R -f <(printf fox)"),
    "pipe | tee | pipe": Row("printf fox | $R | tee copy | cat; cat copy", "{A}{A}"),
    "chat | tee": Row("printf 'fox\\n' | $C | tee copy | cat; cat copy", "{A}\n{A}\n"),
    "while read": Row(
        "printf 'fox\\nfox\\n' | while read -r line; do $R \"$line\" < /dev/null; done", "{A}{A}"
    ),
    "xargs -0": Row("printf fox > 'a b'; find . -name 'a*' -print0 | xargs -0 -n1 $R -f"),
    "timeout": Row("timeout 100 $R fox; timeout 0.1 $R fox; echo $?", "{A}124\n", 1),
    "nohup": Row("nohup $R fox < /dev/null"),
    "background": Row("$R fox & wait"),
    "cron: no HOME, no terminal": Row(f"{CRON} $R fox < /dev/null"),
    "closed stdin": Row("$R fox <&-"),
    "closed stdout": Row("$R fox >&-; echo $?", "1\n", 1),
    "closed stderr": Row("$R fox 2>&-"),
    "all closed": Row("$R fox <&- >&- 2>&-; echo $?", "1\n"),
    "C locale": Row(f'a=$($R größe); b=$({C_LOCALE} $R größe); [ "$a" = "$b" ] && echo same', "same\n"),
}


@pytest.fixture(scope="module")
def results(
    tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[subprocess.CompletedProcess[str]]]]:
    """All scripts, as many at a time as there are cores: most of their time is the import of torch."""
    base = tmp_path_factory.mktemp("pipelines")
    program = base / "bin" / "infer"
    program.parent.mkdir()
    path = os.environ.get("PYTHONPATH", "")
    program.write_text(
        f"#!/bin/sh\nPYTHONPATH='{path}' exec '{sys.executable}' -c 'from infer.cli.start import main; main()' \"$@\"\n"
    )
    program.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INFER_")}
    environment = {
        **kept,
        "PATH": f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "INFER_HOME": str(base / "home"),
        "INFER_MODEL": str(tiny_llama(quant="Q8_0")),
        "R": f"infer run {FLAGS}",
        "C": f"infer chat {FLAGS}",
    }

    def run(number: int, script: str) -> subprocess.CompletedProcess[str]:
        folder = base / str(number)
        folder.mkdir()
        return subprocess.run(
            ["bash", "-c", script], cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=300, check=False,
        )  # fmt: skip

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        scripts = {"alone": "$R fox", **{name: row.script for name, row in ROWS.items()}}
        yield {name: pool.submit(run, i, script) for i, (name, script) in enumerate(scripts.items())}


@pytest.mark.parametrize("name", ROWS)
def test_a_pipeline(name: str, results: Mapping[str, Future[subprocess.CompletedProcess[str]]]) -> None:
    alone, done = results["alone"].result(), results[name].result()
    assert (alone.returncode, alone.stderr) == (0, "")
    assert len(alone.stdout) > 1
    assert done.stderr.count("\n") <= ROWS[name].err, done.stderr
    assert done.stdout == ROWS[name].out.replace("{A}", alone.stdout), done.stderr
