// The linear layers: one autograd family for Linear, LayerNormLinear and the second half of an MLP, which differ in the
// prologue of their product (nothing, a norm, an activation). The prologue is data; forward and backward stand once.
#include <ATen/autocast_mode.h>
#include <ATen/ExpandUtils.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "activation.h"
#include "autograd.h"
#include "linear_core.h"
#include "normalization.h"

namespace te_torch {

namespace {

// What stands before the product, as plain values.
struct Prologue {
  enum Kind { kNone, kNorm, kActivation } kind = kNone;
  double eps = 0;
  bool rms = false;
  bool zero_centered_gamma = false;
  std::string activation;
  std::vector<double> params;
};

struct LinearFamily {
  static constexpr const char* kName = "linear";
  struct State {
    Prologue prologue;
    bool has_beta = false;
  };

  // Argument positions, and where each tensor lies among the saved ones.
  enum Slot { kX, kWeight, kBias, kGamma, kBeta, kResidual };
  enum Saved { kInput, kSavedWeight, kProduct, kSavedGamma, kMean, kRstd };

  // Outputs: y; with a norm prologue also the norm's output, and x + residual where there was one.
  // Kept: weight and norm statistics for the input's gradient, the product's operand for the weight's; of an
  // activation only its input, the activation itself is written again by the backward.
  template <class Route>
  static variable_list forward(State& state, Keeper& keeper, const Tensor& x, const Tensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& gamma, const OptionalTensor& beta,
                               const OptionalTensor& residual, const Prologue& p) {
    state.prologue = p;
    state.has_beta = beta.has_value();
    const auto wants = [](const OptionalTensor& t) { return t.has_value() && t->requires_grad(); };
    const bool into_prologue = x.requires_grad() || wants(gamma) || wants(beta) || wants(residual);
    const bool into_weight = weight.requires_grad();
    Tensor operand = x;
    Tensor h = x;
    Tensor mean, rstd;
    if (p.kind == Prologue::kNorm) {
      Tensor summed;
      std::tie(operand, summed, mean, rstd) = Route::template call<normalization_fwd>(
          "te::normalization_fwd", x, residual, *gamma, beta, p.eps, p.rms, p.zero_centered_gamma);
      if (residual.has_value()) h = summed;
    } else if (p.kind == Prologue::kActivation) {
      operand = Route::template call<activation_fwd>("te::activation_fwd", x, std::string_view(p.activation),
                                                     at::ArrayRef<double>(p.params));
    }
    Tensor y = Route::template call<linear_fwd>("te::linear_fwd", operand, weight, bias);

    const bool norm = p.kind == Prologue::kNorm;
    const bool activation = p.kind == Prologue::kActivation;
    keeper.keep_if((norm && into_prologue) || (activation && (into_prologue || into_weight)), h);
    keeper.keep_if(into_prologue, weight);
    keeper.keep_if(into_weight && !activation, operand);
    keeper.keep_if(norm && into_prologue, gamma.value_or(Tensor()));
    keeper.keep_if(norm && into_prologue, mean);
    keeper.keep_if(norm && into_prologue, rstd);
    if (!norm) return {y};
    if (!residual.has_value()) return {y, operand};
    return {y, operand, h};
  }

  template <class Route>
  static variable_list backward(const State& state, const Wanted& wanted, const variable_list& saved,
                                const variable_list& grads) {
    const Prologue& p = state.prologue;
    const bool norm = p.kind == Prologue::kNorm;
    const bool into_prologue = wanted[kX] || wanted[kGamma] || wanted[kBeta] || wanted[kResidual];
    const Tensor& dy = grads[0];
    variable_list out(kResidual + 1);
    Tensor operand = saved[kProduct];
    Tensor d_operand;
    if (dy.defined() && into_prologue) {
      d_operand = Route::template call<linear_dgrad>("te::linear_dgrad", dy, saved[kSavedWeight]);
    }
    if (norm && grads.size() > 1 && grads[1].defined()) {
      d_operand = d_operand.defined() ? d_operand + grads[1] : grads[1];
    }
    if (p.kind == Prologue::kActivation && dy.defined()) {
      const std::string_view kind(p.activation);
      const at::ArrayRef<double> params(p.params);
      if (into_prologue) {
        std::tie(out[kX], operand) = Route::template call<activation_bwd>("te::activation_bwd", d_operand,
                                                                          saved[kInput], kind, params, wanted[kWeight]);
      } else if (wanted[kWeight]) {
        operand = Route::template call<activation_fwd>("te::activation_fwd", saved[kInput], kind, params);
      }
    } else if (!norm) {
      out[kX] = d_operand;
    }
    if (dy.defined() && wanted[kWeight]) {
      std::tie(out[kWeight], out[kBias]) =
          Route::template call<linear_wgrad>("te::linear_wgrad", dy, operand, wanted[kBias]);
    } else if (dy.defined() && wanted[kBias]) {
      const c10::SymInt features = dy.sym_size(-1);
      out[kBias] = at::sum_to(dy, c10::SymIntArrayRef(&features, 1));
    }
    if (norm && into_prologue) {
      const OptionalTensor dh = grads.size() > 2 && grads[2].defined() ? OptionalTensor(grads[2]) : OptionalTensor();
      if (d_operand.defined()) {
        std::tie(out[kX], out[kGamma], out[kBeta]) = Route::template call<normalization_bwd>(
            "te::normalization_bwd", d_operand, dh, saved[kInput], saved[kSavedGamma], saved[kMean], saved[kRstd],
            p.rms, p.zero_centered_gamma,
            std::array<bool, 3>{wanted[kX] || wanted[kResidual] || dh.has_value(), wanted[kGamma], wanted[kBeta]});
      } else if (dh.has_value()) {
        out[kX] = *dh;
      }
      out[kResidual] = out[kX];
    }
    const auto only_if = [&](size_t slot) {
      if (!wanted[slot]) out[slot] = Tensor();
    };
    for (size_t slot = 0; slot < out.size(); ++slot) only_if(slot);
    return out;
  }
};

struct Arguments {
  Tensor x, weight;
  OptionalTensor bias, gamma, beta, residual;
  Prologue prologue;
};

void autocast_all(Arguments& a) {
  a.x = autocast(a.x);
  a.weight = autocast(a.weight);
  a.bias = autocast(a.bias);
  a.gamma = autocast(a.gamma);
  a.beta = autocast(a.beta);
  a.residual = autocast(a.residual);
}

template <class Route>
variable_list run_node(const Arguments& a) {
  return Node<LinearFamily, Route>::apply(a.x, a.weight, a.bias, a.gamma, a.beta, a.residual, a.prologue);
}

template <class Route>
variable_list run_inference(const Arguments& a) {
  LinearFamily::State state;
  Keeper keeper;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return LinearFamily::forward<Route>(state, keeper, a.x, a.weight, a.bias, a.gamma, a.beta, a.residual, a.prologue);
}

// The faces of a public op, made once from `kPack` (schema arguments to Arguments) and `kUnpack` (outputs to results).
template <auto kPack, auto kUnpack, class Function = decltype(kPack)>
struct Op;

template <auto kPack, auto kUnpack, class... Args>
struct Op<kPack, kUnpack, Arguments (*)(Args...)> {
  static auto autograd(Args... args) {
    const Arguments a = kPack(args...);
    return kUnpack(run_node<Dispatched>(a), a.x);
  }

