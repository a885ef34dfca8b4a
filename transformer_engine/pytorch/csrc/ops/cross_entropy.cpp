// The binding of cross entropy. In eager mode the forward overwrites the logits with their gradient and increments
// their version, so that a node that has saved them raises. Traced calls get the gradient as a new tensor, by
// te::cross_entropy_fwd.
#include "ops/cross_entropy.h"

#include <ATen/ops/empty.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "autograd/autograd.h"
#include "core/op_registration.h"
#include "distributed/agreement.h"
#include "distributed/group.h"

namespace te_torch {

namespace {

constexpr const char* kOp = "cross_entropy";
constexpr SavedInfo kLogitsGradient{"gradient of the logits", "the backward returns it",
                                    "the memory of the logits, which it overwrites"};

void check_logits(const Tensor& logits, const Tensor& target, const LossOptions& options) {
  check_float(logits, kOp, "logits");
  TORCH_CHECK_VALUE(logits.dim() >= 1, kOp, ": argument 'logits' has no dimensions, wanted [..., classes].");
  TORCH_CHECK_VALUE(logits.is_contiguous(), kOp, ": argument 'logits' has strides ", logits.sym_strides(), " of shape ",
                    logits.sym_sizes(),
                    ", wanted contiguous logits, as the gradient overwrites them; pass logits.contiguous().");
  check_loss(kOp, logits.sym_sizes().slice(0, logits.dim() - 1), logits.sym_size(-1), logits, target, options);
}

// Remembers logits that hold a gradient: byte ranges by storage, with the version of the tensor since then. Any other
// write to the storage increments the version, after which it may hold logits.
class GradientsOverLogits {
 public:
  void check(const Tensor& logits) {
    if (!has_version(logits)) return;
    const std::scoped_lock lock(mutex_);
    const auto found = marks_.find(storage_of(logits));
    if (found == marks_.end() || found->second.version != logits._version()) return;
    const Range range = range_of(logits);
    for (const Range& held : found->second.held) {
      TORCH_CHECK(range.begin >= held.end || held.begin >= range.end, kOp,
                  ": argument 'logits' holds the gradient of an earlier loss, which has overwritten the logits; "
                  "compute the logits again, or pass each loss a clone().");
    }
  }

  // Called after a gradient has overwritten logits; increments their version.
  void write(const Tensor& logits) {
    if (!has_version(logits)) return;
    const std::scoped_lock lock(mutex_);
    std::erase_if(marks_, [](const auto& mark) { return mark.second.storage.expired(); });
    const auto [place, is_new] = marks_.try_emplace(storage_of(logits), logits);
    Mark& mark = place->second;
    if (mark.version != logits._version()) mark.held.clear();
    mark.held.push_back(range_of(logits));
    note_written(logits);
    mark.version = logits._version();
  }

  // Called after such a gradient was scaled in place.
  void update(const Tensor& gradient) {
    if (!has_version(gradient)) return;
    const std::scoped_lock lock(mutex_);
    const auto found = marks_.find(storage_of(gradient));
    const bool holds = found != marks_.end() && found->second.version == gradient._version();
    note_written(gradient);
    if (holds) found->second.version = gradient._version();
  }

 private:
  struct Range {
    int64_t begin, end;  // in bytes of the storage
  };
  struct Mark {
    explicit Mark(const Tensor& t) : storage(t.storage().getWeakStorageImpl()), version(t._version()) {}

    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // keeps the address from being reused
    int64_t version;
    std::vector<Range> held;
  };

  static bool has_version(const Tensor& t) { return t.has_storage() && !t.is_inference() && t.numel() != 0; }
  static c10::StorageImpl* storage_of(const Tensor& t) { return t.storage().unsafeGetStorageImpl(); }
  static Range range_of(const Tensor& t) {  // contiguous
    const auto size = int64_t(t.element_size());
    return {t.storage_offset() * size, (t.storage_offset() + t.numel()) * size};
  }

