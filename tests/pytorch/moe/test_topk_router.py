# te.moe.TopKRouter alone: its bias moves by exact counts; groups of experts and numbers that do not fit are refused
# when it is built; its logits are those of products, and have no second derivative.
import pytest
import torch
from support import assert_same_bits, refused

from transformer_engine.pytorch import functional
from transformer_engine.pytorch.moe import TopKRouter

HIDDEN, EXPERTS, TOPK = 32, 12, 4


def build(device, **options):
    return TopKRouter(HIDDEN, EXPERTS, TOPK, **({"score_function": "sigmoid", "device": device} | options))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
def test_the_bias_moves_by_exact_counts(device, dtype):
    """A float32 mean of these counts is rounded, and moves experts that have the mean."""
    ours = build(device, expert_bias=True)
    tokens = torch.full((EXPERTS,), 2**24 + 1, device=device, dtype=dtype)
    ours.update_expert_bias(tokens, 0.5)
    assert not ours.expert_bias.any()
    tokens[0] += 1
    ours.update_expert_bias(tokens, 0.5)
    assert ours.expert_bias.tolist() == [-0.5] + [0.5] * (EXPERTS - 1)


@pytest.mark.parametrize(
    "tokens, rate, error, words",
    [
        ([1] * EXPERTS, 0.5, TypeError, ("'tokens_per_expert'", "list")),
        (torch.ones(EXPERTS), "0.5", ValueError, ("'rate'", "'0.5'")),
        (torch.ones(EXPERTS), float("nan"), ValueError, ("'rate'", "nan")),
        (torch.ones(EXPERTS, device="meta"), 0.5, ValueError, ("'tokens_per_expert'", "meta")),
    ],
)
def test_bad_counts(device, tokens, rate, error, words):
    ours = build(device, expert_bias=True)
    if isinstance(tokens, torch.Tensor) and not tokens.is_meta:
        tokens = tokens.to(device)
    with refused(error, "TopKRouter", *words):
        ours.update_expert_bias(tokens, rate)
    assert not ours.expert_bias.any()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_groups": 5, "group_topk": 1}, ("'num_groups' is 5", "12 experts")),
        ({"num_groups": "4"}, ("'num_groups' is '4'",)),
        ({"num_groups": 0}, ("'num_groups' is 0",)),
        ({"group_topk": 2}, ("'num_groups' is None", "group_topk = 2")),
        ({"num_groups": 4, "group_topk": 3}, ("'group_topk' is 3", "topk = 4")),
        ({"num_groups": 2, "group_topk": 4}, ("'group_topk' is 4", "num_groups = 2")),
        ({"num_groups": 6, "group_topk": 1}, ("'group_topk' is 1", "2 experts of a group")),
        ({"scaling_factor": "2"}, ("'scaling_factor' is '2'",)),
        ({"aux_loss_coeff": None}, ("'aux_loss_coeff' is None",)),
        ({"aux_loss_coeff": float("inf")}, ("'aux_loss_coeff' is inf",)),
    ],
)
def test_bad_options(device, options, words):
    with refused(ValueError, "TopKRouter", *words):
        build(device, **options)


def test_groups_that_fit(device):
    for num_groups, group_topk in ((4, None), (5, None), (4, 2), (3, 1), (12, 4)):
        x = torch.randn(5, HIDDEN, device=device)
        assert build(device, num_groups=num_groups, group_topk=group_topk)(x).routing_map.sum() == 5 * TOPK


def test_bad_input(device):
    with refused(TypeError, "TopKRouter", "'inp'", "list"):
        build(device)([1.0])


def test_no_second_derivative(device):
    x = torch.randn(5, HIDDEN, device=device, requires_grad=True)
    logits = functional.router_logits(x, build(device).weight)
    with refused(NotImplementedError, "router_logits", "double backward"):
        torch.autograd.grad(logits.square().sum(), x, create_graph=True)


@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("bfloat16",) * 2, ("bfloat16", "float32")], ids=str)
def test_logits_are_those_of_products(dtypes, device):
    """Of operands in their own dtype, in float32; gradients are products in float32, rounded once."""
    shapes = zip((5, 7), dtypes, strict=True)
    x, weight = (torch.randn(n, HIDDEN, device=device, dtype=getattr(torch, d)).requires_grad_() for n, d in shapes)
    logits, grad = functional.router_logits(x, weight), torch.randn(5, 7, device=device)
    with torch.no_grad():
        a, b = (weight, x) if x.dtype == weight.dtype else (weight.float(), x.float())
        assert_same_bits(logits.detach(), functional.gemm(a, b, "TN", out_dtype=torch.float32)[0])
        wanted = [
            functional.gemm(weight.float(), grad, "NN")[0].to(x.dtype),
            functional.gemm(x.float(), grad, "NT")[0].to(weight.dtype),
        ]
    for got, want in zip(torch.autograd.grad(logits, (x, weight), grad), wanted, strict=True):
        assert_same_bits(got, want)


def test_opcheck_of_logits(device):
    x, weight = (torch.randn(n, HIDDEN, device=device).requires_grad_() for n in (5, 7))
    torch.library.opcheck(torch.ops.te.router_logits.default, (x, weight))


def test_a_bias_outside_of_the_buffers(device):
    """A parameter in its place leaves the module's buffers."""
    ours, bias = build(device, expert_bias=True), torch.linspace(-1, 1, EXPERTS, device=device)
    x = torch.randn(5, HIDDEN, device=device)
    ours.expert_bias.copy_(bias)
    want = ours(x).routing_map
    del ours.expert_bias
    ours.expert_bias = torch.nn.Parameter(bias, requires_grad=False)
    assert torch.equal(ours(x).routing_map, want)
