# MultiheadAttention against its plain twin: projections, groups, rotary embedding, norms, what is returned and refused.
import pytest
import torch
from api_names import MODULES
from module_contract import check_signature
from plain_modules import PlainAttention, angles, as_tuple, check_against_twin, randomize, run
from support import DTYPES, assert_same_bits, randn, refused

import transformer_engine.pytorch as te

HIDDEN, HEADS, SEQ, BATCH = 32, 4, 7, 3
HEAD = HIDDEN // HEADS
# Products in a row (projection, scores, softmax, context, projection; forward and backward) times the longest sum.
TIGHT = 5 * 64


def shape(layout, *rest, seq=SEQ, batch=BATCH):
    return (seq, batch, *rest) if layout == "sbhd" else (batch, seq, *rest)


ROTARY = ["none", "angles", "pair", "interleaved", "partial"]


def freqs(kind, device):
    if kind == "none":
        return None
    if kind == "pair":
        return angles(SEQ, HEAD).to(device), angles(SEQ, HEAD, stretch=0.5).to(device)
    return angles(SEQ, HEAD // 2 if kind == "partial" else HEAD, interleaved=kind == "interleaved").to(device)


def build(device, dtype=torch.float32, **options):
    options = {"attention_dropout": 0.0, "params_dtype": dtype, "device": device, **options}
    return randomize(te.MultiheadAttention(HIDDEN, HEADS, **options))


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_plain(device, dtype, layout, groups, rotary):
    interleaved = rotary == "interleaved"
    module = build(device, dtype, num_gqa_groups=groups, qkv_format=layout, rotary_pos_interleaved=interleaved)
    twin = PlainAttention(HIDDEN, HEADS, groups, batch_first=layout == "bshd", interleaved=interleaved)
    x = randn(*shape(layout, HIDDEN), dtype=dtype, device=device)
    check_against_twin(module, twin, x, rotary_pos_emb=freqs(rotary, device), tight=TIGHT)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_input_layernorm_matches_plain(device, dtype, bias, zero_centered, normalization):
    module = build(
        device,
        dtype,
        input_layernorm=True,
        normalization=normalization,
        zero_centered_gamma=zero_centered,
        bias=bias,
        num_gqa_groups=2,
        attn_mask_type="no_mask",
    )
    rms = normalization == "RMSNorm"
    twin = PlainAttention(
        HIDDEN, HEADS, 2, input_layernorm=True, rms=rms, zero_centered=zero_centered, bias=bias, causal=False
    )
    x = randn(SEQ, BATCH, HIDDEN, dtype=dtype, device=device)
    check_against_twin(module, twin, x, rotary_pos_emb=freqs("angles", device), tight=TIGHT)


@pytest.mark.parametrize("return_bias", [False, True])
@pytest.mark.parametrize("return_norm", [False, True])
def test_what_is_returned(device, return_norm, return_bias):
    options = {"return_bias": return_bias, "input_layernorm": True}
    module = build(device, return_layernorm_output=return_norm, **options)
    twin = PlainAttention(HIDDEN, HEADS, return_norm=return_norm, **options)
    x = randn(SEQ, BATCH, HIDDEN, device=device)
    check_against_twin(module, twin, x, tight=TIGHT)
    assert len(as_tuple(module(x))) == 1 + return_bias + return_norm


def test_heads_of_their_own_width(device):
    module = build(device, kv_channels=12)
    assert module.proj.weight.shape == (HIDDEN, HEADS * 12)
    check_against_twin(
        module, PlainAttention(HIDDEN, HEADS, head_dim=12), randn(SEQ, BATCH, HIDDEN, device=device), tight=TIGHT
    )


@pytest.mark.parametrize("rotary", ["none", "pair"])
def test_recomputation_changes_no_bit(device, rotary):
    module = build(device, input_layernorm=True, attention_dropout=0.2)
    x = randn(SEQ, BATCH, HIDDEN, device=device)
    torch.manual_seed(5)
    wanted = run(module, x, rotary_pos_emb=freqs(rotary, device))
    torch.manual_seed(5)
    got = run(module, x, rotary_pos_emb=freqs(rotary, device), checkpoint_core_attention=True)
    for name in wanted:
        assert_same_bits(got[name], wanted[name], name)


def test_the_mask_of_the_call_wins(device):
    x = randn(SEQ, BATCH, HIDDEN, device=device)
    module = build(device)
    torch.manual_seed(1)
    other = randomize(
        te.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, attn_mask_type="no_mask", device=device)
    )
    other.load_state_dict(module.state_dict())
    assert_same_bits(module(x, attn_mask_type="no_mask"), other(x))
    assert not torch.equal(module(x), other(x))


@pytest.mark.parametrize(
    "frozen", [("qkv",), ("proj",), ("qkv.query_weight", "qkv.value_bias"), ("qkv", "proj")], ids=lambda f: "+".join(f)
)
def test_frozen_parts(device, frozen):
    module, twin = build(device), PlainAttention(HIDDEN, HEADS)
    for part in (module, twin):
        for name, p in part.named_parameters():
            p.requires_grad_(not any(name.startswith(prefix) for prefix in frozen))
    check_against_twin(module, twin, randn(SEQ, BATCH, HIDDEN, device=device), tight=TIGHT)


# ---- refusals, signature, state ----

CALL_REFUSED = {"inference_params": object()}


def test_accepts_hints_of_overlap(device):
    """Without tensor parallelism there is nothing to overlap with."""
    hints = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")
    plain, x = build(device), randn(SEQ, BATCH, HIDDEN, device=device)
    module = build(device, **dict.fromkeys(hints, True))
    module.load_state_dict(plain.state_dict())
    assert_same_bits(module(x), plain(x))


@pytest.mark.parametrize("argument", CALL_REFUSED)
def test_call_refuses_what_has_not_landed(device, argument):
    with refused(NotImplementedError, f"'{argument}'", "not available in this version"):
        build(device)(randn(SEQ, BATCH, HIDDEN, device=device), **{argument: CALL_REFUSED[argument]})


def test_head_width_that_does_not_divide(device):
    with refused(ValueError, "MultiheadAttention", "num_attention_heads", "5", "kv_channels"):
        te.MultiheadAttention(HIDDEN, 5, device=device)


def test_signature():
    check_signature(
        te.MultiheadAttention,
        *MODULES["MultiheadAttention"],
        ours_init=("recompute_norm_output", "tp_recompute_allgather", "tp_overlap"),
        ours=("return_input",),
    )


def test_state_names(device):
    qkv_names = [f"{part}_{kind}" for kind in ("weight", "bias") for part in ("query", "key", "value")]
    plain = build(device)
    wanted = [f"qkv.{name}" for name in [*qkv_names, "_extra_state"]]
    tail = ["core_attention._extra_state", "proj.weight", "proj.bias", "proj._extra_state"]
    assert list(plain.state_dict()) == wanted + tail
    normed = build(device, input_layernorm=True, set_parallel_mode=True)
    norm_names = ["layer_norm_weight", "layer_norm_bias"]
    wanted = [f"layernorm_qkv.{name}" for name in [*norm_names, *qkv_names, "_extra_state"]]
    assert list(normed.state_dict()) == wanted + tail
    assert (normed.layernorm_qkv.parallel_mode, normed.proj.parallel_mode) == ("column", "row")


def test_returning_the_input_needs_a_norm(device):
    module, x = te.MultiheadAttention(HIDDEN, HEADS, device=device), randn(SEQ, BATCH, HIDDEN, device=device)
    with refused(ValueError, "MultiheadAttention", "'return_input'", "input_layernorm"):
        module(x, return_input=True)
