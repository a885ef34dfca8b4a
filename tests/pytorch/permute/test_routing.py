"""functional.permute_routing: the map and the probabilities of moe_permute_with_probs, in one launch; their gradient;
PyTorch around it; bad input."""

import pytest
import torch
from support import assert_same_bits, negated_view, refused, saved_tensors

import transformer_engine.pytorch as te
from transformer_engine.pytorch import functional
from transformer_engine.pytorch.verdict import SplitVerdict, reset_split_verdict, split_verdict

from .cases import randn

TOKENS, EXPERTS, TOPK = 21, 7, 3


def choice(device, dtype=torch.float32, tokens=TOKENS, zeros=True):
    """Probabilities of all experts, some of them 0; the chosen experts in no order; the mask of these."""
    probs = torch.rand(tokens, EXPERTS, device=device).to(dtype)
    if zeros:
        probs[::4] = 0
    chosen = torch.rand(tokens, EXPERTS, device=device).topk(TOPK).indices
    mask = torch.zeros(tokens, EXPERTS, dtype=torch.bool, device=device).scatter_(1, chosen, True)
    return probs.requires_grad_(), chosen.int(), mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [30, TOKENS * TOPK, TOKENS * TOPK + 5])
@pytest.mark.parametrize("experts", [(0, EXPERTS), (2, 5)])
def test_is_that_of_a_mask(experts, rows, dtype, device):
    probs, chosen, mask = choice(device, dtype)
    local, inp = slice(*experts), randn(TOKENS, 6, device=device)
    want, want_probs, back = te.moe_permute_with_probs(inp, probs[:, local], mask[:, local], rows)
    reset_split_verdict(device)
    row_probs, token_of_row, row_of_pair, offsets, counts = functional.permute_routing(probs, chosen, experts, rows)
    assert split_verdict(device) == SplitVerdict(0, max(0, int(mask[:, local].sum()) - rows))
    assert counts.tolist() == mask.sum(0).tolist()
    assert_same_bits(row_probs.detach(), want_probs.detach())
    assert_same_bits(functional.permute_gather(inp, token_of_row, token_of_row)[0], want)
    assert_same_bits(functional.permute(inp, row_of_pair, rows, of_mask=False)[0], want)
    assert offsets.tolist() == [0, *mask[:, local].sum(0).cumsum(0).clamp(max=rows).tolist()]
    alive = row_probs.detach() != 0
    result = torch.where(alive[:, None], randn(rows, 6, device=device), 0)
    sums = te.moe_unpermute(result, back, restore_shape=inp.shape)
    assert_same_bits(functional.unpermute(result, row_of_pair, of_mask=False), sums)
    grad = randn(rows, device=device).to(dtype)
    got, exact = (torch.autograd.grad(t, probs, grad)[0] for t in (row_probs, want_probs))
    dead = mask & (probs.detach() == 0)  # they keep a gradient there
    assert_same_bits(got, exact.masked_fill(dead, 0))


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens, device):
    probs, chosen, _ = choice(device, tokens=tokens, zeros=False)
    row_probs, token_of_row, row_of_pair, offsets, _ = functional.permute_routing(probs, chosen, (0, EXPERTS), 4)
    rows = tokens * TOPK
    assert token_of_row.tolist() == [0] * rows + [-1] * (4 - rows)
    assert row_of_pair.tolist() == [[0, 1, 2]] * tokens and int(offsets[-1]) == rows
    assert not row_probs[rows:].any()
    row_probs.sum().backward()
    assert probs.grad.sum() == rows


def test_opcheck(device):
    ops, check = torch.ops.te, torch.library.opcheck
    probs, chosen, _ = choice(device)
    check(ops.permute_routing.default, (probs, chosen, 1, 5, 40, True))
    check(ops.permute_routing_fwd.default, (probs.detach(), chosen, 1, 5, 40, False))
    _, _, back, *_ = functional.permute_routing(probs, chosen, (1, 5), 40)
    check(ops.permute_routing_bwd.default, (randn(40, device=device), chosen, back, EXPERTS))


def test_compiled(device):
    def call(probs, chosen):
        return functional.permute_routing(probs, chosen, (1, 5), 2 * chosen.shape[0])

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (TOKENS, 8):
        probs, chosen, _ = choice(device, tokens=tokens)
        got, want = compiled(probs, chosen), call(probs, chosen)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a.detach(), b.detach())
        grad = randn(2 * tokens, device=device)
        assert_same_bits(*(torch.autograd.grad(t[0], probs, grad)[0] for t in (got, want)))


def test_what_is_kept(device):
    probs, chosen, _ = choice(device)
    with saved_tensors() as saved:
        functional.permute_routing(probs, chosen, (0, EXPERTS), 40)
    assert sorted(tuple(t.shape) for t in saved) == [(TOKENS, TOPK)] * 2
    with saved_tensors() as saved:
        functional.permute_routing(probs.detach(), chosen, (0, EXPERTS), 40)
    assert not saved


def test_views(device):
    """Strided and negated ones give the bits of contiguous ones."""
    probs, chosen, _ = choice(device)
    want = functional.permute_routing(probs, chosen, (0, EXPERTS), 63)
    wide = torch.cat([probs.detach(), probs.detach()], 1).requires_grad_()
    got = functional.permute_routing(wide[:, :EXPERTS], chosen.T.contiguous().T, (0, EXPERTS), 63)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a.detach(), b.detach())
    grad = randn(63, device=device)
    gradients = [torch.autograd.grad(want[0], probs, g, retain_graph=True)[0] for g in (grad, negated_view(grad))]
    assert_same_bits(*gradients)


def test_only_asked_for_cuts_count(device):
    probs, chosen, _ = choice(device)
    reset_split_verdict(device)
    functional.permute_routing(probs, chosen, (0, EXPERTS), 9, count=False)
    assert split_verdict(device) == SplitVerdict(0, 0)
    for _ in range(2):
        functional.permute_routing(probs, chosen, (0, EXPERTS), 9)
    assert split_verdict(device) == SplitVerdict(0, 2 * (TOKENS * TOPK - 9))
    reset_split_verdict(device)


def test_bad_arguments(device):
    probs, chosen, _ = choice(device)
    call = functional.permute_routing
    with refused(ValueError, "permute_routing", "'chosen'", "Long"):
        call(probs, chosen.long(), (0, EXPERTS), 9)
    with refused(ValueError, "permute_routing", "'chosen'", "[63]"):
        call(probs, chosen.flatten(), (0, EXPERTS), 9)
    with refused(ValueError, "permute_routing", "'probs'", "[20, 7]", "[21, 7"):
        call(probs[1:], chosen, (0, EXPERTS), 9)
    with refused(ValueError, "permute_routing", "'probs'", "[21, 7]", "[21, 8"):
        call(probs, chosen, (0, 8), 9)
    with refused(ValueError, "permute_routing", "'probs'", "Double"):
        call(probs.double(), chosen, (0, EXPERTS), 9)
    for experts in ((3, 3), (-1, 4), (0, 2000)):
        with refused(ValueError, "permute_routing", "'last_expert'", experts[1]):
            call(probs, chosen, experts, 9)
    with refused(ValueError, "permute_routing", "'rows'", "-1"):
        call(probs, chosen, (0, EXPERTS), -1)
