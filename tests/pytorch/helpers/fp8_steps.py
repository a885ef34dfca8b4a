# Helpers of the suites of FP8 modules: recipes, small models, steps of them, and their state as plain tensors.
import io

import torch
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

RECIPES = {
    "delayed": lambda **options: DelayedScaling(**{"amax_history_len": 4, **options}),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}


def meta(module):
    return {way: module.fp8_meta[f"scaling_{way}"] for way in ("fwd", "bwd")}


def scales_of(module):
    return {f"{name} {way}": t.clone() for way, state in meta(module).items()
            for name, t in (("scale", state.scale), ("history", state.amax_history))}  # fmt: skip


def all_scales(module):
    return {f"{n} {k}": t for n, m in module.named_modules() if "scaling_fwd" in getattr(m, "fp8_meta", {})
            for k, t in scales_of(m).items()}  # fmt: skip


def assert_same_tensors(got, wanted):
    assert got.keys() == wanted.keys() and wanted
    for name, t in wanted.items():
        assert_same_bits(got[name], t, name)


def grads_of(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def pair(device, **options):
    return torch.nn.Sequential(te.Linear(16, 16, device=device, **options), te.Linear(16, 16, device=device, **options))


def step(model, x, recipe, **call):
    with te.autocast(recipe=recipe):
        y = model(x, **call)
    y.float().square().sum().backward()
    return y


def run(model, optimizer, batches, recipe):
    for x in batches:
        optimizer.zero_grad()
        step(model, x, recipe)
        optimizer.step()


def new(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        te.LayerNormLinear(16, 16, device=device),
        te.LayerNormMLP(16, 32, device=device),
        te.Linear(16, 16, device=device),
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
