"""The native matrix products: bit by bit against the torch reference, and a row alone against it in company."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from random_blocks import HALVES_AT, OTHER_SCALES, put_scales

from infer.quant.base import QuantizedTensor, get_format
from infer.quant.kernels import build, native
from infer.quant.kernels import native_abi as abi
from infer.quant.kernels.native import ActBuffer, NativeKernel
from infer.quant.kernels.native_tensors import planes_of
from infer.quant.kernels.reference import create as create_reference
from infer.quant.kernels.reference import matmul_codes, quantize_rows
from infer.quant.kernels.source import WeightSource
from infer.quant.kernels.strips import STORED, NativeWeight, Planes, grid_address

CPU = torch.device("cpu")
CODED = tuple(sorted({*HALVES_AT, *OTHER_SCALES}))
PLAIN = ("F32", "F16", "BF16")
REFERENCE = create_reference(CPU, 1)
HEADER = Path(build.__file__).resolve().parent / "cpu" / "infer_cpu.h"


def random_raw(name: str, n: int, k: int, seed: int) -> torch.Tensor:
    """uint8 [n, row bytes]: random codes, scales of both signs where the type has them."""
    generator = torch.Generator().manual_seed(seed)
    kind = get_format(name)
    if kind.block == 1:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
        return torch.randn(n, k, generator=generator).to(dtype).view(torch.uint8)
    raw = torch.randint(0, 256, (n, kind.row_bytes(k)), dtype=torch.uint8, generator=generator)
    blocks = raw.view(-1, kind.type_size)
    scales = torch.randn(len(blocks), len(HALVES_AT.get(name, (0,))), generator=generator) / 64
    put_scales(name, blocks.numpy(), (scales.abs() if name in ("MXFP4", "NVFP4") else scales).numpy())
    return raw


def source_of(name: str, raw: torch.Tensor, k: int, quant: str | None = None) -> WeightSource:
    def read(start: int, stop: int) -> torch.Tensor:
        return raw[start:stop].reshape(-1)

    return WeightSource(name, (raw.shape[0], k), get_format(name), read, quant)


def random_source(name: str, n: int, k: int, seed: int = 0) -> WeightSource:
    return source_of(name, random_raw(name, n, k, seed), k)


def random_rows(m: int, k: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-3, 3, m).unsqueeze(1)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal numbers; NaN where NaN is expected."""
    assert found.shape == expected.shape
    assert torch.equal(found.nan_to_num(nan=123.0), expected.nan_to_num(nan=123.0))
    assert torch.equal(found.isnan(), expected.isnan())


def pack_internal(kernel: NativeKernel, part: QuantizedTensor) -> NativeWeight:
    weight = NativeWeight.empty(part.shape, planes_of(part))
    parts = (part.unpacked_codes(), part.scales, part.mins, part.super_scales, part.super_mins)
    pointers = [None if t is None else t.contiguous() for t in parts]
    status = kernel.library.infer_pack_codes(
        kernel.pool.handle,
        *(None if t is None else t.data_ptr() for t in pointers),
        ctypes.byref(weight.struct), 0, part.shape[0],
    )  # fmt: skip
    assert status == 0
    return weight


@pytest.fixture(scope="module")
def default() -> Iterator[NativeKernel]:
    kernel = NativeKernel(2)
    yield kernel
    kernel.close()


@pytest.fixture(params=native.offered(native.load()))
def kernel(request: pytest.FixtureRequest) -> Iterator[NativeKernel]:
    """One for every instruction set of this processor."""
    used = native.load().infer_isa()
    made = NativeKernel(2, request.param)
    assert made.isa == request.param
    yield made
    made.close()
    made.library.infer_set_isa(used)


SHAPES = ((1, 256, 1), (16, 256, 2), (37, 512, 4), (50, 768, 7), (33, 1280, 17), (300, 256, 150))


