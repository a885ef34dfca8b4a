# Weights of groups as one tensor [groups, N, K]: to the bit the list of its matrices, forward and gradients, in every
# mode; one input of the graph, one saved tensor, one gradient. main_grad: test_stacked_main_grad.py.
import pytest
import torch
from fp8_products import product
from support import randn, refused, saved_tensors

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import grouped_linear, grouped_mlp

from .stacked_cases import (
    BF16,
    GROUPS,
    HIDDEN,
    HOST_OR_DEVICE,
    KINDS,
    LEAVES,
    SPLITS,
    TOTAL,
    Case,
    K,
    assert_all_same,
    gradient,
    quantizations,
    set_products,
)


@pytest.fixture(params=["libtorch", "loop"])
def products(request, device):
    yield from set_products(request.param, device)


@pytest.mark.parametrize("stacked", [(True, True), (True, False)], ids=["both", "first"])
@pytest.mark.parametrize("recipe", KINDS)
@HOST_OR_DEVICE
def test_an_mlp_is_that_of_the_list(on_device, recipe, stacked, products, device):
    case = Case(device, on_device)
    want = case.results((False, False), quantizations=quantizations(recipe, device))
    assert_all_same(case.results(stacked, quantizations=quantizations(recipe, device)), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("features, hidden", [(K, HIDDEN), (7, 5), (1, 1)])
@HOST_OR_DEVICE
def test_dtypes_and_odd_sizes(on_device, features, hidden, dtype, products, device):
    if dtype is torch.float32 and device == "cuda" and on_device:
        pytest.skip("groups on the device are multiplied in 16 bits")
    case = Case(device, on_device, dtype, features, hidden)
    assert_all_same(case.results(), case.results((False, False)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", KINDS)
@HOST_OR_DEVICE
def test_a_product_is_that_of_the_list(on_device, recipe, bias, products, device):
    case = Case(device, on_device)
    biases = [randn(2 * HIDDEN, dtype=BF16, device=device) for _ in SPLITS] if bias else []
    dy = randn(case.x.shape[0], 2 * HIDDEN, dtype=BF16, device=device)

    def run(stacked):
        x, _, weight, _ = case.leaves((stacked, True))
        own = [b.detach().requires_grad_() for b in biases]
        groups = case.groups()
        y = grouped_linear(x, weight, own, quantizations=quantizations(recipe, device)[0], **groups)
        y.backward(dy)
        assert x.grad[:TOTAL].isfinite().all()
        return [y.detach(), x.grad, gradient(weight), *(b.grad for b in own)]

    assert_all_same(run(True), run(False))


@pytest.mark.parametrize("wanted", LEAVES)
@pytest.mark.parametrize("recipe", ["none", "block"])
def test_only_one_needs_a_gradient(recipe, wanted, device):
    case = Case(device, True, wanted=(wanted,))
    want = case.results((False, False), quantizations=quantizations(recipe, device))
    assert_all_same(case.results(quantizations=quantizations(recipe, device)), want)


def test_what_is_kept_and_returned(device):
    """One saved tensor and one edge for each weight; a write to a saved weight is noticed; its gradient is no copy."""
    case = Case(device, True)
    leaves = case.leaves((True, True))
    with saved_tensors() as saved:
        y = case.call(leaves)
    assert sum(t.data_ptr() == w.data_ptr() and t.shape == w.shape for t in saved for w in leaves[2:]) == 2
    assert len(saved) == 5 and len([f for f, _ in y.grad_fn.next_functions if f is not None]) == 4
    y = case.call(leaves)
    with torch.no_grad():
        leaves[3].mul_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(case.dy)
    got = []
    y = case.call(leaves)
    leaves[2].register_hook(lambda g: got.append(g.data_ptr()))
    y.backward(case.dy)
    assert got == [leaves[2].grad.data_ptr()]
    assert leaves[2].grad.is_contiguous() and leaves[2].grad.shape == leaves[2].shape


def test_hooks_two_calls_and_two_microbatches(device):
    case = Case(device, True)

    def run(stacked):
        leaves, seen = case.leaves((stacked, stacked)), []
        for part in [leaves[2]] if stacked else leaves[2]:
            part.register_hook(lambda g: 2 * g)
            part.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
        for _ in range(2):  # each with two calls of one weight
            (case.call(leaves) + case.call(leaves)).backward(case.dy)
        assert len(seen) == 2 * (1 if stacked else GROUPS)
        return [leaf if leaf is None else gradient(leaf) for leaf in leaves]

    assert_all_same(run(True), run(False))


def test_recomputed(device):
    case = Case(device, True)
    leaves = case.leaves((True, True))
    te.checkpoint(case.call, leaves).backward(case.dy)
    assert_all_same([gradient(leaf) for leaf in leaves], case.results()[1:])


def test_of_autocast(device):
    """Float32 weights are cast once each, and their gradients come back as one."""
    case = Case(device, False, torch.float32)
    case.dy = case.dy.bfloat16()
    with torch.autocast(device, dtype=BF16):
        got, want = case.results(), case.results((False, False))
    assert got[0].dtype is BF16 and got[3].dtype is torch.float32
    assert_all_same(got, want)


@pytest.mark.parametrize("backward", [1, 2], ids=["high precision", "dequantized"])
@HOST_OR_DEVICE
def test_a_backward_of_unquantized_gradients(on_device, backward, device):
    case = Case(device, on_device)
    made = product("block", device)
    quantizers = (made.quantizers[name] for name in ("x", "weight", "dy"))
    one = _C.ProductQuantization(*quantizers, True, True, True, backward=backward)
    quantized = [one], [one]
    assert_all_same(case.results(quantizations=quantized), case.results((False, False), quantizations=quantized))


def test_quantizers_that_quantize_some_weights(device):
    """Of splits on the host: the matrices that stay plain carry the version of the one weight."""
    case = Case(device, False)
    made, none = product("current", device).native, _C.Quantizer("none", False, False, 0.0)
    plain = _C.ProductQuantization(none, none, none, True, True, True)
    quantized = [made, plain, made, plain], [plain, plain, plain, made]
    assert_all_same(case.results(quantizations=quantized), case.results((False, False), quantizations=quantized))
    leaves = case.leaves((True, True))
    y = case.call(leaves, quantizations=quantized)
    with torch.no_grad():
        leaves[2].mul_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(case.dy)


@HOST_OR_DEVICE
def test_fp8_copies_of_the_weights(on_device, device):
    case = Case(device, on_device)
    made = [product("block", device) for _ in range(2)]
    quantized = [made[0].native], [made[1].native]
    copies = tuple(
        [_C.quantize(made[i].quantizers["weight"], part, True, True) for part in case.weights[i]] for i in range(2)
    )
    want = case.results((False, False), quantizations=quantized, own_weights=copies)
    assert_all_same(case.results(quantizations=quantized, own_weights=copies), want)


@pytest.mark.parametrize("recipe", ["none", "block"])
@HOST_OR_DEVICE
def test_opcheck(on_device, recipe, device):
    case = Case(device, on_device)
    case.x, case.scale = case.x[:TOTAL], case.scale[:TOTAL]
    x, scale, first, second = case.leaves((True, True))
    groups = case.groups()
    spec = [] if recipe == "none" else list(product(recipe, device).spec)
    rest = (groups["offsets"], list(groups["splits"]))
    mlp = (x, [first], [second], scale, *rest, None, None, False, "swiglu", [], False, False, spec, spec)
    opcheck = torch.library.opcheck
    opcheck(torch.ops.te.grouped_mlp.default, mlp)
    opcheck(torch.ops.te.grouped_linear.default, (x, [first], [], *rest, False, spec))
    main_grads = [torch.zeros_like(w, dtype=torch.float32) for w in case.weights]
    opcheck(
        torch.ops.te.grouped_mlp.main_grad,
        (*mlp, main_grads, [0, GROUPS, 0, 1, GROUPS, 1]),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_errors(device):
    case = Case(device, True)
    x, scale, first, second = case.leaves((True, True))
    offsets = case.groups()["offsets"]
    op, shaped = "grouped_mlp", "[groups, out_features, in_features]"
    with refused(ValueError, op, "'weights1'", f"[{2 * HIDDEN}, {K}]", shaped):
        grouped_mlp(x, offsets, first[0], second, scale)
    with refused(ValueError, op, "'weights2'", "strides", "contiguous()"):
        grouped_mlp(x, offsets, first, second.transpose(1, 2).contiguous().transpose(1, 2), scale)
    with refused(ValueError, op, "'weights1'", "[0, 96, 64]", "at least one group"):
        grouped_mlp(x, offsets, first[:0], second[:0], scale)
    with refused(ValueError, op, "'weights1'", "'weights2'", "4", "3"):
        grouped_mlp(x, offsets, first, second[:3], scale)
    with refused(ValueError, op, "[4, 64, 48]", "2 * hidden"):
        grouped_mlp(x, offsets, second, second, scale)
    with refused(ValueError, op, "'offsets'", "[4]", "[5]"):
        grouped_mlp(x, offsets[:4], first, second, scale)
    with refused(ValueError, "linear", "'weight'", "Float", "BFloat16"):
        grouped_mlp(x, offsets, first.float(), second, scale)
    with refused(ValueError, "grouped_linear", "'weights'", "4", "3 biases"):
        grouped_linear(x, first, [first[0, :, 0]] * 3, offsets=offsets)
    with refused(ValueError, "grouped_linear", "'m_splits'", "3", "4"):
        grouped_linear(x, first, splits=[1, 2, 3])