  std::mutex mutex_;
  std::unordered_map<c10::StorageImpl*, Mark> marks_;
};

GradientsOverLogits& gradients_over_logits() {
  static GradientsOverLogits marks;
  return marks;
}

using Three = std::tuple<Tensor, Tensor, Tensor>;

// (loss, logits overwritten with their gradient, the mean's 1 / n or an empty tensor).
Three over_logits(const Tensor& logits, const Tensor& target, const LossOptions& options, bool gradient) {
  const RankErrorGuard guard(options.fingerprint_group(), logits, kOp);
  check_logits(logits, target, options);
  check_memory(logits, kOp, "logits");
  gradients_over_logits().check(logits);
  const int64_t classes = logits.size(-1);
  const Tensor rows = logits.view({-1, classes}), targets = target.contiguous().view({-1});
  const auto floats = logits.options().dtype(at::kFloat);
  const Tensor loss = at::empty(target.sizes(), floats), flat = loss.view({-1});
  Tensor inverse, scale;
  if (options.reduce) {
    inverse = loss_inverse_count(targets, classes, options);
    if (!scales_late(logits)) scale = inverse;
  }
  loss_of_rows(rows, targets, scale, flat, gradient, options);
  if (gradient) gradients_over_logits().write(logits);
  return {options.reduce ? loss_mean(flat, inverse) : loss, logits, options.reduce ? inverse : at::empty({0}, floats)};
}

LossOptions options_of(double label_smoothing, bool reduce_loss, int64_t ignore_idx, std::string_view group,
                       int64_t ranks) {
  return {label_smoothing, reduce_loss, ignore_idx, std::string(group), ranks};
}

// The functional form: the logits are not changed.
Three cross_entropy_fwd(const Tensor& logits, const Tensor& target, double label_smoothing, bool reduce_loss,
                        int64_t ignore_idx, std::string_view group, int64_t ranks, bool gradient) {
  const LossOptions options = options_of(label_smoothing, reduce_loss, ignore_idx, group, ranks);
  const RankErrorGuard guard(options.fingerprint_group(), logits, kOp);
  check_logits(logits, target, options);
  gradients_over_logits().check(logits);
  const Tensor memory = gradient ? logits.clone() : logits;
  auto [loss, grad, inverse] = over_logits(memory, target, options, gradient);
  return {loss, gradient ? grad : logits.new_empty({0}), inverse};
}

Three cross_entropy_fwd_meta(const Tensor& logits, const Tensor& target, double label_smoothing, bool reduce_loss,
                             int64_t ignore_idx, std::string_view group, int64_t ranks, bool gradient) {
  check_logits(logits, target, options_of(label_smoothing, reduce_loss, ignore_idx, group, ranks));
  const auto floats = logits.options().dtype(at::kFloat);
  return {reduce_loss ? logits.new_empty({}, floats) : logits.new_empty_symint(target.sym_sizes(), floats),
          gradient ? logits.new_empty_symint(logits.sym_sizes()) : logits.new_empty({0}),
          logits.new_empty({reduce_loss ? 1 : 0}, floats)};
}

struct CrossEntropyFamily {
  static constexpr const char* kName = kOp;
  struct State {
    OnceGuard once;
  };
  enum Saved { kGradient, kInverse };

  template <class Mode, class... Args>
  static Three compute(const Tensor& logits, const Tensor& target, const Args&... options) {
    if constexpr (std::is_same_v<Mode, Dispatched>) {
      return Mode::template call<cross_entropy_fwd>("te::cross_entropy_fwd", logits, target, options..., true);
    } else {
      return over_logits(logits, target, options_of(options...), true);
    }
  }

  template <class Mode>
  static variable_list forward(State&, SaveContext& save, const Tensor& logits, const Tensor& target,
                               double label_smoothing, bool reduce_loss, int64_t ignore_idx, std::string_view group,
                               int64_t ranks) {
    const auto [loss, grad, inverse] =
        compute<Mode>(logits, target, label_smoothing, reduce_loss, ignore_idx, group, ranks);
    save.keep(kGradient, grad, kLogitsGradient);
    if (reduce_loss && scales_late(logits)) save.keep(kInverse, inverse, kLossCount);
    return {loss};
  }

