// See exchange_peer.h. What is done in which order is the comm room's plan.
#include "exchange_peer.h"

#include <ATen/core/Formatting.h>
#include <ATen/ops/empty.h>
#include <transformer_engine/comm.h>

#include <sstream>

namespace te_torch::layer {

namespace {

constexpr int64_t kFp8Rows = 16;    // of which FP8 products take multiples
constexpr uintptr_t kAligned = 16;  // as algorithms of the whole product want the rows of a run

// For te.explain, beside the products.
void peer_path(const char* path, const char* why) { te_note_path(path, why); }

const Tensor& data_of(const Operand& t) { return t.quantized() ? t.fp8.rowwise : t.plain; }

int64_t rows_in(const Tensor& t) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows *= t.size(d);
  return rows;
}

// The leading dimensions of t, the first one changed.
std::vector<int64_t> with_first(const Tensor& t, int64_t first, int64_t last) {
  auto shape = t.sizes().vec();
  shape.front() = first;
  shape.back() = last;
  return shape;
}

std::vector<te_comm_step> plan_of(const te_comm_problem& problem, te_comm_prediction& prediction) {
  int64_t count = 0;
  check(te_comm_plan(&problem, nullptr, 0, &count, &prediction));
  std::vector<te_comm_step> steps(static_cast<size_t>(count));
  check(te_comm_plan(&problem, steps.data(), count, &count, &prediction));
  return steps;
}

// What gathers and scatters share: the plan, and how it is walked.
class PeerTransfer : public Transfer {
 public:
  PeerTransfer(std::shared_ptr<PeerChannel> channel, te_comm_op op, Pass pass, const Operand& mine, const Tensor& like)
      : channel_(std::move(channel)), op_(op), pass_(pass), mine_(mine), like_(like) {}

 protected:
  int64_t ranks() const { return channel_->ranks(); }
  int64_t rank() const { return channel_->rank(); }

  // Runs, or nothing, where the whole is computed at once.
  void plan(int64_t rows, int64_t depth, int64_t cols, bool takes_runs) {
    const bool ragged = mine_.quantized() && rows / ranks() % kFp8Rows != 0;
    takes_runs = takes_runs && !ragged;
    const te_comm_problem problem{
        op_,
        TE_COMM_CHUNKED,
        rows,
        depth,
        cols,
        int32_t(ranks()),
        int32_t(rank()),
        op_ == TE_COMM_GATHER_PRODUCT && mine_.quantized() ? TE_FLOAT8_E4M3 : dtype_of(like_, "linear", "x"),
        te_comm_costs_h200()};
    te_comm_prediction prediction{};
    const char* const name = op_ == TE_COMM_GATHER_PRODUCT ? "te::peer_gather" : "te::peer_scatter";
    if (takes_runs) {
      steps_ = plan_of(problem, prediction);
      path_ = "peers, chunked, " + std::to_string(prediction.runs) + (prediction.runs == 1 ? " run" : " runs");
      Direct::call<peer_path>(name, path_.c_str(), "");
    } else {
      const char* const why = ragged           ? "runs of FP8 products want a multiple of 16 rows from each rank"
                              : like_.is_cpu() ? "LibTorch's products of some rows have other bits than those of all: "
                                                 "set_cpu_products('loop')"
                                               : "the product's algorithm splits its reduction, or has no runs";
      Direct::call<peer_path>(name, "peers, serial", why);
    }
    runs_ = takes_runs;
  }

  std::string words(const char* what, const Tensor& t, at::IntArrayRef sizes) const {
    std::ostringstream text;
    text << what << (pass_ == Pass::kFprop ? " (forward) " : " (backward) ") << t.scalar_type() << " " << sizes;
    return text.str();
  }

