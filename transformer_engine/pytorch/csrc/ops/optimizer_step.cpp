// A step of a whole optimizer: takes gradients and states from their Python objects, checks all of them, and then
// steps. It runs for every parameter in each step, so that it touches each Python object once.
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <deque>

#include "ops/optimizer.h"

namespace te_torch {

namespace {

namespace py = pybind11;

const Tensor& tensor_of(PyObject* object, const char* op, const char* list, int64_t index) {
  TORCH_CHECK_VALUE(object != nullptr && THPVariable_Check(object), op, ": the state of parameter ", index,
                    " has no tensor '", list, "'; load a whole state, or none.");
  return THPVariable_Unpack(object);
}

PyObject* item(PyObject* dict, PyObject* key) {
  return dict != nullptr && PyDict_Check(dict) ? PyDict_GetItemWithError(dict, key) : nullptr;  // a borrowed reference
}

Tensor laid_out_as(const Tensor& like, const Tensor& grad) {
  return at::empty_strided(like.sizes(), like.strides(), grad.options()).copy_(grad);
}

// Checks that a step can read the gradient.
void check_grad(const Tensor& grad, const Tensor& like, const char* op, int64_t index) {
  TORCH_CHECK_VALUE(
      grad.layout() == at::kStrided, op, ": the gradient of parameter ", index, " has layout ", grad.layout(),
      ", wanted a dense gradient; create the layer with sparse=False, or take an optimizer for ", "sparse gradients.");
  TORCH_CHECK_VALUE(grad.sizes() == like.sizes(), op, ": the gradient of parameter ", index, " has shape ",
                    grad.sizes(), ", wanted ", like.sizes(), ".");
  check_float(grad, op, "grad");
}

// Parameters of one group with equal options.
class AdamLists {
 public:
  AdamLists(std::string op, at::ScalarType exp_avg, at::ScalarType exp_avg_sq, std::optional<at::ScalarType> master,
            at::ScalarType rounding)
      : op_(std::move(op)),
        exp_avg_(exp_avg),
        exp_avg_sq_(exp_avg_sq),
        master_(master),
        rounding_(rounding),
        calls_(op_.c_str()) {}

  // grads: a gradient or None for each parameter, or None to read .grad. states: a dict or None for each parameter.
  // scales: the pairs of scaled states likewise. fp8: (scale, amax, scale_inv, is_e5m2) of FP8 weights, whose `params`
  // are their bytes. Parameters without a gradient are skipped. Returns the indices of parameters with a gradient but
  // no state.
  std::vector<int64_t> add(const py::list& params, const py::object& grads, const py::list& states,
                           const py::object& scales, const py::object& fp8) {
    std::vector<int64_t> without_state;
    const auto count = int64_t(params.size());
    PyObject* const grad_list = grads.is_none() ? nullptr : grads.ptr();
    for (int64_t i = 0; i < count; ++i) {
      const Tensor& param = tensor_of(PyList_GET_ITEM(params.ptr(), i), op_.c_str(), "param", i);
      PyObject* const given = grad_list == nullptr ? nullptr : PyList_GET_ITEM(grad_list, i);
      if (given == Py_None) continue;
      const Tensor& grad = given == nullptr ? param.grad() : tensor_of(given, op_.c_str(), "grad", i);
      if (!grad.defined()) continue;
      PyObject* const state = PyList_GET_ITEM(states.ptr(), i);
      if (state == Py_None || (PyDict_Check(state) && PyDict_GET_SIZE(state) == 0)) {
        without_state.push_back(i);
        continue;
      }
      add_one(i, param, grad, state, scales.is_none() ? nullptr : PyList_GET_ITEM(scales.ptr(), i),
              fp8.is_none() ? py::handle() : py::handle(PyList_GET_ITEM(fp8.ptr(), i)));
    }
    return without_state;
  }

  int64_t size() const { return count_; }
  const AdamCalls& calls() const { return calls_; }

  void run(const AdamOptions& options) const {
    calls_.run(options);
    if (!options.inv_scale.has_value()) return;
    for (const auto& [grad, copy] : copies_) grad.copy_(copy);
  }

 private:
  // A state, with the pair of its scale if it has one.
  struct State {
    const Tensor& value;
    const Tensor& pair;
  };
  State state_of(PyObject* state, PyObject* scales, PyObject* key, const char* list, at::ScalarType wanted, int64_t i) {
    const Tensor& value = tensor_of(item(state, key), op_.c_str(), list, i);
    TORCH_CHECK_VALUE(value.scalar_type() == wanted, op_, ": '", list, "' ", i, " has dtype ", value.scalar_type(),
                      ", wanted ", wanted, " as in the optimizer's options; load_state_dict() converts states.");
    const bool scaled = wanted == at::kHalf || wanted == at::kByte;
    return {value, scaled ? tensor_of(item(scales, key), op_.c_str(), list, i) : none_};
  }

