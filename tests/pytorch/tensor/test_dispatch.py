# torch's operations on quantized tensors: which results stay quantized, which operations compute with the values or
# write them back, and that views share memory or are no views.
import copy

import pytest
import torch
from quantized_cases import (
    FORMATS,
    FP8_FORMATS,
    assert_readable,
    assert_same_parts,
    assert_same_tensor,
    block2d,
    current,
    parts_of,
)
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te

every_format = pytest.mark.parametrize("name", FORMATS)
every_fp8 = pytest.mark.parametrize("name", FP8_FORMATS)


def made(name, device, *shape, **options):
    return FORMATS[name](device=device, **options)(randn(*(shape or (6, 40)), device=device))


def pointers(t):
    return [p.data_ptr() for p in parts_of(t).values()]


# ---- attributes of a tensor ----


@every_format
def test_attributes_of_a_tensor(device, name):
    t = made(name, device, 3, 2, 40)
    assert isinstance(t, (torch.Tensor, te.QuantizedTensor)) and isinstance(t, te.QuantizedTensorStorage)
    assert (t.shape, t.size(1), t.dim(), t.numel(), t.nelement()) == ((3, 2, 40), 2, 3, 240, 240)
    assert t.dtype is torch.float32 and t.is_floating_point() and t.is_contiguous() and t.stride() == (80, 40, 1)
    assert t.untyped_storage().nbytes() == 0 and t.untyped_storage().device == t.device
    assert not t.is_pinned() and t.layout is torch.strided and t.itemsize == 4
    assert type(t).__name__ in repr(t) and "dtype=torch.float32" in repr(t)
    with refused(ValueError, "data_ptr", type(t).__name__, "dequantize"):
        t.data_ptr()
    assert t.is_leaf and not t.requires_grad and t.grad is None
    assert t.device.type == device


@every_format
def test_casts_by_name_give_values(device, name):
    t = made(name, device)
    for cast, dtype in (("float", torch.float32), ("half", torch.float16), ("bfloat16", torch.bfloat16)):
        plain = getattr(t, cast)()
        assert type(plain) is torch.Tensor and plain.dtype is dtype
        assert_same_bits(plain, t.dequantize(dtype=dtype))


# ---- kept quantized ----


@every_format
def test_the_same_data(device, name):
    t = made(name, device)
    for other in (t.detach(), torch.ops.aten.alias(t), t.data, t.view(6, 40), t.view_as(t), t.reshape(6, 40), t[:]):
        assert other is not t and pointers(other) == pointers(t)
        assert_same_tensor(other, t)
    assert t.contiguous() is t and t.to(t.dtype) is t and t.to(device) is t


@every_format
def test_copies(device, name):
    t = made(name, device, 5, 7)
    for other in (t, t.clone(), t.to(t.dtype, copy=True), t.to(device, copy=True), copy.deepcopy(t)):
        assert_same_tensor(other, t)
        assert_readable(other)
    for other in (t.clone(), t.to(t.dtype, copy=True), t.to(device, copy=True)):
        assert not set(pointers(other)) & set(pointers(t))
        assert other._quantizer is t._quantizer
    nominal = t.to(torch.bfloat16)
    assert nominal.dtype is torch.bfloat16
    assert_same_parts(nominal, t)
    assert type(t.to(torch.float64)) is torch.Tensor and type(t.int()) is torch.Tensor
    assert_same_bits(t.to(torch.float64), t.dequantize().double())


@every_format
def test_the_same_data_under_another_nominal_dtype(device, name):
    t = made(name, device)
    half = t.to_dtype(torch.float16)
    assert half.dtype is torch.float16 and pointers(half) == pointers(t)
    assert_same_bits(half.dequantize(), t.dequantize(dtype=torch.float16))
    like = type(t).make_like(t, dtype=torch.bfloat16, requires_grad=True)
    assert like.requires_grad and like.dtype is torch.bfloat16 and pointers(like) == pointers(t)
    assert type(t).make_like(t, shape=(2, 3, 40)).shape == (2, 3, 40)
    if name != "identity":
        with refused(ValueError, "make_like", "'shape'", (5, 48)):
            type(t).make_like(t, shape=(5, 48))


