// grouped gemm on a GPU against the CPU: operands of small integers, whose sums are exact in any order, so that the
// results are equal bit for bit; calls that a graph captured follow offsets that change. Skips without a GPU. Mutant: a
// table of tiles that is made on the host when a call is captured.
#include <gtest/gtest.h>

#include <cstring>

#include "grouped_case.h"

namespace te {
namespace {

using testing::GroupedCase;
using testing::GroupedShape;
using testing::same;

template <class T, class D>
void compare_devices(te_grouped_product product, const GroupedShape& s, bool stacked = false) {
  const std::vector<uint8_t> add(size_t(s.groups()), 1);
  GroupedCase<T, D> host(TE_DEVICE_CPU, product, s), device(0, product, s);
  for (GroupedCase<T, D>* c : {&host, &device}) {
    testing::fill_with_integers(*c);
    c->problem.zero_tail = product != TE_GROUPED_WGRAD;
    if (product == TE_GROUPED_FPROP) c->with_bias();
    if (stacked) c->stack();
    if (product == TE_GROUPED_WGRAD) c->problem.accumulate = add.data();
    TE_ASSERT_OK(te_grouped_gemm(&c->problem, nullptr));
  }
  const std::string name = concat(name_of(s, product), stacked ? " stacked" : "");
  if (product != TE_GROUPED_WGRAD) {
    EXPECT_TRUE(same(device.row_result().read(), host.row_result().read())) << name;
    EXPECT_TRUE(device.row_result().padding_untouched()) << name;
    return;
  }
  for (size_t g = 0; g < host.results.size(); ++g) {
    EXPECT_TRUE(same(device.results[g]->read(), host.results[g]->read())) << name << " group " << g;
    EXPECT_TRUE(device.results[g]->padding_untouched()) << name << " group " << g;
  }
}

TEST(GroupedDevice, IntegersAreExact) {
  if (!testing::has_gpu()) GTEST_SKIP() << "no GPU";
  const GroupedShape shapes[] = {{{1}, 0, 1, 1},
                                 {{5, 0, 3}, 0, 17, 33, 3},
                                 {{257, 63, 0}, 9, 129, 65},
                                 {{700, 0, 5, 1300}, 100, 520, 712, 8},
                                 {{64, 128, 256}, 0, 1024, 256}};
  for (const GroupedShape& s : shapes) {
    compare_devices<bf16, bf16>(TE_GROUPED_FPROP, s);
    compare_devices<fp16, fp16>(TE_GROUPED_FPROP, s);
    compare_devices<bf16, bf16>(TE_GROUPED_DGRAD, s);
    compare_devices<fp16, fp16>(TE_GROUPED_DGRAD, s);
    for (const te_grouped_product product : {TE_GROUPED_FPROP, TE_GROUPED_DGRAD}) {
      compare_devices<bf16, bf16>(product, s, true);
      compare_devices<fp16, fp16>(product, s, true);
    }
    compare_devices<bf16, float>(TE_GROUPED_WGRAD, s);
    compare_devices<bf16, bf16>(TE_GROUPED_WGRAD, s);
    compare_devices<fp16, fp16>(TE_GROUPED_WGRAD, s);
  }
}

TEST(GroupedDevice, ANegativeNumberOfSmsIsRefused) {
  EXPECT_EQ(te_grouped_gemm_sms(-1), TE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(te_last_error()).find("'most'"), std::string::npos) << te_last_error();
  TE_ASSERT_OK(te_grouped_gemm_sms(0));
}

// Random values, whose sums depend on their order.
TEST(GroupedDevice, FewerSmsHaveTheSameBits) {
  if (!testing::has_gpu()) GTEST_SKIP() << "no GPU";
  const GroupedShape shape{{700, 0, 5, 1300}, 100, 520, 712, 8};
  const auto results_of = [&](auto& c, int32_t sms) {
    std::vector<std::vector<float>> all;
    const auto note = [&](const auto& values) {
      all.emplace_back();
      for (const auto& value : values) all.back().push_back(to_float(value));
    };
    TE_EXPECT_OK(te_grouped_gemm_sms(sms));
    TE_EXPECT_OK(te_grouped_gemm(&c.problem, nullptr));
    TE_EXPECT_OK(te_grouped_gemm_sms(0));
    if (c.problem.product != TE_GROUPED_WGRAD) note(c.row_result().read());
    for (const auto& result : c.results) {
      if (c.problem.product == TE_GROUPED_WGRAD) note(result->read());
    }
    return all;
  };
  for (const te_grouped_product product : {TE_GROUPED_FPROP, TE_GROUPED_DGRAD, TE_GROUPED_WGRAD}) {
    std::vector<std::vector<float>> all;
    for (const int32_t sms : {0, 2, 14, 131, 1 << 20}) {
      GroupedCase<bf16> fresh(0, product, shape);
      const auto got = results_of(fresh, sms);
      if (sms == 0) all = got;
      ASSERT_EQ(got.size(), all.size());
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(std::memcmp(got[i].data(), all[i].data(), got[i].size() * sizeof(float)) == 0)
            << name_of(shape, product) << " " << sms << " SMs, result " << i;
      }
    }
  }
}

#if defined(TE_WITH_CUDA)

TEST(GroupedDevice, CapturedCallsFollowTheSplits) {
  if (!testing::has_gpu()) GTEST_SKIP() << "no GPU";
  const GroupedShape s{{100, 200, 44}, 0, 136, 72};
  GroupedCase<bf16> captured(0, TE_GROUPED_FPROP, s), eager(0, TE_GROUPED_FPROP, s);
  testing::Buffer<int64_t> splits(0, 1, 3);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t runnable = nullptr;
  testing::cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  captured.problem.zero_tail = eager.problem.zero_tail = 1;
  const auto run = [&](GroupedCase<bf16>& c, te_stream on) {
    TE_ASSERT_OK(te_grouped_offsets(splits.data(), 1, 3, s.rows(), 0, c.device_offsets.data(), nullptr, on));
    TE_ASSERT_OK(te_grouped_gemm(&c.problem, on));
  };
  testing::cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  run(captured, stream);
  testing::cuda_ok(cudaStreamEndCapture(stream, &graph));
  testing::cuda_ok(cudaGraphInstantiate(&runnable, graph, 0));
  for (const std::vector<int64_t>& now :
       {std::vector<int64_t>{100, 200, 44}, {0, 344, 0}, {1, 2, 3}, {-5, 400, 400}, {0, 0, 0}}) {
    splits.fill(now);
    captured.y.poison();
    eager.y.poison();
    run(eager, nullptr);
    testing::cuda_ok(cudaDeviceSynchronize());
    testing::cuda_ok(cudaGraphLaunch(runnable, stream));
    testing::cuda_ok(cudaStreamSynchronize(stream));
    EXPECT_TRUE(same(captured.y.read(), eager.y.read())) << now[0];
  }
  cudaGraphExecDestroy(runnable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

#endif

}  // namespace
}  // namespace te
