"""Opening a model and starting its weights on their way, before all else is imported. Imports no torch."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from infer.quant.kernels.packing import Packing, StoredMatrix
from infer.quant.kernels.strips import STORED, NativeWeight
from infer.runtime.checkpoint.base import Checkpoint
from infer.runtime.checkpoint.open import open_checkpoint
from infer.runtime.config import EngineConfig
from infer.runtime.device import cuda_is_possible
from infer.runtime.heap import keep_little

_MOST_ROWS = 1 << 30


class Preload:
    """An open checkpoint, whose matrices are being packed if the native kernels are going to need them."""

    def __init__(self, path: Path, config: EngineConfig) -> None:
        """Raises ModelError and its kin, as `open_checkpoint` does, and OSError without the memory for the weights."""
        keep_little()
        self.checkpoint = open_checkpoint(path)
        self._packing: Packing | None = None
        if _native_is_likely(config):
            try:
                self._packing = Packing(_matrices(self.checkpoint, config))
            except OSError as error:
                if error.errno == errno.ENOMEM:
                    self.close()
                    raise
                # no library: whoever needs it will say so

    def weights(self, threads: int, on_progress: Callable[[int, int], None]) -> Mapping[str, NativeWeight]:
        """What has been packed by then, once it is. on_progress(done, total) counts bytes, and may raise."""
        if self._packing is None:
            return {}
        total = self.checkpoint.nbytes
        return self._packing.finish(threads, lambda done: on_progress(done, total))

    def stop(self) -> None:
        """End the packing and let go of what it has."""
        packing, self._packing = self._packing, None
        if packing is not None:
            packing.cancel()

    def close(self) -> None:
        """Stop and close the files. May be called again. Nothing here keeps weights or vocabulary in memory then."""
        self.stop()
        if "checkpoint" in vars(self):
            self.checkpoint.close()
            del self.checkpoint


def _native_is_likely(config: EngineConfig) -> bool:
    """Only torch can tell whether CUDA works; a wrong guess costs time and changes nothing."""
    cpu = config.device == "cpu" or (config.device == "auto" and not cuda_is_possible())
    return cpu and config.kernel in ("auto", "native")


def _matrices(checkpoint: Checkpoint, config: EngineConfig) -> Iterator[StoredMatrix]:
    """Those that lie in the file as the library takes them. Of several in one tensor, each must end with a strip."""
    for tensor in checkpoint.tensors.values():
        kind = STORED.get(tensor.type)
        rows = math.prod(tensor.shape[:-1])
        file = checkpoint.descriptor(tensor)
        if (
            kind is None
            or file is None
            or len(tensor.shape) < 2
            or (len(tensor.shape) > 2 and tensor.shape[-2] % 16)
            or not 0 < rows < _MOST_ROWS
            or tensor.shape[-1] < 1
            or tensor.name.endswith(".bias")
            or (config.quant is not None and not kind.bits)  # floats that will be rounded
        ):
            continue
        yield StoredMatrix(
            tensor.name, (rows, tensor.shape[-1]), tensor.type, tensor.nbytes, file, tensor.offset
        )
