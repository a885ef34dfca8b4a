// comm, contract and CPU path (the specification) of the ordered sum.
#include "ops/comm/comm.h"

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

}  // namespace cpu

namespace {

void check_sum(const char* op, const te_tensor* partials, int32_t count, const te_tensor& bias, const te_tensor& out) {
  if (count < 1 || count > TE_COMM_MOST_RANKS) {
    bad_argument(op, "count", count, concat("a number of ranks from 1 to ", TE_COMM_MOST_RANKS));
  }
  if (partials == nullptr) bad_argument(op, "partials", "NULL", concat(count, " tensors"));
  check_tensor(op, "out", out);
  dispatch_float(out.dtype, op, "out", [](auto) {});
  for (int32_t rank = 0; rank < count; ++rank) {
    const std::string argument = concat("partials[", rank, "]");
    check_as(op, argument.c_str(), partials[rank], out.rows, out.cols, out);
  }
  if (!is_absent(bias)) check_as(op, "bias", bias, 1, out.cols, out);
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

}  // extern "C"
