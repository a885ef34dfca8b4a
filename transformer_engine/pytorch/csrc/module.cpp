// The extension module: one register line per room, and the few facts about the build that Python asks for.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <transformer_engine/transformer_engine.h>

#include <string>
#include <vector>

#include "common.h"

namespace te_torch {
void register_activation(pybind11::module_& m);
void register_activation_quantized(pybind11::module_& m);
void register_agreement(pybind11::module_& m);
void register_backward_watch(pybind11::module_& m);
void register_comm(pybind11::module_& m);
void register_cross_entropy(pybind11::module_& m);
void register_exchange_group(pybind11::module_& m);
void register_gemm(pybind11::module_& m);
void register_gemm_fp8(pybind11::module_& m);
void register_gemm_grouped(pybind11::module_& m);
void register_gemm_path(pybind11::module_& m);
void register_grouped_linear(pybind11::module_& m);
void register_layernorm_mlp(pybind11::module_& m);
void register_linear(pybind11::module_& m);
void register_linear_cross_entropy(pybind11::module_& m);
void register_noop_cat(pybind11::module_& m);
void register_recorder(pybind11::module_& m);
void register_product(pybind11::module_& m);
void register_saved(pybind11::module_& m);
void register_weight_product(pybind11::module_& m);
void register_main_grad(pybind11::module_& m);
void register_rope(pybind11::module_& m);
void register_normalization(pybind11::module_& m);
void register_quantize(pybind11::module_& m);
void register_quantize_range(pybind11::module_& m);
void register_offload(pybind11::module_& m);
void register_optimizer(pybind11::module_& m);
void register_stash(pybind11::module_& m);
void register_optimizer_step(pybind11::module_& m);
void register_normalization_quantized(pybind11::module_& m);
void register_tune(pybind11::module_& m);
void register_accumulators(pybind11::module_& m);
}  // namespace te_torch

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  te_torch::register_activation(m);
  te_torch::register_activation_quantized(m);
  te_torch::register_agreement(m);
  te_torch::register_backward_watch(m);
  te_torch::register_comm(m);
  te_torch::register_cross_entropy(m);
  te_torch::register_exchange_group(m);
  te_torch::register_gemm(m);
  te_torch::register_gemm_fp8(m);
  te_torch::register_gemm_grouped(m);
  te_torch::register_gemm_path(m);
  te_torch::register_grouped_linear(m);
  te_torch::register_layernorm_mlp(m);
  te_torch::register_linear(m);
  te_torch::register_linear_cross_entropy(m);
  te_torch::register_noop_cat(m);
  te_torch::register_recorder(m);
  te_torch::register_product(m);
  te_torch::register_saved(m);
  te_torch::register_weight_product(m);
  te_torch::register_main_grad(m);
  te_torch::register_rope(m);
  te_torch::register_normalization(m);
  te_torch::register_quantize(m);
  te_torch::register_quantize_range(m);
  te_torch::register_offload(m);
  te_torch::register_optimizer(m);
  te_torch::register_stash(m);
  te_torch::register_optimizer_step(m);
  te_torch::register_normalization_quantized(m);
  te_torch::register_tune(m);
  te_torch::register_accumulators(m);

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
