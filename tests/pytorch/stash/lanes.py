# Lanes of a CPU on which work runs as late as the waits allow, or as early: what a stream may do is done, and a wait
# that is left out shows in values. Only where somebody waits for a point is what leads to it run; work that is not
# behind the memory's own work on the current stream runs as if before that.
import dataclasses
from collections.abc import Callable

from transformer_engine.pytorch import _C

GARBAGE = 0x5A
COMPUTE = "compute"  # the lane of the current stream, as csrc/stash/stash_lanes.h says it


@dataclasses.dataclass
class Task:
    """after: tasks that it has to be behind. clock: what of the current stream's work it is behind. memory: of its
    pieces, which is there until it has run, as a device reads and writes what was freed."""

    what: str
    work: Callable[[int], None]
    pieces: list
    memory: list
    after: list["Task"]
    clock: int
    early: bool
    done: bool = False

    def run(self, lanes):
        if self.done:
            return
        self.done = True
        for task in self.after:
            task.run(lanes)
        lanes.ran.append(self.what)
        if self.what.startswith("store"):
            self._store()
        else:
            self.work(0)
        if self.what.startswith("load") and self.early:  # what it wrote is written over
            self._fill()
        self.memory = None

    def _store(self):
        """A store that runs early finds other values than those that are made meanwhile; one that runs behind the
        freeing of its members, those of who has the memory then."""
        values = [memory.clone() for memory in self.memory]
        if self.early or any(piece.memory is None for piece in self.pieces):
            self._fill()
        self.work(0)
        if self.early:
            for memory, value in zip(self.memory, values, strict=True):
                memory.copy_(value)

    def _fill(self):
        for memory in self.memory:
            memory.fill_(GARBAGE)


class LateLanes(_C.StashLanes):
    """left_out: (who, whom), beginnings of what waits and what is waited for, which is ignored. hurry: beginning of
    what runs as early as it may. ran: in which order work ran."""

    def __init__(self, device, left_out=None, hurry=None):
        super().__init__(device)
        self.hurry, self.left_out, self.left, self.ran, self.clock = hurry, left_out, 0, [], 0
        self.tasks, self.newest = [], {}

    def _ignored(self, who, point):
        if self.left_out and who.startswith(self.left_out[0]) and point.what.startswith(self.left_out[1]):
            self.left += 1
            return True
        return False

    def now(self, what):
        return _C.StashPoint(COMPUTE, self.clock, what)

    def run(self, lane, work, what, behind):
        kept = [point for point in behind if not self._ignored(what, point)]
        after = [point.mark for point in kept if isinstance(point.mark, Task)]
        clocks = [point.mark for point in kept if point.lane == COMPUTE] + [task.clock for task in after]
        if lane in self.newest:
            after.append(self.newest[lane])
            clocks.append(self.newest[lane].clock)
        clock = max(clocks, default=-1)
        memory = [piece.memory for piece in work.pieces if piece.memory is not None]
        task = Task(what, work, work.pieces, memory, after, clock, clock < self.clock)
        self.clock += 1  # what the current stream does from here on
        self.tasks.append(task)
        self.newest[lane] = task
        if self.hurry is not None and what.startswith(self.hurry):
            task.run(self)
        return _C.StashPoint(lane, task, what)

    def wait(self, point):
        if not self._ignored("compute", point) and isinstance(point.mark, Task):
            point.mark.run(self)

    def flush(self):
        for task in self.tasks:
            task.run(self)
        self.tasks.clear()


def late_lanes(stash, left_out=None, hurry=None):
    """Gives a stash without a pool such lanes."""
    lanes = LateLanes(stash.device, left_out, hurry)
    stash.lanes = lanes
    return lanes
