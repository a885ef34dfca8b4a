"""AdamW on fp32 master weights, for any parameter dtype. Its state is shown as a flat dict of tensors."""

import torch
from torch import nn

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP = 1.0  # norm of the whole gradient


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
        matrices = [p for p in self.masters.values() if p.dim() >= 2]
        vectors = [p for p in self.masters.values() if p.dim() < 2]  # norm weights are not decayed
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, fused=True)
        # AdamW would make its state in its first step. Made here, the first step costs what every step costs, and a
        # checkpoint is read into the same tensors it was written from.
        for master in self.masters.values():
            self.adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Clip, update, write the parameters back from the masters, drop the gradients."""
        for name, p in self.parameters.items():
            if self.masters[name] is not p:
                self.masters[name].grad, p.grad = p.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters.values(), CLIP)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        rounded = [(p, self.masters[name]) for name, p in self.parameters.items() if self.masters[name] is not p]
        if rounded:
            torch._foreach_copy_(*map(list, zip(*rounded, strict=True)))

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
