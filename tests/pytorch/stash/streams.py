# Streams of a CPU whose work runs as late, or as early, as the waits allow, so that a missing wait changes values. Work
# runs when something waits for its event. Work that does not wait for earlier work of the current stream runs as if it
# came before that.
import dataclasses
from collections.abc import Callable

from transformer_engine.pytorch import _C

GARBAGE = 0x5A
COMPUTE = "compute"  # name of the current stream (csrc/stash/stash_streams.cpp)


@dataclasses.dataclass
class Task:
    """after: tasks that run before it. clock: work of the current stream that runs before it. memory: of its segments,
    held until it has run, as a device reads and writes freed memory."""

    label: str
    work: Callable[[int], None]
    segments: list
    memory: list
    after: list["Task"]
    clock: int
    early: bool
    done: bool = False

    def run(self, streams):
        if self.done:
            return
        self.done = True
        for task in self.after:
            task.run(streams)
        streams.ran.append(self.label)
        if self.label.startswith("store"):
            self._store()
        else:
            self.work(0)
        if self.label.startswith("load") and self.early:  # other work overwrites its result
            self._fill()
        self.memory = None

    def _store(self):
        """A store that runs too early reads other values than those written later; one that runs after its originals
        were freed reads values of the memory's next user."""
        values = [memory.clone() for memory in self.memory]
        if self.early or any(segment.memory is None for segment in self.segments):
            self._fill()
        self.work(0)
        if self.early:
            for memory, value in zip(self.memory, values, strict=True):
                memory.copy_(value)

    def _fill(self):
        for memory in self.memory:
            memory.fill_(GARBAGE)


class LateStreams(_C.StashStreams):
    """left_out: prefixes of two labels, (waiting, awaited); these waits are ignored. hurry: prefix of labels whose work
    runs as early as possible. ran: labels in the order of execution."""

    def __init__(self, device, left_out=None, hurry=None):
        super().__init__(device)
        self.hurry, self.left_out, self.left, self.ran, self.clock = hurry, left_out, 0, [], 0
        self.tasks, self.newest = [], {}

    def _ignored(self, waiting, event):
        if self.left_out and waiting.startswith(self.left_out[0]) and event.label.startswith(self.left_out[1]):
            self.left += 1
            return True
        return False

    def now(self, label):
        return _C.StashEvent(COMPUTE, self.clock, label)

    def run(self, stream, work, label, after):
        events = [event for event in after if not self._ignored(label, event)]
        tasks = [event.mark for event in events if isinstance(event.mark, Task)]
        clocks = [event.mark for event in events if event.stream == COMPUTE] + [task.clock for task in tasks]
        if stream in self.newest:
            tasks.append(self.newest[stream])
            clocks.append(self.newest[stream].clock)
        clock = max(clocks, default=-1)
        memory = [segment.memory for segment in work.segments if segment.memory is not None]
        task = Task(label, work, work.segments, memory, tasks, clock, clock < self.clock)
        self.clock += 1  # later work of the current stream
        self.tasks.append(task)
        self.newest[stream] = task
        if self.hurry is not None and label.startswith(self.hurry):
            task.run(self)
        return _C.StashEvent(stream, task, label)

    def wait(self, event):
        if not self._ignored("compute", event) and isinstance(event.mark, Task):
            event.mark.run(self)

    def flush(self):
        for task in self.tasks:
            task.run(self)
        self.tasks.clear()


def late_streams(stash, left_out=None, hurry=None):
    """Sets such streams on a stash that has no pool yet."""
    streams = LateStreams(stash.device, left_out, hurry)
    stash.streams = streams
    return streams
