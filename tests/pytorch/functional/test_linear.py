# linear and activation_linear as functions: values and gradients against float64, what is kept for backward, layouts,
# compile, autocast, errors. The module is in module/test_linear.py.
import math

import pytest
import torch
from fp8_products import product
from support import (
    DTYPES,
    addresses,
    assert_same_bits,
    assert_within,
    in_threads,
    layouts,
    randn,
    refused,
    rounding,
    saved_tensors,
    sum_error,
    wide,
)

from transformer_engine.pytorch.functional import activation, activation_linear, linear

CURRENT, BLOCK = (product(recipe).spec for recipe in ("current", "block"))
FEATURES = ((7, 5), (1, 1), (16, 24), (130, 33), (64, 256))
LEADING = ((5,), (), (0,), (1,), (2, 3), (3, 0, 2), (2, 1, 24))


def draw(leading, features, dtype, device, bias=True):
    """Leaves x, weight, bias and the output's gradient. The weight is scaled so that outputs are near 1."""
    k, n = features
    x = randn(*leading, k, dtype=dtype, device=device, requires_grad=True)
    weight = randn(n, k, dtype=dtype, device=device, scale=1 / math.sqrt(max(k, 1)), requires_grad=True)
    dy = randn(*leading, n, dtype=dtype, device=device)
    return x, weight, randn(n, dtype=dtype, device=device, requires_grad=True) if bias else None, dy


# Bounds: a product of `terms` terms is summed in float32, in any order; tensor cores truncate where adders round, so a
# term costs 2u of the sum of the magnitudes. One rounding at the store. A bias is one term more, and the product may be
# rounded before it is added: by LibTorch's linear at some memory layouts, by cuBLASLt at sizes that 8 does not divide.


def product_within(actual, left, right, what, add=None):
    """actual is left @ right (+ add), with operands of any 2-D shape in float64."""
    want, magnitude = left @ right, left.abs() @ right.abs()
    if add is not None:
        want, magnitude = want + add, magnitude + add.abs()
    error = sum_error(magnitude, 2 * left.shape[1] + 1)
    if add is not None:
        error = error + rounding(want - add, actual.dtype)
    assert_within(actual.reshape(want.shape), want, error + rounding(want, actual.dtype), what)


def check_against_oracle(x, weight, bias, dy, y, grads, what=""):
    """y and those of grads = (dx, dweight, dbias) that are there."""
    rows = math.prod(x.shape[:-1])
    x64, w64, dy64 = wide(x).reshape(rows, x.shape[-1]), wide(weight), wide(dy).reshape(rows, dy.shape[-1])
    dx, dweight, dbias = grads
    assert (y.dtype, y.shape) == (x.dtype, (*x.shape[:-1], weight.shape[0])), what
    product_within(y, x64, w64.T, f"{what} y", None if bias is None else wide(bias))
    if dx is not None:
        assert (dx.dtype, dx.shape, dx.is_contiguous()) == (x.dtype, x.shape, True), what
        product_within(dx, dy64, w64, f"{what} dx")
    if dweight is not None:
        assert dweight.dtype == weight.dtype, what
        product_within(dweight, dy64.T, x64, f"{what} dweight")
    if dbias is not None:
        assert dbias.dtype == bias.dtype, what
        product_within(dbias, torch.ones(1, dy64.shape[0], dtype=torch.float64), dy64, f"{what} dbias", None)


def gradients(y, inputs, dy):
    """Gradients of the inputs that want one, None for the others."""
    wanting = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(y, wanting, dy)) if wanting else iter(())
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(dtype, with_bias, device):
    for leading in LEADING:
        for features in FEATURES:
            x, weight, bias, dy = draw(leading, features, dtype, device, with_bias)
            y = linear(x, weight, bias)
            grads = gradients(y, (x, weight, bias), dy)
            check_against_oracle(x, weight, bias, dy, y, (*grads, None)[:3], f"{leading} {features}")


def test_no_features(device):
    """A product over nothing is zero plus the bias; one with no outputs still has gradients to give."""
    for features in ((0, 5), (5, 0), (0, 0)):
        x, weight, bias, dy = draw((3,), features, torch.float32, device)
        y = linear(x, weight, bias)
        check_against_oracle(x, weight, bias, dy, y, gradients(y, (x, weight, bias), dy), f"{features}")
        weight.requires_grad_(False)
        y = linear(x, weight, bias)
        check_against_oracle(x, weight, bias, dy, y, gradients(y, (x, weight, bias), dy), f"{features} frozen weight")


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_torch_on_the_cpu(dtype):
    for leading in LEADING:
        for features in FEATURES:
            x, weight, bias, _ = draw(leading, features, dtype, "cpu")
            what = f"{leading} {features}"
            assert_same_bits(linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias), what)
            assert_same_bits(linear(x, weight), torch.nn.functional.linear(x, weight), what)


