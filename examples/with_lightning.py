#!/usr/bin/env python
"""Lightning's plug-in, unmodified: TransformerEnginePrecision replaces torch's modules by te.Linear and te.LayerNorm.

python examples/with_lightning.py           needs the extra `lightning`; uses a GPU if there is one, else the CPU
On a GPU the plug-in multiplies in FP8. On a CPU it reports that FP8 is off, and the modules run in bf16."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for `extras`, also under PYTHONSAFEPATH

import torch

import transformer_engine.pytorch as te
from extras import need
from with_accelerate import network


def learner(lightning, hidden: int):
    class Learner(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network(hidden)
            self.losses = []
            self.register_buffer("target", torch.randn(hidden, hidden) / hidden**0.5)

        def training_step(self, batch, _):
            (x,) = batch
            x = x.to(self.target.dtype)
            loss = torch.nn.functional.mse_loss(self.network(x).float(), (x @ self.target).float())
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return te.optimizers.FusedAdam(self.parameters(), lr=3e-3, master_weights=True)

    return Learner()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--cpu", action="store_true", help="also where there is a GPU")
    args = parser.parse_args(arguments)
    lightning = need("lightning", "lightning")
    precision = need("lightning.pytorch.plugins.precision", "lightning")
    torch.manual_seed(0)
    model = learner(lightning, args.hidden)
    rows = torch.utils.data.TensorDataset(torch.randn(64 * args.steps, args.hidden))
    trainer = lightning.Trainer(
        accelerator="cpu" if args.cpu else "auto", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        plugins=[precision.TransformerEnginePrecision(weights_dtype=torch.bfloat16, replace_layers=True)],
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=64))
    replaced = [type(m).__name__ for m in model.modules() if isinstance(m, (te.Linear, te.LayerNorm))]
    print(f"transformer_engine's modules in the model: {', '.join(replaced)}")
    for step in (0, args.steps - 1):
        print(f"step {step + 1}: loss {model.losses[step]:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
