"""Where tensors lie, in torch's words and without torch where that is the CPU."""

from __future__ import annotations

from typing import Protocol


class Device(Protocol):
    """A `torch.device`, or what stands for one. str() gives the name that torch takes: "cpu", "cuda:0"."""

    @property
    def type(self) -> str:
        """ "cpu" or "cuda"."""


class Host:
    """This machine's memory."""

    type = "cpu"

    def __str__(self) -> str:
        return self.type


CPU = Host()
