"""Arguments of parallel_cross_entropy beside contiguous logits of 32 and 16 bits: any strides, float64, a smoothing of
1, the older name of `inp`; and named errors. Values: test_cross_entropy.py."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from support import DTYPES, assert_same_bits, refused

import transformer_engine.pytorch as te

from .cases import draw


def losses(x, target, reduce, smoothing=0.1):
    """(loss, gradient of what x is made of) of x, a function of a leaf."""
    leaf, made = x
    loss = te.parallel_cross_entropy(made, target, smoothing, reduce)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), grad


STRIDED = {
    "[b, s, V] as [s, b, V]": lambda t: t.transpose(0, 1),
    "[b, s, n, V] as [n, b, s, V]": lambda t: t.view(4, 3, 2, 50).permute(2, 0, 1, 3),
    "padded": lambda t: t[..., :40],
    "every other class": lambda t: t[..., ::2],
    "classes first": lambda t: t.transpose(0, 2),
    "expanded": lambda t: t[:1].expand(3, 6, 50),
    "reversed rows": lambda t: t.flip(0)[::2],
}
AS_THEY_LIE = list(STRIDED)[:2]


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_logits(device, dtype, name, reduce):
    """As their contiguous copy, to the bit but for the order of a mean's sum."""
    logits, _ = draw(device, 4, 6, 50, dtype=dtype)
    view = STRIDED[name]
    classes = view(logits).shape[-1]
    target = torch.randint(0, classes, view(logits).shape[:-1], device=device)
    target.view(-1)[::5] = -100
    results = []
    for contiguous in (False, True):
        leaf = logits.clone().requires_grad_()
        made = view(leaf * 1)
        results.append(losses((leaf, made.contiguous() if contiguous else made), target, reduce))
        assert contiguous or not made.is_contiguous()
    assert results[0][0].shape == (() if reduce else target.shape)
    if reduce:
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-6, atol=0)
    else:
        assert_same_bits(results[0][0], results[1][0])
    assert_same_bits(results[0][1], results[1][1])


@pytest.mark.parametrize("name", STRIDED)
def test_which_of_them_are_overwritten(device, name):
    """Rows in another order are no reason for a copy; whatever else is not contiguous stays as it is."""
    logits, _ = draw(device, 4, 6, 50)
    leaf = logits.clone().requires_grad_()
    whole = leaf * 1
    made = STRIDED[name](whole)
    target = torch.zeros(made.shape[:-1], dtype=torch.int64, device=device)
    before = whole.detach().clone()
    te.parallel_cross_entropy(made, target)
    assert torch.equal(whole.detach(), before) == (name not in AS_THEY_LIE)
    if name in AS_THEY_LIE:
        with refused(RuntimeError, "parallel_cross_entropy", "'inp'", "earlier loss"):
            te.parallel_cross_entropy(made, target)
    with torch.no_grad():
        plain = te.parallel_cross_entropy(STRIDED[name](logits), target)
    assert plain.shape == target.shape


@pytest.mark.parametrize("leaf_of", ["itself", "a view"])
def test_a_strided_leaf_stays(device, leaf_of):
    logits, _ = draw(device, 4, 6, 50)
    target = torch.randint(0, 50, (6, 4), device=device)
    leaf = (logits.transpose(0, 1) if leaf_of == "itself" else logits.clone()).detach().requires_grad_()
    made = leaf if leaf_of == "itself" else leaf.transpose(0, 1)
    assert not made.is_contiguous()
    loss = te.parallel_cross_entropy(made, target, reduce_loss=True)
    loss.backward()
    assert_same_bits(
        leaf.detach().contiguous(), (logits.transpose(0, 1) if leaf_of == "itself" else logits).contiguous()
    )
    other = logits.transpose(0, 1).contiguous().requires_grad_()
    F.cross_entropy(other.view(-1, 50), target.reshape(-1)).backward()
    want = other.grad if leaf_of == "itself" else other.grad.transpose(0, 1)
    torch.testing.assert_close(leaf.grad, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["[b, s, V] as [s, b, V]", "padded"])
