# Helpers of the suites of the mixture's modules: recipes, steps, and a twin whose parts run one after the other.
import copy
import re

import pytest
import torch
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R
from transformer_engine.pytorch.moe import MoEMLP

RECIPES = {
    "none": None,
    "delayed": lambda: R.DelayedScaling(amax_history_len=4),
    "current": R.Float8CurrentScaling,
    "block": R.Float8BlockScaling,
}
HIDDEN, FFN = 32, 48
EXPERTS, TOPK, TOKENS = 6, 2, 37
BF16 = torch.bfloat16
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def build(device, dtype=BF16, **options):
    return MoEMLP(HIDDEN, FFN, EXPERTS, TOPK, params_dtype=dtype, device=device, **options)


def recipe_of(name):
    return RECIPES[name] and RECIPES[name]()


def give_main_grads(*modules):
    for module in modules:
        for p in module.parameters():
            p.main_grad = torch.full(p.shape, 0.5, dtype=torch.float32, device=p.device)


def as_before(moe):
    """A copy whose experts have a parameter each, under the names of then; with the same main_grads."""
    twin = copy.deepcopy(moe)
    whole, mlp = (m.experts if isinstance(m, MoEMLP) else m for m in (moe, twin))
    for name in ("fc1", "fc2"):
        part = getattr(whole, name)
        weight = part.weight
        with te.quantized_model_init(enabled=False):
            each = te.GroupedLinear(
                part.num_gemms,
                part.in_features,
                part.out_features,
                bias=False,
                fuse_wgrad_accumulation=part.fuse_wgrad_accumulation,
                delay_wgrad_compute=part.need_backward_dw(),
                params_dtype=weight.dtype,
                device=weight.device,
                name=part.name,
            )
        for i, p in enumerate(each.parameters()):
            with torch.no_grad():
                p.copy_(weight[i])
            for mark in ("main_grad", "allreduce"):
                if hasattr(weight, mark):
                    value = getattr(weight, mark)
                    setattr(p, mark, value[i].clone() if isinstance(value, torch.Tensor) else value)
        each.train(part.training)
        setattr(mlp, name, each)
    return twin


def in_todays_names(named):
    """{name: tensor} of a module with a parameter for each expert, stacked."""
    found = {}
    for name, t in named.items():
        match = re.fullmatch(r"(.*fc[12]\.weight)(\d+)", name)
        found.setdefault(match[1] if match else name, []).append(t[None] if match else t)
    return {name: torch.cat(ts) if len(ts) > 1 or f"{name}0" in named else ts[0] for name, ts in found.items()}


def in_parts(mlp):
    """A copy of a GroupedMLP whose products are modules of their own: it has hooks."""
    twin = copy.deepcopy(mlp)
    for part in (twin.fc1, twin.fc2):
        part.register_forward_hook(lambda module, arguments, result: None)
    return twin


def step(module, inputs, dy, recipe=None, call=None):
    """Outputs and gradients of the inputs of one forward and backward, delayed weight gradients too."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = (module if call is None else call)(*leaves)
    outs, gradients = (t if isinstance(t, tuple) else (t,) for t in (y, dy))
    with_graph = [i for i, out in enumerate(outs) if out.requires_grad]  # a loss of factor 0 has none
    torch.autograd.backward([outs[i] for i in with_graph], [gradients[i] for i in with_graph])
    module.backward_dw()
    return [*(t.detach().reshape(t.shape or (1,)) for t in outs), *(leaf.grad for leaf in leaves)]


def assert_same_steps(got, want):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(a, b, i)


def assert_same_gradients(first, second):
    for (name, p), q in zip(first.named_parameters(), second.parameters(), strict=True):
        for what in ("grad", "main_grad"):
            a, b = getattr(p, what, None), getattr(q, what, None)
            assert (a is None) == (b is None), f"{name}.{what}"
            if a is not None:
                assert_same_bits(a, b, f"{name}.{what}")
