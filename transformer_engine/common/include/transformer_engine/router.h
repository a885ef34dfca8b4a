/* router: the choice of each token's experts, the scores of an auxiliary loss, and that loss; with their gradients.
 *
 * Formula. x the logits of a token over E experts, k = topk, c = scaling_factor. Scores s:
 *     SOFTMAX        s = softmax(x) with pre_softmax, else s = x
 *     SIGMOID        s = 1 / (1 + exp(-x))
 *     SQRTSOFTPLUS   s = sqrt(log(1 + exp(x)))
 *   The k experts with the largest s + expert_bias are chosen, in that order. With num_groups > 0 the E / num_groups
 *   experts in a row are a group; a group's score is the sum of its topk / group_topk largest, in that order, and only
 *   experts of the group_topk best groups can be chosen. Equal values: the lower index first.
 *   Probabilities of chosen experts (0 for the others): c s with pre_softmax; c softmax(s) over the chosen ones
 *   without; c s / (sum of the chosen s + 1e-20) for the two others, c s if topk is 1. expert_bias counts in the choice
 *   alone, and gets no gradient. The choice has no gradient.
 *   Scores for the auxiliary loss: softmax(x), or s / (sum of s + 1e-20).
 *   Auxiliary loss of probs [T, C] with tokens_per_expert [C], C a multiple of num_experts:
 *     coeff * num_experts / (topk * total * total) * sum_c tokens_per_expert[c] * sum_t probs[t, c]; 0 if total is 0
 * Shapes. logits, probs, scores and their gradients [T, E]; expert_bias [1, E]; chosen [T, topk]; map [T, E] (BYTES) or
 *   [T, ceil(E / 8)] (BITS: bit e % 8 of byte e / 8). 1 <= topk <= min(E, TE_ROUTER_MAX_TOPK), E <=
 * TE_ROUTER_MAX_EXPERTS; group_topk divides topk, num_groups divides E, group_topk <= num_groups, topk / group_topk <=
 * E / num_groups. Dtypes. logits float32, float16 or bfloat16; probs, dprobs and dlogits the same; scores, dscores,
 * expert_bias float32; chosen int32; map uint8. Arithmetic in float32, one rounding at the store. Aliasing. No tensors
 * may overlap. Determinism. A token's bits depend on its own logits alone; the loss's on the shape and the values. Sums
 * have a fixed order, the same on the CPU and on CUDA, and so have all functions: both give the same bits. NaN and Inf.
 * In the choice NaN is above all numbers, as in torch.topk, and so reaches the probabilities. +Inf and rows of -Inf
 * alone give NaN where a softmax reads them. A single -Inf has the score 0 (softmax without pre_softmax: -Inf). Errors.
 * TE_INVALID_ARGUMENT for a wrong shape, dtype, device or option. On the CPU also for an expert of `chosen` outside of
 * [0, E); on CUDA such an expert is skipped. */
#ifndef TRANSFORMER_ENGINE_ROUTER_H_
#define TRANSFORMER_ENGINE_ROUTER_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TE_ROUTER_MAX_EXPERTS 1024
#define TE_ROUTER_MAX_TOPK 32

typedef enum te_router_score {
  TE_ROUTER_SOFTMAX = 0,
  TE_ROUTER_SIGMOID = 1,
  TE_ROUTER_SQRTSOFTPLUS = 2
} te_router_score;

typedef enum te_router_map { TE_ROUTER_BYTES = 0, TE_ROUTER_BITS = 1 } te_router_map;

/* Fields left out of a designated initialiser are 0, which means absent. */
typedef struct te_router_plan {
  te_tensor logits;
  te_tensor expert_bias; /* absent: 0; must be absent for SOFTMAX */
  int32_t topk;
  int32_t num_groups;  /* 0: no groups */
  int32_t group_topk;  /* 0 unless num_groups is given */
  int32_t score;       /* te_router_score */
  int32_t pre_softmax; /* 0 or 1; read for SOFTMAX alone */
  int32_t map_format;  /* te_router_map; read if there is a map */
  float scaling_factor;
} te_router_plan;

/* Writes every element of probs and chosen, and of map unless it is absent. Bits of a map beyond E are 0. */
TE_API te_status te_router_forward(const te_router_plan* plan, te_tensor probs, te_tensor chosen, te_tensor map,
                                   te_stream stream);

/* dlogits from dprobs, the logits and the experts that forward has chosen. Reads of the plan logits, topk, score,
 * pre_softmax and scaling_factor. */
TE_API te_status te_router_backward(const te_router_plan* plan, te_tensor dprobs, te_tensor chosen, te_tensor dlogits,
                                    te_stream stream);

/* Scores for the auxiliary loss, and unless it is absent the map of the topk largest. Reads of the plan logits, topk,
 * score and map_format. */
TE_API te_status te_router_scores_forward(const te_router_plan* plan, te_tensor scores, te_tensor map,
                                          te_stream stream);

/* dlogits from dscores and the logits. Reads of the plan logits and score. */
TE_API te_status te_router_scores_backward(const te_router_plan* plan, te_tensor dscores, te_tensor dlogits,
                                           te_stream stream);

typedef struct te_router_loss_plan {
  te_tensor tokens_per_expert; /* [1, C] int32, int64 or float32 */
  te_tensor total_tensor;      /* [1, 1] int64, read on the device; absent: total */
  int64_t total;               /* >= 0 */
  int64_t num_experts;
  int64_t topk;
  double coeff;
} te_router_loss_plan;

/* Rows of probs of one partial sum. */
#define TE_ROUTER_LOSS_ROWS 64

/* loss [1, 1] in probs' dtype; probs [T, C] float32, float16 or bfloat16. partials [1, max(1, ceil(T /
 * TE_ROUTER_LOSS_ROWS))] float32 is memory for the sums, overwritten. */
TE_API te_status te_router_loss_forward(const te_router_loss_plan* plan, te_tensor probs, te_tensor partials,
                                        te_tensor loss, te_stream stream);

/* dprobs [T, C] from dloss [1, 1], both in probs' dtype. */
TE_API te_status te_router_loss_backward(const te_router_loss_plan* plan, te_tensor dloss, te_tensor dprobs,
                                         te_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_ROUTER_H_ */
