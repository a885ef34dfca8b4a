"""Contiguous memory of parameters and gradients. param.main_grad is a view of the gradients' buffer; where the buffer
is cut into shards, param.data is one of the parameters' buffer too, with the values that it had. FP8 rows off 16 bytes
stay where they are beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.data_parallel import fp8_weights
from transformer_engine.pytorch.data_parallel.communicator import Communicator
from transformer_engine.pytorch.data_parallel.config import DistributedDataParallelConfig
from transformer_engine.pytorch.data_parallel.layout import BucketLayout, BufferLayout

OP = "ParamAndGradBuffer"


class Bucket:
    """Parameters whose gradients travel in one collective. grad_data, param_data: its part of the buffers (param_data
    is None unless sharded). own_grads, own_params: this rank's slices of them (None unless sharded)."""

    def __init__(self, buffer: ParamAndGradBuffer, index: int, layout: BucketLayout) -> None:
        self.buffer, self.bucket_id, self.layout = buffer, index, layout
        self.params_list = [buffer.params[slot.param] for slot in layout.slots]
        self.params = set(self.params_list)
        self.offset, self.numel_unpadded = layout.start, layout.numel_unpadded
        self.gradient_scaling_factor = buffer.gradient_scaling_factor
        self.grad_data = buffer.grad_data[layout.start : layout.end]
        self.param_data = None if buffer.param_data is None else buffer.param_data[layout.start : layout.end]
        self.own_grads = self.own_params = None
        if self.param_data is not None:
            self.own_grads, self.own_params = self.own_shard(self.grad_data), self.own_shard(self.param_data)
        self.pitched = [self._pitched_shard(p, buffer.pitched[p]) for p in self.params_list if p in buffer.pitched]
        self.is_reducing = False

    def _pitched_shard(self, param: torch.nn.Parameter, rows: fp8_weights.PitchedRows) -> fp8_weights.PitchedShard:
        (begin, end), comm = self.buffer.where(param), self.buffer.comm
        first, last = (min(max(at, begin), end) - begin for at in self.layout.shard(comm.rank, comm.size))
        return fp8_weights.PitchedShard(rows, first, last)

    def own_shard(self, data: torch.Tensor) -> torch.Tensor:
        """This rank's slice of grad_data or param_data."""
        comm = self.buffer.comm
        start, end = self.layout.shard(comm.rank, comm.size)
        return data[start - self.offset : end - self.offset]

    def other_shards(self, data: torch.Tensor) -> list[torch.Tensor]:
        comm = self.buffer.comm
        start, end = self.layout.shard(comm.rank, comm.size)
        return [data[: start - self.offset], data[end - self.offset :]]


