# The implementation that computes a product: the choice itself, for either device; the plain loop in place of LibTorch
# on the CPU, in which an element's bits do not depend on the rows beside it; and LibTorch's product lent to C++ callers
# of the engine.
import contextlib
import ctypes
from pathlib import Path

import pytest
import torch
from support import DTYPES, assert_same_bits, assert_within, in_threads, randn, refused, rounding, sum_error, wide
from torch._subclasses.fake_tensor import FakeTensorMode

import transformer_engine as package
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import gemm, gemm_accumulate

from .fp8_operands import BLOCK_1D, BLOCK_2D, TENSOR, Operand, rounded_up

ops = torch.ops.te
F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.uint8


@contextlib.contextmanager
def cpu_products(by):
    before = _C.set_cpu_products(by)
    try:
        yield
    finally:
        _C.set_cpu_products(before)


@pytest.fixture
def loop():
    with cpu_products("loop"):
        yield


# ---- the decision ----


@pytest.mark.parametrize(
    ("place", "operands", "out", "options", "by", "apart", "words"),
    [
        ("cpu", F32, F32, {}, "LibTorch", True, "LibTorch's CPU product"),
        ("cpu", BF16, F32, {"into": True, "bias_gradient": True}, "LibTorch", True, "LibTorch's CPU product"),
        ("cpu", BF16, BF16, {"empty": True}, "LibTorch", True, "LibTorch's CPU product"),
        ("cpu", FP8, BF16, {"bias": F32}, "LibTorch", True, "LibTorch's CPU product of widened operands"),
        ("cpu", FP8, BF16, {"empty": True}, "none", True, "nothing to multiply"),
        ("cuda", BF16, BF16, {"bias": BF16}, "cuBLASLt", False, None),
        ("cuda", BF16, BF16, {"bias_gradient": True}, "cuBLASLt", False, None),
        ("cuda", BF16, F32, {"bias_gradient": True}, "cuBLASLt", True, "cuBLASLt, the bias gradient on its own"),
        ("cuda", F32, F32, {"bias_gradient": True}, "cuBLASLt", False, None),
        ("cuda", F32, F32, {"bias_gradient": True, "empty": True}, "cuBLASLt", True, "cuBLASLt, the bias gradient on"),
        ("cuda", BF16, F32, {"into": True}, "cuBLASLt", False, None),
        ("cuda", BF16, F32, {"into": True, "empty": True}, "none", True, "nothing to multiply"),
        ("cuda", F32, F32, {"empty": True}, "cuBLASLt", False, None),
        ("cuda", FP8, BF16, {"bias": BF16}, "cuBLASLt", False, None),
        ("cuda", FP8, F32, {"bias": BF16}, "cuBLASLt", False, None),
        ("cuda", FP8, F16, {"bias": F16}, "cuBLASLt", False, None),
        ("cuda", FP8, F16, {"bias": BF16}, "cuBLASLt", True, "cuBLASLt, the bias on its own"),
        ("cuda", FP8, F32, {"bias": F32}, "cuBLASLt", True, "cuBLASLt, the bias on its own"),
        ("cuda", FP8, F32, {"into": True}, "cuBLASLt", False, None),
        ("cuda", FP8, F32, {"into": True, "wide": False}, "cuBLASLt", True, "cuBLASLt, brought into the output on its"),
        ("cuda", FP8, F32, {"empty": True}, "none", True, "nothing to multiply"),
    ],
)
def test_the_decision(place, operands, out, options, by, apart, words):
    path = _C.gemm_path(torch.device(place), operands, out, **options)
    assert path[:2] == (by, apart)
    assert path[2] is None if words is None else path[2].startswith(words)
    assert (path[3] or "") != "" or not apart or by != "cuBLASLt", "an operation on its own has a reason"
    with cpu_products("loop"):
        looped = _C.gemm_path(torch.device(place), operands, out, **options)
    if place == "cuda" or by == "none":
        assert looped == path
    else:
        beside = operands == FP8 and (options.get("bias", BF16) != BF16)
        assert looped == ("the CPU loop", beside, "the plain CPU loop", "set_cpu_products('loop') selects it")


def test_the_requested_implementation_is_named():
    before = _C.set_cpu_products("loop")
    assert before == "libtorch" and _C.set_cpu_products("libtorch") == "loop"
    with refused(ValueError, "set_cpu_products", "'by'", "'mkl'", "'libtorch' or 'loop'"):
        _C.set_cpu_products("mkl")
    assert _C.set_cpu_products("libtorch") == "libtorch"


