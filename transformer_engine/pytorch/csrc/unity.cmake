# Whether files are compiled several at a time: what PyTorch's headers cost a file is then paid once for a group. For
# wheels, which are built whole; a developer compiles file by file, so that a change costs one.
option(TE_UNITY "compile the extension's files in groups" OFF)
if(NOT TE_UNITY)
  return()
endif()

set_target_properties(_C PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
# A group a line, of files that belong together; a file that no line names is compiled by itself.
foreach(group IN ITEMS
    "activation;activation_quantize"
    "normalization;normalization_quantize"
    "cross_entropy;linear_cross_entropy"
    "rope;rope_kernels;noop_cat"
    "gemm;gemm_path;tune;cpu_gemm;linear_core"
    "gemm_list;gemm_list_fp8;quantize_grouped;layer/products_grouped"
    "gemm_fp8;gemm_grouped;gemm_grouped_fp8;gemm_grouped_operands"
    "quantize;quantize_list;quantize_range;quantizer"
    "stash;stash_calls;stash_lanes;stash_pool;stash_members"
    "stash_handle;stash_schedule;stash_step"
    "stash_front;saved_python"
    "saved;saved_leaves;saved_marks;saved_rows;saved_door;rows_view"
    "optimizer;optimizer_adam;optimizer_step;parameters"
    "main_grad;main_grad_module;weight_grad;weight_product;product"
    "accumulators;backward_watch;random_state;threads;own_storage;probe"
    "comm;group;agreement;fingerprints;fingerprint_ring;lease"
    "peer;run_streams;layer/exchange_peer;layer/exchange_group"
    "offload;module;common"
    "layer/forward;layer/backward;layer/gathered_product;layer/products;layer/products_device;layer/source_plain;layer/source_norm;layer/source_activation")
  list(GET group 0 name)
  list(TRANSFORM group APPEND .cpp)
  set_source_files_properties(${group} PROPERTIES UNITY_GROUP ${name})
endforeach()