class ParamAndGradBuffer:
    """The parameters of one (parameter dtype, gradient dtype, expert). params, names: all of the module's, by the
    numbers of the layout."""

    def __init__(
        self,
        config: DistributedDataParallelConfig,
        layout: BufferLayout,
        params: Sequence[torch.nn.Parameter],
        names: Mapping[torch.nn.Parameter, str],
        comm: Communicator,
        gradient_scaling_factor: float,
    ) -> None:
        self.config, self.layout, self.params, self.names, self.comm = config, layout, params, names, comm
        self.param_dtype, self.grad_dtype, self.expert = layout.param_dtype, layout.grad_dtype, layout.expert
        self.gradient_scaling_factor = gradient_scaling_factor
        self.numel, self.numel_unpadded = layout.numel, layout.numel_unpadded
        self.device = params[next(iter(layout.slots)).param].device
        self.grad_data = torch.zeros(self.numel, dtype=self.grad_dtype, device=self.device)
        self.param_data: torch.Tensor | None = None
        if config.use_distributed_optimizer:
            self.param_data = torch.zeros(self.numel, dtype=self.param_dtype, device=self.device)
        self.slots = {params[slot.param]: slot for slot in layout.slots}
        self.pitched: dict[torch.nn.Parameter, fp8_weights.PitchedRows] = {}
        for param, slot in self.slots.items():
            self._place(param, slot.start, slot.end)
        self._params = list(self.slots)
        self._kept = _C.KeptObjects()  # what moved() looks at, for one comparison of all parameters
        for p in self._params:
            fields = ["main_grad"]
            memory = [] if self.param_data is None else [p]
            if memory and fp8_weights.is_fp8(p):
                fields.append(p._gathered[0])
                memory = [fp8_weights.raw_data(p)]
            self._kept.add(p, fields, memory)
        self.buckets = [Bucket(self, i, bucket) for i, bucket in enumerate(layout.buckets)]
        self._grad_bytes = self.grad_data.untyped_storage().nbytes()

    @torch.no_grad()
    def _place(self, param: torch.nn.Parameter, start: int, end: int) -> None:
        param.main_grad = self.grad_data[start:end].view(param.shape)
        if self.param_data is not None:
            own = self.param_data[start:end]
            if fp8_weights.is_fp8(param):
                rows = fp8_weights.place(param, own)
                if rows is not None:
                    self.pitched[param] = rows
                return
            own = own.view(param.shape)
            own.copy_(param.data)
            param.data = own

    def where(self, param: torch.nn.Parameter) -> tuple[int, int]:
        """Elements [start, end) of the buffer that hold param."""
        slot = self.slots[param]
        return slot.start, slot.end

    def changed_parameter(self) -> tuple[torch.nn.Parameter, str] | None:
        """The first parameter that is not in the state that this buffer gave it, and how it differs."""
        frozen = _C.first_frozen(self._params)
        if frozen >= 0:
            return self._params[frozen], "was frozen"
        number = self._kept.changed()
        while number >= 0:
            difference = self.moved(self._params[number])
            if difference is not None:
                return self._params[number], difference
            number = self._kept.changed(number + 1)
        return None

    def moved(self, param: torch.nn.Parameter) -> str | None:
        """How the places of a parameter and of its gradient differ from those that this buffer gave it, or None."""
        grad, start = getattr(param, "main_grad", None), self.slots[param].start
        if not isinstance(grad, torch.Tensor):
            return "has no main_grad any more"
        if grad.data_ptr() != self.grad_data.data_ptr() + start * self.grad_data.element_size() and param.numel():
            return "has another main_grad"
        data = self.param_data
        if data is None or not param.numel():
            return None
        own = fp8_weights.raw_data(param) if fp8_weights.is_fp8(param) else param
        if param in self.pitched:
            return None if own.data_ptr() == self.pitched[param].rows.data_ptr() else "has moved to other memory"
        if own.data_ptr() != data.data_ptr() + start * data.element_size():
            return "has moved out of its buffer"
        return None

    @torch.no_grad()
    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """factor: a number, or a tensor of one element on the device. RuntimeError where a part is being reduced."""
        self.check_rests("scale_gradients()")
        self.check_has_memory("scale_gradients()")
        self.grad_data.mul_(factor)

    def reset(self) -> None:
        """All gradients become 0. RuntimeError where a part of them is being reduced."""
        self.check_rests("reset()")
        self.check_has_memory("reset()")
        self.grad_data.zero_()

    def check_rests(self, call: str) -> None:
        if any(bucket.is_reducing for bucket in self.buckets):
            raise RuntimeError(
                f"{OP}: {call} was called while gradients are being reduced, wanted finish_grad_sync() before it."
            )

    def has_memory(self) -> bool:
        """Whether the gradients have memory, which other code may free too."""
        return self.grad_data.untyped_storage().nbytes() >= self._grad_bytes

    def check_has_memory(self, call: str) -> None:
        if not self.has_memory():
            raise RuntimeError(
                f"{OP}: {call} was called while the gradients' memory is away, wanted restore_grad_buffers() before it."
            )

    def offload_grads(self) -> None:
        """Frees the memory of the gradients; the views stay."""
        self.grad_data.untyped_storage().resize_(0)

    def restore_grads(self) -> None:
        """Gives the gradients memory again, of zeros, behind the same views."""
        self.grad_data.untyped_storage().resize_(self._grad_bytes)
        self.grad_data.zero_()
