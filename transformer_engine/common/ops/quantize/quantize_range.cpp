// quantize, ranges of a matrix: contract, entry points and the CPU path (the specification). A range is processed by
// blocks of 128 rows, the first and the last of which may be partial, and by 128 columns.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/cpu_chunk.h"
#include "core/device.h"
#include "core/parallel_for.h"
#include "ops/quantize/fp8.h"
#include "ops/quantize/items.h"
#include "ops/quantize/maxima.h"
#include "transformer_engine/quantize.h"
#include "transformer_engine/scaling.h"

namespace te::quantize {

namespace cuda {
void range_amax(const te_quantize_range& range, te_scaling scaling, const te_tensor& amaxes, te_stream stream);
void range_cast(const te_quantize_range& range, const te_quantize_range_plan& plan, const te_tensor& data,
                const te_tensor& scale_inv, te_stream stream);
void range_list_amaxes(const te_quantize_range_list_problem& list, te_stream stream);
void range_list_cast(const te_quantize_range_list_problem& list, te_stream stream);
}  // namespace cuda

namespace {

// ---- contract ----

void check_dense_floats(const char* op, const char* argument, const te_tensor& t, int64_t rows, int64_t cols,
                        const te_tensor& like) {
  check_floats(op, argument, t, rows, cols, like.device);
  if (t.data != nullptr && rows > 1 && t.row_pitch != cols) {
    bad_argument(op, argument, concat("of row pitch ", t.row_pitch), concat(cols, ": dense rows"));
  }
}

void check_amaxes(const char* op, const char* argument, te_scaling scaling, const te_tensor& amaxes,
                  const te_quantize_range& range) {
  const bool tensor = scaling == TE_SCALING_TENSOR;
  check_dense_floats(op, argument, amaxes, tensor ? 1 : blocks_of(range.rows), tensor ? 1 : blocks_of(range.cols),
                     range.x);
}

void check_range(const char* op, const te_quantize_range& range, te_scaling scaling) {
  if (range.rows < 0 || range.cols < 0) {
    bad_argument(op, "range", concat("of a matrix [", range.rows, ", ", range.cols, "]"), "sizes >= 0");
  }
  check_shape(op, "range.x", range.x, 1, range.x.cols);
  dispatch_float(range.x.dtype, op, "range.x", [](auto) {});
  dispatch_float(range.rounded_to, op, "range.rounded_to", [](auto) {});
  if (range.start < 0 || range.x.cols > range.rows * range.cols - range.start) {
    bad_argument(op, "range", concat("elements ", range.start, " to ", range.start + range.x.cols),
                 concat("some of the ", range.rows * range.cols, " of a matrix [", range.rows, ", ", range.cols, "]"));
  }
  if (!is_scaling(int(scaling))) bad_argument(op, "scaling", int(scaling), "a te_scaling");
  if (!scaling_row(scaling).same_both_ways()) {
    throw Error(TE_NOT_IMPLEMENTED, concat(op, ": argument 'scaling' is ", scaling_row(scaling).words,
                                           " blocks: a weight whose two directions hold different values "
                                           "cannot be quantized in parts; use 128x128 blocks."));
  }
}

void check_cast(const char* op, const te_quantize_range& range, const te_quantize_range_plan& plan,
                const te_tensor& data, const te_tensor& scale_inv) {
  check_range(op, range, plan.scaling);
  const bool tensor = plan.scaling == TE_SCALING_TENSOR, given = plan.scale.data != nullptr;
  if (!tensor && (given || plan.amax.data != nullptr)) {
    bad_argument(op, "plan", "one with scale or amax", "neither: block scales come from amaxes");
  }
  if (given) check_dense_floats(op, "plan.scale", plan.scale, 1, 1, range.x);
  if (!given || !is_absent(plan.amaxes)) check_amaxes(op, "plan.amaxes", plan.scaling, plan.amaxes, range);
  if (plan.amax.data != nullptr) check_dense_floats(op, "plan.amax", plan.amax, 1, 1, range.x);
  if (!(plan.amax_epsilon >= 0.f && std::isfinite(plan.amax_epsilon))) {
    bad_argument(op, "plan.amax_epsilon", plan.amax_epsilon, "a finite number >= 0");
  }
  const auto [down, along] = scale_shape(plan.scaling, range.rows, range.cols);
  check_dense_floats(op, "scale_inv", scale_inv, down, tensor && scale_inv.cols == 2 ? 2 : along, range.x);
  check_tensor(op, "data", data);
  const bool alone = data.rows == 1 && data.cols == range.x.cols;
  if (!alone) check_shape(op, "data", data, range.rows, range.cols);
  dispatch_fp8(data.dtype, op, "data", [](auto) {});
  if (data.device != range.x.device) bad_argument(op, "data", concat("on ", device_of(data)), device_of(range.x));
}

void check_list_amaxes(const char* op, const te_quantize_range_list_problem& list) {
  check_items(op, list.count, {list.ranges, list.plans}, [&](int32_t i) {
    const te_quantize_range& range = list.ranges[i];
    const te_quantize_range_plan& plan = list.plans[i];
    check_range(op, range, plan.scaling);
    check_one_device(op, "range.x", range.x, list.ranges[0].x);
    if (!is_absent(plan.amaxes)) check_amaxes(op, "plan.amaxes", plan.scaling, plan.amaxes, range);
  });
}

void check_list_cast(const char* op, const te_quantize_range_list_problem& list) {
  check_items(op, list.count, {list.ranges, list.plans, list.data, list.scale_invs}, [&](int32_t i) {
    check_cast(op, list.ranges[i], list.plans[i], list.data[i], list.scale_invs[i]);
    check_one_device(op, "range.x", list.ranges[i].x, list.ranges[0].x);
  });
}

}  // namespace

// ---- the CPU path ----

namespace cpu {

using namespace te::cpu;

namespace {

// n values of the range from its element `at` on, rounded and as floats; n <= kChunk.
const float* load(const te_quantize_range& range, int64_t at, int64_t n, float* buffer) {
  const float* values = dispatch_float(range.x.dtype, "te_quantize_range", "range.x", [&](auto t) {
    return load_chunk(static_cast<const decltype(t)*>(range.x.data) + at, buffer, n);
  });
  if (range.rounded_to == range.x.dtype || range.rounded_to == TE_FLOAT32) return values;
  return dispatch_float(range.rounded_to, "te_quantize_range", "range.rounded_to", [&](auto t) {
    decltype(t) rounded[kChunk];
    store_chunk(rounded, values, n);
    const float* back = load_chunk(rounded, buffer, n);
    if (back != buffer) std::copy_n(back, n, buffer);
    return static_cast<const float*>(buffer);
  });
}

// n <= kBlock bytes, by way of a local array, whose loop is vectorised: the destination might alias the source.
template <bool kE5m2>
void convert(const float* values, int64_t n, float scale, uint8_t* target) {
  uint8_t bytes[kBlock];
  if (n == kBlock) {
    for (int i = 0; i < kBlock; ++i) bytes[i] = uint8_t(to_fp8<kE5m2>(values[i] * scale));
  } else {
    for (int64_t i = 0; i < n; ++i) bytes[i] = uint8_t(to_fp8<kE5m2>(values[i] * scale));
  }
  std::copy_n(bytes, n, target);
}

// Calls body(row, first column, n, values) for the range's elements in 128 rows, by 128 columns: each part is within
// one block.
template <class Body>
void for_parts(const te_quantize_range& range, int64_t block_row, Body&& body) {
  const int64_t end = range.start + range.x.cols;
  for (int64_t row = block_row * kBlock; row < std::min(range.rows, (block_row + 1) * kBlock); ++row) {
    const int64_t origin = row * range.cols;
    const int64_t first = std::max<int64_t>(0, range.start - origin), last = std::min(range.cols, end - origin);
    float buffer[kChunk];
    for (int64_t col = first; col < last;) {
      const int64_t n = std::min(last, (col / kBlock + 1) * kBlock) - col;
      body(row, col, n, load(range, origin + col - range.start, n, buffer));
      col += n;
    }
  }
}

}  // namespace

void range_amax(const te_quantize_range& range, te_scaling scaling, const te_tensor& amaxes) {
  const int64_t block_rows = blocks_of(range.rows), block_cols = blocks_of(range.cols);
  auto* out = static_cast<float*>(amaxes.data);
  std::vector<float> found;
  float* blocks = out;
  if (scaling == TE_SCALING_TENSOR) {
    found.resize(size_t(block_rows * block_cols));
    blocks = found.data();
  }
  parallel_for(block_rows, [&](int64_t block_row) {
    float* of_row = blocks + block_row * block_cols;
    std::fill_n(of_row, block_cols, 0.f);
    for_parts(range, block_row, [&](int64_t, int64_t col, int64_t n, const float* values) {
      of_row[col / kBlock] = larger(of_row[col / kBlock], amax_of(values, n));
    });
  });
  if (scaling == TE_SCALING_TENSOR) *out = amax_of(blocks, block_rows * block_cols);
}

void range_cast(const te_quantize_range& range, const te_quantize_range_plan& plan, const te_tensor& data,
                const te_tensor& scale_inv) {
  const bool e5m2 = data.dtype == TE_FLOAT8_E5M2, given = plan.scale.data != nullptr;
  const float max = fp8_max(e5m2);
  const int64_t block_rows = blocks_of(range.rows), block_cols = blocks_of(range.cols);
  const auto* amaxes = static_cast<const float*>(plan.amaxes.data);
  const auto computed_scale = [&](float amax) {
    return scale_of(amax, plan.amax_epsilon, max, plan.pow_2_scales != 0);
  };
  float scale = 1.f;
  if (plan.scaling == TE_SCALING_TENSOR) {
    scale = given ? value_at(plan.scale) : computed_scale(*amaxes);
    auto* target = static_cast<float*>(scale_inv.data);
    target[0] = 1.f / scale;
    if (scale_inv.cols == 2) target[1] = scale;
    if (plan.amax.data != nullptr && amaxes != nullptr) {
      auto* amax = static_cast<float*>(plan.amax.data);
      *amax = given ? larger(*amax, *amaxes) : *amaxes;
    }
  }
  // The addresses of the full matrix's elements; a range alone has the layout of a matrix without a pitch.
  const bool alone = data.rows == 1 && data.cols == range.x.cols;
  auto* bytes = static_cast<uint8_t*>(data.data);
  const int64_t pitch = alone ? range.cols : data.row_pitch, offset = alone ? range.start : 0;
  const bool blocks = plan.scaling == TE_SCALING_BLOCK_2D;
  parallel_for(block_rows, [&](int64_t block_row) {
    const auto scale_at = [&](int64_t c) {
      return blocks ? computed_scale(amaxes[block_row * block_cols + c]) : scale;
    };
    if (blocks) {
      float* inverse = row_ptr<float>(scale_inv, block_row);
      for (int64_t c = 0; c < scale_inv.cols; ++c) inverse[c] = c < block_cols ? 1.f / scale_at(c) : 0.f;
    }
    for_parts(range, block_row, [&](int64_t row, int64_t col, int64_t n, const float* values) {
      const float factor = scale_at(col / kBlock);
      uint8_t* target = bytes + (row * pitch + col - offset);
      e5m2 ? convert<true>(values, n, factor, target) : convert<false>(values, n, factor, target);
    });
  });
}

namespace {

void range_list_amaxes(const te_quantize_range_list_problem& list) {
  for (int32_t i = 0; i < list.count; ++i) {
    te_tensor amaxes = list.plans[i].amaxes;
    const int64_t n = amaxes.rows * amaxes.cols;
    auto* out = static_cast<float*>(amaxes.data);
    std::vector<float> found(static_cast<size_t>(n));
    amaxes.data = found.data();
    if (n > 0) range_amax(list.ranges[i], list.plans[i].scaling, amaxes);
    for (int64_t k = 0; k < n; ++k) out[k] = larger(out[k], found[size_t(k)]);
  }
}

void range_list_cast(const te_quantize_range_list_problem& list) {
  for (int32_t i = 0; i < list.count; ++i) {
    range_cast(list.ranges[i], list.plans[i], list.data[i], list.scale_invs[i]);
  }
}

}  // namespace

}  // namespace cpu

}  // namespace te::quantize

