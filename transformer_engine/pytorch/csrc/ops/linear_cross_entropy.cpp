// linear_cross_entropy: the GEMM of a head and its loss, without all logits at once. Each chunk of tokens runs through
// the GEMM, the loss with its gradient, which overwrites the chunk's logits, and the two GEMMs of the backward. The
// formulas are in ops/cross_entropy.cpp and gemm/; this file has the loop, the saved tensors and the schemas.
// - A reduced loss has one factor for all gradients: the forward computes them, the backward scales them.
// - A loss that is not reduced has a factor for each token, which cannot be applied after the sum over tokens: its
//   backward runs the loop again with the factors.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "autograd/autograd.h"
#include "autograd/trailing_rows.h"
#include "core/op_registration.h"
#include "distributed/agreement.h"
#include "gemm/gemm.h"
#include "gemm/gemm_fp8.h"
#include "gemm/linear_core.h"
#include "gemm/product.h"
#include "ops/cross_entropy.h"
#include "wgrad/wgrad_task.h"

namespace te_torch {

namespace {

constexpr const char* kFusedOp = "linear_cross_entropy";
std::atomic<int64_t> chunk_bytes{int64_t{512} << 20};  // tests use less
constexpr int64_t kRowStep = 128;                      // a multiple of the FP8 blocks, so that none crosses chunks
constexpr SavedInfo kHiddenGradient{"gradient of hidden", "computed in the forward; the backward returns it",
                                    "a loss that is not reduced, whose backward recomputes all", true};
constexpr SavedInfo kWeightGradient{"gradient of the weight", "computed in the forward; the backward returns it",
                                    "a loss that is not reduced, whose backward recomputes all"};
constexpr SavedInfo kHidden{"hidden", "the backward computes chunks of logits from it again", kCallers, true};
constexpr SavedInfo kTarget{"target", "the backward computes the gradient of the loss again", kCallers, true, true};

using Flags = std::array<bool, 3>;  // of hidden, weight, bias
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Five linear_cross_entropy_fwd(const Tensor& hidden, const Tensor& weight, const OptionalTensor& bias,
                              const Tensor& target, const OptionalTensor& dloss, double label_smoothing,
                              bool reduce_loss, int64_t ignore_idx, bool float32_sum,
                              at::ArrayRef<int64_t> quantization, std::string_view group, int64_t ranks, Flags wanted);

// The tokens of a chunk: as many as fit into chunk_bytes, in chunks of equal size. Depends on shapes alone, so that
// equal calls give equal bits.
int64_t chunk_rows(int64_t tokens, int64_t classes, int64_t element_bytes, bool fp8) {
  const int64_t bytes_per_token =
      classes * (element_bytes + (fp8 ? 2 : 0));  // logits, and their gradient in FP8 in both directions
  const int64_t most = std::max(kRowStep, chunk_bytes.load() / bytes_per_token / kRowStep * kRowStep);
  const int64_t chunks = std::max<int64_t>(1, (tokens + most - 1) / most);
  return ((tokens + chunks - 1) / chunks + kRowStep - 1) / kRowStep * kRowStep;
}

void check_arguments(const Tensor& hidden, const Tensor& weight, const OptionalTensor& bias, const Tensor& target,
                     const LossOptions& options) {
  check_float(hidden, kFusedOp, "hidden");
  TORCH_CHECK_VALUE(hidden.dim() >= 1 && weight.dim() == 2 && weight.sym_size(1) == hidden.sym_size(-1), kFusedOp,
                    ": arguments 'hidden' and 'weight' have shapes ", hidden.sym_sizes(), " and ", weight.sym_sizes(),
                    ", wanted [..., features] and [classes, features].");
  check_same(weight, hidden, kFusedOp, "weight");
  if (bias.has_value()) {
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), kFusedOp,
                      ": argument 'bias' has shape ", bias->sym_sizes(), ", wanted [", weight.sym_size(0), "].");
    check_same(*bias, hidden, kFusedOp, "bias");
  }
  check_loss(kFusedOp, hidden.sym_sizes().slice(0, hidden.dim() - 1), weight.sym_size(0), hidden, target, options);
}

