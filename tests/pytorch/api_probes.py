# How compatibility.py tries what the API names: a small call of each function, a small instance of each module, and for
# each parameter values other than its default, with what has to go with them. Everything runs on the CPU.
import contextlib
import inspect
import io

import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch import cpu_offload, distributed, graph, module, utils
from transformer_engine.pytorch.attention import rope
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.fp8 import check_fp8_support, check_mxfp8_support

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


def heads(count=HEADS):
    return torch.randn(SEQ, BATCH, count, HEAD, requires_grad=True)


def angles():
    return te.RotaryPositionEmbedding(HEAD)(SEQ).cpu()


def rotate_packed(**beyond):
    packed = torch.randn(SEQ, BATCH, HEADS, 3 * HEAD)
    return rope.apply_fused_qkv_rotary_pos_emb(packed, angles(), angles(), [HEAD] * 3, **beyond)


def quietly(function):
    with contextlib.redirect_stdout(io.StringIO()):
        return function()


def entered(context):
    with context:
        pass


# ---- quantized tensors ----

FP8 = te.DType.kFloat8E4M3


def quantizers():
    """Format -> a quantizer of it."""
    both = {"rowwise": True, "columnwise": True}
    current, block = te.Float8CurrentScalingQuantizer(FP8, "cpu"), te.Float8BlockQuantizer(FP8, **both)
    return {
        "Float8": te.Float8Quantizer(torch.ones(1), torch.zeros(1), FP8),
        "Float8CurrentScaling": current,
        "Float8Block": block,
        "MXFP8": te.MXFP8Quantizer(FP8),
        "NVFP4": te.NVFP4Quantizer(),
        "Hybrid": te.HybridQuantizer(rowwise_quantizer=current, columnwise_quantizer=block),
        "Identity": te.IdentityQuantizer(),
    }


def quantized(name, internal=False):
    """A tensor of that format, or a bare storage; used."""
    quantizer = quantizers()[name]
    quantizer.internal = internal
    return quantizer(torch.randn(6, 40)).dequantize()


def saved_and_restored():
    tensors, objects = te.prepare_for_saving(quantizers()["Identity"](torch.ones(2)), None)
    return te.restore_from_saved(objects, tensors)


# Format -> its tensor class; those that are not made here are tried by their constructors.
TENSORS = {
    "Float8": "Float8Tensor",
    "Float8Block": "Float8BlockwiseQTensor",
    "Hybrid": "HybridQuantizedTensor",
    "Identity": "IdentityTensor",
}
BLACKWELL = ("MXFP8Tensor", "MXFP8TensorStorage", "NVFP4Tensor", "NVFP4TensorStorage")


def captured():
    module = te.make_graphed_callables(te.Linear(HIDDEN, HIDDEN, device="cpu"), (tokens(),))
    module(tokens()).sum().backward()


def offloaded():
    context, sync = te.get_cpu_offload_context(True, 1, 2)
    with context:
        y = te.Linear(HIDDEN, HIDDEN, device="cpu")(tokens())
    sync(y).sum().backward()


def offloaded_by_hand():
    context, sync, manual = te.get_cpu_offload_context(True, None, 1, manual_synchronization=True)
    with context:
        y = te.Linear(HIDDEN, HIDDEN, device="cpu")(tokens())
    y = sync(y)
    manual.start_offload_layer(0)
    manual.release_activation_forward_gpu_memory(0)
    manual.start_reload_layer(0)
    y.sum().backward()


def a_step_in(context, around=None):
    """One step of a layer in FP8, built under another context."""
    with around or te.quantized_model_init(enabled=False):
        layer = te.Linear(HIDDEN, HIDDEN, device="cpu")
    with context:
        layer(tokens()).sum().backward()


# ---- functions and classes that are no modules: name -> a call ----

