// layernorm_mlp: norm, first product, activation and second product as one node, made of the linear family twice. What
// the halves keep is kept, or with `recompute` only the input, and the backward computes the rest again. Between them
// the gradient of the pre-activation need not exist in plain form: it is quantized where it is made.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "linear_family.h"
#include "op_faces.h"

namespace te_torch {

namespace {

struct MlpOptions {
  bool recompute = false;           // keep the input alone
  bool fp8_pre_activation = false;  // keep it as E4M3 in blocks of 1 x 128
};

// What is kept in place of a plain pre-activation: half its bytes and a thirty-second for scales.
const Quantizer& packer() {
  static const Quantizer packer{{QuantizeSpec::kBlock1d, false, true, 0.f}, {}, {}, {}};
  return packer;
}

struct MlpFamily {
  static constexpr const char* kName = "layernorm_mlp";
  using Half = LinearFamily;
  struct State {
    Half::State fc1, fc2;
    MlpOptions options;
  };

  enum Slot { kX, kResidual, kGamma, kBeta, kWeight1, kBias1, kWeight2, kBias2 };
  // Saved: what the halves keep, one after the other, then the packed pre-activation; with recompute instead:
  enum Saved {
    kInput,
    kSavedGamma,
    kSavedBeta,
    kSavedBias1,
    kScales1,
    kWeight1Plain,
    kWeight1Rowwise,
    kWeight1RowwiseScale,
    kWeight1Columnwise,
    kWeight1ColumnwiseScale,
    kSavedWeight2,
    kWeight2Scale,
    kScales2
  };

  static constexpr size_t kPackedData = 2 * Half::kSavedCount, kPackedScales = kPackedData + 1;

  // Outputs: y, the norm's output, and x + residual where there was one.
  template <class Route>
  static variable_list forward(State& state, Keeper& keeper, const Tensor& x, const OptionalTensor& residual,
                               const Tensor& gamma, const OptionalTensor& beta, const Tensor& weight1,
                               const OptionalTensor& bias1, const Tensor& weight2, const OptionalTensor& bias2,
                               const Prologue& norm, const Prologue& activation, const MlpOptions& options,
                               const std::array<Sink, 2>& sinks, const std::array<Quantization, 2>& quantizations,
                               const std::array<Quantized, 2>& own_weights) {
    const bool graph = keeper.serves_a_graph();
    const bool wanted1 = graph && weight1.requires_grad(), wanted2 = graph && weight2.requires_grad();
    const bool into_norm =
        graph && (x.requires_grad() || Half::wants(residual) || gamma.requires_grad() || Half::wants(beta));
    const bool into_first = into_norm || wanted1 || (graph && Half::wants(bias1));
    const bool any = into_first || wanted2;
    state.options = options;
    state.fc1 = Half::State(norm, sinks[0], quantizations[0]);
    state.fc2 = Half::State(activation, sinks[1], quantizations[1]);
    state.fc1.prologue.recompute_output |= options.recompute;
    state.fc2.prologue.input_kept_elsewhere = options.recompute || options.fp8_pre_activation;
    const OptionalTensor none;
    Keeper apart;  // with recompute: of what the halves would keep only some is kept
    Keeper& both = options.recompute ? apart : keeper;

    Quantized own1 = own_weights[0];
    if (options.recompute && !own1.defined() && quantizations[0] != nullptr) {
      own1 = operand_of<Route>(&quantizations[0]->weight, weight1, {true, any}).fp8;
    }
    const Half::Needs needs1 = options.recompute ? Half::Needs{any, any} : Half::Needs{into_norm, wanted1};
    variable_list first = Half::run<Route>(state.fc1, both, {x, weight1, bias1, gamma, beta, residual, own1}, needs1);
    variable_list second = Half::run<Route>(
        state.fc2, both, {first[0], weight2, bias2, none, none, none, own_weights[1]}, {into_first, wanted2});
    if (options.recompute) {
      const variable_list halves = apart.take();
      const Tensor* saved2 = halves.data() + Half::kSavedCount;
      keeper.keep_if(any, halves[Half::kInput], kMlpInput);
      keeper.keep_if(any, gamma, kParameter);
      keeper.keep_if(any, beta, kParameter);
      keeper.keep_if(any, bias1, kParameter);
      keeper.keep_if(any, halves[Half::kProductScale], Half::kScales);
      keeper.keep_if(any && !own1.defined(), weight1, kParameter);
      keeper.keep_if(any, own1.rowwise, Half::kQuantizedWeight);
      keeper.keep_if(any, own1.rowwise_scale_inv, Half::kScales);
      keeper.keep_if(any, own1.columnwise, Half::kQuantizedWeight);
      keeper.keep_if(any, own1.columnwise_scale_inv, Half::kScales);
      keeper.keep_if(any, saved2[Half::kSavedWeight], state.fc2.weight.quantized ? Half::kQuantizedWeight : kParameter);
      keeper.keep_if(any, saved2[Half::kWeightScale], Half::kScales);
      keeper.keep_if(any, saved2[Half::kProductScale], Half::kScales);
      if (any) {
        keeper.recompute(norm.return_output ? first[1] : x, Half::kNormOutput);
        keeper.recompute(first[0], Half::kPreActivation);
      }
    } else if (options.fp8_pre_activation) {
      const Quantized packed = any ? operand_of<Route>(&packer(), first[0], {true, false}).fp8 : Quantized{};
      keeper.keep_if(any, packed.rowwise, kPackedPreActivation);
      keeper.keep_if(any, packed.rowwise_scale_inv, Half::kScales);
    }
    first[0] = second[0];
    return first;
  }