  const std::shared_ptr<PeerChannel> channel_;
  const te_comm_op op_;
  const Pass pass_;
  const Operand mine_;
  const Tensor like_;
  std::vector<te_comm_step> steps_;
  size_t at_ = 0;
  bool runs_ = false;
  std::string path_;
};

class PeerGather final : public PeerTransfer {
 public:
  PeerGather(std::shared_ptr<PeerChannel> channel, Pass pass, const Operand& mine, const Tensor& like, Leases& leases)
      : PeerTransfer(std::move(channel), TE_COMM_GATHER_PRODUCT, pass, mine, like) {
    Operand sent = mine;
    Tensor& data = sent.quantized() ? sent.fp8.rowwise : sent.plain;
    data = data.contiguous();
    shard_ = rows_in(data);
    auto sizes = data.sizes().vec();
    sizes[0] *= ranks();
    call_ = std::make_shared<PeerCall>(channel_, SlotKind::kValues, words("gather, product", data, data.sizes()), sizes,
                                       data.options());
    leases.hold(call_);
    arrived_ = sent;
    (arrived_.quantized() ? arrived_.fp8.rowwise : arrived_.plain) = call_->slot();
    if (arrived_.quantized()) arrived_.fp8.columnwise = arrived_.fp8.columnwise_scale_inv = Tensor();
    own_ = sent;
    whole_ = like.new_empty({0}).expand(with_first(like, like.size(0) * ranks(), 0));
    call_->follow();
    for (int64_t step = 1; step <= ranks(); ++step) {
      const int64_t to = (rank() + step) % ranks();
      call_->push(to, rank() * int64_t(data.nbytes()), data);
      call_->signal(to);
    }
  }

  int64_t rows() const override { return shard_ * ranks(); }

  void expect(const c10::SymInt& cols, bool takes_runs) override {
    const int64_t n = cols.expect_int();
    plan(rows(), data_of(mine_).size(-1), n, takes_runs);
    if (runs_) {
      y_ = at::empty({rows(), n}, like_.options());
    } else {
      wait_for_all();
    }
  }

  const Operand& operand() const override { return arrived_; }
  const Tensor* at_once() const override { return runs_ ? nullptr : &whole_; }
  Tensor room() const override { return y_; }

  Operand part(const Rows& rows) const override {
    const int64_t first = rank() * shard_;
    const bool own = rows.first >= first && rows.first + rows.count <= first + shard_;
    const bool aligned = reinterpret_cast<uintptr_t>(data_of(own_).data_ptr()) % kAligned == 0;
    if (!own || !aligned) return rows_of(arrived_, rows);
    return rows_of(own_, {rows.first - first, rows.count});
  }

  bool next(Rows& rows) override {
    for (; at_ < steps_.size(); ++at_) {
      const te_comm_step& step = steps_[at_];
      if (step.kind == TE_COMM_STEP_WAIT) call_->wait(step.peer);
      if (step.kind != TE_COMM_STEP_GEMM) continue;
      rows = {step.first, step.last - step.first};
      own_in_slot(rows);
      ++at_;
      return true;
    }
    behind_all();
    return false;
  }

  void take(const Rows* rows, const Tensor& result) override {
    if (rows == nullptr) y_ = result;
  }

  Tensor finish() override {
    call_->poison(y_);
    return y_.view(with_first(like_, like_.size(0) * ranks(), y_.size(-1)));
  }

 private:
  // Own rows that lie otherwise than a run of the whole wants them are read in the slot.
  void own_in_slot(const Rows& rows) {
    if (waited_own_ || reinterpret_cast<uintptr_t>(data_of(own_).data_ptr()) % kAligned == 0) return;
    for (size_t i = at_; i < steps_.size(); ++i) {
      if (steps_[i].kind == TE_COMM_STEP_WAIT && steps_[i].peer == rank()) {
        call_->wait(rank());
        steps_.erase(steps_.begin() + int64_t(i));
        break;
      }
    }
    waited_own_ = true;
  }

  void wait_for_all() {
    for (int64_t step = 1; step <= ranks(); ++step) call_->wait((rank() + ranks() - step) % ranks());
    behind_all();
  }

  // What a weight's gradient reads of it.
  void behind_all() {
    if (pass_ == Pass::kDgrad) call_->poison(call_->slot());
  }

