// Three stacked equal layers on virtual ranks, two microbatches interleaved, all forwards, then all backwards in
// reverse: every result has the bits of ranks computed one after the other, in 100 orders for each number of ranks.
// Mutants kept as bits: with shared buffers, or with any one wait left out, some order gives other bits. By hand: a
// slot that is released before the second product reads it (calls.cpp, queue: end_call() before add_wgrad()), and a
// push that waits for the turn before last (add_push), turn Stacked red.
#include <string>

#include "virtual_ranks/matrices.h"

namespace te {
namespace {

using testing::Matrix;
using testing::MatrixCall;
using testing::options_of;
using testing::Sharded;
using testing::World;
using testing::WorldOptions;
using Half = bf16;

constexpr int64_t kShard = 3, kHidden = 8, kInner = 4;  // kInner: a rank's part of the wide dimension

// A column layer, then a row layer: h = gathered(x) W1^T, y = the rank's rows of the sum over ranks of h W2^T.
struct Layer {
  Sharded<Half> w1, w2;
};

// The inputs and outputs of a layer in one microbatch.
struct Pass {
  Sharded<Half> h, y, dh, dx, dw1, dw2;

  explicit Pass(int32_t ranks)
      : h(testing::empty<Half>(ranks, ranks * kShard, kInner)),
        y(testing::empty<Half>(ranks, kShard, kHidden)),
        dh(testing::empty<Half>(ranks, ranks * kShard, kInner)),
        dx(testing::empty<Half>(ranks, kShard, kHidden)),
        dw1(testing::empty<Half>(ranks, kInner, kHidden)),
        dw2(testing::empty<Half>(ranks, kHidden, kInner)) {}
};

struct Stack {
  int32_t ranks;
  std::vector<Layer> layers;
  std::vector<Sharded<Half>> x, dy;       // by microbatch
  std::vector<std::vector<Pass>> passes;  // by microbatch and layer

  Stack(int32_t ranks, int depth, int batches = 2) : ranks(ranks) {
    for (int layer = 0; layer < depth; ++layer) {
      layers.push_back({testing::random<Half>(ranks, kInner, kHidden, unsigned(10 + layer)),
                        testing::random<Half>(ranks, kHidden, kInner, unsigned(30 + layer))});
    }
    for (int batch = 0; batch < batches; ++batch) {
      x.push_back(testing::random<Half>(ranks, kShard, kHidden, unsigned(50 + batch)));
      dy.push_back(testing::random<Half>(ranks, kShard, kHidden, unsigned(60 + batch)));
      passes.emplace_back(size_t(depth), Pass(ranks));
    }
  }

  int batches() const { return int(passes.size()); }
  int depth() const { return int(layers.size()); }
  Sharded<Half>& input(int batch, int layer) {
    return layer == 0 ? x[size_t(batch)] : passes[size_t(batch)][size_t(layer - 1)].y;
  }
  Sharded<Half>& gradient(int batch, int layer) {
    return layer + 1 == depth() ? dy[size_t(batch)] : passes[size_t(batch)][size_t(layer + 1)].dx;
  }

  // op.gather(source, weight, by_depth, out, other, wgrad, gathered_first, ready) and op.scatter(source, weight,
  // by_depth, out): the calls of a layer.
  template <class Op>
  void forward(Op& op, int batch, int layer) {
    Pass& pass = passes[size_t(batch)][size_t(layer)];
    op.gather(input(batch, layer), &layers[size_t(layer)].w1, false, &pass.h, nullptr, nullptr, false, false);
    op.scatter(pass.h, layers[size_t(layer)].w2, false, pass.y);
  }
  template <class Op>
  void backward(Op& op, int batch, int layer, bool input_is_ready) {
    Pass& pass = passes[size_t(batch)][size_t(layer)];
    op.gather(gradient(batch, layer), &layers[size_t(layer)].w2, true, &pass.dh, &pass.h, &pass.dw2, true, false);
    op.scatter(pass.dh, layers[size_t(layer)].w1, true, pass.dx);
    op.gather(input(batch, layer), nullptr, false, nullptr, &pass.dh, &pass.dw1, false, input_is_ready);
  }

