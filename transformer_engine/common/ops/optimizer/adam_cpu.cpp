// Adam, the CPU path (the specification). Formulas are in optimizer_math.h; arguments have been checked.
#include <algorithm>

#include "ops/optimizer/lists_cpu.h"
#include "ops/optimizer/optimizer_math.h"

namespace te::optimizer::cpu {

namespace {

template <bool kDecoupled>
void step_chunk(const Adam& a, const float* __restrict g, float* __restrict p, float* __restrict m, float* __restrict v,
                int64_t n) {
  for (int64_t i = 0; i < n; ++i) adam_step<kDecoupled>(a, g[i], p[i], m[i], v[i]);
}

// A chunk of a state that may be scaled.
struct State {
  void* const data;
  const te_dtype dtype;
  float* const pair;  // nullptr: not scaled
  const bool second;  // a second moment
  float buffer[kChunk];

  State(void* data, te_dtype dtype, float* pair, bool second = false)
      : data(data), dtype(dtype), pair(is_scaled(dtype) ? pair : nullptr), second(second) {}

  float* open(int64_t offset, int64_t n, bool copied) {
    float* values = cpu::open(data, dtype, offset, buffer, n);
    if (copied && values != buffer) values = std::copy(values, values + n, buffer) - n;
    if (pair != nullptr) {
      for (int64_t i = 0; i < n; ++i) values[i] *= pair[0];
    }
    return values;
  }
  void measure(const float* values, int64_t n) const {
    if (pair != nullptr) raise(pair + 1, amax_of(values, n));
  }
  void close(int64_t offset, float* values, int64_t n) const {
    if (pair != nullptr) {
      const float scale = state_scale(pair[1], range_of(dtype));
      if (second) {
        const float least = least_of(dtype);
        for (int64_t i = 0; i < n; ++i) values[i] = scaled_second(values[i], scale, least);
      } else {
        for (int64_t i = 0; i < n; ++i) values[i] /= scale;
      }
    }
    cpu::close(data, dtype, offset, values, n);
  }
};

enum class Pass { kWrite, kMeasure };

class AdamTensor {
 public:
  AdamTensor(const te_adam_plan& plan, const Adam& a, const te_optimizer_tensor& t, const te_adam_scales* scales)
      : plan_(plan),
        a_(a),
        t_(t),
        scales_(scales == nullptr ? te_adam_scales{} : *scales),
        m_(t.data[2], plan.exp_avg, scales_.exp_avg),
        v_(t.data[3], plan.exp_avg_sq, scales_.exp_avg_sq, true),
        w_(plan.master == TE_MASTER_NONE
               ? State(t.data[1], plan.param, nullptr)
               : State(t.data[4], plan.master == TE_MASTER_FLOAT16 ? TE_FLOAT16 : TE_FLOAT32, scales_.master)) {}

  void run(int64_t first, int64_t n, Pass pass) {
    const bool copied = pass == Pass::kMeasure;
    const float* g = unscaled(first, n, pass);
    float *m = m_.open(first, n, copied), *v = v_.open(first, n, copied);
    float* w = plan_.master == TE_MASTER_REMAINDER ? join(first, n) : w_.open(first, n, copied);
    (plan_.decoupled ? step_chunk<true> : step_chunk<false>)(a_, g, w, m, v, n);
    if (pass == Pass::kMeasure) {
      m_.measure(m, n);
      v_.measure(v, n);
      w_.measure(w, n);
      return;
    }
    write_weight(first, w, n);
    m_.close(first, m, n);
    v_.close(first, v, n);
    if (plan_.master == TE_MASTER_REMAINDER) {
      split(first, w, n);
    } else {
      w_.close(first, w, n);
    }
  }

