// The kernel of Adam: one chunk of one tensor for each block, for lists whose types are known at compile time, or at
// run time (Any). Scaled states take two passes over their tensors: first the maxima of the new values, then the values
// with the new scales.
#pragma once

#include "ops/optimizer/multi_tensor.cuh"
#include "ops/optimizer/optimizer_math.h"

namespace te::optimizer::cuda {

struct Remainder {};  // as the type of masters

// Types of the gradient, the weight, both moments, the master (Absent: the weight is updated itself).
template <class G_, class P_, class M_, class W_>
struct Types {
  using G = G_;
  using P = P_;
  using M = M_;
  using W = W_;
  using MasterList = List<std::conditional_t<std::is_same_v<W, Remainder>, bf16, W>>;
  static constexpr bool kAny = std::is_same_v<W, Any>;
  static constexpr int kLists = std::is_same_v<W, Absent> ? 4 : 5;
  using Extra = std::conditional_t<kAny, te_adam_scales, Nothing>;
};

struct AdamOptions {
  Adam adam;
  te_dtype grad, param, exp_avg, exp_avg_sq, rounding;
  te_master master;
  bool decoupled, bias_correction;
  double beta1, beta2;
  const float *lr, *inv_scale, *clip;
  const int32_t* step;
  Flag noop;

  explicit AdamOptions(const te_adam_plan& plan)
      : adam(plan),
        grad(plan.grad),
        param(plan.param),
        exp_avg(plan.exp_avg),
        exp_avg_sq(plan.exp_avg_sq),
        rounding(plan.rounding),
        master(plan.master),
        decoupled(plan.decoupled != 0),
        bias_correction(plan.bias_correction != 0),
        beta1(plan.beta1),
        beta2(plan.beta2),
        lr(floats_at(plan.lr_device)),
        inv_scale(floats_at(plan.inv_scale)),
        clip(floats_at(plan.clip)),
        step(static_cast<const int32_t*>(plan.step_device.data)),
        noop(plan.noop) {}
};

template <class T>
struct AdamLaunch : AdamOptions {
  using Types = T;

  explicit AdamLaunch(const te_adam_plan& plan) : AdamOptions(plan) {}
  Table<T::kLists, typename T::Extra> table;
};

template <class T, int N>
__device__ __forceinline__ uint16_t bits_at(const Packed<T, N>& x, int k) {
  if constexpr (N == 1) {
    return x.v[0].bits;
  } else {
    return uint16_t(x.v[k / 2] >> (k % 2 * 16));
  }
}

template <int N>
__device__ __forceinline__ Packed<bf16, N> of_bits(const uint16_t (&bits)[N]) {
  Packed<bf16, N> x;
  memcpy(&x, bits, sizeof(x));
  return x;
}

template <class L, bool kMeasure>
struct AdamBody {
  using T = typename L::Types;
  using MasterList = typename T::MasterList;
  static constexpr bool kAny = T::kAny;

  template <int N>
  struct Raw {
    typename List<typename T::G>::template Raw<N> g;
    typename List<typename T::P>::template Raw<N> p;
    typename List<typename T::M>::template Raw<N> m, v;
    typename MasterList::template Raw<N> w;
  };

  const L& launch;
  const int tensor;
  Adam adam;
  float m_scale = 1.f, v_scale = 1.f, w_scale = 1.f;              // old scales
  float new_m_scale = 1.f, new_v_scale = 1.f, new_w_scale = 1.f;  // for the written values
  float m_max = 0.f, v_max = 0.f, w_max = 0.f;                    // of this thread; w_max of FP8 weights

  __device__ __forceinline__ AdamBody(const L& launch, int tensor)
      : launch(launch), tensor(tensor), adam(launch.adam) {}

