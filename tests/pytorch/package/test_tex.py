# transformer_engine_torch, what clients call of the C++ side: quantization and activations equal to our own to the bit,
# the balanced division of packed sequences, and its plain data.
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_cases import FORMATS, assert_same_tensor
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.pytorch.functional import activation, activation_kinds

PLAIN = [kind for kind in activation_kinds if kind != "clamped_swiglu"]


def same(got, want):
    (assert_same_tensor if isinstance(want, te.QuantizedTensor) else assert_same_bits)(got, want)


@pytest.mark.parametrize("name", FORMATS)
def test_quantize_and_back(name, device):
    quantizer, x = FORMATS[name](device=device), randn(24, 32, dtype=torch.bfloat16, device=device)
    made = tex.quantize(x, quantizer)
    same(made, quantizer(x))
    for dtype, wanted in ((te.DType.kFloat32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        assert_same_bits(tex.dequantize(made, dtype), made.dequantize(dtype=wanted))
    other = randn(24, 32, dtype=torch.bfloat16, device=device)
    before = made.dequantize()
    assert tex.quantize(other, quantizer, made, torch.ones(1, device=device)) is made
    assert_same_bits(made.dequantize(), before)
    assert tex.quantize(other, quantizer, output=made, noop=torch.zeros(1, device=device)) is made
    same(made, quantizer(other))


@pytest.mark.parametrize("kind", PLAIN)
def test_activations(kind, device):
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device)
    x = randn(6, 64, device=device, scale=2, requires_grad=True)
    y = activation(x, kind)
    dy = randn(*y.shape, device=device)
    (dx,) = torch.autograd.grad(y, x, dy)
    forward, backward = getattr(tex, kind), getattr(tex, f"d{kind}")
    for through in (None, quantizer):
        same(forward(x, through), y.detach() if through is None else quantizer(y.detach()))
        same(backward(dy, x, through), dx if through is None else quantizer(dx))
    assert not forward(x).requires_grad
    for function in (forward, backward):
        assert pickle.loads(pickle.dumps(function)) is function and function.__doc__


def test_the_activation_with_parameters(device):
    params = {"limit": 1.0, "alpha": 1.5, "glu_linear_offset": 0.5}
    x = randn(6, 64, device=device, scale=2, requires_grad=True)
    y = activation(x, "clamped_swiglu", tuple(params.values()))
    dy = randn(*y.shape, device=device)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert_same_bits(tex.clamped_swiglu(x, None, **params), y.detach())
    assert_same_bits(tex.clamped_dswiglu(dy, x, None, **params), dx)
    assert_same_bits(tex.clamped_swiglu(x), activation(x.detach(), "clamped_swiglu"))
    assert_same_bits(tex.clamped_dswiglu(dy, x), tex.clamped_dswiglu(dy, x, None, 7.0, 1.702, 1.0))


def test_plain_data():
    meta = tex.FP8TensorMeta()
    assert meta.scale is meta.scale_inv is meta.amax_history is None
    meta.scale, meta.amax_history = torch.ones(3), torch.zeros(4, 3)
    assert meta.scale[tex.FP8FwdTensors.GEMM1_OUTPUT] == 1
    copy = pickle.loads(pickle.dumps(meta))
    assert_same_bits(copy.scale, meta.scale)
    assert [tex.FP8FwdTensors.GEMM1_WEIGHT, tex.FP8FwdTensors.GEMM2_INPUT, tex.FP8FwdTensors.GEMM3_OUTPUT] == [1, 3, 8]
    assert [tex.FP8BwdTensors.GRAD_INPUT1, tex.FP8BwdTensors.GRAD_OUTPUT2, tex.FP8BwdTensors.GRAD_INPUT3] == [1, 2, 5]


# ---- the division of packed sequences ----


def by_hand(lengths, world_size, rank):
    """Chunks r and 2 w - 1 - r of each sequence."""
    found, start = [], 0
    for length in lengths:
        chunks = torch.arange(start, start + length).split(max(length // (2 * world_size), 1))
        found += [chunks[rank], chunks[2 * world_size - 1 - rank]] if length else []
        start += length
    return torch.cat([torch.empty(0, dtype=torch.int64), *found])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(1, 5), st.lists(st.integers(0, 6), max_size=6))
def test_division_of_packed_sequences(world_size, chunks):
    lengths = [2 * world_size * n for n in chunks]
    cumulative = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    parts = [tex.thd_get_partitioned_indices(cumulative, sum(lengths), world_size, rank) for rank in range(world_size)]
    for rank, part in enumerate(parts):
        assert_same_bits(part, by_hand(lengths, world_size, rank).to(torch.int32))
    assert torch.cat(parts).sort().values.tolist() == list(range(sum(lengths)))


def test_division_on_the_device(device):
    """As clients use it, on tokens on the device."""
    cumulative = torch.tensor([0, 8, 8, 24], dtype=torch.int32, device=device)
    tokens = torch.arange(24, device=device)
    got = tokens.index_select(0, tex.thd_get_partitioned_indices(cumulative, 24, 2, 1))
    assert got.tolist() == [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19]


def test_refused_by_name(device):
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device)
    with refused(ValueError, "quantize", "'noop'", "'output'"):
        tex.quantize(randn(4, 4, device=device), quantizer, noop=torch.ones(1, device=device))
    with refused(TypeError, "dequantize", "'input'", "Tensor"):
        tex.dequantize(randn(4, 4, device=device), te.DType.kFloat32)
    cumulative = torch.tensor([0, 8, 24], dtype=torch.int32)
    op = "thd_get_partitioned_indices"
    for args, words in (
        ((cumulative.long(), 24, 2, 0), ("'cu_seqlens'", "int64")),
        ((cumulative[None], 24, 2, 0), ("'cu_seqlens'", "[1, 3]")),
        (([0, 24], 24, 2, 0), ("'cu_seqlens'", "[0, 24]")),
        ((cumulative, 24, 3, 0), ("'cu_seqlens'", "multiples of 6", "pad")),
        ((cumulative, 28, 2, 0), ("'cu_seqlens'", "total_tokens 28")),
        ((cumulative, 24, 2, 2), ("'rank'", "2", "world_size 2")),
        ((cumulative, 24, 2, -1), ("'rank'", "-1")),
        ((cumulative, 24, 0, 0), ("'world_size'", "0")),
    ):
        with refused(ValueError, op, *words):
            tex.thd_get_partitioned_indices(*args)
