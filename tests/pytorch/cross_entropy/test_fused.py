"""fused_linear_cross_entropy on one rank: values and gradients against a float64 oracle in one chunk and in several,
equality with the product and the loss by themselves, what is wanted, FP8, bad input."""

import pytest
import torch
import torch.nn.functional as F
from support import DTYPES, U32, assert_same_bits, assert_within, refused, rounding, saved_tensors, sum_error, wide

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch import _C

from .fused_cases import FEATURES, IGNORED, RECIPES, chunks_of, draw


def parts_of(*tensors):
    return [t for t in tensors if t is not None]


def oracle(hidden, weight, bias, target, given, smoothing, reduce):
    """Loss and gradients in float64, and how large what is added up in them is."""
    h, w = (wide(t).requires_grad_() for t in (hidden, weight))
    b = None if bias is None else wide(bias).requires_grad_()
    logits = F.linear(h, w, b)
    how = "mean" if reduce else "none"
    loss = F.cross_entropy(logits, target.cpu(), label_smoothing=smoothing, reduction=how)
    leaves = parts_of(h, w, b)
    d_logits, *grads = torch.autograd.grad(loss, [logits, *leaves], wide(given))
    sums = [d_logits.abs() @ w.abs(), d_logits.abs().T @ h.abs(), d_logits.abs().sum(0)]
    return loss, logits, d_logits, grads, sums[: len(leaves)]


def bounds(hidden, weight, bias, target, given, oracle_of, chunks, two_roundings):
    """The logits: a sum of FEATURES products and a rounding to the dtype, e. The loss moves by at most 2 e beside the
    arithmetic of a row of them; p by a factor of 1 + 2 e, so that d logits, rounded once or twice, do by 2 e |factor|
    each; a gradient of them adds that over what it reduces, its own sum's error, and its own roundings (the sum over
    chunks in float32)."""
    _, logits, d_logits, grads, sums = oracle_of
    dtype = hidden.dtype
    h, w = wide(hidden), wide(weight)
    size = h.abs() @ w.abs().T + (0 if bias is None else wide(bias).abs())
    e = (sum_error(size, FEATURES + 2) + rounding(size, dtype)).max().item()
    row = 600 * U32
    of_loss = 2 * e + row * (3 + wide(logits).abs().max().item() * 2)
    p = d_logits.abs() + d_logits.abs().amax(-1, keepdim=True)  # at least |factor| p
    error = p * (2 * e + 2 * row) + (2 if two_roundings else 1) * rounding(d_logits, dtype) + 1e-9
    of_hidden = error @ w.abs() + sum_error(sums[0], logits.shape[1]) + 2 * rounding(sums[0], dtype)
    of_weight = error.T @ h.abs() + sum_error(sums[1], len(h) + chunks) + 2 * rounding(grads[1], weight.dtype)
    of_bias = error.sum(0) + sum_error(d_logits.abs().sum(0), len(h) + chunks) + 2 * rounding(error.sum(0) + 1, dtype)
    return of_loss, [of_hidden, of_weight, of_bias]


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(device, dtype, chunks, smoothing, reduce):
    tokens, classes = 384, 211
    hidden, weight, bias, target = draw(device, tokens, classes, dtype)
    given = torch.tensor(1.0) if reduce else torch.rand(tokens) + 0.5
    with chunks_of(128 * classes * dtype.itemsize if chunks > 1 else 1 << 29):
        assert _C.linear_cross_entropy_chunk_rows(tokens, classes, dtype.itemsize, False) == tokens // chunks
        loss = te.fused_linear_cross_entropy(
            hidden, weight, target, bias, label_smoothing=smoothing, reduce_loss=reduce
        )
        got = torch.autograd.grad(loss, (hidden, weight, bias), given.to(device))
    want = oracle(hidden, weight, bias, target, given, smoothing, reduce)
    assert loss.dtype is torch.float32 and [g.dtype for g in got] == [dtype] * 3
    late = reduce and dtype is torch.float16
    of_loss, of_grads = bounds(hidden, weight, bias, target, given, want, chunks, late)
    assert_within(loss, want[0], of_loss, "loss")
    for name, g, reference, bound in zip(("hidden", "weight", "bias"), got, want[3], of_grads):
        assert_within(g, reference, bound, f"gradient of {name}")