def test_strided_logits_compiled(device, name):
    logits, _ = draw(device, 4, 6, 50)
    view = STRIDED[name]
    target = torch.randint(0, view(logits).shape[-1], view(logits).shape[:-1], device=device)

    def loss_of(x, t):
        return te.parallel_cross_entropy(view(x * 1), t, 0.1)

    results = []
    for call in (loss_of, torch.compile(loss_of, backend="aot_eager", fullgraph=True)):
        leaf = logits.clone().requires_grad_()
        loss = call(leaf, target)
        results.append((loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]))
    assert_same_bits(results[0][0], results[1][0])
    assert_same_bits(results[0][1], results[1][1])


def test_float64(device):
    """Rounded to float32, with a gradient in float64; the logits stay."""
    logits, target = draw(device, 5, 60)
    wide = logits.double().requires_grad_()
    before = wide.detach().clone()
    loss = te.parallel_cross_entropy(wide, target, 0.1, True)
    assert loss.dtype is torch.float32
    loss.backward()
    assert wide.grad.dtype is torch.float64
    assert_same_bits(wide.detach(), before)
    leaf = logits.clone().requires_grad_()
    other = te.parallel_cross_entropy(leaf, target, 0.1, True)
    other.backward()
    assert_same_bits(loss.detach().view(1), other.detach().view(1))
    assert_same_bits(wide.grad.float(), leaf.grad)
    te.parallel_cross_entropy(wide, target)  # nothing was written over it


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_smoothing_of_1(device, fused, reduce):
    """No class counts more than another; ignored tokens are left out. Mutant: no smoothing == 1 in Asked::loss."""
    logits, target = draw(device, 9, 30)
    target[::3] = -100
    leaf, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    if fused:
        eye = torch.eye(30, device=device)
        loss = te.fused_linear_cross_entropy(leaf, eye, target, label_smoothing=1.0, reduce_loss=reduce)
    else:
        loss = te.parallel_cross_entropy(leaf * 1, target, 1.0, reduce)
    want = F.cross_entropy(other, target, label_smoothing=1.0, reduction="mean" if reduce else "none")
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    loss.sum().backward(), want.sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-5, atol=1e-7)
    logits[0, 7] = -torch.inf
    inf = te.parallel_cross_entropy(logits[:2], target[:2].fill_(7), 1.0)
    assert inf[0] == torch.inf and inf[1].isfinite()


def test_the_name_of_before(device):
    logits, target = draw(device, 4, 50)
    with pytest.warns(DeprecationWarning, match="'_input' is deprecated, it is 'inp'"):
        loss = te.parallel_cross_entropy(_input=logits, target=target, label_smoothing=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_bits(loss, te.parallel_cross_entropy(inp=logits, target=target, label_smoothing=0.1))
    with pytest.warns(DeprecationWarning), pytest.raises(TypeError, match="multiple values for argument 'inp'"):
        te.parallel_cross_entropy(logits, target, _input=logits)
    with refused(TypeError, "parallel_cross_entropy", "'ignore_index'", "ignore_idx"):
        te.parallel_cross_entropy(_input=logits, target=target, ignore_index=3)


def test_errors_name_the_function_and_its_argument(device):
    logits, target = draw(device, 4, 50)
    weight = torch.ones(50, 50, device=device)
    for op, call in (
        ("parallel_cross_entropy", te.parallel_cross_entropy),
        ("fused_linear_cross_entropy", lambda x, t, **o: te.fused_linear_cross_entropy(x, weight, t, **o)),
    ):
        for value in (2.5, "5", None):
            with refused(ValueError, f"{op}: argument 'ignore_idx' is {value!r}", "integer"):
                call(logits, target, ignore_idx=value)
        for value in ("0.1", None, [0.1]):
            with refused(ValueError, f"{op}: argument 'label_smoothing' is {value!r}", "[0, 1]"):
                call(logits, target, label_smoothing=value)
        with refused(ValueError, f"{op}: argument 'label_smoothing' is 1.5", "[0, 1]"):
            call(logits, target, label_smoothing=1.5)
        with refused(ValueError, f"{op}: argument 'target'", "int64"):
            call(logits, target.int())
        if device == "cpu":
            for reduce in (False, True):
                with refused(ValueError, f"{op}: argument 'target' is 59 in row 0", "0 to 49"):
                    call(logits, torch.full_like(target, 59), reduce_loss=reduce)
    with refused(ValueError, "parallel_cross_entropy: argument 'inp'", "float32"):
        te.parallel_cross_entropy(logits.long(), target)
