// normalization, CUDA: y by known statistics as a producer of the quantize room's tiles. It makes values and stores
// nothing; tiles, scales and bytes are that room's.
#include "ops/normalization/normalization.cuh"

namespace te::normalization::cuda {

namespace {

using quantize::kColumns;
using quantize::kRows;
using quantize::Vector;

// kAtOnce: rows whose inputs are on their way together; more would spill where a block loops over tiles (amax).
template <class T, class G, int kAtOnce>
struct Normalized {
  using Type = T;
  static constexpr int kInputs = 1, kOutputs = 1, kAmaxOutputs = 1, kBatch = kAtOnce;
  static constexpr int kBlocksPerSm = sizeof(T) == 4 ? 2 : 3;
  static constexpr bool kStaged = false;
  struct Row {
    float mean, rstd;
  };

  Rows<const T> h;
  const float* mean;  // NULL: 0
  const float* rstd;
  const G* gamma;
  const G* beta;  // NULL: none
  int64_t hidden;
  float shift;  // added to gamma
  bool wide;

  Normalized(const Plan& plan, const KnownTensors& t, bool wide)
      : h(t.h),
        mean(static_cast<const float*>(t.mean.data)),
        rstd(static_cast<const float*>(t.rstd.data)),
        gamma(static_cast<const G*>(t.gamma.data)),
        beta(static_cast<const G*>(t.beta.data)),
        hidden(t.h.cols),
        shift(plan.zero_centered_gamma ? 1.f : 0.f),
        wide(wide) {}

  __device__ __forceinline__ const T* input(int, int64_t row, int64_t col) const { return h.at(row) + col; }

  __device__ __forceinline__ int64_t pitch(int) const { return h.pitch; }

  __device__ __forceinline__ Row of(int64_t row) const { return {mean != nullptr ? mean[row] : 0.f, rstd[row]}; }

  __device__ __forceinline__ void load_parameter(const G* p, int64_t col, float (&out)[kColumns]) const {
    if (wide) return load_floats<G, kColumns>(p + col, out);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) out[j] = col + j < hidden ? to_float(p[col + j]) : 0.f;
  }

  __device__ __forceinline__ void compute(const Vector<T> (&in)[1], const Row& of_row, int64_t col,
                                          Vector<T> (&out)[1]) const {
    float v[kColumns], g[kColumns];
    widen<T, kColumns>(in[0], v);
    load_parameter(gamma, col, g);
    if (beta != nullptr) {
      float b[kColumns];
      load_parameter(beta, col, b);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) v[j] = normalized(v[j], of_row.mean, of_row.rstd, g[j] + shift, b[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) v[j] = normalized(v[j], of_row.mean, of_row.rstd, g[j] + shift);
    }
    out[0] = narrow<T, kColumns>(v);
  }
};

bool is_wide(const KnownTensors& t) {
  const bool aligned = aligned16(t.h) && aligned16(t.gamma) && aligned16(t.beta), divides = t.h.cols % kColumns == 0;
  note_width(aligned, divides, "CUDA, quantized where it is made");
  return aligned && divides;
}

}  // namespace

void quantize(const Plan& plan, const KnownTensors& t, const te_quantize_plan& quantization, const te_quantized& out,
              te_stream stream) {
  const char* op = "te_normalization_quantize";
  dispatch_types(t.h, t.gamma, op, [&](auto h_type, auto gamma_type) {
    const bool wide = is_wide(t);
    const Normalized<decltype(h_type), decltype(gamma_type), kRows> producer(plan, t, wide);
    const quantize::Dests<1> dests{{quantize::Dest(quantization, out, t.h.rows, t.h.cols)}};
    quantize::launch_quantize(op, producer, dests, t.h.rows, t.h.cols, wide, stream);
  });
}

void amax(const Plan& plan, const KnownTensors& t, const te_tensor& parts, const te_tensor& noop, te_stream stream) {
  const char* op = "te_normalization_amax";
  dispatch_types(t.h, t.gamma, op, [&](auto h_type, auto gamma_type) {
    const bool wide = is_wide(t);
    const Normalized<decltype(h_type), decltype(gamma_type), 4> producer(plan, t, wide);
    quantize::launch_amax(op, producer, t.h.rows, t.h.cols, wide, parts, noop, stream);
  });
}

}  // namespace te::normalization::cuda
