// permute, contract and CPU path (the specification): tokens to rows, rows to tokens, and both gradients. The maps are
// in permute_map.cpp.
#include "transformer_engine/permute.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/cpu_chunk.h"
#include "core/device.h"
#include "core/parallel_for.h"
#include "core/tensor.h"
#include "ops/permute/pairs.h"

namespace te::permute {

namespace cuda {
void forward(const te_permute_forward_plan& plan, te_stream stream);
void gather(te_tensor inp, te_tensor source, te_tensor out, te_stream stream);
void unpermute(const te_permute_unpermute_plan& plan, te_stream stream);
void unpermute_backward(const te_permute_unpermute_backward_plan& plan, te_stream stream);
void probs_backward(const te_permute_map& map, te_tensor drow_probs, te_tensor dprobs, te_stream stream);
}  // namespace cuda

namespace cpu {

using namespace te::cpu;

size_t row_bytes(const te_tensor& t) { return size_t(t.cols) * te_dtype_bytes(t.dtype); }

char* row_of(const te_tensor& t, int64_t row) {
  return static_cast<char*>(t.data) + row * t.row_pitch * int64_t(te_dtype_bytes(t.dtype));
}

void copy_row(const te_tensor& inp, int64_t from, const te_tensor& out, int64_t to) {
  std::memcpy(row_of(out, to), row_of(inp, from), row_bytes(inp));
}
void clear_row(const te_tensor& out, int64_t row) { std::memset(row_of(out, row), 0, row_bytes(out)); }

void forward(const te_permute_forward_plan& plan) {
  const Pairs pairs = pairs_of(plan.map, plan.out.rows);
  const auto* covered = static_cast<const uint8_t*>(plan.covered.data);
  const size_t prob_bytes = te_dtype_bytes(plan.probs.dtype);
  const auto put_scales = [&](int64_t row, int64_t token) {
    for (int64_t b = 0; b < plan.scales.rows; ++b) {
      row_ptr<float>(plan.out_scales, b)[row] = token < 0 ? 1.f : row_ptr<const float>(plan.scales, b)[token];
    }
  };
  parallel_rows(plan.inp.rows, plan.inp.cols, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      for (int i = 0; i < pairs.count(t); ++i) {
        const int64_t row = pairs.row(t, i);
        if (row < 0) continue;
        if (plan.out_probs.data != nullptr) {
          std::memcpy(static_cast<char*>(plan.out_probs.data) + row * int64_t(prob_bytes),
                      row_of(plan.probs, t) + pairs.column(t, i) * int64_t(prob_bytes), prob_bytes);
        }
        const bool alive = takes_part(plan.out_probs.data, int(prob_bytes), row);
        alive ? copy_row(plan.inp, t, plan.out, row) : clear_row(plan.out, row);
        put_scales(row, alive ? t : -1);
      }
    }
  });
  parallel_rows(plan.out.rows, 1, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      if (covered[row]) continue;
      clear_row(plan.out, row);
      if (plan.out_probs.data != nullptr) {
        std::memset(static_cast<char*>(plan.out_probs.data) + row * int64_t(prob_bytes), 0, prob_bytes);
      }
      put_scales(row, -1);
    }
  });
  for (int64_t b = 0; b < plan.out_scales.rows; ++b) {
    float* const scales = row_ptr<float>(plan.out_scales, b);
    std::fill(scales + plan.out.rows, scales + plan.out_scales.cols, 0.f);
  }
}

void gather(const te_tensor& inp, const te_tensor& source, const te_tensor& out) {
  const auto* from = static_cast<const int32_t*>(source.data);
  parallel_rows(out.rows, out.cols, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      from[row] >= 0 && from[row] < inp.rows ? copy_row(inp, from[row], out, row) : clear_row(out, row);
    }
  });
}

// The probability of a pair: 1 if there are none.
template <class P>
float prob_of(const te_tensor& probs, const Pairs& pairs, int64_t token, int pair) {
  return probs.data == nullptr ? 1.f : to_float(row_ptr<const P>(probs, token)[pairs.column(token, pair)]);
}

