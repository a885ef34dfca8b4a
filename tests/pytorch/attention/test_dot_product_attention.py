# DotProductAttention without a mask or plainly causal, against its plain twin: layouts, groups, dropout, recomputation.
# Masks and biases are test_masks.py's.
import pytest
import torch
from api_names import MODULES
from module_contract import Tracker, check_signature, saved_shapes
from plain_modules import attend, compare, run
from support import DTYPES, assert_same_bits, randn, wide

import transformer_engine.pytorch as te

HIDDEN, HEADS, SEQ, BATCH = 32, 4, 7, 3
HEAD = HIDDEN // HEADS
TIGHT_CORE = 3 * 16  # products in a row (scores, softmax, context) times the longest sum


def shape(layout, *rest, seq=SEQ, batch=BATCH):
    return (seq, batch, *rest) if layout == "sbhd" else (batch, seq, *rest)


def qkv(device, dtype=torch.float32, *, layout="sbhd", groups=HEADS, seq_kv=SEQ, value_dim=HEAD):
    return (
        randn(*shape(layout, HEADS, HEAD), dtype=dtype, device=device),
        randn(*shape(layout, groups, HEAD, seq=seq_kv), dtype=dtype, device=device),
        randn(*shape(layout, groups, value_dim, seq=seq_kv), dtype=dtype, device=device),
    )


def check_core(module, tensors, **options):
    """module(q, k, v) against `attend` in the same dtype and in float64."""
    module = module.to(tensors[0].device)
    got = run(module, *tensors)
    near = run(module, *tensors, call=lambda _, *t: attend(*t, **options))
    exact = run(module, *(wide(t) for t in tensors), call=lambda _, *t: attend(*t, **options))
    compare(got, near, exact, tensors[0].dtype, TIGHT_CORE)


# ---- DotProductAttention ----


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_core_matches_plain(device, dtype, mask, groups, layout):
    tensors = qkv(device, dtype, layout=layout, groups=groups)
    options = {"causal": mask == "causal", "batch_first": layout == "bshd"}
    check_core(te.DotProductAttention(HEADS, HEAD, groups, qkv_format=layout, attn_mask_type=mask), tensors, **options)
    module = te.DotProductAttention(HEADS, HEAD, groups)  # the call's own layout and mask win over the module's
    out = module(*tensors, qkv_format=layout, attn_mask_type=mask)
    assert out.shape == shape(layout, HIDDEN) and out.dtype == dtype and out.is_contiguous()
    fixed = te.DotProductAttention(HEADS, HEAD, groups, qkv_format=layout, attn_mask_type=mask)
    assert_same_bits(out, fixed(*tensors))


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fastest_backends_match_plain(dtype, mask, groups):
    """The other tests run under deterministic algorithms, which cuDNN does not take; the default is this."""
    torch.use_deterministic_algorithms(False)  # the fixture that set it restores it
    for layout, seq, seq_kv, head in (("sbhd", 128, 128, 64), ("bshd", 65, 65, 128), ("sbhd", 33, 80, 64)):
        q = randn(*shape(layout, 4, head, seq=seq), dtype=dtype, device="cuda")
        k, v = (randn(*shape(layout, groups, head, seq=seq_kv), dtype=dtype, device="cuda") for _ in range(2))
        module = te.DotProductAttention(4, head, groups, qkv_format=layout, attn_mask_type=mask)
        check_core(module, (q, k, v), causal=mask == "causal", batch_first=layout == "bshd")


@pytest.mark.parametrize("mask", ["no_mask", "causal"])
@pytest.mark.parametrize("seq_kv", [1, 5, 12])
def test_keys_of_another_length(device, seq_kv, mask):
    tensors = qkv(device, seq_kv=seq_kv)
    # causal counts from the first key; causal_bottom_right counts from the last one
    check_core(
        te.DotProductAttention(HEADS, HEAD, attn_mask_type=mask), tensors, causal=mask == "causal", batch_first=False
    )


@pytest.mark.parametrize("scale", [0.01, 0.3, 1.0])
def test_softmax_scale(device, scale):
    module = te.DotProductAttention(HEADS, HEAD, attn_mask_type="no_mask", softmax_scale=scale)
    check_core(module, qkv(device), causal=False, batch_first=False, scale=scale)


