"""How fast this machine reads memory: what decoding is measured against, since each token reads all weights once."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from infer.quant.kernels import native
from infer.quant.kernels.device import Device

BUFFER_BYTES = 512 << 20  # far more than the caches that most processors have
PASSES = 5


def measure_bandwidth(device: Device, threads: int) -> float:
    """Bytes a second: the best of a few sequential reads of a buffer far larger than the caches.

    On a CPU `threads` threads read a part each and do as little as possible with it: the native library's loads
    where there is one, else numpy's sum of 64-bit words. On CUDA the device sums float32.
    """
    if device.type == "cuda":
        import torch

        buffer = torch.ones(BUFFER_BYTES // 4, dtype=torch.float32, device=str(device))

        def read_device() -> None:
            buffer.sum()
            torch.cuda.synchronize(str(device))

        return _best(read_device)
    words = np.ones(BUFFER_BYTES // 8, dtype=np.int64)  # written, so that every page is memory of its own
    if native.available():
        library = native.load()
        pool = native.Pool(library, threads)
        try:
            return _best(lambda: library.infer_read(pool.handle, words.ctypes.data, words.nbytes))
        finally:
            pool.close()
    with ThreadPoolExecutor(threads) as executor:
        parts = np.array_split(words, threads)
        return _best(lambda: list(executor.map(np.sum, parts)))


def _best(read: Callable[[], object]) -> float:
    read()
    times: list[float] = []
    for _ in range(PASSES):
        started = time.perf_counter()
        read()
        times.append(time.perf_counter() - started)
    return BUFFER_BYTES / min(times)
