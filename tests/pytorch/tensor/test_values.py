# Quantizers and what they make: every part byte-equal to plain PyTorch for any shape, new values in old tensors, the
# directions that a tensor has, and the errors.

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_cases import (
    BOTH,
    E4M3,
    E5M2,
    FORMATS,
    FP8_FORMATS,
    assert_same_parts,
    assert_same_tensor,
    current,
    folded,
    parts_of,
    wanted_parts,
)
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor.layout import PITCH

every_format = pytest.mark.parametrize("name", FORMATS)
every_fp8 = pytest.mark.parametrize("name", FP8_FORMATS)
SHAPES = [(), (0,), (5,), (16,), (0, 3), (3, 0), (1, 1), (5, 7), (16, 32), (3, 2, 40), (130, 129), (2, 65, 300)]


def values(*shape, **options):
    """randn, of no dimensions too."""
    return randn(*(shape or (1,)), **options).view(shape)


@every_fp8
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_are_those_of_plain_torch(device, name, fp8_dtype, shape):
    x = values(*shape, dtype=torch.bfloat16, device=device)
    t = FP8_FORMATS[name](fp8_dtype, device)(x)
    assert t.shape == x.shape and t.dtype is torch.bfloat16 and t.device == x.device
    assert_same_parts(t, wanted_parts(name, x, fp8_dtype), name)
    value = t.dequantize(dtype=torch.float32)
    assert value.shape == x.shape and type(value) is torch.Tensor and value.device == x.device


@every_fp8
@settings(max_examples=15, deadline=None, derandomize=True)
@given(shape=st.lists(st.integers(0, 70), min_size=1, max_size=3), usage=st.sampled_from([(1, 0), (0, 1), (1, 1)]))
def test_parts_of_any_shape_in_any_directions(name, shape, usage):
    x = values(*shape)
    quantizer = FP8_FORMATS[name](rowwise=bool(usage[0]), columnwise=bool(usage[1]))
    t = quantizer(x)
    assert t.get_usages() == {"rowwise": bool(usage[0]), "columnwise": bool(usage[1])}
    wanted = wanted_parts(name, x)
    assert_same_parts(t, {field: wanted[field] for field in t._tensors()}, name)
    assert tuple(t.size()) == tuple(shape)


@every_fp8
def test_options_reach_the_engine(device, name):
    x = randn(33, 200, device=device) * 1e-3
    options = {} if name == "delayed" else {"amax_epsilon": 0.5, "force_pow_2_scales": name == "current"}
    t = FP8_FORMATS[name](device=device, **options)(x)
    pow_2 = options.get("force_pow_2_scales", False)
    assert_same_parts(t, wanted_parts(name, x, pow_2=pow_2, epsilon=options.get("amax_epsilon", 0.0)), name)


@every_format
def test_special_values(device, name):
    """NaN stays, takes no part in an amax; zeros divide nothing; Inf saturates or keeps the scale at 1."""
    x = randn(4, 130, device=device)
    x[1, 3], x[2], x[3, 7] = torch.nan, 0.0, torch.inf
    t = FORMATS[name](device=device)(x)
    value = t.dequantize()
    assert value[1, 3].isnan() and int(value.isnan().sum()) == 1
    assert (value[2] == 0).all()
    assert FORMATS[name](device=device)(torch.zeros(3, 5, device=device)).dequantize().eq(0).all()


