# torch.autocast casts the inputs of every module: with inputs in float32 (or in the other 16-bit type) the result is
# that of the module in autocast's dtype, to the bits, quantized or not, compiled or not.
import copy

import pytest
import torch
from families import BATCH, EVERY_FAMILY, HEADS, HIDDEN, SEQ, build, inputs_of, loss_of
from plain_modules import as_tuple
from support import assert_same_bits, randn, saved_tensors

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch.attention.qk_norm import L2Normalization

pytestmark = pytest.mark.usefixtures("fp8_left_off")
LOW = (torch.bfloat16, torch.float16)
RECIPES = {"none": None, "delayed": DelayedScaling(), "current": Float8CurrentScaling(), "block": Float8BlockScaling()}
every_family = pytest.mark.parametrize("name", EVERY_FAMILY)


def called(module, inputs, low, recipe=None, call=None, device="cpu"):
    """Outputs and gradients; low: under autocast of this dtype, or without."""
    module.zero_grad()
    inputs = [t.detach().requires_grad_() for t in inputs]
    around = torch.autocast(device, dtype=low, enabled=low is not None)
    with around, te.autocast(enabled=recipe is not None, recipe=recipe):
        out = (module if call is None else call)(*inputs)
    loss_of(out).backward()
    return as_tuple(out), [t.grad for t in inputs], [p.grad for p in module.parameters()]


def check_is_the_low_module(results, wanted, given, low):
    for got, want in zip(results[0], wanted[0], strict=True):
        assert_same_bits(got, want, "output")
    for got, want in zip(results[1], wanted[1], strict=True):
        assert_same_bits(got, want.to(given), "gradient of an input")
    for got, want in zip(results[2], wanted[2], strict=True):
        assert got.dtype is torch.float32
        assert_same_bits(got.to(low), want, "gradient of a parameter")


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@every_family
def test_a_module_is_the_module_in_that_dtype(name, given, low, device):
    module, inputs = build(name, device), inputs_of(name, device, given)
    results = called(module, inputs, low, device=device)
    wanted = called(copy.deepcopy(module).to(low), [t.to(low) for t in inputs], None)
    check_is_the_low_module(results, wanted, given, low)
    with torch.autocast(device, dtype=low), torch.no_grad():
        for got, want in zip(as_tuple(module(*inputs)), wanted[0], strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@every_family
def test_and_so_under_a_recipe(name, recipe, device):
    module, inputs = build(name, device), inputs_of(name, device)
    low = copy.deepcopy(module).bfloat16()
    for _ in range(2):  # the second by scales that the first left
        results = called(module, inputs, torch.bfloat16, RECIPES[recipe], device=device)
        wanted = called(low, [t.bfloat16() for t in inputs], None, RECIPES[recipe])
        check_is_the_low_module(results, wanted, torch.float32, torch.bfloat16)


@every_family
def test_and_so_compiled(name, device):
    module, inputs = build(name, device), inputs_of(name, device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = called(module, inputs, torch.bfloat16, call=compiled, device=device)
    wanted = called(module, inputs, torch.bfloat16, device=device)
    for got, want in zip(results[0], wanted[0], strict=True):
        assert got.dtype is torch.bfloat16
        assert torch.allclose(got, want, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_all_that_a_module_takes_and_returns(recompute, device):
    """Beside the input: the encoder's output, a residual; beside the output: a norm's output, the bias as it is."""
    attention = te.MultiheadAttention(
        HIDDEN,
        HEADS,
        attention_type="cross",
        input_layernorm=True,
        attention_dropout=0.0,
        return_bias=True,
        return_layernorm_output=True,
        qk_norm_type="L2Normalization",
        device=device,
    )
    x, encoded = randn(SEQ, BATCH, HIDDEN, device=device), randn(SEQ + 2, BATCH, HIDDEN, device=device)
    low = copy.deepcopy(attention).bfloat16()
    with torch.autocast(device, dtype=torch.bfloat16):
        got = attention(x, encoder_output=encoded, checkpoint_core_attention=recompute)
    wanted = low(x.bfloat16(), encoder_output=encoded.bfloat16(), checkpoint_core_attention=recompute)
    assert [t.dtype for t in got] == [torch.bfloat16, torch.float32, torch.bfloat16]
    for a, b in zip(got, wanted, strict=True):
        assert_same_bits(a.bfloat16(), b)
    mlp = te.LayerNormMLP(HIDDEN, 24, return_layernorm_output=True, checkpoint=recompute, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = mlp(x, residual=x + 1)
    wanted = copy.deepcopy(mlp).bfloat16()(x.bfloat16(), residual=(x + 1).bfloat16())
    for a, b in zip(got, wanted, strict=True):
        assert_same_bits(a, b)


def test_float64_stays_refused_by_name(device):
    """As torch's own autocast leaves it alone."""
    for name in ("Linear", "LayerNorm", "TransformerLayer"):
        with torch.autocast(device, dtype=torch.bfloat16), pytest.raises(ValueError, match=r"float32|Double|dtype"):
            build(name, device)(inputs_of(name, device, torch.float64)[0])


def test_of_the_stream_the_cast_one_is_kept(device):
    layer, x = build("TransformerLayer", device), inputs_of("TransformerLayer", device)[0].requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16), saved_tensors() as kept:
        out = layer(x)
    assert out.dtype is torch.bfloat16
    assert not [t.shape for t in kept if t.dtype is torch.float32 and t.shape[-1] == HIDDEN and t.numel() > HIDDEN]


@pytest.mark.parametrize("width", [8, 128])
def test_the_l2_norms_scale_is_not_rounded(width, device):
    """1 / sqrt(128) is no bfloat16."""
    x = randn(64, width, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert_same_bits(L2Normalization()(x), L2Normalization()(x.bfloat16()))
    assert_same_bits(L2Normalization()(x.bfloat16()), L2Normalization()(x.bfloat16().float()).bfloat16())