@every_format
def test_new_ones(device, name):
    t = made(name, device)
    for other, shape in ((torch.empty_like(t), (6, 40)), (t.new_empty(3, 5, 16), (3, 5, 16))):
        assert type(other) is type(t) and other.shape == shape and other.get_usages() == t.get_usages()
        assert not set(pointers(other)) & set(pointers(t))
        x = randn(*shape, device=device)
        other.copy_(x)
        assert_readable(other)
        assert_same_parts(other, FORMATS[name](device=device)(x))
    assert torch.empty_like(t, dtype=torch.bfloat16).dtype is torch.bfloat16
    assert type(torch.empty_like(t, dtype=torch.int32)) is torch.Tensor
    zeros = t.new_zeros(5, 48)
    assert type(zeros) is type(t) and (zeros.dequantize() == 0).all()
    meta = torch.empty_like(t, device="meta")
    assert meta.is_meta and all(p.is_meta for p in parts_of(meta).values())


@every_format
@pytest.mark.parametrize("shape", [(6, 40), (3, 2, 40), (3, 5, 48)], ids=str)
def test_views_that_keep_the_last_dimension(device, name, shape):
    t = made(name, device, *shape)
    values = t.dequantize()
    rows = t.numel() // shape[-1]
    for wanted in ((rows, shape[-1]), (1, rows, shape[-1]), (-1, 1, shape[-1])):
        v = t.view(wanted)
        assert type(v) is type(t) and v.shape == values.view(wanted).shape and pointers(v) == pointers(t)
        assert_same_bits(v.dequantize(), values.view(wanted))
        assert v.get_usages() == t.get_usages()
        flat = FORMATS[name](device=device)(values.view(wanted))
        assert {n: p.shape for n, p in parts_of(v).items()} == {n: p.shape for n, p in parts_of(flat).items()}
        assert_same_bits(t.reshape(wanted).dequantize(), values.view(wanted))
    t.view(rows, 1, shape[-1]).copy_(torch.ones(rows, 1, shape[-1], device=device))
    assert_same_parts(t, FORMATS[name](device=device)(torch.ones(shape, device=device)))


@every_fp8
def test_views_that_change_the_last_dimension(device, name):
    """One scale fits any shape; blocks do not. Columnwise data fits none: such a view is of the rowwise data alone, and
    what is written to it reaches the other direction too."""
    for columnwise in (True, False):
        t = made(name, device, 6, 48)
        t.update_usage(columnwise_usage=columnwise)
        flat = t.view(-1)
        assert_same_bits(flat.float(), t.dequantize().view(-1))
        if name.startswith("block"):
            assert not isinstance(flat, te.QuantizedTensor)
            continue
        assert type(flat) is type(t) and flat.get_usages() == {"rowwise": True, "columnwise": False}
        assert flat._data.data_ptr() == t._data.data_ptr()
        for written in (flat, flat[17:200]):
            written.copy_(torch.full(written.shape, 0.5, device=device))
            assert (written.dequantize() - 0.5).abs().max() < 0.05
            if columnwise:
                assert_same_bits(t._transpose, t._data.t().contiguous())
        assert (t.dequantize() - 0.5).abs().max() < 0.05


@every_fp8
def test_rows(device, name):
    """A view of rows shares memory, in both directions where there is one scale; rows across blocks are values."""
    x = randn(384, 48, device=device)
    whole = FP8_FORMATS[name](device=device)(x)
    alone = FP8_FORMATS[name](device=device, columnwise=False)(x)
    for t in (whole, alone):
        values = t.dequantize()
        for part, want in (
            (t[128:256], values[128:256]),
            (t.narrow(0, 256, 128), values[256:]),
            (torch.chunk(t, 3)[1], values[128:256]),
            (torch.split(t, 256)[1], values[256:]),
        ):
            assert_same_bits(part.dequantize() if isinstance(part, te.QuantizedTensor) else part, want)
            if name == "block1d":
                assert not isinstance(part, te.QuantizedTensor)
                continue
            columnwise = t is whole and name != "block2d"
            assert type(part) is type(t) and part.get_usages() == {"rowwise": True, "columnwise": columnwise}
            before = t.clone()
            part.copy_(torch.ones_like(want))
            assert not torch.equal(t.dequantize(), before.dequantize())
            t.copy_(before)
        assert [p.shape[0] for p in torch.split(t, 250)] == [250, 134]
    assert not any(isinstance(t, te.QuantizedTensor) for t in (whole[:, 3:7], whole[::2], whole[5]))
    assert whole[200:100].shape == (0, 48) and whole[0:0].shape == (0, 48)