  template <class Route>
  static variable_list backward(const State& state, const Wanted& wanted, const variable_list& saved,
                                const variable_list& grads) {
    const bool into_norm = wanted[kX] || wanted[kResidual] || wanted[kGamma] || wanted[kBeta];
    const bool into_first = into_norm || wanted[kWeight1] || wanted[kBias1];
    const bool any = into_first || wanted[kWeight2];
    Half::State fc1 = state.fc1;
    variable_list saved1, saved2;
    if (!any) {
      saved2.resize(Half::kSavedCount);
    } else if (state.options.recompute) {
      std::tie(saved1, saved2) = run_again<Route>(fc1, saved, {into_norm, wanted[kWeight1]});
      fc1.prologue.return_output = state.fc1.prologue.return_output;
    } else {
      const auto middle = saved.begin() + Half::kSavedCount;
      saved1.assign(saved.begin(), middle);
      saved2.assign(middle, middle + Half::kSavedCount);
    }
    if (any && grads[0].defined() && state.options.fp8_pre_activation) {
      Tensor& pre_activation = saved2[Half::kInput];
      const bool packed_now = state.options.recompute;
      const Tensor& like = packed_now ? pre_activation : grads[0];
      const Quantized packed =
          packed_now ? operand_of<Route>(&packer(), pre_activation, {true, false}).fp8
                     : Quantized{TE_SCALING_BLOCK_1D, false, saved[kPackedData], saved[kPackedScales], {}, {}};
      const Tensor unpacked = plain_of<Route>({{}, packed}, state.fc1.dtype);  // leading dimensions folded
      pre_activation = detail::unfold_last(unpacked, like, unpacked.sym_size(-1));
    }

    const Directions directions{into_norm, wanted[kWeight1]};
    Half::Onward onward{gradient_quantizer(fc1.quantization.get(), directions), directions, wanted[kBias1], {}};
    const variable_list second = Half::run_backward<Route>(state.fc2, {into_first, wanted[kWeight2], wanted[kBias2]},
                                                           saved2, {grads[0], {}, {}, {}, {}}, &onward);
    variable_list first(Half::kResidual + 1);
    if (into_first) {
      const auto grad = [&](size_t i) { return grads.size() > i ? grads[i] : Tensor(); };
      const Half::Incoming in{second[Half::kX], grad(1), grad(2),
                              onward.made.dx.quantized() ? onward.made.dx : Operand{}, onward.made.dbias};
      first = Half::run_backward<Route>(
          fc1, {wanted[kX], wanted[kWeight1], wanted[kBias1], wanted[kGamma], wanted[kBeta], wanted[kResidual]}, saved1,
          in, nullptr);
    }
    return {first[Half::kX],      first[Half::kResidual], first[Half::kGamma],   first[Half::kBeta],
            first[Half::kWeight], first[Half::kBias],     second[Half::kWeight], second[Half::kBias]};
  }

