# The public names of the API that this library follows (its version is the level), as plain data: where each name is
# imported from, which ones clients import, and the parameters of modules with their defaults. compatibility.py has the
# state of each name in this library.

TE = "transformer_engine.pytorch"

# Group -> names of transformer_engine.pytorch.
TOP_LEVEL = {
    "Modules": "Linear LayerNormLinear LayerNormMLP LayerNorm RMSNorm GroupedLinear Fp8Padding Fp8Unpadding "
    "DotProductAttention MultiheadAttention TransformerLayer RotaryPositionEmbedding InferenceParams "
    "FusedMLAQUpProjRopeQuant",
    "Quantization": "autocast quantized_model_init fp8_autocast fp8_model_init is_fp8_available is_mxfp8_available "
    "is_fp8_block_scaling_available is_nvfp4_available get_default_recipe QuantizerRole QuantizerRequest "
    "DelayedScalingRequest DType constants",
    "Graphs, offload, recomputation": "make_graphed_callables checkpoint get_cpu_offload_context mark_not_offload "
    "ManualOffloadSynchronizer CudaRNGStatesTracker",
    "Userbuffers": "initialize_ub destroy_ub UserBufferQuantizationMode",
    "Mixture of experts": "moe_permute moe_permute_with_probs moe_permute_and_pad_with_probs moe_unpermute "
    "moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs",
    "Others": "parallel_cross_entropy onnx_export newton_schulz CusolverMpCtx interleave_glu_tensor "
    "deinterleave_glu_tensor is_bf16_available get_cudnn_version get_device_compute_capability torch_version ops "
    "optimizers",
    "Quantized tensors": "Quantizer QuantizedTensorStorage QuantizedTensor prepare_for_saving restore_from_saved "
    "restore_from_func_ctx Float8Quantizer Float8CurrentScalingQuantizer MXFP8Quantizer Float8BlockQuantizer "
    "NVFP4Quantizer HybridQuantizer IdentityQuantizer Float8Tensor Float8TensorStorage MXFP8Tensor MXFP8TensorStorage "
    "Float8BlockwiseQTensor Float8BlockwiseQTensorStorage NVFP4Tensor NVFP4TensorStorage HybridQuantizedTensor "
    "HybridQuantizedTensorStorage IdentityTensor IdentityTensorStorage",
    "Ours alone": "MoEMLP doctor explain fused_linear_cross_entropy memory_plan tune functional",
}

MULTI_TENSOR = """multi_tensor_applier multi_tensor_scale multi_tensor_scale_tensor multi_tensor_l2norm
    multi_tensor_unscale_l2norm multi_tensor_adam multi_tensor_adam_param_remainder multi_tensor_adam_fp8
    multi_tensor_adam_capturable multi_tensor_adam_capturable_master multi_tensor_sgd
    multi_tensor_compute_scale_and_scale_inv"""

_QUANTIZATION = """FP8GlobalStateManager autocast fp8_autocast fp8_model_init quantized_model_init check_fp8_support
    check_mxfp8_support check_fp8_block_scaling_support check_nvfp4_support get_default_recipe get_fp8_torch_dtype
    get_fp8_te_dtype get_fp8_max get_align_size_for_quantization RecipeState DelayedScalingRecipeState
    Float8CurrentScalingRecipeState Float8BlockScalingRecipeState CustomRecipeState QuantizerRole QuantizerRequest
    DelayedScalingRequest is_fp8_available is_mxfp8_available is_fp8_block_scaling_available is_nvfp4_available"""
_KINDS = ["gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu"]
ACTIVATIONS = " ".join([*_KINDS, *(f"d{kind}" for kind in _KINDS), "clamped_swiglu", "clamped_dswiglu"])

# Modules that clients import as names of their package.
_FORMATS = "float8_tensor float8_blockwise_tensor mxfp8_tensor nvfp4_tensor hybrid_tensor identity_tensor"

