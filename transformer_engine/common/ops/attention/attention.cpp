// attention, contract and CPU path (the specification). The formulas are in attention_math.h.
#include "transformer_engine/attention.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/cpu_chunk.h"
#include "core/device.h"
#include "core/parallel_for.h"
#include "core/tensor.h"
#include "ops/attention/attention_math.h"

namespace te::attention {

namespace cuda {
void sequences(const te_attention_rows& queries, int64_t longest_q, const te_attention_rows* keys, int64_t longest_kv,
               te_tensor pieces_q, te_tensor pieces_kv, te_stream stream);
void forward(const te_attention_plan& plan, te_tensor kernel_lse, te_tensor out, te_tensor lse, te_stream stream);
void backward(const te_attention_plan& plan, te_tensor lse, te_tensor dout, te_tensor out, te_tensor kernel_lse,
              te_tensor dsink, te_tensor workspace, te_stream stream);
void zero_padding(const te_attention_rows& queries, const te_attention_rows& keys, te_tensor dq, te_tensor dk,
                  te_tensor dv, te_stream stream);
}  // namespace cuda

namespace cpu {

using namespace te::cpu;

// Ends with the first fault, in PyTorch's names and with the values.
void check_places(const te_attention_rows& t, int64_t longest, bool keys) {
  const Places places = Places::of(t);
  Fault fault = Fault::kNone;
  for (int32_t i = 0; i <= places.sequences && fault == Fault::kNone; ++i) fault = places.fault(i, longest);
  if (fault == Fault::kNone) return;
  const std::string lengths = keys ? "cu_seqlens_kv" : "cu_seqlens_q";
  const auto values = [](const te_tensor& row) {
    std::string text = "[";
    for (int64_t i = 0; i < row.cols; ++i) {
      text += concat(i == 0 ? "" : ", ", static_cast<const int32_t*>(row.data)[i]);
    }
    return text + "]";
  };
  if (fault == Fault::kLengths) {
    bad_argument("attention", lengths.c_str(), values(t.lengths),
                 concat("0 first and then each sequence's length added, up to the ", t.rows, " tokens of the input"));
  }
  if (fault == Fault::kStarts) {
    bad_argument("attention", (lengths + "_padded").c_str(), values(t.starts),
                 concat("the row where each sequence begins, with room for its tokens, up to the ", t.rows,
                        " rows of the input"));
  }
  bad_argument("attention", keys ? "max_seqlen_kv" : "max_seqlen_q", longest,
               concat("at least the longest sequence of '", lengths, "'"));
}

void write_pieces(const te_attention_rows& t, bool keys, const te_tensor& pieces) {
  if (pieces.data == nullptr) return;
  const Places places = Places::of(t);
  auto* out = static_cast<int32_t*>(pieces.data);
  *out++ = int32_t(places.begin(0));
  for (int32_t i = 0; i < places.sequences; ++i) {
    int32_t ends[3];
    places.pieces(i, keys, ends);
    out = std::copy(ends, ends + 3, out);
  }
}

void sequences(const te_attention_rows& queries, int64_t longest_q, const te_attention_rows* keys, int64_t longest_kv,
               const te_tensor& pieces_q, const te_tensor& pieces_kv) {
  check_places(queries, longest_q, false);
  if (keys != nullptr) check_places(*keys, longest_kv, true);
  write_pieces(queries, false, pieces_q);
  if (keys != nullptr) write_pieces(*keys, true, pieces_kv);
}

template <class T>
void scale(T* x, int64_t n, float factor) {
  float buffer[kChunk];
  for_chunks(n, [&](int64_t first, int64_t count) {
    const float* in = load_chunk(x + first, buffer, count);
    float* out = chunk_target(x + first, buffer);
    for (int64_t i = 0; i < count; ++i) out[i] = in[i] * factor;
    store_chunk(x + first, out, count);
  });
}

template <class T>
void forward_row(const te_attention_plan& plan, const LseOrder& order, const te_tensor& kernel_lse,
                 const te_tensor& out, const te_tensor& lse, int64_t row) {
  const int64_t width = out.cols / order.heads;
  T* values = row_ptr<T>(out, row);
  float* totals = row_ptr<float>(lse, row);
  if (Places::of(plan.queries).is_padding(row)) {
    std::fill(totals, totals + order.heads, 0.f);
    std::memset(static_cast<void*>(values), 0, size_t(out.cols) * sizeof(T));
    return;
  }
  for (int64_t head = 0; head < order.heads; ++head) {
    const float given = lse_of_kernel(static_cast<const float*>(kernel_lse.data)[order.place(row, head)]);
    totals[head] = given;
    if (plan.sink.data == nullptr) continue;
    const Sunk sunk = Sunk::of(given, static_cast<const float*>(plan.sink.data)[head]);
    totals[head] = sunk.lse;
    if (sunk.factor != 1.f) scale(values + head * width, width, sunk.factor);
  }
}

void forward(const te_attention_plan& plan, const te_tensor& kernel_lse, const te_tensor& out, const te_tensor& lse) {
  const LseOrder order = LseOrder::of(plan, lse.cols);
  dispatch_float(out.dtype, "te_attention_forward", "out", [&](auto t) {
    parallel_rows(out.rows, out.cols, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        forward_row<decltype(t)>(plan, order, kernel_lse, out, lse, row);
      }
    });
  });
}