  __device__ __forceinline__ void* list(int k) const { return launch.table.data[k][tensor]; }
  __device__ __forceinline__ te_master master() const {
    if constexpr (kAny) {
      return launch.master;
    } else {
      return std::is_same_v<typename T::W, Absent>      ? TE_MASTER_NONE
             : std::is_same_v<typename T::W, Remainder> ? TE_MASTER_REMAINDER
                                                        : TE_MASTER_FLOAT32;
    }
  }
  __device__ __forceinline__ te_dtype master_dtype() const {
    return master() == TE_MASTER_FLOAT32 ? TE_FLOAT32 : TE_FLOAT16;  // for a remainder only the width matters
  }
  __device__ __forceinline__ bool reads_weight() const {
    return master() == TE_MASTER_NONE || master() == TE_MASTER_REMAINDER;
  }
  __device__ __forceinline__ bool writes_fp8() const {
    return kAny && (launch.param == TE_FLOAT8_E4M3 || launch.param == TE_FLOAT8_E5M2);
  }

  __device__ __forceinline__ bool is_wide() const {
    bool wide = List<typename T::G>::is_wide(list(0), launch.grad) &&
                List<typename T::P>::is_wide(list(1), launch.param) &&
                List<typename T::M>::is_wide(list(2), launch.exp_avg) &&
                List<typename T::M>::is_wide(list(3), launch.exp_avg_sq);
    if constexpr (T::kLists == 5) {
      wide = wide && (master() == TE_MASTER_NONE || MasterList::is_wide(list(4), master_dtype()));
    }
    if constexpr (kAny) {
      wide = wide && (!writes_fp8() || scales().fp8_cols == scales().fp8_row_pitch);
    }
    return wide;
  }

  template <int N>
  __device__ __forceinline__ Raw<N> load(int64_t i) const {
    Raw<N> raw;
    raw.g = List<typename T::G>::template load<N>(list(0), i, launch.grad);
    if (reads_weight()) raw.p = List<typename T::P>::template load<N>(list(1), i, launch.param);
    raw.m = List<typename T::M>::template load<N>(list(2), i, launch.exp_avg);
    raw.v = List<typename T::M>::template load<N>(list(3), i, launch.exp_avg_sq);
    if constexpr (T::kLists == 5) {
      if (master() != TE_MASTER_NONE) raw.w = MasterList::template load<N>(list(4), i, master_dtype());
    }
    return raw;
  }

  // Reads scalars on the device, once for each block.
  __device__ __forceinline__ bool begin() {
    if (launch.noop.is_set()) return false;
    adam.inv_scale = value_or(launch.inv_scale, 1.f);
    adam.clip = value_or(launch.clip, 1.f);
    adam.lr = value_or(launch.lr, adam.lr);
    if (launch.step != nullptr && launch.bias_correction) {
      __shared__ float corrections[2];
      if (threadIdx.x < 2) {
        corrections[threadIdx.x] = bias_correction(threadIdx.x == 0 ? launch.beta1 : launch.beta2, *launch.step);
      }
      __syncthreads();
      adam.m_correction = corrections[0];
      adam.v_correction = corrections[1];
    }
    if constexpr (kAny) {
      read_scales(launch.exp_avg, scales().exp_avg, m_scale, new_m_scale);
      read_scales(launch.exp_avg_sq, scales().exp_avg_sq, v_scale, new_v_scale);
      if (master() == TE_MASTER_FLOAT16) read_scales(TE_FLOAT16, scales().master, w_scale, new_w_scale);
    }
    return true;
  }

