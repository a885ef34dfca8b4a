// Plans of every rank of 1 to 8, as properties: rows computed once, remote rows after their wait, partials pushed
// behind their product, one pusher to a peer in a step, an order that never stands still, serial where that is faster.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "transformer_engine/comm.h"

namespace te {
namespace {

using Steps = std::vector<te_comm_step>;

struct Planned {
  te_comm_problem problem;
  std::vector<Steps> ranks;
  std::vector<te_comm_prediction> predictions;

  bool gathers() const { return problem.op == TE_COMM_GATHER_PRODUCT; }
  int64_t shard() const { return problem.rows / problem.ranks; }
  std::string what() const {
    std::vector<char> text(4096);
    size_t length = 0;
    te_comm_plan_print(&problem, text.data(), text.size(), &length);
    return text.data();
  }
};

te_comm_problem problem_of(te_comm_op op, te_comm_schedule schedule, int64_t rows, int64_t depth, int64_t cols,
                           int32_t ranks, int32_t rank = 0) {
  return {op, schedule, rows, depth, cols, ranks, rank, TE_BFLOAT16, te_comm_costs_h200(), {}};
}

Planned plans(te_comm_problem problem) {
  Planned out{problem, {}, {}};
  for (problem.rank = 0; problem.rank < problem.ranks; ++problem.rank) {
    int64_t count = 0;
    te_comm_prediction prediction{};
    EXPECT_EQ(te_comm_plan(&problem, nullptr, 0, &count, nullptr), TE_SUCCESS) << te_last_error();
    Steps steps(static_cast<size_t>(count));
    EXPECT_EQ(te_comm_plan(&problem, steps.data(), count, &count, &prediction), TE_SUCCESS) << te_last_error();
    out.ranks.push_back(steps);
    out.predictions.push_back(prediction);
  }
  return out;
}

// Every op, schedule and number of ranks at sizes from one row a rank to those of large models.
template <class Check>
void for_plans(Check&& check) {
  for (const te_comm_op op : {TE_COMM_GATHER_PRODUCT, TE_COMM_PRODUCT_SCATTER}) {
    for (const te_comm_schedule schedule : {TE_COMM_AUTO, TE_COMM_SERIAL, TE_COMM_CHUNKED}) {
      for (int32_t ranks = 1; ranks <= 8; ++ranks) {
        for (const int64_t shard : {1, 7, 128, 129, 1000, 4096}) {
          for (const int64_t width : {16, 4096, 28672}) {
            const Planned planned = plans(problem_of(op, schedule, shard * ranks, 4096, width, ranks));
            check(planned);
            if (::testing::Test::HasFailure()) return;
          }
        }
      }
    }
  }
}

Steps of_kind(const Steps& steps, te_comm_step_kind kind) {
  Steps out;
  for (const te_comm_step& step : steps) {
    if (step.kind == kind) out.push_back(step);
  }
  return out;
}

TEST(CommPlan, EachRowIsComputedOnce) {
  for_plans([](const Planned& planned) {
    for (const Steps& steps : planned.ranks) {
      Steps gemms = of_kind(steps, TE_COMM_STEP_GEMM);
      EXPECT_LE(int64_t(gemms.size()), 2 * planned.predictions[0].runs) << planned.what();
      std::sort(gemms.begin(), gemms.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      int64_t next = 0;
      for (const te_comm_step& gemm : gemms) {
        EXPECT_EQ(gemm.first, next) << planned.what();
        EXPECT_LT(gemm.first, gemm.last) << planned.what();
        next = gemm.last;
      }
      EXPECT_EQ(next, planned.problem.rows) << planned.what();
    }
  });
}

TEST(CommPlan, RemoteRowsAreThere) {
  for_plans([](const Planned& planned) {
    const int64_t shard = planned.shard();
    for (int32_t rank = 0; rank < planned.problem.ranks; ++rank) {
      std::set<int32_t> waited;
      for (const te_comm_step& step : planned.ranks[size_t(rank)]) {
        const bool others = step.first < rank * shard || step.last > (rank + 1) * shard;
        if (step.kind == TE_COMM_STEP_WAIT) {
          EXPECT_TRUE(waited.insert(step.peer).second) << planned.what();
          const int64_t from = (planned.gathers() ? step.peer : rank) * shard;
          EXPECT_EQ(step.first, from) << planned.what();
          EXPECT_EQ(step.last, from + shard) << planned.what();
        } else if (step.kind == TE_COMM_STEP_GEMM && planned.gathers() && others) {
          for (int64_t owner = step.first / shard; owner <= (step.last - 1) / shard; ++owner) {
            EXPECT_TRUE(waited.count(int32_t(owner))) << "rank " << rank << "\n" << planned.what();
          }
        } else if (step.kind == TE_COMM_STEP_SUM) {
          EXPECT_EQ(int32_t(waited.size()), planned.problem.ranks - 1) << planned.what();
        }
      }
      // A buffer is released after the last step: all its pushes must have arrived.
      if (planned.gathers() && planned.problem.ranks > 1) {
        EXPECT_EQ(int32_t(waited.size()), planned.problem.ranks) << planned.what();
      }
    }
  });
}

TEST(CommPlan, PushesWhatIsThereOnceToEachPeer) {
  for_plans([](const Planned& planned) {
    const int64_t shard = planned.shard();
    for (int32_t rank = 0; rank < planned.problem.ranks; ++rank) {
      const Steps& steps = planned.ranks[size_t(rank)];
      std::set<int32_t> pushed;
      std::vector<bool> computed(static_cast<size_t>(planned.problem.rows), false);
      for (const te_comm_step& step : steps) {
        if (step.kind == TE_COMM_STEP_GEMM) {
          std::fill(computed.begin() + step.first, computed.begin() + step.last, true);
        } else if (step.kind == TE_COMM_STEP_PUSH) {
          EXPECT_TRUE(pushed.insert(step.peer).second) << planned.what();
          const int64_t from = (planned.gathers() ? rank : step.peer) * shard;
          EXPECT_EQ(step.first, from) << planned.what();
          EXPECT_EQ(step.last, from + shard) << planned.what();
          const auto first = computed.begin() + step.first, last = computed.begin() + step.last;
          EXPECT_TRUE(planned.gathers() || std::count(first, last, false) == 0) << planned.what();
        }
      }
      const int32_t others = planned.problem.ranks - 1;
      EXPECT_EQ(int32_t(pushed.size()), others == 0 ? 0 : others + planned.gathers()) << planned.what();
      const Steps sums = of_kind(steps, TE_COMM_STEP_SUM);
      EXPECT_EQ(sums.size(), size_t(!planned.gathers() && others != 0)) << planned.what();
      if (sums.empty()) continue;
      EXPECT_EQ(steps.back().kind, TE_COMM_STEP_SUM) << planned.what();
      EXPECT_EQ(sums[0].first, rank * shard) << planned.what();
      EXPECT_EQ(sums[0].last, (rank + 1) * shard) << planned.what();
    }
  });
}

TEST(CommPlan, NoTwoRanksPushToOnePeerAtOnce) {
  for_plans([](const Planned& planned) {
    std::vector<Steps> pushes;
    for (const Steps& steps : planned.ranks) pushes.push_back(of_kind(steps, TE_COMM_STEP_PUSH));
    for (size_t step = 0; step < pushes[0].size(); ++step) {
      std::set<int32_t> peers;
      for (size_t rank = 0; rank < pushes.size(); ++rank) {
        const int32_t peer = pushes[rank][step].peer;
        EXPECT_EQ(peer, int32_t((rank + step + 1) % pushes.size())) << planned.what();
        EXPECT_TRUE(peers.insert(peer).second) << planned.what();
      }
    }
  });
}

// Whatever rank goes on first: each walks its list, and stands still only before a wait whose push was not made.
TEST(CommPlan, NoOrderStandsStill) {
  std::mt19937 generator(5);
  for_plans([&](const Planned& planned) {
    const size_t ranks = planned.ranks.size();
    std::vector<size_t> at(ranks, 0);
    std::set<std::pair<int32_t, int32_t>> pushed;
    while (true) {
      std::vector<size_t> ready;
      size_t done = 0;
      for (size_t rank = 0; rank < ranks; ++rank) {
        if (at[rank] == planned.ranks[rank].size()) {
          ++done;
          continue;
        }
        const te_comm_step& step = planned.ranks[rank][at[rank]];
        if (step.kind != TE_COMM_STEP_WAIT || pushed.count({step.peer, int32_t(rank)})) ready.push_back(rank);
      }
      if (done == ranks) return;
      ASSERT_FALSE(ready.empty()) << planned.what();
      const size_t rank = ready[generator() % ready.size()];
      const te_comm_step& step = planned.ranks[rank][at[rank]++];
      if (step.kind == TE_COMM_STEP_PUSH) pushed.insert({int32_t(rank), step.peer});
    }
  });
}

TEST(CommPlan, OwnRowsAreFirstOrLast) {
  for_plans([](const Planned& planned) {
    if (planned.predictions[0].schedule != TE_COMM_CHUNKED) return;
    const int64_t shard = planned.shard();
    for (int32_t rank = 0; rank < planned.problem.ranks; ++rank) {
      const Steps gemms = of_kind(planned.ranks[size_t(rank)], TE_COMM_STEP_GEMM);
      const te_comm_step& gemm = planned.gathers() ? gemms.front() : gemms.back();
      EXPECT_GE(gemm.first, rank * shard) << planned.what();
      EXPECT_LE(gemm.last, (rank + 1) * shard) << planned.what();
    }
  });
}

TEST(CommPlan, AllRanksPredictTheSame) {
  for_plans([](const Planned& planned) {
    const te_comm_prediction& first = planned.predictions[0];
    for (const te_comm_prediction& other : planned.predictions) {
      EXPECT_EQ(other.us, first.us) << planned.what();
      EXPECT_EQ(other.runs, first.runs) << planned.what();
      EXPECT_EQ(other.schedule, first.schedule) << planned.what();
    }
    EXPECT_TRUE(planned.problem.schedule != TE_COMM_AUTO || first.us <= first.serial_us) << planned.what();
    if (planned.problem.ranks == 1 || planned.problem.schedule == TE_COMM_SERIAL) {
      EXPECT_EQ(first.schedule, TE_COMM_SERIAL) << planned.what();
    } else if (planned.problem.schedule == TE_COMM_CHUNKED) {
      EXPECT_EQ(first.schedule, TE_COMM_CHUNKED) << planned.what();
      EXPECT_GE(first.runs, 2) << planned.what();
    }
  });
}

// By whatever costs: what is predicted to be faster, the same on every rank. Mutants: a serial plan by the rate of
// pushes beside a product, a chunked one without what copies slow it down by, turn these red.
TEST(CommPlan, AutoTakesWhatItsCostsSay) {
  std::mt19937 generator(11);
  std::uniform_real_distribution<double> draw(-1, 1);
  int serial = 0, chunked = 0;
  for (int again = 0; again < 60; ++again) {
    for (int32_t ranks = 1; ranks <= 8; ++ranks) {
      const te_comm_op op = again % 2 == 0 ? TE_COMM_GATHER_PRODUCT : TE_COMM_PRODUCT_SCATTER;
      te_comm_problem problem = problem_of(op, TE_COMM_AUTO, 1024 * ranks, 4096, 4096, ranks);
      problem.costs.link_bytes_per_us *= std::exp2(4 * draw(generator));
      problem.costs.serial_bytes_per_us *= std::exp2(4 * draw(generator));
      problem.costs.launch_us *= std::exp2(6 * draw(generator));
      problem.costs.beside = 1.1 + 0.1 * draw(generator);
      const Planned planned = plans(problem);
      problem.schedule = TE_COMM_SERIAL;
      const te_comm_prediction one = plans(problem).predictions[0];
      problem.schedule = TE_COMM_CHUNKED;
      const te_comm_prediction runs = plans(problem).predictions[0];
      for (const te_comm_prediction& found : planned.predictions) {
        EXPECT_EQ(found.schedule, runs.us < one.us ? runs.schedule : TE_COMM_SERIAL) << planned.what();
        EXPECT_EQ(found.us, std::min(runs.us, one.us)) << planned.what();
        EXPECT_EQ(found.serial_us, one.us) << planned.what();
        (found.schedule == TE_COMM_SERIAL ? serial : chunked) += 1;
      }
    }
  }
  EXPECT_GT(serial, 100);
  EXPECT_GT(chunked, 100);
}

TEST(CommPlan, CopiesBesideAProductSlowIt) {
  te_comm_problem problem = problem_of(TE_COMM_GATHER_PRODUCT, TE_COMM_CHUNKED, 8192, 8192, 28672, 2);
  const double alone = plans(problem).predictions[0].us;
  problem.costs.beside = 1.1;
  const double beside = plans(problem).predictions[0].us;
  EXPECT_GT(beside, alone);
  EXPECT_LT(beside, 1.1 * alone);  // nothing is pushed after the last row
  problem.schedule = TE_COMM_SERIAL;
  const double serial = plans(problem).predictions[0].us;
  problem.costs.link_bytes_per_us /= 10;
  EXPECT_EQ(plans(problem).predictions[0].us, serial);
  problem.costs.serial_bytes_per_us /= 2;
  EXPECT_GT(plans(problem).predictions[0].us, serial + 100);
}

TEST(CommPlan, CostsAreKnownForMeasuredDevices) {
  te_comm_costs costs{};
  int32_t known = 1;
  const char* const kind = "a device of tests";
  TE_ASSERT_OK(te_comm_costs_of(kind, &costs, &known));
  EXPECT_EQ(known, 0);
  te_comm_costs given = te_comm_costs_h200();
  given.hop_us = 7;
  TE_ASSERT_OK(te_comm_lend_costs(kind, &given));
  TE_ASSERT_OK(te_comm_costs_of(kind, &costs, &known));
  EXPECT_EQ(known, 1);
  EXPECT_EQ(costs.hop_us, 7);
  given.beside = 0;
  EXPECT_EQ(te_comm_lend_costs(kind, &given), TE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(te_last_error()).find("'costs.beside' is 0"), std::string::npos) << te_last_error();
  TE_ASSERT_OK(te_comm_lend_costs(kind, nullptr));
  TE_ASSERT_OK(te_comm_costs_of(kind, &costs, &known));
  EXPECT_EQ(known, 0);
  EXPECT_EQ(te_comm_costs_of(nullptr, &costs, &known), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_comm_costs_of(kind, nullptr, &known), TE_INVALID_ARGUMENT);
}

// The large products of the 70B models: within 6 % of max(G, C + G / t) + 15 us at 2 ranks, the last run the longest,
// each run's rows in one piece.
TEST(CommPlan, LargeProductsHideTheirTransfer) {
  for (const auto& [op, depth, cols] :
       {std::tuple(TE_COMM_GATHER_PRODUCT, 8192, 28672), std::tuple(TE_COMM_GATHER_PRODUCT, 8192, 5120),
        std::tuple(TE_COMM_PRODUCT_SCATTER, 14336, 8192)}) {
    const Planned planned = plans(problem_of(op, TE_COMM_AUTO, 8192, depth, cols, 2));
    const te_comm_costs costs = te_comm_costs_h200();
    const double whole = 2.0 * 8192 * depth * cols / costs.flops_per_us;
    const double transfer = 4096.0 * (op == TE_COMM_GATHER_PRODUCT ? depth : cols) * 2 / costs.link_bytes_per_us;
    const double sum = op == TE_COMM_GATHER_PRODUCT ? 0 : 3 * 4096.0 * cols * 2 / costs.memory_bytes_per_us;
    const double floor = std::max(whole, transfer + whole / 2) + 15 + sum;
    EXPECT_EQ(planned.predictions[0].schedule, TE_COMM_CHUNKED) << planned.what();
    EXPECT_EQ(planned.predictions[0].runs, 2) << planned.what();
    EXPECT_LE(planned.predictions[0].us, 1.06 * floor) << planned.what();
    for (const Steps& steps : planned.ranks) {
      const Steps gemms = of_kind(steps, TE_COMM_STEP_GEMM);
      ASSERT_EQ(gemms.size(), 2u) << planned.what();
      const te_comm_step& lone = planned.gathers() ? gemms[0] : gemms[1];
      EXPECT_LE(lone.last - lone.first, 4096) << planned.what();
    }
  }
}

// Models of 8 and 70 billion parameters over two ranks, with the cluster of tiles that cuBLASLt takes on an H200, and
// without: runs take no more waves than the whole. With it a gather reads its own rows in place where that takes none
// more.
TEST(CommPlan, RunsTakeNoWaveMoreThanTheWhole) {
  const auto waves = [](int64_t rows, int64_t cols, int64_t high, int64_t wide) {
    const auto over = [](int64_t n, int64_t by) { return (n + by - 1) / by; };
    return over(over(rows, high) * over(cols, wide), 66);  // clusters at once
  };
  te_comm_costs costs{};
  int32_t known = 0;
  TE_ASSERT_OK(te_comm_costs_of("NVIDIA H200", &costs, &known));
  ASSERT_EQ(known, 1);
  for (const auto& [op, depth, cols, high, wide] : {std::tuple(TE_COMM_GATHER_PRODUCT, 4096, 3072, 256, 256),
                                                    std::tuple(TE_COMM_GATHER_PRODUCT, 8192, 5120, 256, 320),
                                                    std::tuple(TE_COMM_GATHER_PRODUCT, 4096, 14336, 256, 320),
                                                    std::tuple(TE_COMM_GATHER_PRODUCT, 8192, 28672, 192, 384),
                                                    std::tuple(TE_COMM_PRODUCT_SCATTER, 7168, 4096, 256, 256),
                                                    std::tuple(TE_COMM_PRODUCT_SCATTER, 4096, 8192, 256, 320)}) {
    te_comm_problem problem = problem_of(op, TE_COMM_CHUNKED, 8192, depth, cols, 2);
    problem.costs = costs;
    for (const bool told : {false, true}) {
      if (told) problem.tile = {high, wide, 2};
      const Planned planned = plans(problem);
      for (const Steps& steps : planned.ranks) {
        const Steps runs = of_kind(steps, TE_COMM_STEP_GEMM);
        int64_t taken = 0;
        for (const te_comm_step& run : runs) taken += waves(run.last - run.first, cols, high, wide);
        EXPECT_LE(taken, waves(8192, cols, high, wide)) << planned.what();
        const bool halves = 2 * waves(4096, cols, high, wide) == waves(8192, cols, high, wide);
        EXPECT_TRUE(!told || !planned.gathers() || !halves || runs[0].last - runs[0].first == 4096) << planned.what();
      }
    }
  }
}

TEST(CommPlan, IsPrinted) {
  te_comm_problem problem = problem_of(TE_COMM_PRODUCT_SCATTER, TE_COMM_CHUNKED, 256, 64, 16, 2, 1);
  std::vector<char> text(1000, '?');
  size_t length = 0;
  TE_ASSERT_OK(te_comm_plan_print(&problem, text.data(), text.size(), &length));
  const std::string words(text.data());
  EXPECT_EQ(words.size(), length);
  EXPECT_EQ(words.substr(words.find('\n')),
            "\n  gemm [0, 128)\n  push to 0 [0, 128)\n  gemm [128, 256)\n  wait for 0 [128, 256)\n  sum [128, 256)\n");
  EXPECT_EQ(words.find("product_scatter 256 x 64 x 16 bfloat16, rank 1 of 2: chunked, 2 runs, "), 0u) << words;
  TE_ASSERT_OK(te_comm_plan_print(&problem, text.data(), 8, &length));
  EXPECT_EQ(std::string(text.data()) + std::to_string(length), "product" + std::to_string(words.size()));
}

TEST(CommPlan, NothingToDo) {
  const Planned planned = plans(problem_of(TE_COMM_GATHER_PRODUCT, TE_COMM_AUTO, 0, 64, 64, 4));
  for (const Steps& steps : planned.ranks) EXPECT_TRUE(steps.empty());
}

TEST(CommPlan, RefusesWhatDoesNotFit) {
  const te_comm_problem good = problem_of(TE_COMM_GATHER_PRODUCT, TE_COMM_AUTO, 64, 64, 64, 4);
  const auto refused = [&](auto&& spoil, const std::string& word) {
    te_comm_problem bad = good;
    spoil(bad);
    int64_t count = 0;
    EXPECT_EQ(te_comm_plan(&bad, nullptr, 0, &count, nullptr), TE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(te_last_error()).find(word), std::string::npos) << te_last_error();
  };
  refused([](auto& p) { p.rows = 66; }, "'problem.rows' is 66, wanted a multiple of the 4 ranks");
  refused([](auto& p) { p.rank = 4; }, "'problem.rank' is 4");
  refused([](auto& p) { p.ranks = 0; }, "'problem.ranks' is 0");
  refused([](auto& p) { p.depth = -1; }, "'problem.depth'");
  refused([](auto& p) { p.op = te_comm_op(7); }, "'problem.op' is 7");
  refused([](auto& p) { p.schedule = te_comm_schedule(3); }, "'problem.schedule' is 3");
  refused([](auto& p) { p.costs.hop_us = NAN; }, "'problem.costs.hop_us'");
  refused([](auto& p) { p.costs.units = 0; }, "'problem.costs.units' is 0");
  refused([](auto& p) { p.tile = {128, 0, 2}; }, "'problem.tile' is 128 x 0 on 2");
  int64_t count = 0;
  EXPECT_EQ(te_comm_plan(nullptr, nullptr, 0, &count, nullptr), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_comm_plan(&good, nullptr, 4, &count, nullptr), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_comm_plan(&good, nullptr, 0, nullptr, nullptr), TE_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace te
