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
  Quantization quantization;
  Sink sink;
  Quantized own_weight;

  template <class Call>
  auto with(Call&& call) const {
    return call(x, weight, bias, gamma, beta, residual, prologue, sink, quantization, own_weight);
  }
  template <class Visit>
  void each(Visit&& visit) {
    visit(x), visit(bias), visit(gamma), visit(beta), visit(residual);
    if (!own_weight.defined()) visit(weight);
  }
  template <class Visit>
  void each_own(Visit&& visit) const {
    if (own_weight.defined()) visit(weight);
  }
  bool weights_need_graph() const { return weight.requires_grad(); }
};

Packed pack_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool keep_input,
                   at::ArrayRef<int64_t> quantization) {
  Prologue p;
  p.keep_input = keep_input;
  return {x, weight, bias, {}, {}, {}, p, quantization_of(quantization, "linear"), {}, {}};
}

Packed pack_norm(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma, const OptionalTensor& beta,
                 const Tensor& weight, const OptionalTensor& bias, double eps, bool rms, bool zero_centered_gamma,
                 bool return_output, bool recompute_output, at::ArrayRef<int64_t> quantization) {
  Prologue p = Prologue::norm(eps, rms, zero_centered_gamma);
  p.return_output = return_output;
  p.recompute_output = recompute_output;
  return {x, weight, bias, gamma, beta, residual, p, quantization_of(quantization, "normalization_linear"), {}, {}};
}

Packed pack_activation(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, std::string_view kind,
                       at::ArrayRef<double> params, at::ArrayRef<int64_t> quantization) {
  return {x,  weight, bias, {}, {}, {}, Prologue::act(kind, params), quantization_of(quantization, "activation_linear"),
          {}, {}};
}

Tensor one(const variable_list& outputs, const Packed&) { return outputs[0]; }

using Linear = Op<&pack_linear, &one>;
using NormLinear = Op<&pack_norm, &three_outputs<Packed>>;
using ActivationLinear = Op<&pack_activation, &one>;

auto with_handles(const EagerHandles& handles) {
  return [&handles](Packed& packed) {
    packed.sink = sink_of(handles.sink);
    packed.quantization = handles.quantization;
    if (handles.own_weight != nullptr) packed.own_weight = *handles.own_weight;
    return packed.sink != nullptr;
  };
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(te, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, bool keep_input, int[] quantization) -> Tensor");
  m.def(
      "normalization_linear(Tensor x, Tensor? residual, Tensor gamma, Tensor? beta, Tensor weight, Tensor? bias, "
      "float eps, bool rms, bool zero_centered_gamma, bool return_output, bool recompute_output, int[] quantization) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "activation_linear(Tensor x, Tensor weight, Tensor? bias, str kind, float[] params, int[] quantization) -> "
      "Tensor");
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
  using GivenQuantization = std::shared_ptr<ProductQuantization>;
  using GivenWeight = const Quantized*;
  m.def("linear", torch::wrap_pybind_function_no_gil(
                      [](const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool keep_input,
                         const py::object& sink, const GivenQuantization& quantization, GivenWeight own_weight) {
                        const EagerHandles handles{sink.ptr(), quantization, own_weight};
                        return Linear::eager("te::linear", with_handles(handles), x, weight, bias, keep_input, handles);
                      }));
  m.def("normalization_linear",
        torch::wrap_pybind_function_no_gil(
            [](const Tensor& x, const OptionalTensor& residual, const Tensor& gamma, const OptionalTensor& beta,
               const Tensor& weight, const OptionalTensor& bias, double eps, bool rms, bool zero_centered_gamma,
               bool return_output, bool recompute_output, bool return_input, const py::object& sink,
               const GivenQuantization& quantization, GivenWeight own_weight) {
              const EagerHandles handles{sink.ptr(), quantization, own_weight};
              const auto extra = [&](Packed& packed) {
                packed.prologue.return_input = return_input;
                return with_handles(handles)(packed);
              };
              auto results =
                  NormLinear::eager("te::normalization_linear", extra, x, residual, gamma, beta, weight, bias, eps, rms,
                                    zero_centered_gamma, return_output, recompute_output, handles);
              // The schema has no alias of x among its results, so the dispatched route leaves this one empty.
              Tensor& h = std::get<2>(results);
              if (return_input && !residual.has_value() && h.sym_sizes() != x.sym_sizes()) h = x;
              return results;
            }));
  m.def("activation_linear", torch::wrap_pybind_function_no_gil(
                                 [](const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                    const std::string& kind, const std::vector<double>& params, const py::object& sink,
                                    const GivenQuantization& quantization, GivenWeight own_weight) {
                                   const EagerHandles handles{sink.ptr(), quantization, own_weight};
                                   return ActivationLinear::eager("te::activation_linear", with_handles(handles), x,
                                                                  weight, bias, std::string_view(kind),
                                                                  at::ArrayRef<double>(params), handles);
                                 }));
}

}  // namespace te_torch
