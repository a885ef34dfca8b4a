// A TPComm for tests whose operands come in pooled memory, on one process: nothing is communicated, rows are
// copied. install(mode):
//   "again"     gathered for the forward, and again for the backward: as tensor parallelism has it
//   "kept"      what is pooled is kept for the backward
//   "returned"  what is pooled is the result
//   "stored"    what is pooled is the gradient that a gradient accumulator may store
//   "shared"    without buffers: one buffer for all, kept for the backward. The mistake that buffers are there for
#include <torch/csrc/utils/pybind.h>

#include "layer/layer.h"

namespace {

using at::Tensor;
using namespace te_torch;

std::string mode;
Tensor buffer;  // "shared"

Tensor copied(const Tensor& t, ScopedBuffers* buffers) {
  if (mode == "shared") {
    if (!buffer.defined() || buffer.numel() < t.numel()) buffer = t.new_empty({t.numel()});
    return buffer.narrow(0, 0, t.numel()).view(t.sizes()).copy_(t);
  }
  return (buffers != nullptr ? buffers->take(t.sizes(), t.options(), "tests", SlotKind::kValues).tensor()
                             : t.new_empty(t.sizes()))
      .copy_(t);
}

std::unique_ptr<ScopedBuffers> kept_buffers;  // until remove()

ScopedBuffers& lasting() {
  if (kept_buffers == nullptr) kept_buffers = std::make_unique<ScopedBuffers>();
  return *kept_buffers;
}

class Borrowing final : public layer::CommOp {
 public:
  Borrowing(Tensor arrived, Tensor like) : arrived_{std::move(arrived), {}}, like_(std::move(like)) {}

  const Operand& operand() const override { return arrived_; }
  const Tensor* at_once() const override { return &like_; }
  bool next_chunk(Rows&) override { return false; }
  void store_chunk(const Rows*, const Tensor& result) override { result_ = result; }
  Tensor finish() override { return mode == "returned" ? copied(result_, &lasting()).view(result_.sizes()) : result_; }

 private:
  Operand arrived_;
  Tensor like_, result_;
};

class TPComm final : public layer::TPComm {
 public:
  bool gathers(layer::Pass pass) const override { return pass == layer::Pass::kFprop; }
  bool keeps_gathered(bool) const override { return mode == "kept" || mode == "shared"; }
  layer::QuantizeAt quantize_at(const DispatchMode&, layer::Pass pass, const Quantizer*, const Tensor&) const override {
    return mode == "stored" && pass == layer::Pass::kDgrad ? layer::QuantizeAt::kWithSharedAmax
                                                           : layer::QuantizeAt::kBeforeGather;
  }
  Operand quantized(const Quantizer&, const Tensor& x, QuantizeUsage) const override {
    return {copied(x.contiguous(), &lasting()), {}};
  }
  std::unique_ptr<layer::CommOp> begin(const DispatchMode&, layer::Pass pass, const Operand& mine, const Tensor& like,
                                       const Quantizer*, QuantizeUsage, const OptionalTensor&,
                                       ScopedBuffers* buffers) const override {
    if (!gathers(pass)) return nullptr;
    return std::make_unique<Borrowing>(copied(mine.plain, mode == "kept" ? &lasting() : buffers), like);
  }
  Operand gather_all(const DispatchMode&, layer::Pass pass, const Operand& mine, const Quantizer*,
                     const layer::CommOp* done, const Tensor&, ScopedBuffers* buffers) const override {
    if (!gathers(pass)) return mine;
    return done != nullptr ? done->operand() : Operand{copied(mine.plain, buffers), {}};
  }
};

}  // namespace

PYBIND11_MODULE(borrowed, m) {
  m.def("install", [](const std::string& how) {
    mode = how;
    te_torch::layer::defaults().tp_comm = std::make_shared<TPComm>();
  });
  m.def("two_at_once", [](const Tensor& like) {
    ScopedBuffers buffers;
    const Tensor one = buffers.take(like.sizes(), like.options(), "tests", SlotKind::kValues).tensor();
    const Tensor other = buffers.take(like.sizes(), like.options(), "tests", SlotKind::kValues).tensor();
    return one.is_alias_of(other);
  });
  m.def("remove", [] {
    te_torch::layer::defaults().tp_comm.reset();
    buffer.reset();
    kept_buffers.reset();
  });
}