# Module -> names.
SUBMODULES = {
    "transformer_engine": "pytorch common doctor __version__",
    "transformer_engine.common.recipe": "Format MMParams QParams Recipe DelayedScaling Float8CurrentScaling "
    "Float8BlockScaling MXFP8BlockScaling NVFP4BlockScaling CustomRecipe _FormatHelper",
    "transformer_engine.debug.pytorch.debug_state": "TEDebugState",
    "transformer_engine_torch": f"DType FP8TensorMeta FP8FwdTensors FP8BwdTensors quantize dequantize {ACTIVATIONS} "
    f"thd_get_partitioned_indices {MULTI_TENSOR}",
    f"{TE}.attention": "DotProductAttention MultiheadAttention InferenceParams RotaryPositionEmbedding "
    "apply_rotary_pos_emb",
    f"{TE}.attention.dot_product_attention": "DotProductAttention",
    f"{TE}.attention.dot_product_attention.context_parallel": "pad_thd_sequences_for_cp",
    f"{TE}.attention.dot_product_attention.dot_product_attention": "DotProductAttention",
    f"{TE}.attention.dot_product_attention.utils": "FlashAttentionUtils",
    f"{TE}.attention.inference": "InferenceParams PagedKVCacheManager",
    f"{TE}.attention.rope": "RotaryPositionEmbedding apply_rotary_pos_emb apply_fused_qkv_rotary_pos_emb",
    f"{TE}.constants": "TE_DType DType TE_DType_To_Torch FP8FwdTensorIdx FP8BwdTensorIdx MXFP8_BLOCK_SCALING_SIZE "
    "NVFP4_BLOCK_SCALING_SIZE dist_group_type AttnMaskTypes AttnTypes AttnBiasTypes LayerTypes GemmParallelModes",
    f"{TE}.cpp_extensions": "general_gemm general_grouped_gemm general_grouped_gemm_for_grouped_tensor",
    f"{TE}.cpu_offload": "get_cpu_offload_context start_offload mark_activation_offload mark_not_offload "
    "is_cpu_offload_enabled ManualOffloadSynchronizer",
    f"{TE}.cpu_offload_v1": "get_cpu_offload_context start_offload mark_activation_offload mark_not_offload "
    "is_cpu_offload_enabled ManualOffloadSynchronizer",
    f"{TE}.cross_entropy": "parallel_cross_entropy",
    f"{TE}.distributed": "CudaRNGStatesTracker activation_recompute_forward checkpoint get_all_rng_states "
    "gather_along_first_dim reduce_scatter_along_first_dim allreduce is_fp8_activation_recompute_enabled "
    "in_fp8_activation_recompute_phase symmetric_all_reduce get_symmetric_memory_tensor symm_mem_alloc "
    "release_symm_mem_pool prepare_te_modules_for_fsdp FullyShardedDataParallel get_distributed_world_size "
    "get_distributed_rank",
    f"{TE}.distributed_weight": "DistributedWeight",
    f"{TE}.ep": "ep_bootstrap ep_finalize EpBuffer ep_prepare ep_dispatch ep_combine",
    f"{TE}.export": "onnx_export te_translation_table",
    f"{TE}.float8_tensor": "Float8Tensor",
    f"{TE}.fp8": f"{_QUANTIZATION} DelayedScaling Format get_default_fp8_recipe _amax_and_scale_update",
    f"{TE}.graph": "make_graphed_callables save_fp8_tensors restore_fp8_tensors set_capture_start set_capture_end",
    f"{TE}.jit": "jit_fuser no_torch_dynamo set_jit_fusion_options bias_gelu_fused bgrad_dgelu_fused "
    "l2normalization_fused bias_dropout_add get_bias_dropout_add bias_dropout_add_fused_train "
    "bias_dropout_add_fused_inference warmup_jit_bias_dropout_add warmup_jit_bias_dropout_add_all_dtypes "
    "warmup_jit_bias_gelu warmup_jit_bias_gelu_all_dtypes",
    f"{TE}.module": "Linear LayerNorm LayerNormLinear LayerNormMLP RMSNorm GroupedLinear Fp8Padding Fp8Unpadding",
    f"{TE}.module.layernorm_linear": "LayerNormLinear general_gemm",
    f"{TE}.module.linear": "Linear general_gemm",
    f"{TE}.module._common": "WeightGradStore noop_cat",
    f"{TE}.module.grouped_linear": "GroupedLinear _GroupedLinear is_module_grouped_tensor_path_supported",
    f"{TE}.module.base": "TransformerEngineBaseModule get_dummy_wgrad initialize_ub destroy_ub "
    "UserBufferQuantizationMode get_workspace _dummy_wgrads",
    f"{TE}.optimizers": f"FusedAdam FusedSGD MultiTensorApply {MULTI_TENSOR}",
    f"{TE}.ops": "Sequential Linear BasicLinear Bias LayerNorm RMSNorm GELU SwiGLU MakeExtraOutput AddExtraInput",
    f"{TE}.permutation": "moe_permute moe_permute_with_probs moe_permute_and_pad_with_probs moe_unpermute "
    "moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs",
    f"{TE}.quantization": _QUANTIZATION,
    f"{TE}.quantized_tensor": "QuantizedTensor QuantizedTensorStorage Quantizer prepare_for_saving restore_from_saved "
    "restore_from_func_ctx",
    f"{TE}.router": "fused_topk_with_score_function fused_compute_score_for_moe_aux_loss fused_moe_aux_loss "
    "RoutingMapFormat QBHistogramMode",
    f"{TE}.tensor": f"{TOP_LEVEL['Quantized tensors']} GroupedTensor GroupedTensorStorage {_FORMATS}",
    f"{TE}.tensor.float8_blockwise_tensor": "Float8BlockQuantizer Float8BlockwiseQTensor Float8BlockwiseQTensorStorage",
    f"{TE}.tensor.float8_tensor": "Float8CurrentScalingQuantizer Float8Quantizer Float8Tensor Float8TensorStorage",
    f"{TE}.tensor.hybrid_tensor": "HybridQuantizedTensor HybridQuantizedTensorStorage HybridQuantizer",
    f"{TE}.tensor.identity_tensor": "IdentityQuantizer IdentityTensor IdentityTensorStorage",
    f"{TE}.tensor.mxfp8_tensor": "MXFP8Quantizer MXFP8Tensor MXFP8TensorStorage",
    f"{TE}.tensor.nvfp4_tensor": "NVFP4Quantizer NVFP4Tensor NVFP4TensorStorage",
    f"{TE}.tensor.grouped_tensor": "GroupedTensor GroupedTensorStorage",
    f"{TE}.tensor.utils": "replace_raw_data quantize_master_weights cast_master_weights_to_fp8 "
    "post_all_gather_processing clear_columnwise_cache",
    f"{TE}.torch_version": "torch_version",
    f"{TE}.utils": "make_weak_ref nvtx_range_push nvtx_range_pop init_method_normal scaled_init_method_normal "
    "attention_mask_func round_up_to_nearest_multiple gpu_autocast_ctx is_non_tn_fp8_gemm_supported "
    "get_default_init_method cast_if_needed divide SplitAlongDim torch_get_autocast_gpu_dtype check_dim_for_fp8_exec",
}

