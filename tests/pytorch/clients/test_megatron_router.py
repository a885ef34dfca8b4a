"""megatron-core's router calls our fused functions (`moe_router_fusion`), and gets what it computes by itself. Skipped,
by name, where the package is not installed."""

import functools
import importlib.util

import pytest
import torch

from transformer_engine.pytorch import router

there = importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None
pytestmark = pytest.mark.skipif(not there, reason="needs the extra: pip install 'transformer_engine[megatron]'")

CHOICES = {
    "softmax": {},
    "softmax before the choice": {"use_pre_softmax": True, "scaling_factor": 2.5},
    "groups": {"use_pre_softmax": True, "num_groups": 4, "group_topk": 2},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid, bias and groups": {
        "score_function": "sigmoid",
        "expert_bias": torch.linspace(-0.1, 0.1, 16),
        "num_groups": 4,
        "group_topk": 2,
        "scaling_factor": 2.5,
    },
    "sqrtsoftplus": {"score_function": "sqrtsoftplus", "expert_bias": torch.linspace(0.1, -0.1, 16)},
}


@pytest.fixture
def fused_calls(monkeypatch):
    """Names of our functions that megatron-core has called."""
    from megatron.core.transformer.moe import moe_utils

    called = []
    for name in ("topk_with_score_function", "compute_score_for_moe_aux_loss", "moe_aux_loss"):
        ours = getattr(router, f"fused_{name}")
        assert getattr(moe_utils, f"fused_{name}") is ours
        spy = functools.wraps(ours)(lambda *a, _ours=ours, **kw: (called.append(_ours.__name__), _ours(*a, **kw))[1])
        monkeypatch.setattr(moe_utils, f"fused_{name}", spy)
    return called


def results(function, *args, **options):
    """Outputs without and with fusion, and gradients of the logits."""
    found = []
    for fused in (False, True):
        logits = torch.randn(40, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()
        out = function(logits, *args, fused=fused, **options)
        floats = next(t for t in out if t.is_floating_point())
        (gradient,) = torch.autograd.grad(floats, logits, torch.linspace(-1, 1, 640).view(40, 16))
        found.append((floats.detach(), next(t for t in out if not t.is_floating_point()), gradient))
    return found


def expect_same(found):
    plain, fused = found
    assert fused[1].dtype is plain[1].dtype and torch.equal(fused[1], plain[1])
    torch.testing.assert_close(fused[0], plain[0])
    torch.testing.assert_close(fused[2], plain[2])


@pytest.mark.parametrize("topk", (1, 4))
@pytest.mark.parametrize("choice", CHOICES)
def test_choice(choice, topk, fused_calls):
    from megatron.core.transformer.moe import moe_utils

    options = dict(CHOICES[choice])
    if topk == 1:
        options |= {name: None for name in ("num_groups", "group_topk") if name in options}
    expect_same(results(moe_utils.topk_routing_with_score_function, topk, **options))
    assert fused_calls == ["fused_topk_with_score_function"]


@pytest.mark.parametrize("score", ("softmax", "sigmoid", "sqrtsoftplus"))
def test_scores_and_loss(score, fused_calls):
    from megatron.core.transformer.moe import moe_utils

    found = results(moe_utils.compute_routing_scores_for_aux_loss, 4, score)
    expect_same(found)
    losses = []
    for fused, (scores, routing_map, _) in zip((False, True), found, strict=True):
        scores = scores.clone().requires_grad_()
        loss = moe_utils.switch_load_balancing_loss_func(
            probs=scores,
            tokens_per_expert=routing_map.sum(0),
            total_num_tokens=40,
            topk=4,
            num_experts=16,
            moe_aux_loss_coeff=0.01,
            fused=fused,
        )
        losses.append((loss.detach(), torch.autograd.grad(loss, scores)[0]))
    torch.testing.assert_close(*losses)
    assert fused_calls == ["fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss"]
