"""What a model name means, which names are safe, and what may be removed from the store."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from infer.runtime.errors import DownloadError, ModelError, ModelNotFoundError, UsageError
from infer.runtime.store import catalog, local
from infer.runtime.store.files import check_remote_name, human_size
from infer.runtime.store.hub import HubModel
from infer.runtime.store.lock import exclusive
from infer.runtime.store.paths import DataDirs
from infer.runtime.store.resolve import CatalogModel, LocalPath, resolve

NAME = "tiny-test-model"
ENTRY = dataclasses.replace(catalog.CATALOG[0], name=NAME)


@pytest.fixture
def dirs(tmp_path: Path) -> DataDirs:
    return DataDirs.from_home(tmp_path / "home")


@pytest.mark.parametrize("name", ["a.gguf", "sub/a-b_c.1.gguf", "ünï.gguf", "a b.gguf"])
def test_plain_remote_names(name: str) -> None:
    assert check_remote_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "..", "../a", "a/../b", "/a", "a//b", "./a", "a/", "C:\\a", "a\\b", "a\0b", "a\nb", "a\x1b[2Jb",
     "\x9b", "a\u202egpj.exe", " a", "a ", "x" * 300, "C:a", "a\ud800"],
)  # fmt: skip
def test_remote_names_that_could_leave_the_folder_or_fool_a_terminal(name: str) -> None:
    with pytest.raises(DownloadError, match="unsafe file name") as caught:
        check_remote_name(name)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (98_362_432, "98.4 MB"), (999_600_000, "1 GB"),
     (1_117_320_768, "1.12 GB"), (5 * 10**15, "5000 TB")],
)  # fmt: skip
def test_sizes(size: int, text: str) -> None:
    assert human_size(size) == text


def test_what_a_model_name_means(dirs: DataDirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.gguf").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "home").mkdir()
    dirs.models.mkdir()
    (dirs.models / "stored.gguf").touch()
    (dirs.models / "here.gguf").touch()
    known = (ENTRY, *catalog.CATALOG)

    def meaning(spec: str | None) -> object:
        return resolve(spec, dirs, catalog=known)

    default = meaning(None)
    assert isinstance(default, CatalogModel)
    assert default.entry.name == catalog.DEFAULT_MODEL
    assert meaning(NAME) == meaning("Tiny-TEST-Model") == CatalogModel(ENTRY)
    assert meaning("here.gguf") == LocalPath(Path("here.gguf"))
    assert meaning("stored.gguf") == LocalPath(dirs.models / "stored.gguf")
    assert meaning("folder") == LocalPath(Path("folder"))
    assert meaning("hf:org/repo") == HubModel("org/repo")
    assert meaning("hf:org/repo:sub/a.gguf") == HubModel("org/repo", "sub/a.gguf")
    (tmp_path / NAME).mkdir()
    assert meaning(NAME) == LocalPath(Path(NAME))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert meaning("~/here.gguf") == LocalPath(tmp_path / "here.gguf")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("smollm2-135m", "did you mean smollm2-135m-instruct"),
        ("nothing-like-it", "no model is called 'nothing-like-it'; the catalog has smollm2"),
        ("no/such", "no such file"),
        ("./smollm2-135m-instruct", "no such file"),
        ("gone.gguf", "no such file"),
        ("x" * 5000 + "/y", "no such file"),
        ("a\0b/c", "no such file"),
        ("/dev/null", "neither a file nor a folder"),
        ("hf:", "not of the form"),
        ("hf:repo", "not of the form"),
        ("hf:../repo", "not of the form"),
        ("hf:org/repo/../../x", "not of the form"),
        ("hf:org/repo:", "must name a .gguf file"),
        ("hf:org/repo:model.bin", "must name a .gguf file"),
    ],
)
def test_names_that_mean_nothing(spec: str, said: str, dirs: DataDirs) -> None:
    with pytest.raises(ModelNotFoundError, match=said):
        resolve(spec, dirs)


def test_names_that_are_refused(dirs: DataDirs) -> None:
    with pytest.raises(DownloadError, match="unsafe"):
        resolve("hf:org/repo:../../x.gguf", dirs)
    with pytest.raises(UsageError, match="empty"):
        resolve(" ", dirs)


def test_folders_follow_the_platform_unless_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    moved = DataDirs.from_home(tmp_path)
    assert {path.parent for path in dataclasses.astuple(moved)} == {tmp_path}
    if sys.platform == "linux":
        assert DataDirs.from_home().models == tmp_path / "XDG_DATA_HOME" / "infer" / "models"
        assert DataDirs.from_home().cache == tmp_path / "XDG_CACHE_HOME" / "infer"


@pytest.mark.parametrize(
    "name", ["../outside.gguf", "/etc/passwd", "a/b.gguf", "..", ".", "", ".partial", "a\\b"]
)
def test_removal_refuses_paths(name: str, dirs: DataDirs) -> None:
    dirs.models.mkdir(parents=True)
    outside = dirs.models.parent / "outside.gguf"
    outside.touch()
    with pytest.raises(UsageError, match="is not a name in the model store"):
        local.remove(name, dirs)
    assert outside.exists()


def test_removal_of_a_link_leaves_what_it_points_to(dirs: DataDirs, tmp_path: Path) -> None:
    dirs.models.mkdir(parents=True)
    target = tmp_path / "precious.gguf"
    target.write_bytes(b"precious")
    (dirs.models / "link.gguf").symlink_to(target)
    local.remove("link.gguf", dirs)
    assert target.read_bytes() == b"precious"
    assert not os.path.lexists(dirs.models / "link.gguf")


def test_removal_touches_model_files_only(dirs: DataDirs) -> None:
    (dirs.models / "folder.gguf").mkdir(parents=True)
    (dirs.models / "notes.txt").touch()
    with pytest.raises(ModelError, match="is not a file"):
        local.remove("folder.gguf", dirs)
    with pytest.raises(ModelNotFoundError):
        local.remove("notes.txt", dirs)
    assert (dirs.models / "notes.txt").exists()


def test_removal_waits_for_no_download(dirs: DataDirs) -> None:
    partial = dirs.models / ".partial"
    partial.mkdir(parents=True)
    with (
        exclusive(partial / f"{ENTRY.sha256}.lock", busy="", notify=None),
        pytest.raises(ModelError, match="is being downloaded"),
    ):
        local.remove(NAME, dirs, (ENTRY,))


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platformdirs.user_state_dir", lambda *args, **kwargs: "~/.local/state/infer")
    with pytest.raises(UsageError, match="no home folder: set INFER_HOME"):
        DataDirs.from_home()
