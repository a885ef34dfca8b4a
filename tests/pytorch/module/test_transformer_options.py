# TransformerLayer's options against their twin: orders of norm and residual, the MLP beside the attention, decoders,
# masks handed on; state and misuse.
import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from plain_modules import angles
from support import DTYPES, assert_same_bits, randn, refused

import transformer_engine.pytorch as te

from ..attention.cases import by_hand, padding_arguments
from ..attention.plain import OptionLayer, check_options
from .transformer_cases import (
    AFTER_NORM,
    BATCH,
    DECODER,
    FFN,
    HEADS,
    HIDDEN,
    OPTIONS,
    POST_LN,
    SEQ,
    SEQ_KV,
    build,
    calling,
    inputs_of,
    tokens,
)

# Products in a row (norms, GEMMs, attentions, activation; forward and backward) times the longest sum (80).
TIGHT = 12 * 80
LLAMA = {"normalization": "RMSNorm", "bias": False, "num_gqa_groups": 2}
GPT = {"normalization": "LayerNorm", "zero_centered_gamma": True}


def twin(**options):
    return OptionLayer(
        HIDDEN,
        FFN,
        HEADS,
        options.get("num_gqa_groups"),
        decoder=options.get("layer_type") == "decoder",
        parallel=options.get("parallel_attention_mlp", False),
        after_norm=options.get("apply_residual_connection_post_layernorm", False),
        output_norm=options.get("output_layernorm", False),
        rms=options.get("normalization") == "RMSNorm",
        zero_centered=options.get("zero_centered_gamma", False),
        bias=options.get("bias", True),
        batch_first=options.get("attn_input_format") == "bshd",
        fused=options.get("fuse_qkv_params", False),
        weight_interleaved=options.get("qkv_weight_interleaved", True),
        qk_norm=options.get("qk_norm_type"),
        before_rope=options.get("qk_norm_before_rope", False),
    )


# ---- against the twin ----


