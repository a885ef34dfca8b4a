// The binding of the MoE router: its logits, the choice of experts, and the scores of the auxiliary loss
// (router_loss.cpp). Each is an autograd node. A node saves the logits and the chosen experts (int32, 4 bytes each),
// and computes scores again.
#include "ops/router.h"

#include <ATen/ops/empty.h>
#include <transformer_engine/optimizer.h>
#include <transformer_engine/router.h>

#include "autograd/autograd.h"
#include "core/op_registration.h"

namespace te_torch {

namespace {

constexpr const char* kTopk = "router_topk";
constexpr const char* kScores = "router_scores";

using Two = std::tuple<Tensor, Tensor>;
using Three = RouterTopk;

enum class MapFormat { kBytes, kBits, kNone };

MapFormat map_format_of(const char* op, std::string_view name) {
  if (name == "bytes") return MapFormat::kBytes;
  if (name == "bits") return MapFormat::kBits;
  TORCH_CHECK_VALUE(name == "none", op, ": argument 'map_format' is '", name, "', wanted bytes, bits or none.");
  return MapFormat::kNone;
}

int32_t score_of(const char* op, std::string_view name) {
  if (name == "softmax") return TE_ROUTER_SOFTMAX;
  if (name == "sigmoid") return TE_ROUTER_SIGMOID;
  TORCH_CHECK_VALUE(name == "sqrtsoftplus", op, ": argument 'score_function' is '", name,
                    "', wanted softmax, sigmoid or sqrtsoftplus.");
  return TE_ROUTER_SQRTSOFTPLUS;
}

// ---- checks, on sizes that may be symbolic ----

void check_logits(const char* op, const Tensor& logits, int64_t topk) {
  check_float(logits, op, "logits");
  TORCH_CHECK_VALUE(logits.dim() >= 1, op, ": argument 'logits' has no dimensions, wanted [..., experts].");
  const c10::SymInt experts = logits.sym_size(-1);
  TORCH_CHECK_VALUE(experts >= 1 && experts <= TE_ROUTER_MAX_EXPERTS, op, ": argument 'logits' has shape ",
                    logits.sym_sizes(), ", wanted 1 to ", TE_ROUTER_MAX_EXPERTS, " experts in the last dimension.");
  const c10::SymInt most = experts.min(TE_ROUTER_MAX_TOPK);
  TORCH_CHECK_VALUE(topk >= 1 && topk <= most, op, ": argument 'topk' is ", topk, ", wanted 1 to ", most,
                    ", as there are ", experts, " experts; at most ", TE_ROUTER_MAX_TOPK, " are supported.");
}

void check_expert_groups(const Tensor& logits, int64_t topk, int64_t num_groups, int64_t group_topk) {
  if (num_groups == 0 && group_topk == 0) return;
  const c10::SymInt experts = logits.sym_size(-1);
  TORCH_CHECK_VALUE(num_groups >= 1 && experts % num_groups == 0, kTopk, ": argument 'num_groups' is ", num_groups,
                    ", wanted a divisor of the ", experts, " experts.");
  TORCH_CHECK_VALUE(group_topk >= 1 && group_topk <= num_groups && topk % group_topk == 0, kTopk,
                    ": argument 'group_topk' is ", group_topk, ", wanted a divisor of topk = ", topk,
                    " from 1 to num_groups = ", num_groups, ".");
  TORCH_CHECK_VALUE(topk / group_topk <= experts / num_groups, kTopk, ": argument 'group_topk' is ", group_topk,
                    ", so that a group gives ", topk / group_topk, " of its ", experts / num_groups,
                    " experts; choose more groups, or fewer experts.");
}

void check_topk(const Tensor& logits, const OptionalTensor& bias, const RouterChoice& choice) {
  check_logits(kTopk, logits, choice.topk);
  check_expert_groups(logits, choice.topk, choice.num_groups, choice.group_topk);
  if (!bias.has_value()) return;
  TORCH_CHECK_VALUE(choice.score != "softmax", kTopk,
                    ": argument 'expert_bias' is given, wanted None with score_function 'softmax'; use sigmoid or "
                    "sqrtsoftplus.");
  check_float(*bias, kTopk, "expert_bias");
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == logits.sym_size(-1), kTopk,
                    ": argument 'expert_bias' has shape ", bias->sym_sizes(), ", wanted [", logits.sym_size(-1),
                    "], one value for each expert.");
  TORCH_CHECK_VALUE(bias->device() == logits.device(), kTopk, ": argument 'expert_bias' is on ", bias->device(),
                    ", wanted ", logits.device(), " like the logits; move it with .to(device).");
}

void check_like_logits(const char* op, const char* argument, const Tensor& t, const Tensor& logits,
                       at::ScalarType dtype) {
  TORCH_CHECK_VALUE(t.sym_sizes() == logits.sym_sizes() && t.scalar_type() == dtype && t.device() == logits.device(),
                    op, ": argument '", argument, "' is ", t.scalar_type(), " of shape ", t.sym_sizes(), " on ",
                    t.device(), ", wanted ", dtype, " of shape ", logits.sym_sizes(), " on ", logits.device(), ".");
}

c10::SymDimVector with_last(const Tensor& logits, const c10::SymInt& last) {
  c10::SymDimVector shape(logits.sym_sizes().begin(), logits.sym_sizes().end());
  shape.back() = last;
  return shape;
}

void check_chosen(const Tensor& chosen, const Tensor& logits, int64_t topk) {
  TORCH_CHECK_VALUE(chosen.sym_sizes() == c10::SymIntArrayRef(with_last(logits, topk)) &&
                        chosen.scalar_type() == at::kInt && chosen.device() == logits.device(),
                    kTopk, ": argument 'chosen' is ", chosen.scalar_type(), " of shape ", chosen.sym_sizes(), " on ",
                    chosen.device(), ", wanted int32 of shape ", c10::SymIntArrayRef(with_last(logits, topk)), " on ",
                    logits.device(), ".");
}

// ---- results ----

// [..., E] bool, [..., ceil(E / 8)] uint8, or empty.
Tensor empty_map(const Tensor& logits, MapFormat format) {
  const auto bytes = logits.options().dtype(at::kByte);
  if (format == MapFormat::kNone) return logits.new_empty({0}, bytes);
  if (format == MapFormat::kBits)
    return logits.new_empty_symint(with_last(logits, (logits.sym_size(-1) + 7) / 8), bytes);
  return logits.new_empty_symint(logits.sym_sizes(), logits.options().dtype(at::kBool));
}

Tensor empty_chosen(const Tensor& logits, int64_t topk) {
  return logits.new_empty_symint(with_last(logits, topk), logits.options().dtype(at::kInt));
}

te_tensor map_view(const char* op, const Tensor& map, MapFormat format) {
  if (format == MapFormat::kNone) return absent();
  return view_2d(map.view(at::kByte), op, "map");
}

te_router_plan plan_of(const char* op, const Tensor& logits, int64_t topk, std::string_view score, MapFormat format) {
  te_router_plan plan{};
  plan.logits = view_2d(logits, op, "logits");
  plan.topk = static_cast<int32_t>(topk);
  plan.score = score_of(op, score);
  plan.map_format = format == MapFormat::kBits ? TE_ROUTER_BITS : TE_ROUTER_BYTES;
  plan.scaling_factor = 1.f;
  return plan;
}

// ---- kernels ----

Three topk_fwd_meta(const Tensor& logits, const OptionalTensor& bias, int64_t topk, bool pre_softmax,
                    int64_t num_groups, int64_t group_topk, double scaling_factor, std::string_view score,
                    std::string_view map_format) {
  score_of(kTopk, score);
  check_topk(logits, bias, {topk, pre_softmax, num_groups, group_topk, scaling_factor, std::string(score)});
  return {logits.new_empty_symint(logits.sym_sizes()), empty_map(logits, map_format_of(kTopk, map_format)),
          empty_chosen(logits, topk)};
}

void check_topk_bwd(const Tensor& dprobs, const Tensor& logits, const Tensor& chosen, int64_t topk) {
  check_logits(kTopk, logits, topk);
  check_like_logits(kTopk, "dprobs", dprobs, logits, logits.scalar_type());
  check_chosen(chosen, logits, topk);
}

Tensor topk_bwd_meta(const Tensor& dprobs, const Tensor& logits, const Tensor& chosen, int64_t topk, bool, double,
                     std::string_view score) {
  score_of(kTopk, score);
  check_topk_bwd(dprobs, logits, chosen, topk);
  return logits.new_empty_symint(logits.sym_sizes());
}

Two scores_fwd(const Tensor& logits, int64_t topk, std::string_view score, std::string_view map_format) {
  const MapFormat format = map_format_of(kScores, map_format);
  check_logits(kScores, logits, topk);
  const Tensor x = rows_of(logits), map = empty_map(x, format);
  const te_router_plan plan = plan_of(kScores, x, topk, score, format);
  const Tensor scores = at::empty(x.sizes(), x.options().dtype(at::kFloat));
  check(te_router_scores_forward(&plan, view_2d(scores, kScores, "scores"), map_view(kScores, map, format),
                                 current_stream(x)));
  return {scores, map};
}

Two scores_fwd_meta(const Tensor& logits, int64_t topk, std::string_view score, std::string_view map_format) {
  score_of(kScores, score);
  check_logits(kScores, logits, topk);
  return {logits.new_empty_symint(logits.sym_sizes(), logits.options().dtype(at::kFloat)),
          empty_map(logits, map_format_of(kScores, map_format))};
}

Tensor scores_bwd(const Tensor& dscores, const Tensor& logits, std::string_view score) {
  check_logits(kScores, logits, 1);
  check_like_logits(kScores, "dscores", dscores, logits, at::kFloat);
  const Tensor x = rows_of(logits), dy = rows_of(dscores), dx = at::empty(x.sizes(), x.options());
  const te_router_plan plan = plan_of(kScores, x, 1, score, MapFormat::kNone);
  check(te_router_scores_backward(&plan, view_2d(dy, kScores, "dscores"), view_2d(dx, kScores, "dlogits"),
                                  current_stream(x)));
  return dx;
}

Tensor scores_bwd_meta(const Tensor& dscores, const Tensor& logits, std::string_view score) {
  score_of(kScores, score);
  check_logits(kScores, logits, 1);
  check_like_logits(kScores, "dscores", dscores, logits, at::kFloat);
  return logits.new_empty_symint(logits.sym_sizes());
}

}  // namespace

