"""Reports of a device about a step: a mailbox in pinned host memory, read without a sync, counts of splits that the
device had to correct, and a watch over both."""

from __future__ import annotations

import math
import struct
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
    rows that groups claimed beyond the tensor, and ids of experts out of range, which were cut. Chunks are groups, and
    `cut` has also the rows of those that an order on the device leaves out, and its entries that name no other one."""

    negative: int
    cut: int


_counting: set[torch.device] = set()  # CUDA devices whose counters exist


def count_splits(op: str, device: torch.device) -> None:
    """Runs before the first call on a CUDA device: its counters must outlive the graph of a capture."""
    if device in _counting:
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{op}: its first call whose counts are on {device} is inside of a CUDA graph's capture; run it once "
            "before."
        )
    with outside_of_modes():
        _C.split_counters(device)
    _counting.add(device)


class StepVerdict(NamedTuple):
    """On a step of a device. negative, cut: as SplitVerdict's. capacity_factor: with which no MoEMLP had cut a row; 0
    where none did. ok: nothing was negative or cut."""

    step: int
    negative: int
    cut: int
    capacity_factor: float

    @property
    def ok(self) -> bool:
        return not (self.negative or self.cut)

    def __str__(self) -> str:
        if self.ok:
            return f"step {self.step} is good."
        found = f"step {self.step} is bad: {self.negative} sizes of groups were negative, {self.cut} rows were cut"
        if not self.capacity_factor:
            return f"{found}."
        return f"{found}; MoEMLP(capacity_factor={math.ceil(100 * self.capacity_factor) / 100}) holds the rows."


_RECORD_BYTES = 20  # int32: step, negative, cut, capacity_factor's bits, step


def _report_in(memory: torch.Tensor) -> dict | None:
    first, negative, cut, factor, last = struct.unpack("=iIIfi", bytes(memory.tolist()))
    if first < 0 or first != last:  # nothing yet, or half of a copy
        return None
    return {"step": first, "negative": negative, "cut": cut, "capacity_factor": factor}


class Watch:
    """The verdicts on the steps of a device, and a gate, without a wait of the host. verdict.watch() makes it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._record = _C.split_record(device)
        self._faults = self._record[1:3]
        self._steps = torch.tensor([1, 0, 0, 0, 1], dtype=torch.int32, device=device)
        self._mailbox = Mailbox(device, _RECORD_BYTES, _report_in)
        self._gate = torch.zeros((), device=device)
        self._gates: dict[object, torch.Tensor] = {}  # by process group

    def reset(self) -> None:
        """Starts a step, in order with the current stream: sends the verdict on the last one to the host, and sets the
        counts to 0. A captured step captures it."""
        self._post()
        self._record.mul_(self._steps).add_(self._steps)

    def verdict(self, wait: bool = False) -> StepVerdict | None:
        """The verdict on the last step whose report has arrived and was not read yet, else None; does not wait. wait:
        the verdict on the current step, after waiting for the device."""
        # A report of the current step in the mailbox would take the place of one that was not read yet.
        report = _report_in(self._record.cpu().view(torch.uint8)) if wait else self._mailbox.read()
        return None if report is None else StepVerdict(**report)

    def gate(self, group: torch.distributed.ProcessGroup | None = None) -> torch.Tensor:
        """float32 [] on the device: 1 where the step so far has negative sizes or cut rows, else 0. Pass it as the
        `found_inf` of FusedAdam and torch's fused optimizers, which then skip the step. Each call writes the same
        tensor. group: the maximum over these ranks in another tensor, by one all-reduce on the device; every rank calls
        it in each step, also ranks without groups."""
        self._gate.copy_(self._faults.any())
        if group is None:
            return self._gate
        gate = self._gates.get(group)
        if gate is None:
            with outside_of_modes():
                gate = self._gates[group] = torch.zeros_like(self._gate)
        gate.copy_(self._gate)
        torch.distributed.all_reduce(gate, torch.distributed.ReduceOp.MAX, group=group)
        return gate

    def _post(self) -> None:
        self._mailbox.memory.view(torch.int32).copy_(self._record, non_blocking=True)


_watches: dict[torch.device, Watch] = {}


def watch(device: torch.device | str | int | None = None) -> Watch:
    """The device's Watch, the same one in each call. Its first step begins with the process. From the first call on the
    gates of the device's PagedStash are up where this one is: each step has to reset() it too, or they stay up after
    one bad step. Errors: RuntimeError where the first call is inside of a CUDA graph's capture."""
    device = resolve_device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in _watches:
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"verdict.watch: the first call for {device} is inside of a CUDA graph's capture; call it once "
                    "before."
                )
            count_splits("verdict.watch", device)
        with outside_of_modes():
            _watches[device] = Watch(device)
    return _watches[device]


def watch_of(device: torch.device) -> Watch | None:
    """The device's Watch, if there is one."""
    return _watches.get(device)


def split_verdict(device: torch.device | str | int | None = None) -> SplitVerdict:
    """Waits for the device. The counters stay."""
    return SplitVerdict(*_C.split_counters(resolve_device(device)).tolist()[:2])


def split_gate(device: torch.device | str | int | None = None) -> torch.Tensor:
    """float32 [] on the device: 1 where one of the counts is above 0, else 0. Pass it as the `found_inf` of FusedAdam
    and torch's fused optimizers, which then skip the step. Nothing waits; reset_split_verdict() comes before the
    step."""
    return _C.split_counters(resolve_device(device)).view(torch.int32).any().float()


def reset_split_verdict(device: torch.device | str | int | None = None) -> None:
    """Sets the counts to 0, in order with the current stream. A Watch's reset() does so too."""
    _C.split_counters(resolve_device(device)).zero_()
