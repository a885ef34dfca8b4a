// The binding of the MoE router's auxiliary loss (load balancing): checks, kernels and the autograd node.
#include <ATen/ops/empty.h>
#include <transformer_engine/router.h>

#include <algorithm>
#include <vector>

#include "autograd/autograd.h"
#include "core/op_registration.h"

namespace te_torch {

namespace {

constexpr const char* kLoss = "router_aux_loss";

constexpr SavedInfo kTokens{"tokens per expert", "the gradient of the scores is their multiple", kCallers};

void check_aux_loss(c10::SymIntArrayRef probs, const Tensor& like, const Tensor& tokens,
                    const OptionalTensor& total_tensor, c10::SymInt total, int64_t num_experts, int64_t topk) {
  check_float(like, kLoss, "probs");
  TORCH_CHECK_VALUE(!probs.empty(), kLoss, ": argument 'probs' has no dimensions, wanted [..., experts].");
  const c10::SymInt& columns = probs.back();
  TORCH_CHECK_VALUE(num_experts >= 1 && columns % num_experts == 0, kLoss, ": argument 'num_experts' is ", num_experts,
                    ", wanted a divisor of the last dimension of probs, ", columns, ".");
  TORCH_CHECK_VALUE(topk >= 1 && topk <= num_experts, kLoss, ": argument 'topk' is ", topk, ", wanted 1 to ",
                    num_experts, ", the number of experts.");
  TORCH_CHECK_VALUE(tokens.dim() == 1 && tokens.sym_size(0) == columns, kLoss,
                    ": argument 'tokens_per_expert' has shape ", tokens.sym_sizes(), ", wanted [", columns,
                    "], one count for each column of probs.");
  const auto dtype = tokens.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kInt || dtype == at::kLong || dtype == at::kFloat || dtype == at::kBFloat16, kLoss,
                    ": argument 'tokens_per_expert' has dtype ", dtype,
                    ", wanted int32, int64, float32 or bfloat16; cast it with .to(dtype).");
  TORCH_CHECK_VALUE(tokens.device() == like.device(), kLoss, ": argument 'tokens_per_expert' is on ", tokens.device(),
                    ", wanted ", like.device(), " like probs; move it with .to(device).");
  if (!total_tensor.has_value()) {
    TORCH_CHECK_VALUE(total >= 0, kLoss, ": argument 'total_num_tokens' is ", total, ", wanted at least 0.");
    return;
  }
  TORCH_CHECK_VALUE(total_tensor->sym_numel() == 1 && total_tensor->scalar_type() == at::kLong &&
                        total_tensor->device() == like.device(),
                    kLoss, ": argument 'total_num_tokens' is ", total_tensor->scalar_type(), " of shape ",
                    total_tensor->sym_sizes(), " on ", total_tensor->device(), ", wanted an int, or one int64 on ",
                    like.device(), ".");
}

// A plan, and the tensors that it reads, until the launch.
struct LossPlan {
  Tensor tokens, total;
  te_router_loss_plan plan{};

  LossPlan(const Tensor& tokens_per_expert, const OptionalTensor& total_tensor, int64_t total_int, int64_t num_experts,
           int64_t topk, double coeff)
      : tokens(tokens_per_expert.scalar_type() == at::kBFloat16 ? tokens_per_expert.to(at::kFloat)
                                                                : rows_of(tokens_per_expert)) {
    plan.tokens_per_expert = view_2d(tokens, kLoss, "tokens_per_expert");
    if (total_tensor.has_value()) {
      total = total_tensor->view({1});
      plan.total_tensor = view_2d(total, kLoss, "total_num_tokens");
    }
    plan.total = total_int;
    plan.num_experts = num_experts;
    plan.topk = topk;
    plan.coeff = coeff;
  }
};

Tensor aux_loss_fwd(const Tensor& probs, const Tensor& tokens, const OptionalTensor& total_tensor, c10::SymInt total,
                    int64_t num_experts, int64_t topk, double coeff) {
  check_aux_loss(probs.sym_sizes(), probs, tokens, total_tensor, total, num_experts, topk);
  const Tensor p = rows_of(probs);
  const LossPlan loss_plan(tokens, total_tensor, total.expect_int(), num_experts, topk, coeff);
  const te_tensor rows = view_2d(p, kLoss, "probs");
  const int64_t parts = std::max<int64_t>(1, (rows.rows + TE_ROUTER_LOSS_ROWS - 1) / TE_ROUTER_LOSS_ROWS);
  const Tensor partials = at::empty({parts}, p.options().dtype(at::kFloat)), loss = at::empty({}, p.options());
  check(te_router_loss_forward(&loss_plan.plan, rows, view_2d(partials, kLoss, "partials"),
                               view_2d(loss, kLoss, "loss"), current_stream(p)));
  return loss;
}

Tensor aux_loss_fwd_meta(const Tensor& probs, const Tensor& tokens, const OptionalTensor& total_tensor,
                         c10::SymInt total, int64_t num_experts, int64_t topk, double) {
  check_aux_loss(probs.sym_sizes(), probs, tokens, total_tensor, total, num_experts, topk);
  return probs.new_empty({});
}

Tensor aux_loss_bwd_meta(const Tensor& dloss, const Tensor& tokens, const OptionalTensor& total_tensor,
                         c10::SymInt total, int64_t num_experts, int64_t topk, double, c10::SymIntArrayRef shape) {
  check_aux_loss(shape, dloss, tokens, total_tensor, total, num_experts, topk);
  return dloss.new_empty_symint(shape);
}

Tensor aux_loss_bwd(const Tensor& dloss, const Tensor& tokens, const OptionalTensor& total_tensor, c10::SymInt total,
                    int64_t num_experts, int64_t topk, double coeff, c10::SymIntArrayRef shape) {
  check_aux_loss(shape, dloss, tokens, total_tensor, total, num_experts, topk);
  const LossPlan loss_plan(tokens, total_tensor, total.expect_int(), num_experts, topk, coeff);
  const Tensor dprobs = at::empty(C10_AS_INTARRAYREF_SLOW(shape), dloss.options());
  const Tensor scalar = dloss.resolve_neg().contiguous();
  check(te_router_loss_backward(&loss_plan.plan, view_2d(scalar, kLoss, "dloss"), view_2d(dprobs, kLoss, "dprobs"),
                                current_stream(dloss)));
  return dprobs;
}

struct LossFamily {
  static constexpr const char* kName = kLoss;
  struct State {
    c10::SymInt total;
    int64_t num_experts, topk;
    double coeff;
    std::vector<c10::SymInt> shape;
  };
  enum Saved { kCounts, kTotal };

