# The linear family on FP8 operands: linear, normalization_linear, activation_linear and layernorm_mlp are, bit for bit,
# their ops' functions one after the other, for each way of scaling; what they keep for backward; recomputation; where
# weight gradients go; torch.compile.
import pytest
import torch
from fp8_products import RECIPES, product, spelled_out
from support import assert_same_bits, assert_within, call_op, randn, saved_tensors

from transformer_engine.pytorch import _C, functional

SHAPES = (((32,), 64, 48), ((2, 3), 16, 32), ((5,), 17, 3), ((1,), 1, 1), ((0,), 16, 16), ((130,), 300, 130))


def leaves(leading, k, n, device, dtype=torch.bfloat16):
    x = randn(*leading, k, dtype=dtype, device=device, requires_grad=True)
    weight = randn(n, k, dtype=dtype, device=device, scale=k**-0.5, requires_grad=True)
    bias = randn(n, dtype=dtype, device=device, requires_grad=True)
    return x, weight, bias, randn(*leading, n, dtype=dtype, device=device)


def grads(y, inputs, dy):
    return torch.autograd.grad(y, inputs, dy)


def assert_sums(got, dy):
    """A bias gradient: float32 sums of dy's columns in some order, rounded once."""
    rows = dy.reshape(-1, dy.shape[-1]).double().cpu()
    bound = rows.abs().sum(0) * (len(rows) * 2**-24) + rows.sum(0).abs() * torch.finfo(dy.dtype).eps
    assert_within(got, rows.sum(0), bound)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("leading, k, n", SHAPES)
def test_linear(device, recipe, leading, k, n):
    x, weight, bias, dy = leaves(leading, k, n, device)
    p, again = product(recipe, device), product(recipe, device)
    y = functional.linear(x, weight, bias, quantization=p.native)
    got = grads(y, (x, weight, bias), dy)
    want = spelled_out(again, x.detach(), weight.detach(), bias.detach(), dy)
    assert_same_bits(y, want[0])
    assert_same_bits(got[0], want[1])
    assert_same_bits(got[1], want[2])
    assert_sums(got[2], dy)
    for name, amax in p.amaxes.items():
        if amax is not None:
            assert_same_bits(amax, again.amaxes[name])


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_what_is_wanted(device, recipe):
    x, weight, bias, dy = leaves((32,), 64, 48, device)
    full = grads(functional.linear(x, weight, bias, quantization=product(recipe, device).native), (x, weight, bias), dy)
    for wanted in range(1, 8):
        inputs = [t.detach().requires_grad_(bool(wanted >> i & 1)) for i, t in enumerate((x, weight, bias))]
        with saved_tensors() as kept:
            y = functional.linear(*inputs, quantization=product(recipe, device).native)
        sizes = [t.numel() for t in kept if t.dtype == torch.uint8]
        assert sizes == [weight.numel()] * inputs[0].requires_grad + [x.numel()] * inputs[1].requires_grad
        assert all(t.dtype in (torch.uint8, torch.float32) for t in kept), "nothing is kept twice"
        chosen = [i for i in range(3) if wanted >> i & 1]
        for i, got in zip(chosen, grads(y, [inputs[i] for i in chosen], dy), strict=True):
            if i < 2:
                assert_same_bits(got, full[i])


