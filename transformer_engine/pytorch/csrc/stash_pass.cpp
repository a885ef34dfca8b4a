// The identity on data that a stash's schedulers put before and behind the layers of a group: its backward calls
// Python.
#include <ATen/ops/view_as.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/custom_class.h>

#include "held_object.h"

namespace te_torch {

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Call : torch::CustomClassHolder {
  std::shared_ptr<PyObject> function;
};

struct Pass : torch::autograd::Function<Pass> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const c10::intrusive_ptr<Call>& call) {
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto capsule = ctx->saved_data.at("call").toCapsule();
    const pybind11::gil_scoped_acquire gil;
    const THPObjectPtr result(PyObject_CallNoArgs(static_cast<const Call&>(*capsule).function.get()));
    if (!result) throw_python_error();
    return {grads[0], Tensor()};
  }
};

}  // namespace

void register_stash_pass(pybind11::module_& m) {
  m.def("stash_pass", torch::wrap_pybind_function([](const Tensor& x, const pybind11::object& in_backward) {
          auto call = c10::make_intrusive<Call>();
          call->function = held_object(in_backward.ptr());
          return Pass::apply(x, call);
        }),
        "x; in_backward() is called when its backward passes by.");
}

}  // namespace te_torch
