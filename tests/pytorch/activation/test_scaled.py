# scaled_activation, an activation whose rows have a scale each: its bits are those of activation and a product done
# separately, the scale's gradient is a sum within its bound; a counter of live rows, compile, autocast, errors.
import pytest
import torch
from activation_oracles import ORACLE
from support import (
    DTYPES,
    U32,
    UNIT_ROUNDOFF,
    assert_same_bits,
    assert_within,
    randn,
    refused,
    saved_tensors,
    wide,
)

from transformer_engine.pytorch.functional import activation, activation_kinds, scaled_activation

KINDS = sorted(ORACLE)
SHAPES = ((0, 8), (4, 0), (1, 1), (3, 5), (2, 3, 33), (64, 520))


def draw(kind, shape, dtype, device, scale_dtype=torch.float32):
    """x, scale, dy."""
    x = randn(*shape[:-1], shape[-1] * (2 if activation_kinds[kind] else 1), dtype=dtype, device=device, scale=3.0)
    x = torch.where(x == 0, torch.full_like(x, 0.5), x).requires_grad_()
    scale = randn(*shape[:-1], dtype=scale_dtype, device=device, requires_grad=True)
    return x, scale, randn(*shape, dtype=dtype, device=device)


def separate(x, scale, kind):
    return (activation(x, kind) * scale.unsqueeze(-1)).to(x.dtype)


def check(x, scale, dy, kind, call=scaled_activation):
    y = call(x, scale, kind)
    dx, dscale = torch.autograd.grad(y, (x, scale), dy)
    want = separate(x, scale, kind)
    assert_same_bits(y, want, kind)
    assert_same_bits(dx, torch.autograd.grad(want, x, dy)[0], kind)
    # n products are summed, in any order: a term carries n + 1 roundings; the result is rounded to the scale's dtype.
    terms = wide(dy) * wide(activation(x, kind))
    exact, magnitude = terms.sum(-1), terms.abs().sum(-1)
    bound = (dy.shape[-1] + 1) * U32 * magnitude
    unit = UNIT_ROUNDOFF[scale.dtype]
    assert (dscale.dtype, dscale.shape) == (scale.dtype, scale.shape)
    assert_within(dscale, exact, bound + unit * (exact.abs() + bound) + 2.0**-25 * (scale.dtype == torch.float16), kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_is_an_activation_and_a_product(kind, dtype, device):
    for shape in SHAPES:
        for scale_dtype in {torch.float32, dtype}:
            check(*draw(kind, shape, dtype, device, scale_dtype), kind)


def test_layouts(device):
    x, scale, dy = draw("swiglu", (6, 40), torch.bfloat16, device)
    leaf = x.detach().T.contiguous().T.requires_grad_()
    spread = torch.stack((scale.detach(), scale.detach()), -1)[:, 0].requires_grad_()
    assert not leaf.is_contiguous() and not spread.is_contiguous()
    check(leaf, spread, dy, "swiglu")
    check(leaf, spread, dy.T.contiguous().T, "swiglu")
    negated = torch._neg_view(-scale.detach()).requires_grad_()
    assert negated.is_neg() and negated.is_contiguous()
    check(x, negated, dy, "swiglu")


@pytest.mark.parametrize("wanted", ["x", "scale"])
def test_only_one_needs_a_gradient(wanted, device):
    x, scale, dy = draw("swiglu", (5, 16), torch.bfloat16, device)
    both = torch.autograd.grad(scaled_activation(x, scale, "swiglu"), (x, scale), dy)
    (scale if wanted == "x" else x).requires_grad_(False)
    y = scaled_activation(x, scale, "swiglu")
    assert_same_bits(torch.autograd.grad(y, x if wanted == "x" else scale, dy)[0], both[wanted == "scale"])


def test_what_is_saved(device):
    x, scale, _ = draw("swiglu", (5, 16), torch.bfloat16, device)
    with saved_tensors() as saved:
        scaled_activation(x, scale, "swiglu")
    assert sorted(t.data_ptr() for t in saved) == sorted((x.data_ptr(), scale.data_ptr()))


@pytest.mark.parametrize("live", [0, 3, 5, 9, -2])
def test_rows_after_the_live_ones_are_not_touched(live, device):
    """Inputs are NaN there, and the gradient of the scale is 0."""
    x, scale, dy = (t.detach() for t in draw("swiglu", (5, 24), torch.bfloat16, device))
    rows = min(max(live, 0), 5)
    counter = torch.tensor([live], dtype=torch.int32, device=device)
    want = torch.ops.te.scaled_activation_bwd(dy, x, scale, None, "swiglu", [], True, True)
    want_y = scaled_activation(x, scale, "swiglu")
    for t in (x, scale, dy):
        t[rows:] = torch.nan
    dx, dscale, y = torch.ops.te.scaled_activation_bwd(dy, x, scale, counter, "swiglu", [], True, True)
    for got, all_rows in ((dx, want[0]), (dscale, want[1]), (y, want_y)):
        assert_same_bits(got[:rows], all_rows[:rows])
    assert not dscale[rows:].any()
    y = torch.ops.te.scaled_activation_fwd(x, scale, counter, "swiglu", [])
    assert_same_bits(y[:rows], want_y[:rows])


def test_compiled(device):
    compiled = torch.compile(scaled_activation, fullgraph=True, backend="aot_eager")
    check(*draw("swiglu", (6, 16), torch.bfloat16, device), "swiglu", call=compiled)


def test_autocast_casts_x_alone(device):
    x, scale, dy = draw("swiglu", (6, 16), torch.float32, device)
    want = scaled_activation(x.bfloat16(), scale, "swiglu")
    with torch.autocast(device, dtype=torch.bfloat16):
        for call in (scaled_activation, torch.ops.te.scaled_activation):
            y = call(x, scale, "swiglu") if call is scaled_activation else call(x, scale, "swiglu", [])
            assert_same_bits(y, want)
    assert torch.autograd.grad(y, scale, dy.bfloat16())[0].dtype == torch.float32


def test_opcheck(device):
    x, scale, dy = draw("swiglu", (6, 16), torch.bfloat16, device)
    live = torch.tensor([6], dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.te.scaled_activation.default, (x, scale, "swiglu", []))
    plain = x.detach(), scale.detach()
    torch.library.opcheck(torch.ops.te.scaled_activation_fwd.default, (*plain, live, "swiglu", []))
    for needs_dscale, emit in ((True, True), (False, False)):
        args = (dy, *plain, live, "swiglu", [], needs_dscale, emit)
        torch.library.opcheck(torch.ops.te.scaled_activation_bwd.default, args)


def test_errors(device):
    x, scale, _ = draw("swiglu", (6, 16), torch.bfloat16, device)
    with refused(ValueError, "scaled_activation", "'scale'", "[5]", "[6]"):
        scaled_activation(x, scale[:5], "swiglu")
    with refused(ValueError, "scaled_activation", "'scale'", "[6, 1]"):
        scaled_activation(x, scale.unsqueeze(-1), "swiglu")
    with refused(ValueError, "scaled_activation", "'scale'", "Half", "float32"):
        scaled_activation(x, scale.half(), "swiglu")
    with refused(ValueError, "activation", "'kind'", "no such"):
        scaled_activation(x, scale, "no such")
    with refused(ValueError, "scaled_activation", "'live'", "Long", "int32"):
        torch.ops.te.scaled_activation_fwd(x, scale, torch.tensor([3], device=device), "swiglu", [])
