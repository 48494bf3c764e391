"""Runs the commands of the README's picture with the default model and writes docs/demo.svg.

    python docs/record.py

The answers are those of fixed seeds and an empty prompt cache, so the same version writes the same file.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMANDS = (
    'infer run --seed 1 "Write a haiku about the sea."',
    'infer run --temp 0 -x "Write a Python function that adds two numbers." | tee add.py',
    'infer run --temp 0 -f manual.txt "Which port does it listen on?"',
    'infer run --temp 0 -f manual.txt --json "On which port does it listen?" | jq -c .usage',
    'infer tokenize --json "Standard output is the answer." | jq -c .pieces',
)
MANUAL = (
    "The server listens on port 8080. To change it, set PORT in server.conf and restart the server.\n" * 8
)
WIDTH = 100


def run(command: str, folder: Path) -> str:
    """What the command prints in bash, where `infer` is the one this Python imports."""
    bash = f'infer() {{ "{sys.executable}" -c "from infer.cli.start import main; main()" "$@"; }}; {command}'
    environment = {**os.environ, "INFER_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(
        ["bash", "-c", bash], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def main() -> None:
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "manual.txt").write_text(MANUAL)
        for command in COMMANDS:
            console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
            console.print(Text(run(command, folder).strip()))
            console.print()
    target = Path(__file__).parent / "demo.svg"
    target.write_text(console.export_svg(title="infer", unique_id="infer"), encoding="utf-8")


if __name__ == "__main__":
    main()
