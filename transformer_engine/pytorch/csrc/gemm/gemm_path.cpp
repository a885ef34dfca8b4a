// See gemm_path.h. set_cpu_products(), which the decision reads, is for tests, and for users who need bits on a CPU
// that do not depend on the size of the batch, and have the time.
#include "gemm/gemm_path.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string>

#include "core/common.h"

namespace te_torch {

namespace {

// For the whole process, since a backward runs in other threads.
std::atomic<bool> by_loop{false};

enum class Lists : uint8_t { kFastest, kEach, kGrouped, kAlternating };
constexpr std::array<std::string_view, 4> kLists = {"fastest", "each", "grouped", "alternating"};
std::atomic<Lists> lists{Lists::kFastest};

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
  if (c.empty && (fp8 || c.into)) return {GemmBy::kZeros, true, "nothing to multiply", ""};
  if (libtorch) return {GemmBy::kLibTorch, true, "LibTorch's CPU product of widened operands", ""};
  // The engine's contract for FP8 operands is one for both of its sides.
  const bool bias_apart = fp8 && c.epilogue == TE_GEMM_BIAS && !takes_bias(c.bias, c.out);
  if (!loop) return by_cublaslt(c, bias_apart);
  const bool apart = bias_apart || (fp8 && c.into && !c.wide);
  return {GemmBy::kCpuLoop, apart, "the plain CPU loop", "set_cpu_products('loop') selects it"};
}

const char* list_refuses(const GemmList& list) {
  const Lists wanted = lists.load(std::memory_order_relaxed);
  if (wanted == Lists::kEach) return "set_list_products('each') selects it";
  if (!list.readable)
    return "the grouped kernels take dense rows on 16 bytes, of 16 bits or FP8, in blocks with scales of powers of 2";
  te_device_properties gpu{};
  const bool cpu = list.device == TE_DEVICE_CPU;
  if (!cpu) check(te_get_device_properties(list.device, &gpu));
  if (!cpu && gpu.capability != 90) return "the grouped kernels need Hopper (9.0)";
  if (wanted != Lists::kFastest) return list.groups == 0 ? "no group has rows" : nullptr;
  if (cpu) return "a CPU has no grouped kernels";
  // cuBLASLt is as fast where a group's tiles are more than run at once.
  return list.groups > 1 && list.tiles < list.groups * gpu.sm_count ? nullptr
                                                                    : "each group has tiles for all of the GPU";
}

void leave_groups(const std::vector<int64_t>& counts, std::vector<uint8_t>& each) {
  if (lists.load(std::memory_order_relaxed) != Lists::kAlternating) return;
  for (size_t g = 1; g < counts.size(); g += 2) {
    if (counts[g] > 0) each[g] = 1;
  }
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
      "Selects the implementation of GEMMs on the CPU for the whole process, FP8 ones too, forward and backward:\n"
      "'libtorch', the default, or 'loop', the engine's plain loop. The loop is slow, but the bits of an element\n"
      "depend neither on other rows nor on the number of threads. Returns the previous selection. For tests, and for\n"
      "bits on a CPU that do not depend on the size of the batch. Other operations (attention, sums of bias gradients\n"
      "over the batch) do not change.");
  m.def(
      "set_list_products", torch::wrap_pybind_function([](const std::string& by) {
        const auto found = std::find(kLists.begin(), kLists.end(), by);
        TORCH_CHECK_VALUE(found != kLists.end(), "set_list_products: argument 'by' is '", by,
                          "', wanted 'fastest', 'each', 'grouped' or 'alternating'.");
        return std::string(kLists[size_t(lists.exchange(Lists(found - kLists.begin())))]);
      }),
      py::arg("by"),
      "Selects the implementation of GEMMs of groups of rows whose sizes are on the host, for the whole process:\n"
      "'fastest', the default; 'each', one GEMM for each group; 'grouped', the grouped kernel for all groups that it\n"
      "can compute, of any size; 'alternating', the same, with a GEMM for each second group. The bits are the same,\n"
      "but for those of FP8 with a scale for each group on CUDA. Returns the previous selection. For tests.");
  m.def(
      "gemm_path",
      [](const at::Device& device, at::ScalarType operands, at::ScalarType out, bool empty, bool bias_gradient,
         std::optional<at::ScalarType> bias, bool into, bool wide) {
        const te_gemm_epilogue epilogue = bias_gradient      ? TE_GEMM_BGRAD
                                          : bias.has_value() ? TE_GEMM_BIAS
                                                             : TE_GEMM_NONE;
        const GemmPath path =
            gemm_path({device.is_cpu(), operands, out, empty, epilogue, bias.value_or(at::kFloat), into, wide});
        const char* by[] = {"none", "LibTorch", "the CPU loop", "cuBLASLt"};
        return py::make_tuple(by[size_t(path.by)], path.apart, path.name, path.why_not_faster);
      },
      py::arg("device"), py::arg("operands"), py::arg("out"), py::kw_only(), py::arg("empty") = false,
      py::arg("bias_gradient") = false, py::arg("bias") = py::none(), py::arg("into") = false, py::arg("wide") = true,
      "The decision about a GEMM, from these arguments alone: (the implementation; whether LibTorch computes a bias\n"
      "or a copy apart from the GEMM; the name of the path, or None if the implementation reports it; why no faster\n"
      "path is taken).");
}

}  // namespace te_torch
