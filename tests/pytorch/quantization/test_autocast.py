# torch.autocast around FP8 products: it casts what goes in, and nothing between. Inference, and a reentrant
# checkpoint's first run, have the bits of training; products by hand, and those of backward_dw(), those without it.
# Mutants: gemm, gemm_accumulate or gemm_fp8 (csrc) without their guards turn these red.
import contextlib

import pytest
import torch
from fp8_steps import RECIPES
from support import assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch import functional

pytestmark = pytest.mark.usefixtures("fp8_left_off")
DTYPE = torch.bfloat16


def only(*roles):
    def factory(role):
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3) if role.tensor_type in roles else None

    return CustomRecipe(qfactory=factory)


ALL = RECIPES | {
    "inputs alone": lambda: only("input"),
    "weights alone": lambda: only("weight"),
    "gradients alone": lambda: only("grad_output"),
}
MODULES = {
    "Linear": lambda **options: te.Linear(24, 40, **options),
    "LayerNormLinear": lambda **options: te.LayerNormLinear(24, 40, **options),
    "LayerNormMLP": lambda **options: te.LayerNormMLP(24, 40, **options),
    "recomputing LayerNormMLP": lambda **options: te.LayerNormMLP(24, 40, checkpoint=True, **options),
}


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("name", MODULES)
def test_inference_is_training(device, name, recipe):
    module, x, made = MODULES[name](device=device), randn(20, 24, device=device), ALL[recipe]()

    def run(guard):
        with guard, torch.autocast(device, dtype=DTYPE), te.autocast(recipe=made):
            return module(x)

    module(x).sum().backward()
    run(contextlib.nullcontext())  # scales of delayed scaling
    module.eval()
    trained = run(contextlib.nullcontext())
    assert trained.requires_grad and trained.dtype is DTYPE
    assert_same_bits(run(torch.no_grad()), trained, "no_grad")
    assert_same_bits(run(torch.inference_mode()), trained, "inference_mode")


@pytest.mark.parametrize("recipe", ALL)
def test_a_checkpoint_is_a_plain_call(device, recipe):
    module, x, made = te.LayerNormMLP(24, 40, device=device), randn(20, 24, device=device), ALL[recipe]()
    found = []
    for call in (module, lambda t: te.checkpoint(module, t, use_reentrant=True)):
        if recipe == "delayed":
            module.fp8_meta.pop("scaling_fwd", None), module.fp8_meta.pop("scaling_bwd", None)
            module.runtime.quantization.own = None
        leaf = x.clone().requires_grad_()
        with torch.autocast(device, dtype=DTYPE), te.autocast(recipe=made):
            y = call(leaf)
        y.float().square().sum().backward()
        found.append((y, leaf.grad))
    for a, b in zip(*found, strict=True):
        assert_same_bits(b, a)


def test_products_by_hand(device):
    a, b = randn(16, 32, device=device), randn(48, 32, device=device)
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device)
    left, right = quantizer(a), quantizer(b)

    def products():
        out = torch.ones(48, 16, device=device)
        te.cpp_extensions.general_gemm(left, right, out_dtype=torch.float32, out=out, accumulate=True)
        return (
            functional.gemm(a, b, layout="TN")[0],
            te.cpp_extensions.general_gemm(left, right, out_dtype=torch.float32)[0],
            out,
        )

    wanted = products()
    with torch.autocast(device, dtype=DTYPE):
        for got, want in zip(products(), wanted, strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("recipe", ["plain", "current", "inputs alone"])
def test_a_gradient_that_is_computed_inside(device, recipe, fuse):
    """backward_dw() does not depend on the torch.autocast around it."""
    found = []
    for around in (contextlib.nullcontext(), torch.autocast(device, dtype=DTYPE)):
        torch.manual_seed(0)
        split = {"parameters_split": ["a", "b"]}
        module = te.Linear(24, 40, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse, device=device, **split)
        for p in module.parameters():
            p.main_grad = torch.zeros_like(p)
        inside = contextlib.nullcontext() if recipe == "plain" else te.autocast(recipe=ALL[recipe]())
        with inside:
            y = module(randn(20, 24, device=device))
        y.square().sum().backward()
        with around:
            module.backward_dw()
        found.append([t for p in module.parameters() for t in (p.grad, p.main_grad) if t is not None])
    for got, want in zip(*found, strict=True):
        assert_same_bits(got, want)
