# Calls by which compatibility.py tries functions and classes other than modules: a small call of each, and one for each
# of its arguments that is refused. Everything runs on the CPU.
import contextlib
import importlib
import inspect
import io

import torch
from api_names import ACTIVATIONS, TOP_LEVEL

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import recipe
from transformer_engine.pytorch import cpu_offload, distributed, graph, module, optimizers, quantization, router, utils
from transformer_engine.pytorch.attention import rope
from transformer_engine.pytorch.cpp_extensions import general_gemm, general_grouped_gemm
from transformer_engine.pytorch.tensor import utils as utils_of_tensors

from .api_probes import BATCH, HEAD, HEADS, HIDDEN, SEQ, angles, heads, tokens, tracker
from .client_names import NEXT


def rotate_packed(**beyond):
    packed = torch.randn(SEQ, BATCH, HEADS, 3 * HEAD)
    return rope.apply_fused_qkv_rotary_pos_emb(packed, angles(), angles(), [HEAD] * 3, **beyond)


def cross_entropy_step():
    logits = torch.randn(SEQ, BATCH, 40, requires_grad=True)
    te.parallel_cross_entropy(logits * 1, torch.zeros(SEQ, BATCH, dtype=torch.int64), 0.1, True).backward()


def head_step():
    hidden, weight = torch.randn(SEQ, BATCH, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    te.fused_linear_cross_entropy(hidden, weight, torch.zeros(SEQ, BATCH, dtype=torch.int64)).backward()


def routed(**options):
    """A router's step: choice, auxiliary scores and loss, forward and backward."""
    logits = torch.randn(SEQ, BATCH, 8, requires_grad=True)
    probs, _ = router.fused_topk_with_score_function(logits, 2, True, 4, 2, 2.0, "softmax", None, **options)
    routing_map, scores = router.fused_compute_score_for_moe_aux_loss(logits, 2, "sigmoid")
    counts = routing_map.flatten(0, 1).sum(0)
    (probs.sum() + router.fused_moe_aux_loss(scores, counts, SEQ * BATCH, 8, 2, 0.1)).backward()


def permuted():
    """Every function of permutation, forward and backward."""
    mask, probs = torch.tensor([[1, 0, 1], [0, 1, 1]]).bool(), torch.rand(2, 3, requires_grad=True)
    x, chunks = torch.randn(2, HIDDEN, requires_grad=True), (torch.tensor([1, 3]), torch.tensor([1, 0]))
    out, weights, row_id_map, pads, _ = te.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 4)
    out = te.moe_sort_chunks_by_index(out + te.moe_permute(x, mask, 12)[0], *chunks)
    out = te.moe_sort_chunks_by_index_with_probs(out, weights, *chunks)[0]
    back = te.moe_unpermute(out, row_id_map, probs, x.shape, pad_offsets=pads)
    (back.sum() + te.moe_permute_with_probs(x, probs, mask, 4)[1].sum()).backward()


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


# Class of state, less "RecipeState" -> a recipe of it.
RECIPE_STATES = {
    "DelayedScaling": recipe.DelayedScaling(),
    "Float8CurrentScaling": recipe.Float8CurrentScaling(),
    "Float8BlockScaling": recipe.Float8BlockScaling(),
    "Custom": recipe.CustomRecipe(lambda role: te.Float8CurrentScalingQuantizer(FP8)),
}


def quantized_by_state(name):
    state = quantization.RecipeState.create(RECIPE_STATES[name], mode="forward", num_quantizers=3, device="cpu")
    return [quantizer(torch.randn(6, 40)).dequantize() for quantizer in state.make_quantizers()]


def cast_from_masters(name, gathered):
    """A weight that takes a master in two parts."""
    weight = quantizers()["Float8Block"](torch.ones(4, 40))
    for start in (0, 60):
        getattr(utils_of_tensors, name)([weight], [torch.full((100,), 2.0)], [start], None)
    gathered(weight)
    assert (weight.dequantize() == 2).all() and weight.get_usages()["columnwise"]


