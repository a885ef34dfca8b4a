// The channel by which ranks push into each other's memory, with threads as ranks: which bytes arrive, which ranks
// wait, and the failure where a rank does not come. Mutant, in ops/comm/peer*.cpp: a word
// that is not put back.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "ops/comm/peer.h"
#include "transformer_engine/comm_peer.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kBytes = 4096;  // of a slot

void ok(te_status status) { ASSERT_EQ(status, TE_SUCCESS) << te_last_error(); }

class Ranks {
 public:
  explicit Ranks(int32_t ranks, double timeout_s = 20) : ranks_(ranks) {
    size_t bytes = 0;
    ok(te_comm_peer_bytes(ranks, &bytes));
    words_ = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    std::memset(words_, 0, bytes);
    for (int32_t rank = 0; rank < ranks; ++rank) {
      const te_comm_peer_options options{ranks, rank, TE_DEVICE_CPU, words_, timeout_s};
      channels_.push_back(nullptr);
      ok(te_comm_peer_create(&options, &channels_.back()));
      slots_.emplace_back(kBytes, char(0));
    }
    for (te_comm_peer* channel : channels_) {
      std::vector<void*> addresses;
      for (auto& slot : slots_) addresses.push_back(slot.data());
      ok(te_comm_peer_slot(channel, 0, addresses.data(), kBytes));
    }
  }
  ~Ranks() {
    for (te_comm_peer* channel : channels_) te_comm_peer_destroy(channel);
    std::free(words_);
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  te_comm_peer* operator[](int32_t rank) const { return channels_[size_t(rank)]; }
  char* slot(int32_t rank) { return slots_[size_t(rank)].data(); }
  te::comm::Words words() const { return {words_, ranks_}; }

  // Every rank's part, each in a thread of its own.
  template <class Part>
  void run(Part&& part) const {
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < ranks_; ++rank) threads.emplace_back([&, rank] { part(rank); });
    for (std::thread& thread : threads) thread.join();
  }

  // One byte of every rank goes to every rank.
  void call(int32_t rank, const char* text, char value) const {
    te_comm_peer* const channel = channels_[size_t(rank)];
    ok(te_comm_peer_begin(channel, 0, text));
    ok(te_comm_peer_follow(channel, nullptr));
    for (int32_t to = 0; to < ranks_; ++to) {
      if (to == rank) continue;
      ok(te_comm_peer_push(channel, 0, to, size_t(rank), 1, &value, 1, 1, 1));
      ok(te_comm_peer_signal(channel, 0, to));
    }
    for (int32_t from = 0; from < ranks_; ++from) {
      if (from != rank) ok(te_comm_peer_wait(channel, 0, from, nullptr));
    }
  }
  void done(int32_t rank) const {
    for (int32_t from = 0; from < ranks_; ++from) {
      if (from != rank) ok(te_comm_peer_done(channels_[size_t(rank)], 0, from, nullptr, 0, nullptr));
    }
  }

  te_comm_peer_failure_info failure(int32_t rank) const {
    te_comm_peer_failure_info info;
    ok(te_comm_peer_failure(channels_[size_t(rank)], &info));
    return info;
  }

 private:
  const int32_t ranks_;
  void* words_ = nullptr;
  std::vector<te_comm_peer*> channels_;
  std::vector<std::vector<char>> slots_;
};