def test_rows_across_blocks_are_values(device):
    t = block2d(device=device, columnwise=False)(randn(300, 48, device=device))
    assert not isinstance(t[3:131], te.QuantizedTensor) and type(t[128:300]) is te.Float8BlockwiseQTensor
    assert_same_bits(t[128:300].dequantize(), t.dequantize()[128:300])
    folded = block2d(device=device, columnwise=False)(randn(4, 64, 48, device=device))
    assert not isinstance(folded[1:2], te.QuantizedTensor) and type(folded[2:4]) is te.Float8BlockwiseQTensor
    assert_same_bits(folded[2:4].dequantize(), folded.dequantize()[2:4])


# ---- values go in ----


@every_format
def test_copy_from_values(device, name):
    t, y = made(name, device), randn(6, 40, device=device)
    before = pointers(t)
    assert t.copy_(y) is t and pointers(t) == before
    assert_same_parts(t, FORMATS[name](device=device)(y))
    t.copy_(y[0])  # broadcast
    assert_same_parts(t, FORMATS[name](device=device)(y[0].expand(6, 40)))
    t.copy_(torch.arange(40, device=device))
    assert_same_parts(t, FORMATS[name](device=device)(torch.arange(40.0, device=device).expand(6, 40)))
    t.fill_(2.0)
    assert_same_parts(t, FORMATS[name](device=device)(torch.full((6, 40), 2.0, device=device)))
    t.zero_()
    assert (t.dequantize() == 0).all()


@every_fp8
def test_copy_from_a_quantized_tensor_takes_its_bytes(device, name):
    """Delayed scaling would quantize by another scale: the bytes and the scale come as they are."""
    y = randn(130, 300, device=device) * 5
    src = FP8_FORMATS[name](device=device, **({"scale": 9.0} if name == "delayed" else {}))(y)
    t = made(name, device, 130, 300)
    t.copy_(src)
    assert_same_tensor(t, src)
    if name != "block1d":  # the direction that src lacks is made of the one that it has
        src.update_usage(columnwise_usage=False)
        t.fill_(1.0)
        t.copy_(src)
        assert not src.get_usages()["columnwise"] and t.get_usages()["columnwise"]
        src.update_usage(columnwise_usage=True)
        assert_same_tensor(t, src)
    with refused(ValueError, "copy_from_storage", "'src'", (130, 300), (6, 40)):
        t.copy_from_storage(made(name, device))


@every_format
@pytest.mark.parametrize("other", FORMATS)
def test_copy_between_formats_and_to_values(device, name, other):
    src, t = made(other, device), made(name, device)
    t.copy_(src)
    if other == name or {name, other} == {"delayed", "current"}:  # one format, two ways to a scale
        assert_same_parts(t, src)
    else:
        assert_same_parts(t, FORMATS[name](device=device)(src.dequantize()))
        assert not t.copy_from_storage(src)
    plain = torch.full((6, 40), torch.nan, device=device)
    assert plain.copy_(src) is plain
    assert_same_bits(plain, src.dequantize())


@every_format
def test_operations_in_place_quantize_what_they_wrote(device, name):
    y = randn(6, 40, device=device)
    for change in (
        lambda t: t.add_(y),
        lambda t: t.mul_(0.5),
        lambda t: t.clamp_(-0.5, 0.5),
        lambda t: torch.ops.aten.addcmul_(t, y, y, value=0.25),
        lambda t: torch.neg(t, out=t),
    ):
        t = made(name, device)
        values, before = t.dequantize().clone(), pointers(t)
        assert change(t) is t and pointers(t) == before
        assert_same_parts(t, FORMATS[name](device=device)(change(values)), name)


@every_format
def test_lists_in_place(device, name):
    ts, ys = [made(name, device) for _ in range(2)], [randn(6, 40, device=device) for _ in range(2)]
    values = [t.dequantize().clone() for t in ts]
    torch._foreach_add_(ts, ys, alpha=-0.1)
    torch._foreach_add_(values, ys, alpha=-0.1)
    for t, want in zip(ts, values):
        assert_same_parts(t, FORMATS[name](device=device)(want))
    assert all(type(t) is torch.Tensor for t in torch._foreach_mul(ts, 2.0))


