// attention, CUDA path: the launches of the kernels in attention.cuh.
#include <initializer_list>

#include "core/device.h"
#include "core/tensor.h"
#include "ops/attention/attention.cuh"

namespace te::attention::cuda {

namespace {

template <class T>
Pass<T> pass_of(const te_attention_plan& plan, const te_tensor& kernel_lse, const te_tensor& lse,
                const te_tensor& out) {
  Pass<T> pass{};
  pass.places = Places::of(plan.queries);
  pass.order = LseOrder::of(plan, lse.cols);
  pass.lse = Matrix<float>::of(lse);
  pass.kernel_lse = static_cast<float*>(kernel_lse.data);
  pass.sink = static_cast<const float*>(plan.sink.data);
  pass.out = Matrix<T>::of(out);
  pass.head_dim = lse.cols == 0 ? 0 : int32_t(out.cols / lse.cols);
  return pass;
}

unsigned blocks_of(int64_t tiles, int64_t heads) { return unsigned(tiles * ((heads + kTileHeads - 1) / kTileHeads)); }

// Calls f with the elements of a vector, as a constant.
template <class T, class F>
void with_width(int64_t head_dim, std::initializer_list<te_tensor> tensors, F&& f) {
  bool aligned = true;
  for (const te_tensor& t : tensors) aligned = aligned && aligned16(t);
  const bool divides = head_dim % kVec<T> == 0;
  note_width(aligned, divides);
  if (aligned && divides) {
    f(std::integral_constant<int, kVec<T>>{});
  } else {
    f(std::integral_constant<int, 1>{});
  }
}

}  // namespace

void sequences(const te_attention_rows& queries, int64_t longest_q, const te_attention_rows* keys, int64_t longest_kv,
               te_tensor pieces_q, te_tensor pieces_kv, te_stream stream) {
  const Side q{Places::of(queries), longest_q, static_cast<int32_t*>(pieces_q.data)};
  const Side kv = keys == nullptr ? q : Side{Places::of(*keys), longest_kv, static_cast<int32_t*>(pieces_kv.data)};
  sequences_kernel<<<keys == nullptr ? 1 : 2, kThreads, 0, cudaStream_t(stream)>>>(q, kv);
  check_launch("te_attention_sequences");
}

void forward(const te_attention_plan& plan, te_tensor kernel_lse, te_tensor out, te_tensor lse, te_stream stream) {
  const unsigned blocks = blocks_of(tiles_of(lse.rows), lse.cols);
  if (blocks == 0) return;
  dispatch_float(out.dtype, "te_attention_forward", "out", [&](auto t) {
    using T = decltype(t);
    const Pass<T> pass = pass_of<T>(plan, kernel_lse, lse, out);
    with_width<T>(pass.head_dim, {out},
                  [&](auto n) { forward_kernel<T, n><<<blocks, kThreads, 0, cudaStream_t(stream)>>>(pass); });
  });
  check_launch("te_attention_forward");
}

void backward(const te_attention_plan& plan, te_tensor lse, te_tensor dout, te_tensor out, te_tensor kernel_lse,
              te_tensor dsink, te_tensor workspace, te_stream stream) {
  const int parts = int(parts_of(lse.rows));
  const unsigned blocks = blocks_of(parts, lse.cols);
  if (is_absent(dsink)) {
    const Pass<float> pass = pass_of<float>(plan, kernel_lse, lse, te_tensor{});
    if (blocks != 0) backward_kernel<float, 1, false><<<blocks, kThreads, 0, cudaStream_t(stream)>>>(pass, parts);
    return check_launch("te_attention_backward");
  }
  dispatch_float(out.dtype, "te_attention_backward", "out", [&](auto t) {
    using T = decltype(t);
    Pass<T> pass = pass_of<T>(plan, kernel_lse, lse, out);
    pass.dout = Matrix<T>::of(dout);
    pass.partials = static_cast<float*>(workspace.data);
    if (blocks == 0) return;
    with_width<T>(pass.head_dim, {dout, out}, [&](auto n) {
      backward_kernel<T, n, true><<<blocks, kThreads, 0, cudaStream_t(stream)>>>(pass, parts);
    });
  });
  const unsigned columns = unsigned((lse.cols + kWarp - 1) / kWarp);
  if (columns != 0) {
    sum_parts_kernel<<<columns, kWarp * kSumRows, 0, cudaStream_t(stream)>>>(
        static_cast<const float*>(workspace.data), parts, lse.cols, static_cast<float*>(dsink.data));
  }
  check_launch("te_attention_backward");
}

void zero_padding(const te_attention_rows& queries, const te_attention_rows& keys, te_tensor dq, te_tensor dk,
                  te_tensor dv, te_stream stream) {
  ZeroedTensors list{};
  unsigned blocks = 0;
  const auto add = [&](int place, const te_tensor& t, const te_attention_rows& rows) {
    if (t.data == nullptr) return;
    const auto bytes = int64_t(te_dtype_bytes(t.dtype));
    const bool wide = aligned16(t) && t.cols * bytes % 16 == 0;
    list.tensors[place] = {Places::of(rows),
                           static_cast<char*>(t.data),
                           t.row_pitch * bytes,
                           t.cols * bytes,
                           wide,
                           unsigned((t.rows + kZeroRows - 1) / kZeroRows)};
    blocks += list.tensors[place].blocks;
  };
  add(0, dq, queries), add(1, dk, keys), add(2, dv, keys);
  if (blocks == 0) return;
  zero_padding_kernel<<<blocks, kThreads, 0, cudaStream_t(stream)>>>(list);
  check_launch("te_attention_zero_padding");
}

}  // namespace te::attention::cuda
