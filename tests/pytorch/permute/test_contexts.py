"""permute and PyTorch around it: opcheck, torch.compile, autocast, what is kept, gradients that are not needed."""

import pytest
import torch
from support import assert_same_bits, negated_view, refused, saved_tensors

import transformer_engine.pytorch as te
from transformer_engine.pytorch import functional

from .cases import ids_of, mask_of, probs_of, randn


def test_opcheck(device):
    ops, check = torch.ops.te, torch.library.opcheck
    mask = mask_of(9, 5, 2, device)
    inp, rows = (randn(n, 6, device=device, requires_grad=True) for n in (9, 20))
    probs = probs_of(mask, requires_grad=True)
    ids, pad = ids_of(9, 5, 2, device), torch.tensor([0, 1, 1, 2, 2], device=device)
    check(ops.permute_mask_map.default, (mask,))
    check(ops.permute_row_map.default, (ids, 1, 4, 12, False))
    row_map, pairs = functional.permute_mask_map(mask), functional.permute_row_map(ids, (0, 5), 18)[1]
    plain = inp.detach(), rows.detach(), probs.detach()
    for args in ((row_map, True, probs, pad, 20), (row_map, True, None, None, 20), (pairs, False, None, None, 18)):
        check(ops.permute.default, (inp, *args))
        given = [a.detach() if a is probs else a for a in args]
        check(ops.permute_fwd.default, (plain[0], *given[:-1], None, given[-1]))
    scales = randn(1, 12, device=device)
    check(ops.permute_fwd.default, (plain[0].to(torch.uint8), row_map, True, None, None, scales, 20))
    check(ops.permute_probs_bwd.default, (randn(20, device=device), row_map, pad))
    weights = torch.rand(9, 2, device=device).requires_grad_()
    for args in ((row_map, True, probs, pad), (row_map, True, None, None), (pairs, False, weights, None)):
        check(ops.unpermute.default, (rows, *args))
        given = [a.detach() if a is probs or a is weights else a for a in args]
        check(ops.unpermute_fwd.default, (plain[1], *given, None))
    for to_rows, with_rows in ((True, True), (False, True), (True, False)):
        args = (plain[0], row_map, True, plain[1] if with_rows else None, plain[2], pad, 20, to_rows)
        check(ops.unpermute_bwd.default, args)
    sizes, order = torch.tensor([3, 6], device=device), torch.tensor([1, 0], device=device)
    check(ops.permute_chunk_map.default, (sizes, order, 9))
    maps = functional.permute_chunk_map(sizes, order, 9)
    check(ops.permute_gather.default, (inp, *maps, randn(9, device=device, requires_grad=True)))
    check(ops.permute_gather.default, (inp, *maps, None))
    check(ops.permute_gather_fwd.default, (plain[0], maps[0]))


def views_of(t):
    """t's values in views that the engine cannot read as they are; of its first row too, with strides of 0."""
    yield t, negated_view(t)
    first = t[:1].expand_as(t)
    yield first.contiguous(), first


def test_gradients_that_are_views(device):
    """Negated ones, and those with strides of 0, give the bits of contiguous ones; so do the inputs."""
    mask = mask_of(9, 5, 2, device)
    sizes, order = mask.sum(0), torch.arange(4, -1, -1, device=device)

    def steps(inp, probs, grads):
        inp, probs = (t.detach().requires_grad_() for t in (inp, probs))
        rows, row_probs, back = te.moe_permute_with_probs(inp, probs, mask, 18)
        moved = te.moe_sort_chunks_by_index_with_probs(inp, inp[:, 0], sizes.new_tensor([2, 7]), order[-2:])
        sums = te.moe_unpermute(rows.detach().requires_grad_(), back, probs, restore_shape=inp.shape)
        outs = rows, row_probs, *moved, sums
        return [*outs, *torch.autograd.grad(outs, (inp, probs), grads)]

    inp, probs = randn(9, 6, device=device), probs_of(mask)
    shapes = (18, 6), (18,), (9, 6), (9,), (9, 6)
    plain = [randn(*shape, device=device) for shape in shapes]
    for i in range(2):
        pairs = [list(views_of(t))[i] for t in plain]
        want = steps(inp, probs, [pair[0] for pair in pairs])
        for got, exact in zip(steps(inp, probs, [pair[1] for pair in pairs]), want, strict=True):
            assert_same_bits(got, exact)
    want = steps(inp, probs, plain)
    for got, exact in zip(steps(negated_view(inp), negated_view(probs), plain), want, strict=True):
        assert_same_bits(got, exact)