template <class T, class P>
void unpermute_token(const te_permute_unpermute_plan& plan, const Pairs& pairs, int64_t token) {
  float buffer[kChunk], out[kChunk];
  const int bytes = int(te_dtype_bytes(plan.row_probs.dtype)), count = pairs.count(token);
  T* const y = row_ptr<T>(plan.out, token);
  for_chunks(plan.out.cols, [&](int64_t first, int64_t n) {
    float* sum = chunk_target(y + first, out);
    std::fill(sum, sum + n, -0.f);  // the sum of one term has its bits
    bool any = false;
    for (int i = 0; i < count; ++i) {
      const int64_t row = pairs.row(token, i);
      if (row < 0 || !takes_part(plan.row_probs.data, bytes, row)) continue;
      const float prob = prob_of<P>(plan.probs, pairs, token, i);
      const float* x = load_chunk(row_ptr<const T>(plan.inp, row) + first, buffer, n);
      for (int64_t j = 0; j < n; ++j) sum[j] = std::fma(prob, x[j], sum[j]);
      any = true;
    }
    if (!any) std::fill(sum, sum + n, 0.f);
    store_chunk(y + first, sum, n);
  });
}

// An element of dprobs: partial sums by a column's place in 32 lanes of 16 bytes, a lane's in their order, lanes in the
// order of a butterfly.
template <class T>
class ProductSum {
 public:
  void add(const float* a, const float* b, int64_t n) {  // n elements from a multiple of kPlaces on
    for (int64_t first = 0; first < n; first += kPlaces) {
      const int64_t count = std::min<int64_t>(kPlaces, n - first);
      for (int64_t i = 0; i < count; ++i) part_[i] = std::fma(a[first + i], b[first + i], part_[i]);
    }
  }

  float total() const {
    float lanes[kLanesOfSum], next[kLanesOfSum];
    for (int lane = 0; lane < kLanesOfSum; ++lane) {
      lanes[lane] = part_[lane * kVector<T>];
      for (int i = 1; i < kVector<T>; ++i) lanes[lane] += part_[lane * kVector<T> + i];
    }
    for (int offset = kLanesOfSum / 2; offset > 0; offset /= 2) {
      for (int lane = 0; lane < kLanesOfSum; ++lane) next[lane] = lanes[lane] + lanes[lane ^ offset];
      std::copy(next, next + kLanesOfSum, lanes);
    }
    return lanes[0];
  }

 private:
  static constexpr int64_t kPlaces = kLanesOfSum * kVector<T>;
  static_assert(kChunk % kPlaces == 0);
  float part_[kPlaces] = {};
};

template <class T, class P>
void unpermute_backward_token(const te_permute_unpermute_backward_plan& plan, const Pairs& pairs, int64_t token) {
  float grad_buffer[kChunk], buffer[kChunk], out[kChunk];
  const T* const grad = row_ptr<const T>(plan.grad, token);
  P* const dprobs = plan.dprobs.data == nullptr ? nullptr : row_ptr<P>(plan.dprobs, token);
  if (dprobs != nullptr) std::fill(dprobs, dprobs + plan.dprobs.cols, from_float<P>(0.f));
  for (int i = 0; i < pairs.count(token); ++i) {
    const int64_t row = pairs.row(token, i);
    if (row < 0) continue;
    const float prob = prob_of<P>(plan.probs, pairs, token, i);
    ProductSum<T> sum;
    for_chunks(plan.grad.cols, [&](int64_t first, int64_t n) {
      const float* g = load_chunk(grad + first, grad_buffer, n);
      if (dprobs != nullptr) sum.add(g, load_chunk(row_ptr<const T>(plan.inp, row) + first, buffer, n), n);
      if (plan.dinp.data == nullptr) return;
      T* const dx = row_ptr<T>(plan.dinp, row) + first;
      float* const target = chunk_target(dx, out);
      for (int64_t j = 0; j < n; ++j) target[j] = prob * g[j];
      store_chunk(dx, target, n);
    });
    if (dprobs != nullptr) dprobs[pairs.column(token, i)] = from_float<P>(sum.total());
  }
}

void unpermute(const te_permute_unpermute_plan& plan) {
  const Pairs pairs = pairs_of(plan.map, plan.inp.rows);
  const te_dtype probs = plan.probs.data == nullptr ? TE_FLOAT32 : plan.probs.dtype;
  dispatch_float(plan.inp.dtype, "te_permute_unpermute", "plan.inp", [&](auto t) {
    dispatch_float(probs, "te_permute_unpermute", "plan.probs", [&](auto p) {
      parallel_rows(plan.out.rows, plan.out.cols, [&](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; ++token) {
          unpermute_token<decltype(t), decltype(p)>(plan, pairs, token);
        }
      });
    });
  });
}

