// Which pages calls take and give back, and every number of the report, against a model that keeps lists of its own, on
// random traces: no page with two owners, none lost, and the same maps on the CPU and on CUDA. Then the rule that loads
// called after a store show it no page, whenever they run.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <set>

#include "stash_pool.h"

namespace te {
namespace {

using testing::Buffer;
using testing::StashEntry;
using testing::StashPool;

constexpr int64_t kPage = 128;
constexpr int64_t kMost = 24;  // pages of a group

// The contract as a model, with lists of ids.
class Model {
 public:
  struct Held {
    te_stash_state state = TE_STASH_STATE_EMPTY;
    int64_t pages = 0, bytes = 0;
    std::vector<int32_t> device, host;
  };

  explicit Model(const te_stash_options& options) : o_(options), held_(64) { reset(-1); }

  void reset(int64_t step) {
    device_.resize(size_t(o_.device_pages));
    host_.resize(size_t(o_.host_pages));
    std::iota(device_.begin(), device_.end(), 0);
    std::iota(host_.begin(), host_.end(), 0);
    held_.assign(held_.size(), Held{});
    wanted_ = top_ = 0;
    report = te_stash_report{};
    report.step = step + 1;
    report.flagged_entry = -1;
  }

  void store(int e, int64_t live, int64_t number) {
    Held& held = held_[size_t(e)];
    if (held.state != TE_STASH_STATE_EMPTY) return flag(TE_STASH_EMPTY, number);
    held = {TE_STASH_STATE_STORED, (live + kPage - 1) / kPage, (live + 127) / 128 * 128, {}, {}};
    ++report.groups;
    wanted_ += held.pages;
    report.demand = std::max(report.demand, wanted_);
    const int64_t free = o_.policy == TE_STASH_BUMP ? o_.device_pages - top_ : int64_t(device_.size());
    const int64_t device = std::min(held.pages, free), host = held.pages - device;
    if (host > int64_t(host_.size())) {
      held.state = TE_STASH_STATE_LOST;
      ++report.lost_groups;
      return flag(TE_STASH_LOST, number);
    }
    for (int64_t i = 0; i < device; ++i) held.device.push_back(take_device());
    for (int64_t i = 0; i < host; ++i) held.host.push_back(take(host_));
    report.live_bytes += live;
    report.stream_bytes += held.bytes;
    report.taken_bytes += held.pages * kPage;
    report.spilled_bytes += host == 0 ? 0 : held.bytes - device * kPage;
    report.device_in_use += device;
    report.host_in_use += host;
    peaks();
  }

  void give(int e, bool load, int64_t number) {
    Held& held = held_[size_t(e)];
    if (held.state == TE_STASH_STATE_EMPTY) {
      if (load) flag(TE_STASH_EMPTY, number);
      return;
    }
    wanted_ -= held.pages;
    if (o_.policy == TE_STASH_BUMP && !held.device.empty()) {
      if (held.device.front() + int64_t(held.device.size()) == top_) {
        top_ = held.device.front();
        report.device_in_use -= int64_t(held.device.size());
      } else {
        flag(TE_STASH_ORDER, number);
      }
    } else {
      give_device(held);
    }
    for (const int32_t id : held.host) host_.push_back(id);
    report.host_in_use -= int64_t(held.host.size());
    held = Held{};
  }

  void evict(int e, int64_t low_water) {
    Held& held = held_[size_t(e)];
    const auto pages = int64_t(held.device.size());
    if (held.state != TE_STASH_STATE_STORED || int64_t(device_.size()) >= low_water) return;
    if (pages > int64_t(host_.size())) return;
    std::vector<int32_t> host;
    for (int64_t i = 0; i < pages; ++i) host.push_back(take(host_));
    give_device(held);
    host.insert(host.end(), held.host.begin(), held.host.end());
    held.host = host;
    held.device.clear();
    report.host_in_use += pages;
    report.evicted_pages += pages;
    peaks();
  }

  std::vector<int32_t> map(int e) const {
    std::vector<int32_t> ids = held_[size_t(e)].device;
    ids.insert(ids.end(), held_[size_t(e)].host.begin(), held_[size_t(e)].host.end());
    return ids;
  }
  const Held& held(int e) const { return held_[size_t(e)]; }

