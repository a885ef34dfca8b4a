# TransformerLayer's options against their twin: orders of norm and residual, the MLP beside the attention, decoders,
# stochastic depth, masks handed on. Mutants: taking the norm's input for its output in _branch, or dropping along
# dimension 0 in every format, turns the comparisons or test_drop_path_drops_whole_sequences red.
import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from attention_cases import by_hand, padding_arguments
from plain_attention import OptionLayer, check_options
from plain_modules import angles, randomize, run
from support import DTYPES, assert_same_bits, randn, refused

import transformer_engine.pytorch as te

HIDDEN, FFN, HEADS, SEQ, SEQ_KV, BATCH = 32, 40, 4, 7, 9, 3
# Products in a row (norms, GEMMs, attentions, activation; forward and backward) times the longest sum (80).
TIGHT = 12 * 80

POST_LN = {"output_layernorm": True}
AFTER_NORM = {"apply_residual_connection_post_layernorm": True}
DECODER = {"layer_type": "decoder"}
OPTIONS = {
    "parallel": {"parallel_attention_mlp": True},
    "after norm": AFTER_NORM,
    "post-LN": POST_LN,
    "post-LN after norm": {**POST_LN, **AFTER_NORM},
    "decoder": DECODER,
    "decoder after norm": {**DECODER, **AFTER_NORM},
    "decoder post-LN": {**DECODER, **POST_LN},
    "fused": {"fuse_qkv_params": True, "num_gqa_groups": 2},
    "side by side": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "decoder fused": {**DECODER, "fuse_qkv_params": True, "qk_norm_type": "L2Normalization"},
    "q and k normed": {"qk_norm_type": "RMSNorm"},
    "q and k normed first": {"qk_norm_type": "LayerNorm", "qk_norm_before_rope": True},
}
LLAMA = {"normalization": "RMSNorm", "bias": False, "num_gqa_groups": 2}
GPT = {"normalization": "LayerNorm", "zero_centered_gamma": True}


def build(device, dtype=torch.float32, **options):
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": dtype, "device": device, **options}
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, **options)
    randomize(layer)
    if layer.output_layernorm and not layer.layernorm.zero_centered_gamma:
        with torch.no_grad():
            layer.layernorm.weight.add_(1.0)
    return layer


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


def tokens(device, dtype=torch.float32, layout="sbhd", seq=SEQ):
    return randn(*((seq, BATCH) if layout == "sbhd" else (BATCH, seq)), HIDDEN, dtype=dtype, device=device)


def inputs_of(options, device, dtype=torch.float32):
    layout = options.get("attn_input_format", "sbhd")
    inputs = [tokens(device, dtype, layout)]
    return inputs + ([tokens(device, dtype, layout, SEQ_KV)] if options.get("layer_type") == "decoder" else [])


