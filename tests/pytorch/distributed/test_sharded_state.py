# tensor_parallel_state_dict: its keys, placements and memory, and torch's distributed checkpoints written and loaded at
# 1, 2 and 4 ranks on four processes, and without torch.distributed.
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import on_ranks

from transformer_engine.pytorch.distributed import load_tensor_parallel_state_dict, tensor_parallel_state_dict

from . import sharded_state_workers as workers


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    return folder, on_ranks(workers.round_trips, str(folder), ranks=workers.MOST)


@pytest.mark.dist
def test_a_checkpoint_loads_at_any_number_of_ranks(results):
    for rank, (wrong, _) in enumerate(results[1]):
        assert not wrong, f"rank {rank}: " + "; ".join(wrong)


@pytest.mark.dist
@pytest.mark.parametrize("saved", ["1", "2", "4", "fsdp2"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_and_into_one_process(results, saved):
    module = workers.zeroed(workers.build(1))
    state = tensor_parallel_state_dict(module, None)
    dcp.load(state, checkpoint_id=results[0] / saved)
    assert not list(workers.wrong_parameters(module, 0, 1, saved))
    load_tensor_parallel_state_dict(module, state)
    assert not list(workers.wrong_parameters(module, 0, 1, f"{saved}, taken"))


@pytest.mark.dist
def test_refusals_are_the_same_on_every_rank(results):
    words = {
        "module": ("TypeError", "'module'", "list"),
        "mesh": ("TypeError", "'mesh'", "ProcessGroup", "DeviceMesh"),
        "dimensions": ("ValueError", "'mesh'", "'a'", "'tp'"),
        "size": ("ValueError", "'mesh'", "4", "tp_size 2"),
        "no mesh": ("ValueError", "'mesh'", "1", "tp_size 2"),
        "unmarked": ("ValueError", "fc1_weight", "tp_size 2", "set_parallel_mode"),
        "quantized": ("NotImplementedError", "'weight'", "Float8Tensor", "dequantize"),
        "quantized, loaded": ("NotImplementedError", "'weight'", "Float8Tensor"),
        "partial": ("RuntimeError", "'state_dict'", "gated.fc1_weight.gate", "gated.fc1_weight.up"),
        "stride": ("ValueError", "'weight'", "partition_stride 2", "3"),
        "dimension": ("ValueError", "'weight'", "partition_dim 2"),
    }
    first = results[1][0][1]
    assert all(told == first for _, told in results[1]) and sorted(first) == sorted(words)
    for case, told in first.items():
        assert told is not None and told[0] == words[case][0], (case, told)
        assert all(word in told[1] for word in words[case][1:]), (case, told)


def test_alone_the_keys_are_the_same():
    module = workers.build(1)
    state = tensor_parallel_state_dict(module, None)
    assert {"gated.fc1_weight.gate", "gated.fc1_bias.up", "attention.qkv.weight.value", "strided.weight.1"} <= set(
        state
    )
    for p in module.parameters():
        p.requires_grad_(False)
    state["gated.fc1_weight.gate"].fill_(1.0)
    assert torch.equal(module.gated.fc1_weight[: workers.FFN].cpu(), torch.ones(workers.FFN, workers.HIDDEN))
    with pytest.raises(RuntimeError, match="Missing key"):
        load_tensor_parallel_state_dict(module, {})
    assert load_tensor_parallel_state_dict(module, {}, strict=False).missing_keys
