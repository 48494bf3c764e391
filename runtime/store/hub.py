"""Models of a hub repository, through huggingface_hub and in its own cache.

The library brings resuming, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN along. Its files stay in its
cache; they are never copied. huggingface_hub is imported on first use.
"""

from __future__ import annotations

import errno
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infer.runtime.errors import DownloadError, InferError, ModelNotFoundError
from infer.runtime.store.files import Notify, Progress, check_remote_name, human_size
from infer.runtime.store.folders import describe_folder

PREFIX = "hf:"
_REPO = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_PREFERRED = "q4_k_m"
_MOST_SHARDS = 1000
# What a checkpoint folder is read from, beside its weights: never code, never pickles.
_FOLDER_FILES = frozenset(
    {
        "added_tokens.json", "chat_template.jinja", "chat_template.json", "config.json", "generation_config.json",
        "model.safetensors.index.json", "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
        "tokenizer_config.json",
    }
)  # fmt: skip
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True)
class HubModel:
    """`hf:org/repo[:file]`. file None: chosen from what the repository holds."""

    repo: str
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return f"{PREFIX}{self.repo}" + (f":{self.file}" if self.file else "")


@dataclass(frozen=True)
class HubOptions:
    """offline: no network at all. refresh: ask the hub for a newer version even if a copy is cached."""

    progress: Progress
    notify: Notify
    offline: bool = False
    refresh: bool = False


def parse(spec: str) -> HubModel:
    """`hf:org/repo[:file]` as a HubModel. Raises ModelNotFoundError naming the expected form."""
    repo, _, file = spec.removeprefix(PREFIX).partition(":")
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo:
        raise ModelNotFoundError(f"{spec!r} is not of the form hf:org/repo or hf:org/repo:file.gguf")
    if spec.endswith(":") or (file and not file.lower().endswith(".gguf")):
        raise ModelNotFoundError(f"{spec!r} must name a .gguf file behind the second colon")
    if file:
        check_remote_name(file)
    return HubModel(repo, file or None)


def fetch(model: HubModel, options: HubOptions) -> Path:
    """Path of the model in the hub's cache: the file (the first of a set of shards), or a safetensors folder.

    A cached file is used without asking the network, unless `refresh`. Raises DownloadError and
    ModelNotFoundError.
    """
    from huggingface_hub import constants

    offline = options.offline or constants.HF_HUB_OFFLINE
    with _explained(model, offline):
        file = model.file
        if file is None:
            sizes = _cached_sizes(model) if offline else _remote_sizes(model)
            file = choose(model, sizes, options.notify)
        if file is None:
            return _fetch_folder(model, folder_files(sizes), offline, options)
        paths = [_fetch_file(model, name, offline, options) for name in shards(file)]
    return paths[0]


def fetch_into(model: HubModel, folder: Path, options: HubOptions) -> Path:
    """Download the one file below `folder` instead of the cache: for models whose hash the catalog knows."""
    from huggingface_hub import hf_hub_download

    if model.file is None:
        raise DownloadError(f"{model}: the catalog names no file")
    with _explained(model, options.offline):
        name = check_remote_name(model.file)
        arguments = _arguments(model, name, hf_hub_download, options.progress)
        return Path(hf_hub_download(**arguments, local_dir=folder))