template <class T>
float dot(const T* x, const T* y, int64_t n) {
  float sum = 0.f, x_buffer[kChunk], y_buffer[kChunk];
  for_chunks(n, [&](int64_t first, int64_t count) {
    const float* a = load_chunk(x + first, x_buffer, count);
    const float* b = load_chunk(y + first, y_buffer, count);
    sum += lane_sum(count, [&](int64_t i) { return a[i] * b[i]; });
  });
  return sum;
}

// A head in parts of kSinkRows rows, whose sums are added in order.
template <class T>
float sink_gradient(const te_attention_plan& plan, const te_tensor& lse, const te_tensor& dout, const te_tensor& out,
                    int64_t head) {
  constexpr int64_t kSinkRows = 64;
  const Places places = Places::of(plan.queries);
  const float a = static_cast<const float*>(plan.sink.data)[head];
  const int64_t width = out.cols / lse.cols;
  float total = 0.f;
  for (int64_t first = 0; first < out.rows; first += kSinkRows) {
    float part = 0.f;
    for (int64_t row = first; row < std::min(out.rows, first + kSinkRows); ++row) {
      const float share = places.is_padding(row) ? 0.f : sink_share(a, row_ptr<const float>(lse, row)[head]);
      if (share == 0.f) continue;
      const T* const gradient = row_ptr<const T>(dout, row) + head * width;
      part += share * dot(gradient, row_ptr<const T>(out, row) + head * width, width);
    }
    total -= part;
  }
  return total;
}

void backward(const te_attention_plan& plan, const te_tensor& lse, const te_tensor& dout, const te_tensor& out,
              const te_tensor& kernel_lse, const te_tensor& dsink) {
  const LseOrder order = LseOrder::of(plan, lse.cols);
  parallel_rows(lse.rows, lse.cols, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const bool padding = Places::of(plan.queries).is_padding(row);
      for (int64_t head = 0; head < lse.cols; ++head) {
        static_cast<float*>(kernel_lse.data)[order.place(row, head)] =
            padding ? 0.f : lse_for_kernel(row_ptr<const float>(lse, row)[head]);
      }
    }
  });
  if (dsink.data == nullptr) return;
  dispatch_float(out.dtype, "te_attention_backward", "out", [&](auto t) {
    parallel_for(lse.cols, [&](int64_t head) {
      static_cast<float*>(dsink.data)[head] = sink_gradient<decltype(t)>(plan, lse, dout, out, head);
    });
  });
}

void zero_padding(const te_attention_rows& t, const te_tensor& gradient) {
  const Places places = Places::of(t);
  parallel_rows(gradient.rows, gradient.cols, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const auto bytes = int64_t(te_dtype_bytes(gradient.dtype));
      if (places.is_padding(row)) {
        std::memset(static_cast<char*>(gradient.data) + row * gradient.row_pitch * bytes, 0,
                    size_t(gradient.cols * bytes));
      }
    }
  });
}

}  // namespace cpu