  template <int N>
  __device__ __forceinline__ void finish(const Raw<N>& raw, int64_t i) {
    float g[N], p[N], m[N], v[N];
    open_gradient<N>(raw, i, g);
    open_weight<N>(raw, p);
    List<typename T::M>::template open<N>(raw.m, launch.exp_avg, m);
    List<typename T::M>::template open<N>(raw.v, launch.exp_avg_sq, v);
    if constexpr (kAny) {
      times(m, m_scale);
      times(v, v_scale);
    }
    if (launch.decoupled) {
#pragma unroll
      for (int k = 0; k < N; ++k) adam_step<true>(adam, g[k], p[k], m[k], v[k]);
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) adam_step<false>(adam, g[k], p[k], m[k], v[k]);
    }
    if constexpr (kMeasure) {
      note(m, m_max);
      note(v, v_max);
      note(p, w_max);
    } else {
      store_weight<N>(i, p);
      if constexpr (kAny) {
        over(m, new_m_scale);
        if (is_scaled_on_device(launch.exp_avg_sq)) over_second(v);
      }
      List<typename T::M>::template store<N>(list(2), i, launch.exp_avg, m);
      List<typename T::M>::template store<N>(list(3), i, launch.exp_avg_sq, v);
    }
  }

  // By all threads of the block.
  __device__ __forceinline__ void end(const Place& at) {
    __shared__ float scratch[kThreads / kWarp];
    if constexpr (kMeasure) {
      raise_pair(is_scaled_on_device(launch.exp_avg), scales().exp_avg, m_max, scratch);
      raise_pair(is_scaled_on_device(launch.exp_avg_sq), scales().exp_avg_sq, v_max, scratch);
      raise_pair(master() == TE_MASTER_FLOAT16, scales().master, w_max, scratch);
    } else if constexpr (kAny) {
      if (!writes_fp8()) return;
      const float largest = block_max(w_max, scratch);
      if (threadIdx.x != 0) return;
      raise(scales().fp8_amax, largest);
      if (at.first == 0) *scales().fp8_scale_inv = 1.f / *scales().fp8_scale;
    }
  }

 private:
  __device__ __forceinline__ const te_adam_scales& scales() const { return launch.table.extra[tensor]; }

  static __device__ __forceinline__ bool is_scaled_on_device(te_dtype dtype) {
    return dtype == TE_FLOAT16 || dtype == TE_FLOAT8_E4M3;
  }