@pytest.mark.parametrize("classes", [1, 2, 13, 1027])
@pytest.mark.parametrize("lead", [(), (1,), (7,), (3, 5), (2, 0, 3)], ids=str)
def test_shapes(device, lead, classes):
    hidden = torch.randn(*lead, FEATURES, device=device, requires_grad=True)
    weight = torch.randn(classes, FEATURES, device=device, requires_grad=True)
    target = torch.randint(0, classes, lead, device=device)
    each = te.fused_linear_cross_entropy(hidden, weight, target, reduce_loss=False)
    want = F.cross_entropy(F.linear(hidden, weight).reshape(-1, classes), target.reshape(-1), reduction="none")
    assert_within(each, want.view(lead), 1e-4)
    for loss, other in ((each.sum(), want.sum()), (None, want.mean())):
        loss = te.fused_linear_cross_entropy(hidden, weight, target) if loss is None else loss
        if target.numel():
            assert_within(loss, other, 1e-3)
        got = torch.autograd.grad(loss, (hidden, weight))
        for g, reference in zip(got, torch.autograd.grad(other, (hidden, weight), retain_graph=True)):
            assert_within(g, reference.nan_to_num(0.0), 1e-4)


def test_all_ignored(device):
    hidden, weight, bias, target = draw(device, 6, 20)
    target.fill_(IGNORED)
    loss = te.fused_linear_cross_entropy(hidden, weight, target, bias)
    assert loss.isnan()
    assert all((g == 0).all() for g in torch.autograd.grad(loss, (hidden, weight, bias)))


class Separate(torch.nn.Module):
    """The same by a Linear and the loss."""

    def __init__(self, weight):
        super().__init__()
        classes, features = weight.shape
        self.head = te.Linear(features, classes, bias=False, params_dtype=weight.dtype, device=weight.device)
        with torch.no_grad():
            self.head.weight.copy_(weight)

    def forward(self, hidden, target, **options):
        return te.parallel_cross_entropy(self.head(hidden), target, reduce_loss=True, **options)


