// One call of all virtual ranks as steps of their lanes: a plan's steps with what they do and what they wait for. The
// leases of the call end with its queueing; the slots' turns go on in the lanes.
#include "core/tensor.h"
#include "ops/comm/plan.h"
#include "ops/comm/world.h"
#include "transformer_engine/gemm.h"

namespace te::comm {

namespace {

enum Channel : int32_t { kGathered = 0, kInbox = 1, kPartials = 2 };

constexpr te_tensor kAbsent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};

te_tensor rows_in(const te_tensor& t, int64_t first, int64_t last) {
  te_tensor out = t;
  out.rows = last - first;
  if (t.data != nullptr) out.data = static_cast<char*>(t.data) + first * t.row_pitch * int64_t(te_dtype_bytes(t.dtype));
  return out;
}

void copy_rows(const te_tensor& from, const te_tensor& to) {
  const size_t element = te_dtype_bytes(from.dtype), bytes = size_t(from.cols) * element;
  for (int64_t row = 0; row < from.rows && bytes != 0; ++row) {
    std::memcpy(static_cast<char*>(to.data) + size_t(row * to.row_pitch) * element,
                static_cast<const char*>(from.data) + size_t(row * from.row_pitch) * element, bytes);
  }
}

void must(te_status status) {
  if (status != TE_SUCCESS) throw Error(status, te_last_error());
}

void multiply(te_gemm_layout layout, const te_tensor& a, const te_tensor& b, const te_tensor& bias, const te_tensor& d,
              bool loop) {
  te_gemm_problem problem{};
  problem.a = a;
  problem.b = b;
  problem.d = d;
  problem.bias = bias;
  problem.layout = layout;
  problem.epilogue = bias.data == nullptr ? TE_GEMM_NONE : TE_GEMM_BIAS;
  must(loop ? te_gemm_by_loop(&problem) : te_gemm(&problem, nullptr, 0, nullptr));
}

te_tensor dense(void* data, int64_t rows, int64_t cols, te_dtype dtype) {
  return {rows * cols == 0 ? nullptr : data, rows, cols, cols, dtype, TE_DEVICE_CPU};
}

// Sizes of a call, which every rank's tensors must have.
struct Sizes {
  int64_t rows, depth, cols, shard;
};

Sizes check_call(const char* op, const te_comm_call& call, int32_t ranks) {
  const bool gathers = call.op == TE_COMM_GATHER_PRODUCT;
  if (!gathers && call.op != TE_COMM_PRODUCT_SCATTER) bad_argument(op, "call.op", int(call.op), "a te_comm_op");
  if (call.source == nullptr) bad_argument(op, "call.source", "NULL", concat(ranks, " tensors"));
  if (call.weight == nullptr && !gathers) bad_argument(op, "call.weight", "NULL", concat(ranks, " tensors"));
  if (call.weight != nullptr && call.out == nullptr) bad_argument(op, "call.out", "NULL", concat(ranks, " tensors"));
  if ((call.other != nullptr) != (call.wgrad != nullptr) || (call.other != nullptr && !gathers)) {
    bad_argument(op, "call.other", "without its fellow", "both other and wgrad, of a gather, or neither");
  }
  const te_tensor& like = call.source[0];
  check_tensor(op, "call.source[0]", like);
  if (like.device != TE_DEVICE_CPU) bad_argument(op, "call.source[0]", device_of(like), "virtual ranks' memory: cpu");
  Sizes s{};
  s.rows = gathers ? like.rows * ranks : like.rows;
  s.depth = like.cols;
  if (call.weight != nullptr) s.cols = call.weight_by_depth != 0 ? call.weight[0].cols : call.weight[0].rows;
  if (s.rows % ranks != 0) bad_argument(op, "call.source[0]", shape_of(like), concat("rows that ", ranks, " divides"));
  s.shard = s.rows / ranks;
  const auto check = [&](const char* name, const te_tensor* tensors, int32_t rank, int64_t rows, int64_t cols) {
    if (tensors == nullptr) return;
    const std::string argument = concat(name, "[", rank, "]");
    check_as(op, argument.c_str(), tensors[rank], rows, cols, like);
  };
  const bool by_depth = call.weight_by_depth != 0, first = call.gathered_first != 0;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    check("call.source", call.source, rank, gathers ? s.shard : s.rows, s.depth);
    check("call.weight", call.weight, rank, by_depth ? s.depth : s.cols, by_depth ? s.cols : s.depth);
    if (call.weight != nullptr) {
      check("call.bias", call.bias, rank, 1, s.cols);
      check("call.out", call.out, rank, gathers ? s.rows : s.shard, s.cols);
    }
    if (call.other == nullptr) continue;
    const int64_t n = call.other[0].cols;
    check("call.other", call.other, rank, s.rows, n);
    check("call.wgrad", call.wgrad, rank, first ? s.depth : n, first ? n : s.depth);
  }
  return s;
}

}  // namespace