def layer(inp, probs, mask, ids, weights):
    """All functions of a layer, with rows that depend on T."""
    tokens = inp.shape[0]
    out, row_probs, row_id_map = te.moe_permute_with_probs(inp, probs, mask, tokens * 2)
    sizes, order = mask.sum(0), torch.arange(mask.shape[1] - 1, -1, -1, device=inp.device)
    out, row_probs = te.moe_sort_chunks_by_index_with_probs(out, row_probs, sizes, order)
    out = te.moe_sort_chunks_by_index(out * row_probs[:, None], sizes.flip(0), order)
    first = te.moe_unpermute(out, row_id_map, probs, restore_shape=inp.shape)
    out, row_id_map = te.moe_permute(inp, ids, 0, map_type="index")
    padded = te.moe_permute_and_pad_with_probs(inp, probs, mask, mask.sum(0), 4, num_out_tokens=tokens * 2 + 20)
    third = te.moe_unpermute(padded[0], padded[2], restore_shape=inp.shape, pad_offsets=padded[3])
    return first + te.moe_unpermute(out, row_id_map, weights, map_type="index") + third


def inputs(tokens, device):
    mask = mask_of(tokens, 6, 2, device)
    inp, probs = randn(tokens, 8, device=device, requires_grad=True), probs_of(mask, requires_grad=True)
    return inp, probs, mask, ids_of(tokens, 6, 2, device), torch.rand(tokens, 2).to(device).requires_grad_()


def test_compiled_with_dynamic_tokens(device):
    stats = torch._dynamo.utils.counters["stats"]  # of the process, which other tests compile in
    before = stats["unique_graphs"]
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for tokens in (12, 31, 40):
        given = inputs(tokens, device)
        leaves = [given[0], given[1], given[4]]
        got, want = compiled(*given), layer(*given)
        torch.testing.assert_close(got, want)
        grads = torch.autograd.grad(got.square().sum(), leaves), torch.autograd.grad(want.square().sum(), leaves)
        for ours, eager in zip(*grads, strict=True):
            torch.testing.assert_close(ours, eager)
    assert 1 <= stats["unique_graphs"] - before <= 2


def test_compiled_with_no_tokens(device):
    given = inputs(0, device)
    got = torch.compile(layer, fullgraph=True)(*given)
    assert got.shape == (0, 8)
    got.sum().backward()
    assert given[0].grad.shape == (0, 8) and given[1].grad.shape == (0, 6)


def test_fake_tensors(device):
    """Eager calls under a dispatch mode go through the dispatcher."""
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty(t.shape, dtype=t.dtype, device=device) for t in inputs(7, "cpu")]
        assert layer(*given).shape == (7, 8)


