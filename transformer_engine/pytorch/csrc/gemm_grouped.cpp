// See gemm_grouped.h. The CPU's are linear_core's, group by group; CUDA's are one launch each.
#include "gemm_grouped.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <transformer_engine/grouped_gemm.h>
#include <map>
#include <mutex>

#include "faces.h"
#include "gemm.h"
#include "linear_core.h"

namespace te_torch {

namespace {

constexpr const char* kOp = "grouped_linear";

void check_matrix(const Tensor& t, const char* argument) {
  check_float(t, kOp, argument);
  TORCH_CHECK_VALUE(t.dim() == 2, kOp, ": argument '", argument, "' has shape ", t.sym_sizes(), ", wanted a matrix.");
}

void check_offsets(const Tensor& offsets, const Tensor& rows, size_t groups) {
  TORCH_CHECK_VALUE(offsets.scalar_type() == at::kInt && offsets.dim() == 1 && offsets.is_contiguous() &&
                        offsets.sym_size(0) == int64_t(groups) + 1 && offsets.device() == rows.device(),
                    kOp, ": argument 'offsets' is ", offsets.scalar_type(), " ", offsets.sym_sizes(), " on ",
                    offsets.device(), ", wanted Int [", groups + 1, "] on ", rows.device(), ".");
}

// width: of the weights' dimension that is reduced. argument: what `rows` is called.
void check_weights(const Tensor& rows, const char* argument, at::TensorList weights, int64_t width,
                   const Tensor& offsets) {
  check_matrix(rows, argument);
  TORCH_CHECK_VALUE(!weights.empty(), kOp, ": argument 'weights' is empty, wanted one for each group.");
  check_offsets(offsets, rows, weights.size());
  for (const Tensor& weight : weights) {
    check_same(weight, rows, kOp, "weight");
    TORCH_CHECK_VALUE(weight.dim() == 2 && weight.sym_sizes() == weights[0].sym_sizes(), kOp,
                      ": argument 'weight' has shape ", weight.sym_sizes(), ", wanted that of the first, ",
                      weights[0].sym_sizes(), ".");
  }
  TORCH_CHECK_VALUE(rows.sym_size(1) == weights[0].sym_size(width), kOp, ": argument '", argument, "' has shape ",
                    rows.sym_sizes(), ", wanted a last dimension of ", weights[0].sym_size(width), ".");
}

void check_biases(const Tensor& x, at::TensorList weights, at::TensorList biases) {
  TORCH_CHECK_VALUE(biases.empty() || biases.size() == weights.size(), kOp, ": argument 'biases' has ", biases.size(),
                    " tensors, wanted none, or ", weights.size(), ".");
  for (const Tensor& bias : biases) {
    check_same(bias, x, kOp, "bias");
    TORCH_CHECK_VALUE(bias.dim() == 1 && bias.sym_size(0) == weights[0].sym_size(0), kOp,
                      ": argument 'bias' has shape ", bias.sym_sizes(), ", wanted [", weights[0].sym_size(0), "].");
  }
}

void check_gradient(const Tensor& dy, const Tensor& x, const Tensor& offsets) {
  check_matrix(dy, "dy");
  check_matrix(x, "x");
  check_same(x, dy, kOp, "x");
  TORCH_CHECK_VALUE(dy.sym_size(0) == x.sym_size(0), kOp, ": argument 'dy' has ", dy.sym_size(0), " rows, wanted ",
                    x.sym_size(0), ", x's.");
  TORCH_CHECK_VALUE(offsets.dim() == 1 && offsets.sym_size(0) > 1, kOp, ": argument 'offsets' has shape ",
                    offsets.sym_sizes(), ", wanted [groups + 1].");
  check_offsets(offsets, x, size_t(offsets.size(0) - 1));
}

void check_targets(const Tensor& dy, const Tensor& x, at::TensorList outs, at::ArrayRef<int64_t> how, size_t groups) {
  size_t wanted = 0;
  for (const int64_t one : how) wanted += one >= 0 ? 1 : 0;
  TORCH_CHECK_VALUE(how.size() == groups && outs.size() == wanted, kOp, ": arguments 'outs' and 'how' have ",
                    outs.size(), " and ", how.size(), " entries, wanted ", wanted, " and ", groups, ".");
  for (const Tensor& out : outs) {
    TORCH_CHECK_VALUE(out.dim() == 2 && out.sym_size(0) == dy.sym_size(1) && out.sym_size(1) == x.sym_size(1) &&
                          out.is_contiguous() && out.device() == x.device(),
                      kOp, ": argument 'outs' has a tensor of shape ", out.sym_sizes(), " on ", out.device(),
                      ", wanted contiguous [", dy.sym_size(1), ", ", x.sym_size(1), "] on ", x.device(), ".");
  }
}

// ---- the CPU ----

struct HostOffsets {
  const int32_t* at;
  size_t groups;