extern "C" {

te_status te_quantize_range_amax(const te_quantize_range* range, te_scaling scaling, te_tensor amaxes,
                                 te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_quantize_range_amax";
    quantize::check_range(op, *range, scaling);
    quantize::check_amaxes(op, "amaxes", scaling, amaxes, *range);
    if (amaxes.rows * amaxes.cols == 0) return;
    TE_ON_DEVICE_OF(op, range->x, quantize::cpu::range_amax(*range, scaling, amaxes),
                    quantize::cuda::range_amax(*range, scaling, amaxes, stream));
  });
}

te_status te_quantize_range_cast(const te_quantize_range* range, const te_quantize_range_plan* plan, te_tensor data,
                                 te_tensor scale_inv, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_quantize_range_cast";
    quantize::check_cast(op, *range, *plan, data, scale_inv);
    TE_ON_DEVICE_OF(op, range->x, quantize::cpu::range_cast(*range, *plan, data, scale_inv),
                    quantize::cuda::range_cast(*range, *plan, data, scale_inv, stream));
  });
}

te_status te_quantize_range_list_amaxes(const te_quantize_range_list_problem* list, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_quantize_range_list_amaxes";
    quantize::check_list_amaxes(op, *list);
    if (list->count == 0) return;
    TE_ON_DEVICE_OF(op, list->ranges[0].x, quantize::cpu::range_list_amaxes(*list),
                    quantize::cuda::range_list_amaxes(*list, stream));
  });
}

te_status te_quantize_range_list_cast(const te_quantize_range_list_problem* list, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_quantize_range_list_cast";
    quantize::check_list_cast(op, *list);
    if (list->count == 0) return;
    TE_ON_DEVICE_OF(op, list->ranges[0].x, quantize::cpu::range_list_cast(*list),
                    quantize::cuda::range_list_cast(*list, stream));
  });
}

}  // extern "C"
