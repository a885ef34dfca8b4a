"""Replays the weight gradients that are not returned by the backward: those added to main_grad, and delayed ones.

- Nothing is computed here beside the captured graphs.
"""

from collections.abc import Callable, Container
from functools import partial

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.torch_private import increment_version
from transformer_engine.pytorch.graph.recorded.main_grads import FusedWeight, main_grad_of
from transformer_engine.pytorch.graph.replay.checks import ReplayChecks
from transformer_engine.pytorch.graph.replay.record import CaptureRecord
from transformer_engine.pytorch.module.weight_grad import get_dummy_wgrad

_NO_COPIES = ((), (), (0, 0), ())  # for CaptureRecord.launch


class WgradReplay:
    """backward_dw() of a captured callable, and main_grad around the replay of its backward."""

    __slots__ = ("checks", "label", "record")

    def __init__(self, record: CaptureRecord, checks: ReplayChecks) -> None:
        self.record, self.checks, self.label = record, checks, record.label

    def backward_dw(self) -> None:
        """Computes the weight gradients that the latest backward delayed, then calls the hooks of their modules.
        RuntimeError if no backward delayed any."""
        record = self.record
        calls, later, aliased_grads = record.calls, record.wgrad_graph, record.aliased_grads
        if calls.ran_eager and calls.pending_wgrad is None and hasattr(type(record.module), "backward_dw"):
            return type(record.module).backward_dw(record.module)
        if later is None:
            return
        was_reset = record.validity.was_reset
        if was_reset or calls.pending_wgrad is None:
            raise RuntimeError(
                f"{self.label}: backward_dw() was called, but "
                + ("reset() dropped its graphs; capture again." if was_reset else "no backward delayed any gradient.")
            )
        if record.peer_channels:
            self.checks.check_peers()
        if record.in_flight is not None:
            if record.microbatch.wgrad_overwritten_by is not None:
                self.checks.refuse_overwritten("backward_dw()", record.microbatch.wgrad_overwritten_by)
            record.in_flight.weight_grads(record.microbatch)
        if aliased_grads.input_grads:
            aliased_grads.copy_out()
        if aliased_grads.last_position >= later.position:
            aliased_grads.copy_out_param_grads(later.position)
        stream, first_microbatch, unwanted = calls.pending_wgrad
        with torch.no_grad():
            restores = self.prepare_main_grads(later.fused, first_microbatch, unwanted)
            record.launch(later.graph, _NO_COPIES, stream, None)  # this graph records no event
            calls.pending_wgrad = None
            for restore in restores:
                restore()
            self._accumulate(unwanted)
        for part in later.modules:
            part.runtime.call_hooks()

    def _accumulate(self, unwanted: Container[int]) -> None:
        """Adds the gradients to .grad, or marks those that are in main_grad."""
        later = self.record.wgrad_graph
        increment_version([grad for _, grad in later.static_grads])
        static = {id(parameter) for parameter, _ in later.static_grads}
        for parameter, grad in later.grads:
            if not parameter.requires_grad or id(parameter) in unwanted:
                continue
            if parameter.grad is None:
                parameter.grad = grad.detach() if id(parameter) in static else grad.clone()
            else:
                parameter.grad += grad
        if later.static_grads:
            self.record.aliased_grads.alias_param_grads(later.position, later.static_grads)
        for weight, _ in later.fused:
            included = weight.requires_grad and id(weight) not in unwanted
            if included and hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = True
                if weight.grad is None:
                    zero = getattr(weight, "zero_out_wgrad", False)
                    weight.grad = get_dummy_wgrad(weight.shape, weight.dtype, zero, weight.device)

    def drop_backward_dw(self) -> None:
        """Drops delayed weight gradients, for a step that is abandoned."""
        record = self.record
        if record.calls.ran_eager and hasattr(type(record.module), "drop_backward_dw"):
            type(record.module).drop_backward_dw(record.module)
        record.calls.pending_wgrad = None

    def need_backward_dw(self) -> bool:
        """Whether backward_dw() computes weight gradients."""
        record = self.record
        if record.calls.ran_eager and hasattr(type(record.module), "need_backward_dw"):
            return type(record.module).need_backward_dw(record.module)
        return record.wgrad_graph is not None

    def unwanted(self) -> frozenset[int]:
        """In a backward: ids of the parameters whose gradients it does not compute (torch.autograd.grad(y, x),
        backward(inputs=)). RuntimeError for a bias without its weight, if both gradients are delayed together."""
        parameters, later = self.record.parameters, self.record.wgrad_graph
        unwanted = frozenset(id(parameters[i]) for i in _C.unwanted(parameters))
        for part in later.modules if unwanted and later is not None else ():
            for product in part.runtime.stores:
                names = part._product_names(product)
                weights, biases = ({id(getattr(part, name)) for name in some} & later.parameters for some in names)
                if weights <= unwanted and not biases <= unwanted:
                    raise RuntimeError(
                        f"{self.label}: backward was called for the gradient of {names[1]} and not of {names[0]}, but "
                        "the graph delays both until backward_dw(), which computes them together; include both, or run "
                        "the module without its graph."
                    )
        return unwanted

    def _captured_main_grad(self, weight: torch.nn.Parameter, address: int) -> torch.Tensor:
        main_grad = main_grad_of(weight)
        if not isinstance(main_grad, torch.Tensor) or main_grad.data_ptr() != address:
            raise RuntimeError(
                f"{self.label}: a parameter of shape {list(weight.shape)} has another main_grad than when it was "
                "captured, but the graph adds to that one; keep the tensor and zero it, or capture again."
            )
        return main_grad

    def prepare_main_grads(
        self, fused: list[FusedWeight], first_microbatch: bool | None, unwanted: Container[int]
    ) -> list[Callable[[], object]]:
        """Before a replay, which adds to main_grad: zeroes those that the gradient replaces. Returns functions to call
        after the replay, which restore main_grad of weights that were frozen since the capture or are unwanted."""
        main_grads = [self._captured_main_grad(*one) for one in fused]
        restores = []
        for (weight, _), main_grad in zip(fused, main_grads):
            if not weight.requires_grad or id(weight) in unwanted:
                restores.append(partial(main_grad.copy_, main_grad.clone()))
                if hasattr(weight, "grad_added_to_main_grad"):  # the CPU backend's function sets it
                    restores.append(partial(setattr, weight, "grad_added_to_main_grad", weight.grad_added_to_main_grad))
            elif first_microbatch or getattr(weight, "overwrite_main_grad", False):
                main_grad.zero_()
        increment_version(main_grads)
        return restores
