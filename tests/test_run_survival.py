"""Whole runs killed or hindered in what they do to the prompt cache; `support/run_faults.py` does more of the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

FAULTS = Path(__file__).parent / "support" / "run_faults.py"


def faults(*arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(FAULTS), *arguments],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_killed_at_random_moments_of_the_store_phase() -> None:
    match = re.search(r"(\d+) of 25 runs died", faults("random", "25"))
    assert match is not None
    assert int(match[1]) > 0


def test_a_fault_at_calls_all_over_a_run() -> None:
    match = re.search(
        r"^(\d+) faults", faults("calls", "53", "KILL", "EIO", "ENOSPC+", "EMFILE"), re.MULTILINE
    )
    assert match is not None
    assert int(match[1]) > 20