std::pair<Tensor, Tensor> router_choose(const Tensor& logits, const OptionalTensor& bias, const RouterChoice& choice,
                                        const Tensor& map, std::string_view map_format) {
  check_topk(logits, bias, choice);
  const MapFormat format = map_format_of(kTopk, map_format);
  const Tensor x = rows_of(logits);
  te_router_plan plan = plan_of(kTopk, x, choice.topk, choice.score, format);
  const Tensor floats = bias.has_value() ? rows_of(bias->to(at::kFloat)) : Tensor();
  if (floats.defined()) plan.expert_bias = view_2d(floats, kTopk, "expert_bias");
  plan.num_groups = static_cast<int32_t>(choice.num_groups);
  plan.group_topk = static_cast<int32_t>(choice.group_topk);
  plan.pre_softmax = choice.pre_softmax;
  plan.scaling_factor = static_cast<float>(choice.scaling_factor);
  const Tensor probs = at::empty(x.sizes(), x.options()), chosen = empty_chosen(x, choice.topk);
  check(te_router_forward(&plan, view_2d(probs, kTopk, "probs"), view_2d(chosen, kTopk, "chosen"),
                          map_view(kTopk, map, format), current_stream(x)));
  return {probs, chosen};
}

Three router_topk_fwd(const Tensor& logits, const OptionalTensor& bias, int64_t topk, bool pre_softmax,
                      int64_t num_groups, int64_t group_topk, double scaling_factor, std::string_view score,
                      std::string_view map_format) {
  check_logits(kTopk, logits, topk);  // before the map has a shape
  const Tensor map = empty_map(logits, map_format_of(kTopk, map_format));
  const auto [probs, chosen] = router_choose(
      logits, bias, {topk, pre_softmax, num_groups, group_topk, scaling_factor, std::string(score)}, map, map_format);
  return {probs, map, chosen};
}