void unpermute_backward(const te_permute_unpermute_backward_plan& plan) {
  constexpr const char* kOp = "te_permute_unpermute_backward";
  const Pairs pairs = pairs_of(plan.map, plan.dinp.data == nullptr ? plan.inp.rows : plan.dinp.rows);
  const te_dtype probs = plan.probs.data == nullptr ? TE_FLOAT32 : plan.probs.dtype;
  dispatch_float(plan.grad.dtype, kOp, "plan.grad", [&](auto t) {
    dispatch_float(probs, kOp, "plan.probs", [&](auto p) {
      parallel_rows(plan.grad.rows, plan.grad.cols, [&](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; ++token) {
          unpermute_backward_token<decltype(t), decltype(p)>(plan, pairs, token);
        }
      });
    });
  });
  if (plan.dinp.data == nullptr) return;
  for (int64_t row = 0; row < plan.dinp.rows; ++row) {
    if (!static_cast<const uint8_t*>(plan.covered.data)[row]) clear_row(plan.dinp, row);
  }
}

template <class Bits>
void probs_backward(const te_permute_map& map, const te_tensor& drow_probs, const te_tensor& dprobs) {
  const Pairs pairs = pairs_of(map, drow_probs.cols);
  for (int64_t t = 0; t < dprobs.rows; ++t) {
    Bits* const out = row_ptr<Bits>(dprobs, t);
    std::fill(out, out + dprobs.cols, Bits(0));
    for (int i = 0; i < pairs.count(t); ++i) {
      const int64_t row = pairs.row(t, i);
      if (row >= 0) out[pairs.column(t, i)] = static_cast<const Bits*>(drow_probs.data)[row];
    }
  }
}

// Marks the rows that have a pair, and refuses contents of a map that no function here writes.
void check_and_cover(const char* op, const te_permute_map& map, int64_t rows, uint8_t* covered) {
  const Pairs pairs = pairs_of(map, rows);
  const auto fail = [&](int64_t token, const char* why) {
    bad_argument(op, "plan.map.rows", concat("of other contents: ", why, " of token ", token),
                 "the map of these tokens and rows, unchanged");
  };
  if (covered != nullptr) std::memset(covered, 0, size_t(rows));
  for (int64_t t = 0; t < map.rows.rows; ++t) {
    const int32_t* const of_token = row_ptr<const int32_t>(map.rows, t);
    if (map.of_mask && (of_token[pairs.width - 1] < 0 || of_token[pairs.width - 1] > pairs.experts)) {
      fail(t, "the number of rows");
    }
    for (int i = 0; i < pairs.count(t); ++i) {
      if (map.of_mask && (pairs.column(t, i) < 0 || pairs.column(t, i) >= pairs.experts)) fail(t, "an expert");
      const int64_t row = pairs.row(t, i);
      if (row < 0 || covered == nullptr) continue;
      if (covered[row]++ != 0) fail(t, "a row that another pair has too,");
    }
  }
}

}  // namespace cpu

