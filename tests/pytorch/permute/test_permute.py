"""Tokens to the order of their experts and back, by a mask and by ids: values and gradients against float64 oracles in
plain PyTorch, every dtype, dropped and missing rows, probabilities, padding."""

import pytest
import torch
from support import assert_same_bits, assert_within, layouts, rounding, sum_error, wide

import transformer_engine.pytorch as te

from .cases import (
    DTYPES,
    ids_of,
    mask_of,
    pairs_of_ids,
    pairs_of_mask,
    probs_of,
    randn,
    rows_oracle,
    sum_bound,
    tokens_oracle,
)

# tokens, experts, topk, hidden
SHAPES = (
    (13, 5, 2, 16),
    (130, 8, 3, 33),
    (1, 4, 4, 7),
    (0, 4, 2, 8),
    (37, 64, 32, 1),
    (5, 1, 1, 40),
    (200, 40, 6, 130),
)
ROWS = ("fewer", "all", "more")


def row_count(pairs, rows):
    return max(1, {"fewer": pairs - pairs // 3 - 1, "all": pairs, "more": pairs + 11}[rows])


def gradients(output, inputs, grad):
    return torch.autograd.grad(output, inputs, grad)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_mask(device, shape, dtype, rows):
    tokens, experts, topk, hidden = shape
    mask = mask_of(tokens, experts, topk, device)
    token, _ = pairs_of_mask(mask)
    count = row_count(tokens * topk, rows)
    inp = randn(tokens, hidden, dtype=dtype, device=device, requires_grad=True)
    out, row_id_map = te.moe_permute(inp, mask, count)
    assert out.shape == (count, hidden) and row_id_map.dtype is torch.int32
    assert tuple(row_id_map.shape) == (tokens, 2 * experts + 1)
    assert_same_bits(out, rows_oracle(inp, token, count))
    grad = randn(count, hidden, dtype=dtype, device=device)
    (dinp,) = gradients(out, inp, grad)
    ones = torch.ones(token.numel(), dtype=torch.float64)
    want = tokens_oracle(wide(grad), token, ones, tokens)
    assert_within(dinp, want, sum_bound(wide(grad), token, ones, tokens, topk, dtype), "dinp")

    back = te.moe_unpermute(out.detach().requires_grad_(), row_id_map, restore_shape=inp.shape)
    want = tokens_oracle(wide(out), token, ones, tokens)
    assert_within(back, want, sum_bound(wide(out), token, ones, tokens, topk, dtype), "unpermute")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_unpermute_of_a_permute_is_topk_times_the_input(device, shape, dtype):
    tokens, experts, topk, hidden = shape
    mask = mask_of(tokens, experts, topk, device, skew=True)
    inp = randn(tokens, hidden, dtype=dtype, device=device)
    out, row_id_map = te.moe_permute(inp, mask, max(1, tokens * topk))
    got = te.moe_unpermute(out, row_id_map, restore_shape=inp.shape)
    assert_within(got, wide(inp) * topk, rounding(wide(inp) * topk, dtype) + sum_error(wide(inp) * topk, topk))


@pytest.mark.parametrize("map_dtype", (torch.bool, torch.uint8, torch.int32))
def test_masks_of_every_dtype_and_layout(device, map_dtype):
    mask, inp = mask_of(50, 9, 3, device), randn(50, 8, device=device)
    want, want_map = te.moe_permute(inp, mask, 150)
    for name, given in (("plain", mask.to(map_dtype)), *layouts(mask.to(map_dtype))):
        out, row_id_map = te.moe_permute(inp, given, torch.tensor(150))
        assert torch.equal(out, want) and torch.equal(row_id_map, want_map), name


def test_maps_are_as_documented(device):
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 0, 1]], device=device).bool()
    _, row_id_map = te.moe_permute(randn(3, 4, device=device), mask, 3)
    assert row_id_map.tolist() == [[0, 1, -1, 0, 2, -1, 2], [-1] * 6 + [0], [2, -1, -1, 2, -1, -1, 1]]
    _, row_id_map = te.moe_permute(
        randn(2, 4, device=device), torch.tensor([[2, 0], [0, 7]], device=device).int(), 0, map_type="index"
    )
    assert row_id_map.tolist() == [2, 0, 1, 3]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_ids(device, shape, dtype, rows):
    tokens, experts, topk, hidden = shape
    ids = ids_of(tokens, experts, topk, device)
    token, place = pairs_of_ids(ids)
    count = row_count(tokens * topk, rows)
    inp = randn(tokens, hidden, dtype=dtype, device=device, requires_grad=True)
    out, row_id_map = te.moe_permute(inp, ids, 0 if rows == "all" else count, map_type="index")
    count = tokens * topk if rows == "all" else count
    assert tuple(row_id_map.shape) == (tokens * topk,)
    assert_same_bits(out, rows_oracle(inp, token, count))
    grad = randn(count, hidden, dtype=dtype, device=device)
    (dinp,) = gradients(out, inp, grad)
    ones = torch.ones(token.numel(), dtype=torch.float64)
    want = tokens_oracle(wide(grad), token, ones, tokens)
    assert_within(dinp, want, sum_bound(wide(grad), token, ones, tokens, topk, dtype), "dinp")

    probs = torch.rand(tokens, topk).to(device).requires_grad_()
    rows_in = out.detach().requires_grad_()
    back = te.moe_unpermute(rows_in, row_id_map, probs, map_type="index")
    weights = wide(probs)[token, place]
    want = tokens_oracle(wide(out), token, weights, tokens)
    assert_within(back, want, sum_bound(wide(out), token, weights, tokens, topk, dtype), "unpermute")
    check_merging_gradients(back, rows_in, probs, (token, place), dtype)