  // Whatever the trace: each page is free or has one owner.
  void expect_conserved() const {
    std::multiset<int32_t> device(device_.begin(), device_.end()), host(host_.begin(), host_.end());
    for (const Held& held : held_) {
      device.insert(held.device.begin(), held.device.end());
      host.insert(held.host.begin(), held.host.end());
    }
    EXPECT_EQ(std::set<int32_t>(host.begin(), host.end()).size(), host.size());
    EXPECT_EQ(int64_t(host.size()), o_.host_pages);
    if (o_.policy == TE_STASH_BUMP) return;
    EXPECT_EQ(std::set<int32_t>(device.begin(), device.end()).size(), device.size());
    EXPECT_EQ(int64_t(device.size()), o_.device_pages);
  }

  te_stash_report report{};

 private:
  static int32_t take(std::deque<int32_t>& ids) {
    const int32_t id = ids.front();
    ids.pop_front();
    return id;
  }
  int32_t take_device() { return o_.policy == TE_STASH_BUMP ? int32_t(top_++) : take(device_); }
  void give_device(const Held& held) {
    for (const int32_t id : held.device) {
      if (o_.policy == TE_STASH_STACK) {
        device_.push_front(id);
      } else {
        device_.push_back(id);
      }
    }
    report.device_in_use -= int64_t(held.device.size());
  }
  void peaks() {
    report.device_peak = std::max(report.device_peak, report.device_in_use);
    report.host_peak = std::max(report.host_peak, report.host_in_use);
  }
  void flag(uint32_t bit, int64_t number) {
    report.flags |= bit;
    report.gate = 1.f;
    if (report.flagged_entry == -1) report.flagged_entry = number;
  }

  te_stash_options o_;
  std::vector<Held> held_;
  std::deque<int32_t> device_, host_;
  int64_t wanted_ = 0, top_ = 0;
};

// Traces of one pool: one member of one byte a unit, so that a count is a number of bytes.
class Trace {
 public:
  explicit Trace(const te_stash_options& options, int entries = 12)
      : pool_(options), counter_(options.device, 1, 1), data_(options.device, 1, kMost * kPage), model_(options) {
    for (int e = 0; e < entries; ++e) entries_.push_back(std::make_unique<StashEntry>(pool_, kMost));
    last_.resize(size_t(entries), 0);
  }

  // Mostly right calls in any order, a few wrong ones, a reset now and then.
  void step(std::mt19937& random) {
    // Bump is walked up and down, and only now and then in another order.
    const bool down = pool_.options.policy == TE_STASH_BUMP && !stored_.empty() && random() % 64 != 0;
    int e = int(random() % entries_.size());
    if (down && model_.held(e).state != TE_STASH_STATE_EMPTY) e = stored_.back();
    const uint32_t kind = random() % 1000;
    const bool full = model_.held(e).state != TE_STASH_STATE_EMPTY;
    if (kind == 0) {
      pool_.reset();
      lost_ += model_.report.lost_groups;
      evicted_ += model_.report.evicted_pages;
      stored_.clear();
      model_.reset(model_.report.step);
    } else if (kind < 60 && pool_.options.policy != TE_STASH_BUMP) {
      evict(e, int64_t(random() % uint64_t(pool_.options.device_pages + 2)));
    } else if (kind < 65 || !full) {
      store(e, int64_t(random() % 8 == 0 ? random() % (kMost * kPage) : random() % (4 * kPage)));
    } else {
      give(e, kind % 5 != 0);
    }
  }

  void store(int e, int64_t live) {
    set(live);
    const te_stash_member member{data_.data(), counter_.data(), 4, TE_STASH_TAIL_KEEP, 1, kMost * kPage, 1, 0, 0, 0};
    TE_ASSERT_OK(te_stash_store(pool_.handle, &member, 1, entry(e), ++number_, nullptr));
    if (model_.held(e).state == TE_STASH_STATE_EMPTY) last_[size_t(e)] = number_;
    if (model_.held(e).state == TE_STASH_STATE_EMPTY) stored_.push_back(e);
    model_.store(e, live, number_);
  }
  void give(int e, bool load) {
    const te_stash_member member{data_.data(), nullptr, 0, TE_STASH_TAIL_KEEP, 1, kMost * kPage, 1, 0, 0, 0};
    if (load) {
      TE_ASSERT_OK(te_stash_load(pool_.handle, &member, 1, entry(e), 0, nullptr));
    } else {
      TE_ASSERT_OK(te_stash_drop(pool_.handle, entry(e), nullptr));
    }
    model_.give(e, load, last_[size_t(e)]);
    stored_.erase(std::remove(stored_.begin(), stored_.end(), e), stored_.end());
  }
  void evict(int e, int64_t low_water) {
    TE_ASSERT_OK(te_stash_evict(pool_.handle, entry(e), low_water, nullptr));
    model_.evict(e, low_water);
  }

