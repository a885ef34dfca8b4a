// See gemm_path.h. set_cpu_products(), which the decision reads, is for tests, and for whoever wants a CPU's bits not
// to depend on the size of the batch and has the time.
#include "gemm_path.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <string>

namespace te_torch {

namespace {

std::atomic<bool> by_loop{false};  // the whole process's: a backward runs in threads of its own

// The bias that an FP8 product's epilogue adds.
bool takes_bias(at::ScalarType bias, at::ScalarType out) {
  return bias == (out == at::kHalf ? at::kHalf : at::kBFloat16);
}

GemmPath by_cublaslt(const GemmCall& c, bool bias_apart) {
  const auto apart = [](const char* name, const char* why) { return GemmPath{GemmBy::kCublasLt, true, name, why}; };
  if (c.operands == at::kByte) {
    if (c.into && !c.wide) {
      return apart("cuBLASLt, brought into the output on its own",
                   "FP8 products write outputs whose sizes and address are multiples of 16");
    }
    if (bias_apart) {
      return apart("cuBLASLt, the bias on its own",
                   "FP8 products add a bias of bfloat16, of float16 beside a float16 output");
    }
  } else if (c.epilogue == TE_GEMM_BGRAD && (c.empty || c.out != c.operands)) {
    return apart("cuBLASLt, the bias gradient on its own",
                 "cuBLASLt sums none beside a float32 output of 16-bit operands, nor where nothing is multiplied");
  }
  return {GemmBy::kCublasLt, false, nullptr, nullptr};
}

}  // namespace

bool cpu_products_by_loop() { return by_loop.load(std::memory_order_relaxed); }

GemmPath gemm_path(const GemmCall& c) {
  const bool fp8 = c.operands == at::kByte;
  const bool loop = c.on_cpu && cpu_products_by_loop();
  const bool libtorch = c.on_cpu && !loop;
  if (libtorch && !fp8) return {GemmBy::kLibTorch, true, "LibTorch's CPU product", ""};
  if (c.empty && (fp8 || c.into)) return {GemmBy::kNobody, true, "nothing to multiply", ""};
  if (libtorch) return {GemmBy::kLibTorch, true, "LibTorch's CPU product of widened operands", ""};
  // The engine's contract for FP8 operands is one for both of its sides.
  const bool bias_apart = fp8 && c.epilogue == TE_GEMM_BIAS && !takes_bias(c.bias, c.out);
  if (!loop) return by_cublaslt(c, bias_apart);
  const bool apart = bias_apart || (fp8 && c.into && !c.wide);
  return {GemmBy::kCpuLoop, apart, "the plain CPU loop", "set_cpu_products('loop') asks for it"};
}

void register_gemm_path(pybind11::module_& m) {
  namespace py = pybind11;
  m.def(
      "set_cpu_products", torch::wrap_pybind_function([](const std::string& by) {
        TORCH_CHECK_VALUE(by == "libtorch" || by == "loop", "set_cpu_products: argument 'by' is '", by,
                          "', wanted 'libtorch' or 'loop'.");
        return std::string(by_loop.exchange(by == "loop") ? "loop" : "libtorch");
      }),
      py::arg("by"),
      "Who computes the CPU's products in the whole process from now on, FP8 ones too, forward and backward:\n"
      "'libtorch', as ever, or 'loop', the engine's plain loop, slow, in which an element has the same bits whichever\n"
      "rows are computed beside it and on however many threads. Returns who did so far. For tests, and for bits on a\n"
      "CPU that do not depend on the size of the batch. What is no product (attention, sums of bias gradients over "
      "the\n"
      "batch) stays as it is.");
  m.def(
      "gemm_path",
      [](const at::Device& device, at::ScalarType operands, at::ScalarType out, bool empty, bool bias_gradient,
         std::optional<at::ScalarType> bias, bool into, bool wide) {
        const te_gemm_epilogue epilogue = bias_gradient      ? TE_GEMM_BGRAD
                                          : bias.has_value() ? TE_GEMM_BIAS
                                                             : TE_GEMM_NONE;
        const GemmPath path =
            gemm_path({device.is_cpu(), operands, out, empty, epilogue, bias.value_or(at::kFloat), into, wide});
        const char* by[] = {"nobody", "LibTorch", "the CPU loop", "cuBLASLt"};
        return py::make_tuple(by[size_t(path.by)], path.apart, path.name, path.why_not_faster);
      },
      py::arg("device"), py::arg("operands"), py::arg("out"), py::kw_only(), py::arg("empty") = false,
      py::arg("bias_gradient") = false, py::arg("bias") = py::none(), py::arg("into") = false, py::arg("wide") = true,
      "The decision about a product, of which nothing but this is needed: (who, whether what goes with the product\n"
      "is done beside it, the path in words or None where who computes says it, why not faster).");
}

}  // namespace te_torch