  std::shared_ptr<PeerCall> call_;
  Operand own_, arrived_;
  Tensor whole_, y_;
  int64_t shard_ = 0;
  bool waited_own_ = false;
};

class PeerScatter final : public PeerTransfer {
 public:
  PeerScatter(std::shared_ptr<PeerChannel> channel, Pass pass, const Operand& mine, const Tensor& like,
              const OptionalTensor& bias)
      : PeerTransfer(std::move(channel), TE_COMM_PRODUCT_SCATTER, pass, mine, like),
        bias_(bias),
        shard_(rows_in(like) / ranks()),
        computed_(size_t(ranks()), 0) {
    channel_->refuse_failed();
  }

  int64_t rows() const override { return shard_ * ranks(); }

  void expect(const c10::SymInt& cols, bool takes_runs) override {
    const int64_t n = cols.expect_int();
    plan(rows(), data_of(mine_).size(-1), n, takes_runs);
    if (!runs_) return;
    result_ = at::empty({rows(), n}, like_.options());
    open(n);
  }

  const Operand& operand() const override { return mine_; }
  const Tensor* at_once() const override { return runs_ ? nullptr : &like_; }
  Tensor room() const override { return result_; }

  bool next(Rows& rows) override {
    for (; at_ < steps_.size(); ++at_) {
      const te_comm_step& step = steps_[at_];
      if (step.kind != TE_COMM_STEP_GEMM) continue;
      rows = {step.first, step.last - step.first};
      ++at_;
      return true;
    }
    return false;
  }

  void take(const Rows* rows, const Tensor& result) override {
    if (rows == nullptr) {
      result_ = result.contiguous().view({this->rows(), result.size(-1)});
      open(result_.size(1));
    }
    const Rows taken = rows != nullptr ? *rows : Rows{0, this->rows()};
    call_->follow();
    for (int64_t step = 1; step < ranks(); ++step) {
      const int64_t to = (rank() + step) % ranks();
      const int64_t first = std::max(taken.first, to * shard_);
      const int64_t last = std::min(taken.first + taken.count, (to + 1) * shard_);
      if (first >= last) continue;
      const Tensor piece = result_.narrow(0, first, last - first);
      call_->push(to, ((rank() * shard_) + first - to * shard_) * pitch_, piece);
      computed_[size_t(to)] += last - first;
      if (computed_[size_t(to)] == shard_) call_->signal(to);
    }
  }

  Tensor finish() override {
    for (int64_t step = 1; step < ranks(); ++step) call_->wait((rank() + ranks() - step) % ranks());
    std::vector<te_tensor> partials;
    for (int64_t from = 0; from < ranks(); ++from) {
      const Tensor part =
          from == rank() ? result_.narrow(0, rank() * shard_, shard_) : call_->slot().narrow(0, from * shard_, shard_);
      partials.push_back(view_2d(part, "peer_scatter", "partials"));
    }
    const Tensor out = at::empty(with_first(like_, like_.size(0) / ranks(), result_.size(-1)), like_.options());
    check(te_comm_ordered_sum(partials.data(), int32_t(ranks()), view_2d(bias_, "peer_scatter", "bias"),
                              view_2d(out, "peer_scatter", "out"), current_stream(out)));
    call_->poison(out);
    call_.reset();
    return out;
  }

 private:
  void open(int64_t cols) {
    pitch_ = cols * int64_t(like_.itemsize());
    call_ = std::make_unique<PeerCall>(channel_, SlotKind::kInbox, words("product, scatter", like_, {rows(), cols}),
                                       at::IntArrayRef({rows(), cols}), like_.options());
  }

  const OptionalTensor bias_;
  const int64_t shard_;
  std::vector<int64_t> computed_;  // rows of each rank's, so far
  std::unique_ptr<PeerCall> call_;
  Tensor result_;
  int64_t pitch_ = 0;
};

}  // namespace

std::unique_ptr<Transfer> peer_gather_product(std::shared_ptr<PeerChannel> channel, Pass pass, const Operand& mine,
                                              const Tensor& like, Leases& leases) {
  return std::make_unique<PeerGather>(std::move(channel), pass, mine, like, leases);
}

std::unique_ptr<Transfer> peer_product_scatter(std::shared_ptr<PeerChannel> channel, Pass pass, const Operand& mine,
                                               const Tensor& like, const OptionalTensor& bias) {
  return std::make_unique<PeerScatter>(std::move(channel), pass, mine, like, bias);
}

}  // namespace te_torch::layer