  bool agrees() const {
    for (int e = 0; e < int(entries_.size()); ++e) {
      const te_stash_entry head = entries_[size_t(e)]->head();
      const Model::Held& held = model_.held(e);
      if (held.state == TE_STASH_STATE_EMPTY) continue;  // those of an earlier step still show what was
      EXPECT_EQ(head.state, held.state);
      EXPECT_EQ(head.pages, held.pages);
      EXPECT_EQ(head.host_pages, int64_t(held.host.size()));
      EXPECT_EQ(entries_[size_t(e)]->map(), model_.map(e));
    }
    const te_stash_report got = pool_.report(), &want = model_.report;
    const auto numbers = [](const te_stash_report& r) {
      return std::vector<int64_t>{int64_t(r.gate), int64_t(r.flags), r.step,          r.flagged_entry,
                                  r.groups,        r.lost_groups,    r.live_bytes,    r.stream_bytes,
                                  r.taken_bytes,   r.spilled_bytes,  r.evicted_pages, r.device_in_use,
                                  r.device_peak,   r.host_in_use,    r.host_peak,     r.demand};
    };
    EXPECT_EQ(numbers(got), numbers(want));
    model_.expect_conserved();
    return !::testing::Test::HasFailure();
  }
  const Model& model() const { return model_; }
  int64_t lost() const { return lost_ + model_.report.lost_groups; }
  int64_t evicted() const { return evicted_ + model_.report.evicted_pages; }
  std::vector<int32_t> map(int e) const { return entries_[size_t(e)]->map(); }

 private:
  void* entry(int e) const { return entries_[size_t(e)]->data(); }
  void set(int64_t live) {
    if (pool_.options.device == TE_DEVICE_CPU) {
      *counter_.data() = int32_t(live);
      return;
    }
#if defined(TE_WITH_CUDA)  // ordered after the store before it, without a wait of the host
    const auto count = int32_t(live);
    testing::cuda_ok(cudaMemcpyAsync(counter_.data(), &count, sizeof(count), cudaMemcpyHostToDevice, nullptr));
#endif
  }