  template <class Op>
  void all(Op& op, bool run_between) {
    for (int layer = 0; layer < depth(); ++layer) {
      for (int batch = 0; batch < batches(); ++batch) forward(op, batch, layer);
    }
    if (run_between) op.run();
    for (int layer = depth(); layer-- > 0;) {
      for (int batch = batches(); batch-- > 0;) backward(op, batch, layer, run_between);
    }
    op.run();
  }

  bool same_bits(const Stack& other) const {
    for (size_t batch = 0; batch < passes.size(); ++batch) {
      for (size_t layer = 0; layer < passes[batch].size(); ++layer) {
        const Pass &a = passes[batch][layer], &b = other.passes[batch][layer];
        for (const auto part : {&Pass::h, &Pass::y, &Pass::dh, &Pass::dx, &Pass::dw1, &Pass::dw2}) {
          if (!testing::same_bits(a.*part, b.*part)) return false;
        }
      }
    }
    return true;
  }
};

// Each rank's part, one after the other.
struct OneByOne {
  void gather(Sharded<Half>& source, Sharded<Half>* weight, bool by_depth, Sharded<Half>* out, Sharded<Half>* other,
              Sharded<Half>* wgrad, bool gathered_first, bool) {
    const Matrix<Half> all = testing::gathered(source);
    for (size_t r = 0; r < source.size(); ++r) {
      if (weight != nullptr) (*out)[r] = testing::product(by_depth ? TE_GEMM_NN : TE_GEMM_TN, (*weight)[r], all);
      if (other == nullptr) continue;
      (*wgrad)[r] = gathered_first ? testing::product(TE_GEMM_NT, (*other)[r], all)
                                   : testing::product(TE_GEMM_NT, all, (*other)[r]);
    }
  }
  void scatter(Sharded<Half>& source, Sharded<Half>& weight, bool by_depth, Sharded<Half>& out) {
    Sharded<Half> partials;
    for (size_t r = 0; r < source.size(); ++r) {
      partials.push_back(testing::product(by_depth ? TE_GEMM_NN : TE_GEMM_TN, weight[r], source[r]));
    }
    Matrix<Half> sum(partials[0].rows, partials[0].cols);
    const te_tensor absent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};
    TE_EXPECT_OK(te_comm_ordered_sum(testing::tensors(partials).data(), int32_t(partials.size()), absent, sum.tensor(),
                                     nullptr));
    const int64_t shard = sum.rows / int64_t(source.size());
    for (size_t r = 0; r < source.size(); ++r) out[r] = sum.slice(int64_t(r) * shard, int64_t(r + 1) * shard);
  }
  void run() {}
};

struct OnWorld {
  World& world;
  te_comm_schedule schedule;