@pytest.mark.parametrize("name", CODED)
def test_products_have_the_references_bits(kernel: NativeKernel, name: str) -> None:
    for n, k, m in (*SHAPES, (50, 3 * get_format(name).block, 7)):
        source = random_source(name, n, k, seed=n)
        x = random_rows(m, k)
        assert_same(kernel.matmul(x, kernel.pack(source)), REFERENCE.matmul(x, REFERENCE.pack(source)))


@pytest.mark.parametrize("name", CODED)
def test_stored_bytes_become_the_planes_of_the_internal_form(default: NativeKernel, name: str) -> None:
    for n, blocks in ((1, 1), (37, 2), (64, 5)):
        k = max(256, get_format(name).block) * blocks
        source = random_source(name, n, k, seed=n)
        part = source.decode(0, n)
        assert isinstance(part, QuantizedTensor)
        packed, wanted = default.pack(source), pack_internal(default, part)
        assert packed.kind == wanted.kind == STORED[name]
        for plane, memory in wanted.planes.items():
            assert packed.planes[plane] == memory, plane


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q8_0"])
def test_every_small_width(kernel: NativeKernel, name: str) -> None:
    for k in (*range(32, 600, 96), 8992):
        source = random_source(name, 19, k, seed=k)
        x = random_rows(3, k, seed=k)
        packed = kernel.pack(source)
        expected = REFERENCE.matmul(x, REFERENCE.pack(source))
        assert_same(kernel.matmul(x, packed), expected)
        assert_same(kernel.matmul(x[:1], packed), expected[:1])


