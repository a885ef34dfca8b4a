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

// Splits the pass by the elements of a vector, and calls f with these as a constant.
template <class T, class F>
void with_width(Pass<T>& pass, std::initializer_list<te_tensor> tensors, F&& f) {
  bool aligned = true;
  for (const te_tensor& t : tensors) aligned = aligned && aligned16(t);
  const bool divides = pass.head_dim % kVec<T> == 0, fits = pass.head_dim <= kThreads * kVec<T>;
  note_width(aligned, divides);
  if (aligned && divides && !fits) te_note_path("CUDA, one element at a time", "a head has more than 256 vectors");
  const auto call = [&](auto n) {
    pass.split = Split::of(pass.order.heads, pass.head_dim / n);
    f(n);
  };
  if (aligned && divides && fits) {
    call(std::integral_constant<int, kVec<T>>{});
  } else {
    call(std::integral_constant<int, 1>{});
  }
}

template <class T>
unsigned blocks_of(const Pass<T>& pass, int64_t tiles) {
  return unsigned(tiles * pass.split.chunks(pass.order.heads));
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
  if (out.rows == 0 || out.cols == 0) return;
  dispatch_float(out.dtype, "te_attention_forward", "out", [&](auto t) {
    using T = decltype(t);
    Pass<T> pass = pass_of<T>(plan, kernel_lse, lse, out);
    with_width(pass, {out}, [&](auto n) {
      const int64_t tiles = (lse.rows + pass.split.rows() - 1) / pass.split.rows();
      forward_kernel<T, n><<<blocks_of(pass, tiles), kThreads, 0, cudaStream_t(stream)>>>(pass);
    });
  });
  check_launch("te_attention_forward");
}

void backward(const te_attention_plan& plan, te_tensor lse, te_tensor dout, te_tensor out, te_tensor kernel_lse,
              te_tensor dsink, te_tensor workspace, te_stream stream) {
  if (is_absent(dsink)) {
    const Pass<float> pass = pass_of<float>(plan, kernel_lse, lse, te_tensor{});
    const unsigned blocks = unsigned(tiles_of(lse.rows) * ((lse.cols + kTileHeads - 1) / kTileHeads));
    if (blocks != 0) kernel_lse_kernel<<<blocks, kThreads, 0, cudaStream_t(stream)>>>(pass);
    return check_launch("te_attention_backward");
  }
  const int parts = int(parts_of(lse.rows));
  dispatch_float(out.dtype, "te_attention_backward", "out", [&](auto t) {
    using T = decltype(t);
    Pass<T> pass = pass_of<T>(plan, kernel_lse, lse, out);
    pass.dout = Matrix<T>::of(dout);
    pass.partials = static_cast<float*>(workspace.data);
    if (out.rows == 0 || out.cols == 0) return;
    with_width(pass, {dout, out}, [&](auto n) {
      backward_kernel<T, n><<<blocks_of(pass, parts), kThreads, 0, cudaStream_t(stream)>>>(pass, parts);
    });
  });
  const unsigned columns = unsigned((lse.cols + kSumHeads - 1) / kSumHeads);
  if (columns != 0) {
    sum_parts_kernel<<<columns, kSumHeads * kSumRows, 0, cudaStream_t(stream)>>>(
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
