"""The fused router: choice, probabilities and gradients against a float64 oracle, maps, layouts, compile, opcheck."""

import pytest
import torch
from support import DTYPES, assert_same_bits, assert_within, layouts, rounding, saved_tensors, wide

from transformer_engine.pytorch import functional
from transformer_engine.pytorch.router import (
    RoutingMapFormat,
    fused_compute_score_for_moe_aux_loss,
    fused_topk_with_score_function,
)

from .cases import (
    SCORES,
    draw_logits,
    gradient_bound,
    scores_of,
    scores_oracle,
    share_error,
    stored,
    topk_oracle,
)

# leading dimensions, experts, topk, num_groups, group_topk
SHAPES = (
    ((64,), 128, 8, None, None),
    ((5, 3), 8, 2, None, None),
    ((7,), 1, 1, None, None),
    ((4,), 33, 32, None, None),
    ((3,), 1024, 32, None, None),
    ((2,), 1000, 7, None, None),
    ((), 9, 1, None, None),
    ((0,), 16, 4, None, None),
    ((2, 0), 16, 4, None, None),
    ((16,), 256, 8, 8, 4),
    ((9,), 30, 6, 5, 3),
    ((5,), 12, 4, 12, 4),
    ((4,), 64, 2, 1, 1),
    ((4,), 6, 6, 2, 2),
)


def fused(logits, topk, score, num_groups=None, group_topk=None, scaling_factor=None, bias=None, **options):
    function = "softmax" if score == "pre_softmax" else score
    return fused_topk_with_score_function(
        logits, topk, score == "pre_softmax", num_groups, group_topk, scaling_factor, function, bias, **options
    )


def bits_of(routing_map):
    """The BITMAP_U8 form of a map of bools."""
    padded = torch.nn.functional.pad(routing_map.cpu(), (0, -routing_map.size(-1) % 8)).unflatten(-1, (-1, 8))
    return (padded.long() << torch.arange(8)).sum(-1).to(torch.uint8)


def shares_and_factor(x, chosen, topk, score):
    """Shares of all experts and the factor of their gradient, in float64, for the bound."""
    mask = torch.zeros_like(x, dtype=torch.bool).scatter(-1, chosen, True)
    if score == "pre_softmax":
        return x.softmax(-1), x.softmax(-1)
    if score == "softmax":
        shares = x.masked_fill(~mask, -torch.inf).softmax(-1)
        return shares, shares
    s = scores_of(x, score) * mask
    sums = s.sum(-1, keepdim=True) if topk > 1 else torch.ones_like(s[..., :1])
    slope = torch.autograd.functional.jvp(lambda t: scores_of(t, score), x, torch.ones_like(x))[1]
    return s / sums if topk > 1 else torch.zeros_like(s), slope * mask / sums


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_choice_probabilities_and_gradients(device, shape, score, dtype):
    lead, experts, topk, num_groups, group_topk = shape
    logits = draw_logits(device, *lead, experts, dtype=dtype, seed=experts).requires_grad_()
    scaling, bias = (2.5, None) if "softmax" in score else (None, draw_logits(device, experts, seed=3) / 4)
    options = {"num_groups": num_groups, "group_topk": group_topk, "scaling_factor": scaling}
    probs, routing_map = fused(logits, topk, score, bias=bias, **options)
    assert probs.dtype is dtype and probs.shape == logits.shape and probs.is_contiguous()
    assert routing_map.dtype is torch.bool and routing_map.shape == logits.shape and not routing_map.requires_grad

    x = wide(logits).requires_grad_()
    want, chosen = topk_oracle(x, topk, score, expert_bias=None if bias is None else bias.cpu(), **options)
    mask = torch.zeros_like(want, dtype=torch.bool).scatter(-1, chosen, True)
    assert torch.equal(routing_map.cpu(), mask)
    assert_within(probs, want.detach(), stored(want.detach(), share_error(x.detach()), dtype), "probs")

    incoming = draw_logits(device, *lead, experts, dtype=dtype, seed=7)
    (got,) = torch.autograd.grad(probs, logits, incoming)
    (gradient,) = torch.autograd.grad(want, x, wide(incoming))
    assert got.dtype is dtype and got.is_contiguous()
    shares, factor = shares_and_factor(x.detach(), chosen, topk, score)
    before = gradient_bound(x.detach(), shares, wide(incoming) * mask * (scaling or 1.0), factor) + 1e-37
    assert_within(got, gradient, before + rounding(gradient.abs() + before, dtype), "gradient")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("score", ("softmax", "sigmoid", "sqrtsoftplus"))