// The tensors of one call, and the computation of each chunk.
class ChunkLoop {
 public:
  ChunkLoop(const Tensor& hidden, const Tensor& weight, const OptionalTensor& bias, const Tensor& target,
            const LossOptions& options, Quantization quantization, Flags wanted, bool float32_sum)
      : x_(rows_of(hidden).reshape({-1, hidden.size(-1)})),
        bias_(bias),
        target_(target.contiguous().view({-1})),
        options_(options),
        q_(std::move(quantization)),
        wanted_(wanted) {
    const Tensor matrix = weight.contiguous();
    weight_ = operand_of(DispatchMode(Direct{}), q_ != nullptr ? &q_->weight : nullptr, matrix, {true, wanted[0]});
    classes_ = weight.size(0);
    const int64_t tokens = x_.size(0), features = x_.size(1);
    const auto sums = x_.options().dtype(float32_sum ? at::kFloat : x_.scalar_type());
    loss = at::empty({tokens}, x_.options().dtype(at::kFloat));
    if (wanted[0]) dhidden = at::empty({tokens, features}, x_.options());
    // Written by the first chunk; zeros without chunks.
    const auto make = [&](at::IntArrayRef shape, const at::TensorOptions& options) {
      return tokens > 0 ? at::empty(shape, options) : at::zeros(shape, options);
    };
    if (wanted[1]) dweight = make({classes_, features}, sums);
    if (wanted[2]) dbias = make({classes_}, x_.options().dtype(at::kFloat));
  }

  // scale: a factor of the gradients, float32 [1] or [tokens]; undefined: 1.
  void run(const Tensor& scale) {
    const int64_t tokens = x_.size(0);
    const int64_t step = chunk_rows(tokens, classes_, x_.element_size(), q_ != nullptr);
    for (int64_t first = 0; first < tokens; first += step) {
      const int64_t count = std::min(step, tokens - first);
      const bool by_row = scale.defined() && scale.numel() == tokens && tokens > 1;
      chunk(first, count, by_row ? scale.narrow(0, first, count) : scale);
    }
  }

  Tensor loss, dhidden, dweight, dbias;

 private:
  bool needs_any() const { return wanted_[0] || wanted_[1] || wanted_[2]; }

  void chunk(int64_t first, int64_t count, const Tensor& scale) {
    const DispatchMode dispatch(Direct{});
    const Operand x =
        operand_of(dispatch, q_ != nullptr ? &q_->x : nullptr, x_.narrow(0, first, count), {true, wanted_[1]});
    Tensor logits = product(x);
    loss_of_rows(logits, target_.narrow(0, first, count), scale, loss.narrow(0, first, count), needs_any(), options_);
    if (!needs_any()) return;
    if (wanted_[2]) {
      const Tensor sums = logits.sum(0, false, at::kFloat);
      first == 0 ? dbias.copy_(sums) : dbias.add_(sums);
    }
    if (!wanted_[0] && !wanted_[1]) return;
    const Operand dy = operand_of(dispatch, q_ != nullptr ? &q_->dy : nullptr, logits, {wanted_[0], wanted_[1]});
    logits = Tensor();  // frees the memory: with FP8 it is not read again
    if (wanted_[0]) hidden_gradient(dy, dhidden.narrow(0, first, count));
    if (wanted_[1]) {
      const MatrixWgrad gradient(dy, x, {}, x_.scalar_type(), q_ == nullptr || q_->split_wgrad);
      gradient.accumulate({WeightTarget{dweight, classes_, first == 0}}, false);
    }
  }

  Tensor product(const Operand& x) const {
    if (q_ == nullptr) return Direct::call<linear_fwd>("te::linear_fwd", x.plain, weight_.plain, bias_);
    return gemm_fp8(weight_.fp8, false, x.fp8, false, x_.scalar_type(), bias_,
                    may_be_fast(weight_.fp8, x.fp8, q_->split_fprop));
  }

