# Tensors whose memory was freed under them, as sharding frameworks do: an error that names them, before anything is
# read. Without the checks (check_memory in csrc/core/common.h, must_have_memory in tensor/layout.py, _check_main_grad
# in module/weight_grad.py) these end the process.
import pytest
import torch
from support import randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch import functional

pytestmark = pytest.mark.usefixtures("fp8_left_off")
E4M3 = te.DType.kFloat8E4M3
RECIPES = {"plain": None, "current": Float8CurrentScaling(), "block": Float8BlockScaling()}
QUANTIZERS = {
    "current": lambda device: te.Float8CurrentScalingQuantizer(E4M3, device),
    "rowwise": lambda device: te.Float8CurrentScalingQuantizer(E4M3, device, columnwise=False),
    "columnwise": lambda device: te.Float8CurrentScalingQuantizer(E4M3, device, rowwise=False),
    "1 x 128": lambda device: te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
    "128 x 128": lambda device: te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=2),
}
USES = {
    "dequantize": lambda t, x: t.dequantize(),
    "an operation": lambda t, x: t + 1,
    "clone": lambda t, x: t.clone(),
    "copy_": lambda t, x: t.copy_(x),
    "zero_": lambda t, x: t.zero_(),
    "update_quantized": lambda t, x: t._quantizer.update_quantized(x, t),
}


def free(*tensors):
    for t in tensors:
        t.untyped_storage().resize_(0)


def refused_as_freed():
    return pytest.raises((ValueError, RuntimeError), match="memory has been freed")


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("shape", [(32, 32), (30, 30)])
@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("handled", [True, False], ids=["used before", "new"])
def test_a_quantized_tensor(device, name, shape, use, handled):
    x = randn(*shape, device=device)
    t = QUANTIZERS[name](device)(x)
    if handled:
        t.dequantize()  # it keeps what the engine was given
    free(*[part for part in t._tensors().values() if part.dtype is torch.uint8])
    with refused_as_freed():
        USES[use](t, x)


def test_the_source_of_a_copy(device):
    source, target = (QUANTIZERS["current"](device)(randn(32, 32, device=device)) for _ in range(2))
    before = target.dequantize()
    free(source._data)
    with refused(RuntimeError, "memory has been freed"):
        target.copy_(source)
    assert torch.equal(target.dequantize(), before)


@pytest.mark.parametrize("freed", ["_data", "_scale_inv"])
def test_operands_of_a_product(device, freed):
    a, b = (QUANTIZERS["current"](device)(randn(32, 32, device=device)) for _ in range(2))
    free(getattr(a, freed))
    with refused_as_freed():
        te.cpp_extensions.general_gemm(a, b)


def test_plain_operands(device):
    a, b, out = randn(32, 32, device=device), randn(32, 32, device=device), torch.zeros(32, 32, device=device)
    module = te.LayerNormLinear(32, 32, device=device)
    free(module.layer_norm_weight.data)
    with refused(ValueError, "'layer_norm_weight'", "[32]", "memory has been freed"):
        module(a)
    module = te.Linear(32, 32, device=device)
    free(module.weight.data)
    with pytest.raises(ValueError, match=r"(weight|'a').*memory has been freed"):
        module(a)
    free(out)
    with refused(ValueError, "'out'", "[32, 32]", "memory has been freed"):
        functional.gemm_accumulate(a, b, "NT", out)
    free(a)
    for call in (
        lambda: functional.gemm(a, b),
        lambda: functional.activation(a, "gelu"),
        lambda: te.RMSNorm(32, device=device)(a),
    ):
        with refused(ValueError, "memory has been freed"):
            call()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_in_fp8(device, recipe):
    made = RECIPES[recipe] or Float8CurrentScaling()
    with te.quantized_model_init(recipe=made):
        module = te.Linear(32, 32, device=device)
    free(*[part for part in module.weight._tensors().values() if part.dtype is torch.uint8])
    with te.autocast(enabled=recipe != "plain", recipe=made), refused_as_freed():
        module(randn(8, 32, device=device))


@pytest.mark.parametrize("when", ["forward", "backward", "backward_dw"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_main_grad(device, recipe, when):
    module = te.Linear(32, 32, fuse_wgrad_accumulation=True, delay_wgrad_compute=when == "backward_dw", device=device)
    module.weight.main_grad = torch.zeros(32, 32, device=device)
    x = randn(8, 32, device=device)

    def forward():
        with te.autocast(enabled=recipe != "plain", recipe=RECIPES[recipe]):
            return module(x)

    if when != "forward":
        y = forward()
    if when == "backward_dw":
        y.sum().backward()
    free(module.weight.main_grad)
    step = {"forward": forward, "backward": lambda: y.sum().backward(), "backward_dw": module.backward_dw}[when]
    with refused(ValueError, "Linear", "main_grad of parameter 'weight'", "memory has been freed"):
        step()
