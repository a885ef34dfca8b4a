// The maps of permute, CUDA path: launches. The kernels are in permute_map.cuh.
#include <algorithm>

#include "core/device.h"
#include "ops/permute/permute_map.cuh"

namespace te::permute::cuda {

namespace {

constexpr int kRowMapThreads = 1024;
constexpr int kRowMapBlocks = 128;  // each reads all ids, so that more would not be faster
constexpr int kLeastSpan = 1024;

template <class Routed>
void mask_map_of(const te_tensor& mask, const te_tensor& map, const te_tensor& counts, cudaStream_t stream) {
  const Mask<Routed> view{static_cast<const Routed*>(mask.data), mask.row_pitch, int32_t(mask.rows),
                          int32_t(mask.cols)};
  auto* const sums = static_cast<int32_t*>(counts.data);
  const auto blocks = unsigned(counts.rows);
  count_kernel<Routed><<<blocks, kMaskThreads, 0, stream>>>(view, sums);
  check_launch("te_permute_mask_map");
  place_kernel<Routed><<<blocks, kMaskThreads, 0, stream>>>(view, sums, static_cast<int32_t*>(map.data));
  check_launch("te_permute_mask_map");
}

}  // namespace

void mask_map(te_tensor mask, te_tensor map, te_tensor counts, te_stream stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  mask.dtype == TE_UINT8 ? mask_map_of<uint8_t>(mask, map, counts, on) : mask_map_of<int32_t>(mask, map, counts, on);
}

void row_map(const te_permute_row_map_plan& plan, te_stream stream) {
  RowMap map{};
  map.ids = static_cast<const int32_t*>(plan.ids.data);
  map.row_of_pair = static_cast<int32_t*>(plan.row_of_pair.data);
  map.token_of_row = static_cast<int32_t*>(plan.token_of_row.data);
  map.offsets = static_cast<int32_t*>(plan.offsets.data);
  map.panels = static_cast<int32_t*>(plan.panels.data);
  map.pairs = int32_t(plan.ids.rows * plan.ids.cols);
  map.of_token = int32_t(plan.ids.cols);
  map.rows = int32_t(plan.rows);
  map.first_expert = plan.first_expert;
  map.experts = plan.last_expert - plan.first_expert;
  map.probs = static_cast<const char*>(plan.probs.data);
  map.row_probs = static_cast<char*>(plan.row_probs.data);
  map.probs_pitch = plan.probs.row_pitch;
  map.prob_bytes = int32_t(te_dtype_bytes(plan.probs.dtype));
  map.ascending = plan.ascending;
  map.tokens_per_expert = static_cast<int64_t*>(plan.tokens_per_expert.data);
  map.all_experts = int32_t(plan.tokens_per_expert.cols);
  map.cut = plan.cut;
  map.factor = reinterpret_cast<uint32_t*>(plan.factor);
  map.even = plan.even;
  map.outside = plan.outside;
  map.zero = plan.zero;
  const int64_t spans = (int64_t(map.pairs) + kLeastSpan - 1) / kLeastSpan;
  const int64_t blocks = std::clamp<int64_t>(spans, 1, kRowMapBlocks);
  map.span = int32_t((spans + blocks - 1) / blocks * kLeastSpan);
  const auto grid = unsigned(blocks + (map.tokens_per_expert != nullptr ? 1 : 0));
  row_map_kernel<kRowMapThreads><<<grid, kRowMapThreads, 0, static_cast<cudaStream_t>(stream)>>>(map);
  check_launch("te_permute_row_map");
}

void row_probs_backward(te_tensor ids, te_tensor row_of_pair, te_tensor drow_probs, te_tensor dprobs,
                        te_stream stream) {
  constexpr int64_t kTokens = kMapThreads / kWarp;  // of a block
  const auto blocks = unsigned((dprobs.rows + kTokens - 1) / kTokens);
  dispatch_bytes(dprobs.dtype, [&](auto bits) {
    using Bits = decltype(bits);
    row_probs_backward_kernel<Bits><<<blocks, kMapThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const int32_t*>(ids.data), static_cast<const int32_t*>(row_of_pair.data),
        static_cast<const Bits*>(drow_probs.data), static_cast<Bits*>(dprobs.data), dprobs.row_pitch, dprobs.rows,
        drow_probs.cols, int(dprobs.cols), int(ids.cols));
  });
  check_launch("te_permute_row_probs_backward");
}

void chunk_map(te_tensor sizes, te_tensor order, te_tensor source, te_tensor destination, te_tensor starts,
               uint32_t* counters, te_stream stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  auto* const sums = static_cast<int64_t*>(starts.data);
  const Chunks chunks{static_cast<const int64_t*>(sizes.data),
                      static_cast<const int64_t*>(order.data),
                      sums,
                      sums + starts.cols,
                      sums + 2 * starts.cols,
                      sizes.cols,
                      source.cols,
                      counters};
  chunk_starts_kernel<<<1, kMapThreads, 0, on>>>(chunks);
  check_launch("te_permute_chunk_map");
  const auto blocks = unsigned((source.cols + kMapThreads - 1) / kMapThreads);
  chunk_rows_kernel<<<blocks, kMapThreads, 0, on>>>(chunks, static_cast<int32_t*>(source.data),
                                                    static_cast<int32_t*>(destination.data));
  check_launch("te_permute_chunk_map");
}

}  // namespace te::permute::cuda