  static auto composite(Args... args) {
    const Arguments a = kPack(args...);
    return kUnpack(run_inference<Dispatched>(a), a.x);
  }

  static auto autocast(Args... args) {
    Arguments a = kPack(args...);
    autocast_all(a);  // before autocast is excluded
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return kUnpack(c10::InferenceMode::is_enabled() ? run_inference<Dispatched>(a) : run_node<Dispatched>(a), a.x);
  }

  // What Python calls in eager mode.
  static auto eager(const char* name, Args... args) {
    Arguments a = kPack(args...);
    const Tensor* bias = pointer_to(a.bias);
    const Tensor* gamma = pointer_to(a.gamma);
    const Tensor* beta = pointer_to(a.beta);
    const Tensor* residual = pointer_to(a.residual);
    if (must_dispatch({&a.x, &a.weight, bias, gamma, beta, residual})) {
      return Dispatched::call<&Op::autograd>(name, args...);
    }
    autocast_all(a);
    const bool graph = needs_graph({&a.x, &a.weight, bias, gamma, beta, residual});
    return kUnpack(graph ? run_node<Direct>(a) : run_inference<Direct>(a), a.x);
  }
};

Arguments pack_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  return {x, weight, bias, {}, {}, {}, {}};
}

Arguments pack_norm(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma, const OptionalTensor& beta,
                    const Tensor& weight, const OptionalTensor& bias, double eps, bool rms, bool zero_centered_gamma) {
  Prologue p;
  p.kind = Prologue::kNorm;
  p.eps = eps;
  p.rms = rms;
  p.zero_centered_gamma = zero_centered_gamma;
  return {x, weight, bias, gamma, beta, residual, p};
}

Arguments pack_activation(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, std::string_view kind,
                          at::ArrayRef<double> params) {
  Prologue p;
  p.kind = Prologue::kActivation;
  p.activation = std::string(kind);
  p.params = params.vec();
  return {x, weight, bias, {}, {}, {}, p};
}

Tensor one(const variable_list& outputs, const Tensor&) { return outputs[0]; }

// (y, norm output, x + residual); the last is empty where there was no residual.
std::tuple<Tensor, Tensor, Tensor> three(const variable_list& outputs, const Tensor& x) {
  return {outputs[0], outputs[1], outputs.size() > 2 ? outputs[2] : x.new_empty({0})};
}

using Linear = Op<&pack_linear, &one>;
using NormLinear = Op<&pack_norm, &three>;
using ActivationLinear = Op<&pack_activation, &one>;

}  // namespace

TORCH_LIBRARY_FRAGMENT(te, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "normalization_linear(Tensor x, Tensor? residual, Tensor gamma, Tensor? beta, Tensor weight, Tensor? bias, "
      "float eps, bool rms, bool zero_centered_gamma) -> (Tensor, Tensor, Tensor)");
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
  m.def("linear",
        torch::wrap_pybind_function_no_gil([](const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
          return Linear::eager("te::linear", x, weight, bias);
        }));
  m.def("normalization_linear",
        torch::wrap_pybind_function_no_gil(
            [](const Tensor& x, const OptionalTensor& residual, const Tensor& gamma, const OptionalTensor& beta,
               const Tensor& weight, const OptionalTensor& bias, double eps, bool rms, bool zero_centered_gamma) {
              return NormLinear::eager("te::normalization_linear", x, residual, gamma, beta, weight, bias, eps, rms,
                                       zero_centered_gamma);
            }));
  m.def("activation_linear",
        torch::wrap_pybind_function_no_gil([](const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                              const std::string& kind, const std::vector<double>& params) {
          return ActivationLinear::eager("te::activation_linear", x, weight, bias, std::string_view(kind),
                                         at::ArrayRef<double>(params));
        }));
}

}  // namespace te_torch