  static constexpr Kept kMlpInput{"MLP input", "norm, first product and activation are computed again from it",
                                  "the sum or product that made it: te.checkpoint around the layer"};
  static constexpr Kept kPackedPreActivation{"pre-activation, FP8", "the activation's backward reads it",
                                             "norm and first product: LayerNormMLP(checkpoint=True)"};

 private:
  // What the halves would have kept, with the scales of the forward.
  template <class Route>
  static std::tuple<variable_list, variable_list> run_again(Half::State& fc1, const variable_list& saved,
                                                            Half::Needs needs) {
    const auto optional = [&](size_t i) { return saved[i].defined() ? OptionalTensor(saved[i]) : OptionalTensor(); };
    fc1.prologue.recompute_output = fc1.prologue.return_input = fc1.prologue.return_output = false;
    if constexpr (std::is_same_v<Route, Direct>) {  // a traced route has no state, and makes the same scales again
      if (fc1.quantization != nullptr) fc1.quantization = with_scales(*fc1.quantization, saved[kScales1]);
    }
    Quantized own;
    if (saved[kWeight1Rowwise].defined()) {
      own = {fc1.weight.scaling,          fc1.weight.e5m2,           saved[kWeight1Rowwise],
             saved[kWeight1RowwiseScale], saved[kWeight1Columnwise], saved[kWeight1ColumnwiseScale]};
    }
    const Tensor& weight1 = own.defined() ? own.rowwise : saved[kWeight1Plain];
    Keeper keeper;
    const variable_list first = Half::run<Route>(fc1, keeper,
                                                 {saved[kInput], weight1, optional(kSavedBias1), *optional(kSavedGamma),
                                                  optional(kSavedBeta), OptionalTensor(), own},
                                                 needs);
    variable_list saved2(Half::kSavedCount);
    saved2[Half::kInput] = first[0];
    saved2[Half::kSavedWeight] = saved[kSavedWeight2];
    saved2[Half::kWeightScale] = saved[kWeight2Scale];
    saved2[Half::kProductScale] = saved[kScales2];
    return {keeper.take(), saved2};
  }
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
  MlpOptions options;
  std::array<Sink, 2> sinks;
  std::array<Quantization, 2> quantizations;
  std::array<Quantized, 2> own_weights;

