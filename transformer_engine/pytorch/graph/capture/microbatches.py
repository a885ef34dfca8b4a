"""The microbatches that are warmed up and captured, and what surrounds each step: hooks, restored values, checks.

- Nothing is captured here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from transformer_engine.pytorch.graph.capture.checks import check_gradient_leaves, check_result_types
from transformer_engine.pytorch.graph.capture.module_call import ModuleCall
from transformer_engine.pytorch.graph.capture.order import Step
from transformer_engine.pytorch.graph.capture.plan import CapturePlan
from transformer_engine.pytorch.graph.capture.state_guard import StateGuard, values_restored
from transformer_engine.pytorch.graph.capture.static_callable import StaticCallable
from transformer_engine.pytorch.graph.describe import OP, PLAIN_TENSORS
from transformer_engine.pytorch.graph.memory.buffers import version_of


class Microbatches:
    """funcs: one for each sample."""

    def __init__(self, plan: CapturePlan, funcs: Sequence[StaticCallable], guard: StateGuard) -> None:
        self.plan, self.funcs, self.guard = plan, funcs, guard
        self.ran: set[StaticCallable] = set()
        self.mutated_inputs: dict[StaticCallable, list[torch.Tensor]] = {}  # inputs that the forward writes to
        self.modules_ran: set[int] = set()

    def run_hooks(self, step: Step, kind: str) -> None:
        for hook in self.plan.hooks[step.module].get(kind, {}).values():
            answer = hook(self.plan.modules[step.module])
            if answer is not None:
                raise RuntimeError(
                    f"{OP}: a hook of 'capture_time_hooks' ({kind} of {self.plan.name(step)}) returned a "
                    f"{type(answer).__name__}, wanted None: it runs outside the graph and cannot replace anything."
                )

    @contextmanager
    def values_restored(self, step: Step) -> Iterator[None]:
        """Around a forward. Inputs that the first forward of a microbatch writes, and parameters that the first forward
        of a module writes, get their values back after the captures. Before later forwards the versions of such inputs
        are incremented, as in a replay."""
        func = self.funcs[step.sample]
        if func in self.ran:
            torch.autograd.graph.increment_version(self.mutated_inputs[func])
            yield
            return
        tensors = list(func.inputs)
        if step.module not in self.modules_ran:
            tensors += [p for p in (*func.parameters, *func.frozen) if type(p) in PLAIN_TENSORS]
        self.ran.add(func)
        self.modules_ran.add(step.module)
        try:
            versions = [version_of(t) for t in func.inputs]
            with values_restored(tensors, self.guard.undo):
                yield
            self.mutated_inputs[func] = [t for t, version in zip(func.inputs, versions) if version_of(t) != version]
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                raise ValueError(
                    f"{OP}: the forward of {self.plan.name(step)} writes in place to an argument, or a parameter, that "
                    "requires a gradient; write to a copy, or pass the argument with requires_grad=False."
                ) from error
            raise

    def check_forward(self, step: Step) -> None:
        func, name = self.funcs[step.sample], self.plan.name(step)
        check_result_types(name, func)
        check_gradient_leaves(name, func)

    def check_all_used(self, step: Step, grads: list[torch.Tensor | None]) -> None:
        """Each input and parameter that requires a gradient has to get one, now or from backward_dw(). A module whose
        class overrides __call__ may use parameters in code that is not captured."""
        func, plan = self.funcs[step.sample], self.plan
        if plan.allow_unused_input:
            return
        later = func.accumulated_by_backward | func.delayed_params()
        names = [func.signature.names[func.signature.tensor_indices[i]] for i in func.inputs_requiring_grad]
        tensors = [func.inputs[i] for i in func.inputs_requiring_grad]
        if not isinstance(func.function, ModuleCall):
            names += [f"parameter of shape {list(p.shape)}" for p in func.parameters]
            tensors += func.parameters
        for name, tensor, grad in zip(names, tensors, grads):
            if grad is None and id(tensor) not in later:
                raise RuntimeError(
                    f"{OP}: {name} of {plan.name(step)} requires a gradient, but the outputs do not depend on it; pass "
                    "allow_unused_input=True, or requires_grad=False for it."
                )