def calling(**arguments):
    """The module or its twin as a function of its inputs, float tensors of arguments where the inputs are."""

    def call(m, x, encoder_output=None):
        moved = {k: v.to(x.device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        return m(x, encoder_output=encoder_output, **moved)

    return call


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
    """What stands in the padding changes nothing of the other tokens' outputs and gradients."""
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


# ---- stochastic depth ----


def ones_layer(device, rate, layout, **options):
    """Both branches are 1 everywhere: zero weights, biases 1."""
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "drop_path_rate": rate} | options
    layer = te.TransformerLayer(16, 8, 2, attn_input_format=layout, device=device, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.self_attention.proj.bias.fill_(1.0)
        layer.layernorm_mlp.fc2_bias.fill_(1.0)
    return layer


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("parallel", [False, True])
def test_drop_path_drops_whole_sequences(device, layout, parallel):
    """A branch is gone from a sequence, or there 1 / (1 - rate) times; the branches draw by themselves."""
    rate, batch, seq = 0.25, 512, 3
    layer = ones_layer(device, rate, layout, parallel_attention_mlp=parallel)
    x = torch.zeros(*((seq, batch) if layout == "sbhd" else (batch, seq)), 16, device=device)
    out = layer(x)
    by_sequence = out.transpose(0, 1) if layout == "sbhd" else out
    counts = by_sequence[:, 0, 0] * (1 - rate)
    assert torch.equal(by_sequence, by_sequence[:, :1, :1].expand_as(by_sequence)), "whole sequences"
    branches = [0.0, 2.0] if parallel else [0.0, 1.0, 2.0]
    shares = [rate, 1 - rate] if parallel else [rate**2, 2 * rate * (1 - rate), (1 - rate) ** 2]
    assert sum(torch.isclose(counts, counts.new_tensor(n), atol=1e-5).sum().item() for n in branches) == batch
    for n, p in zip(branches, shares, strict=True):
        share = torch.isclose(counts, counts.new_tensor(n), atol=1e-5).float().mean().item()
        assert abs(share - p) < 5 * (p * (1 - p) / batch) ** 0.5  # five standard deviations of a binomial
    assert not torch.equal(out, layer(x)), "each call draws by itself"
    assert_same_bits(layer.eval()(x), torch.full_like(x, 2.0))


def test_drop_path_replays_and_scales_gradients(device):
    """The same seed drops the same; a dropped sequence's gradient is the residual's alone."""
    layer, x = ones_layer(device, 0.5, "sbhd"), torch.zeros(2, 64, 16, device=device, requires_grad=True)
    torch.manual_seed(5)
    first = layer(x)
    torch.manual_seed(5)
    assert_same_bits(layer(x), first)
    first.sum().backward()
    assert_same_bits(x.grad, torch.ones_like(x))
    dropped = (first.detach()[0, :, 0] / 2).round()  # 0, 1 or 2 branches are there, twice each
    kept_mlp = layer.layernorm_mlp.fc2_bias.grad[0].item() / (2 * 2)
    kept_attention = layer.self_attention.proj.bias.grad[0].item() / (2 * 2)
    assert kept_mlp + kept_attention == dropped.sum().item()


@pytest.mark.parametrize("rate", ["drop_path_rate", "hidden_dropout"])
@pytest.mark.parametrize("parallel", [False, True])
def test_a_rate_of_one_leaves_the_residual_alone(device, rate, parallel):
    """The branches get gradients of 0, not none."""
    layer = ones_layer(device, **{"rate": 0.0, "layout": "sbhd", "parallel_attention_mlp": parallel, rate: 1.0})
    x = randn(3, 4, 16, device=device, requires_grad=True)
    out = layer(x)
    assert_same_bits(out, x.detach())
    out.backward(torch.full_like(out, 2.0))
    assert_same_bits(x.grad, torch.full_like(x, 2.0))
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in layer.parameters())


@pytest.mark.parametrize("name", ["plain", *OPTIONS])
def test_dropout_replays_and_eval_is_without(device, name):
    options = OPTIONS.get(name, {})
    dropping = {"hidden_dropout": 0.3, "attention_dropout": 0.3, "drop_path_rate": 0.3}
    module, inputs = build(device, **options, **dropping), inputs_of(options, device)
    without = build(device, **options)
    without.load_state_dict(module.state_dict())
    results = []
    for recompute in (False, True):
        torch.manual_seed(5)
        results.append(run(module, *inputs, call=calling(checkpoint_core_attention=recompute)))
    for key in results[0]:
        assert_same_bits(results[1][key], results[0][key], key)
    call = calling()
    assert not torch.equal(results[0]["output 0"], call(without, *inputs))
    assert_same_bits(call(module.eval(), *inputs), call(without, *inputs))


# ---- fused weight-gradient accumulation ----


@pytest.mark.parametrize("options", [{}, DECODER, {**POST_LN, "qk_norm_type": "RMSNorm"}], ids=["", "decoder", "post"])
def test_weight_gradients_accumulate_in_every_part(device, options):
    """Each weight matrix of each submodule: the first microbatch overwrites its main_grad, the next one adds to it."""
    options = {**options, "fuse_qkv_params": True, "num_gqa_groups": 2}
    module, plain = build(device, fuse_wgrad_accumulation=True, **options), build(device, **options)
    plain.load_state_dict(module.state_dict())
    matrices = {name: p for name, p in module.named_parameters() if p.dim() == 2}
    assert len(matrices) == (7 if options.get("layer_type") == "decoder" else 4)
    for p in matrices.values():
        p.main_grad = torch.full(p.shape, torch.nan, device=device)
        p.grad_added_to_main_grad = False
    for first in (True, False):
        inputs = inputs_of(options, device)
        for m in (module, plain):
            calling(is_first_microbatch=first)(m, *inputs).square().sum().backward()
    for name, p in plain.named_parameters():
        ours = module.get_parameter(name)
        got = ours.main_grad if name in matrices else ours.grad
        assert name not in matrices or ours.grad_added_to_main_grad
        # Two float32 sums of two addends each; on CUDA the product is added to main_grad before it is rounded.
        torch.testing.assert_close(got, p.grad, rtol=1e-5, atol=1e-5 * p.grad.abs().max().item())


# ---- torch.compile ----


@pytest.mark.parametrize("name", OPTIONS)
def test_compiled_equals_eager(device, name):
    options = OPTIONS[name]
    module, inputs = build(device, **options), inputs_of(options, device)
    call = calling(rotary_pos_emb=angles(SEQ_KV, HIDDEN // HEADS).to(device))
    got = run(module, *inputs, call=torch.compile(call, fullgraph=True, backend="aot_eager"))
    for key, wanted in run(module, *inputs, call=call).items():
        torch.testing.assert_close(got[key], wanted, rtol=1e-5, atol=1e-5, msg=lambda m, n=key: f"{n}: {m}")


def test_compiled_dropout_runs(device):
    module = build(device, hidden_dropout=0.5, attention_dropout=0.5, drop_path_rate=0.5)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = tokens(device)
    first, second = compiled(x), compiled(x)
    assert first.isfinite().all() and not torch.equal(first, second)


# ---- autocast ----


@pytest.mark.parametrize("name", OPTIONS)
def test_autocast_casts_at_the_door(device, name):
    """Whatever the order of its parts: the layer in bfloat16, to the bits."""
    options = OPTIONS[name]
    module, inputs = build(device, **options), inputs_of(options, device)
    low = copy.deepcopy(module).bfloat16()
    with torch.autocast(device, dtype=torch.bfloat16):
        out = calling()(module, *inputs)
    wanted = calling()(low, *(t.bfloat16() for t in inputs))
    assert_same_bits(out, wanted)
    for result in (out, wanted):
        result.sum().backward()
    for got, want in zip(module.parameters(), low.parameters(), strict=True):
        assert_same_bits(got.grad.bfloat16(), want.grad)


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
