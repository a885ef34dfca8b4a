// optimizer, CPU path (the specification) of the ops other than Adam: SGD, scaling, norms, FP8 scales. Formulas are in
// optimizer_math.h; arguments have been checked.
#include <algorithm>
#include <cmath>

#include "ops/optimizer/lists_cpu.h"
#include "ops/optimizer/optimizer_math.h"

namespace te::optimizer::cpu {

void count_step(const te_tensor& step, const te_tensor& noop) {
  if (!is_set(noop)) ++*static_cast<int32_t*>(step.data);
}

// ---- SGD ----

namespace {

template <bool kMomentum>
void step_chunk(const Sgd& s, const float* __restrict g, float* __restrict p, float* __restrict b, int64_t n) {
  float none = 0.f;
  for (int64_t i = 0; i < n; ++i) sgd_step<kMomentum>(s, g[i], p[i], kMomentum ? b[i] : none);
}

}  // namespace

void sgd(const te_sgd_plan& plan, Tensors tensors, int64_t count) {
  if (is_set(plan.noop)) return;
  const Sgd s(plan);
  for_pieces(tensors, count, [&](int64_t t, int64_t begin, int64_t size) {
    float g_buffer[kChunk], p_buffer[kChunk], b_buffer[kChunk];
    void* const* data = tensors[t].data;
    for_chunks(size, [&](int64_t offset, int64_t n) {
      const int64_t first = begin + offset;
      const float* g = open(data[0], plan.grad, first, g_buffer, n);
      float* p = open(data[1], plan.param, first, p_buffer, n);
      if (plan.momentum != 0.0) {
        float* b = open(data[2], plan.momentum_buffer, first, b_buffer, n);
        step_chunk<true>(s, g, p, b, n);
        close(data[2], plan.momentum_buffer, first, b, n);
      } else {
        step_chunk<false>(s, g, p, nullptr, n);
      }
      if (plan.has_copy) close(data[3], plan.copy, first, p, n);
      close(data[1], plan.param, first, p, n);
    });
  });
}

// ---- scaling ----

void scale(const te_scale_plan& plan, Tensors tensors, int64_t count) {
  const float scale = value_or(plan.scale_device, float(plan.scale));
  std::atomic<bool> finite{true};
  for_pieces(tensors, count, [&](int64_t t, int64_t begin, int64_t size) {
    float buffer[kChunk], products[kChunk];
    for_chunks(size, [&](int64_t offset, int64_t n) {
      const float* in = open(tensors[t].data[0], plan.in, begin + offset, buffer, n);
      uint32_t largest = 0;
      for (int64_t i = 0; i < n; ++i) {
        products[i] = in[i] * scale;
        largest = std::max(largest, te::detail::bits_of(products[i]) & 0x7fffffffu);
      }
      if (largest >= 0x7f800000u) finite.store(false, std::memory_order_relaxed);
      close(tensors[t].data[1], plan.out, begin + offset, products, n);
    });
  });
  if (!finite) set(plan.noop);
}

// ---- norms ----

namespace {

constexpr int kSums = 8;

double sum_of(const double (&lanes)[kSums]) {
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

double sum_in_order(const double* values, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += values[i];
  return sum;
}

}  // namespace

void square_sums(Tensors tensors, int64_t count, te_dtype dtype, const te_tensor& inv_scale, double* partials) {
  const float factor = value_or(inv_scale, 1.f);
  struct Chunk {
    void* data;
    int64_t first, n;
  };
  std::vector<Chunk> chunks;
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t first = 0; first < tensors[t].numel; first += TE_OPTIMIZER_NORM_CHUNK) {
      chunks.push_back(
          {tensors[t].data[0], first, std::min<int64_t>(TE_OPTIMIZER_NORM_CHUNK, tensors[t].numel - first)});
    }
  }
  constexpr int64_t kTogether = 16;  // chunks of a block: small tensors have one each
  parallel_for((int64_t(chunks.size()) + kTogether - 1) / kTogether, [&](int64_t block) {
    const int64_t last = std::min(int64_t(chunks.size()), (block + 1) * kTogether);
    for (int64_t k = block * kTogether; k < last; ++k) {
      const Chunk& chunk = chunks[size_t(k)];
      float buffer[kChunk];
      double lanes[kSums] = {};
      for_chunks(chunk.n, [&](int64_t offset, int64_t n) {
        const float* x = open(chunk.data, dtype, chunk.first + offset, buffer, n);
        int64_t i = 0;
        for (; i + kSums <= n; i += kSums) {
          for (int lane = 0; lane < kSums; ++lane) {
            const double value = double(x[i + lane] * factor);
            lanes[lane] = fma(value, value, lanes[lane]);
          }
        }
        for (int lane = 0; i < n; ++i, ++lane) {
          const double value = double(x[i] * factor);
          lanes[lane] = fma(value, value, lanes[lane]);
        }
      });
      partials[k] = sum_of(lanes);
    }
  });
}

void norm(const double* partials, const int64_t* chunks, int64_t count, const te_tensor& norm,
          const te_tensor& per_tensor, const te_tensor& noop) {
  int64_t done = 0;
  for (int64_t t = 0; t < count; ++t) {
    if (per_tensor.data != nullptr) {
      static_cast<float*>(per_tensor.data)[t] = float(std::sqrt(sum_in_order(partials + done, chunks[t])));
    }
    done += chunks[t];
  }
  const auto result = float(std::sqrt(sum_in_order(partials, done)));
  *static_cast<float*>(norm.data) = result;
  if (!is_finite(result)) set(noop);
}

void compute_scales(Tensors tensors, int64_t count, float max_fp8, bool pow_2, float epsilon) {
  for_pieces(tensors, count, [&](int64_t t, int64_t first, int64_t n) {
    const auto list = [&](int k) { return static_cast<float*>(tensors[t].data[k]) + first; };
    for (int64_t i = 0; i < n; ++i) {
      const float scale = quantize::scale_of(list(0)[i], epsilon, max_fp8, pow_2);
      list(1)[i] = scale;
      list(2)[i] = 1.f / scale;
    }
  });
}

}  // namespace te::optimizer::cpu
