# Writes through views of quantized tensors: rows are written where they are, whatever the scale, and every direction
# follows; a result that is not a view of the memory cannot be written.
import copy
import io

import pytest
import torch
from quantized_cases import (
    FORMATS,
    FP8_FORMATS,
    assert_directions_agree,
    assert_readable,
    assert_same_bits,
    current,
    delayed,
)
from support import randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

ROWS = {name: FP8_FORMATS[name] for name in ("delayed", "current", "block2d")}  # rows of these stay quantized
with_rows = pytest.mark.parametrize("name", ROWS)
every_format = pytest.mark.parametrize("name", FORMATS)
both_or_one = pytest.mark.parametrize("columnwise", [True, False], ids=["both directions", "rowwise"])


def quantized(name, device, columnwise=True, shape=(384, 48), factor=1.0):
    return ROWS[name](device=device, columnwise=columnwise)(randn(*shape, device=device) * factor)


def set_rows(t, values):
    t[128:256] = values


def masked(t):
    t[128:256].masked_fill_(t[128:256] > 0, 0.25)


def put(t):
    index = torch.arange(0, 128, 2, device=t.device)
    t[128:256].index_put_((index,), torch.tensor(0.5, device=t.device))


WRITES = {
    "zero": lambda t: t[128:256].zero_(),
    "fill": lambda t: t[128:256].fill_(0.5),
    "set a number": lambda t: set_rows(t, 0.5),
    "set values": lambda t: set_rows(t, torch.full((128, 48), 0.25, device=t.device)),
    "narrow": lambda t: t.narrow(0, 128, 128).zero_(),
    "chunk": lambda t: t.chunk(3)[1].mul_(0.5),
    "split": lambda t: t.split(128)[1].mul_(0.5),
    "split in sizes": lambda t: t.split([128, 128, 128])[1].mul_(0.5),
    "tensor_split": lambda t: torch.tensor_split(t, 3)[1].mul_(0.5),
    "copy": lambda t: t[128:256].copy_(torch.full((48,), 0.25)),
    "of data": lambda t: t.data[128:256].zero_(),
    "of detached": lambda t: t.detach()[128:256].mul_(-1.0),
    "of a view": lambda t: t.view(3, 128, 48)[1:2].mul_(0.5),
    "a view of it": lambda t: t[128:256].view(2, 64, 48).mul_(0.5),
    "rows of rows": lambda t: t[128:384][:128].mul_(0.5),
    "another format": lambda t: t[128:256].copy_(FORMATS["block1d"](device=t.device)(t[:128] * 0.5)),
    "the same format": lambda t: t[128:256].copy_(current(device=t.device)(t.to(torch.float32, copy=True)[:128] * 0.5)),
    "index_put_": put,
    "masked_fill_": masked,
    "inference": torch.inference_mode()(lambda t: t[128:256].zero_()),
    "random": lambda t: t[128:256].uniform_(-0.5, 0.5, generator=torch.Generator(t.device).manual_seed(3)),
    "a list": lambda t: torch._foreach_mul_([t[128:256]], 0.5),
}


@with_rows
@both_or_one
@pytest.mark.parametrize("write", WRITES)
def test_rows_are_written_and_no_others(device, name, columnwise, write):
    """Values that fit the existing scale change nothing beside them."""
    t = quantized(name, device, columnwise)
    before, version = t.dequantize(), t._version
    plain = before.clone()
    WRITES[write](t)
    WRITES[write](plain)
    assert_same_bits(t.dequantize()[:128], before[:128], "rows in front")
    assert_same_bits(t.dequantize()[256:], before[256:], "rows behind")
    got, want = t.dequantize()[128:256], plain[128:256]
    assert not torch.equal(got, before[128:256])
    # One rounding to E4M3 (2**-4 of the value, or half the step of its subnormals, 2**-10 by the scale); a source that
    # is quantized has been rounded before.
    scale_inv = max(part.max().item() for name, part in t._tensors().items() if "scale" in name)
    once = 2.0**-4 * want.abs() + 2.0**-10 * scale_inv
    assert ((got - want).abs() <= once * (2.1 if "format" in write else 1)).all()
    assert_directions_agree(t)
    assert_readable(t)
    assert write in ("of data", "inference") or t._version > version  # as torch has it


