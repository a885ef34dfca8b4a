// See tp_comm_peer.h. The engine's comm op plans the order of the steps.
#include "layer/tp_comm_peer.h"

#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>
#include <transformer_engine/comm.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>

namespace te_torch::layer {

namespace {

constexpr int64_t kFp8Rows = 16;    // of which FP8 products take multiples
constexpr uintptr_t kAligned = 16;  // address of a chunk, for the algorithms of the GEMM over all rows

// For te.explain, beside the products.
void peer_path(const char* path, const char* why) { te_note_path(path, why); }

const Tensor& data_of(const Operand& t) { return t.quantized() ? t.fp8.rowwise : t.plain; }

int64_t rows_in(const Tensor& t) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows *= t.size(d);
  return rows;
}

// The leading dimensions of t, the first one changed.
c10::SmallVector<int64_t, 4> with_first(const Tensor& t, int64_t first, int64_t last) {
  c10::SmallVector<int64_t, 4> shape(t.sizes().begin(), t.sizes().end());
  shape.front() = first;
  shape.back() = last;
  return shape;
}

using Steps = c10::SmallVector<te_comm_step, 16>;  // enough for the plans of a few ranks

Steps plan_of(const te_comm_problem& problem, te_comm_prediction& prediction) {
  Steps steps(16);
  int64_t count = 0;
  check(te_comm_plan(&problem, steps.data(), int64_t(steps.size()), &count, &prediction));
  const bool fits = count <= int64_t(steps.size());
  steps.resize(static_cast<size_t>(count));
  if (!fits) check(te_comm_plan(&problem, steps.data(), count, &count, &prediction));
  return steps;
}

// rows_of(), without the dispatcher.
Operand direct_rows(const Operand& t, const Rows& rows) {
  if (t.quantized()) {
    const Quantized& q = t.fp8;
    if (q.scaling != TE_SCALING_TENSOR) return rows_of(t, rows);
    const Tensor part = rows_view(q.rowwise, rows.first, rows.count);
    return {{}, {q.scaling, q.e5m2, part, q.rowwise_scale_inv, {}, {}}};
  }
  const Tensor& all = t.plain;
  if (all.dim() == 2) return {rows_view(all, rows.first, rows.count), {}};
  if (!all.is_contiguous()) return rows_of(t, rows);
  return {rows_view(matrix_view(all), rows.first, rows.count), {}};
}

// The beginning of the text of a pass's call.
struct CallName {
  std::string_view forward, backward;
};
constexpr CallName kGather{"gather, product (forward)", "gather, product (backward)"};
constexpr CallName kScatter{"product, scatter (forward)", "product, scatter (backward)"};

// The base of gathers and scatters: the plan and its steps.
class PeerCommOp : public CommOp {
 public:
  // shard: the rows of each rank.
  PeerCommOp(std::shared_ptr<PeerChannel> channel, te_comm_op op, bool automatic, Pass pass, const Operand& mine,
             const Tensor& like, int64_t shard)
      : channel_(std::move(channel)),
        op_(op),
        automatic_(automatic),
        pass_(pass),
        mine_(mine),
        like_(like),
        shard_(shard) {}

  ~PeerCommOp() override {
    try {
      if (streams_ != nullptr) streams_->end();  // of a product that has raised an error
    } catch (...) {                              // streams fail again after an error that is already reported
    }
  }

  int64_t rows() const override { return shard_ * ranks(); }

  void plan_chunks(const std::optional<ChunkedResult>& result) override {
    const bool gathers = op_ == TE_COMM_GATHER_PRODUCT;
    const int64_t first = like_.size(0) * (gathers ? ranks() : 1);
    plan(result);
    if (probe::active()) explain(gathers ? "te::peer_gather" : "te::peer_scatter");
    if (runs_) {
      whole_ = at::empty(with_first(like_, first, result->columns), like_.options());
      result_ = whole_.dim() == 2 ? whole_ : matrix_view(whole_);
    } else {
      like_all_ = gathers ? at::empty(with_first(like_, first, 0), like_.options()) : like_;
    }
    begin_product();
  }

