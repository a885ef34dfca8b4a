"""Bad input of the functions of permute: named errors before anything is computed, and maps whose contents no function
wrote, which must not lead out of a tensor."""

import numpy as np
import pytest
import torch
from support import refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch import functional
from transformer_engine.pytorch.verdict import SplitVerdict, reset_split_verdict, split_verdict

from .cases import ids_of, mask_of, probs_of, randn


@pytest.fixture
def case(device):
    mask = mask_of(9, 5, 2, device)
    inp = randn(9, 6, device=device)
    rows, row_id_map = te.moe_permute(inp, mask, 18)
    return inp, mask, probs_of(mask), rows, row_id_map


def test_masks(case):
    inp, mask, _, _, _ = case
    with refused(ValueError, "moe_permute", "routing_map", "float32", "> 0"):
        te.moe_permute(inp, mask.float(), 18)
    for wrong in (mask[:8], mask[0], mask.new_zeros(9, 0), mask.new_zeros(9, 1025)):
        with refused(ValueError, "moe_permute", "routing_map", str(tuple(wrong.shape)), "1024"):
            te.moe_permute(inp, wrong, 18)
    with refused(ValueError, "moe_permute", "map_type", "'ids'"):
        te.moe_permute(inp, mask, 18, map_type="ids")
    with refused(ValueError, "moe_permute", "inp", "(9,)"):
        te.moe_permute(inp[:, 0], mask, 18)
    with refused(TypeError, "moe_permute", "routing_map", "list"):
        te.moe_permute(inp, mask.tolist(), 18)
    with refused(ValueError, "permute", "inp", "float32"):
        te.moe_permute(inp.double(), mask, 18)


@pytest.mark.parametrize("rows", (0, -1, 2.5, None, torch.tensor([18]), torch.tensor(18.0)))
def test_counts_of_rows(case, rows):
    with refused(ValueError, "moe_permute", "num_out_tokens"):
        te.moe_permute(case[0], case[1], rows)


def test_ids(device):
    inp, ids = randn(9, 6, device=device), ids_of(9, 5, 2, device)
    for wrong, words in ((ids.float(), "float32"), (ids[:8], "(8, 2)"), (ids[0], "(2,)"), (ids > 0, "bool")):
        with refused(ValueError, "moe_permute", "routing_map", words):
            te.moe_permute(inp, wrong, 0, map_type="index")
    with refused(ValueError, "moe_permute", "num_out_tokens", "-1"):
        te.moe_permute(inp, ids, -1, map_type="index")
    with pytest.warns(UserWarning, match="cast to int32"):
        out, _ = te.moe_permute(inp, ids.long(), 0, map_type="index")
    assert torch.equal(out, te.moe_permute(inp, ids, 0, map_type="index")[0])


@pytest.mark.parametrize("wrong", (-1, 1024, 2**31 - 1))
def test_ids_out_of_range(device, wrong):
    inp, ids = randn(9, 6, device=device), ids_of(9, 5, 2, device)
    ids[4, 1] = wrong
    if device == "cpu":
        with refused(ValueError, "moe_permute", "routing_map", f"{wrong} for token 4", "0 to 1023"):
            te.moe_permute(inp, ids, 0, map_type="index")
    else:  # the pair has no row, and is counted
        reset_split_verdict(device)
        out, row_id_map = te.moe_permute(inp, ids, 0, map_type="index")
        assert row_id_map[9] == -1 and not out[-1].any()
        assert split_verdict(device) == SplitVerdict(0, 1)
        reset_split_verdict(device)


