"""Values in the padding change no bit of the rest: results, and gradients of valid tokens, are as with zeros there."""

import pytest
import torch
from support import assert_same_bits

import transformer_engine.pytorch as te

LENGTHS = torch.tensor([0, 4, 7], dtype=torch.int32)


def run(device, dtype, value, mask, layout, groups, checkpointed, given):
    torch.manual_seed(0)
    module = te.DotProductAttention(4, 64, groups, attn_mask_type=mask, qkv_format=layout)
    q, k, v = (torch.randn(2, 6, heads, 64).to(device, dtype) for heads in (4, groups, groups))
    for t in (q, k, v):
        t[0, 4:], t[1, 3:] = value, -value
    q, k, v = ((t if layout == "bshd" else t.transpose(0, 1).contiguous()).requires_grad_() for t in (q, k, v))
    lengths = LENGTHS.to(device)
    told = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths if given == "one tensor" else lengths.clone()}
    if given == "mask":
        present = torch.arange(6) < (LENGTHS[1:] - LENGTHS[:-1])[:, None]
        told = {"attention_mask": ~present[:, None, None, :].to(device)}
    y = module(q, k, v, checkpoint_core_attention=checkpointed, **told)
    y.float().square().sum().backward()
    return [t if layout == "bshd" else t.transpose(0, 1) for t in (y.detach(), q.grad, k.grad, v.grad)]


@pytest.mark.parametrize("value", [1e18, 1e20, 3e38, torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_huge_values_are_as_zeros(device, value, dtype, mask, layout):
    for groups, checkpointed, given in (
        (4, False, "two tensors"),
        (2, False, "mask"),
        (4, True, "one tensor"),
        (2, False, "one tensor"),
    ):
        options = (mask, layout, groups, checkpointed, given)
        for got, want in zip(run(device, dtype, value, *options), run(device, dtype, 0.0, *options), strict=True):
            assert_same_bits(got.contiguous(), want.contiguous())
            assert not got[0, 4:].any() and not got[1, 3:].any()
