// quantize, contract and entry points. The CPU path is quantize_cpu.cpp.
#include "transformer_engine/quantize.h"

#include <cmath>

#include "core/device.h"
#include "ops/quantize/fp8.h"
#include "ops/quantize/store.h"
#include "transformer_engine/scaling.h"

namespace te::quantize {

namespace cuda {
void quantize(const te_quantize_plan& plan, const te_tensor& x, const te_quantized& out, te_stream stream);
void amax(const te_tensor& x, const te_tensor& parts, const te_tensor& noop, te_stream stream);
void sum_columns(const te_tensor& column_sums, const te_tensor& dbias, te_stream stream);
void dequantize(const te_quantized& x, const te_tensor& y, te_stream stream);
void update_scales(const te_scale_update* updates, int32_t count, te_stream stream);
}  // namespace cuda

namespace cpu {
void sum_columns(const te_tensor& column_sums, const te_tensor& dbias);
void dequantize(const te_quantized& x, const te_tensor& y);
void update_scales(const te_scale_update* updates, int32_t count);
}  // namespace cpu

void check_starts(const char* op, const char* argument, const te_tensor& data) {
  if (data.data == nullptr) return;
  const auto address = reinterpret_cast<uintptr_t>(data.data);
  if (address % 16 != 0) bad_argument(op, argument, "at an odd address", "data on a multiple of 16 bytes");
  if (data.row_pitch % 16 != 0) {
    bad_argument(op, argument, concat("of row pitch ", data.row_pitch), "a multiple of 16 bytes");
  }
}

namespace {

void check_scale_inv(const char* op, const std::string& argument, te_scaling scaling, const te_tensor& scale_inv,
                     int64_t rows, int64_t cols, const te_tensor& like) {
  const char* name = argument.c_str();
  if (!is_scaling(int(scaling))) bad_argument(op, "scaling", int(scaling), "a te_scaling");
  const auto [down, along] = scale_shape(scaling, rows, cols);
  const bool pair = scaling_row(scaling).is_per_tensor() && scale_inv.cols == 2;
  check_floats(op, name, scale_inv, down, pair ? 2 : along, like.device);
}

// FP8 data of one direction with its scales; `rows` and `cols` are those of the direction.
void check_direction(const char* op, const std::string& argument, te_scaling scaling, const te_tensor& data,
                     const te_tensor& scale_inv, int64_t rows, int64_t cols, const te_tensor& like) {
  const char* name = argument.c_str();
  check_shape(op, name, data, rows, cols);
  if (data.dtype != TE_FLOAT8_E4M3 && data.dtype != TE_FLOAT8_E5M2) {
    bad_argument(op, name, concat("of dtype ", te_dtype_name(data.dtype)), "float8_e4m3 or float8_e5m2");
  }
  if (data.device != like.device) bad_argument(op, name, concat("on ", device_of(data)), device_of(like));
  check_scale_inv(op, argument + "_scale_inv", scaling, scale_inv, rows, cols, like);
}

// The present directions of a [rows, cols] matrix.
void check_quantized(const char* op, const char* argument, const te_quantized& q, int64_t rows, int64_t cols,
                     const te_tensor& like) {
  const bool rowwise = !is_absent(q.rowwise), columnwise = !is_absent(q.columnwise);
  const std::string name(argument);
  if (rowwise) {
    check_direction(op, name + ".rowwise", q.scaling, q.rowwise, q.rowwise_scale_inv, rows, cols, like);
  }
  if (columnwise) {
    check_direction(op, name + ".columnwise", q.scaling, q.columnwise, q.columnwise_scale_inv, cols, rows, like);
  }
  if (rowwise && columnwise && q.rowwise.dtype != q.columnwise.dtype) {
    bad_argument(op, (name + ".columnwise").c_str(), concat("of dtype ", te_dtype_name(q.columnwise.dtype)),
                 te_dtype_name(q.rowwise.dtype));
  }
}

void check_float_dtype(const char* op, const char* argument, const te_tensor& x) {
  dispatch_float(x.dtype, op, argument, [](auto) {});
}

}  // namespace

void check_quantization(const char* op, const te_quantize_plan& plan, int64_t rows, int64_t cols, const te_tensor& like,
                        const te_quantized& out, const char* argument) {
  check_quantized(op, argument, out, rows, cols, like);
  check_starts(op, (std::string(argument) + ".rowwise").c_str(), out.rowwise);
  check_starts(op, (std::string(argument) + ".columnwise").c_str(), out.columnwise);
  const bool tensor = out.scaling == TE_SCALING_TENSOR, given = plan.scale.data != nullptr;
  if (given) check_floats(op, "plan.scale", plan.scale, 1, 1, like.device);
  if (plan.amax_parts.data != nullptr) {
    check_floats(op, "plan.amax_parts", plan.amax_parts, 1, plan.amax_parts.cols, like.device);
  }
  if (tensor && given == (plan.amax_parts.data != nullptr)) {
    bad_argument(op, "plan", given ? "one with scale and amax_parts" : "one without scale and amax_parts",
                 "one of them: per-tensor scaling takes its scale from there");
  }
  if (!tensor && (given || plan.amax_parts.data != nullptr || plan.amax.data != nullptr)) {
    bad_argument(op, "plan", "one with scale, amax_parts or amax", "none of them: block scaling makes its own scales");
  }
  if (plan.amax.data != nullptr) check_floats(op, "plan.amax", plan.amax, 1, 1, like.device);
  if (plan.column_sums.data != nullptr) {
    check_floats(op, "plan.column_sums", plan.column_sums, blocks_of(rows), cols, like.device);
  }
  if (plan.noop.data != nullptr) check_floats(op, "plan.noop", plan.noop, 1, 1, like.device);
  if (!(plan.amax_epsilon >= 0.f && std::isfinite(plan.amax_epsilon))) {
    bad_argument(op, "plan.amax_epsilon", plan.amax_epsilon, "a finite number >= 0");
  }
}

void check_amax_parts(const char* op, const te_tensor& parts, const te_tensor& noop, const te_tensor& like) {
  check_floats(op, "parts", parts, 1, TE_QUANTIZE_PARTS, like.device);
  if (noop.data != nullptr) check_floats(op, "noop", noop, 1, 1, like.device);
}

}  // namespace te::quantize