CALLS = {
    "doctor": lambda: quietly(te.doctor),
    "explain": lambda: te.explain(te.Linear(8, 8, device="cpu"), torch.randn(2, 8)),
    "memory_plan": lambda: te.memory_plan(te.Linear(8, 8, device="cpu"), torch.randn(2, 8)),
    "tune": lambda: inspect.signature(te.tune),  # it searches on a GPU, where its own suite calls it
    "convert": lambda: inspect.signature(te.convert),
    "general_gemm": lambda: general_gemm(torch.ones(2, 4), torch.ones(3, 4)),
    "autocast": lambda: a_step_in(te.autocast()),
    "fp8_autocast": lambda: a_step_in(te.fp8_autocast()),
    "quantized_model_init": lambda: a_step_in(te.autocast(), te.quantized_model_init()),
    "fp8_model_init": lambda: a_step_in(te.autocast(), te.fp8_model_init()),
    "QuantizerRole": lambda: te.QuantizerRole("linear", "weight", "fc1"),
    "QuantizerRequest": te.QuantizerRequest,
    "DelayedScalingRequest": te.DelayedScalingRequest,
    "onnx_export": lambda: entered(te.onnx_export()),
    "get_cpu_offload_context": offloaded,
    "mark_not_offload": lambda: te.mark_not_offload(torch.ones(1)),
    "start_offload": lambda: cpu_offload.start_offload(torch.ones(1)),
    "mark_activation_offload": lambda: cpu_offload.mark_activation_offload(torch.ones(1)),
    "ManualOffloadSynchronizer": offloaded_by_hand,
    "is_cpu_offload_enabled": lambda: cpu_offload.is_cpu_offload_enabled(),
    "get_default_recipe": te.get_default_recipe,
    "check_fp8_support": check_fp8_support,
    "check_mxfp8_support": check_mxfp8_support,
    "FP8GlobalStateManager": te.fp8.FP8GlobalStateManager.is_fp8_enabled,
    "checkpoint": lambda: te.checkpoint(te.Linear(HIDDEN, HIDDEN, device="cpu"), tokens()).sum().backward(),
    "CudaRNGStatesTracker": lambda: entered(tracker().fork()),
    "activation_recompute_forward": lambda: entered(distributed.activation_recompute_forward(True)),
    "get_all_rng_states": distributed.get_all_rng_states,
    "make_graphed_callables": captured,
    "save_fp8_tensors": lambda: graph.save_fp8_tensors([te.Linear(HIDDEN, HIDDEN, device="cpu")], None),
    "restore_fp8_tensors": lambda: graph.restore_fp8_tensors([], None),
    "set_capture_start": lambda: (graph.set_capture_start(), graph.set_capture_end()),
    "set_capture_end": graph.set_capture_end,
    "make_weak_ref": lambda: utils.make_weak_ref(torch.ones(2)),
    "gather_along_first_dim": lambda: distributed.gather_along_first_dim(torch.ones(2), None),
    "reduce_scatter_along_first_dim": lambda: distributed.reduce_scatter_along_first_dim(torch.ones(2), None),
    "allreduce": lambda: distributed.allreduce(torch.ones(2)),
    "is_fp8_activation_recompute_enabled": distributed.is_fp8_activation_recompute_enabled,
    "in_fp8_activation_recompute_phase": distributed.in_fp8_activation_recompute_phase,
    "interleave_glu_tensor": lambda: te.interleave_glu_tensor(torch.ones(8), 2),
    "deinterleave_glu_tensor": lambda: te.deinterleave_glu_tensor(torch.ones(8), 2),
    "is_bf16_available": te.is_bf16_available,
    "get_cudnn_version": te.get_cudnn_version,
    # Without a GPU it raises RuntimeError, which is its answer; test_utils.py calls it.
    "get_device_compute_capability": lambda: inspect.signature(te.get_device_compute_capability),
    "nvtx_range_push": lambda: (utils.nvtx_range_push("here"), utils.nvtx_range_pop()),
    "nvtx_range_pop": lambda: (utils.nvtx_range_push("here"), utils.nvtx_range_pop()),
    "apply_rotary_pos_emb": lambda: rope.apply_rotary_pos_emb(heads(), angles()),
    "apply_fused_qkv_rotary_pos_emb": rotate_packed,
    "get_dummy_wgrad": lambda: module.base.get_dummy_wgrad([2, 2], torch.float32),
    "TransformerEngineBaseModule": module.base.TransformerEngineBaseModule,
    "Quantizer": lambda: te.Quantizer(rowwise=True, columnwise=False),
    "QuantizedTensor": lambda: isinstance(torch.ones(1), te.QuantizedTensor),
    "QuantizedTensorStorage": lambda: isinstance(torch.ones(1), te.QuantizedTensorStorage),
    "prepare_for_saving": saved_and_restored,
    "restore_from_saved": saved_and_restored,
    "restore_from_func_ctx": lambda: inspect.signature(te.restore_from_func_ctx),  # its own suite has a context
    **{f"{name}Quantizer": lambda name=name: quantized(name) for name in quantizers()},
    **{tensor: lambda name=name: quantized(name) for name, tensor in TENSORS.items()},
    **{f"{tensor}Storage": lambda name=name: quantized(name, internal=True) for name, tensor in TENSORS.items()},
    **{name: getattr(te, name) for name in BLACKWELL},
    "Recipe": recipe.Recipe,
    "CustomRecipe": lambda: recipe.CustomRecipe(lambda role: None),
    **{
        name: getattr(te, name)
        for name in ("is_fp8_available", "is_mxfp8_available", "is_fp8_block_scaling_available", "is_nvfp4_available")
    },
    **{
        name: getattr(recipe, name)
        for name in (
            "MMParams",
            "QParams",
            "DelayedScaling",
            "Float8CurrentScaling",
            "Float8BlockScaling",
            "MXFP8BlockScaling",
            "NVFP4BlockScaling",
        )
    },
}

