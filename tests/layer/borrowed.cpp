// An exchange for tests whose operands come by memory on lease, on one process: nothing is communicated, rows are
// copied. install(mode):
//   "again"     gathered for the forward, and again for the backward: as tensor parallelism has it
//   "kept"      what is on lease is kept for the backward
//   "returned"  what is on lease is the result
//   "stored"    what is on lease is the gradient that a sink may store
//   "shared"    without leases: one buffer for all, kept for the backward. The mistake that leases are there for
#include <torch/csrc/utils/pybind.h>

#include "layer/layer.h"

namespace {

using at::Tensor;
using namespace te_torch;

std::string mode;
Tensor buffer;  // "shared"

Tensor copied(const Tensor& t, Leases* leases) {
  if (mode == "shared") {
    if (!buffer.defined() || buffer.numel() < t.numel()) buffer = t.new_empty({t.numel()});
    return buffer.narrow(0, 0, t.numel()).view(t.sizes()).copy_(t);
  }
  return (leases != nullptr ? leases->take(t.sizes(), t.options(), "tests", SlotKind::kValues).tensor()
                            : t.new_empty(t.sizes()))
      .copy_(t);
}

std::unique_ptr<Leases> kept_leases;  // until remove()

Leases& lasting() {
  if (kept_leases == nullptr) kept_leases = std::make_unique<Leases>();
  return *kept_leases;
}

class Borrowing final : public layer::Transfer {
 public:
  Borrowing(Tensor arrived, Tensor like) : arrived_{std::move(arrived), {}}, like_(std::move(like)) {}

  const Operand& operand() const override { return arrived_; }
  const Tensor* at_once() const override { return &like_; }
  bool next(Rows&) override { return false; }
  void take(const Rows*, const Tensor& result) override { result_ = result; }
  Tensor finish() override { return mode == "returned" ? copied(result_, &lasting()).view(result_.sizes()) : result_; }

 private:
  Operand arrived_;
  Tensor like_, result_;
};

class Exchange final : public layer::Exchange {
 public:
  bool gathers(layer::Pass pass) const override { return pass == layer::Pass::kFprop; }
  bool keeps_gathered(bool) const override { return mode == "kept" || mode == "shared"; }
  layer::Quantizing quantizing(const Route&, layer::Pass pass, const Quantizer*, const Tensor&) const override {
    return mode == "stored" && pass == layer::Pass::kDgrad ? layer::Quantizing::kTogether : layer::Quantizing::kBefore;
  }
  Operand quantized(const Quantizer&, const Tensor& x, Directions) const override {
    return {copied(x.contiguous(), &lasting()), {}};
  }
  std::unique_ptr<layer::Transfer> begin(const Route&, layer::Pass pass, const Operand& mine, const Tensor& like,
                                         const Quantizer*, Directions, const OptionalTensor&,
                                         Leases* leases) const override {
    if (!gathers(pass)) return nullptr;
    return std::make_unique<Borrowing>(copied(mine.plain, mode == "kept" ? &lasting() : leases), like);
  }
  Operand whole(const Route&, layer::Pass pass, const Operand& mine, const Quantizer*, const layer::Transfer* done,
                const Tensor&, Leases* leases) const override {
    if (!gathers(pass)) return mine;
    return done != nullptr ? done->operand() : Operand{copied(mine.plain, leases), {}};
  }
};

}  // namespace

PYBIND11_MODULE(borrowed, m) {
  m.def("install", [](const std::string& how) {
    mode = how;
    te_torch::layer::defaults().exchange = std::make_shared<Exchange>();
  });
  m.def("two_at_once", [](const Tensor& like) {
    Leases leases;
    const Tensor one = leases.take(like.sizes(), like.options(), "tests", SlotKind::kValues).tensor();
    const Tensor other = leases.take(like.sizes(), like.options(), "tests", SlotKind::kValues).tensor();
    return one.is_alias_of(other);
  });
  m.def("remove", [] {
    te_torch::layer::defaults().exchange.reset();
    buffer.reset();
    kept_leases.reset();
  });
}