class CallQueue {
 public:
  CallQueue(const char* op, World& world, const te_comm_call& call)
      : op_(op), world_(world), ranks_(world.options_.ranks), call_(call), s_(check_call(op, call, ranks_)) {}

  void queue() {
    const bool gathers = call_.op == TE_COMM_GATHER_PRODUCT;
    std::vector<StepPlan> plans;
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      const te_comm_schedule schedule = call_.weight == nullptr ? TE_COMM_SERIAL : call_.schedule;
      plans.push_back(make_plan(
          op_, {call_.op, schedule, s_.rows, s_.depth, s_.cols, ranks_, rank, call_.source[0].dtype, call_.costs}));
    }
    const bool alone = ranks_ == 1 || s_.rows == 0;
    for (int32_t rank = 0; rank < ranks_ && !alone; ++rank) {
      slots_.push_back(lease(rank, gathers ? kGathered : kInbox, world_.options_.slots, gathers ? s_.depth : s_.cols));
      if (!gathers) partials_.push_back(lease(rank, kPartials, 1, s_.cols));
    }
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      rank_ = rank;
      fork_ = lanes().compute.queued;
      computed_ = fork_;
      for (const te_comm_step& step : plans[size_t(rank)].steps) add(step, alone);
      if (call_.other != nullptr) add_wgrad(alone);
      if (!alone) end();
    }
    ++world_.calls_;
  }

 private:
  Rank& lanes() { return world_.ranks_[size_t(rank_)]; }
  te_dtype dtype() const { return call_.source[0].dtype; }
  bool gathers() const { return call_.op == TE_COMM_GATHER_PRODUCT; }
  bool loop() const { return world_.options_.loop != 0; }

  Lease lease(int32_t rank, Channel channel, int slots, int64_t cols) {
    const size_t bytes = size_t(s_.rows * cols) * te_dtype_bytes(dtype());
    const bool shared = (world_.options_.left_out & TE_COMM_LEASES) != 0 && channel != kPartials;
    const SlotKey key{rank, 0, shared ? kGathered : channel};
    return world_.ranks_[size_t(rank)].arena.lease(key, shared ? 1 : slots, bytes, shared);
  }

  // What the rank's slot holds: all rows gathered; or by rank its partials of the own rows.
  te_tensor gathered(int32_t rank) const { return dense(slots_[size_t(rank)].data(), s_.rows, s_.depth, dtype()); }
  te_tensor inbox(int32_t rank, int32_t from) const {
    return rows_in(dense(slots_[size_t(rank)].data(), s_.rows, s_.cols, dtype()), from * s_.shard,
                   (from + 1) * s_.shard);
  }
  te_tensor partials() const { return dense(partials_[size_t(rank_)].data(), s_.rows, s_.cols, dtype()); }

  te_comm_event event(te_comm_step_kind kind, int32_t peer = -1, int64_t first = 0, int64_t last = 0) const {
    return {rank_, world_.calls_, kind, peer, first, last};
  }

  void add(const te_comm_step& step, bool alone) {
    const te_comm_event noted = event(step.kind, step.peer, step.first, step.last);
    switch (step.kind) {
      case TE_COMM_STEP_PUSH:
        return add_push(noted);
      case TE_COMM_STEP_WAIT: {
        const Lease& slot = slots_[size_t(rank_)];
        const int64_t* arrived = &slot.slot().arrived[size_t(step.peer)];
        return lanes().compute.add({noted, {{TE_COMM_WAIT_ARRIVED, arrived, slot.turn()}}, {}});
      }
      case TE_COMM_STEP_GEMM:
        if (call_.weight != nullptr) add_gemm(noted, alone);
        return;
      default:
        return add_sum(noted);
    }
  }

  void add_push(const te_comm_event& noted) {
    const Lease& target = slots_[size_t(noted.peer)];
    std::vector<Need> needs;
    const Lane& compute = lanes().compute;
    if (!gathers()) {
      needs.push_back({TE_COMM_WAIT_COMPUTED, &compute.done, computed_});
    } else if (call_.source_ready == 0) {
      needs.push_back({TE_COMM_WAIT_PRODUCED, &compute.done, fork_});
    }
    const bool turns = (world_.options_.left_out & TE_COMM_LEASES) == 0;
    if (turns) needs.push_back({TE_COMM_WAIT_FREE, &target.slot().freed, target.turn() - 1});
    const te_tensor from = gathers() ? call_.source[rank_] : rows_in(partials(), noted.first, noted.last);
    const te_tensor to = gathers() ? rows_in(gathered(noted.peer), noted.first, noted.last) : inbox(noted.peer, rank_);
    lanes().copy.add({noted, needs, [from, to, arrived = &target.slot().arrived[size_t(rank_)], turn = target.turn()] {
                        copy_rows(from, to);
                        *arrived = turn;
                      }});
  }

  void add_gemm(const te_comm_event& noted, bool alone) {
    const int64_t own = rank_ * s_.shard;
    const bool own_alone = noted.first >= own && noted.last <= own + s_.shard;
    te_tensor b{}, d{};
    if (gathers()) {
      b = own_alone ? rows_in(call_.source[rank_], noted.first - own, noted.last - own)
                    : rows_in(gathered(rank_), noted.first, noted.last);
      d = rows_in(call_.out[rank_], noted.first, noted.last);
    } else {
      b = rows_in(call_.source[rank_], noted.first, noted.last);
      d = rows_in(alone ? call_.out[rank_] : partials(), noted.first, noted.last);
    }
    const te_tensor bias = call_.bias != nullptr && (gathers() || alone) ? call_.bias[rank_] : kAbsent;
    const te_gemm_layout layout = call_.weight_by_depth != 0 ? TE_GEMM_NN : TE_GEMM_TN;
    lanes().compute.add({noted, {}, [layout, a = call_.weight[rank_], b, bias, d, by_loop = loop()] {
                           multiply(layout, a, b, bias, d, by_loop);
                         }});
    computed_ = lanes().compute.queued;
  }

  void add_sum(const te_comm_event& noted) {
    std::vector<te_tensor> parts;
    for (int32_t from = 0; from < ranks_; ++from) {
      parts.push_back(from == rank_ ? rows_in(partials(), noted.first, noted.last) : inbox(rank_, from));
    }
    const te_tensor bias = call_.bias != nullptr ? call_.bias[rank_] : kAbsent;
    lanes().compute.add({noted, {}, [parts, bias, out = call_.out[rank_]] {
                           must(te_comm_ordered_sum(parts.data(), int32_t(parts.size()), bias, out, nullptr));
                         }});
  }

  void add_wgrad(bool alone) {
    const te_tensor all = alone ? call_.source[rank_] : gathered(rank_);
    const te_tensor other = call_.other[rank_];
    const bool first = call_.gathered_first != 0;
    lanes().compute.add({event(TE_COMM_STEP_WGRAD, -1, 0, s_.rows),
                         {},
                         [a = first ? other : all, b = first ? all : other, d = call_.wgrad[rank_], by_loop = loop()] {
                           multiply(TE_GEMM_NT, a, b, kAbsent, d, by_loop);
                         }});
  }

  // The lanes rejoin, then the slots are given back.
  void end() {
    Lane& compute = lanes().compute;
    compute.add({event(TE_COMM_STEP_JOIN), {{TE_COMM_WAIT_PUSHED, &lanes().copy.done, lanes().copy.queued}}, {}});
    give_back(slots_[size_t(rank_)]);
    if (!gathers()) give_back(partials_[size_t(rank_)]);
  }

  void give_back(const Lease& lease) {
    const size_t poisoned = world_.options_.debug != 0 ? lease.bytes() : 0;
    lanes().compute.add({event(TE_COMM_STEP_RELEASE),
                         {},
                         [data = lease.data(), poisoned, freed = &lease.slot().freed, turn = lease.turn()] {
                           if (poisoned != 0) std::memset(data, kSlotPoison, poisoned);
                           *freed = turn;
                         }});
  }

  const char* op_;
  World& world_;
  const int32_t ranks_;
  const te_comm_call& call_;
  const Sizes s_;
  std::vector<Lease> slots_, partials_;
  int32_t rank_ = 0;
  int64_t fork_ = 0;      // of the lane that computes, before the call
  int64_t computed_ = 0;  // behind its last product so far
};

void World::queue(const char* op, const te_comm_call& call) { CallQueue(op, *this, call).queue(); }

}  // namespace te::comm
