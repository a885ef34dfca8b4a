// The extension module: one register line per room, and the few facts about the build that Python asks for.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <transformer_engine/transformer_engine.h>

#include <string>
#include <vector>

#include "common.h"

// One line for each file that registers: register_<name> is made by TE_FACES (faces.h), or written where there are no
// ops.
#define TE_ROOMS(X)         \
  X(activation)             \
  X(activation_quantize)    \
  X(agreement)              \
  X(backward_watch)         \
  X(comm)                   \
  X(cross_entropy)          \
  X(exchange_group)         \
  X(fingerprints)           \
  X(gemm)                   \
  X(gemm_fp8)               \
  X(gemm_grouped)           \
  X(gemm_grouped_fp8)       \
  X(gemm_path)              \
  X(group)                  \
  X(grouped_linear)         \
  X(layernorm_mlp)          \
  X(lease)                  \
  X(linear)                 \
  X(linear_core)            \
  X(linear_cross_entropy)   \
  X(noop_cat)               \
  X(own_storage)            \
  X(peer)                   \
  X(probe)                  \
  X(product)                \
  X(saved_marks)            \
  X(saved_python)           \
  X(saved_rows)             \
  X(weight_product)         \
  X(main_grad)              \
  X(rope)                   \
  X(normalization)          \
  X(quantize)               \
  X(quantize_grouped)       \
  X(quantize_list)          \
  X(quantizer)              \
  X(quantize_range)         \
  X(random_state)           \
  X(offload)                \
  X(optimizer)              \
  X(parameters)             \
  X(stash_lanes)            \
  X(stash_handle)           \
  X(stash)                  \
  X(stash_members)          \
  X(stash_schedule)         \
  X(stash_step)             \
  X(stash_front)            \
  X(optimizer_step)         \
  X(normalization_quantize) \
  X(threads)                \
  X(tune)                   \
  X(accumulators)

namespace te_torch {
#define TE_DECLARE(room) void register_##room(pybind11::module_& m);
TE_ROOMS(TE_DECLARE)
}  // namespace te_torch

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
#define TE_REGISTER(room) te_torch::register_##room(m);
  TE_ROOMS(TE_REGISTER)

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