@pytest.mark.parametrize("map_type", ("mask", "index"))
def test_repeats_its_bits(device, map_type):
    mask, ids = mask_of(300, 7, 3, device), ids_of(300, 7, 3, device)
    inp = randn(300, 24, dtype=torch.bfloat16, device=device)
    routing = mask if map_type == "mask" else ids
    weights = probs_of(mask) if map_type == "mask" else torch.rand(300, 3).to(device)
    results = []
    for _ in range(2):
        out, row_id_map = te.moe_permute(inp, routing, 900, map_type=map_type)
        results.append((out, row_id_map, te.moe_unpermute(out, row_id_map, weights, inp.shape, map_type)))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def test_what_is_kept(device):
    mask = mask_of(9, 5, 2, device)
    inp, probs = randn(9, 6, device=device, requires_grad=True), probs_of(mask, requires_grad=True)
    with saved_tensors() as kept:
        out, row_id_map = te.moe_permute(inp, mask, 18)
    assert [t.data_ptr() for t in kept] == [row_id_map.data_ptr()]
    with saved_tensors() as kept:
        _, row_probs, row_id_map = te.moe_permute_with_probs(inp, probs, mask, 18)
    assert {t.data_ptr() for t in kept} == {row_id_map.data_ptr(), row_probs.data_ptr()}
    with saved_tensors() as kept:
        te.moe_unpermute(out, row_id_map, probs.detach(), restore_shape=inp.shape)
    assert {t.data_ptr() for t in kept} == {row_id_map.data_ptr(), probs.data_ptr()}
    with saved_tensors() as kept:
        te.moe_unpermute(out, row_id_map, probs, restore_shape=inp.shape)
    assert {t.data_ptr() for t in kept} == {row_id_map.data_ptr(), probs.data_ptr(), out.data_ptr()}
    with saved_tensors() as kept:
        te.moe_sort_chunks_by_index(inp, torch.tensor([4, 5]), torch.tensor([1, 0]))
    assert [tuple(t.shape) for t in kept] == [(9,)] and kept[0].dtype is torch.int32


def test_gradients_that_are_not_needed(device):
    mask = mask_of(9, 5, 2, device)
    inp, probs = randn(9, 6, device=device), probs_of(mask)
    rows, row_id_map = te.moe_permute(inp, mask, 18)
    grad = randn(9, 6, device=device)
    both = [t.clone().requires_grad_() for t in (rows, probs)]
    options = {"restore_shape": inp.shape}
    want = torch.autograd.grad(te.moe_unpermute(both[0], row_id_map, both[1], **options), both, grad)
    for which in (0, 1):
        given = [t.detach().requires_grad_(i == which) for i, t in enumerate(both)]
        back = te.moe_unpermute(given[0], row_id_map, given[1], **options)
        assert_same_bits(torch.autograd.grad(back, given[which], grad)[0], want[which])
    x, p = inp.clone().requires_grad_(), probs.clone().requires_grad_()
    out, row_probs, _ = te.moe_permute_with_probs(x, p, mask, 18)
    assert torch.autograd.grad(out.sum(), p, allow_unused=True, retain_graph=True) == (None,)
    assert torch.equal(torch.autograd.grad(row_probs.sum(), p)[0], mask.float())
    assert not te.moe_permute(inp, mask, 18)[0].requires_grad


def test_autocast_changes_nothing(device):
    mask = mask_of(9, 5, 2, device)
    inp, probs = randn(9, 6, device=device), probs_of(mask)
    want = te.moe_permute_with_probs(inp, probs, mask, 18)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = te.moe_permute_with_probs(inp, probs, mask, 18)
        back = te.moe_unpermute(got[0], got[2], probs, restore_shape=inp.shape)
    for ours, theirs in zip(got, want, strict=True):
        assert_same_bits(ours, theirs)
    assert back.dtype is torch.float32


def test_double_backward_is_refused(device):
    mask, inp = mask_of(9, 5, 2, device), randn(9, 6, device=device, requires_grad=True)
    out, _ = te.moe_permute(inp, mask, 18)
    with refused(NotImplementedError, "permute", "double backward"):
        torch.autograd.grad(out.sum(), inp, create_graph=True)


def test_a_changed_probability_of_rows_raises(device):
    mask, inp = mask_of(9, 5, 2, device), randn(9, 6, device=device, requires_grad=True)
    out, row_probs, _ = te.moe_permute_with_probs(inp, probs_of(mask), mask, 18)
    row_probs.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
