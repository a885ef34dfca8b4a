"""Chunks of rows in another order, and the map by rows of expert ids."""

import pytest
import torch
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.pytorch import functional

from .cases import DTYPES, ids_of, randn

# split_sizes, rows
CHUNKS = (
    ((3, 1, 4), 8),
    ((0, 5, 0, 0, 2, 1), 11),
    ((7,), 7),
    ((0, 0), 3),
    ((), 0),
    ((), 4),
    ((0,), 0),
    (tuple(i * 7 % 5 for i in range(300)), 700),
)


def oracle(inp, sizes, order):
    parts = inp.split([*sizes, inp.shape[0] - sum(sizes)])
    return torch.cat([*(parts[i] for i in order), parts[-1]])


@pytest.mark.parametrize("place", ("host", "device"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunks", CHUNKS, ids=lambda c: f"{len(c[0])}of{c[1]}")
def test_sorts_chunks(device, chunks, dtype, place):
    sizes, rows = chunks
    order = torch.randperm(len(sizes))
    split_sizes = torch.tensor(sizes, dtype=torch.int32 if place == "host" else torch.int64)
    where = "cpu" if place == "host" else device
    indices = split_sizes.to(where), order.to(where)
    inp = randn(rows, 17, dtype=dtype, device=device, requires_grad=True)
    probs = randn(rows, device=device, requires_grad=True)
    out = te.moe_sort_chunks_by_index(inp, *indices)
    assert_same_bits(out, oracle(inp.detach(), sizes, order.tolist()))
    both = te.moe_sort_chunks_by_index_with_probs(inp, probs, *indices)
    assert_same_bits(both[0], out)
    assert_same_bits(both[1], oracle(probs.detach(), sizes, order.tolist()))

    grads = randn(rows, 17, dtype=dtype, device=device), randn(rows, device=device)
    dinp, dprobs = torch.autograd.grad(both, (inp, probs), grads)
    want = torch.autograd.grad(
        [oracle(t, sizes, order.tolist()) for t in (inp, probs)], (inp, probs), grads, allow_unused=rows == 0
    )
    assert_same_bits(dinp, want[0])
    assert_same_bits(dprobs, want[1])

    inverse = order.argsort()
    back = te.moe_sort_chunks_by_index(out, split_sizes[order].to(where), inverse.to(where))
    assert_same_bits(back, inp)


WIDTHS = (torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)


@pytest.mark.parametrize("dtype", (*WIDTHS, torch.float64, *COMPLEX), ids=str)
def test_any_dtype_of_rows_and_probabilities(device, dtype):
    inp = torch.arange(24, device=device).view(8, 3).to(dtype)
    sizes, order = torch.tensor([2, 6]), torch.tensor([1, 0])
    assert_same_bits(te.moe_sort_chunks_by_index(inp, sizes, order), torch.cat((inp[2:], inp[:2])))
    narrow = inp.repeat_interleave(2, 1)[:, 1::7]  # one column, with a pitch
    assert_same_bits(te.moe_sort_chunks_by_index(narrow, sizes, order), torch.cat((narrow[2:], narrow[:2])))
    probs = torch.rand(8, dtype=torch.float64).to(device)
    assert_same_bits(
        te.moe_sort_chunks_by_index_with_probs(inp, probs, sizes, order)[1], torch.cat((probs[2:], probs[:2]))
    )


@pytest.mark.parametrize("dtype", COMPLEX[1:], ids=str)
def test_gradients_of_complex_rows(device, dtype):
    """The rows are a conjugate view, and so is the incoming gradient."""
    inp, incoming = (torch.randn(8, 3, dtype=dtype).to(device) for _ in range(2))
    inp.requires_grad_()
    out = te.moe_sort_chunks_by_index(inp.conj(), torch.tensor([2, 6]), torch.tensor([1, 0]))
    (got,) = torch.autograd.grad(out, inp, incoming.conj())
    assert torch.equal(out, torch.cat((inp[2:], inp[:2])).conj())
    assert torch.equal(got, torch.cat((incoming[-2:], incoming[:-2])))


def row_map_oracle(ids, experts, rows):
    first, last = experts
    token_of_row, row_of_pair = [], torch.full(ids.shape, -1, dtype=torch.int32)
    offsets, panels = [0], 0
    for expert in range(first, last):
        for token, place in (ids == expert).nonzero().tolist():
            if len(token_of_row) < rows:
                row_of_pair[token, place] = len(token_of_row)
                token_of_row.append(token)
        panels += -(-(len(token_of_row) - offsets[-1]) // 128)
        offsets.append(len(token_of_row))
    token_of_row += [-1] * (rows - len(token_of_row))
    return [torch.tensor(t, dtype=torch.int32) for t in (token_of_row, row_of_pair.tolist(), offsets, [panels])]


@pytest.mark.parametrize("experts", ((0, 16), (3, 9), (15, 16)))
@pytest.mark.parametrize("rows", (0, 5, 301, 4000))
@pytest.mark.parametrize("tokens", (0, 1, 700))
def test_map_by_rows(device, tokens, rows, experts):
    ids = ids_of(tokens, 16, 4)
    ids[::5, 1] = -1  # a pair without an expert
    got = functional.permute_row_map(ids.to(device), experts, rows)
    for ours, want in zip(got, row_map_oracle(ids, experts, rows), strict=True):
        assert torch.equal(ours.cpu(), want.view(ours.shape))


def test_rows_by_the_map_by_rows(device):
    """Its two directions: rows gathered by their tokens are the tokens permuted by their pairs."""
    ids, inp = ids_of(60, 8, 3, device), randn(60, 12, device=device)
    token_of_row, row_of_pair, _, _ = functional.permute_row_map(ids, (2, 7), 150)
    gathered = torch.ops.te.permute_gather_fwd(inp, token_of_row)
    permuted, _ = functional.permute(inp, row_of_pair, 150, of_mask=False)
    assert_same_bits(gathered, permuted)
