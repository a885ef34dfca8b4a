"""Reports of a wrapper: the places of its parameters, the memory that it and its optimizer hold, and the times of
its collectives.

- Times are recorded only after a timeline was asked for: until then no event is made."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from transformer_engine.pytorch.data_parallel.buffers import ParamAndGradBuffer
from transformer_engine.pytorch.tensor import QuantizedTensor


class LayoutRow(NamedTuple):
    """Elements [start, end) of a buffer hold a parameter. shards: ranks that step a part of it, all if not sharded.
    pitch_bytes: the size of the weight's own memory where it has its bytes beside the buffer, as sharded FP8 weights
    have whose rows are off 16 bytes; 0 for all others."""

    buffer: int
    bucket: int
    name: str
    start: int
    end: int
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    expert: bool
    shards: tuple[int, ...]
    pitch_bytes: int


class LayoutReport(list):
    """LayoutRows in the order of the buffers."""

    def __init__(self, buffers: Sequence[ParamAndGradBuffer]) -> None:
        super().__init__()
        for number, buffer in enumerate(buffers):
            kind = buffer.param_dtype, buffer.grad_dtype, buffer.expert
            for bucket in buffer.buckets:
                for slot in bucket.layout.slots:
                    param = buffer.params[slot.param]
                    name, rows = buffer.names[param], buffer.pitched.get(param)
                    shards = tuple(range(buffer.comm.size))
                    if buffer.param_data is not None:
                        shards = tuple(rank for rank in shards if _meets(bucket.layout.shard(rank, len(shards)), slot))
                    beside = 0 if rows is None else rows.nbytes
                    self.append(LayoutRow(number, bucket.bucket_id, name, slot.start, slot.end, *kind, shards, beside))

    def __str__(self) -> str:
        lines = ["buffer bucket  start .. end  parameter  (weight, gradient)  ranks"]
        for row in self:
            kind = f"({_short(row.param_dtype)}, {_short(row.grad_dtype)}{', expert' if row.expert else ''})"
            beside = f", and {row.pitch_bytes} bytes on a pitch" if row.pitch_bytes else ""
            place = f"{row.buffer:>6} {row.bucket:>6}  {row.start} .. {row.end}  {row.name}"
            lines.append(f"{place}  {kind}  {list(row.shards)}{beside}")
        return "\n".join(lines)


def _meets(shard: tuple[int, int], slot: object) -> bool:
    return max(shard[0], slot.start) < min(shard[1], slot.end)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- memory ----


class HeldMemory(NamedTuple):
    """A tensor that owns its storage. status: parameter, gradient or optimizer."""

    name: str
    tensor: torch.Tensor
    status: str


def memory_of_buffers(buffers: Sequence[ParamAndGradBuffer]) -> Iterator[HeldMemory]:
    """Gradients, and parameters: of the buffers, and those of their parts that lie elsewhere."""
    for number, buffer in enumerate(buffers):
        name = f"buffer {number}"
        yield HeldMemory(f"{name}: gradients", buffer.grad_data, "gradient")
        if buffer.param_data is not None:
            yield HeldMemory(f"{name}: parameters", buffer.param_data, "parameter")
        for p in buffer.slots:
            parts = p.get_data_tensors() if isinstance(p, QuantizedTensor) else (p.detach(),)
            for part in parts:
                if part is not None:
                    yield HeldMemory(buffer.names[p], part, "parameter")


def memory_of_states(optimizer: Any) -> Iterator[HeldMemory]:
    """The states of this rank's shards, as they are kept."""
    for number, shards in enumerate(optimizer._shards):
        for i, shard in enumerate(shards):
            name = shard.group.names[shard.param]
            scales = {f"scale of {state}": scale for state, scale in optimizer._steps.scales_of(number, i).items()}
            for state, value in {**optimizer._steps.kept_of(number, i), **scales}.items():
                if isinstance(value, torch.Tensor):
                    yield HeldMemory(f"{name}: {state}", value, "optimizer")


# ---- time ----


class TimelineRow(NamedTuple):
    """A collective of a bucket group ("reduce" or "gather"), in milliseconds after the first dispatch among the rows.
    dispatch: the host starts it. start: the device has reached that point. end: the stream that waits for it goes on.
    exposed: how long that stream waited. On a CPU the host takes the place of device and stream."""

    group: int
    kind: str
    dispatch: float
    start: float
    end: float
    exposed: float


class TimelineReport(list):
    """TimelineRows by dispatch."""

    def __str__(self) -> str:
        lines = ["group kind    dispatch     start       end   exposed  ms"]
        for row in self:
            times = " ".join(f"{value:>9.3f}" for value in row[2:])
            lines.append(f"{row.group:>5} {row.kind:<7}{times}")
        return "\n".join(lines)


class _Clock:
    """Points in time: events of a device's current stream, or those of the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, first: Any, last: Any) -> float:
        """Milliseconds. Waits for events on the host."""
        if self.device.type != "cuda":
            return 1e3 * (last - first)
        last.synchronize()
        return first.elapsed_time(last)


class Span:
    """One collective while it is in flight. dispatch: by the host's clock."""

    def __init__(self, timeline: Timeline, group: int, kind: str) -> None:
        self.timeline, self.group, self.kind = timeline, group, kind
        self.dispatch, self.start = time.perf_counter(), timeline.clock.now()
        self.waited: tuple[Any, Any] | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for it."""
        before = self.timeline.clock.now()
        yield
        self.waited = before, self.timeline.clock.now()
        self.timeline.spans[self.group, self.kind] = self


def waiting(span: Span | None) -> AbstractContextManager:
    return nullcontext() if span is None else span.waiting()


class Timeline:
    """The last reduction and the last gather of each bucket group that were waited for."""

    def __init__(self, device: torch.device) -> None:
        self.clock = _Clock(device)
        self.spans: dict[tuple[int, str], Span] = {}

    def report(self) -> TimelineReport:
        """Waits for the device."""
        spans = sorted(self.spans.values(), key=lambda span: span.dispatch)
        return TimelineReport(self._row(span, spans[0]) for span in spans)

    def _row(self, span: Span, first: Span) -> TimelineRow:
        between, (before, after) = self.clock.between, span.waited
        times = 1e3 * (span.dispatch - first.dispatch), between(first.start, span.start), between(first.start, after)
        return TimelineRow(span.group, span.kind, *times, between(before, after))


def timeline_of(groups: Iterable[Any], device: torch.device) -> Timeline:
    """Records from now on in each of the groups."""
    timeline = Timeline(device)
    for number, group in enumerate(groups):
        group.span = lambda kind, number=number: Span(timeline, number, kind)
    return timeline