def choose(model: HubModel, sizes: Mapping[str, int], notify: Notify) -> str | None:
    """The GGUF file to use of a repository's files: the only one, else the only Q4_K_M, no further guess.

    sizes: file name → bytes. A set of shards counts as its first file. None: no GGUF but safetensors.
    Raises ModelNotFoundError listing the files.
    """
    candidates: dict[str, int] = {}
    for name, size in sorted(sizes.items()):
        if not name.lower().endswith(".gguf") or name.rpartition("/")[2].lower().startswith("mmproj"):
            continue
        check_remote_name(name)
        shard = _SHARD.fullmatch(name)
        first = f"{shard['stem']}-00001-of-{shard['count']}{name[-5:]}" if shard else name
        candidates[first] = candidates.get(first, 0) + size
    if not candidates:
        if any(name.lower().endswith(".safetensors") for name in sizes):
            return None
        raise ModelNotFoundError(f"{model}: the repository holds neither .gguf nor .safetensors files")
    if len(candidates) == 1:
        return next(iter(candidates))
    preferred = [name for name in candidates if _PREFERRED in name.lower()]
    if len(preferred) == 1:
        notify(f"{model}: using {preferred[0]} of {len(candidates)} GGUF files; name another as {model}:FILE")
        return preferred[0]
    listing = [f"{name} ({human_size(size)})" for name, size in candidates.items()]
    more = f", … {len(listing) - 12} more" if len(listing) > 12 else ""
    raise ModelNotFoundError(f"{model}: say which file, as {model}:FILE: " + ", ".join(listing[:12]) + more)


def folder_files(sizes: Mapping[str, int]) -> list[str]:
    """The files of a repository that make a checkpoint folder: `model*.safetensors`, else the only safetensors file."""
    weights = [name for name in sizes if _WEIGHTS.fullmatch(name)]
    if not weights:
        weights = [name for name in sizes if name.endswith(".safetensors") and "/" not in name]
    return sorted({*weights, *(_FOLDER_FILES & sizes.keys())})


def shards(file: str) -> list[str]:
    """All files of the set that `file` belongs to (`…-00002-of-00005.gguf`), in order, or the file alone."""
    shard = _SHARD.fullmatch(file)
    count = int(shard["count"]) if shard else 1
    if not shard or not 1 <= count <= _MOST_SHARDS:
        return [file]
    return [f"{shard['stem']}-{number:05d}-of-{shard['count']}{file[-5:]}" for number in range(1, count + 1)]


def cached_files() -> list[tuple[HubModel, Path, int]]:
    """Models in the hub's cache, where they are, and their bytes: GGUF files, which `hf:org/repo:file` names, and
    checkpoint folders of repositories without one, which `hf:org/repo` does."""
    from huggingface_hub import constants

    found: list[tuple[HubModel, Path, int]] = []
    with suppress(OSError):
        for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
            repo = folder.name.removeprefix("models--").replace("--", "/", 1)
            snapshot = _snapshot(folder)
            if snapshot is None:
                continue
            files = [path for path in sorted(snapshot.rglob("*.gguf")) if path.is_file()]
            for path in files:
                name = path.relative_to(snapshot).as_posix()
                found.append((HubModel(repo, name), path, path.stat().st_size))
            facts = None if files else describe_folder(snapshot)
            if facts is not None:
                found.append((HubModel(repo), snapshot, facts.size))
    return found


def _fetch_file(model: HubModel, name: str, offline: bool, options: HubOptions) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    if not options.refresh:
        cached = try_to_load_from_cache(model.repo, name, revision=model.revision)
        if isinstance(cached, str):
            return Path(cached)
    arguments = _arguments(model, name, hf_hub_download, options.progress)
    return Path(hf_hub_download(**arguments, local_files_only=offline))


def _fetch_folder(model: HubModel, names: list[str], offline: bool, options: HubOptions) -> Path:
    folders = {_fetch_file(model, name, offline, options).parent for name in names}
    if len(folders) > 1 and not options.refresh:  # some were cached from before the repository changed
        return _fetch_folder(model, names, offline, replace(options, refresh=True))
    if len(folders) != 1:
        raise DownloadError(f"{model}: the repository changed during the download; run the command again")
    return folders.pop()


def _arguments(
    model: HubModel, name: str, function: Callable[..., Any], progress: Progress
) -> dict[str, Any]:
    arguments: dict[str, Any] = {"repo_id": model.repo, "filename": name, "revision": model.revision}
    if "tqdm_class" in inspect.signature(function).parameters:
        arguments["tqdm_class"] = _bar_class(progress)
    return arguments