  void hidden_gradient(const Operand& dy, Tensor out) const {
    if (q_ == nullptr) {
      Direct::call<gemm_accumulate>("te::gemm_accumulate", weight_.plain, dy.plain, std::string_view("NN"), out, false,
                                    true);
    } else {
      gemm_fp8_accumulate(weight_.fp8, true, dy.fp8, false, out, true,
                          may_be_fast(weight_.fp8, dy.fp8, q_->split_dgrad));
    }
  }

  Tensor x_;
  OptionalTensor bias_;
  Tensor target_;
  const LossOptions& options_;
  Quantization q_;
  Flags wanted_;
  Operand weight_;
  int64_t classes_ = 0;
};

// The trailing rows that the backward reads to compute the scales of each chunk again.
int64_t trailing_rows_of(at::ArrayRef<int64_t> quantization) {
  const Quantization q = quantization_of(quantization, kFusedOp);
  if (q == nullptr || !q->x.active()) return 0;
  return q->x.spec.scaling() == TE_SCALING_TENSOR ? kAllRows : 127;
}

Tensor or_empty(const Tensor& t, const Tensor& like) { return t.defined() ? t : like.new_empty({0}); }

struct LinearCrossEntropyFamily {
  static constexpr const char* kName = kFusedOp;
  struct State {
    LossOptions options;
    bool float32_sum = true;
    std::vector<int64_t> quantization;
    std::array<at::ScalarType, 3> dtypes{};
    OnceGuard once;
  };
  enum Saved { kX, kWeight, kBias, kTargets, kScale };

  template <class Mode>
  static Five compute(const State& s, const Tensor& hidden, const Tensor& weight, const OptionalTensor& bias,
                      const Tensor& target, const OptionalTensor& dloss, Flags wanted) {
    const at::ArrayRef<int64_t> quantization(s.quantization);
    const std::string_view group(s.options.group);
    const auto& o = s.options;
    if constexpr (std::is_same_v<Mode, Dispatched>) {
      return Mode::template call<linear_cross_entropy_fwd>("te::linear_cross_entropy_fwd", hidden, weight, bias, target,
                                                           dloss, o.label_smoothing, o.reduce, o.ignore_idx,
                                                           s.float32_sum, quantization, group, o.ranks, wanted);
    } else {  // the ops inside are recorded separately
      return linear_cross_entropy_fwd(hidden, weight, bias, target, dloss, o.label_smoothing, o.reduce, o.ignore_idx,
                                      s.float32_sum, quantization, group, o.ranks, wanted);
    }
  }

  template <class Mode>
  static variable_list forward(State& state, SaveContext& save, const Tensor& hidden, const Tensor& weight,
                               const OptionalTensor& bias, const Tensor& target, double label_smoothing,
                               bool reduce_loss, int64_t ignore_idx, bool float32_sum,
                               at::ArrayRef<int64_t> quantization, std::string_view group, int64_t ranks) {
    state.options = {label_smoothing, reduce_loss, ignore_idx, std::string(group), ranks};
    state.float32_sum = float32_sum;
    state.quantization = quantization.vec();
    state.dtypes = {hidden.scalar_type(), weight.scalar_type(), hidden.scalar_type()};
    const bool bias_wanted = bias.has_value() && bias->requires_grad();
    const Flags wanted{hidden.requires_grad(), weight.requires_grad(), bias_wanted};
    const auto [loss, dhidden, dweight, dbias, inverse] =
        compute<Mode>(state, hidden, weight, bias, target, {}, reduce_loss ? wanted : Flags{});
    if (reduce_loss) {
      if (wanted[0]) save.keep(kX, dhidden, kHiddenGradient);
      if (wanted[1]) save.keep(kWeight, dweight, kWeightGradient);
      if (wanted[2]) save.keep(kBias, dbias, kWeightGradient);
      if (scales_late(hidden)) save.keep(kScale, inverse, kLossCount);
    } else {
      const TrailingRows trailing(trailing_rows_of(state.quantization));
      save.keep(kX, hidden, kHidden);
      save.keep(kWeight, weight, kParameter);
      save.keep(kBias, bias, kParameter);
      save.keep(kTargets, target, kTarget);
    }
    return {loss};
  }