@pytest.mark.parametrize("name", ["delayed", "current"])
@both_or_one
@pytest.mark.parametrize("rows", [(0, 2), (1, 4), (5, 6)], ids=str)
def test_what_has_no_room_takes_all_rows_along(device, name, columnwise, rows):
    """100 times larger than the values before: nothing is clipped, and the other rows keep their values but for a
    rounding."""
    first, last = rows
    values = randn(last - first, 40, device=device) * 100
    quantizer = ROWS[name](device=device, columnwise=columnwise)
    t = quantizer(randn(6, 40, device=device))
    if name == "delayed":
        quantizer.scale.fill_(448 / 400)  # as a module's would by now
    before = t.dequantize()
    view = t[first:last]
    view.copy_(values)
    got, scale_inv = t.dequantize(), t._scale_inv.item()
    plain = before.clone()
    plain[first:last] = values
    half_step = 2.0**-10 * scale_inv  # of E4M3's subnormals
    assert ((got - plain).abs() <= 2.0**-4 * plain.abs() + half_step).all()
    assert_same_bits(view.dequantize(), got[first:last])
    assert_same_bits(got[first:last], quantizer(values).dequantize())
    assert_directions_agree(t)
    assert_directions_agree(view)
    assert_readable(t)


@with_rows
@both_or_one
def test_what_is_written_to_the_whole_shows_in_its_rows(device, name, columnwise):
    t = quantized(name, device, columnwise)
    rows, values = t[128:256], randn(384, 48, device=device) * 7
    t.copy_(values)
    assert_same_bits(rows.dequantize(), t.dequantize()[128:256])
    assert_directions_agree(rows)


@with_rows
def test_rows_alone_in_a_tensor_are_quantized_as_such(device, name):
    """A shard with padding after it: no other values need the scale, which may become smaller again."""
    whole = quantized(name, device, False, (256, 48)).new_zeros(256, 48)
    rows = torch.nn.Parameter(whole[:128]) if name == "block2d" else torch.nn.Parameter(whole.narrow(0, 0, 100))
    for factor in (3.0, 200.0, 2.0**-6):
        values = randn(*rows.shape, device=device) * factor
        want = ROWS[name](device=device, columnwise=False)(values)
        rows.data.copy_(values)
        assert_same_bits(rows.dequantize(), want.dequantize())
        assert (whole.dequantize()[len(rows) :] == 0).all()
        with torch.no_grad():
            rows.copy_(want)
        assert_same_bits(rows.dequantize(), want.dequantize())


@with_rows
@both_or_one
def test_a_tensor_is_filled_piece_by_piece(device, name, columnwise):
    """With any bytes in the unwritten memory."""
    like, values = quantized(name, device, columnwise), randn(384, 48, device=device) / 50
    for factor in (1.0, 2.0**-8):
        t = torch.empty_like(like)
        for part in t._tensors().values():
            if part.dtype is torch.uint8:
                part.fill_(0x7F)
        for rows, want in zip(t.chunk(3), (values * factor).chunk(3)):
            rows.copy_(want)
        # Rounded again where a later piece is larger; half a step of the subnormals each time.
        scale_inv = max(part.max().item() for name, part in t._tensors().items() if "scale" in name)
        wanted = values * factor
        assert ((t.dequantize() - wanted).abs() <= 2.0**-3 * 1.1 * wanted.abs() + 2.0**-9 * scale_inv).all()
        assert name == "delayed" or scale_inv <= 2 * wanted.abs().max() / 448
        assert_directions_agree(t)


def test_rows_that_bring_their_scale_have_the_bits_of_a_tensor_of_their_own(device):
    """Values halfway between two of E4M3, where the last bit of the scale decides."""
    between = torch.tensor([2.0**e * (m + 0.5) / 8 for e in range(1, 8) for m in range(8, 16)], device=device)
    for amax in torch.arange(1.0, 40.0) / 7:
        values = torch.cat([between, between.new_tensor([448.0])])[None] * (amax / 448)
        t = current(device=device)(torch.full((3, 57), amax / 9, device=device))
        t[1:2].copy_(values)
        assert_same_bits(t.dequantize()[1:2], current(device=device)(values).dequantize())


