"""Reports of a device about a step: a mailbox in pinned host memory, read without a sync, and counts of splits that the
device had to correct."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.compiling import outside_of_modes
from transformer_engine.pytorch.utils import resolve_device


class Mailbox:
    """One report, which the device overwrites. parse(memory): the report there, or None if there is no complete one; of
    reports with `step`, each is returned once."""

    def __init__(self, device: torch.device, size: int, parse: Callable[[torch.Tensor], dict | None]) -> None:
        self.memory = torch.full((size,), 0xFF, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._parse, self._seen = parse, -1

    def peek(self) -> dict | None:
        """The last report, whether it has been read before or not."""
        return self._parse(self.memory)

    def read(self) -> dict | None:
        """The report since the last read."""
        report = self.peek()
        if report is None or report["step"] == self._seen:
            return None
        self._seen = report["step"]
        return report


class SplitVerdict(NamedTuple):
    """Since the process began, or since reset_split_verdict(): sizes of groups that were negative, and counted as 0;
    rows that groups claimed beyond the tensor, which were cut."""

    negative: int
    cut: int


_counting: set[torch.device] = set()  # CUDA devices whose counters exist


def count_splits(op: str, device: torch.device) -> None:
    """Runs before the first call on a CUDA device: its counters must outlive the graph of a capture."""
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


def split_gate(device: torch.device | str | int | None = None) -> torch.Tensor:
    """float32 [] on the device: 1 where one of the counts is above 0, else 0. Pass it as the `found_inf` of FusedAdam
    and torch's fused optimizers, which then skip the step. Nothing waits; reset_split_verdict() comes before the
    step."""
    return _C.split_counters(resolve_device(device)).view(torch.int32).any().float()


def reset_split_verdict(device: torch.device | str | int | None = None) -> None:
    """Sets the counts to 0, in order with the current stream."""
    _C.split_counters(resolve_device(device)).zero_()
