"""The collectives of data parallelism over one process group. A collective returns an object with wait(), which orders
the current stream (on a CPU: the caller) after the collective. A group of one rank communicates nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from transformer_engine.pytorch._internal.torch_private import (
    current_raw_stream,
    group_store,
    group_timeout,
    make_nccl_premul_sum,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from transformer_engine.pytorch.distributed.groups import ranks_of

OP = "DistributedDataParallel"


class Work(Protocol):
    def wait(self) -> object: ...


@functools.cache
def stream_of(handle: int, device: torch.device) -> torch.cuda.Stream:
    """0 is the default stream, for which ExternalStream would make another one."""
    return torch.cuda.ExternalStream(handle, device=device) if handle else torch.cuda.default_stream(device)


class Done:
    """The end of the work that the current stream has now: a collective of one rank, or a sum that has been made. Any
    stream may wait for it: what that stream itself does later comes after it anyway. On a CPU nothing is left to wait
    for."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.event = device, None
        if device.type == "cuda":
            self._stream, self.event = current_raw_stream(device), torch.cuda.Event()
            self.event.record(stream_of(self._stream, device))

    def wait(self) -> None:
        if self.event is None:
            return
        stream = current_raw_stream(self.device)
        if stream != self._stream:
            stream_of(stream, self.device).wait_event(self.event)

    def is_completed(self) -> bool:
        return self.event is None or self.event.query()


def all_gather_object(value: Any, group: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


class Communicator:
    """Over a torch.distributed group; None is all processes, or this one alone without torch.distributed."""

    def __init__(self, argument: str, group: object | None) -> None:
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"{OP}: argument '{argument}' is a DeviceMesh of {group.ndim} dimensions, wanted one; take a "
                    "dimension by its name: mesh['dp']."
                )
            group = group.get_group()
        self.size = ranks_of(OP, argument, group)
        self.group: Any = group
        self.rank = dist.get_rank(group) if self.size > 1 else 0
        # torch's answers, which take long and are the same for each bucket.
        self._blocks_host: dict[str, bool] = {}
        self._premultiplied: dict[float, Any] = {}
        self._store: Any = None
        if self.size > 1:  # sentences of ranks that leave a step travel beside the collectives
            store = group_store(dist.group.WORLD if group is None else group)
            made = store.add(f"te_data_parallel/{argument}/{self.rank}", 1)  # the same on all ranks
            self._store = dist.PrefixStore(f"te_data_parallel/{argument}/{made}", store)

    def scales(self, device: torch.device) -> bool:
        """Whether a sum may be multiplied inside of the collective."""
        return self.size > 1 and not self.blocks_host(device)

    def blocks_host(self, device: torch.device) -> bool:
        """Whether wait() of a collective waits on the host, not on the stream."""
        if device.type not in self._blocks_host:
            may_queue = self.size > 1 and device.type == "cuda" and "nccl" in str(dist.get_backend_config(self.group))
            self._blocks_host[device.type] = self.size > 1 and not may_queue
        return self._blocks_host[device.type]

    def premultiplied_sum(self, factor: float) -> Any:
        if factor not in self._premultiplied:
            self._premultiplied[factor] = make_nccl_premul_sum(factor)
        return self._premultiplied[factor]

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Work:
        return self._started(tensor, lambda: start_all_reduce(tensor, op, self.group))

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Work:
        """shard: this rank's slice of full, in place."""
        return self._started(full, lambda: start_reduce_scatter(shard, full, op, self.group))

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """shard: this rank's slice of full, in place."""
        return self._started(full, lambda: start_all_gather(full, shard, self.group))

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Work:
        return self._started(sent, lambda: dist.all_to_all_single(received, sent, group=self.group, async_op=True))

    def broadcast(self, tensor: torch.Tensor) -> Work:
        """The values of the group's first rank."""
        return self._started(tensor, lambda: dist.broadcast(tensor, group=self.group, group_src=0, async_op=True))

    def all_gather_object(self, value: Any) -> list[Any]:
        """The plain data that each rank passes, in the order of the ranks. Waits on the host."""
        return [value] if self.size == 1 else all_gather_object(value, self.group)

    def all_gather_text(self, key: str, text: str) -> list[str]:
        """The text of each rank, once for a key. It travels beside the collectives, of which ranks may have started
        different numbers. Waits on the host."""
        if self._store is None:
            return [text]
        self._store.set(f"{key}/{self.rank}", text)
        return [self._store.get(f"{key}/{rank}").decode() for rank in range(self.size)]

    # Of a step that some rank does not finish; step: a number that the ranks count alike.

    def post_message(self, step: int, message: str) -> None:
        """Leaves a message for ranks that wait for this one in vain."""
        if self._store is not None:
            self._store.set(f"{step}/message/{self.rank}", message)

    def messages(self, step: int) -> str:
        """The messages that other ranks left for that step."""
        if self._store is None:
            return ""
        keys = {rank: f"{step}/message/{rank}" for rank in range(self.size) if rank != self.rank}
        found = {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
        return "; ".join(f"rank {rank} of the process group: {text}" for rank, text in found.items())

    def leave(self, step: int, message: str, device: torch.device) -> None:
        """Waits until every rank leaves that step. RuntimeError after the group's timeout."""
        if self._store is None:
            return
        self.post_message(step, message)
        self._store.set(f"{step}/left/{self.rank}", "")
        keys = [f"{step}/left/{rank}" for rank in range(self.size)]
        group = dist.group.WORLD if self.group is None else self.group
        try:
            self._store.wait(keys, group_timeout(group, device))
        except RuntimeError as error:
            late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise RuntimeError(
                f"{OP}: {message}, and ranks {late} of the process group did not do so within its timeout; wanted a "
                "step that every rank leaves, or every rank finishes."
            ) from error

    def _started(self, tensor: torch.Tensor, start: Callable[[], Work]) -> Work:
        return Done(tensor.device) if self.size == 1 else start()