namespace {

te_tensor like(te_dtype dtype, int32_t device) { return {nullptr, 0, 0, 0, dtype, device}; }

void check_map(const char* op, const te_permute_map& map, int64_t tokens, int32_t device) {
  const te_tensor& rows = map.rows;
  check_tensor(op, "plan.map.rows", rows);
  check_like(op, "plan.map.rows", rows, like(TE_INT32, device));
  if (rows.rows != tokens) {
    bad_argument(op, "plan.map.rows", shape_of(rows), concat("the map of ", tokens, " tokens"));
  }
  if (rows.rows > 1 && rows.row_pitch != rows.cols) bad_argument(op, "plan.map.rows", "not contiguous", "a dense map");
  if (map.of_mask && (rows.cols < 3 || rows.cols % 2 == 0 || rows.cols > 2 * TE_PERMUTE_MAX_EXPERTS + 1)) {
    bad_argument(op, "plan.map.rows", shape_of(rows), "2 E + 1 columns");
  }
  if (map.pad_offsets.data == nullptr) return;
  if (!map.of_mask) bad_argument(op, "plan.map.pad_offsets", "present", "none, with a map of ids");
  check_as(op, "plan.map.pad_offsets", map.pad_offsets, 1, (rows.cols - 1) / 2, like(TE_INT64, device));
}

bool is_prob(te_dtype dtype) {
  return dtype == TE_FLOAT32 || dtype == TE_FLOAT16 || dtype == TE_BFLOAT16 || dtype == TE_INT64;
}

int64_t columns_of_probs(const te_permute_map& map) { return map.of_mask ? (map.rows.cols - 1) / 2 : map.rows.cols; }

void check_probs(const char* op, const te_permute_map& map, const te_tensor& probs) {
  check_shape(op, "plan.probs", probs, map.rows.rows, columns_of_probs(map));
  check_like(op, "plan.probs", probs, like(probs.dtype, map.rows.device));
}

void check_row_probs(const char* op, const char* argument, const te_tensor& t, int64_t rows, int32_t device) {
  if (!is_prob(t.dtype)) {
    bad_argument(op, argument, concat("of dtype ", te_dtype_name(t.dtype)), "float32, float16, bfloat16 or int64");
  }
  check_as(op, argument, t, 1, rows, like(t.dtype, device));
}

void check_forward(const te_permute_forward_plan& plan) {
  constexpr const char* kOp = "te_permute_forward";
  const te_tensor& inp = plan.inp;
  check_tensor(kOp, "plan.inp", inp);
  check_map(kOp, plan.map, inp.rows, inp.device);
  check_as(kOp, "plan.out", plan.out, plan.out.rows, inp.cols, inp);
  check_as(kOp, "plan.covered", plan.covered, 1, plan.out.rows, like(TE_UINT8, inp.device));
  if (plan.out_probs.data != nullptr) {
    if (!plan.map.of_mask) bad_argument(kOp, "plan.probs", "present", "none, with a map of ids");
    check_probs(kOp, plan.map, plan.probs);
    check_row_probs(kOp, "plan.out_probs", plan.out_probs, plan.out.rows, inp.device);
    check_like(kOp, "plan.out_probs", plan.out_probs, plan.probs);
  }
  if (plan.scales.data == nullptr && plan.out_scales.data == nullptr) return;
  check_floats(kOp, "plan.scales", plan.scales, plan.scales.rows, plan.scales.cols, inp.device);
  check_floats(kOp, "plan.out_scales", plan.out_scales, plan.scales.rows, plan.out_scales.cols, inp.device);
  if (plan.scales.cols < inp.rows) bad_argument(kOp, "plan.scales", shape_of(plan.scales), "a column for each token");
  if (plan.out_scales.cols < plan.out.rows) {
    bad_argument(kOp, "plan.out_scales", shape_of(plan.out_scales), "a column for each row");
  }
}

void check_gather(const te_tensor& inp, const te_tensor& source, const te_tensor& out) {
  constexpr const char* kOp = "te_permute_gather";
  check_tensor(kOp, "inp", inp);
  check_as(kOp, "out", out, out.rows, inp.cols, inp);
  check_as(kOp, "source", source, 1, out.rows, like(TE_INT32, inp.device));
}

void check_unpermute(const te_permute_unpermute_plan& plan) {
  constexpr const char* kOp = "te_permute_unpermute";
  check_tensor(kOp, "plan.inp", plan.inp);
  check_map(kOp, plan.map, plan.out.rows, plan.inp.device);
  check_as(kOp, "plan.out", plan.out, plan.out.rows, plan.inp.cols, plan.inp);
  if (plan.probs.data != nullptr) check_probs(kOp, plan.map, plan.probs);
  if (plan.row_probs.data != nullptr) {
    check_row_probs(kOp, "plan.row_probs", plan.row_probs, plan.inp.rows, plan.inp.device);
  }
}

void check_unpermute_backward(const te_permute_unpermute_backward_plan& plan) {
  constexpr const char* kOp = "te_permute_unpermute_backward";
  const te_tensor& grad = plan.grad;
  check_tensor(kOp, "plan.grad", grad);
  check_map(kOp, plan.map, grad.rows, grad.device);
  if (plan.probs.data != nullptr) check_probs(kOp, plan.map, plan.probs);
  if (plan.dprobs.data != nullptr) {
    check_as(kOp, "plan.dprobs", plan.dprobs, grad.rows, columns_of_probs(plan.map), plan.probs);
    check_as(kOp, "plan.inp", plan.inp, plan.inp.rows, grad.cols, grad);
  }
  if (plan.dinp.data == nullptr) return;
  check_as(kOp, "plan.dinp", plan.dinp, plan.dprobs.data == nullptr ? plan.dinp.rows : plan.inp.rows, grad.cols, grad);
  check_as(kOp, "plan.covered", plan.covered, 1, plan.dinp.rows, like(TE_UINT8, grad.device));
}

void check_probs_backward(const te_permute_map& map, const te_tensor& drow_probs, const te_tensor& dprobs) {
  constexpr const char* kOp = "te_permute_probs_backward";
  check_tensor(kOp, "dprobs", dprobs);
  check_map(kOp, map, dprobs.rows, dprobs.device);
  check_shape(kOp, "dprobs", dprobs, map.rows.rows, columns_of_probs(map));
  check_row_probs(kOp, "drow_probs", drow_probs, drow_probs.cols, dprobs.device);
  check_like(kOp, "drow_probs", drow_probs, dprobs);
}

void cover(const char* op, const te_permute_map& map, const te_tensor& covered) {
  cpu::check_and_cover(op, map, covered.cols, static_cast<uint8_t*>(covered.data));
}

}  // namespace

}  // namespace te::permute

