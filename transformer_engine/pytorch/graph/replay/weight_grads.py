"""The weight gradients of a captured callable that are not simply returned: those that its graphs add to main_grad, and
those that wait for backward_dw(). Replays what was captured, and computes nothing itself."""

from collections.abc import Callable, Container
from functools import partial

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.torch_private import increment_version
from transformer_engine.pytorch.graph.recorded.main_grads import Fused, main_grad_of
from transformer_engine.pytorch.module.weight_grad import get_dummy_wgrad


class WeightGrads:
    """Of replay.Graphed, whose attributes these are."""

    __slots__ = ()

    def backward_dw(self) -> None:
        """The weight gradients that the latest backward left, then the hooks of the modules that left them.
        RuntimeError where none did."""
        calls, later = self.calls, self.wgrad_graph
        if calls.ran_eager and calls.wgrad_due is None and hasattr(type(self.module), "backward_dw"):
            return type(self.module).backward_dw(self.module)
        if later is None:
            return
        if self.fitness.gone or calls.wgrad_due is None:
            gone = self.fitness.gone
            raise RuntimeError(
                f"{self.label}: backward_dw() was called, but "
                + ("reset() dropped its graphs; capture again." if gone else "no backward has left it anything.")
            )
        if self.channels:
            self._refuse_failed()
        if self.flight is not None:
            if self.place.wgrad_spoilt_by is not None:
                self._refuse_spoilt("backward_dw()", self.place.wgrad_spoilt_by)
            self.flight.weight_grads(self.place)
        if self.loans.out:
            self.loans.settle()
        if self.loans.latest >= later.position:
            self.loans.keep_grads(later.position)
        stream, microbatch, unwanted = calls.wgrad_due
        with torch.no_grad():
            kept = self._prepare_main_grads(later.fused, microbatch, unwanted)
            self._launch(later.graph, ((), (), (0, 0), ()), stream, None)  # an event is not recorded in there
            calls.wgrad_due = None
            for put_back in kept:
                put_back()
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
                self.loans.hand_out(later.position, later.static_grads)
            for weight, _ in later.fused:
                asked = weight.requires_grad and id(weight) not in unwanted
                if asked and hasattr(weight, "grad_added_to_main_grad"):
                    weight.grad_added_to_main_grad = True
                    if weight.grad is None:
                        zero = getattr(weight, "zero_out_wgrad", False)
                        weight.grad = get_dummy_wgrad(weight.shape, weight.dtype, zero, weight.device)
        for part in later.modules:
            part.runtime.call_hooks()

    def drop_backward_dw(self) -> None:
        """Forgets what waits for backward_dw(): for a step that is given up."""
        if self.calls.ran_eager and hasattr(type(self.module), "drop_backward_dw"):
            type(self.module).drop_backward_dw(self.module)
        self.calls.wgrad_due = None

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for backward_dw()."""
        if self.calls.ran_eager and hasattr(type(self.module), "need_backward_dw"):
            return type(self.module).need_backward_dw(self.module)
        return self.wgrad_graph is not None

    def _unwanted(self) -> frozenset[int]:
        """In a backward: the parameters, by id, whose gradients it is not asked for (torch.autograd.grad(y, x),
        backward(inputs=)). RuntimeError for a bias whose gradient comes with its weight's alone, and that one later."""
        unwanted = frozenset(id(self.parameters[i]) for i in _C.unwanted(self.parameters))
        later = self.wgrad_graph
        for part in later.modules if unwanted and later is not None else ():
            for product in part.runtime.stores:
                names = part._product_names(product)
                weights, biases = ({id(getattr(part, name)) for name in some} & later.parameters for some in names)
                if weights <= unwanted and not biases <= unwanted:
                    raise RuntimeError(
                        f"{self.label}: backward was asked for the gradient of {names[1]} and not of {names[0]}, but "
                        "the graph leaves both to backward_dw(), which computes them together; ask for both, or run "
                        "the module without its graph."
                    )
        return unwanted

    def _own_main_grad(self, weight: torch.nn.Parameter, address: int) -> torch.Tensor:
        main_grad = main_grad_of(weight)
        if not isinstance(main_grad, torch.Tensor) or main_grad.data_ptr() != address:
            raise RuntimeError(
                f"{self.label}: a parameter of shape {list(weight.shape)} has another main_grad than when it was "
                "captured, and the graph adds to that one; keep the tensor and zero it, or capture again."
            )
        return main_grad

    def _prepare_main_grads(
        self, fused: list[Fused], microbatch: bool | None, unwanted: Container[int]
    ) -> list[Callable[[], object]]:
        """The graph adds; where a gradient is to replace what is there, that is zeroed first. What comes back is to be
        called behind the replay: it puts back what belongs to weights that were frozen since, or whose gradients were
        not asked for."""
        main_grads = [self._own_main_grad(*one) for one in fused]
        kept = []
        for (weight, _), main_grad in zip(fused, main_grads):
            if not weight.requires_grad or id(weight) in unwanted:
                kept.append(partial(main_grad.copy_, main_grad.clone()))
                if hasattr(weight, "grad_added_to_main_grad"):  # the CPU's work sets it
                    kept.append(partial(setattr, weight, "grad_added_to_main_grad", weight.grad_added_to_main_grad))
            elif microbatch or getattr(weight, "overwrite_main_grad", False):
                main_grad.zero_()
        increment_version(main_grads)
        return kept
