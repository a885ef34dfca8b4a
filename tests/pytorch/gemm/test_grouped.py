# Products of rows in groups below the module: the registered ops that compiled calls and CUDA take,
# general_grouped_gemm, and padding. Oracles are float64 products of each group alone. Mutants: `narrow` from at[g +
# 1], the tail not zeroed, `how == 1` read as +=, padding put before a group: each turns tests here red.
import threading
from functools import partial

import pytest
import torch
from support import DTYPES, assert_same_bits, assert_within, randn, refused, rounding, sum_error, wide

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R
from transformer_engine.pytorch.cpp_extensions import general_gemm, general_grouped_gemm
from transformer_engine.pytorch.functional import grouped_offsets

K, N = 40, 24
SPLITS = [7, 0, 130, 1]
ROWS = sum(SPLITS) + 5


def offsets_of(splits, x):
    return grouped_offsets(torch.tensor(splits, device=x.device), x)


def operands(dtype, device):
    x, dy = randn(ROWS, K, dtype=dtype, device=device), randn(ROWS, N, dtype=dtype, device=device)
    weights = [randn(N, K, dtype=dtype, device=device) for _ in SPLITS]
    biases = [randn(N, dtype=dtype, device=device) for _ in SPLITS]
    x[sum(SPLITS) :], dy[sum(SPLITS) :] = torch.nan, torch.nan
    return x, dy, weights, biases, offsets_of(SPLITS, x)


def groups(t):
    return t[: sum(SPLITS)].split(SPLITS)


def within(got, exact, magnitude, depth, dtype, what):
    assert_within(got, exact, sum_error(magnitude, depth + 2) + rounding(magnitude, dtype), what)


kernels = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if torch.cuda.is_available() else DTYPES)


@kernels
def test_against_float64(dtype, device):
    x, dy, weights, biases, offsets = operands(dtype, device)
    y = torch.ops.te.grouped_fprop(x, weights, biases, offsets)
    dx = torch.ops.te.grouped_dgrad(dy, weights, offsets)
    dweights = torch.ops.te.grouped_wgrad(dy, x, offsets)
    sums = torch.ops.te.grouped_sums(dy, offsets, False)
    assert not y[sum(SPLITS) :].any() and not dx[sum(SPLITS) :].any()
    assert sums.shape == (len(SPLITS), N)
    for i, (a, b) in enumerate(zip(groups(x), groups(dy), strict=True)):
        a, b, w, bias = (wide(t) for t in (a, b, weights[i], biases[i]))
        within(groups(y)[i], a @ w.T + bias, a.abs() @ w.abs().T + bias.abs(), K, dtype, f"y {i}")
        within(groups(dx)[i], b @ w, b.abs() @ w.abs(), N, dtype, f"dx {i}")
        within(dweights[i], b.T @ a, b.abs().T @ a.abs(), SPLITS[i], dtype, f"dweight {i}")
        within(sums[i], b.sum(0), b.abs().sum(0), SPLITS[i], dtype, f"sums {i}")


@kernels
def test_accumulation_is_requested_group_by_group(dtype, device):
    x, dy, _, _, offsets = operands(dtype, device)
    how = [0, 1, 0, -1]
    outs = [torch.full((N, K), 3.0, device=device) for _ in range(3)]
    torch.ops.te.grouped_wgrad_accumulate(dy, x, offsets, outs, how)
    for i in range(3):
        a, b = wide(groups(x)[i]), wide(groups(dy)[i])
        exact = b.T @ a + (3.0 if how[i] == 0 else 0.0)
        within(outs[i], exact, b.abs().T @ a.abs() + 3.0, SPLITS[i] + 1, torch.float32, f"main_grad {i}")


def test_misaligned_and_strided_operands(device):
    dtype = torch.bfloat16
    x, dy, weights, biases, offsets = operands(dtype, device)
    want = torch.ops.te.grouped_fprop(x, weights, biases, offsets), torch.ops.te.grouped_dgrad(dy, weights, offsets)

    def odd(t):
        return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)

    strange = [odd(w) for w in weights]
    pitched = torch.empty(ROWS, K + 3, dtype=dtype, device=device)[:, :K].copy_(x)
    assert_same_bits(torch.ops.te.grouped_fprop(pitched, strange, [odd(b) for b in biases], offsets), want[0])
    assert_same_bits(torch.ops.te.grouped_dgrad(odd(dy), strange, offsets), want[1])


