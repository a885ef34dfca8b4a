// The kernels of attention on emulated blocks (emulated_intrinsics.h), against the oracle of their CPU path, in several
// orders of the threads with the same bits.
#include "emulated_intrinsics.h"

#include <vector>

#include "ops/attention/attention_math.h"

namespace te::attention::cuda {
struct Refusal {
  bool keys;
  Fault fault;
  int32_t place;
};
inline std::vector<Refusal> refusals;
inline void refuse(bool keys, Fault fault, int32_t place) { refusals.push_back({keys, fault, place}); }
}  // namespace te::attention::cuda

#include "attention_case.h"
#include "ops/attention/attention.cuh"

namespace te {
namespace {

using namespace testing;
using namespace attention;
using namespace attention::cuda;

template <class T>
Pass<T> pass_of(const AttentionProblem<T>& p) {
  Pass<T> pass{};
  pass.places = Places::of(p.plan.queries);
  pass.order = LseOrder::of(p.plan, p.shape.heads);
  pass.lse = Matrix<float>::of(p.lse->tensor()), pass.kernel_lse = p.kernel_lse->data();
  pass.sink = static_cast<const float*>(p.plan.sink.data);
  pass.out = Matrix<T>::of(p.out->tensor()), pass.dout = Matrix<T>::of(p.dout->tensor());
  pass.partials = p.workspace->data(), pass.head_dim = int32_t(p.shape.width);
  return pass;
}

template <class T, int N>
void forward(const AttentionProblem<T>& p, unsigned seed) {
  Pass<T> pass = pass_of(p);
  pass.split = Split::of(p.shape.heads, p.shape.width / N);
  const int64_t tiles = (p.rows + pass.split.rows() - 1) / pass.split.rows();
  run_blocks(unsigned(tiles * pass.split.chunks(p.shape.heads)), kThreads, seed, [&] { forward_kernel<T, N>(pass); });
}

template <class T>
void backward_without_sink(const AttentionProblem<T>& p, unsigned seed) {
  Pass<float> pass{};
  pass.places = Places::of(p.plan.queries), pass.order = LseOrder::of(p.plan, p.shape.heads);
  pass.lse = Matrix<float>::of(p.lse->tensor()), pass.kernel_lse = p.kernel_lse->data();
  const int64_t chunks = (p.shape.heads + kTileHeads - 1) / kTileHeads;
  run_blocks(unsigned(tiles_of(p.rows) * chunks), kThreads, seed, [&] { kernel_lse_kernel(pass); });
}

template <class T, int N>
void backward(const AttentionProblem<T>& p, unsigned seed) {
  Pass<T> pass = pass_of(p);
  pass.split = Split::of(p.shape.heads, p.shape.width / N);
  const int parts = int(parts_of(p.rows));
  run_blocks(unsigned(parts * pass.split.chunks(p.shape.heads)), kThreads, seed,
             [&] { backward_kernel<T, N>(pass, parts); });
  run_blocks(unsigned((p.shape.heads + kSumHeads - 1) / kSumHeads), kSumHeads * kSumRows, seed,
             [&] { sum_parts_kernel(pass.partials, parts, p.shape.heads, p.dsink->data()); });
}

template <class T, int N>
void check(const AttentionShape& shape) {
  AttentionProblem<T> p(TE_DEVICE_CPU, shape);
  forward<T, N>(p, 1);
  p.expect_forward();
  const std::vector<T> first = p.out->read();
  p.out->fill(p.given);
  forward<T, N>(p, 2);
  EXPECT_EQ(std::memcmp(first.data(), p.out->read().data(), first.size() * sizeof(T)), 0);
  p.start_backward();
  p.out->fill(p.given);
  backward_without_sink(p, 3);
  p.expect_backward(false);
  if (!shape.sink) return;
  backward<T, N>(p, 4);
  p.expect_backward(true);
  const std::vector<float> sums = p.dsink->read();
  backward<T, N>(p, 5);
  EXPECT_EQ(std::memcmp(sums.data(), p.dsink->read().data(), sums.size() * sizeof(float)), 0);
}

TEST(AttentionKernels, ForwardAndBackward) {
  for (const AttentionShape& shape : kAttentionShapes) {
    for_attention_dtypes([&](auto t) {
      using T = decltype(t);
      if (shape.width % kVec<T> == 0 && shape.pitch % kVec<T> == 0) {
        check<T, kVec<T>>(shape);
      } else {
        check<T, 1>(shape);
      }
    });
    if (HasFatalFailure()) return;
  }
}

// More tiles than parts: a block adds several.
TEST(AttentionKernels, ManyRows) {
  AttentionProblem<bf16> p(TE_DEVICE_CPU, {{4200}, 0, 30, 32, 64});
  p.start_backward();
  backward<bf16, 8>(p, 6);
  p.expect_backward(true);
}

TEST(AttentionKernels, PiecesAndRefusals) {
  const std::vector<int32_t> lengths{0, 3, 3, 5}, starts{1, 6, 6, 9}, keys{0, 4, 5, 8};
  std::vector<int32_t> of_q(10, -1), of_kv(10, -1);
  const auto run = [&](const Side& q, const Side& kv, unsigned sides) {
    refusals.clear();
    run_blocks(sides, kThreads, 7, [&] { sequences_kernel(q, kv); });
  };
  const Side q{{lengths.data(), starts.data(), 9, 3, false, 0}, 3, of_q.data()},
      kv{{keys.data(), nullptr, 8, 3, false, 0}, 4, of_kv.data()};
  run(q, kv, 2);
  EXPECT_TRUE(refusals.empty());
  EXPECT_EQ(of_q, (std::vector<int32_t>{1, 4, 6, 6, 6, 6, 6, 8, 9, 9}));
  EXPECT_EQ(of_kv, (std::vector<int32_t>{0, 4, 4, 4, 5, 5, 5, 8, 8, 8}));
  const auto expect = [&](const Side& queries, const Side& of_keys, bool is_keys, Fault fault, int32_t place) {
    run(queries, of_keys, 2);
    ASSERT_EQ(refusals.size(), 1u);
    EXPECT_EQ(refusals[0].keys, is_keys);
    EXPECT_EQ(refusals[0].fault, fault);
    EXPECT_EQ(refusals[0].place, place);
  };
  Side wrong = kv;
  wrong.places.rows = 7;
  expect(q, wrong, true, Fault::kLengths, 3);
  wrong = kv, wrong.longest = 3;
  expect(q, wrong, true, Fault::kLongest, 0);
  wrong = q, wrong.places.rows = 8;
  expect(wrong, kv, false, Fault::kStarts, 3);
  const std::vector<int32_t> falls{0, 3, 2, 5};
  wrong = kv, wrong.places.lengths = falls.data();
  expect(q, wrong, true, Fault::kLengths, 1);
}

TEST(AttentionKernels, ZeroPadding) {
  for (const bool wide : {false, true}) {
    AttentionProblem<bf16> p(TE_DEVICE_CPU, {{5, 0, 33, 1}, 2, 70, 2, 12, false});
    AttentionProblem<float> keys(TE_DEVICE_CPU, {{4, 1, 0, 2}, 0, 3, 1, 8, false});
    p.out->poison(), keys.out->poison();
    ZeroedTensors list{};
    const auto zeroed = [&](const auto& problem, int64_t bytes) {
      const int64_t row = problem.shape.heads * problem.shape.width * bytes;
      return Zeroed{Places::of(problem.plan.queries),
                    reinterpret_cast<char*>(problem.out->data()),
                    row,
                    row,
                    wide,
                    unsigned((problem.rows + kZeroRows - 1) / kZeroRows)};
    };
    list.tensors[0] = zeroed(p, 2), list.tensors[2] = zeroed(keys, 4);
    run_blocks(list.tensors[0].blocks + list.tensors[2].blocks, kThreads, 9, [&] { zero_padding_kernel(list); });
    expect_zero_padding(p), expect_zero_padding(keys);
  }
}

TEST(AttentionKernels, ZeroPaddingOfABatch) {
  constexpr int64_t kSeq = 37, kCols = 24;
  const std::vector<int32_t> sums{0, 5, 5, 42};
  const int64_t sequences = int64_t(sums.size()) - 1, rows = kSeq * sequences;
  for (const bool batch_first : {false, true}) {
    Buffer<bf16> t(TE_DEVICE_CPU, rows, kCols);
    t.poison();
    ZeroedTensors list{};
    list.tensors[0] = Zeroed{{sums.data(), nullptr, rows, int32_t(sequences), batch_first, kSeq},
                             reinterpret_cast<char*>(t.data()),
                             kCols * 2,
                             kCols * 2,
                             true,
                             unsigned((rows + kZeroRows - 1) / kZeroRows)};
    run_blocks(list.tensors[0].blocks, kThreads, 9, [&] { zero_padding_kernel(list); });
    const auto values = t.read();
    for (int64_t i = 0; i < int64_t(values.size()); ++i) {
      const int64_t row = i / kCols, of = batch_first ? row / kSeq : row % sequences;
      const bool padding = (batch_first ? row % kSeq : row / sequences) >= sums[of + 1] - sums[of];
      ASSERT_TRUE(padding ? to_float(values[i]) == 0.f : std::isnan(to_float(values[i]))) << batch_first << " " << i;
    }
  }
}

}  // namespace
}  // namespace te