def test_values_of_another_width(device):
    tensors = qkv(device, value_dim=HEAD // 2)
    check_core(te.DotProductAttention(HEADS, (HEAD, HEAD // 2)), tensors, causal=True, batch_first=False)


@pytest.mark.parametrize("window", [None, (-1, -1), (-1, 0)])
def test_windows_that_the_causal_mask_implies(device, window):
    tensors = qkv(device)
    module = te.DotProductAttention(HEADS, HEAD, window_size=window)
    assert_same_bits(module(*tensors, window_size=window), te.DotProductAttention(HEADS, HEAD)(*tensors))


def test_arguments_of_other_capabilities_that_change_nothing(device):
    """Arguments that only padding, packing or FP8 read are accepted, and change no bit."""
    tensors = qkv(device)
    module = te.DotProductAttention(HEADS, HEAD)
    lengths = torch.arange(BATCH + 1, dtype=torch.int32, device=device) * SEQ
    given = module(
        *tensors,
        attention_mask=torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool, device=device),
        cu_seqlens_q=lengths,
        cu_seqlens_kv=lengths,
        max_seqlen_q=SEQ,
        max_seqlen_kv=SEQ,
        fast_zero_fill=False,
        pad_between_seqs=False,
        bf16_backward=True,
        num_splits=2,
        alibi_slopes=torch.ones(HEADS, device=device),
    )
    assert_same_bits(given, module(*tensors))


def test_strided_inputs_have_the_same_bits(device):
    """q, k and v as views of one packed projection."""
    packed = randn(SEQ, BATCH, HEADS, 3 * HEAD, device=device)
    views = packed.split(HEAD, dim=-1)
    module = te.DotProductAttention(HEADS, HEAD)
    strided, dense = run(module, *views), run(module, *(t.contiguous() for t in views))
    for name in dense:
        assert_same_bits(strided[name], dense[name], name)


@pytest.mark.parametrize("seq, batch", [(0, BATCH), (SEQ, 0), (1, 1)])
@pytest.mark.parametrize("groups", [HEADS, 1])
def test_empty_and_single(device, seq, batch, groups):
    tensors = [
        randn(*shape("sbhd", heads, HEAD, seq=seq, batch=batch), device=device, requires_grad=True)
        for heads in (HEADS, groups, groups)
    ]
    out = te.DotProductAttention(HEADS, HEAD, groups)(*tensors)
    assert out.shape == (seq, batch, HIDDEN)
    out.sum().backward()
    assert all(t.grad.shape == t.shape and t.grad.isfinite().all() for t in tensors)
    if out.numel():  # one position attends to itself
        assert_same_bits(out, tensors[2].repeat_interleave(HEADS // groups, dim=2).flatten(2).detach())


def test_nan_and_infinity_stay_in_their_sequence(device):
    q, k, v = qkv(device)
    clean = te.DotProductAttention(HEADS, HEAD)(q, k, v)
    v[4, 1, 2, 0] = torch.nan
    k[3, 0] = torch.inf
    out = te.DotProductAttention(HEADS, HEAD)(q, k, v)
    assert out[4:, 1, 2 * HEAD].isnan().all() and out[3:, 0].isnan().any()
    # Another sequence, and positions before the fault under the causal mask, see nothing of it.
    assert_same_bits(out[:, 2], clean[:, 2])
    if device == "cpu":  # on CUDA float32 goes to torch's plain attention, whose mask is added: Inf - Inf
        assert_same_bits(out[:3, 0], clean[:3, 0])
    assert_same_bits(out[:, 1, : 2 * HEAD], clean[:, 1, : 2 * HEAD])


# ---- dropout, random states, recomputation ----


def masks_of(module, device, seq=64):
    """Which probabilities survive: all of them are 1 / seq, and v[j] is the j-th unit vector."""
    q = torch.zeros(seq, 1, 1, seq, device=device)
    v = torch.eye(seq, device=device)[:, None, None, :]
    return module(q, q, v)[:, 0]


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_statistics(device, p):
    seq = 64
    module = te.DotProductAttention(1, seq, attention_dropout=p, attn_mask_type="no_mask")
    kept = masks_of(module, device)
    dropped = (kept == 0).float().mean().item()
    assert abs(dropped - p) < 5 * (p * (1 - p) / seq**2) ** 0.5  # five standard deviations of a binomial
    torch.testing.assert_close(kept[kept != 0], torch.full_like(kept[kept != 0], 1 / seq / (1 - p)), rtol=1e-6, atol=0)
    assert not torch.equal(kept, masks_of(module, device)), "each call draws its own mask"
    module.eval()
    state = torch.get_rng_state()
    assert_same_bits(masks_of(module, device), torch.full_like(kept, 1 / seq))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_draws_from_the_tracker(recompute):
    """The fork's state advances once per forward, the default state never; recomputation repeats the fork's mask."""
    tracker = Tracker()
    module = te.DotProductAttention(HEADS, HEAD, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
    tensors = qkv("cpu")
    outside = torch.get_rng_state()
    first = run(module, *tensors, checkpoint_core_attention=recompute)
    assert torch.equal(outside, torch.get_rng_state())
    after_one = tracker.state.clone()
    second = run(module, *tensors, checkpoint_core_attention=recompute)
    assert not torch.equal(first["output 0"], second["output 0"])
    plain = Tracker()
    module.get_rng_state_tracker = lambda: plain
    wanted = run(module, *tensors)
    assert torch.equal(after_one, plain.state), "recomputation leaves the tracker where the forward left it"
    for name in wanted:
        assert_same_bits(first[name], wanted[name], name)
    forks = len(plain.forks)
    module.eval()(*tensors)
    assert forks == len(plain.forks) == 1, "no fork where nothing is dropped"


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_recomputation_has_the_same_bits_and_keeps_less(device, mask, dropout):
    module = te.DotProductAttention(HEADS, HEAD, attention_dropout=dropout, attn_mask_type=mask)
    tensors = qkv(device)
    torch.manual_seed(5)
    wanted = run(module, *tensors)
    torch.manual_seed(5)
    got = run(module, *tensors, checkpoint_core_attention=True)
    for name in wanted:
        assert_same_bits(got[name], wanted[name], name)
    for t in tensors:
        t.requires_grad_()
    once = saved_shapes(lambda: module(*tensors))
    assert len(saved_shapes(lambda: module(*tensors, checkpoint_core_attention=True))) < len(once)


def test_signature():
    check_signature(te.DotProductAttention, *MODULES["DotProductAttention"], ours_init=("device",))