@pytest.mark.parametrize("how", ["plain", *RECIPES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_chunk_is_the_product_and_the_loss(device, dtype, how):
    """Bit for bit, FP8 too: the same engine calls on the same operands."""
    hidden, weight, _, target = draw(device, 96, 160, dtype, features=64, bias=False)
    separate = Separate(weight.detach())
    results = []
    with te.autocast(enabled=how != "plain", recipe=RECIPES.get(how)):
        for call, leaf in (
            (lambda: te.fused_linear_cross_entropy(hidden, weight, target, label_smoothing=0.1), weight),
            (lambda: separate(hidden, target, label_smoothing=0.1), separate.head.weight),
        ):
            loss = call()
            results.append((loss.detach().view(1), *torch.autograd.grad(loss, (hidden, leaf))))
    for got, want, name in zip(*results, ("loss", "hidden", "weight")):
        # Products into existing memory, or into float32 and rounded afterwards, may have other bits.
        if name != "loss" and (device == "cuda" or (name == "weight" and dtype is torch.bfloat16)):
            assert_within(got, want, 2 * rounding(wide(want), dtype) + 1e-6, name)
        else:
            assert_same_bits(got, want, name)


@pytest.mark.parametrize("how", RECIPES)
def test_fp8_chunks(device, how):
    """Each is quantized by itself: as one call for each, their gradients added up in float32."""
    hidden, weight, _, target = draw(device, 256, 160, features=64, bias=False)
    target = target.clamp_min(0)
    with te.autocast(recipe=RECIPES[how]):
        with chunks_of(128 * 160 * 6):
            assert _C.linear_cross_entropy_chunk_rows(256, 160, 4, True) == 128
            loss = te.fused_linear_cross_entropy(hidden, weight, target, reduce_loss=False)
            got = torch.autograd.grad(loss.sum(), (hidden, weight))
        parts = []
        for rows in (slice(0, 128), slice(128, 256)):
            part = te.fused_linear_cross_entropy(hidden[rows], weight, target[rows], reduce_loss=False)
            parts.append((part.detach(), *torch.autograd.grad(part.sum(), (hidden, weight))))
    assert_same_bits(loss.detach(), torch.cat([part[0] for part in parts]))
    assert_same_bits(got[0], parts[0][1] + parts[1][1])
    assert_within(got[1], parts[0][2] + parts[1][2], 4 * U32 * (parts[0][2].abs() + parts[1][2].abs()).cpu().double())


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_incoming_gradient(device, dtype, reduce):
    """One that is not 1 multiplies what forward has made. Mutant: leave scale_gradient out of scaled()."""
    hidden, weight, bias, target = draw(device, 40, 60, dtype)
    grads = []
    for factor in (1.0, 0.25):
        loss = te.fused_linear_cross_entropy(hidden, weight, target, bias, reduce_loss=reduce)
        grads.append(torch.autograd.grad(loss, (hidden, weight, bias), torch.full_like(loss, factor)))
    # A power of two: exact, but where float16 has no more bits: d logits then lose up to 2^-25 each, times sums of 60
    # classes' or 40 tokens' magnitudes, all below 4.
    for once, quarter in zip(*grads):
        assert_within(quarter, once * 0.25, 240 * 2.0**-25 + once.abs() * 2.0**-11 if dtype is torch.float16 else 0.0)


def test_run_to_run(device):
    hidden, weight, bias, target = draw(device, 300, 500, torch.bfloat16)
    with chunks_of(128 * 500 * 2):
        runs = [
            torch.autograd.grad(te.fused_linear_cross_entropy(hidden, weight, target, bias), (hidden, weight, bias))
            for _ in range(2)
        ]
    for first, second in zip(*runs):
        assert_same_bits(first, second)


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("wanted", range(8))
def test_only_what_is_wanted(device, wanted, reduce):
    """Frozen parameters and a hidden without a gradient: neither computed nor kept; the others' bits stay."""
    hidden, weight, bias, target = draw(device, 30, 50)
    leaves = (hidden, weight, bias)
    want = torch.autograd.grad(te.fused_linear_cross_entropy(hidden, weight, target, bias).sum(), leaves)
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(bool(wanted >> i & 1))
    with saved_tensors() as kept:
        loss = te.fused_linear_cross_entropy(hidden, weight, target, bias, reduce_loss=reduce)
    assert loss.requires_grad == (wanted > 0)
    if reduce:
        assert sorted(t.numel() for t in kept) == sorted(leaf.numel() for leaf in leaves if leaf.requires_grad)
    if wanted:
        loss.sum().backward()
    for leaf, reference in zip(leaves, want):
        assert (leaf.grad is not None) == leaf.requires_grad
        if leaf.requires_grad and reduce:
            assert_same_bits(leaf.grad, reference)


def test_weight_grad_dtype(device):
    """In the weight's dtype: a rounding for each of 3 chunks, of sums no larger than the oracle's magnitudes."""
    hidden, weight, _, target = draw(device, 384, 90, torch.bfloat16, bias=False)
    with chunks_of(128 * 90 * 2):
        grads = [
            torch.autograd.grad(te.fused_linear_cross_entropy(hidden, weight, target, weight_grad_dtype=d), weight)[0]
            for d in (torch.float32, torch.bfloat16)
        ]
    *_, sums = oracle(hidden, weight, None, target, torch.tensor(1.0), 0.0, True)
    assert grads[1].dtype is torch.bfloat16
    assert_within(grads[1], wide(grads[0]), 4 * rounding(sums[1], torch.bfloat16))
    with refused(ValueError, "fused_linear_cross_entropy", "'weight_grad_dtype'", "torch.float16", "torch.bfloat16"):
        te.fused_linear_cross_entropy(hidden, weight, target, weight_grad_dtype=torch.float16)


def test_strided_operands(device):
    hidden, weight, bias, target = draw(device, 24, 40)
    want = torch.autograd.grad(te.fused_linear_cross_entropy(hidden, weight, target, bias), (hidden, weight))
    for h, w, t in (
        (hidden.t().contiguous().t(), weight.t().contiguous().t(), target.repeat_interleave(2)[::2]),
        (F.pad(hidden, (0, 3))[:, :FEATURES], F.pad(weight, (0, 5))[:, :FEATURES], target),
    ):
        for got, reference in zip(
            torch.autograd.grad(te.fused_linear_cross_entropy(h, w, t, bias), (hidden, weight)), want
        ):
            assert_same_bits(got, reference)


def test_torch_autocast(device):
    """float32 masters, products in bf16, gradients back in float32."""
    hidden, weight, bias, target = draw(device, 30, 50)
    low = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight, bias)]
    with torch.autocast(device, torch.bfloat16):
        loss = te.fused_linear_cross_entropy(hidden, weight, target, bias)
    want = te.fused_linear_cross_entropy(*low[:2], target, low[2])
    assert_same_bits(loss.detach().view(1), want.detach().view(1))
    for got, reference in zip(torch.autograd.grad(loss, (hidden, weight, bias)), torch.autograd.grad(want, low)):
        assert_same_bits(got, reference.float())