@pytest.mark.parametrize("kind", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_options_match_plain(device, dtype, name, kind):
    turn = list(OPTIONS).index(name) + DTYPES.index(dtype) + (kind is GPT)
    options = {**kind, **OPTIONS[name], "attn_input_format": ("sbhd", "bshd")[turn % 2]}
    module, plain = build(device, dtype, **options), twin(**options)
    inputs = inputs_of(options, device, dtype)
    for freqs in (None, angles(SEQ_KV, HIDDEN // HEADS)):
        call = {"call": calling(rotary_pos_emb=freqs)}
        check_options(module, plain, *inputs, ours=call, plain=call, tight=TIGHT, what=f"rotary {freqs is not None}")


@pytest.mark.parametrize("how", ["two masks", "lengths"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_reaches_both_attentions(device, dtype, how):
    """The decoder's own tokens are padded in its self-attention, those and the encoder's in the other one."""
    lengths, window = ([7, 3, 0], [9, 4, 2]), (3, 1)
    module = build(device, dtype, **DECODER, self_attn_mask_type="padding", enc_dec_attn_mask_type="padding")
    own = by_hand("padding", (SEQ, SEQ), window=window, lengths=(lengths[0], lengths[0]))
    other = by_hand("padding", (SEQ, SEQ_KV), window=(-1, 2), lengths=lengths)
    arguments = padding_arguments(how, lengths, (SEQ, SEQ_KV), device)
    if how == "two masks":
        both = arguments.pop("attention_mask")
        arguments = {"attention_mask": both[0], "enc_dec_attn_mask": both}
    ours = {"call": calling(window_size=window, enc_dec_window_size=(-1, 2), **arguments)}
    plain = {"call": calling(visible=own, cross_visible=other)}
    check_options(module, twin(**DECODER), *inputs_of(DECODER, device, dtype), ours=ours, plain=plain, tight=TIGHT)


@pytest.mark.parametrize("where", ["module", "call"])
def test_masks_of_the_module_and_of_the_call(device, where):
    """Arbitrary and sliding, given once or at each call; the call's win."""
    hidden = torch.rand(BATCH, 1, SEQ, SEQ, device=device) < 0.3
    options = {"self_attn_mask_type": "arbitrary", "window_size": (2, 3), "bottom_right_diagonal": False}
    options |= {"enc_dec_window_size": (4, 4), "enc_dec_bottom_right_diagonal": False}
    built, called = (options, {}) if where == "module" else ({"self_attn_mask_type": "no_mask"}, options)
    if where == "call":
        built["window_size"], built["enc_dec_window_size"] = (0, 0), (0, 0)
        built["bottom_right_diagonal"] = built["enc_dec_bottom_right_diagonal"] = True
    module = build(device, **DECODER, **built)
    own = by_hand("arbitrary", (SEQ, SEQ), window=(2, 3), arbitrary=hidden.cpu())
    other = by_hand("no_mask", (SEQ, SEQ_KV), window=(4, 4), bottom_right=False)
    ours = {"call": calling(attention_mask=hidden, **called)}
    plain = {"call": calling(visible=own, cross_visible=other)}
    check_options(module, twin(**DECODER), *inputs_of(DECODER, device), ours=ours, plain=plain, tight=TIGHT)


def test_padded_tokens_send_no_gradient_to_the_others(device):
    """Values in the padding do not change the outputs and gradients of the other tokens."""
    lengths = [7, 3, 1]
    arguments = padding_arguments("one mask", (lengths, lengths), (SEQ, SEQ), device)
    module, x = build(device, self_attn_mask_type="padding_causal"), tokens(device)
    padded = arguments["attention_mask"][:, 0, 0].T
    results = []
    for value in (0.0, 3.0):
        leaf = x.masked_fill(padded[..., None], value).requires_grad_()
        out = module(leaf, **arguments)
        out[~padded].square().sum().backward()
        assert leaf.grad[padded].eq(0).all()
        results.append((out[~padded], leaf.grad[~padded]))
    for got, wanted in zip(*results, strict=True):
        assert_same_bits(got, wanted)


# ---- state and misuse ----


def test_groups_reach_every_part(device, tmp_path):
    module, store = build(device, **DECODER), dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        module.set_tensor_parallel_group(group)
        attentions = (module.self_attention, module.inter_attention)
        parts = [module, module.layernorm_mlp, *(part for a in attentions for part in (a, a.core_attention, a.proj))]
        assert all(part.tp_group is group for part in parts)
        with refused(TypeError, "TransformerLayer", "tp_group", "ProcessGroup"):
            module.set_tensor_parallel_group("a group")
        assert all(part.tp_group is group for part in parts)
    finally:
        dist.destroy_process_group()
    group = object()
    module.set_context_parallel_group(None, None, None)
    with refused(NotImplementedError, "DotProductAttention", "cp_group", "context parallelism"):
        module.set_context_parallel_group(group, [0], None, cp_comm_type="a2a")


@pytest.mark.parametrize("name", OPTIONS)
def test_state_travels(device, name):
    options = OPTIONS[name]
    module, other = build(device, **options), build(device, **options)
    other.load_state_dict(module.state_dict())
    inputs = inputs_of(options, device)
    assert_same_bits(calling()(other, *inputs), calling()(module, *inputs))


@pytest.mark.parametrize("name", OPTIONS)
def test_copies_and_meta_modules(device, name):
    """Copied, pickled, or built on the meta device and filled: the same bits."""
    options = OPTIONS[name]
    module, inputs = build(device, **options), inputs_of(options, device)
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    empty = te.TransformerLayer(HIDDEN, FFN, HEADS, device="meta", **dropout, **options)
    assert all(p.is_meta for p in empty.parameters())
    empty.to_empty(device=device).load_state_dict(module.state_dict())
    wanted = calling()(module, *inputs)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), empty):
        assert_same_bits(calling()(other, *inputs), wanted)


def test_state_names(device):
    names = {name.rpartition(".")[0] for name in build(device, **DECODER, **POST_LN).state_dict()}
    assert {"self_attention.qkv", "inter_attention.layernorm_query", "inter_attention.key_value"} <= names
    assert {"layernorm_mlp", "layernorm", "self_attention.proj", "inter_attention.proj"} <= names
    assert "self_attention.layernorm_qkv" not in names


@pytest.mark.parametrize(
    "options, words",
    [
        ({"fuse_wgrad_accumulation": True}, ("fuse_wgrad_accumulation", "fuse_qkv_params=True")),
        ({"parallel_attention_mlp": True, **DECODER}, ("parallel_attention_mlp", "layer_type", "decoder")),
        ({"parallel_attention_mlp": True, **POST_LN}, ("parallel_attention_mlp", "output_layernorm")),
        ({"parallel_attention_mlp": True, **AFTER_NORM}, ("parallel_attention_mlp", "post_layernorm")),
        ({"drop_path_rate": 1.5}, ("drop_path_rate", "1.5", "0 <= p <= 1")),
        ({"hidden_dropout": 1.5}, ("hidden_dropout", "1.5", "0 <= p <= 1")),
        ({"drop_path_rate": -0.5}, ("drop_path_rate", "-0.5")),
        ({"enc_dec_attn_mask_type": "diagonal"}, ("enc_dec_attn_mask_type", "diagonal")),
        ({"self_attn_mask_type": "diagonal"}, ("self_attn_mask_type", "diagonal")),
        ({"window_size": (1, 2, 3)}, ("window_size", "(1, 2, 3)")),
        ({"enc_dec_window_size": (-3, 0)}, ("enc_dec_window_size", "(-3, 0)")),
        ({"qk_norm_type": "BatchNorm"}, ("qk_norm_type", "BatchNorm")),
    ],
)
def test_bad_arguments(device, options, words):
    with refused(ValueError, *words):
        te.TransformerLayer(HIDDEN, FFN, HEADS, device=device, **options)


def test_unknown_arguments(device):
    with pytest.raises(TypeError, match="post_norm"):
        te.TransformerLayer(HIDDEN, FFN, HEADS, device=device, post_norm=True)
    module = build(device)
    with pytest.raises(TypeError, match="mask"):
        module(tokens(device), mask=None)


@pytest.mark.parametrize(
    "layer_type, arguments, words",
    [
        ("encoder", {"encoder_output": (SEQ_KV, BATCH, HIDDEN)}, ("encoder_output", "given", "'encoder'")),
        ("decoder", {}, ("encoder_output", "None", "'decoder'")),
        ("decoder", {"encoder_output": (SEQ_KV, BATCH + 1, HIDDEN)}, ("encoder_output", str(BATCH + 1))),
        ("encoder", {"self_attn_mask_type": "padding"}, ("cu_seqlens_q", "attention_mask")),
        ("encoder", {"self_attn_mask_type": "diagonal"}, ("self_attn_mask_type", "diagonal")),
        ("encoder", {"enc_dec_attn_mask_type": "diagonal"}, ("enc_dec_attn_mask_type", "diagonal")),
        ("encoder", {"window_size": (4,)}, ("window_size", "(4,)")),
        ("encoder", {"core_attention_bias": (1, 1, SEQ, SEQ)}, ("core_attention_bias", "no_bias")),
        ("encoder", {"core_attention_bias_type": "post_scale_bias"}, ("core_attention_bias", "None")),
    ],
)
def test_bad_calls_and_the_same_bits_after_them(device, layer_type, arguments, words):
    module, x = build(device, layer_type=layer_type), tokens(device)
    good = {"encoder_output": tokens(device, seq=SEQ_KV)} if layer_type == "decoder" else {}
    before = module(x, **good)
    tensors = ("encoder_output", "core_attention_bias")
    made = {name: randn(*v, device=device) if name in tensors else v for name, v in arguments.items()}
    with refused(ValueError, *words):
        module(x, **made)
    assert_same_bits(module(x, **good), before)


@pytest.mark.parametrize("change", ["missing", "extra", "other layer"])
def test_checkpoints_that_do_not_fit(device, change):
    module, x = build(device, **POST_LN), tokens(device)
    before, state = module(x), module.state_dict()
    if change == "missing":
        del state["layernorm.weight"]
        words = ("Missing key", "layernorm.weight")
    elif change == "extra":
        state["inter_attention.proj.weight"] = torch.ones(1)
        words = ("Unexpected key", "inter_attention.proj.weight")
    else:
        state = build(device).state_dict()
        words = ("Missing key", "self_attention.qkv.query_weight", "Unexpected key", "layernorm_qkv")
    state = {name: value + 1 for name, value in state.items()}
    with refused(RuntimeError, *words):
        module.load_state_dict(state)
    assert_same_bits(module(x), before)
