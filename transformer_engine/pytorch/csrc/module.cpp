// The extension module: one line for each name that registers, by folders, and the few facts about the build that
// Python reads.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <transformer_engine/transformer_engine.h>

#include <string>
#include <vector>

#include "core/common.h"

// The names that a folder's files register, a list a folder, from the lowest floor up (tests/policy/test_includes.py).
// register_<name> is made by TE_OP_REGISTRATION (core/op_registration.h), or written where there are no ops.
#define TE_CORE(X)    \
  X(comm_buffer_pool) \
  X(kept_objects)     \
  X(own_storage)      \
  X(probe)            \
  X(random_state)     \
  X(parameters)       \
  X(threads)          \
  X(tune)

#define TE_AUTOGRAD(X) \
  X(backward_watch)    \
  X(accumulators)

#define TE_QUANTIZE(X) \
  X(quantize)          \
  X(grouped_quantize)  \
  X(list_quantize)     \
  X(quantizer)         \
  X(quantize_range)    \
  X(range_casts)

#define TE_DISTRIBUTED(X) \
  X(agreement)            \
  X(fingerprints)         \
  X(group)                \
  X(peer)

#define TE_GEMM(X)    \
  X(gemm)             \
  X(gemm_fp8)         \
  X(grouped_gemm)     \
  X(grouped_gemm_fp8) \
  X(gemm_path)        \
  X(linear_core)      \
  X(product)

#define TE_SAVED_HOOKS(X) \
  X(saved_marks)          \
  X(saved_python)         \
  X(saved_rows)

#define TE_WGRAD(X) \
  X(ready_counts)   \
  X(grad_gate)      \
  X(wgrad_task)     \
  X(main_grad)

#define TE_STASH(X) \
  X(stash_segments) \
  X(stash_streams)  \
  X(stash_handle)   \
  X(stash)          \
  X(stash_tensors)  \
  X(stash_schedule) \
  X(stash_step)     \
  X(stash_api)

#define TE_OPS(X)         \
  X(activation)           \
  X(activation_quantize)  \
  X(activation_scaled)    \
  X(attention)            \
  X(comm)                 \
  X(cross_entropy)        \
  X(linear_cross_entropy) \
  X(noop_cat)             \
  X(rope)                 \
  X(router)               \
  X(router_loss)          \
  X(router_rows)          \
  X(normalization)        \
  X(offload)              \
  X(optimizer)            \
  X(optimizer_step)       \
  X(permute)              \
  X(normalization_quantize)

#define TE_LAYER(X) \
  X(tp_comm_group)  \
  X(grouped_linear) \
  X(grouped_mlp)    \
  X(layernorm_mlp)  \
  X(linear)

namespace te_torch {
#define TE_DECLARE(name) void register_##name(pybind11::module_& m);
#define TE_REGISTER(name) register_##name(m);
#define TE_FOLDER(folder, names) \
  names(TE_DECLARE) static void register_folder_##folder(pybind11::module_& m) { names(TE_REGISTER) }

TE_FOLDER(core, TE_CORE)
TE_FOLDER(autograd, TE_AUTOGRAD)
TE_FOLDER(quantize, TE_QUANTIZE)
TE_FOLDER(distributed, TE_DISTRIBUTED)
TE_FOLDER(gemm, TE_GEMM)
TE_FOLDER(saved_hooks, TE_SAVED_HOOKS)
TE_FOLDER(wgrad, TE_WGRAD)
TE_FOLDER(stash, TE_STASH)
TE_FOLDER(ops, TE_OPS)
TE_FOLDER(layer, TE_LAYER)
}  // namespace te_torch

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  te_torch::register_folder_core(m);
  te_torch::register_folder_autograd(m);
  te_torch::register_folder_quantize(m);
  te_torch::register_folder_distributed(m);
  te_torch::register_folder_gemm(m);
  te_torch::register_folder_saved_hooks(m);
  te_torch::register_folder_wgrad(m);
  te_torch::register_folder_stash(m);
  te_torch::register_folder_ops(m);
  te_torch::register_folder_layer(m);

  m.attr("torch_version") = TE_TORCH_VERSION;
  m.attr("version") = te_version();
  m.attr("built_with_cuda") = te_built_with_cuda() != 0;
  m.def(
      "probe_library",
      [](const std::string& name) {
        return std::string(te_probe_library(name.c_str()) == TE_SUCCESS ? "" : te_last_error());
      },
      "'' when the library (cublasLt, nccl, cuda) opens here, else why not.");
  m.def(
      "captured_events",
      [](int64_t stream) {
        const auto on = reinterpret_cast<te_stream>(stream);
        size_t count = 0;
        te_torch::check(te_captured_events(on, nullptr, 0, &count));
        std::vector<void*> events(count);
        te_torch::check(te_captured_events(on, events.data(), count, &count));
        std::vector<int64_t> handles;
        for (void* event : events) handles.push_back(reinterpret_cast<int64_t>(event));
        return handles;
      },
      "The events (cudaEvent_t) that the capture under way on a stream (cudaStream_t) records for work outside of it.");
}
