// quantize, transposes of bytes: contract, entry points and the CPU path (the specification).
#include "core/device.h"
#include "core/parallel_for.h"
#include "ops/quantize/fp8.h"
#include "ops/quantize/items.h"
#include "ops/quantize/store.h"
#include "transformer_engine/quantize.h"

namespace te::quantize {

namespace cuda {
void transpose(const te_tensor& rowwise, const te_tensor& columnwise, te_stream stream);
void transpose_list(const te_quantize_transpose_list_problem& list, te_stream stream);
}  // namespace cuda

namespace {

// ---- contract ----

void check_bytes(const char* op, const te_tensor& rowwise, const te_tensor& columnwise) {
  check_tensor(op, "rowwise", rowwise);
  if (te_dtype_bytes(rowwise.dtype) != 1) {
    bad_argument(op, "rowwise", concat("of dtype ", te_dtype_name(rowwise.dtype)), "a dtype of one byte");
  }
  check_as(op, "columnwise", columnwise, rowwise.cols, rowwise.rows, rowwise);
  check_starts(op, "columnwise", columnwise);
}

void check_list(const char* op, const te_quantize_transpose_list_problem& list) {
  check_items(op, list.count, {list.rowwise, list.columnwise, list.scales, list.column_scales}, [&](int32_t i) {
    const te_tensor &rows = list.rowwise[i], &scales = list.scales[i], &column_scales = list.column_scales[i];
    check_bytes(op, rows, list.columnwise[i]);
    check_one_device(op, "rowwise", rows, list.rowwise[0]);
    if (is_absent(scales) && is_absent(column_scales)) return;
    check_floats(op, "scales", scales, blocks_of(rows.rows), blocks_of(rows.cols), rows.device);
    check_floats(op, "column_scales", column_scales, blocks_of(rows.cols), blocks_of(rows.rows), rows.device);
  });
}

}  // namespace

// ---- the CPU path ----

namespace cpu {

namespace {

void transpose(const te_tensor& rowwise, const te_tensor& columnwise) {
  parallel_rows(columnwise.rows, columnwise.row_pitch, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      uint8_t* target = row_ptr<uint8_t>(columnwise, c);
      for (int64_t r = 0; r < columnwise.row_pitch; ++r) {
        target[r] = r < rowwise.rows ? row_ptr<const uint8_t>(rowwise, r)[c] : 0;
      }
    }
  });
}

void transpose_list(const te_quantize_transpose_list_problem& list) {
  for (int32_t i = 0; i < list.count; ++i) {
    transpose(list.rowwise[i], list.columnwise[i]);
    const te_tensor& scales = list.scales[i];
    for (int64_t r = 0; r < scales.rows; ++r) {
      for (int64_t c = 0; c < scales.cols; ++c) {
        row_ptr<float>(list.column_scales[i], c)[r] = row_ptr<const float>(scales, r)[c];
      }
    }
  }
}

}  // namespace

}  // namespace cpu

}  // namespace te::quantize

extern "C" {

te_status te_quantize_transpose(te_tensor rowwise, te_tensor columnwise, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_quantize_transpose";
    quantize::check_bytes(op, rowwise, columnwise);
    TE_ON_DEVICE_OF(op, rowwise, quantize::cpu::transpose(rowwise, columnwise),
                    quantize::cuda::transpose(rowwise, columnwise, stream));
  });
}

te_status te_quantize_transpose_list(const te_quantize_transpose_list_problem* list, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_quantize_transpose_list";
    quantize::check_list(op, *list);
    if (list->count == 0) return;
    TE_ON_DEVICE_OF(op, list->rowwise[0], quantize::cpu::transpose_list(*list),
                    quantize::cuda::transpose_list(*list, stream));
  });
}

}  // extern "C"
