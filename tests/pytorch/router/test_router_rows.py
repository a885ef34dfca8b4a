"""functional.router_rows: the bits of router_logits, router_topk and permute_routing, as one node; its first result;
what is not wanted; PyTorch around it."""

import pytest
import torch
from support import assert_same_bits, refused
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from transformer_engine.pytorch import functional
from transformer_engine.pytorch.verdict import SplitVerdict, reset_split_verdict, split_verdict

TOKENS, HIDDEN, EXPERTS, TOPK = 19, 24, 8, 3
CHOICES = {
    "softmax": {},
    "pre": {"pre_softmax": True, "scaling_factor": 2.5},
    "sigmoid": {"score_function": "sigmoid", "num_groups": 4, "group_topk": 3},
    "bias": {"score_function": "sqrtsoftplus"},
}


def build(device, dtype=torch.bfloat16, weight_dtype=None):
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, device=device).to(dtype).requires_grad_()
    return x, torch.randn(EXPERTS, HIDDEN, device=device).to(weight_dtype or dtype).requires_grad_()


def options_of(name, device):
    bias = torch.linspace(-1, 1, EXPERTS, device=device) if name == "bias" else None
    return {**CHOICES[name], "expert_bias": bias}


def by_parts(x, weight, experts, rows, **options):
    tokens = x.view(x.shape)
    logits = functional.router_logits(tokens, weight)
    probs, _, chosen = functional.router_topk(logits, TOPK, **options, map_format="none")
    return tokens, *functional.permute_routing(probs, chosen, experts, rows), logits


def gradients(results, x, weight, grads, logits=False):
    """The tokens have another reader, and x one more."""
    tokens, probs, last = results[0], results[1], results[-1]
    loss = (tokens * grads[0]).sum() + (probs * grads[1]).sum() + (x * grads[2]).sum()
    if logits:
        loss = loss + (last * grads[3]).sum()
    return torch.autograd.grad(loss, [t for t in (x, weight) if t.requires_grad])


@pytest.mark.parametrize("logits", [False, True], ids=["", "logits"])
@pytest.mark.parametrize("frozen", ["", "x", "weight"])
@pytest.mark.parametrize("name", CHOICES)
def test_is_its_parts(name, frozen, logits, device):
    x, weight = build(device)
    for tensor, which in ((x, "x"), (weight, "weight")):
        tensor.requires_grad_(frozen != which)
    options, experts, rows = options_of(name, device), (1, 6), 40
    reset_split_verdict(device)
    want = by_parts(x, weight, experts, rows, **options)
    counted = split_verdict(device)
    got = functional.router_rows(x, weight, TOPK, experts, rows, **options, with_logits=logits)
    assert split_verdict(device) == SplitVerdict(0, 2 * counted.cut)
    for a, b in zip(got[: 7 if logits else 6], want, strict=False):
        assert_same_bits(a.detach(), b.detach())
    assert logits or got[6] is None
    assert got[0].requires_grad is (frozen != "x"), "else the other reader computes a gradient without need"
    shapes = [(TOKENS, HIDDEN), (rows,), (TOKENS, HIDDEN), (TOKENS, EXPERTS)]
    grads = [torch.randn(shape, device=device).to(x.dtype if len(shape) > 1 else torch.float32) for shape in shapes]
    for a, b in zip(gradients(got, x, weight, grads, logits), gradients(want, x, weight, grads, logits), strict=True):
        assert_same_bits(a, b)


