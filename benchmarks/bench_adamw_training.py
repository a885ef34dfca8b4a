"""200 steps of the language model of examples/ with FusedAdam on fp32 masters, clipped by the multi-tensor functions,
beside torch's AdamW, fused and foreach, from the same weights on the same data (targets.py case 26, `lm_adamw`).

"own bf16 gradients" is the example's way: clipped in place, without a float32 copy. Three rows an optimizer: the time
of a step, its peak memory (weights, state and activations), and the mean loss of the last 20 steps, in nats a byte.
torch's two ways round in different orders, so the difference between their losses is the effect of rounding. It uses
the h200 preset on a GPU, and the toy preset on a CPU."""

import dataclasses
import gc
import pathlib
import statistics
import sys

import torch
from common import Bench, Case

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
from lm import data
from lm.config import PRESETS
from lm.model import FusedLM
from lm.optimizer import BETAS, FusedMasterAdamW, groups_of
from lm.train import Trainer, set_determinism

STEPS, LAST = 200, 20
KINDS = {"ours": "fused", "own bf16 gradients": "fused", "torch fused": "torch", "torch foreach": "torch"}


class Float32Gradients(FusedMasterAdamW):
    """Gradients in float32, as in torch's way here and in a framework's main_grad: clipping does not round again."""

    def __init__(self, model):
        super().__init__(model)
        self.adam.use_decoupled_grad = True

    def gradients(self):
        for p in self.parameters.values():
            p.decoupled_grad, p.grad = p.grad.float(), None
        return [p.decoupled_grad for p in self.parameters.values()]


def trained(config, device, batches, name):
    """The steps of one optimizer."""
    torch.manual_seed(config.seed)
    set_determinism(config, device)
    trainer = Trainer(FusedLM(config, device), config, device)
    if name == "ours":
        trainer.optimizer = None  # its state first
        trainer.optimizer = Float32Gradients(trainer.model)
    if name == "torch foreach":
        own = trainer.optimizer
        own.adamw = torch.optim.AdamW(groups_of(own.masters.values()), lr=0.0, betas=BETAS, foreach=True)
    return [trainer.step(batches) for _ in range(STEPS)]


def main():
    bench = Bench(__doc__)
    preset = PRESETS["h200" if bench.cuda else "toy"]
    shape, flops = (STEPS, preset.parameters), 6 * preset.parameters * preset.tokens
    dtype = preset.dtype
    times, peaks, losses = {}, {}, {}
    case = Case("26", "lm_adamw", dtype, shape, "step", flops=flops)
    if not bench.selects(case):
        return
    batches = data.Batches(data.read_text(data.stdlib_files()), preset)
    for name, kind in KINDS.items():
        steps = trained(dataclasses.replace(preset, optimizer=kind), bench.device, batches, name)
        times[name] = statistics.median(step.seconds for step in steps[LAST:]) * 1e6
        peaks[name] = max(step.memory for step in steps) / 2**20
        losses[name] = statistics.fmean(step.loss for step in steps[-LAST:])
        gc.collect()
        if bench.cuda:
            torch.cuda.empty_cache()
    bench.record(case, times, "us")
    bench.record(dataclasses.replace(case, op="lm_adamw_peak", direction="keeps", flops=0), peaks, "MiB")
    bench.record(dataclasses.replace(case, op="lm_adamw_loss"), losses, "nats")
    bench.finish()


if __name__ == "__main__":
    main()
