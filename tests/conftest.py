"""Fixtures every test may use: tiny random models, the real default model, and the GPU gate."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from infer.runtime.loader import LoadedModel

MODEL_VARIABLE = "INFER_TEST_MODEL"
OFFLINE_VARIABLE = "INFER_OFFLINE_TESTS"
TEST_MODEL = "smollm2-135m-instruct"


def pytest_configure() -> None:
    # A shell's background job ignores SIGINT, nohup SIGHUP, and so would every process that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu on a machine without CUDA, and those marked native without the library; what tells is
    imported only if there are any."""
    gates = (
        ("gpu", _has_cuda, "no CUDA device"),
        ("native", _has_native, "the native library was not built here"),
    )
    for name, offered, reason in gates:
        marked = [item for item in items if item.get_closest_marker(name)]
        if marked and not offered():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _has_native() -> bool:
    from infer.quant.kernels import native

    return native.available()


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """`hf_folder(case, dtype)`: a checkpoint folder of `hf_folders.CASES`, and transformers' model of it; not to be
    changed."""
    from hf_folders import folder_maker

    return folder_maker(tmp_path_factory.mktemp("folders"))


@pytest.fixture
def hf_folder_copy(hf_folder: Callable[..., tuple[Path, Any]], tmp_path: Path) -> Callable[..., Path]:
    """The same to be changed, as `hf_folders.folder_copier` says."""
    from hf_folders import folder_copier

    return folder_copier(hf_folder, tmp_path / "copy")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_llama(path=None, **options)` writes a tiny random GGUF model and returns its path.

    The options are those of `tiny_models.TinyOptions`. Without a path, equal options give one shared file:
    read it, never write to it.
    """
    from tiny_models import TinyOptions, write_tiny

    folder = tmp_path_factory.mktemp("tiny")
    written: dict[str, Path] = {}

    def make_tiny(path: Path | None = None, **options: Any) -> Path:
        resolved = TinyOptions(**options)
        if path is not None:
            return write_tiny(path, resolved)
        if resolved.add:  # arrays have no faithful repr to look a file up by
            return write_tiny(folder / f"added-{len(list(folder.iterdir()))}.gguf", resolved)
        if repr(resolved) not in written:
            written[repr(resolved)] = write_tiny(folder / f"{resolved.arch}-{len(written)}.gguf", resolved)
        return written[repr(resolved)]

    return make_tiny


@pytest.fixture
def open_model(tmp_path: Path) -> Iterator[Callable[..., LoadedModel]]:
    """`open_model(path, **settings)` loads a model on the CPU with one thread; all are closed afterwards."""
    from infer.runtime.config import EngineConfig
    from infer.runtime.loader import load_model

    opened: list[LoadedModel] = []

    def load(path: Path, **settings: Any) -> LoadedModel:
        config = EngineConfig(**{"device": "cpu", "threads": 1, **settings})
        opened.append(load_model(path, config, memo_dir=tmp_path))
        return opened[-1]

    yield load
    for model in opened:
        model.close()


@pytest.fixture
def scripted_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """INFER_HOME for commands with a `scripted_model.ScriptedModel`; no other setting is in the environment."""
    from scripted_model import stub_engine

    for variable in list(os.environ):
        if variable.startswith("INFER_"):
            monkeypatch.delenv(variable)
    stub_engine(monkeypatch)
    monkeypatch.setenv("INFER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def tiny_infer(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_llama: Callable[..., Path],
) -> Callable[..., tuple[int, str, str]]:
    """`tiny_infer(*arguments, stdin=b"")` runs `infer` on a tiny model with one thread: exit code, stdout, stderr."""
    from command_line import call

    monkeypatch.setenv("INFER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("INFER_MODEL", str(tiny_llama(quant="Q8_0")))
    monkeypatch.setenv("INFER_THREADS", "1")
    return lambda *arguments, stdin=b"": call(arguments, monkeypatch, capsys, stdin)


@pytest.fixture
def scripted_infer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """`scripted_infer(*arguments, stdin=b"", script={})` runs `infer` with a `scripted_model.ScriptedModel`, which is
    then its attribute `model`."""
    from command_line import call
    from scripted_model import Script, ScriptedModel, install, stub_engine

    stub_engine(monkeypatch)
    monkeypatch.setenv("INFER_HOME", str(tmp_path / "home"))
    for name in ("INFER_MODEL", "INFER_THREADS"):
        monkeypatch.delenv(name, raising=False)

    def run(
        *arguments: str, stdin: bytes = b"", script: dict[str, Any] | None = None
    ) -> tuple[int, str, str]:
        run.model = ScriptedModel(Script(**script or {}))  # type: ignore[attr-defined]
        install(run.model, monkeypatch.setattr)  # type: ignore[attr-defined]
        return call(arguments, monkeypatch, capsys, stdin)

    return run


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct file: the one INFER_TEST_MODEL names, else the store's (pulled once).

    With INFER_OFFLINE_TESTS=1 nothing is pulled, and the tests that need a missing file are skipped.
    """
    given = os.environ.get(MODEL_VARIABLE)
    if given:
        path = Path(given)
        if not path.is_file():
            pytest.fail(f"{MODEL_VARIABLE} names {given}, which is not a file")
        return path
    from infer.runtime.errors import InferError
    from infer.runtime.store.paths import DataDirs
    from infer.runtime.store.pull import PullOptions, ensure_local
    from infer.runtime.store.resolve import resolve

    home = os.environ.get("INFER_HOME")
    dirs = DataDirs.from_home(Path(home) if home else None)
    offline = os.environ.get(OFFLINE_VARIABLE) == "1"
    try:
        return ensure_local(resolve(TEST_MODEL, dirs), dirs, PullOptions(offline=offline))
    except InferError as error:
        if offline:
            pytest.skip(f"{OFFLINE_VARIABLE}=1 and no copy of {TEST_MODEL}: {error}")
        pytest.fail(f"{error}; or set {MODEL_VARIABLE} to the file, or {OFFLINE_VARIABLE}=1 to go without it")
