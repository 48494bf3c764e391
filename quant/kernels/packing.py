"""Weights packed straight from their files by threads of their own, while Python imports what computes with
them. Imports no torch itself."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from infer.quant.kernels import native_abi as abi
from infer.quant.kernels.arena import Arena
from infer.quant.kernels.strips import STORED, NativeWeight, grid_address

_POLL_S = 0.02


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [rows, columns] of a type in STORED, nbytes in all, from byte `offset` of an open file on."""

    name: str
    shape: tuple[int, int]
    type: str
    nbytes: int
    file: int
    offset: int


class Packing:
    """Packs matrices in order, beginning at once. The files must stay open until `finish` or `cancel` has returned."""

    def __init__(self, matrices: Iterable[StoredMatrix]) -> None:
        """Leaves out matrices that do not fill whole blocks. Raises OSError without the library, or the memory."""
        self._library = abi.open_library(abi.library_path())
        arena = Arena()
        self._weights: dict[str, NativeWeight] = {}
        stored = []
        for matrix in matrices:
            try:
                weight = NativeWeight.empty(matrix.shape, STORED[matrix.type], arena)
            except ValueError:
                continue
            self._weights[matrix.name] = weight
            stored.append(
                abi.Stored(
                    type=matrix.type.encode(), w=ctypes.pointer(weight.struct), grid=grid_address(matrix.type),
                    offset=matrix.offset,
                    row_bytes=matrix.nbytes // matrix.shape[0], file=matrix.file,
                )
            )  # fmt: skip
        self._stored = (abi.Stored * len(stored))(*stored)
        self._work = abi.Packing(matrices=self._stored, count=len(stored))
        self._threads: list[threading.Thread] = []
        self._join_in()

    def finish(self, threads: int, on_progress: Callable[[int], None]) -> dict[str, NativeWeight]:
        """The weights by name, without those that could not be read, packed by so many threads from now on.

        on_progress(bytes done) may raise, which leaves everything as it is.
        """
        while len(self._threads) < threads and self._join_in():
            pass
        if not self._threads:  # the system refuses
            self._run()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_POLL_S)
                on_progress(self._work.done)
        on_progress(self._work.done)
        named = zip(self._weights.items(), self._stored, strict=True)
        return {name: weight for (name, weight), stored in named if not stored.failed}

    def cancel(self) -> None:
        """End within milliseconds."""
        self._work.stop = 1
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        self._library.infer_pack_files(ctypes.byref(self._work))

    def _join_in(self) -> bool:
        work = threading.Thread(
            target=self._run,  # a method, so that the memory lives as long as somebody writes into it
            name="packing",
            daemon=True,
        )
        try:
            work.start()
        except RuntimeError:
            return False
        self._threads.append(work)
        return True
