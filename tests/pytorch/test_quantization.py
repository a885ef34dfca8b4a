# Quantization contexts without FP8: switched off they change nothing, switched on they are refused by name, and every
# question is answered. Mutant: an autocast that forgets to look at `enabled` turns these red.
import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import fp8
from transformer_engine.pytorch.cpu_offload import is_cpu_offload_enabled
from transformer_engine.pytorch.quantization import FP8GlobalStateManager


def old(name, *args, **kwargs):
    with pytest.warns(DeprecationWarning, match=name):
        return getattr(te, name)(*args, **kwargs)


OFF = {
    "autocast": lambda: te.autocast(enabled=False),
    "autocast with a recipe": lambda: te.autocast(enabled=False, recipe=DelayedScaling()),
    "fp8_autocast": lambda: old("fp8_autocast", enabled=False, fp8_recipe=DelayedScaling()),
    "quantized_model_init": lambda: te.quantized_model_init(enabled=False),
    "fp8_model_init": lambda: old("fp8_model_init", enabled=False),
    "get_cpu_offload_context": lambda: te.get_cpu_offload_context()[0],
    "onnx_export": lambda: te.onnx_export(),
}


@pytest.mark.parametrize("name", OFF)
def test_switched_off_nothing_changes(device, name):
    torch.manual_seed(0)
    wanted = te.Linear(8, 8, device=device)
    x = randn(4, 8, device=device)
    torch.manual_seed(0)
    with OFF[name](), torch.autocast(device, enabled=False):
        module = te.Linear(8, 8, device=device)
        with OFF[name]():
            got = module(x)
    assert_same_bits(got, wanted(x))
    assert type(module.weight) is torch.nn.Parameter
    with pytest.raises(KeyError), OFF[name]():
        raise KeyError


def test_switched_off_under_compile():
    linear, x = te.Linear(8, 8, device="cpu"), randn(4, 8)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(t):
        with te.autocast(enabled=FP8GlobalStateManager.is_fp8_enabled()), te.fp8_autocast(enabled=False):
            return linear(t)

    assert_same_bits(call(x), linear(x))


def test_switched_on_they_are_refused_by_name():
    for name, call in (
        ("autocast: FP8", lambda: te.autocast()),
        ("autocast: FP8", lambda: old("fp8_autocast", enabled=True)),
        ("autocast: FP8 calibration", lambda: te.autocast(enabled=False, calibrating=True)),
        ("quantized_model_init", lambda: te.quantized_model_init().__enter__()),
        ("quantized_model_init", lambda: old("fp8_model_init").__enter__()),
        ("onnx_export", lambda: te.onnx_export(enabled=True).__enter__()),
    ):
        with refused(NotImplementedError, name, "not available in this version"):
            call()


def test_every_question_is_answered():
    for name in ("is_fp8_available", "is_mxfp8_available", "is_fp8_block_scaling_available", "is_nvfp4_available"):
        ask = getattr(te, name)
        available, reason = ask(return_reason=True)
        assert ask() is False and available is False and "FP8" in reason and ask.__name__ == name
    for check in (fp8.check_fp8_support, te.fp8.check_mxfp8_support):
        available, reason = check()
        assert available is False and isinstance(reason, str) and reason
    state = FP8GlobalStateManager
    assert fp8.FP8GlobalStateManager is state
    assert not (state.is_fp8_enabled() or state.is_fp8_calibration() or state.with_fp8_parameters())
    assert state.get_fp8_recipe() is None and state.get_fp8_group() is None
    assert state.is_fp8_available() == fp8.check_fp8_support()
    state.reset()
    state.reduce_and_update_fp8_tensors(forward=True)
    with refused(NotImplementedError, "set_skip_fp8_weight_update_tensor", "FP8"):
        state.set_skip_fp8_weight_update_tensor(True)
    assert te.get_default_recipe().delayed()


def test_offload_switched_off():
    context, sync = te.get_cpu_offload_context(False, 2, model_layers=4)
    x = randn(3)
    with context:
        assert not is_cpu_offload_enabled()
    assert sync(x) is x
    te.mark_not_offload(x, None)
