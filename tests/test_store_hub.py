"""Hub repositories: which file is taken, what is cached, and what its errors become. No network."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from pathlib import Path

import huggingface_hub
import pytest
from fake_wheels import CONTENT, files_below, make_entry
from huggingface_hub import constants, errors
from huggingface_hub.hf_api import RepoFile, RepoFolder

from infer.runtime.errors import DownloadError, ModelNotFoundError
from infer.runtime.store import hub, pull
from infer.runtime.store.catalog import HubSource
from infer.runtime.store.hub import HubModel, HubOptions
from infer.runtime.store.paths import DataDirs


def options(notes: list[str] | None = None, **more: bool) -> HubOptions:
    return HubOptions(lambda *_: None, (notes if notes is not None else []).append, **more)


MODEL = HubModel("org/repo")


def test_the_only_gguf_file_is_chosen() -> None:
    notes: list[str] = []
    sizes = {"README.md": 1, "mmproj-model-f16.gguf": 5, "a.gguf": 7, "x.safetensors": 9}
    assert hub.choose(MODEL, sizes, notes.append) == "a.gguf"
    assert hub.choose(MODEL, {"s-00002-of-00002.gguf": 1, "s-00001-of-00002.gguf": 1}, notes.append) == (
        "s-00001-of-00002.gguf"
    )
    assert notes == []


def test_the_only_q4_k_m_is_chosen_and_that_is_said() -> None:
    notes: list[str] = []
    sizes = {"m-Q8_0.gguf": 5, "m-Q4_K_M.gguf": 7, "m-Q4_K_S.gguf": 9}
    assert hub.choose(MODEL, sizes, notes.append) == "m-Q4_K_M.gguf"
    assert notes == ["hf:org/repo: using m-Q4_K_M.gguf of 3 GGUF files; name another as hf:org/repo:FILE"]


def test_nothing_further_is_guessed() -> None:
    with pytest.raises(
        ModelNotFoundError, match=r"say which file, as hf:org/repo:FILE: a\.gguf \(5 MB\), b\.gguf"
    ):
        hub.choose(MODEL, {"b.gguf": 7, "a.gguf": 5_000_000}, [].append)
    many = {f"{number:03d}.gguf": 1 for number in range(40)}
    with pytest.raises(ModelNotFoundError, match="… 28 more"):
        hub.choose(MODEL, many, [].append)
    with pytest.raises(ModelNotFoundError, match=r"neither \.gguf nor \.safetensors"):
        hub.choose(MODEL, {"pytorch_model.bin": 1}, [].append)
    assert hub.choose(MODEL, {"model.safetensors": 1}, [].append) is None
    with pytest.raises(DownloadError, match="unsafe"):
        hub.choose(MODEL, {"../../a.gguf": 1}, [].append)


def test_shards_are_named_from_any_of_them() -> None:
    assert hub.shards("d/m-00002-of-00003.gguf") == [f"d/m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert hub.shards("m.gguf") == ["m.gguf"]
    assert hub.shards("m-00001-of-99999.gguf") == ["m-00001-of-99999.gguf"]


def fail_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def hf_hub_download(**_: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)


def hub_errors() -> list[tuple[Exception, type[Exception], str]]:
    base = next(kind for kind in errors.HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
    http = importlib.import_module(base.__module__.partition(".")[0])  # httpx, or what came after it

    def answered(kind: type[Exception], status: int) -> Exception:
        response = http.Response(status, request=http.Request("GET", "https://hub.test/x"))
        return kind("many\nlines", response=response)  # type: ignore[call-arg]

    return [
        (answered(errors.GatedRepoError, 403), DownloadError, "is gated: accept its terms at .*HF_TOKEN"),
        (answered(errors.RepositoryNotFoundError, 404), ModelNotFoundError, "has no such repository"),
        (answered(errors.RevisionNotFoundError, 404), ModelNotFoundError, "has no revision"),
        (answered(errors.RemoteEntryNotFoundError, 404), ModelNotFoundError, "holds no such file"),
        (answered(errors.HfHubHTTPError, 401), DownloadError, "HTTP status 401; set HF_TOKEN"),
        (answered(errors.HfHubHTTPError, 503), DownloadError, "HTTP status 503; try again"),
        (errors.LocalEntryNotFoundError("x\ny"), DownloadError, "cannot reach https?://"),
        (base("no route"), DownloadError, "cannot reach https?://"),
        (ConnectionError("no route"), DownloadError, "cannot reach https?://"),
        (OSError(28, "No space left on device"), DownloadError, "No space left on device"),
        (ValueError("first\nsecond"), DownloadError, "the download failed: first$"),
    ]


@pytest.mark.parametrize("number", range(11))
def test_hub_errors_are_one_line(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    error, kind, said = hub_errors()[number]
    fail_with(monkeypatch, error)
    with pytest.raises(kind, match=said) as caught:
        hub.fetch(HubModel("org/repo", "a.gguf"), options())
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("hf:org/repo:a.gguf")


def hub_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """The library's cache, moved to `folder`, with one repository of two files in it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    repository = folder / "models--org--repo"
    commit = "c" * 40
    snapshot = repository / "snapshots" / commit
    (snapshot / "sub").mkdir(parents=True)
    (snapshot / "sub" / "a.gguf").write_bytes(b"GGUF")
    (snapshot / "config.json").write_bytes(b"{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return snapshot


def test_offline_the_hub_gives_what_is_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    snapshot = hub_cache(monkeypatch, tmp_path)
    offline = options(offline=True)
    assert hub.fetch(MODEL, offline) == snapshot / "sub" / "a.gguf"
    assert hub.cached_files() == [(HubModel("org/repo", "sub/a.gguf"), snapshot / "sub" / "a.gguf", 4)]
    (snapshot / "sub" / "a.gguf").rename(snapshot / "model.safetensors")
    assert hub.cached_files() == [(HubModel("org/repo"), snapshot, 6)]
    for missing in (HubModel("org/repo", "b.gguf"), HubModel("org/other")):
        with pytest.raises(DownloadError, match="is not in the hub's cache"):
            hub.fetch(missing, offline)


@pytest.mark.parametrize("ref", ["../../..", "", "c" * 39, "\0" * 40])
def test_a_strange_hub_cache_is_an_empty_one(
    ref: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub_cache(monkeypatch, tmp_path)
    (tmp_path / "models--org--repo" / "refs" / "main").write_text(ref)
    assert hub.cached_files() == []


def test_a_hub_file_in_the_cache_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fail_with(monkeypatch, AssertionError("asked the network"))
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda repo, name, revision=None: str(tmp_path / name)
    )
    model = HubModel("org/repo", "m-00002-of-00002.gguf")
    assert hub.fetch(model, options()) == tmp_path / "m-00001-of-00002.gguf"


def test_a_hub_repository_is_listed_and_its_file_downloaded_with_progress(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = RepoFile(path="a.gguf", size=5, oid="x")
    folder = RepoFolder(path="sub", oid="x")
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", lambda self, repo, **_: [folder, entry])
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)

    def hf_hub_download(*, repo_id: str, filename: str, tqdm_class: type, **_: object) -> str:
        with tqdm_class(total=5, initial=0, desc=filename, unit="B", unit_scale=True) as bar:
            bar.update(2)
            bar.update(3)
        return str(tmp_path / repo_id / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    steps: list[tuple[int, int, str]] = []
    path = hub.fetch(MODEL, HubOptions(lambda *step: steps.append(step), [].append))
    assert path == tmp_path / "org/repo/a.gguf"
    assert steps == [(2, 5, "a.gguf"), (5, 5, "a.gguf")]


FOLDER = {
    "config.json": 1, "tokenizer.json": 1, "model-00001-of-00002.safetensors": 1, "model-00002-of-00002.safetensors": 1,
    "model.safetensors.index.json": 1, "chat_template.jinja": 1, "tokenizer.model": 1,
}  # fmt: skip
LEFT = {
    "pytorch_model.bin": 9, "modeling_evil.py": 9, "consolidated.safetensors": 9, "original/model.safetensors": 9,
    "onnx/config.json": 9, "README.md": 9, "vocab.json": 9, "training_args.bin": 9,
}  # fmt: skip


def test_of_a_safetensors_repository_only_its_checkpoint_is_taken() -> None:
    assert hub.folder_files({**FOLDER, **LEFT}) == sorted(FOLDER)
    assert hub.folder_files({"config.json": 1, "weights.safetensors": 1, "x/y.safetensors": 1}) == [
        "config.json",
        "weights.safetensors",
    ]


def test_a_safetensors_repository_becomes_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entries = [RepoFile(path=name, size=size, oid="x") for name, size in {**FOLDER, **LEFT}.items()]
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", lambda self, repo, **_: entries)
    cached = {"config.json": str(tmp_path / "old" / "config.json")}
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda repo, name, revision=None: cached.get(name)
    )
    asked: list[str] = []

    def hf_hub_download(*, filename: str, **_: object) -> str:
        asked.append(filename)
        return str(tmp_path / "new" / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    assert hub.fetch(MODEL, options()) == tmp_path / "new"
    assert set(asked) == set(FOLDER)


def test_a_catalog_entry_from_the_hub_is_checked_like_any_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dirs = DataDirs.from_home(tmp_path / "home")
    content = [b"wrong"]

    def hf_hub_download(*, filename: str, local_dir: Path, **_: object) -> str:
        local_dir.mkdir(parents=True, exist_ok=True)
        (local_dir / filename).write_bytes(content[0])
        return str(local_dir / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    entry = dataclasses.replace(make_entry(()), sources=(HubSource("org/repo", "a.gguf", "c" * 40),))
    with pytest.raises(DownloadError, match="another sha256"):
        pull.pull(entry, dirs)
    assert files_below(dirs.models) == []
    content[0] = CONTENT
    assert pull.pull(entry, dirs).read_bytes() == CONTENT
    assert files_below(dirs.models) == ["tiny-test.gguf", "tiny-test.gguf.json"]


def test_the_library_writes_no_lines_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("huggingface_hub.utils._http")

    def fail(*arguments: object, **more: object) -> None:
        logger.warning("thrown while requesting")
        raise errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    level = logging.getLogger("huggingface_hub").level
    with pytest.raises(DownloadError, match="cannot reach"):
        hub.fetch_into(dataclasses.replace(MODEL, file="a.gguf"), Path("x"), options())
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("huggingface_hub").level == level
