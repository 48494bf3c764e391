"""`infer cache` and the flags of the disk cache. The entries are written by the store itself."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.cli import config
from infer.cli.main import invoke
from infer.cli.run import RunOptions
from infer.cli.session import engine_config
from infer.cli.size import parse_size
from infer.runtime.config import EngineConfig
from infer.runtime.errors import UsageError
from infer.runtime.kvcache.disk.store import PrefixStore, StoreConfig
from infer.runtime.kvcache.identity import KVIdentity, Label, parse_label

BYTES_PER_TOKEN = 64
DEFAULT = "smollm2-135m-instruct"
IDENTITY = KVIdentity(
    weights="ab" * 32, architecture="llama", rope={"dim": 64, "base": 10000.0}, kv_type="f16",
    kernel="native", kernel_version="7",
)  # fmt: skip


class Cache:
    """Runs `infer cache …` in this process; fills the folder it looks at."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = home / "cache" / "prefix"
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        code = invoke(["cache", *arguments])
        return code, *self._capsys.readouterr()

    def json(self, *arguments: str) -> dict[str, Any]:
        code, out, err = self(*arguments, "--json")
        assert (code, err) == (0, "")
        return dict(json.loads(out))

    def fill(self, identity: KVIdentity, name: str, path: str = "", blocks: int = 3) -> str:
        """Store a chain of full blocks of a model; its folder's name."""
        warnings: list[str] = []
        store = PrefixStore(
            StoreConfig(root=self.root, free_floor_bytes=0), identity.fingerprint(), BYTES_PER_TOKEN,
            warnings.append, label=identity.label(name, path),
        )  # fmt: skip
        parent = store.root
        for block in range(blocks):
            parent = store.offer(parent, [block] * 64, os.urandom(64 * BYTES_PER_TOKEN))
        assert store.flush(10)
        store.close(10)
        assert warnings == []
        return identity.fingerprint()[:16].hex()

    def entries(self) -> list[Path]:
        return sorted(self.root.rglob("*.kv"))

    def damage(self) -> Path:
        """Flip a bit in the payload of one entry."""
        path = self.entries()[0]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cache:
    for variable in list(os.environ):
        if variable.startswith("INFER_"):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("INFER_HOME", str(tmp_path / "home"))
    return Cache(tmp_path / "home", capsys)


def test_an_empty_cache(cache: Cache) -> None:
    assert cache("ls") == (0, "MODEL  ENTRIES  TOKENS  SIZE  LAST USED  FINGERPRINT\n", "")
    assert cache.json("ls") == {"folder": str(cache.root), "models": []}
    code, out, err = cache("info")
    assert (code, err) == (0, "")
    assert f"folder:     {cache.root}\n" in out
    assert "used:       0 B by 0 entries" in out
    assert cache("verify") == (0, "checked 0 entries, 0 B: 0 damaged\n", "")
    for command in ("prune", "clear"):
        assert cache(command) == (0, "", "removed 0 entries, 0 B\n")
    assert not cache.root.exists()


def test_ls(cache: Cache) -> None:
    first = cache.fill(IDENTITY, "smol\x1b[2J", "/models/smol.gguf")
    second = cache.fill(dataclasses.replace(IDENTITY, kv_type="int8"), "smol", blocks=1)
    code, out, err = cache("ls")
    assert (code, err) == (0, "")
    lines = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert lines[0] == ["MODEL", "ENTRIES", "TOKENS", "SIZE", "LAST USED", "FINGERPRINT"]
    assert {tuple(line[1:3]) for line in lines[1:]} == {("3", "192"), ("1", "64")}
    assert {line[5] for line in lines[1:]} == {first[:12], second[:12]}
    assert "\x1b" not in out

    rows = {row["fingerprint"]: row for row in cache.json("ls")["models"]}
    row = rows[first]
    assert (row["entries"], row["tokens"], row["path"]) == (3, 192, "/models/smol.gguf")
    assert row["bytes"] >= 192 * BYTES_PER_TOKEN
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["last_used"])
    assert row["parts"] == IDENTITY.parts()
    assert (rows[second]["path"], rows[second]["parts"]["kv_type"]) == (None, "int8")