namespace {

void check_rows(const char* op, const char* argument, const te_attention_rows& t, bool wanted) {
  const std::string name(argument);
  if (t.rows < 0 || t.rows > INT32_MAX) bad_argument(op, (name + ".rows").c_str(), t.rows, "0 to 2^31 - 1");
  const bool has_lengths = t.lengths.data != nullptr;
  if (!has_lengths && (wanted || t.starts.data != nullptr)) {
    bad_argument(op, (name + ".lengths").c_str(), "absent", "int32 [1, n + 1]");
  }
  if (!has_lengths) return;
  if (t.lengths.cols < 1 || t.lengths.cols > INT32_MAX / 4) {
    bad_argument(op, (name + ".lengths").c_str(), shape_of(t.lengths), "[1, n + 1]");
  }
  const te_tensor like{nullptr, 0, 0, 0, TE_INT32, t.lengths.device};
  check_as(op, (name + ".lengths").c_str(), t.lengths, 1, t.lengths.cols, like);
  if (t.starts.data != nullptr) check_as(op, (name + ".starts").c_str(), t.starts, 1, t.lengths.cols, like);
}

void check_no_batch(const char* op, const char* argument, const te_attention_rows& t) {
  if (t.seq != 0) bad_argument(op, (std::string(argument) + ".seq").c_str(), t.seq, "0: packed rows");
}

void check_batch(const char* op, const char* argument, const te_attention_rows& t) {
  if (t.seq == 0) return;
  const std::string name(argument);
  if (t.starts.data != nullptr) bad_argument(op, (name + ".starts").c_str(), "given", "absent for a batch");
  if (t.seq < 0 || t.lengths.data == nullptr || t.rows != t.seq * (t.lengths.cols - 1)) {
    bad_argument(op, (name + ".rows").c_str(), t.rows, concat("a row for each of ", t.seq, " in each sequence"));
  }
}

void check_pieces(const char* argument, const te_tensor& pieces, const te_attention_rows& t) {
  check_as("te_attention_sequences", argument, pieces, 1, 3 * (t.lengths.cols - 1) + 1, t.lengths);
}

// Of tensors that are dense and have a place for every row and head.
void check_plan(const char* op, const te_attention_plan& plan, const te_tensor& lse, const te_tensor& kernel_lse) {
  const te_attention_rows& queries = plan.queries;
  check_rows(op, "plan.queries", queries, false);
  check_no_batch(op, "plan.queries", queries);
  const int64_t batch = queries.lengths.data != nullptr ? 1 : plan.batch;
  if (plan.batch < 1 || plan.batch != batch || queries.rows % plan.batch != 0) {
    bad_argument(op, "plan.batch", plan.batch, "a divisor of the rows, and 1 with lengths");
  }
  check_floats(op, "lse", lse, queries.rows, lse.cols, lse.device);
  check_floats(op, "kernel_lse", kernel_lse, plan.batch * lse.cols, queries.rows / plan.batch, lse.device);
  if (kernel_lse.rows > 1 && kernel_lse.row_pitch != kernel_lse.cols) {
    bad_argument(op, "kernel_lse", concat("of row pitch ", kernel_lse.row_pitch), kernel_lse.cols);
  }
  if (plan.sink.data != nullptr) check_floats(op, "plan.sink", plan.sink, 1, lse.cols, lse.device);
  if (queries.lengths.data != nullptr && queries.lengths.device != lse.device) {
    bad_argument(op, "plan.queries.lengths", concat("on ", device_of(queries.lengths)), device_of(lse));
  }
}

void check_values(const char* op, const char* argument, const te_tensor& t, const te_tensor& lse) {
  check_tensor(op, argument, t);
  const bool has_values = lse.rows > 0 && lse.cols > 0;
  if (t.rows != lse.rows || (lse.cols == 0 ? t.cols != 0 : t.cols % lse.cols != 0) || (has_values && t.cols == 0)) {
    bad_argument(op, argument, shape_of(t), concat("[", lse.rows, ", a multiple of ", lse.cols, " above 0]"));
  }
  if (t.device != lse.device) bad_argument(op, argument, concat("on ", device_of(t)), device_of(lse));
}

void check_gradient(const char* argument, const te_tensor& t, const te_attention_rows& rows) {
  if (is_absent(t)) return;
  check_tensor("te_attention_zero_padding", argument, t);
  if (t.rows != rows.rows) {
    bad_argument("te_attention_zero_padding", argument, shape_of(t), concat("[", rows.rows, ", any width]"));
  }
  if (t.device != rows.lengths.device) {
    bad_argument("te_attention_zero_padding", argument, concat("on ", device_of(t)), device_of(rows.lengths));
  }
}

template <class T>
const T& present(const char* op, const char* argument, const T* pointer) {
  if (pointer == nullptr) bad_argument(op, argument, "NULL", "a pointer");
  return *pointer;
}

}  // namespace

}  // namespace te::attention