@pytest.mark.parametrize("name", [*ROWS, "identity"])
def test_rows_take_quantized_rows(device, name):
    t = FORMATS[name](device=device)(randn(384, 48, device=device))
    before, rows = t.dequantize(), t[128:256]
    rows.copy_(t[:128].clone())
    assert_same_bits(t.dequantize(), torch.cat([before[:128], before[:128], before[256:]]))
    assert_directions_agree(t)


def test_a_set_noop_flag_changes_no_rows(device):
    for noop, changed in ((1.0, False), (0.0, True)):
        t = quantized("current", device, True, (6, 40))
        before = t.clone()
        t[1:3].quantize_(randn(2, 40, device=device) * 50, noop_flag=torch.full((1,), noop, device=device))
        assert torch.equal(t.dequantize(), before.dequantize()) != changed
        assert_directions_agree(t)


def test_amaxes_of_rows_are_noted(device):
    quantizer = delayed(device=device, scale=1.0)
    t = quantizer(torch.ones(4, 16, device=device))
    quantizer.amax.zero_()
    t[:2].copy_(torch.full((2, 16), 30.0, device=device))
    assert quantizer.amax.item() == 30.0
    t[2:] = torch.nan
    assert t.dequantize()[2:].isnan().all() and (t.dequantize()[:2] == 30).all()
    t[2:] = torch.inf
    assert (t.dequantize()[:2] == 30).all()


@with_rows
def test_rows_that_leave_the_tensor_are_no_longer_of_it(device, name):
    t = quantized(name, device)
    rows = t[128:256]
    before = t.dequantize()
    buffer = io.BytesIO()
    torch.save(rows, buffer)
    buffer.seek(0)
    for other in (rows.clone(), copy.deepcopy(rows), torch.load(buffer, weights_only=True), rows.to(device, copy=True)):
        other.fill_(3.0)
        assert_same_bits(t.dequantize(), before)
        assert other.dequantize().sub(3).abs().max() < 0.2


@with_rows
def test_directions_that_rows_made_for_themselves_follow(device, name):
    t = quantized(name, device, columnwise=False)
    rows = t[128:256]
    rows.update_usage(columnwise_usage=True)
    rows.mul_(-0.5)
    assert_same_bits(rows.dequantize(), t.dequantize()[128:256])
    assert_directions_agree(rows)
    t.update_usage(columnwise_usage=True)
    rows.mul_(-0.5)
    assert_directions_agree(t)


def test_a_backward_that_saved_the_tensor_detects_written_rows(device):
    weight = torch.nn.Parameter(quantized("current", device, True, (6, 40)))
    y = randn(3, 40, device=device, requires_grad=True) @ weight.t()
    with torch.no_grad():
        weight[:2].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_an_invalid_transpose_stays_invalid_until_it_is_made_again(device, name):
    """After a direct write of the bytes was announced, copies, aliases and writes do not take it for valid again."""
    t = quantized(name, device, True, (6, 40))
    t._data.zero_()
    t._reset_caches()
    parameter = torch.nn.Parameter(t)
    other = quantized(name, device, True, (6, 40))
    other.data = t
    others = t.clone(), t.detach(), copy.deepcopy(t), parameter, other, t[:3]
    for one in (*others, t):
        assert one.get_usages() == {"rowwise": True, "columnwise": False}
    t.quantize_(randn(6, 40, device=device) * 3)
    t.mul_(0.5)
    t[:2].fill_(1.0)
    for one in (*others, t):
        one.update_usage(columnwise_usage=True)
        assert_directions_agree(one)
    assert torch.equal(parameter.dequantize(), t.dequantize())


# ---- results that are not views ----

