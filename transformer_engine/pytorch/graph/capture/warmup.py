"""The warm-up of what is captured: eager runs in the schedule's order, on the stream of the captures."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from transformer_engine.pytorch._internal.capture_flag import pass_ended
from transformer_engine.pytorch.graph.backend.interface import Backend
from transformer_engine.pytorch.graph.capture.checks import noted_once
from transformer_engine.pytorch.graph.capture.order import BACKWARD, FORWARD, WGRAD, Step
from transformer_engine.pytorch.graph.capture.passes import Passes
from transformer_engine.pytorch.graph.capture.work import Work
from transformer_engine.pytorch.graph.describe import OP


def warm_up(passes: Passes, backend: Backend) -> None:
    plan = passes.plan
    with backend.warming():
        if plan.before_warmup is not None:
            plan.before_warmup()
        with _ended_by(plan.after_warmup):
            for iteration in range(plan.warmup_iterations):
                for step in plan.schedule.steps:
                    _KINDS[step.kind](passes, step, iteration)
                pass_ended()
            for work in passes.works:
                work.live = []


@contextmanager
def _ended_by(hook: Callable[[], object] | None) -> Iterator[None]:
    """Calls what undoes the hook before the warm-up, also where the warm-up raises: then that is what is raised."""
    try:
        yield
    except BaseException:
        try:
            if hook is not None:
                hook()
        except Exception as error:
            warnings.warn(
                f"{OP}: 'post_warmup_hook', called behind a warm-up that failed, raised {type(error).__name__} "
                f"too: {error}",
                stacklevel=2,
            )
        raise
    if hook is not None:
        hook()


def _forward(passes: Passes, step: Step, iteration: int) -> None:
    passes.hooks(step, "forward_pre_hooks")
    work = passes.works[step.sample]
    with passes.values_kept(step):
        if iteration == 0:
            _noted_forward(work)
        else:
            work.forward()
    passes.check_forward(step)
    passes.hooks(step, "forward_hooks")


def _noted_forward(work: Work) -> None:
    try:
        noted_once(work)()
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        work.forward()  # torch.func inside, which takes no hooks: nothing is known of what it saves


def _backward(passes: Passes, step: Step, iteration: int) -> None:
    work = passes.works[step.sample]
    if not work.has_backward():
        return
    work.grad_outputs = [torch.ones_like(t) for t in work.live]
    passes.hooks(step, "backward_pre_hooks")
    grads = work.backward()
    passes.hooks(step, "backward_hooks")
    work.grad_outputs, work.live = [], []
    passes.check_used(step, grads)


def _wgrad(passes: Passes, step: Step, iteration: int) -> None:
    if passes.works[step.sample].pending:
        passes.works[step.sample].wgrad()


_KINDS = {FORWARD: _forward, BACKWARD: _backward, WGRAD: _wgrad}