Tensor router_topk_bwd(const Tensor& dprobs, const Tensor& logits, const Tensor& chosen, int64_t topk, bool pre_softmax,
                       double scaling_factor, std::string_view score) {
  check_topk_bwd(dprobs, logits, chosen, topk);
  const Tensor x = rows_of(logits), dy = rows_of(dprobs), experts = rows_of(chosen);
  te_router_plan plan = plan_of(kTopk, x, topk, score, MapFormat::kNone);
  plan.pre_softmax = pre_softmax;
  plan.scaling_factor = static_cast<float>(scaling_factor);
  const Tensor dx = at::empty(x.sizes(), x.options());
  check(te_router_backward(&plan, view_2d(dy, kTopk, "dprobs"), view_2d(experts, kTopk, "chosen"),
                           view_2d(dx, kTopk, "dlogits"), current_stream(x)));
  return dx;
}

std::pair<Tensor, Tensor> cast_together(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  const Tensor wide_a = at::empty(a.sizes(), a.options().dtype(dtype));
  const Tensor wide_b = at::empty(b.sizes(), b.options().dtype(dtype));
  te_scale_plan plan{};  // by 1, which rounds once
  plan.scale = 1;
  plan.scale_device = plan.noop = absent();
  plan.in = dtype_of(a, kRouterLogitsOp, "x");
  plan.out = dtype_of(wide_a, kRouterLogitsOp, "x");
  const te_optimizer_tensor list[] = {{a.numel(), {a.data_ptr(), wide_a.data_ptr()}},
                                      {b.numel(), {b.data_ptr(), wide_b.data_ptr()}}};
  check(te_optimizer_scale(&plan, list, 2, a.is_cpu() ? TE_DEVICE_CPU : int32_t(a.get_device()), current_stream(a)));
  return {wide_a, wide_b};
}