# Where clients have a fallback of their own, behind `except ImportError`.
GUARDED = {
    "transformer_engine_torch": MULTI_TENSOR,
    f"{TE}.cpp_extensions": "general_gemm general_grouped_gemm",
    f"{TE}.export": "te_translation_table",
    f"{TE}.ops": SUBMODULES[f"{TE}.ops"],
    f"{TE}.optimizers": SUBMODULES[f"{TE}.optimizers"],
    f"{TE}.tensor": "GroupedTensor GroupedTensorStorage",
}

# Names that may be missing: modules and names that come with their capability. Clients rely on all the others.
LATER = {
    **GUARDED,
    f"{TE}.distributed_weight": SUBMODULES[f"{TE}.distributed_weight"],
    f"{TE}.ep": SUBMODULES[f"{TE}.ep"],
}

_UB = "ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False"
_LENGTHS = """cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
    max_seqlen_q=None, max_seqlen_kv=None"""
_REST_OF_ATTENTION = f"""checkpoint_core_attention=False, inference_params=None, rotary_pos_emb=None,
    core_attention_bias_type="no_bias", core_attention_bias=None, alibi_slopes=None, {_LENGTHS}, fast_zero_fill=True,
    pad_between_seqs=None, thd_attention_policies=None, thd_attention_policy_dispatch="auto", softcap=None"""
