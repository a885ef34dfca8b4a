# A captured MoEMLP has the bits of the captured layer with a parameter for each expert, and of the eager one: with
# main_grad, delayed weight gradients, and FP8 weights that are kept over microbatches.
import copy

import pytest
import torch
from support import assert_same_bits, randn

import transformer_engine.pytorch as te

from .cases import BF16, HIDDEN, TOKENS, as_before, build, every_recipe, in_todays_names, recipe_of

pytestmark = pytest.mark.usefixtures("fp8_left_off")


def sample(device):
    return randn(TOKENS, HIDDEN, dtype=BF16, device=device).requires_grad_()


def give_main_grads(module):
    for p in module.experts.parameters():
        p.main_grad = torch.full(p.shape, 0.5, dtype=torch.float32, device=p.device)


def results(module, call, recipe, device, firsts, **options):
    """Outputs and gradients of microbatches, and what they have added up."""
    found = []
    for turn, first in enumerate(firsts):
        torch.manual_seed(turn)
        x, dy = sample(device), randn(TOKENS, HIDDEN, dtype=BF16, device=device)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y, _ = call(x, **({} if first is None else {"is_first_microbatch": first}))
        y.backward(dy)
        if options.get("delay_wgrad_compute"):
            call.backward_dw()
        found += [y.detach().clone(), x.grad.clone()]
    named = {n: p.main_grad if hasattr(p, "main_grad") else p.grad for n, p in module.named_parameters()}
    return found + list(in_todays_names({n: t for n, t in named.items() if t is not None}).values())


def assert_all_same(device, recipe, firsts, options, **of_capture):
    ours = build(device, **options)
    if "fuse_wgrad_accumulation" in options:
        give_main_grads(ours)
    got = []
    for module in (ours, as_before(ours), copy.deepcopy(ours)):
        if "fuse_wgrad_accumulation" in options:
            give_main_grads(module)
        call = module
        if len(got) < 2:
            call = te.make_graphed_callables(
                module, (sample(device),), enabled=recipe is not None, recipe=recipe, **of_capture
            )
            for p in module.parameters():
                assert p.grad is None and bool((getattr(p, "main_grad", p.new_tensor(0.5)) == 0.5).all())
        got.append(results(module, call, recipe, device, firsts, **options))
    for other in got[1:]:
        for i, (a, b) in enumerate(zip(got[0], other, strict=True)):
            assert_same_bits(a, b, i)


@every_recipe
@pytest.mark.parametrize("options", [{}, {"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}], ids=str)
def test_captured(options, recipe, device):
    assert_all_same(device, recipe_of(recipe), (None, None), options)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_captured_with_kept_weights(recipe, device):
    options = {"fuse_wgrad_accumulation": True}
    assert_all_same(device, recipe_of(recipe), (True, False, True), options, cache_quantized_params=True)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_step_before_the_backward(stacked, device):
    """All microbatches share the quantized weights, which another call has made of new values."""
    ours = build(device)
    module = ours if stacked else as_before(ours)
    calls = te.make_graphed_callables(
        (module,),
        ((sample(device),), (sample(device),)),
        _order=[1, 1, -1, -1],
        enabled=True,
        recipe=recipe_of("block"),
        cache_quantized_params=True,
    )
    one, _ = calls[0](sample(device), is_first_microbatch=True)
    with torch.no_grad():
        next(module.experts.fc2.parameters()).mul_(3)
    calls[1](sample(device), is_first_microbatch=True)
    with pytest.raises(RuntimeError, match="quantized again by another call"):
        one.float().sum().backward()
