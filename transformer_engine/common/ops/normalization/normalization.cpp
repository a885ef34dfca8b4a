// normalization, contract and CPU path (the specification). The formulas are in the C header.
#include "ops/normalization/tensors.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/cpu_chunk.h"
#include "core/device.h"
#include "core/parallel_for.h"
#include "core/tensor.h"

namespace te::normalization {

namespace cpu {

using namespace te::cpu;

// One widened row of gamma or beta, shared by all rows; `shift` is 1 for zero-centred gamma. Zeros if absent.
std::vector<float> widened(const te_tensor& t, int64_t hidden, float shift, const char* op, const char* argument) {
  std::vector<float> values(static_cast<size_t>(hidden));
  if (t.data == nullptr) return values;
  dispatch_float(t.dtype, op, argument, [&](auto type) {
    const auto* source = row_ptr<const decltype(type)>(t, 0);
    for (int64_t i = 0; i < hidden; ++i) values[size_t(i)] = to_float(source[i]) + shift;
  });
  return values;
}

struct Statistics {
  float mean;
  float rstd;
};

template <class T>
Statistics statistics_of(const Plan& plan, const T* h, int64_t hidden) {
  float buffer[kChunk];
  float mean = 0.f, sum = 0.f, squares = 0.f;
  if (!plan.rms) {
    for_chunks(hidden, [&](int64_t c, int64_t n) {
      const float* v = load_chunk(h + c, buffer, n);
      sum += lane_sum(n, [v](int64_t i) { return v[i]; });
    });
    mean = sum / float(hidden);
  }
  for_chunks(hidden, [&](int64_t c, int64_t n) {
    const float* v = load_chunk(h + c, buffer, n);
    squares += lane_sum(n, [v, mean](int64_t i) { return (v[i] - mean) * (v[i] - mean); });
  });
  return {mean, 1.f / std::sqrt(squares / float(hidden) + plan.eps)};
}

template <class T>
void add_rows(const T* x, const T* residual, T* h, int64_t hidden) {
  float x_buffer[kChunk], r_buffer[kChunk], result[kChunk];
  for_chunks(hidden, [&](int64_t c, int64_t n) {
    const float* a = load_chunk(x + c, x_buffer, n);
    const float* b = load_chunk(residual + c, r_buffer, n);
    float* out = chunk_target(h + c, result);
    for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
    store_chunk(h + c, out, n);
  });
}

// y of one row; gamma includes its shift.
template <class T>
void normalize_row(const T* h, Statistics s, const float* gamma, const float* beta, T* y, int64_t hidden) {
  float buffer[kChunk], result[kChunk];
  for_chunks(hidden, [&](int64_t c, int64_t n) {
    const float* v = load_chunk(h + c, buffer, n);
    const float *g = gamma + c, *b = beta + c;
    float* out = chunk_target(y + c, result);
    for (int64_t i = 0; i < n; ++i) out[i] = (v[i] - s.mean) * s.rstd * g[i] + b[i];
    store_chunk(y + c, out, n);
  });
}

template <class T>
void forward_rows(const Plan& plan, const ForwardTensors& t, const float* gamma, const float* beta) {
  const int64_t hidden = t.x.cols;
  parallel_rows(t.x.rows, hidden, [&](int64_t first_row, int64_t last_row) {
    for (int64_t row = first_row; row < last_row; ++row) {
      const T* h = row_ptr<const T>(t.x, row);
      if (t.residual.data != nullptr) {
        add_rows(h, row_ptr<const T>(t.residual, row), row_ptr<T>(t.residual_out, row), hidden);
        h = row_ptr<const T>(t.residual_out, row);
      }
      const Statistics s = statistics_of(plan, h, hidden);
      if (t.mean.data != nullptr) static_cast<float*>(t.mean.data)[row] = s.mean;
      if (t.rstd.data != nullptr) static_cast<float*>(t.rstd.data)[row] = s.rstd;
      if (t.y.data != nullptr) normalize_row(h, s, gamma, beta, row_ptr<T>(t.y, row), hidden);
    }
  });
}

void forward(const Plan& plan, const ForwardTensors& t) {
  const char* op = "te_normalization_forward";
  const std::vector<float> gamma = widened(t.gamma, t.x.cols, plan.zero_centered_gamma ? 1.f : 0.f, op, "gamma");
  const std::vector<float> beta = widened(t.beta, t.x.cols, 0.f, op, "beta");
  dispatch_float(t.x.dtype, op, "x",
                 [&](auto type) { forward_rows<decltype(type)>(plan, t, gamma.data(), beta.data()); });
}

void forward_known(const Plan& plan, const KnownTensors& t, const te_tensor& y) {
  const char* op = "te_normalization_quantize";
  const int64_t hidden = t.h.cols;
  const std::vector<float> gamma = widened(t.gamma, hidden, plan.zero_centered_gamma ? 1.f : 0.f, op, "gamma");
  const std::vector<float> beta = widened(t.beta, hidden, 0.f, op, "beta");
  dispatch_float(t.h.dtype, op, "h", [&](auto type) {
    using T = decltype(type);
    parallel_rows(t.h.rows, hidden, [&](int64_t first_row, int64_t last_row) {
      for (int64_t row = first_row; row < last_row; ++row) {
        const Statistics s{plan.rms ? 0.f : static_cast<const float*>(t.mean.data)[row],
                           static_cast<const float*>(t.rstd.data)[row]};
        normalize_row(row_ptr<const T>(t.h, row), s, gamma.data(), beta.data(), row_ptr<T>(y, row), hidden);
      }
    });
  });
}

// Row means of w and of w * n, with w = dy * g.
struct Projections {
  float w;
  float wn;
};

template <class T>
Projections projections_of(const Plan& plan, const T* dy, const T* h, const float* gamma, Statistics s,
                           int64_t hidden) {
  float dy_buffer[kChunk], h_buffer[kChunk];
  float w = 0.f, wn = 0.f;
  for_chunks(hidden, [&](int64_t c, int64_t n) {
    const float* d = load_chunk(dy + c, dy_buffer, n);
    const float* v = load_chunk(h + c, h_buffer, n);
    const float* g = gamma + c;
    const auto [of_w, of_wn] = lane_sums(n, [d, g, v, s](int64_t i) {
      const float product = d[i] * g[i];
      return std::pair(product, product * ((v[i] - s.mean) * s.rstd));
    });
    w += of_w;
    wn += of_wn;
  });
  return {plan.rms ? 0.f : w / float(hidden), wn / float(hidden)};
}

// Rows [first_row, last_row): writes dx, adds to dgamma and dbeta (of the part; NULL if not wanted).
template <class T>
void backward_rows(const Plan& plan, const BackwardTensors& t, const float* gamma, int64_t first_row, int64_t last_row,
                   float* dgamma, float* dbeta) {
  const int64_t hidden = t.x.cols;
  float dy_buffer[kChunk], h_buffer[kChunk], residual_buffer[kChunk], result[kChunk];
  float unwanted[kChunk] = {};
  const float zeros[kChunk] = {};
  for (int64_t row = first_row; row < last_row; ++row) {
    const T* dy = row_ptr<const T>(t.dy, row);
    const T* h = row_ptr<const T>(t.x, row);
    const Statistics s{plan.rms ? 0.f : static_cast<const float*>(t.mean.data)[row],
                       static_cast<const float*>(t.rstd.data)[row]};
    const Projections p = t.dx.data != nullptr ? projections_of(plan, dy, h, gamma, s, hidden) : Projections{0.f, 0.f};
    for_chunks(hidden, [&](int64_t c, int64_t n) {
      const float* d = load_chunk(dy + c, dy_buffer, n);
      const float* v = load_chunk(h + c, h_buffer, n);
      const float* g = gamma + c;
      const float* r = zeros;
      if (t.residual_grad.data != nullptr) {
        r = load_chunk(row_ptr<const T>(t.residual_grad, row) + c, residual_buffer, n);
      }
      float* __restrict__ scale_sum = dgamma != nullptr ? dgamma + c : unwanted;
      if (dbeta != nullptr) {
        float* __restrict__ shift_sum = dbeta + c;
        for (int64_t i = 0; i < n; ++i) shift_sum[i] += d[i];
      }
      float* out = t.dx.data != nullptr ? chunk_target(row_ptr<T>(t.dx, row) + c, result) : result;
#pragma GCC ivdep  // out may be d or r itself, element by element: iterations are independent
      for (int64_t i = 0; i < n; ++i) {
        const float normalized = (v[i] - s.mean) * s.rstd;
        scale_sum[i] += d[i] * normalized;
        out[i] = (d[i] * g[i] - p.w - normalized * p.wn) * s.rstd + r[i];
      }
      if (t.dx.data == nullptr) return;
      store_chunk(row_ptr<T>(t.dx, row) + c, out, n);
    });
  }
}

// target = the sum over the parts, part after part.
void sum_parts(const te_tensor& target, const std::vector<float>& partials, int64_t parts) {
  if (target.data == nullptr) return;
  dispatch_float(target.dtype, "te_normalization_backward", "dgamma", [&](auto type) {
    using T = decltype(type);
    parallel_rows(target.cols, parts, [&](int64_t first, int64_t last) {
      for_chunks(last - first, [&](int64_t c, int64_t n) {
        float sum[kChunk] = {};
        for (int64_t part = 0; part < parts; ++part) {
          const float* source = partials.data() + part * target.cols + first + c;
          for (int64_t i = 0; i < n; ++i) sum[i] += source[i];
        }
        store_chunk(row_ptr<T>(target, 0) + first + c, sum, n);
      });
    });
  });
}

void backward(const Plan& plan, const BackwardTensors& t) {
  const char* op = "te_normalization_backward";
  const int64_t rows = t.x.rows, hidden = t.x.cols;
  // At least 16 rows a part, so that adding the parts costs little, and at least the work of parallel_rows.
  const int64_t parts = std::min(rows, std::clamp<int64_t>(std::min(rows / 16, rows * hidden / 16384), 1, 64));
  const std::vector<float> gamma = widened(t.gamma, t.x.cols, plan.zero_centered_gamma ? 1.f : 0.f, op, "gamma");
  std::vector<float> dgamma(static_cast<size_t>(t.dgamma.data != nullptr ? parts * hidden : 0));
  std::vector<float> dbeta(static_cast<size_t>(t.dbeta.data != nullptr ? parts * hidden : 0));
  dispatch_float(t.x.dtype, op, "x", [&](auto type) {
    parallel_for(parts, [&](int64_t part) {
      backward_rows<decltype(type)>(plan, t, gamma.data(), part * rows / parts, (part + 1) * rows / parts,
                                    dgamma.empty() ? nullptr : dgamma.data() + part * hidden,
                                    dbeta.empty() ? nullptr : dbeta.data() + part * hidden);
    });
  });
  sum_parts(t.dgamma, dgamma, parts);
  sum_parts(t.dbeta, dbeta, parts);
}

}  // namespace cpu

namespace {

bool present(const te_tensor& t) { return t.data != nullptr; }

void check_absent(const char* op, const char* argument, const te_tensor& t, const char* why) {
  if (present(t)) bad_argument(op, argument, "present", concat("none: ", why));
}

void check_plan(const char* op, const Plan& plan, const te_tensor& x) {
  check_tensor(op, "x", x);
  if (!(plan.eps >= 0.f) || std::isinf(plan.eps)) bad_argument(op, "plan.eps", plan.eps, "a finite number >= 0");
  if (x.cols < 1) bad_argument(op, "x", shape_of(x), "a hidden size of at least 1");
  if (x.cols > kMaxHidden) {
    throw Error(TE_NOT_IMPLEMENTED, concat(op, ": argument 'x' is ", shape_of(x), ": a hidden size over ", kMaxHidden,
                                           " is not supported; normalize it in pieces, or with plain torch."));
  }
}

void check_device(const char* op, const char* argument, const te_tensor& t, const te_tensor& x) {
  if (t.device != x.device) bad_argument(op, argument, concat("on ", device_of(t)), device_of(x));
}

void check_gamma(const char* op, const te_tensor& gamma, const te_tensor& x) {
  check_shape(op, "gamma", gamma, 1, x.cols);
  check_device(op, "gamma", gamma, x);
  if (gamma.dtype != TE_FLOAT32 && gamma.dtype != x.dtype) {
    bad_argument(op, "gamma", concat("of dtype ", te_dtype_name(gamma.dtype)),
                 concat(te_dtype_name(x.dtype), " like x, or float32"));
  }
}

void check_statistic(const char* op, const char* argument, const te_tensor& t, const te_tensor& x) {
  check_shape(op, argument, t, 1, x.rows);
  check_device(op, argument, t, x);
  if (t.dtype != TE_FLOAT32) bad_argument(op, argument, concat("of dtype ", te_dtype_name(t.dtype)), "float32");
}

}  // namespace

void check_forward(const char* op, const Plan& plan, const ForwardTensors& t) {
  check_plan(op, plan, t.x);
  const int64_t rows = t.x.rows, hidden = t.x.cols;
  check_gamma(op, t.gamma, t.x);
  if (!is_absent(t.y)) check_as(op, "y", t.y, rows, hidden, t.x);
  if (present(t.residual)) {
    check_as(op, "residual", t.residual, rows, hidden, t.x);
    check_as(op, "residual_out", t.residual_out, rows, hidden, t.x);
  } else {
    check_absent(op, "residual_out", t.residual_out, "there is no residual, so it would be a copy of x");
  }
  if (plan.rms) {
    check_absent(op, "beta", t.beta, "RMSNorm has no beta");
    check_absent(op, "mean", t.mean, "RMSNorm takes no mean");
  }
  if (present(t.beta)) check_as(op, "beta", t.beta, 1, hidden, t.gamma);
  if (present(t.mean)) check_statistic(op, "mean", t.mean, t.x);
  if (present(t.rstd)) check_statistic(op, "rstd", t.rstd, t.x);
}

void check_known(const char* op, Plan plan, const KnownTensors& t) {
  plan.eps = 0.f;  // not read
  check_plan(op, plan, t.h);
  dispatch_float(t.h.dtype, op, "h", [](auto) {});
  check_gamma(op, t.gamma, t.h);
  if (plan.rms) {
    check_absent(op, "beta", t.beta, "RMSNorm has no beta");
    check_absent(op, "mean", t.mean, "RMSNorm takes no mean");
  } else if (t.h.rows > 0) {
    check_statistic(op, "mean", t.mean, t.h);
  }
  if (t.h.rows > 0) check_statistic(op, "rstd", t.rstd, t.h);
  if (present(t.beta)) check_as(op, "beta", t.beta, 1, t.h.cols, t.gamma);
}

// uint8 [1, >= bytes] on 16 bytes, on CUDA.
void check_bytes(const char* op, const te_tensor& workspace, const te_tensor& x, int64_t bytes) {
  if (x.device == TE_DEVICE_CPU || bytes == 0) return;
  check_tensor(op, "workspace", workspace);
  if (workspace.dtype != TE_UINT8 || workspace.rows != 1 || workspace.cols < bytes || workspace.device != x.device ||
      reinterpret_cast<uintptr_t>(workspace.data) % 16 != 0) {
    bad_argument(op, "workspace",
                 concat(te_dtype_name(workspace.dtype), " ", shape_of(workspace), " on ", device_of(workspace)),
                 concat("uint8 [1, >= ", bytes, "] on ", device_of(x), ", on a 16-byte address"));
  }
}

namespace {

void check_workspace(const char* op, const Plan& plan, const BackwardTensors& t) {
  if (!present(t.dgamma) && !present(t.dbeta)) return;
  check_bytes(op, t.workspace, t.x, int64_t(te_normalization_backward_workspace(plan, t.x.rows, t.x.cols)));
}

void check_backward(const char* op, const Plan& plan, const BackwardTensors& t) {
  check_plan(op, plan, t.x);
  const int64_t rows = t.x.rows, hidden = t.x.cols;
  check_as(op, "dy", t.dy, rows, hidden, t.x);
  check_gamma(op, t.gamma, t.x);
  if (plan.rms) {
    check_absent(op, "mean", t.mean, "RMSNorm takes no mean");
    check_absent(op, "dbeta", t.dbeta, "RMSNorm has no beta");
  } else if (rows > 0) {
    check_statistic(op, "mean", t.mean, t.x);
  }
  if (rows > 0) check_statistic(op, "rstd", t.rstd, t.x);
  if (present(t.dx)) check_as(op, "dx", t.dx, rows, hidden, t.x);
  if (present(t.residual_grad)) {
    check_as(op, "residual_grad", t.residual_grad, rows, hidden, t.x);
    if (!present(t.dx)) bad_argument(op, "dx", "absent", "present: residual_grad is added to it");
  }
  if (present(t.dgamma)) check_as(op, "dgamma", t.dgamma, 1, hidden, t.gamma);
  if (present(t.dbeta)) check_as(op, "dbeta", t.dbeta, 1, hidden, t.gamma);
  check_workspace(op, plan, t);
}

}  // namespace

}  // namespace te::normalization