@pytest.mark.parametrize("shape", SHAPES[:9], ids=str)
def test_scores_of_the_auxiliary_loss(device, shape, score, dtype):
    lead, experts, topk = shape[:3]
    logits = draw_logits(device, *lead, experts, dtype=dtype, seed=experts + 1).requires_grad_()
    routing_map, scores = fused_compute_score_for_moe_aux_loss(logits=logits, topk=topk, score_function=score)
    assert scores.dtype is torch.float32 and routing_map.dtype is torch.bool
    x = wide(logits).requires_grad_()
    want = scores_oracle(x, score)
    chosen = topk_oracle(x.detach(), topk, score)[1]
    assert torch.equal(routing_map.cpu(), torch.zeros_like(want, dtype=torch.bool).scatter(-1, chosen, True))
    assert_within(scores, want.detach(), want.detach() * share_error(x.detach()) + 1e-37, "scores")

    incoming = draw_logits(device, *lead, experts, seed=9)
    (got,) = torch.autograd.grad(scores, logits, incoming)
    (gradient,) = torch.autograd.grad(want, x, wide(incoming))
    factor = want.detach()
    if score != "softmax":
        slope = torch.autograd.functional.jvp(lambda t: scores_of(t, score), x.detach(), torch.ones_like(x))[1]
        factor = slope / scores_of(x.detach(), score).sum(-1, keepdim=True)
    before = gradient_bound(x.detach(), want.detach(), wide(incoming), factor) + 1e-37
    assert_within(got, gradient, before + rounding(gradient.abs() + before, dtype), "gradient")


@pytest.mark.parametrize("experts", (1, 8, 33, 100, 1024))
def test_maps_of_all_formats_are_the_same_choice(device, experts):
    logits, topk = draw_logits(device, 6, experts, seed=2), min(4, experts)
    probs, routing_map = fused(logits, topk, "sigmoid")
    chosen = topk_oracle(wide(logits), topk, "sigmoid")[1]
    bitmap = fused(logits, topk, "sigmoid", routing_map_format=RoutingMapFormat.BITMAP_U8)
    assert_same_bits(bitmap[0], probs)
    assert bitmap[1].dtype is torch.uint8 and torch.equal(bitmap[1].cpu(), bits_of(routing_map))
    for dtype in (torch.int16, torch.int32, torch.int64):
        indices = torch.full((6, 2 * topk), -7, dtype=dtype, device=device)[:, ::2]
        got = fused(logits, topk, "sigmoid", topk_indices=indices)
        assert got[1] is indices and torch.equal(indices.cpu().long(), chosen)
        assert_same_bits(got[0], probs)
    scored = fused_compute_score_for_moe_aux_loss(logits, topk, "sigmoid", RoutingMapFormat.BITMAP_U8)
    assert torch.equal(scored[0].cpu(), bits_of(routing_map))


def test_equal_scores_choose_the_lower_index(device):
    logits = torch.tensor([[0.0, 1, 1, -0.0, 1, 0]], device=device)
    assert functional.router_topk(logits, 5)[2].tolist() == [[1, 2, 4, 0, 3]]
    flat = torch.zeros(2, 64, device=device)
    assert functional.router_topk(flat, 3)[2].tolist() == [[0, 1, 2]] * 2
    grouped = functional.router_topk(flat, 4, num_groups=8, group_topk=2, score_function="sigmoid")
    assert grouped[2].tolist() == [[0, 1, 2, 3]] * 2