def test_probabilities(case):
    inp, mask, probs, rows, row_id_map = case
    for wrong, words in ((probs[:8], "(8, 5)"), (probs[:, :4], "(9, 4)"), (mask, "bool")):
        with refused(ValueError, "moe_permute_with_probs", "probs", words):
            te.moe_permute_with_probs(inp, wrong, mask, 18)
        with refused(ValueError, "moe_unpermute", "merging_probs", words):
            te.moe_unpermute(rows, row_id_map, wrong, restore_shape=inp.shape)
    with refused(ValueError, "moe_unpermute", "merging_probs", "probs"):
        te.moe_unpermute(rows, row_id_map, probs, inp.shape, probs=probs)
    with pytest.warns(DeprecationWarning, match="merging_probs"):
        old = te.moe_unpermute(rows, row_id_map, restore_shape=inp.shape, probs=probs)
    assert torch.equal(old, te.moe_unpermute(rows, row_id_map, probs, inp.shape))
    double = te.moe_unpermute(rows, row_id_map, probs.double(), inp.shape)
    assert torch.equal(double, old) and double.dtype is torch.float32


def test_maps(case):
    inp, _, probs, rows, row_id_map = case
    with refused(ValueError, "moe_unpermute", "restore_shape", "(18, 6)", "(9, 6)"):
        te.moe_unpermute(rows, row_id_map)
    with refused(ValueError, "moe_unpermute", "restore_shape", "(8, 6)"):
        te.moe_unpermute(rows, row_id_map, restore_shape=(8, 6))
    for wrong in (3, 9.5):
        with refused(ValueError, "moe_unpermute", "restore_shape", repr(wrong), "(9, 6)"):
            te.moe_unpermute(rows, row_id_map, restore_shape=wrong)
    wanted = te.moe_unpermute(rows, row_id_map, restore_shape=(9, 6))
    for shape in (np.array([9, 6]), torch.tensor([9, 6])):
        assert torch.equal(te.moe_unpermute(rows, row_id_map, restore_shape=shape), wanted)
    for wrong in (np.array([8, 6]), torch.tensor([8, 6]), np.array([9.5, 6]), np.array([[9, 6]]), torch.tensor(9)):
        with refused(ValueError, "moe_unpermute", "'restore_shape'", "(9, 6)"):
            te.moe_unpermute(rows, row_id_map, restore_shape=wrong)
    for wrong in (row_id_map[:, :-1], row_id_map.view(-1), row_id_map[:, :1]):
        with refused(ValueError, "moe_unpermute", "row_id_map", "2 E + 1"):
            te.moe_unpermute(rows, wrong, restore_shape=inp.shape)
    with refused(ValueError, "moe_unpermute", "row_id_map", "int64"):
        te.moe_unpermute(rows, row_id_map.long(), restore_shape=inp.shape)
    with refused(ValueError, "moe_unpermute", "row_id_map", "(9, 11)"):
        te.moe_unpermute(rows, row_id_map, map_type="index")
    with refused(ValueError, "moe_unpermute", "merging_probs", "(9, 5)", "18 pairs"):
        te.moe_unpermute(rows, row_id_map[:, :2].reshape(-1), probs, map_type="index")
    with refused(ValueError, "moe_unpermute", "pad_offsets"):
        te.moe_unpermute(rows, row_id_map[:, 0].contiguous(), map_type="index", pad_offsets=row_id_map[0].long())
    with refused(ValueError, "moe_unpermute", "pad_offsets", "int32"):
        te.moe_unpermute(rows, row_id_map, restore_shape=inp.shape, pad_offsets=row_id_map[0, :5])


@pytest.mark.parametrize("column, value", ((10, 6), (10, -1), (5, 5), (5, -2), (5, 2**31 - 1)))
def test_maps_of_other_contents(case, device, column, value):
    """On a GPU they are not checked, and lead to no address outside of the tensors."""
    inp, _, probs, rows, row_id_map = case
    wrong = row_id_map.clone()
    wrong[3, column] = value
    if device == "cpu":
        with refused(ValueError, "te_permute_unpermute", "map.rows", "token 3"):
            te.moe_unpermute(rows, wrong, probs, restore_shape=inp.shape)
    else:
        got = te.moe_unpermute(rows, wrong, probs, restore_shape=inp.shape)
        want = te.moe_unpermute(rows, row_id_map, probs, restore_shape=inp.shape)
        assert torch.equal(got[4:], want[4:])