extern "C" {

te_status te_normalization_forward(te_normalization_plan plan, te_tensor x, te_tensor residual, te_tensor gamma,
                                   te_tensor beta, te_tensor y, te_tensor residual_out, te_tensor mean, te_tensor rstd,
                                   te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_normalization_forward";
    const normalization::ForwardTensors t{x, residual, gamma, beta, y, residual_out, mean, rstd};
    normalization::check_forward(op, plan, t);
    TE_ON_DEVICE_OF(op, x, normalization::cpu::forward(plan, t),
                    normalization::cuda::forward(plan, t, te_tensor{}, stream));
  });
}

size_t te_normalization_backward_workspace(te_normalization_plan plan, int64_t rows, int64_t hidden) {
  if (rows <= 0 || hidden <= 0) return 0;
  return size_t(te::normalization::max_parts(rows, hidden)) * size_t(hidden) * sizeof(float) * (plan.rms ? 1 : 2);
}

te_status te_normalization_backward(te_normalization_plan plan, te_tensor dy, te_tensor residual_grad, te_tensor x,
                                    te_tensor gamma, te_tensor mean, te_tensor rstd, te_tensor dx, te_tensor dgamma,
                                    te_tensor dbeta, te_tensor workspace, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_normalization_backward";
    const normalization::BackwardTensors t{dy, residual_grad, x, gamma, mean, rstd, dx, dgamma, dbeta, workspace};
    normalization::check_backward(op, plan, t);
    TE_ON_DEVICE_OF(op, x, normalization::cpu::backward(plan, t), normalization::cuda::backward(plan, t, stream));
  });
}

}  // extern "C"
