"""Warms up a capture: eager runs in the order of the schedule, on the stream of the captures."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from transformer_engine.pytorch.graph.backend.interface import Backend
from transformer_engine.pytorch.graph.capture.checks import record_guards_once
from transformer_engine.pytorch.graph.capture.microbatches import Microbatches
from transformer_engine.pytorch.graph.capture.order import BACKWARD, FORWARD, WGRAD, Step
from transformer_engine.pytorch.graph.capture.static_callable import StaticCallable
from transformer_engine.pytorch.graph.describe import OP
from transformer_engine.pytorch.graph.observers import pass_begins


def warm_up(microbatches: Microbatches, backend: Backend) -> None:
    plan = microbatches.plan
    with backend.warmup():
        if plan.pre_warmup_hook is not None:
            plan.pre_warmup_hook()
        with _post_warmup_hook_called(plan.post_warmup_hook):
            for iteration in range(plan.warmup_iterations):
                pass_begins()
                for step in plan.schedule.steps:
                    _KINDS[step.kind](microbatches, step, iteration)
            for func in microbatches.funcs:
                func.outputs_with_grad = []


@contextmanager
def _post_warmup_hook_called(hook: Callable[[], object] | None) -> Iterator[None]:
    """Calls the hook after the warm-up, even if it raises: the hook reverts what pre_warmup_hook did. The exception of
    the warm-up is raised in preference to that of the hook."""
    try:
        yield
    except BaseException:
        try:
            if hook is not None:
                hook()
        except Exception as error:
            warnings.warn(
                f"{OP}: 'post_warmup_hook', called after a warm-up that failed, raised {type(error).__name__} "
                f"too: {error}",
                stacklevel=2,
            )
        raise
    if hook is not None:
        hook()


def _forward(microbatches: Microbatches, step: Step, iteration: int) -> None:
    microbatches.run_hooks(step, "forward_pre_hooks")
    func = microbatches.funcs[step.sample]
    with microbatches.values_restored(step):
        if iteration == 0:
            _forward_recording_guards(func)
        else:
            func.forward()
    microbatches.check_forward(step)
    microbatches.run_hooks(step, "forward_hooks")


def _forward_recording_guards(func: StaticCallable) -> None:
    try:
        record_guards_once(func)()
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        func.forward()  # torch.func inside refuses saved-tensor hooks: its saved tensors stay unknown


def _backward(microbatches: Microbatches, step: Step, iteration: int) -> None:
    func = microbatches.funcs[step.sample]
    if not func.has_backward():
        return
    func.grad_outputs = [torch.ones_like(t) for t in func.outputs_with_grad]
    microbatches.run_hooks(step, "backward_pre_hooks")
    grads = func.backward()
    microbatches.run_hooks(step, "backward_hooks")
    func.grad_outputs, func.outputs_with_grad = [], []
    microbatches.check_all_used(step, grads)


def _wgrad(microbatches: Microbatches, step: Step, iteration: int) -> None:
    if microbatches.funcs[step.sample].pending:
        microbatches.funcs[step.sample].wgrad()


_KINDS = {FORWARD: _forward, BACKWARD: _backward, WGRAD: _wgrad}
