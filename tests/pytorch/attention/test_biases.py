# DotProductAttention's additive biases, their gradients, and ALiBi, under masks.
import pytest
import torch
from support import DTYPES, randn, wide

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.masks import default_slopes

from .cases import BATCH, HEAD, HEADS, LENGTHS, by_hand, check, lower_right, padding_arguments, qkv


def bias_shape(kind, seqs):
    return {
        "full": (BATCH, HEADS, *seqs),
        "heads": (1, HEADS, *seqs),
        "one": (1, 1, *seqs),
        "keys": (BATCH, 1, 1, seqs[1]),
    }[kind]


@pytest.mark.parametrize("kind", ["full", "heads", "one", "keys"])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "padding_causal"])
@pytest.mark.parametrize("when", ["pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_matches_plain(device, dtype, when, mask, kind):
    """The bias gets its gradient; a bias that requires none gives the same output."""
    seqs, scale = (7, 7), 0.3
    arguments = {"attn_mask_type": mask, "core_attention_bias_type": when}
    if "padding" in mask:
        arguments |= padding_arguments("one mask", LENGTHS[seqs], seqs, device)
    visible = by_hand(mask, seqs, lengths=LENGTHS[seqs])
    tensors = [*qkv(device, dtype, groups=2), randn(*bias_shape(kind, seqs), dtype=dtype, device=device)]
    module = te.DotProductAttention(HEADS, HEAD, 2, softmax_scale=scale)
    times = scale if when == "pre_scale_bias" else 1.0
    check(module, tensors, arguments, visible, bias=lambda added: added * times, scale=scale)
    fixed = tensors.pop()
    check(
        module,
        tensors,
        {**arguments, "core_attention_bias": fixed},
        visible,
        bias=lambda: wide(fixed) * times,
        scale=scale,
    )


def test_slopes_of_the_paper(device):
    """Eight heads: 1/2 .. 1/256. Twelve: those, then every other one of sixteen heads'."""
    eight = [2.0**-i for i in range(1, 9)]
    assert default_slopes(8, torch.device(device)).tolist() == eight
    further = [2.0 ** (-0.5 * i) for i in (1, 3, 5, 7)]
    twelve = default_slopes(12, torch.device(device))
    torch.testing.assert_close(twelve.cpu(), torch.tensor(eight + further), rtol=1e-6, atol=0)
    assert default_slopes(1, torch.device(device)).tolist() == [2.0**-8]


@pytest.mark.parametrize("slopes", ["default", "heads", "batch"])
@pytest.mark.parametrize("seqs", list(LENGTHS), ids=str)
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right", "padding", "padding_causal"])
def test_alibi_matches_plain(device, mask, seqs, slopes):
    """bias = -slope * |distance from the diagonal|, which follows the mask's alignment."""
    lengths = LENGTHS[seqs]
    given = {"default": None, "heads": torch.rand(HEADS), "batch": torch.rand(BATCH, HEADS)}[slopes]
    by_head = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]) if given is None else given
    arguments = {"attn_mask_type": mask, "core_attention_bias_type": "alibi"}
    if given is not None:
        arguments["alibi_slopes"] = given.to(device)
    if "padding" in mask:
        arguments |= padding_arguments("two masks", lengths, seqs, device)
    offset = torch.tensor([kv - q for q, kv in zip(*lengths, strict=True)])
    offset = offset if "padding" in mask else torch.full((BATCH,), seqs[1] - seqs[0])
    offset = offset if lower_right(mask) else torch.zeros(BATCH)
    distance = torch.arange(seqs[1]) - torch.arange(seqs[0])[:, None] - offset[:, None, None, None]
    bias = -by_head.double().reshape(-1, HEADS, 1, 1) * distance.abs()
    dtype = DTYPES[0 if slopes == "default" else 2]
    # The product is rounded to a 16-bit type, so the twin in float64 gets it rounded too.
    bias = bias.to(dtype)
    visible = by_hand(mask, seqs, lengths=lengths)
    check(te.DotProductAttention(HEADS, HEAD), qkv(device, dtype, seqs=seqs), arguments, visible, bias=lambda: bias)


def test_what_is_added_has_the_precision_of_the_scores(device):
    """A bias in 16 bits before the scale, slopes in float32."""
    tensors, seqs = qkv(device, torch.float64, seqs=(7, 9)), (7, 9)
    module, scale = te.DotProductAttention(HEADS, HEAD, softmax_scale=0.3, attn_mask_type="no_mask"), 0.3
    narrow, slopes = torch.randn(1, HEADS, *seqs, device=device).bfloat16(), torch.rand(HEADS, device=device) / 3
    distance = torch.arange(9, device=device) - torch.arange(7, device=device)[:, None] - 2
    for kind, given, bias in (
        ("pre_scale_bias", {"core_attention_bias": narrow}, narrow.double() * scale),
        ("alibi", {"alibi_slopes": slopes}, -slopes.double()[:, None, None] * distance.abs()),
    ):
        got = module(*tensors, core_attention_bias_type=kind, **given).unflatten(-1, (HEADS, HEAD))
        q, k, v = (t.permute(1, 2, 0, 3) for t in tensors)
        wanted = torch.softmax(scale * q @ k.transpose(-1, -2) + bias, -1) @ v
        torch.testing.assert_close(got.permute(1, 2, 0, 3), wanted, rtol=1e-12, atol=1e-12)
