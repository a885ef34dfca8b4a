# Options that are wrong, contradict each other, or are not built are errors that name them.
import dataclasses
import inspect

import pytest
import torch
from support import refused

from transformer_engine.pytorch.data_parallel import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
)

from .fake import ladder

Config = DistributedDataParallelConfig


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overlap_grad_reduce": 1}, ("'overlap_grad_reduce'", "1", "True or False")),
        ({"bucket_size": True}, ("'bucket_size'", "True", "None or an int > 0")),
        ({"bucket_size": 0}, ("'bucket_size'", "0")),
        ({"num_buckets": 2.0}, ("'num_buckets'", "2.0")),
        ({"num_buckets": 2, "bucket_size": 8}, ("'bucket_size' (8)", "'num_buckets' (2)", "one of them")),
        ({"average_in_collective": True, "reproducible": True}, ("'average_in_collective'", "'reproducible'")),
    ],
)
def test_configurations(options, words):
    with refused(ValueError, "DistributedDataParallelConfig", *words):
        Config(**options)


@pytest.mark.parametrize(
    ("name", "done", "other", "instead"),
    [
        ("num_distributed_optimizer_instances", 1, 2, "'process_group'"),
        ("nccl_ub", False, True, "ordinary memory"),
        ("param_name_patterns_for_fp32_local_accumulation", (), ("all",), "grad_reduce_in_fp32=True"),
        ("fp4_param_gather", False, True, "FP8 bytes (quantized_model_init)"),
        ("reuse_grad_buf_for_mxfp8_param_ag", False, True, "128x128 block scaling"),
    ],
)
def test_options_of_other_libraries(name, done, other, instead):
    """The value that changes nothing is taken; neither it nor an unknown option becomes a field."""
    for value in (other, None, "x"):
        with refused(NotImplementedError, f"'{name}'", repr(value), "not built", instead):
            Config(**{name: value, "reproducible": True})
    config = Config(True, **{name: done}, reproducible=True)
    assert config == Config(grad_reduce_in_fp32=True, reproducible=True) and not hasattr(config, name)
    assert name not in inspect.signature(Config).parameters and "debug" in inspect.signature(Config).parameters
    assert dataclasses.replace(config, debug=True).debug
    with pytest.raises(TypeError, match="use_megatron_fsdp"):
        Config(use_megatron_fsdp=False)


def test_no_name_patterns():
    for none in ((), [], set(), frozenset()):
        assert Config(param_name_patterns_for_fp32_local_accumulation=none) == Config()
    for some in (["all"], {"all"}, "", {}):
        with refused(NotImplementedError, "'param_name_patterns_for_fp32_local_accumulation'", "grad_reduce_in_fp32"):
            Config(param_name_patterns_for_fp32_local_accumulation=some)


def test_optimizers_of_whole_matrices():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon is not there")
    ddp = DistributedDataParallel(Config(), ladder(2, 4))
    with refused(NotImplementedError, "'optimizer'", "Muon", "whole matrices", "finish_grad_sync()"):
        DistributedOptimizer(torch.optim.Muon([p for p in ddp.module.parameters() if p.dim() == 2]), ddp)
