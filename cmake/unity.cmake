# TE_UNITY compiles files in groups, so that PyTorch's headers are parsed once a group instead of once a file. Wheels are
# built with it; without it, a change compiles one file.
option(TE_UNITY "compile the extension's files in groups" OFF)
if(NOT TE_UNITY)
  return()
endif()

set_target_properties(_C PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
# A group a line, of files that belong together; a file that no line names is compiled by itself.
foreach(group IN ITEMS
    "ops/activation;ops/activation_quantize;ops/activation_scaled"
    "ops/normalization;ops/normalization_quantize"
    "ops/cross_entropy;ops/linear_cross_entropy"
    "ops/permute;ops/permute_kernels"
    "ops/router;ops/router_loss;ops/router_rows"
    "ops/rope;ops/rope_kernels;ops/noop_cat"
    "ops/attention;ops/attention_chunked;ops/attention_flash;ops/attention_kernels;ops/attention_passes;ops/attention_rows"
    "gemm/gemm;gemm/gemm_path;core/tune;core/cpu_gemm;gemm/linear_core"
    "gemm/gemm_list;gemm/gemm_list_fp8;quantize/grouped_quantize;layer/gemm_policy_grouped;layer/grouping;layer/grouped_call"
    "gemm/gemm_fp8;gemm/grouped_gemm;gemm/grouped_gemm_fp8;core/grouped_operands"
    "quantize/quantize;quantize/list_quantize;quantize/quantize_range;quantize/quantizer"
    "stash/stash;stash/stash_calls;stash/stash_streams;stash/stash_pool;stash/stash_segments;stash/stash_tensors"
    "stash/stash_handle;stash/stash_schedule;stash/stash_step"
    "stash/stash_api;saved_hooks/saved_python"
    "autograd/saved;autograd/saved_leaves;core/rows_view"
    "saved_hooks/saved_marks;saved_hooks/saved_rows;saved_hooks/saved_tensor_hooks"
    "ops/optimizer;ops/optimizer_adam;ops/optimizer_step;core/parameters;core/kept_objects"
    "wgrad/main_grad;wgrad/main_grad_module;wgrad/ready_counts;wgrad/grad_gate;wgrad/grad_accumulator;wgrad/wgrad_task;gemm/product"
    "autograd/accumulators;autograd/backward_watch;core/random_state;core/threads;core/own_storage;core/probe"
    "ops/comm;distributed/group;distributed/collective_call;distributed/agreement;distributed/fingerprints;distributed/fingerprint_ring;core/comm_buffer_pool"
    "distributed/peer;core/run_streams;layer/tp_comm_peer;layer/tp_comm_group"
    "ops/offload;module;core/common"
    "layer/forward;layer/backward;layer/layer_gemm;layer/prepare_operand;layer/save_rules;layer/named_arguments"
    "layer/gathered_wgrad;layer/gemm_policy;layer/gemm_policy_device;layer/prologue_plain;layer/prologue_rows;layer/prologue_norm;layer/prologue_activation;layer/epilogue_bias;layer/epilogue_row_sum")
  list(GET group 0 name)
  list(TRANSFORM group APPEND .cpp)
  set_source_files_properties(${group} PROPERTIES UNITY_GROUP ${name})
endforeach()
