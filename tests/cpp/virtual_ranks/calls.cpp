// Queues a call of all virtual ranks as steps of their streams: the plan's steps with their work and their waits.
#include "core/tensor.h"
#include "transformer_engine/gemm.h"
#include "virtual_ranks/world.h"

namespace te::testing {

namespace {

constexpr const char* kOp = "virtual ranks";

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

std::vector<te_comm_step> steps_of(const te_comm_problem& problem) {
  int64_t count = 0;
  must(te_comm_plan(&problem, nullptr, 0, &count, nullptr));
  std::vector<te_comm_step> steps(static_cast<size_t>(count));
  must(te_comm_plan(&problem, steps.data(), count, &count, nullptr));
  return steps;
}

// Sizes of a call, which every rank's tensors must have.
struct Sizes {
  int64_t rows, depth, cols, shard;
};

Sizes check_call(const CommCall& call, int32_t ranks) {
  const char* op = kOp;
  const bool gathers = call.op == TE_COMM_GATHER_PRODUCT;
  if (!gathers && call.op != TE_COMM_PRODUCT_SCATTER) bad_argument(op, "call.op", int(call.op), "a te_comm_op");
  if (call.source == nullptr) bad_argument(op, "call.source", "NULL", concat(ranks, " tensors"));
  if (call.weight == nullptr && !gathers) bad_argument(op, "call.weight", "NULL", concat(ranks, " tensors"));
  if (call.weight != nullptr && call.out == nullptr) bad_argument(op, "call.out", "NULL", concat(ranks, " tensors"));
  if ((call.other != nullptr) != (call.wgrad != nullptr) || (call.other != nullptr && !gathers)) {
    bad_argument(op, "call.other", "given without wgrad, or the reverse",
                 "other and wgrad together, with a gather, or neither");
  }
  const te_tensor& like = call.source[0];
  check_tensor(op, "call.source[0]", like);
  if (like.device != TE_DEVICE_CPU) bad_argument(op, "call.source[0]", device_of(like), "cpu");
  Sizes s{};
  s.rows = gathers ? like.rows * ranks : like.rows;
  s.depth = like.cols;
  if (call.weight != nullptr) s.cols = call.weight_by_depth ? call.weight[0].cols : call.weight[0].rows;
  if (s.rows % ranks != 0) bad_argument(op, "call.source[0]", shape_of(like), concat("rows that ", ranks, " divides"));
  s.shard = s.rows / ranks;
  const auto check = [&](const char* name, const te_tensor* tensors, int32_t rank, int64_t rows, int64_t cols) {
    if (tensors == nullptr) return;
    const std::string argument = concat(name, "[", rank, "]");
    check_as(op, argument.c_str(), tensors[rank], rows, cols, like);
  };
  const bool by_depth = call.weight_by_depth, first = call.gathered_first;
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
  CallQueue(World& world, const CommCall& call)
      : world_(world), ranks_(world.options_.ranks), call_(call), s_(check_call(call, ranks_)) {}

  void queue() {
    const bool gathers = call_.op == TE_COMM_GATHER_PRODUCT;
    std::vector<std::vector<te_comm_step>> plans;
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      const te_comm_schedule schedule = call_.weight == nullptr ? TE_COMM_SERIAL : call_.schedule;
      plans.push_back(steps_of(
          {call_.op, schedule, s_.rows, s_.depth, s_.cols, ranks_, rank, call_.source[0].dtype, call_.costs, {}}));
    }
    const bool alone = ranks_ == 1 || s_.rows == 0;
    for (int32_t rank = 0; rank < ranks_ && !alone; ++rank) {
      buffers_.push_back(
          take_buffer(rank, gathers ? kGathered : kInbox, world_.options_.buffers, gathers ? s_.depth : s_.cols));
      if (!gathers) partials_.push_back(take_buffer(rank, kPartials, 1, s_.cols));
    }
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      rank_ = rank;
      fork_ = streams().compute.queued;
      computed_ = fork_;
      for (const te_comm_step& step : plans[size_t(rank)]) add(step, alone);
      if (call_.other != nullptr) add_wgrad(alone);
      if (!alone) end_call();
    }
    ++world_.calls_;
  }

 private:
  Rank& streams() { return world_.ranks_[size_t(rank_)]; }
  te_dtype dtype() const { return call_.source[0].dtype; }
  bool gathers() const { return call_.op == TE_COMM_GATHER_PRODUCT; }
  bool loop() const { return world_.options_.by_loop; }

  ScopedBuffer take_buffer(int32_t rank, Channel channel, int count, int64_t cols) {
    const size_t bytes = size_t(s_.rows * cols) * te_dtype_bytes(dtype());
    const bool is_shared = (world_.options_.left_out & kExclusive) != 0 && channel != kPartials;
    const BufferKey key{rank, 0, is_shared ? kGathered : channel};
    return world_.ranks_[size_t(rank)].pool.take(key, is_shared ? 1 : count, bytes, is_shared);
  }