@every_format
def test_a_plain_tensor_takes_what_is_computed(device, name):
    t, y = made(name, device), randn(6, 40, device=device)
    values = t.dequantize()
    assert_same_bits(y.clone().add_(t), y + values)
    out = torch.full((6, 40), torch.nan, device=device)
    assert torch.add(t, y, out=out) is out
    assert_same_bits(out, values + y)


# ---- everything else: values ----

OTHERS = {
    "add": lambda t, y: t + y,
    "radd": lambda t, y: 1.0 - t,
    "matmul": lambda t, y: y @ t.t(),
    "linear": lambda t, y: torch.nn.functional.linear(y, t),
    "sum": lambda t, y: t.sum(0),
    "cat": lambda t, y: torch.cat([t, y, t]),
    "stack": lambda t, y: torch.stack([t, t]),
    "transpose": lambda t, y: t.t(),
    "permute": lambda t, y: t.permute(1, 0),
    "index": lambda t, y: t[torch.tensor([0, 2], device=y.device)],
    "where": lambda t, y: torch.where(t > 0, t, y),
    "isfinite": lambda t, y: t.isfinite(),
    "double": lambda t, y: t.double(),
    "ones_like": lambda t, y: torch.ones_like(t),
    "expand": lambda t, y: t.expand(2, 6, 40),
    "unbind": lambda t, y: torch.stack(t.unbind()),
    "norm": lambda t, y: torch.linalg.vector_norm(t, dim=1),
    "te activation": lambda t, y: te.functional.activation(t, "gelu"),
}


@every_format
@pytest.mark.parametrize("operation", OTHERS)
def test_other_operations_see_the_values(device, name, operation):
    t, y = made(name, device), randn(6, 40, device=device)
    got, want = OTHERS[operation](t, y), OTHERS[operation](t.dequantize(), y)
    assert not isinstance(got, te.QuantizedTensor)
    assert_same_bits(got, want)


@every_format
def test_gradients_reach_a_quantized_parameter(device, name):
    t, y = made(name, device), randn(3, 40, device=device)
    p = torch.nn.Parameter(t)
    assert isinstance(p, torch.nn.Parameter) and type(p) is type(t)
    plain = t.dequantize().requires_grad_()
    torch.nn.functional.linear(y, p).square().sum().backward()
    torch.nn.functional.linear(y, plain).square().sum().backward()
    assert type(p.grad) is torch.Tensor
    assert_same_bits(p.grad, plain.grad)
    p.grad = None
    torch.nn.functional.linear(y, p.view(2, 3, 40).view(6, 40)).square().sum().backward()
    assert_same_bits(p.grad, plain.grad)


# ---- .data ----


@every_format
def test_data_is_taken_and_given(device, name):
    p, y = torch.nn.Parameter(made(name, device)), randn(6, 40, device=device)
    assert type(p.data) is type(p) and not p.data.requires_grad and pointers(p.data) == pointers(p)
    p.data = y
    assert_same_parts(p, FORMATS[name](device=device)(y))
    other = made(name, device).to_dtype(torch.bfloat16)
    p.data = other
    assert isinstance(p, torch.nn.Parameter) and p.requires_grad and p.dtype is torch.bfloat16
    assert pointers(p) == pointers(other)
    for shape in ((3, 40), (2, 5, 16), (0,), (6, 40)):  # values, then data, of another shape
        y = randn(*shape, device=device)
        p.data = y
        want = FORMATS[name](device=device)(y)
        assert isinstance(p, torch.nn.Parameter) and p.is_leaf and p.requires_grad and p.shape == shape
        assert_same_parts(p, want)
        p.data = FORMATS[name](device=device)(randn(7, 24, device=device))
        assert p.shape == (7, 24) and p.dequantize().shape == (7, 24)
        (p * 1.0).sum().backward()
        assert p.grad.shape == (7, 24)
        p.grad = None
        p.data = p.data.new_empty(0)
        assert p.shape == (0,)
        p.data = want
        assert_same_tensor(p.data, want)
    if name != "current":
        with refused(ValueError, "data", "Float8Tensor") if name != "delayed" else refused(ValueError, "data"):
            p.data = current(torch.float8_e5m2, device)(y)
