"""Speed of the native matrix products: GB/s of weights and GOP/s, per format and number of rows.

Few rows cycle through copies of the matrix that together exceed the caches; many rows use one copy. Figures are the
median and the best of the repeats. `python benchmarks/kernel_bench.py --help` lists the options.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import torch

from infer.quant.base import get_format
from infer.quant.kernels import native
from infer.quant.kernels import native_abi as abi
from infer.quant.kernels.source import WeightSource
from infer.quant.kernels.strips import NativeWeight

SHAPES = {
    "1.5b-up": (8960, 1536),
    "1.5b-down": (1536, 8960),
    "1.5b-attn": (1536, 1536),
    "135m-up": (1536, 576),
}


def random_source(name: str, n: int, k: int) -> WeightSource:
    """A matrix of that type with random codes and small scales."""
    kind = get_format(name)
    size = kind.row_bytes(k)
    if kind.block == 1:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
        raw = torch.randn(n, k).to(dtype).view(torch.uint8)
    else:
        raw = torch.randint(0, 256, (n, size), dtype=torch.uint8)
        blocks = raw.view(n, -1, kind.type_size)
        halves = (208,) if name == "Q6_K" else (0, 2) if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)
        for at in halves:
            blocks[:, :, at : at + 2] = (torch.rand(*blocks.shape[:2], 1) / 256).half().view(torch.uint8)
    return WeightSource(name, (n, k), kind, lambda start, stop: raw[start:stop].reshape(-1))


def copies(weight: NativeWeight, count: int) -> list[NativeWeight]:
    made = [weight]
    while len(made) < count:
        other = NativeWeight.empty(weight.shape, weight.kind)
        for name, plane in weight.planes.items():
            other.planes[name][:] = plane
        made.append(other)
    return made


class Products:
    """Products of one random input with weights of one shape, prepared so that a call is one infer_run."""

    def __init__(self, kernel: native.NativeKernel, weights: list[NativeWeight], rows: int) -> None:
        n, k = weights[0].shape
        self.kernel = kernel
        self.batch = abi.Batch(tokens=rows)
        self.x = torch.randn(rows, k)
        self.acts = native.ActBuffer.empty(rows, k)
        self.out = torch.empty(rows, n)
        quantize = abi.QuantizeOp(x=self.x.data_ptr(), acts=ctypes.pointer(self.acts.struct), width=k)
        kernel.run([quantize], self.batch)
        self.weights = weights
        self.program = abi.program(*(self._product(weight) for weight in weights))

    def _product(self, weight: NativeWeight) -> abi.MatmulOp:
        op = abi.MatmulOp(count=1, x=self.x.data_ptr(), acts=ctypes.pointer(self.acts.struct))
        op.w[0] = ctypes.pointer(weight.struct)
        op.out[0] = self.out.data_ptr()
        return op

    def __call__(self) -> None:
        self.kernel.run(self.program, self.batch)


def seconds(call: Callable[[], object], repeats: int, at_least: float = 0.0) -> tuple[float, float]:
    """Median and best time of a call, after one to warm up; more repeats until `at_least` seconds have passed."""
    call()
    times: list[float] = []
    while len(times) < repeats or sum(times) < at_least:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times), min(times)


def plain_read(kernel: native.NativeKernel, megabytes: int, repeats: int) -> tuple[float, float, float]:
    """GB, and the median and best time of reading them with all threads."""
    memory = torch.zeros(megabytes << 17, dtype=torch.int64)
    read = kernel.library.infer_read
    median, best = seconds(lambda: read(kernel.pool.handle, memory.data_ptr(), memory.nbytes), repeats)
    return memory.nbytes / 1e9, median, best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", default=["Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q8_0"])
    parser.add_argument(
        "--shapes", nargs="+", default=["1.5b-up"], help=f"names or NxK; names: {', '.join(SHAPES)}"
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64, 512])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", help="default: the best")
    parser.add_argument("--megabytes", type=int, default=600, help="memory that few rows cycle through")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    kernel = native.NativeKernel(options.threads, options.isa)
    size, median, best = plain_read(kernel, options.megabytes, options.repeats)
    print(
        f"{kernel.isa}, {options.threads} threads; plain read {size / median:.1f} GB/s (best {size / best:.1f})"
    )
    print(f"{'format':8}{'shape':>12}{'rows':>6}{'GB/s':>8}{'best':>7}{'GOP/s':>9}{'best':>8}{'us':>10}")
    for shape in options.shapes:
        n, k = SHAPES[shape] if shape in SHAPES else map(int, shape.split("x"))
        for name in options.formats:
            source = random_source(name, n, k)
            median, best = seconds(lambda source=source: kernel.pack(source), 3)
            stored = n * source.format.row_bytes(k) / 1e9
            print(f"{name:8}{f'{n}x{k}':>12}  pack{stored / median:8.1f}{stored / best:7.1f}")
            weight = kernel.pack(source)
            many = copies(weight, max(1, (options.megabytes << 20) // weight.nbytes))
            for rows in options.rows:
                used = many if rows <= 8 else many[:1]
                median, best = seconds(
                    Products(kernel, used, rows), options.repeats, 0.0 if rows <= 8 else 0.3
                )
                size = len(used) * weight.nbytes / 1e9
                work = len(used) * 2 * rows * n * k / 1e9
                print(
                    f"{name:8}{f'{n}x{k}':>12}{rows:6}{size / median:8.1f}{size / best:7.1f}"
                    f"{work / median:9.0f}{work / best:8.0f}{median / len(used) * 1e6:10.1f}"
                )


if __name__ == "__main__":
    main()
