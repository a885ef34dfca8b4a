"""Buckets whose collectives start together: gradients are reduced when the last of them is ready, weights are gathered
when a forward is about to read them.

Gradients of a step go through three states: accumulating, in flight, reduced; reset() begins the next step.
Weights are stale while their version, which a step raises, is not the one that was gathered."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum, auto

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.torch_private import current_raw_stream, disable_dynamo
from transformer_engine.pytorch.data_parallel import fp8_weights
from transformer_engine.pytorch.data_parallel.buffers import Bucket, ParamAndGradBuffer
from transformer_engine.pytorch.data_parallel.communicator import Done, Work, stream_of
from transformer_engine.pytorch.data_parallel.layout import default_bucket_size
from transformer_engine.pytorch.data_parallel.nan_check import NanCheck
from transformer_engine.pytorch.data_parallel.order import DispatchOrder, GatherChain
from transformer_engine.pytorch.data_parallel.reduction import Reduction
from transformer_engine.pytorch.data_parallel.report import Span, waiting
from transformer_engine.pytorch.tensor.master_casts import ColumnsOfWeights

OP = "BucketGroup"


class GradState(Enum):
    ACCUMULATING = auto()
    IN_FLIGHT = auto()
    REDUCED = auto()


class BucketGroup:
    """buckets: of buffers of one communicator. order, chain: those of the wrapper; without them a group stands
    alone."""

    def __init__(self, buckets: Sequence[Bucket], reduction: Reduction | None = None) -> None:
        first = buckets[0].buffer
        self.buckets, self.config, self.comm, self.names = list(buckets), first.config, first.comm, first.names
        self.reduction = Reduction(self.config) if reduction is None else reduction
        self.params_list = [p for bucket in self.buckets for p in bucket.params_list]
        self.params = set(self.params_list)
        self.param_to_bucket = {p: bucket for bucket in self.buckets for p in bucket.params_list}
        self.number_of = {p: i for i, p in enumerate(self.params_list)}
        self.device = first.device
        self.order: DispatchOrder | None = None
        self.chain: GatherChain | None = None
        self.next_param_gather_bucket_group: BucketGroup | None = None
        self.nan_check = NanCheck(self.buckets) if self.config.check_for_nan_in_grad else None
        # Gradients. expected: how often a parameter is ready in a synchronized backward; None until it is measured.
        self.counts = _C.ReadyCounts(
            parameters=len(self.params_list),
            overlaps=self.config.overlap_grad_reduce,
            may_be_unused=self.config.find_unused_parameters,
            has_streams=self.device.type == "cuda",
        )
        self.state = GradState.ACCUMULATING
        self.expected: dict[torch.Tensor, int] | None = None
        self.reductions = 0  # that were started
        self._works: list[Work] = []
        self._whole = not self.is_sharded  # whether the gradients are reduced as a whole, not into shards
        # Weights.
        self.version = self._gathered_version = 0
        self.fp8_weights = [p for p in self.params_list if fp8_weights.is_fp8(p)]
        self._fp8_columns = ColumnsOfWeights(self.fp8_weights)
        self._pitched = [weight for bucket in self.buckets for weight in bucket.pitched]
        self._gathers: list[Work] | None = None
        self._unwaited: list[Work] = []  # the same, for a group that is deleted before
        if self.comm.size > 1 and not self.comm.blocks_host(self.device):
            stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
            weakref.finalize(self, _wait_on, stream, self._unwaited).atexit = False
        self._gathered: Done | None = None
        # Streams whose work may read the weights: they are whole, and a GPU's streams wait for the gather; None: all.
        self.readers: set[int] | None = None
        # span(kind) notes the dispatch of a collective, once a timeline was asked for.
        self.span: Callable[[str], Span | None] = lambda kind: None
        self._grad_span: Span | None = None
        self._gather_span: Span | None = None

    # ---- gradients ----

    @property
    def state(self) -> GradState:
        return self._state

    @state.setter
    def state(self, state: GradState) -> None:
        self._state = state
        self.counts.accumulates = state is GradState.ACCUMULATING

    @property
    def is_last_microbatch(self) -> bool:
        return self.counts.is_last_microbatch

    @is_last_microbatch.setter
    def is_last_microbatch(self, is_last: bool) -> None:
        self.counts.is_last_microbatch = is_last

    @property
    def is_counted(self) -> bool:
        """Whether a gradient of a synchronized backward is there."""
        return self.counts.is_counted

    @property
    def is_held_back(self) -> bool:
        """Whether one of a backward under no_sync() is there."""
        return self.counts.is_held_back

    @property
    def last_ready(self) -> int:
        """When the group was last ready in the first step, as a number that rises over all groups; 0: not yet."""
        return self.counts.last

    def reset(self) -> None:
        """Begins a step: gradients accumulate. RuntimeError while a collective of theirs is in flight."""
        if self.state is GradState.IN_FLIGHT:
            raise RuntimeError(
                f"{OP}: reset() was called while gradients are being reduced, wanted finish_grad_sync() before it."
            )
        self._begin()

    def _begin(self) -> None:
        self.state = GradState.ACCUMULATING
        self.counts.begin()

    def check_accumulates(self, param: torch.Tensor) -> None:
        """Raises RuntimeError where a gradient of param would be lost."""
        if not all(bucket.buffer.has_memory() for bucket in self.buckets):
            raise RuntimeError(
                f"{OP}: parameter '{self.names[param]}' got a gradient while the gradients' memory is away, wanted "
                "restore_grad_buffers() before the backward."
            )
        if self.state is GradState.ACCUMULATING:
            return
        name = self.names[param]
        if self.state is GradState.REDUCED:
            raise RuntimeError(
                f"{OP}: parameter '{name}' got a gradient after the gradients were reduced, wanted zero_grad_buffer() "
                "(or zero_grad() of the DistributedOptimizer) between the two; under no_sync() for all but the last "
                "microbatch."
            )
        raise RuntimeError(
            f"{OP}: parameter '{name}' is ready more often than in the first step, and its bucket is being reduced; "
            "wanted as many gradients in each step, and no_sync() around all microbatches but the last."
        )

    def register_grad_ready(self, param: torch.Tensor) -> None:
        """A gradient of param is in main_grad. Counts in the last microbatch alone; the group whose last parameter this
        is starts its collective, when those before it in the common order have started. Gates do the same in C++."""
        number = self.number_of[param]
        self.check_accumulates(param)
        is_complete = self.counts.count(number, current_raw_stream(self.device) if self.device.type == "cuda" else 0)
        if self.expected is not None and self.counts.left[number] < 0 and not self.config.find_unused_parameters:
            self.refuse_count(param)
        if is_complete:
            self.start_when_ready()

    def refuse_count(self, param: torch.Tensor) -> None:
        raise RuntimeError(
            f"{OP}: parameter '{self.names[param]}' is ready {self.expected[param] + 1} times, wanted "
            f"{self.expected[param]} as in the first step; no_sync() around all microbatches but the last."
        )

    def refuse_layout(self, param: torch.Tensor) -> None:
        raise ValueError(
            f"DistributedDataParallel: the gradient of parameter '{self.names[param]}' has layout {param.grad.layout}, "
            "wanted a dense one; make the layer with sparse=False."
        )

    @staticmethod
    def as_hook(run: Callable[[], None]) -> Callable[..., None]:
        """run(), the work of a gate, for compiled autograd, which takes functions of Python."""

        @disable_dynamo
        def hook(*_: object) -> None:
            run()

        return hook

    def start_when_ready(self) -> None:
        """Starts the collective of this group, which is complete, and of complete groups that wait for it."""
        if self.order is None:
            self.start_grad_sync()
            return
        with self.order.lock:
            self.order.start_ready()

    def is_ready(self) -> bool:
        return self.counts.is_ready

    def unready(self) -> list[str]:
        """Names of parameters whose gradients are missing from a backward that was synchronized."""
        if self.state is not GradState.ACCUMULATING or not self.config.overlap_grad_reduce:
            return []
        if self.config.find_unused_parameters:
            return []
        found = zip(self.params_list, self.counts.left)
        if self.expected is None:
            return [self.names[p] for p, count in found if not count]
        return [self.names[p] for p, left in found if left > 0]

    @property
    def is_partial(self) -> bool:
        """Whether gradients are missing that a synchronized backward makes. With find_unused_parameters they always may
        be: ranks use different parameters, and all of them have to give the same answer."""
        if self.state is GradState.REDUCED or self.expected is None:
            return False
        return self.config.find_unused_parameters or any(left > 0 for left in self.counts.left)

    def expect(self, counts: Sequence[int]) -> None:
        """From now on parameters are ready so often in a step."""
        least = 1 if self.config.find_unused_parameters else 0
        self.expected = {p: max(least, count) for p, count in zip(self.params_list, counts, strict=True)}
        self.counts.expect(list(self.expected.values()))

    def start_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Starts the reduction of the gradients as they are. Does nothing where it has started."""
        if self.state is not GradState.ACCUMULATING:
            if force_all_reduce and not self._whole:
                raise RuntimeError(
                    f"{OP}: force_all_reduce=True was given after gradients were reduced into shards, wanted "
                    "overlap_grad_reduce=False, or the backwards under no_sync()."
                )
            return
        for bucket in self.buckets:
            bucket.buffer.check_has_memory("start_grad_sync()")
        self._wait_for_producers()
        if self.nan_check is not None:
            self.nan_check.measure()
        self._whole = force_all_reduce or not self.is_sharded
        self._grad_span = self.span("reduce")
        self._works = [self.reduction.start(bucket, self.comm, self._whole) for bucket in self.buckets]
        self.reductions += 1
        self._set_in_flight(True)

    def _set_in_flight(self, is_in_flight: bool) -> None:
        self.state = GradState.IN_FLIGHT if is_in_flight else GradState.REDUCED
        for bucket in self.buckets:
            bucket.is_reducing = is_in_flight

    def _wait_for_producers(self) -> None:
        """Orders the current stream after every stream on which a gradient was made."""
        streams = self.counts.take_streams()
        current = current_raw_stream(self.device) if streams else 0
        for stream in streams:
            if stream != current:
                stream_of(current, self.device).wait_stream(stream_of(stream, self.device))

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Starts the reduction if nothing has, and waits for it. Does nothing where the gradients are reduced.
        RuntimeError for parameters whose gradients are missing."""
        missing = self.unready()
        if missing:
            raise RuntimeError(unready_sentence(missing, len(self.params_list)))
        self.start_grad_sync(force_all_reduce)
        self.wait_for_reduction()

    def wait_for_reduction(self) -> None:
        if self.state is not GradState.IN_FLIGHT:
            return
        with waiting(self._grad_span):
            for work in self._works:
                work.wait()
        self._works = []
        self._set_in_flight(False)

    # ---- weights ----

    @property
    def is_sharded(self) -> bool:
        return self.config.use_distributed_optimizer

    @property
    def is_stale(self) -> bool:
        return self.is_sharded and self.version != self._gathered_version

    @property
    def is_gathering(self) -> bool:
        return self._gathers is not None

    def note_step(self) -> None:
        """This rank's shards were written: the weights are stale until they are gathered."""
        if self._gathers is not None:
            raise RuntimeError(
                f"{OP}: the shards were written while weights are being gathered, wanted finish_param_sync() before it."
            )
        torch.autograd.graph.increment_version(self.params_list)
        if not self.is_sharded:
            return
        self.version += 1
        self.readers = set()
        if self.config.debug:
            self._spoil()

    @torch.no_grad()
    def _spoil(self) -> None:
        for bucket in self.buckets:
            for other in bucket.other_shards(bucket.param_data):
                other.fill_(fp8_weights.NAN if other.dtype is torch.uint8 else float("nan"))
        for weight in self._pitched:
            weight.spoil()

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Gathers the weights from the shards; waits for them unless they are overlapped. force_sync: waits in any
        case; for a gather that is pending, without another one. RuntimeError for a second gather without it."""
        if not self.is_sharded:
            return
        if self._gathers is not None:
            if not force_sync:
                raise RuntimeError(
                    f"{OP}: start_param_sync() was called while a gather is pending, wanted finish_param_sync() before "
                    "it, or force_sync=True."
                )
            self._wait_for_gathers()
            return
        self._gather_span = self.span("gather")
        self.readers = set()
        self._move_pitched(fp8_weights.PitchedShard.pack)
        self._gathers = [self.comm.all_gather(bucket.param_data, bucket.own_params) for bucket in self.buckets]
        self._unwaited += self._gathers
        if force_sync or not self.config.overlap_param_gather:
            self._wait_for_gathers()

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Makes the weights whole: starts a gather where they are stale, and those before it in the chain,
        waits for it, and starts that of the next group."""
        if not self.is_sharded:
            return
        if self._gathers is None and self.is_stale:
            if self.chain is not None:
                self.chain.start_up_to(self)
            else:
                self.start_param_sync()
        self._wait_for_gathers()
        following = self.next_param_gather_bucket_group
        if skip_next_bucket_dispatch or following is None:
            return
        if following.is_stale and not following.is_gathering:
            if self.chain is not None:
                self.chain.start(following)
            else:
                following.start_param_sync()

    def _move_pitched(self, move: Callable[[fp8_weights.PitchedShard], None]) -> None:
        """Of weights whose rows are off 16 bytes, between the buffer and their own memory."""
        if self._pitched:
            with torch.no_grad():
                for weight in self._pitched:
                    move(weight)

    def _wait_for_gathers(self) -> None:
        if self._gathers is None:
            if self._gathered is not None and self._gathered.event is not None:
                self._order_stream(self._gathered, current_raw_stream(self.device))
            return
        with waiting(self._gather_span):
            for work in self._gathers:
                work.wait()
        self._gathers = None
        self._unwaited.clear()
        self._gathered_version = self.version
        if self.fp8_weights:
            self._move_pitched(fp8_weights.PitchedShard.lay)
            self._fp8_columns.make()
        self._gathered = Done(self.device)
        if self._gathered.event is None:
            self.readers = None
        torch.autograd.graph.increment_version(self.params_list)

    def _order_stream(self, gathered: Done, stream: int) -> None:
        """The first stream that waits makes the weights whole; each other one that reads them waits for it."""
        if stream not in self.readers:
            gathered.wait()
            self.readers.add(stream)