def product_paths(module, *sample):
    return {(row.path, row.why_not_faster) for row in te.explain(module, *sample).rows if row.op.startswith("linear")}


def test_explain_shows_the_implementation(loop):
    module = te.LayerNormMLP(32, 48, activation="swiglu", device="cpu", params_dtype=BF16)
    assert product_paths(module) == {("the plain CPU loop", "set_cpu_products('loop') selects it")}
    _C.set_cpu_products("libtorch")
    assert product_paths(module) == {("LibTorch's CPU product", "")}


# ---- the plain loop: values, and bits that do not depend on what is computed beside them ----

ROWS, COLS, DEPTH = 37, 29, 67
PARTS = ((0, 1), (1, 17), (17, 37), (0, 36))


def operands(layout, dtype, rows=ROWS, cols=COLS, depth=DEPTH):
    a = (cols, depth) if layout == "TN" else (depth, cols)
    b = (depth, rows) if layout == "NT" else (rows, depth)
    return randn(*a, dtype=dtype), randn(*b, dtype=dtype)


def rows_of(b, layout, first, last):
    return b[:, first:last] if layout == "NT" else b[first:last]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_rows_alone_and_rows_of_the_whole_are_the_same_bits(layout, dtype, threads, loop):
    before = torch.get_num_threads()
    a, b = operands(layout, dtype)
    bias, aux = randn(COLS, dtype=dtype), randn(ROWS, COLS, dtype=dtype)
    outs = [randn(ROWS, COLS, dtype=d) for d in {dtype, F32}]
    torch.set_num_threads(threads)
    try:
        for first, last in PARTS:
            part = rows_of(b, layout, first, last)

            def same(epilogue, f, rows=slice(first, last), part=part):
                for of_part, of_all in zip(f(part, rows), f(b, slice(None)), strict=True):
                    assert_same_bits(of_part, of_all[rows], f"{epilogue} {rows}")

            same("none", lambda b, _: gemm(a, b, layout)[:1])
            same("bias", lambda b, _: gemm(a, b, layout, epilogue="bias", bias=bias)[:1])
            same("gelu", lambda b, _: gemm(a, b, layout, epilogue="gelu", bias=bias))
            same("dgelu", lambda b, rows: gemm(a, b, layout, epilogue="dgelu", aux=aux[rows])[:1])
            same("wide", lambda b, _: gemm(a, b, layout, out_dtype=F32)[:1])
            if layout == "NT":
                same("bgrad", lambda b, _: gemm(a, b, layout, epilogue="bgrad"))
            for out in outs:
                for overwrite in (False, True):

                    def into(b, rows, out=out, overwrite=overwrite):
                        target = out[rows].clone()
                        sums = gemm_accumulate(a, b, layout, target, bias_grad=layout == "NT", overwrite=overwrite)
                        return (target, sums) if layout == "NT" else (target,)

                    same(f"into {out.dtype} {overwrite}", into)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_three_products_of_a_linear_layer(dtype, loop):
    """Against float64, and row by row: of y and dx by the batch's rows, of dweight by the weight's."""
    x, weight, bias = randn(5, 7, DEPTH, dtype=dtype), randn(COLS, DEPTH, dtype=dtype), randn(COLS, dtype=dtype)
    dy = randn(5, 7, COLS, dtype=dtype)

    def near(got, left, right, add=0.0):
        want, size = wide(left) @ wide(right) + add, wide(left).abs() @ wide(right).abs() + abs(add)
        assert got.dtype == dtype
        assert_within(got, want, sum_error(size, left.shape[-1] + 1) + rounding(want, dtype))

    y = ops.linear_fwd(x, weight, bias)
    dx = ops.linear_dgrad(dy, weight)
    dweight, dbias = ops.linear_wgrad(dy, x, True)
    near(y, x, weight.mT, wide(bias))
    near(dx, dy, weight)
    near(dweight, dy.flatten(0, 1).mT, x.flatten(0, 1))
    near(dbias[None], torch.ones(1, 35, dtype=dtype), dy.flatten(0, 1))
    for i in range(5):
        assert_same_bits(ops.linear_fwd(x[i], weight, bias), y[i])
        assert_same_bits(ops.linear_fwd(x[i], weight, None), ops.linear_fwd(x, weight, None)[i])
        assert_same_bits(ops.linear_dgrad(dy[i], weight), dx[i])
    for rows in (slice(0, 1), slice(3, 20), slice(20, 29)):
        part, sums = ops.linear_wgrad(dy[..., rows], x, True)
        assert_same_bits(part, dweight[rows])
        assert_same_bits(sums, dbias[rows])