extern "C" {

te_status te_quantize(const te_quantize_plan* plan, te_tensor x, const te_quantized* out, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_quantize";
    check_tensor(op, "x", x);
    quantize::check_float_dtype(op, "x", x);
    quantize::check_quantization(op, *plan, x.rows, x.cols, x, *out, "out");
    TE_ON_DEVICE_OF(op, x, quantize::cpu::quantize(*plan, x, *out), quantize::cuda::quantize(*plan, x, *out, stream));
  });
}

te_status te_quantize_amax(te_tensor x, te_tensor parts, te_tensor noop, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_quantize_amax";
    check_tensor(op, "x", x);
    quantize::check_float_dtype(op, "x", x);
    quantize::check_amax_parts(op, parts, noop, x);
    TE_ON_DEVICE_OF(op, x, quantize::cpu::amax(x, parts, noop), quantize::cuda::amax(x, parts, noop, stream));
  });
}

te_status te_quantize_sum_columns(te_tensor column_sums, te_tensor dbias, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_quantize_sum_columns";
    check_shape(op, "dbias", dbias, 1, dbias.cols);
    quantize::check_float_dtype(op, "dbias", dbias);
    check_tensor(op, "column_sums", column_sums);
    check_floats(op, "column_sums", column_sums, column_sums.rows, dbias.cols, dbias.device);
    TE_ON_DEVICE_OF(op, dbias, quantize::cpu::sum_columns(column_sums, dbias),
                    quantize::cuda::sum_columns(column_sums, dbias, stream));
  });
}

te_status te_dequantize(const te_quantized* x, te_tensor y, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_dequantize";
    check_tensor(op, "y", y);
    quantize::check_float_dtype(op, "y", y);
    quantize::check_quantized(op, "x", *x, y.rows, y.cols, y);
    if (is_absent(x->rowwise) && is_absent(x->columnwise) && y.rows * y.cols != 0) {
      bad_argument(op, "x", "without data", "a rowwise or a columnwise direction");
    }
    TE_ON_DEVICE_OF(op, y, quantize::cpu::dequantize(*x, y), quantize::cuda::dequantize(*x, y, stream));
  });
}

te_status te_quantize_update_scales(const te_scale_update* updates, int32_t count, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_quantize_update_scales";
    if (count < 0) bad_argument(op, "count", count, "a number >= 0");
    for (int32_t i = 0; i < count; ++i) {
      const te_scale_update& update = updates[i];
      check_tensor(op, "history", update.history);
      te_tensor like = updates[0].history;
      check_floats(op, "history", update.history, update.history.rows, update.history.cols, like.device);
      check_floats(op, "scale", update.scale, 1, update.history.cols, like.device);
      if (update.history.rows < 1) bad_argument(op, "history", shape_of(update.history), "at least one row");
      if (update.margin < 0) bad_argument(op, "margin", update.margin, "a number >= 0");
      if (!(update.fp8_max > 0.f && std::isfinite(update.fp8_max))) {
        bad_argument(op, "fp8_max", update.fp8_max, "a finite number > 0");
      }
    }
    if (count == 0) return;
    TE_ON_DEVICE_OF(op, updates[0].history, quantize::cpu::update_scales(updates, count),
                    quantize::cuda::update_scales(updates, count, stream));
  });
}

}  // extern "C"
