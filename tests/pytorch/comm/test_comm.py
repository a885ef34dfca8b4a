# comm, the binding: the ordered sum against the same additions in torch, shards quantized apart and put together
# against the whole quantized, layouts, torch.compile, opcheck, errors.
import pytest
import torch
from support import DTYPES, assert_same_bits, layouts, randn, refused

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import comm_interleave, comm_ordered_sum

from ..quantize.cases import KINDS, check_padding, draw, quantizer


def in_order(partials, bias=None):
    """The formula, one float32 addition after the other."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    return (total if bias is None else total + bias.float()).to(partials.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", (1, 2, 3, 4, 8))
def test_adds_in_the_order_of_the_ranks(dtype, ranks, device):
    for shape in ((5, 64), (3, 7, 33), (1, 1), (129, 40), (8,), (0, 16), (16, 0)):
        partials = randn(ranks, *shape, dtype=dtype, device=device, scale=30.0)
        bias = randn(shape[-1], dtype=dtype, device=device)
        assert_same_bits(comm_ordered_sum(partials), in_order(partials), shape)
        assert_same_bits(comm_ordered_sum(partials, bias), in_order(partials, bias), shape)


def test_the_order_matters(device):
    """The test above could not detect a wrong order if the values added up exactly."""
    partials = randn(8, 64, 64, device=device)
    assert not torch.equal(comm_ordered_sum(partials), comm_ordered_sum(partials.flip(0)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype, device):
    partials, bias = randn(3, 6, 40, dtype=dtype, device=device), randn(40, dtype=dtype, device=device)
    want = in_order(partials, bias)
    for name, laid in layouts(partials):
        for bias_name, bias_laid in layouts(bias[None]):
            got = comm_ordered_sum(laid, bias_laid[0])
            assert got.is_contiguous()
            assert_same_bits(got, want, f"{name}, bias {bias_name}")
    assert_same_bits(
        comm_ordered_sum(partials[:1].expand(4, 6, 40)), in_order(partials[:1].expand(4, 6, 40)), "expanded"
    )


# ---- interleave ----


def together(kind, parts, m):
    """(rowwise, its scales, columnwise, its scales) of the whole, from those of shards with m rows each."""

    def behind(name):
        return torch.cat([getattr(part, name) for part in parts])

    def beside(name, columns):
        return comm_interleave(torch.stack([getattr(part, name)[:, :columns] for part in parts]))

    tensor_wide = kind in ("current", "delayed")
    scales = columnwise_scales = parts[0].rowwise_scale_inv
    if not tensor_wide:
        scales = beside("rowwise_scale_inv", m) if kind == "block1d" else behind("rowwise_scale_inv")
        columnwise_scales = (
            behind("columnwise_scale_inv") if kind == "block1d" else beside("columnwise_scale_inv", m // 128)
        )
    return behind("rowwise"), scales, beside("columnwise", m), columnwise_scales


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", (1, 2, 3, 4, 8))
def test_shards_become_the_whole(kind, ranks, device):
    for m, cols, e5m2 in ((128, 48, False), (256, 130, True), (128, 1, False), (1, 40, False), (33, 40, True)):
        if kind.startswith("block") and m % 128 != 0:
            continue  # a block of the whole would be of two ranks
        x = draw(ranks * m, cols, torch.bfloat16, device)
        q = quantizer("delayed" if kind == "current" else kind, device, e5m2)  # current: the group's amax, one scale
        whole = _C.quantize(q, x, True, True)
        parts = [_C.quantize(q, shard, True, True) for shard in x.chunk(ranks)]
        got = together(kind, parts, m)
        want = (whole.rowwise, whole.rowwise_scale_inv, whole.columnwise, whole.columnwise_scale_inv)
        for name, a, b in zip(("rowwise", "scales", "columnwise", "columnwise scales"), got, want, strict=True):
            assert_same_bits(a, b, f"{name} of {ranks} x {m} x {cols}")
        assert got[2].stride() == whole.columnwise.stride()
        check_padding(got[2], "columnwise")


def test_interleave_layouts(device):
    plain = torch.randint(1, 256, (3, 20, 24), dtype=torch.uint8, device=device)
    want = torch.cat(list(plain), 1)
    for name, laid in (("contiguous", plain), *layouts(plain), ("expanded", plain[:1].expand(3, 20, 24))):
        got = comm_interleave(laid)
        assert_same_bits(got, torch.cat(list(laid), 1), name)
        check_padding(got, name)
    scales = torch.randn(3, 5, 6, device=device)
    padded = comm_interleave(scales)
    assert padded.shape == (5, 20) and not padded[:, 18:].any()
    assert_same_bits(padded[:, :18], torch.cat(list(scales), 1))
    for empty in (plain[:, :0], plain[:, :, :0], scales[:, :0], scales[:, :, :0]):
        assert comm_interleave(empty).numel() == 0
    assert_same_bits(comm_interleave(plain), want)


# ---- under the dispatcher ----


def test_compiles_whole(device):
    partials, bias = randn(2, 6, 40, device=device), randn(40, device=device)
    compiled = torch.compile(lambda p, b: comm_ordered_sum(p * 2, b) + 1, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(partials, bias), comm_ordered_sum(partials * 2, bias) + 1)

    bytes = torch.randint(256, (2, 20, 24), dtype=torch.uint8, device=device)
    compiled = torch.compile(lambda b: comm_interleave(b ^ 1) ^ 1, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(bytes), comm_interleave(bytes))


def test_opcheck(device):
    op = torch.ops.te.comm_ordered_sum.default
    for bias in (None, randn(24, device=device)):
        torch.library.opcheck(op, (randn(3, 5, 24, device=device), bias))
    for shards in (torch.ones(3, 5, 24, dtype=torch.uint8, device=device), randn(3, 5, 3, device=device)):
        torch.library.opcheck(torch.ops.te.comm_interleave.default, (shards,))


def test_errors(device):
    x = randn(2, 3, 8, device=device)
    with refused(ValueError, "comm_ordered_sum", "partials", "[ranks, ..., cols]"):
        comm_ordered_sum(x[0, 0])
    with refused(ValueError, "comm_ordered_sum", "partials", "float32"):
        comm_ordered_sum(x.long())
    with refused(ValueError, "comm_ordered_sum", "partials", "[ranks, ..., cols]"):
        comm_ordered_sum(x[:0])
    with refused(ValueError, "count", "129", "1 to 128"):
        comm_ordered_sum(x[:1, :1].expand(129, 1, 8))
    with refused(ValueError, "bias", "[7]", "[8]"):
        comm_ordered_sum(x, randn(7, device=device))
    with refused(ValueError, "bias", "Half", "Float"):
        comm_ordered_sum(x, randn(8, dtype=torch.float16, device=device))
    assert_same_bits(comm_ordered_sum(x), x[0] + x[1])
    with refused(ValueError, "comm_interleave", "shards", "[3, 8]", "[ranks, rows, columns of one]"):
        comm_interleave(x[0])
    with refused(ValueError, "comm_interleave", "shards", "Half", "uint8"):
        comm_interleave(x.half())
    with refused(ValueError, "count", "129", "1 to 128"):
        comm_interleave(x[:1].expand(129, 3, 8))