namespace {

// ---- autograd nodes ----

struct LogitsFamily {
  static constexpr const char* kName = kRouterLogitsOp;
  struct State {};
  enum Saved { kX, kWeight };

  template <class Mode>
  static variable_list forward(State&, SaveContext& save, const Tensor& x, const Tensor& weight) {
    const Tensor logits = router_logits_fwd<Mode>(x, weight);
    save.keep(kX, x, kRouterInput);
    save.keep(kWeight, weight, kParameter);
    return {logits};
  }

  template <class Mode>
  static variable_list backward(const State&, const Wanted& wanted, const NamedTensors& saved,
                                const variable_list& grads) {
    variable_list out(2);
    if (!grads[0].defined()) return out;
    if (wanted[0]) out[0] = router_logits_dx<Mode>(grads[0], saved[kX], saved[kWeight]);
    if (wanted[1]) out[1] = router_logits_dweight<Mode>(grads[0], saved[kX], saved[kWeight]);
    return out;
  }
};

struct TopkFamily {
  static constexpr const char* kName = kTopk;
  using State = RouterChoice;
  enum Saved { kX, kExperts };

  template <class Mode>
  static variable_list forward(State& state, SaveContext& save, const Tensor& logits, const OptionalTensor& bias,
                               int64_t topk, bool pre_softmax, int64_t num_groups, int64_t group_topk,
                               double scaling_factor, std::string_view score, std::string_view map_format) {
    state = {topk, pre_softmax, num_groups, group_topk, scaling_factor, std::string(score)};
    const auto [probs, map, chosen] =
        Mode::template call<router_topk_fwd>("te::router_topk_fwd", logits, bias, topk, pre_softmax, num_groups,
                                             group_topk, scaling_factor, score, map_format);
    save.keep(kX, logits, kRouterLogits);
    save.keep(kExperts, chosen, kChosenExperts);
    return {probs, map, chosen};
  }

  template <class Mode>
  static variable_list backward(const State& state, const Wanted& wanted, const NamedTensors& saved,
                                const variable_list& grads) {
    if (!wanted[0] || !grads[0].defined()) return {};
    return {Mode::template call<router_topk_bwd>("te::router_topk_bwd", grads[0], saved[kX], saved[kExperts],
                                                 state.topk, state.pre_softmax, state.scaling_factor,
                                                 std::string_view(state.score))};
  }
};

struct ScoresFamily {
  static constexpr const char* kName = kScores;
  struct State {
    std::string score;
  };
  enum Saved { kX };

  template <class Mode>
  static variable_list forward(State& state, SaveContext& save, const Tensor& logits, int64_t topk,
                               std::string_view score, std::string_view map_format) {
    state.score = std::string(score);
    const auto [scores, map] =
        Mode::template call<scores_fwd>("te::router_scores_fwd", logits, topk, score, map_format);
    save.keep(kX, logits, kRouterLogits);
    return {scores, map};
  }

  template <class Mode>
  static variable_list backward(const State& state, const Wanted& wanted, const NamedTensors& saved,
                                const variable_list& grads) {
    if (!wanted[0] || !grads[0].defined()) return {};
    return {
        Mode::template call<scores_bwd>("te::router_scores_bwd", grads[0], saved[kX], std::string_view(state.score))};
  }
};

Tensor logits_autograd(const Tensor& x, const Tensor& weight) {
  return Node<LogitsFamily, Dispatched>::run(x, weight)[0];
}

template <class Mode>
Tensor logits_alone(const Tensor& x, const Tensor& weight) {
  LogitsFamily::State state;
  SaveContext nothing = SaveContext::of_none();
  return LogitsFamily::forward<Mode>(state, nothing, x, weight)[0];
}

Three topk_autograd(const Tensor& logits, const OptionalTensor& bias, int64_t topk, bool pre_softmax,
                    int64_t num_groups, int64_t group_topk, double scaling_factor, std::string_view score,
                    std::string_view map_format) {
  const variable_list out = Node<TopkFamily, Dispatched>::run(logits, bias, topk, pre_softmax, num_groups, group_topk,
                                                              scaling_factor, score, map_format);
  return {out[0], out[1], out[2]};
}

Three topk_dispatched(const Tensor& logits, const OptionalTensor& bias, int64_t topk, bool pre_softmax,
                      int64_t num_groups, int64_t group_topk, double scaling_factor, std::string_view score,
                      std::string_view map_format) {
  return Dispatched::call<router_topk_fwd>("te::router_topk_fwd", logits, bias, topk, pre_softmax, num_groups,
                                           group_topk, scaling_factor, score, map_format);
}

Two scores_autograd(const Tensor& logits, int64_t topk, std::string_view score, std::string_view map_format) {
  const variable_list out = Node<ScoresFamily, Dispatched>::run(logits, topk, score, map_format);
  return {out[0], out[1]};
}

Two scores_dispatched(const Tensor& logits, int64_t topk, std::string_view score, std::string_view map_format) {
  return Dispatched::call<scores_fwd>("te::router_scores_fwd", logits, topk, score, map_format);
}

}  // namespace

