# activation, the functional op: values and gradients of every kind against float64 formulas, and what holds for each of
# them (layouts, re-emission, compile, autocast, what is saved, errors). A new kind is added to activation_oracles.py.
import math

import pytest
import torch
from activation_oracles import ORACLE
from support import (
    DTYPES,
    U32,
    UNIT_ROUNDOFF,
    addresses,
    assert_same_bits,
    assert_within,
    in_threads,
    layouts,
    randn,
    refused,
    rounding,
    saved_tensors,
    wide,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import activation, activation_kinds

KINDS = sorted(ORACLE)

# Output shapes: no rows, no columns, one element, odd (elementwise access on the GPU), one dimension, three, aligned.
SHAPES = ((0, 8), (4, 0), (1, 1), (3, 5), (2, 130), (7,), (2, 3, 33), (64, 4096))


def draw(kind, shape, dtype, device="cpu", scale=3.0):
    """(x, dy) for an output of that shape. Exact zeros are moved off relu's kink."""
    wide_shape = (*shape[:-1], shape[-1] * (2 if activation_kinds[kind] else 1))
    x = randn(*wide_shape, dtype=dtype, scale=scale)
    x = torch.where(x == 0, 0.5, x).to(device)
    return x.requires_grad_(), randn(*shape, dtype=dtype, device=device)


def evaluate(kind, x64, sigmoid):
    if not activation_kinds[kind]:
        return ORACLE[kind](x64, sigmoid)
    return ORACLE[kind](*x64.chunk(2, -1), sigmoid)


# The bound, u = 2^-24. exp is within 2u (fp32 paths) or (4 + 2.4 |z|) u (the GPU's fast exponential, used for 16-bit
# results), its argument z carries at most 6u |z|, sum and reciprocal 2u (fast division: 5u): s = sigmoid(z) is within
# (9 + 9 |z|) u of itself. A value is a product with one s, at most four more roundings: 32 u (1 + |z|) |y|. A gradient
# is a sum of the part that holds s fixed and the part through ds = s (1 - s) dz, where 1 - s is wrong by what s is,
# not in proportion: 32 u (1 + |z|) (|first| + |second| / (1 - s)) covers both, with their six roundings. Where
# s < 2^-126 the path may answer 0: kSmall makes the bound 2^-126 of what s is multiplied with. The store rounds once.
kSmall = 2.0**-107  # 32 u kSmall = 2^-126


def expected(kind, x, dy):
    """(y, bound of y, dx, bound of dx) in float64."""
    dtype, x64, dy64 = x.dtype, wide(x).requires_grad_(), wide(dy)
    seen = [torch.zeros(dy.shape, dtype=torch.float64)]

    def exact(z):
        seen[0] = z.detach().abs()
        return z.sigmoid()

    def held(z):  # no gradient through it
        return z.sigmoid().clamp(min=kSmall).detach()

    def leaking(z):  # ds = s dz
        return z.sigmoid().clamp(min=kSmall).detach() * (1 + z - z.detach())

    def gradient(y):
        return torch.autograd.grad(y, x64, dy64)[0] if y.requires_grad else torch.zeros_like(x64)

    y = evaluate(kind, x64, exact)
    dx = gradient(y)
    y_held = evaluate(kind, x64, held)
    first = gradient(y_held)
    through = gradient(evaluate(kind, x64, leaking)) - first
    factor = 32 * U32 * (1 + UNIT_ROUNDOFF[dtype]) * (1 + seen[0])
    wide_factor = torch.cat([factor, factor], -1) if activation_kinds[kind] else factor
    y_bound = rounding(y, dtype) + factor * y_held.abs()
    dx_bound = rounding(dx, dtype) + wide_factor * (first.abs() + through.abs())
    return y.detach(), y_bound.detach(), dx, dx_bound


def gradient_of(x, kind, dy):
    return torch.autograd.grad(activation(x, kind), x, dy)[0]


def test_every_kind_has_its_oracle():
    assert set(ORACLE) == set(activation_kinds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_match_the_oracle(kind, dtype, device):
    for shape in SHAPES:
        x, dy = draw(kind, shape, dtype, device)
        y = activation(x, kind)
        assert (y.dtype, y.device) == (x.dtype, x.device)
        want, bound, _, _ = expected(kind, x, dy)
        assert_within(y, want, bound, f"{kind} {shape}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_match_the_oracle(kind, dtype, device):
    for shape in SHAPES:
        x, dy = draw(kind, shape, dtype, device)
        _, _, want, bound = expected(kind, x, dy)
        dx = gradient_of(x, kind, dy)
        assert_within(dx, want, bound, f"{kind} {shape}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_emits_the_forwards_bits(kind, dtype, device):
    for shape in SHAPES:
        x, dy = draw(kind, shape, dtype, device)
        dx, again = _C.activation_bwd(dy, x.detach(), kind, [], True)
        assert_same_bits(again, activation(x, kind), f"{kind} {shape}")
        assert_same_bits(dx, gradient_of(x, kind, dy), f"{kind} {shape}")
        alone, nothing = _C.activation_bwd(dy, x.detach(), kind, [], False)
        assert_same_bits(alone, dx, f"{kind} {shape}")
        assert nothing.numel() == 0


@pytest.mark.parametrize("kind", [k for k in KINDS if activation_kinds[k]])
def test_gated_gradient_is_merged(kind, device):
    """dx = [da | db]: a slope in b alone must land in the right half, one in a alone in the left."""
    a, b = randn(3, 8, device=device), randn(3, 8, device=device)
    one = torch.ones(3, 8, device=device)
    offset = 1.0 if kind == "clamped_swiglu" else 0.0  # act(a) is multiplied with b + offset
    dx = _C.activation_bwd(one, torch.cat([a.abs() + 1, b], -1), kind, [], False)[0]
    y_of_one = activation(torch.cat([a.abs() + 1, one - offset], -1), kind)
    assert_same_bits(dx[:, 8:].contiguous(), y_of_one)  # db = dy act(a)
    dx = _C.activation_bwd(one, torch.cat([a, torch.full_like(b, -offset)], -1), kind, [], False)[0]
    assert not dx[:, :8].any()  # da = dy b act'(a)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_layout_changes_no_bits(kind, dtype, device):
    for shape in ((5, 24), (2, 3, 40)):
        x, dy = draw(kind, shape, dtype, device)
        y, dx = activation(x, kind), gradient_of(x, kind, dy)
        for name, other in layouts(x):
            other.requires_grad_()
            assert_same_bits(activation(other, kind), y, name)
            got = gradient_of(other, kind, dy)
            assert_same_bits(got, dx, name)
            assert got.is_contiguous()
        for name, other in layouts(dy):
            assert_same_bits(gradient_of(x, kind, other), dx, name)


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_stride_0_gradient(kind, device):
    x, _ = draw(kind, (3, 33), torch.float32, device)
    ones = torch.ones(3, 33, device=device)
    activation(x, kind).sum().backward()
    assert_same_bits(x.grad, gradient_of(x, kind, ones))


@pytest.mark.parametrize("kind", ["gelu", "relu", "silu"])
def test_special_values_spread_as_torch_spreads_them(kind, device):
    twin = {"gelu": lambda t: torch.nn.functional.gelu(t, approximate="tanh")}.get(kind, getattr(torch, kind, None))
    twin = twin or torch.nn.functional.silu
    for dtype in DTYPES:
        x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0], dtype=dtype, device=device)
        x = x.repeat(9).requires_grad_()  # vector and tail
        want = twin(x)
        assert_within(activation(x, kind), wide(want), 0.0, f"{kind} {dtype}")
        if kind == "gelu":  # torch's slope at +-Inf is NaN, the limit is 1 or 0
            want_dx = torch.tensor([math.nan, 1.0, 0.0, 0.5, 0.5]).repeat(9)
        else:
            want_dx = torch.autograd.grad(want, x, torch.ones_like(x))[0]
        assert_within(gradient_of(x, kind, torch.ones_like(x)), wide(want_dx), 0.0, f"{kind} {dtype}")


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_in_its_row(kind, device):
    x, dy = draw(kind, (3, 40), torch.float32, device)
    clean = activation(x, kind)
    with torch.no_grad():
        x[1, 7] = math.nan
    y, dx = activation(x, kind), gradient_of(x, kind, dy)
    assert y[1, 7].isnan() and int(y.isnan().sum()) == 1
    assert dx[1, 7].isnan() or kind in ("relu", "reglu")
    assert_same_bits(y[::2].contiguous(), clean[::2].contiguous())
    assert not dx[::2].isnan().any()


# ---- PyTorch around it ----


@pytest.mark.parametrize("kind", ["srelu", "swiglu"])
def test_opcheck(kind, device):
    for shape in ((3, 6), (0, 8)):
        x, dy = draw(kind, shape, torch.float32, device)
        plain = x.detach()
        torch.library.opcheck(torch.ops.te.activation.default, (x, kind, []))
        torch.library.opcheck(torch.ops.te.activation_fwd.default, (plain, kind, []))
        for emit in (True, False):
            torch.library.opcheck(torch.ops.te.activation_bwd.default, (dy, plain, kind, [], emit))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_bits_equal_eager(kind, device):
    compiled = torch.compile(lambda x: activation(x, kind), fullgraph=True, backend="aot_eager", dynamic=True)
    stances = ("default", "fail_on_recompile")  # the second shape must fit the graph of the first
    for shape, stance in zip(((3, 10), (5, 28)), stances, strict=True):
        x, dy = draw(kind, shape, torch.float32, device)
        with torch.compiler.set_stance(stance):
            y = compiled(x)
        assert_same_bits(y, activation(x, kind), kind)
        assert_same_bits(torch.autograd.grad(y, x, dy)[0], gradient_of(x, kind, dy), kind)


@pytest.mark.slow
def test_inductor_bits_equal_eager(device):
    x, dy = draw("swiglu", (4, 16), torch.float32, device)
    y = torch.compile(lambda x: activation(x, "swiglu"), fullgraph=True)(x)
    assert_same_bits(y, activation(x, "swiglu"))
    assert_same_bits(torch.autograd.grad(y, x, dy)[0], gradient_of(x, "swiglu", dy))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, backend, device):
    x, dy = draw("swiglu", (3, 10), torch.float32, device)
    low = x.detach().to(dtype).requires_grad_()
    with torch.autocast(device, dtype=dtype):
        call = activation if backend is None else torch.compile(activation, backend=backend, fullgraph=True)
        y = call(x, "swiglu")
    assert_same_bits(y, activation(low, "swiglu"))
    y.backward(dy.to(dtype))
    assert_same_bits(x.grad, gradient_of(low, "swiglu", dy.to(dtype)).float())


def test_fake_and_meta_tensors_get_shapes():
    with FakeTensorMode() as mode:
        assert activation(torch.empty(3, 8), "swiglu").shape == (3, 4)
    fake = mode.from_tensor(torch.zeros(2, 6))
    assert activation(fake, "gelu").shape == (2, 6)
    assert activation(torch.empty(5, 2, device="meta"), "glu").shape == (5, 1)


def test_nothing_is_kept_without_a_graph(device):
    x, _ = draw("swiglu", (3, 10), torch.float32, device)
    y = activation(x, "swiglu")
    with saved_tensors() as kept, torch.no_grad():
        y_no_grad = activation(x, "swiglu")
    with saved_tensors() as kept_too:
        y_frozen = activation(x.detach(), "swiglu")
    assert kept == kept_too == []
    assert not y_no_grad.requires_grad and not y_frozen.requires_grad
    with torch.inference_mode():
        y_inference = activation(x, "swiglu")
    assert y_inference.is_inference()
    for other in (y_no_grad, y_frozen, y_inference):
        assert_same_bits(other, y)


@pytest.mark.parametrize("kind", KINDS)
def test_the_input_alone_is_saved(kind, device):
    x, dy = draw(kind, (3, 10), torch.float32, device)
    with saved_tensors() as kept:
        activation(x, kind)
    assert addresses(kept) == addresses([x])
    y = activation(x, kind)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_backward_reads_the_tensors_that_hooks_unpack(device):
    x, dy = draw("swiglu", (3, 10), torch.float32, device)
    other, _ = draw("swiglu", (3, 10), torch.float32, device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: other.detach()):
        y = activation(x, "swiglu")
    assert_same_bits(torch.autograd.grad(y, x, dy)[0], gradient_of(other, "swiglu", dy))


def test_double_backward_is_refused_by_name(device):
    x, dy = draw("silu", (3, 5), torch.float32, device)
    with refused(NotImplementedError, "activation", "double backward", "create_graph=True"):
        torch.autograd.grad(activation(x, "silu"), x, dy, create_graph=True)


def test_threads_get_the_same_bits(device):
    x, dy = draw("geglu", (64, 300), torch.bfloat16, device)

    def call(_):
        leaf = x.detach().requires_grad_()
        y = activation(leaf, "geglu")
        y.backward(dy)
        return y, leaf.grad

    y, dx = call(0)
    for other_y, other_dx in in_threads(6, call):
        assert_same_bits(other_y, y)
        assert_same_bits(other_dx, dx)


# ---- errors ----


def bad_calls(device):
    x, dy = torch.ones(3, 8, device=device), torch.ones(3, 4, device=device)
    return (
        (lambda: activation(torch.tensor(1.0, device=device), "silu"), ("'x'", "no dimensions")),
        (lambda: activation(x[:, :7], "swiglu"), ("'x'", "[3, 7]", "even last dimension")),
        (lambda: activation(x.double(), "silu"), ("'x'", "Double", "float32, float16 or bfloat16")),
        (lambda: activation(x.int(), "silu"), ("'x'", "int32", "float32, float16 or bfloat16")),
        (lambda: activation(x, "swish"), ("'kind'", "'swish'", "swiglu")),
        (lambda: activation(x, "silu", (1.0, 2.0)), ("'params'", "2 values", "3")),
        (lambda: activation(x, "silu", (-1.0, 1.0, 1.0)), ("'params.limit'", "-1", "> 0")),
        (lambda: _C.activation_bwd(dy, x, "silu", [], False), ("'dy'", "[3, 4]", "[3, 8]")),
        (lambda: _C.activation_bwd(dy.half(), x, "swiglu", [], False), ("'dy'", "Half", "Float", "cast")),
        (lambda: _C.activation_bwd(dy.to("meta"), x, "swiglu", [], False), ("'dy'", "meta", device, ".to(device)")),
    )


def test_bad_input_is_named_and_harmless(device):
    x, dy = draw("swiglu", (3, 10), torch.float32, device)
    y, dx = activation(x, "swiglu"), gradient_of(x, "swiglu", dy)
    for call, words in bad_calls(device):
        with refused(ValueError, "activation", *words):
            call()
    assert_same_bits(activation(x, "swiglu"), y)
    assert_same_bits(gradient_of(x, "swiglu", dy), dx)


@pytest.mark.gpu
def test_tensor_on_another_gpu_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, dy = draw("swiglu", (3, 10), torch.float32, "cuda:1")
    here = x.detach().to("cuda:0").requires_grad_()
    with torch.cuda.device(0):
        y, dx = activation(x, "swiglu"), gradient_of(x, "swiglu", dy)
    assert y.device == dx.device == x.device
    assert_same_bits(y.to("cuda:0"), activation(here, "swiglu"))
    assert_same_bits(dx.to("cuda:0"), gradient_of(here, "swiglu", dy.to("cuda:0")))
