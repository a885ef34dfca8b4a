"""How the gradients of a bucket become sums over ranks: by one collective, or by an exchange of slices that are summed
here in the order of the ranks, in float32, and rounded once.

- Factor: the bucket's gradient_scaling_factor. It goes into the collective where the backend takes one without a loss
  (AVG, or a premultiplied sum of NCCL); else the gradients are multiplied before it.
- Sums in the order of the ranks are scaled after the sum. At most two of them have scratch memory. Where a wait blocks
  the host, that holds for those whose slices have come: a backward waits for no other rank, which may start its part
  only after its own backward has raised."""

from __future__ import annotations

import functools
from collections import deque

import torch
import torch.distributed as dist

from transformer_engine.pytorch.data_parallel.buffers import Bucket
from transformer_engine.pytorch.data_parallel.communicator import Communicator, Done, Work
from transformer_engine.pytorch.data_parallel.config import DistributedDataParallelConfig

_IN_FLIGHT = 2  # sums in the order of the ranks


class Reduction:
    """Starts the collectives of all buckets of a wrapper, in the order in which they are asked for."""

    def __init__(self, config: DistributedDataParallelConfig) -> None:
        self.config = config
        self._ordered: deque[_OrderedSum] = deque()

    def start(self, bucket: Bucket, comm: Communicator, all_reduce: bool) -> Work:
        """all_reduce: every rank gets the whole sum, else its own shard of it, in place."""
        config = self.config
        narrow = bucket.grad_data.dtype.itemsize < 4
        if config.reproducible or (config.reduce_scatter_with_fp32_accumulation and narrow):
            self._make_room(bucket.grad_data.device)
            self._ordered.append(_OrderedSum(bucket, comm, all_reduce))
            return self._ordered[-1]
        op = self._prepared(bucket, comm)
        if all_reduce:
            return comm.all_reduce(bucket.grad_data, op)
        return comm.reduce_scatter(bucket.own_grads, bucket.grad_data, op)

    def _make_room(self, device: torch.device) -> None:
        if not any(each.comm.blocks_host(device) for each in self._ordered):
            while len(self._ordered) >= _IN_FLIGHT:
                self._ordered.popleft().wait()
            return
        while self._ordered and self._ordered[0].end is not None:
            self._ordered.popleft()
        for each in self._ordered:
            if each.added_up is None and each.work.is_completed():
                each.add_up()

    def _prepared(self, bucket: Bucket, comm: Communicator) -> object:
        """The collective's operation, with the factor in it or in the gradients."""
        factor, data = bucket.gradient_scaling_factor, bucket.grad_data
        if self.config.average_in_collective:
            rest = factor * comm.size  # of experts, whose group is smaller than the one that they are scaled by
            if rest != 1.0:
                data.mul_(rest)
            return dist.ReduceOp.AVG if comm.size > 1 else dist.ReduceOp.SUM
        if factor == 1.0:
            return dist.ReduceOp.SUM
        if comm.scales(data.device) and _is_exact(factor, data.dtype):
            return comm.premultiplied_sum(factor)
        data.mul_(factor)
        return dist.ReduceOp.SUM

    def finish_scratch(self) -> None:
        """Waits for sums whose scratch memory is still there, and lets go of it."""
        while self._ordered:
            self._ordered.popleft().wait()


@functools.cache
def _is_exact(factor: float, dtype: torch.dtype) -> bool:
    """Whether a factor of the gradients' dtype loses nothing of what float32 keeps."""
    return dtype.itemsize >= 4 or torch.tensor(factor, dtype=dtype).item() == factor


class _OrderedSum:
    """Slices of every rank come here, and are summed when it is waited for, or before it."""

    def __init__(self, bucket: Bucket, comm: Communicator, all_reduce: bool) -> None:
        self.bucket, self.comm, self.all_reduce = bucket, comm, all_reduce
        self.sent = data = bucket.grad_data
        if data.numel() % comm.size:  # not sharded
            self.sent = data.new_zeros(-(-data.numel() // comm.size) * comm.size)
            self.sent[: data.numel()] = data
        self.received = None if comm.size == 1 else torch.empty_like(self.sent)
        self.work: dist.Work | Done = Done(data.device) if comm.size == 1 else comm.all_to_all(self.received, self.sent)
        self.added_up: Done | None = None
        self.end: Work | None = None

    @torch.no_grad()
    def wait(self) -> None:
        """The first call ends the sum, on its stream; others wait for it."""
        if self.end is None:
            self.add_up().wait()
            self._share()
            self.end = Done(self.bucket.grad_data.device)
        self.end.wait()

    @torch.no_grad()
    def add_up(self) -> Done:
        """Makes this rank's slice of the sum, once, and starts no collective. Returns the end of that on its stream."""
        if self.added_up is None:
            self.work.wait()
            self._make_sum()
            self.added_up = Done(self.bucket.grad_data.device)
        return self.added_up

    def _make_sum(self) -> None:
        comm, factor, data = self.comm, self.bucket.gradient_scaling_factor, self.bucket.grad_data
        if self.received is None:
            if factor != 1.0:
                data.mul_(factor)
            return
        if data.is_cuda:  # they were allocated on the stream of the backward
            for each in (self.received, self.sent):
                each.record_stream(torch.cuda.current_stream(data.device))
        parts, own = self.received.view(comm.size, -1), self.sent.view(comm.size, -1)[comm.rank]
        is_narrow = data.dtype.itemsize < 4
        total = parts[0].float().add_(parts[1]) if is_narrow else torch.add(parts[0], parts[1], out=own)
        for part in parts[2:]:
            total.add_(part)
        if factor != 1.0:
            total.mul_(factor)
        if is_narrow:
            own.copy_(total)
        self.received = None

    def _share(self) -> None:
        """Every rank gets the slices of all of them, where it is not sharded."""
        data, sent, self.sent = self.bucket.grad_data, self.sent, None
        if self.all_reduce and self.comm.size > 1:
            self.comm.all_gather(sent, sent.view(self.comm.size, -1)[self.comm.rank]).wait()
            if sent is not data:
                data.copy_(sent[: data.numel()])
