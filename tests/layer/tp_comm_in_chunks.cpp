// A TPComm for tests: the operand of each product arrives in three uneven runs of rows, out of order, in memory that
// holds NaN until then, block scales included; the result's rows are copied away. Nothing is communicated.
#include <torch/csrc/utils/pybind.h>

#include <limits>

#include "layer/layer.h"

namespace {

using at::Tensor;
using namespace te_torch;

int64_t runs = 0;

Tensor folded(const Tensor& t) { return t.dim() == 1 ? t.unsqueeze(0) : t.flatten(0, -2); }

Tensor poisoned(const Tensor& t) {
  const Tensor memory = t.new_empty(t.sizes());
  return t.is_floating_point() ? memory.fill_(std::numeric_limits<double>::quiet_NaN()) : memory.fill_(0x7f);
}

class InRuns final : public layer::CommOp {
 public:
  InRuns(const Operand& mine, const Tensor& like) : like_(like.sizes().vec()) {
    if (mine.quantized()) {
      sent_.fp8 = {mine.fp8.scaling, mine.fp8.e5m2, mine.fp8.rowwise, mine.fp8.rowwise_scale_inv, {}, {}};
      arrived_.fp8 = sent_.fp8;
      arrived_.fp8.rowwise = poisoned(sent_.fp8.rowwise);
      if (sent_.fp8.scaling == TE_SCALING_BLOCK_1D) arrived_.fp8.rowwise_scale_inv = poisoned(scales());
    } else {
      sent_.plain = folded(mine.plain);
      arrived_.plain = poisoned(sent_.plain);
    }
    const int64_t rows = data(sent_).size(0), first = rows / 5, second = rows / 2;
    for (const auto& [from, to] : {std::pair(second, rows), std::pair(int64_t{0}, first), std::pair(first, second)}) {
      if (to > from || rows == 0) waiting_.push_back({from, to - from});
      if (rows == 0) break;
    }
  }

  const Operand& operand() const override { return arrived_; }

  bool next_chunk(Rows& rows) override {
    if (delivered_ == waiting_.size()) return false;
    rows = waiting_[delivered_++];
    data(arrived_).narrow(0, rows.first, rows.count).copy_(data(sent_).narrow(0, rows.first, rows.count));
    if (sent_.quantized() && sent_.fp8.scaling == TE_SCALING_BLOCK_1D) {
      arrived_.fp8.rowwise_scale_inv.narrow(1, rows.first, rows.count)
          .copy_(scales().narrow(1, rows.first, rows.count));
    }
    ++runs;
    return true;
  }

  void store_chunk(const Rows* taken, const Tensor& result) override {
    const Rows& rows = *taken;
    if (!result_.defined()) {
      result_ = result.new_empty({data(sent_).size(0), result.size(-1)});
      result_.fill_(std::numeric_limits<double>::quiet_NaN());
    }
    result_.narrow(0, rows.first, rows.count).copy_(result);
  }

  Tensor finish() override {
    like_.back() = result_.size(-1);
    return result_.view(like_);
  }

 private:
  static const Tensor& data(const Operand& t) { return t.quantized() ? t.fp8.rowwise : t.plain; }
  const Tensor& scales() const { return sent_.fp8.rowwise_scale_inv; }

  Operand sent_, arrived_;
  std::vector<Rows> waiting_;
  size_t delivered_ = 0;
  Tensor result_;
  std::vector<int64_t> like_;
};

class TPComm final : public layer::TPComm {
 public:
  std::unique_ptr<layer::CommOp> begin(const DispatchMode& dispatch, layer::Pass, const Operand& mine,
                                       const Tensor& like, const Quantizer*, QuantizeUsage, const OptionalTensor&,
                                       ScopedBuffers*) const override {
    const bool refused = mine.plain.defined() && mine.plain.dim() == 0;  // by the GEMM, with its error
    return dispatch.direct() && !refused ? std::make_unique<InRuns>(mine, like) : nullptr;
  }
  Operand gather_all(const DispatchMode&, layer::Pass, const Operand& mine, const Quantizer*, const layer::CommOp*,
                     const Tensor&, ScopedBuffers*) const override {
    return mine;
  }
};

}  // namespace

PYBIND11_MODULE(tp_comm_in_chunks, m) {
  m.def("install", [] { te_torch::layer::defaults().tp_comm = std::make_shared<TPComm>(); });
  m.def("remove", [] { te_torch::layer::defaults().tp_comm.reset(); });
  m.def("runs", [] { return std::exchange(runs, 0); });
}