def test_info(cache: Cache) -> None:
    folder = cache.fill(IDENTITY, "smol", "/models/smol.gguf")
    code, out, _ = cache("info", "--cache-limit", "1MiB", "-m", "smol")
    assert code == 0
    assert "limit:      1.05 MB\n" in out
    assert "by 3 entries of 192 tokens" in out
    for part in (
        f"fingerprint: +{folder}", f"weights: +{'ab' * 32}", "architecture: +llama", "rope dim: +64",
        r"rope base: +10000\.0", "quantization: +as stored", "kv_type: +f16", "kernel: +native",
        "kernel_version: +7", "torch: +-", r"model: +smol \(/models/smol\.gguf\)",
    ):  # fmt: skip
        assert re.search(f"^{part}$", out, re.MULTILINE), part
    facts = cache.json("info", "--cache-limit", "1MiB")
    assert (facts["limit"], facts["limit_is_default"], facts["entries"]) == (1 << 20, False, 3)
    assert facts["bytes"] > 192 * BYTES_PER_TOKEN
    assert "models" not in facts
    assert cache.json("info", "-m", folder[:8])["models"][0]["parts"]["weights"] == "ab" * 32
    facts = cache.json("info")
    assert facts["limit_is_default"]
    assert 0 < facts["limit"] <= 20 * 10**9
    assert "the disk cache is off" in cache("info", "--cache-limit", "0")[1]