  StashPool pool_;
  Buffer<int32_t> counter_;
  Buffer<unsigned char> data_;
  std::vector<std::unique_ptr<StashEntry>> entries_;
  std::vector<int64_t> last_;
  std::vector<int> stored_;  // entries that hold something, in the order of their stores
  int64_t number_ = 100, lost_ = 0, evicted_ = 0;
  Model model_;
};

class StashPages : public ::testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Devices, StashPages, ::testing::ValuesIn(testing::devices()), testing::device_name);

// `steps` of each trace: all policies, one tier and both. The effects of a trace show in the order of the free pages,
// and so in every map from then on: it is compared now and then.
void expect_the_models(int32_t device, int steps) {
  std::mt19937 random(20);
  for (const te_stash_policy policy : {TE_STASH_RING, TE_STASH_STACK, TE_STASH_BUMP}) {
    for (const auto& [device_pages, host_pages] :
         std::vector<std::pair<int64_t, int64_t>>{{40, 0}, {37, 23}, {0, 50}}) {
      Trace trace(StashPool::defaults(device, kPage, device_pages, host_pages, policy));
      for (int i = 0; i < steps; ++i) {
        trace.step(random);
        if (i % (steps / 60) == 0) {
          ASSERT_TRUE(trace.agrees()) << "step " << i << ", policy " << policy;
        }
      }
      ASSERT_TRUE(trace.agrees());
      if (steps < 10000) continue;
      EXPECT_GT(trace.lost(), steps / 1000) << "the trace loses hardly anything";
      EXPECT_LT(trace.lost(), steps / 3) << "the trace loses nearly everything";
      const bool evicts = device_pages * host_pages != 0 && policy != TE_STASH_BUMP;
      EXPECT_EQ(trace.evicted() > steps / 200, evicts) << trace.evicted();
    }
  }
}

// A million steps on the CPU, of all traces together; on CUDA, where each one is a launch, they are a test of their
// own.
TEST_P(StashPages, RandomTracesAreTheModels) {
  expect_the_models(GetParam(), GetParam() == TE_DEVICE_CPU ? 120000 : 600);
}

TEST_P(StashPages, LargeAMillionStepsAreTheModels) {
  if (GetParam() == TE_DEVICE_CPU) GTEST_SKIP() << "the random traces are as long there";
  expect_the_models(GetParam(), 120000);
}

TEST_P(StashPages, RingsGoRoundAtEveryOffset) {
  for (int64_t pages = 1; pages <= 9; ++pages) {
    Trace trace(StashPool::defaults(GetParam(), kPage, 9, 4), 2);
    for (int i = 0; i < 12; ++i) {
      trace.store(0, pages * kPage);
      trace.store(1, 3 * kPage);
      ASSERT_TRUE(trace.agrees());
      trace.give(i % 2, true);
      trace.give(1 - i % 2, true);
      ASSERT_TRUE(trace.agrees());
    }
  }
}

TEST_P(StashPages, AStackGivesTheLastOnesFirst) {
  Trace trace(StashPool::defaults(GetParam(), kPage, 10, 0, TE_STASH_STACK), 3);
  trace.store(0, 3 * kPage);
  trace.store(1, 2 * kPage);
  EXPECT_EQ(trace.map(0), (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(trace.map(1), (std::vector<int32_t>{3, 4}));
  trace.give(0, true);
  trace.store(2, 4 * kPage);
  EXPECT_EQ(trace.map(2), (std::vector<int32_t>{2, 1, 0, 5}));
}

TEST_P(StashPages, BumpFlagsAnyOrderButTheReverse) {
  const auto order = [&](std::vector<int> loads) {
    Trace trace(StashPool::defaults(GetParam(), kPage, 10, 0, TE_STASH_BUMP), 3);
    for (int e = 0; e < 3; ++e) trace.store(e, 3 * kPage);
    EXPECT_EQ(trace.map(1), (std::vector<int32_t>{3, 4, 5}));
    for (const int e : loads) trace.give(e, true);
    EXPECT_TRUE(trace.agrees());
    return std::pair(trace.model().report.flags, trace.model().report.device_in_use);
  };
  EXPECT_EQ(order({2, 1, 0}), std::pair(0u, int64_t(0)));
  EXPECT_EQ(order({1, 2, 0}), std::pair(uint32_t(TE_STASH_ORDER), int64_t(6)));
  EXPECT_EQ(order({0, 2, 1}), std::pair(uint32_t(TE_STASH_ORDER), int64_t(3)));
}

TEST_P(StashPages, AResetIsTheFirstMapAgain) {
  for (const te_stash_policy policy : {TE_STASH_RING, TE_STASH_STACK, TE_STASH_BUMP}) {
    StashPool pool(GetParam(), kPage, 10, 5, policy);
    const StashEntry a(pool, kMost), b(pool, kMost);
    Buffer<int32_t> counter(GetParam(), 1, 1);
    const Buffer<unsigned char> data(GetParam(), 1, kMost * kPage);
    const te_stash_member member{data.data(), counter.data(), 4, 0, 1, kMost * kPage, 1, 0, 0, 0};
    std::vector<std::vector<int32_t>> maps;
    for (int round = 0; round < 3; ++round) {
      counter.fill({6 * kPage});
      TE_ASSERT_OK(te_stash_store(pool.handle, &member, 1, a.data(), 0, nullptr));
      TE_ASSERT_OK(te_stash_store(pool.handle, &member, 1, b.data(), 0, nullptr));
      maps.push_back(a.map());
      maps.push_back(b.map());
      if (round == 0) {
        TE_ASSERT_OK(te_stash_drop(pool.handle, a.data(), nullptr));
      }
      pool.reset();
    }
    EXPECT_EQ(maps[0], (std::vector<int32_t>{0, 1, 2, 3, 4, 5}));
    EXPECT_EQ(maps[1], (std::vector<int32_t>{6, 7, 8, 9, 0, 1}));
    EXPECT_EQ(maps[2], maps[0]);
    EXPECT_EQ(maps[3], maps[1]);
    EXPECT_EQ(maps[4], maps[0]);
    EXPECT_EQ(maps[5], maps[1]);
  }
}

TEST(StashDevices, CpuAndCudaMakeTheSameMaps) {
  if (!testing::has_gpu()) GTEST_SKIP() << "no GPU";
  for (const te_stash_policy policy : {TE_STASH_RING, TE_STASH_STACK, TE_STASH_BUMP}) {
    std::mt19937 on_cpu(9), on_cuda(9);
    Trace cpu(StashPool::defaults(TE_DEVICE_CPU, kPage, 30, 20, policy));
    Trace cuda(StashPool::defaults(0, kPage, 30, 20, policy));
    for (int i = 0; i < 1500; ++i) {
      cpu.step(on_cpu);
      cuda.step(on_cuda);
      if (i % 10 != 0) continue;
      for (int e = 0; e < 12; ++e) ASSERT_EQ(cpu.map(e), cuda.map(e)) << "step " << i << ", entry " << e;
    }
  }
}

}  // namespace
}  // namespace te