  template <class Mode>
  static variable_list forward(State& state, SaveContext& save, const Tensor& probs, const Tensor& tokens,
                               const OptionalTensor& total_tensor, c10::SymInt total, int64_t num_experts, int64_t topk,
                               double coeff) {
    state = {total, num_experts, topk, coeff, probs.sym_sizes().vec()};
    save.keep(kCounts, tokens, kTokens);
    save.keep(kTotal, total_tensor, kTokens);
    return {Mode::template call<aux_loss_fwd>("te::router_aux_loss_fwd", probs, tokens, total_tensor, total,
                                              num_experts, topk, coeff)};
  }

  template <class Mode>
  static variable_list backward(const State& state, const Wanted& wanted, const NamedTensors& saved,
                                const variable_list& grads) {
    if (!wanted[0] || !grads[0].defined()) return {};
    return {Mode::template call<aux_loss_bwd>("te::router_aux_loss_bwd", grads[0], saved[kCounts],
                                              saved.optional(kTotal), state.total, state.num_experts, state.topk,
                                              state.coeff, c10::SymIntArrayRef(state.shape))};
  }
};

Tensor aux_loss_autograd(const Tensor& probs, const Tensor& tokens, const OptionalTensor& total_tensor,
                         c10::SymInt total, int64_t num_experts, int64_t topk, double coeff) {
  return Node<LossFamily, Dispatched>::run(probs, tokens, total_tensor, total, num_experts, topk, coeff)[0];
}

Tensor aux_loss_dispatched(const Tensor& probs, const Tensor& tokens, const OptionalTensor& total_tensor,
                           c10::SymInt total, int64_t num_experts, int64_t topk, double coeff) {
  return Dispatched::call<aux_loss_fwd>("te::router_aux_loss_fwd", probs, tokens, total_tensor, total, num_experts,
                                        topk, coeff);
}

// Called by Python in eager mode.
Tensor aux_loss(const Tensor& probs, const Tensor& tokens, const OptionalTensor& total_tensor, c10::SymInt total,
                int64_t num_experts, int64_t topk, double coeff) {
  if (must_dispatch({&probs, &tokens, pointer_to(total_tensor)})) {
    return Dispatched::call<aux_loss_autograd>("te::router_aux_loss", probs, tokens, total_tensor, total, num_experts,
                                               topk, coeff);
  }
  if (!needs_graph({&probs})) {
    return Direct::call<aux_loss_fwd>("te::router_aux_loss_fwd", probs, tokens, total_tensor, total, num_experts, topk,
                                      coeff);
  }
  return Node<LossFamily, Direct>::run(probs, tokens, total_tensor, total, num_experts, topk, coeff)[0];
}

}  // namespace

TE_OP_REGISTRATION(router_loss, ops) {
  ops.op("router_aux_loss_fwd(Tensor probs, Tensor tokens_per_expert, Tensor? total_tensor, SymInt total, int "
         "num_experts, int topk, float coeff) -> Tensor")
      .kernel(aux_loss_fwd)
      .meta(aux_loss_fwd_meta);
  ops.op("router_aux_loss_bwd(Tensor dloss, Tensor tokens_per_expert, Tensor? total_tensor, SymInt total, int "
         "num_experts, int topk, float coeff, SymInt[] shape) -> Tensor")
      .kernel(aux_loss_bwd)
      .meta(aux_loss_bwd_meta);
  ops.op("router_aux_loss(Tensor probs, Tensor tokens_per_expert, Tensor? total_tensor, SymInt total, int num_experts, "
         "int topk, float coeff) -> Tensor")
      .composite(aux_loss_dispatched)
      .autograd(aux_loss_autograd)
      .python(aux_loss);
}

}  // namespace te_torch