def check_merging_gradients(back, rows, probs, pairs, dtype):
    token, column = pairs
    grad = randn(*back.shape, dtype=dtype, device=back.device)
    drows, dprobs = torch.autograd.grad(back, (rows, probs), grad)
    n, hidden = min(token.numel(), rows.shape[0]), rows.shape[1]
    token, column = token[:n], column[:n]
    want = torch.zeros(rows.shape, dtype=torch.float64)
    want[:n] = wide(grad)[token] * wide(probs)[token, column][:, None]
    # A product of two values of float32, rounded to it if dtype is narrower, then to dtype.
    assert_within(drows, want, rounding(want, dtype) * (1 + 2.0**-20) + rounding(want, torch.float32), "drows")
    products = wide(grad)[token] * wide(rows)[:n]
    want, magnitude = torch.zeros(2, *probs.shape, dtype=torch.float64)
    want[token, column], magnitude[token, column] = products.sum(1), products.abs().sum(1)
    assert_within(dprobs, want, sum_error(magnitude, hidden + 8) + rounding(want.abs() + magnitude * 1e-4, probs.dtype))
    assert bool((dprobs.cpu()[magnitude == 0] == 0).all())


def test_ids_without_probabilities_are_one_row_a_token(device):
    ids, inp = ids_of(6, 5, 2, device), randn(6, 8, device=device)
    out, row_id_map = te.moe_permute(inp, ids, 0, map_type="index")
    back = te.moe_unpermute(out, row_id_map, map_type="index")
    assert torch.equal(back, inp.repeat_interleave(2, 0))


@pytest.mark.parametrize("probs_dtype", (*DTYPES, torch.float64))
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_probabilities(device, shape, rows, probs_dtype):
    """They move with their rows; where one is 0, the row is 0 and has no gradient."""
    tokens, experts, topk, hidden = shape
    mask = mask_of(tokens, experts, topk, device)
    token, expert = pairs_of_mask(mask)
    count = row_count(tokens * topk, rows)
    probs = probs_of(mask, probs_dtype)
    probs[::3] = torch.where(torch.rand(probs[::3].shape, device=device) < 0.5, -0.0, probs[::3])
    probs.requires_grad_()
    inp = randn(tokens, hidden, device=device, requires_grad=True)
    out, row_probs, _ = te.moe_permute_with_probs(inp, probs, mask, count)
    n = min(count, token.numel())
    alive = torch.zeros(token.numel(), dtype=torch.bool)
    alive[:n] = probs.detach().cpu()[token, expert][:n] != 0
    want = torch.zeros(count, dtype=probs_dtype)
    want[:n] = probs.detach().cpu()[token, expert][:n]
    assert_same_bits(row_probs, want)
    want = rows_oracle(inp.detach().cpu(), token, count)
    want[:n][~alive[:n]] = 0
    assert_same_bits(out, want)

    grads = randn(count, hidden, device=device), randn(count, dtype=probs_dtype, device=device)
    dinp, dprobs = torch.autograd.grad((out, row_probs), (inp, probs), grads)
    want = tokens_oracle(wide(grads[0]), token, alive.double(), tokens)
    assert_within(dinp, want, sum_bound(wide(grads[0]), token, alive.double(), tokens, topk, torch.float32))
    want = torch.zeros(probs.shape, dtype=probs_dtype)
    want[token[:n], expert[:n]] = grads[1].cpu()[:n]
    assert_same_bits(dprobs, want)


