"""Whole runs on one prompt cache: killed, hindered, side by side. `support/run_faults.py` does more of the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent / "support"


def script(name: str, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SUPPORT / name), *arguments],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_killed_at_random_moments_of_the_store_phase() -> None:
    match = re.search(r"(\d+) of 25 runs died", script("run_faults.py", "random", "25"))
    assert match is not None
    assert int(match[1]) > 0


def test_a_fault_at_calls_all_over_a_run() -> None:
    match = re.search(
        r"^(\d+) faults",
        script("run_faults.py", "calls", "97", "KILL", "EIO", "ENOSPC+"),
        re.MULTILINE,
    )
    assert match is not None
    assert int(match[1]) > 12


def test_runs_beside_each_other_and_a_changed_model_file() -> None:
    assert script("run_together.py").count("\n") == 4