def test_experts_outside_of_the_best_groups_are_never_chosen(device):
    """Even if -Inf is chosen within them: -Inf is a value, and not the mark of an excluded expert."""
    low, nan = -torch.inf, torch.nan
    for row, wanted in (
        ([3.0, 3, low, low, low, low, 4, 1], [0, 1]),  # sums of two: 6, -inf, -inf, 5
        ([low, low, 5, low], [0, 1]),  # equal sums: the first group
        ([1, low, nan, low], [2, 3]),  # a sum of NaN is above all
    ):
        logits = torch.tensor([row], device=device)
        chosen = functional.router_topk(logits, 2, num_groups=len(row) // 2, group_topk=1)[2]
        assert chosen.tolist() == [wanted]


def test_the_bias_chooses_alone(device):
    logits, bias = draw_logits(device, 32, 16, seed=4).requires_grad_(), torch.zeros(16, device=device)
    bias[5] = 10.0
    bias.requires_grad_()
    probs, routing_map = fused(logits, 3, "sigmoid", bias=bias)
    assert routing_map[:, 5].all()
    probs.square().sum().backward()
    assert bias.grad is None and logits.grad is not None
    for dtype in (torch.float16, torch.bfloat16):
        again = fused(logits, 3, "sigmoid", bias=bias.detach().to(dtype))
        assert_same_bits(again[0], probs.detach())
    assert_same_bits(fused(logits, 3, "sigmoid", bias=torch.zeros_like(bias))[0], fused(logits, 3, "sigmoid")[0])


def test_nan_and_infinity(device):
    """NaN is chosen first, as by torch.topk, and reaches the loss. A masked expert is not chosen before others."""
    nan, inf = torch.nan, torch.inf
    rows = torch.tensor([[0.0, nan, 2, 1], [0, inf, 2, 1], [0, -inf, 2, 1], [-inf, -inf, -inf, -inf]], device=device)
    for score in SCORES:
        options = {"score_function": "softmax" if score == "pre_softmax" else score}
        probs, _, chosen = functional.router_topk(rows, 2, pre_softmax=score == "pre_softmax", **options)
        if score in ("softmax", "sigmoid", "sqrtsoftplus"):
            assert chosen[0].tolist() == [1, 2] and chosen[1].tolist() == [1, 2]
        assert probs[0].isnan().any() and chosen[2].tolist() == [2, 3] and chosen[3].tolist() == [0, 1]
        assert probs[1].isnan().any() if score != "sigmoid" else probs[1].isfinite().all()
        assert probs[2].isfinite().all() and probs[2, 1] == 0
        assert probs[3].isnan().any() == ("softmax" in score)
    scores, _ = functional.router_scores(rows, 2)
    assert scores[0].isnan().all() and scores[1].isnan().all() and scores[2, 1] == 0


@pytest.mark.parametrize("score", ("sigmoid", "sqrtsoftplus"))
def test_extreme_logits_have_finite_gradients(device, score):
    """Scores that saturate or underflow: no 0 / 0."""
    logits = torch.tensor([[-300.0, -120.0, 300.0, 90.0, -90.0, 0.0]], device=device).requires_grad_()
    probs, _ = fused(logits, 6, score)
    (gradient,) = torch.autograd.grad(probs, logits, torch.arange(6.0, device=device)[None])
    assert probs.isfinite().all() and gradient.isfinite().all()
    scores = functional.router_scores(logits, 2, score_function=score)[0]
    assert torch.autograd.grad(scores, logits, torch.arange(6.0, device=device)[None])[0].isfinite().all()


def test_reads_any_layout(device):
    logits, incoming = draw_logits(device, 12, 40, seed=5), draw_logits(device, 12, 40, seed=6)
    leaf = logits.clone().requires_grad_()
    probs, _ = fused(leaf, 4, "sqrtsoftplus")
    (want,) = torch.autograd.grad(probs, leaf, incoming)
    for (name, x), (_, g) in zip(layouts(logits), layouts(incoming), strict=True):
        x = x.requires_grad_()
        got, _ = fused(x, 4, "sqrtsoftplus")
        assert_same_bits(got.detach(), probs.detach(), name)
        assert_same_bits(torch.autograd.grad(got, x, g)[0].contiguous(), want, name)
    summed = fused(leaf, 4, "sqrtsoftplus")[0].sum()  # a gradient with strides of 0
    ones = torch.autograd.grad(fused(leaf, 4, "sqrtsoftplus")[0], leaf, torch.ones_like(leaf))[0]
    assert_same_bits(torch.autograd.grad(summed, leaf)[0], ones)


def test_a_token_does_not_depend_on_the_others(device):
    logits = draw_logits(device, 301, 96, dtype=torch.bfloat16, seed=8)
    for score in SCORES:
        probs, _ = fused(logits, 6, score)
        parts = [fused(logits[i : i + 7], 6, score)[0] for i in range(0, 301, 7)]
        assert_same_bits(torch.cat(parts), probs, score)


def test_saves_the_logits_and_the_choice(device):
    logits = draw_logits(device, 20, 64).requires_grad_()
    with saved_tensors() as kept:
        fused(logits, 4, "pre_softmax")
    assert [(t.dtype, tuple(t.shape)) for t in kept] == [(torch.float32, (20, 64)), (torch.int32, (20, 4))]
    assert kept[0].data_ptr() == logits.data_ptr()
    with saved_tensors() as kept:
        fused_compute_score_for_moe_aux_loss(logits, 4, "softmax")
    assert [t.data_ptr() for t in kept] == [logits.data_ptr()]


@pytest.mark.parametrize("score", SCORES)
def test_compile(device, score):
    """fullgraph, dynamic tokens, bit for bit eager, gradients too."""

    def step(logits, indices):
        probs, routing_map = fused(logits, 2, score, scaling_factor=1.5)
        filled = fused(logits, 2, score, topk_indices=indices)[1]
        function = "softmax" if score == "pre_softmax" else score
        scored, scores = fused_compute_score_for_moe_aux_loss(logits, 2, function, RoutingMapFormat.BITMAP_U8)
        return probs, scores, routing_map, filled, scored

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (4, 7):
        results = []
        for function in (step, compiled):
            logits = draw_logits(device, tokens, 3, 12, seed=tokens).requires_grad_()
            indices = torch.zeros(tokens, 3, 2, dtype=torch.int64, device=device)
            out = function(logits, indices)
            incoming = [draw_logits(device, tokens, 3, 12, seed=s) for s in (1, 2)]
            results.append([*out, indices, *torch.autograd.grad(out[:2], logits, incoming)])
        for eager, traced in zip(*results, strict=True):
            assert torch.equal(eager, traced)


def test_opcheck(device):
    ops, logits = torch.ops.te, draw_logits(device, 3, 5, 16).requires_grad_()
    bias = torch.zeros(16, device=device)
    for options in (
        (None, 4, True, 4, 2, 2.0, "softmax", "bits"),
        (bias, 4, False, 0, 0, 1.0, "sigmoid", "bytes"),
        (None, 1, False, 0, 0, 1.0, "sqrtsoftplus", "none"),
    ):
        torch.library.opcheck(ops.router_topk.default, (logits, *options))
        torch.library.opcheck(ops.router_topk_fwd.default, (logits.detach(), *options))
    chosen = functional.router_topk(logits.detach(), 4)[2]
    backward = (draw_logits(device, 3, 5, 16, seed=1), logits.detach(), chosen, 4, False, 1.0, "softmax")
    torch.library.opcheck(ops.router_topk_bwd.default, backward)
    for options in ((4, "softmax", "bytes"), (2, "sigmoid", "bits")):
        torch.library.opcheck(ops.router_scores.default, (logits, *options))
        torch.library.opcheck(ops.router_scores_fwd.default, (logits.detach(), *options))
    torch.library.opcheck(ops.router_scores_bwd.default, (*backward[:2], "sigmoid"))


@pytest.mark.gpu
def test_devices_give_the_same_bits():
    for score in SCORES:
        for dtype in DTYPES:
            logits = draw_logits("cpu", 50, 160, dtype=dtype, seed=11)
            cpu, gpu = fused(logits, 8, score), fused(logits.cuda(), 8, score)
            assert_same_bits(gpu[0].cpu(), cpu[0], score)
            assert torch.equal(gpu[1].cpu(), cpu[1])
