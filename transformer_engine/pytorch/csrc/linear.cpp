// linear, normalization_linear and activation_linear: schemas and Python entries of the one family in linear_family.h.
#include "linear_family.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "op_faces.h"

namespace te_torch {

namespace {

struct Packed {
  using Family = LinearFamily;
  Tensor x, weight;
  OptionalTensor bias, gamma, beta, residual;
  Prologue prologue;
  Sink sink;

  template <class Call>
  auto with(Call&& call) const {
    return call(x, weight, bias, gamma, beta, residual, prologue, sink);
  }
  template <class Visit>
  void each(Visit&& visit) {
    visit(x), visit(weight), visit(bias), visit(gamma), visit(beta), visit(residual);
  }
};

Packed pack_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  return {x, weight, bias, {}, {}, {}, {}, {}};
}

Packed pack_norm(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma, const OptionalTensor& beta,
                 const Tensor& weight, const OptionalTensor& bias, double eps, bool rms, bool zero_centered_gamma,
                 bool recompute_output) {
  Prologue p = Prologue::norm(eps, rms, zero_centered_gamma);
  p.recompute_output = recompute_output;
  return {x, weight, bias, gamma, beta, residual, p, {}};
}

Packed pack_activation(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, std::string_view kind,
                       at::ArrayRef<double> params) {
  return {x, weight, bias, {}, {}, {}, Prologue::act(kind, params), {}};
}

Tensor one(const variable_list& outputs, const Packed&) { return outputs[0]; }

// (y, norm output, x + residual); the last is empty where there was none to return.
std::tuple<Tensor, Tensor, Tensor> three(const variable_list& outputs, const Packed& packed) {
  return {outputs[0], outputs[1], outputs.size() > 2 ? outputs[2] : packed.x.new_empty({0})};
}

using Linear = Op<&pack_linear, &one>;
using NormLinear = Op<&pack_norm, &three>;
using ActivationLinear = Op<&pack_activation, &one>;

auto with_sink(const pybind11::object& sink) {
  return [&sink](Packed& packed) {
    packed.sink = sink_of(sink.ptr());
    return packed.sink != nullptr;
  };
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(te, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "normalization_linear(Tensor x, Tensor? residual, Tensor gamma, Tensor? beta, Tensor weight, Tensor? bias, "
      "float eps, bool rms, bool zero_centered_gamma, bool recompute_output) -> (Tensor, Tensor, Tensor)");
  m.def("activation_linear(Tensor x, Tensor weight, Tensor? bias, str kind, float[] params) -> Tensor");
}

#define TE_IMPL_FACE(face)                          \
  m.impl("linear", Linear::face);                   \
  m.impl("normalization_linear", NormLinear::face); \
  m.impl("activation_linear", ActivationLinear::face)

TORCH_LIBRARY_IMPL(te, CompositeExplicitAutograd, m) { TE_IMPL_FACE(composite); }
TORCH_LIBRARY_IMPL(te, Autograd, m) { TE_IMPL_FACE(autograd); }
TORCH_LIBRARY_IMPL(te, AutocastCPU, m) { TE_IMPL_FACE(autocast); }
TORCH_LIBRARY_IMPL(te, AutocastCUDA, m) { TE_IMPL_FACE(autocast); }

#undef TE_IMPL_FACE

void register_linear(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("linear", torch::wrap_pybind_function_no_gil(
                      [](const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const py::object& sink) {
                        return Linear::eager("te::linear", with_sink(sink), x, weight, bias);
                      }));
  m.def("normalization_linear",
        torch::wrap_pybind_function_no_gil(
            [](const Tensor& x, const OptionalTensor& residual, const Tensor& gamma, const OptionalTensor& beta,
               const Tensor& weight, const OptionalTensor& bias, double eps, bool rms, bool zero_centered_gamma,
               bool recompute_output, bool return_input, const py::object& sink) {
              const auto extra = [&](Packed& packed) {
                packed.prologue.return_input = return_input;
                return with_sink(sink)(packed);
              };
              auto results = NormLinear::eager("te::normalization_linear", extra, x, residual, gamma, beta, weight,
                                               bias, eps, rms, zero_centered_gamma, recompute_output);
              // The schema has no alias of x among its results, so the dispatched route leaves this one empty.
              Tensor& h = std::get<2>(results);
              if (return_input && !residual.has_value() && h.sym_sizes() != x.sym_sizes()) h = x;
              return results;
            }));
  m.def("activation_linear",
        torch::wrap_pybind_function_no_gil([](const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                              const std::string& kind, const std::vector<double>& params,
                                              const py::object& sink) {
          return ActivationLinear::eager("te::activation_linear", with_sink(sink), x, weight, bias,
                                         std::string_view(kind), at::ArrayRef<double>(params));
        }));
  m.def("linear_wgrad", torch::wrap_pybind_function_no_gil(linear_wgrad));
}

}  // namespace te_torch
