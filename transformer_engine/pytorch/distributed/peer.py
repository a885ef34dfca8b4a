"""Channels between the ranks of a group on one machine, by which layers with tp_overlap="chunked" push rows into each
other's memory (csrc/distributed/peer.h): the ranks exchange processes and addresses, or the reason why they cannot.
Nothing is pushed here. No multicast."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.torch_private import symmetric_memory
from transformer_engine.pytorch.distributed.symmetric import without_multicast
from transformer_engine.pytorch.distributed.userbuffers import reservation

_TIMEOUT = "TE_COMM_TIMEOUT_S"
_NAME = "te_peer"  # of shared memory, in /proc/PID/maps
_DEAD_PERIOD = 0.25  # seconds between checks for a process that has ended


class CommTimeout(RuntimeError):
    """A channel to peers has failed: a rank is dead, stopped, late, or in another call.

    op: the call of the rank that raises; rank: that rank; peer: the rank that it waited for, -1 for none in particular;
    step: the reason of the wait ("arrive": its rows, "free": its memory, "grow": memory that all share, "call": a call
    was abandoned).
    """

    def __init__(self, message: str, op: str = "", peer: int = -1, rank: int = -1, step: str = "") -> None:
        super().__init__(message)
        self.op, self.peer, self.rank, self.step = op, peer, rank, step


_C.set_comm_timeout(CommTimeout)

_channels: dict[tuple[str, torch.device], _Meeting] = {}
# Of groups that no longer exist, on CUDA: streams may not have ended, and graphs captured over them may be replayed.
# Channels that may end do so at the next meeting, where the garbage collector does not wait for a device.
_outlived: list[_Meeting] = []


def has_met(group: str, device: torch.device) -> bool:
    """Whether the group that has this name at present has a channel on `device`."""
    return _C.PeerChannel.has_met(group, device)


def peer_channel(op: str, group: str, device: torch.device) -> None:
    """Makes sure that the group of this name has a channel on `device`: the ranks meet, once. Errors:
    NotImplementedError, with the reason as its text, if the ranks do not reach each other's memory; RuntimeError while
    a graph is captured."""
    device = _indexed(device)
    if has_met(group, device):
        return
    for meeting in list(_channels.values()):  # the garbage collector may remove some in between
        if not has_met(meeting.group, meeting.device):
            _forget(meeting)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{op}: the ranks of the group '{group}' have not met, which is impossible while a graph is captured; run "
            "the same call once before the capture."
        )
    meeting = _Meeting(op, group, device)
    meeting.channel.note_met()  # before another thread sees it: that drops meetings that have not ended
    _channels[group, device] = meeting
    _outlived[:] = [meeting for meeting in _outlived if not meeting.channel.can_close()]


def _forget(meeting: _Meeting) -> None:
    key = meeting.group, meeting.device
    if _channels.get(key) is meeting:
        del _channels[key]
        if meeting.device.type == "cuda":
            _outlived.append(meeting)


def kind_of(device: torch.device) -> str:
    """The device whose costs a plan uses (ops/comm/costs.cpp)."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


@contextlib.contextmanager
def channels_noted(found: set[_C.PeerChannel]) -> Iterator[None]:
    """Collects the channels that calls of any thread use inside."""
    before = {meeting.channel: meeting.channel.calls for meeting in list(_channels.values())}
    yield
    every = [meeting.channel for meeting in list(_channels.values())]
    found.update(channel for channel in every if channel.calls != before.get(channel, 0))


def channels_of(group: str) -> list[_C.PeerChannel]:
    return [found.channel for (name, _), found in list(_channels.items()) if name == group]


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def timeout_of(group: dist.ProcessGroup) -> float:
    """The seconds that a rank waits for another one: TE_COMM_TIMEOUT_S, or the group's timeout."""
    given = os.environ.get(_TIMEOUT)
    if given is None:
        backend = group._get_backend(torch.device(group._device_types[0]))
        found = getattr(getattr(backend, "options", None), "_timeout", None)
        return found.total_seconds() if found is not None else timedelta(minutes=30).total_seconds()
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{_TIMEOUT} is {given!r}, wanted a number of seconds > 0.")
    return seconds


