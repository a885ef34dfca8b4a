// Pinned memory: the arena's slots, and one count of all of it, by owner and together: the figures of an arena are part
// of its account, those of an account part of its parent, and freed memory is subtracted again.
#include "transformer_engine/offload.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/arena.h"
#include "device_buffer.h"

static bool operator==(const te_pinned_bytes& a, const te_pinned_bytes& b) {
  return a.reserved == b.reserved && a.used == b.used && a.peak == b.peak && a.slots == b.slots;
}

namespace te {
namespace {

TEST(Arena, ReleasedSlotsArePoisonedAndRefused) {
  std::map<void*, size_t> held;
  const auto allocate = [&](size_t bytes) {
    void* p = ::operator new(bytes);
    held[p] = bytes;
    return p;
  };
  pinned::Account account;
  pinned::Arena arena(
      account, allocate,
      [&](void* p) {
        held.erase(p);
        ::operator delete(p);
      },
      0, true);
  const pinned::Slot first = arena.take("test", 1000, true);
  std::memset(first.data, 1, first.bytes);
  arena.check("test", first);
  arena.give_back("test", first);
  for (size_t i = 0; i < first.bytes; ++i) ASSERT_EQ(first.data[i], pinned::kReleased);
  EXPECT_THROW(arena.check("test", first), Error);
  const pinned::Slot second = arena.take("test", 1000, false);
  EXPECT_EQ(second.data, first.data);
  EXPECT_THROW(arena.check("test", first), Error);  // the same place, another generation
  arena.check("test", second);
  EXPECT_THROW(arena.give_back("test", first), Error);
  EXPECT_THROW(arena.take("test", 8 << 20, false), Error);  // as inside of a capture
  EXPECT_EQ(held.size(), 1u);
}

TEST(Arena, RangesJoinAgain) {
  pinned::Account account;
  pinned::Arena arena(
      account, [](size_t bytes) { return ::operator new(bytes); }, [](void* p) { ::operator delete(p); }, 4 << 20,
      false);
  uint32_t state = 7;
  std::vector<pinned::Slot> slots;
  std::set<unsigned char*> starts;
  for (int i = 0; i < 2000; ++i) {
    state = state * 1664525u + 1013904223u;
    if (slots.size() < 20 && state >> 31) {
      slots.push_back(arena.take("test", (state >> 8) % 60000, true));
      EXPECT_TRUE(starts.insert(slots.back().data).second);
      EXPECT_EQ((slots.back().data - slots.front().data) % int64_t(pinned::kAlignment), 0);
    } else if (!slots.empty()) {
      const size_t which = (state >> 8) % slots.size();
      starts.erase(slots[which].data);
      arena.give_back("test", slots[which]);
      slots.erase(slots.begin() + int64_t(which));
    }
  }
  for (const auto& slot : slots) arena.give_back("test", slot);
  EXPECT_EQ(arena.used(), 0u);
  arena.take("test", size_t(2) << 20, false);  // one range again, or this would throw
}

void* get(size_t bytes) { return ::operator new(bytes); }
void put(void* data) { ::operator delete(data); }

TEST(PinnedAccount, CountsEachOwnerAndAllOfThem) {
  pinned::Account all, one(&all), other(&all);
  {
    pinned::Arena first(one, get, put, 0, false), second(one, get, put, 0, false), third(other, get, put, 0, false);
    const auto a = first.take("test", 1000, true);
    const auto b = second.take("test", 3 << 20, true);
    EXPECT_EQ(one.bytes(), (te_pinned_bytes{6 << 20, 1024 + (3 << 20), 1024 + (3 << 20), 2}));
    EXPECT_EQ(one.bytes().reserved, first.reserved() + second.reserved());
    second.give_back("test", b);
    third.take("test", 256, true);
    EXPECT_EQ(other.bytes(), (te_pinned_bytes{2 << 20, 256, 256, 1}));
    // the most at once, which is less than the sum of both peaks
    EXPECT_EQ(all.bytes(), (te_pinned_bytes{8 << 20, 1024 + 256, 1024 + (3 << 20), 2}));
    second.trim();
    EXPECT_EQ(one.bytes(), (te_pinned_bytes{2 << 20, 1024, 1024 + (3 << 20), 1}));
    first.give_back("test", a);
    EXPECT_EQ(one.bytes().used, 0u);
  }  // third goes with a slot in it
  EXPECT_EQ(one.bytes(), (te_pinned_bytes{0, 0, 1024 + (3 << 20), 0}));
  EXPECT_EQ(other.bytes(), (te_pinned_bytes{0, 0, 256, 0}));
  EXPECT_EQ(all.bytes(), (te_pinned_bytes{0, 0, 1024 + (3 << 20), 0}));
}

TEST(PinnedAccount, WhatIsRefusedIsNotCounted) {
  pinned::Account account;
  pinned::Arena limited(account, get, put, 2 << 20, false);
  EXPECT_THROW(limited.take("test", 3 << 20, true), Error);
  EXPECT_THROW(limited.take("test", 1, false), Error);
  pinned::Arena exhausted(
      account, [](size_t) { return static_cast<void*>(nullptr); }, put, 0, false);
  EXPECT_THROW(exhausted.take("test", 1, true), Error);
  EXPECT_EQ(account.bytes(), te_pinned_bytes{});
}

TEST(PinnedAccount, ThreadsTakeTurns) {
  pinned::Account all, own(&all);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      pinned::Arena arena(own, get, put, 0, false);
      for (int i = 0; i < 1000; ++i) arena.give_back("test", arena.take("test", 1000, true));
    });
  }
  for (auto& thread : threads) thread.join();
  for (const pinned::Account* account : {&all, &own}) {
    EXPECT_EQ(account->bytes().used, 0u);
    EXPECT_EQ(account->bytes().reserved, 0u);
    EXPECT_EQ(account->bytes().slots, 0);
    EXPECT_GE(account->bytes().peak, 1024u);
    EXPECT_LE(account->bytes().peak, 4096u);
  }
}

