// Python binding of main_grad: a module's product by the names of its parameters, and what the store of backward_dw()
// calls.
#include <torch/csrc/autograd/python_variable.h>

#include "core/held_object.h"
#include "wgrad/main_grad.h"
#include "wgrad/main_grad_python.h"

namespace te_torch {

using namespace main_grad;

namespace {

// A module's product by the names of its parameters, which are looked up at each call.
class WeightGradProduct {
 public:
  WeightGradProduct(std::vector<py::str> weights, std::vector<py::str> biases)
      : weights_(std::move(weights)), biases_(std::move(biases)) {
    for (auto* list : {&weights_, &biases_}) {
      for (py::str& name : *list) {
        PyObject* interned = name.release().ptr();
        PyUnicode_InternInPlace(&interned);
        name = py::reinterpret_steal<py::str>(interned);
      }
    }
  }

  // Returns null if no weight needs a gradient.
  std::shared_ptr<ParameterGradAccumulator> grad_accumulator(const py::object& module, bool fused,
                                                             const py::object& first, const py::object& store) {
    const py::object registered = attribute(module.ptr(), names_of_attributes().parameters);
    WeightParameters p;
    bool any = false;
    p.weights.reserve(weights_.size());
    p.biases.reserve(biases_.size());
    for (const py::str& name : weights_) {
      p.weights.push_back(parameter(module.ptr(), registered.ptr(), name));
      p.wanted.push_back(p.weights.back().requires_grad());
      any = any || p.wanted.back();
    }
    if (!any) return {};
    p.names = named(Py_TYPE(module.ptr()));
    p.fused = fused;
    p.overwrite = first.ptr() == Py_True;
    if (first.ptr() != Py_True && first.ptr() != Py_False && !first.is_none()) {
      p.overwrite = is_true(called(answers->is_first_microbatch, {text(p.names->op).ptr(), first.ptr()}).ptr());
    }
    for (size_t i = 0; i < weights_.size(); ++i) {
      if (!p.wanted[i] || p.weights[i].is_leaf()) continue;
      called(answers->refuse_computed, {text(p.names->op).ptr(), weights_[i].ptr()});
    }
    for (const py::str& name : biases_) {
      p.biases.push_back(parameter(module.ptr(), registered.ptr(), name));
      p.wanted_biases.push_back(p.biases.back().requires_grad());
    }
    if (fused) p.main_grads(false);  // raises before anything has run
    return std::make_shared<ParameterGradAccumulator>(std::move(p),
                                                      store.is_none() ? nullptr : held_object(store.ptr()));
  }

 private:
  static Tensor parameter(PyObject* module, PyObject* registered, const py::str& name) {
    PyObject* found =
        registered != nullptr && PyDict_Check(registered) ? PyDict_GetItemWithError(registered, name.ptr()) : nullptr;
    if (found != nullptr && THPVariable_Check(found)) return THPVariable_Unpack(found);
    const py::object other = owned(PyObject_GetAttr(module, name.ptr()));  // computed, by a parametrization
    if (!other) throw_python_error();
    TORCH_CHECK_TYPE(THPVariable_Check(other.ptr()), "'", std::string(name), "' is a ", Py_TYPE(other.ptr())->tp_name,
                     ", wanted a Tensor.");
    return THPVariable_Unpack(other.ptr());
  }

  std::shared_ptr<const WeightNames> named(PyTypeObject* type) {
    if (type != type_) {  // a parametrization changes it
      auto names = std::make_shared<WeightNames>();
      names->op = std::string(py::str(py::handle(reinterpret_cast<PyObject*>(type)).attr("__name__")));
      for (const py::str& name : weights_) names->weights.emplace_back(name);
      names_ = std::move(names);
      type_ = type;
    }
    return names_;
  }