  explicit HostOffsets(const Tensor& offsets)
      : at(offsets.const_data_ptr<int32_t>()), groups(size_t(offsets.numel() - 1)) {}
  Tensor rows(const Tensor& t, size_t g) const { return t.narrow(0, at[g], at[g + 1] - at[g]); }
};

// ---- CUDA: operands as the kernels read them ----

constexpr int64_t kAlignment = 16;  // bytes, of addresses and of pitches

bool aligned(const Tensor& t) {
  return t.stride(1) == 1 && t.stride(0) >= t.size(1) && (t.stride(0) * t.element_size()) % kAlignment == 0 &&
         reinterpret_cast<uintptr_t>(t.data_ptr()) % kAlignment == 0 && !t.is_neg();
}

// Tensors for the length of one call, those that a kernel cannot read as copies.
class Operands {
 public:
  te_tensor add(const Tensor& t, const char* argument) {
    check_memory(t, kOp, argument);
    Tensor ready = t;
    if (!aligned(t) && t.numel() > 0) {
      const int64_t step = kAlignment / int64_t(t.element_size());
      ready = at::empty({t.size(0), (t.size(1) + step - 1) / step * step}, t.options()).narrow(1, 0, t.size(1));
      ready.copy_(t);
      copied_ += ready.nbytes();
    }
    held_.push_back(ready);
    return {ready.data_ptr(),
            ready.size(0),
            ready.size(1),
            std::max<int64_t>(ready.stride(0), ready.size(1)),
            dtype_of(ready, kOp, argument),
            int32_t(ready.get_device())};
  }

  // Behind the launch, which says what it is; of copies, over that.
  void note() const {
    if (copied_ == 0) return;
    thread_local std::string why;  // the note is read when this is gone
    why = "copies " + std::to_string(copied_) + " bytes: it reads addresses and row pitches that are multiples of 16";
    te_note_path("grouped kernel on copies", why.c_str());
  }

