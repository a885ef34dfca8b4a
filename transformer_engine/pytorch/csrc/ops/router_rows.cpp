// A router's logits, its choice, and the map by rows of that choice as one autograd node, for eager mode; elsewhere,
// and under a tracer, they are three ops (router.cpp, permute.cpp). The bits are the same.
#include "autograd/autograd.h"
#include "core/op_registration.h"
#include "ops/permute.h"
#include "ops/router.h"

namespace te_torch {

namespace {

constexpr SavedInfo kRowsOfToken{"rows of each token", "the gradient of a row's probability goes to its token",
                                 "making it again from the chosen experts"};

// The arguments besides tensors. counts: receives the tokens of every expert; undefined: a new tensor does. zero:
// receives 0, or undefined.
struct RowsCall {
  RouterChoice choice;
  int64_t first, last, rows;
  bool count, with_logits;
  Tensor counts, zero;
};

// Outputs: probabilities of the rows, token of each row, rows of each token, offsets; then, where there are such, new
// counts, the logits, and x, through which the gradient of x's other reader joins the router's.
struct RouterRowsFamily {
  static constexpr const char* kName = "router_rows";
  struct State {
    RouterChoice choice;
    int64_t experts = 0;
    size_t logits = 0, x = 0;  // numbers of outputs; 0: no output
  };
  // As many as those of the three ops: a checkpoint's recomputation may take the other way, and counts them.
  enum Saved { kX, kWeight, kLogits, kExperts, kExpertsOfMap, kMap };

  template <class Mode>
  static variable_list forward(State& state, SaveContext& save, const Tensor& x, const Tensor& weight,
                               const OptionalTensor& bias, const RowsCall& call) {
    state.choice = call.choice;
    const RouterChoice& c = call.choice;
    const Tensor logits = router_logits_fwd<Mode>(x, weight);
    const auto [probs, chosen] =
        Mode::template call<router_choose>("te::router_topk_fwd", logits, bias, c, Tensor(), std::string_view("none"));
    const auto [row_probs, token_of_row, row_of_pair, offsets, counts] = Mode::template call<permute_routing_into>(
        "te::permute_routing_fwd", probs, chosen, call.first, call.last, call.rows, call.count, call.counts, call.zero);
    state.experts = logits.size(1);
    save.keep(kX, x, kRouterInput);
    save.keep(kWeight, weight, kParameter);
    save.keep(kLogits, logits, kRouterLogits);
    save.keep(kExperts, chosen, kChosenExperts);
    save.keep(kExpertsOfMap, chosen, kChosenExperts);
    save.keep(kMap, row_of_pair, kRowsOfToken);
    variable_list out{row_probs, token_of_row, row_of_pair, offsets};
    if (!call.counts.defined()) out.push_back(counts);
    if (call.with_logits) state.logits = out.size(), out.push_back(logits);
    if (save.serves_a_graph() && x.requires_grad()) state.x = out.size(), out.push_back(x);
    return out;
  }

  template <class Mode>
  static variable_list backward(const State& state, const Wanted& wanted, const NamedTensors& saved,
                                const variable_list& grads) {
    const RouterChoice& c = state.choice;
    const auto grad = [&](size_t output) { return output > 0 ? grads[output] : Tensor(); };
    variable_list out(2);
    Tensor dlogits = grad(state.logits);
    if (grads[0].defined() && (wanted[0] || wanted[1])) {
      const Tensor dprobs = Mode::template call<permute_routing_bwd>(
          "te::permute_routing_bwd", grads[0], saved[kExpertsOfMap], saved[kMap], c10::SymInt(state.experts));
      const Tensor chosen =
          Mode::template call<router_topk_bwd>("te::router_topk_bwd", dprobs, saved[kLogits], saved[kExperts], c.topk,
                                               c.pre_softmax, c.scaling_factor, std::string_view(c.score));
      dlogits = dlogits.defined() ? dlogits + chosen : chosen;
    }
    if (wanted[0]) out[0] = grad(state.x);
    if (!dlogits.defined()) return out;
    Tensor dx;
    if (wanted[0] && wanted[1]) {
      std::tie(dx, out[1]) = router_logits_grads<Mode>(dlogits, saved[kX], saved[kWeight]);
    } else if (wanted[0]) {
      dx = router_logits_dx<Mode>(dlogits, saved[kX], saved[kWeight]);
    } else if (wanted[1]) {
      out[1] = router_logits_dweight<Mode>(dlogits, saved[kX], saved[kWeight]);
    }
    if (dx.defined()) out[0] = out[0].defined() ? dx.add_(out[0]) : dx;
    return out;
  }
};

// (x, probabilities of the rows, token of each row, rows of each token, offsets, tokens of every expert, logits).
using RouterRows = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, OptionalTensor>;

RouterRows by_ops(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const RowsCall& call) {
  const RouterChoice& c = call.choice;
  const Tensor tokens = x.view_symint(x.sym_sizes()), logits = router_logits(tokens, weight);
  const auto [probs, map, chosen] =
      router_topk(logits, bias, c.topk, c.pre_softmax, c.num_groups, c.group_topk, c.scaling_factor, c.score, "none");
  const OptionalTensor into = call.counts.defined() ? OptionalTensor(call.counts) : OptionalTensor();
  const auto [row_probs, token_of_row, row_of_pair, offsets, counts] =
      permute_routing(probs, chosen, call.first, call.last, call.rows, call.count, into);
  if (call.zero.defined()) call.zero.zero_();
  return {tokens,
          row_probs,
          token_of_row,
          row_of_pair,
          offsets,
          counts,
          call.with_logits ? OptionalTensor(logits) : OptionalTensor()};
}

void check_zero(const Tensor& zero, const Tensor& x) {
  TORCH_CHECK_VALUE(zero.scalar_type() == at::kFloat && zero.sym_numel() == 1 && zero.device() == x.device(),
                    "router_rows: argument 'zero' is ", zero.scalar_type(), " ", zero.sym_sizes(), " on ",
                    zero.device(), ", wanted one Float on ", x.device(), ".");
}

// Called by Python in eager mode.
RouterRows router_rows(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t topk,
                       bool pre_softmax, int64_t num_groups, int64_t group_topk, double scaling_factor,
                       const std::string& score, int64_t first, int64_t last, int64_t rows, bool count,
                       const OptionalTensor& counts, bool with_logits, const OptionalTensor& zero) {
  if (zero.has_value()) check_zero(*zero, x);
  const RowsCall call{{topk, pre_softmax, num_groups, group_topk, scaling_factor, score},
                      first,
                      last,
                      rows,
                      count,
                      with_logits,
                      counts.value_or(Tensor()),
                      zero.value_or(Tensor())};
  if (must_dispatch({&x, &weight, pointer_to(bias), pointer_to(counts), pointer_to(zero)}))
    return by_ops(x, weight, bias, call);
  const bool graph = needs_graph({&x, &weight});
  RouterRowsFamily::State state;
  SaveContext nothing = SaveContext::of_none();
  const variable_list out = graph ? Node<RouterRowsFamily, Direct>::run(x, weight, bias, call)
                                  : RouterRowsFamily::forward<Direct>(state, nothing, x, weight, bias, call);
  const size_t logits = call.counts.defined() ? 4 : 5;
  return {graph && x.requires_grad() ? out.back() : x,
          out[0],
          out[1],
          out[2],
          out[3],
          call.counts.defined() ? call.counts : out[4],
          with_logits ? OptionalTensor(out[logits]) : OptionalTensor()};
}

}  // namespace

TE_OP_REGISTRATION(router_rows, ops) { ops.python("router_rows", router_rows); }

}  // namespace te_torch