@pytest.mark.parametrize("name", PLAIN)
def test_float_weights(kernel: NativeKernel, name: str) -> None:
    for n, k, m in ((1, 1, 1), (17, 3, 2), (40, 67, 9), (5, 256, 4)):
        source = random_source(name, n, k, seed=k)
        x = random_rows(m, k)
        assert_same(kernel.matmul(x, kernel.pack(source)), REFERENCE.matmul(x, REFERENCE.pack(source)))


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("scales", ["f16", "f32", "u8", "i8"])
def test_any_internal_form(default: NativeKernel, bits: int, group: int, scales: str) -> None:
    """Forms no file type has: later formats need no C."""
    n, k = 21, 512
    generator = torch.Generator().manual_seed(bits * group)
    for mins, zero in ((False, 1 << (bits - 1)), (True, 0), (True, 3), (False, 0)):
        codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator)
        stored = codes[:, 0::2] | codes[:, 1::2] << 4 if bits == 4 else codes
        if scales in ("u8", "i8"):
            low, high, dtype = (0, 256, torch.uint8) if scales == "u8" else (-128, 128, torch.int8)
            fine = torch.randint(low, high, (n, k // group), generator=generator).to(dtype)
            coarse = torch.rand(n, k // 256, generator=generator).half()
            fine_mins = torch.randint(0, 256, (n, k // group), generator=generator).to(torch.uint8)
            part = QuantizedTensor(
                (n, k),
                bits,
                group,
                zero,
                stored,
                fine,
                fine_mins if mins else None,
                coarse,
                coarse if mins else None,
            )
        else:
            dtype = torch.float16 if scales == "f16" else torch.float32
            fine = torch.randn(n, k // group, generator=generator).to(dtype)
            part = QuantizedTensor((n, k), bits, group, zero, stored, fine, fine.flip(0) if mins else None)
        weight = pack_internal(default, part)
        x = random_rows(20, k)
        expected = matmul_codes(x, part)
        used = default.library.infer_isa()
        for isa in native.offered(default.library):
            default.library.infer_set_isa(isa.encode())
            assert_same(default.matmul(x, weight), expected)
            assert_same(default.matmul(x[:1], weight), expected[:1])
        default.library.infer_set_isa(used)


@pytest.mark.parametrize("name", CODED)
def test_quantized_arithmetic_stays_close_to_the_exact_product(default: NativeKernel, name: str) -> None:
    source = random_source(name, 64, 1024)
    x = random_rows(5, 1024)
    exact = x.double() @ source.dequantize(0, 64).double().T
    error = (default.matmul(x, default.pack(source)) - exact).abs().amax(dim=1)
    size = x.double().norm(dim=1) * source.dequantize(0, 64).double().norm(dim=1).max()
    assert bool((error < size * 1e-2).all())


@pytest.mark.parametrize("name", [*CODED, *PLAIN])
def test_a_row_is_the_same_alone_and_in_company(kernel: NativeKernel, name: str) -> None:
    n, k = (70, 512) if name in CODED else (40, 130)
    weight = kernel.pack(random_source(name, n, k))
    x = random_rows(200, k)
    together = kernel.matmul(x, weight)
    assert torch.equal(torch.cat([kernel.matmul(row, weight) for row in x[:20].split(1)]), together[:20])
    for rows in (2, 3, 8, 17, 64, 129):
        for start in (0, 37):
            assert torch.equal(kernel.matmul(x[start : start + rows], weight), together[start : start + rows])


def test_threads_change_nothing(default: NativeKernel) -> None:
    for name in ("Q4_K", "Q6_K", "F16"):
        source = random_source(name, 700, 512)
        x = random_rows(150, 512)
        packed = default.pack(source)
        expected = default.matmul(x, packed)
        for threads in (1, 3, 8):
            other = NativeKernel(threads)
            assert torch.equal(other.matmul(x, other.pack(source)), expected)
            assert torch.equal(other.matmul(x[:1], packed), expected[:1])
            other.close()


def test_nan_and_infinity_stay_in_their_row(kernel: NativeKernel) -> None:
    for name in ("Q4_K", "Q8_0", "Q6_K"):
        weight = kernel.pack(random_source(name, 40, 512))
        x = random_rows(24, 512)
        clean = kernel.matmul(x, weight)
        x[3, 100] = torch.nan
        x[7, 0] = torch.inf
        x[20, 511] = -torch.inf
        found = kernel.matmul(x, weight)
        broken = [3, 7, 20]
        assert bool(found[broken].isnan().all())
        sound = [row for row in range(24) if row not in broken]
        assert torch.equal(found[sound], clean[sound])


def test_activations_at_the_edges(kernel: NativeKernel) -> None:
    k = 32 * 8
    x = torch.zeros(8, k)
    x[1] = 1e-45
    x[2] = 2.0**-119
    x[3] = 2.0**-119 * 0.999
    x[4] = 3.4e38
    x[5, ::2] = -1e-30
    x[6, 5] = torch.finfo(torch.float32).max
    x[7] = torch.linspace(-1, 1, k)
    x[7, :32] = torch.arange(32) - 15.5  # ties
    acts = ActBuffer.empty(8, k)
    ops = abi.QuantizeOp(x=x.data_ptr(), acts=ctypes.pointer(acts.struct), width=k)
    kernel.run([ops], abi.Batch(tokens=8))
    expected = quantize_rows(x)
    assert torch.equal(torch.from_numpy(acts.codes), expected.codes)
    assert torch.equal(torch.from_numpy(acts.scales), expected.scales)
    assert torch.equal(torch.from_numpy(acts.sums), expected.codes.view(8, -1, 16).sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("scale", [0x0001, 0x03FF, 0x7BFF, 0xFBFF, 0x7C00, 0x7E00, 0x8000])
def test_scales_at_the_edges(default: NativeKernel, name: str, scale: int) -> None:
    """Smallest and largest subnormal, largest and smallest number, infinity, NaN, minus zero."""
    raw = random_raw(name, 20, 256, seed=1)
    blocks = raw.view(20, -1, get_format(name).type_size)
    for at in HALVES_AT[name]:
        blocks[::3, :, at], blocks[::3, :, at + 1] = scale & 255, scale >> 8
    source = source_of(name, raw, 256)
    x = random_rows(18, 256)
    expected = REFERENCE.matmul(x, REFERENCE.pack(source))
    used = default.library.infer_isa()
    for isa in native.offered(default.library):
        default.library.infer_set_isa(isa.encode())
        packed = default.pack(source)
        assert_same(default.matmul(x, packed), expected)
        assert_same(default.matmul(x[:1], packed), expected[:1])
    default.library.infer_set_isa(used)


def test_input_at_any_address(default: NativeKernel) -> None:
    weight = default.pack(random_source("Q5_K", 40, 512))
    x = random_rows(5, 512)
    expected = default.matmul(x, weight)
    storage = torch.empty(5 * 512 * 4 + 64, dtype=torch.uint8)
    for offset in (1, 4, 60):
        moved = storage[offset : offset + x.nbytes]
        moved.copy_(x.view(torch.uint8).flatten())
        acts = ActBuffer.empty(5, 512)
        out = torch.empty(5, 40)
        quantize = abi.QuantizeOp(x=moved.data_ptr(), acts=ctypes.pointer(acts.struct), width=512)
        product = abi.MatmulOp(acts=ctypes.pointer(acts.struct), count=1)
        product.w[0], product.out[0] = ctypes.pointer(weight.struct), out.data_ptr()
        default.run([quantize, product], abi.Batch(tokens=5))
        assert torch.equal(out, expected)


def test_bias_softcap_accumulation_and_several_weights(kernel: NativeKernel) -> None:
    k, rows = 256, 19
    weights = [kernel.pack(random_source("Q4_0", n, k, seed=n)) for n in (40, 16, 7)]
    x = random_rows(rows, k)
    plain = [kernel.matmul(x, weight) for weight in weights]
    biases = [torch.randn(40), None, torch.randn(7)]
    before = [torch.randn(rows, weight.shape[0]) for weight in weights]
    for softcap, accumulate in ((0.0, 0), (30.0, 0), (0.0, 1), (5.0, 1)):
        acts = ActBuffer.empty(rows, k)
        outs = [t.clone() for t in before]
        op = abi.MatmulOp(acts=ctypes.pointer(acts.struct), count=3, softcap=softcap, accumulate=accumulate)
        for i, weight in enumerate(weights):
            op.w[i], op.out[i] = ctypes.pointer(weight.struct), outs[i].data_ptr()
            bias = biases[i]
            op.bias[i] = None if bias is None else bias.data_ptr()
        kernel.run(
            [abi.QuantizeOp(x=x.data_ptr(), acts=ctypes.pointer(acts.struct), width=k), op],
            abi.Batch(tokens=rows),
        )
        for i, out in enumerate(outs):
            bias = biases[i]
            expected = plain[i] if bias is None else plain[i] + bias
            if softcap:
                expected = softcap * torch.tanh(expected / softcap)
            if accumulate:
                expected = before[i] + expected
            if softcap:
                torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(out, expected)


@pytest.mark.parametrize("name", [*CODED, *PLAIN])
def test_packed_rows_dequantize_to_the_files_values(default: NativeKernel, name: str) -> None:
    source = random_source(name, 45, 512)
    packed = default.pack(source)
    ids = torch.tensor([44, 0, 15, 16, 31, 0])
    assert torch.equal(default.rows(packed, ids), source.dequantize(0, 45)[ids])
    with pytest.raises(IndexError):
        default.rows(packed, torch.tensor([45]))


def test_reading_in_chunks_gives_the_same_planes(
    default: NativeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Q4_K", "Q5_0", "F16"):
        source = random_source(name, 450, 512)
        whole = default.pack(source)
        monkeypatch.setattr("infer.quant.kernels.source.CHUNK_BYTES", 20_000)
        pieces = default.pack(source)
        monkeypatch.undo()
        assert whole.planes == pieces.planes


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_weights_rounded_while_loading(default: NativeKernel, quant: str) -> None:
    source = source_of("BF16", random_raw("BF16", 50, 256, seed=2), 256, quant)
    x = random_rows(6, 256)
    assert_same(default.matmul(x, default.pack(source)), REFERENCE.matmul(x, REFERENCE.pack(source)))


def test_no_rows_and_wrong_shapes(default: NativeKernel) -> None:
    weight = default.pack(random_source("Q4_0", 40, 64))
    assert default.matmul(torch.empty(0, 64), weight).shape == (0, 40)
    assert default.rows(weight, torch.empty(0, dtype=torch.int64)).shape == (0, 64)
    with pytest.raises(ValueError, match=r"\[M, 64\]"):
        default.matmul(torch.empty(1, 32), weight)
    with pytest.raises(ValueError, match="empty matrix"):
        default.pack(source_of("Q4_0", torch.empty(0, 36, dtype=torch.uint8), 64))
    with pytest.raises(ValueError, match="not a multiple of 64"):
        NativeWeight.empty((16, 96), Planes(bits=4, group=64))
    short = WeightSource(
        "w", (40, 64), get_format("Q4_0"), lambda start, stop: torch.zeros(3, dtype=torch.uint8)
    )
    with pytest.raises(ValueError, match="3 bytes were read"):
        default.pack(short)


def test_the_library_refuses_what_it_cannot_pack(default: NativeKernel) -> None:
    weight = NativeWeight.empty((40, 64), STORED["Q4_0"])
    raw = torch.zeros(40 * 36, dtype=torch.uint8)
    pack = default.library.infer_pack

    def status(name: bytes, row0: int, rows: int) -> int:
        code: int = pack(
            default.pool.handle, name, raw.data_ptr(), ctypes.byref(weight.struct), row0, rows, None
        )
        return code

    assert status(b"Q4_0", 0, 40) == 0
    for name, row0, rows in (
        (b"Q9_9", 0, 40),
        (b"Q4_1", 0, 40),
        (b"Q4_0", 8, 16),
        (b"Q4_0", 0, 41),
        (b"Q4_0", 0, 20),
    ):
        assert status(name, row0, rows) == -1


def test_a_type_of_a_grid_is_refused_without_it(default: NativeKernel) -> None:
    weight = NativeWeight.empty((16, 256), STORED["IQ2_XS"])
    raw = torch.zeros(16 * 74, dtype=torch.uint8)
    for grid, status in ((None, -1), (grid_address("IQ2_XS"), 0)):
        arguments = (raw.data_ptr(), ctypes.byref(weight.struct), 0, 16, grid)
        assert default.library.infer_pack(default.pool.handle, b"IQ2_XS", *arguments) == status


def test_mirrors_match_the_header(default: NativeKernel, tmp_path: Path) -> None:
    """Sizes as compiled into the library, and every member's offset as a C compiler sees the header."""
    for name, mirror in abi.MIRRORS.items():
        assert default.library.infer_sizeof(name.encode()) == ctypes.sizeof(mirror)
    assert default.library.infer_sizeof(b"nothing") == -1
    prints = [
        f'printf("{name} {field[0]} %d\\n", (int)offsetof({name}, {field[0]}));'
        for name, mirror in abi.MIRRORS.items()
        for field in mirror._fields_
    ]
    code = f'#include <stddef.h>\n#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{ {" ".join(prints)} }}\n'
    program = tmp_path / "offsets"
    subprocess.run([build.find_compiler(), "-x", "c", "-", "-o", program], input=code, text=True, check=True)
    for line in subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines():
        name, member, offset = line.split()
        assert getattr(abi.MIRRORS[name], member).offset == int(offset), line


def test_instruction_sets_are_checked(default: NativeKernel) -> None:
    used = default.isa
    with pytest.raises(ValueError, match="does not offer avx9000"):
        native.load("avx9000")
    assert default.isa == used
    assert native.offered(default.library)[-1] == "scalar"
    assert native.offered(default.library)[0] == used


def test_reading_memory(default: NativeKernel) -> None:
    words = torch.randint(-(2**62), 2**62, (3 << 17,))
    expected = 0
    for word in words.tolist():
        expected ^= word % 2**64
    assert default.library.infer_read(default.pool.handle, words.data_ptr(), words.nbytes) == expected


def test_many_pools_come_and_go() -> None:
    source = random_source("Q4_0", 100, 64)
    x = random_rows(3, 64)
    expected = REFERENCE.matmul(x, REFERENCE.pack(source))
    before = len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else None
    for _ in range(100):
        kernel = NativeKernel(4)
        assert torch.equal(kernel.matmul(x, kernel.pack(source)), expected)
        del kernel
    gc.collect()
    if before is not None:
        for _ in range(500):  # a thread that was joined may be listed for a moment
            if len(os.listdir("/proc/self/task")) == before:
                break
            time.sleep(0.02)
        assert len(os.listdir("/proc/self/task")) == before


def test_two_pools_and_two_callers_at_once() -> None:
    source = random_source("Q4_K", 300, 512)
    x = random_rows(9, 512)
    shared, other = NativeKernel(3), NativeKernel(2)
    packed = shared.pack(source)
    expected = shared.matmul(x, packed)
    wrong: list[int] = []

    def call(kernel: NativeKernel) -> None:
        for i in range(200):
            if not torch.equal(kernel.matmul(x, packed), expected):
                wrong.append(i)

    callers = [threading.Thread(target=call, args=(kernel,)) for kernel in (shared, shared, other)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
    shared.close()
    other.close()


class Child:
    """A process that runs a script with the kernels set up."""

    SETUP = """
import os, signal, sys, time, torch
sys.path[:0] = [{folder!r}, {folder!r} + "/support"]
from test_native_matmul import NativeKernel, random_rows, random_source
torch.set_num_threads(1)  # its own threads are not counted
kernel = NativeKernel(4)
weight = kernel.pack(random_source("Q4_0", 2000, 512))
x = random_rows(40, 512)
expected = kernel.matmul(x, weight)
"""

    @classmethod
    def run(cls, script: str) -> str:
        code = cls.SETUP.format(folder=str(Path(__file__).parent)) + script
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_computes_on_its_own() -> None:
    script = """
torch.set_num_threads(1)  # torch's own thread pool does not survive a fork
child = os.fork()
if child == 0:
    same = torch.equal(kernel.matmul(x, weight), expected)
    fresh = NativeKernel(2)
    same = same and torch.equal(fresh.matmul(x, weight), expected)
    fresh.close()
    kernel.close()
    os._exit(0 if same else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.equal(kernel.matmul(x, weight), expected))
"""
    assert Child.run(script).split() == ["0", "True"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
def test_an_interrupt_leaves_no_thread() -> None:
    script = """
before = len(os.listdir("/proc/self/task"))
signal.setitimer(signal.ITIMER_REAL, 0.2)
signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
try:
    while True:
        kernel.matmul(x, weight)
except KeyboardInterrupt:
    pass
same = torch.equal(kernel.matmul(x, weight), expected)
kernel.close()
for _ in range(500):  # a thread that was joined may be listed for a moment
    ended = before - len(os.listdir("/proc/self/task"))
    if ended == 3:
        break
    time.sleep(0.02)
print(ended, same)
"""
    assert Child.run(script).split() == ["3", "True"]


@dataclass
class Flushed:
    """Restores denormals whatever happens."""

    def __enter__(self) -> None:
        torch.set_flush_denormal(True)

    def __exit__(self, *_: object) -> None:
        torch.set_flush_denormal(False)


def test_the_callers_floating_point_mode_changes_nothing(default: NativeKernel) -> None:
    raw = random_raw("Q4_0", 700, 64, seed=3)
    raw.view(700, -1, 18)[:, :, 0], raw.view(700, -1, 18)[:, :, 1] = 1, 0  # subnormal as float16
    weight = default.pack(source_of("Q4_0", raw, 64))
    x = torch.full((3, 64), 1e-34)  # products are subnormal as float32
    expected = default.matmul(x, weight)
    assert bool((expected != 0).any())
    with Flushed():
        found = default.matmul(x, weight)
    assert torch.equal(found, expected)


def test_signals_reach_the_main_thread_only(default: NativeKernel) -> None:
    """The pool's threads block every signal, or a handler could run where none is expected."""
    status = Path("/proc/self/task")
    if not status.exists():
        return
    kernel = NativeKernel(3)
    blocked = 0
    for task in status.iterdir():
        lines = (task / "status").read_text().splitlines()
        mask = int(next(line for line in lines if line.startswith("SigBlk")).split()[1], 16)
        blocked += bool(mask >> (signal.SIGINT - 1) & 1)
    assert blocked >= 2
    kernel.close()
