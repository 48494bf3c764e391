"""The disk prefix cache finds exactly what was stored, for every history, and misses in every doubt."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from disk_store import (
    BLOCK,
    ENTRY,
    FINGERPRINT,
    PER_TOKEN,
    check_chain,
    entry_of,
    fail,
    files_in,
    ids_of,
    load,
    offer_prompt,
    open_store,
    payload_of,
    save,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.runtime.kvcache.disk import reader
from infer.runtime.kvcache.disk.format import HEADER_BYTES, Header
from infer.runtime.kvcache.disk.store import Chain, PrefixStore, StoreConfig


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 66, 127, 128, 129, 200, 640])
def test_same_prompt_in_a_new_run(tmp_path: Path, length: int) -> None:
    ids = ids_of(1, length)
    save(tmp_path, [ids])
    assert load(tmp_path, ids).tokens == length - 1


@pytest.mark.parametrize(
    ("stored", "asked", "shared", "expected"),
    [
        (200, 300, 200, 200),  # a prompt that continues a stored one
        (200, 201, 200, 200),
        (200, 199, 199, 192),  # one token less: the tail is too long
        (200, 150, 150, 128),
        (128, 300, 128, 128),
        (300, 300, 100, 64),  # another text within the second block
        (300, 300, 64, 64),
        (300, 300, 63, 0),
        (300, 300, 0, 0),
        (300, 64, 64, 63),  # the whole prompt is in a full block: its last token is computed
        (50, 300, 50, 50),
    ],
)
def test_other_prompts(tmp_path: Path, stored: int, asked: int, shared: int, expected: int) -> None:
    text = ids_of(1, stored)
    save(tmp_path, [text])
    ids = text[:shared] + ids_of(2, asked)[: asked - shared]
    assert load(tmp_path, ids).tokens == expected


def test_longest_tail_wins(tmp_path: Path) -> None:
    ids = ids_of(1, 120)
    save(tmp_path, [ids[:70], ids[:90], ids[:110], [*ids[:80], 7]])
    assert load(tmp_path, ids).tokens == 110
    assert load(tmp_path, ids[:100]).tokens == 90
    assert load(tmp_path, ids[:69]).tokens == 64


def test_blocks_in_memory_are_not_loaded(tmp_path: Path) -> None:
    ids = ids_of(1, 300)
    save(tmp_path, [ids])
    for have in range(5):
        chain = load(tmp_path, ids, have)
        assert chain.tokens == 299 - have * BLOCK
    assert load(tmp_path, ids[:257], 4).tokens == 0


@pytest.mark.parametrize("last", [1, 2, 5, 30])
def test_only_the_last_blocks_are_kept_of_a_chain_verified_as_a_whole(tmp_path: Path, last: int) -> None:
    ids = ids_of(1, 1300)
    save(tmp_path, [ids])
    keys = [entry.key for entry in load(tmp_path, ids).entries]
    store = open_store(tmp_path, load_bytes=(last + 1) * BLOCK * PER_TOKEN)
    for length in (1300, 1281, 1280, 1279, 700, 64):
        chain = store.find(ids[:length], last_blocks=last)
        assert chain.tokens == (1299 if length == 1300 else min(length - 1, length // BLOCK * BLOCK))
        whole = (length - 1) // BLOCK
        assert chain.passed == max(0, whole - last)
        check_payloads(chain, ids)
    entry_of(tmp_path, keys[10]).unlink()
    for damaged in (8, 3):
        flip(entry_of(tmp_path, keys[damaged]), 8000)
        chain = store.find(ids, last_blocks=last)
        assert (chain.tokens, chain.passed) == (damaged * BLOCK, max(0, damaged - last))
        check_payloads(chain, ids)
    store.close()


def check_payloads(chain: Chain, ids: list[int]) -> None:
    at = chain.passed * BLOCK
    for entry in chain.entries:
        assert entry.payload.tobytes() == payload_of(ids, at, at + entry.tokens)
        at += entry.tokens
    assert chain.tokens in (at, at - 1)


def test_size_on_disk(tmp_path: Path) -> None:
    per_token = 23040
    store = open_store(tmp_path, per_token=per_token)
    ids = ids_of(1, 150)
    offer_prompt(store, ids, per_token)
    assert store.flush(30)
    store.close()
    total = sum(path.stat().st_size for path in files_in(tmp_path))
    assert 150 * per_token < total <= 150 * per_token * 1.02
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files_in(tmp_path))
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in tmp_path.glob("kv-v1/**/") if path.is_dir())


def test_stats_and_needs(tmp_path: Path) -> None:
    ids = ids_of(1, 130)
    store = open_store(tmp_path)
    assert store.needs(store.key(store.root, ids[:64]), 64)
    keys = offer_prompt(store, ids)
    assert not any(store.needs(key, 64) for key in keys)
    assert store.flush(30)
    assert (store.stats.written_entries, store.stats.written_bytes) == (3, 3 * 160 + 130 * PER_TOKEN)
    store.close()
    assert not store.needs(b"new", 64)
    assert store.find(ids).tokens == 0

    store = open_store(tmp_path)
    store.find(ids)
    assert not any(store.needs(key, 64) for key in keys)
    assert (store.stats.loaded_entries, store.stats.loaded_tokens) == (3, 129)
    assert store.stats.loaded_bytes == 130 * PER_TOKEN
    assert store.stats.loaded_seconds > 0
    offer_prompt(store, ids)
    store.close()
    assert store.stats.written_entries == 0


def test_two_models_share_a_folder(tmp_path: Path) -> None:
    ids = ids_of(1, 150)
    for salt in (b"", b"other"):
        store = open_store(tmp_path, fingerprint=bytes(32) if salt else FINGERPRINT)
        offer_prompt(store, ids, salt=salt)
        store.flush(30)
        store.close()
    for salt in (b"", b"other"):
        store = open_store(tmp_path, fingerprint=bytes(32) if salt else FINGERPRINT)
        chain = store.find(ids)
        assert chain.tokens == 149
        check_chain(chain, ids, salt=salt)
        store.close()


def test_wrong_arguments_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        PrefixStore(StoreConfig(root=tmp_path), b"short", 64, fail)
    with pytest.raises(ValueError, match="at least 1"):
        PrefixStore(StoreConfig(root=tmp_path), FINGERPRINT, 0, fail)
    store = open_store(tmp_path)
    with pytest.raises(ValueError, match="payload has 5 bytes"):
        store.offer(store.root, [1], b"12345")
    with pytest.raises(ValueError, match="1 to 64 tokens"):
        store.offer(store.root, [], b"")
    store.close()


def test_slow_loading_is_given_up(tmp_path: Path) -> None:
    ids = ids_of(1, 640)
    save(tmp_path, [ids])
    store = open_store(tmp_path)
    chain = store.find(ids, prefill_token_s=1e-12)
    assert 64 <= chain.tokens < 639
    check_chain(chain, ids)
    assert store.find(ids, prefill_token_s=10.0).tokens == 639
    store.close()


def test_loads_are_bounded(tmp_path: Path) -> None:
    ids = ids_of(1, 640)
    save(tmp_path, [ids])
    assert load(tmp_path, ids, load_bytes=3 * BLOCK * PER_TOKEN).tokens == 192


# Lies: whatever lies under an entry's name, the result is exact or a miss, and what is damaged goes.


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    replace_file(path, bytes(data))


def replace_file(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.touch(0o600)
    path.write_bytes(data)


def test_every_header_bit_and_a_thousand_of_the_payload(tmp_path: Path) -> None:
    ids = ids_of(1, 70)
    root = tmp_path / "cache"
    save(root, [ids])
    path = max(files_in(root), key=lambda file: file.stat().st_size)
    whole = path.read_bytes()
    rng = random.Random(5)
    bits = [*range(8 * HEADER_BYTES), *(rng.randrange(8 * HEADER_BYTES, 8 * len(whole)) for _ in range(1000))]
    store = open_store(root)
    for bit in bits:
        replace_file(path, whole)
        flip(path, bit)
        assert store.find(ids).tokens == 0
        assert not path.exists()
    assert store.stats.damaged_entries == len(bits)
    replace_file(path, whole)
    assert store.find(ids).tokens == 69
    store.close()


@pytest.mark.parametrize(
    "damage", ["zeroed", "emptied", "truncated", "longer", "header only", "other block", "other model"]
)
def test_damaged_entry_is_a_miss_and_goes(tmp_path: Path, damage: str) -> None:
    ids = ids_of(1, 300)
    store = open_store(tmp_path)
    keys = offer_prompt(store, ids)
    store.flush(30)
    store.close()
    other = open_store(tmp_path, fingerprint=bytes(32))
    other_keys = offer_prompt(other, ids, salt=b"other")
    other.flush(30)
    other.close()
    path = entry_of(tmp_path, keys[1])
    whole = path.read_bytes()
    replace_file(
        path,
        {
            "zeroed": bytes(len(whole)),
            "emptied": b"",
            "truncated": whole[:-1],
            "longer": whole + b"\0",
            "header only": whole[:160],
            "other block": entry_of(tmp_path, keys[2]).read_bytes(),
            "other model": entry_of(tmp_path, other_keys[1]).read_bytes(),
        }[damage],
    )
    before = files_in(tmp_path)
    assert load(tmp_path, ids).tokens == 64
    assert files_in(tmp_path) == [file for file in before if file != path]
    save(tmp_path, [ids])
    assert load(tmp_path, ids).tokens == 299


def test_swapped_entries(tmp_path: Path) -> None:
    ids = ids_of(1, 300)
    store = open_store(tmp_path)
    keys = offer_prompt(store, ids)
    store.flush(30)
    store.close()
    first, second = entry_of(tmp_path, keys[1]), entry_of(tmp_path, keys[3])
    saved = tmp_path / "saved"
    first.rename(saved)
    second.rename(first)
    saved.rename(second)
    assert load(tmp_path, ids).tokens == 64


def test_payload_under_another_entrys_header(tmp_path: Path) -> None:
    """A file whose header is intact and whose payload is a valid one of another block."""
    ids = ids_of(1, 128)
    store = open_store(tmp_path)
    keys = offer_prompt(store, ids)
    store.flush(30)
    store.close()
    first, second = (entry_of(tmp_path, key).read_bytes() for key in keys)
    replace_file(entry_of(tmp_path, keys[0]), first[:160] + second[160:])
    assert load(tmp_path, ids).tokens == 0


def test_read_only_removes_and_writes_nothing(tmp_path: Path) -> None:
    ids = ids_of(1, 300)
    save(tmp_path, [ids])
    path = files_in(tmp_path)[0]
    replace_file(path, b"damaged")
    before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in tmp_path.rglob("*")}
    store = open_store(tmp_path, read_only=True)
    check_chain(store.find(ids), ids)
    offer_prompt(store, ids_of(2, 100))
    store.close()
    assert {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in tmp_path.rglob("*")} == before


def test_read_only_without_a_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path / "none", read_only=True)
    assert store.find(ids_of(1, 100)).tokens == 0
    store.close()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("kind", ["fifo", "folder", "symlink", "dangling symlink", "hidden by mode"])
def test_strange_files_under_an_entrys_name_stay(tmp_path: Path, kind: str) -> None:
    ids = ids_of(1, 64)
    root = tmp_path / "cache"
    save(root, [ids])
    (path,) = files_in(root)
    saved = tmp_path / "saved"
    path.rename(saved)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "symlink":
        path.symlink_to(saved)
    elif kind == "dangling symlink":
        path.symlink_to(tmp_path / "nothing")
    else:
        shutil.copy(saved, path)
        path.chmod(0)
    chain = load(root, ids)
    assert chain.tokens == (63 if kind == "hidden by mode" and os.geteuid() == 0 else 0)
    assert os.path.lexists(path)
    save(root, [ids, ids_of(2, 64)])
    assert os.path.lexists(path)


def test_another_users_entry_is_a_miss_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of(1, 64)
    save(tmp_path, [ids])
    store = open_store(tmp_path)
    monkeypatch.setattr(reader.os, "geteuid", lambda: os.getuid() + 1)
    assert store.find(ids).tokens == 0
    monkeypatch.undo()
    assert store.find(ids).tokens == 63
    store.close()


def test_future_version_under_an_entrys_name_stays(tmp_path: Path) -> None:
    import hashlib
    import struct

    ids = ids_of(1, 64)
    save(tmp_path, [ids])
    (path,) = files_in(tmp_path)
    for length, size in ((192, 7), (160, BLOCK * PER_TOKEN)):
        body = struct.pack("<8sII", b"\x89IKV\r\n\x1a\n", 2, length).ljust(length - 16, b"?")
        replace_file(path, body + hashlib.sha256(body).digest()[:16] + bytes(size))
        assert load(tmp_path, ids).tokens == 0
        assert path.exists()


@pytest.mark.parametrize("call", ["open", "fstat", "readv"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.EACCES, errno.ENOMEM, errno.EINTR])
def test_read_errors_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    ids = ids_of(1, 300)
    save(tmp_path, [ids])
    before = files_in(tmp_path)
    store = open_store(tmp_path)

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return self.refuse if name == call else getattr(os, name)

        def refuse(self, *_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(reader, "os", Broken())
    assert store.find(ids).tokens == 0
    monkeypatch.undo()
    assert files_in(tmp_path) == before
    assert store.find(ids).tokens == 299
    store.close()


def test_short_reads_are_continued_and_early_ends_are_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ids_of(1, 200)
    save(tmp_path, [ids])
    real = os.readv

    def one_piece(descriptor: int, buffers: list[memoryview]) -> int:
        return real(descriptor, [buffers[0][:77]])

    store = open_store(tmp_path)
    monkeypatch.setattr(os, "readv", one_piece)
    chain = store.find(ids)
    check_chain(chain, ids)
    assert chain.tokens == 199
    monkeypatch.setattr(os, "readv", lambda *_: 0)
    assert store.find(ids).tokens == 0
    store.close()
    assert len(files_in(tmp_path)) == 4


def test_no_memory_for_a_chain_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of(1, 200)
    save(tmp_path, [ids])
    store = open_store(tmp_path)

    def none_left(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("infer.runtime.kvcache.disk.store.np.empty", none_left)
    assert store.find(ids).tokens == 0
    store.close()


def test_damaged_entry_replaced_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the very file that was read may be removed."""
    ids = ids_of(1, 64)
    save(tmp_path, [ids])
    (path,) = files_in(tmp_path)
    whole = path.read_bytes()
    flip(path, 8 * 1000)
    real = reader.is_foreign

    def meanwhile(data: bytes) -> bool:
        replacement = tmp_path / "new"
        replacement.touch(0o600)
        replacement.write_bytes(whole)
        replacement.rename(path)
        return real(data)

    monkeypatch.setattr(reader, "is_foreign", meanwhile)
    assert load(tmp_path, ids).tokens == 0
    monkeypatch.undo()
    assert load(tmp_path, ids).tokens == 63


