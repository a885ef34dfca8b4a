"""DistributedDataParallel: a module whose gradients are summed over ranks bucket by bucket, and whose weights may be
gathered from shards. Collectives, layouts and hooks are in the other files; nothing is stepped here."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.capture_flag import stream_captures
from transformer_engine.pytorch._internal.torch_private import break_graph
from transformer_engine.pytorch.data_parallel.buffers import ParamAndGradBuffer
from transformer_engine.pytorch.data_parallel.communicator import OP, Communicator
from transformer_engine.pytorch.data_parallel.config import DistributedDataParallelConfig
from transformer_engine.pytorch.data_parallel.construction import plan_of
from transformer_engine.pytorch.data_parallel.groups import (
    BucketGroup,
    has_partial_step,
    partition_buckets,
    unready_sentence,
)
from transformer_engine.pytorch.data_parallel.hooks import WeightHooks, gates_of
from transformer_engine.pytorch.data_parallel.nan_check import NanCheck, NanReport
from transformer_engine.pytorch.data_parallel.order import DispatchOrder, GatherChain
from transformer_engine.pytorch.data_parallel.reduction import Reduction
from transformer_engine.pytorch.data_parallel.report import (
    HeldMemory,
    LayoutReport,
    Timeline,
    TimelineReport,
    memory_of_buffers,
    timeline_of,
)
from transformer_engine.pytorch.graph.observers import find_weight_waits

_group_of: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> weak reference to its group
_hooks_of: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> weak reference to the hooks of its wrapper
_COMPILED = (
    f"{OP}: torch.compile was called on the wrapper, whose collectives it cannot trace, wanted it on parts of the "
    "module after the wrapping: layer.compile()."
)


class _BufferList(list):
    """The wrapper's ParamAndGradBuffers; called, as torch.nn.Module calls it, the module's buffers."""

    def __init__(self, owner: torch.nn.Module) -> None:
        super().__init__()
        self._owner = weakref.ref(owner)

    def __call__(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        return torch.nn.Module.buffers(self._owner(), recurse)


class DistributedDataParallel(torch.nn.Module):
    """module, with gradients that are averaged over process_group: in buckets, in param.main_grad.

    A step: zero_grad_buffer(), forwards and backwards (all but the last under no_sync()), finish_grad_sync(), then an
    optimizer that reads main_grad; DistributedOptimizer does all but the forwards and backwards.
    disable_bucketing: one bucket a buffer. process_group: a group, or a mesh of one dimension, of the ranks that have
    the same weights; None for all processes. expert_process_group: that of parameters with `allreduce` False, which are
    scaled as the others are. calculate_per_token_loss: gradients are summed, not averaged.

    Errors: TypeError, ValueError and NotImplementedError for what cannot be wrapped, on every rank of the group, with
    the module as it was. state_dict() and load_state_dict() call those of the module."""

    def __init__(
        self,
        config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        *,
        process_group: Any = None,
        expert_process_group: Any = None,
        calculate_per_token_loss: bool = False,
    ) -> None:
        super().__init__()
        _check_arguments(config, module, disable_bucketing, calculate_per_token_loss)
        self.config = self.ddp_config = config
        self._comm = Communicator("process_group", process_group)
        self._expert_comm = self._comm
        if expert_process_group is not None:
            self._expert_comm = Communicator("expert_process_group", expert_process_group)
        earlier_hooks = _hooks_there(module.parameters())
        _check_no_step(earlier_hooks, self._comm)
        for earlier in earlier_hooks:
            earlier.finish_gathers()  # of all its weights: the hooks that would wait are removed
        plan = plan_of(module, config, self._comm, self._expert_comm, disable_bucketing)
        for earlier, param in _hooks_there(plan.params).items():
            earlier.remove(param)
        self.module = module
        self.register_load_state_dict_pre_hook(_name_as_saved)
        self.use_forward_hook = config.overlap_param_gather and config.use_distributed_optimizer
        if config.overlap_param_gather and not self.use_forward_hook:
            warnings.warn(
                f"{OP}: overlap_param_gather=True without use_distributed_optimizer=True does nothing: weights are "
                "whole on every rank, and none is gathered.",
                stacklevel=2,
            )
        self.overlap_param_gather_with_optimizer_step = False
        self._nan_report: NanReport | None = None
        self._nan_was_raised = False  # by finish_grad_sync(), in this step
        self._steps = 0  # that were reduced or left: the same on all ranks
        self._timeline: Timeline | None = None
        self._make_groups(plan, 1.0 if calculate_per_token_loss else 1.0 / self._comm.size, disable_bucketing)
        self._hooks = WeightHooks(module, self.param_to_bucket_group)
        gates, self._delayed = gates_of(module, self.param_to_bucket_group)
        self._hooks.gates += gates
        weakref.finalize(self, self._hooks.remove_gates).atexit = False
        for p in plan.params:
            _hooks_of[p] = weakref.ref(self._hooks)
        if self.use_forward_hook:
            self.enable_forward_pre_hook()

    def _make_groups(self, plan: Any, factor: float, disable_bucketing: bool) -> None:
        self.buffers, self.expert_parallel_buffers = _BufferList(self), []
        for layout in plan.layouts:
            comm = self._expert_comm if layout.expert else self._comm
            made = ParamAndGradBuffer(self.config, layout, plan.params, plan.names, comm, factor)
            (self.expert_parallel_buffers if layout.expert else self.buffers).append(made)
        self._reduction = Reduction(self.config)
        self.bucket_groups = partition_buckets(self.buffers, disable_bucketing, self._reduction)
        self.expert_parallel_bucket_groups = partition_buckets(
            self.expert_parallel_buffers, disable_bucketing, self._reduction
        )
        self._groups = self.bucket_groups + self.expert_parallel_bucket_groups
        self._order = DispatchOrder(self._groups)
        self.param_to_bucket_group = {p: group for group in self._groups for p in group.params_list}
        self._params = list(self.param_to_bucket_group)
        self._ids = {id(p) for p in self._params}
        for group in self._groups:
            group.order = self._order
            for p in group.params_list:
                _group_of[p] = weakref.ref(group)
        self._make_chains([*self.bucket_groups[::-1], *self.expert_parallel_bucket_groups[::-1]])

    def _make_chains(self, ordered: list[BucketGroup]) -> None:
        """One for each communicator, whose collectives have one order on all ranks."""
        of_dense = [group for group in ordered if group.comm is self._comm]
        others = [group for group in ordered if group.comm is not self._comm]
        self._order.chains = [GatherChain(groups, ordered) for groups in (of_dense, others) if groups]

    @property
    def _chains(self) -> list[GatherChain]:
        return self._order.chains

    @property
    def _all_buffers(self) -> list[ParamAndGradBuffer]:
        return [*self.buffers, *self.expert_parallel_buffers]

    @property
    def buffers_device(self) -> torch.device:
        return self._all_buffers[0].device

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refused, as torch.compile() of the wrapper."""
        raise RuntimeError(_COMPILED)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            break_graph(_COMPILED)  # an error that is traced would be dropped
            raise RuntimeError(_COMPILED)
        self._check_is_current("forward()")
        return self.module(*args, **kwargs)

    def _check_is_current(self, call: str) -> None:
        """Raises RuntimeError where a parameter belongs to a later wrapper: no gradient would come here."""
        param = self._hooks.wrapped_again
        if param is not None:
            name = self.param_to_bucket_group[param].names[param]
            raise RuntimeError(
                f"{OP}: {call} was called on a wrapper whose parameter '{name}' was wrapped again, wanted the later "
                "wrapper; for the other parameters make one around the whole module, and its optimizer."
            )

    # ---- weights ----

    def enable_forward_pre_hook(self) -> None:
        """Each forward of a part of the module waits for its own weights. RuntimeError where the hooks are there, or
        where the configuration has no overlapped gather."""
        self._check_is_current("enable_forward_pre_hook()")
        if not self.use_forward_hook:
            raise RuntimeError(
                f"{OP}: enable_forward_pre_hook() was called with use_forward_hook=False, wanted a configuration with "
                "use_distributed_optimizer=True and overlap_param_gather=True."
            )
        if self._hooks.forward_handles:
            raise RuntimeError(
                f"{OP}: enable_forward_pre_hook() was called with the hooks there already, wanted "
                "disable_forward_pre_hook() before it."
            )
        chained = not (self.config.align_param_gather or self.overlap_param_gather_with_optimizer_step)
        self._hooks.enable_forward(chained)

    @property
    def remove_forward_pre_hook_handles(self) -> list[Any]:
        return self._hooks.forward_handles

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Removes the hooks; with param_sync the weights are gathered then, and waited for."""
        if not self._hooks.forward_handles:
            raise RuntimeError(
                f"{OP}: disable_forward_pre_hook() was called without hooks; call enable_forward_pre_hook() first."
            )
        self._hooks.disable_forward()
        if param_sync:
            self.start_param_sync(force_sync=True)

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gathers all weights from their shards; waits unless the gather is overlapped, or with force_sync. Returns at
        once where each group's gather leaves in the optimizer's step, unless force_sync or force_dispatch."""
        if self.overlap_param_gather_with_optimizer_step and not (force_sync or force_dispatch):
            return
        for chain in self._chains:
            for group in chain.groups:
                group.start_param_sync(force_sync)

    def reset_param_sync_dispatch_state(self) -> None:
        """For an optimizer of another library: it has written this rank's shards, and what was gathered is stale."""
        for group in self._groups:
            group.note_step()

    def _begin_gathers(self) -> None:
        """After a step of the shards: starts the first gather, which the hooks wait for and go on from; without hooks
        gathers everything. With align_param_gather a schedule starts them."""
        for chain in self._chains:
            if not self._hooks.forward_handles:
                chain.finish()
            elif not self.config.align_param_gather:
                chain.start_first()

    def _ready(self) -> None:
        for chain in self._chains:
            chain.finish()

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Every rank takes the weights of the first one, over the group of each parameter."""
        self._ready()
        works, sent = [], []
        for buffer in self._all_buffers:
            for p in buffer.slots:
                tensors = p._tensors().values() if hasattr(p, "_tensors") else [p.data]
                for t in (t for t in tensors if t is not None):
                    sent.append((t, t.contiguous()))  # gloo sends dense memory, whatever the strides
                    works.append(buffer.comm.broadcast(sent[-1][1]))
        for work in works:
            work.wait()
        for t, dense in sent:
            if dense is not t:
                t.copy_(dense)
        for buffer in self._all_buffers:
            torch.autograd.graph.increment_version(list(buffer.slots))

    # ---- gradients ----

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate gradients, and start no collective."""
        before = [group.is_last_microbatch for group in self._groups]
        for group in self._groups:
            group.is_last_microbatch = False
        try:
            yield
        finally:
            for group, was in zip(self._groups, before):
                group.is_last_microbatch = was

    def start_grad_sync(self, *unused: Any) -> None:
        """Starts the reduction of all gradients that are not being reduced yet, complete or not."""
        self._check_is_current("start_grad_sync()")
        with self._order.lock:
            self._order.start_rest()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Starts what has not started, and waits: main_grad is reduced (its own shard where sharded; everything with
        force_all_reduce). The second of two calls does nothing.

        Errors: RuntimeError for parameters whose gradients are missing, for force_all_reduce after a reduction into
        shards, and with check_for_nan_in_grad, on all ranks, for a gradient that is not finite."""
        self._check_is_current("finish_grad_sync()")
        self._raise_for_nan()
        was_reduced = self._is_reduced
        self._finish_grad_sync(force_all_reduce)
        flag = None if was_reduced else self._nan_flag()
        if flag is not None:
            self._comm.all_reduce(flag, torch.distributed.ReduceOp.MAX).wait()
            self._nan_was_raised = bool(flag)
            where = f"rank {self._comm.rank}"
            NanReport(self._nan_checks, flag, where, self._comm.all_gather_object).raise_once()

    @property
    def _is_reduced(self) -> bool:
        return all(group.state is group.state.REDUCED for group in self._groups)

    def _finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        if self._is_reduced:
            self._order.start_rest(force_all_reduce)  # which checks force_all_reduce
            return
        if self.config.overlap_grad_reduce:
            self._order.start_gathers()  # on all ranks before other collectives of the same group
            self._check_ready()
        self._order.start_rest(force_all_reduce)
        self._wait_for_reductions()

    def _wait_for_reductions(self) -> None:
        """RuntimeError with the sentence of a rank that left the step, where this one waits for it in vain."""
        try:
            for i in self._order.order:
                self._groups[i].wait_for_reduction()
            self._reduction.finish_scratch()
        except RuntimeError as error:
            messages = self._comm.messages(self._steps)
            if not messages:
                raise
            raise RuntimeError(f"{OP}: the gradients were not reduced. {messages}") from error
        self._steps += 1

    def _check_ready(self) -> None:
        """Raises RuntimeError for parameters without a gradient. After the first synchronized backward the ranks agree
        on how often each parameter is ready, and in which order groups are. Gradients that were all made under
        no_sync() are reduced as they are."""
        accumulates = all(group.state is group.state.ACCUMULATING for group in self._groups)
        held_back = not any(group.is_counted for group in self._groups)
        held_back = held_back and any(group.is_held_back for group in self._groups)
        missing = [] if held_back else [name for group in self._groups for name in group.unready()]
        sentence = unready_sentence(missing, len(self.param_to_bucket_group)) if missing else None
        if all(group.expected is not None for group in self._groups):
            if sentence is not None:
                self._comm.post_message(self._steps, sentence)
                raise RuntimeError(sentence)
            return
        if not accumulates:  # start_grad_sync() was called: nothing was measured
            return
        every = self._comm.all_gather_object(
            (sentence, held_back, [group.counts.left for group in self._groups], self._order.measured())
        )
        for rank, (other, *_) in enumerate(every):
            if other is not None:
                raise RuntimeError(other if rank == self._comm.rank else f"{other} (rank {rank} of the process group)")
        rest = [rank for rank, (_, its, *_) in enumerate(every) if its != every[0][1]]
        if rest and not self.config.find_unused_parameters:  # with it the last backward of a rank may use nothing
            raise RuntimeError(
                f"{OP}: all backwards ran under no_sync() on {'rank 0' if every[0][1] else f'ranks {rest}'} of the "
                "process group alone, wanted the same on all ranks."
            )
        if held_back and not rest:
            return
        self._agree_on_counts([counts for _, _, counts, _ in every])
        order = every[0][3]
        self._order.agree(order)
        self._make_chains([self._groups[i] for i in reversed(order)])

    def _agree_on_counts(self, every: list[list[list[int]]]) -> None:
        for number, group in enumerate(self._groups):
            counts = every[0][number]
            for rank, other in enumerate(every):
                for p, wanted, got in zip(group.params_list, counts, other[number], strict=True):
                    if wanted != got and not self.config.find_unused_parameters:
                        raise RuntimeError(
                            f"{OP}: parameter '{group.names[p]}' was ready {wanted} times in a backward of rank 0, and "
                            f"{got} times of rank {rank}, wanted the same on each rank."
                        )
            group.expect(counts)

    @property
    def _nan_checks(self) -> list[NanCheck]:
        return [group.nan_check for group in self._groups if group.nan_check is not None]

    def _nan_flag(self) -> torch.Tensor | None:
        """1 on the device where a local gradient of this rank was not finite; None where nothing is checked."""
        flags = [check.flag for check in self._nan_checks]
        return torch.stack(flags).amax(0) if flags else None

    def _raise_for_nan(self) -> None:
        """Raises what the last step of an optimizer has found."""
        report, self._nan_report = self._nan_report, None
        if report is not None:
            report.raise_once()

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """main_grad of all parameters times a number, or a tensor of one element on the device."""
        for buffer in self._all_buffers:
            buffer.check_rests("scale_gradients()")
            buffer.check_has_memory("scale_gradients()")
        for buffer in self._all_buffers:
            buffer.scale_gradients(factor)

    def zero_grad_buffer(self) -> None:
        """All gradients become 0, and a step begins. After a backward that an exception ended, the step is left: on
        all ranks, which wait for each other.

        Errors: RuntimeError while complete gradients are being reduced, for a step that other ranks do not leave, and
        for parameters that were frozen, thawed or moved since the wrapping."""
        self._check_is_current("zero_grad_buffer()")
        self._raise_for_nan()
        self._check_parameters()
        self._nan_was_raised = False
        self._leave_partial_step()
        for group in self._groups:
            group.reset()
        self._order.begin()
        # Of a backward that was refused or ended before the gate.
        _C.drop_grads(self._params, "grad_added_to_main_grad")
        for part in self._delayed:  # a backward_dw() of a step that was left would come first in the next one
            part.drop_backward_dw()
        for buffer in self._all_buffers:
            if buffer.has_memory():
                buffer.reset()

    def _leave_partial_step(self) -> None:
        """The reductions that some rank has started run on all ranks, and what they give is dropped."""
        if not has_partial_step(self._groups):
            return
        lacking = [group for group in self._groups if group.is_partial]
        self._order.start_gathers()  # a rank that comes later may still be in a forward that waits for them
        self._comm.leave(
            self._steps,
            f"zero_grad_buffer() was called after a backward that left gradients of {len(lacking)} of "
            f"{len(self._groups)} bucket groups incomplete",
            self.buffers_device,
        )
        self._drop_reductions()

    def _drop_complete_step(self) -> None:
        """Of an optimizer that takes no step with gradients that are being reduced."""
        in_flight = any(group.state is group.state.IN_FLIGHT for group in self._groups)
        if in_flight and not any(group.is_partial for group in self._groups):
            self._drop_reductions()

    def _drop_reductions(self) -> None:
        self._order.start_rest()
        self._wait_for_reductions()
        for check in self._nan_checks:
            check.clear()

    def _check_parameters(self) -> None:
        for buffer in self._all_buffers:
            found = buffer.changed_parameter()
            if found is not None:
                raise RuntimeError(
                    f"{OP}: parameter '{buffer.names[found[0]]}' {found[1]} since the wrapping, wanted it as it was; "
                    "wrap the module after .to(), casts and freezing."
                )
        wrapped = self._ids  # a look at each name would take longer than all else here
        for part in self.module.modules():
            for p in part._parameters.values():
                if p is not None and id(p) not in wrapped and p.requires_grad:
                    name = next(name for name, other in self.module.named_parameters() if other is p)
                    raise RuntimeError(
                        f"{OP}: parameter '{name}' was not trainable, or not there, when the module was wrapped, "
                        "wanted the wrapping after all parameters have requires_grad=True."
                    )

    def offload_grad_buffers(self) -> None:
        """Frees the memory of all gradients; main_grad stays a view of it."""
        if any(group.state is group.state.IN_FLIGHT for group in self._groups) or stream_captures():
            raise RuntimeError(
                f"{OP}: offload_grad_buffers() was called while gradients are being reduced or a graph is captured, "
                "wanted it after finish_grad_sync()."
            )
        for buffer in self._all_buffers:
            buffer.offload_grads()

    def restore_grad_buffers(self) -> None:
        """Gives the gradients memory again, of zeros."""
        for buffer in self._all_buffers:
            if not buffer.has_memory():
                buffer.restore_grads()

    def free_overlap_buffers(self) -> None:
        """Waits for sums in the order of the ranks, and frees their scratch memory."""
        self._reduction.finish_scratch()

    # ---- looking, files ----

    def layout(self) -> LayoutReport:
        """The place and bucket of each parameter: rows, which print as a table."""
        return LayoutReport(self._all_buffers)

    def timeline(self) -> TimelineReport:
        """The last reduction and the last gather of each bucket group: rows, which print as a table. The first call
        starts the recording and has no rows. Waits for the device."""
        if self._timeline is None:
            self._timeline = timeline_of(self._groups, self.buffers_device)
        return self._timeline.report()

    def _held_memory(self) -> Iterator[HeldMemory]:
        """For te.memory_plan."""
        return memory_of_buffers(self._all_buffers)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{OP}: the wrapper was copied or pickled, which its collectives do not allow, wanted copies and files of "
            "the module in it: te.distributed.ensure_params_ready(ddp.module.parameters()), copy.deepcopy(ddp.module), "
            "and a wrapper of the copy."
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


def _check_arguments(config: object, module: object, disable_bucketing: object, per_token: object) -> None:
    if not isinstance(config, DistributedDataParallelConfig):
        raise TypeError(
            f"{OP}: argument 'config' is a {type(config).__name__}, wanted a DistributedDataParallelConfig."
        )
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{OP}: argument 'module' is a {type(module).__name__}, wanted a torch.nn.Module.")
    for name, value in (("disable_bucketing", disable_bucketing), ("calculate_per_token_loss", per_token)):
        if not isinstance(value, bool):
            raise ValueError(f"{OP}: argument '{name}' is {value!r}, wanted True or False.")
    if per_token and config.average_in_collective:
        raise ValueError(
            f"{OP}: argument 'calculate_per_token_loss' is True with average_in_collective=True, wanted one of them: "
            "gradients of a loss per token are summed."
        )


def _name_as_saved(ddp: torch.nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Of a wrapper in another module, whose state dict has the names of the wrapped module: without 'module.'. Names
    that the wrapper's own tensors have, those of named_parameters(), stay."""
    own = {name for name, _ in ddp.named_parameters(prefix[:-1], remove_duplicate=False)}
    own |= {name for name, _ in ddp.named_buffers(prefix[:-1], remove_duplicate=False)}
    given = {name: state.pop(name) for name in list(state) if name.startswith(prefix)}
    all_are_own = own.issuperset(given)  # else a module in the module may be called 'module' too
    for name, value in given.items():
        longer = f"{prefix}module.{name[len(prefix) :]}"
        state[name if name in own and (all_are_own or longer not in own) else longer] = value


