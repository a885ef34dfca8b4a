// layernorm_mlp: norm, first product, activation and second product as one node that keeps only its input and computes
// the rest again in its backward. Made of the linear family twice; without recomputation the two halves are nodes of
// their own (normalization_linear, activation_linear), and this file is not used.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "linear_family.h"
#include "op_faces.h"

namespace te_torch {

namespace {

struct MlpFamily {
  static constexpr const char* kName = "layernorm_mlp";
  struct State {
    LinearFamily::State fc1, fc2;
  };

  enum Slot { kX, kResidual, kGamma, kBeta, kWeight1, kBias1, kWeight2, kBias2 };
  enum Saved { kInput, kSavedGamma, kSavedBeta, kSavedWeight1, kSavedBias1, kSavedWeight2 };

  // Outputs: y, the norm's output, and x + residual where there was one.
  template <class Route>
  static variable_list forward(State& state, Keeper& keeper, const Tensor& x, const OptionalTensor& residual,
                               const Tensor& gamma, const OptionalTensor& beta, const Tensor& weight1,
                               const OptionalTensor& bias1, const Tensor& weight2, const OptionalTensor& bias2,
                               const Prologue& norm, const Prologue& activation, const Sink& sink1, const Sink& sink2) {
    Keeper nothing;  // what the halves would keep is what the backward computes again
    variable_list first =
        LinearFamily::forward<Route>(state.fc1, nothing, x, weight1, bias1, gamma, beta, residual, norm, sink1);
    variable_list second =
        LinearFamily::forward<Route>(state.fc2, nothing, first[0], weight2, bias2, {}, {}, {}, activation, sink2);
    const auto wants = [](const OptionalTensor& t) { return t.has_value() && t->requires_grad(); };
    const bool into_first = x.requires_grad() || wants(residual) || gamma.requires_grad() || wants(beta) ||
                            weight1.requires_grad() || wants(bias1);
    const bool again = into_first || weight2.requires_grad();
    keeper.keep_if(again, residual.has_value() ? first[2] : x, kMlpInput);
    keeper.keep_if(again, gamma, kParameter);
    keeper.keep_if(again, beta, kParameter);
    keeper.keep_if(again, weight1, kParameter);
    keeper.keep_if(again, bias1, kParameter);
    keeper.keep_if(into_first, weight2, kParameter);
    if (again) {
      keeper.recompute(first[1], LinearFamily::kNormOutput);
      keeper.recompute(first[0], LinearFamily::kPreActivation);
    }
    first[0] = second[0];
    return first;
  }

  template <class Route>
  static variable_list backward(const State& state, const Wanted& wanted, const variable_list& saved,
                                const variable_list& grads) {
    const Prologue& p = state.fc1.prologue;
    const auto optional = [&](size_t i) { return saved[i].defined() ? OptionalTensor(saved[i]) : OptionalTensor(); };
    const bool into_first =
        wanted[kX] || wanted[kResidual] || wanted[kGamma] || wanted[kBeta] || wanted[kWeight1] || wanted[kBias1];
    variable_list first(LinearFamily::kResidual + 1), second(LinearFamily::kResidual + 1);
    if (!into_first && !wanted[kWeight2]) {
      second = LinearFamily::backward<Route>(state.fc2, {false, false, wanted[kBias2]},
                                             variable_list(LinearFamily::kSavedCount), {grads[0]});
    } else {
      const auto [norm_output, h, mean, rstd] = Route::template call<normalization_fwd>(
          "te::normalization_fwd", saved[kInput], OptionalTensor(), saved[kSavedGamma], optional(kSavedBeta), p.eps,
          p.rms, p.zero_centered_gamma);
      if (grads[0].defined()) {
        const Tensor pre_activation = Route::template call<linear_fwd>("te::linear_fwd", norm_output,
                                                                       saved[kSavedWeight1], optional(kSavedBias1));
        second = LinearFamily::backward<Route>(state.fc2, {into_first, wanted[kWeight2], wanted[kBias2]},
                                               {pre_activation, saved[kSavedWeight2], {}, {}, {}, {}, {}}, {grads[0]});
      }
      variable_list into_fc1{second[LinearFamily::kX]};
      into_fc1.insert(into_fc1.end(), grads.begin() + 1, grads.end());
      first = LinearFamily::backward<Route>(
          state.fc1, {wanted[kX], wanted[kWeight1], wanted[kBias1], wanted[kGamma], wanted[kBeta], wanted[kResidual]},
          {saved[kInput], saved[kSavedWeight1], norm_output, saved[kSavedGamma], {}, mean, rstd}, into_fc1);
    }
    return {first[LinearFamily::kX],       first[LinearFamily::kResidual], first[LinearFamily::kGamma],
            first[LinearFamily::kBeta],    first[LinearFamily::kWeight],   first[LinearFamily::kBias],
            second[LinearFamily::kWeight], second[LinearFamily::kBias]};
  }

