// The kernels of the router that other bindings call, the logits' products, and the functions of Python. Contracts:
// transformer_engine/router.h.
#pragma once

#include <string>
#include <utility>

#include "gemm/gemm.h"

namespace te_torch {

inline constexpr const char* kRouterLogitsOp = "router_logits";

inline constexpr SavedInfo kRouterInput{"router input", "the weight's gradient is taken with it", kCallers};
inline constexpr SavedInfo kRouterLogits{"router logits", "the backward computes the scores again", kCallers, true};
inline constexpr SavedInfo kChosenExperts{"chosen experts", "the gradient flows through them alone",
                                          "a choice of each token's experts", true};

// The options of a choice, as the schemas have them.
struct RouterChoice {
  int64_t topk = 0;
  bool pre_softmax = false;
  int64_t num_groups = 0;
  int64_t group_topk = 0;
  double scaling_factor = 1;
  std::string score;
};

// (probs, chosen). map: contiguous memory for the map, undefined with the format "none".
std::pair<Tensor, Tensor> router_choose(const Tensor& logits, const OptionalTensor& bias, const RouterChoice& choice,
                                        const Tensor& map, std::string_view map_format);

// (probs, map, chosen).
using RouterTopk = std::tuple<Tensor, Tensor, Tensor>;
RouterTopk router_topk_fwd(const Tensor& logits, const OptionalTensor& bias, int64_t topk, bool pre_softmax,
                           int64_t num_groups, int64_t group_topk, double scaling_factor, std::string_view score,
                           std::string_view map_format);
Tensor router_topk_bwd(const Tensor& dprobs, const Tensor& logits, const Tensor& chosen, int64_t topk, bool pre_softmax,
                       double scaling_factor, std::string_view score);

template <class Mode>
Tensor router_product(const Tensor& a, const Tensor& b, std::string_view layout) {
  return std::get<0>(Mode::template call<gemm>("te::gemm", a, b, layout, std::string_view("none"), OptionalTensor(),
                                               OptionalTensor(), std::optional<at::ScalarType>(at::kFloat)));
}

// x weight^T in float32 of operands in their own dtype; the gradients are products in float32, rounded once.
template <class Mode>
Tensor router_logits_fwd(const Tensor& x, const Tensor& weight) {
  check_float(x, kRouterLogitsOp, "x");
  check_float(weight, kRouterLogitsOp, "weight");
  const bool same = x.scalar_type() == weight.scalar_type();
  return router_product<Mode>(same ? weight : weight.to(at::kFloat), same ? x : x.to(at::kFloat), "TN");
}
template <class Mode>
Tensor router_logits_dx(const Tensor& dlogits, const Tensor& x, const Tensor& weight) {
  return router_product<Mode>(weight.to(at::kFloat), dlogits, "NN").to(x.scalar_type());
}
template <class Mode>
Tensor router_logits_dweight(const Tensor& dlogits, const Tensor& x, const Tensor& weight) {
  return router_product<Mode>(x.to(at::kFloat), dlogits, "NT").to(weight.scalar_type());
}

// a and b in another dtype, by one launch. Dense tensors of one dtype and device, which differ from the other dtype.
std::pair<Tensor, Tensor> cast_together(const Tensor& a, const Tensor& b, at::ScalarType dtype);

// Both, to the same bits with fewer launches.
template <class Mode>
std::pair<Tensor, Tensor> router_logits_grads(const Tensor& dlogits, const Tensor& x, const Tensor& weight) {
  const bool together = std::is_same_v<Mode, Direct> && x.scalar_type() == weight.scalar_type() &&
                        x.scalar_type() != at::kFloat && x.is_contiguous() && weight.is_contiguous() && !x.is_neg() &&
                        !weight.is_neg();
  if (!together) return {router_logits_dx<Mode>(dlogits, x, weight), router_logits_dweight<Mode>(dlogits, x, weight)};
  const auto [wide_x, wide_weight] = cast_together(x, weight, at::kFloat);
  const Tensor dx = router_product<Mode>(wide_weight, dlogits, "NN"),
               dweight = router_product<Mode>(wide_x, dlogits, "NT");
  return cast_together(dx, dweight, x.scalar_type());
}

// Called by Python in eager mode.
Tensor router_logits(const Tensor& x, const Tensor& weight);
RouterTopk router_topk(const Tensor& logits, const OptionalTensor& bias, int64_t topk, bool pre_softmax,
                       int64_t num_groups, int64_t group_topk, double scaling_factor, const std::string& score,
                       const std::string& map_format);

}  // namespace te_torch