 private:
  const float* unscaled(int64_t first, int64_t n, Pass pass) {
    const float* g = open(t_.data[0], plan_.grad, first, g_, n);
    if (plan_.inv_scale.data == nullptr) return g;
    for (int64_t i = 0; i < n; ++i) g_[i] = g[i] * a_.inv_scale;
    if (pass == Pass::kWrite) cpu::close(t_.data[0], plan_.grad, first, g_, n);
    return g_;
  }
  float* join(int64_t first, int64_t n) {
    const auto* weight = static_cast<const uint16_t*>(t_.data[1]) + first;
    const auto* remainder = static_cast<const int16_t*>(t_.data[4]) + first;
    for (int64_t i = 0; i < n; ++i) w_.buffer[i] = joined(weight[i], remainder[i]);
    return w_.buffer;
  }
  void split(int64_t first, const float* w, int64_t n) const {
    auto* weight = static_cast<uint16_t*>(t_.data[1]) + first;
    auto* remainder = static_cast<int16_t*>(t_.data[4]) + first;
    for (int64_t i = 0; i < n; ++i) {
      const Halves halves = halves_of(w[i]);
      weight[i] = halves.weight;
      remainder[i] = halves.remainder;
    }
  }
  // The weight of a float master.
  void write_weight(int64_t first, const float* w, int64_t n) {
    if (plan_.master != TE_MASTER_FLOAT32 && plan_.master != TE_MASTER_FLOAT16) return;
    if (!is_fp8(plan_.param)) return cpu::close(t_.data[1], plan_.param, first, w, n);
    const float scale = *scales_.fp8_scale;
    std::copy(w, w + n, g_);  // the gradient has been used
    round_to(plan_.rounding, g_, n);
    raise(scales_.fp8_amax, amax_of(g_, n));
    for (int64_t i = 0; i < n; ++i) g_[i] *= scale;
    const int64_t cols = scales_.fp8_cols;
    for (int64_t done = 0; done < n;) {
      const int64_t row = (first + done) / cols, col = (first + done) % cols, run = std::min(n - done, cols - col);
      cpu::close(t_.data[1], plan_.param, row * scales_.fp8_row_pitch + col, g_ + done, run);
      done += run;
    }
  }

  const te_adam_plan& plan_;
  const Adam& a_;
  const te_optimizer_tensor& t_;
  te_adam_scales scales_;
  State m_, v_, w_;
  float g_[kChunk];
};

void end_scaled(float* pair, te_dtype dtype) {
  pair[0] = state_scale(pair[1], range_of(dtype));
  pair[1] = 0.f;
}

}  // namespace

void adam(const te_adam_plan& plan, Tensors tensors, const te_adam_scales* scales, int64_t count) {
  if (is_set(plan.noop)) return;
  te_adam_plan now = plan;
  now.step = value_or<int32_t>(plan.step_device, int32_t(std::min<int64_t>(plan.step, INT32_MAX)));
  Adam a(now);
  a.lr = value_or(plan.lr_device, a.lr);
  a.inv_scale = value_or(plan.inv_scale, 1.f);
  a.clip = value_or(plan.clip, 1.f);
  const auto run = [&](Pass pass) {
    for_pieces(tensors, count, [&](int64_t t, int64_t first, int64_t n) {
      AdamTensor tensor(plan, a, tensors[t], scales == nullptr ? nullptr : scales + t);
      for_chunks(n, [&](int64_t offset, int64_t m) { tensor.run(first + offset, m, pass); });
    });
  };
  const bool scaled = has_scaled_states(plan);
  if (scaled) run(Pass::kMeasure);
  run(Pass::kWrite);
  for (int64_t t = 0; t < count && (scaled || is_fp8(plan.param)); ++t) {
    if (tensors[t].numel == 0) continue;
    if (is_scaled(plan.exp_avg)) end_scaled(scales[t].exp_avg, plan.exp_avg);
    if (is_scaled(plan.exp_avg_sq)) end_scaled(scales[t].exp_avg_sq, plan.exp_avg_sq);
    if (plan.master == TE_MASTER_FLOAT16) end_scaled(scales[t].master, TE_FLOAT16);
    if (is_fp8(plan.param)) *scales[t].fp8_scale_inv = 1.f / *scales[t].fp8_scale;
  }
}

}  // namespace te::optimizer::cpu