def test_other_dtypes_and_memory_for_counts(device):
    x, weight = build(device, torch.bfloat16, torch.float32)
    kept = torch.full((EXPERTS,), -1, device=device)
    got = functional.router_rows(x, weight, TOPK, (0, EXPERTS), TOKENS * TOPK, counts=kept, with_logits=True)
    want = by_parts(x, weight, (0, EXPERTS), TOKENS * TOPK)
    assert got[5] is kept and kept.tolist() == want[5].tolist()
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a.detach(), b.detach())
    grads = [torch.randn_like(t) for t in (x, got[1], x, got[6])]
    for a, b in zip(gradients(got, x, weight, grads, True), gradients(want, x, weight, grads, True), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("hidden", [7, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_all_dtypes(dtype, hidden, device):
    """The casts of x and weight, and of both gradients, are one launch each; rows apart in memory are cast alone."""
    for apart in (False, True):
        torch.manual_seed(0)
        x = torch.randn(TOKENS, 2 * hidden, device=device).to(dtype)[:, :hidden]
        x = (x if apart else x.contiguous()).requires_grad_()
        weight = torch.randn(EXPERTS, hidden, device=device).to(dtype).requires_grad_()
        got = functional.router_rows(x, weight, TOPK, (0, EXPERTS), 57, with_logits=True)
        want = by_parts(x, weight, (0, EXPERTS), 57)
        grads = [torch.randn_like(t) for t in (x, got[1], x, got[6])]
        grads[3][0, 0] = 1e30  # infinite in float16
        for a, b in zip(gradients(got, x, weight, grads, True), gradients(want, x, weight, grads, True), strict=True):
            assert a.dtype == dtype
            assert_same_bits(a, b)


def test_memory_for_a_zero(device):
    """It is written beside the map, traced too; other memory is refused."""
    x, weight = build(device)
    for call in (functional.router_rows, torch.compile(functional.router_rows, backend="aot_eager", fullgraph=True)):
        zero = torch.full((), 3.0, device=device)
        call(x, weight, TOPK, (0, EXPERTS), 57, zero=zero)
        assert zero.item() == 0
    for wrong in (torch.zeros(2, device=device), torch.zeros((), dtype=torch.float64, device=device)):
        with refused(ValueError, "router_rows", "'zero'", "one Float"):
            functional.router_rows(x, weight, TOPK, (0, EXPERTS), 57, zero=wrong)


def test_one_reader_alone(device):
    """A gradient of the tokens, of the probabilities or of the logits alone."""
    for reader in (0, 1, 6):
        x, weight = build(device)
        got = functional.router_rows(x, weight, TOPK, (0, EXPERTS), 57, with_logits=True)
        want = by_parts(x, weight, (0, EXPERTS), 57)
        grad = torch.randn_like(got[reader])
        each = [torch.autograd.grad(r[reader], (x, weight), grad, allow_unused=True) for r in (got, want)]
        for a, b in zip(*each, strict=True):
            assert (a is None) is (b is None)
            if a is not None:
                assert_same_bits(a, b)


def test_without_a_graph(device):
    x, weight = build(device)
    want = functional.router_rows(x, weight, TOPK, (0, EXPERTS), 57)
    with torch.no_grad():
        got = functional.router_rows(x, weight, TOPK, (0, EXPERTS), 57)
    assert got[0] is x and got[1].grad_fn is None
    for a, b in zip(got[1:6], want[1:6], strict=True):
        assert_same_bits(a.detach(), b.detach())


def test_pytorch_around_it(device):
    x, weight = build(device)
    call = torch.compile(functional.router_rows, backend="aot_eager", fullgraph=True)
    got, want = (f(x, weight, TOPK, (0, EXPERTS), 57, with_logits=True) for f in (call, functional.router_rows))
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a.detach(), b.detach())
    grads = [torch.randn_like(t) for t in (x, got[1], x, got[6])]
    grads[2].zero_()  # a compiler chooses the order of x's readers
    for a, b in zip(gradients(got, x, weight, grads, True), gradients(want, x, weight, grads, True), strict=True):
        assert_same_bits(a, b)
    with FakeTensorMode() as mode:
        shapes = functional.router_rows(mode.from_tensor(x), mode.from_tensor(weight), TOPK, (0, EXPERTS), 57)
    assert [t.shape for t in shapes[:6]] == [t.shape for t in want[:6]]
    with refused(NotImplementedError, "router_rows", "double backward"):
        torch.autograd.grad(want[1].square().sum(), x, create_graph=True)


def test_bad_input(device):
    x, weight = build(device)
    with refused(ValueError, "router_topk", "'topk' is 9", "1 to 8"):
        functional.router_rows(x, weight, 9, (0, EXPERTS), 57)
    with refused(ValueError, "permute_routing", "'rows'", "-1"):
        functional.router_rows(x, weight, TOPK, (0, EXPERTS), -1)
    with refused(ValueError, "router_logits", "'x'", "Double"):
        functional.router_rows(x.double(), weight, TOPK, (0, EXPERTS), 57)


@pytest.mark.parametrize("counted", ["forward", "backward"])
def test_recomputed_in_another_mode(counted, device):
    """A mode of one pass alone takes the ops there, which save as many tensors."""
    x, weight = build(device)
    want = torch.autograd.grad(functional.router_rows(x, weight, TOPK, (1, 6), 40)[1].sum(), (x, weight))

    def within(pass_, call):
        if pass_ != counted:
            return call()
        with FlopCounterMode(display=False):
            return call()

    def run(x, weight):
        return functional.router_rows(x, weight, TOPK, (1, 6), 40)[1]

    out = within("forward", lambda: checkpoint(run, x, weight, use_reentrant=False))
    got = within("backward", lambda: torch.autograd.grad(out.sum(), (x, weight)))
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)