def test_weights_anywhere_in_memory(device):
    """At one distance in one buffer, as those of GroupedLinear, forwards, backwards, with gaps; but for one; apart."""
    x, dy, weights, _, offsets = operands(torch.bfloat16, device)
    want = torch.ops.te.grouped_fprop(x, weights, [], offsets), torch.ops.te.grouped_dgrad(dy, weights, offsets)
    size, groups = N * K, len(weights)

    def within_one_buffer(gap, order):
        buffer = torch.empty(groups * (size + gap), dtype=x.dtype, device=device)
        places = [buffer[i * (size + gap) :][:size].view(N, K) for i in order]
        return [place.copy_(weight) for place, weight in zip(places, weights, strict=True)]

    forwards, backwards = range(groups), range(groups - 1, -1, -1)
    rows = within_one_buffer(0, forwards)
    arrangements = [rows, within_one_buffer(0, backwards), within_one_buffer(0, [0, 2, 1, 3])]
    arrangements += [within_one_buffer(gap, forwards) for gap in (3, 64)]
    arrangements += [[*rows[:2], weights[2], rows[3]], [weights[0], *rows[1:]]]
    wide_rows = torch.empty(groups, N, K + 8, dtype=x.dtype, device=device)[:, :, :K].copy_(torch.stack(weights))
    arrangements += [list(wide_rows), [*rows[:3], wide_rows[3]]]
    for arranged in arrangements:
        assert_same_bits(torch.ops.te.grouped_fprop(x, arranged, [], offsets), want[0])
        assert_same_bits(torch.ops.te.grouped_dgrad(dy, arranged, offsets), want[1])
    same = torch.ops.te.grouped_fprop(x, [weights[0]] * groups, [], offsets)
    assert_same_bits(same, torch.ops.te.grouped_fprop(x, [weights[0].clone() for _ in weights], [], offsets))


@pytest.mark.parametrize("n, k", [(N, K), (16, 8), (7, 5), (1, 1), (0, 8), (8, 0)])
@kernels
def test_weights_and_gradients_as_one_tensor(dtype, n, k, device):
    """The bits of the list of its matrices, where they are aligned and where they are not."""
    ops, count = torch.ops.te, len(SPLITS)
    x, dy = randn(ROWS, k, dtype=dtype, device=device), randn(ROWS, n, dtype=dtype, device=device)
    biases, offsets = [randn(n, dtype=dtype, device=device) for _ in SPLITS], offsets_of(SPLITS, x)
    values = randn(count * n * k + 1, dtype=dtype, device=device)
    for stacked in (values[:-1].view(count, n, k), values[1:].view(count, n, k)):
        want = ops.grouped_fprop(x, list(stacked), biases, offsets), ops.grouped_dgrad(dy, list(stacked), offsets)
        assert_same_bits(ops.grouped_fprop(x, [stacked], biases, offsets), want[0])
        assert_same_bits(ops.grouped_dgrad(dy, [stacked], offsets), want[1])
    assert_same_bits(ops.grouped_wgrad_stacked(dy, x, offsets), torch.stack(ops.grouped_wgrad(dy, x, offsets)))


def test_offsets(device):
    x = torch.empty(10, 4, device=device)
    for splits, wanted in (
        ([3, 0, 7], [0, 3, 3, 10]),
        ([3, -5, 2], [0, 3, 3, 5]),
        ([8, 8, 8], [0, 8, 10, 10]),
        ([2**62, 2**62, 2**62], [0, 10, 10, 10]),
    ):
        for dtype in (torch.int64, torch.int32):
            if max(splits) < 2**31 or dtype is torch.int64:
                found = grouped_offsets(torch.tensor(splits, dtype=dtype, device=device), x)
                assert found.tolist() == wanted and found.dtype is torch.int32
    assert grouped_offsets(torch.tensor([4], device=device), torch.empty(0, 4, device=device)).tolist() == [0, 0]


