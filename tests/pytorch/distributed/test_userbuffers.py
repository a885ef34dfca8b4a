# initialize_ub and destroy_ub: their arguments are checked and noted, and nothing happens then.
import pytest
import torch
from support import refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import userbuffers
from transformer_engine.pytorch.module import base

NONE, FP8 = te.UserBufferQuantizationMode.NONE, te.UserBufferQuantizationMode.FP8


@pytest.fixture(autouse=True)
def nothing_reserved():
    te.destroy_ub()
    yield
    te.destroy_ub()


def test_arguments_are_noted():
    assert userbuffers.reservation() is None
    te.initialize_ub([16, 4], 2)
    assert userbuffers.reservation() == ((16, 4), 2, torch.bfloat16, {NONE: {}})
    layers = {"qkv_fprop": {"method": "ring_exchange", "num_splits": 4}}
    base.initialize_ub([16, 4], 2, True, dtype=torch.float16, ub_cfgs=layers, bootstrap_backend="gloo")
    assert userbuffers.reservation() == ((16, 4), 2, torch.float16, {FP8: layers})
    te.initialize_ub((0, 4), 1, quantization_modes=[FP8, NONE], ub_cfgs=[layers, {}])
    assert userbuffers.reservation().options == {FP8: layers, NONE: {}}
    base.destroy_ub()
    base.destroy_ub()
    assert userbuffers.reservation() is None
    assert te.initialize_ub is base.initialize_ub


@pytest.mark.parametrize(
    ("error", "argument", "given"),
    [
        (ValueError, "shape", {"shape": 8}),
        (ValueError, "shape", {"shape": [8, 4, 2]}),
        (ValueError, "shape", {"shape": [8.0, 4]}),
        (ValueError, "shape", {"shape": [9, 4]}),
        (ValueError, "tp_size", {"tp_size": 0}),
        (ValueError, "tp_size", {"tp_size": True}),
        (ValueError, "dtype", {"dtype": torch.int32}),
        (ValueError, "dtype", {"dtype": "bfloat16"}),
        (TypeError, "use_fp8", {"use_fp8": 1}),
        (ValueError, "quantization_modes", {"quantization_modes": []}),
        (ValueError, "quantization_modes", {"quantization_modes": [FP8, FP8]}),
        (ValueError, "quantization_modes", {"quantization_modes": ["fp8"]}),
        (TypeError, "ub_cfgs", {"ub_cfgs": {"qkv_fprop": 4}}),
        (TypeError, "ub_cfgs", {"ub_cfgs": "configuration.yaml"}),
        (ValueError, "ub_cfgs", {"ub_cfgs": [{}, {}]}),
        (ValueError, "bootstrap_backend", {"bootstrap_backend": "tcp"}),
    ],
)
def test_what_it_cannot_be_is_named_and_not_noted(error, argument, given):
    te.initialize_ub([2, 2], 1)
    before = userbuffers.reservation()
    with refused(error, "initialize_ub", f"'{argument}'"):
        te.initialize_ub(**{"shape": [8, 4], "tp_size": 2, **given})
    assert userbuffers.reservation() is before
