// The walk over the lanes of all virtual ranks, and the C API of worlds.
#include "ops/comm/world.h"

#include <algorithm>

#include "core/error.h"

struct te_comm_world : te::comm::World {
  using World::World;
};

namespace te::comm {

namespace {

constexpr const char* kSteps[] = {"push", "wait", "gemm", "sum", "wgrad", "join", "release"};
constexpr uint64_t kKept = 8;  // steps, on average, for which an order is kept: long enough to let a rank run ahead

te_comm_world& world_of(const char* op, const te_comm_world* world) {
  if (world == nullptr) bad_argument(op, "world", "NULL", "one that was created");
  return const_cast<te_comm_world&>(*world);
}

void check_options(const char* op, const te_comm_world_options* options) {
  if (options == nullptr) bad_argument(op, "options", "NULL", "options");
  if (options->ranks < 1 || options->ranks > TE_COMM_MOST_RANKS) {
    bad_argument(op, "options.ranks", options->ranks, concat("a number from 1 to ", TE_COMM_MOST_RANKS));
  }
  if (options->slots != 1 && options->slots != 2) bad_argument(op, "options.slots", options->slots, "1 or 2");
}

}  // namespace

World::World(const te_comm_world_options& options) : options_(options), generator_(options.seed) {
  for (int32_t rank = 0; rank < options.ranks; ++rank) {
    ranks_.emplace_back(options.ranks);
    order_.push_back(&ranks_.back().compute);
    order_.push_back(&ranks_.back().copy);
  }
}

bool World::ready(const Step& step) const {
  return std::all_of(step.needs.begin(), step.needs.end(), [&](const Need& need) {
    return (options_.left_out & need.wait) != 0 || *need.counter >= need.at_least;
  });
}

void World::walk(Lane& lane) {
  const Step step = std::move(lane.queue.front());
  lane.queue.pop_front();
  if (step.work) step.work();
  if (options_.trace != 0) trace_.push_back(step.event);
  ++lane.done;
}

void World::stuck(const char* op) const {
  for (const Lane* lane : order_) {
    if (lane->queue.empty()) continue;
    const te_comm_event& event = lane->queue.front().event;
    throw Error(TE_RUNTIME_ERROR, concat(op, ": nobody can go on; rank ", event.rank, " stands before ",
                                         kSteps[event.kind], " of call ", event.call, ", peer ", event.peer, "."));
  }
  throw Error(TE_RUNTIME_ERROR, concat(op, ": nobody can go on."));
}

void World::run(const char* op) {
  try {
    while (true) {
      if (generator_() % kKept == 0) std::shuffle(order_.begin(), order_.end(), generator_);
      const auto found = std::find_if(order_.begin(), order_.end(), [&](const Lane* lane) {
        return !lane->queue.empty() && ready(lane->queue.front());
      });
      if (found != order_.end()) {
        walk(**found);
        continue;
      }
      const bool empty = std::all_of(order_.begin(), order_.end(), [](const Lane* l) { return l->queue.empty(); });
      if (empty) break;
      stuck(op);
    }
  } catch (...) {
    for (Lane* lane : order_) {
      lane->queue.clear();
      lane->done = lane->queued;
    }
    for (Rank& rank : ranks_) rank.arena.end_turns();
    throw;
  }
  for (Rank& rank : ranks_) rank.arena.release_outgrown();
}

}  // namespace te::comm

extern "C" {

using te::bad_argument;
using te::c_guard;

te_status te_comm_world_create(const te_comm_world_options* options, te_comm_world** out) {
  return c_guard([&] {
    const char* op = "te_comm_world_create";
    te::comm::check_options(op, options);
    if (out == nullptr) bad_argument(op, "out", "NULL", "a place for the result");
    *out = new te_comm_world(*options);
  });
}

te_status te_comm_world_destroy(te_comm_world* world) {
  return c_guard([&] { delete &te::comm::world_of("te_comm_world_destroy", world); });
}

te_status te_comm_world_call(te_comm_world* world, const te_comm_call* call) {
  return c_guard([&] {
    const char* op = "te_comm_world_call";
    if (call == nullptr) bad_argument(op, "call", "NULL", "a call");
    te::comm::world_of(op, world).queue(op, *call);
  });
}

te_status te_comm_world_run(te_comm_world* world) {
  return c_guard([&] { te::comm::world_of("te_comm_world_run", world).run("te_comm_world_run"); });
}

te_status te_comm_world_trace(const te_comm_world* world, int64_t first, int64_t most, te_comm_event* events,
                              int64_t* count) {
  return c_guard([&] {
    const char* op = "te_comm_world_trace";
    const auto& trace = te::comm::world_of(op, world).trace();
    if (first < 0) bad_argument(op, "first", first, "a number >= 0");
    if (most < 0) bad_argument(op, "most", most, "a number >= 0");
    if (events == nullptr && most != 0) bad_argument(op, "events", "NULL", "room for `most` events");
    if (count == nullptr) bad_argument(op, "count", "NULL", "a place for the result");
    *count = int64_t(trace.size());
    for (int64_t i = 0; i < most && first + i < *count; ++i) events[i] = trace[size_t(first + i)];
  });
}

te_status te_comm_world_arena(const te_comm_world* world, int32_t rank, size_t* bytes) {
  return c_guard([&] {
    const char* op = "te_comm_world_arena";
    const te_comm_world& found = te::comm::world_of(op, world);
    if (rank < 0 || rank >= found.options().ranks) {
      bad_argument(op, "rank", rank, te::concat("0 to ", found.options().ranks - 1));
    }
    if (bytes == nullptr) bad_argument(op, "bytes", "NULL", "a place for the result");
    *bytes = found.arena(rank).bytes();
  });
}

}  // extern "C"
