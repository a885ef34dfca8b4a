# Tensor-parallel modules on several ranks against the same modules whole. Mutants: a wait left out, the partial sums
# gathered, the bias added before the scatter, norm gradients summed by the module itself, turn these red.
import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import backends, here, on_ranks

from . import parallel_stacks
from . import parallel_workers as workers
from .parallel_fp8_workers import fp8_bits

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", sorted(workers.MODULES))
def test_divided_is_whole(name, ranks):
    for wrong in on_ranks(workers.products, name, torch.float32, ranks=ranks):
        assert not wrong, "\n".join(wrong[:5])


@pytest.mark.parametrize("recipe", workers.RECIPES)
def test_divided_is_whole_in_bfloat16(recipe):
    for wrong in on_ranks(workers.all_products, torch.bfloat16, recipe):
        assert not wrong, "\n".join(wrong[:5])


@pytest.mark.parametrize("exact", [True] if here().type == "cuda" else [False, True])
def test_what_fp8_gathers_is_the_whole_tensors(exact):
    """CUDA's products add up in another order for a part than for the whole: there of values whose sums are exact."""
    for found in on_ranks(fp8_bits, exact):
        for (recipe, rows, mode), (wrong, carried) in found.items():
            assert not wrong, (recipe, rows, mode, wrong)
            # Of blocks that lie across ranks, and for quantizers in Python, 16-bit values are gathered.
            behind = recipe == "own" or (recipe.startswith("block") and rows % 128)
            # A gradient that is not quantized, and what high precision reads in a backward.
            behind = behind or "high_precision" in recipe or ("dequantized" in recipe and mode == "row")
            assert ("c10::BFloat16" in carried) == bool(behind), (recipe, rows, mode, carried)


def test_saved_bytes():
    for found in on_ranks(workers.saved_bytes):
        own = workers.TOKENS * workers.BATCH * workers.HIDDEN * 2
        assert found == {True: own, False: 2 * own}


def test_what_keeping_costs_grows_with_the_layers_alone():
    """layers x (t - 1) / t x M x K x e between the two modes: each layer keeps its tokens, or those of all ranks."""
    for found in on_ranks(workers.saved_by_layers):
        own = workers.TOKENS * workers.BATCH * workers.HIDDEN * 4
        for layers in (2, 16):
            assert found[layers, False] - found[layers, True] == layers * own


def test_copies_keep_the_group():
    for found in on_ranks(workers.copies):
        assert found == [(True, True, 2)] * 2


def test_another_group_is_the_one_that_is_used():
    for found in on_ranks(workers.another_group):
        assert len({name for name, _, _ in found}) == 2
        assert all(used == {name} and scaled == name for name, used, scaled in found), found


def test_calibrating_sees_what_the_products_read():
    for whole, divided in on_ranks(workers.calibrated):
        # An activation's amax is of a product; on CUDA that of a part may be added up in another order.
        close = {"rtol": 0, "atol": 0} if here().type == "cpu" else {"rtol": 32 * 2.0**-24, "atol": 0}
        torch.testing.assert_close(whole, divided, **close)


def test_compiled_is_eager_and_keeps_the_shard():
    for wrong, kept in on_ranks(workers.compiled):
        assert not wrong, wrong
        assert kept == {key: not recompute and key[0] != "row" for key, recompute in zip(kept, (k[1] for k in kept))}


def test_refusals_are_the_same_on_every_rank():
    (said, works), *others = on_ranks(workers.refusals)
    assert works and all(other == (said, works) for other in others)
    wanted = [
        ("ValueError", "Linear: argument 'out_features' is 33", "2 ranks", "multiple"),
        ("ValueError", "Linear: argument 'in_features' is 33", "2 ranks", "multiple"),
        ("ValueError", "LayerNormMLP: argument 'ffn_hidden_size' is 33", "2 ranks", "multiple"),
        ("ValueError", "Linear: argument 'parameters_split['a']' is 31", "2 ranks", "multiple"),
        ("ValueError", "Linear: argument 'tp_recompute_allgather' is False", "row"),
        ("ValueError", "Linear: argument 'tp_overlap' is 'fast'", "'auto'"),
        ("NotImplementedError", "LayerNormLinear: argument 'parallel_mode' is 'row'", "use 'column'"),
        ("RuntimeError", "Linear:", "tp_size", "set_tensor_parallel_group()"),
        ("ValueError", "Linear: argument 'inp' has 5 tokens", "2 ranks", "pad it"),
        ("ValueError", "Linear: argument 'inp' has shape [16]", "two dimensions"),
        ("ValueError", "Linear: argument 'inp' has last dimension 32, wanted 16"),
        ("ValueError", "rank 0 passes Float [4, 32] to group_exchange, rank 1 passes Float [6, 32]", "equally many"),
        ("ValueError", "Linear: argument 'tp_group' has 1 ranks", "divided by 2"),
        ("RuntimeError", "process group", "destroyed", "set_tensor_parallel_group()"),
    ]
    assert len(said) == len(wanted)
    for words, parts in zip(said, wanted):
        assert words.startswith(parts[0]) and all(part in words for part in parts), words


