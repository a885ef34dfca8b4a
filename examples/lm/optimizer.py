"""AdamW on fp32 master weights, for any parameter dtype: Transformer Engine's FusedAdam, and torch's. Their state is
shown as a flat dict of tensors."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from transformer_engine.pytorch.optimizers import (
    FusedAdam,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale_tensor,
)

from .parallel import ALONE, is_divided

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP = 1.0  # norm of the whole gradient


def groups_of(parameters: Iterable[nn.Parameter]) -> list[dict]:
    """Norm weights are not decayed."""
    parameters = list(parameters)
    matrices, vectors = ([p for p in parameters if (p.dim() >= 2) == of_matrices] for of_matrices in (True, False))
    return [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]


class FusedMasterAdamW:
    """FusedAdam: 16-bit gradients are read as they are, and masters, moments and parameters written in one pass."""

    def __init__(self, model: nn.Module):
        self.model, self.ranks = model, getattr(model, "ranks", ALONE)
        self.parameters = dict(model.named_parameters())
        masters = any(p.dtype != torch.float32 for p in self.parameters.values())
        self.adam = FusedAdam(groups_of(self.parameters.values()), lr=0.0, betas=BETAS, master_weights=masters)
        for p in self.parameters.values():  # made here, see MasterAdamW
            self.adam.initialize_state(p)
        self.overflow = torch.zeros(1, dtype=torch.int32, device=p.device)

    def accumulating(self, is_last: bool) -> AbstractContextManager:
        """Around the forward and the backward of a microbatch."""
        return nullcontext()

    @torch.no_grad()
    def step(self, lr: float) -> torch.Tensor:
        """Clip by the norm of the whole gradient, on the device; update; drop the gradients. Returns that norm."""
        self.ranks.finish_gradients(self.model)
        grads = self.gradients()
        norm = self._norm(grads)
        clip = (CLIP / (norm + 1e-6)).clamp(max=1.0)
        multi_tensor_applier(multi_tensor_scale_tensor, self.overflow, [grads, grads], clip)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self.adam.zero_grad()
        return norm

    def _norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """Norm of the whole gradient, each parameter counted once: the squares of divided parameters are added up over
        the ranks; the gradient of an undivided parameter is the same on all ranks."""
        if self.ranks.size == 1:
            return multi_tensor_applier(multi_tensor_l2norm, self.overflow, [grads], False)[0]
        divided = [is_divided(p) for p in self.parameters.values()]
        squares = []
        for wanted in (True, False):
            some = [grad for grad, is_one in zip(grads, divided, strict=True) if is_one == wanted]
            squares.append(multi_tensor_applier(multi_tensor_l2norm, self.overflow, [some], False)[0].square())
        dist.all_reduce(squares[0], group=self.ranks.group)
        return sum(squares).sqrt()

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that are clipped in place and read by the step."""
        return [p.grad for p in self.parameters.values()]

    def state_bytes(self) -> int:
        """Bytes of parameters, masters and moments."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The same as MasterAdamW.tensors(), in the same formats."""
        tensors = {f"model.{name}": p.detach() for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            shown = {"master_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
            for kept, state in self.adam.state[p].items():
                tensors[f"optimizer.{shown[kept]}.{name}"] = state
        return tensors

    def set_step_count(self, steps: int) -> None:
        for group in self.adam.param_groups:
            group["step"] = steps


class MasterAdamW:
    """torch's fused AdamW on fp32 copies of the parameters (on the parameters themselves where they are fp32).

    bf16 keeps 8 bits of a weight, so an update smaller than 1/256 of it would vanish; the fp32 master keeps it.
    """

    def __init__(self, model: nn.Module):
        self.parameters = dict(model.named_parameters())
        self.masters = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in self.parameters.items()
        }
        self.adamw = torch.optim.AdamW(groups_of(self.masters.values()), lr=0.0, betas=BETAS, fused=True)
        # AdamW would make its state in its first step. Made here, the first step costs the same as the others, and a
        # checkpoint is read into the same tensors it was written from.
        for master in self.masters.values():
            self.adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def accumulating(self, is_last: bool) -> AbstractContextManager:
        """Around the forward and the backward of a microbatch."""
        return nullcontext()

    @torch.no_grad()
    def step(self, lr: float) -> torch.Tensor:
        """Clip, update, write the parameters back from the masters, drop the gradients. Returns their norm."""
        for name, p in self.parameters.items():
            if self.masters[name] is not p:
                self.masters[name].grad, p.grad = p.grad.float(), None
        norm = nn.utils.clip_grad_norm_(self.masters.values(), CLIP)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        rounded = [(p, self.masters[name]) for name, p in self.parameters.items() if self.masters[name] is not p]
        if rounded:
            torch._foreach_copy_(*map(list, zip(*rounded, strict=True)))
        return norm

    def state_bytes(self) -> int:
        """Bytes of parameters, masters and moments."""
        masters = [m for name, m in self.masters.items() if m is not self.parameters[name]]
        moments = [t for state in self.adamw.state.values() for t in state.values()]
        return sum(t.numel() * t.element_size() for t in (*self.parameters.values(), *masters, *moments))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, masters and moments by name, as they are (not copies); the step count is not among them."""
        tensors = {f"model.{name}": p.detach() for name, p in self.parameters.items()}
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                tensors[f"optimizer.master.{name}"] = master.detach()
            state = self.adamw.state[master]
            tensors[f"optimizer.exp_avg.{name}"] = state["exp_avg"]
            tensors[f"optimizer.exp_avg_sq.{name}"] = state["exp_avg_sq"]
        return tensors

    def set_step_count(self, steps: int) -> None:
        """How many updates the moments hold; with tensors() written in place, this completes a restore."""
        for master in self.masters.values():
            self.adamw.state[master]["step"].fill_(steps)


OPTIMIZERS = {"fused": FusedMasterAdamW, "torch": MasterAdamW}
