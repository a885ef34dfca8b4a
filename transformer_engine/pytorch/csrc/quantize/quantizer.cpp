// Quantizers and quantized matrices as Python classes, and their functions.
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "core/held_object.h"
#include "quantize/quantize.h"

namespace te_torch {

namespace {

Tensor defined(const OptionalTensor& t) { return t.has_value() ? *t : Tensor(); }
OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : OptionalTensor(); }

int64_t rows_in(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return rows;
}

// Called by Python in eager mode.
Quantized quantize_eager(const Quantizer& quantizer, const Tensor& x, bool rowwise, bool columnwise,
                         const OptionalTensor& noop, const Quantized* out, const OptionalTensor& amax) {
  if (out == nullptr && !noop.has_value() && !amax.has_value()) return quantize(quantizer, x, {rowwise, columnwise});
  if (out == nullptr) check_float(x, "quantize", "x");
  const Quantized target =
      out != nullptr ? *out
                     : empty_quantized(quantizer.spec, rows_in(x), x.size(-1), {rowwise, columnwise}, x.options());
  return quantize_into(quantizer, x, target, defined(noop), defined(amax));
}

using Update = std::tuple<Tensor, Tensor, double, int64_t, bool, bool>;  // history, scale, fp8_max, margin, ...

void update_scales(const std::vector<Update>& updates) {
  std::vector<te_scale_update> list;
  for (const auto& [history, scale, fp8_max, margin, most_recent, pow_2] : updates) {
    list.push_back({view_2d(history, "update_scales", "history"), view_2d(scale, "update_scales", "scale"),
                    static_cast<float>(fp8_max), static_cast<int>(margin), most_recent, pow_2});
  }
  if (list.empty()) return;
  check(te_quantize_update_scales(list.data(), static_cast<int32_t>(list.size()),
                                  current_stream(std::get<0>(updates[0]))));
}

Quantizer make_quantizer(const std::string& kind, bool e5m2, bool pow_2_scales, double amax_epsilon,
                         const OptionalTensor& scale, const OptionalTensor& amax, const pybind11::object& python) {
  const auto* found = std::find_if(std::begin(kQuantizerKinds), std::end(kQuantizerKinds),
                                   [&](const QuantizerKind& k) { return kind == k.name; });
  TORCH_CHECK_VALUE(found != std::end(kQuantizerKinds), "Quantizer: argument 'kind' is '", kind,
                    "', wanted one of none, delayed, current, block1d, block2d, python.");
  Quantizer q;
  q.spec = {static_cast<QuantizeSpec::Kind>(found - kQuantizerKinds), e5m2, pow_2_scales,
            static_cast<float>(amax_epsilon)};
  q.scale = defined(scale);
  q.amax = defined(amax);
  TORCH_CHECK_VALUE((q.spec.kind == QuantizeSpec::kDelayed) == q.scale.defined(), "Quantizer: argument 'scale' is ",
                    q.scale.defined() ? "given" : "missing", " for kind '", kind,
                    "', wanted a scale for kind delayed and None for other kinds.");
  TORCH_CHECK_VALUE((q.spec.kind == QuantizeSpec::kPython) == !python.is_none(), "Quantizer: argument 'python' is ",
                    python.is_none() ? "missing" : "given", " for kind '", kind,
                    "', wanted it for kind python and None for other kinds.");
  if (!python.is_none()) q.python = held_object(python.ptr());
  return q;
}

Quantized make_quantized(int64_t scaling, bool e5m2, const OptionalTensor& rowwise,
                         const OptionalTensor& rowwise_scale_inv, const OptionalTensor& columnwise,
                         const OptionalTensor& columnwise_scale_inv) {
  return {scaling_of(scaling),          e5m2, defined(rowwise), defined(rowwise_scale_inv), defined(columnwise),
          defined(columnwise_scale_inv)};
}

}  // namespace