  template <class Mode>
  static variable_list backward(const State& state, const Wanted& wanted, const NamedTensors& saved,
                                const variable_list& grads) {
    if (!wanted[0] || !grads[0].defined()) return {};
    if constexpr (std::is_same_v<Mode, Direct>) state.once.pass(kOp);
    return {scaled<Mode>(saved[kGradient], grads[0], saved.optional(kInverse))};
  }
};

Tensor cross_entropy_autograd(const Tensor& logits, const Tensor& target, double label_smoothing, bool reduce_loss,
                              int64_t ignore_idx, std::string_view group, int64_t ranks) {
  return Node<CrossEntropyFamily, Dispatched>::run(logits, target, label_smoothing, reduce_loss, ignore_idx, group,
                                                   ranks)[0];
}

Tensor cross_entropy_dispatched(const Tensor& logits, const Tensor& target, double label_smoothing, bool reduce_loss,
                                int64_t ignore_idx, std::string_view group, int64_t ranks) {
  return std::get<0>(Dispatched::call<cross_entropy_fwd>("te::cross_entropy_fwd", logits, target, label_smoothing,
                                                         reduce_loss, ignore_idx, group, ranks, false));
}

// Called by Python in eager mode.
Tensor cross_entropy(const Tensor& logits, const Tensor& target, double label_smoothing, bool reduce_loss,
                     int64_t ignore_idx, const std::string& name, int64_t ranks) {
  const std::string_view group(name);
  if (must_dispatch({&logits, &target})) {
    return Dispatched::call<cross_entropy_autograd>("te::cross_entropy", logits, target, label_smoothing, reduce_loss,
                                                    ignore_idx, group, ranks);
  }
  if (!needs_graph({&logits})) {
    return std::get<0>(
        over_logits(logits, target, options_of(label_smoothing, reduce_loss, ignore_idx, group, ranks), false));
  }
  return Node<CrossEntropyFamily, Direct>::run(logits, target, label_smoothing, reduce_loss, ignore_idx, group,
                                               ranks)[0];
}

te_cross_entropy_plan plan_of(const Tensor& logits, const Tensor& target, const LossOptions& options) {
  te_cross_entropy_plan plan{};
  plan.logits = view_2d(logits, kOp, "logits");
  plan.target = view_2d(target, kOp, "target");
  plan.ignore_idx = options.ignore_idx;
  plan.ranks = static_cast<int32_t>(options.ranks);
  plan.label_smoothing = static_cast<float>(options.label_smoothing);
  return plan;
}

// Gathered from all ranks in their order; undefined where this rank has all classes.
Tensor statistics_of_all(te_cross_entropy_plan& plan, const Tensor& logits, const LossOptions& options) {
  if (options.ranks == 1) return {};
  const auto group = group_named(options.group, options.ranks);
  plan.rank = group->getRank();
  check_agreement(*group, logits, kOp);
  const Tensor mine = at::empty({logits.size(0), 4}, logits.options().dtype(at::kFloat));
  check(te_cross_entropy_statistics(&plan, view_2d(mine, kOp, "statistics"), current_stream(logits)));
  return group_gather(mine, options.group, options.ranks);
}

}  // namespace

void check_loss(const char* op, c10::SymIntArrayRef rows, const c10::SymInt& classes, const Tensor& like,
                const Tensor& target, const LossOptions& options) {
  TORCH_CHECK_VALUE(classes > 0, op, ": there are no classes, wanted at least one.");
  TORCH_CHECK_VALUE(target.scalar_type() == at::kLong, op, ": argument 'target' has dtype ", target.scalar_type(),
                    ", wanted int64; cast it with .long().");
  TORCH_CHECK_VALUE(target.sym_sizes() == rows, op, ": argument 'target' has shape ", target.sym_sizes(), ", wanted ",
                    rows, ", one class for each row.");
  TORCH_CHECK_VALUE(target.device() == like.device(), op, ": argument 'target' is on ", target.device(), ", wanted ",
                    like.device(), "; move it with .to(device).");
  TORCH_CHECK_VALUE(options.label_smoothing >= 0 && options.label_smoothing <= 1, op,
                    ": argument 'label_smoothing' is ", options.label_smoothing, ", wanted a number in [0, 1].");
}

Tensor loss_inverse_count(const Tensor& target, int64_t classes, const LossOptions& options) {
  const Tensor inverse = at::empty({1}, target.options().dtype(at::kFloat));
  check(te_cross_entropy_count(view_2d(target, kOp, "target"), classes * options.ranks, options.ignore_idx,
                               view_2d(inverse, kOp, "inverse_count"), current_stream(target)));
  return inverse;
}

namespace {

void pass_over_rows(const Tensor& logits, const Tensor& target, const Tensor& scale, const Tensor& loss, bool gradient,
                    const LossOptions& options) {
  te_cross_entropy_plan plan = plan_of(logits, target, options);
  const Tensor statistics = statistics_of_all(plan, logits, options);
  plan.loss = view_2d(loss, kOp, "loss");
  if (scale.defined()) plan.scale = view_2d(scale, kOp, "scale");
  if (statistics.defined()) plan.statistics = view_2d(statistics, kOp, "statistics");
  plan.gradient = gradient;
  check(te_cross_entropy_forward(&plan, current_stream(logits)));
}

void scale_rows(const Tensor& rows, const Tensor& factors, const Tensor& scale) {
  check(te_cross_entropy_backward(view_2d(rows, kOp, "grad"), view_2d(factors, kOp, "dloss"),
                                  scale.defined() ? view_2d(scale, kOp, "scale") : absent(), current_stream(rows)));
}

}  // namespace

void loss_of_rows(const Tensor& logits, const Tensor& target, const Tensor& scale, const Tensor& loss, bool gradient,
                  const LossOptions& options) {
  Direct::call<pass_over_rows>("te::cross_entropy_fwd", logits, target, scale, loss, gradient, options);
}

Tensor loss_mean(const Tensor& loss, const Tensor& inverse_count) {
  const Tensor mean = at::empty({}, loss.options());
  check(te_cross_entropy_mean(view_2d(loss, kOp, "loss"), view_2d(inverse_count, kOp, "inverse_count"),
                              view_2d(mean, kOp, "mean"), current_stream(loss)));
  return mean;
}

void scale_gradient(const Tensor& grad, const Tensor& dloss, const Tensor& scale) {
  if (grad.numel() == 0) return;
  check_memory(grad, kOp, "grad");
  const Tensor rows = grad.dim() > 1 ? grad.view({-1, grad.size(-1)}) : grad.view({1, -1});
  Direct::call<scale_rows>("te::cross_entropy_bwd", rows, dloss.resolve_neg().contiguous().view({-1}), scale);
  gradients_over_logits().update(grad);
}

Tensor cross_entropy_bwd(const Tensor& grad, const Tensor& dloss, const OptionalTensor& scale) {
  const Tensor copy = grad.clone(at::MemoryFormat::Contiguous);
  scale_gradient(copy, dloss, scale.has_value() ? *scale : Tensor());
  return copy;
}

namespace {
Tensor cross_entropy_bwd_meta(const Tensor& grad, const Tensor&, const OptionalTensor&) {
  return grad.new_empty_symint(grad.sym_sizes());
}
}  // namespace

void OnceGuard::pass(const char* op) const {
  TORCH_CHECK(!passed_->exchange(true), op,
              ": a second backward through the same loss: the first one has scaled the gradient in place; compute the "
              "loss again, or use torch.nn.functional.cross_entropy to retain a graph.");
}

#define TE_LOSS "float label_smoothing, bool reduce_loss, int ignore_idx, str group, int ranks"

TE_OP_REGISTRATION(cross_entropy, ops) {
  ops.op("cross_entropy_fwd(Tensor logits, Tensor target, " TE_LOSS ", bool gradient) -> (Tensor, Tensor, Tensor)")
      .kernel(cross_entropy_fwd)
      .meta(cross_entropy_fwd_meta);
  ops.op("cross_entropy_bwd(Tensor grad, Tensor dloss, Tensor? scale) -> Tensor")
      .kernel(cross_entropy_bwd)
      .meta(cross_entropy_bwd_meta);
  ops.op("cross_entropy(Tensor logits, Tensor target, " TE_LOSS ") -> Tensor")
      .composite(cross_entropy_dispatched)
      .autograd(cross_entropy_autograd)
      .python(cross_entropy);
#undef TE_LOSS
}

}  // namespace te_torch
