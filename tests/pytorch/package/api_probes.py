# Samples by which compatibility.py tries modules: a small instance of each, and for each parameter values other than
# its default, together with the other arguments that they need. Everything runs on the CPU.
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te

HIDDEN, FFN, HEADS, SEQ, BATCH = 16, 24, 2, 4, 2
HEAD = HIDDEN // HEADS
MASKS = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
ACTIVATIONS = "gelu geglu glu qgelu qgeglu relu reglu srelu sreglu silu swiglu clamped_swiglu"


def tracker():
    states = te.CudaRNGStatesTracker()
    states.add("model-parallel-rng", 1)
    states.add("expert", 2)
    return states


def tokens(dtype=torch.float32):
    return torch.randn(SEQ, BATCH, HIDDEN, dtype=dtype, requires_grad=True)


def rows(count=8):
    return torch.randn(count, HIDDEN, requires_grad=True)


def group():
    """A process group of this process alone; torch.distributed is not initialised for it."""
    found = dist.ProcessGroup(dist.HashStore(), 0, 1)
    kind = dist.ProcessGroup.BackendType.GLOO
    found._set_default_backend(kind)
    found._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(dist.HashStore(), 0, 1))
    found._set_group_name("one rank")
    return found


def heads(count=HEADS):
    return torch.randn(SEQ, BATCH, count, HEAD, requires_grad=True)


def angles():
    return te.RotaryPositionEmbedding(HEAD)(SEQ).cpu()


# ---- modules: positional arguments, options in every call, inputs ----

SAMPLES = {
    "Linear": ((HIDDEN, FFN), {"device": "cpu"}, lambda: [tokens()]),
    "LayerNormLinear": ((HIDDEN, FFN), {"device": "cpu"}, lambda: [tokens()]),
    "LayerNormMLP": ((HIDDEN, FFN), {"device": "cpu"}, lambda: [tokens()]),
    "GroupedLinear": ((2, HIDDEN, FFN), {"device": "cpu"}, lambda: [rows(), [3, 5]]),
    "Fp8Padding": ((2,), {}, lambda: [rows(), [3, 5]]),
    "Fp8Unpadding": ((2,), {}, lambda: [rows(32), [3, 5]]),
    "LayerNorm": ((HIDDEN,), {"device": "cpu"}, lambda: [tokens()]),
    "RMSNorm": ((HIDDEN,), {"device": "cpu"}, lambda: [tokens()]),
    "DotProductAttention": ((HEADS, HEAD), {}, lambda: [heads(), heads(), heads()]),
    "MultiheadAttention": ((HIDDEN, HEADS), {"device": "cpu", "attention_dropout": 0.0}, lambda: [tokens()]),
    "TransformerLayer": (
        (HIDDEN, FFN, HEADS),
        {"device": "cpu", "attention_dropout": 0.0, "hidden_dropout": 0.0},
        lambda: [tokens()],
    ),
    "RotaryPositionEmbedding": ((HEAD,), {}, lambda: [SEQ]),
}

# ---- parameters ----


class Probe:
    """Options of the constructor and arguments of the call that try one value of one parameter."""

    def __init__(self, value, init=None, call=None, positional=None, inputs=None):
        self.value, self.init, self.call = value, init or {}, call or {}
        self.positional, self.inputs = positional, inputs  # in the place of the sample's


def options(name, *values, **beside):
    """The constructor's parameter with each of the values."""
    return [Probe(value, {name: value, **beside}) for value in values]


def arguments(name, *values, init=None, **beside):
    """The call's parameter with each of the values."""
    return [Probe(value, init, {name: value, **beside}) for value in values]


def masked(kind, mask_name="attn_mask_type", tensor="attention_mask"):
    """The arguments that a call with this mask needs."""
    if kind == "arbitrary":
        return {mask_name: kind, tensor: torch.zeros(1, 1, SEQ, SEQ, dtype=torch.bool)}
    if "padding" in kind:
        return {mask_name: kind, tensor: torch.zeros(BATCH, 1, 1, SEQ, dtype=torch.bool)}
    return {mask_name: kind}