  static constexpr Kept kMlpInput{"MLP input", "norm, first product and activation are computed again from it",
                                  "the sum or product that made it: te.checkpoint around the layer"};
};

struct Packed {
  using Family = MlpFamily;
  Tensor x;
  OptionalTensor residual;
  Tensor gamma;
  OptionalTensor beta;
  Tensor weight1;
  OptionalTensor bias1;
  Tensor weight2;
  OptionalTensor bias2;
  Prologue norm, activation;
  Sink sink1, sink2;

  template <class Call>
  auto with(Call&& call) const {
    return call(x, residual, gamma, beta, weight1, bias1, weight2, bias2, norm, activation, sink1, sink2);
  }
  template <class Visit>
  void each(Visit&& visit) {
    visit(x), visit(residual), visit(gamma), visit(beta), visit(weight1), visit(bias1), visit(weight2), visit(bias2);
  }
};

Packed pack(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma, const OptionalTensor& beta,
            const Tensor& weight1, const OptionalTensor& bias1, const Tensor& weight2, const OptionalTensor& bias2,
            double eps, bool rms, bool zero_centered_gamma, std::string_view kind, at::ArrayRef<double> params) {
  return {x,
          residual,
          gamma,
          beta,
          weight1,
          bias1,
          weight2,
          bias2,
          Prologue::norm(eps, rms, zero_centered_gamma),
          Prologue::act(kind, params),
          {},
          {}};
}

std::tuple<Tensor, Tensor, Tensor> unpack(const variable_list& outputs, const Packed& packed) {
  return {outputs[0], outputs[1], outputs.size() > 2 ? outputs[2] : packed.x.new_empty({0})};
}

using Mlp = Op<&pack, &unpack>;

}  // namespace

TORCH_LIBRARY_FRAGMENT(te, m) {
  m.def(
      "layernorm_mlp(Tensor x, Tensor? residual, Tensor gamma, Tensor? beta, Tensor fc1_weight, Tensor? fc1_bias, "
      "Tensor fc2_weight, Tensor? fc2_bias, float eps, bool rms, bool zero_centered_gamma, str kind, float[] params) "
      "-> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(te, CompositeExplicitAutograd, m) { m.impl("layernorm_mlp", Mlp::composite); }
TORCH_LIBRARY_IMPL(te, Autograd, m) { m.impl("layernorm_mlp", Mlp::autograd); }
TORCH_LIBRARY_IMPL(te, AutocastCPU, m) { m.impl("layernorm_mlp", Mlp::autocast); }
TORCH_LIBRARY_IMPL(te, AutocastCUDA, m) { m.impl("layernorm_mlp", Mlp::autocast); }

void register_layernorm_mlp(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("layernorm_mlp",
        torch::wrap_pybind_function_no_gil(
            [](const Tensor& x, const OptionalTensor& residual, const Tensor& gamma, const OptionalTensor& beta,
               const Tensor& weight1, const OptionalTensor& bias1, const Tensor& weight2, const OptionalTensor& bias2,
               double eps, bool rms, bool zero_centered_gamma, const std::string& kind,
               const std::vector<double>& params, const py::object& sink1, const py::object& sink2) {
              const auto extra = [&](Packed& packed) {
                packed.sink1 = sink_of(sink1.ptr());
                packed.sink2 = sink_of(sink2.ptr());
                return packed.sink1 != nullptr || packed.sink2 != nullptr;
              };
              return Mlp::eager("te::layernorm_mlp", extra, x, residual, gamma, beta, weight1, bias1, weight2, bias2,
                                eps, rms, zero_centered_gamma, std::string_view(kind), at::ArrayRef<double>(params));
            }));
}

}  // namespace te_torch