@pytest.mark.parametrize("needs_bias", [False, True])
@pytest.mark.parametrize("needs_weight", [False, True])
@pytest.mark.parametrize("needs_x", [False, True])
def test_frozen_arguments(needs_x, needs_weight, needs_bias, device):
    """Frozen arguments get no gradient, and a tensor that no gradient reads is not kept."""
    x, weight, bias, dy = draw((4, 3), (16, 24), torch.float32, device)
    for t, needs_grad in ((x, needs_x), (weight, needs_weight), (bias, needs_bias)):
        t.requires_grad_(needs_grad)
    with saved_tensors() as kept:
        y = linear(x, weight, bias)
    assert addresses(kept) == addresses([weight] * needs_x + [x] * needs_weight)
    assert y.requires_grad == (needs_x or needs_weight or needs_bias)
    check_against_oracle(x, weight, bias, dy, y, gradients(y, (x, weight, bias), dy))


def test_backward_computes_only_wanted_gradients(device):
    """torch.autograd.grad for one input leaves the others' gradients alone."""
    x, weight, bias, dy = draw((6,), (16, 24), torch.float32, device)
    for i, wanted in enumerate((x, weight, bias)):
        y = linear(x, weight, bias)
        grads = [None, None, None]
        grads[i] = torch.autograd.grad(y, wanted, dy)[0]
        check_against_oracle(x, weight, bias, dy, y, grads)
        assert x.grad is weight.grad is bias.grad is None


def test_memory_layouts(device):
    x, weight, bias, dy = draw((6, 8), (16, 24), torch.bfloat16, device)
    for (name, other_x), (_, other_weight), (_, other_dy) in zip(layouts(x), layouts(weight), layouts(dy), strict=True):
        leaves = other_x.requires_grad_(), other_weight.requires_grad_(), bias
        y = linear(*leaves)
        check_against_oracle(*leaves, other_dy, y, gradients(y, leaves, other_dy), name)
    y = linear(x, weight, bias)
    ones = torch.ones_like(dy)
    grads = torch.autograd.grad(y.sum(), (x, weight, bias))  # stride 0
    check_against_oracle(x, weight, bias, ones, y, grads, "stride 0")


def test_nan_and_infinity_spread(device):
    x, weight, bias, dy = draw((8,), (16, 24), torch.float32, device)
    with torch.no_grad():
        x[2, 3], x[5, 0] = math.nan, math.inf
    y = linear(x, weight, bias)
    assert y[2].isnan().all() and not y[5].isfinite().any()
    assert y[[0, 1, 3, 4, 6, 7]].isfinite().all()
    dx, dweight, dbias = gradients(y, (x, weight, bias), dy)
    assert dx.isfinite().all() and dbias.isfinite().all()
    assert dweight[:, 3].isnan().all() and not dweight[:, 0].isfinite().any() and dweight[:, 1:3].isfinite().all()


# ---- activation_linear: the composition of two ops that have their own oracles, bit for bit ----


