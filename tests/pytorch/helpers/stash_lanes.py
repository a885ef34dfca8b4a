# Lanes of a CPU on which work runs as late as the waits allow, or as early: what a stream may do is done, and a wait
# that is left out shows in values. Only where somebody waits for a point is what leads to it run; work that is not
# behind the memory's own work on the current stream runs as if before that.
import dataclasses
from collections.abc import Callable

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.stash import pool as pool_module
from transformer_engine.pytorch.stash.lanes import COMPUTE, Lanes, Point

GARBAGE = 0x5A


@dataclasses.dataclass
class Task:
    """after: tasks that it has to be behind. clock: what of the current stream's work it is behind."""

    what: str
    work: Callable[[int], None]
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
        lanes.early = self.early
        self.work(0)
        lanes.early = False


class LateLanes(Lanes):
    """left_out: (who, whom), beginnings of what waits and what is waited for, which is ignored. hurry: beginning of
    what runs as early as it may. ran: in which order work ran."""

    def __init__(self, device, left_out=None, hurry=None):
        super().__init__(device)
        self.hurry, self.left_out, self.left, self.ran, self.early, self.clock = hurry, left_out, 0, [], False, 0
        self.tasks, self.newest = [], {}

    def _ignored(self, who, point):
        if self.left_out and who.startswith(self.left_out[0]) and point.what.startswith(self.left_out[1]):
            self.left += 1
            return True
        return False

    def now(self, what):
        return Point(COMPUTE, self.clock, what)

    def run(self, lane, work, what, behind):
        kept = [point for point in behind if not self._ignored(what, point)]
        after = [point.event for point in kept if isinstance(point.event, Task)]
        clocks = [point.event for point in kept if point.lane == COMPUTE] + [task.clock for task in after]
        if lane in self.newest:
            after.append(self.newest[lane])
            clocks.append(self.newest[lane].clock)
        clock = max(clocks, default=-1)
        task = Task(what, work, after, clock, clock < self.clock)
        self.clock += 1  # what the current stream does from here on
        self.tasks.append(task)
        self.newest[lane] = task
        if self.hurry is not None and what.startswith(self.hurry):
            task.run(self)
        return Point(lane, task, what)

    def wait(self, point):
        if not self._ignored("compute", point) and isinstance(point.event, Task):
            point.event.run(self)

    def flush(self):
        for task in self.tasks:
            task.run(self)
        self.tasks.clear()


class LatePool:
    """The host's part of a call happens when it is made, and not when it runs."""

    def __init__(self, device, **options):
        self.real, self.evicted = _C.StashPool(device, **options), False

    def __getattr__(self, name):
        return getattr(self.real, name)

    @property
    def load_waits(self):
        return self.evicted or self.real.load_waits


class LateGroup:
    """Holds its members until its store has run, as a device reads what was freed. A store that runs early finds other
    values than those that are made meanwhile; what a load that runs early wrote is written over."""

    lanes = None

    def __init__(self, native, handle, tail):
        self.pool, self.real = native, _C.StashGroup(native.real, handle, tail)
        self.pieces, self.forgotten = [piece.memory for piece in handle.pieces], False

    def __getattr__(self, name):
        return getattr(self.real, name)

    def store(self, number, stream):
        values = [piece.clone() for piece in self.pieces]
        if self.lanes().early:
            for piece in self.pieces:
                piece.fill_(GARBAGE)
        self.real.store(number, stream)
        if self.lanes().early:
            for piece, value in zip(self.pieces, values, strict=True):
                piece.copy_(value)
        self.pieces = None
        if self.forgotten:
            self.real.forget_members()

    def forget_members(self):
        self.forgotten = True
        if self.pieces is None:
            self.real.forget_members()
            return
        for piece in self.pieces:  # which are free for anybody, and not copied yet
            piece.fill_(GARBAGE)

    def bring(self, handle):
        self.real.bring(handle)
        self.targets = _C.StashHandle(handle.name)  # which are there until the load has run, whatever the handle does
        for piece in handle.pieces:
            self.targets.add(_C.StashPiece(piece.memory))

    def load(self, handle, keep, stream):
        self.real.load(self.targets, keep, stream)
        if self.lanes().early:
            for piece in self.targets.pieces:
                piece.memory.fill_(GARBAGE)

    def evict(self, low, stream):
        self.real.evict(low, stream)


class _Late:
    StashPool, StashGroup = LatePool, LateGroup


def late_lanes(monkeypatch):
    """(stash, left_out, hurry) -> lanes: gives a stash without a pool such lanes."""
    monkeypatch.setattr(pool_module, "_C", _Late)

    def give(stash, left_out=None, hurry=None):
        stash.lanes = lanes = LateLanes(stash.device, left_out, hurry)
        monkeypatch.setattr(LateGroup, "lanes", staticmethod(lambda: lanes))
        evict = pool_module.Pool.evict

        def noted(self, *args):
            if isinstance(self.native, LatePool):
                self.native.evicted = True
            evict(self, *args)

        monkeypatch.setattr(pool_module.Pool, "evict", noted)
        return lanes

    return give
