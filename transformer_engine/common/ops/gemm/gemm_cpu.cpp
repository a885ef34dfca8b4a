// gemm, CPU path. The sums come from the product that te_set_cpu_gemm installed or from a plain loop, which is the
// specification; both share the widening to float32 and the epilogues.
#include <atomic>
#include <cmath>
#include <vector>

#include "core/gelu.h"
#include "core/parallel_for.h"
#include "ops/gemm/gemm_fp8.h"

namespace te::gemm::cpu {

namespace {

std::atomic<te_cpu_gemm_hook> installed{nullptr};

float load(const te_tensor& t, int64_t row, int64_t col) {
  float value = 0.f;
  dispatch_float(t.dtype, "te_gemm", "a", [&](auto type) { value = to_float(row_ptr<decltype(type)>(t, row)[col]); });
  return value;
}

void store(const te_tensor& t, int64_t row, int64_t col, float value) {
  dispatch_float(t.dtype, "te_gemm", "d", [&](auto type) {
    using T = decltype(type);
    row_ptr<T>(t, row)[col] = from_float<T>(value);
  });
}

struct DoubleExp {
  static double exp(double x) { return std::exp(x); }
  static double reciprocal(double x) { return 1. / x; }
};
GeluAt<double> gelu(float x) { return te::gelu<DoubleExp>(double(x)); }

// A matrix in float32: the caller's memory, or a dense copy.
struct Floats {
  const float* data;
  int64_t pitch;
  std::vector<float> copy;

  Floats(const te_tensor& t, const te_tensor& scale_inv, te_scaling scaling)
      : data(static_cast<const float*>(t.data)), pitch(t.row_pitch) {
    if (t.dtype == TE_FLOAT32) return;
    copy.resize(size_t(t.rows * t.cols));
    parallel_for(t.rows, [&](int64_t row) {
      float* to = copy.data() + row * t.cols;
      for (int64_t col = 0; col < t.cols; ++col) {
        to[col] = is_fp8(t.dtype) ? load_fp8(t, scale_inv, scaling, row, col) : load(t, row, col);
      }
    });
    data = copy.data();
    pitch = t.cols;
  }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;
};

// The epilogue of one element.
void finish(const te_gemm_problem& p, int64_t row, int64_t col, float sum) {
  if (p.epilogue == TE_GEMM_BIAS || (p.epilogue == TE_GEMM_GELU && p.bias.data != nullptr)) sum += load(p.bias, 0, col);
  if (p.epilogue == TE_GEMM_GELU) {
    store(p.aux, row, col, sum);
    sum = float(gelu(sum).value);
  } else if (p.epilogue == TE_GEMM_DGELU) {
    sum *= float(gelu(load(p.aux, row, col)).slope);
  }
  store(p.d, row, col, p.accumulate ? load(p.d, row, col) + sum : sum);
}

// sum(row, col) returns an element of the product.
template <class Sum>
void finish_all(const te_gemm_problem& p, const GemmShape& s, Sum&& sum) {
  parallel_for(s.m, [&](int64_t row) {
    for (int64_t col = 0; col < s.n; ++col) finish(p, row, col, sum(row, col));
  });
}

void sum_rows_of_b(const te_gemm_problem& p, const GemmShape& s) {
  parallel_for(s.m, [&](int64_t row) {
    float sum = 0.f;
    for (int64_t k = 0; k < s.k; ++k) sum += load(p.b, k, row);
    store(p.bias, 0, row, sum);
  });
}

}  // namespace

void install(te_cpu_gemm_hook hook) { installed.store(hook, std::memory_order_release); }

void run_by(te_cpu_gemm_hook hook, const te_gemm_problem& p, const GemmShape& s) {
  const Floats a(p.a, p.a_scale_inv, p.a_scaling), b(p.b, p.b_scale_inv, p.b_scaling);
  if (p.epilogue == TE_GEMM_BGRAD) sum_rows_of_b(p, s);
  if (hook == nullptr) {
    // Steps along K and from one output to the next. The fused multiply-add is explicit: left to itself, the compiler
    // contracts in one layout and not in another.
    const int64_t a_step = p.layout == TE_GEMM_TN ? 1 : a.pitch, a_next = p.layout == TE_GEMM_TN ? a.pitch : 1;
    const int64_t b_step = p.layout == TE_GEMM_NT ? b.pitch : 1, b_next = p.layout == TE_GEMM_NT ? 1 : b.pitch;
    finish_all(p, s, [&](int64_t row, int64_t col) {
      float sum = 0.f;
      for (int64_t k = 0; k < s.k; ++k) {
        sum = std::fma(a.data[col * a_next + k * a_step], b.data[row * b_next + k * b_step], sum);
      }
      return sum;
    });
    return;
  }
  const auto multiply = [&](float* d, int64_t pitch, bool accumulate) {
    hook(p.layout, s.m, s.n, s.k, a.data, a.pitch, b.data, b.pitch, d, pitch, accumulate ? 1 : 0);
  };
  if (p.d.dtype == TE_FLOAT32 && (p.epilogue == TE_GEMM_NONE || p.epilogue == TE_GEMM_BGRAD)) {
    return multiply(static_cast<float*>(p.d.data), p.d.row_pitch, p.accumulate != 0);
  }
  std::vector<float> product(size_t(s.m * s.n));
  multiply(product.data(), s.n, false);
  finish_all(p, s, [&](int64_t row, int64_t col) { return product[size_t(row * s.n + col)]; });
}

void run(const te_gemm_problem& p, const GemmShape& s) {
  const te_cpu_gemm_hook hook = is_empty(s) ? nullptr : installed.load(std::memory_order_acquire);
  if (hook != nullptr) {
    te_note_path("the CPU product that te_set_cpu_gemm installed", "");
  } else {
    te_note_path("CPU loop", is_empty(s) ? "" : "te_set_cpu_gemm has installed no product");
  }
  run_by(hook, p, s);
}

}  // namespace te::gemm::cpu