# Places


def warnings_of(root: Path, **options: Any) -> list[str]:
    lines: list[str] = []
    store = open_store(root, lines.append, **options)
    ids = ids_of(1, 100)
    offer_prompt(store, ids)
    store.flush(10)
    assert store.find(ids).tokens == 0
    store.close()
    assert all("\n" not in line for line in lines)
    return lines


@pytest.mark.parametrize("level", ["", "kv-v1", "kv-v1/" + FINGERPRINT[:16].hex()])
@pytest.mark.parametrize("kind", ["symlink", "group-writable", "world-writable", "file", "another user's"])
def test_unsafe_folders_turn_the_cache_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, kind: str
) -> None:
    root = tmp_path / "cache"
    save(root, [ids_of(1, 100)])
    place = root / level
    if kind == "symlink":
        place.rename(tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        place.rename(tmp_path / "elsewhere")
        place.write_text("")
    elif kind == "another user's":
        inode, real = place.stat().st_ino, os.fstat

        def fstat(descriptor: int) -> os.stat_result:
            status = real(descriptor)
            if status.st_ino == inode:
                return os.stat_result((*status[:4], os.geteuid() + 1, *status[5:]))
            return status

        monkeypatch.setattr(os, "fstat", fstat)
    else:
        place.chmod(0o770 if kind == "group-writable" else 0o707)
    before = sorted(tmp_path.rglob("*"))
    lines = warnings_of(root)
    assert len(lines) == 1
    assert str(place) in lines[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_readable_folders_are_made_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    save(tmp_path, [ids_of(1, 100)])
    (tmp_path / "kv-v1").chmod(0o755)
    save(tmp_path, [ids_of(1, 100)])
    assert stat.S_IMODE((tmp_path / "kv-v1").stat().st_mode) == 0o700
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755  # the user's own folder stays as it is


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert len(warnings_of(tmp_path / "file" / "cache")) == 1
    assert len(warnings_of(Path("/proc/no/such"))) == 1


def test_limit_zero_writes_nothing(tmp_path: Path) -> None:
    assert warnings_of(tmp_path / "cache", limit_bytes=0) == []
    assert not (tmp_path / "cache").exists()


# Histories


prompt_parts = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90)), min_size=1, max_size=4)
actions = st.sampled_from(["save", "find", "damage", "remove"])


