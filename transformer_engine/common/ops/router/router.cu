// router, CUDA path: the launches of the kernels in router.cuh.
#include "core/device.h"
#include "core/tensor.h"
#include "ops/router/router.cuh"

namespace te::router::cuda {

namespace {

unsigned blocks(int64_t rows, int64_t rows_of_block) { return unsigned((rows + rows_of_block - 1) / rows_of_block); }

}  // namespace

void forward(const te_router_plan& plan, te_tensor probs, te_tensor chosen, te_tensor map, te_stream stream) {
  dispatch_float(plan.logits.dtype, "te_router_forward", "plan.logits", [&](auto t) {
    const size_t shared = kWarps * size_t(plan.logits.cols + plan.num_groups) * sizeof(uint32_t);
    forward_kernel<decltype(t)>
        <<<blocks(plan.logits.rows, kWarps), kTokenThreads, shared, cudaStream_t(stream)>>>(plan, probs, chosen, map);
  });
  check_launch("te_router_forward");
}

void backward(const te_router_plan& plan, te_tensor dprobs, te_tensor chosen, te_tensor dlogits, te_stream stream) {
  dispatch_float(plan.logits.dtype, "te_router_backward", "plan.logits", [&](auto t) {
    backward_kernel<decltype(t)>
        <<<blocks(plan.logits.rows, kWarps), kTokenThreads, 0, cudaStream_t(stream)>>>(plan, dprobs, chosen, dlogits);
  });
  check_launch("te_router_backward");
}

void scores_forward(const te_router_plan& plan, te_tensor scores, te_tensor map, te_stream stream) {
  dispatch_float(plan.logits.dtype, "te_router_scores_forward", "plan.logits", [&](auto t) {
    const size_t shared = kWarps * size_t(plan.logits.cols) * sizeof(uint32_t);
    scores_forward_kernel<decltype(t)>
        <<<blocks(plan.logits.rows, kWarps), kTokenThreads, shared, cudaStream_t(stream)>>>(plan, scores, map);
  });
  check_launch("te_router_scores_forward");
}

void scores_backward(const te_router_plan& plan, te_tensor dscores, te_tensor dlogits, te_stream stream) {
  dispatch_float(plan.logits.dtype, "te_router_scores_backward", "plan.logits", [&](auto t) {
    scores_backward_kernel<decltype(t)>
        <<<blocks(plan.logits.rows, kWarps), kTokenThreads, 0, cudaStream_t(stream)>>>(plan, dscores, dlogits);
  });
  check_launch("te_router_scores_backward");
}

void loss_forward(const te_router_loss_plan& plan, te_tensor probs, te_tensor partials, te_tensor loss,
                  te_stream stream) {
  dispatch_float(probs.dtype, "te_router_loss_forward", "probs", [&](auto t) {
    using T = decltype(t);
    auto* sums = static_cast<float*>(partials.data);
    const unsigned parts = blocks(probs.rows, TE_ROUTER_LOSS_ROWS);
    if (parts > 0) loss_parts_kernel<T><<<parts, kLossLanes, 0, cudaStream_t(stream)>>>(plan, probs, sums);
    loss_kernel<T><<<1, kLossLanes, 0, cudaStream_t(stream)>>>(plan, sums, parts, static_cast<T*>(loss.data));
  });
  check_launch("te_router_loss_forward");
}

void loss_backward(const te_router_loss_plan& plan, te_tensor dloss, te_tensor dprobs, te_stream stream) {
  dispatch_float(dprobs.dtype, "te_router_loss_backward", "dprobs", [&](auto t) {
    using T = decltype(t);
    loss_backward_kernel<T><<<blocks(dprobs.rows, TE_ROUTER_LOSS_ROWS), kLossLanes, 0, cudaStream_t(stream)>>>(
        plan, static_cast<const T*>(dloss.data), dprobs);
  });
  check_launch("te_router_loss_backward");
}

}  // namespace te::router::cuda
