# DotProductAttention's masks, windows and biases against visibility written out by hand: padding by masks and lengths,
# alignments, queries that see nothing, gradients of biases. Mutants, each turning test_masks_match_plain red: `<` for
# `<=` in build_scores, +left for -left, leaving out Scores.unseen; swapping 8.0 and 4.0 in default_slopes turns
# test_alibi_slopes red.
import pytest
import torch
from module_contract import Tracker
from plain_modules import attend, compare, run
from support import DTYPES, assert_same_bits, randn, wide

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.masks import BIASES, MASKS, default_slopes

HEADS, HEAD, BATCH = 4, 8, 3
TIGHT = 3 * 16  # products in a row (scores, softmax, context) times the longest sum
LENGTHS = {(7, 7): ([7, 3, 0], [7, 3, 0]), (5, 9): ([5, 2, 1], [9, 4, 0]), (9, 5): ([9, 0, 4], [5, 3, 2])}
WINDOWS = [None, (-1, -1), (2, 1), (0, 0), (1, -1), (-1, 2)]


def shape(layout, *rest, seq):
    return (seq, BATCH, *rest) if layout == "sbhd" else (BATCH, seq, *rest)


def qkv(device, dtype=torch.float32, *, layout="sbhd", groups=HEADS, seqs=(7, 7), head=HEAD):
    return (
        randn(*shape(layout, HEADS, head, seq=seqs[0]), dtype=dtype, device=device),
        randn(*shape(layout, groups, head, seq=seqs[1]), dtype=dtype, device=device),
        randn(*shape(layout, groups, head, seq=seqs[1]), dtype=dtype, device=device),
    )


def lower_right(mask, bottom_right=None):
    """Where the diagonal ends, as the API has it."""
    if "causal" in mask:
        return mask.endswith("bottom_right")
    return bottom_right is None or bottom_right


def by_hand(mask, seqs, *, window=None, bottom_right=None, lengths=None, arbitrary=None):
    """[BATCH, HEADS, s, s_kv], True where a query sees a key: one score at a time."""
    left, right = window or (-1, -1)
    seen = torch.zeros(BATCH, HEADS, *seqs, dtype=torch.bool)
    for b in range(BATCH):
        n_q, n_kv = (lengths[0][b], lengths[1][b]) if "padding" in mask else seqs
        for i in range(n_q):
            for j in range(n_kv):
                ahead = j - i - (n_kv - n_q if lower_right(mask, bottom_right) else 0)
                if ("causal" in mask and ahead > 0) or (left >= 0 and -ahead > left) or (0 <= right < ahead):
                    continue
                seen[b, :, i, j] = True
    return seen if arbitrary is None else seen & ~arbitrary


def padding_mask(lengths, seq, device):
    return (torch.arange(seq) >= torch.tensor(lengths)[:, None])[:, None, None, :].to(device)


def cumulative(lengths, device):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)


def padding_arguments(how, lengths, seqs, device):
    if how == "lengths":
        return {f"cu_seqlens_{name}": cumulative(n, device) for name, n in zip(("q", "kv"), lengths, strict=True)}
    masks = tuple(padding_mask(n, seq, device) for n, seq in zip(lengths, seqs, strict=True))
    return {"attention_mask": masks[0] if how == "one mask" else masks}


def check(module, tensors, arguments, visible, *, bias=None, layout="sbhd", scale=None):
    """The module against `attend`, which sees `visible` and adds bias(tensors..., extra inputs) to the scaled scores.
    Inputs after q, k, v are the bias, whose gradient counts too."""
    q = tensors[0]

    def ours(m, q, k, v, *rest):
        return m(q, k, v, **arguments, **({"core_attention_bias": rest[0]} if rest else {}))

    def plain(_, q, k, v, *rest):
        added = None if bias is None else bias(*rest).to(q.device, q.dtype).expand(visible.shape)
        options = {"causal": None, "batch_first": layout == "bshd", "scale": scale}
        return attend(q, k, v, visible=visible.to(q.device), bias=added, **options)

    got, near = run(module, *tensors, call=ours), run(module, *tensors, call=plain)
    exact = run(module, *(wide(t) for t in tensors), call=plain)
    compare(got, near, exact, q.dtype, TIGHT)
    return got