te_pinned_bytes usage(const char* owner) {
  te_pinned_bytes bytes{};
  EXPECT_EQ(te_pinned_usage(owner, &bytes), TE_SUCCESS) << te_last_error();
  return bytes;
}

TEST(PinnedUsage, OffloadsEnginesAddUp) {
  for (const int32_t device : testing::devices()) {
    const te_pinned_bytes before = usage("offload"), whole = usage(nullptr);
    te_offload_options options{};
    options.device = device;
    te_offload_engine* engines[2] = {};
    for (auto& engine : engines) {
      ASSERT_EQ(te_offload_engine_create(options, &engine), TE_SUCCESS) << te_last_error();
      ASSERT_EQ(te_offload_reserve(engine, 3 << 20), TE_SUCCESS) << te_last_error();
    }
    EXPECT_EQ(usage("offload").reserved, before.reserved + (8 << 20));
    EXPECT_EQ(usage(nullptr).reserved, whole.reserved + (8 << 20));
    te_offload_layer* layer = nullptr;
    const size_t size = 5000;
    size_t staging = 0;
    ASSERT_EQ(te_offload_layer_create(engines[1], 0, &layer), TE_SUCCESS);
    ASSERT_EQ(te_offload_prepare(layer, &size, 1, nullptr, &staging), TE_SUCCESS) << te_last_error();
    te_offload_usage own{};
    te_offload_get_usage(engines[1], &own);
    EXPECT_EQ(usage("offload").used, before.used + own.used);
    EXPECT_EQ(usage("offload").slots, before.slots + 1);
    te_offload_layer_destroy(layer);
    EXPECT_EQ(te_offload_trim(engines[0]), TE_SUCCESS);
    EXPECT_EQ(usage("offload").reserved, before.reserved + (4 << 20));
    for (auto* engine : engines) EXPECT_EQ(te_offload_engine_destroy(engine), TE_SUCCESS);
    EXPECT_EQ(usage("offload").reserved, before.reserved);
    EXPECT_EQ(usage("offload").used, before.used);
    EXPECT_GE(usage("offload").peak, own.used);
    EXPECT_EQ(usage(nullptr).used, whole.used);
  }
  EXPECT_EQ(usage("nobody"), te_pinned_bytes{});
  EXPECT_EQ(te_pinned_usage("offload", nullptr), TE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(te_last_error()).find("'out'"), std::string::npos);
}

}  // namespace
}  // namespace te
