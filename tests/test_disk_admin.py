"""What `infer cache` can learn and do, below the command line."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from disk_store import FINGERPRINT, bytes_in, entry_of, files_in, ids_of, load, offer_prompt, open_store, save

from infer.runtime.errors import InferError
from infer.runtime.kvcache.disk import admin

OTHER = bytes(32)


def two_models(root: Path) -> None:
    save(root, [ids_of(1, 150)], label="first model")
    store = open_store(root, fingerprint=OTHER, label="second \x1b[31mmodel")
    offer_prompt(store, ids_of(2, 64), salt=b"other")
    store.flush(10)
    store.close()


def test_list_and_info(tmp_path: Path) -> None:
    two_models(tmp_path)
    for path in (tmp_path / "kv-v1" / OTHER[:16].hex()).glob("*.kv"):
        os.utime(path, (1000, 1000))
    first, second = admin.list_models(tmp_path)
    assert (first.folder, first.label) == (FINGERPRINT[:16].hex(), "first model")
    assert (first.entries, first.tokens) == (3, 150)
    assert abs(first.used_ns - time.time_ns()) < 60e9
    assert second.used_ns == 1000 * 10**9
    assert second.label == "second [31mmodel"
    info = admin.info(tmp_path, 123)
    assert (info.models, info.entries, info.tokens, info.limit) == (2, 4, 214, 123)
    assert info.nbytes >= bytes_in(tmp_path) - 100
    assert 0 < admin.info(tmp_path, None).limit <= 20 * 10**9


def test_nothing_there(tmp_path: Path) -> None:
    root = tmp_path / "none"
    assert admin.list_models(root) == []
    assert admin.info(root, None).entries == 0
    assert admin.verify(root).checked == 0
    assert admin.prune(root, 0) == admin.clear(root) == admin.Removal(0, 0, True)
    assert admin.remove_damaged(root, []) == admin.Removal(0, 0, True)
    assert not root.exists()


@pytest.mark.parametrize("damage", ["header", "payload", "short", "long", "empty", "renamed", "other model"])
def test_verify_finds_and_removes(tmp_path: Path, damage: str) -> None:
    store = open_store(tmp_path)
    keys = offer_prompt(store, ids_of(1, 200))
    store.flush(10)
    store.close()
    path = entry_of(tmp_path, keys[1])
    data = bytearray(path.read_bytes())
    if damage == "renamed":
        data[:] = entry_of(tmp_path, keys[2]).read_bytes()
    elif damage == "other model":
        other = open_store(tmp_path, fingerprint=OTHER)
        offer_prompt(other, ids_of(1, 64))
        other.flush(10)
        other.close()
        (found,) = (tmp_path / "kv-v1" / OTHER[:16].hex()).glob("*.kv")
        data[:] = found.read_bytes()
        found.unlink()
    elif damage in ("header", "payload"):
        data[50 if damage == "header" else 3000] ^= 4
    else:
        data[:] = {"short": data[:-1], "long": data + b"x", "empty": b""}[damage]
    path.write_bytes(data)
    steps: list[tuple[int, int]] = []
    report = admin.verify(tmp_path, on_progress=lambda done, total: steps.append((done, total)))
    assert report.checked == 4
    assert steps[-1][0] == steps[-1][1]
    (bad,) = report.damaged
    assert path.name in bad.path
    assert path.exists()
    assert admin.remove_damaged(tmp_path, report.damaged).entries == 1
    assert not path.exists()
    assert load(tmp_path, ids_of(1, 200)).tokens == 64
    assert admin.verify(tmp_path).damaged == ()


def test_what_was_replaced_since_is_not_removed(tmp_path: Path) -> None:
    save(tmp_path, [ids_of(1, 64)])
    (path,) = files_in(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(b"damaged")
    report = admin.verify(tmp_path)
    new = tmp_path / "new"
    new.write_bytes(whole)
    new.rename(path)
    assert admin.remove_damaged(tmp_path, report.damaged) == admin.Removal(0, 0, True)
    assert load(tmp_path, ids_of(1, 64)).tokens == 63


def test_verify_of_large_payloads_in_pieces(tmp_path: Path) -> None:
    per_token = 50_001
    store = open_store(tmp_path, per_token=per_token)
    offer_prompt(store, ids_of(1, 64), per_token)
    store.flush(10)
    store.close()
    assert admin.verify(tmp_path).damaged == ()


def test_verify_one_model(tmp_path: Path) -> None:
    two_models(tmp_path)
    assert admin.verify(tmp_path, OTHER[:16].hex()).checked == 1


def test_clear(tmp_path: Path) -> None:
    two_models(tmp_path)
    foreign = tmp_path / "kv-v2"
    foreign.mkdir()
    assert admin.clear(tmp_path, admin.model_name(OTHER)).entries == 1
    assert load(tmp_path, ids_of(1, 150)).tokens == 149
    removal = admin.clear(tmp_path)
    assert (removal.entries, removal.complete) == (3, True)
    assert [path for path in (tmp_path / "kv-v1").rglob("*") if path.is_file() and path.name != "lock"] == []
    assert foreign.exists()


def test_prune(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    keys = offer_prompt(store, ids_of(1, 300))
    offer_prompt(store, ids_of(2, 100))
    store.flush(10)
    store.close()
    entry_of(tmp_path, keys[1]).unlink()
    (entry_of(tmp_path, keys[0]).parent / "tmp-dead").touch(0o600)
    removal = admin.prune(tmp_path, 1 << 30)
    assert (removal.entries, removal.complete) == (3, True)  # the end of the chain that lost its middle
    assert len(files_in(tmp_path)) == 3
    assert files_in(tmp_path, "tmp-*") == []
    assert load(tmp_path, ids_of(2, 100)).tokens == 99
    assert load(tmp_path, ids_of(1, 300)).tokens == 64
    assert admin.prune(tmp_path, 0).entries == 3
    assert files_in(tmp_path) == []


def test_unsafe_folder(tmp_path: Path) -> None:
    save(tmp_path / "cache", [ids_of(1, 64)])
    (tmp_path / "cache").chmod(0o777)
    for act in (admin.list_models, admin.verify, admin.clear):
        with pytest.raises(InferError, match="writable"):
            act(tmp_path / "cache")
    assert len(files_in(tmp_path / "cache")) == 1