@pytest.mark.parametrize("probs_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_merging_probabilities(device, shape, dtype, probs_dtype):
    tokens, experts, topk, hidden = shape
    mask = mask_of(tokens, experts, topk, device, skew=True)
    pairs = pairs_of_mask(mask)
    count = row_count(tokens * topk, "fewer" if tokens == 13 else "more")
    _, row_id_map = te.moe_permute(randn(tokens, hidden, device=device), mask, count)
    rows = randn(count, hidden, dtype=dtype, device=device, requires_grad=True)
    probs = probs_of(mask, probs_dtype, requires_grad=True)
    back = te.moe_unpermute(rows, row_id_map, probs, restore_shape=(tokens, hidden))
    weights = wide(probs)[pairs]
    want = tokens_oracle(wide(rows), pairs[0], weights, tokens)
    assert_within(back, want, sum_bound(wide(rows), pairs[0], weights, tokens, topk, dtype), "unpermute")
    check_merging_gradients(back, rows, probs, pairs, dtype)


@pytest.mark.parametrize("align", (1, 8, 16, 48))
@pytest.mark.parametrize("shape", SHAPES)
def test_padding(device, shape, align):
    tokens, experts, topk, hidden = shape
    mask = mask_of(tokens, experts, topk, device, skew=True)
    token, expert = pairs_of_mask(mask)
    counts = mask.sum(0)
    inp = randn(tokens, hidden, device=device, requires_grad=True)
    probs = probs_of(mask, requires_grad=True)
    out, row_probs, row_id_map, pad_offsets, target = te.moe_permute_and_pad_with_probs(inp, probs, mask, counts, align)
    assert torch.equal(target, (counts + align - 1) // align * align) and target.dtype is torch.int64
    assert (pad_offsets is None) == torch.equal(target, counts)
    begins = (target.cumsum(0) - target).cpu()
    place = begins[expert] + torch.arange(token.numel()) - (counts.cumsum(0) - counts).cpu()[expert]
    want = torch.zeros(int(target.sum()), hidden)
    want[place] = inp.detach().cpu()[token]
    assert_same_bits(out, want)
    want = torch.zeros(int(target.sum()))
    want[place] = probs.detach().cpu()[token, expert]
    assert_same_bits(row_probs, want)
    options = {"restore_shape": inp.shape, "pad_offsets": pad_offsets}
    back = te.moe_unpermute(out, row_id_map, **options)
    assert_within(back, wide(inp) * topk, rounding(wide(inp) * topk, torch.float32) * topk)
    ours = torch.autograd.grad(back.sum() + (row_probs * 2).sum(), (inp, probs))
    # topk squared: out's gradient is 1 a row
    assert_within(ours[0], torch.full_like(inp, topk, dtype=torch.float64), 0.0)
    assert torch.equal(ours[1], mask * 2.0)
    static = int(target.sum()) + 5
    again = te.moe_permute_and_pad_with_probs(inp, probs, mask, counts, align, num_out_tokens=static)
    assert again[0].shape[0] == static and torch.equal(again[0][:-5], out) and not again[0][-5:].any()
    assert again[3] is not None and torch.equal(again[4], target)


def test_four_thousand_tokens(device):
    tokens, experts, topk, hidden = 4096, 128, 8, 64
    mask = mask_of(tokens, experts, topk, device, skew=True)
    token, expert = pairs_of_mask(mask)
    inp = randn(tokens, hidden, dtype=torch.bfloat16, device=device)
    probs = probs_of(mask)
    out, _, row_id_map = te.moe_permute_with_probs(inp, probs, mask, tokens * topk)
    assert torch.equal(out.cpu(), inp.cpu()[token])
    weights = wide(probs)[token, expert]
    back = te.moe_unpermute(out, row_id_map, probs, restore_shape=inp.shape)
    bound = sum_bound(wide(out), token, weights, tokens, topk, torch.bfloat16)
    assert_within(back, tokens_oracle(wide(out), token, weights, tokens), bound)


@pytest.mark.parametrize("hidden", (16384, 16383))
def test_wide_rows(device, hidden):
    mask = mask_of(9, 4, 2, device)
    pairs = pairs_of_mask(mask)
    rows = randn(18, hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
    probs = probs_of(mask, requires_grad=True)
    _, row_id_map = te.moe_permute(rows[:9], mask, 18)
    back = te.moe_unpermute(rows, row_id_map, probs, restore_shape=(9, hidden))
    weights = wide(probs)[pairs]
    want = tokens_oracle(wide(rows), pairs[0], weights, 9)
    assert_within(back, want, sum_bound(wide(rows), pairs[0], weights, 9, 2, torch.bfloat16))
    check_merging_gradients(back, rows, probs, pairs, torch.bfloat16)


def test_every_layout(device):
    mask = mask_of(20, 6, 2, device)
    inp, probs = randn(20, 24, dtype=torch.bfloat16, device=device), probs_of(mask)
    out, row_probs, row_id_map = te.moe_permute_with_probs(inp, probs, mask, 40)
    back = te.moe_unpermute(out, row_id_map, probs, restore_shape=inp.shape)
    for (name, x), (_, p), (_, rows), (_, ids) in zip(*map(layouts, (inp, probs, out, row_id_map)), strict=True):
        got = te.moe_permute_with_probs(x, p, mask, 40)
        assert torch.equal(got[0], out) and torch.equal(got[1], row_probs), name
        assert torch.equal(te.moe_unpermute(rows, ids, p, restore_shape=inp.shape), back), name
    x, p = inp.clone().requires_grad_(), probs.clone().requires_grad_()
    results = te.moe_permute_with_probs(x, p, mask, 40)
    (results[0].sum() + results[1].sum()).backward()  # gradients with strides of 0
    assert torch.equal(x.grad, torch.full_like(x, 2)) and torch.equal(p.grad, mask.float())
