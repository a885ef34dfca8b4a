"""The streams that a stash copies on, and who waits for whom. What is copied is the pool's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from transformer_engine.pytorch.capture_flag import stream_captures

STORE, LOAD, COMPUTE = "store", "load", "compute"


class Point(NamedTuple):
    """A place in a lane: what was given to it so far. event: None where nothing has to be waited for."""

    lane: str
    event: torch.cuda.Event | None
    what: str
    captured: bool = False


class Lanes:
    """A capture waits for points of its own alone, and so does what is outside of captures: what was given before a
    capture is done when its graph is replayed, and a graph has joined its lanes when it ends.

    Work runs in the lane that it is given to, behind the points named with it, and gives a point itself. On the CPU
    it runs at once. log: told each call, where it is a list."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._at_once = device.type == "cpu"
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._nows: dict[str, Point] = {}
        self.log: list[tuple] | None = None

    def now(self, what: str) -> Point:
        """What the current stream has been given so far."""
        if self._at_once:
            return self._nows.get(what) or self._nows.setdefault(what, Point(COMPUTE, None, what))
        return self._point(COMPUTE, torch.cuda.current_stream(self.device), what)

    def run(self, lane: str, work: Callable[[int], None], what: str, behind: list[Point]) -> Point:
        """work(stream) behind these points."""
        if self.log is not None:
            self.log.append((lane, what, tuple(p.what for p in behind)))
        if self._at_once:
            work(0)
            return Point(lane, None, what)
        stream = self._streams.get(lane)
        if stream is None:
            stream = self._streams[lane] = torch.cuda.Stream(self.device)
        captured = stream_captures()
        for point in behind:
            if point.lane != lane and point.captured == captured:  # in one lane it is behind it anyway
                stream.wait_event(point.event)
        work(stream.cuda_stream)
        return self._point(lane, stream, what)

    def wait(self, point: Point) -> None:
        """The current stream waits for it."""
        if self.log is not None:
            self.log.append((COMPUTE, "wait", (point.what,)))
        if point.event is not None and point.captured == stream_captures():
            torch.cuda.current_stream(self.device).wait_event(point.event)

    def current(self) -> int:
        """The current stream, as work takes it."""
        return 0 if self._at_once else torch.cuda.current_stream(self.device).cuda_stream

    @staticmethod
    def _point(lane: str, stream: torch.cuda.Stream, what: str) -> Point:
        return Point(lane, stream.record_event(), what, stream_captures())