  template <class Mode>
  static variable_list backward(const State& state, const Wanted& inputs, const NamedTensors& saved,
                                const variable_list& grads) {
    const Flags wanted{inputs[0], inputs[1], inputs[2]};
    if (!grads[0].defined()) return {};
    variable_list out(3);
    if (!state.options.reduce) {
      std::tie(std::ignore, out[0], out[1], out[2], std::ignore) =
          compute<Mode>(state, saved[kX], saved[kWeight], saved.optional(kBias), saved[kTargets], grads[0], wanted);
    } else {
      if constexpr (std::is_same_v<Mode, Direct>) state.once.pass(kFusedOp);
      for (int i = 0; i < 3; ++i) {
        if (wanted[i]) out[i] = scaled<Mode>(saved[kX + i], grads[0], saved.optional(kScale));
      }
    }
    for (int i = 0; i < 3; ++i) out[i] = wanted[i] ? out[i].to(state.dtypes[i]) : Tensor();
    return out;
  }
};

Five linear_cross_entropy_fwd(const Tensor& hidden, const Tensor& weight, const OptionalTensor& bias,
                              const Tensor& target, const OptionalTensor& dloss, double label_smoothing,
                              bool reduce_loss, int64_t ignore_idx, bool float32_sum,
                              at::ArrayRef<int64_t> quantization, std::string_view group, int64_t ranks, Flags wanted) {
  const LossOptions options{label_smoothing, reduce_loss, ignore_idx, std::string(group), ranks};
  const RankErrorGuard guard(options.fingerprint_group(), hidden, kFusedOp);
  check_arguments(hidden, weight, bias, target, options);
  check_memory(hidden, kFusedOp, "hidden");
  check_memory(weight, kFusedOp, "weight");
  const Tensor inverse = loss_inverse_count(target.contiguous().view({-1}), weight.size(0), options);
  ChunkLoop loop(hidden, weight, bias, target, options, quantization_of(quantization, kFusedOp), wanted, float32_sum);
  Tensor scale = reduce_loss && !scales_late(hidden) ? inverse : Tensor();
  if (dloss.has_value()) scale = dloss->resolve_neg().contiguous().view({-1});
  loop.run(scale);
  const Tensor dhidden = loop.dhidden.defined() ? loop.dhidden.view(hidden.sizes()) : Tensor();
  return {reduce_loss ? loss_mean(loop.loss, inverse) : loop.loss.view(target.sizes()), or_empty(dhidden, hidden),
          or_empty(loop.dweight, hidden), or_empty(loop.dbias, hidden), inverse};
}

Five linear_cross_entropy_fwd_meta(const Tensor& hidden, const Tensor& weight, const OptionalTensor& bias,
                                   const Tensor& target, const OptionalTensor& dloss, double label_smoothing,
                                   bool reduce_loss, int64_t ignore_idx, bool float32_sum,
                                   at::ArrayRef<int64_t> quantization, std::string_view group, int64_t ranks,
                                   Flags wanted) {
  check_arguments(hidden, weight, bias, target, {label_smoothing, reduce_loss, ignore_idx, std::string(group), ranks});
  const auto floats = hidden.options().dtype(at::kFloat);
  return {reduce_loss ? hidden.new_empty({}, floats) : hidden.new_empty_symint(target.sym_sizes(), floats),
          wanted[0] ? hidden.new_empty_symint(hidden.sym_sizes()) : hidden.new_empty({0}),
          wanted[1] ? hidden.new_empty_symint(weight.sym_sizes(), float32_sum ? floats : hidden.options())
                    : hidden.new_empty({0}),
          wanted[2] ? hidden.new_empty_symint({weight.sym_size(0)}, floats) : hidden.new_empty({0}),
          hidden.new_empty({1}, floats)};
}

Tensor linear_cross_entropy_autograd(const Tensor& hidden, const Tensor& weight, const OptionalTensor& bias,
                                     const Tensor& target, double label_smoothing, bool reduce_loss, int64_t ignore_idx,
                                     bool float32_sum, at::ArrayRef<int64_t> quantization, std::string_view group,
                                     int64_t ranks) {
  return Node<LinearCrossEntropyFamily, Dispatched>::run(hidden, weight, bias, target, label_smoothing, reduce_loss,
                                                         ignore_idx, float32_sum, quantization, group, ranks)[0];
}

