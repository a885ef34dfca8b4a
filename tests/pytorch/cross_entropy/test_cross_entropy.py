"""parallel_cross_entropy on one rank: losses and gradients against a float64 oracle, factors in backward, NaN, Inf and
ignored tokens, bad input."""

import pytest
import torch
import torch.nn.functional as F
from support import DTYPES, U32, UNIT_ROUNDOFF, assert_same_bits, assert_within, randn, refused, rounding, wide

import transformer_engine.pytorch as te
from transformer_engine.pytorch import functional

from .cases import IGNORED, draw


def oracle(logits, target, smoothing=0.0, reduce=False, ignore=IGNORED):
    """torch's own in float64, as a loss and what it has a graph to."""
    x = wide(logits).requires_grad_()
    rows, classes = x.reshape(-1, x.shape[-1]), wide(target).long().reshape(-1)
    how = "mean" if reduce else "none"
    loss = F.cross_entropy(rows, classes, ignore_index=ignore, label_smoothing=smoothing, reduction=how)
    return (loss if reduce else loss.view(target.shape)), x


def arithmetic(logits, device):
    """The relative error of a sum of exponentials. CPU: 16 + 16 additions in float32 before double takes over, an
    exponential within 1 unit; CUDA: at most 512 additions in a thread and 15 after them, an exponential within 2 + 1.2
    |x - top| units; on both x - top is rounded, which the exponential takes |x - top|-fold."""
    x = wide(logits)
    spread = (x.amax() - x.amin()).item() if x.numel() else 0.0
    return (40 + 2 * spread if device == "cpu" else 540 + 4 * spread) * U32, spread


def bounds(logits, loss, grad, factor, device):
    """Of the loss: the sum's error through a logarithm, that of x - top and of the smoothed mean, and their sum's
    roundings. Of the gradient: p <= 1 with twice that error, three roundings, then one in the dtype."""
    error, spread = arithmetic(logits, device)
    of_loss = error * (2 + spread) + 8 * U32 * (loss.detach().abs() + spread)
    of_grad = (2 * error + 6 * U32) * factor + rounding(grad, logits.dtype) * 1.001
    return of_loss, of_grad


SHAPES = ((3, 5, 17), (2, 4, 1), (7, 2), (2, 3, 1000), (5, 4099), (2, 33001))


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.25])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(device, dtype, shape, smoothing, reduce):
    logits, target = draw(device, *shape, dtype=dtype)
    want, x = oracle(logits, target, smoothing, reduce)
    leaf = logits.clone().requires_grad_()
    loss = te.parallel_cross_entropy(leaf * 1, target, smoothing, reduce)
    assert loss.dtype is torch.float32 and loss.shape == want.shape
    (grad,) = torch.autograd.grad(want.sum(), x)
    of_loss, of_grad = bounds(logits, want, grad, 1.0, device)
    assert_within(loss, want, of_loss, "loss")
    (got,) = torch.autograd.grad(loss.sum(), leaf)
    assert got.dtype is dtype
    assert_within(got, grad, of_grad, "gradient")


