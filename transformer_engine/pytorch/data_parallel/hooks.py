"""Where a wrapper meets autograd and modules: a gate after each parameter's accumulator, the end of backward_dw(), and
hooks in front of forwards and state dicts that wait for weights.

Gates are in C++ (csrc/wgrad/grad_gate.h): they add .grad to main_grad, and count parameters as ready."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.capture_flag import is_graph_capturing, stream_captures
from transformer_engine.pytorch._internal.torch_private import current_raw_stream, disable_dynamo
from transformer_engine.pytorch.data_parallel.groups import BucketGroup, has_partial_step
from transformer_engine.pytorch.data_parallel.order import gather_for


def gates_of(
    module: torch.nn.Module, group_of: dict[torch.Tensor, BucketGroup]
) -> tuple[list[_C.GradGate], list[torch.nn.Module]]:
    """A gate for each parameter, and the modules that keep delayed weight gradients: those gates count at the end of
    their module's backward_dw()."""
    delayed = {param for param in group_of if getattr(param, "skip_backward_post_hook", False)}
    gates = {
        param: _C.GradGate(param, param.main_grad, group, group.counts, group.number_of[param], param in delayed)
        for param, group in group_of.items()
    }
    parts = []
    for part in module.modules():
        register = getattr(part, "register_wgrad_accumulation_and_reduce_hooks", None)
        if register is None:
            continue
        own = [gates[p] for p in part.parameters(recurse=False) if p in delayed]
        if own:
            register(_after_backward_dw([weakref.ref(gate) for gate in own]))
            if hasattr(part, "drop_backward_dw"):  # frameworks' own modules may lack it
                parts.append(part)
    return list(gates.values()), parts


def _after_backward_dw(gates: Sequence[weakref.ref[_C.GradGate]]) -> Callable[[], None]:
    """Modules keep this hook for good; it does nothing after the gates are gone."""

    def hook() -> None:
        for gate in gates:
            alive = gate()
            if alive is not None:
                alive.ready()

    return hook


class WeightHooks:
    """Hooks in front of everything that reads weights of a module. A module waits for its own parameters and for those
    of children that are never called themselves. gates: removed with these hooks, or before, when the wrapper is
    deleted: weights that are not gathered yet are waited for all the same. wrapped_again: a parameter that a later
    wrapper holds."""

    def __init__(self, module: torch.nn.Module, group_of: dict[torch.Tensor, BucketGroup]) -> None:
        self.forward_handles: list[Any] = []
        self.gates: list[Any] = []
        self.wrapped_again: torch.Tensor | None = None
        self.chained = True
        self._handles: list[Any] = []
        self._groups = {part: _groups(_read_by(part), group_of) for part in module.modules()}
        self._groups = {part: groups for part, groups in self._groups.items() if groups}
        for part, groups in self._groups.items():
            hook = _before_state_dict(groups, self)
            self._handles.append(part.register_state_dict_pre_hook(hook))
            self._handles.append(part.register_load_state_dict_pre_hook(hook))

    def enable_forward(self, chained: bool) -> None:
        """chained: whether a forward that waits starts the gathers after those that it has waited for."""
        self.chained = chained
        for part, groups in self._groups.items():
            self.forward_handles.append(part.register_forward_pre_hook(_before_forward(groups, self)))

    def wait_before_replay(self, params: Sequence[torch.Tensor]) -> Callable[[], None]:
        """For a captured callable that reads these parameters, as hooks of modules in it do not run in a replay. It
        waits while hooks are enabled."""
        hook = _before_forward([group for group in self.groups if not group.params.isdisjoint(params)], self)

        def wait() -> None:
            if self.forward_handles:
                hook()

        return wait

    def disable_forward(self) -> None:
        for handle in self.forward_handles:
            handle.remove()
        self.forward_handles.clear()

    def remove_gates(self) -> None:
        for gate in self.gates:
            gate.remove()
        self.gates.clear()

    @property
    def groups(self) -> list[BucketGroup]:
        return list({id(group): group for groups in self._groups.values() for group in groups}.values())

    def finish_gathers(self) -> None:
        for group in self.groups:
            group.finish_param_sync(skip_next_bucket_dispatch=True)

    def is_in_a_step(self) -> bool:
        """Whether the wrapper is there, and its reductions are in flight, or those of a rank that went further are."""
        if not self.gates:
            return False
        in_flight = any(group.state is group.state.IN_FLIGHT for group in self.groups)
        return in_flight or has_partial_step(self.groups)

    def remove(self, wrapped_again: torch.Tensor) -> None:
        self.wrapped_again = wrapped_again
        self.remove_gates()
        self.disable_forward()
        for handle in self._handles:
            handle.remove()


def _read_by(part: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters that the forward of a module reads itself. torch.nn.MultiheadAttention reads those of out_proj."""
    yield from part.parameters(recurse=False)
    for child in part.children():
        if isinstance(child, (torch.nn.ParameterList, torch.nn.ParameterDict)) or isinstance(
            part, torch.nn.MultiheadAttention
        ):
            yield from _read_by(child)


def _groups(params: Iterable[torch.Tensor], group_of: dict[torch.Tensor, BucketGroup]) -> tuple[BucketGroup, ...]:
    return tuple({id(group_of[p]): group_of[p] for p in params if p in group_of}.values())


def _before_forward(groups: Sequence[BucketGroup], owner: WeightHooks) -> Callable[..., None]:
    @disable_dynamo  # breaks a graph that is traced; costs more than all else here
    def wait() -> None:
        if is_graph_capturing() or stream_captures():
            return  # the weights are whole: the capture has waited for them, and each replay does
        if owner.chained:
            gather_for(groups)
            return
        for group in groups:
            group.finish_param_sync(skip_next_bucket_dispatch=True)

    is_traced, device = torch.compiler.is_dynamo_compiling, groups[0].device

    def hook(*_: object) -> None:
        if is_traced():
            wait()
            return
        for group in groups:
            readers = group.readers
            if readers is not None and (not readers or current_raw_stream(device) not in readers):
                wait()
                return

    hook.rests_in_captures = True
    return hook


def _before_state_dict(groups: Sequence[BucketGroup], owner: WeightHooks) -> Callable[..., None]:
    """owner: lives as long as its hooks."""

    def hook(*_: object, owner: WeightHooks = owner) -> None:
        for group in groups:
            group.finish_param_sync(skip_next_bucket_dispatch=True)

    return hook