def _remote_sizes(model: HubModel) -> dict[str, int]:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    entries = HfApi().list_repo_tree(model.repo, recursive=True, revision=model.revision)
    return {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}


def _cached_sizes(model: HubModel) -> dict[str, int]:
    from huggingface_hub import constants, errors

    snapshot = _snapshot(Path(constants.HF_HUB_CACHE) / f"models--{model.repo.replace('/', '--')}")
    if snapshot is None:
        raise errors.LocalEntryNotFoundError(f"{model} has no snapshot")
    files = (path for path in snapshot.rglob("*") if path.is_file())
    return {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in files}


def _snapshot(repository: Path) -> Path | None:
    """Folder of the cached files of the main branch: what a name without a revision means."""
    try:
        commit = (repository / "refs" / "main").read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    folder = repository / "snapshots" / commit
    return folder if _COMMIT.fullmatch(commit) and folder.is_dir() else None


def _bar_class(progress: Progress) -> type:
    """What huggingface_hub takes for its bar: the few methods of tqdm it calls, reporting to `progress`."""

    class Bar:
        def __init__(
            self, *_: object, total: float | None = None, initial: int = 0, desc: str = "", **__: object
        ):
            self.total, self.n, self.desc = total, initial, desc

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            progress(self.n, max(int(self.total or 0), self.n), self.desc)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def close(self) -> None:
            """Nothing is drawn here, so nothing is to be removed."""

        def refresh(self, *_: object, **__: object) -> None:
            """Drawn by `update`."""

        def set_description(self, desc: str | None = None, **_: object) -> None:
            self.desc = desc or ""

        def set_postfix_str(self, *_: object, **__: object) -> None:
            """Speeds are not shown."""

    return Bar


@contextmanager
def _silent_library() -> Iterator[None]:
    """Keep the library from writing a line on stderr for each attempt; errors are told by `_explained`."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _explained(model: HubModel, offline: bool) -> Iterator[None]:
    """Turn what the library raises into one line."""
    from huggingface_hub import constants, errors

    # httpx or its successor, whichever the library was built on.
    http_error: type[Exception] = getattr(errors, "HTTPError", errors.HfHubHTTPError)
    page = f"{constants.ENDPOINT}/{model.repo}"
    try:
        with _silent_library():
            yield
    except InferError:
        raise
    except errors.GatedRepoError:
        raise DownloadError(
            f"{model} is gated: accept its terms at {page}, then set HF_TOKEN or run `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"{model}: {constants.ENDPOINT} has no such repository, or a private one: "
            "check the name, or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelNotFoundError(f"{model}: {page} has no revision {model.revision!r}") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        if offline:
            raise DownloadError(
                f"{model} is not in the hub's cache, and this may not use the network: "
                f"run `infer pull {model}` with HF_HUB_OFFLINE unset"
            ) from None
        raise DownloadError(_unreachable(model, constants.ENDPOINT)) from None
    except errors.EntryNotFoundError:
        raise ModelNotFoundError(f"{model}: {page} holds no such file") from None
    except errors.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        hint = "set HF_TOKEN to a token with access" if status in (401, 403) else "try again later"
        raise DownloadError(
            f"{model}: {constants.ENDPOINT} answered with HTTP status {status}; {hint}"
        ) from None
    except (http_error, ConnectionError, TimeoutError):
        raise DownloadError(_unreachable(model, constants.ENDPOINT)) from None
    except OSError as error:
        full = " (the disk is full)" if error.errno == errno.ENOSPC else ""
        reason = error.strerror or str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DownloadError(f"{model}: the download failed: {reason}{full}") from None
    except (ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DownloadError(f"{model}: the download failed: {reason[:300]}") from None


def _unreachable(model: HubModel, endpoint: str) -> str:
    return (
        f"{model}: cannot reach {endpoint}; check the network, or set HF_ENDPOINT to a mirror, "
        "or HF_HUB_OFFLINE=1 to use what is cached"
    )
