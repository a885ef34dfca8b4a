// Executes the queued steps of all virtual ranks.
#include "virtual_ranks/world.h"

namespace te::testing {

namespace {

constexpr const char* kOp = "virtual ranks";
constexpr const char* kSteps[] = {"push", "wait", "gemm", "sum", "wgrad", "join", "release"};
constexpr uint64_t kKept = 8;  // steps, on average, before the order changes: long enough to let a rank run ahead

}  // namespace

World::World(const WorldOptions& options) : options_(options), generator_(options.seed) {
  if (options.ranks < 1 || options.ranks > TE_COMM_MOST_RANKS) {
    bad_argument(kOp, "options.ranks", options.ranks, concat("a number from 1 to ", TE_COMM_MOST_RANKS));
  }
  if (options.buffers != 1 && options.buffers != 2) bad_argument(kOp, "options.buffers", options.buffers, "1 or 2");
  for (int32_t rank = 0; rank < options.ranks; ++rank) {
    ranks_.emplace_back(options.ranks);
    order_.push_back(&ranks_.back().compute);
    order_.push_back(&ranks_.back().copy);
  }
}

bool World::is_ready(const Step& step) const {
  return std::all_of(step.needs.begin(), step.needs.end(), [&](const Need& need) {
    return (options_.left_out & need.wait) != 0 || *need.counter >= need.at_least;
  });
}

void World::execute(Stream& stream) {
  const Step step = std::move(stream.queue.front());
  stream.queue.pop_front();
  if (step.work) step.work();
  if (options_.trace) trace_.push_back(step.event);
  ++stream.done;
}

void World::report_deadlock() const {
  for (const Stream* stream : order_) {
    if (stream->queue.empty()) continue;
    const Event& event = stream->queue.front().event;
    throw Error(TE_RUNTIME_ERROR, concat(kOp, ": no step is ready; rank ", event.rank, " waits before ",
                                         kSteps[int(event.kind)], " of call ", event.call, ", peer ", event.peer, "."));
  }
  throw Error(TE_RUNTIME_ERROR, concat(kOp, ": no step is ready."));
}

void World::run() {
  try {
    while (true) {
      if (generator_() % kKept == 0) std::shuffle(order_.begin(), order_.end(), generator_);
      const auto found = std::find_if(order_.begin(), order_.end(), [&](const Stream* stream) {
        return !stream->queue.empty() && is_ready(stream->queue.front());
      });
      if (found != order_.end()) {
        execute(**found);
        continue;
      }
      if (std::all_of(order_.begin(), order_.end(), [](const Stream* stream) { return stream->queue.empty(); })) break;
      report_deadlock();
    }
  } catch (...) {
    for (Stream* stream : order_) {
      stream->queue.clear();
      stream->done = stream->queued;
    }
    for (Rank& rank : ranks_) rank.pool.end_uses();
    throw;
  }
  for (Rank& rank : ranks_) rank.pool.release_outgrown();
}

}  // namespace te::testing