 private:
  std::vector<Tensor> held_;
  size_t copied_ = 0;
};

void launch(const te_grouped_gemm_problem& problem, const Operands& operands, const Tensor& like) {
  check(te_grouped_gemm(&problem, current_stream(like)));
  operands.note();
}

// FPROP and DGRAD.
void rows_by_kernel(te_grouped_product product, const Tensor& rows, at::TensorList weights, at::TensorList biases,
                    const Tensor& offsets, const Tensor& out, bool zero_tail) {
  Operands operands;
  std::vector<te_tensor> of_weights, of_biases;
  te_grouped_gemm_problem problem{};
  problem.product = product;
  problem.groups = int32_t(weights.size());
  problem.offsets = offsets.const_data_ptr<int32_t>();
  problem.rows = operands.add(rows, product == TE_GROUPED_FPROP ? "x" : "dy");
  problem.depth_rows = absent();
  for (const Tensor& weight : weights) of_weights.push_back(operands.add(weight, "weight"));
  std::vector<Tensor> dense;
  for (const Tensor& bias : biases) {
    dense.push_back(bias.contiguous());
    of_biases.push_back(view_2d(dense.back(), kOp, "bias"));
  }
  problem.weights = of_weights.data();
  problem.biases = biases.empty() ? nullptr : of_biases.data();
  problem.result = view_2d(out, kOp, "out");
  problem.zero_tail = zero_tail ? 1 : 0;
  launch(problem, operands, rows);
}

// results: one for each group; undefined ones are not wanted.
void weights_by_kernel(const Tensor& dy, const Tensor& x, const Tensor& offsets, const std::vector<Tensor>& results,
                       const std::vector<uint8_t>& accumulate) {
  Operands operands;
  te_grouped_gemm_problem problem{};
  problem.product = TE_GROUPED_WGRAD;
  problem.groups = int32_t(results.size());
  problem.offsets = offsets.const_data_ptr<int32_t>();
  problem.rows = operands.add(dy, "dy");
  problem.depth_rows = operands.add(x, "x");
  problem.result = absent();
  std::vector<te_tensor> of_results;
  for (const Tensor& result : results) {
    of_results.push_back(result.defined() ? view_2d(result, kOp, "outs") : absent());
  }
  problem.results = of_results.data();
  problem.accumulate = accumulate.empty() ? nullptr : accumulate.data();
  launch(problem, operands, x);
}

// dy^T times a column of ones: the sums come from the product's one accumulator an element, in the order of the rows.
std::vector<Tensor> sums_by_kernel(const Tensor& dy, const Tensor& offsets) {
  const int64_t width = kAlignment / int64_t(dy.element_size());
  const Tensor ones = at::full({dy.size(0), width}, 1, dy.options()).narrow(1, 0, 1);
  std::vector<Tensor> columns, sums;
  for (int64_t g = 1; g < offsets.size(0); ++g) {
    sums.push_back(at::empty({dy.size(1)}, dy.options()));
    columns.push_back(sums.back().unsqueeze(1));
  }
  weights_by_kernel(dy, ones, offsets, columns, {});
  return sums;
}

// ---- on either ----

void fprop_into(const Tensor& x, at::TensorList weights, at::TensorList biases, const Tensor& offsets,
                const Tensor& out, bool zero_tail) {
  check_weights(x, "x", weights, 1, offsets);
  check_biases(x, weights, biases);
  const c10::NoGradGuard no_graph;
  if (!x.is_cpu()) return rows_by_kernel(TE_GROUPED_FPROP, x, weights, biases, offsets, out, zero_tail);
  const HostOffsets host(offsets);
  for (size_t g = 0; g < host.groups; ++g) {
    const OptionalTensor bias = biases.empty() ? OptionalTensor() : OptionalTensor(biases[g]);
    linear_fwd_into(host.rows(x, g), weights[g], bias, host.rows(out, g));
  }
  if (zero_tail) out.narrow(0, host.at[host.groups], out.size(0) - host.at[host.groups]).zero_();
}

void dgrad_into(const Tensor& dy, at::TensorList weights, const Tensor& offsets, const Tensor& out, bool zero_tail) {
  check_weights(dy, "dy", weights, 0, offsets);
  const c10::NoGradGuard no_graph;
  if (!dy.is_cpu()) return rows_by_kernel(TE_GROUPED_DGRAD, dy, weights, {}, offsets, out, zero_tail);
  const HostOffsets host(offsets);
  for (size_t g = 0; g < host.groups; ++g) linear_dgrad_into(host.rows(dy, g), weights[g], host.rows(out, g));
  if (zero_tail) out.narrow(0, host.at[host.groups], out.size(0) - host.at[host.groups]).zero_();
}

Tensor grouped_offsets_meta(const Tensor& splits, const Tensor& x) {
  return at::empty_symint({splits.sym_size(0) + 1}, splits.options().dtype(at::kInt));
}
Tensor grouped_fprop_meta(const Tensor& x, at::TensorList weights, at::TensorList biases, const Tensor& offsets) {
  check_weights(x, "x", weights, 1, offsets);
  check_biases(x, weights, biases);
  return x.new_empty_symint({x.sym_size(0), weights[0].sym_size(0)});
}
Tensor grouped_dgrad_meta(const Tensor& dy, at::TensorList weights, const Tensor& offsets) {
  check_weights(dy, "dy", weights, 0, offsets);
  return dy.new_empty_symint({dy.sym_size(0), weights[0].sym_size(1)});
}
std::vector<Tensor> grouped_wgrad_meta(const Tensor& dy, const Tensor& x, const Tensor& offsets) {
  check_gradient(dy, x, offsets);
  std::vector<Tensor> all;
  for (int64_t g = 1; g < offsets.size(0); ++g) all.push_back(x.new_empty_symint({dy.sym_size(1), x.sym_size(1)}));
  return all;
}
std::vector<Tensor> grouped_sums_meta(const Tensor& dy, const Tensor& offsets) {
  check_gradient(dy, dy, offsets);
  std::vector<Tensor> sums;
  for (int64_t g = 1; g < offsets.size(0); ++g) sums.push_back(dy.new_empty_symint({dy.sym_size(1)}));
  return sums;
}
void grouped_wgrad_accumulate_meta(const Tensor& dy, const Tensor& x, const Tensor& offsets, at::TensorList outs,
                                   at::ArrayRef<int64_t> how) {
  check_gradient(dy, x, offsets);
  check_targets(dy, x, outs, how, size_t(offsets.size(0) - 1));
}

}  // namespace

Tensor split_counters(const at::Device& asked) {
  const at::Device device = indexed(asked);
  static auto* mutex = new std::mutex;
  static auto* all = new std::map<std::pair<at::DeviceType, int>, Tensor>;
  const std::lock_guard<std::mutex> lock(*mutex);
  Tensor& counters = (*all)[{device.type(), device.index()}];
  if (!counters.defined()) {
    const c10::InferenceMode normal(false);  // a tensor made there would be an inference tensor for good
    counters = at::zeros({2}, at::TensorOptions(device).dtype(at::kUInt32));
  }
  return counters;
}

Tensor grouped_offsets(const Tensor& splits, const Tensor& x) {
  const bool wide = splits.scalar_type() == at::kLong;
  TORCH_CHECK_VALUE((wide || splits.scalar_type() == at::kInt) && splits.dim() == 1 && splits.numel() > 0, kOp,
                    ": argument 'm_splits' is ", splits.scalar_type(), " ", splits.sizes(),
                    ", wanted Int or Long, one for each group.");
  TORCH_CHECK_VALUE(splits.device() == x.device(), kOp, ": argument 'm_splits' is on ", splits.device(), ", wanted ",
                    x.device(), ".");
  const int64_t rows = x.dim() < 2 ? 1 : x.size(-1) == 0 ? x.flatten(0, -2).size(0) : x.numel() / x.size(-1);
  const Tensor dense = splits.contiguous(), offsets = at::empty({splits.numel() + 1}, splits.options().dtype(at::kInt));
  const Tensor counters = split_counters(x.device());
  check(te_grouped_offsets(dense.const_data_ptr(), wide ? 1 : 0, int32_t(dense.numel()), rows,
                           x.is_cpu() ? TE_DEVICE_CPU : int32_t(x.get_device()), offsets.mutable_data_ptr<int32_t>(),
                           static_cast<uint32_t*>(counters.mutable_data_ptr()), current_stream(x)));
  return offsets;
}

Tensor grouped_fprop(const Tensor& x, at::TensorList weights, at::TensorList biases, const Tensor& offsets) {
  const Tensor y = at::empty({x.size(0), weights.empty() ? 0 : weights[0].size(0)}, x.options());
  fprop_into(x, weights, biases, offsets, y, true);
  return y;
}

Tensor grouped_dgrad(const Tensor& dy, at::TensorList weights, const Tensor& offsets) {
  const Tensor dx = at::empty({dy.size(0), weights.empty() ? 0 : weights[0].size(1)}, dy.options());
  dgrad_into(dy, weights, offsets, dx, true);
  return dx;
}

void grouped_fprop_into(const Tensor& x, at::TensorList weights, at::TensorList biases, const Tensor& offsets,
                        const Tensor& out) {
  fprop_into(x, weights, biases, offsets, out, false);
}

void grouped_dgrad_into(const Tensor& dy, at::TensorList weights, const Tensor& offsets, const Tensor& out) {
  dgrad_into(dy, weights, offsets, out, false);
}

std::vector<Tensor> grouped_wgrad(const Tensor& dy, const Tensor& x, const Tensor& offsets) {
  check_gradient(dy, x, offsets);
  const c10::NoGradGuard no_graph;
  std::vector<Tensor> all;
  if (!x.is_cpu()) {
    for (int64_t g = 1; g < offsets.size(0); ++g) all.push_back(at::empty({dy.size(1), x.size(1)}, x.options()));
    weights_by_kernel(dy, x, offsets, all, {});
    return all;
  }
  const HostOffsets host(offsets);
  for (size_t g = 0; g < host.groups; ++g) {
    all.push_back(std::get<0>(linear_wgrad(host.rows(dy, g), host.rows(x, g), false)));
  }
  return all;
}

std::vector<Tensor> grouped_sums(const Tensor& dy, const Tensor& offsets) {
  check_gradient(dy, dy, offsets);
  const c10::NoGradGuard no_graph;
  if (!dy.is_cpu()) return sums_by_kernel(dy, offsets);
  const HostOffsets host(offsets);
  std::vector<Tensor> sums;
  for (size_t g = 0; g < host.groups; ++g) sums.push_back(host.rows(dy, g).sum(0));
  return sums;
}

void grouped_wgrad_accumulate(const Tensor& dy, const Tensor& x, const Tensor& offsets, at::TensorList outs,
                              at::ArrayRef<int64_t> how) {
  check_gradient(dy, x, offsets);
  check_targets(dy, x, outs, how, size_t(offsets.size(0) - 1));
  const c10::NoGradGuard no_graph;
  std::vector<Tensor> results(how.size());
  std::vector<uint8_t> accumulate;
  for (size_t g = 0, next = 0; g < how.size(); ++g) {
    if (how[g] >= 0) results[g] = outs[next++];
    accumulate.push_back(how[g] == 0 ? 1 : 0);
  }
  if (!x.is_cpu()) {
    for (size_t i = 0; i < outs.size(); ++i) {  // which one launch would write at once
      for (size_t j = 0; j < i; ++j) {
        TORCH_CHECK_NOT_IMPLEMENTED(outs[i].numel() == 0 || outs[i].const_data_ptr() != outs[j].const_data_ptr(), kOp,
                                    ": two groups with one main_grad, whose sizes the device alone knows, are not "
                                    "available in this version; pass 'm_splits' as a list of integers.");
      }
    }
    weights_by_kernel(dy, x, offsets, results, accumulate);
    for (const Tensor& out : outs) note_written(out);
    return;
  }
  const HostOffsets host(offsets);
  for (size_t g = 0; g < how.size(); ++g) {
    if (!results[g].defined()) continue;
    gemm_accumulate(host.rows(x, g), host.rows(dy, g), "NT", results[g], false, how[g] == 1);
  }
}

TE_FACES(gemm_grouped, faces) {
  faces.op("grouped_offsets(Tensor splits, Tensor x) -> Tensor")
      .kernel(grouped_offsets)
      .meta(grouped_offsets_meta)
      .python([](const Tensor& splits, const Tensor& x) {
        if (must_dispatch({&splits, &x})) return Dispatched::call<grouped_offsets>("te::grouped_offsets", splits, x);
        return grouped_offsets(splits, x);
      });
  faces.op("grouped_fprop(Tensor x, Tensor[] weights, Tensor[] biases, Tensor offsets) -> Tensor")
      .kernel(grouped_fprop)
      .meta(grouped_fprop_meta);
  faces.op("grouped_dgrad(Tensor dy, Tensor[] weights, Tensor offsets) -> Tensor")
      .kernel(grouped_dgrad)
      .meta(grouped_dgrad_meta);
  faces.op("grouped_wgrad(Tensor dy, Tensor x, Tensor offsets) -> Tensor[]")
      .kernel(grouped_wgrad)
      .meta(grouped_wgrad_meta);
  faces.op("grouped_sums(Tensor dy, Tensor offsets) -> Tensor[]").kernel(grouped_sums).meta(grouped_sums_meta);
  faces.op("grouped_wgrad_accumulate(Tensor dy, Tensor x, Tensor offsets, Tensor(a!)[] outs, int[] how) -> ()")
      .kernel(grouped_wgrad_accumulate)
      .meta(grouped_wgrad_accumulate_meta);
  faces.python("split_counters", split_counters);
}

}  // namespace te_torch
