"""FP8 rows: the same class with the same bytes, scales that move with their rows, plain gradients."""

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te

from .cases import mask_of, probs_of, randn

E4M3 = te.DType.kFloat8E4M3


def per_tensor(device):
    return te.Float8CurrentScalingQuantizer(E4M3, torch.device(device), columnwise=False)


def by_blocks(device):
    return te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=False, block_scaling_dim=1)


QUANTIZERS = {"per_tensor": per_tensor, "by_blocks": by_blocks}


def same_bytes(got, want, rows=None):
    """Their rowwise data and scales; of 1 x 128 blocks the scales of `rows` alone."""
    assert type(got) is type(want) and got.shape == want.shape and got.dtype is want.dtype
    if isinstance(got, te.Float8Tensor):
        assert_same_bits(got._data, want._data)
        assert_same_bits(got._scale_inv, want._scale_inv)
        return
    assert_same_bits(got._rowwise_data, want._rowwise_data)
    assert_same_bits(got._rowwise_scale_inv, want._rowwise_scale_inv)


@pytest.mark.parametrize("hidden", (256, 130))
@pytest.mark.parametrize("name", QUANTIZERS)
def test_permuted_bytes(device, name, hidden):
    """For blocks: quantizing the permuted rows gives the same bytes, rows without a token included."""
    mask = mask_of(21, 6, 2, device)
    inp = randn(21, hidden, dtype=torch.bfloat16, device=device)
    fp8 = QUANTIZERS[name](device)(inp)
    plain, row_id_map = te.moe_permute(inp, mask, 50)
    got, fp8_map = te.moe_permute(fp8, mask, 50)
    assert torch.equal(row_id_map, fp8_map) and not got.requires_grad
    same_bytes(got, QUANTIZERS[name](device)(plain))
    assert_same_bits(got.dequantize(), te.moe_permute(fp8.dequantize(), mask, 50)[0])

    probs = probs_of(mask)
    probs[::2] = 0
    plain, row_probs, _ = te.moe_permute_with_probs(inp, probs, mask, 42)
    got, fp8_probs, _ = te.moe_permute_with_probs(fp8, probs, mask, 42)
    assert_same_bits(fp8_probs, row_probs)
    if name == "by_blocks":
        same_bytes(got, by_blocks(device)(plain))
    else:
        assert_same_bits(got.dequantize(), te.moe_permute_with_probs(fp8.dequantize(), probs, mask, 42)[0])


@pytest.mark.parametrize("map_type", ("mask", "index"))
@pytest.mark.parametrize("name", QUANTIZERS)
def test_gradients_are_plain(device, name, map_type):
    mask = mask_of(21, 6, 2, device)
    routing = mask if map_type == "mask" else mask.nonzero()[:, 1].view(21, 2).int()
    inp = randn(21, 256, dtype=torch.bfloat16, device=device)
    fp8 = QUANTIZERS[name](device)(inp).requires_grad_()
    plain = inp.clone().requires_grad_()
    grad = randn(42, 256, dtype=torch.bfloat16, device=device)
    got = torch.autograd.grad(te.moe_permute(fp8, routing, 42, map_type=map_type)[0], fp8, grad)[0]
    want = torch.autograd.grad(te.moe_permute(plain, routing, 42, map_type=map_type)[0], plain, grad)[0]
    assert type(got) is torch.Tensor
    assert_same_bits(got, want)


class _GivesGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, grad):
        ctx.grad = grad
        return x.sum()

    @staticmethod
    def backward(ctx, _):
        return ctx.grad, None


@pytest.mark.parametrize("name", QUANTIZERS)
def test_an_unpermute_takes_a_quantized_gradient(device, name):
    mask = mask_of(21, 6, 2, device)
    rows = randn(50, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
    _, row_id_map = te.moe_permute(randn(21, 256, device=device), mask, 50)
    grad = QUANTIZERS[name](device)(randn(21, 256, dtype=torch.bfloat16, device=device))
    seen = []
    scaled = rows * 1
    scaled.register_hook(seen.append)
    back = te.moe_unpermute(scaled, row_id_map, restore_shape=(21, 256))
    _GivesGradient.apply(back, grad).backward()
    same_bytes(seen[0], te.moe_permute(grad, mask, 50)[0])


def test_chunks(device):
    fp8 = per_tensor(device)(randn(9, 32, device=device)).requires_grad_()
    sizes, order = torch.tensor([4, 2]), torch.tensor([1, 0])
    got = te.moe_sort_chunks_by_index(fp8, sizes, order)
    assert type(got) is te.Float8Tensor
    assert_same_bits(got._data, torch.cat((fp8._data[4:6], fp8._data[:4], fp8._data[6:])))
    (grad,) = torch.autograd.grad(got, fp8, torch.ones(9, 32, device=device))
    assert type(grad) is torch.Tensor and torch.equal(grad, torch.ones(9, 32, device=device))
    blocks = by_blocks(device)(randn(9, 128, device=device))
    with refused(NotImplementedError, "moe_sort_chunks_by_index", "Float8BlockwiseQTensor", "dequantize"):
        te.moe_sort_chunks_by_index(blocks, sizes, order)


def test_a_write_to_the_source_leaves_its_rows(device):
    mask = mask_of(9, 4, 2, device)
    fp8 = per_tensor(device)(randn(9, 32, device=device))
    got, _ = te.moe_permute(fp8, mask, 18)
    before = got.dequantize()
    fp8.quantize_(randn(9, 32, device=device, scale=100.0))
    assert_same_bits(got.dequantize(), before)


def test_refusals(device):
    mask, x = mask_of(128, 4, 2, device), randn(128, 128, device=device)
    square = te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True)(x)
    with refused(NotImplementedError, "moe_permute", "128 x 128", "dequantize"):
        te.moe_permute(square, mask, 256)
    with refused(NotImplementedError, "moe_unpermute", "Float8Tensor", "dequantize"):
        te.moe_unpermute(per_tensor(device)(x), torch.zeros(128, 9, dtype=torch.int32, device=device))
    columns = te.Float8CurrentScalingQuantizer(E4M3, torch.device(device), rowwise=False)(x)
    with refused(ValueError, "moe_permute", "rowwise"):
        te.moe_permute(columns, mask, 256)
    fp8 = per_tensor(device)(x)
    with pytest.raises(RuntimeError, match=r"moe_permute: .*Float8Tensor.*compiled"):
        torch.compile(lambda t: te.moe_permute(t, mask, 256), fullgraph=True)(fp8)