def part_of(operand, first, last):
    """Rows of an Operand, as te::gemm_fp8 takes them."""
    scales = operand.scale_inv
    if operand.scaling == BLOCK_1D:
        scales = torch.zeros(scales.shape[0], rounded_up(last - first, 4))
        scales[:, : last - first] = operand.scale_inv[:, first:last]
    elif operand.scaling == BLOCK_2D:
        scales = scales[first // 128 : -(-last // 128)].contiguous()
    return operand.data[first:last], scales, operand.code


@pytest.mark.parametrize("out_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("scaling", [(TENSOR, TENSOR), (BLOCK_1D, BLOCK_1D), (BLOCK_2D, BLOCK_1D)])
def test_rows_of_fp8_products(scaling, out_dtype, loop):
    for a_outer, b_outer, depth in ((29, 37, 67), (32, 48, 144)):
        a = Operand(a_outer, depth, scaling[0], False, "cpu", whole=False)
        b = Operand(b_outer, depth, scaling[1], True, "cpu", whole=False)
        before = randn(b_outer, a_outer, dtype=out_dtype)
        for bias in (None, randn(a_outer), randn(a_outer, dtype=BF16), randn(a_outer, dtype=F16)):
            whole = ops.gemm_fp8(*a.arguments, *b.arguments, out_dtype, bias, False)
            add = 0.0 if bias is None else wide(bias)
            want = b.value @ a.value.mT + add
            # the factors are each rounded once
            bound = sum_error(b.value.abs() @ a.value.abs().mT + abs(add), 2 * depth + 5)
            assert_within(whole, want, bound + rounding(want, out_dtype))
            for first, last in ((0, 1), (3, 19), (16, 32), (19, b_outer)):
                part = ops.gemm_fp8(*a.arguments, *part_of(b, first, last), out_dtype, bias, False)
                assert_same_bits(part, whole[first:last])
        for overwrite in (False, True):
            out = before.clone()
            ops.gemm_fp8_accumulate(*a.arguments, *b.arguments, out, overwrite, False)
            for first, last in ((0, 1), (3, 19), (16, 32), (19, b_outer)):
                part = before[first:last].clone()
                ops.gemm_fp8_accumulate(*a.arguments, *part_of(b, first, last), part, overwrite, False)
                assert_same_bits(part, out[first:last])


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear, te.LayerNormMLP])
def test_modules_give_rows_of_a_batch_the_same_bits(kind, dtype, recipe, loop):
    """y and dx of some rows of the batch; weight gradients are sums over all of it, and equal where all else is."""
    module = kind(48, 64, device="cpu", params_dtype=dtype)
    x, dy = randn(33, 48, dtype=dtype), randn(33, 64 if kind is not te.LayerNormMLP else 48, dtype=dtype)

    def run(rows):
        given = x[rows].clone().requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(given)
        y.backward(dy[rows])
        return y, given.grad

    whole = run(slice(None))
    for rows in (slice(0, 1), slice(1, 12), slice(12, 33)):
        for part, of_all in zip(run(rows), whole, strict=True):
            assert_same_bits(part, of_all[rows])


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (5, 3, 0)])
def test_nothing_to_multiply(shape, loop):
    rows, cols, depth = shape
    for layout in ("TN", "NN", "NT"):
        a, b = operands(layout, BF16, rows, cols, depth)
        bias = randn(cols, dtype=BF16)
        assert_same_bits(gemm(a, b, layout)[0], torch.zeros(rows, cols, dtype=BF16))
        d = gemm(a, b, layout, epilogue="bias", bias=bias)[0]
        assert_same_bits(d, bias.expand(rows, cols).contiguous())
        for overwrite in (False, True):
            out = torch.ones(rows, cols)
            sums = gemm_accumulate(a, b, layout, out, bias_grad=layout == "NT", overwrite=overwrite)
            assert out.eq(0.0 if overwrite else 1.0).all()
            if layout == "NT":
                assert_within(sums, wide(b).sum(0), 0.05)
    y = ops.linear_fwd(randn(rows, depth), randn(cols, depth), None)
    assert y.shape == (rows, cols) and y.eq(0).all()


def test_the_whole_process_changes_and_changes_back():
    """Results before and after have LibTorch's bits, and the threads of a backward use the loop too."""
    layer = te.Linear(64, 48, device="cpu", params_dtype=BF16)
    x = randn(24, 64, dtype=BF16)
    before = layer(x)
    with cpu_products("loop"):
        loop_bits = layer(x)
        in_threads(2, lambda _: assert_same_bits(layer(x), loop_bits))
    assert_same_bits(layer(x), before)