TEST(CommPeer, WhatIsPushedIsThereAndStaysUntilItWasRead) {
  for (const int32_t ranks : {2, 3, 5}) {
    Ranks all(ranks);
    std::vector<int> wrong(size_t(ranks), 0);
    all.run([&](int32_t rank) {
      std::mt19937 generator{unsigned(rank)};
      for (int again = 0; again < 300; ++again) {
        all.call(rank, again % 2 ? "odd" : "even", char(again + rank));
        if (generator() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
        for (int32_t from = 0; from < ranks; ++from) {
          if (from != rank && all.slot(rank)[from] != char(again + from)) ++wrong[size_t(rank)];
        }
        all.done(rank);
      }
    });
    EXPECT_EQ(std::count(wrong.begin(), wrong.end(), 0), ranks);
    EXPECT_EQ(all.failure(0).trouble, TE_COMM_PEER_SOUND);
  }
}

// Words of all other ranks in one operation, and own rows beside them; each rank has one queue, its thread, in which a
// wait blocks all later work. Mutants: an own copy that goes nowhere, a wait ahead of this rank's own signal.
TEST(CommPeer, AllOthersAtOnce) {
  constexpr int32_t kRanks = 4;
  Ranks all(kRanks);
  std::vector<int> wrong(kRanks, 0);
  all.run([&](int32_t rank) {
    te_comm_peer* const channel = all[rank];
    for (int again = 0; again < 200; ++again) {
      const char value = char(again + rank);
      ok(te_comm_peer_begin(channel, 0, "all"));
      ok(te_comm_peer_follow(channel, nullptr));
      for (int32_t to = 0; to < kRanks; ++to) ok(te_comm_peer_push(channel, 0, to, size_t(rank), 1, &value, 1, 1, 1));
      ok(te_comm_peer_signal(channel, 0, TE_COMM_PEER_OTHERS));
      ok(te_comm_peer_wait(channel, 0, TE_COMM_PEER_OTHERS, nullptr));
      ok(te_comm_peer_wait(channel, 0, rank, nullptr));
      for (int32_t from = 0; from < kRanks; ++from) wrong[size_t(rank)] += all.slot(rank)[from] != char(again + from);
      ok(te_comm_peer_join(channel, 0, nullptr));
      ok(te_comm_peer_done(channel, 0, TE_COMM_PEER_OTHERS, nullptr, 0, nullptr));
    }
  });
  EXPECT_EQ(std::count(wrong.begin(), wrong.end(), 0), kRanks);
  EXPECT_EQ(all.failure(0).trouble, TE_COMM_PEER_SOUND);
}

TEST(CommPeer, RowsWithPitches) {
  Ranks all(2);
  const char rows[] = "ab..cd..ef";
  all.run([&](int32_t rank) {
    te_comm_peer* const channel = all[rank];
    ok(te_comm_peer_begin(channel, 0, "rows"));
    ok(te_comm_peer_push(channel, 0, 1 - rank, 10, 3, rows, 4, 2, 3));
    ok(te_comm_peer_signal(channel, 0, 1 - rank));
    ok(te_comm_peer_wait(channel, 0, 1 - rank, nullptr));
  });
  EXPECT_EQ(std::string(all.slot(0) + 10, 8), std::string("ab\0cd\0ef", 8));
}

TEST(CommPeer, RanksInDifferentCallsAreBothNamed) {
  Ranks all(2);
  all.run([&](int32_t rank) { all.call(rank, rank == 0 ? "apples" : "pears", 1); });
  for (const int32_t rank : {0, 1}) {
    const te_comm_peer_failure_info info = all.failure(rank);
    EXPECT_EQ(info.trouble, TE_COMM_PEER_OTHER);
    EXPECT_EQ(std::string(info.op), info.rank == 0 ? "apples" : "pears");
    EXPECT_EQ(std::string(info.other), info.rank == 0 ? "pears" : "apples");
    float value = 1;
    ok(te_comm_peer_poison(all[rank], &value, sizeof value, nullptr));
    EXPECT_NE(value, value);
  }
}

TEST(CommPeer, ALateRankEndsTheWaitAtTheDeadlineAndLaterWaitsAtOnce) {
  Ranks all(2, 0.3);
  const auto began = Clock::now();
  all.call(0, "alone", 1);
  for (int again = 0; again < 100; ++again) all.call(0, "again", 1);
  const double seconds = std::chrono::duration<double>(Clock::now() - began).count();
  EXPECT_GT(seconds, 0.25);
  EXPECT_LT(seconds, 15) << "a deadline for each of the later calls takes 30";
  for (const int32_t rank : {0, 1}) {
    EXPECT_EQ(all.failure(rank).trouble, TE_COMM_PEER_LATE);
    EXPECT_EQ(all.failure(rank).peer, 1);
    EXPECT_EQ(std::string(all.failure(rank).op), "alone");
  }
}

TEST(CommPeer, WaitsThatEachEndInTimeAreNotOneLongWait) {
  Ranks all(2, 1);  // a thread of a busy machine may start again late
  all.run([&](int32_t rank) {
    for (int again = 0; again < 15; ++again) {
      if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      all.call(rank, "the same", 1);
      all.done(rank);
    }
  });
  EXPECT_EQ(all.failure(0).trouble, TE_COMM_PEER_SOUND);
}

// A separate process, which is stopped for longer than the deadline while its rank waits: that time does not count.
TEST(CommPeer, TimeThatThisProcessWasStoppedForDoesNotCount) {
  const pid_t child = fork();
  if (child == 0) {
    Ranks all(2, 1.5);
    std::thread waits([&] { all.call(0, "a call", 1); });
    while (te::comm::word(all.words().line(0, 0, 1).expected_arrived).load() == 0) std::this_thread::yield();
    raise(SIGSTOP);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // looks at the clock
    all.call(1, "a call", 1);
    waits.join();
    _exit(all.failure(0).trouble == TE_COMM_PEER_SOUND ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, WUNTRACED), child);
  ASSERT_TRUE(WIFSTOPPED(status));
  std::this_thread::sleep_for(std::chrono::seconds(2));
  kill(child, SIGCONT);
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(CommPeer, AChannelOfTheCpuIsIdleBetweenCalls) {
  Ranks all(2);
  int32_t idle = 0;
  ok(te_comm_peer_idle(all[0], &idle));
  EXPECT_EQ(idle, 1);
  EXPECT_EQ(te_comm_peer_idle(all[0], nullptr), TE_INVALID_ARGUMENT);
}

TEST(CommPeer, ADeadProcessIsFoundLongBeforeTheDeadline) {
  Ranks all(2);
  const pid_t child = fork();
  if (child == 0) _exit(0);
  all.words().member(1).pid = uint32_t(child);  // a zombie, until its parent reads its status
  const auto began = Clock::now();
  all.call(0, "alone", 1);
  EXPECT_LT(std::chrono::duration<double>(Clock::now() - began).count(), 10);  // of 20
  EXPECT_EQ(all.failure(0).trouble, TE_COMM_PEER_DEAD);
  EXPECT_EQ(all.failure(0).peer, 1);
  waitpid(child, nullptr, 0);
}

TEST(CommPeer, AProcessThatEndsAfterAllPushesIsNoFailure) {
  Ranks all(2);
  all.run([&](int32_t rank) { all.call(rank, "the last", char(1 + rank)); });
  const pid_t child = fork();
  if (child == 0) _exit(0);
  all.words().member(1).pid = uint32_t(child);
  std::this_thread::sleep_for(std::chrono::milliseconds(700));
  EXPECT_EQ(all.failure(0).trouble, TE_COMM_PEER_SOUND);
  EXPECT_EQ(all.slot(0)[1], 2);
  all.done(0);
  all.done(1);
  all.call(0, "another", 1);
  EXPECT_EQ(all.failure(0).trouble, TE_COMM_PEER_DEAD);
  EXPECT_EQ(std::string(all.failure(0).op), "another");
  waitpid(child, nullptr, 0);
}

TEST(CommPeer, AForkedProcessHasNoPartInIt) {
  Ranks all(2);
  const pid_t child = fork();
  if (child == 0) {
    te_comm_peer_failure_info info;
    const bool refused = te_comm_peer_begin(all[0], 0, "x") == TE_RUNTIME_ERROR &&
                         te_comm_peer_failure(all[0], &info) == TE_RUNTIME_ERROR;
    te_comm_peer_destroy(all[0]);  // waits for no thread
    _exit(refused ? 0 : 1);
  }
  const auto began = Clock::now();
  int status = -1;
  while (waitpid(child, &status, WNOHANG) == 0 && Clock::now() - began < std::chrono::seconds(20)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (status == -1) kill(child, SIGKILL);
  EXPECT_EQ(status, 0);
  all.run([&](int32_t rank) { all.call(rank, "a call", 1); });
  EXPECT_EQ(all.failure(0).trouble, TE_COMM_PEER_SOUND);
}

TEST(CommPeer, APidThatIsUsedAgainIsAnotherProcess) {
  Ranks all(2);
  all.words().member(1).start += 1;
  all.call(0, "alone", 1);
  EXPECT_EQ(all.failure(0).trouble, TE_COMM_PEER_DEAD);
}

TEST(CommPeer, AWaitForARankThatClosedItsChannelEnds) {
  Ranks all(2, 60);
  all.words().member(1).left = 1;
  const auto began = Clock::now();
  all.call(0, "alone", 1);
  EXPECT_LT(std::chrono::duration<double>(Clock::now() - began).count(), 10);
  EXPECT_EQ(all.failure(0).trouble, TE_COMM_PEER_LEFT);
  EXPECT_EQ(all.failure(0).peer, 1);
}

// Like waiting streams, which do not read the failure word.
TEST(CommPeer, AwaitedWordsAreSetAfterAFailure) {
  Ranks all(2);
  ok(te_comm_peer_give_up(all[1], "raised"));
  te::comm::Line& line = all.words().line(0, 0, 1);
  te::comm::word(line.expected_arrived).store(77);
  const auto began = Clock::now();
  while (te::comm::word(line.arrived).load() != 77 && Clock::now() - began < std::chrono::seconds(10)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(te::comm::word(line.arrived).load(), 77U);
}

TEST(CommPeer, ACallThatIsGivenUpEndsTheOthers) {
  Ranks all(2);
  all.run([&](int32_t rank) {
    if (rank == 0) return all.call(rank, "a call", 1);
    ok(te_comm_peer_give_up(all[rank], "raised"));
  });
  EXPECT_EQ(all.failure(0).trouble, TE_COMM_PEER_LEFT);
  EXPECT_EQ(std::string(all.failure(0).op), "raised");
}

TEST(CommPeer, Refusals) {
  size_t bytes = 0;
  EXPECT_EQ(te_comm_peer_bytes(1, &bytes), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_comm_peer_bytes(2, nullptr), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_comm_peer_create(nullptr, nullptr), TE_INVALID_ARGUMENT);
  Ranks all(2);
  const char value = 0;
  EXPECT_EQ(te_comm_peer_begin(all[0], TE_COMM_PEER_SLOTS, "x"), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_comm_peer_push(all[0], 1, 1, 0, 1, &value, 1, 1, 1), TE_INVALID_ARGUMENT);  // no such memory
  ok(te_comm_peer_begin(all[0], 0, "x"));
  EXPECT_EQ(te_comm_peer_push(all[0], 0, 1, kBytes, 1, &value, 1, 1, 1), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_comm_peer_push(all[0], 0, 2, 0, 1, &value, 1, 1, 1), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_comm_peer_wait(all[0], 0, -2, nullptr), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_comm_peer_signal(all[0], 0, 0), TE_INVALID_ARGUMENT);  // a rank does not await its own word
  EXPECT_EQ(te_comm_peer_done(all[0], 0, 0, nullptr, 0, nullptr), TE_INVALID_ARGUMENT);
}

}  // namespace