  const Tensor* at_once() const override { return runs_ ? nullptr : &like_all_; }
  Operand part(const Rows& rows) const override { return direct_rows(operand(), rows); }
  Tensor output_buffer() const override { return result_; }

  bool next_chunk(Rows& rows) override {
    if (streams_ != nullptr) taken_ < products_ ? streams_->turn() : streams_->end();
    for (bool waits = false; at_ < steps_.size(); ++at_) {
      const te_comm_step& step = steps_[at_];
      if (step.kind == TE_COMM_STEP_WAIT) {
        arrives(step.peer);
        waits = true;
      }
      if (step.kind != TE_COMM_STEP_GEMM) continue;
      rows = {step.first, step.last - step.first};
      ++at_;
      ++taken_;
      if (streams_ != nullptr && waits && taken_ < products_) streams_->arrived();
      return true;
    }
    end_product();
    return false;
  }

 protected:
  int64_t ranks() const { return channel_->ranks(); }
  int64_t rank() const { return channel_->rank(); }

  virtual void begin_product() = 0;        // after the plan is made
  virtual void arrives(int32_t peer) = 0;  // before its rows are read
  virtual void end_product() = 0;          // after the last chunk of a GEMM in chunks

  std::string text_of(const CallName& name, const Tensor& t, at::IntArrayRef sizes) const {
    return call_text(pass_ == Pass::kFprop ? name.forward : name.backward, t.scalar_type(), sizes);
  }

  const std::shared_ptr<PeerChannel> channel_;
  const te_comm_op op_;
  const bool automatic_;
  const Pass pass_;
  const Operand mine_;
  const Tensor like_;
  const int64_t shard_;
  Steps steps_;  // of a product in runs
  bool runs_ = false;
  // The result of all rows; of a product in runs as a matrix, and with the leading dimensions of `like`.
  Tensor result_, whole_;

 private:
  // Runs, or none and why.
  void plan(const std::optional<ChunkedResult>& result) {
    if (mine_.quantized() && shard_ % kFp8Rows != 0) {
      why_no_runs_ = "runs of FP8 products want a multiple of 16 rows from each rank";
      return;
    }
    if (!result.has_value()) {
      why_no_runs_ = like_.is_cpu() ? "LibTorch's products of some rows have other bits than those of all: "
                                      "set_cpu_products('loop')"
                                    : "the product's algorithm splits its reduction, or has no runs";
      return;
    }
    const bool bytes = op_ == TE_COMM_GATHER_PRODUCT && mine_.quantized();
    const te_comm_problem problem{op_,
                                  automatic_ ? TE_COMM_AUTO : TE_COMM_CHUNKED,
                                  rows(),
                                  data_of(mine_).size(-1),
                                  result->columns,
                                  int32_t(ranks()),
                                  int32_t(rank()),
                                  bytes ? TE_FLOAT8_E4M3 : dtype_of(like_, "linear", "x"),
                                  channel_->costs(),
                                  {result->tile.rows, result->tile.cols, result->tile.units}};
    steps_ = plan_of(problem, prediction_);
    runs_ = prediction_.schedule == TE_COMM_CHUNKED;
    if (runs_) {
      products_ = std::count_if(steps_.begin(), steps_.end(),
                                [](const te_comm_step& step) { return step.kind == TE_COMM_STEP_GEMM; });
      if (products_ > 1) streams_ = channel_->streams();
    } else {
      steps_.clear();
    }
  }

  void explain(const char* op) const {
    std::string path = "peers, serial", why;
    if (runs_) {
      path = "peers, chunked, " + std::to_string(prediction_.runs) + (prediction_.runs == 1 ? " run" : " runs");
    } else if (why_no_runs_ != nullptr) {
      why = why_no_runs_;
    } else {
      why = "one product is predicted to be faster than runs, " + std::to_string(std::llround(prediction_.us)) + " us";
    }
    Direct::call<peer_path>(op, path.c_str(), why.c_str());
  }