  void gather(Sharded<Half>& source, Sharded<Half>* weight, bool by_depth, Sharded<Half>* out, Sharded<Half>* other,
              Sharded<Half>* wgrad, bool gathered_first, bool ready) {
    MatrixCall<Half>{TE_COMM_GATHER_PRODUCT, schedule, &source, weight, nullptr, out, other, wgrad, by_depth,
                     gathered_first,         ready}
        .queue_in(world);
  }
  void scatter(Sharded<Half>& source, Sharded<Half>& weight, bool by_depth, Sharded<Half>& out) {
    MatrixCall<Half>{TE_COMM_PRODUCT_SCATTER, schedule, &source, &weight, nullptr, &out, nullptr, nullptr, by_depth}
        .queue_in(world);
  }
  void run() { world.run(); }
};

Stack expected(int32_t ranks, int depth, int batches = 2) {
  Stack stack(ranks, depth, batches);
  OneByOne op;
  stack.all(op, false);
  return stack;
}

Stack walked(const WorldOptions& options, int depth, int batches = 2) {
  Stack stack(options.ranks, depth, batches);
  World world(options);
  OnWorld op{world, options.seed % 4 < 3 ? TE_COMM_CHUNKED : TE_COMM_SERIAL};
  stack.all(op, options.seed % 3 == 0);
  return stack;
}

TEST(CommBufferReuse, Stacked) {
  for (const int32_t ranks : {1, 2, 3, 4, 8}) {
    const Stack want = expected(ranks, 3);
    for (uint64_t seed = 0; seed < 100; ++seed) {
      ASSERT_TRUE(walked(options_of(ranks, seed), 3).same_bits(want)) << ranks << " ranks, seed " << seed;
    }
  }
}

class LeftOut : public ::testing::TestWithParam<std::pair<uint32_t, const char*>> {};
INSTANTIATE_TEST_SUITE_P(Bits, LeftOut,
                         ::testing::Values(std::pair(uint32_t(testing::kWaitProduced), "produced"),
                                           std::pair(uint32_t(testing::kWaitComputed), "computed"),
                                           std::pair(uint32_t(testing::kWaitArrived), "arrived"),
                                           std::pair(uint32_t(testing::kWaitFree), "free"),
                                           std::pair(uint32_t(testing::kWaitPushed), "pushed"),
                                           std::pair(uint32_t(testing::kExclusive), "exclusive")),
                         [](const auto& info) { return std::string(info.param.second); });

TEST_P(LeftOut, IsSeen) {
  for (const int32_t ranks : {2, 4}) {
    int wrong = 0;
    // Pushes of one microbatch follow waits of the other, which hides that a wait of their own is missing.
    for (const int batches : {1, 2}) {
      const Stack want = expected(ranks, 3, batches);
      for (uint64_t seed = 0; seed < 100; ++seed) {
        WorldOptions options = options_of(ranks, seed);
        options.left_out = GetParam().first;
        wrong += !walked(options, 3, batches).same_bits(want);
      }
    }
    EXPECT_GT(wrong, 10) << ranks << " ranks: hardly an order shows that it is missing";
    RecordProperty("wrong_of_200_at_" + std::to_string(ranks), wrong);
  }
}

// Two buffers of the largest gather and of the largest inbox and one partial product, for any number of layers.
TEST(CommBufferReuse, PoolDoesNotGrowWithLayers) {
  constexpr int32_t kRanks = 4;
  const size_t largest = size_t(kRanks * kShard * kHidden) * sizeof(Half);
  size_t bytes[2] = {};
  for (const int depth : {2, 16}) {
    WorldOptions options = options_of(kRanks, 1);
    ASSERT_EQ(options.buffers, 2);
    Stack stack(kRanks, depth);
    World world(options);
    OnWorld op{world, TE_COMM_CHUNKED};
    stack.all(op, true);
    EXPECT_TRUE(stack.same_bits(expected(kRanks, depth)));
    for (int32_t rank = 0; rank < kRanks; ++rank) EXPECT_EQ(world.pool_bytes(rank), world.pool_bytes(0));
    bytes[depth == 16] = world.pool_bytes(0);
  }
  EXPECT_EQ(bytes[0], bytes[1]);
  EXPECT_EQ(bytes[0], 2 * largest + 2 * largest + largest);
}

// Buffers grow while queued calls use them.
TEST(CommBufferReuse, GrowUnderQueuedCalls) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    World world(options_of(3, seed));
    std::vector<Sharded<Half>> x, w, out;
    for (int i = 0; i < 5; ++i) {
      x.push_back(testing::random<Half>(3, i + 1, 8, unsigned(i)));
      w.push_back(testing::random<Half>(3, 5, 8, unsigned(10 + i)));
      out.push_back(testing::empty<Half>(3, 3 * (i + 1), 5));
    }
    for (size_t i = 0; i < 5; ++i) {
      MatrixCall<Half>{TE_COMM_GATHER_PRODUCT, TE_COMM_CHUNKED, &x[i], &w[i], nullptr, &out[i]}.queue_in(world);
    }
    world.run();
    for (size_t i = 0; i < 5; ++i) {
      for (size_t r = 0; r < 3; ++r) {
        ASSERT_TRUE(out[i][r].same_bits(testing::product(TE_GEMM_TN, w[i][r], testing::gathered(x[i])))) << i;
      }
    }
  }
}

}  // namespace
}  // namespace te
