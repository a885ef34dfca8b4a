"""The order of replays of graphs that copies tie together, such as those of a stash: a graph reads copies that another
one has made, and later graphs use the memory of the originals."""

from typing import Protocol


class Stream(Protocol):
    def wait_stream(self, other: object) -> None: ...


class Streams(Protocol):
    def current_stream(self) -> Stream: ...


class ReplayOrder:
    """Graphs that were captured together, forwards and backwards. Once tied, a step replays them in the order of their
    captures, each after the whole of the one before it, and begin() precedes the step.

    tied: the call that begins a step, None: replays have no order of their own. begins_itself: a captured call does.
    invalid: why no graph can be replayed any more. unfinished: the stream of a replay whose end nothing has waited for.
    """

    __slots__ = ("__weakref__", "_labels", "_next", "_streams", "begins_itself", "invalid", "tied", "unfinished")

    def __init__(self, streams: Streams) -> None:
        self._streams, self._labels, self._next = streams, [], 0
        self.tied: str | None = None
        self.begins_itself = False
        self.invalid: str | None = None
        self.unfinished: Stream | None = None

    def add(self, label: str) -> int:
        """The position of a captured graph."""
        self._labels.append(label)
        return len(self._labels) - 1

    def tie(self, call: str, *, begins_itself: bool) -> None:
        self.tied, self.begins_itself = call, begins_itself

    def begin(self) -> None:
        """Starts a step: the current stream waits for the last one."""
        self._next = 0
        self.join()

    def join(self) -> None:
        """The current stream waits for the end of the last replay."""
        self.wait(self._streams.current_stream())

    def wait(self, stream: Stream) -> None:
        """As join(), another stream."""
        if self.unfinished is not None:
            if self.unfinished != stream:
                stream.wait_stream(self.unfinished)
            self.unfinished = None

    def enter(self, position: int) -> None:
        """Before a replay, which it refuses out of the order. Nothing is changed then."""
        if self.invalid is None and (position == self._next or (position == 0 and self.begins_itself)):
            self._next = position + 1
            return
        label = self._labels[position]
        if self.invalid is not None:
            raise RuntimeError(f"{label}: {self.invalid}")
        if self._next == len(self._labels):
            raise RuntimeError(
                f"{label}: replayed after the last graph of a step, wanted {self.tied} before the next step."
            )
        begun = f", as {self.tied} has begun a step" if self._next == 0 else ""
        raise RuntimeError(
            f"{label}: replayed out of the order of the captures, wanted {self._labels[self._next]}{begun}. A graph "
            f"reads copies that earlier ones made; after {self.tied} replay all in the order of their captures."
        )
