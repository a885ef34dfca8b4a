// The maps of permute: contract and CPU path (the specification).
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "core/device.h"
#include "core/tensor.h"
#include "ops/permute/pairs.h"

namespace te::permute {

namespace cuda {
void mask_map(te_tensor mask, te_tensor map, te_tensor counts, te_stream stream);
void row_map(const te_permute_row_map_plan& plan, te_stream stream);
void row_probs_backward(te_tensor ids, te_tensor row_of_pair, te_tensor drow_probs, te_tensor dprobs, te_stream stream);
void chunk_map(te_tensor sizes, te_tensor order, te_tensor source, te_tensor destination, te_tensor starts,
               uint32_t* counters, te_stream stream);
}  // namespace cuda

namespace cpu {

template <class Routed>
void mask_map(const te_tensor& mask, const te_tensor& map) {
  const int64_t experts = mask.cols;
  std::vector<int32_t> next(size_t(experts) + 1, 0);
  for (int64_t t = 0; t < mask.rows; ++t) {
    const Routed* routed = row_ptr<const Routed>(mask, t);
    for (int64_t e = 0; e < experts; ++e) next[size_t(e) + 1] += routed[e] != 0;
  }
  for (int64_t e = 0; e < experts; ++e) next[size_t(e) + 1] += next[size_t(e)];
  for (int64_t t = 0; t < mask.rows; ++t) {
    const Routed* routed = row_ptr<const Routed>(mask, t);
    int32_t* const out = row_ptr<int32_t>(map, t);
    std::fill(out, out + map.cols, -1);
    int32_t n = 0;
    for (int64_t e = 0; e < experts; ++e) {
      if (routed[e] == 0) continue;
      out[n] = next[size_t(e)]++;
      out[experts + n++] = int32_t(e);
    }
    out[map.cols - 1] = n;
  }
}

void count_all(const te_permute_row_map_plan& plan) {
  const auto* ids = static_cast<const int32_t*>(plan.ids.data);
  auto* const counts = static_cast<int64_t*>(plan.tokens_per_expert.data);
  if (counts == nullptr) return;
  std::fill_n(counts, plan.tokens_per_expert.cols, 0);
  for (int64_t pair = 0; pair < plan.ids.rows * plan.ids.cols; ++pair) {
    if (ids[pair] >= 0 && ids[pair] < plan.tokens_per_expert.cols) ++counts[ids[pair]];
  }
}

void row_map(const te_permute_row_map_plan& plan) {
  const auto* ids = static_cast<const int32_t*>(plan.ids.data);
  auto* row_of_pair = static_cast<int32_t*>(plan.row_of_pair.data);
  auto* token_of_row = static_cast<int32_t*>(plan.token_of_row.data);
  const int64_t pairs = plan.ids.rows * plan.ids.cols;
  const int32_t experts = plan.last_expert - plan.first_expert;
  const auto expert_of = [&](int64_t pair) {
    const int64_t expert = int64_t(ids[pair]) - plan.first_expert;
    return expert >= 0 && expert < experts ? int32_t(expert) : -1;
  };
  std::vector<int64_t> first(size_t(experts) + 1, 0);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    if (const int32_t e = expert_of(pair); e >= 0) ++first[size_t(e) + 1];
  }
  for (int32_t e = 0; e < experts; ++e) first[size_t(e) + 1] += first[size_t(e)];
  const auto cut = [&](int64_t row) { return int32_t(std::min(row, plan.rows)); };
  int32_t panels = 0;
  for (int32_t e = 0; e < experts; ++e) panels += (cut(first[size_t(e) + 1]) - cut(first[size_t(e)]) + 127) / 128;
  if (plan.panels.data != nullptr) *static_cast<int32_t*>(plan.panels.data) = panels;
  if (plan.offsets.data != nullptr)
    std::transform(first.begin(), first.end(), static_cast<int32_t*>(plan.offsets.data), cut);
  if (plan.cut != nullptr) {
    *plan.cut = saturating_sum(*plan.cut, uint32_t(std::max<int64_t>(first[size_t(experts)] - plan.rows, 0)));
  }
  if (plan.outside != nullptr) {
    *plan.outside = saturating_sum(*plan.outside, uint32_t(pairs - first[size_t(experts)]));
  }
  if (plan.factor != nullptr && first[size_t(experts)] > plan.rows) {
    *plan.factor = std::max(*plan.factor, float(first[size_t(experts)]) / plan.even);
  }
  if (plan.zero != nullptr) *plan.zero = 0;
  count_all(plan);
  std::fill(token_of_row, token_of_row + plan.rows, -1);
  auto* const row_probs = static_cast<char*>(plan.row_probs.data);
  const size_t bytes = row_probs == nullptr ? 0 : te_dtype_bytes(plan.probs.dtype);
  if (row_probs != nullptr) std::memset(row_probs, 0, size_t(plan.rows) * bytes);
  const int64_t topk = plan.ids.cols;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int32_t e = expert_of(pair);
    const int64_t row = e < 0 ? plan.rows : first[size_t(e)]++, token = pair / topk;
    bool alive = row < plan.rows;
    if (alive && row_probs != nullptr) {
      const auto* const from = static_cast<const char*>(plan.probs.data);
      std::memcpy(row_probs + size_t(row) * bytes, from + size_t(token * plan.probs.row_pitch + ids[pair]) * bytes,
                  bytes);
      alive = takes_part(row_probs, int(bytes), row);
    }
    const int64_t of_token = token * topk;
    const int64_t place =
        plan.ascending ? place_by_expert(ids + of_token, int(topk), int(pair - of_token)) : pair - of_token;
    row_of_pair[of_token + place] = alive ? int32_t(row) : -1;
    if (alive) token_of_row[row] = int32_t(token);
  }
}