  // The rank's buffer holds all gathered rows, or the partials of its own rows, by the rank that pushed them.
  te_tensor gathered(int32_t rank) const { return dense(buffers_[size_t(rank)].data(), s_.rows, s_.depth, dtype()); }
  te_tensor inbox(int32_t rank, int32_t from) const {
    return rows_in(dense(buffers_[size_t(rank)].data(), s_.rows, s_.cols, dtype()), from * s_.shard,
                   (from + 1) * s_.shard);
  }
  te_tensor partials() const { return dense(partials_[size_t(rank_)].data(), s_.rows, s_.cols, dtype()); }

  Event event(StepKind kind, int32_t peer = -1, int64_t first = 0, int64_t last = 0) const {
    return {rank_, world_.calls_, kind, peer, first, last};
  }

  void add(const te_comm_step& step, bool alone) {
    const Event noted = event(StepKind(step.kind), step.peer, step.first, step.last);
    switch (step.kind) {
      case TE_COMM_STEP_PUSH:
        return add_push(noted);
      case TE_COMM_STEP_WAIT: {
        const ScopedBuffer& buffer = buffers_[size_t(rank_)];
        const int64_t* arrived = &buffer.buffer().arrived[size_t(step.peer)];
        return streams().compute.add({noted, {{kWaitArrived, arrived, buffer.use()}}, {}});
      }
      case TE_COMM_STEP_GEMM:
        if (call_.weight != nullptr) add_gemm(noted, alone);
        return;
      default:
        return add_sum(noted);
    }
  }

  void add_push(const Event& noted) {
    const ScopedBuffer& target = buffers_[size_t(noted.peer)];
    std::vector<Need> needs;
    const Stream& compute = streams().compute;
    if (!gathers()) {
      needs.push_back({kWaitComputed, &compute.done, computed_});
    } else if (!call_.source_ready) {
      needs.push_back({kWaitProduced, &compute.done, fork_});
    }
    const bool is_exclusive = (world_.options_.left_out & kExclusive) == 0;
    if (is_exclusive) needs.push_back({kWaitFree, &target.buffer().freed, target.use() - 1});
    const te_tensor from = gathers() ? call_.source[rank_] : rows_in(partials(), noted.first, noted.last);
    const te_tensor to = gathers() ? rows_in(gathered(noted.peer), noted.first, noted.last) : inbox(noted.peer, rank_);
    streams().copy.add(
        {noted, needs, [from, to, arrived = &target.buffer().arrived[size_t(rank_)], use = target.use()] {
           copy_rows(from, to);
           *arrived = use;
         }});
  }

  void add_gemm(const Event& noted, bool alone) {
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
    const te_gemm_layout layout = call_.weight_by_depth ? TE_GEMM_NN : TE_GEMM_TN;
    streams().compute.add({noted, {}, [layout, a = call_.weight[rank_], b, bias, d, by_loop = loop()] {
                             multiply(layout, a, b, bias, d, by_loop);
                           }});
    computed_ = streams().compute.queued;
  }

  void add_sum(const Event& noted) {
    std::vector<te_tensor> parts;
    for (int32_t from = 0; from < ranks_; ++from) {
      parts.push_back(from == rank_ ? rows_in(partials(), noted.first, noted.last) : inbox(rank_, from));
    }
    const te_tensor bias = call_.bias != nullptr ? call_.bias[rank_] : kAbsent;
    streams().compute.add({noted, {}, [parts, bias, out = call_.out[rank_]] {
                             must(te_comm_ordered_sum(parts.data(), int32_t(parts.size()), bias, out, nullptr));
                           }});
  }

  void add_wgrad(bool alone) {
    const te_tensor all = alone ? call_.source[rank_] : gathered(rank_);
    const te_tensor other = call_.other[rank_];
    const bool first = call_.gathered_first;
    streams().compute.add({event(StepKind::kWgrad, -1, 0, s_.rows),
                           {},
                           [a = first ? other : all, b = first ? all : other, d = call_.wgrad[rank_],
                            by_loop = loop()] { multiply(TE_GEMM_NT, a, b, kAbsent, d, by_loop); }});
  }

  // The compute stream waits for the call's pushes, then releases the buffers.
  void end_call() {
    Stream& compute = streams().compute;
    compute.add({event(StepKind::kJoin), {{kWaitPushed, &streams().copy.done, streams().copy.queued}}, {}});
    release(buffers_[size_t(rank_)]);
    if (!gathers()) release(partials_[size_t(rank_)]);
  }

  void release(const ScopedBuffer& take_buffer) {
    const size_t poisoned_bytes = world_.options_.poison ? take_buffer.bytes() : 0;
    streams().compute.add(
        {event(StepKind::kRelease),
         {},
         [data = take_buffer.data(), poisoned_bytes, freed = &take_buffer.buffer().freed, use = take_buffer.use()] {
           if (poisoned_bytes != 0) std::memset(data, kBufferPoison, poisoned_bytes);
           *freed = use;
         }});
  }

  World& world_;
  const int32_t ranks_;
  const CommCall& call_;
  const Sizes s_;
  std::vector<ScopedBuffer> buffers_, partials_;
  int32_t rank_ = 0;
  int64_t fork_ = 0;      // steps of the compute stream before the call
  int64_t computed_ = 0;  // and after its last product so far
};

void World::queue(const CommCall& call) { CallQueue(*this, call).queue(); }

}  // namespace te::testing