VALUES = {
    "t": lambda t: t.t(),
    "transpose": lambda t: t.transpose(0, 1),
    "permute": lambda t: t.permute(1, 0),
    "columns": lambda t: t[:, 3:7],
    "every other row": lambda t: t[::2],
    "one row": lambda t: t[5],
    "select": lambda t: t.select(0, 1),
    "unbind": lambda t: t.unbind()[2],
    "unsqueeze": lambda t: t.unsqueeze(-1),
    "expand": lambda t: t.expand(2, 6, 40),
    "diagonal": lambda t: t.diagonal(),
    "unfold": lambda t: t.unfold(1, 4, 4),
    "of a view": lambda t: t.t()[1:3],
    "detached": lambda t: t.t().detach(),
    "data": lambda t: t.t().data,
    "split columns": lambda t: t.split(8, 1)[1],
    "flat": lambda t: t.view(-1),
    "reshaped": lambda t: t.reshape(8, 30),
}
INTO = {
    "zero_": lambda v: v.zero_(),
    "fill_": lambda v: v.fill_(1.0),
    "mul_": lambda v: v.mul_(2.0),
    "copy_": lambda v: v.copy_(torch.zeros_like(v)),
    "index_put_": lambda v: v.index_put_((torch.tensor([0], device=v.device),), v.new_ones(())),
    "masked_fill_": lambda v: v.masked_fill_(v > 0, 1.0),
    "add": lambda v: torch.add(v, 1.0, out=v),
    "_foreach_add_": lambda v: torch._foreach_add_([v], 1.0),
    "normal_": lambda v: torch.nn.init.normal_(v),
}


@every_format
@pytest.mark.parametrize("view", VALUES)
def test_values_of_a_view_are_read_and_not_written(device, name, view):
    t = FORMATS[name](device=device)(randn(6, 40, device=device))
    before = t.dequantize().clone()
    values, want = VALUES[view](t), VALUES[view](t.dequantize())
    assert values.stride() == want.stride()
    assert_same_bits(values.float(), want)
    if name == "identity":  # its values are memory
        values.zero_()
        assert not torch.equal(t.dequantize(), before)
        return
    assert not isinstance(values, te.QuantizedTensor)
    assert values.tolist() == want.tolist() and repr(values) == repr(want)
    for op, write in INTO.items():
        with refused(RuntimeError, type(t).__name__, f"{op} would write", "dequantize()"):
            write(values)
    with refused(RuntimeError, "would write"):
        values[...] = 0
    assert_same_bits(t.dequantize(), before)
    assert_same_bits(values, want)


def test_results_from_values_of_a_view_are_plain(device):
    t = quantized("current", device, True, (6, 40))
    values, want = t.t(), t.dequantize().t()
    for made in (values + 0, values.clone(), values.contiguous(), values.to(torch.float64), torch.stack([values])):
        assert type(made) is torch.Tensor
    buffer = io.BytesIO()
    torch.save(values, buffer)
    buffer.seek(0)
    for other in (torch.load(buffer, weights_only=True), copy.deepcopy(values), copy.copy(values)):
        assert_same_bits(other, want)
    assert type(copy.deepcopy(values)) is torch.Tensor
    assert (values.cpu().numpy() == want.cpu().numpy()).all()
    plain = torch.zeros(40, 6, device=device)
    assert plain.copy_(values) is plain and torch.equal(plain, want)
    t.copy_(values.t())
    for name in FP8_FORMATS:
        assert torch.equal(
            FORMATS[name](device=device)(values).dequantize(), FORMATS[name](device=device)(want).dequantize()
        )
    linear = te.Linear(6, 16, device=device)
    assert_same_bits(linear(values), linear(want))
    for recipe in (DelayedScaling(), Float8CurrentScaling()):
        results = []
        for x in (t.detach().requires_grad_(), t.dequantize().requires_grad_()):
            layer = copy.deepcopy(linear)
            with te.autocast(recipe=recipe):
                y = layer(x.t())
            y.sum().backward()
            results.append((y, x.grad))
        assert_same_bits(results[0][0], results[1][0])
        assert_same_bits(results[0][1], results[1][1])


def test_a_gradient_goes_through_the_values_of_a_view(device):
    weight = torch.nn.Parameter(quantized("current", device, True, (6, 40)))
    (weight.t() * 2).sum().backward()
    assert_same_bits(weight.grad, torch.full((6, 40), 2.0, device=device))
