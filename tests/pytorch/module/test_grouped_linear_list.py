# te.GroupedLinear by a list of sizes, whose products go to te_gemm by addresses alone: the bits of a loop of Linears in
# every dtype, with rows, buffers and weights that it takes and that it does not, one by one and by the grouped kernels;
# and gradients that are pieces of one allocation, each a tensor for itself. Mutants: a pitch of a single row
# (gemm_list.cpp), no note_written() (gemm_policy_grouped.cpp).
import pytest
import torch
from support import DTYPES, assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C

from .grouped_cases import SPLITS, K, N, assert_same_gradients, build, give_main_grads, step, step_of_loop

ROWS = sum(SPLITS)
OPTIONS = {
    "plain": {"bias": False},
    "bias": {"bias": True},
    "main_grad": {"bias": False, "fuse_wgrad_accumulation": True},
    "main_grad of 16 bits": {"bias": False, "fuse_wgrad_accumulation": True},
    "main_grad, bias": {"bias": True, "fuse_wgrad_accumulation": True},
    "delayed": {"bias": True, "delay_wgrad_compute": True},
}


@pytest.fixture(autouse=True, params=["each", "grouped", "alternating"])
def products(device, request):
    """A product for each group, the grouped kernels for what they take, and both side by side. On a CPU by the engine's
    loop, which takes addresses as cuBLASLt does."""
    before = _C.set_cpu_products("loop") if device == "cpu" else None
    lists = _C.set_list_products(request.param)
    yield
    _C.set_list_products(lists)
    if before is not None:
        _C.set_cpu_products(before)


def draw(device, dtype, rows=ROWS):
    return randn(rows, K, dtype=dtype, device=device), randn(rows, N, dtype=dtype, device=device)


@pytest.mark.parametrize("splits", [SPLITS, [1, 1, 1, 1], [0, 3, 0, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_has_the_bits_of_a_loop(dtype, options, splits, device):
    ours, loop = build(device=device, dtype=dtype, **OPTIONS[options])
    give_main_grads([ours, *loop] if "main_grad" in options else [], dtype if "16" in options else torch.float32)
    for _ in range(2):
        x, dy = draw(device, dtype, sum(splits))
        got, want = step(ours, x, dy, splits), step_of_loop(loop, x, dy, splits)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)
        assert_same_gradients(ours, loop)


def pitched(t):
    """The same values, more memory from row to row."""
    return torch.cat([t, t], 1)[:, : t.shape[1]]


def across(t):
    return t.t().contiguous().t()


def expanded(t):
    return t[:1].expand(t.shape)


@pytest.mark.parametrize("laid", [pitched, across, expanded])
def test_rows_that_lie_otherwise(laid, device):
    ours, loop = build(device=device, dtype=torch.bfloat16)
    x, dy = (laid(t) for t in draw(device, torch.bfloat16))
    rows = x.detach().requires_grad_()
    ours(rows, SPLITS).backward(dy)
    got = rows.grad
    want = step_of_loop(loop, x.contiguous(), dy.contiguous(), SPLITS)[1]
    assert_same_bits(got, want)
    assert_same_gradients(ours, loop)


def test_weights_and_widths_that_lie_otherwise(device):
    ours, loop = build(device=device, dtype=torch.bfloat16)
    for i, linear in enumerate(loop):
        for module, name in ((ours, f"weight{i}"), (linear, "weight")):
            p = getattr(module, name)
            p.data = pitched(p.data) if i % 2 else across(p.data)
    x, dy = draw(device, torch.bfloat16)
    for a, b in zip(step(ours, x, dy, SPLITS), step_of_loop(loop, x, dy, SPLITS), strict=True):
        assert_same_bits(a, b)
    assert_same_gradients(ours, loop)


def test_a_result_whose_groups_begin_anywhere(device):
    """Rows of 5 bfloat16: no group but the first begins on 16 bytes."""
    ours = te.GroupedLinear(3, 8, 5, params_dtype=torch.bfloat16, device=device)
    loop = [te.Linear(8, 5, params_dtype=torch.bfloat16, device=device) for _ in range(3)]
    with torch.no_grad():
        for i, linear in enumerate(loop):
            for name in ("weight", "bias"):
                getattr(linear, name).copy_(getattr(ours, f"{name}{i}"))
    splits = [1, 2, 3]
    x = randn(6, 8, dtype=torch.bfloat16, device=device)
    dy = randn(6, 5, dtype=torch.bfloat16, device=device)
    for a, b in zip(step(ours, x, dy, splits), step_of_loop(loop, x, dy, splits), strict=True):
        assert_same_bits(a, b)
    assert_same_gradients(ours, loop)


@pytest.mark.parametrize("on_device", [False, True])
def test_gradients_are_tensors_for_themselves(on_device, device):
    ours, _ = build(device=device, dtype=torch.bfloat16)
    x, dy = draw(device, torch.bfloat16)
    ours(x, torch.tensor(SPLITS, device=device) if on_device else SPLITS).backward(dy)
    weights = [getattr(ours, f"weight{i}").grad for i in range(4)]
    biases = [getattr(ours, f"bias{i}").grad for i in range(4)]
    assert all(g.is_contiguous() and g.data_ptr() % 16 == 0 for g in weights)
    assert len({g.data_ptr() for g in weights + biases}) == 8
    before = [g.clone() for g in weights + biases]
    version = weights[1]._version
    weights[0].fill_(7)
    biases[0].fill_(7)
    assert weights[1]._version == version
    for i, (g, want) in enumerate(zip(weights + biases, before, strict=True)):
        if i % 4:
            assert_same_bits(g, want, str(i))


@pytest.mark.parametrize("first", [True, False])
def test_some_of_the_buffers_are_written_over(first, device):
    """Each buffer follows its own flag; NaN where it is overwritten; and the version of each counts the write."""
    ours, loop = build(device=device, dtype=torch.float32, bias=False, fuse_wgrad_accumulation=True)
    weights = [[getattr(ours, f"weight{i}") for i in range(4)], [linear.weight for linear in loop]]
    for of_one in weights:
        for i, weight in enumerate(of_one):
            weight.overwrite_main_grad = (i % 2 == 0) == first
            held = float("nan") if weight.overwrite_main_grad else 0.5
            weight.main_grad = torch.full(weight.shape, held, device=device)
    before = [weight.main_grad._version for weight in weights[0]]
    x, dy = draw(device, torch.float32)
    step(ours, x, dy, SPLITS), step_of_loop(loop, x, dy, SPLITS)
    for i, (a, b) in enumerate(zip(*weights, strict=True)):
        assert_same_bits(a.main_grad, b.main_grad, str(i))
        assert a.main_grad._version > before[i], str(i)


def test_rows_of_the_other_sign(device):
    """A negated view's bytes are not its values."""
    ours, _ = build(device=device, dtype=torch.float32)
    x, dy = draw(device, torch.float32)
    plain = step(ours, x, dy, SPLITS)
    assert torch._neg_view(-x).is_neg()
    negated = ours(torch._neg_view(-x).requires_grad_(), SPLITS)
    assert_same_bits(negated, plain[0])