extern "C" {

te_status te_permute_forward(const te_permute_forward_plan* plan, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_permute_forward";
    permute::check_forward(object(kOp, "plan", plan));
    if (plan->out.rows == 0) return;
    const auto on_cpu = [&] {
      permute::cover(kOp, plan->map, plan->covered);
      permute::cpu::forward(*plan);
    };
    TE_ON_DEVICE_OF(kOp, plan->inp, on_cpu(), permute::cuda::forward(*plan, stream));
  });
}

te_status te_permute_gather(te_tensor inp, te_tensor source, te_tensor out, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    permute::check_gather(inp, source, out);
    if (out.rows == 0 || out.cols == 0) return;
    TE_ON_DEVICE_OF("te_permute_gather", inp, permute::cpu::gather(inp, source, out),
                    permute::cuda::gather(inp, source, out, stream));
  });
}

te_status te_permute_unpermute(const te_permute_unpermute_plan* plan, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_permute_unpermute";
    permute::check_unpermute(object(kOp, "plan", plan));
    if (plan->out.rows == 0 || plan->out.cols == 0) return;
    const auto on_cpu = [&] {
      permute::cpu::check_and_cover(kOp, plan->map, plan->inp.rows, nullptr);
      permute::cpu::unpermute(*plan);
    };
    TE_ON_DEVICE_OF(kOp, plan->inp, on_cpu(), permute::cuda::unpermute(*plan, stream));
  });
}

te_status te_permute_unpermute_backward(const te_permute_unpermute_backward_plan* plan, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_permute_unpermute_backward";
    permute::check_unpermute_backward(object(kOp, "plan", plan));
    const auto on_cpu = [&] {
      permute::cover(kOp, plan->map, plan->dinp.data == nullptr ? te_tensor{} : plan->covered);
      permute::cpu::unpermute_backward(*plan);
    };
    TE_ON_DEVICE_OF(kOp, plan->grad, on_cpu(), permute::cuda::unpermute_backward(*plan, stream));
  });
}

te_status te_permute_probs_backward(const te_permute_map* map, te_tensor drow_probs, te_tensor dprobs,
                                    te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_permute_probs_backward";
    permute::check_probs_backward(object(kOp, "map", map), drow_probs, dprobs);
    if (dprobs.rows == 0) return;
    const auto on_cpu = [&] {
      permute::cpu::check_and_cover(kOp, *map, drow_probs.cols, nullptr);
      permute::dispatch_bytes(
          dprobs.dtype, [&](auto bits) { permute::cpu::probs_backward<decltype(bits)>(*map, drow_probs, dprobs); });
    };
    TE_ON_DEVICE_OF(kOp, dprobs, on_cpu(), permute::cuda::probs_backward(*map, drow_probs, dprobs, stream));
  });
}

}  // extern "C"