void register_quantizer(pybind11::module_& m) {
  namespace py = pybind11;
  py::list scalings, kinds;
  for (const te::ScalingRow& s : te::kScalings) {
    scalings.append(py::make_tuple(s.name, s.block_rows, s.block_cols, s.across, s.words));
  }
  for (const QuantizerKind& kind : kQuantizerKinds) {
    kinds.append(py::make_tuple(kind.name, int(kind.scaling), kind.stateless));
  }
  m.attr("scalings") = py::tuple(scalings);      // TE_SCALING_TABLE, by its numbers
  m.attr("quantizer_kinds") = py::tuple(kinds);  // TE_QUANTIZER_TABLE: name, number of the scaling, stateless
  py::class_<Quantizer>(m, "Quantizer")
      .def(py::init(&make_quantizer), py::arg("kind"), py::arg("e5m2") = false, py::arg("pow_2_scales") = false,
           py::arg("amax_epsilon") = 0.0, py::arg("scale") = py::none(), py::arg("amax") = py::none(),
           py::arg("python") = py::none())
      .def_property_readonly("kind", [](const Quantizer& q) { return kQuantizerKinds[q.spec.kind].name; })
      .def_property_readonly("e5m2", [](const Quantizer& q) { return q.spec.e5m2; })
      .def_property_readonly("scale", [](const Quantizer& q) { return optional(q.scale); })
      .def_property_readonly("amax", [](const Quantizer& q) { return optional(q.amax); })
      .def_property_readonly("spec", [](const Quantizer& q) {
        std::vector<int64_t> packed;
        q.spec.pack(packed);
        return packed;
      });
  py::class_<Quantized>(m, "Quantized")
      .def(py::init(&make_quantized), py::arg("scaling"), py::arg("e5m2"), py::arg("rowwise") = py::none(),
           py::arg("rowwise_scale_inv") = py::none(), py::arg("columnwise") = py::none(),
           py::arg("columnwise_scale_inv") = py::none())
      .def_property_readonly("scaling", [](const Quantized& q) { return int(q.scaling); })
      .def_readonly("e5m2", &Quantized::e5m2)
      .def_property_readonly("rowwise", [](const Quantized& q) { return optional(q.rowwise); })
      .def_property_readonly("rowwise_scale_inv", [](const Quantized& q) { return optional(q.rowwise_scale_inv); })
      .def_property_readonly("columnwise", [](const Quantized& q) { return optional(q.columnwise); })
      .def_property_readonly("columnwise_scale_inv",
                             [](const Quantized& q) { return optional(q.columnwise_scale_inv); });
  m.def("quantize", torch::wrap_pybind_function_no_gil(quantize_eager), py::arg("quantizer"), py::arg("x"),
        py::arg("rowwise"), py::arg("columnwise"), py::arg("noop") = py::none(), py::arg("out") = py::none(),
        py::arg("amax") = py::none());
  m.def("quantize_op", torch::wrap_pybind_function_no_gil([](const Tensor& x, const std::vector<int64_t>& spec,
                                                             bool rowwise, bool columnwise, bool dbias) {
          const at::ArrayRef<int64_t> packed(spec);
          if (!must_dispatch({&x})) return quantize_op(x, packed, rowwise, columnwise, dbias);
          return Dispatched::call<quantize_op>("te::quantize", x, packed, rowwise, columnwise, dbias);
        }));
  m.def("dequantize", torch::wrap_pybind_function_no_gil(dequantize), py::arg("quantized"), py::arg("dtype"));
  m.def("dequantize_op",
        torch::wrap_pybind_function_no_gil([](const Tensor& data, const Tensor& scale_inv, int64_t scaling, bool e5m2,
                                              bool columnwise, at::ScalarType dtype) {
          if (!must_dispatch({&data, &scale_inv}))
            return dequantize_op(data, scale_inv, scaling, e5m2, columnwise, dtype);
          return Dispatched::call<dequantize_op>("te::dequantize", data, scale_inv, scaling, e5m2, columnwise, dtype);
        }));
  // A view made inside of __torch_dispatch__, where torch tracks none, has a version counter of its own until then.
  m.def("share_version", [](const Tensor& view, const Tensor& base) {
    if (view.is_inference() || base.is_inference()) return;
    torch::autograd::impl::set_version_counter(view, torch::autograd::impl::version_counter(base));
  });
  m.def("fp8_transpose", torch::wrap_pybind_function_no_gil(fp8_transpose), py::arg("data"),
        py::arg("out") = py::none());
  m.def("quantize_amax", torch::wrap_pybind_function_no_gil(quantize_amax));
  m.def("update_scales", torch::wrap_pybind_function_no_gil(update_scales));
}

}  // namespace te_torch