def test_schemas_and_meta(device):
    x, dy, weights, biases, offsets = operands(torch.bfloat16, device)
    opcheck, tests = torch.library.opcheck, ("test_schema", "test_faketensor")
    opcheck(torch.ops.te.grouped_fprop.default, (x, weights, biases, offsets), test_utils=tests)
    opcheck(torch.ops.te.grouped_dgrad.default, (dy, weights, offsets), test_utils=tests)
    opcheck(torch.ops.te.grouped_wgrad.default, (dy, x, offsets), test_utils=tests)
    opcheck(torch.ops.te.grouped_fprop.default, (x, [torch.stack(weights)], biases, offsets), test_utils=tests)
    opcheck(torch.ops.te.grouped_dgrad.default, (dy, [torch.stack(weights)], offsets), test_utils=tests)
    opcheck(torch.ops.te.grouped_wgrad_stacked.default, (dy, x, offsets), test_utils=tests)
    for as_quantized in (False, True):
        opcheck(torch.ops.te.grouped_sums.default, (dy, offsets, as_quantized), test_utils=tests)
    opcheck(torch.ops.te.grouped_offsets.default, (torch.tensor(SPLITS, device=device), x), test_utils=tests)
    outs = [torch.zeros(N, K, device=device) for _ in SPLITS]
    opcheck(torch.ops.te.grouped_wgrad_accumulate.default, (dy, x, offsets, outs, [0, 1, 0, 1]), test_utils=tests)
    leaves = [w.requires_grad_() for w in weights]
    opcheck(
        torch.ops.te.grouped_linear.default,
        (x[: sum(SPLITS)].clone().requires_grad_(), leaves, biases, None, SPLITS, False, []),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    targets = [number for i in range(4) for number in (0, N, i % 2)]  # += and = in turn
    rows = x[: sum(SPLITS)].clone().requires_grad_()
    opcheck(torch.ops.te.grouped_linear.main_grad, (rows, leaves, [], None, SPLITS, False, [], outs, targets))


def test_bad_operands_are_named(device):
    x, dy, weights, biases, offsets = operands(torch.bfloat16, device)
    ops = torch.ops.te
    for words, call in (
        (("'weight'",), lambda: ops.grouped_fprop(x, [*weights[:3], weights[3].t()], biases, offsets)),
        (("'bias'",), lambda: ops.grouped_fprop(x, weights, [b[:-1] for b in biases], offsets)),
        (("'biases'", "4"), lambda: ops.grouped_fprop(x, weights, biases[:2], offsets)),
        (("'offsets'", "[5]"), lambda: ops.grouped_fprop(x, weights, biases, offsets[:-1])),
        (("'offsets'", "Int"), lambda: ops.grouped_dgrad(dy, weights, offsets.long())),
        (("'x'", str(K)), lambda: ops.grouped_fprop(dy, weights, biases, offsets)),
        (("'dy'", "rows"), lambda: ops.grouped_wgrad(dy[:-1], x, offsets)),
        (("'outs'", "'how'"), lambda: ops.grouped_wgrad_accumulate(dy, x, offsets, [], [0, 0, 0, 0])),
        (("'how' has 7", "-1"), lambda: ops.grouped_wgrad_accumulate(dy, x, offsets, weights, [0, 7, 0, 0])),
        (
            ("'offsets'", "strides", "contiguous"),
            lambda: ops.grouped_dgrad(dy, weights, offsets.repeat_interleave(2)[::2]),
        ),
        (("'m_splits'",), lambda: ops.grouped_offsets(torch.ones(2, device=device), x)),
    ):
        with refused(ValueError, "grouped_linear", *words):
            call()


# By dtype before anything is written: on the real device and by the Meta function alike.
def test_gradients_of_another_dtype_are_refused(device):
    x, dy, _, _, offsets = operands(torch.bfloat16, device)
    for dtype in (torch.float16, torch.int32, torch.float64):
        outs = [torch.full((N, K), 3.0, device=device) for _ in range(2)]
        outs[1] = outs[1].to(dtype)
        for on in (lambda t: t, lambda t: t.to("meta")):
            with refused(ValueError, "grouped_linear", "'outs'", "dtype", "Float or BFloat16"):
                torch.ops.te.grouped_wgrad_accumulate(on(dy), on(x), on(offsets), [on(t) for t in outs], [0, -1, -1, 1])
        assert all((out == 3).all() for out in outs)


# ---- general_grouped_gemm ----


# The quantizers of operands; `lines`: blocks as of inputs and gradients, else squares as of weights.
MAKERS = {
    "plain": None,
    "current": lambda device, lines: te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device),
    "block": lambda device, lines: te.Float8BlockQuantizer(
        te.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1 if lines else 2
    ),
}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("held", MAKERS)
def test_it_is_a_loop_of_general_gemm(held, dtype, layout, accumulate, device):
    x, dy, weights, biases, _ = operands(dtype, device)
    a = list(groups(x)) if layout == "NT" else weights
    b = list(groups(dy if layout != "TN" else x))
    if MAKERS[held] is not None:
        makers = [MAKERS[held](device, lines) for lines in (layout == "NT", True)]
        a, b = ([make(t) for t in operand] for make, operand in zip(makers, (a, b), strict=True))
    bias = biases if layout != "NN" else None
    options = {"layout": layout, "grad": layout == "NT", "accumulate": accumulate}
    rows = [p.shape[0] for p in groups(x)] if layout != "NT" else [N] * 4
    width = N if layout == "TN" else K
    out, want = ([torch.ones(n, width, dtype=dtype, device=device) for n in rows] for _ in range(2))
    single = torch.ones(sum(rows), width, dtype=dtype, device=device)
    made = general_grouped_gemm(a, b, out, None, dtype, bias=bias, use_bias=bias is not None, **options)
    general_grouped_gemm(
        a, b, [single], None, dtype, bias=bias, use_bias=bias is not None, m_splits=rows, single_output=True, **options
    )
    for i in range(4):
        one = general_gemm(a[i], b[i], dtype, out=want[i], bias=None if bias is None else bias[i], **options)
        assert_same_bits(out[i], want[i])
        assert_same_bits(single.split(rows)[i], want[i])
        assert (made[1][i] is None) == (one[1] is None) and made[0] is out
        if one[1] is not None:
            assert_same_bits(made[1][i], one[1])


