# Weights whose requires_grad changes between a forward and its backward, which autograd's accumulators go by: what they
# get in main_grad, in .grad and by backward_dw().
import pytest
import torch
from support import assert_same_bits

from .weight_grad_cases import build, every_family, microbatch, split_linear, weights, with_main_grads


@every_family
@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("delay", [False, True], ids=["immediate", "delayed"])
@pytest.mark.parametrize("every", [False, True], ids=["first", "every"])
def test_frozen_after_the_forward(device, family, delay, fused, every):
    def step(freezes):
        torch.manual_seed(5)
        module = build(family, device, fuse_wgrad_accumulation=fused, delay_wgrad_compute=delay)
        if fused:
            with_main_grads(module, value=1.0)
        x, generator = microbatch(device, torch.float32, 1)
        y = module(x)
        chosen = list(weights(module).values()) if every else list(weights(module).values())[:1]
        for weight in chosen if freezes else ():
            weight.requires_grad_(False)
        y.backward(torch.randn(y.shape, generator=generator).to(y))
        if delay:
            module.backward_dw()
        return x.grad, {name: p.main_grad if fused else p.grad for name, p in weights(module).items()}

    (dx, gradients), (want_dx, want) = step(True), step(False)
    assert_same_bits(dx, want_dx, "dx")
    for number, (name, gradient) in enumerate(gradients.items()):
        if every or number == 0:
            assert (gradient == 1).all() if fused else gradient is None, name
        else:
            assert_same_bits(gradient, want[name], name)


@pytest.mark.parametrize("when", ["backward", "backward_dw"])
@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
def test_thawed_after_the_forward(device, fused, when):
    """Parameters that are frozen in the forward get no gradient, thawed before the backward or before backward_dw().
    Mutant: a left_out() that names what the backward left out alone."""
    module = build(split_linear, device, fuse_wgrad_accumulation=fused, delay_wgrad_compute=True)
    if fused:
        with_main_grads(module, value=1.0)
    frozen = [module.key_weight, module.value_bias]
    for parameter in frozen:
        parameter.requires_grad_(False)
    x, generator = microbatch(device, torch.float32, 1)
    y = module(x)
    for late in (False, True):
        if late == (when == "backward_dw"):
            for parameter in frozen:
                parameter.requires_grad_(True)
        if not late:
            y.backward(torch.randn(y.shape, generator=generator).to(y))
    module.backward_dw()
    assert all(p.grad is None for p in frozen)
    if fused:
        assert (module.key_weight.main_grad == 1).all() and (module.query_weight.main_grad != 1).any()
    else:
        assert module.query_weight.grad is not None
    assert module.key_bias.grad is not None