def test_a_model_is_found_by_name_path_content_and_fingerprint(
    cache: Cache, tmp_path: Path, tiny_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    path = tiny_llama(tmp_path / "tiny.gguf")
    weights = hashlib.sha256(path.read_bytes()).hexdigest()
    by_content = cache.fill(dataclasses.replace(IDENTITY, weights=weights), "Tiny", "/elsewhere/tiny.gguf")
    by_path = cache.fill(dataclasses.replace(IDENTITY, weights="cd" * 32), "Old", str(path))
    other = cache.fill(IDENTITY, DEFAULT)

    def found(model: str) -> set[str]:
        return {row["fingerprint"] for row in cache.json("ls", "-m", model)["models"]}

    assert found(str(path)) == {by_content, by_path}
    monkeypatch.chdir(tmp_path)
    assert found("tiny.gguf") == {by_content, by_path}
    assert found("tiny") == {by_content}
    assert found(DEFAULT) == {other}
    assert found(other) == found(other[:6]) == {other}
    assert found("gemma-3-270m") == set()
    monkeypatch.setenv("INFER_MODEL", DEFAULT)
    assert len(cache.json("ls")["models"]) == 3
    for command in ("ls", "info", "verify", "clear"):
        code, out, err = cache(command, "-m", "unheard-of")
        assert (code, out, err.count("\n")) == (3, "", 1)
        assert "no model is called 'unheard-of'" in err


def test_verify(cache: Cache) -> None:
    cache.fill(IDENTITY, "smol")
    code, out, err = cache("verify")
    assert (code, out.count("\n"), err) == (0, 1, "")
    assert re.fullmatch(r"checked 3 entries, [\d.]+ kB: 0 damaged\n", out)
    bad = cache.damage()
    code, out, err = cache("verify")
    assert code == 1
    assert out.splitlines()[1].endswith(f"{bad.name}: the payload is damaged")
    assert err == "1 damaged entries stay: give -y to remove them\n"
    assert bad.exists()
    code, out, err = cache("verify", "--json")
    report = json.loads(out)
    assert (code, report["checked"], report["removed"], report["unreadable"]) == (1, 3, 0, [])
    assert report["damaged"][0]["reason"] == "the payload is damaged"
    code, out, err = cache("verify", "-y")
    assert code == 0
    assert err.startswith("removed 1 entries, ")
    assert not bad.exists()
    assert len(cache.entries()) == 2
    assert cache("verify")[0] == 0


def test_verify_with_json_and_yes(cache: Cache) -> None:
    cache.fill(IDENTITY, "smol")
    cache.damage()
    code, out, _ = cache("verify", "--json", "-y", "-q")
    assert (code, json.loads(out)["removed"], len(cache.entries())) == (0, 1, 2)


@pytest.mark.parametrize(("answer", "code", "left"), [("y", 0, 2), ("n", 1, 3)])
def test_verify_asks_on_a_terminal(cache: Cache, answer: str, code: int, left: int) -> None:
    cache.fill(IDENTITY, "smol")
    cache.damage()
    assert on_terminal(cache, ["cache", "verify"], answer)[0] == code
    assert len(cache.entries()) == left


def test_prune(cache: Cache) -> None:
    cache.fill(IDENTITY, "smol", blocks=5)
    assert cache("prune") == (0, "", "removed 0 entries, 0 B\n")
    used = cache.json("info")["bytes"]
    code, out, err = cache("prune", "--cache-limit", str(used - 1))
    assert (code, out) == (0, "")
    assert re.fullmatch(r"removed \d entries, .*B\n", err)
    assert 0 < len(cache.entries()) < 5
    left = len(cache.entries())
    report = cache.json("prune", "--cache-limit", "24KiB")
    assert (report["folder"], report["complete"]) == (str(cache.root), True)
    assert report["removed"] == left - len(cache.entries()) > 0
    code, _, err = cache("prune", "--cache-limit", "1B")  # the folders alone are more
    assert (code, err.splitlines()[1][:12]) == (1, "infer: error")
    assert cache.entries() == []


def test_prune_to_nothing_is_not_what_0_means(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.fill(IDENTITY, "smol")
    monkeypatch.setenv("INFER_CACHE_LIMIT", "0")
    code, _, err = cache("prune")
    assert (code, err.count("\n")) == (2, 1)
    assert "INFER_CACHE_LIMIT 0 turns the disk cache off" in err
    assert len(cache.entries()) == 3


def test_clear(cache: Cache) -> None:
    cache.fill(IDENTITY, "smol")
    cache.fill(dataclasses.replace(IDENTITY, kv_type="int8"), "smol")
    cache.fill(dataclasses.replace(IDENTITY, weights="cd" * 32), "other")
    code, out, err = cache("clear")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "give -y" in err
    assert len(cache.entries()) == 9
    code, _, err = cache("clear", "-m", "smol", "-y")
    assert code == 0
    assert err.startswith("removed 6 entries, ")
    assert [row["name"] for row in cache.json("ls")["models"]] == ["other"]
    report = cache.json("clear", "-y")
    assert (report["removed"], report["complete"], cache.entries()) == (3, True, [])
    assert cache("clear") == (0, "", "removed 0 entries, 0 B\n")


@pytest.mark.parametrize(("answer", "left"), [("y", 0), ("n", 3), ("", 3)])
def test_clear_asks_on_a_terminal(cache: Cache, answer: str, left: int) -> None:
    cache.fill(IDENTITY, "smol")
    code, shown = on_terminal(cache, ["cache", "clear"], answer)
    assert code == 0
    assert b"Delete 3 entries" in shown
    assert len(cache.entries()) == left


def test_another_folder(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.root = tmp_path / "mine"
    cache.fill(IDENTITY, "smol")
    assert cache.json("ls")["models"] == []
    assert len(cache.json("ls", "--cache-dir", str(cache.root))["models"]) == 1
    monkeypatch.setenv("INFER_CACHE_DIR", str(cache.root))
    assert len(cache.json("ls")["models"]) == 1


@pytest.mark.parametrize("command", ["ls", "info", "verify", "prune", "clear"])
def test_an_unsafe_folder_is_one_line(cache: Cache, tmp_path: Path, command: str) -> None:
    cache.fill(IDENTITY, "smol")
    cache.root.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(cache.root)
    for flags in ([], ["--cache-dir", str(link)], ["--cache-dir", str(cache.entries()[0])]):
        code, out, err = cache(command, *flags)
        assert (code, out, err.count("\n")) == (1, "", 1), err
        assert "cache folder" in err
    assert len(cache.entries()) == 3


def test_what_is_imported(cache: Cache) -> None:
    """No command imports torch; numpy, whose import takes 0.1 s, only the one that computes checksums."""
    cache.fill(IDENTITY, "smol")
    code = (
        "import sys; from infer.cli.main import invoke\n"
        "for words in (['ls'], ['info'], ['info', '-m', 'smol'], ['prune'], ['clear', '-y'], ['verify']):\n"
        "    if words == ['verify']: print(*({'numpy', 'rich'} & set(sys.modules)), file=sys.stderr)\n"
        "    assert invoke(['cache', *words, '-q']) == 0\n"
        "print(*({'torch', 'jinja2', 'rich', 'tokenizers'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert done.stderr == "\n\n"


def test_help(cache: Cache) -> None:
    code, out, _ = cache()
    assert code == 0
    for command in ("ls", "info", "verify", "prune", "clear"):
        assert re.search(rf"^  {command}  +\S", out, re.MULTILINE)
        assert cache(command, "-h")[0] == 0
    assert cache("nope")[0] == 2


def on_terminal(cache: Cache, arguments: list[str], answer: str) -> tuple[int, bytes]:
    """Exit code and what is shown when the user types an answer and Enter."""
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", "from infer.cli.main import main; main()", *arguments],
        stdin=inner, stdout=inner, stderr=inner,
    )  # fmt: skip
    os.close(inner)
    shown, answered = b"", False
    while True:
        if not answered and b"[y/N]" in shown:
            os.write(outer, answer.encode() + b"\n")
            answered = True
        try:
            piece = os.read(outer, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(outer)
    return process.wait(timeout=20), shown


# -- flags


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("1", 1), ("17B", 17), ("20GB", 20 * 10**9), ("20gb", 20 * 10**9), ("20 G", 20 * 10**9),
        ("512MiB", 512 << 20), ("1.5kB", 1500), ("1Ki", 1024), (" 3 TiB ", 3 << 40), ("0GB", 0), ("2k", 2000),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--x") == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "-1",
        "GB",
        "1iB",
        "1e9",
        "1,5GB",
        "1 G B",
        "9" * 30,
        "10000000TiB",
        "١GB",
        "nan",
        "1.GB",
        "5%",
    ],
)
def test_texts_that_are_no_size(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--x must be a size such as 20GB"):
        parse_size(text, "--x")


def built(tmp_path: Path, flags: dict[str, object], **env: str) -> EngineConfig:
    return engine_config(config.resolve(RunOptions, flags, environ=env, path=tmp_path / "none.toml"))


def test_flags_reach_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_HOME", str(tmp_path))
    default = built(tmp_path, {})
    assert (default.cache_dir, default.cache_limit) == (tmp_path / "cache" / "prefix", None)
    assert not default.cache_read_only
    flags: dict[str, object] = {"cache_dir": "~/kv", "cache_limit": "3GB", "cache_read_only": True}
    given = built(tmp_path, flags)
    assert (given.cache_dir, given.cache_limit) == (Path.home() / "kv", 3 * 10**9)
    assert given.cache_read_only
    assert built(tmp_path, {"cache_dir": "~nobody-here/x"}).cache_dir is not None
    off = built(tmp_path, {"no_cache": True})
    assert (off.prefix_cache, off.cache_dir) == (False, None)
    memory_only = built(tmp_path, {}, INFER_CACHE_LIMIT="0")
    assert (memory_only.prefix_cache, memory_only.cache_dir) == (True, None)
    with pytest.raises(UsageError, match=r"^INFER_CACHE_LIMIT must be a size"):
        built(tmp_path, {}, INFER_CACHE_LIMIT="much")
    for bad in ("", "a\0b"):
        with pytest.raises(UsageError, match=r"^--cache-dir (is empty|must be a folder)"):
            built(tmp_path, {"cache_dir": bad})


def test_engine_config_checks_the_limit() -> None:
    with pytest.raises(ValueError, match="cache_limit must be at least 1"):
        EngineConfig(cache_limit=0)


# -- identity


def test_every_part_changes_the_fingerprint() -> None:
    other: dict[str, object] = {"rope": {"dim": 32, "base": 10000.0}}
    prints = {IDENTITY.fingerprint()}
    for field in dataclasses.fields(KVIdentity):
        prints.add(dataclasses.replace(IDENTITY, **{field.name: other.get(field.name, "x")}).fingerprint())
    assert len(prints) == 1 + len(dataclasses.fields(KVIdentity))
    assert {len(digest) for digest in prints} == {32}
    again = dataclasses.replace(IDENTITY, rope={"base": 10000.0, "dim": 64})
    assert again.fingerprint() == IDENTITY.fingerprint()


def test_labels() -> None:
    label = parse_label(IDENTITY.label("Grüße", "/p"))
    assert label == Label("Grüße", "/p", IDENTITY.parts())
    assert label.weights == IDENTITY.weights
    assert parse_label(IDENTITY.label("n", "/" * 9000)) == Label("n")
    for text in ("plain", "[1]", "7", "{", "[" * 100_000):
        assert parse_label(text) == Label(text)
    assert parse_label('{"name": 7, "path": [], "parts": "x"}') == Label()