Tensor router_logits(const Tensor& x, const Tensor& weight) {
  if (must_dispatch({&x, &weight})) return Dispatched::call<logits_autograd>("te::router_logits", x, weight);
  if (!needs_graph({&x, &weight})) return logits_alone<Direct>(x, weight);
  return Node<LogitsFamily, Direct>::run(x, weight)[0];
}

Three router_topk(const Tensor& logits, const OptionalTensor& bias, int64_t topk, bool pre_softmax, int64_t num_groups,
                  int64_t group_topk, double scaling_factor, const std::string& score_name,
                  const std::string& format_name) {
  const std::string_view score(score_name), format(format_name);
  if (must_dispatch({&logits, pointer_to(bias)})) {
    return Dispatched::call<topk_autograd>("te::router_topk", logits, bias, topk, pre_softmax, num_groups, group_topk,
                                           scaling_factor, score, format);
  }
  if (!needs_graph({&logits})) {
    return Direct::call<router_topk_fwd>("te::router_topk_fwd", logits, bias, topk, pre_softmax, num_groups, group_topk,
                                         scaling_factor, score, format);
  }
  const variable_list out = Node<TopkFamily, Direct>::run(logits, bias, topk, pre_softmax, num_groups, group_topk,
                                                          scaling_factor, score, format);
  return {out[0], out[1], out[2]};
}

namespace {

// Called by Python in eager mode.
Two scores(const Tensor& logits, int64_t topk, const std::string& score_name, const std::string& format_name) {
  const std::string_view score(score_name), format(format_name);
  if (must_dispatch({&logits})) {
    return Dispatched::call<scores_autograd>("te::router_scores", logits, topk, score, format);
  }
  if (!needs_graph({&logits})) return Direct::call<scores_fwd>("te::router_scores_fwd", logits, topk, score, format);
  const variable_list out = Node<ScoresFamily, Direct>::run(logits, topk, score, format);
  return {out[0], out[1]};
}

}  // namespace

TE_OP_REGISTRATION(router, ops) {
  ops.op("router_topk_fwd(Tensor logits, Tensor? expert_bias, int topk, bool pre_softmax, int num_groups, int "
         "group_topk, float scaling_factor, str score_function, str map_format) -> (Tensor, Tensor, Tensor)")
      .kernel(router_topk_fwd)
      .meta(topk_fwd_meta);
  ops.op("router_topk_bwd(Tensor dprobs, Tensor logits, Tensor chosen, int topk, bool pre_softmax, float "
         "scaling_factor, str score_function) -> Tensor")
      .kernel(router_topk_bwd)
      .meta(topk_bwd_meta);
  ops.op("router_scores_fwd(Tensor logits, int topk, str score_function, str map_format) -> (Tensor, Tensor)")
      .kernel(scores_fwd)
      .meta(scores_fwd_meta);
  ops.op("router_scores_bwd(Tensor dscores, Tensor logits, str score_function) -> Tensor")
      .kernel(scores_bwd)
      .meta(scores_bwd_meta);
  ops.op("router_logits(Tensor x, Tensor weight) -> Tensor")
      .composite(logits_alone<Dispatched>)
      .autograd(logits_autograd)
      .python(router_logits);
  ops.op("router_topk(Tensor logits, Tensor? expert_bias, int topk, bool pre_softmax, int num_groups, int group_topk, "
         "float scaling_factor, str score_function, str map_format) -> (Tensor, Tensor, Tensor)")
      .composite(topk_dispatched)
      .autograd(topk_autograd)
      .python(router_topk);
  ops.op("router_scores(Tensor logits, int topk, str score_function, str map_format) -> (Tensor, Tensor)")
      .composite(scores_dispatched)
      .autograd(scores_autograd)
      .python(scores);
}

}  // namespace te_torch