def test_general_grouped_gemm_refuses_by_name(device):
    a, b, d = ([torch.ones(2, 2, device=device)] * 2 for _ in range(3))
    for error, words, options in (
        (ValueError, ("'B'", "1 entries"), {"B": b[:1]}),
        (ValueError, ("'out'",), {"out": d[:1]}),
        (ValueError, ("'single_output'",), {"single_output": True}),
        (ValueError, ("'m_splits'",), {"single_output": True, "out": [torch.ones(5, 2)], "m_splits": [2, 2]}),
        (ValueError, ("'m_splits'", "negative"), {"single_output": True, "out": d[:1], "m_splits": [3, -1]}),
        (ValueError, ("'use_bias'",), {"use_bias": True}),
        (NotImplementedError, ("'gelu'",), {"gelu": True, "grad": True}),
        (NotImplementedError, ("'quantization_params'",), {"quantization_params": [object(), object()]}),
    ):
        with refused(error, "general_grouped_gemm", *words):
            general_grouped_gemm(
                **{"A": a, "B": b, "out": d, "quantization_params": None, "out_dtype": torch.float32, **options}
            )


# ---- padding ----


@pytest.mark.parametrize("align", [None, 4, 1])
def test_padding_and_back(align, device):
    pad, unpad = te.Fp8Padding(4, align), te.Fp8Unpadding(4, align)
    x = randn(sum(SPLITS), K, device=device, requires_grad=True)
    size = align or 16
    padded, splits = pad(x, SPLITS)
    assert splits == [-(-n // size) * size for n in SPLITS] and padded.shape == (sum(splits), K)
    for part, own in zip(padded.split(splits), x.split(SPLITS), strict=True):
        assert_same_bits(part[: len(own)], own)
        assert not part[len(own) :].any()
    back = unpad(padded, SPLITS)
    assert_same_bits(back, x)
    weight = randn(sum(SPLITS), K, device=device)
    (back * weight).sum().backward()
    assert_same_bits(x.grad, weight)
    assert pad(padded, splits)[0] is padded and unpad(x, [size, sum(SPLITS) - size, 0, 0]) is x if align == 1 else True


def test_padding_makes_fp8_groups_what_they_were(device):
    """Rows of zeros change nothing of a group but its size."""
    x = randn(sum(SPLITS), 32, dtype=torch.bfloat16, device=device)
    module = te.GroupedLinear(4, 32, N, params_dtype=torch.bfloat16, bias=False, device=device)
    padded, splits = te.Fp8Padding(4)(x, SPLITS)
    with te.autocast(recipe=R.Float8BlockScaling()):
        y, want = te.Fp8Unpadding(4)(module(padded, splits), SPLITS), module(x, SPLITS)
    assert_within(y, wide(want), rounding(wide(want), torch.bfloat16) + 2.0**-16)


def test_padding_names_what_does_not_fit(device):
    x = randn(sum(SPLITS), K, device=device)
    for module, inp, splits, words in (
        (te.Fp8Padding(4), x, SPLITS[:2], ("'m_splits'", "4")),
        (te.Fp8Padding(4), x, [7, -1, 131, 1], ("'m_splits'", "negative")),
        (te.Fp8Padding(4), x, [7.0, 0, 130, 1], ("'m_splits'", "whole numbers")),
        (te.Fp8Unpadding(4), x, None, ("'m_splits'", "whole numbers")),
        (te.Fp8Padding(4), x[:-1], SPLITS, ("'inp'", str(sum(SPLITS)))),
        (te.Fp8Unpadding(4), x, SPLITS, ("'inp'", "multiples of 16")),
    ):
        with refused(ValueError, type(module).__name__, *words):
            module(inp, splits)
    with refused(ValueError, "Fp8Padding", "'align_size'"):
        te.Fp8Padding(4, 0)


@pytest.mark.gpu
def test_a_threads_first_call(device="cuda"):
    """Of a thread that has called nothing of CUDA yet, as autograd's may be: with memory at hand, nothing before the
    tensor maps does. Mutant: without cudaSetDevice() in map_of (grouped_gemm.cu)."""
    _, dy, weights, _, offsets = operands(torch.bfloat16, device)
    run = partial(torch.ops.te.grouped_dgrad, dy, weights, offsets)
    want = run()
    run()  # leaves memory for the next one
    found = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    assert_same_bits(found[0], want)