@every_format
def test_dtypes_and_the_nominal_one(device, name):
    x = randn(6, 40, device=device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        t = FORMATS[name](device=device)(x.to(dtype))
        assert t.dtype is dtype and t.dequantize().dtype is dtype
        assert t.dequantize(dtype=torch.float64).dtype is torch.float64
    nominal = FORMATS[name](device=device).quantize(x, dtype=torch.bfloat16)
    assert nominal.dtype is torch.bfloat16
    assert_same_parts(nominal, FORMATS[name](device=device)(x))


@every_format
def test_the_gradient_passes_straight_through(device, name):
    x = randn(6, 40, device=device, requires_grad=True)
    t = FORMATS[name](device=device)(x)
    assert t.requires_grad and not t.is_leaf
    grad = randn(6, 40, device=device)
    t.dequantize().backward(grad)
    assert_same_bits(x.grad, grad)
    x.grad = None
    (FORMATS[name](device=device)(x) * 2.0).backward(grad)
    assert_same_bits(x.grad, grad * 2.0)
    with torch.no_grad():
        assert not FORMATS[name](device=device)(x).requires_grad


@every_format
def test_a_bare_storage_holds_the_same(device, name):
    x = randn(3, 5, 40, device=device, requires_grad=True)
    quantizer = FORMATS[name](device=device)
    wanted = quantizer(x)
    quantizer.internal = True
    storage = quantizer(x)
    assert isinstance(storage, te.QuantizedTensorStorage) and not isinstance(storage, torch.Tensor)
    assert type(storage).__name__ == f"{type(wanted).__name__}Storage"
    assert_same_parts(storage, wanted.detach())
    assert (storage.size(), storage.shape, storage.device) == (wanted.shape, wanted.shape, wanted.device)
    assert (storage.dtype, storage.numel(), storage.size(1)) == (wanted.dtype, 600, 5)
    assert_same_bits(storage.dequantize(), wanted.detach().dequantize())
    viewed = storage.view(15, 40)
    assert_same_bits(viewed.dequantize(), wanted.detach().dequantize().view(15, 40))
    assert_same_parts(storage.view([-1, 40]), viewed)
    assert parts_of(viewed).keys() == parts_of(storage).keys()
    for one, two in zip(parts_of(viewed).values(), parts_of(storage).values()):
        assert one.data_ptr() == two.data_ptr()
    if name != "identity":
        with refused(ValueError, "view", "'shape'", (3, 200)):
            storage.view(3, 200)


# ---- new values ----


@every_format
@pytest.mark.parametrize("shape", [(5, 7), (16, 32), (2, 65, 300)], ids=str)
def test_new_values_in_an_old_tensor(device, name, shape):
    x, y = randn(*shape, device=device), randn(*shape, device=device)
    quantizer = FORMATS[name](device=device)
    t, wanted = quantizer(x).clone(), FORMATS[name](device=device)(y)
    before = [p.data_ptr() for p in parts_of(t).values()]
    assert quantizer.quantize(y, out=t) is t
    assert_same_tensor(t, wanted)
    t.quantize_(x)
    assert_same_tensor(t, FORMATS[name](device=device)(x))
    assert quantizer.update_quantized(y, t) is t
    assert_same_tensor(t, wanted)
    assert [p.data_ptr() for p in parts_of(t).values()] == before


@every_format
@pytest.mark.parametrize("shape", [(5, 7), (16, 32)], ids=str)
def test_a_flag_on_the_device_stops_it(device, name, shape):
    x, y = randn(*shape, device=device), randn(*shape, device=device)
    quantizer = FORMATS[name](device=device)
    t = quantizer(x).clone()
    t.quantize_(y, noop_flag=torch.ones(1, device=device))
    assert_same_tensor(t, FORMATS[name](device=device)(x))
    t.quantize_(y, noop_flag=torch.zeros(1, device=device))
    assert_same_tensor(t, FORMATS[name](device=device)(y))


@every_fp8
def test_only_the_directions_that_a_tensor_has_are_written(device, name):
    x, y = randn(32, 48, device=device), randn(32, 48, device=device)
    for usages in ({"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True}):
        t = FP8_FORMATS[name](device=device, **usages)(x)
        FP8_FORMATS[name](device=device).update_quantized(y, t)
        assert_same_tensor(t, FP8_FORMATS[name](device=device, **usages)(y))


@every_fp8
def test_rows_that_the_engine_cannot_write_in_place(device, name):
    """Data without the pitch, as a client may bring: new values arrive all the same."""
    x, y = randn(5, 7, device=device), randn(5, 7, device=device)
    quantizer = FP8_FORMATS[name](device=device)
    t = quantizer(x)
    bare = {n: p.contiguous().clone() for n, p in t._tensors().items()}
    client = t._like(bare, t.shape)
    assert_same_bits(client.dequantize(), t.dequantize())
    client.quantize_(y)
    assert_same_tensor(client, FP8_FORMATS[name](device=device)(y))
    assert client._native().rowwise.stride(0) % PITCH == 0


@every_format
def test_empty_tensors(device, name):
    quantizer = FORMATS[name](device=device)
    x = randn(3, 5, 40, device=device)
    for internal in (False, True):
        quantizer.internal = internal
        t = quantizer.make_empty((3, 5, 40), dtype=torch.bfloat16, device=device)
        wanted = quantizer(x.bfloat16())
        assert type(t) is type(wanted) and t.size() == wanted.size() and t.dtype is torch.bfloat16
        shapes = {n: (p.shape, p.dtype, p.device) for n, p in parts_of(t).items()}
        assert shapes == {n: (p.shape, p.dtype, p.device) for n, p in parts_of(wanted).items()}
        t.quantize_(x.bfloat16())
        assert_same_parts(t, wanted)
    quantizer.internal = False
    assert quantizer.make_empty((2, 16), device=device, requires_grad=True).requires_grad
    if name not in ("hybrid", "identity"):
        specs = quantizer.inner_tensor_specs((3, 5, 40))
        assert specs == {n: (tuple(p.shape), p.dtype) for n, p in t._tensors().items()}


# ---- directions ----


@every_fp8
@pytest.mark.parametrize("shape", [(5,), (5, 7), (130, 300), (3, 2, 40)], ids=str)
def test_a_direction_is_made_of_the_other_where_that_is_possible(device, name, shape):
    x = randn(*shape, device=device)
    whole = FP8_FORMATS[name](device=device)(x)
    for one, other in (("rowwise", "columnwise"), ("columnwise", "rowwise")):
        t = FP8_FORMATS[name](device=device, **{one: True, other: False})(x)
        if name == "block1d":
            before = parts_of(t)
            with refused(NotImplementedError, "update_usage", other, "1 x 128", "set_usage"):
                t.update_usage(**{f"{other}_usage": True})
            assert_same_parts(t, before)
            continue
        t.update_usage(**{f"{other}_usage": True})
        assert_same_tensor(t, whole, f"{other} of {one}")
        t.update_usage(**{f"{one}_usage": False})
        assert t.get_usages() == {one: False, other: True}
        assert_same_bits(t.dequantize(), whole.dequantize())


@every_fp8
def test_wanting_one_direction_and_not_the_other(device, name):
    t = FP8_FORMATS[name](device=device)(randn(32, 48, device=device))
    t.update_usage()
    assert t.get_usages() == BOTH
    t.update_usage(rowwise_usage=True, columnwise_usage=False)
    assert t.get_usages() == {"rowwise": True, "columnwise": False}
    t.update_usage(rowwise_usage=False)
    assert t._tensors() == {} or name in ("delayed", "current")
    with refused(RuntimeError, type(t).__name__, "columnwise", "no data"):
        t.update_usage(columnwise_usage=True)
    with refused(RuntimeError, "dequantize", "no data"):
        t.dequantize()


def test_the_caches_of_a_float8_tensor(device):
    t = current(device=device)(randn(32, 48, device=device))
    transpose = t._transpose.clone()
    assert not t._transpose_invalid
    t._data.copy_(torch.zeros_like(t._data))
    t._reset_caches()
    assert t._transpose_invalid and not t.get_usages()["columnwise"]
    t.update_usage(columnwise_usage=True)
    assert (t._transpose == 0).all() and not torch.equal(t._transpose, transpose)
    t._data.fill_(56)
    t._create_transpose()
    assert (t._transpose == 56).all()


@every_fp8
def test_data_and_metadata(device, name):
    t = FP8_FORMATS[name](device=device)(randn(6, 40, device=device))
    rowwise, columnwise = t.get_data_tensors()
    assert rowwise.shape == (6, 40) and columnwise.shape == (40, 6)
    assert t.get_data_tensors(columnwise_data=False) is rowwise
    assert t.get_data_tensors(rowwise_data=False) is columnwise
    with refused(ValueError, "get_data_tensors", "rowwise_data"):
        t.get_data_tensors(False, False)
    metadata = t.get_metadata()
    again = type(t)(shape=t.shape, dtype=t.dtype, **metadata)
    assert_same_tensor(again, t)
    assert again._quantizer is t._quantizer and metadata["fp8_dtype"] is E4M3
    t.clear()
    assert t._tensors() == {} and t.shape == (6, 40)


# ---- the engine's handles ----


@every_fp8
def test_handles_share_memory_and_follow_the_parts(device, name):
    t = FP8_FORMATS[name](device=device)(randn(3, 5, 48, device=device))
    native = t._native()
    assert t._native() is native
    data, transposed = t.get_data_tensors()
    assert native.rowwise.data_ptr() == data.data_ptr() and native.rowwise.shape == (15, 48)
    assert native.columnwise.data_ptr() == transposed.data_ptr() and native.columnwise.shape == (48, 15)
    t.update_usage(columnwise_usage=False)
    assert t._native().columnwise is None and t._native() is not native


def test_plain_torch_has_the_last_word_on_folding():
    """The suite's own reference folds as the tensors do."""
    assert folded(torch.ones(2, 3, 4)).shape == (6, 4) and folded(torch.ones(())).shape == (1, 1)