PACKED = {name: torch.tensor([0, 1, SEQ], dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_kv")}


def packed_heads():
    return [torch.randn(SEQ, HEADS, HEAD, requires_grad=True) for _ in range(3)]


def packed(parameter, mask_name, inputs=lambda: [rows(SEQ)]):
    """thd, given to a constructor."""
    return Probe("thd", {parameter: "thd", mask_name: "padding"}, PACKED, inputs=inputs)


def stacked(parts, dim):
    return torch.stack([torch.randn(SEQ, BATCH, HEADS, HEAD) for _ in range(parts)], dim).requires_grad_()


def mask_options(parameter):
    """Every mask given to the constructor; the call then needs the tensors alone."""
    probes = []
    for kind in (*MASKS, "arbitrary"):
        call = {name: value for name, value in masked(kind, parameter).items() if name != parameter}
        probes.append(Probe(kind, {parameter: kind}, call))
    return probes


TRUE = """sequence_parallel fuse_wgrad_accumulation return_bias zero_centered_gamma return_layernorm_output
    return_layernorm_output_gathered ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad
    ub_tp_comm_overlap delay_wgrad_compute save_original_input set_parallel_mode checkpoint input_layernorm
    fuse_qkv_params rotary_pos_interleaved apply_residual_connection_post_layernorm output_layernorm
    parallel_attention_mlp bottom_right_diagonal return_max_logit interleaved enc_dec_bottom_right_diagonal"""

INIT = {
    **{name: options(name, True) for name in TRUE.split()},
    "tp_group": options("tp_group", group()),
    "tp_size": options("tp_size", 2),
    "get_rng_state_tracker": options("get_rng_state_tracker", tracker),
    "rng_tracker_name": options("rng_tracker_name", "expert", get_rng_state_tracker=tracker),
    "init_method": options("init_method", torch.nn.init.zeros_),
    "output_layer_init_method": options("output_layer_init_method", torch.nn.init.zeros_),
    "bias": options("bias", False),
    "params_dtype": options("params_dtype", torch.bfloat16),
    "parallel_mode": options("parallel_mode", "column", "row"),
    "parameters_split": options("parameters_split", ["a", "b"], {"a": 8, "b": 16}),
    "device": options("device", "cpu", torch.device("cpu")),
    "ub_name": options("ub_name", "fc1"),
    "name": options("name", "a label"),
    "symmetric_ar_type": options("symmetric_ar_type", "one_shot", "two_shot", "multimem_all_reduce"),
    "eps": options("eps", 1e-6),
    "layernorm_epsilon": options("layernorm_epsilon", 1e-6),
    "normalization": options("normalization", "RMSNorm"),
    "activation": options("activation", *ACTIVATIONS.split()),
    "activation_params": options("activation_params", {"limit": 5.0}, activation="clamped_swiglu"),
    "seq_length": options("seq_length", SEQ),
    "micro_batch_size": options("micro_batch_size", BATCH),
    "normalized_shape": [Probe(HIDDEN, {"normalized_shape": HIDDEN}, positional=())],
    "hidden_size": [Probe(HIDDEN, {"hidden_size": HIDDEN}, positional=())],
    "num_gqa_groups": options("num_gqa_groups", 1),
    "attention_dropout": options("attention_dropout", 0.5),
    "hidden_dropout": options("hidden_dropout", 0.5),
    "drop_path_rate": options("drop_path_rate", 0.5),
    "qkv_format": [*options("qkv_format", "bshd"), packed("qkv_format", "attn_mask_type")],
    "attn_input_format": [*options("attn_input_format", "bshd"), packed("attn_input_format", "self_attn_mask_type")],
    "attn_mask_type": mask_options("attn_mask_type"),
    "self_attn_mask_type": mask_options("self_attn_mask_type"),
    "window_size": options("window_size", (2, 0)),
    "layer_number": options("layer_number", 1),
    "cp_group": options("cp_group", "a group"),
    "cp_global_ranks": options("cp_global_ranks", [0]),
    "cp_stream": options("cp_stream", "a stream"),
    "cp_comm_type": options("cp_comm_type", "all_gather", "a2a", "a2a+p2p"),
    "softmax_scale": options("softmax_scale", 0.5),
    "softmax_type": options("softmax_type", "off-by-one", "learnable"),
    "kv_channels": options("kv_channels", 4),
    "qkv_weight_interleaved": options("qkv_weight_interleaved", False, fuse_qkv_params=True),
    "qk_norm_type": options("qk_norm_type", "L2Normalization", "RMSNorm", "LayerNorm"),
    "qk_norm_eps": options("qk_norm_eps", 1e-5, qk_norm_type="RMSNorm"),
    "qk_norm_before_rope": options("qk_norm_before_rope", True, qk_norm_type="RMSNorm"),
    "rotary_percent": options("rotary_percent", 0.5),
    "seq_len_interpolation_factor": options("seq_len_interpolation_factor", 2.0),
    "pretrained_max_position_embeddings": options("pretrained_max_position_embeddings", 2),
    "rotary_base": options("rotary_base", 500.0),
}


def decoder(**call):
    return {"encoder_output": tokens().detach(), **call}


# (module, parameter) -> probes, where they are not those of INIT.
INIT_OF = {
    ("DotProductAttention", "qkv_format"): [
        *options("qkv_format", "bshd"),
        packed("qkv_format", "attn_mask_type", packed_heads),
    ],
    ("GroupedLinear", "num_gemms"): [Probe(1, positional=(1, HIDDEN, FFN), inputs=lambda: [rows(), [8]])],
    ("GroupedLinear", "tp_size"): options("tp_size", 2, bias=False),
    ("GroupedLinear", "single_grouped_weight"): options("single_grouped_weight", True),
    ("GroupedLinear", "single_grouped_bias"): options("single_grouped_bias", True),
    ("GroupedLinear", "use_grouped_tensor"): options("use_grouped_tensor", True),
    **{(name, argument): [] for name in ("Fp8Padding", "Fp8Unpadding") for argument in ("num_gemms",)},
    ("Fp8Padding", "align_size"): options("align_size", 4),
    ("Fp8Unpadding", "align_size"): [Probe(4, {"align_size": 4}, inputs=lambda: [rows(12), [3, 5]])],
    ("DotProductAttention", "kv_channels"): [Probe((HEAD, HEAD), {"kv_channels": (HEAD, HEAD)}, positional=(HEADS,))],
    ("DotProductAttention", "num_gqa_groups"): [
        Probe(1, {"num_gqa_groups": 1}, inputs=lambda: [heads(), heads(1), heads(1)])
    ],
    ("DotProductAttention", "attention_type"): options("attention_type", "cross"),
    ("DotProductAttention", "tp_size"): [
        Probe(2, {"tp_size": 2}, inputs=lambda: [heads(HEADS // 2) for _ in range(3)])
    ],
    ("MultiheadAttention", "attention_type"): [Probe("cross", {"attention_type": "cross"}, decoder())],
    ("MultiheadAttention", "hidden_size"): [],
    ("MultiheadAttention", "return_layernorm_output"): options("return_layernorm_output", True, input_layernorm=True),
    ("LayerNormMLP", "hidden_size"): [],
    ("TransformerLayer", "hidden_size"): [],
    ("TransformerLayer", "fuse_wgrad_accumulation"): options("fuse_wgrad_accumulation", True, fuse_qkv_params=True),
    ("TransformerLayer", "ub_overlap_ag"): options("ub_overlap_ag", False),
    ("TransformerLayer", "ub_overlap_rs"): options("ub_overlap_rs", False),
    ("TransformerLayer", "ub_bulk_dgrad"): options("ub_bulk_dgrad", False),
    ("TransformerLayer", "ub_bulk_wgrad"): options("ub_bulk_wgrad", False),
    # The parts of a residual have to be added up: on two ranks in distributed/test_parallel_attention.py.
    ("TransformerLayer", "tp_size"): options("tp_size", 1, set_parallel_mode=True),
    ("TransformerLayer", "layer_type"): [Probe("decoder", {"layer_type": "decoder"}, decoder())],
    ("TransformerLayer", "enc_dec_attn_mask_type"): [
        Probe(kind, {"layer_type": "decoder", "enc_dec_attn_mask_type": kind}, decoder(**call))
        for kind, call in (
            ("causal", {}),
            ("padding", {"enc_dec_attn_mask": (torch.zeros(BATCH, 1, 1, SEQ, dtype=torch.bool),) * 2}),
        )
    ],
    ("TransformerLayer", "enc_dec_bottom_right_diagonal"): [
        Probe(True, {"layer_type": "decoder", "enc_dec_bottom_right_diagonal": True}, decoder())
    ],
    ("TransformerLayer", "enc_dec_window_size"): [
        Probe((2, 2), {"layer_type": "decoder", "enc_dec_window_size": (2, 2)}, decoder())
    ],
}

LENGTHS = torch.tensor([0, 3, SEQ + 3], dtype=torch.int32)
BIAS = torch.randn(1, HEADS, SEQ, SEQ)
PADDED = {"attn_mask_type": "padding_causal"}


def lengths(name, mask_name):
    return [
        Probe("lengths", {}, {mask_name: "padding", "cu_seqlens_q": LENGTHS, "cu_seqlens_kv": LENGTHS, name: LENGTHS})
    ]


def of_attention(mask_name):
    """Probes of what the forwards of the three attention modules share."""
    kinds = (*MASKS, "arbitrary")
    return {
        "attention_mask": [Probe("tensor", {}, masked("arbitrary", mask_name))],
        mask_name: [Probe(kind, {}, masked(kind, mask_name)) for kind in kinds],
        "window_size": arguments("window_size", (2, 0)),
        "bottom_right_diagonal": arguments("bottom_right_diagonal", True),
        "is_first_microbatch": arguments("is_first_microbatch", True, False),
        "checkpoint_core_attention": arguments("checkpoint_core_attention", True),
        "inference_params": arguments("inference_params", object()),
        "rotary_pos_emb": arguments("rotary_pos_emb", torch.randn(SEQ, 1, 1, HEAD)),
        "core_attention_bias_type": [
            *arguments("core_attention_bias_type", "pre_scale_bias", "post_scale_bias", core_attention_bias=BIAS),
            *arguments("core_attention_bias_type", "alibi"),
        ],
        "core_attention_bias": arguments("core_attention_bias", BIAS, core_attention_bias_type="post_scale_bias"),
        "alibi_slopes": arguments("alibi_slopes", torch.ones(HEADS), core_attention_bias_type="alibi"),
        **{
            name: lengths(name, mask_name)
            for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        },
        "max_seqlen_q": arguments("max_seqlen_q", SEQ),
        "max_seqlen_kv": arguments("max_seqlen_kv", SEQ),
        "fast_zero_fill": arguments("fast_zero_fill", False),
        "pad_between_seqs": arguments("pad_between_seqs", False),
        "thd_attention_policies": arguments("thd_attention_policies", "a policy"),
        "thd_attention_policy_dispatch": arguments("thd_attention_policy_dispatch", "manual"),
        "softcap": arguments("softcap", 30.0),
        "encoder_output": [Probe("tensor", {"attention_type": "cross"}, decoder())],
        "qkv_format": [
            *arguments("qkv_format", "bshd"),
            Probe("thd", {"attn_mask_type": "padding"}, {"qkv_format": "thd", **PACKED}, inputs=packed_heads),
        ],
        "fp8_output": arguments("fp8_output", True),
        "bf16_backward": arguments("bf16_backward", True),
        "num_splits": arguments("num_splits", 2),
        "score_mod": arguments("score_mod", abs),
        "score_mod_bprop": arguments("score_mod_bprop", abs, score_mod=abs),
        "score_mod_tensors": arguments("score_mod_tensors", {"t": BIAS}, score_mod=abs),
        "score_mod_bprop_tensors": arguments("score_mod_bprop_tensors", {"t": BIAS}, score_mod=abs),
        "qkv_layer": [Probe("tensor", {}, {"qkv_layer": stacked(3, -3)}, inputs=list)],
        "kv_layer": [Probe("tensor", {}, {"kv_layer": stacked(2, -3)}, inputs=lambda: [heads()])],
        "qkv_interleave_dim": [Probe(-2, {}, {"qkv_layer": stacked(3, -2), "qkv_interleave_dim": -2}, inputs=list)],
    }


CALL = {
    "is_first_microbatch": arguments("is_first_microbatch", True, False),
    "fp8_output": arguments("fp8_output", True),
    "fp8_grad": arguments("fp8_grad", True),
    "offset": arguments("offset", 2),
}
_LAYER = {"layer_type": "decoder"}
CALL_OF = {
    "GroupedLinear": {
        "m_splits": [Probe("tensor", inputs=lambda: [rows(), torch.tensor([2, 4])])],
        "out": arguments("out", torch.empty(8, FFN)),
        "dgrad_out": arguments("dgrad_out", torch.empty(8, HIDDEN)),
    },
    "Fp8Padding": {"m_splits": []},
    "Fp8Unpadding": {"m_splits": []},
    "DotProductAttention": of_attention("attn_mask_type"),
    "MultiheadAttention": of_attention("attn_mask_type"),
    "TransformerLayer": {
        **of_attention("self_attn_mask_type"),
        "encoder_output": [Probe("tensor", _LAYER, decoder())],
        "enc_dec_attn_mask": [
            Probe("tensor", _LAYER, decoder(**masked("arbitrary", "enc_dec_attn_mask_type", "enc_dec_attn_mask")))
        ],
        "enc_dec_attn_mask_type": [Probe("causal", _LAYER, decoder(enc_dec_attn_mask_type="causal"))],
        "enc_dec_window_size": [Probe((2, 2), _LAYER, decoder(enc_dec_window_size=(2, 2)))],
        "enc_dec_bottom_right_diagonal": [Probe(True, _LAYER, decoder(enc_dec_bottom_right_diagonal=True))],
    },
}
