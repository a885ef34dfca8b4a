"""The passes that are warmed up and captured, and what stands around each of their steps in either: the caller's hooks,
values that are put back, checks of what came out. Captures nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from transformer_engine.pytorch.graph.capture.checks import check_leaves, check_result
from transformer_engine.pytorch.graph.capture.order import Step
from transformer_engine.pytorch.graph.capture.own_call import OwnCall
from transformer_engine.pytorch.graph.capture.plan import CapturePlan
from transformer_engine.pytorch.graph.capture.untouched import Untouched, values_kept
from transformer_engine.pytorch.graph.capture.work import Work
from transformer_engine.pytorch.graph.describe import OP, PLAIN
from transformer_engine.pytorch.graph.memory.buffers import version_of


class Passes:
    """`works`: of each sample."""

    def __init__(self, plan: CapturePlan, works: Sequence[Work], untouched: Untouched) -> None:
        self.plan, self.works, self.untouched = plan, works, untouched
        self.ran: set[Work] = set()
        self.written: dict[Work, list[torch.Tensor]] = {}  # inputs that its forward writes to
        self.modules_ran: set[int] = set()

    def hooks(self, step: Step, when: str) -> None:
        for hook in self.plan.hooks[step.module].get(when, {}).values():
            answer = hook(self.plan.modules[step.module])
            if answer is not None:
                raise RuntimeError(
                    f"{OP}: a hook of 'capture_time_hooks' ({when} of {self.plan.name(step)}) returned a "
                    f"{type(answer).__name__}, wanted None: it runs outside the graph and cannot replace anything."
                )

    @contextmanager
    def values_kept(self, step: Step) -> Iterator[None]:
        """Around a pass's forward. Behind the first one inputs that it writes to, and of a module's first pass
        parameters, get their values back when all is captured; before the others they count as new, as in a replay."""
        work = self.works[step.sample]
        if work in self.ran:
            torch.autograd.graph.increment_version(self.written[work])
            yield
            return
        tensors = list(work.inputs)
        if step.module not in self.modules_ran:
            tensors += [p for p in (*work.parameters, *work.frozen) if type(p) in PLAIN]
        self.ran.add(work)
        self.modules_ran.add(step.module)
        try:
            versions = [version_of(t) for t in work.inputs]
            with values_kept(tensors, self.untouched.undo):
                yield
            self.written[work] = [t for t, version in zip(work.inputs, versions) if version_of(t) != version]
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                raise ValueError(
                    f"{OP}: the forward of {self.plan.name(step)} writes in place to an argument, or a parameter, that "
                    "wants a gradient; let it write to a copy, or pass the argument with requires_grad=False."
                ) from error
            raise

    def check_forward(self, step: Step) -> None:
        work, name = self.works[step.sample], self.plan.name(step)
        check_result(name, work)
        check_leaves(name, work)

    def check_used(self, step: Step, grads: list[torch.Tensor | None]) -> None:
        """Once for each pass: every input and parameter that wants a gradient gets one, now or later. A __call__ of its
        class's own may leave parameters to what is not captured."""
        work, plan = self.works[step.sample], self.plan
        if plan.allow_unused_input:
            return
        later = work.accumulated | work.left_for_later()
        names = [work.signature.names[work.signature.slots[i]] for i in work.wanted]
        wanted = [work.inputs[i] for i in work.wanted]
        if not isinstance(work.function, OwnCall):
            names += [f"parameter of shape {list(p.shape)}" for p in work.parameters]
            wanted += work.parameters
        for name, tensor, grad in zip(names, wanted, grads):
            if grad is None and id(tensor) not in later:
                raise RuntimeError(
                    f"{OP}: {name} of {plan.name(step)} wants a gradient, but the outputs do not depend on it; pass "
                    "allow_unused_input=True, or requires_grad=False for it."
                )
