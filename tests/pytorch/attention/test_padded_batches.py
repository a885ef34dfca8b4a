# Padding of a batch by cumulative lengths, without a mask tensor: zeros around attention with a causal mask.
import pytest
import torch
from support import assert_same_bits

from transformer_engine.pytorch.attention.memory_order import inputs_without_padding, result_without_padding, zeroed


def lengths_of(numbers, device):
    return torch.tensor([0, *numbers], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def batch(device, dtype, layout, seqs, lengths, *, fill, heads=(4, 2), width=16):
    made = []
    for seq, numbers, count in zip(
        (seqs[0], seqs[1], seqs[1]), (lengths[0], lengths[1], lengths[1]), (*heads, heads[1])
    ):
        t = torch.randn(len(numbers), seq, count, width)
        for i, n in enumerate(numbers):
            t[i, n:] = fill
        made.append((t if layout == "bshd" else t.transpose(0, 1).contiguous()).to(device, dtype))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_zeros_in_padding(device, dtype, layout):
    """The engine's zeros are those of a pass over the tensor, forward and backward; views in another order have it."""
    seqs, numbers = (9, 9), ((9, 0, 4), (9, 0, 4))
    cumulative, batch_first = lengths_of(numbers[0], device), layout == "bshd"
    tensors = batch(device, dtype, layout, seqs, numbers, fill=torch.nan)
    present = torch.arange(9, device=device) < torch.tensor(numbers[0], device=device)[:, None]
    padding = ~(present if batch_first else present.t())[:, :, None, None]
    for views in (tensors, [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors]):
        leaves = [t.requires_grad_() for t in views]
        made = inputs_without_padding(tuple(leaves), cumulative, batch_first)
        for ours, leaf in zip(made, leaves, strict=True):
            assert_same_bits(ours.detach(), zeroed(leaf.detach(), padding))
            assert ours.is_contiguous() or views is not tensors
        (grad,) = torch.autograd.grad(made[0].sum(), leaves[0])
        wanted = torch.ones_like(grad) if views is tensors else torch.ones_like(grad).masked_fill(padding, 0.0)
        assert_same_bits(grad, wanted)  # those of attention are zeros there already
        out = result_without_padding(leaves[0], cumulative, batch_first)
        assert_same_bits(out.detach(), zeroed(leaves[0].detach(), padding))
        dout = torch.randn_like(out)
        (grad,) = torch.autograd.grad(out, leaves[0], dout, retain_graph=True)
        assert_same_bits(grad, dout.masked_fill(padding, 0.0))
        (again,) = torch.autograd.grad(out, leaves[0], dout, create_graph=True)
        assert_same_bits(again.detach(), grad)


def test_zeros_of_no_rows_and_under_torch_func(device):
    none = [torch.zeros(2, 0, 4, 8, device=device)] * 3
    assert all(t.shape == none[0].shape for t in inputs_without_padding(tuple(none), lengths_of((0, 0), device), True))
    x, cumulative = torch.randn(3, 2, 5, 4, 8, device=device), lengths_of((3, 5), device)
    made = torch.func.vmap(lambda t: result_without_padding(t, cumulative, True))(x)
    assert not made[:, 0, 3:].any() and made[:, 1].all()


def test_opcheck(device):
    tensors = [torch.randn(2, 5, n, 8, device=device) for n in (4, 2, 2)]
    op = torch.ops.te.attention_without_padding.default
    torch.library.opcheck(op, (tensors, lengths_of((3, 5), device), True))
