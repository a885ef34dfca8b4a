// activation, contract and CPU path (the specification). The formulas are in activation_math.h.
#include "transformer_engine/activation.h"

#include <cstring>

#include "core/cpu_chunk.h"
#include "core/device.h"
#include "core/parallel_for.h"
#include "core/tensor.h"
#include "ops/activation/activation.h"

namespace te::activation {

namespace cpu {

using namespace te::cpu;

struct CpuExp {
  static float exp(float x) { return te::cpu::exp(x); }
  static float reciprocal(float x) { return 1.f / x; }
};

// Calls body<Op, T>(row, c, n) for columns [c, c + n) of every row of a result of rows x cols: Op is the functor of
// `kind`, T the type of x's dtype. Rows run in parallel, the chunks of a row in order.
template <class Body>
void each_chunk(const char* op, int kind, const te_tensor& x, int64_t rows, int64_t cols, const Body& body) {
  dispatch(kind, [&]<class Op>(Op) {
    dispatch_float(x.dtype, op, "x", [&]<class T>(T) {
      parallel_rows(rows, cols, [&](int64_t first_row, int64_t last_row) {
        for (int64_t row = first_row; row < last_row; ++row) {
          for_chunks(cols, [&](int64_t c, int64_t n) { body.template operator()<Op, T>(row, c, n); });
        }
      });
    });
  });
}

void forward(int kind, const Params& params, const te_tensor& x, const te_tensor& y) {
  const auto chunk = [&]<class Op, class T>(int64_t row, int64_t c, int64_t n) {
    float a_buffer[kChunk], b_buffer[kChunk], out[kChunk];
    const T* x_row = row_ptr<const T>(x, row);
    const float* a = load_chunk(x_row + c, a_buffer, n);
    const float* b = Op::kGated ? load_chunk(x_row + y.cols + c, b_buffer, n) : a;
    for (int64_t i = 0; i < n; ++i) out[i] = Op::template forward<CpuExp>(a[i], b[i], params);
    store_chunk(row_ptr<T>(y, row) + c, out, n);
  };
  each_chunk("te_activation_forward", kind, x, y.rows, y.cols, chunk);
}

void backward(int kind, const Params& params, const te_tensor& dy, const te_tensor& x, const te_tensor& dx,
              const te_tensor& y) {
  const auto chunk = [&]<class Op, class T>(int64_t row, int64_t c, int64_t n) {
    float dy_buffer[kChunk], a_buffer[kChunk], b_buffer[kChunk], da[kChunk], db[kChunk], out[kChunk];
    const T* x_row = row_ptr<const T>(x, row);
    T* dx_row = row_ptr<T>(dx, row);
    const float* g = load_chunk(row_ptr<const T>(dy, row) + c, dy_buffer, n);
    const float* a = load_chunk(x_row + c, a_buffer, n);
    const float* b = Op::kGated ? load_chunk(x_row + dy.cols + c, b_buffer, n) : a;
    for (int64_t i = 0; i < n; ++i) {
      const Gradients r = Op::template backward<CpuExp>(g[i], a[i], b[i], params);
      da[i] = r.da;
      db[i] = r.db;
      out[i] = r.y;
    }
    store_chunk(dx_row + c, da, n);
    if (Op::kGated) store_chunk(dx_row + dy.cols + c, db, n);
    if (y.data != nullptr) store_chunk(row_ptr<T>(y, row) + c, out, n);
  };
  each_chunk("te_activation_backward", kind, x, dy.rows, dy.cols, chunk);
}

}  // namespace cpu

namespace {

constexpr const char* kNames[] = {
#define TE_ACTIVATION_NAME(name, ...) #name,
    TE_ACTIVATION_TABLE(TE_ACTIVATION_NAME)
#undef TE_ACTIVATION_NAME
};

constexpr bool kIsGated[] = {
#define TE_ACTIVATION_GATED(name, ...) __VA_ARGS__::kGated,
    TE_ACTIVATION_TABLE(TE_ACTIVATION_GATED)
#undef TE_ACTIVATION_GATED
};

}  // namespace

bool is_gated(int kind) { return kIsGated[kind]; }

void check_kind(const char* op, int kind, const Params& params) {
  if (kind < 0 || kind >= kCount) bad_argument(op, "kind", kind, concat("a number from 0 to ", kCount - 1));
  if (!(params.limit > 0.f)) bad_argument(op, "params.limit", params.limit, "a number > 0");
}

}  // namespace te::activation

extern "C" {

int te_activation_count(void) { return te::activation::kCount; }

const char* te_activation_name(int kind) {
  return kind >= 0 && kind < te::activation::kCount ? te::activation::kNames[kind] : nullptr;
}

int te_activation_kind(const char* name) {
  for (int kind = 0; kind < te::activation::kCount; ++kind) {
    if (name != nullptr && std::strcmp(te::activation::kNames[kind], name) == 0) return kind;
  }
  return -1;
}

int te_activation_is_gated(int kind) {
  return kind >= 0 && kind < te::activation::kCount && te::activation::kIsGated[kind];
}

te_status te_activation_forward(int kind, te_activation_params params, te_tensor x, te_tensor y, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_activation_forward";
    activation::check_kind(op, kind, params);
    check_tensor(op, "y", y);
    check_as(op, "x", x, y.rows, y.cols * (activation::kIsGated[kind] ? 2 : 1), y);
    TE_ON_DEVICE_OF(op, x, activation::cpu::forward(kind, params, x, y),
                    activation::cuda::forward(kind, params, x, y, stream));
  });
}

te_status te_activation_backward(int kind, te_activation_params params, te_tensor dy, te_tensor x, te_tensor dx,
                                 te_tensor y, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_activation_backward";
    activation::check_kind(op, kind, params);
    check_tensor(op, "dy", dy);
    const int64_t x_cols = dy.cols * (activation::kIsGated[kind] ? 2 : 1);
    check_as(op, "x", x, dy.rows, x_cols, dy);
    check_as(op, "dx", dx, dy.rows, x_cols, dy);
    if (y.data != nullptr) check_as(op, "y", y, dy.rows, dy.cols, dy);
    TE_ON_DEVICE_OF(op, x, activation::cpu::backward(kind, params, dy, x, dx, y),
                    activation::cuda::backward(kind, params, dy, x, dx, y, stream));
  });
}

}  // extern "C"