@pytest.mark.parametrize("needs_weight", [False, True])
@pytest.mark.parametrize("needs_x", [False, True])
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_linear_is_the_composition(dtype, kind, needs_x, needs_weight, device):
    for leading in ((5,), (0,), (2, 8)):
        _, weight, bias, dy = draw(leading, (24, 16), dtype, device)
        x = randn(*leading, 48 if kind == "swiglu" else 24, dtype=dtype, device=device)
        x.requires_grad_(needs_x)
        weight.requires_grad_(needs_weight)
        with saved_tensors() as kept:
            y = activation_linear(x, weight, bias, kind=kind)
        wanted = [weight] * needs_x + [x] * (needs_x or needs_weight)
        assert addresses(kept) == addresses(wanted), "the activation must not be kept"
        plain = linear(activation(x, kind), weight, bias)
        assert_same_bits(y, plain)
        for got, want in zip(gradients(y, (x, weight, bias), dy), gradients(plain, (x, weight, bias), dy), strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                assert_same_bits(got, want)


# ---- PyTorch around it ----


def test_opcheck(device):
    ops = torch.ops.te
    for leading in ((6,), (2, 3), (0,)):
        x, weight, bias, dy = draw(leading, (8, 16), torch.float32, device)
        plain = x.detach(), weight.detach(), bias.detach()
        torch.library.opcheck(ops.linear.default, (x, weight, bias, False, []))
        torch.library.opcheck(ops.linear_fwd.default, plain)
        torch.library.opcheck(ops.linear_dgrad.default, (dy, plain[1]))
        for with_bias in (False, True):
            torch.library.opcheck(ops.linear_wgrad.default, (dy, plain[0], with_bias))
    torch.library.opcheck(ops.linear.default, (x, weight.detach(), None, False, []))
    x, weight, bias, _ = draw((6,), (16, 16), torch.float32, device)
    gate_up = randn(6, 32, device=device, requires_grad=True)
    gamma, residual = randn(16, device=device, requires_grad=True), randn(6, 16, device=device, requires_grad=True)
    for quantization in ([], CURRENT, BLOCK):
        torch.library.opcheck(ops.linear.default, (x, weight, bias, bool(quantization), quantization))
        torch.library.opcheck(ops.activation_linear.default, (gate_up, weight, None, "swiglu", [], quantization))
        for recompute, added in ((False, residual), (True, None)):
            norm = (1e-5, True, False, not recompute, recompute)
            args = (x, added, gamma, None, weight, bias, *norm, quantization)
            torch.library.opcheck(ops.normalization_linear.default, args)
        for recompute in (False, True):
            mlp = (x, residual, gamma, bias, weight, bias, weight, None, 1e-5, False, True, "gelu", [])
            kept = (not recompute, False, recompute, bool(quantization))
            torch.library.opcheck(ops.layernorm_mlp.default, (*mlp, *kept, quantization, quantization))


def clones(*leaves):
    return tuple(t.detach().clone().requires_grad_() for t in leaves)


@pytest.mark.parametrize("op", ["linear", "activation_linear"])
def test_compiled_bits_equal_eager(op, device):
    def call(x, weight, bias):
        return linear(x, weight, bias) if op == "linear" else activation_linear(x, weight, bias, kind="gelu")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for leading, stance in (((8, 3), "default"), ((16, 5), "fail_on_recompile")):
        *leaves, dy = draw(leading, (16, 24), torch.float32, device)
        with torch.compiler.set_stance(stance):
            y = compiled(*leaves)
        assert_same_bits(y, call(*leaves))
        for got, want in zip(gradients(y, leaves, dy), gradients(call(*leaves), leaves, dy), strict=True):
            assert_same_bits(got, want)


@pytest.mark.slow
def test_inductor_bits_equal_eager(device):
    x, weight, bias, dy = draw((8,), (16, 24), torch.float32, device)
    y = torch.compile(linear, fullgraph=True)(x, weight, bias)
    want = linear(x, weight, bias)
    assert_same_bits(y, want)
    leaves = x, weight, bias
    for got, same in zip(gradients(y, leaves, dy), gradients(want, leaves, dy), strict=True):
        assert_same_bits(got, same)


@pytest.mark.parametrize("where", ["eager", "inside compile", "outside compile"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, where, device):
    leaves = draw((8,), (16, 24), torch.float32, device)
    *leaves, dy = leaves
    low = tuple(t.detach().to(dtype).requires_grad_() for t in leaves)

    def under(*args):
        with torch.autocast(device, dtype=dtype):
            return linear(*args)

    if where == "eager":
        y = under(*leaves)
    elif where == "inside compile":
        y = torch.compile(under, fullgraph=True, backend="aot_eager")(*leaves)
    else:
        compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
        with torch.autocast(device, dtype=dtype):
            y = compiled(*leaves)
    want = linear(*low)
    assert_same_bits(y, want)
    grads = gradients(y, leaves, dy.to(dtype))
    for got, same in zip(grads, gradients(want, low, dy.to(dtype)), strict=True):
        assert_same_bits(got, same.float())


def test_without_a_graph(device):
    x, weight, bias, _ = draw((6,), (16, 24), torch.float32, device)
    want = linear(x, weight, bias)
    with saved_tensors() as kept, torch.no_grad():
        y = linear(x, weight, bias)
    assert kept == [] and not y.requires_grad
    assert_same_bits(y, want)
    with torch.inference_mode():
        inferred = linear(x, weight, bias)
        with torch.autocast(device, dtype=torch.bfloat16):
            assert linear(x, weight, bias).dtype == torch.bfloat16
    assert inferred.is_inference()
    assert_same_bits(inferred, want)


def test_meta_tensors_get_shapes():
    x, weight = torch.empty(2, 3, 8, device="meta"), torch.empty(5, 8, device="meta")
    assert linear(x, weight).shape == (2, 3, 5)
    assert activation_linear(torch.empty(2, 16, device="meta"), weight, kind="swiglu").shape == (2, 5)


def test_changing_what_is_saved_is_noticed(device):
    for i in (0, 1):
        *leaves, dy = draw((6,), (16, 24), torch.float32, device)
        y = linear(*leaves)
        with torch.no_grad():
            leaves[i].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(dy)


def test_checkpointing_repeats_the_bits(device):
    *leaves, dy = draw((6,), (16, 24), torch.float32, device)
    want = gradients(linear(*leaves), leaves, dy)
    y = torch.utils.checkpoint.checkpoint(linear, *leaves, use_reentrant=False)
    for got, same in zip(gradients(y, leaves, dy), want, strict=True):
        assert_same_bits(got, same)


@pytest.mark.parametrize("op", ["linear", "activation_linear"])
def test_double_backward_is_refused_by_name(op, device):
    x, weight, bias, dy = draw((6,), (16, 24), torch.float32, device)
    y = linear(x, weight, bias) if op == "linear" else activation_linear(x, weight, bias, kind="silu")
    with refused(NotImplementedError, "linear", "double backward", "create_graph=True"):
        torch.autograd.grad(y, x, dy, create_graph=True)


def test_threads_get_the_same_bits(device):
    *leaves, dy = draw((64,), (130, 96), torch.bfloat16, device)

    def call(_):
        own = clones(*leaves)
        y = linear(*own)
        return y, *gradients(y, own, dy)

    want = call(0)
    for results in in_threads(6, call):
        for got, same in zip(results, want, strict=True):
            assert_same_bits(got, same)


# ---- errors ----


def bad_calls(device):
    def t(*shape, dtype=torch.float32):
        return torch.ones(*shape, dtype=dtype, device=device)

    x, weight, bias = t(3, 8), t(5, 8), t(5)
    return (
        (lambda: linear(t(3, 7), weight, bias), ("'x'", "[3, 7]", "8")),
        (lambda: linear(t(3)[0], weight), ("'x'", "no dimensions", "8")),
        (lambda: linear(x, t(8)), ("'weight'", "[8]", "[out_features, in_features]")),
        (lambda: linear(x, weight, t(6)), ("'bias'", "[6]", "[5]")),
        (lambda: linear(x, weight, t(1)), ("'bias'", "[1]", "[5]")),
        (lambda: linear(x.half(), weight), ("'weight'", "Float", "Half", "autocast")),
        (lambda: linear(x, weight, bias.half()), ("'bias'", "Half", "Float")),
        (lambda: linear(x.int(), weight), ("'x'", "Int", "float32, float16 or bfloat16")),
        (lambda: linear(x.int(), weight.int()), ("'x'", "Int", "float32, float16 or bfloat16")),
        (lambda: linear(x.double(), weight.double()), ("'x'", "Double", "float32, float16 or bfloat16")),
        (lambda: linear(x, weight.to("meta")), ("'weight'", "meta", device, ".to(device)")),
        (lambda: activation_linear(x, weight, kind="silu2"), ("'kind'", "silu2", "swiglu")),
        (lambda: activation_linear(x, weight, kind="swiglu"), ("'x'", "[3, 4]", "8")),
        (lambda: activation_linear(t(3, 9), weight, kind="swiglu"), ("'x'", "[3, 9]", "even")),
    )


def test_bad_input_is_named_and_harmless(device):
    *leaves, dy = draw((6,), (16, 24), torch.float32, device)
    y = linear(*leaves)
    grads = gradients(y, leaves, dy)
    for bad, words in bad_calls(device):
        with refused(ValueError, *words):
            bad()
    again = linear(*leaves)
    assert_same_bits(again, y)
    for got, want in zip(gradients(again, leaves, dy), grads, strict=True):
        assert_same_bits(got, want)


@pytest.mark.gpu
def test_tensor_on_another_device_than_the_others():
    x, weight, bias, dy = draw((6,), (16, 24), torch.float32, "cuda")
    with refused(ValueError, "linear", "'weight'", "cuda:0", "cpu", ".to(device)"):
        linear(x.cpu(), weight)
    if torch.cuda.device_count() < 2:
        return
    other = tuple(t.detach().to("cuda:1").requires_grad_() for t in (x, weight, bias))
    with torch.cuda.device(0):
        y = linear(*other)
        grads = gradients(y, other, dy.to("cuda:1"))
    check_against_oracle(*other, dy, y, grads, "cuda:1")