  template <class Call>
  auto with(Call&& call) const {
    return call(x, residual, gamma, beta, weight1, bias1, weight2, bias2, norm, activation, options, sinks,
                quantizations, own_weights);
  }
  template <class Visit>
  void each(Visit&& visit) {
    visit(x), visit(residual), visit(gamma), visit(beta), visit(bias1), visit(bias2);
    if (!own_weights[0].defined()) visit(weight1);
    if (!own_weights[1].defined()) visit(weight2);
  }
  template <class Visit>
  void each_own(Visit&& visit) const {
    if (own_weights[0].defined()) visit(weight1);
    if (own_weights[1].defined()) visit(weight2);
  }
  bool weights_need_graph() const { return weight1.requires_grad() || weight2.requires_grad(); }
};

Packed pack(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma, const OptionalTensor& beta,
            const Tensor& weight1, const OptionalTensor& bias1, const Tensor& weight2, const OptionalTensor& bias2,
            double eps, bool rms, bool zero_centered_gamma, std::string_view kind, at::ArrayRef<double> params,
            bool return_norm_output, bool recompute_norm_output, bool recompute, bool fp8_pre_activation,
            at::ArrayRef<int64_t> fc1_quantization, at::ArrayRef<int64_t> fc2_quantization) {
  Prologue norm = Prologue::norm(eps, rms, zero_centered_gamma);
  norm.return_output = return_norm_output;
  norm.recompute_output = recompute_norm_output;
  return {x,
          residual,
          gamma,
          beta,
          weight1,
          bias1,
          weight2,
          bias2,
          norm,
          Prologue::act(kind, params),
          {recompute, fp8_pre_activation},
          {},
          {quantization_of(fc1_quantization, MlpFamily::kName), quantization_of(fc2_quantization, MlpFamily::kName)},
          {}};
}

using Mlp = Op<&pack, &three_outputs<Packed>>;

}  // namespace

TORCH_LIBRARY_FRAGMENT(te, m) {
  m.def(
      "layernorm_mlp(Tensor x, Tensor? residual, Tensor gamma, Tensor? beta, Tensor fc1_weight, Tensor? fc1_bias, "
      "Tensor fc2_weight, Tensor? fc2_bias, float eps, bool rms, bool zero_centered_gamma, str kind, float[] params, "
      "bool return_norm_output, bool recompute_norm_output, bool recompute, bool fp8_pre_activation, "
      "int[] fc1_quantization, int[] fc2_quantization) -> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(te, CompositeExplicitAutograd, m) { m.impl("layernorm_mlp", Mlp::composite); }
TORCH_LIBRARY_IMPL(te, Autograd, m) { m.impl("layernorm_mlp", Mlp::autograd); }
TORCH_LIBRARY_IMPL(te, AutocastCPU, m) { m.impl("layernorm_mlp", Mlp::autocast); }
TORCH_LIBRARY_IMPL(te, AutocastCUDA, m) { m.impl("layernorm_mlp", Mlp::autocast); }

void register_layernorm_mlp(pybind11::module_& m) {
  namespace py = pybind11;
  using Handles = std::array<EagerHandles, 2>;
  m.def(
      "layernorm_mlp",
      torch::wrap_pybind_function_no_gil(
          [](const Tensor& x, const OptionalTensor& residual, const Tensor& gamma, const OptionalTensor& beta,
             const Tensor& weight1, const OptionalTensor& bias1, const Tensor& weight2, const OptionalTensor& bias2,
             double eps, bool rms, bool zero_centered_gamma, const std::string& kind, const std::vector<double>& params,
             bool return_norm_output, bool recompute_norm_output, bool recompute, bool fp8_pre_activation,
             const py::object& sink1, const py::object& sink2,
             const std::shared_ptr<ProductQuantization>& quantization1,
             const std::shared_ptr<ProductQuantization>& quantization2, const Quantized* own1, const Quantized* own2) {
            const Handles handles{EagerHandles{sink1.ptr(), quantization1, own1},
                                  EagerHandles{sink2.ptr(), quantization2, own2}};
            const auto extra = [&](Packed& packed) {
              for (size_t i = 0; i < 2; ++i) {
                packed.sinks[i] = sink_of(handles[i].sink);
                packed.quantizations[i] = handles[i].quantization;
                if (handles[i].own_weight != nullptr) packed.own_weights[i] = *handles[i].own_weight;
              }
              return packed.sinks[0] != nullptr || packed.sinks[1] != nullptr;
            };
            return Mlp::eager("te::layernorm_mlp", extra, x, residual, gamma, beta, weight1, bias1, weight2, bias2, eps,
                              rms, zero_centered_gamma, std::string_view(kind), at::ArrayRef<double>(params),
                              return_norm_output, recompute_norm_output, recompute, fp8_pre_activation, handles[0],
                              handles[1]);
          }));
}

}  // namespace te_torch
