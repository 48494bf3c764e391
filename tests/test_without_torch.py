"""Where the compiled kernels compute, torch is not imported: that takes longer, and more memory, than a small model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.quant.kernels.strips import STORED
from infer.runtime import device
from infer.runtime.errors import UsageError

pytestmark = pytest.mark.native
Tiny = Callable[..., Path]

#: runs a command line; what tries to import torch fails, and so does the command
FORBIDDEN = "import sys; sys.modules['torch'] = None; from infer.cli.main import invoke; sys.exit(invoke(sys.argv[1:]))"


def run(*arguments: str, home: Path, stdin: bytes = b"") -> bytes:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INFER_")}
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN, *arguments],
        env={**environment, "INFER_HOME": str(home), "INFER_DEVICE": "cpu"},
        input=stdin, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_a_gguf_file_runs(tiny_llama: Tiny, tmp_path: Path) -> None:
    model = str(tiny_llama(quant="Q4_K", rope_freqs=True))
    arguments = ["run", "-m", model, "-n", "4", "--seed", "1", "--raw", "Once upon a time"]
    first = run(*arguments, home=tmp_path)
    assert first
    assert run(*arguments, home=tmp_path) == first  # from the prompt cache
    for flags in (["--kv-type", "int8"], ["--kv-type", "bf16"], ["--temp", "0", "--repeat-penalty", "1.2"]):
        run(*arguments, *flags, home=tmp_path)


def test_every_type_is_read(tiny_llama: Tiny, tmp_path: Path) -> None:
    """All in one process, for speed; Q1_0 is one that gguf cannot write."""
    files = [str(tiny_llama(quant=name)) for name in sorted(STORED) if name != "Q1_0"]
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from infer.runtime.config import EngineConfig\n"
        "from infer.runtime.loader import load_model\n"
        "for path in sys.argv[2:]:\n"
        "    load_model(Path(path), EngineConfig(device='cpu', prefix_cache=False), memo_dir=Path(sys.argv[1])).close()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), *files], timeout=120, check=True)


@pytest.mark.parametrize("case", ["qwen2", "gemma3", "phi3", "llama, llama3"])
def test_a_folder_runs(hf_folder: Callable[..., tuple[Path, Any]], tmp_path: Path, case: str) -> None:
    path, _ = hf_folder(case)
    run("run", "-m", str(path), "-n", "4", "--seed", "1", "--raw", "Once upon a time", home=tmp_path)


def test_other_commands_run(tiny_llama: Tiny, tmp_path: Path) -> None:
    model = str(tiny_llama(quant="Q8_0"))
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    assert run("bench", "-m", model, "-p", "16", "-n", "4", "-r", "1", home=tmp_path)
    assert run("perplexity", "-m", model, "-f", str(text), "--ctx", "32", home=tmp_path)
    assert run("chat", "-m", model, "-n", "4", home=tmp_path, stdin=b"Hello\nAgain\n")


def test_without_a_driver_torch_is_not_asked_for_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda_is_possible", lambda: False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert str(device.resolve_device("auto")) == str(device.resolve_device("cpu")) == "cpu"
    with pytest.raises(UsageError, match="not known"):
        device.resolve_device("gpu")


@pytest.mark.parametrize(
    ("versions", "possible"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", False),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", True),
        ("cuda = '12.8'\nhip = None\n", True),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.1'\n", True),
        ("cuda: Optional[str] = None\n", True),  # in doubt
        ("", True),
        (None, True),
    ],
)
def test_a_torch_without_cuda_is_not_asked_for_cards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, versions: str | None, possible: bool
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('torch was imported')")
    if versions is not None:
        (package / "version.py").write_text(versions)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: None)  # there is a driver
    assert device.cuda_is_possible() == possible


def test_the_installed_torch_says_whether_it_has_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: None)
    assert device.cuda_is_possible() == (torch.version.cuda is not None or torch.version.hip is not None)