template <class Bits>
void row_probs_backward(const te_tensor& ids, const te_tensor& row_of_pair, const te_tensor& drow_probs,
                        const te_tensor& dprobs) {
  const int topk = int(ids.cols);
  for (int64_t t = 0; t < dprobs.rows; ++t) {
    Bits* const out = row_ptr<Bits>(dprobs, t);
    std::fill_n(out, dprobs.cols, Bits(0));
    const int32_t* const experts = row_ptr<const int32_t>(ids, t);
    for (int i = 0; i < topk; ++i) {
      const int64_t row = row_ptr<const int32_t>(row_of_pair, t)[place_by_expert(experts, topk, i)];
      if (row < 0 || row >= drow_probs.cols || experts[i] < 0 || experts[i] >= dprobs.cols) continue;
      out[experts[i]] = static_cast<const Bits*>(drow_probs.data)[row];
    }
  }
}

void chunk_map(const te_tensor& sizes, const te_tensor& order, const te_tensor& source, const te_tensor& destination) {
  const auto* size = static_cast<const int64_t*>(sizes.data);
  const auto* which = static_cast<const int64_t*>(order.data);
  auto* from = static_cast<int32_t*>(source.data);
  auto* to = static_cast<int32_t*>(destination.data);
  std::vector<int64_t> start(size_t(sizes.cols) + 1, 0);
  for (int64_t i = 0; i < sizes.cols; ++i) start[size_t(i) + 1] = start[size_t(i)] + size[i];
  int64_t row = 0;
  for (int64_t i = 0; i < sizes.cols; ++i) {
    const int64_t first = start[size_t(which[i])];
    for (int64_t j = 0; j < size[which[i]]; ++j, ++row) {
      from[row] = int32_t(first + j);
      to[first + j] = int32_t(row);
    }
  }
  for (; row < source.cols; ++row) from[row] = to[row] = int32_t(row);
}

}  // namespace cpu

namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

void check_dense(const char* op, const char* argument, const te_tensor& t, int64_t rows, int64_t cols, te_dtype dtype,
                 int32_t device) {
  check_as(op, argument, t, rows, cols, te_tensor{nullptr, 0, 0, 0, dtype, device});
  if (t.rows > 1 && t.row_pitch != t.cols)
    bad_argument(op, argument, "not contiguous", concat("a row pitch of ", cols));
}

void check_mask_map(const te_tensor& mask, const te_tensor& map, const te_tensor& counts) {
  constexpr const char* kOp = "te_permute_mask_map";
  check_tensor(kOp, "mask", mask);
  if (mask.dtype != TE_UINT8 && mask.dtype != TE_INT32) {
    bad_argument(kOp, "mask", concat("of dtype ", te_dtype_name(mask.dtype)), "uint8 or int32");
  }
  if (mask.cols < 1 || mask.cols > TE_PERMUTE_MAX_EXPERTS) {
    bad_argument(kOp, "mask", concat("of ", mask.cols, " experts"), concat("1 to ", TE_PERMUTE_MAX_EXPERTS));
  }
  if (mask.rows > kMaxRows / mask.cols) bad_argument(kOp, "mask", shape_of(mask), "fewer than 2^31 elements");
  check_dense(kOp, "map", map, mask.rows, 2 * mask.cols + 1, TE_INT32, mask.device);
  const int64_t chunks = (mask.rows + TE_PERMUTE_CHUNK - 1) / TE_PERMUTE_CHUNK;
  check_dense(kOp, "counts", counts, chunks, mask.cols, TE_INT32, mask.device);
}