def test_zero_tokens_and_a_group_of_one():
    for wrong in on_ranks(workers.nothing_and_one):
        assert not wrong, "\n".join(wrong[:5])


def test_a_backward_without_wanted_gradients_moves_nothing():
    for counts in on_ranks(workers.frozen):
        gather, scatter = "c10d::_allgather_base_", "c10d::alltoall_base_"
        assert counts == {
            ("column", "nothing"): sorted([gather, scatter]),
            ("column", "weight"): [scatter],
            ("column", "input"): [gather],
            ("column", "both"): [],
            ("row", "nothing"): [gather],
            ("row", "weight"): [gather],
            ("row", "input"): [gather],
            ("row", "both"): [],
        }


def test_one_sum_alone_runs_beside_something():
    """The sum of a column's input gradient without sequence parallelism, during which the weight gradient is computed.
    Mutant: a row's sum, which no computation overlaps, with a stream of its own."""
    for found in on_ranks(workers.on_streams_of_their_own):
        asides = {key: [] for key in itertools.product(("column", "row"), (True, False))}
        assert found == asides | {("column", False): ["c10d::allreduce_"]}


def test_stacks_compose():
    """Mutant: layers whose gathered tensors share memory have other gradients once two microbatches are in flight."""
    for found in on_ranks(parallel_stacks.ways):
        columns, rows = 4, 4  # of a stack: each gathers once in the forward or in the backward
        assert found.pop("gathers") == (
            2 * columns + rows,
            2 * columns + rows,
        )  # a checkpoint's second run keeps its own
        assert all(equal is True for equal in found.values()), {k: v for k, v in found.items() if v is not True}


def test_a_checkpoints_input_in_parts():
    for found in on_ranks(parallel_stacks.divided_inputs, ranks=2):
        assert found[True] == (True, [True]) and found[False] == (True, [True]), found
        assert "'tp_group' None" in found[2] and "checkpoint:" in found[3] and "sequence_parallel" in found["sequence"]


def test_sums_go_by_rank_and_a_recomputed_mlp_gathers_once_more():
    """Forward, dy, and the run again, whose gather serves the weight's gradient as well."""
    assert on_ranks(workers.in_rank_order, ranks=3) == [(True, 3)] * 3


def test_functions_are_the_modules():
    for wrong in on_ranks(workers.functions):
        assert not wrong, "\n".join(wrong[:5])


def test_opcheck(tmp_path):
    """On one rank: what the operators say of themselves."""
    store, on = dist.FileStore(str(tmp_path / "store"), 1), {"device": here()}
    dist.init_process_group(backends(here()), store=store, rank=0, world_size=1)
    try:
        ops, opcheck, group = torch.ops.te, torch.library.opcheck, dist.group.WORLD.group_name
        x, dy = torch.randn(4, 3, **on), torch.randn(4, 5, **on)
        opcheck(ops.group_gather.default, (x, group, 1))
        opcheck(ops.group_gather_again.default, (x, dy, group, 1))
        opcheck(ops.group_exchange.default, (x, group, 1))
        opcheck(ops.group_sum.default, (x, group, 1))
        opcheck(ops.group_symmetric_sum.default, (x, group, 1, 1))
        x, weight, wide, gamma, bias = (
            torch.randn(*sizes, requires_grad=True, **on) for sizes in ((4, 16), (16, 16), (32, 16), (16,), (16,))
        )
        norm = (1e-5, True, False)
        for mode in (1, 2):
            divided = ([mode, 1, 1, 1], group)
            opcheck(ops.linear.default, (x, weight, bias, False, [], *divided))
            opcheck(ops.activation_linear.default, (x, weight, None, "gelu", [], [], *divided))
        divided = ([1, 1, 1, 1], group)
        opcheck(
            ops.normalization_linear.default,
            (x, None, gamma, None, weight, bias, *norm, True, False, [], *divided),
        )
        products = (wide, None, weight, bias)
        options = ("swiglu", [], True, False, False, False, [], [])
        opcheck(ops.layernorm_mlp.default, (x, None, gamma, None, *products, *norm, *options, *divided))
    finally:
        dist.destroy_process_group()
