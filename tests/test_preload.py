"""Weights packed from their files by threads of their own, and what goes wrong there; the oracle packs from memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from infer.quant.base import get_format
from infer.quant.kernels import native_abi as abi
from infer.quant.kernels.native import NativeKernel
from infer.quant.kernels.packing import Packing, StoredMatrix
from infer.quant.kernels.source import WeightSource
from infer.quant.kernels.strips import STORED, NativeWeight
from infer.runtime.config import EngineConfig
from infer.runtime.errors import ChatTemplateError, CheckpointError
from infer.runtime.loader import load_model
from infer.runtime.preload import Preload

pytestmark = pytest.mark.native
SHAPES = {"Q4_0": (1, 32), "Q4_K": (450, 512), "Q6_K": (33, 256), "F16": (5000, 96), "Q8_0": (2048, 1024)}


def random_bytes(name: str, rows: int, columns: int) -> torch.Tensor:
    size = rows * get_format(name).row_bytes(columns)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))


def packed_from_memory(name: str, shape: tuple[int, int], raw: torch.Tensor) -> NativeWeight:
    width = get_format(name).row_bytes(shape[1])
    rows = raw.view(-1, width)
    return NativeKernel(1).pack(
        WeightSource(name, shape, get_format(name), lambda a, b: rows[a:b].reshape(-1))
    )


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, tuple[int, int], int]]]:
    """A file of matrices of every type, and where each begins."""
    path, places, at = tmp_path_factory.mktemp("stored") / "weights", [], 24
    with path.open("wb") as file:
        file.write(bytes(at))
        for name in STORED:
            shape = SHAPES.get(name, (50, 256))
            raw = random_bytes(name, *shape)
            places.append((name, shape, at))
            at += file.write(raw.numpy().tobytes())
    return path, places


def matrices(descriptor: int, places: list[tuple[str, tuple[int, int], int]]) -> list[StoredMatrix]:
    return [
        StoredMatrix(name, shape, name, shape[0] * get_format(name).row_bytes(shape[1]), descriptor, at)
        for name, shape, at in places
    ]


@pytest.mark.parametrize("threads", [1, 3])
def test_every_type_has_the_planes_that_packing_from_memory_gives(
    stored: tuple[Path, list[tuple[str, tuple[int, int], int]]], threads: int
) -> None:
    path, places = stored
    with path.open("rb") as file:
        all_of_it = matrices(file.fileno(), places)
        seen: list[int] = []
        found = Packing(all_of_it).finish(threads, seen.append)
    assert seen[-1] == sum(matrix.nbytes for matrix in all_of_it)
    for name, shape, _ in places:
        expected = packed_from_memory(name, shape, random_bytes(name, *shape))
        assert found[name].planes == expected.planes, name
        assert found[name].shape == shape


def test_a_part_is_what_packing_its_rows_gives() -> None:
    for name in ("Q4_K", "Q6_K", "Q5_0", "BF16"):
        raw = random_bytes(name, 100, 256)
        whole = packed_from_memory(name, (100, 256), raw)
        rows = raw.view(100, -1)
        for first, count in ((0, 100), (16, 32), (48, 52)):
            part = whole.part(first, count)
            assert part is not None
            expected = packed_from_memory(name, (count, 256), rows[first : first + count].reshape(-1))
            assert (part.shape, part.planes) == ((count, 256), expected.planes)
            assert (part.struct.n, part.struct.k) == (count, 256)
        assert whole.part(8, 16) is None
        assert whole.part(16, 20) is None


def test_what_cannot_be_read_or_packed_is_left_out(
    stored: tuple[Path, list[tuple[str, tuple[int, int], int]]], tmp_path: Path
) -> None:
    path, places = stored
    cut = tmp_path / "cut"
    cut.write_bytes(path.read_bytes()[:-1])
    with cut.open("rb") as file:
        wanted = matrices(file.fileno(), places)
        odd = StoredMatrix("odd", (4, 40), "Q4_0", 90, file.fileno(), 0)
        closed = StoredMatrix("closed", (16, 32), "F32", 2048, 1 << 20, 0)
        found = Packing([odd, closed, *wanted]).finish(2, lambda _: None)
    assert list(found) == [name for name, *_ in places[:-1]]


def test_cancelling_ends_the_threads_before_the_work(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb+") as file:
        file.truncate(1 << 31)
        one = StoredMatrix("w", (1 << 19, 4096), "Q8_0", 0, file.fileno(), 0)
        packing = Packing([StoredMatrix(**{**vars(one), "nbytes": one.shape[0] * 4352})])

        def interrupt(done: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            packing.finish(2, interrupt)
        packing.cancel()
        assert all(not thread.is_alive() for thread in packing._threads)
        assert packing._work.done < 1 << 31


def test_the_loader_takes_what_was_packed(
    tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[str] = []
    pack = NativeKernel.pack

    def noted(kernel: NativeKernel, source: WeightSource) -> NativeWeight:
        packed.append(source.name)
        return pack(kernel, source)

    monkeypatch.setattr(NativeKernel, "pack", noted)
    config = EngineConfig(kernel="native", device="cpu", prefix_cache=False)
    load_model(tiny_llama(), config, memo_dir=tmp_path).close()
    assert packed == []
    load_model(tiny_llama(), EngineConfig(kernel="torch", prefix_cache=False), memo_dir=tmp_path).close()


def test_a_file_that_shrank_is_an_error_that_says_so(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "model.gguf")
    size = path.stat().st_size
    with closing(Preload(path, EngineConfig(kernel="torch"))) as preload:
        with path.open("rb+") as file:
            file.truncate(size - 4096)
        with pytest.raises(CheckpointError, match="restore the file"):
            load_model(path, EngineConfig(kernel="native"), memo_dir=tmp_path, preload=preload)
    path = tiny_llama(tmp_path / "other.gguf")
    with closing(Preload(path, EngineConfig(kernel="native"))) as preload:
        assert preload._packing is not None
        preload._packing.finish(1, lambda _: None)
        for stored in preload._packing._stored:
            stored.failed = 1  # as a read error would
        load_model(path, EngineConfig(kernel="native"), memo_dir=tmp_path, preload=preload).close()


def test_without_the_library_nothing_is_begun(
    tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abi, "library_path", lambda: tmp_path / "absent.so")
    with closing(Preload(tiny_llama(), EngineConfig())) as preload:
        assert preload.weights(2, lambda done, total: None) == {}


def test_no_torch_until_the_loader(tiny_llama: Callable[..., Path]) -> None:
    code = (
        "import sys; from pathlib import Path; from infer.runtime.preload import Preload;"
        "from infer.runtime.config import EngineConfig;"
        f"p = Preload(Path({str(tiny_llama())!r}), EngineConfig(device='cpu'));"
        "w = p.weights(1, lambda *_: None); p.close(); print(len(w), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    count, torch_is_there = done.stdout.split()
    assert int(count) > 5
    assert torch_is_there == "False"


def test_what_needs_no_template_does_not_read_it(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    broken = tiny_llama(metadata={"tokenizer.chat_template": "{% for"})
    config = EngineConfig(prefix_cache=False)
    with pytest.raises(ChatTemplateError):
        load_model(broken, config, memo_dir=tmp_path)
    with closing(load_model(broken, config, memo_dir=tmp_path, chat_template=False)) as model:
        assert model.chat_template is None


def test_an_error_at_the_start_leaves_nothing_behind(
    tiny_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Packing] = []
    make = Packing.__init__

    def noted(packing: Packing, matrices: Iterable[StoredMatrix]) -> None:
        make(packing, matrices)
        begun.append(packing)

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Packing, "__init__", noted)
    monkeypatch.setattr("infer.runtime.preload.ThreadPoolExecutor.submit", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="new thread"):
        Preload(tiny_llama(), EngineConfig(device="cpu"))
    assert [packing._work.stop for packing in begun] == [1]
    assert not any(thread.is_alive() for thread in begun[0]._threads)
    assert len(os.listdir("/proc/self/fd")) == before


def test_packing_outlives_whoever_forgets_it(
    stored: tuple[Path, list[tuple[str, tuple[int, int], int]]],
) -> None:
    path, places = stored
    with path.open("rb") as file:
        packing = Packing(matrices(file.fileno(), places))
        memory, threads = weakref.ref(packing), list(packing._threads)
        del packing
        for thread in threads:
            assert memory() is not None or not thread.is_alive()
            thread.join()
    gc.collect()
    assert memory() is None
