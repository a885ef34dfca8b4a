"""The checked arguments of a capture, as plain data between make_graphed_callables and class Capture."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from transformer_engine.pytorch.graph.capture.order import BACKWARD, WGRAD, Schedule, Step
from transformer_engine.pytorch.graph.describe import callable_name
from transformer_engine.pytorch.graph.recorded.quantization import Quantization, WeightFlag
from transformer_engine.pytorch.graph.replay.signature import Signature

Hooks = Mapping[str, Mapping[object, Callable[[object], None]]]


@dataclass(frozen=True, eq=False, repr=False)
class CapturePlan:
    modules: Sequence[object]
    signatures: Sequence[Signature]  # one for each sample
    schedule: Schedule
    device: torch.device
    warmup_iterations: int
    hooks: Sequence[Hooks]  # one for each module
    quantizations: Sequence[Quantization]  # one for each module
    weight_flag: WeightFlag | None = None  # if each call decides whether weights are quantized again
    allow_unused_input: bool = False
    retain_graph: bool = False
    reuse_buffers: bool = False
    clone_parameter_grads: bool = True
    pool: object | None = None
    pre_warmup_hook: Callable[[], object] | None = None
    post_warmup_hook: Callable[[], object] | None = None
    delays_wgrad: Sequence[bool] = field(default_factory=tuple)  # whether each module delays weight gradients

    def module_of(self, sample: int) -> int:
        return next(step.module for step in self.schedule.steps if step.sample == sample)

    def torch_modules(self) -> list[torch.nn.Module]:
        return [m for m in self.modules if isinstance(m, torch.nn.Module)]

    def name(self, step: Step) -> str:
        return callable_name(self.modules[step.module], step.module)

    def last_use(self, step: Step) -> bool:
        """Whether this step is the last one that uses the memory of its microbatch. There is none if backward_dw() may
        be called at any time."""
        if not self.delays_wgrad[step.module]:
            return step.kind == BACKWARD
        return step.kind == WGRAD and step.module in self.schedule.scheduled_wgrad

    def keeps_static_grad(self, p: torch.nn.Parameter) -> bool:
        """Whether its gradients are returned without a copy: by the caller's option for all, or because the parameter
        has skip_backward_post_hook and so needs them at one address after backward() or backward_dw()."""
        return not self.clone_parameter_grads or bool(getattr(p, "skip_backward_post_hook", False))
