# quantize, the functional op: the same bytes through the registered op and torch.compile, bias gradients in their fixed
# order, quantizers written in Python, errors.
import plain_fp8 as plain
import pytest
import torch
from support import DTYPES, assert_same_bits, refused
from torch._subclasses.fake_tensor import FakeTensorMode

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import dequantize, quantize

from .cases import DIRECTIONS, SHAPES, check_quantized, draw, expected

# ---- bias gradients, the registered op ----


@pytest.mark.parametrize("kind", ("current", "block1d", "block2d"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_op_and_its_bias_gradient(kind, dtype, device):
    for shape in SHAPES:
        x = draw(*shape, dtype, device)
        spec = _C.Quantizer(kind).spec
        want = expected(kind, x)
        for rowwise, columnwise in DIRECTIONS:
            *parts, dbias = quantize(x, spec, rowwise=rowwise, columnwise=columnwise, dbias=True)
            assert_same_bits(dbias.cpu(), plain.bias_gradient(x.cpu()), f"dbias {shape}")
            parts = [part if wanted else None for part, wanted in zip(parts, [rowwise] * 2 + [columnwise] * 2)]
            check_quantized(_C.Quantized(plain.SCALINGS[kind], False, *parts), want, False, shape)
        assert quantize(x, spec)[4].numel() == 0


def test_opcheck(device):
    for shape, dtype in (((5, 33), torch.float32), ((130, 272), torch.bfloat16), ((1, 16), torch.float16)):
        x = draw(*shape, dtype, device)
        for kind in ("current", "block1d", "block2d"):
            spec = _C.Quantizer(kind, True, True, 1e-3).spec
            for rowwise, columnwise in DIRECTIONS:
                for dbias in (False, True):
                    arguments = (x, spec, rowwise, columnwise, dbias)
                    torch.library.opcheck(torch.ops.te.quantize.default, arguments)
            row, row_scale, col, col_scale, _ = quantize(x, spec, rowwise=True, columnwise=True)
            scaling = plain.SCALINGS[kind]
            for arguments in ((row, row_scale, scaling, True, False), (col, col_scale, scaling, True, True)):
                torch.library.opcheck(torch.ops.te.dequantize.default, (*arguments, dtype))
            if kind == "current":
                for directions in DIRECTIONS:
                    arguments = (x, spec, row_scale, *directions)
                    torch.library.opcheck(torch.ops.te.quantize_again.default, arguments)
                    again = torch.ops.te.quantize_again(*arguments)
                    for got, want, wanted in zip(again[::2], (row, col), directions, strict=True):
                        assert not wanted or torch.equal(got, want)
                half = torch.stack(
                    [row_scale[0] * 2, row_scale[1] / 2]
                )  # the scale that is given, not the tensor's own
                assert torch.equal(torch.ops.te.quantize_again(x, spec, half, True, False)[1], half)


@pytest.mark.parametrize("kind", ("current", "block1d", "block2d"))
def test_compiled_bits_equal_eager(kind, device):
    spec = _C.Quantizer(kind, False, True).spec

    def through(x):
        row, row_scale, col, col_scale, dbias = quantize(x, spec, rowwise=True, columnwise=True, dbias=True)
        back = dequantize(row, row_scale, scaling=plain.SCALINGS[kind], e5m2=False, columnwise=False, dtype=x.dtype)
        return row, row_scale, col, col_scale, dbias, back

    compiled = torch.compile(through, fullgraph=True, backend="aot_eager", dynamic=True)
    # Both shapes have more than one block each way: PyTorch specialises sizes of 1.
    for shape, stance in (((150, 130), "default"), ((300, 277), "fail_on_recompile")):
        x = draw(*shape, torch.bfloat16, device)
        with torch.compiler.set_stance(stance):
            results = compiled(x)
        for got, want in zip(results, through(x), strict=True):
            assert_same_bits(got.contiguous(), want.contiguous(), f"{shape}")


def test_fake_and_meta_tensors_get_shapes_and_pitches():
    real = quantize(torch.zeros(5, 33), _C.Quantizer("block1d").spec, columnwise=True)
    with FakeTensorMode():
        fake = quantize(torch.empty(5, 33), _C.Quantizer("block1d").spec, columnwise=True)
    meta = quantize(torch.empty(5, 33, device="meta"), _C.Quantizer("block1d").spec, columnwise=True)
    for other in (fake, meta):
        assert [(t.shape, t.stride(), t.dtype) for t in other] == [(t.shape, t.stride(), t.dtype) for t in real]


# ---- quantizers written in Python ----


class Halving:
    """A format of its own: blocks of halved values."""

    def __init__(self):
        self.seen = []

    def _quantize_native(self, x, rowwise, columnwise):
        self.seen.append((tuple(x.shape), rowwise, columnwise))
        return _C.quantize(_C.Quantizer("block1d"), x / 2, rowwise, columnwise)


def test_a_quantizer_in_python_is_called(device):
    mine = Halving()
    handle = _C.Quantizer("python", python=mine)
    x = draw(20, 40, torch.bfloat16, device)
    q = _C.quantize(handle, x, True, False)
    assert mine.seen == [((20, 40), True, False)] and handle.kind == "python"
    check_quantized(q, expected("block1d", x / 2), False, "python")

    class Leaving:
        def _quantize_native(self, x, rowwise, columnwise):
            return None

    left = _C.quantize(_C.Quantizer("python", python=Leaving()), x, True, False)
    assert left.rowwise is None and left.columnwise is None

    class Broken:
        def _quantize_native(self, x, rowwise, columnwise):
            raise KeyError("no such table")

    with pytest.raises(KeyError, match="no such table"):
        _C.quantize(_C.Quantizer("python", python=Broken()), x, True, False)


# ---- errors ----


def bad_calls(device):
    x = torch.ones(4, 32, device=device)
    block = _C.Quantizer("block1d")
    good = _C.quantize(block, x, True, True)
    flag = torch.zeros(1, device=device)
    return (
        (lambda: _C.quantize(block, x.int(), True, False), ("quantize", "'x'", "Int", "float32, float16 or bfloat16")),
        (lambda: _C.quantize(block, x.double(), True, False), ("quantize", "'x'", "Double")),
        (lambda: _C.quantize(block, x.to(torch.float8_e4m3fn), True, False), ("quantize", "'x'", "Float8_e4m3fn")),
        (lambda: _C.quantize(block, torch.tensor(1.0, device=device), True, False), ("'x'", "no dimensions")),
        (lambda: _C.quantize(_C.Quantizer("none"), x, True, False), ("'quantizer'", "none")),
        (lambda: _C.quantize(block, x[:2], True, True, None, good), ("'out.rowwise'", "[4, 32]", "[2, 32]")),
        (lambda: _C.quantize(_C.Quantizer("current"), x, True, True, None, good), ("'plan'", "block scaling")),
        (lambda: _C.quantize(block, x, True, True, flag.double()), ("'noop'", "Double")),
        (lambda: _C.quantize(block, x, True, True, torch.zeros(2, device=device)), ("argument 'noop'", "[1, 2]")),
        (lambda: _C.quantize(_C.Quantizer("block1d", amax_epsilon=-1.0), x, True, False), ("amax_epsilon", "-1")),
        (lambda: _C.Quantizer("block3d"), ("'kind'", "'block3d'", "block1d")),
        (lambda: _C.Quantizer("delayed"), ("'scale'", "missing", "delayed")),
        (lambda: _C.Quantizer("current", scale=flag), ("'scale'", "given", "current")),
        (lambda: _C.Quantizer("python"), ("'python'", "missing")),
        (lambda: _C.Quantized(7, False), ("'scaling'", "7")),
        (lambda: _C.dequantize(_C.Quantized(1, False), torch.float32), ("dequantize", "'x'", "no data")),
        (lambda: _C.dequantize(good, torch.int32), ("dequantize", "'dtype'", "Int")),
        (lambda: _C.dequantize(_C.Quantized(1, False, good.rowwise), torch.float32), ("rowwise_scale_inv", "[1, 4]")),
        (lambda: _C.dequantize(_C.Quantized(0, False, x, flag), torch.float32), ("'x'", "Float", "uint8")),
        (lambda: _C.update_scales([(flag[None], flag, 448.0, -1, False, False)]), ("'margin'", "-1", ">= 0")),
        (lambda: _C.update_scales([(flag[None], flag, 0.0, 0, False, False)]), ("'fp8_max'", "0", "> 0")),
        (lambda: _C.update_scales([(flag[:0].view(0, 1), flag, 1.0, 0, False, False)]), ("'history'", "[0, 1]", "row")),
        (lambda: quantize(x, [1, 2]), ("'spec'", "4 integers")),
    )


def test_bad_input_is_named_and_harmless(device):
    for call, words in bad_calls(device):
        with refused(ValueError, *words):
            call()
    x = torch.ones(4, 32, device=device)
    for kind in (_C.Quantizer("delayed", scale=torch.ones(1)), _C.Quantizer("python", python=Halving())):
        with refused(NotImplementedError, "'spec'", "eager"):
            quantize(x, kind.spec)