@pytest.mark.parametrize("shift", [1e4, -1e4, 2.9e6, -4e6, 1e9, -1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_far_from_zero(device, dtype, shift):
    """Rows around any value: what counts is how far they are from their largest. Mutants: kFar without end, or factor
    left out (measured_from in cross_entropy_row.cuh)."""
    logits, target = draw(device, 6, 1000, scale=max(3.0, abs(shift) * 2e-7))
    logits = (logits + shift).to(dtype)
    want, x = oracle(logits, target, 0.0, False)
    leaf = logits.clone().requires_grad_()
    loss = te.parallel_cross_entropy(leaf * 1, target)
    (grad,) = torch.autograd.grad(want.sum(), x)
    of_loss, of_grad = bounds(logits, want, grad, 1.0, device)
    assert_within(loss, want, of_loss, "loss")
    (got,) = torch.autograd.grad(loss.sum(), leaf)
    assert_within(got, grad, of_grad, "gradient")


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_incoming_gradients(device, dtype, reduce):
    """Rows are multiplied by theirs: a second rounding."""
    logits, target = draw(device, 4, 6, 129, dtype=dtype)
    want, x = oracle(logits, target, 0.1, reduce)
    given = torch.rand(want.shape, dtype=torch.float32) + 0.5
    given.view(-1)[0] = 1.0 if not reduce else 3.0
    (grad,) = torch.autograd.grad(want, x, given.double())
    leaf = logits.clone().requires_grad_()
    loss = te.parallel_cross_entropy(leaf * 1, target, 0.1, reduce)
    (got,) = torch.autograd.grad(loss, leaf, given.to(device))
    _, of_grad = bounds(logits, want, grad, 3.0, device)
    assert_within(got, grad, of_grad + 2 * rounding(grad, dtype), "gradient")


@pytest.mark.parametrize("strides", ["expanded", "every other", "negated"])
def test_incoming_gradients_of_any_strides(device, strides):
    logits, target = draw(device, 6, 40)
    values = torch.arange(1.0, 7.0, device=device)
    given = {
        "expanded": torch.full((), 2.0, device=device).expand(6),
        "every other": values.repeat_interleave(2)[::2],
        "negated": torch.complex(values, -values).conj().imag,
    }[strides]
    assert strides != "negated" or given.is_neg()
    grads = []
    for g in (given, given.resolve_neg().clone()):
        leaf = logits.clone().requires_grad_()
        grads.append(torch.autograd.grad(te.parallel_cross_entropy(leaf * 1, target), leaf, g)[0])
    assert_same_bits(*grads)


def test_float16_gradients_keep_what_a_loss_scale_is_for(device):
    """p / n is nothing in float16 and p scale / n is: the mean's 1 / n comes with the loss scale. Mutant: false from
    scales_late()."""
    logits, target = draw(device, 64, 50, dtype=torch.float16, scale=0.5)
    target.fill_(3)
    leaf = logits.clone().requires_grad_()
    tokens = 4096
    rows = torch.cat((leaf, leaf.new_zeros(tokens - 64, 50))) * 1
    loss = te.parallel_cross_entropy(rows, F.pad(target, (0, tokens - 64), value=3), reduce_loss=True)
    (got,) = torch.autograd.grad(loss * 65536.0, leaf)
    p = wide(logits).softmax(-1) - F.one_hot(target.cpu(), 50)
    assert_within(got, p * (65536.0 / tokens), p.abs() * 16 * 3 * UNIT_ROUNDOFF[torch.float16] + 1e-3, "gradient")
    assert (got != 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ignored_tokens_have_no_gradient_whatever_comes_in(dtype, device):
    logits, target = draw(device, 4, 50)
    target[::2] = -100
    for factor in (float("inf"), float("nan")):
        x = logits.to(dtype, copy=True).requires_grad_()
        te.parallel_cross_entropy(x * 1, target).backward(torch.full((4,), factor, device=device))
        assert not x.grad[::2].any() and not x.grad[1::2].isfinite().all()
    none = torch.full_like(target, -100)
    x = logits.to(dtype, copy=True).requires_grad_()
    te.parallel_cross_entropy(x * 1, none, reduce_loss=True).backward()
    assert not x.grad.any()
    hidden, weight = randn(4, 8, dtype=dtype, device=device), randn(50, 8, dtype=dtype, device=device)
    hidden.requires_grad_(), weight.requires_grad_()
    te.fused_linear_cross_entropy(hidden, weight, none).backward()
    assert not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_nan_and_inf(device, smoothing, reduce):
    """As torch's, element for element; an ignored token has 0 whatever it holds, where torch's gradient is NaN."""
    inf = torch.inf
    logits = torch.ones(6, 40)
    logits[0, 3] = torch.nan
    logits[1, 5] = inf
    logits[2] = -inf
    logits[3, 7:] = -inf
    logits[4, 2] = torch.nan
    logits[5, 1] = -inf
    target = torch.tensor([1, 2, 3, 4, IGNORED, 1])
    for rows in ([0], [1], [2], [3], [5], [3, 4, 5], [0, 3, 4]):
        x, t = logits[rows], target[rows]
        clean = x.nan_to_num(0.0, posinf=0.0, neginf=0.0) if t.tolist() == [IGNORED] else x
        want, oracle_x = oracle(clean, t, smoothing, reduce)
        (grad,) = torch.autograd.grad(want.sum(), oracle_x)
        grad[t == IGNORED] = 0.0
        leaf = x.to(device).requires_grad_()
        loss = te.parallel_cross_entropy(leaf * 1, t.to(device), smoothing, reduce)
        assert_within(loss, want, 1e-5, f"loss of rows {rows}")
        (got,) = torch.autograd.grad(loss.sum(), leaf)
        if reduce and want.isnan():
            assert (got.cpu()[t == IGNORED] == 0).all()
        assert_within(got, grad, 1e-6, f"gradient of rows {rows}")


def test_nothing_to_learn_from(device):
    """0 tokens, and tokens that are all ignored: torch's mean is NaN, too; the gradients are zeros."""
    for tokens, target in ((0, []), (3, [IGNORED] * 3)):
        t = torch.tensor(target, dtype=torch.int64, device=device)
        leaf = torch.randn(tokens, 30, device=device).requires_grad_()
        each = te.parallel_cross_entropy(leaf * 1, t)
        assert each.shape == (tokens,) and (each == 0).all()
        loss = te.parallel_cross_entropy(leaf * 1, t, reduce_loss=True)
        assert loss.isnan() and F.cross_entropy(leaf, t).isnan()
        (grad,) = torch.autograd.grad(loss, leaf)
        assert grad.shape == leaf.shape and (grad == 0).all()


def test_a_single_token_without_dimensions(device):
    logits, _ = draw(device, 30)
    target = torch.tensor(4, device=device)
    want, _ = oracle(logits, target)
    assert_within(te.parallel_cross_entropy(logits, target), want, 1e-5)


def test_ignored_index_inside_the_vocabulary(device):
    logits, target = draw(device, 9, 30)
    target = target.clamp_min(0)
    target[4] = 7
    want, x = oracle(logits, target, 0.1, True, ignore=7)
    leaf = logits.clone().requires_grad_()
    loss = te.parallel_cross_entropy(leaf * 1, target, 0.1, True, ignore_idx=7)
    assert_within(loss, want, 1e-5)
    (grad,) = torch.autograd.grad(want, x)
    assert_within(torch.autograd.grad(loss, leaf)[0], grad, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_token_are_its_own(device, dtype):
    """Beside any other row of the call, wherever its memory starts, and in every run."""
    logits, target = draw(device, 11, 1021, dtype=dtype)

    def run(x, t):
        leaf = x.clone().requires_grad_()
        loss = te.parallel_cross_entropy(leaf * 1, t, 0.1)
        return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]

    loss, grad = run(logits, target)
    for again, whole in zip(run(logits, target), (loss, grad)):
        assert_same_bits(again, whole)
    for first, last in ((0, 1), (3, 8), (10, 11)):
        part = run(logits[first:last], target[first:last])
        assert_same_bits(part[0], loss[first:last])
        assert_same_bits(part[1], grad[first:last])
    odd = torch.empty(logits.numel() + 1, dtype=dtype, device=device)[1:].view_as(logits).copy_(logits)
    made = te.parallel_cross_entropy(odd.requires_grad_(), target, 0.1)
    assert_same_bits(made.detach(), loss)
    assert_same_bits(torch.autograd.grad(made.sum(), odd)[0], grad)


def test_is_cg_capturable_changes_nothing(device):
    logits, target = draw(device, 5, 90)
    losses = [te.parallel_cross_entropy(logits, target, 0.0, False, None, IGNORED, flag) for flag in (False, True)]
    assert_same_bits(*losses)


def test_targets_out_of_range(device):
    """Named on the CPU, before anything is written; on a GPU the token's loss and gradient are NaN."""
    for wrong in (50, -1, 2**40):
        logits, target = draw(device, 4, 50)
        target[2] = wrong
        leaf = logits.clone().requires_grad_()
        x = leaf * 1
        version = x._version
        if device == "cpu":
            for reduce in (False, True):
                with refused(
                    ValueError, "cross_entropy", "target", f"{wrong} in row 2", "0 to 49", "ignore_idx = -100"
                ):
                    te.parallel_cross_entropy(x, target, reduce_loss=reduce)
            assert x._version == version
            assert_same_bits(x.detach(), logits)
            continue
        loss = te.parallel_cross_entropy(x, target)
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        assert loss[2].isnan() and grad[2].isnan().all()
        assert loss[[0, 1, 3]].isfinite().all() and grad[[0, 1, 3]].isfinite().all()


def test_refusals(device):
    logits, target = draw(device, 4, 6, 50)
    call = te.parallel_cross_entropy
    with refused(ValueError, "cross_entropy", "'logits'", "contiguous", "strides"):
        functional.cross_entropy(logits.transpose(0, 1), target.t())
    for dtype in (torch.int64, torch.bool):
        with refused(ValueError, "'inp'", "wanted float32, float16 or bfloat16"):
            call(logits.to(dtype), target)
    for dtype in (torch.int32, torch.float32, torch.uint8):
        with refused(ValueError, "'target'", "wanted int64", ".long()"):
            call(logits, target.to(dtype))
    for shape in ((6, 4), (24,), (4,), (4, 6, 1), (4, 6, 50)):
        with refused(ValueError, "'target'", "shape", "[4, 6]"):
            call(logits, torch.zeros(shape, dtype=torch.int64, device=device))
    for smoothing in (1.01, -0.1, 2.0, float("nan")):
        with refused(ValueError, "'label_smoothing'", "[0, 1]"):
            call(logits, target, smoothing)
    with refused(ValueError, "no dimensions"):
        call(logits.sum(), target.sum())
    with refused(ValueError, "there are no classes"):
        call(logits[..., :0].contiguous(), target)
    with refused(TypeError, "parallel_cross_entropy", "'inp'", "list"):
        call([1.0], target)
    with refused(TypeError, "parallel_cross_entropy", "'dist_process_group'", "str"):
        call(logits, target, dist_process_group="tp")
    with refused(TypeError, "parallel_cross_entropy", "ignore_index", "ignore_idx"):
        call(logits, target, ignore_index=3)
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device)
    with refused(NotImplementedError, "parallel_cross_entropy", "'inp'", "dequantize()"):
        call(quantizer(logits.view(24, 50)), target.view(24))


def test_opcheck(device):
    logits, target = draw(device, 4, 31)
    ops = torch.ops.te
    for options in ((0.0, False, IGNORED, "", 1), (0.1, True, IGNORED, "", 1)):
        torch.library.opcheck(ops.cross_entropy.default, (logits.clone().requires_grad_(), target, *options))
        for gradient in (False, True):
            torch.library.opcheck(ops.cross_entropy_fwd.default, (logits, target, *options, gradient))
    torch.library.opcheck(ops.cross_entropy_bwd.default, (logits, torch.rand(4, device=device), None))
    torch.library.opcheck(ops.cross_entropy_bwd.default, (logits, logits.sum(), torch.ones(1, device=device)))


def test_functional_is_the_same(device):
    logits, target = draw(device, 5, 40)
    assert_same_bits(functional.cross_entropy(logits, target), te.parallel_cross_entropy(logits, target))
