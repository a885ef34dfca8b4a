# TransformerLayer against its plain twin, its dropout, its residual stream under autocast, what it keeps and refuses.
import copy

import pytest
import torch
from api_names import MODULES
from module_contract import Tracker, check_signature, saved_shapes
from plain_modules import PlainLayer, angles, check_against_twin, randomize, run
from support import DTYPES, assert_same_bits, randn, refused, wide

import transformer_engine.pytorch as te

HIDDEN, FFN, HEADS, SEQ, BATCH = 32, 40, 4, 6, 2
# Products in a row (two norms, four GEMMs, attention, activation; forward and backward) times the longest sum (80).
TIGHT = 8 * 80


def build(device, dtype=torch.float32, **options):
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": dtype, "device": device, **options}
    return randomize(te.TransformerLayer(HIDDEN, FFN, HEADS, **options))


def tokens(device, dtype=torch.float32, layout="sbhd"):
    lead = (SEQ, BATCH) if layout == "sbhd" else (BATCH, SEQ)
    return randn(*lead, HIDDEN, dtype=dtype, device=device)


LLAMA = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "num_gqa_groups": 2}
GPT = {"normalization": "LayerNorm", "activation": "gelu", "zero_centered_gamma": True}


def twin(*, causal=True, batch_first=False, interleaved=False, **options):
    return PlainLayer(
        HIDDEN,
        FFN,
        HEADS,
        options.get("num_gqa_groups"),
        activation=options.get("activation", "gelu"),
        rms=options.get("normalization") == "RMSNorm",
        zero_centered=options.get("zero_centered_gamma", False),
        bias=options.get("bias", True),
        causal=causal,
        batch_first=batch_first,
        interleaved=interleaved,
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("kind", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_plain(device, dtype, kind, layout, mask, interleaved):
    module = build(
        device,
        dtype,
        attn_input_format=layout,
        self_attn_mask_type=mask,
        rotary_pos_interleaved=interleaved,
        **kind,
    )
    plain = twin(causal=mask == "causal", batch_first=layout == "bshd", interleaved=interleaved, **kind)
    x = tokens(device, dtype, layout)
    check_against_twin(module, plain, x, tight=TIGHT)
    freqs = angles(SEQ, HIDDEN // HEADS, interleaved=interleaved).to(device)
    check_against_twin(module, plain, x, rotary_pos_emb=freqs, tight=TIGHT, what="rotary")
    check_against_twin(module, plain, x, rotary_pos_emb=(freqs, freqs * 0.5), tight=TIGHT, what="rotary pair")


def test_the_mask_of_the_call_wins(device):
    module, x = build(device), tokens(device)
    other = build(device, self_attn_mask_type="no_mask")
    other.load_state_dict(module.state_dict())
    assert_same_bits(module(x, self_attn_mask_type="no_mask"), other(x))


def test_recomputation_changes_no_bit(device):
    module, x = build(device, attention_dropout=0.2, hidden_dropout=0.2), tokens(device)
    torch.manual_seed(5)
    wanted = run(module, x)
    torch.manual_seed(5)
    got = run(module, x, checkpoint_core_attention=True)
    for name in wanted:
        assert_same_bits(got[name], wanted[name], name)


@pytest.mark.parametrize("frozen", ["self_attention", "layernorm_mlp", ""])
def test_frozen_parts(device, frozen):
    module, plain = build(device, **LLAMA), twin(**LLAMA)
    for part in (module, plain):
        for name, p in part.named_parameters():
            p.requires_grad_(not name.startswith(frozen))
    check_against_twin(module, plain, tokens(device), tight=TIGHT, what=f"frozen {frozen}")


# ---- dropout ----


@pytest.mark.parametrize("at", ["attention", "mlp"])
def test_hidden_dropout_statistics(device, at):
    """A branch that is 1 everywhere (zero weights, bias 1) shows its mask in output - input."""
    p, hidden = 0.3, 64
    layer = te.TransformerLayer(hidden, 8, 2, hidden_dropout=p, attention_dropout=0.0, device=device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        (layer.self_attention.proj.bias if at == "attention" else layer.layernorm_mlp.fc2_bias).fill_(1.0)
    x = torch.zeros(32, 4, hidden, device=device)
    delta = layer(x)
    dropped = (delta == 0).float().mean().item()
    assert abs(dropped - p) < 5 * (p * (1 - p) / delta.numel()) ** 0.5  # five standard deviations
    torch.testing.assert_close(delta[delta != 0], torch.full_like(delta[delta != 0], 1 / (1 - p)), rtol=1e-6, atol=0)
    assert not torch.equal(delta, layer(x))
    layer.eval()
    assert_same_bits(layer(x), torch.ones_like(x))


def test_eval_is_the_layer_without_dropout(device):
    module, x = build(device, hidden_dropout=0.5, attention_dropout=0.5), tokens(device)
    without = build(device)
    without.load_state_dict(module.state_dict())
    assert_same_bits(module.eval()(x), without(x))


def test_attention_dropout_draws_from_the_tracker():
    tracker = Tracker()
    module, x = build("cpu", attention_dropout=0.5, get_rng_state_tracker=lambda: tracker), tokens("cpu")
    forks = len(tracker.forks)  # initialisation forked too
    assert forks > 0
    outside = torch.get_rng_state()
    module(x)
    assert torch.equal(outside, torch.get_rng_state()) and len(tracker.forks) == forks + 1


# ---- autocast ----


@pytest.mark.parametrize("kind", [LLAMA, GPT], ids=["llama", "gpt"])
def test_autocast_casts_the_residual_stream(device, kind):
    """A float32 input is cast first: the layer in bfloat16, to the bits, and no wider stream through it."""
    module, x = build(device, **kind), tokens(device)

    def under_autocast(m, t):
        with torch.autocast(device, dtype=torch.bfloat16):
            return m(t)

    got = run(module, x, call=under_autocast)
    wanted = run(copy.deepcopy(module).bfloat16(), x.bfloat16())
    assert got["output 0"].dtype == torch.bfloat16
    for key, want in wanted.items():
        assert_same_bits(got[key].bfloat16(), want, key)
    with torch.autocast(device, dtype=torch.bfloat16):
        kept = saved_shapes(lambda: module(x.requires_grad_()))
    assert ((SEQ, BATCH, HIDDEN), torch.float32) not in kept


# ---- kept, refused, signature, state ----


def test_keeps_no_sum_twice(device):
    """Of the residual stream the layer keeps its input and h, each once."""
    module = build(device, **LLAMA)
    x = tokens(device).requires_grad_()
    kept = saved_shapes(lambda: module(x))
    stream = [(s, d) for s, d in kept if s == (SEQ, BATCH, HIDDEN)]
    # x, norm output, h, norm output, attention's context
    assert len(stream) == 5, kept
    assert ((SEQ, BATCH, 2 * FFN), torch.float32) in kept, "the pre-activation"
    assert ((SEQ, BATCH, FFN), torch.float32) not in kept, "never the activation"


CALL_REFUSED = {"inference_params": object()}


@pytest.mark.parametrize("argument", CALL_REFUSED)
def test_call_refuses_what_has_not_landed(device, argument):
    with refused(NotImplementedError, f"'{argument}'", "not available in this version"):
        build(device)(tokens(device), **{argument: CALL_REFUSED[argument]})


@pytest.mark.parametrize(
    "options, words",
    [
        ({"layer_type": "middle"}, ("layer_type", "middle", "encoder")),
        ({"hidden_dropout": 1.5}, ("hidden_dropout", "1.5")),
        ({"attention_dropout": 2.0}, ("attention_dropout", "2.0")),
        ({"activation": "tanh"}, ("activation", "tanh")),
        ({"normalization": "BatchNorm"}, ("normalization", "BatchNorm")),
        ({"num_gqa_groups": 3}, ("num_gqa_groups", "3")),
    ],
)
def test_bad_arguments(options, words):
    with refused(ValueError, *words):
        te.TransformerLayer(HIDDEN, FFN, HEADS, device="cpu", **options)


@pytest.mark.parametrize("kind", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_recomputing_norm_outputs_gives_the_same_bits(device, dtype, kind):
    keeping, other = build(device, dtype, **kind), build(device, dtype, recompute_norm_output=True, **kind)
    other.load_state_dict(keeping.state_dict())
    x = tokens(device, dtype)
    wanted, got = run(keeping, x), run(other, x)
    for name, value in wanted.items():
        assert_same_bits(got[name], value, name)
    x.requires_grad_()
    plans = [te.memory_plan(module, x).kept_bytes for module in (keeping, other)]
    assert plans[0] - plans[1] == 2 * x.nbytes, "the outputs of two norms"


def test_main_grads_of_the_whole_layer(device):
    """fuse_qkv_params and fuse_wgrad_accumulation: every weight's gradient is in main_grad, twice over after two
    microbatches, and once after one that is the first."""
    layer = build(device, fuse_qkv_params=True, fuse_wgrad_accumulation=True)
    plain = build(device, fuse_qkv_params=True)
    plain.load_state_dict(layer.state_dict())
    x = tokens(device)
    weights = {name: p for name, p in layer.named_parameters() if p.dim() == 2}
    for p in weights.values():
        p.main_grad = torch.full_like(p, torch.nan)
    for first in (True, False):
        layer(x, is_first_microbatch=first).square().sum().backward()
    plain(x).square().sum().backward()
    for name, p in weights.items():
        want = 2 * wide(plain.get_parameter(name).grad)
        assert p.grad is None
        assert (wide(p.main_grad) - want).abs().max() <= 64 * 2.0**-24 * want.abs().max(), name


def test_signature():
    check_signature(
        te.TransformerLayer,
        *MODULES["TransformerLayer"],
        ours_init=("recompute_norm_output", "tp_recompute_allgather", "tp_overlap"),
    )


def test_state_names(device):
    names = list(build(device, **LLAMA).state_dict())
    qkv = ["layer_norm_weight", "query_weight", "key_weight", "value_weight", "_extra_state"]
    assert names == [
        *(f"self_attention.layernorm_qkv.{name}" for name in qkv),
        "self_attention.core_attention._extra_state",
        "self_attention.proj.weight",
        "self_attention.proj._extra_state",
        *(f"layernorm_mlp.{name}" for name in ("layer_norm_weight", "fc1_weight", "fc2_weight", "_extra_state")),
    ]
