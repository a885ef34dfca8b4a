// permute, CUDA path: the choice of words and types, and launches. The kernels are in permute.cuh.
#include <algorithm>
#include <limits>

#include "core/device.h"
#include "core/vec.cuh"
#include "ops/permute/permute.cuh"

namespace te::permute::cuda {

namespace {

unsigned grid_of(const char* op, int64_t blocks) {
  if (blocks > std::numeric_limits<int32_t>::max()) {
    bad_argument(op, "plan.inp", concat("for ", blocks, " blocks"), "tokens and rows for at most 2^31 - 1");
  }
  return unsigned(blocks);
}

int64_t pitch_bytes(const te_tensor& t) { return t.row_pitch * int64_t(te_dtype_bytes(t.dtype)); }

// Whether words of that many bytes divide rows, and the steps between them, of both tensors.
bool fits(const te_tensor& t, int64_t bytes) {
  const int64_t row = t.cols * int64_t(te_dtype_bytes(t.dtype));
  return reinterpret_cast<uintptr_t>(t.data) % uintptr_t(bytes) == 0 && row % bytes == 0 &&
         (t.rows <= 1 || pitch_bytes(t) % bytes == 0);
}

// Calls f with the widest word for both.
template <class F>
void dispatch_words(const te_tensor& a, const te_tensor& b, F&& f) {
  const bool wide = fits(a, 16) && fits(b, 16);
  note_width(aligned16(a) && aligned16(b), wide);
  if (wide) return f(uint4{});
  if (fits(a, 4) && fits(b, 4)) return f(uint32_t{});
  if (fits(a, 2) && fits(b, 2)) return f(uint16_t{});
  f(uint8_t{});
}

template <class Word>
Rows<Word> words_of(const te_tensor& t) {
  constexpr int64_t kBytes = sizeof(Word);
  return {static_cast<Word*>(t.data), pitch_bytes(t) / kBytes, t.cols * int64_t(te_dtype_bytes(t.dtype)) / kBytes,
          t.rows};
}

template <class T>
Rows<T> elements_of(const te_tensor& t) {
  return {static_cast<T*>(t.data), t.row_pitch, t.cols, t.rows};
}

void cover(const char* op, const Pairs& pairs, int64_t tokens, const te_tensor& covered, cudaStream_t stream) {
  auto* const flags = static_cast<uint8_t*>(covered.data);
  check_cuda(cudaMemsetAsync(flags, 0, size_t(covered.cols), stream), op);
  if (tokens == 0) return;
  const int64_t blocks = (tokens * kPairLanes + kMoveThreads - 1) / kMoveThreads;
  cover_kernel<<<grid_of(op, blocks), kMoveThreads, 0, stream>>>(pairs, tokens, flags);
  check_launch(op);
}

template <class F>
void dispatch_wide(bool wide, F&& f) {
  note_width(wide, true);
  wide ? f(std::true_type{}) : f(std::false_type{});
}

te_dtype dtype_of_probs(const te_tensor& probs) { return probs.data == nullptr ? TE_FLOAT32 : probs.dtype; }

}  // namespace

void forward(const te_permute_forward_plan& plan, te_stream stream) {
  constexpr const char* kOp = "te_permute_forward";
  const auto on = static_cast<cudaStream_t>(stream);
  const Pairs pairs = pairs_of(plan.map, plan.out.rows);
  cover(kOp, pairs, plan.inp.rows, plan.covered, on);
  const Scales scales{static_cast<const float*>(plan.scales.data),
                      static_cast<float*>(plan.out_scales.data),
                      plan.scales.row_pitch,
                      plan.out_scales.row_pitch,
                      plan.out_scales.rows,
                      plan.out_scales.cols};
  const RowProbs probs{static_cast<const char*>(plan.probs.data), static_cast<char*>(plan.out_probs.data),
                       plan.probs.row_pitch, int32_t(te_dtype_bytes(plan.probs.dtype))};
  const unsigned blocks = grid_of(kOp, plan.inp.rows + (plan.out.rows + kClearRows - 1) / kClearRows);
  dispatch_words(plan.inp, plan.out, [&](auto word) {
    using Word = decltype(word);
    const Forward<Word> move{pairs,
                             words_of<const Word>(plan.inp),
                             words_of<Word>(plan.out),
                             probs,
                             scales,
                             static_cast<const uint8_t*>(plan.covered.data)};
    forward_kernel<Word><<<blocks, kMoveThreads, 0, on>>>(move);
  });
  check_launch(kOp);
}

void gather(te_tensor inp, te_tensor source, te_tensor out, te_stream stream) {
  constexpr const char* kOp = "te_permute_gather";
  const unsigned blocks = grid_of(kOp, (out.rows + kWarps - 1) / kWarps);
  dispatch_words(inp, out, [&](auto word) {
    using Word = decltype(word);
    gather_kernel<Word><<<blocks, kWarp * kWarps, 0, static_cast<cudaStream_t>(stream)>>>(
        words_of<const Word>(inp), static_cast<const int32_t*>(source.data), words_of<Word>(out));
  });
  check_launch(kOp);
}

void unpermute(const te_permute_unpermute_plan& plan, te_stream stream) {
  constexpr const char* kOp = "te_permute_unpermute";
  const Pairs pairs = pairs_of(plan.map, plan.inp.rows);
  if (!plan.map.of_mask && plan.map.rows.cols > TE_PERMUTE_MAX_EXPERTS) {
    bad_argument(kOp, "plan.map.rows", shape_of(plan.map.rows), concat("at most ", TE_PERMUTE_MAX_EXPERTS, " pairs"));
  }
  dispatch_float(plan.inp.dtype, kOp, "plan.inp", [&](auto t) {
    dispatch_float(dtype_of_probs(plan.probs), kOp, "plan.probs", [&](auto p) {
      dispatch_wide(aligned16(plan.inp) && aligned16(plan.out), [&](auto wide) {
        using T = decltype(t);
        using P = decltype(p);
        const Unpermute<T, P> sum{pairs,
                                  elements_of<const T>(plan.inp),
                                  elements_of<T>(plan.out),
                                  static_cast<const P*>(plan.probs.data),
                                  plan.probs.row_pitch,
                                  plan.row_probs.data,
                                  int32_t(te_dtype_bytes(plan.row_probs.dtype))};
        unpermute_kernel<T, P, wide.value>
            <<<grid_of(kOp, plan.out.rows), kMoveThreads, 0, static_cast<cudaStream_t>(stream)>>>(sum);
      });
    });
  });
  check_launch(kOp);
}

void unpermute_backward(const te_permute_unpermute_backward_plan& plan, te_stream stream) {
  constexpr const char* kOp = "te_permute_unpermute_backward";
  const auto on = static_cast<cudaStream_t>(stream);
  const bool to_rows = plan.dinp.data != nullptr, to_probs = plan.dprobs.data != nullptr;
  const Pairs pairs = pairs_of(plan.map, to_rows ? plan.dinp.rows : plan.inp.rows);
  if (to_rows) {
    cover(kOp, pairs, plan.grad.rows, plan.covered, on);
    dispatch_words(plan.dinp, plan.dinp, [&](auto word) {
      const unsigned blocks = grid_of(kOp, (plan.dinp.rows + kClearRows - 1) / kClearRows);
      clear_kernel<decltype(word)><<<blocks, kMoveThreads, 0, on>>>(words_of<decltype(word)>(plan.dinp),
                                                                    static_cast<const uint8_t*>(plan.covered.data));
    });
    check_launch(kOp);
  }
  if (plan.grad.rows == 0) return;
  const te_tensor none{};
  const te_tensor& inp = to_probs ? plan.inp : none;
  dispatch_float(plan.grad.dtype, kOp, "plan.grad", [&](auto t) {
    dispatch_float(dtype_of_probs(plan.probs), kOp, "plan.probs", [&](auto p) {
      dispatch_wide(aligned16(plan.grad) && aligned16(inp) && aligned16(plan.dinp), [&](auto wide) {
        using T = decltype(t);
        using P = decltype(p);
        const UnpermuteBackward<T, P> op{pairs,
                                         elements_of<const T>(plan.grad),
                                         elements_of<const T>(inp),
                                         elements_of<T>(plan.dinp),
                                         static_cast<const P*>(plan.probs.data),
                                         static_cast<P*>(plan.dprobs.data),
                                         plan.probs.row_pitch,
                                         plan.dprobs.row_pitch,
                                         plan.dprobs.cols};
        unpermute_backward_kernel<T, P, wide.value><<<grid_of(kOp, plan.grad.rows), kWarp * kWarps, 0, on>>>(op);
      });
    });
  });
  check_launch(kOp);
}

void probs_backward(const te_permute_map& map, te_tensor drow_probs, te_tensor dprobs, te_stream stream) {
  constexpr const char* kOp = "te_permute_probs_backward";
  const unsigned blocks = grid_of(kOp, (dprobs.rows + kWarps - 1) / kWarps);
  dispatch_bytes(dprobs.dtype, [&](auto bits) {
    using Bits = decltype(bits);
    probs_backward_kernel<Bits><<<blocks, kWarp * kWarps, 0, static_cast<cudaStream_t>(stream)>>>(
        pairs_of(map, drow_probs.cols), static_cast<const Bits*>(drow_probs.data), static_cast<Bits*>(dprobs.data),
        dprobs.row_pitch, dprobs.rows, int(dprobs.cols));
  });
  check_launch(kOp);
}

}  // namespace te::permute::cuda
