#!/usr/bin/env python
"""LoRA on a frozen Linear that is held in FP8 alone: one byte a weight, no gradient, no optimizer state for it.

python examples/with_lora.py                needs torch alone (the extra `lora` is empty)
The frozen weight is quantized once, from a given one; the adapter A, B of low rank is trained in fp32."""

import argparse
import sys

import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe

RECIPE = recipe.Float8CurrentScaling()


class LoRA(torch.nn.Module):
    """y = frozen(x) + x A^T B^T * alpha / rank, frozen in FP8."""

    def __init__(self, linear: torch.nn.Linear, rank: int = 4, alpha: float = 8.0):
        super().__init__()
        out_features, in_features = linear.weight.shape
        with te.quantized_model_init(recipe=RECIPE):
            self.frozen = te.Linear(in_features, out_features, bias=False, device=linear.weight.device)
        self.frozen.load_state_dict({"weight": linear.weight.detach()}, strict=False)
        self.frozen.requires_grad_(False)
        self.a = torch.nn.Parameter(torch.randn(rank, in_features, device=linear.weight.device) / in_features**0.5)
        self.b = torch.nn.Parameter(torch.zeros(out_features, rank, device=linear.weight.device))
        self.scale = alpha / rank

    def forward(self, x):
        with te.autocast(recipe=RECIPE):
            y = self.frozen(x)
        return y + torch.nn.functional.linear(torch.nn.functional.linear(x, self.a), self.b) * self.scale


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=128)
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    given = torch.nn.Linear(args.hidden, args.hidden, bias=False, device=device)
    change = torch.randn(args.hidden, 2, device=device) @ torch.randn(2, args.hidden, device=device) / args.hidden
    model = LoRA(given)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = te.optimizers.FusedAdam(trained, lr=1e-2)
    for step in range(args.steps):
        x = torch.randn(64, args.hidden, device=device)
        loss = torch.nn.functional.mse_loss(model(x), x @ (given.weight.detach() + change).T)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, args.steps - 1):
            print(f"step {step + 1}: loss {loss.item():.4f}")
    plan = te.memory_plan(model, x.requires_grad_(), optimizer=optimizer)
    print(plan)
    print(
        f"frozen: {model.frozen.weight.numel()} weights, {plan.bytes_of('optimizer')} bytes of optimizer state in all"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