class _Meeting:
    """One rank's part in a channel: it writes the address of its memory to the group's store, and reads the others'."""

    def __init__(self, op: str, group: str, device: torch.device) -> None:
        self.op, self.group, self.device = op, group, device
        found = dist.distributed_c10d._resolve_process_group(group)
        # Weak, like all references that the channel holds: a group without other references ends, with its channel.
        this = weakref.ref(self)
        self.process_group = weakref.ref(found, lambda _: (meeting := this()) is not None and _forget(meeting))
        self.rank, self.ranks = found.rank(), found.size()
        self.timeout = timeout_of(found)
        if "fake" in dist.get_backend_config(found):  # one process that imitates several
            self._refuse("the group's backend is 'fake'")
        store = dist.distributed_c10d._get_process_group_store(found)
        # A store may serve one group after another of the same name.
        times = (store.add(f"te_peer/{device.type}/{self.ranks}", 1) - 1) // self.ranks
        self.store = dist.PrefixStore(f"te_peer/{device.type}/{self.ranks}/{times}", store)
        self.channel = None
        self.grown = 0
        self.processes: list[str] = []
        process = f"{os.getpid()} {_started(str(os.getpid()))}"
        hosts = self._exchange("here", f"{process}|{socket.gethostname()} {_boot()} {_processes()}")
        if len({host.partition("|")[2] for host in hosts}) > 1:
            self._refuse("they are not on one machine, or do not see each other's processes there")
        self.processes = [host.partition("|")[0] for host in hosts]
        for refused in self._exchange("access", self._no_access()):  # either all ranks use the channel, or none
            if refused:
                self._refuse(refused)
        size = _C.peer_words_bytes(self.ranks)
        words = self._map_shared("words", size)[0]
        grow = weakref.WeakMethod(self._grow)
        kinds = set(self._exchange("kind", kind_of(device)))
        kind = kinds.pop() if len(kinds) == 1 else ""
        self.channel = _C.PeerChannel(
            group, device, self.ranks, self.rank, words, self.timeout, lambda *call: grow()(*call), kind
        )
        self._exchange("made", "")
        reserved = reservation()
        if reserved is not None and reserved.tp_size == self.ranks:
            self.channel.reserve(reserved.shape[0] * reserved.shape[1] * reserved.dtype.itemsize)

    def _refuse(self, why: str) -> None:
        raise NotImplementedError(f"the ranks of the group '{self.group}' do not reach each other's memory: {why}")

    def _no_access(self) -> str:
        """Why this rank cannot access another one's device; empty if it can, or does not see it."""
        if self.device.type != "cuda":
            return ""
        every = self._exchange("device", str(torch.cuda.get_device_properties(self.device).uuid))
        uuids = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
        mine = self.device.index
        for rank, its in enumerate(every):
            peer_index = uuids.get(its)
            if (
                peer_index is not None
                and peer_index != mine
                and not torch.cuda.can_device_access_peer(mine, peer_index)
            ):
                return f"rank {self.rank}'s {self.device} has no access to that of rank {rank}"
        return ""

    def _exchange(self, what: str, value: str) -> list[str]:
        """Exchanges values: those of every rank. CommTimeout if a rank does not come."""
        keys = [f"{what}/{rank}" for rank in range(self.ranks)]
        self.store.set(keys[self.rank], value)
        until = time.monotonic() + self.timeout
        look = time.monotonic() + _DEAD_PERIOD  # the channel's own thread checks only its own waits
        for rank, key in enumerate(keys):
            while not self.store.check([key]):
                if self.channel is not None:
                    self.channel.refuse_failed()
                now, dead = time.monotonic(), False
                if now > look and self.processes:
                    look = now + _DEAD_PERIOD
                    pid, began = self.processes[rank].split(" ", 1)
                    dead = _started(pid) != began and not self.store.check([key])
                if dead or now > until:
                    words = (
                        f"the tensor-parallel group '{self.group}': rank {self.rank} waited for rank {rank} to make "
                        f"memory that they share ({what}); "
                        + (
                            "it is dead; make a new group."
                            if dead
                            else "it is late, or makes another call; every rank must come within the group's timeout "
                            f"or {_TIMEOUT}."
                        )
                    )
                    if self.channel is not None:
                        self.channel.give_up(what)
                    raise CommTimeout(words, self.op, rank, self.rank, "grow")
                time.sleep(0.001)
        return [self.store.get(key).decode() for key in keys]

    def _map_shared(self, what: str, size: int, each: bool = False) -> list[torch.Tensor]:
        """Host memory of this size that all ranks map: rank 0's, or with `each` one of every rank's. It never has a
        name, so that a process that dies leaves nothing."""
        path, trouble, mapped = "", "", []
        with contextlib.ExitStack() as until_all_have_it:
            if each or self.rank == 0:
                try:
                    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
                    until_all_have_it.callback(os.close, descriptor)
                    os.posix_fallocate(descriptor, 0, size)  # an error now instead of a signal later
                    path = f"/proc/{os.getpid()}/fd/{descriptor}"
                except OSError as error:
                    trouble = str(error)
            paths = self._exchange_or_raise(size, what, path, trouble)
            try:
                mapped = [torch.from_file(p, shared=True, size=size, dtype=torch.uint8) for p in paths if p]
            except (OSError, RuntimeError) as error:
                trouble = str(error)
            self._exchange_or_raise(size, f"{what} mapped", "", trouble)
        return mapped

    def _exchange_or_raise(self, size: int, what: str, value: str, trouble: str) -> list[str]:
        """Exchanges values as _exchange; if one rank has an error, all raise RuntimeError instead of waiting."""
        values = self._exchange(what, f"!{trouble}" if trouble else value)
        for rank, received in enumerate(values):
            if received.startswith("!"):
                raise RuntimeError(
                    f"{self.op}: the ranks of the group '{self.group}' cannot share {size} bytes of host "
                    f"memory: rank {rank} got {received[1:]}; leave more of it free, or use tp_overlap='off'."
                )
        return values

    def _grow(self, slot: int, size: int, text: str) -> tuple:
        """(this rank's memory of the slot, the addresses of every rank's, an object that keeps it alive). All ranks
        call it at the same time, because they have seen the same sizes."""
        self.grown += 1
        size = 1 << max(12, (size - 1).bit_length())
        what = f"slot {slot} grows, number {self.grown}"
        every = self._exchange(what, f"{size} {text}")
        if len(set(every)) > 1:
            calls = "; ".join(f"rank {rank}: {call.split(' ', 1)[1]}" for rank, call in enumerate(every))
            other = next(rank for rank, call in enumerate(every) if call != every[self.rank])
            self.channel.give_up(text)
            raise CommTimeout(
                f"the tensor-parallel group '{self.group}': its ranks are in different calls: {calls}. "
                "Give each the same call, of one shape and dtype; make a new group.",
                text,
                other,
                self.rank,
                "grow",
            )
        if self.device.type == "cpu":
            mapped = self._map_shared(what + " in", size, each=True)
            return mapped[self.rank], [t.data_ptr() for t in mapped], mapped
        return self._grow_symmetric(size)

    def _grow_symmetric(self, size: int) -> tuple:
        symm_mem = symmetric_memory()
        result = symm_mem.empty(size, dtype=torch.uint8, device=self.device)
        with without_multicast():
            handle = symm_mem.rendezvous(result, self.group)
        if handle.multicast_ptr:
            raise RuntimeError(
                f"{self.op}: symmetric memory of the group '{self.group}' came with multicast, which is not used here; "
                "set TORCH_SYMM_MEM_DISABLE_MULTICAST=1 before torch is imported, or use tp_overlap='off'."
            )
        return result, list(handle.buffer_ptrs), handle


def _started(pid: str) -> str:
    """The start time of that process; empty if it does not exist or has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _boot() -> str:
    """Distinguishes machines of one name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _processes() -> str:
    """The namespace of process ids: in containers, the container's."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