def test_rows_of_two_pairs(case, device):
    inp, mask, _, _, _ = case
    row_map = functional.permute_mask_map(mask)
    row_map[1, 0] = row_map[0, 0]
    if device == "cpu":
        with refused(ValueError, "te_permute_forward", "map.rows", "token 1"):
            functional.permute(inp, row_map, 18, of_mask=True)


def test_padding(case):
    inp, mask, probs, _, _ = case
    counts = mask.sum(0)
    for wrong in (0, -4, 2.0):
        with refused(ValueError, "moe_permute_and_pad_with_probs", "align_size", str(wrong)):
            te.moe_permute_and_pad_with_probs(inp, probs, mask, counts, wrong)
    for wrong in (counts[:4], counts.float()):
        with refused(ValueError, "moe_permute_and_pad_with_probs", "tokens_per_expert"):
            te.moe_permute_and_pad_with_probs(inp, probs, mask, wrong, 4)
    if inp.is_cpu:
        with refused(ValueError, "moe_permute_and_pad_with_probs", "tokens_per_expert", "column sums"):
            te.moe_permute_and_pad_with_probs(inp, probs, mask, counts + 1, 4)


def test_chunks(device):
    inp = randn(9, 6, device=device)
    sizes, order = torch.tensor([4, 5]), torch.tensor([1, 0])
    op = "moe_sort_chunks_by_index"
    for wrong in (torch.tensor([0, 0]), torch.tensor([0, 2]), torch.tensor([-1, 0])):
        with refused(ValueError, op, "sorted_index", "permutation of 0 to 1"):
            te.moe_sort_chunks_by_index(inp, sizes, wrong)
    for wrong in (torch.tensor([-1, 5]), torch.tensor([4, 6])):
        with refused(ValueError, op, "split_sizes", "sum of at most 9"):
            te.moe_sort_chunks_by_index(inp, wrong, order)
    for wrong in (sizes.float(), sizes[None]):
        with refused(ValueError, op, "split_sizes", "integers"):
            te.moe_sort_chunks_by_index(inp, wrong, order)
    with refused(ValueError, op, "sorted_index", "[2]"):
        te.moe_sort_chunks_by_index(inp, sizes, torch.tensor([0]))
    with refused(ValueError, f"{op}_with_probs", "probs", "(8,)"):
        te.moe_sort_chunks_by_index_with_probs(inp, inp[:8, 0], sizes, order)


@pytest.mark.gpu
def test_chunks_of_the_device_are_counted():
    """Where the host may not look: sizes below 0, and what is cut or left out; not by good chunks or recomputations."""
    inp = randn(9, 6, device="cuda", requires_grad=True)
    for sizes, order, wanted in (
        ([4, 5], [1, 0], (0, 0)),
        ([4, 6], [1, 0], (0, 1)),
        ([-1, 5], [1, 0], (1, 0)),
        ([4, 5], [0, 0], (0, 6)),
        ([4, 5], [0, 2], (0, 6)),
        ([4, 0], [0, 0], (0, 1)),
    ):
        reset_split_verdict("cuda")
        arguments = (torch.tensor(t, device="cuda") for t in (sizes, order))
        out = te.checkpoint(te.moe_sort_chunks_by_index, inp, *arguments, use_reentrant=False)
        out.sum().backward()
        assert tuple(split_verdict("cuda")) == wanted, (sizes, order)
    reset_split_verdict("cuda")


def test_ranges_of_experts(device):
    ids = ids_of(9, 5, 2, device)
    for wrong in ((3, 3), (-1, 4), (0, 1025)):
        with refused(ValueError, "permute_row_map", "last_expert", str(wrong[1])):
            functional.permute_row_map(ids, wrong, 18)