def _check_no_step(earlier: Iterable[WeightHooks], comm: Communicator) -> None:
    """Raises RuntimeError on all ranks where an earlier wrapper is in a step on one. Ranks may have started different
    collectives of such a step, so that another one would not return."""
    is_busy = any(hooks.is_in_a_step() for hooks in earlier)
    busy = [
        rank for rank, text in enumerate(comm.all_gather_text("in a step", "yes" if is_busy else "no")) if text == "yes"
    ]
    if busy:
        raise RuntimeError(
            f"{OP}: argument 'module' belongs to a wrapper whose gradients are being reduced on ranks {busy} of the "
            "process group, wanted its zero_grad_buffer() (or zero_grad() of its DistributedOptimizer) before it is "
            "wrapped again."
        )


def _hooks_there(params: Iterable[torch.Tensor]) -> dict[WeightHooks, torch.Tensor]:
    """Those of wrappers that are there, each with the first of these parameters that it holds."""
    found: dict[WeightHooks, torch.Tensor] = {}
    for p in params:
        hooks = _hooks_of[p]() if p in _hooks_of else None
        if hooks is not None:
            found.setdefault(hooks, p)
    return found


def _waits_before_replays(params: Sequence[torch.Tensor]) -> list[Callable[[], None]]:
    """Of a captured callable that reads these parameters."""
    return [hooks.wait_before_replay(params) for hooks in _hooks_there(params)]


find_weight_waits(_waits_before_replays)


def ensure_params_ready(params: Iterable[torch.Tensor]) -> None:
    """Waits for the weights among `params` that a wrapper gathers; others are whole as they are."""
    for group in {id(g): g for p in params if (known := _group_of.get(p)) and (g := known())}.values():
        group.finish_param_sync(skip_next_bucket_dispatch=True)