  size_t at_ = 0;
  int64_t products_ = 0, taken_ = 0;  // of the steps: in all, and so far
  RunStreams* streams_ = nullptr;     // null: one stream
  te_comm_prediction prediction_{};
  const char* why_no_runs_ = nullptr;  // other than the prediction
  Tensor like_all_;                    // what at_once() returns
};

class PeerGather final : public PeerCommOp {
 public:
  PeerGather(std::shared_ptr<PeerChannel> channel, bool automatic, Pass pass, const Operand& mine, const Tensor& like,
             ScopedBuffers* buffers)
      : PeerCommOp(std::move(channel), TE_COMM_GATHER_PRODUCT, automatic, pass, mine, like, rows_in(data_of(mine))),
        read_later_(pass == Pass::kDgrad || buffers == nullptr),
        own_(mine) {
    Tensor& data = own_.quantized() ? own_.fp8.rowwise : own_.plain;
    data = data.contiguous();
    const auto sizes = with_first(data, data.size(0) * ranks(), data.size(-1));
    call_ = std::make_shared<PeerCall>(channel_, SlotKind::kValues, text_of(kGather, data, data.sizes()), sizes,
                                       data.options());
    if (buffers != nullptr) buffers->hold(call_);
    arrived_ = own_;
    (arrived_.quantized() ? arrived_.fp8.rowwise : arrived_.plain) = call_->slot();
    if (arrived_.quantized()) arrived_.fp8.columnwise = arrived_.fp8.columnwise_scale_inv = Tensor();
    call_->gather(data);
  }

  const Operand& operand() const override { return arrived_; }

  Operand part(const Rows& rows) const override {
    if (!own_alone(rows.first, rows.first + rows.count) || own_in_slot_) return direct_rows(arrived_, rows);
    return direct_rows(own_, {rows.first - rank() * shard_, rows.count});
  }

  void store_chunk(const Rows* rows, const Tensor& result) override {
    if (rows == nullptr) result_ = result;
  }

  Tensor finish() override {
    if (read_later_) {
      call_->poison(result_);
    } else {
      call_->end(result_);
    }
    return runs_ ? whole_ : result_.view(with_first(like_, like_.size(0) * ranks(), result_.size(-1)));
  }

 private:
  // Rows of this rank alone are read where they are, so that a copy of them in the slot is for all other readers.
  bool own_alone(int64_t first, int64_t last) const {
    return first >= rank() * shard_ && last <= (rank() + 1) * shard_;
  }
  bool copies_own() const {
    return !runs_ || read_later_ || own_in_slot_ ||
           std::any_of(steps_.begin(), steps_.end(), [&](const te_comm_step& step) {
             return step.kind == TE_COMM_STEP_GEMM && !own_alone(step.first, step.last) &&
                    step.first < (rank() + 1) * shard_ && step.last > rank() * shard_;
           });
  }

  void begin_product() override {
    // Rows of this rank whose alignment does not fit a chunk are read from the slot.
    own_in_slot_ = runs_ && reinterpret_cast<uintptr_t>(data_of(own_).data_ptr()) % kAligned != 0;
    if (copies_own()) call_->gather_own(data_of(own_));
    if (!runs_) {
      call_->wait_for_others();
      call_->wait(rank());
      end_product();
    } else if (own_in_slot_) {
      call_->wait(rank());
    }
  }

  void arrives(int32_t peer) override {
    if (peer != rank() || !own_in_slot_) call_->wait(peer);
  }

  void end_product() override {
    if (read_later_) call_->poison(call_->slot());
  }

