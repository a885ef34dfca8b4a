"""Second moments far below their tensor's largest, in float16 and FP8: they never become 0, so that no step is m /
eps."""

import pytest
import torch
from support import assert_same_bits

from transformer_engine.pytorch.optimizers import FusedAdam

from .cases import everything

LEAST = {torch.uint8: 2.0**-9 / 448, torch.float16: 2.0**-24 / 32752}
# The magnitudes of the rows' gradients: the last ones' squares are far below the least that the format holds.
RANGE = {torch.uint8: -4, torch.float16: -7}


def run(device, dtype, steps=50, **options):
    """Lengths of the longest steps, in lr; the optimizer; its parameter."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(64, 512).to(device))
    magnitudes = torch.logspace(RANGE[dtype], 0, 64)[:, None]
    optimizer = FusedAdam([p], lr=1e-3, eps=1e-12, exp_avg_sq_dtype=dtype, **options)
    longest = 0.0
    for _ in range(steps):
        p.grad = (torch.randn(64, 512) * magnitudes).to(device)
        before = p.detach().clone()
        optimizer.step()
        longest = max(longest, (p.detach() - before).abs().max().item() / 1e-3)
    return longest, optimizer, p


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("dtype", LEAST)
def test_no_step_is_longer_than_a_few_lr(device, dtype, masters):
    """Compared with float32, whose longest steps are the first ones. Without the least: up to sqrt(least) / eps."""
    options = {"exp_avg_dtype": dtype, "master_weights": masters}
    longest, optimizer, p = run(device, dtype, **options)
    assert longest < 10
    state = optimizer.state[p]["exp_avg_sq"]
    assert (state != 0).all()
    v = optimizer.get_unscaled_state(p, "exp_avg_sq")
    least = v.max() * LEAST[dtype]
    assert (v >= least * (1 - 1e-5)).all() and (v < least * 1.5).any()


@pytest.mark.parametrize("dtype", LEAST)
def test_what_has_no_gradient_stays_0(device, dtype):
    p = torch.nn.Parameter(torch.ones(300, device=device))
    optimizer = FusedAdam([p], exp_avg_sq_dtype=dtype)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        p.grad[100:] = 0
        optimizer.step()
    assert not optimizer.state[p]["exp_avg_sq"][100:].any() and optimizer.state[p]["exp_avg_sq"][:100].all()
    assert (p.detach()[100:] == 1).all()


@pytest.mark.parametrize("dtype", LEAST)
def test_loaded_and_set_values_do_not_become_0(device, dtype):
    """And what was read comes back to the bit."""
    _, optimizer, p = run(device, dtype, steps=3)
    before = everything(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    for name, t in everything(optimizer).items():
        assert_same_bits(t, before[name], name)
    values = torch.tensor([1.0, 1e-30, 0.0, 1e-3], device=device).repeat(64, 128)
    for name, is_kept in (("exp_avg_sq", True), ("exp_avg", False)):
        optimizer = FusedAdam([p], **{f"{name}_dtype": dtype})
        optimizer.set_scaled_state(p, name, values)
        got = optimizer.get_unscaled_state(p, name)
        assert ((got != 0) == (values != 0)).all() == is_kept, name
    assert (got[:, 2::4] == 0).all()


@pytest.mark.parametrize("dtype", LEAST)
def test_nan_and_inf_stay(device, dtype):
    p = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = FusedAdam([p], exp_avg_sq_dtype=dtype)
    p.grad = torch.tensor([1.0, float("nan"), 1e-20, 0.0], device=device)
    optimizer.step()
    v = optimizer.get_unscaled_state(p, "exp_avg_sq")
    assert v[1].isnan() and v[2] > 0 and v[3] == 0