def in_a_buffer():
    weight, buffer = quantizers()["Float8"](torch.ones(4, 40)), torch.zeros(160, dtype=torch.uint8)
    utils_of_tensors.replace_raw_data(weight, buffer.view(4, 40))
    buffer.zero_()
    assert not weight.dequantize().any()


def without_columns():
    weight = quantizers()["Float8"](torch.ones(4, 40))
    utils_of_tensors.clear_columnwise_cache([weight])
    assert not weight.get_usages()["columnwise"]


DERIVATIVES = [name for name in ACTIVATIONS.split() if name.startswith(("d", "clamped_d"))]


def activated(name):
    """By the function of transformer_engine_torch, backward too where it is one."""
    x = torch.ones(2, 32)
    y = getattr(tex, name.replace("clamped_d", "clamped_").removeprefix("d"))(x, None)
    return getattr(tex, name)(torch.ones_like(y), x, None) if name in DERIVATIVES else y


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


# ---- optimizers ----

_ADAM, _ONE = (1e-3, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0), torch.ones(1)
_ON_DEVICE = (_ONE, 0.9, 0.99, 1e-8, _ONE.int(), 1, 1, 0.0, _ONE)

# Function -> (its lists: a letter for the dtype of each list, the arguments after them).
MULTI_TENSOR = {
    "scale": ("ff", (2.0,)),
    "scale_tensor": ("ff", (_ONE,)),
    "l2norm": ("f", (True,)),
    "unscale_l2norm": ("f", (_ONE, True)),
    "adam": ("ffff", _ADAM),
    "adam_param_remainder": ("fbffs", _ADAM),
    "adam_fp8": ("fufff111", (*_ADAM, FP8)),
    "adam_capturable": ("ffff", _ON_DEVICE),
    "adam_capturable_master": ("fbfff", _ON_DEVICE),
    "sgd": ("fff", (0.0, 0.9, 0.0, 0.1, True, False, False, 1.0)),
    "compute_scale_and_scale_inv": ("111", (448.0, False, 0.0)),
}
_DTYPES = {"b": torch.bfloat16, "s": torch.int16, "u": torch.uint8}


def over_lists(name):
    letters, rest = MULTI_TENSOR[name]
    lists = [[torch.ones(1 if d == "1" else 8, dtype=_DTYPES.get(d, torch.float32)) for _ in "ab"] for d in letters]
    function = getattr(optimizers, f"multi_tensor_{name}")
    optimizers.multi_tensor_applier(function, torch.zeros(1, dtype=torch.int32), lists, *rest)


def stepped(cls, **options):
    weight = torch.nn.Parameter(torch.ones(8))
    weight.grad = torch.ones(8)
    cls([weight], lr=0.1, **options).step()
    assert (weight < 1).all()


# ---- functions and classes other than modules: name -> a call ----


def next_calls():
    """Name -> the client's use of it (client_names.py)."""
    found = {}
    for (path, name), call in NEXT.items():
        found[name] = lambda path=path, name=name, call=call: call(getattr(importlib.import_module(path), name))
    return found


