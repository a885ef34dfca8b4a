# DotProductAttention's masks and windows against visibility written out by hand: padding by masks and by lengths,
# alignments, queries that see nothing.
import pytest
import torch
from module_contract import saved_shapes
from plain_modules import run
from support import DTYPES, assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.pytorch.constants import AttnMaskTypes as MASKS

from .cases import (
    BATCH,
    HEAD,
    HEADS,
    LENGTHS,
    by_hand,
    check,
    check_zeros,
    padding_arguments,
    qkv,
)

WINDOWS = [None, (-1, -1), (2, 1), (0, 0), (1, -1), (-1, 2)]


@pytest.mark.parametrize("seqs", list(LENGTHS), ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_match_plain(device, mask, window, seqs):
    """Every mask under every window; layouts, groups and dtypes take turns."""
    turn = MASKS.index(mask) + WINDOWS.index(window)
    dtype, layout, groups = DTYPES[turn % 3], ("sbhd", "bshd")[turn % 2], (HEADS, 2, 1)[turn % 3]
    lengths, arbitrary = LENGTHS[seqs], None
    arguments = {"attn_mask_type": mask, "window_size": window}
    if "padding" in mask:
        arguments |= padding_arguments(("two masks", "lengths")[turn % 2], lengths, seqs, device)
    elif mask == "arbitrary":
        arbitrary = torch.rand(BATCH, 1, *seqs) < 0.4
        arguments["attention_mask"] = arbitrary.to(device)
    visible = by_hand(mask, seqs, window=window, lengths=lengths, arbitrary=arbitrary)
    module = te.DotProductAttention(HEADS, HEAD, groups, qkv_format=layout)
    tensors = qkv(device, dtype, layout=layout, groups=groups, seqs=seqs)
    got = check(module, tensors, arguments, visible, layout=layout)
    check_zeros(got, visible, layout)
    arguments.pop("attn_mask_type"), arguments.pop("window_size")
    built = te.DotProductAttention(
        HEADS, HEAD, groups, qkv_format=layout, attn_mask_type=mask, window_size=window, attention_type="cross"
    )
    assert_same_bits(built(*tensors, **arguments), got["output 0"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "causal_bottom_right", "arbitrary"])
def test_masks_in_every_dtype(device, mask, dtype):
    seqs = (5, 9)
    arguments, arbitrary = {"attn_mask_type": mask}, None
    if mask == "arbitrary":
        arbitrary = torch.rand(1, HEADS, *seqs) < 0.5
        arguments["attention_mask"] = arbitrary.to(device)
    elif "padding" in mask:
        arguments |= padding_arguments("lengths", LENGTHS[seqs], seqs, device)
    visible = by_hand(mask, seqs, lengths=LENGTHS[seqs], arbitrary=arbitrary)
    check(te.DotProductAttention(HEADS, HEAD, 2), qkv(device, dtype, groups=2, seqs=seqs), arguments, visible)


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("mask", ["no_mask", "padding", "arbitrary", "causal"])
def test_where_the_diagonal_ends(device, mask, bottom_right):
    """The argument of the call or of the module; the name of a causal mask already determines it."""
    seqs, window = (5, 9), (1, 2)
    lengths = LENGTHS[seqs]
    arguments, arbitrary = {"attn_mask_type": mask, "window_size": window}, None
    if mask == "padding":
        arguments |= padding_arguments("two masks", lengths, seqs, device)
    if mask == "arbitrary":
        arbitrary = torch.rand(BATCH, HEADS, *seqs) < 0.2
        arguments["attention_mask"] = arbitrary.to(device)
    visible = by_hand(mask, seqs, window=window, bottom_right=bottom_right, lengths=lengths, arbitrary=arbitrary)
    tensors = qkv(device, seqs=seqs)
    got = check(
        te.DotProductAttention(HEADS, HEAD), tensors, {**arguments, "bottom_right_diagonal": bottom_right}, visible
    )
    built = te.DotProductAttention(HEADS, HEAD, bottom_right_diagonal=bottom_right)
    assert_same_bits(built(*tensors, **arguments), got["output 0"])


@pytest.mark.parametrize("window", [(5, 0), (4, -1), (-1, 6), (5, 5), (7, 4)], ids=str)
@pytest.mark.parametrize("seqs", [(5, 9), (9, 5), (2, 9), (9, 1)], ids=str)
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
def test_windows_between_the_lengths_of_queries_and_keys(device, mask, seqs, window):
    """A window that is as wide as the shorter of the two and narrower than the longer one limits something still."""
    for bottom_right in (False, True):
        visible = by_hand(mask, seqs, window=window, bottom_right=bottom_right)
        arguments = {"attn_mask_type": mask, "window_size": window, "bottom_right_diagonal": bottom_right}
        check(te.DotProductAttention(HEADS, HEAD), qkv(device, seqs=seqs), arguments, visible)


@pytest.mark.parametrize("window", [None, (2, 1)], ids=str)
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_sequences_of_two_lengths_in_one_room(device, mask, window):
    """As many rows of queries as of keys, and other lengths: the diagonal ends where the lengths do."""
    lengths = ([7, 3, 2], [5, 6, 1])
    arguments = {"attn_mask_type": mask, "window_size": window}
    arguments |= padding_arguments("lengths", lengths, (7, 7), device)
    visible = by_hand(mask, (7, 7), window=window, lengths=lengths)
    check_zeros(check(te.DotProductAttention(HEADS, HEAD), qkv(device), arguments, visible), visible, "sbhd")


@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_padding_in_three_ways_has_the_same_bits(device, mask):
    tensors = qkv(device)
    module = te.DotProductAttention(HEADS, HEAD, attn_mask_type=mask)
    ways = [
        module(*tensors, **padding_arguments(how, LENGTHS[7, 7], (7, 7), device))
        for how in ("one mask", "two masks", "lengths")
    ]
    mask = padding_arguments("one mask", LENGTHS[7, 7], (7, 7), device)["attention_mask"]
    for way in (*ways[1:], module(*tensors, attention_mask=(mask,))):
        assert_same_bits(way, ways[0])


@pytest.mark.parametrize("window", [None, (2, 0), (0, 0), (-1, 2)], ids=str)
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_one_tensor_of_lengths_for_queries_and_keys(device, mask, window):
    """A causal mask hides the padding from tokens then: nothing of the size of the scores is kept without a window."""
    turn = WINDOWS.index(window) % 3 if window in WINDOWS else 0
    dtype, layout, groups = DTYPES[turn], ("sbhd", "bshd")[turn % 2], (HEADS, 2, 1)[turn]
    lengths = padding_arguments("lengths", LENGTHS[7, 7], (7, 7), device)["cu_seqlens_q"]
    arguments = {"attn_mask_type": mask, "window_size": window, "cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    visible = by_hand(mask, (7, 7), window=window, lengths=LENGTHS[7, 7])
    module = te.DotProductAttention(HEADS, HEAD, groups, qkv_format=layout)
    tensors = qkv(device, dtype, layout=layout, groups=groups)
    check_zeros(check(module, tensors, arguments, visible, layout=layout), visible, layout)
    plain = device == "cuda" and dtype is torch.float32  # torch's plain attention keeps scores
    if "causal" in mask and window in (None, (-1, 2)) and not plain:
        leaves = [t.requires_grad_() for t in tensors]
        shapes = [shape for shape, _ in saved_shapes(lambda: module(*leaves, **arguments).sum())]
        assert not [shape for shape in shapes if shape[-2:] == (7, 7)]


def test_the_mask_wins_over_lengths(device):
    tensors = qkv(device)
    module = te.DotProductAttention(HEADS, HEAD, attn_mask_type="padding")
    masks = padding_arguments("one mask", LENGTHS[7, 7], (7, 7), device)
    others = padding_arguments("lengths", ([1, 1, 1], [1, 1, 1]), (7, 7), device)
    assert_same_bits(module(*tensors, **masks, **others), module(*tensors, **masks))


def test_what_padding_holds_does_not_matter(device):
    """Keys, values and queries in the padding may be any finite numbers."""
    arguments = padding_arguments("one mask", LENGTHS[7, 7], (7, 7), device)
    module = te.DotProductAttention(HEADS, HEAD, attn_mask_type="padding_causal")
    tensors = qkv(device)
    padded = arguments["attention_mask"][:, 0, 0].T[:, :, None, None]
    other = [t.masked_fill(padded, 1e4) for t in tensors]
    wanted, got = run(module, *tensors, **arguments), run(module, *other, **arguments)
    for name in wanted:
        assert_same_bits(got[name], wanted[name], name)


def test_limits_that_say_nothing_change_no_bit(device):
    """A window no narrower than the sequence, and a bottom right that is the top left, take the plain mask's path."""
    tensors = qkv(device)
    plain = te.DotProductAttention(HEADS, HEAD)
    for options in ({"window_size": (6, 0)}, {"window_size": (9, 9)}, {"attn_mask_type": "causal_bottom_right"}):
        assert_same_bits(plain(*tensors, **options), plain(*tensors), str(options))
    open_mask = {"attn_mask_type": "no_mask"}
    assert_same_bits(plain(*tensors, **open_mask, window_size=(6, 6)), plain(*tensors, **open_mask))


@pytest.mark.parametrize("seqs", [(0, 7), (7, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_empty_and_single(device, mask, seqs):
    tensors = [t.requires_grad_() for t in qkv(device, seqs=seqs)]
    arguments = {"attn_mask_type": mask, "window_size": (0, 0)}
    if "padding" in mask:
        arguments |= padding_arguments("two masks", ([seqs[0]] * BATCH, [seqs[1]] * BATCH), seqs, device)
    elif mask == "arbitrary":
        arguments["attention_mask"] = torch.zeros(1, 1, *seqs, dtype=torch.bool, device=device)
    out = te.DotProductAttention(HEADS, HEAD)(*tensors, **arguments)
    assert out.shape == (seqs[0], BATCH, HEADS * HEAD)
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in tensors)
    if seqs == (1, 1):
        assert_same_bits(out, tensors[2].flatten(2).detach())
    else:
        assert out.eq(0).all()