  template <int N>
  static __device__ __forceinline__ void times(float (&x)[N], float scale) {
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] *= scale;
  }
  template <int N>
  static __device__ __forceinline__ void over(float (&x)[N], float scale) {
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] /= scale;
  }
  template <int N>
  __device__ __forceinline__ void over_second(float (&v)[N]) const {
    const float least = least_of(launch.exp_avg_sq);
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = scaled_second(v[k], new_v_scale, least);
  }
  template <int N>
  static __device__ __forceinline__ void note(const float (&x)[N], float& largest) {
#pragma unroll
    for (int k = 0; k < N; ++k) largest = fmaxf(largest, fabsf(x[k]));
  }

  __device__ __forceinline__ void read_scales(te_dtype dtype, const float* pair, float& old_scale,
                                              float& new_scale) const {
    if (!is_scaled_on_device(dtype)) return;
    old_scale = pair[0];
    if (!kMeasure) new_scale = state_scale(pair[1], dtype == TE_FLOAT16 ? kHalfRange : kFp8Range);
  }
  __device__ __forceinline__ void raise_pair(bool scaled, float* pair, float x,
                                             float (&scratch)[kThreads / kWarp]) const {
    if (!scaled) return;
    const float largest = block_max(x, scratch);
    if (threadIdx.x == 0) raise(pair + 1, largest);
  }

  template <int N>
  __device__ __forceinline__ void open_gradient(const Raw<N>& raw, int64_t i, float (&g)[N]) const {
    List<typename T::G>::template open<N>(raw.g, launch.grad, g);
    if (launch.inv_scale == nullptr) return;
    times(g, adam.inv_scale);
    if (!kMeasure && adam.inv_scale != 1.f) List<typename T::G>::template store<N>(list(0), i, launch.grad, g);
  }

  template <int N>
  __device__ __forceinline__ void open_weight(const Raw<N>& raw, float (&p)[N]) const {
    if constexpr (kAny) {
      if (master() == TE_MASTER_NONE) {
        List<Any>::open<N>(raw.p, launch.param, p);
      } else if (master() == TE_MASTER_REMAINDER) {
        join<N>(List<Any>::bits16<N>(raw.p), List<Any>::bits16<N>(raw.w), p);
      } else {
        List<Any>::open<N>(raw.w, master_dtype(), p);
        times(p, w_scale);
      }
    } else if constexpr (std::is_same_v<typename T::W, Absent>) {
      List<typename T::P>::template open<N>(raw.p, launch.param, p);
    } else if constexpr (std::is_same_v<typename T::W, Remainder>) {
      join<N>(raw.p, raw.w, p);
    } else {
      MasterList::template open<N>(raw.w, master_dtype(), p);
    }
  }

  template <int N>
  static __device__ __forceinline__ void join(const Packed<bf16, N>& weight, const Packed<bf16, N>& remainder,
                                              float (&p)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) p[k] = joined(bits_at(weight, k), int16_t(bits_at(remainder, k)));
  }

  template <int N>
  __device__ __forceinline__ void store_weight(int64_t i, float (&p)[N]) {
    if (master() == TE_MASTER_REMAINDER) {
      uint16_t weight[N], remainder[N];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const Halves halves = halves_of(p[k]);
        weight[k] = halves.weight;
        remainder[k] = uint16_t(halves.remainder);
      }
      store_packed<bf16, N>(static_cast<bf16*>(list(1)) + i, of_bits<N>(weight));
      store_packed<bf16, N>(static_cast<bf16*>(list(4)) + i, of_bits<N>(remainder));
      return;
    }
    if (writes_fp8()) {
      store_fp8<N>(i, p);
    } else {
      List<typename T::P>::template store<N>(list(1), i, launch.param, p);
    }
    if constexpr (T::kLists == 5 && !std::is_same_v<typename T::W, Remainder>) {
      if (master() == TE_MASTER_NONE) return;
      if constexpr (kAny) {
        if (master() == TE_MASTER_FLOAT16) over(p, new_w_scale);
      }
      MasterList::template store<N>(list(4), i, master_dtype(), p);
    }
  }

  template <int N>
  __device__ __forceinline__ void store_fp8(int64_t i, const float (&p)[N]) {
    if constexpr (kAny) {
      const float scale = *scales().fp8_scale;
      float x[N];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        x[k] = launch.rounding == TE_BFLOAT16  ? to_float(from_float<bf16>(p[k]))
               : launch.rounding == TE_FLOAT16 ? to_float(from_float<fp16>(p[k]))
                                               : p[k];
      }
      note(x, w_max);
      times(x, scale);
      const int64_t cols = scales().fp8_cols, pitch = scales().fp8_row_pitch;
      List<Any>::store<N>(list(1), cols == pitch ? i : i / cols * pitch + i % cols, launch.param, x);
    }
  }
};

template <class L, bool kMeasure>
__global__ void __launch_bounds__(kThreads) adam_kernel(const __grid_constant__ L launch) {
  const Place at = place_of(launch.table, kChunk);
  AdamBody<L, kMeasure> body(launch, at.tensor);
  if (run_chunk(body, at, body.is_wide())) body.end(at);
}

// One launch, or as many as the tables need.
template <class T, bool kMeasure, class ExtraOf>
void launch_adam(const te_adam_plan& plan, Tensors tensors, int64_t count, ExtraOf&& extra, te_stream stream) {
  using L = AdamLaunch<T>;
  static_assert(sizeof(L) <= kArgumentBytes);
  L launch(plan);
  for_tables("te_optimizer_adam", launch, tensors, count, kChunk, extra, [&](const L& full, unsigned blocks) {
    adam_kernel<L, kMeasure><<<blocks, kThreads, 0, cudaStream_t(stream)>>>(full);
  });
}

// In adam_any.cu: every combination without its own kernel.
void adam_any(const te_adam_plan& plan, Tensors tensors, const te_adam_scales* scales, int64_t count, te_stream stream);

}  // namespace te::optimizer::cuda
