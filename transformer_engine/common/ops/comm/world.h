// Virtual ranks: lanes of steps with their waits, and the walk over them. What a step does is a function; what the
// steps of a call are is calls.cpp's.
#pragma once

#include <deque>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "ops/comm/arena.h"
#include "transformer_engine/comm.h"

namespace te::comm {

// A counter has to have come so far; not asked for where its bit is left out.
struct Need {
  te_comm_wait wait;
  const int64_t* counter;
  int64_t at_least;
};

struct Step {
  te_comm_event event;
  std::vector<Need> needs;
  std::function<void()> work;  // may be empty
};

struct Lane {
  std::deque<Step> queue;
  int64_t queued = 0;  // in all
  int64_t done = 0;

  void add(Step step) {
    queue.push_back(std::move(step));
    ++queued;
  }
};

struct Rank {
  explicit Rank(int32_t ranks) : arena(ranks) {}
  Lane compute, copy;
  Arena arena;
};

class World {
 public:
  explicit World(const te_comm_world_options& options);

  void queue(const char* op, const te_comm_call& call);
  void run(const char* op);

  const te_comm_world_options& options() const { return options_; }
  const std::vector<te_comm_event>& trace() const { return trace_; }
  const Arena& arena(int32_t rank) const { return ranks_[size_t(rank)].arena; }

 private:
  friend class CallQueue;

  bool ready(const Step& step) const;
  void walk(Lane& lane);
  [[noreturn]] void stuck(const char* op) const;

  te_comm_world_options options_;
  std::deque<Rank> ranks_;
  std::vector<Lane*> order_;  // the first that can go on goes on
  std::mt19937_64 generator_;
  std::vector<te_comm_event> trace_;
  int32_t calls_ = 0;
};

}  // namespace te::comm
