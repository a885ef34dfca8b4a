// Plans walked by 1 to 8 virtual ranks in 100 seeded orders each: both products against the unsharded ones, chunked and
// serial bit for bit, traces, errors. Mutants: a product that takes rows behind the own ones from where these lie, and
// a scatter that adds its bias to every partial (calls.cpp, add_gemm), turn GatherProduct and ProductScatter red.
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "virtual_ranks/matrices.h"

namespace te {
namespace {

using testing::Event;
using testing::Matrix;
using testing::MatrixCall;
using testing::Sharded;
using testing::StepKind;
using testing::World;
using testing::WorldOptions;

constexpr int32_t kMostRanks = 8;
constexpr uint64_t kSeeds = 100;

WorldOptions traced(int32_t ranks, uint64_t seed) {
  WorldOptions options = testing::options_of(ranks, seed);
  options.trace = true;
  return options;
}

// A call by both schedules in many orders: each rank gets `rows` rows of the wanted result.
template <class T>
void check_seeds(MatrixCall<T> call, bool by_depth, int64_t rows, const Sharded<T>& want) {
  const auto ranks = int32_t(want.size());
  call.weight_by_depth = by_depth;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    World world(traced(ranks, seed));
    Sharded<T> out = testing::empty<T>(ranks, rows, want[0].cols);
    call.schedule = seed % 4 == 0 ? TE_COMM_SERIAL : TE_COMM_CHUNKED;
    call.out = &out;
    call.queue_in(world);
    world.run();
    ASSERT_TRUE(testing::same_bits(out, want)) << ranks << " ranks of " << rows << " rows, seed " << seed;
  }
}

template <class T>
void check_gather(int32_t ranks, int64_t shard, bool by_depth) {
  const int64_t depth = 6, cols = 5, rows = ranks * shard;
  const te_gemm_layout layout = by_depth ? TE_GEMM_NN : TE_GEMM_TN;
  Sharded<T> x = testing::random<T>(ranks, shard, depth, 1), bias = testing::random<T>(ranks, 1, cols, 3);
  Sharded<T> w = testing::random<T>(ranks, by_depth ? depth : cols, by_depth ? cols : depth, 2);
  Sharded<T> want;
  for (int32_t r = 0; r < ranks; ++r) {
    want.push_back(testing::product(layout, w[size_t(r)], testing::gathered(x), &bias[size_t(r)]));
  }
  check_seeds<T>({TE_COMM_GATHER_PRODUCT, TE_COMM_CHUNKED, &x, &w, &bias}, by_depth, rows, want);
}

TEST(CommWorld, GatherProduct) {
  for (int32_t ranks = 1; ranks <= kMostRanks; ++ranks) {
    check_gather<float>(ranks, 5, false);
    check_gather<bf16>(ranks, 4, true);
    check_gather<float>(ranks, 1, true);
    check_gather<float>(ranks, 0, false);
  }
}

// |sum of products, in float32, in any order| differs from the exact one by at most terms * 2^-24 of the magnitudes.
void expect_unsharded(const Sharded<float>& x, const Sharded<float>& w, const Matrix<float>& bias,
                      const Sharded<float>& out) {
  const int64_t shard = out[0].rows, cols = out[0].cols, depth = x[0].cols, ranks = int64_t(x.size());
  for (int64_t row = 0; row < shard * ranks; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      double sum = bias.values[size_t(col)], magnitude = std::fabs(sum);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        for (int64_t k = 0; k < depth; ++k) {
          const double term = double(x[size_t(rank)].values[size_t(row * depth + k)]) *
                              double(w[size_t(rank)].values[size_t(col * depth + k)]);
          sum += term;
          magnitude += std::fabs(term);
        }
      }
      const float got = out[size_t(row / shard)].values[size_t(row % shard * cols + col)];
      ASSERT_NEAR(got, sum, double(depth * ranks + ranks + 1) * 0x1p-24 * magnitude) << row << ", " << col;
    }
  }
}

template <class T>
Sharded<T> scattered(const Sharded<T>& x, const Sharded<T>& w, te_gemm_layout layout, Matrix<T>* bias) {
  const int32_t ranks = int32_t(x.size());
  if (ranks == 1) return {testing::product(layout, w[0], x[0], bias)};
  Sharded<T> partials, out;
  for (int32_t r = 0; r < ranks; ++r) partials.push_back(testing::product(layout, w[size_t(r)], x[size_t(r)]));
  const int64_t shard = x[0].rows / ranks;
  for (int32_t r = 0; r < ranks; ++r) {
    Sharded<T> parts;
    for (const Matrix<T>& partial : partials) parts.push_back(partial.slice(r * shard, (r + 1) * shard));
    out.emplace_back(shard, partials[0].cols);
    const te_tensor absent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};
    TE_EXPECT_OK(te_comm_ordered_sum(testing::tensors(parts).data(), ranks, bias != nullptr ? bias->tensor() : absent,
                                     out.back().tensor(), nullptr));
  }
  return out;
}

template <class T>
void check_scatter(int32_t ranks, int64_t shard, bool by_depth) {
  const int64_t depth = 6, cols = 5, rows = ranks * shard;
  Sharded<T> x = testing::random<T>(ranks, rows, depth, 4);
  Sharded<T> w = testing::random<T>(ranks, by_depth ? depth : cols, by_depth ? cols : depth, 5);
  Sharded<T> bias(static_cast<size_t>(ranks), Matrix<T>::random(1, cols, 6));
  const Sharded<T> want = scattered(x, w, by_depth ? TE_GEMM_NN : TE_GEMM_TN, &bias[0]);
  if constexpr (std::is_same_v<T, float>) {
    if (!by_depth) expect_unsharded(x, w, bias[0], want);
  }
  check_seeds<T>({TE_COMM_PRODUCT_SCATTER, TE_COMM_CHUNKED, &x, &w, &bias}, by_depth, shard, want);
}