Tensor linear_cross_entropy_dispatched(const Tensor& hidden, const Tensor& weight, const OptionalTensor& bias,
                                       const Tensor& target, double label_smoothing, bool reduce_loss,
                                       int64_t ignore_idx, bool float32_sum, at::ArrayRef<int64_t> quantization,
                                       std::string_view group, int64_t ranks) {
  return std::get<0>(Dispatched::call<linear_cross_entropy_fwd>(
      "te::linear_cross_entropy_fwd", hidden, weight, bias, target, OptionalTensor(), label_smoothing, reduce_loss,
      ignore_idx, float32_sum, quantization, group, ranks, Flags{}));
}

Tensor linear_cross_entropy_autocast(const Tensor& hidden, const Tensor& weight, const OptionalTensor& bias,
                                     const Tensor& target, double label_smoothing, bool reduce_loss, int64_t ignore_idx,
                                     bool float32_sum, at::ArrayRef<int64_t> quantization, std::string_view group,
                                     int64_t ranks) {
  const Tensor x = autocast(hidden), matrix = autocast(weight);  // casts before autocast is excluded
  const OptionalTensor shift = autocast(bias);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return Dispatched::call<linear_cross_entropy_autograd>("te::linear_cross_entropy", x, matrix, shift, target,
                                                         label_smoothing, reduce_loss, ignore_idx, float32_sum,
                                                         quantization, group, ranks);
}

// Called by Python in eager mode.
Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const OptionalTensor& bias,
                            const Tensor& target, double label_smoothing, bool reduce_loss, int64_t ignore_idx,
                            bool float32_sum, const std::vector<int64_t>& quantization, const std::string& name,
                            int64_t ranks) {
  const at::ArrayRef<int64_t> q(quantization);
  const std::string_view group(name);
  if (must_dispatch({&hidden, &weight, pointer_to(bias), &target})) {
    return Dispatched::call<linear_cross_entropy_autograd>("te::linear_cross_entropy", hidden, weight, bias, target,
                                                           label_smoothing, reduce_loss, ignore_idx, float32_sum, q,
                                                           group, ranks);
  }
  const Tensor x = autocast(hidden), matrix = autocast(weight);
  const OptionalTensor shift = autocast(bias);
  if (!needs_graph({&x, &matrix, pointer_to(shift)})) {
    return std::get<0>(linear_cross_entropy_fwd(x, matrix, shift, target, OptionalTensor(), label_smoothing,
                                                reduce_loss, ignore_idx, float32_sum, q, group, ranks, Flags{}));
  }
  return Node<LinearCrossEntropyFamily, Direct>::run(x, matrix, shift, target, label_smoothing, reduce_loss, ignore_idx,
                                                     float32_sum, q, group, ranks)[0];
}

}  // namespace

#define TE_ARGUMENTS "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
#define TE_LOSS                                                                                                    \
  "float label_smoothing, bool reduce_loss, int ignore_idx, bool float32_sum, int[] quantization, str group, int " \
  "ranks"

TE_OP_REGISTRATION(linear_cross_entropy, ops) {
  ops.op("linear_cross_entropy_fwd(" TE_ARGUMENTS "Tensor? dloss, " TE_LOSS
         ", bool[3] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
      .kernel(linear_cross_entropy_fwd)
      .meta(linear_cross_entropy_fwd_meta);
  ops.op("linear_cross_entropy(" TE_ARGUMENTS TE_LOSS ") -> Tensor")
      .composite(linear_cross_entropy_dispatched)
      .autograd(linear_cross_entropy_autograd)
      .autocast(linear_cross_entropy_autocast)
      .python(linear_cross_entropy);
  ops.python("linear_cross_entropy_chunk_rows", chunk_rows);
  ops.python("set_linear_cross_entropy_chunk_bytes", [](int64_t bytes) { return chunk_bytes.exchange(bytes); });
}

}  // namespace te_torch