// Of each expert, or gradients of them: a row for each token of ids.
void check_probs(const char* op, const char* argument, const te_tensor& probs, const te_tensor& ids) {
  check_tensor(op, argument, probs);
  const te_dtype dtype = probs.dtype;
  if (dtype != TE_FLOAT32 && dtype != TE_FLOAT16 && dtype != TE_BFLOAT16 && dtype != TE_INT64) {
    bad_argument(op, argument, concat("of dtype ", te_dtype_name(dtype)), "float32, float16, bfloat16 or int64");
  }
  check_as(op, argument, probs, ids.rows, probs.cols, te_tensor{nullptr, 0, 0, 0, dtype, ids.device});
}

void check_row_probs_backward(const te_tensor& ids, const te_tensor& row_of_pair, const te_tensor& drow_probs,
                              const te_tensor& dprobs) {
  constexpr const char* kOp = "te_permute_row_probs_backward";
  check_tensor(kOp, "ids", ids);
  check_dense(kOp, "ids", ids, ids.rows, ids.cols, TE_INT32, ids.device);
  check_dense(kOp, "row_of_pair", row_of_pair, ids.rows, ids.cols, TE_INT32, ids.device);
  check_probs(kOp, "dprobs", dprobs, ids);
  check_dense(kOp, "drow_probs", drow_probs, 1, drow_probs.cols, dprobs.dtype, ids.device);
}

void check_row_map(const te_permute_row_map_plan& plan) {
  constexpr const char* kOp = "te_permute_row_map";
  const te_tensor& ids = plan.ids;
  check_tensor(kOp, "plan.ids", ids);
  check_dense(kOp, "plan.ids", ids, ids.rows, ids.cols, TE_INT32, ids.device);
  if (ids.cols > 0 && ids.rows > kMaxRows / ids.cols) {
    bad_argument(kOp, "plan.ids", shape_of(ids), "fewer than 2^31 pairs");
  }
  const int64_t experts = int64_t(plan.last_expert) - plan.first_expert;
  if (plan.first_expert < 0 || experts < 1 || experts > TE_PERMUTE_MAX_EXPERTS) {
    bad_argument(kOp, "plan.last_expert", concat(plan.last_expert, " for experts from ", plan.first_expert, " on"),
                 concat("1 to ", TE_PERMUTE_MAX_EXPERTS, " experts, from 0 on"));
  }
  if (plan.rows < 0 || plan.rows > kMaxRows) bad_argument(kOp, "plan.rows", plan.rows, "0 to 2^31 - 1");
  check_dense(kOp, "plan.row_of_pair", plan.row_of_pair, ids.rows, ids.cols, TE_INT32, ids.device);
  check_dense(kOp, "plan.token_of_row", plan.token_of_row, 1, plan.rows, TE_INT32, ids.device);
  if (plan.offsets.data != nullptr) {
    check_dense(kOp, "plan.offsets", plan.offsets, 1, experts + 1, TE_INT32, ids.device);
  }
  if (plan.panels.data != nullptr) check_dense(kOp, "plan.panels", plan.panels, 1, 1, TE_INT32, ids.device);
  if (plan.tokens_per_expert.data != nullptr) {
    const te_tensor& counts = plan.tokens_per_expert;
    check_dense(kOp, "plan.tokens_per_expert", counts, 1, counts.cols, TE_INT64, ids.device);
    if (counts.cols > TE_PERMUTE_MAX_EXPERTS) {
      bad_argument(kOp, "plan.tokens_per_expert", shape_of(counts), concat("at most ", TE_PERMUTE_MAX_EXPERTS));
    }
  }
  if (plan.factor != nullptr && !(plan.even > 0)) bad_argument(kOp, "plan.even", plan.even, "above 0");
  if (plan.row_probs.data != nullptr) {
    check_probs(kOp, "plan.probs", plan.probs, ids);
    if (plan.probs.cols < plan.last_expert) {
      bad_argument(kOp, "plan.probs", shape_of(plan.probs), concat("at least ", plan.last_expert, " columns"));
    }
    check_dense(kOp, "plan.row_probs", plan.row_probs, 1, plan.rows, plan.probs.dtype, ids.device);
  }
  if (!plan.strict || ids.device != TE_DEVICE_CPU) return;
  for (int64_t i = 0; i < ids.rows * ids.cols; ++i) {
    const int32_t id = static_cast<const int32_t*>(ids.data)[i];
    if (id < plan.first_expert || id >= plan.last_expert) {
      bad_argument(kOp, "plan.ids", concat(id, " for token ", i / ids.cols),
                   concat(plan.first_expert, " to ", plan.last_expert - 1));
    }
  }
}