# What of a working name is refused: name -> {argument: a call with it}.
REFUSED = {
    "MXFP8BlockScaling": {"at use": lambda: a_step_in(te.autocast(recipe=recipe.MXFP8BlockScaling()))},
    "NVFP4BlockScaling": {"at use": lambda: a_step_in(te.autocast(recipe=recipe.NVFP4BlockScaling()))},
    "DelayedScaling": {
        name: lambda name=name: a_step_in(te.autocast(recipe=recipe.DelayedScaling(**{name: True})))
        for name in ("fp8_dpa", "fp8_mha")
    },
    **{
        name: {
            "backward_override": lambda name=name: a_step_in(
                te.autocast(recipe=getattr(recipe, name)(backward_override="high_precision"))
            )
        }
        for name in ("Float8CurrentScaling", "Float8BlockScaling")
    },
    "onnx_export": {"enabled=True": lambda: entered(te.onnx_export(enabled=True))},
    "get_cpu_offload_context": {"offload_weights=True": lambda: te.get_cpu_offload_context(True, offload_weights=True)},
    "checkpoint": {
        "distribute_saved_activations=True": lambda: te.checkpoint(abs, tokens(), distribute_saved_activations=True)
    },
    "gather_along_first_dim": {
        f"{name}=": lambda name=name: distributed.gather_along_first_dim(torch.ones(2), None, **{name: True})
        for name in ("quantizer", "external_coalescing")
    },
    "apply_rotary_pos_emb": {
        f"{name}=": lambda name=name, value=value: rope.apply_rotary_pos_emb(heads(), angles(), **{name: value})
        for name, value in (("tensor_format", "thd"), ("cu_seqlens", torch.arange(3)), ("cp_size", 2))
    },
    "apply_fused_qkv_rotary_pos_emb": {
        f"{name}=": lambda name=name, value=value: rotate_packed(**{name: value})
        for name, value in (("tensor_format", "thd"), ("cu_seqlens", torch.arange(3)), ("cp_size", 2))
    },
}

# ---- modules: positional arguments, options in every call, inputs ----

SAMPLES = {
    "Linear": ((HIDDEN, FFN), {"device": "cpu"}, lambda: [tokens()]),
    "LayerNormLinear": ((HIDDEN, FFN), {"device": "cpu"}, lambda: [tokens()]),
    "LayerNormMLP": ((HIDDEN, FFN), {"device": "cpu"}, lambda: [tokens()]),
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
    """What a call with this mask needs."""
    if kind == "arbitrary":
        return {mask_name: kind, tensor: torch.zeros(1, 1, SEQ, SEQ, dtype=torch.bool)}
    if "padding" in kind:
        return {mask_name: kind, tensor: torch.zeros(BATCH, 1, 1, SEQ, dtype=torch.bool)}
    return {mask_name: kind}


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
    "tp_group": options("tp_group", "a group"),
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
    "symmetric_ar_type": options("symmetric_ar_type", "two_shot"),
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
    "qkv_format": options("qkv_format", "bshd", "thd"),
    "attn_input_format": options("attn_input_format", "bshd", "thd"),
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
    ("DotProductAttention", "kv_channels"): [Probe((HEAD, HEAD), {"kv_channels": (HEAD, HEAD)}, positional=(HEADS,))],
    ("DotProductAttention", "num_gqa_groups"): [
        Probe(1, {"num_gqa_groups": 1}, inputs=lambda: [heads(), heads(1), heads(1)])
    ],
    ("DotProductAttention", "attention_type"): options("attention_type", "cross"),
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
        "qkv_format": arguments("qkv_format", "bshd", "thd"),
        "fp8_output": arguments("fp8_output", True),
        "bf16_backward": arguments("bf16_backward", True),
        "num_splits": arguments("num_splits", 2),
        "score_mod": arguments("score_mod", abs),
        "score_mod_bprop": arguments("score_mod_bprop", abs, score_mod=abs),
        "score_mod_tensors": arguments("score_mod_tensors", {"t": BIAS}, score_mod=abs),
        "score_mod_bprop_tensors": arguments("score_mod_bprop_tensors", {"t": BIAS}, score_mod=abs),
        "qkv_layer": arguments("qkv_layer", torch.ones(1)),
        "kv_layer": arguments("kv_layer", torch.ones(1)),
        "qkv_interleave_dim": arguments("qkv_interleave_dim", -2, qkv_layer=torch.ones(1)),
    }


CALL = {
    "is_first_microbatch": arguments("is_first_microbatch", True, False),
    "fp8_output": arguments("fp8_output", True),
    "fp8_grad": arguments("fp8_grad", True),
    "offset": arguments("offset", 2),
}
_LAYER = {"layer_type": "decoder"}
CALL_OF = {
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