  std::vector<py::str> weights_, biases_;
  std::shared_ptr<const WeightNames> names_;
  PyTypeObject* type_ = nullptr;  // to be compared alone
};

std::vector<int64_t> rows_of(const std::vector<Tensor>& parameters) {
  std::vector<int64_t> rows;
  for (const Tensor& parameter : parameters) rows.push_back(parameter.size(0));
  return rows;
}

// The rows of the matrices that belong to each parameter.
std::vector<Tensor> cut(at::TensorList matrices, const std::vector<int64_t>& rows) {
  if (matrices.size() == rows.size()) return matrices.vec();
  std::vector<Tensor> parts;
  for (const Tensor& matrix : matrices) {
    std::vector<int64_t> sizes;
    for (int64_t left = matrix.size(0); left > 0 && parts.size() + sizes.size() < rows.size(); left -= sizes.back()) {
      sizes.push_back(rows[parts.size() + sizes.size()]);
    }
    const std::vector<Tensor> own = matrix.split_with_sizes(sizes);
    parts.insert(parts.end(), own.begin(), own.end());
  }
  return parts;
}

}  // namespace

void register_main_grad(py::module_& m) {
  py::class_<WeightGradProduct>(m, "WeightGradProduct")
      .def(py::init<std::vector<py::str>, std::vector<py::str>>(), py::arg("weights"), py::arg("biases"))
      .def("grad_accumulator", torch::wrap_pybind_function(&WeightGradProduct::grad_accumulator), py::arg("module"),
           py::arg("fused"), py::arg("is_first_microbatch"), py::arg("store"));
  register_grad_accumulators(m);
  py::class_<ParameterGradAccumulator, GradAccumulator, std::shared_ptr<ParameterGradAccumulator>>(
      m, "ParameterGradAccumulator");
  py::class_<WeightParameters, std::shared_ptr<WeightParameters>>(m, "WeightParameters")
      .def_property_readonly("op", [](const WeightParameters& p) { return p.names->op; })
      .def_property_readonly("names", [](const WeightParameters& p) { return p.names->weights; })
      .def_readonly("weights", &WeightParameters::weights)
      .def_readonly("biases", &WeightParameters::biases)
      .def_readonly("fused", &WeightParameters::fused)
      .def_property_readonly("left_out", torch::wrap_pybind_function(&WeightParameters::left_out),
                             "Numbers of the weights, then biases, that wanted no gradient when the product was "
                             "called, or whose gradients "
                             "the backward did not bring.")
      .def("main_grads", torch::wrap_pybind_function([](const WeightParameters& p) { return p.main_grads(true); }))
      .def("accumulate", torch::wrap_pybind_function([](const WeightParameters& p, const WgradTask& product,
                                                        const std::vector<OptionalTensor>& main_grads, bool with_bias) {
             std::vector<Tensor> given;
             for (const OptionalTensor& main_grad : main_grads) given.push_back(main_grad.value_or(Tensor()));
             return p.accumulate(product, p.targets(given), with_bias);
           }))
      .def("compute",
           torch::wrap_pybind_function_no_gil([](const WeightParameters& p, const WgradTask& product, bool with_bias) {
             const WeightGrads grads = product.compute(DispatchMode(Direct{}), with_bias);
             return std::make_tuple(cut(grads.weights, rows_of(p.weights)),
                                    with_bias ? cut(grads.biases, rows_of(p.biases)) : std::vector<Tensor>());
           }));
  m.def(
      "answer_weight_grads",
      [](const py::function& check_main_grad, const py::function& refuse_computed,
         const py::function& is_first_microbatch, const py::function& leave) {
        answers = new Answers{check_main_grad.inc_ref().ptr(), refuse_computed.inc_ref().ptr(),
                              is_first_microbatch.inc_ref().ptr(), leave.inc_ref().ptr()};
      },
      py::kw_only(), py::arg("check_main_grad"), py::arg("refuse_computed"), py::arg("is_first_microbatch"),
      py::arg("leave"));
  m.def("note_accumulations", [](const py::set& noted) { note_accumulations(noted.ptr()); });
  m.def("forget_accumulations", [](const py::set& noted) { forget_accumulations(noted.ptr()); });
  m.def("dummy_weight_grad", torch::wrap_pybind_function_no_gil(
                                 [](const std::vector<int64_t>& shape, at::ScalarType dtype, const at::Device& device,
                                    bool zero) { return dummy_weight_grad(shape, dtype, device, zero); }));
  m.def("dummy_weight_grads", torch::wrap_pybind_function(dummy_weight_grads));
  m.def("clear_dummy_weight_grads", torch::wrap_pybind_function(clear_dummy_weight_grads));
}

}  // namespace te_torch