  const bool read_later_;  // what has arrived, by a weight's gradient
  std::shared_ptr<PeerCall> call_;
  Operand own_, arrived_;
  bool own_in_slot_ = false;
};

class PeerScatter final : public PeerCommOp {
 public:
  PeerScatter(std::shared_ptr<PeerChannel> channel, bool automatic, Pass pass, const Operand& mine, const Tensor& like,
              const OptionalTensor& bias)
      : PeerCommOp(channel, TE_COMM_PRODUCT_SCATTER, automatic, pass, mine, like, rows_in(like) / channel->ranks()),
        bias_(bias),
        computed_(size_t(ranks()), 0) {
    channel_->refuse_failed();
  }

  const Operand& operand() const override { return mine_; }

  void store_chunk(const Rows* rows, const Tensor& result) override {
    if (rows == nullptr) {
      result_ = result.contiguous().view({this->rows(), result.size(-1)});
      open();
    }
    const Rows taken = rows != nullptr ? *rows : Rows{0, this->rows()};
    call_->follow();
    for (int64_t step = 1; step < ranks(); ++step) {
      const int64_t to = (rank() + step) % ranks();
      const int64_t first = std::max(taken.first, to * shard_);
      const int64_t last = std::min(taken.first + taken.count, (to + 1) * shard_);
      if (first >= last && shard_ > 0) continue;  // without rows the ranks say so
      call_->push(to, ((rank() * shard_) + first - to * shard_) * pitch_, result_, first * pitch_,
                  (last - first) * pitch_);
      computed_[size_t(to)] += last - first;
      if (computed_[size_t(to)] == shard_) call_->signal(to);
    }
  }

  Tensor finish() override {
    call_->wait_for_others();
    const te_tensor mine = view_2d(result_, "peer_scatter", "partials"),
                    inbox = view_2d(call_->slot(), "peer_scatter", "partials");
    c10::SmallVector<te_tensor, 8> partials;
    for (int64_t from = 0; from < ranks(); ++from) {
      te_tensor part = from == rank() ? mine : inbox;
      part.rows = shard_;
      if (part.data != nullptr) part.data = static_cast<char*>(part.data) + from * shard_ * pitch_;
      partials.push_back(part);
    }
    const Tensor out = at::empty(with_first(like_, like_.size(0) / ranks(), result_.size(-1)), like_.options());
    check(te_comm_ordered_sum(partials.data(), int32_t(ranks()), view_2d(bias_, "peer_scatter", "bias"),
                              view_2d(out, "peer_scatter", "out"), current_stream(out)));
    call_->end(out);
    call_.reset();
    return out;
  }

 private:
  void begin_product() override {
    if (runs_) open();
  }
  void arrives(int32_t) override {}  // in finish(): a weight's gradient may go before
  void end_product() override {}

  void open() {
    pitch_ = result_.size(1) * int64_t(like_.itemsize());
    call_ = std::make_unique<PeerCall>(channel_, SlotKind::kInbox, text_of(kScatter, like_, result_.sizes()),
                                       result_.sizes(), like_.options());
  }

  const OptionalTensor bias_;
  std::vector<int64_t> computed_;  // rows of each rank's, so far
  std::unique_ptr<PeerCall> call_;
  int64_t pitch_ = 0;
};

}  // namespace

std::unique_ptr<CommOp> peer_gather_product(std::shared_ptr<PeerChannel> channel, bool automatic, Pass pass,
                                            const Operand& mine, const Tensor& like, ScopedBuffers* buffers) {
  return std::make_unique<PeerGather>(std::move(channel), automatic, pass, mine, like, buffers);
}

std::unique_ptr<CommOp> peer_product_scatter(std::shared_ptr<PeerChannel> channel, bool automatic, Pass pass,
                                             const Operand& mine, const Tensor& like, const OptionalTensor& bias) {
  return std::make_unique<PeerScatter>(std::move(channel), automatic, pass, mine, like, bias);
}

}  // namespace te_torch::layer