def check_zeros(got, visible, layout, lengths=None):
    """Queries that see nothing give zeros and get none; keys that nobody sees, and padding, get zeros."""

    def by_position(t):
        return t.transpose(0, 1) if layout == "sbhd" else t

    blind = (~visible.any(-1)).all(1).to(got["output 0"].device)  # [b, s]
    unseen = (~visible.any(-2)).all(1).to(blind.device)
    for name, rows in (("output 0", blind), ("gradient of input 0", blind), ("gradient of input 1", unseen)):
        assert by_position(got[name])[rows].eq(0).all(), name
    assert by_position(got["gradient of input 2"])[unseen].eq(0).all()
    assert all(t.isfinite().all() for t in got.values())


# ---- masks ----


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
    """The argument of the call or of the module; the name of a causal mask already says it."""
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


@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_padding_in_three_ways_has_the_same_bits(device, mask):
    tensors = qkv(device)
    module = te.DotProductAttention(HEADS, HEAD, attn_mask_type=mask)
    ways = [
        module(*tensors, **padding_arguments(how, LENGTHS[7, 7], (7, 7), device))
        for how in ("one mask", "two masks", "lengths")
    ]
    assert_same_bits(ways[1], ways[0])
    assert_same_bits(ways[2], ways[0])


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


# ---- biases ----


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
    """The bias gets its gradient; one that wants none gives the same output."""
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
    # What is rounded to a 16-bit type is the product, so the twin in float64 gets it rounded too.
    bias = bias.to(dtype)
    visible = by_hand(mask, seqs, lengths=lengths)
    check(te.DotProductAttention(HEADS, HEAD), qkv(device, dtype, seqs=seqs), arguments, visible, bias=lambda: bias)


# ---- dropout, recomputation, torch.compile ----