  // The shape has to be equal, not only the number of elements: a transposed weight would use wrong moments.
  void check_shape(const State& state, const Tensor& like, const char* list, int64_t i) const {
    TORCH_CHECK_VALUE(state.value.sizes() == like.sizes(), op_, ": '", list, "' ", i, " has shape ",
                      state.value.sizes(), ", wanted ", like.sizes(),
                      " like its parameter; initialize_state(parameter) creates a new one.");
  }

  void add_one(int64_t i, const Tensor& param, const Tensor& given, PyObject* state, PyObject* scales, py::handle fp8) {
    const char* op = op_.c_str();
    const State m = state_of(state, scales, keys().exp_avg, "exp_avg", exp_avg_, i);
    const State v = state_of(state, scales, keys().exp_avg_sq, "exp_avg_sq", exp_avg_sq_, i);
    const State w = master_.has_value() ? state_of(state, scales, keys().master_param, "master_param", *master_, i)
                                        : State{none_, none_};
    const Tensor& like = fp8 ? m.value : param;
    check_shape(m, like, "exp_avg", i);
    check_shape(v, like, "exp_avg_sq", i);
    if (w.value.defined()) check_shape(w, like, "master_param", i);
    check_grad(given, like, op, i);
    const Tensor* grad = &given;
    const bool laid_out = (given.is_contiguous() && like.is_contiguous()) || given.strides() == like.strides();
    if (!laid_out || given.is_neg()) {
      copies_.emplace_back(given, laid_out_as(like, given));
      grad = &copies_.back().second;
    }
    if (!fp8) {
      calls_.add(
          {*grad, param, m.value, v.value, w.value, m.pair, v.pair, w.pair, none_, none_, none_, false, at::kFloat}, i);
    } else {
      const auto parts = fp8.cast<std::tuple<Tensor, Tensor, Tensor, bool>>();
      const auto& [scale, amax, scale_inv, e5m2] = parts;
      calls_.add(
          {*grad, param, m.value, v.value, w.value, m.pair, v.pair, w.pair, scale, amax, scale_inv, e5m2, rounding_},
          i);
    }
    ++count_;
  }

  struct Keys {
    PyObject* exp_avg = PyUnicode_InternFromString("exp_avg");
    PyObject* exp_avg_sq = PyUnicode_InternFromString("exp_avg_sq");
    PyObject* master_param = PyUnicode_InternFromString("master_param");
  };
  static const Keys& keys() {
    static const Keys names;
    return names;
  }

  const std::string op_;
  const at::ScalarType exp_avg_, exp_avg_sq_;
  const std::optional<at::ScalarType> master_;
  const at::ScalarType rounding_;
  AdamCalls calls_;
  int64_t count_ = 0;
  std::deque<std::pair<Tensor, Tensor>> copies_;  // gradients with other strides than their parameters
  const Tensor none_;
};

}  // namespace

void register_optimizer_step(pybind11::module_& m) {
  const auto wrapped = [](auto method) { return torch::wrap_pybind_function(method); };
  py::class_<OverlapGuard>(m, "OverlapGuard")
      .def(py::init<>())
      .def("check", wrapped([](OverlapGuard& guard, const std::string& op, const std::vector<const AdamLists*>& lists) {
             std::vector<Span> written, read;
             for (const AdamLists* each : lists) {
               const auto &writes = each->calls().written(), &reads = each->calls().read();
               written.insert(written.end(), writes.begin(), writes.end());
               read.insert(read.end(), reads.begin(), reads.end());
             }
             guard.check(op.c_str(), written, read);
           }));
  py::class_<AdamLists>(m, "AdamLists")
      .def(py::init<std::string, at::ScalarType, at::ScalarType, std::optional<at::ScalarType>, at::ScalarType>())
      .def("add", wrapped([](AdamLists& lists, const py::list& params, const py::object& grads, const py::list& states,
                             const py::object& scales,
                             const py::object& fp8) { return lists.add(params, grads, states, scales, fp8); }))
      .def("__len__", [](const AdamLists& lists) { return lists.size(); })
      .def("run", torch::wrap_pybind_function_no_gil(
                      [](const AdamLists& lists, double lr, double beta1, double beta2, double eps, double weight_decay,
                         int64_t step, bool decoupled, bool bias_correction, const OptionalTensor& noop,
                         const OptionalTensor& lr_tensor, const OptionalTensor& step_tensor,
                         const OptionalTensor& inv_scale, const OptionalTensor& clip) {
                        lists.run({lr, beta1, beta2, eps, weight_decay, step, decoupled, bias_correction, noop,
                                   lr_tensor, step_tensor, inv_scale, clip});
                      }));
}

}  // namespace te_torch
