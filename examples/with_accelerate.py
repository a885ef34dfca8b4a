#!/usr/bin/env python
"""accelerate's own FP8, unmodified: mixed_precision="fp8" replaces torch's modules by te.Linear and te.LayerNorm.

python examples/with_accelerate.py          needs the extra `accelerate`; uses a GPU if there is one, else the CPU
Learns a fixed map from noise, in FP8 by delayed scaling; prints the loss and the replaced modules."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for `extras`, also under PYTHONSAFEPATH

import torch

import transformer_engine.pytorch as te
from extras import need


def network(hidden: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.LayerNorm(hidden), torch.nn.Linear(hidden, 4 * hidden), torch.nn.GELU(),
        torch.nn.Linear(4 * hidden, hidden),
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--cpu", action="store_true", help="also where there is a GPU")
    args = parser.parse_args(arguments)
    accelerate = need("accelerate", "accelerate")
    recipe = need("accelerate.utils", "accelerate").TERecipeKwargs(
        fp8_format="HYBRID", amax_history_len=16, amax_compute_algo="max"
    )
    accelerator = accelerate.Accelerator(mixed_precision="fp8", cpu=args.cpu, kwargs_handlers=[recipe])
    torch.manual_seed(0)
    model = network(args.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    replaced = [type(m).__name__ for m in model.modules() if isinstance(m, (te.Linear, te.LayerNorm))]
    print(f"transformer_engine's modules in the model: {', '.join(replaced)}")
    target = torch.randn(args.hidden, args.hidden, device=accelerator.device) / args.hidden**0.5
    for step in range(args.steps):
        x = torch.randn(64, args.hidden, device=accelerator.device)
        loss = torch.nn.functional.mse_loss(model(x).float(), x @ target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, args.steps - 1):
            print(f"step {step + 1}: loss {loss.item():.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
