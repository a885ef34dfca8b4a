// comm, contract and CPU path (the specification) of the ordered sum and the interleave.
#include "ops/comm/comm.h"

#include <algorithm>
#include <cstring>

#include "core/cpu_chunk.h"
#include "core/device.h"
#include "core/parallel_for.h"
#include "core/tensor.h"

namespace te::comm {

namespace cpu {

using namespace te::cpu;

template <class T>
void sum_row(const te_tensor* partials, int32_t count, const te_tensor& bias, const te_tensor& out, int64_t row) {
  float sum[kChunk], buffer[kChunk];
  for_chunks(out.cols, [&](int64_t first, int64_t n) {
    const float* start = load_chunk(row_ptr<const T>(partials[0], row) + first, sum, n);
    if (start != sum) std::copy(start, start + n, sum);
    const auto add = [&](const T* source) {
      const float* values = load_chunk(source + first, buffer, n);
      for (int64_t i = 0; i < n; ++i) sum[i] += values[i];
    };
    for (int32_t rank = 1; rank < count; ++rank) add(row_ptr<const T>(partials[rank], row));
    if (bias.data != nullptr) add(row_ptr<const T>(bias, 0));
    store_chunk(row_ptr<T>(out, row) + first, sum, n);
  });
}

void ordered_sum(const te_tensor* partials, int32_t count, const te_tensor& bias, const te_tensor& out) {
  dispatch_float(out.dtype, "te_comm_ordered_sum", "out", [&](auto t) {
    parallel_rows(out.rows, out.cols * count, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) sum_row<decltype(t)>(partials, count, bias, out, row);
    });
  });
}

void interleave(const te_tensor* shards, int32_t count, const te_tensor& out) {
  const size_t element = te_dtype_bytes(out.dtype), run = size_t(shards[0].cols) * element;
  const auto row_of = [&](const te_tensor& t, int64_t row) {
    return static_cast<char*>(t.data) + size_t(row * t.row_pitch) * element;
  };
  parallel_rows(out.rows, out.row_pitch, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      char* target = row_of(out, row);
      for (int32_t rank = 0; rank < count; ++rank) {
        std::memcpy(target + size_t(rank) * run, row_of(shards[rank], row), run);
      }
      std::memset(target + size_t(out.cols) * element, 0, size_t(out.row_pitch - out.cols) * element);
    }
  });
}

}  // namespace cpu

namespace {

// `count` tensors [rows, cols] like out.
void check_ranks(const char* op, const char* argument, const te_tensor* tensors, int32_t count, int64_t rows,
                 int64_t cols, const te_tensor& out) {
  if (tensors == nullptr) bad_argument(op, argument, "NULL", concat(count, " tensors"));
  for (int32_t rank = 0; rank < count; ++rank) {
    const te_tensor& t = tensors[rank];
    const bool filled = t.data != nullptr || rows * cols == 0;
    const bool fits = t.rows == rows && t.cols == cols && t.row_pitch >= cols && filled;
    if (fits && t.dtype == out.dtype && t.device == out.device) continue;
    check_as(op, element_name(argument, rank).c_str(), t, rows, cols, out);
  }
}

void check_count(const char* op, int32_t count) {
  if (count >= 1 && count <= TE_COMM_MOST_RANKS) return;
  bad_argument(op, "count", count, concat("a number of ranks from 1 to ", TE_COMM_MOST_RANKS));
}

void check_sum(const char* op, const te_tensor* partials, int32_t count, const te_tensor& bias, const te_tensor& out) {
  check_count(op, count);
  check_tensor(op, "out", out);
  dispatch_float(out.dtype, op, "out", [](auto) {});
  check_ranks(op, "partials", partials, count, out.rows, out.cols, out);
  if (!is_absent(bias)) check_as(op, "bias", bias, 1, out.cols, out);
}

void check_interleave(const char* op, const te_tensor* shards, int32_t count, const te_tensor& out) {
  check_count(op, count);
  check_tensor(op, "out", out);
  if (te_dtype_bytes(out.dtype) != 1 && out.dtype != TE_FLOAT32) {
    bad_argument(op, "out", concat("of dtype ", te_dtype_name(out.dtype)), "uint8, float8 or float32");
  }
  if (out.cols % count != 0) {
    bad_argument(op, "out", shape_of(out), concat("columns that are a multiple of the ", count, " shards"));
  }
  check_ranks(op, "shards", shards, count, out.rows, out.cols / count, out);
}

}  // namespace

}  // namespace te::comm

extern "C" {

te_status te_comm_ordered_sum(const te_tensor* partials, int32_t count, te_tensor bias, te_tensor out,
                              te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    comm::check_sum("te_comm_ordered_sum", partials, count, bias, out);
    if (out.rows * out.cols == 0) return;
    TE_ON_DEVICE_OF("te_comm_ordered_sum", out, comm::cpu::ordered_sum(partials, count, bias, out),
                    comm::cuda::ordered_sum(partials, count, bias, out, stream));
  });
}

te_status te_comm_interleave(const te_tensor* shards, int32_t count, te_tensor out, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    comm::check_interleave("te_comm_interleave", shards, count, out);
    if (out.rows * out.cols == 0) return;
    TE_ON_DEVICE_OF("te_comm_interleave", out, comm::cpu::interleave(shards, count, out),
                    comm::cuda::interleave(shards, count, out, stream));
  });
}

te_status te_comm_is_captured(te_stream stream, int32_t* captured) {
  return te::c_guard([&] {
    const char* op = "te_comm_is_captured";
    te::check_place(op, "captured", captured);
#if defined(TE_WITH_CUDA)
    *captured = te::comm::cuda::is_captured(stream) ? 1 : 0;
#else
    (void)stream;
    te::no_cuda(op);
#endif
  });
}

}  // extern "C"