// Where the host can read them: on the CPU.
void check_chunks(const char* op, const te_tensor& sizes, const te_tensor& order, int64_t rows) {
  const auto* size = static_cast<const int64_t*>(sizes.data);
  const auto* which = static_cast<const int64_t*>(order.data);
  std::vector<bool> seen(size_t(sizes.cols), false);
  int64_t sum = 0;
  for (int64_t i = 0; i < sizes.cols; ++i) {
    if (size[i] < 0) bad_argument(op, "sizes", concat(size[i], " at ", i), "sizes >= 0");
    if (size[i] > rows - sum) bad_argument(op, "sizes", concat("above ", rows, " in sum"), "at most the rows of inp");
    sum += size[i];
    if (which[i] < 0 || which[i] >= sizes.cols || seen[size_t(which[i])]) {
      bad_argument(op, "order", concat(which[i], " at ", i), concat("a permutation of 0 to ", sizes.cols - 1));
    }
    seen[size_t(which[i])] = true;
  }
}

void check_chunk_map(const te_tensor& sizes, const te_tensor& order, const te_tensor& source,
                     const te_tensor& destination, const te_tensor& starts) {
  constexpr const char* kOp = "te_permute_chunk_map";
  check_dense(kOp, "sizes", sizes, 1, sizes.cols, TE_INT64, source.device);
  check_dense(kOp, "order", order, 1, sizes.cols, TE_INT64, source.device);
  check_dense(kOp, "source", source, 1, source.cols, TE_INT32, source.device);
  check_dense(kOp, "destination", destination, 1, source.cols, TE_INT32, source.device);
  check_dense(kOp, "starts", starts, 3, sizes.cols + 1, TE_INT64, source.device);
  if (source.cols > kMaxRows) bad_argument(kOp, "source", shape_of(source), "fewer than 2^31 rows");
  if (source.device == TE_DEVICE_CPU) check_chunks(kOp, sizes, order, source.cols);
}

}  // namespace

}  // namespace te::permute

extern "C" {

te_status te_permute_mask_map(te_tensor mask, te_tensor map, te_tensor counts, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    permute::check_mask_map(mask, map, counts);
    if (mask.rows == 0) return;
    const auto on_cpu = [&] {
      mask.dtype == TE_UINT8 ? permute::cpu::mask_map<uint8_t>(mask, map) : permute::cpu::mask_map<int32_t>(mask, map);
    };
    TE_ON_DEVICE_OF("te_permute_mask_map", mask, on_cpu(), permute::cuda::mask_map(mask, map, counts, stream));
  });
}

te_status te_permute_row_map(const te_permute_row_map_plan* plan, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    if (plan == nullptr) bad_argument("te_permute_row_map", "plan", "NULL", "a plan");
    permute::check_row_map(*plan);
    TE_ON_DEVICE_OF("te_permute_row_map", plan->ids, permute::cpu::row_map(*plan),
                    permute::cuda::row_map(*plan, stream));
  });
}

te_status te_permute_row_probs_backward(te_tensor ids, te_tensor row_of_pair, te_tensor drow_probs, te_tensor dprobs,
                                        te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    permute::check_row_probs_backward(ids, row_of_pair, drow_probs, dprobs);
    if (dprobs.rows == 0) return;
    const auto on_cpu = [&] {
      permute::dispatch_bytes(dprobs.dtype, [&](auto bits) {
        permute::cpu::row_probs_backward<decltype(bits)>(ids, row_of_pair, drow_probs, dprobs);
      });
    };
    TE_ON_DEVICE_OF("te_permute_row_probs_backward", ids, on_cpu(),
                    permute::cuda::row_probs_backward(ids, row_of_pair, drow_probs, dprobs, stream));
  });
}

te_status te_permute_chunk_map(te_tensor sizes, te_tensor order, te_tensor source, te_tensor destination,
                               te_tensor starts, uint32_t* counters, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    permute::check_chunk_map(sizes, order, source, destination, starts);
    if (source.cols == 0) return;
    TE_ON_DEVICE_OF("te_permute_chunk_map", source, permute::cpu::chunk_map(sizes, order, source, destination),
                    permute::cuda::chunk_map(sizes, order, source, destination, starts, counters, stream));
  });
}

}  // extern "C"