@pytest.mark.parametrize("recipe", RECIPES)
def test_own_weight_and_kept_input(device, recipe):
    x, weight, bias, dy = leaves((32,), 64, 48, device)
    want_y = functional.linear(x, weight, bias, quantization=product(recipe, device).native)
    want = grads(want_y, (x, weight, bias), dy)
    p = product(recipe, device)
    own = _C.quantize(p.quantizers["weight"], weight.detach(), True, True)
    with saved_tensors() as kept:
        y = functional.linear(x, weight, bias, quantization=p.native, own_weight=own, keep_input=True)
    assert own.columnwise.data_ptr() in [t.data_ptr() for t in kept]
    assert x.data_ptr() in [t.data_ptr() for t in kept]
    assert_same_bits(y, want_y)
    for got, wanted in zip(grads(y, (x, weight, bias), dy), want, strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rms", (True, False))
@pytest.mark.parametrize("recompute", (False, True))
def test_normalization_linear(device, recipe, rms, recompute):
    x, weight, bias, dy = leaves((34,), 64, 48, device)
    gamma = randn(64, dtype=torch.bfloat16, device=device, requires_grad=True)
    beta = None if rms else randn(64, dtype=torch.bfloat16, device=device, requires_grad=True)
    residual = randn(34, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    inputs = [t for t in (x, gamma, beta, residual, weight, bias) if t is not None]
    norm = functional.normalization(x, gamma, beta, rms=rms, residual=residual)
    want_y = functional.linear(norm[0], weight, bias, quantization=product(recipe, device).native)
    want = torch.autograd.grad((want_y, norm[1]), inputs, (dy, residual.detach()))
    for return_output in (True, False):
        y, out, h = functional.normalization_linear(
            x,
            gamma,
            beta,
            weight,
            bias,
            rms=rms,
            residual=residual,
            return_output=return_output,
            recompute_output=recompute,
            quantization=product(recipe, device).native,
        )
        assert_same_bits(y, want_y)
        assert_same_bits(h, norm[1])
        assert out.numel() == 0 if not return_output else torch.equal(out, norm[0])
        for got, wanted in zip(torch.autograd.grad((y, h), inputs, (dy, residual.detach())), want, strict=True):
            assert_same_bits(got, wanted)


def mlp_leaves(device, kind, rows=34, hidden=32, ffn=48):
    gated = functional.activation_kinds[kind]
    half = torch.bfloat16
    x = randn(rows, hidden, dtype=half, device=device, requires_grad=True)
    gamma = randn(hidden, dtype=half, device=device, requires_grad=True)
    fc1 = randn(ffn * (2 if gated else 1), hidden, dtype=half, device=device, scale=hidden**-0.5, requires_grad=True)
    bias1 = randn(len(fc1), dtype=half, device=device, requires_grad=True)
    fc2 = randn(hidden, ffn, dtype=half, device=device, scale=ffn**-0.5, requires_grad=True)
    bias2 = randn(hidden, dtype=half, device=device, requires_grad=True)
    return (x, gamma, fc1, bias1, fc2, bias2), randn(rows, hidden, dtype=half, device=device)


def mlp(inputs, kind, products, **options):
    x, gamma, fc1, bias1, fc2, bias2 = inputs
    natives = tuple(p and p.native for p in products)
    out = functional.layernorm_mlp(
        x, gamma, None, fc1, bias1, fc2, bias2, rms=True, kind=kind, quantizations=natives, **options
    )
    return out[0]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ("swiglu", "gelu", "srelu"))
def test_layernorm_mlp(device, recipe, kind):
    inputs, dy = mlp_leaves(device, kind)
    x, gamma, fc1, bias1, fc2, bias2 = inputs
    first, second = product(recipe, device), product(recipe, device, scale=7.0)
    pre, _, _ = functional.normalization_linear(x, gamma, None, fc1, bias1, rms=True, quantization=first.native)
    want_y = functional.activation_linear(pre, fc2, bias2, kind=kind, quantization=second.native)
    want = grads(want_y, inputs, dy)
    for options in ({}, {"recompute": True}, {"recompute_output": True}, {"return_output": False}):
        products = product(recipe, device), product(recipe, device, scale=7.0)
        y = mlp(inputs, kind, products, **options)
        assert_same_bits(y, want_y)
        for got, wanted in zip(grads(y, inputs, dy), want, strict=True):
            assert_same_bits(got, wanted)
        for p, seen in zip(products, (first, second), strict=True):
            for name, amax in p.amaxes.items():
                assert amax is None or torch.equal(amax, seen.amaxes[name]), f"{options}: {name}"


@pytest.mark.parametrize("recipe", (None, *RECIPES))
def test_packed_pre_activation(device, recipe):
    """Kept as FP8, the pre-activation costs half; recomputing gives the same bits."""
    inputs, dy = mlp_leaves(device, "swiglu", rows=96, hidden=32, ffn=128)
    results = []
    for options in ({"fp8_pre_activation": True}, {"fp8_pre_activation": True, "recompute": True}, {}):
        products = [recipe and product(recipe, device) for _ in range(2)]
        with saved_tensors() as kept:
            y = mlp(inputs, "swiglu", products, **options)
        sizes = {t.nbytes for t in kept}
        assert (96 * 256 in sizes) == (options == {"fp8_pre_activation": True}), "1 B for each element, gate and up"
        assert (2 * 96 * 256 in sizes) == (options == {})
        results.append((y, *grads(y, inputs, dy)))
    for packed, again in zip(results[0], results[1], strict=True):
        assert_same_bits(packed, again)
    assert_same_bits(results[0][0], results[2][0])
    # E4M3 has 3 bits of mantissa: gradients of the packed one are near those of the plain one, and not the same.
    for packed, plain in zip(results[0][1:3], results[2][1:3], strict=True):
        error = (packed - plain).float().norm() / plain.float().norm()
        assert 0 < error < 0.1


@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("leading", ((34,), (2, 17), (1, 2, 17), ()))
def test_packed_pre_activation_of_any_dimensions(device, leading, recompute):
    inputs, dy = mlp_leaves(device, "swiglu", rows=34 if leading else 1)
    shaped = (inputs[0].detach().view(*leading, -1).requires_grad_(), *inputs[1:])
    dy_shaped = dy.view(shaped[0].shape)
    options = {"fp8_pre_activation": True, "recompute": recompute}
    y, want = mlp(shaped, "swiglu", (None, None), **options), mlp(inputs, "swiglu", (None, None), **options)
    assert_same_bits(y, want.view(y.shape))
    for got, wanted in zip(grads(y, shaped, dy_shaped), grads(want, inputs, dy), strict=True):
        assert_same_bits(got, wanted.view(got.shape))


@pytest.mark.parametrize("recipe", RECIPES)
def test_weight_gradients_elsewhere(device, recipe):
    x, weight, bias, dy = leaves((32,), 64, 48, device)
    want = grads(functional.linear(x, weight, bias, quantization=product(recipe, device).native), (weight, bias), dy)
    main = torch.ones(48, 64, device=device)
    left = []

    def grad_accumulator(work, with_bias):
        left.append((work, with_bias))
        return None, None

    functional.linear(
        x, weight, bias, quantization=product(recipe, device).native, grad_accumulator=grad_accumulator
    ).backward(dy)
    ((work, with_bias),) = left
    assert with_bias and work.reads == [] and work.dtype == torch.bfloat16
    dweight, dbias = work.compute(True)
    assert_same_bits(dweight, want[0])
    assert_same_bits(dbias, want[1])
    sums = torch.cat([work.accumulate(main, 0, 48, True, False)])
    assert_same_bits(sums, want[1])
    product_gradient = want[0].double().cpu()
    assert_within(main, 1 + product_gradient, 2**-8 * product_gradient.abs() + 2**-20)
    parts = [torch.full((rows, 64), float("nan"), device=device) for rows in (17, 31)]
    work.accumulate(parts[0], 0, 17, False, True)
    work.accumulate(parts[1], 17, 31, False, True)
    whole = torch.empty(48, 64, device=device)
    work.accumulate(whole, 0, 48, False, True)
    whole = whole.double().cpu()
    assert_within(torch.cat(parts), whole, 2**-18 * whole.abs() + 2**-18)


@pytest.mark.parametrize("recipe", ("current", "block"))
def test_compile(device, recipe):
    inputs, dy = mlp_leaves(device, "swiglu")
    spec = product(recipe, device).spec
    products = product(recipe, device), product(recipe, device)

    def compiled(x, gamma, fc1, bias1, fc2, bias2):
        return functional.layernorm_mlp(
            x, gamma, None, fc1, bias1, fc2, bias2, rms=True, kind="swiglu", quantizations=(spec, spec)
        )[0]

    want_y = mlp(inputs, "swiglu", products)
    want = grads(want_y, inputs, dy)
    y = torch.compile(compiled, backend="aot_eager", fullgraph=True)(*inputs)
    assert_same_bits(y, want_y)
    for got, wanted in zip(grads(y, inputs, dy), want, strict=True):
        assert_same_bits(got, wanted)


def test_bad_input(device):
    x, weight, bias, _ = leaves((32,), 64, 48, device)
    native = product("current", device).native
    with pytest.raises(ValueError, match=r"'x' has shape .*63.*wanted a last dimension of 64"):
        functional.linear(x[:, :63], weight, bias, quantization=native)
    with pytest.raises(ValueError, match="'weight' has dtype Float"):
        functional.linear(x, weight.float(), bias, quantization=native)
    with pytest.raises(ValueError, match="'bias' has shape"):
        functional.linear(x, weight, bias[:3], quantization=native)
    with pytest.raises(NotImplementedError, match=r"delayed scaling .* torch\.compile"):
        spec = product("delayed", device).spec
        call_op(torch.ops.te.linear.default, x=x, weight=weight, bias=bias, quantization=spec)
    with pytest.raises(ValueError, match="'quantization' has 3 integers"):
        call_op(torch.ops.te.linear.default, x=x, weight=weight, bias=bias, quantization=[1, 2, 3])
