// See list_quantize.h. The engine computes scales and bytes.
#include "quantize/list_quantize.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <transformer_engine/quantize_list.h>

#include <algorithm>

namespace te_torch {

namespace {

constexpr const char* kOp = "quantize";

// The matrices as te_quantize_list checks them.
bool of_one_form(const Tensor& t, const Tensor& first) {
  if (!t.defined() || !first.defined()) return t.defined() == first.defined();
  return t.sizes() == first.sizes() && t.strides() == first.strides() && t.dtype() == first.dtype() &&
         t.device() == first.device();
}

bool of_one_form(const Quantized& one, const Quantized& first) {
  return one.scaling == first.scaling && one.e5m2 == first.e5m2 && of_one_form(one.rowwise, first.rowwise) &&
         of_one_form(one.columnwise, first.columnwise) && of_one_form(one.rowwise_scale_inv, first.rowwise_scale_inv) &&
         of_one_form(one.columnwise_scale_inv, first.columnwise_scale_inv);
}

// For matrices with takes_list().
void run(at::ArrayRef<const Quantizer*> quantizers, at::TensorList xs, at::ArrayRef<te_quantized> outs,
         const Tensor& noop) {
  const QuantizeSpec& spec = quantizers[0]->spec;
  const size_t count = xs.size();
  std::vector<Tensor> rows;
  std::vector<te_tensor> views;
  std::vector<const float*> scales;
  std::vector<float*> amaxes;
  views.reserve(count);
  rows.reserve(count);
  for (const Tensor& x : xs) views.push_back(view_2d(rows.emplace_back(rows_of(x)), kOp, "x"));
  te_quantize_list_problem problem{};
  problem.count = int32_t(count);
  problem.xs = views.data();
  problem.outs = outs.data();
  problem.noop = noop.defined() ? view_2d(noop, kOp, "noop") : absent();
  problem.pow_2_scales = spec.pow_2_scales;
  problem.amax_epsilon = spec.amax_epsilon;
  problem.amax_parts = absent();
  Tensor parts;
  if (spec.kind == QuantizeSpec::kCurrent) {
    parts = at::empty({int64_t(count), TE_QUANTIZE_LIST_PARTS}, xs[0].options().dtype(at::kFloat));
    problem.amax_parts = view_2d(parts, kOp, "amax_parts");
  }
  if (spec.scaling() == TE_SCALING_TENSOR) {
    bool any = false;
    for (const Quantizer* one : quantizers) {
      if (spec.kind == QuantizeSpec::kDelayed) scales.push_back(one->scale.const_data_ptr<float>());
      amaxes.push_back(one->amax.defined() ? one->amax.mutable_data_ptr<float>() : nullptr);
      any = any || one->amax.defined();
    }
    problem.scales = scales.empty() ? nullptr : scales.data();
    problem.amaxes = any ? amaxes.data() : nullptr;
  }
  check(te_quantize_list(&problem, current_stream(xs[0])));
}

bool state_fits(const Quantizer& quantizer, const Tensor& x) {
  const auto fits = [&](const Tensor& t) {
    return !t.defined() || (t.numel() == 1 && t.scalar_type() == at::kFloat && t.device() == x.device());
  };
  return fits(quantizer.scale) && fits(quantizer.amax);
}

void check_quantizers(const char* op, const std::vector<const Quantizer*>& quantizers, size_t wanted) {
  TORCH_CHECK_VALUE(quantizers.size() == wanted, op, ": argument 'quantizers' has ", quantizers.size(),
                    " entries, wanted ", wanted, ", one for each matrix.");
  const auto none = std::find(quantizers.begin(), quantizers.end(), nullptr);
  TORCH_CHECK_VALUE(none == quantizers.end(), op, ": argument 'quantizers' has None at ", none - quantizers.begin(),
                    ", wanted a quantizer for each matrix.");
}

}  // namespace

bool takes_list(at::ArrayRef<const Quantizer*> quantizers, at::TensorList xs) {
  if (xs.size() < 2 || quantizers.size() != xs.size()) return false;
  for (size_t i = 0; i < xs.size(); ++i) {
    if (quantizers[i] == nullptr || !(quantizers[i]->spec == quantizers[0]->spec)) return false;
    const Tensor& x = xs[i];
    if (x.dim() != 2 || !x.sizes().equals(xs[0].sizes()) || !x.strides().equals(xs[0].strides()) ||
        x.scalar_type() != xs[0].scalar_type() || x.device() != xs[0].device() || !state_fits(*quantizers[i], x)) {
      return false;
    }
    if (x.is_neg()) return false;  // would be copied, with another pitch
  }
  const auto kind = quantizers[0]->spec.kind;
  return kind != QuantizeSpec::kNone && kind != QuantizeSpec::kPython;
}

std::vector<Quantized> quantize_list(at::ArrayRef<const Quantizer*> quantizers, at::TensorList xs,
                                     QuantizeUsage usage) {
  std::vector<Quantized> results;
  if (!takes_list(quantizers, xs)) {
    for (size_t i = 0; i < xs.size(); ++i) results.push_back(quantize(*quantizers[i], xs[i], usage));
    return results;
  }
  check_float(xs[0], kOp, "x");
  const at::AutoDispatchBelowADInplaceOrView apart;  // views of one buffer with a version counter each
  results = empty_quantized_list(xs.size(), quantizers[0]->spec, xs[0].size(0), xs[0].size(1), usage, xs[0].options());
  std::vector<te_quantized> views;
  views.reserve(results.size());
  for (const Quantized& one : results) views.push_back(view_of(one, kOp, "out"));
  run(quantizers, xs, views, {});
  return results;
}

void quantize_list_into(at::ArrayRef<const Quantizer*> quantizers, at::TensorList xs, at::ArrayRef<Quantized> outs,
                        const Tensor& noop) {
  std::vector<te_quantized> views;
  views.reserve(outs.size());
  bool one_call = takes_list(quantizers, xs);
  for (const Quantized& out : outs) {
    views.push_back(view_of(out, kOp, "out"));
    one_call = one_call && of_one_form(out, outs[0]);
  }
  if (!one_call) {
    for (size_t i = 0; i < xs.size(); ++i) quantize_into(*quantizers[i], xs[i], outs[i], noop, {});
    return;
  }
  run(quantizers, xs, views, noop);
  for (const Quantized& out : outs) {
    for (const Tensor* t : {&out.rowwise, &out.rowwise_scale_inv, &out.columnwise, &out.columnwise_scale_inv}) {
      note_written(*t);
    }
  }
}

void register_list_quantize(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("quantize_list",
        torch::wrap_pybind_function_no_gil([](const std::vector<const Quantizer*>& quantizers,
                                              const std::vector<Tensor>& xs, bool rowwise, bool columnwise) {
          check_quantizers("quantize_list", quantizers, xs.size());
          return quantize_list(quantizers, xs, {rowwise, columnwise});
        }),
        py::arg("quantizers"), py::arg("xs"), py::arg("rowwise"), py::arg("columnwise"));
  m.def("quantize_list_into",
        torch::wrap_pybind_function_no_gil([](const std::vector<const Quantizer*>& quantizers,
                                              const std::vector<Tensor>& xs, const std::vector<Quantized>& outs,
                                              const OptionalTensor& noop) {
          check_quantizers("quantize_list_into", quantizers, xs.size());
          TORCH_CHECK_VALUE(outs.size() == xs.size(), "quantize_list_into: argument 'outs' has ", outs.size(),
                            " entries, wanted ", xs.size(), ", one for each matrix.");
          quantize_list_into(quantizers, xs, outs, noop.value_or(Tensor()));
        }),
        py::arg("quantizers"), py::arg("xs"), py::arg("outs"), py::arg("noop") = py::none());
}

}  // namespace te_torch