def test_opcheck(device):
    hidden, weight, bias, target = draw(device, 10, 32, features=32)
    ops = torch.ops.te
    q = [2, 0, 0, 0, 2, 0, 0, 0, 2, 1, 0, 0, 0, 1, 1, 0]
    for reduce, quantization, shift in ((True, [], bias), (False, [], None), (True, q, None)):
        options = (0.1, reduce, IGNORED, True, quantization, "", 1)
        torch.library.opcheck(ops.linear_cross_entropy.default, (hidden, weight, shift, target, *options))
        h, w = hidden.detach(), weight.detach()
        b = None if shift is None else shift.detach()
        given = torch.rand(10, device=device)
        for dloss, wanted in ((None, [True, False, False]), (given, [True, True, b is not None])):
            if dloss is not None and reduce:
                continue
            torch.library.opcheck(ops.linear_cross_entropy_fwd.default, (h, w, b, target, dloss, *options, wanted))


def test_refusals(device):
    hidden, weight, bias, target = draw(device, 20, 30)
    call = te.fused_linear_cross_entropy
    op = "linear_cross_entropy"
    with refused(ValueError, op, "'hidden' and 'weight'", "[20, 23]", "[..., features]"):
        call(hidden[:, :23], weight, target)
    with refused(ValueError, op, "'weight'", "Half"):
        call(hidden, weight.half(), target, weight_grad_dtype=torch.float32)
    with refused(ValueError, op, "'bias'", "[29]", "[30]"):
        call(hidden, weight, target, bias[:29])
    with refused(ValueError, op, "'target'", "Int", ".long()"):
        call(hidden, weight, target.int())
    with refused(ValueError, op, "'target'", "[19]", "[20]"):
        call(hidden, weight, target[1:])
    with refused(ValueError, op, "'hidden'", "Long"):
        call(hidden.long(), weight, target)
    with refused(ValueError, op, "'label_smoothing'"):
        call(hidden, weight, target, label_smoothing=1.5)
    with refused(TypeError, "fused_linear_cross_entropy", "'weight'", "NoneType"):
        call(hidden, None, target)
    with refused(TypeError, "fused_linear_cross_entropy", "smoothing", "label_smoothing"):
        call(hidden, weight, target, smoothing=0.1)
    if device == "cpu":
        wrong = target.clone()
        wrong[17] = 30
        with refused(ValueError, "target", "30 in row 17", "0 to 29"), chunks_of(1):
            call(hidden, weight, wrong)
    for refused_recipe, word in (
        (recipe.DelayedScaling(), "state"),
        (recipe.CustomRecipe(qfactory=lambda role: None), "state"),
        (recipe.Float8CurrentScaling(backward_override="dequantized"), "'backward_override'"),
    ):
        with te.autocast(recipe=refused_recipe):
            with refused(NotImplementedError, "fused_linear_cross_entropy", type(refused_recipe).__name__, word):
                call(hidden, weight, target)
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device)
    with refused(NotImplementedError, "fused_linear_cross_entropy", "'weight'", "dequantize()"):
        call(hidden, quantizer(weight.detach()), target)
