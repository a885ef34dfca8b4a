"""What a device has to say of a step: a mailbox in pinned host memory, read without waiting for it, and what it counts
of splits that it had to mend."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.compiling import outside_of_modes
from transformer_engine.pytorch.utils import resolve_device


class Mailbox:
    """One report, written over and over by the device. parse(memory): the report there, or None where nothing whole
    is there; of one that carries `step`, each is handed out once."""

    def __init__(self, device: torch.device, size: int, parse: Callable[[torch.Tensor], dict | None]) -> None:
        self.memory = torch.full((size,), 0xFF, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._parse, self._seen = parse, -1

    def peek(self) -> dict | None:
        """What has arrived, whether it was read before or not."""
        return self._parse(self.memory)

    def read(self) -> dict | None:
        """What has arrived since the last read."""
        report = self.peek()
        if report is None or report["step"] == self._seen:
            return None
        self._seen = report["step"]
        return report


class SplitVerdict(NamedTuple):
    """Since the process began, or since reset_split_verdict(): sizes of groups that were negative, and counted as 0;
    rows that groups claimed and no tensor had, which were cut."""

    negative: int
    cut: int


_counting: set[torch.device] = set()  # CUDA devices whose counters are there


def count_splits(op: str, device: torch.device) -> None:
    """Before the first call on a CUDA device: what it counts has to outlive the graph of a capture."""
    if device in _counting:
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{op}: its first call with sizes of groups on {device} is inside of a CUDA graph's capture; run it once "
            "before."
        )
    with outside_of_modes():
        _C.split_counters(device)
    _counting.add(device)


def split_verdict(device: torch.device | str | int | None = None) -> SplitVerdict:
    """Waits for the device. The counters stay."""
    return SplitVerdict(*_C.split_counters(resolve_device(device)).tolist())


def reset_split_verdict(device: torch.device | str | int | None = None) -> None:
    """Counts from 0 again, behind what the current stream has to do."""
    _C.split_counters(resolve_device(device)).zero_()
