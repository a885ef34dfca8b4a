// rope, contract and CPU path (the specification). The formulas are in rope_math.h.
#include "transformer_engine/rope.h"

#include <algorithm>
#include <cstring>

#include "core/cpu_chunk.h"
#include "core/device.h"
#include "core/parallel_for.h"
#include "core/tensor.h"
#include "ops/rope/rope_math.h"

namespace te::rope {

namespace cuda {
void apply(const te_rope_plan& plan, te_stream stream);
}

namespace cpu {

using namespace te::cpu;

constexpr int64_t kPairs = kChunk / 2;

// Cosines, and signed sines that multiply the partner, of up to kPairs pairs at one position.
struct Angles {
  float low_cos[kPairs], low_weight[kPairs], high_cos[kPairs], high_weight[kPairs];
};

// Columns of a run of pairs: pair i has its elements at low + i * step and high + i * step.
struct Columns {
  int64_t low, high, step;
};

Columns columns_of(const te_rope_plan& plan, int64_t first_pair) {
  if (plan.interleaved) return {2 * first_pair, 2 * first_pair + 1, 2};
  return {first_pair, plan.rot_dim / 2 + first_pair, 1};
}

void sines_and_cosines(const float* angles, int64_t step, int64_t n, float* sines, float* cosines) {
  for (int64_t i = 0; i < n; ++i) {
    const SinCos value = sin_cos(angles[i * step]);
    sines[i] = value.sin;
    cosines[i] = value.cos;
  }
}

void fill_angles(const float* row, const Columns& columns, int64_t n, bool backward, Angles& out) {
  float low[kPairs], high[kPairs];
  sines_and_cosines(row + columns.low, columns.step, n, low, out.low_cos);
  sines_and_cosines(row + columns.high, columns.step, n, high, out.high_cos);
  float* low_weighs = backward ? out.high_weight : out.low_weight;
  float* high_weighs = backward ? out.low_weight : out.high_weight;
  for (int64_t i = 0; i < n; ++i) {
    low_weighs[i] = signed_sine(true, low[i]);
    high_weighs[i] = signed_sine(false, high[i]);
  }
}

template <class T>
void rotate_pairs(const T* x, T* y, const Columns& columns, int64_t n, const Angles& angles) {
  float low[kPairs], high[kPairs], low_out[kPairs], high_out[kPairs];
  for (int64_t i = 0; i < n; ++i) {
    low[i] = to_float(x[columns.low + i * columns.step]);
    high[i] = to_float(x[columns.high + i * columns.step]);
  }
  for (int64_t i = 0; i < n; ++i) {
    low_out[i] = rotated(low[i], high[i], angles.low_cos[i], angles.low_weight[i]);
    high_out[i] = rotated(high[i], low[i], angles.high_cos[i], angles.high_weight[i]);
  }
  for (int64_t i = 0; i < n; ++i) {
    y[columns.low + i * columns.step] = from_float<T>(low_out[i]);
    y[columns.high + i * columns.step] = from_float<T>(high_out[i]);
  }
}

template <class T>
T* head_ptr(const te_rope_tensor& t, int64_t s, int64_t b, int64_t head) {
  const int64_t group = t.heads_per_group == 0 ? 0 : head / t.heads_per_group;
  return static_cast<T*>(t.data) + s * t.seq_stride + b * t.batch_stride + group * t.group_stride +
         (head - group * t.heads_per_group) * t.head_stride;
}

template <class T>
void apply_position(const te_rope_plan& plan, const Parts& parts, int64_t s, int64_t b) {
  Angles angles;
  const auto* start = static_cast<const int32_t*>(plan.start_positions.data);
  const int64_t row = s + (start == nullptr ? 0 : start[b]);
  for (int64_t first = 0; first < plan.rot_dim / 2; first += kPairs) {
    const int64_t n = std::min(kPairs, plan.rot_dim / 2 - first);
    const Columns columns = columns_of(plan, first);
    const te_tensor* filled = nullptr;
    for (const Part& part : parts.part) {
      if (part.freqs == nullptr || part.heads == 0) continue;
      if (filled != part.freqs) {
        fill_angles(row_ptr<const float>(*part.freqs, row), columns, n, plan.backward != 0, angles);
        filled = part.freqs;
      }
      for (int64_t head = 0; head < part.heads; ++head) {
        rotate_pairs(head_ptr<const T>(part.in, s, b, head), head_ptr<T>(part.out, s, b, head), columns, n, angles);
      }
    }
  }
  for (const Part& part : parts.part) {
    const int64_t first = part.freqs == nullptr ? 0 : plan.rot_dim;
    if (first == plan.head_dim) continue;
    for (int64_t head = 0; head < part.heads; ++head) {
      std::memmove(head_ptr<T>(part.out, s, b, head) + first, head_ptr<const T>(part.in, s, b, head) + first,
                   size_t(plan.head_dim - first) * sizeof(T));
    }
  }
}

void apply(const te_rope_plan& plan) {
  const Parts parts = parts_of(plan);
  const int64_t elements = (plan.q_heads + plan.k_heads + plan.v_heads) * plan.head_dim;
  dispatch_float(plan.dtype, "te_rope_apply", "plan.dtype", [&](auto t) {
    parallel_rows(plan.seq * plan.batch, elements, [&](int64_t first, int64_t last) {
      for (int64_t position = first; position < last; ++position) {
        apply_position<decltype(t)>(plan, parts, position / plan.batch, position % plan.batch);
      }
    });
  });
}

}  // namespace cpu

namespace {

constexpr const char* kOp = "te_rope_apply";

void check_tensors(const te_rope_plan& plan, const char* argument, const te_rope_tensor& t, int64_t heads,
                   bool written) {
  if (plan.seq * plan.batch * heads * plan.head_dim == 0) return;
  if (t.data == nullptr) bad_argument(kOp, argument, "NULL", "a data pointer");
  if (t.heads_per_group < 0 || (t.heads_per_group > 0 && heads % t.heads_per_group != 0)) {
    bad_argument(kOp, argument, concat("in groups of ", t.heads_per_group, " heads"), concat("a divisor of ", heads));
  }
  const int64_t group = t.heads_per_group == 0 ? heads : t.heads_per_group;
  const struct {
    const char* name;
    int64_t size, stride;
  } dims[] = {{"seq", plan.seq, t.seq_stride},
              {"batch", plan.batch, t.batch_stride},
              {"head", group, t.head_stride},
              {"group", heads / group, t.group_stride}};
  for (const auto& dim : dims) {
    // If two elements of an output share memory, their order of writes would be undefined.
    const int64_t least = written ? plan.head_dim : 0;
    if (dim.size > 1 && dim.stride < least) {
      bad_argument(kOp, argument, concat("of ", dim.name, " stride ", dim.stride), concat(">= ", least));
    }
  }
}

void check_device(const te_rope_plan& plan, const char* argument, const te_tensor& t, te_dtype dtype) {
  check_like(kOp, argument, t, te_tensor{nullptr, 0, 0, 0, dtype, plan.device});
}

void check_freqs(const te_rope_plan& plan, const char* argument, const te_tensor& t) {
  check_tensor(kOp, argument, t);
  check_device(plan, argument, t, TE_FLOAT32);
  if (t.cols != plan.rot_dim || t.rows < plan.seq) {
    bad_argument(kOp, argument, shape_of(t), concat("[>= ", plan.seq, ", ", plan.rot_dim, "]"));
  }
}

void check_start_positions(const te_rope_plan& plan) {
  const te_tensor& t = plan.start_positions;
  const char* argument = "plan.start_positions";
  check_shape(kOp, argument, t, 1, plan.batch);
  check_device(plan, argument, t, TE_INT32);
  if (plan.device != TE_DEVICE_CPU) return;
  const bool own_k = plan.k_freqs.data != nullptr;
  const int64_t rows = own_k ? std::min(plan.q_freqs.rows, plan.k_freqs.rows) : plan.q_freqs.rows;
  for (int64_t b = 0; b < plan.batch; ++b) {
    const int64_t start = static_cast<const int32_t*>(t.data)[b];
    if (start < 0 || start + plan.seq > rows) {
      bad_argument(kOp, argument, concat(start, " at batch ", b),
                   concat("0 to ", rows - plan.seq, " (freqs has ", rows, " rows, seq is ", plan.seq, ")"));
    }
  }
}

void check_plan(const te_rope_plan& plan) {
  const auto size = [](const char* argument, int64_t value) {
    if (value < 0) bad_argument(kOp, argument, value, "a size >= 0");
  };
  size("plan.seq", plan.seq);
  size("plan.batch", plan.batch);
  size("plan.q_heads", plan.q_heads);
  size("plan.k_heads", plan.k_heads);
  size("plan.v_heads", plan.v_heads);
  size("plan.head_dim", plan.head_dim);
  if (plan.rot_dim < 0 || plan.rot_dim % 2 != 0 || plan.rot_dim > plan.head_dim) {
    bad_argument(kOp, "plan.rot_dim", plan.rot_dim, concat("an even number from 0 to head_dim = ", plan.head_dim));
  }
  check_tensors(plan, "plan.q", plan.q, plan.q_heads, false);
  check_tensors(plan, "plan.q_out", plan.q_out, plan.q_heads, true);
  check_tensors(plan, "plan.k", plan.k, plan.k_heads, false);
  check_tensors(plan, "plan.k_out", plan.k_out, plan.k_heads, true);
  check_tensors(plan, "plan.v", plan.v, plan.v_heads, false);
  check_tensors(plan, "plan.v_out", plan.v_out, plan.v_heads, true);
  check_freqs(plan, "plan.q_freqs", plan.q_freqs);
  if (plan.k_freqs.data != nullptr) check_freqs(plan, "plan.k_freqs", plan.k_freqs);
  if (plan.start_positions.data != nullptr) check_start_positions(plan);
}

}  // namespace

}  // namespace te::rope

extern "C" {

te_status te_rope_apply(const te_rope_plan* plan, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    if (plan == nullptr) bad_argument("te_rope_apply", "plan", "NULL", "a plan");
    rope::check_plan(*plan);
    TE_ON_DEVICE_OF("te_rope_apply", *plan, rope::cpu::apply(*plan), rope::cuda::apply(*plan, stream));
  });
}

}  // extern "C"
