# Edges of tensor parallelism on gloo ranks. Mutants: the largest amax asked for without the question whether the ranks
# agree, or a backward's gather that counts as a forward's, end or hang the ranks here; so do functions
# and modules that ask in words of different lengths.
import pytest
import torch
from ranks import found_by, ranks_compare

from . import parallel_edge_workers as workers

pytestmark = pytest.mark.dist
found = found_by(workers.everything)


@pytest.mark.skipif(not ranks_compare(), reason="over NCCL ranks raise the error later: test_fingerprints.py")
def test_ranks_that_disagree_raise_an_error(found):
    (*one, gather, grads), (*other, its_gather, its_grads) = found["disagreeing"]
    assert one == other
    for what, words, works in one:
        assert words.startswith("ValueError: the ranks of the process group") and works, (what, words)
    backward = one[-1][1]
    assert (
        "rank 0 passes Float [128, 32] to group_gather_again, rank 1 passes Float [128, 32] to group_gather;"
        in backward
    )
    for function, module in ((gather, its_gather), (grads, its_grads)):  # in the words of where each of them is
        assert function[1].startswith(f"ValueError: {function[0]}: ") and function[2] and module[2], function
        assert f" to {function[0]}, rank 1 passes Float [128, 32] to group_gather;" in module[1]


@pytest.mark.skipif(not ranks_compare(), reason="over NCCL ranks raise the error later: test_fingerprints.py")
def test_an_error_on_one_rank_is_raised_on_all(found):
    """Long before the group's timeout. Mutant: a ~RankErrorGuard() that sends nothing to the other ranks."""
    one, other = found["ended_alone"]
    ops = {"width": "layernorm_mlp", "dtype": "layernorm_mlp", "loss": "cross_entropy", "fused": "linear_cross_entropy"}
    for (what, heard, works), (_, raised, its_works) in zip(one, other, strict=True):
        assert works == its_works == "nothing", (what, works, its_works)
        op = ops.get(what, "linear")
        assert heard.startswith("ValueError: ") and " rank 1 of the process group '" in heard, (what, heard)
        assert f"does not join: its call of {op} has raised an error" in heard, (what, heard)
        assert "Error: " in raised and "does not join" not in raised, (what, raised)


def test_a_module_goes_by_its_group(found):
    for rank in found["devices_and_groups"]:
        assert rank["sizes"] == [2, 2, 2] and rank["whole"]
        assert rank["meta"].startswith("ValueError: Linear: argument 'inp' is on meta, but the tensor-parallel group")
        assert rank["not in it"].startswith(
            "ValueError: Linear: argument 'tp_group' is a group that this process is not"
        )
        assert rank["no group"].startswith("TypeError: Linear: argument 'tp_group' is a DeviceMesh, wanted")
        assert rank["destroyed"].startswith(
            "RuntimeError: Linear: argument 'tp_group' is a process group that has been"
        )


@pytest.mark.parametrize("worker", ["no_tokens", "called_sinks"])
def test_nothing_is_wrong(found, worker):
    for wrong in found[worker]:
        assert not wrong, wrong[:5]


def test_an_input_without_tokens_is_called_by_its_name(found):
    for said in found["without_dimensions"]:
        for op, words in zip(("LayerNormMLP", "LayerNormLinear", "Linear"), said, strict=True):
            assert words.startswith(f"ValueError: {op}: argument 'inp' has shape [32], wanted at least two"), words


def test_a_checkpointed_column_gathers_no_more_than_it_reads(found):
    """Values come in each run, and the second keeps them; FP8 comes rowwise in each, columnwise in the backward."""
    for counts in found["gathers_of_checkpoints"]:
        for (recipe, *_), count in counts.items():
            assert count == {"none": 2, "current": 3, "delayed": 3, "block": 6}[recipe], counts


def test_explain_gives_the_reason_for_gathered_values(found):
    for told in found["explained"]:
        for (recipe, tokens), rows in told.items():
            why = {why for _, op, path, why in rows if path.endswith("quantized after")}
            behind = recipe == "own" or (recipe, tokens) == ("block", 64)
            ops = {op for _, op, path, _ in rows if path.endswith("quantized after")}
            assert ops == ({"group_gather", "group_gather_again"} if behind else set()), (recipe, tokens, rows)
            assert all("half of the bytes" in words for words in why) and {module for module, *_ in rows} == {"inner"}
            assert not behind or any(("Python" if recipe == "own" else "multiple of 128") in words for words in why)
            assert ("group_amax" in {op for _, op, *_ in rows}) == (recipe == "current")


def test_a_sequence_is_dropped_on_all_ranks_that_have_a_part_of_it(found):
    """Whichever way they draw; where ranks have sequences of their own, they draw on their own."""
    one, other = found["dropped_paths"]
    for (layout, forks, traced), kept in one.items():
        assert set(kept.tolist()) == {0.0, 2.0}
        same = torch.equal(kept, other[layout, forks, traced])
        assert same == (layout == "sbhd" or traced), (layout, forks, traced)