def test_dropout_only_drops_what_is_seen(device):
    p, seq = 0.3, 64
    module = te.DotProductAttention(1, seq, attention_dropout=p, attn_mask_type="arbitrary")
    hidden = torch.rand(1, 1, seq, seq, device=device) < 0.5
    q, v = torch.zeros(seq, 1, 1, seq, device=device), torch.eye(seq, device=device)[:, None, None, :]
    kept = module(q, q, v, hidden)[:, 0]
    seen = ~hidden[0, 0]
    assert kept[~seen].eq(0).all()
    share = (kept[seen] == 0).float().mean().item()
    assert abs(share - p) < 5 * (p * (1 - p) / seen.sum().item()) ** 0.5  # five standard deviations of a binomial
    wanted = (1 / seen.sum(-1, keepdim=True) / (1 - p)).expand_as(kept)
    torch.testing.assert_close(kept[kept != 0], wanted[kept != 0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("mask", ["padding_causal", "causal_bottom_right", "arbitrary"])
def test_recomputation_has_the_same_bits(device, mask, tracked):
    if tracked and device != "cpu":
        pytest.skip("the stand-in tracker holds the CPU's state alone")
    tracker = Tracker()
    options = {"get_rng_state_tracker": lambda: tracker} if tracked else {}
    module = te.DotProductAttention(HEADS, HEAD, attention_dropout=0.3, attn_mask_type=mask, **options)
    tensors = [*qkv(device, seqs=(5, 9)), randn(1, HEADS, 5, 9, device=device)]
    arguments = {"core_attention_bias_type": "post_scale_bias"}
    if mask == "padding_causal":
        arguments |= padding_arguments("lengths", LENGTHS[5, 9], (5, 9), device)
    if mask == "arbitrary":
        arguments["attention_mask"] = torch.rand(1, 1, 5, 9, device=device) < 0.5

    def call(m, q, k, v, bias):
        return m(q, k, v, core_attention_bias=bias, **arguments)

    results = []
    for recompute in (False, True):
        torch.manual_seed(5)
        tracker.__init__()
        arguments["checkpoint_core_attention"] = recompute
        results.append(run(module, *tensors, call=call))
    for name in results[0]:
        assert_same_bits(results[1][name], results[0][name], name)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
def test_compiled_equals_eager(device, mask, bias):
    arguments = {"attn_mask_type": mask, "window_size": (2, 2), "core_attention_bias_type": bias}
    tensors = qkv(device, seqs=(5, 9))
    if bias.endswith("scale_bias"):
        tensors = (*tensors, randn(1, HEADS, 5, 9, device=device))
    if "padding" in mask:
        arguments |= padding_arguments("lengths", LENGTHS[5, 9], (5, 9), device)
    if mask == "arbitrary":
        arguments["attention_mask"] = torch.rand(1, 1, 5, 9, device=device) < 0.5
    module = te.DotProductAttention(HEADS, HEAD)

    def call(m, q, k, v, *rest):
        return m(q, k, v, **arguments, **({"core_attention_bias": rest[0]} if rest else {}))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, wanted = run(module, *tensors, call=compiled), run(module, *tensors, call=call)
    for name in wanted:
        if device == "cpu":  # CUDA's plain attention is decomposed into other products
            assert_same_bits(got[name], wanted[name], name)
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-5, atol=1e-5)


# ---- the GPU's own ----


@pytest.mark.gpu
@pytest.mark.parametrize("bias", ["no_bias", "post_scale_bias", "alibi"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fastest_backends_match_plain(dtype, mask, bias):
    """The other tests run under deterministic algorithms, which leave plain attention; the default is this."""
    torch.use_deterministic_algorithms(False)  # the fixture that set it restores it
    for seqs, head, groups in (((128, 128), 64, 4), ((65, 65), 128, 2), ((33, 80), 64, 1)):
        lengths = ([seqs[0], seqs[0] // 2, 0], [seqs[1], seqs[1] // 3, 5])
        arguments = {"attn_mask_type": mask, "window_size": (20, 9), "core_attention_bias_type": bias}
        tensors = list(qkv("cuda", dtype, groups=groups, seqs=seqs, head=head))
        added = None
        if bias == "post_scale_bias":
            tensors.append(randn(1, HEADS, *seqs, dtype=dtype, device="cuda"))
            added = lambda b: b  # noqa: E731
        elif bias == "alibi":
            arguments["alibi_slopes"] = torch.zeros(HEADS, device="cuda")
        if "padding" in mask:
            arguments |= padding_arguments("two masks", lengths, seqs, "cuda")
        arbitrary = None
        if mask == "arbitrary":
            arbitrary = torch.rand(BATCH, 1, *seqs) < 0.4
            arguments["attention_mask"] = arbitrary.cuda()
        visible = by_hand(mask, seqs, window=(20, 9), lengths=lengths, arbitrary=arbitrary)
        check(te.DotProductAttention(HEADS, head, groups), tensors, arguments, visible, bias=added)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
def test_masks_are_built_without_waiting_for_the_device(mask):
    torch.use_deterministic_algorithms(False)
    tensors = qkv("cuda", torch.bfloat16)
    arguments = {"attn_mask_type": mask, "window_size": (2, 2), "core_attention_bias_type": "alibi"}
    if "padding" in mask:
        arguments |= padding_arguments("lengths", LENGTHS[7, 7], (7, 7), "cuda")
    if mask == "arbitrary":
        arguments["attention_mask"] = torch.rand(1, 1, 7, 7, device="cuda") < 0.5
    module = te.DotProductAttention(HEADS, HEAD)
    module(*tensors, **arguments)  # libraries load
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(*tensors, **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