extern "C" {

te_status te_attention_sequences(const te_attention_rows* queries, int64_t longest_q, const te_attention_rows* keys,
                                 int64_t longest_kv, te_tensor pieces_q, te_tensor pieces_kv, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_attention_sequences";
    const te_attention_rows& q = attention::present(kOp, "queries", queries);
    attention::check_rows(kOp, "queries", q, true);
    attention::check_no_batch(kOp, "queries", q);
    if (keys != nullptr) {
      attention::check_rows(kOp, "keys", *keys, true);
      attention::check_no_batch(kOp, "keys", *keys);
      check_like(kOp, "keys.lengths", keys->lengths, q.lengths);
    }
    if (is_absent(pieces_q) != is_absent(pieces_kv) || (keys == nullptr && !is_absent(pieces_q))) {
      bad_argument(kOp, "pieces_kv", "without its counterpart", "pieces_q, pieces_kv and keys together, or none");
    }
    if (!is_absent(pieces_q)) {
      attention::check_pieces("pieces_q", pieces_q, q);
      attention::check_pieces("pieces_kv", pieces_kv, *keys);
    }
    TE_ON_DEVICE_OF(kOp, q.lengths, attention::cpu::sequences(q, longest_q, keys, longest_kv, pieces_q, pieces_kv),
                    attention::cuda::sequences(q, longest_q, keys, longest_kv, pieces_q, pieces_kv, stream));
  });
}

te_status te_attention_forward(const te_attention_plan* plan, te_tensor kernel_lse, te_tensor out, te_tensor lse,
                               te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_attention_forward";
    attention::check_plan(kOp, attention::present(kOp, "plan", plan), lse, kernel_lse);
    attention::check_values(kOp, "out", out, lse);
    TE_ON_DEVICE_OF(kOp, lse, attention::cpu::forward(*plan, kernel_lse, out, lse),
                    attention::cuda::forward(*plan, kernel_lse, out, lse, stream));
  });
}

te_status te_attention_backward(const te_attention_plan* plan, te_tensor lse, te_tensor dout, te_tensor out,
                                te_tensor kernel_lse, te_tensor dsink, te_tensor workspace, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_attention_backward";
    attention::check_plan(kOp, attention::present(kOp, "plan", plan), lse, kernel_lse);
    if (!is_absent(dsink)) {
      check_floats(kOp, "plan.sink", plan->sink, 1, lse.cols, lse.device);
      check_floats(kOp, "dsink", dsink, 1, lse.cols, lse.device);
      attention::check_values(kOp, "out", out, lse);
      check_as(kOp, "dout", dout, out.rows, out.cols, out);
      const int64_t floats = attention::parts_of(lse.rows) * lse.cols;
      if (lse.device != TE_DEVICE_CPU && floats > 0) {
        check_floats(kOp, "workspace", workspace, 1, std::max(floats, workspace.cols), lse.device);
      }
    }
    TE_ON_DEVICE_OF(kOp, lse, attention::cpu::backward(*plan, lse, dout, out, kernel_lse, dsink),
                    attention::cuda::backward(*plan, lse, dout, out, kernel_lse, dsink, workspace, stream));
  });
}

int64_t te_attention_backward_workspace(int64_t rows, int64_t heads) { return te::attention::parts_of(rows) * heads; }

te_status te_attention_zero_padding(const te_attention_rows* queries, const te_attention_rows* keys, te_tensor dq,
                                    te_tensor dk, te_tensor dv, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_attention_zero_padding";
    const te_attention_rows& q = attention::present(kOp, "queries", queries);
    const te_attention_rows& kv = attention::present(kOp, "keys", keys);
    attention::check_rows(kOp, "queries", q, true);
    attention::check_rows(kOp, "keys", kv, true);
    attention::check_batch(kOp, "queries", q), attention::check_batch(kOp, "keys", kv);
    check_like(kOp, "keys.lengths", kv.lengths, q.lengths);
    attention::check_gradient("dq", dq, q);
    attention::check_gradient("dk", dk, kv);
    attention::check_gradient("dv", dv, kv);
    const auto on_cpu = [&] {
      attention::cpu::zero_padding(q, dq);
      attention::cpu::zero_padding(kv, dk);
      attention::cpu::zero_padding(kv, dv);
    };
    TE_ON_DEVICE_OF(kOp, q.lengths, on_cpu(), attention::cuda::zero_padding(q, kv, dq, dk, dv, stream));
  });
}

}  // extern "C"