CALLS = {
    **next_calls(),
    "doctor": lambda: quietly(te.doctor),
    "explain": lambda: te.explain(te.Linear(8, 8, device="cpu"), torch.randn(2, 8)),
    "MoEMLP": lambda: te.MoEMLP(16, 32, num_experts=4, topk=2, device="cpu")(torch.randn(3, 16)),
    "memory_plan": lambda: te.memory_plan(te.Linear(8, 8, device="cpu"), torch.randn(2, 8)),
    "tune": lambda: inspect.signature(te.tune),  # it searches on a GPU, where its own suite calls it
    **{f"multi_tensor_{name}": lambda name=name: over_lists(name) for name in MULTI_TENSOR},
    "multi_tensor_applier": lambda: over_lists("scale"),
    "FusedAdam": lambda: stepped(optimizers.FusedAdam, master_weights=True, exp_avg_dtype=torch.bfloat16),
    "FusedSGD": lambda: stepped(optimizers.FusedSGD, momentum=0.9),
    "MultiTensorApply": lambda: optimizers.MultiTensorApply(1024),
    "general_gemm": lambda: general_gemm(torch.ones(2, 4), torch.ones(3, 4)),
    "general_grouped_gemm": lambda: general_grouped_gemm(
        [torch.ones(2, 4)], [torch.ones(3, 4)], [torch.ones(3, 2)], None, torch.float32
    ),
    "is_module_grouped_tensor_path_supported": lambda: module.grouped_linear.is_module_grouped_tensor_path_supported(
        recipe.DelayedScaling(), torch.float32
    ),
    "autocast": lambda: a_step_in(te.autocast()),
    "fp8_autocast": lambda: a_step_in(te.fp8_autocast()),
    "quantized_model_init": lambda: a_step_in(te.autocast(), te.quantized_model_init()),
    "fp8_model_init": lambda: a_step_in(te.autocast(), te.fp8_model_init()),
    **{
        name: lambda name=name: getattr(quantization, name)(recipe.DelayedScaling())
        for name in ("get_fp8_torch_dtype", "get_fp8_te_dtype", "get_fp8_max", "get_align_size_for_quantization")
    },
    **{f"{name}RecipeState": lambda name=name: quantized_by_state(name) for name in RECIPE_STATES},
    "RecipeState": lambda: quantized_by_state("DelayedScaling"),
    "QuantizerRole": lambda: te.QuantizerRole("linear", "weight", "fc1"),
    "QuantizerRequest": te.QuantizerRequest,
    "DelayedScalingRequest": te.DelayedScalingRequest,
    "onnx_export": lambda: entered(te.onnx_export()),
    "parallel_cross_entropy": cross_entropy_step,
    "fused_linear_cross_entropy": head_step,
    **dict.fromkeys(
        ("fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss"), routed
    ),
    **dict.fromkeys(TOP_LEVEL["Mixture of experts"].split(), permuted),
    "get_cpu_offload_context": offloaded,
    "mark_not_offload": lambda: te.mark_not_offload(torch.ones(1)),
    "start_offload": lambda: cpu_offload.start_offload(torch.ones(1)),
    "mark_activation_offload": lambda: cpu_offload.mark_activation_offload(torch.ones(1)),
    "ManualOffloadSynchronizer": offloaded_by_hand,
    "is_cpu_offload_enabled": lambda: cpu_offload.is_cpu_offload_enabled(),
    "get_default_recipe": te.get_default_recipe,
    **{
        f"check_{name}_support": getattr(quantization, f"check_{name}_support")
        for name in ("fp8", "mxfp8", "fp8_block_scaling", "nvfp4")
    },
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
    "initialize_ub": lambda: (te.initialize_ub([8, 4], 2), te.destroy_ub()),
    "destroy_ub": te.destroy_ub,
    "symmetric_all_reduce": lambda: distributed.symmetric_all_reduce(torch.ones(2), all_reduce_type="one_shot"),
    "allreduce": lambda: distributed.allreduce(torch.ones(2)),
    "is_fp8_activation_recompute_enabled": distributed.is_fp8_activation_recompute_enabled,
    "in_fp8_activation_recompute_phase": distributed.in_fp8_activation_recompute_phase,
    "interleave_glu_tensor": lambda: te.interleave_glu_tensor(torch.ones(8), 2),
    "deinterleave_glu_tensor": lambda: te.deinterleave_glu_tensor(torch.ones(8), 2),
    "is_bf16_available": te.is_bf16_available,
    "get_cudnn_version": te.get_cudnn_version,
    # Without a GPU it raises RuntimeError, which is its answer; package/test_utils.py calls it.
    "get_device_compute_capability": lambda: inspect.signature(te.get_device_compute_capability),
    "nvtx_range_push": lambda: (utils.nvtx_range_push("here"), utils.nvtx_range_pop()),
    "nvtx_range_pop": lambda: (utils.nvtx_range_push("here"), utils.nvtx_range_pop()),
    "apply_rotary_pos_emb": lambda: rope.apply_rotary_pos_emb(heads(), angles()),
    "apply_fused_qkv_rotary_pos_emb": rotate_packed,
    "WeightGradStore": lambda: module._common.WeightGradStore(delay_wgrad_compute=True).clear(),
    "noop_cat": lambda: module._common.noop_cat([torch.ones(2, 2), torch.ones(1, 2)]),
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
    "FP8TensorMeta": tex.FP8TensorMeta,
    "replace_raw_data": in_a_buffer,
    "clear_columnwise_cache": without_columns,
    **{
        name: lambda name=name: cast_from_masters(name, lambda weight: weight.update_usage(columnwise_usage=True))
        for name in ("quantize_master_weights", "cast_master_weights_to_fp8")
    },
    "post_all_gather_processing": lambda: cast_from_masters(
        "quantize_master_weights", utils_of_tensors.post_all_gather_processing
    ),
    "quantize": lambda: tex.quantize(torch.ones(2, 2), quantizers()["Float8CurrentScaling"]),
    "dequantize": lambda: tex.dequantize(quantizers()["Identity"](torch.ones(2)), te.DType.kFloat32),
    **{name: lambda name=name: activated(name) for name in ACTIVATIONS.split()},
    "thd_get_partitioned_indices": lambda: tex.thd_get_partitioned_indices(torch.tensor([0, 4]).int(), 4, 2, 0),
    "init_method_normal": lambda: utils.init_method_normal(0.02)(torch.empty(2, 2)),
    "scaled_init_method_normal": lambda: utils.scaled_init_method_normal(0.02, 2)(torch.empty(2, 2)),
    "attention_mask_func": lambda: utils.attention_mask_func(torch.ones(2, 2), torch.eye(2, dtype=torch.bool)),
    "round_up_to_nearest_multiple": lambda: utils.round_up_to_nearest_multiple(3, 2),
    "gpu_autocast_ctx": lambda: entered(utils.gpu_autocast_ctx(enabled=False)),
    "is_non_tn_fp8_gemm_supported": utils.is_non_tn_fp8_gemm_supported,
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

# The refused arguments of a working name: name -> {argument: a call with it}.
REFUSED = {
    "FusedAdam": {"amsgrad=True": lambda: stepped(optimizers.FusedAdam, amsgrad=True)},
    "MXFP8BlockScaling": {"at use": lambda: a_step_in(te.autocast(recipe=recipe.MXFP8BlockScaling()))},
    "NVFP4BlockScaling": {"at use": lambda: a_step_in(te.autocast(recipe=recipe.NVFP4BlockScaling()))},
    "DelayedScaling": {
        name: lambda name=name: a_step_in(te.autocast(recipe=recipe.DelayedScaling(**{name: True})))
        for name in ("fp8_dpa", "fp8_mha")
    },
    "onnx_export": {"enabled=True": lambda: entered(te.onnx_export(enabled=True))},
    "symmetric_all_reduce": {
        "multimem_all_reduce": lambda: distributed.symmetric_all_reduce(torch.ones(2)),
    },
    "gather_along_first_dim": {
        "external_coalescing=": lambda: distributed.gather_along_first_dim(
            torch.ones(2), None, external_coalescing=True
        )
    },
    "fused_topk_with_score_function": {
        f"{name}=": lambda name=name: routed(**{name: torch.zeros(8)})
        for name in ("qb_histogram", "qb_bin_bounds", "qb_histogram_mode")
    },
    "apply_fused_qkv_rotary_pos_emb": {"tensor_format=": lambda: rotate_packed(tensor_format="thd")},
}
