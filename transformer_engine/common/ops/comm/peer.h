// A channel between ranks of one machine: the shared words, the operations that set and await them (peer_verbs.h, on
// the CPU or on CUDA streams), and the thread that watches them. Independent of the pushed data.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "ops/comm/peer_verbs.h"
#include "transformer_engine/comm_peer.h"

namespace te::comm {

constexpr int kSlots = TE_COMM_PEER_SLOTS;
constexpr int kTexts = 64;  // calls whose text a rank keeps

struct Text {
  uint32_t hash;
  char text[TE_COMM_PEER_TEXT];
};

struct alignas(64) Member {
  uint32_t pid;    // 0: not created yet
  uint32_t left;   // 1: closed its channel
  uint64_t start;  // of its process, to detect a reused pid
  uint32_t texts;  // number of texts written
  Text text[kTexts];
};

struct alignas(64) Shared {
  uint32_t failed;   // read by poisoning kernels; 1 after info is complete
  uint32_t claimed;  // by the writer of info
  te_comm_peer_failure_info info;
};

inline std::atomic_ref<uint32_t> word(uint32_t& w) { return std::atomic_ref<uint32_t>(w); }

// The shared memory: Shared, members by rank, lines [slot][owner][peer].
class Words {
 public:
  Words(void* memory, int32_t ranks) : base_(static_cast<char*>(memory)), ranks_(ranks) {}
  static size_t bytes(int32_t ranks) {
    return sizeof(Shared) + size_t(ranks) * sizeof(Member) +
           size_t(kSlots) * size_t(ranks) * size_t(ranks) * sizeof(Line);
  }
  Shared& shared() const { return *reinterpret_cast<Shared*>(base_); }
  Member& member(int32_t rank) const { return reinterpret_cast<Member*>(base_ + sizeof(Shared))[rank]; }
  Line& line(int32_t slot, int32_t owner, int32_t peer) const {
    Line* lines = reinterpret_cast<Line*>(base_ + sizeof(Shared) + size_t(ranks_) * sizeof(Member));
    return lines[(int64_t(slot) * ranks_ + owner) * ranks_ + peer];
  }
  bool failed() const { return word(shared().failed).load(std::memory_order_acquire) != 0; }

 private:
  char* base_;
  int32_t ranks_;
};

std::unique_ptr<Verbs> cpu_verbs(const Words& words);

// Fails the channel; the first failure is kept.
void fail(const Words& words, te_comm_peer_trouble trouble, int32_t rank, int32_t peer, bool freeing,
          const std::string& op, const std::string& other);

uint32_t hash_of(const char* text);

// Watches its own rank's lines until it is destroyed.
class Watch {
 public:
  Watch(const Words& words, int32_t ranks, int32_t rank, double timeout_s);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  struct Seen {
    double arrived = 0, freed = 0;  // durations
  };

  void run();
  void look(double passed);
  void look_at(uint32_t& value, uint32_t& expected, double& seen, double passed, int32_t peer, bool freeing);
  void look_for_dead();
  std::string last_words() const;
  std::string text_of(int32_t rank, uint32_t hash) const;

  const Words words_;
  const int32_t ranks_, rank_;
  const double timeout_s_;
  std::vector<Seen> seen_;
  std::vector<bool> dead_;  // by peer
  std::mutex mutex_;
  std::condition_variable stop_signal_;
  bool stop_ = false;
  std::thread thread_;
};

// 0 if there is no such process, or if it is a zombie.
uint64_t process_start(uint32_t pid);

}  // namespace te::comm
