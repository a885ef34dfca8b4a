// See wgrad_task.h.
#include "wgrad/wgrad_task.h"

#include <ATen/ops/empty_like.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "gemm/gemm.h"
#include "gemm/gemm_fp8.h"
#include "gemm/linear_core.h"

namespace te_torch {

namespace {

constexpr DispatchMode kDirect{Direct{}};  // a gradient accumulator in Python runs in eager mode alone

}  // namespace

WeightGrads MatrixWgrad::compute(const DispatchMode& dispatch, bool with_bias) const {
  return compute_at(dispatch, with_bias, {});
}

WeightGrads MatrixWgrad::compute_at(const DispatchMode& dispatch, bool with_bias, const Tensor& into) const {
  TORCH_INTERNAL_ASSERT(!into.defined() || dispatch.direct());
  if (dy.quantized() && x.quantized()) {
    const bool fast = may_be_fast(x.fp8, dy.fp8, split_);
    if (into.defined()) {
      gemm_fp8_into(x.fp8, true, dy.fp8, true, into, {}, fast);
      return {{into}, {dbias}};
    }
    const Tensor dweight = dispatch.direct() ? gemm_fp8<Direct>(x.fp8, true, dy.fp8, true, dtype_, {}, fast)
                                             : gemm_fp8<Dispatched>(x.fp8, true, dy.fp8, true, dtype_, {}, fast);
    return {{dweight}, {dbias}};
  }
  if (into.defined()) {
    const Tensor sums =
        Direct::call<linear_wgrad_into>("te::linear_wgrad", plain_of(dispatch, dy, dtype_),
                                        plain_of(dispatch, x, dtype_), with_bias && !dbias.defined(), into);
    return {{into}, {dbias.defined() ? dbias : sums}};
  }
  auto [dweight, sums] = dispatch.call<linear_wgrad>("te::linear_wgrad", plain_of(dispatch, dy, dtype_),
                                                     plain_of(dispatch, x, dtype_), with_bias && !dbias.defined());
  WeightGrads grads;
  grads.weights.push_back(std::move(dweight));
  grads.biases.push_back(dbias.defined() ? dbias : std::move(sums));
  return grads;
}

std::vector<Tensor> MatrixWgrad::accumulate(at::ArrayRef<WeightTarget> targets, bool with_bias) const {
  const Tensor& read = dy.quantized() ? dy.fp8.columnwise : dy.plain;
  const DispatchMode dispatch =
      must_dispatch({&read}) ? DispatchMode(Dispatched{}) : kDirect;  // a traced gradient accumulator's
  std::vector<Tensor> sums;
  int64_t first = 0;
  for (const WeightTarget& target : targets) {
    Tensor out = target.out;
    if (out.defined()) {
      Tensor part = accumulate_rows(dispatch, out, first, target.rows, with_bias, target.overwrite);
      if (with_bias) sums.push_back(std::move(part));
    } else if (with_bias) {
      sums.push_back(column_sums(dispatch, first, target.rows));
    }
    first += target.rows;
  }
  return sums;
}

Tensor MatrixWgrad::column_sums(const DispatchMode& dispatch, int64_t first, int64_t rows) const {
  if (dbias.defined()) return dbias.narrow(0, first, rows);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // backward_dw() runs anywhere
  const Tensor part = plain_of(dispatch, dy, dtype_).narrow(-1, first, rows);
  return part.dim() > 1 ? part.flatten(0, -2).sum(0) : part;  // of one row: itself
}

Tensor MatrixWgrad::accumulate_rows(const DispatchMode& dispatch, Tensor& out, int64_t first, int64_t rows,
                                    bool with_bias, bool overwrite) const {
  if (dy.quantized() && x.quantized()) {
    Quantized part = dy.fp8;
    part.columnwise = dy.fp8.columnwise.narrow(0, first, rows);
    if (part.scaling == TE_SCALING_BLOCK_1D && rows != dy.fp8.columnwise.size(0)) {
      // The rows' scales as a matrix of their own, whose pitch is a multiple of 4.
      const Tensor& scales = dy.fp8.columnwise_scale_inv;
      part.columnwise_scale_inv = scales.new_zeros({scales.size(0), (rows + 3) / 4 * 4});
      part.columnwise_scale_inv.narrow(1, 0, rows).copy_(scales.narrow(1, first, rows));
    }
    const bool fast = may_be_fast(x.fp8, part, split_);
    dispatch.direct() ? gemm_fp8_accumulate<Direct>(x.fp8, true, part, true, out, overwrite, fast)
                      : gemm_fp8_accumulate<Dispatched>(x.fp8, true, part, true, out, overwrite, fast);
    return with_bias ? column_sums(dispatch, first, rows) : Tensor();
  }
  const Tensor a = plain_of(dispatch, x, dtype_), all = plain_of(dispatch, dy, dtype_);
  const Tensor b = first == 0 && rows == all.size(-1) ? all : all.narrow(-1, first, rows);
  const bool sum = with_bias && !dbias.defined();
  const Tensor sums = dispatch.direct() ? gemm_accumulate(a, b, "NT", out, sum, overwrite)
                                        : Dispatched::call<gemm_accumulate>(
                                              "te::gemm_accumulate", a, b, std::string_view("NT"), out, sum, overwrite);
  if (!with_bias) return {};
  return dbias.defined() ? dbias.narrow(0, first, rows) : sums;
}

std::vector<Tensor> MatrixWgrad::reads() const {
  std::vector<Tensor> plain;
  for (const Operand* t : {&dy, &x}) {
    if (!t->quantized()) plain.push_back(t->plain);
  }
  return plain;
}

std::vector<Tensor> accumulate_any(const WgradTask& product, at::ArrayRef<WeightTarget> targets, bool with_bias) {
  const auto fits = [dtype = product.dtype()](const WeightTarget& target) {
    if (!target.out.defined()) return true;
    return target.out.scalar_type() == at::kFloat || target.out.scalar_type() == dtype;
  };
  if (std::all_of(targets.begin(), targets.end(), fits)) return product.accumulate(targets, with_bias);
  std::vector<WeightTarget> wide(targets.begin(), targets.end());
  for (WeightTarget& target : wide) {
    if (fits(target)) continue;
    target.out = target.overwrite ? at::empty_like(target.out, at::kFloat) : target.out.to(at::kFloat);
  }
  std::vector<Tensor> sums = product.accumulate(wide, with_bias);
  for (size_t i = 0; i < wide.size(); ++i) {
    if (!fits(targets[i])) targets[i].out.copy_(wide[i].out);
  }
  return sums;
}

void register_wgrad_task(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<WgradTask, std::shared_ptr<WgradTask>>(m, "WgradTask")
      .def_property_readonly("dtype", &WgradTask::dtype)
      .def_property_readonly("reads", &WgradTask::reads)
      .def("compute", torch::wrap_pybind_function_no_gil([](const WgradTask& p, bool with_bias) {
             const WeightGrads grads = p.compute(kDirect, with_bias);
             return std::pair(grads.weights[0], grads.biases[0]);
           }))
      .def("accumulate", torch::wrap_pybind_function_no_gil([](const WgradTask& p, Tensor out, int64_t first,
                                                               int64_t rows, bool with_bias, bool overwrite) {
             std::vector<WeightTarget> targets;
             if (first > 0) targets.push_back({Tensor(), first, false});
             targets.push_back({std::move(out), rows, overwrite});
             const std::vector<Tensor> sums = p.accumulate(targets, with_bias);
             return with_bias ? sums.back() : Tensor();
           }));
}

}  // namespace te_torch