def _wait_on(stream: torch.cuda.Stream | None, works: Sequence[Work]) -> None:
    """On the stream that has allocated the tensors of these works, which hold them until they are waited for: the
    host waits for nothing."""
    with torch.cuda.stream(stream):
        for work in works:
            work.wait()


def has_partial_step(groups: Sequence[BucketGroup]) -> bool:
    """Whether a synchronized backward has left gradients of some of these groups incomplete."""
    return any(group.is_counted for group in groups) and any(group.is_partial for group in groups)


def unready_sentence(missing: Sequence[str], among: int) -> str:
    some = ", ".join(f"'{name}'" for name in missing[:8]) + (", ..." if len(missing) > 8 else "")
    return (
        f"{OP}: {len(missing)} of {among} parameters have no gradient of this backward: {some}; wanted one of each, or "
        "find_unused_parameters=True."
    )


def partition_buckets(
    buffers: Sequence[ParamAndGradBuffer], force_single_bucket_group: bool = False, reduction: Reduction | None = None
) -> list[BucketGroup]:
    """The groups of these buffers' buckets: one group if forced, one for each bucket without FP8 weights. With them
    (one buffer at most) each of its buckets is a group; other buckets join the last of these, unless they have
    bucket_size elements: then each is a group of its own."""
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    if not buckets:
        return []
    reduction = Reduction(buffers[0].config) if reduction is None else reduction
    if force_single_bucket_group:
        return [BucketGroup(buckets, reduction)]
    of_fp8 = [buffer for buffer in buffers if buffer.param_dtype is torch.uint8]
    if not of_fp8:
        return [BucketGroup([bucket], reduction) for bucket in buckets]
    if len(of_fp8) > 1:
        raise ValueError(f"partition_buckets: {len(of_fp8)} buffers hold FP8 weights, wanted one at most.")
    least = of_fp8[0].config.bucket_size or default_bucket_size(of_fp8[0].comm.size)
    others = [bucket for bucket in buckets if bucket.buffer is not of_fp8[0]]
    large = [bucket for bucket in others if bucket.numel_unpadded >= least]
    small = [bucket for bucket in others if bucket.numel_unpadded < least]
    fp8 = [[bucket] for bucket in of_fp8[0].buckets]
    fp8[-1] += small
    return [BucketGroup(some, reduction) for some in [*fp8, *([bucket] for bucket in large)]]
