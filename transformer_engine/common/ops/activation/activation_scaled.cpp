// activation with a scale for each row, contract and CPU path (the specification): the activation, then a product. Rows
// after the live ones are neither read nor written.
#include <algorithm>

#include "core/cpu_chunk.h"
#include "core/device.h"
#include "core/parallel_for.h"
#include "core/tensor.h"
#include "ops/activation/activation_scaled.h"
#include "ops/quantize/store.h"

namespace te::activation {

namespace cpu {

using namespace te::cpu;

constexpr te_tensor kAbsent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};

int64_t live_rows(const ScaledRows& in) {
  if (in.live.data == nullptr) return in.x.rows;
  return std::clamp<int64_t>(*row_ptr<const int32_t>(in.live, 0), 0, in.x.rows);
}

// Calls body(T{}, S{}) with the types of x and of the scale.
template <class Body>
void for_types(const ScaledRows& in, const Body& body) {
  dispatch_float(in.x.dtype, "te_activation_scaled", "x",
                 [&](auto t) { in.scale.dtype == in.x.dtype ? body(t, t) : body(t, float{}); });
}

// out[r] = t[r] * scale[r], rounded. out may be t.
template <class T, class S>
void multiply(const te_tensor& t, const te_tensor& scale, const te_tensor& out) {
  parallel_rows(t.rows, t.cols, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const float factor = to_float(row_ptr<const S>(scale, 0)[row]);
      for_chunks(t.cols, [&](int64_t c, int64_t n) {
        float buffer[kChunk], product[kChunk];
        const float* values = load_chunk(row_ptr<const T>(t, row) + c, buffer, n);
        for (int64_t i = 0; i < n; ++i) product[i] = values[i] * factor;
        store_chunk(row_ptr<T>(out, row) + c, product, n);
      });
    }
  });
}

// sums[r] = the sum over row r of a * b.
template <class T, class S>
void sum_products(const te_tensor& a, const te_tensor& b, const te_tensor& sums) {
  parallel_rows(a.rows, a.cols, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      float sum = 0.f;
      for_chunks(a.cols, [&](int64_t c, int64_t n) {
        float a_buffer[kChunk], b_buffer[kChunk];
        const float* x = load_chunk(row_ptr<const T>(a, row) + c, a_buffer, n);
        const float* y = load_chunk(row_ptr<const T>(b, row) + c, b_buffer, n);
        sum += lane_sum(n, [&](int64_t i) { return x[i] * y[i]; });
      });
      row_ptr<S>(sums, 0)[row] = from_float<S>(sum);
    }
  });
}

void scaled_forward(int kind, const Params& params, const ScaledRows& in, const te_tensor& y) {
  const int64_t rows = live_rows(in);
  const te_tensor out = rows_of(y, 0, rows);
  forward(kind, params, rows_of(in.x, 0, rows), out);
  for_types(in, [&]<class T, class S>(T, S) { multiply<T, S>(out, in.scale, out); });
}

void scaled_backward(int kind, const Params& params, const te_tensor& dy, const ScaledRows& in,
                     const ScaledResults& out) {
  const int64_t rows = live_rows(in);
  const te_tensor gradient = rows_of(dy, 0, rows);
  const quantize::cpu::Scratch scaled(rows, dy.cols, in.x), value(rows, dy.cols, in.x);
  for_types(in, [&]<class T, class S>(T, S) {
    multiply<T, S>(gradient, in.scale, scaled.tensor());
    backward(kind, params, scaled.tensor(), rows_of(in.x, 0, rows), rows_of(out.dx, 0, rows), value.tensor());
    if (out.dscale.data != nullptr) sum_products<T, S>(gradient, value.tensor(), out.dscale);
    if (out.y.data != nullptr) multiply<T, S>(value.tensor(), in.scale, rows_of(out.y, 0, rows));
  });
}

}  // namespace cpu

namespace {

// y: has the shape of the output.
void check_rows(const char* op, int kind, const Params& params, const ScaledRows& in, const te_tensor& y,
                const char* name) {
  check_kind(op, kind, params);
  check_tensor(op, name, y);
  check_as(op, "x", in.x, y.rows, y.cols * (is_gated(kind) ? 2 : 1), y);
  dispatch_float(in.x.dtype, op, "x", [](auto) {});
  check_shape(op, "scale", in.scale, 1, y.rows);
  if (in.scale.dtype != in.x.dtype && in.scale.dtype != TE_FLOAT32) {
    bad_argument(op, "scale", concat("of dtype ", te_dtype_name(in.scale.dtype)), "float32 or x's dtype");
  }
  te_tensor like = in.x;
  like.dtype = in.scale.dtype;
  check_like(op, "scale", in.scale, like);
  like.dtype = TE_INT32;
  if (in.live.data != nullptr) check_as(op, "live", in.live, 1, 1, like);
}

}  // namespace

}  // namespace te::activation

extern "C" {

te_status te_activation_scaled_forward(int kind, te_activation_params params, te_tensor x, te_tensor scale,
                                       te_tensor live, te_tensor y, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_activation_scaled_forward";
    const activation::ScaledRows in{x, scale, live};
    activation::check_rows(op, kind, params, in, y, "y");
    TE_ON_DEVICE_OF(op, x, activation::cpu::scaled_forward(kind, params, in, y),
                    activation::cuda::scaled_forward(kind, params, in, y, stream));
  });
}

te_status te_activation_scaled_backward(int kind, te_activation_params params, te_tensor dy, te_tensor x,
                                        te_tensor scale, te_tensor live, te_tensor dx, te_tensor dscale, te_tensor y,
                                        te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_activation_scaled_backward";
    const activation::ScaledRows in{x, scale, live};
    activation::check_rows(op, kind, params, in, dy, "dy");
    check_as(op, "dx", dx, x.rows, x.cols, x);
    if (dscale.data != nullptr) check_as(op, "dscale", dscale, 1, x.rows, scale);
    if (y.data != nullptr) check_as(op, "y", y, dy.rows, dy.cols, dy);
    const activation::ScaledResults out{dx, dscale, y};
    TE_ON_DEVICE_OF(op, x, activation::cpu::scaled_backward(kind, params, dy, in, out),
                    activation::cuda::scaled_backward(kind, params, dy, in, out, stream));
  });
}

}  // extern "C"
