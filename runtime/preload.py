"""Opening a model and starting its weights and its vocabulary on their way, before all else is imported."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from infer.quant.kernels.packing import Packing, StoredMatrix
from infer.quant.kernels.strips import STORED, NativeWeight
from infer.runtime.checkpoint.base import Checkpoint
from infer.runtime.checkpoint.open import open_checkpoint
from infer.runtime.config import EngineConfig
from infer.runtime.device import cuda_is_possible
from infer.runtime.heap import keep_little

if TYPE_CHECKING:
    from infer.runtime.tokenizer.base import Tokenizer
    from infer.runtime.tokenizer.chat_template import ChatTemplate

_MOST_ROWS = 1 << 30


class Preload:
    """An open checkpoint, whose matrices are being packed if the native kernels are going to need them.

    text: its tokenizer and chat template as they will be, or what is wrong with them. started: on time.perf_counter.
    """

    def __init__(
        self,
        path: Path,
        config: EngineConfig,
        *,
        chat_template: str | Literal[False] | None = None,
        pre: str | None = None,
    ) -> None:
        """chat_template: a built-in name or a template file, None for the model's own, False for those who need none:
        they neither wait for it nor fail with it. pre: pre-tokenizer to use instead of the file's. Raises ModelError
        and its kin, as `open_checkpoint` does, and OSError without the memory for the weights."""
        keep_little()
        self.started = time.perf_counter()
        self.checkpoint = open_checkpoint(path)
        self._config = config
        self._packing: Packing | None = None
        self._text_thread = ThreadPoolExecutor(1, "text")
        try:
            if _native_is_likely(config):
                self._begin()
            self.text = self._text_thread.submit(_load_text, self.checkpoint.metadata, chat_template, pre)
        except BaseException:
            self.close()
            raise

    def weights(self, threads: int, on_progress: Callable[[int, int], None]) -> Mapping[str, NativeWeight]:
        """What can be packed for the native kernels, once it is. on_progress(done, total) counts bytes, and may raise.
        Raises OSError without the memory."""
        if self._packing is None:
            self._begin()
        if self._packing is None:
            return {}
        total = self.checkpoint.nbytes
        return self._packing.finish(threads, lambda done: on_progress(done, total))

    def _begin(self) -> None:
        try:
            self._packing = Packing(_matrices(self.checkpoint, self._config))
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise
            # no library: whoever needs it will say so

    def stop(self) -> None:
        """End the packing and let go of what it has."""
        packing, self._packing = self._packing, None
        if packing is not None:
            packing.cancel()

    def close(self) -> None:
        """Stop and close the files. May be called again. Nothing here keeps weights or vocabulary in memory then."""
        self.stop()
        self._text_thread.shutdown(cancel_futures=True)
        self.__dict__.pop("text", None)
        if "checkpoint" in vars(self):
            self.checkpoint.close()
            del self.checkpoint


def _load_text(
    metadata: Mapping[str, object], chat_template: str | Literal[False] | None, pre: str | None
) -> tuple[Tokenizer, ChatTemplate | None]:
    from infer.runtime.tokenizer.load import load_chat_template, load_tokenizer

    tokenizer = load_tokenizer(metadata, pre=pre)
    if chat_template is False:
        return tokenizer, None
    return tokenizer, load_chat_template(metadata, tokenizer, chat_template)


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