_MICROBATCH = "inp, is_first_microbatch=None"

# Module of te -> (parameters of the constructor, of forward).
MODULES = {
    "Linear": (
        f"""in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, tp_size=1,
    get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False,
    params_dtype=None, parallel_mode=None, parameters_split=None, device="cuda", {_UB}, ub_bulk_dgrad=False,
    ub_bulk_wgrad=False, ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None, save_original_input=False,
    name=None""",
        f"{_MICROBATCH}, fp8_output=False, fp8_grad=False",
    ),
    "LayerNormLinear": (
        f"""in_features, out_features, eps=1e-5, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None,
    tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True, normalization="LayerNorm", return_bias=False,
    params_dtype=None, parallel_mode=None, return_layernorm_output=False, return_layernorm_output_gathered=False,
    parameters_split=None, zero_centered_gamma=False, device="cuda", {_UB}, ub_bulk_wgrad=False, ub_bulk_dgrad=False,
    ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None, name=None""",
        f"{_MICROBATCH}, fp8_output=False, fp8_grad=False",
    ),
    "LayerNormMLP": (
        """hidden_size, ffn_hidden_size, eps=1e-5, sequence_parallel=False, return_bias=False,
    get_rng_state_tracker=None, tp_group=None, tp_size=1, init_method=None, bias=True, normalization="LayerNorm",
    activation="gelu", activation_params=None, output_layer_init_method=None, fuse_wgrad_accumulation=False,
    params_dtype=None, return_layernorm_output=False, return_layernorm_output_gathered=False, seq_length=None,
    micro_batch_size=None, set_parallel_mode=False, zero_centered_gamma=False, device="cuda", ub_overlap_ag=False,
    name=None, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False,
    delay_wgrad_compute=False, symmetric_ar_type=None, checkpoint=False""",
        _MICROBATCH,
    ),
    "LayerNorm": (
        """normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None, zero_centered_gamma=False,
    hidden_size=None""",
        "inp",
    ),
    "RMSNorm": (
        """normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None, zero_centered_gamma=False,
    hidden_size=None""",
        "inp",
    ),
    "GroupedLinear": (
        """num_gemms, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None,
    tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False,
    params_dtype=None, parallel_mode=None, device="cuda", ub_overlap_rs=False, ub_overlap_ag=False, ub_name=None,
    delay_wgrad_compute=False, save_original_input=False, single_grouped_weight=False, single_grouped_bias=False,
    name=None, use_grouped_tensor=None""",
        "inp, m_splits, is_first_microbatch=None, out=None, dgrad_out=None",
    ),
    "Fp8Padding": ("num_gemms, align_size=None", "inp, m_splits"),
    "Fp8Unpadding": ("num_gemms, align_size=None", "inp, m_splits"),
    "DotProductAttention": (
        """num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
    attn_mask_type="causal", window_size=None, bottom_right_diagonal=None, sequence_parallel=False, tp_size=1,
    get_rng_state_tracker=None, tp_group=None, layer_number=None, attention_type="self", cp_group=None,
    cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p", softmax_scale=None, softmax_type="vanilla",
    return_max_logit=False, name=None""",
        f"""query_layer=None, key_layer=None, value_layer=None, attention_mask=None, qkv_format=None, {_LENGTHS},
    attn_mask_type=None, window_size=None, bottom_right_diagonal=None, softcap=None, checkpoint_core_attention=False,
    core_attention_bias_type="no_bias", core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True,
    inference_params=None, pad_between_seqs=None, fp8_output=False, bf16_backward=False, num_splits=1, score_mod=None,
    score_mod_bprop=None, score_mod_tensors=None, score_mod_bprop_tensors=None, qkv_layer=None, kv_layer=None,
    qkv_interleave_dim=-3""",
    ),
    "MultiheadAttention": (
        f"""hidden_size, num_attention_heads, kv_channels=None, attention_dropout=0.1, layernorm_epsilon=1e-5,
    init_method=None, output_layer_init_method=None, layer_number=None, attn_mask_type="causal", window_size=None,
    bottom_right_diagonal=None, tp_group=None, tp_size=1, num_gqa_groups=None, fuse_wgrad_accumulation=False,
    get_rng_state_tracker=None, sequence_parallel=False, params_dtype=None, return_bias=False,
    return_layernorm_output=False, input_layernorm=False, attention_type="self", set_parallel_mode=False,
    fuse_qkv_params=False, zero_centered_gamma=False, qkv_weight_interleaved=True, rotary_pos_interleaved=False,
    {_UB}, ub_bulk_dgrad=False, ub_bulk_wgrad=False, bias=True, normalization="LayerNorm", device="cuda",
    qkv_format="sbhd", name=None, qk_norm_type=None, qk_norm_eps=1e-6, qk_norm_before_rope=False, seq_length=None,
    micro_batch_size=None, softmax_type="vanilla\"""",
        f"""hidden_states, attention_mask=None, encoder_output=None, attn_mask_type=None, window_size=None,
    bottom_right_diagonal=None, is_first_microbatch=None, {_REST_OF_ATTENTION}""",
    ),
    "TransformerLayer": (
        """hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups=None, layernorm_epsilon=1e-5,
    hidden_dropout=0.1, attention_dropout=0.1, init_method=None, output_layer_init_method=None, layer_number=None,
    kv_channels=None, self_attn_mask_type="causal", window_size=None, bottom_right_diagonal=None,
    enc_dec_attn_mask_type="no_mask", enc_dec_bottom_right_diagonal=None, enc_dec_window_size=None, tp_group=None,
    tp_size=1, params_dtype=None, get_rng_state_tracker=None, fuse_wgrad_accumulation=False, seq_length=None,
    micro_batch_size=None, sequence_parallel=False, apply_residual_connection_post_layernorm=False,
    output_layernorm=False, parallel_attention_mlp=False, layer_type="encoder", drop_path_rate=0.0,
    set_parallel_mode=False, fuse_qkv_params=False, rotary_pos_interleaved=False, zero_centered_gamma=False,
    qkv_weight_interleaved=True, ub_tp_comm_overlap=False, ub_overlap_ag=True, ub_overlap_rs=True,
    ub_overlap_rs_dgrad=False, ub_bulk_dgrad=True, ub_bulk_wgrad=True, bias=True, activation="gelu",
    activation_params=None, normalization="LayerNorm", device="cuda", attn_input_format="sbhd", name=None,
    qk_norm_type=None, qk_norm_eps=1e-6, qk_norm_before_rope=False, softmax_type="vanilla\"""",
        f"""hidden_states, attention_mask=None, self_attn_mask_type=None, window_size=None, bottom_right_diagonal=None,
    encoder_output=None, enc_dec_attn_mask=None, enc_dec_attn_mask_type=None, enc_dec_window_size=None,
    enc_dec_bottom_right_diagonal=None, is_first_microbatch=None, {_REST_OF_ATTENTION}""",
    ),
    "RotaryPositionEmbedding": (
        """dim, rotary_percent=1.0, seq_len_interpolation_factor=None, pretrained_max_position_embeddings=None,
    rotary_base=10000.0, interleaved=False""",
        "max_seq_len, offset=0",
    ),
    "InferenceParams": (
        """max_batch_size, max_sequence_length, num_heads_kv=None, head_dim_k=None, dtype=None, head_dim_v=None,
    is_paged=False, total_num_pages=None, page_size=None, max_ctx_len=None, qkv_format="bshd",
    custom_cache_manager=None""",
        "",
    ),
}

# Methods that every module with parameters has.
BASE_METHODS = """set_tensor_parallel_group reset_parameters get_extra_state set_extra_state need_backward_dw
    backward_dw register_wgrad_accumulation_and_reduce_hooks adjust_amax_history_length is_fsdp2 output_quantizer_role
    grad_input_quantizer_role"""
