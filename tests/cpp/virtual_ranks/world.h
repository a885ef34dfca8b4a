// Virtual ranks: t ranks in one process on the CPU, which show that te_comm_plan's steps and the reuse of buffers are
// right. Each rank has a compute and a copy stream. Calls are queued to both; run() executes the steps of all streams
// in an order drawn by a seed, restricted by the waits alone.
#pragma once

#include <deque>
#include <functional>
#include <random>
#include <vector>

#include "transformer_engine/comm.h"
#include "virtual_ranks/buffers.h"

namespace te::testing {

// Waits between streams and ranks; as bits, those that a world leaves out, so that races are seen.
enum Wait : uint32_t {
  kWaitProduced = 1,  // a push, for the computation of its source
  kWaitComputed = 2,  // a push of partials, for their product
  kWaitArrived = 4,   // products and sums, for a peer's push
  kWaitFree = 8,      // a push, for the buffer's previous use
  kWaitPushed = 16,   // the end of a call, for its pushes
  kExclusive = 32     // no wait: without it all calls of a rank share one buffer
};

enum class StepKind { kPush, kWait, kGemm, kSum, kWgrad, kJoin, kRelease };  // the first four: te_comm_step_kind

// One executed step. call: counted from 0 on; first, last, peer: those of te_comm_step.
struct Event {
  int32_t rank;
  int32_t call;
  StepKind kind;
  int32_t peer;
  int64_t first;
  int64_t last;
};

struct WorldOptions {
  int32_t ranks;      // 1 to TE_COMM_MOST_RANKS
  int32_t buffers;    // of a channel that peers push to: 1 or 2
  uint64_t seed;      // of the order
  bool by_loop;       // products by te_gemm_by_loop, whose bits do not depend on the runs; else by te_gemm
  bool poison;        // a buffer is filled with NaN after its use
  bool trace;         // record every step
  uint32_t left_out;  // Wait bits
};

// The seed gives the order and the number of buffers.
inline WorldOptions options_of(int32_t ranks, uint64_t seed) {
  return {ranks, 1 + int32_t(seed % 2), seed, /*by_loop=*/true, /*poison=*/true, /*trace=*/false, /*left_out=*/0};
}

// One call of every rank; arrays have a tensor for each rank, all of one dtype that te_gemm accepts.
//   GATHER_PRODUCT   source [rows / t, depth]; out [rows, cols] = the gathered [rows, depth] x weight + bias [1, cols].
//     Without a weight nothing is multiplied, and out is ignored. With other [rows, n] the gathered rows enter a second
//     product: wgrad [n, depth] = other^T x gathered; with gathered_first wgrad [depth, n] = gathered^T x other.
//   PRODUCT_SCATTER  source [rows, depth]; out [rows / t, cols] = the own rows of the ordered sum of source x weight,
//     with bias.
// weight: [cols, depth], or [depth, cols] with weight_by_depth. The memory of the tensors must stay until run() has
// returned. Calls of a rank compute in the order in which they were queued.
struct CommCall {
  te_comm_op op;
  te_comm_schedule schedule;
  te_comm_costs costs;
  const te_tensor* source;
  const te_tensor* weight;
  const te_tensor* bias;  // NULL: none
  const te_tensor* out;
  const te_tensor* other;  // NULL: no second product
  const te_tensor* wgrad;
  bool weight_by_depth;
  bool gathered_first;
  bool source_ready;  // no queued call writes the source, so that its push does not wait for earlier computations
};

// A counter that has to reach a value, unless its wait is left out.
struct Need {
  Wait wait;
  const int64_t* counter;
  int64_t at_least;
};

struct Step {
  Event event;
  std::vector<Need> needs;
  std::function<void()> work;  // may be empty
};

struct Stream {
  std::deque<Step> queue;
  int64_t queued = 0;  // in all
  int64_t done = 0;

  void add(Step step) {
    queue.push_back(std::move(step));
    ++queued;
  }
};

struct Rank {
  explicit Rank(int32_t ranks) : pool(ranks) {}
  Stream compute, copy;
  BufferPool pool;
};

class World {
 public:
  explicit World(const WorldOptions& options);

  // Queues a call: computes nothing, but buffers may grow. Throws te::Error for a bad argument; nothing is queued then.
  void queue(const CommCall& call);
  // Executes all queued steps. Throws te::Error, naming a step, if none is ready; the queues are empty then.
  void run();

  const std::vector<Event>& trace() const { return trace_; }
  size_t pool_bytes(int32_t rank) const { return ranks_[size_t(rank)].pool.bytes(); }

 private:
  friend class CallQueue;

  bool is_ready(const Step& step) const;
  void execute(Stream& stream);
  [[noreturn]] void report_deadlock() const;

  WorldOptions options_;
  std::deque<Rank> ranks_;
  std::vector<Stream*> order_;  // the first with a ready step executes it
  std::mt19937_64 generator_;
  std::vector<Event> trace_;
  int32_t calls_ = 0;
};

}  // namespace te::testing
