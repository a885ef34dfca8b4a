# A main_grad of the weight's 16-bit dtype where the product is of the other one, as under torch.autocast: it is summed
# in float32 and rounded once. Mutant: copying back what is overwritten without its zero start turns
# the overwriting cases red.
import pytest
import torch
from support import assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from .weight_grad_cases import backward, build, every_family, gradients, microbatch, weights

PAIRS = [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)]
pairs = pytest.mark.parametrize(("own", "other"), PAIRS, ids=lambda dtype: str(dtype).removeprefix("torch."))


def given(module, dtype, values):
    for name, weight in weights(module).items():
        weight.main_grad = values[name].to(dtype)
    return module


def in_autocast(module, device, other, seed, recipe=None, **options):
    def call(m, x, **options):
        with torch.autocast(device, dtype=other), te.autocast(enabled=recipe is not None, recipe=recipe):
            return m(x, **options)

    backward(lambda x: call(module, x, **options), *microbatch(device, torch.float32, seed))


def same_as_float32(device, own, run, build_one):
    """run(module) of main_grads in `own` and of float32 ones with the same values: those, rounded once."""
    module, wide = build_one(), build_one()
    wide.load_state_dict(module.state_dict())
    values = {name: randn(*p.shape, dtype=own, device=device) for name, p in weights(module).items()}
    given(module, own, values), given(wide, torch.float32, values)
    for m in (module, wide):
        run(m)
    for name, p in weights(wide).items():
        got = weights(module)[name]
        assert got.main_grad.dtype == own and got.grad is None
        assert_same_bits(got.main_grad, p.main_grad.to(own), name)
    for name, gradient in gradients(wide).items():
        if gradient is not None:
            assert_same_bits(gradients(module)[name], gradient, name)


@every_family
@pairs
@pytest.mark.parametrize("delay", [False, True], ids=["immediate", "delayed"])
@pytest.mark.parametrize("first", [None, True])
def test_added_and_overwritten(device, own, other, delay, first, family):
    def build_one():
        return build(family, device, own, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)

    def run(module):
        in_autocast(module, device, other, 1, is_first_microbatch=first)
        if delay:
            module.backward_dw()

    same_as_float32(device, own, run, build_one)


@pairs
@pytest.mark.usefixtures("fp8_left_off")
def test_fp8_products(device, own, other):
    """The operands' high precision is the other dtype too."""
    layer = te.Linear(32, 32, params_dtype=own, fuse_wgrad_accumulation=True, device=device)
    layer.weight.main_grad = torch.ones(32, 32, dtype=own, device=device)
    with torch.autocast(device, dtype=other), te.autocast(recipe=Float8CurrentScaling()):
        y = layer(randn(32, 32, dtype=own, device=device))
    y.sum().backward()
    assert layer.weight.main_grad.isfinite().all() and not layer.weight.main_grad.eq(1).all()


@pairs
@pytest.mark.parametrize("splits", [[3, 0, 4], torch.tensor([3, 0, 4])], ids=["list", "tensor"])
def test_groups(device, own, other, splits):
    def build_one():
        return te.GroupedLinear(3, 16, 24, params_dtype=own, fuse_wgrad_accumulation=True, device=device)

    def run(module):
        torch.manual_seed(3)
        x = randn(7, 16, dtype=own, device=device)
        where = splits.to(device) if isinstance(splits, torch.Tensor) else splits
        with torch.autocast(device, dtype=other):
            y = module(x, where)
        y.backward(randn(*y.shape, dtype=y.dtype, device=device))

    same_as_float32(device, own, run, build_one)


@pairs
def test_compiled(device, own, other):
    """To eager's bits."""
    module, eager = (te.Linear(16, 24, params_dtype=own, fuse_wgrad_accumulation=True, device=device) for _ in "ab")
    eager.load_state_dict(module.state_dict())
    x = randn(5, 16, dtype=own, device=device)
    for m in (module, eager):
        m.weight.main_grad = torch.ones(24, 16, dtype=own, device=device)
        call = torch.compile(m, backend="aot_eager", fullgraph=True) if m is module else m
        with torch.autocast(device, dtype=other):
            y = call(x)
        y.backward(torch.ones_like(y))
    assert_same_bits(module.weight.main_grad, eager.weight.main_grad)