TEST(CommWorld, ProductScatter) {
  for (int32_t ranks = 1; ranks <= kMostRanks; ++ranks) {
    check_scatter<float>(ranks, 5, false);
    check_scatter<bf16>(ranks, 4, true);
    check_scatter<float>(ranks, 1, true);
    check_scatter<float>(ranks, 0, false);
  }
}

// With by_loop off a call uses te_gemm: the installed CPU product, or the plain loop.
TEST(CommWorld, ProductsAreTeGemms) {
  WorldOptions options = traced(2, 1);
  options.by_loop = false;
  World world(options);
  Sharded<float> x = testing::random<float>(2, 4, 8, 1), w = testing::random<float>(2, 3, 8, 2);
  Sharded<float> out = testing::empty<float>(2, 8, 3);
  MatrixCall<float>{TE_COMM_GATHER_PRODUCT, TE_COMM_CHUNKED, &x, &w, nullptr, &out}.queue_in(world);
  world.run();
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_TRUE(out[r].same_bits(testing::product(TE_GEMM_TN, w[r], testing::gathered(x))));
  }
}

// The trace has each rank's plan in its order, lane by lane, and no wait stands before its push.
TEST(CommWorld, TraceIsThePlan) {
  constexpr int32_t kRanks = 4;
  Sharded<float> x = testing::random<float>(kRanks, 12, 8, 1), w = testing::random<float>(kRanks, 5, 8, 2);
  Sharded<float> out = testing::empty<float>(kRanks, 3, 5);
  std::set<std::vector<int32_t>> orders;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    World world(traced(kRanks, seed));
    MatrixCall<float>{TE_COMM_PRODUCT_SCATTER, TE_COMM_CHUNKED, &x, &w, nullptr, &out}.queue_in(world);
    world.run();
    std::map<int32_t, std::vector<Event>> pushes, others;
    std::set<std::pair<int32_t, int32_t>> pushed;
    std::vector<int32_t> order;
    for (const Event& event : world.trace()) {
      order.push_back(event.rank);
      EXPECT_EQ(event.call, 0);
      (event.kind == StepKind::kPush ? pushes : others)[event.rank].push_back(event);
      if (event.kind == StepKind::kPush) pushed.insert({event.rank, event.peer});
      EXPECT_TRUE(event.kind != StepKind::kWait || pushed.count({event.peer, event.rank}));
    }
    orders.insert(order);
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      const te_comm_problem problem{
          TE_COMM_PRODUCT_SCATTER, TE_COMM_CHUNKED, 12, 8, 5, kRanks, rank, TE_FLOAT32, testing::small_costs(), {}};
      std::vector<te_comm_step> steps(100);
      int64_t count = 0;
      TE_ASSERT_OK(te_comm_plan(&problem, steps.data(), 100, &count, nullptr));
      size_t push = 0, other = 0;
      for (int64_t i = 0; i < count; ++i) {
        const te_comm_step& step = steps[size_t(i)];
        const bool is_push = step.kind == TE_COMM_STEP_PUSH;
        const Event& event = is_push ? pushes[rank].at(push++) : others[rank].at(other++);
        EXPECT_EQ(std::tuple(event.kind, event.peer, event.first, event.last),
                  std::tuple(StepKind(step.kind), step.peer, step.first, step.last));
      }
      EXPECT_EQ(push, pushes[rank].size());
      ASSERT_EQ(other + 3, others[rank].size());  // join, and the release of two buffers
      EXPECT_EQ(others[rank][other].kind, StepKind::kJoin);
      EXPECT_EQ(others[rank][other + 1].kind, StepKind::kRelease);
    }
  }
  EXPECT_GT(orders.size(), 5u) << "seeds give hardly any order of their own";
}

TEST(CommWorld, RefusesWhatDoesNotFit) {
  const auto refused = [](const auto& action, const std::string& message) {
    try {
      action();
      ADD_FAILURE() << "not refused: " << message;
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), TE_INVALID_ARGUMENT);
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
  };
  WorldOptions bad = traced(0, 0);
  refused([&] { World(bad).run(); }, "'options.ranks' is 0");
  bad = traced(2, 0);
  bad.buffers = 3;
  refused([&] { World(bad).run(); }, "'options.buffers' is 3");

  World world(traced(3, 0));
  Sharded<float> x = testing::random<float>(3, 4, 8, 1), w = testing::random<float>(3, 5, 8, 2);
  Sharded<float> out = testing::empty<float>(3, 12, 5), narrow = testing::empty<float>(3, 12, 4);
  MatrixCall<float> call{TE_COMM_GATHER_PRODUCT, TE_COMM_CHUNKED, &x, &w, nullptr, &narrow};
  const auto queue = [&] { call.queue_in(world); };
  refused(queue, "'call.out[0]' is [12, 4], wanted [12, 5]");
  call.out = nullptr;
  refused(queue, "'call.out' is NULL");
  call.out = &out;
  call.other = &out;
  refused(queue, "'call.other' is given without wgrad");
  call.other = nullptr;
  call.op = TE_COMM_PRODUCT_SCATTER;
  refused(queue, "'call.source[0]' is [4, 8], wanted rows that 3 divides");
  call.op = TE_COMM_GATHER_PRODUCT;
  call.queue_in(world);  // nothing was lost
  world.run();
  EXPECT_TRUE(out[2].same_bits(testing::product(TE_GEMM_TN, w[2], testing::gathered(x))));
}

}  // namespace
}  // namespace te
