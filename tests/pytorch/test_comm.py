# comm, the binding: the ordered sum against the same additions in torch, layouts, torch.compile, opcheck, errors.
# Mutant: cutting the inbox by its width instead of its pitch (csrc/comm.cpp, step) turns test_layouts red.
import pytest
import torch
from support import DTYPES, assert_same_bits, layouts, randn, refused

from transformer_engine.pytorch.functional import comm_ordered_sum


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
    """What the test above could not see if the values added up exactly."""
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


def test_compiles_whole(device):
    partials, bias = randn(2, 6, 40, device=device), randn(40, device=device)
    compiled = torch.compile(lambda p, b: comm_ordered_sum(p * 2, b) + 1, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(partials, bias), comm_ordered_sum(partials * 2, bias) + 1)


def test_opcheck(device):
    op = torch.ops.te.comm_ordered_sum.default
    for bias in (None, randn(24, device=device)):
        torch.library.opcheck(op, (randn(3, 5, 24, device=device), bias))


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