def prompt_of(parts: list[tuple[int, int]]) -> list[int]:
    """Texts that share beginnings often: runs of equal ids."""
    return [token for token, count in parts for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(actions, prompt_parts, st.integers(0, 2**20)), max_size=12))
def test_any_history_gives_exact_results(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, list[tuple[int, int]], int]]
) -> None:
    root = tmp_path_factory.mktemp("history")
    store = open_store(root)
    for action, parts, number in history:
        ids = prompt_of(parts)
        files = files_in(root)
        if action == "save":
            offer_prompt(store, ids)
        elif action == "find":
            have = number % (len(ids) // BLOCK + 1)
            check_chain(store.find(ids, have), ids, have)
        elif files and action == "damage":
            path = files[number % len(files)]
            flip(path, number % (8 * path.stat().st_size))
        elif files:
            files[number % len(files)].unlink()
        if number % 3 == 0:
            store.flush(10)
            store.close()
            store = open_store(root)
    store.flush(10)
    store.close()
    shutil.rmtree(root)


def test_headers_on_disk_say_what_they_hold(tmp_path: Path) -> None:
    from infer.runtime.kvcache.disk.checksum import payload_digest
    from infer.runtime.kvcache.keys import block_key, root_key

    ids = ids_of(1, 64)
    save(tmp_path, [ids])
    (path,) = files_in(tmp_path)
    data = path.read_bytes()
    assert len(data) == ENTRY
    parent = root_key(1, FINGERPRINT)
    payload = payload_of(ids, 0, 64)
    header = Header(block_key(parent, ids), parent, FINGERPRINT, 64, len(payload), payload_digest(payload))
    assert data == header.encode() + payload