# ---- what C++ callers of the engine get in this process ----


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("rows", ctypes.c_int64), ("cols", ctypes.c_int64)] + [
        ("row_pitch", ctypes.c_int64),
        ("dtype", ctypes.c_int),
        ("device", ctypes.c_int32),
    ]


class Problem(ctypes.Structure):
    _fields_ = (
        [(name, Tensor) for name in ("a", "b", "d", "bias", "aux")]
        + [(name, ctypes.c_int) for name in ("layout", "epilogue", "accumulate", "allow_tf32")]
        + [(name, Tensor) for name in ("a_scale_inv", "b_scale_inv")]
        + [(name, ctypes.c_int) for name in ("a_scaling", "b_scaling", "fast_accumulation")]
        + [("whole_rows", ctypes.c_int64)]
    )


class Engine:
    """te_gemm and te_gemm_by_loop as a C program calls them."""

    def __init__(self):
        (path,) = {str(p) for root in package.__path__ for p in Path(root).rglob("libtransformer_engine.so")}
        self.library = ctypes.CDLL(path)
        self.library.te_last_error.restype = ctypes.c_char_p

    def view(self, t):
        return Tensor(t.data_ptr(), *t.shape, t.stride(0), {F32: 3, F16: 4, BF16: 5}[t.dtype], -1)

    def call(self, name, a, b, d, layout, accumulate):
        p = Problem(a=self.view(a), b=self.view(b), d=self.view(d), accumulate=accumulate)
        p.layout = ("TN", "NN", "NT").index(layout)
        for none in ("bias", "aux", "a_scale_inv", "b_scale_inv"):
            getattr(p, none).device = -1
        rest = (None, ctypes.c_size_t(0), None) if name == "te_gemm" else ()
        assert getattr(self.library, name)(ctypes.byref(p), *rest) == 0, self.library.te_last_error()

    def path(self):
        path, why = ctypes.c_char_p(), ctypes.c_char_p()
        self.library.te_noted_path(ctypes.byref(path), ctypes.byref(why))
        return path.value.decode()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_the_engine_uses_libtorchs_product(layout, dtype):
    engine = Engine()
    a, b = (t.new_full((t.shape[0], t.shape[1] + 3), torch.nan)[:, :-3].copy_(t) for t in operands(layout, dtype))
    left, right = (b.mT if layout == "NT" else b), (a.mT if layout == "TN" else a)
    for out_dtype in {dtype, F32}:
        for accumulate in (0, 1):
            memory = randn(ROWS, COLS + 2, dtype=out_dtype)
            d, before = memory[:, :COLS], memory.clone()
            if not accumulate:
                d.fill_(torch.nan)
            add = wide(before[:, :COLS]) if accumulate else 0.0
            engine.call("te_gemm", a, b, d, layout, accumulate)
            assert engine.path() == "the CPU product that te_set_cpu_gemm installed"
            want, size = wide(left) @ wide(right) + add, wide(left).abs() @ wide(right).abs() + abs(add)
            assert_within(d, want, sum_error(size, DEPTH + 1) + rounding(want, out_dtype))
            assert_same_bits(memory[:, COLS:], before[:, COLS:], "beyond d's columns")
            if dtype == F32 and not accumulate:
                assert_same_bits(d.contiguous(), left @ right)
    engine.call("te_gemm_by_loop", a, b, d, layout, 0)
    assert engine.path() == "CPU loop"
    with cpu_products("loop"):
        assert_same_bits(gemm(a, b, layout, out_dtype=d.dtype)[0], d.contiguous())


def test_the_product_of_libtorch_is_no_op_of_the_caller():
    """Modes, autocast and gradients of the thread that calls the engine."""
    a, b = operands("TN", F32)
    want, d = torch.empty(ROWS, COLS), torch.empty(ROWS, COLS)
    engine = Engine()
    engine.call("te_gemm", a, b, want, "TN", 0)

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise AssertionError(f"{function} was seen")

    for mode in (Seen(), FakeTensorMode(), torch.autocast("cpu", BF16), torch.inference_mode()):
        d.fill_(torch.nan)
        view = engine.view(a), engine.view(b), engine.view(d)
        with mode:
            p = Problem(a=view[0], b=view[1], d=view[2])
            assert engine.library.te_gemm(ctypes.byref(p), None, ctypes.c_size_t(0), None) == 0
        assert_same_bits(d, want, type(mode).__name__)
