// The router's kernels on emulated blocks (emulated_intrinsics.h), against the CPU path byte for byte, in several
// orders of the threads.
#include "emulated_intrinsics.h"

namespace te::router::cuda {
inline uint32_t* dynamic_shared() { return reinterpret_cast<uint32_t*>(te::testing::gpu::Cluster::current().shared()); }
}  // namespace te::router::cuda

#include <gtest/gtest.h>

#include "ops/router/router.cuh"
#include "router_case.h"

namespace te {
namespace {

using namespace testing;
using namespace router::cuda;

unsigned blocks_of(int64_t rows, int64_t rows_of_block) { return unsigned((rows + rows_of_block - 1) / rows_of_block); }

template <class T>
void emulate(RouterProblem<T>& p, unsigned seed) {
  const unsigned blocks = blocks_of(p.shape.rows, kWarps), threads = unsigned(kTokenThreads);
  const te_tensor probs = p.probs.tensor(), chosen = p.chosen.tensor(), map = p.map.tensor();
  run_blocks(blocks, threads, seed, [&] { forward_kernel<T>(p.plan, probs, chosen, map); });
  const te_tensor dprobs = p.dprobs.tensor(), dlogits = p.dlogits.tensor();
  run_blocks(blocks, threads, seed, [&] { backward_kernel<T>(p.plan, dprobs, chosen, dlogits); });
  const te_router_plan plan = p.scores_plan();
  const te_tensor scores = p.scores.tensor(), score_map = p.score_map.tensor();
  run_blocks(blocks, threads, seed, [&] { scores_forward_kernel<T>(plan, scores, score_map); });
  const te_tensor dscores = p.dscores.tensor(), dx = p.score_dlogits.tensor();
  run_blocks(blocks, threads, seed, [&] { scores_backward_kernel<T>(plan, dscores, dx); });
}

template <class T>
void check(const RouterShape& shape, unsigned seed, const std::vector<double>& values = {}) {
  RouterProblem<T> cpu(TE_DEVICE_CPU, shape, seed), emulated(TE_DEVICE_CPU, shape, seed);
  if (!values.empty()) {
    cpu.logits.fill(rounded<T>(values));
    emulated.logits.fill(rounded<T>(values));
  }
  cpu.run();
  ASSERT_NO_THROW(emulate(emulated, seed)) << describe(shape);
  emulated.expect_same_bytes(cpu, concat(describe(shape), " ", te_dtype_name(kDtype<T>)));
}

TEST(RouterKernels, AsTheCpuPath) {
  unsigned seed = 1;
  for (const RouterShape& shape : kRouterShapes) {
    for_router_dtypes([&](auto t) { check<decltype(t)>(shape, ++seed); });
    if (HasFatalFailure()) return;
  }
}

// Logits that are not multiples of a step: sums round, and near ties are decided by rounded scores.
TEST(RouterKernels, RoundedSumsAsTheCpuPath) {
  std::mt19937_64 engine(8);
  std::normal_distribution<double> normal(0, 3);
  for (const RouterShape& shape : kRouterShapes) {
    std::vector<double> values;
    for (int64_t i = 0; i < shape.rows * shape.experts; ++i) values.push_back(normal(engine));
    check<float>(shape, 3, values);
    if (HasFatalFailure()) return;
  }
}

TEST(RouterKernels, NanAndInfinityAsTheCpuPath) {
  const double inf = INFINITY;
  for (RouterShape shape : {RouterShape{4, 8, 4, TE_ROUTER_SOFTMAX, 0, 4, 2}, RouterShape{4, 8, 3, TE_ROUTER_SIGMOID},
                            RouterShape{4, 8, 2, TE_ROUTER_SQRTSOFTPLUS}, RouterShape{4, 8, 2, TE_ROUTER_SOFTMAX, 1}}) {
    std::vector<double> values(32, 0.0);
    values[1] = values[9] = NAN, values[10] = NAN, values[18] = inf, values[20] = -inf;
    for (size_t i = 24; i < 32; ++i) values[i] = -inf;
    // Two NaN of other bits are equal here: what a NaN's bits are is no contract.
    RouterProblem<float> cpu(TE_DEVICE_CPU, shape), emulated(TE_DEVICE_CPU, shape);
    cpu.logits.fill(rounded<float>(values));
    emulated.logits.fill(rounded<float>(values));
    cpu.run();
    emulate(emulated, 5);
    EXPECT_EQ(emulated.chosen.read(), cpu.chosen.read());
    EXPECT_EQ(emulated.map.read(), cpu.map.read());
    const auto expect_same = [](const Buffer<float>& a, const Buffer<float>& b) {
      const auto left = a.read(), right = b.read();
      for (size_t i = 0; i < left.size(); ++i) {
        EXPECT_TRUE(left[i] == right[i] || (std::isnan(left[i]) && std::isnan(right[i]))) << i;
      }
    };
    expect_same(emulated.probs, cpu.probs);
    expect_same(emulated.dlogits, cpu.dlogits);
    expect_same(emulated.scores, cpu.scores);
    expect_same(emulated.score_dlogits, cpu.score_dlogits);
  }
}

TEST(RouterKernels, ExpertsOutOfRangeAreSkipped) {
  RouterProblem<float> p(TE_DEVICE_CPU, {4, 40, 2});
  p.chosen.fill({-1, 3, 40, 5, 1 << 30, 7, 0, 39});
  const te_tensor dprobs = p.dprobs.tensor(), chosen = p.chosen.tensor(), dlogits = p.dlogits.tensor();
  run_blocks(1, unsigned(kTokenThreads), 2, [&] { backward_kernel<float>(p.plan, dprobs, chosen, dlogits); });
  EXPECT_TRUE(p.dlogits.padding_untouched());
}

TEST(RouterKernels, LossAsTheCpuPath) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {70, 33}, {300, 128}, {3, 200}, {0, 4}}) {
    for (const bool on_device : {false, true}) {
      for_router_dtypes([&](auto t) {
        using T = decltype(t);
        LossProblem<T> cpu(TE_DEVICE_CPU, rows, cols, on_device), p(TE_DEVICE_CPU, rows, cols, on_device);
        cpu.run();
        const unsigned parts = blocks_of(rows, TE_ROUTER_LOSS_ROWS), threads = unsigned(router::kLossLanes);
        const te_tensor probs = p.probs.tensor(), dprobs = p.dprobs.tensor();
        run_blocks(parts, threads, 3, [&] { loss_parts_kernel<T>(p.plan, probs, p.partials.data()); });
        run_blocks(1, threads, 4, [&] { loss_kernel<T>(p.plan, p.partials.data(), parts, p.loss.data()); });
        run_blocks(parts, threads, 5, [&] { loss_backward_kernel<T>(p.plan, p.dloss.data(), dprobs); });
        EXPECT_EQ(to_float(p.loss.read()[0]), to_float(cpu.loss.read()[0]));
        EXPECT_EQ(widened(p.dprobs.read()), widened(cpu.dprobs.read()));
        EXPECT_TRUE(p.dprobs.padding_untouched() && p.partials.padding_untouched());
      });
    }
  }
}

}  // namespace
}  // namespace te
