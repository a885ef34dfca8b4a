"""What is to be captured, all of it checked: plain data between make_graphed_callables and the capture."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from transformer_engine.pytorch.graph.capture.order import BACKWARD, WGRAD, Schedule, Step
from transformer_engine.pytorch.graph.describe import name_of
from transformer_engine.pytorch.graph.recorded.quantization import Quantization
from transformer_engine.pytorch.graph.recorded.weight_flag import WeightFlag
from transformer_engine.pytorch.graph.replay.arguments import Signature

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
    flag: WeightFlag | None = None  # each call says whether quantized weights are made anew
    allow_unused_input: bool = False
    retain: bool = False
    reuse: bool = False
    clone_parameter_grads: bool = True
    pool: object | None = None
    before_warmup: Callable[[], object] | None = None
    after_warmup: Callable[[], object] | None = None
    delays: Sequence[bool] = field(default_factory=tuple)  # of each module: whether backward_dw() has something to do

    def module_of(self, sample: int) -> int:
        return next(step.module for step in self.schedule.steps if step.sample == sample)

    def torch_modules(self) -> list[torch.nn.Module]:
        return [m for m in self.modules if isinstance(m, torch.nn.Module)]

    def name(self, step: Step) -> str:
        return name_of(self.modules[step.module], step.module)

    def last_use(self, step: Step) -> bool:
        """Whether a pass is over with this step. One whose weight gradients may be asked for at any time never is."""
        if not self.delays[step.module]:
            return step.kind == BACKWARD
        return step.kind == WGRAD and step.module in self.schedule.scheduled_wgrad

    def stays(self, p: torch.nn.Parameter) -> bool:
        """Whether its gradients are handed out without a copy: all are, or its owner takes them himself, behind
        backward() or backward_dw(), and wants them at one address."""
        return not self.clone_parameter_grads or bool(getattr(p, "skip_backward_post_hook", False))
