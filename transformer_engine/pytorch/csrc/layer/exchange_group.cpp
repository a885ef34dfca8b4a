// See exchange_group.h. Collectives are group.h's, formats quantize.h's.
#include "exchange_group.h"

#include <ATen/TensorOperators.h>
#include <torch/csrc/utils/pybind.h>

#include "comm.h"
#include "exchange_peer.h"
#include "group.h"

namespace te_torch::layer {

namespace {

constexpr int64_t kBlock = 128;  // rows of a scale in blocks

// The leading dimensions of t, dimension 0 changed, for a result of any width in t's dtype.
Tensor rows_like(const Tensor& t, const c10::SymInt& first) {
  c10::SymDimVector shape(t.sym_sizes().begin(), t.sym_sizes().end());
  shape[0] = first;
  shape.back() = 0;
  return t.new_empty_symint(shape);
}

// Matrices [rows, n] behind each other, [ranks * rows, >= n], side by side: [rows, ranks * n].
Tensor side_by_side(const Route& route, const Tensor& t, int64_t ranks, const c10::SymInt& n) {
  const Tensor parts = t.view_symint({ranks, t.sym_size(0) / ranks, t.sym_size(1)}).narrow_symint(2, 0, n);
  return route.call<comm_interleave>("te::comm_interleave", parts);
}

// Why values are gathered ahead of such a quantizer, where FP8 is half of the bytes.
const char* why_values(const Quantizer& behind) {
  switch (behind.spec.kind) {
    case QuantizeSpec::kBlock1d:
    case QuantizeSpec::kBlock2d:
      return "FP8 takes half of the bytes, but blocks of 128 tokens would lie across ranks: give each a multiple of "
             "128";
    case QuantizeSpec::kPython:
      return "FP8 takes half of the bytes, but what a quantizer in Python makes of a part need not be that of the "
             "whole";
    default:
      return "FP8 takes half of the bytes, but a traced call looks for one scale when all values are there";
  }
}

class GroupTransfer final : public Transfer {
 public:
  GroupTransfer(const Route& route, const GroupExchange& exchange, bool adds_up, Operand arrived, Tensor like,
                const OptionalTensor& bias)
      : route_(route),
        parallel_(exchange.parallel()),
        group_(exchange.group()),
        adds_up_(adds_up),
        arrived_(std::move(arrived)),
        like_(std::move(like)),
        bias_(bias) {}

  const Operand& operand() const override { return arrived_; }
  const Tensor* at_once() const override { return &like_; }
  bool next(Rows&) override { return false; }

  void take(const Rows*, const Tensor& result) override {
    result_ = result;
    if (!adds_up_) return;
    if (parallel_.sequence) {
      const std::string_view name(group_);
      Leases leases;  // the sum is what goes on
      const Tensor partials =
          route_.direct()
              ? Direct::call<group_exchange_leased>("te::group_exchange", result, name, parallel_.ranks, leases)
              : Dispatched::call<group_exchange>("te::group_exchange", result, name, parallel_.ranks);
      result_ = route_.call<comm_ordered_sum>("te::comm_ordered_sum", partials, bias_);
    } else if (parallel_.sum != 0 && parallel_.mode == Parallel::kRow) {
      result_ = route_.call<group_symmetric_sum>("te::group_symmetric_sum", result, std::string_view(group_),
                                                 parallel_.ranks, parallel_.sum);
    } else if (route_.direct()) {
      result_ = result.contiguous();
      // Behind a column's input gradient comes its weight's; behind a row's output nothing.
      work_ = begin_group_sum(result_, group_, parallel_.ranks, parallel_.mode == Parallel::kColumn);
    } else {
      result_ = Dispatched::call<group_sum>("te::group_sum", result, std::string_view(group_), parallel_.ranks);
    }
  }

  Tensor finish() override {
    if (work_) work_->wait();
    work_.reset();
    if (adds_up_ && !parallel_.sequence && bias_.has_value()) result_ = result_ + *std::exchange(bias_, std::nullopt);
    return result_;
  }

 private:
  Route route_;
  const Parallel parallel_;
  const std::string group_;
  bool adds_up_;
  Operand arrived_;
  Tensor like_, result_;
  OptionalTensor bias_;
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace

std::shared_ptr<PeerChannel> GroupExchange::peers(const Route& route, const Tensor& t) const {
  if (parallel_.overlap != Parallel::kChunked || !parallel_.sequence || !route.direct() || t.numel() == 0)
    return nullptr;
  return PeerChannel::of(group_, t.device());
}

void GroupExchange::check(const Tensor& x) const {
  if (!parallel_.sequence) return;
  TORCH_CHECK_VALUE(x.dim() > 1, "linear: argument 'x' has shape ", x.sym_sizes(),
                    ", wanted at least two dimensions, the first of them tokens, with sequence_parallel.");
  if (column()) return;
  TORCH_CHECK_VALUE(x.sym_size(0) % parallel_.ranks == 0, "linear: argument 'x' has ", x.sym_size(0),
                    " tokens along dimension 0, which the ", parallel_.ranks,
                    " ranks of the tensor-parallel group do not divide; pad it.");
}

c10::SymInt GroupExchange::rows_before(const c10::SymInt& rows) const {
  if (!parallel_.sequence) return rows;
  return column() ? rows / parallel_.ranks : rows * parallel_.ranks;
}

Quantizing GroupExchange::quantizing(const Route& route, Pass pass, const Quantizer* quantizer, const Tensor& x) const {
  if (!gathers(pass) || quantizer == nullptr || !quantizer->active()) return Quantizing::kBefore;
  switch (quantizer->spec.kind) {
    case QuantizeSpec::kCurrent:
      return route.direct() ? Quantizing::kTogether : Quantizing::kBehind;
    case QuantizeSpec::kBlock1d:
    case QuantizeSpec::kBlock2d: {
      c10::SymInt rows = 1;
      for (int64_t d = 0; d + 1 < x.dim(); ++d) rows = rows * x.sym_size(d);
      return rows % kBlock == 0 ? Quantizing::kBefore : Quantizing::kBehind;
    }
    case QuantizeSpec::kPython:  // what it says of a part need not be what it says of the whole
      return Quantizing::kBehind;
    default:
      return Quantizing::kBefore;
  }
}

Operand GroupExchange::quantized(const Quantizer& quantizer, const Tensor& x, Directions directions) const {
  const Tensor amax = Direct::call<quantize_amax>("te::quantize_amax", x);
  Direct::call<group_amax>("te::group_amax", amax, x, std::string_view(group_), parallel_.ranks);
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  const Quantized out = empty_quantized(quantizer.spec, rows, x.size(-1), directions, x.options());
  return {{}, Direct::call<quantize_into>("te::quantize", quantizer, x, out, Tensor(), amax)};
}

Tensor GroupExchange::gathered(const Route& route, const Tensor& t, const Tensor& gradient, Leases* leases,
                               SlotKind kind, const Quantizer* behind) const {
  const std::string_view name(group_);
  const GatherOfValues told(behind != nullptr ? why_values(*behind) : nullptr);
  if (leases != nullptr && route.direct()) {
    const bool again = gradient.defined();
    if (auto channel = peers(route, t)) {
      return Direct::call<peer_gather>("te::peer_gather", std::move(channel), t, kind, *leases);
    }
    return Direct::call<group_gather_leased>(again ? "te::group_gather_again" : "te::group_gather", t, name,
                                             parallel_.ranks, again, *leases, kind);
  }
  if (gradient.defined()) {
    return route.call<group_gather_again>("te::group_gather_again", t, gradient, name, parallel_.ranks);
  }
  return route.call<group_gather>("te::group_gather", t, name, parallel_.ranks);
}

Operand GroupExchange::gathered(const Route& route, const Quantized& mine, bool columnwise, const Tensor& gradient,
                                Leases* leases) const {
  const Tensor& data = columnwise ? mine.columnwise : mine.rowwise;
  const Tensor& scales = columnwise ? mine.columnwise_scale_inv : mine.rowwise_scale_inv;
  const c10::SymInt rows = data.sym_size(columnwise ? 1 : 0);  // of this rank
  // Blocks whose scales lie along the rows: those of 1 x 128 rowwise, of 128 x 128 columnwise.
  const bool along = columnwise != te::scaling_row(mine.scaling).across;
  Leases own;  // of what is put together in memory of its own
  Tensor all =
      gathered(route, data, gradient, columnwise ? &own : leases, columnwise ? SlotKind::kColumns : SlotKind::kValues);
  Tensor all_scales = scales;
  if (columnwise) all = side_by_side(route, all, parallel_.ranks, rows);
  if (mine.scaling != TE_SCALING_TENSOR) {
    TORCH_INTERNAL_ASSERT(rows % kBlock == 0);
    all_scales = gathered(route, scales, gradient, along ? &own : leases, SlotKind::kScales);
    const c10::SymInt n = columnwise ? rows / kBlock : rows;
    if (along) all_scales = side_by_side(route, all_scales, parallel_.ranks, n);
  }
  Quantized q{mine.scaling, mine.e5m2, {}, {}, {}, {}};
  (columnwise ? q.columnwise : q.rowwise) = all;
  (columnwise ? q.columnwise_scale_inv : q.rowwise_scale_inv) = all_scales;
  return {{}, q};
}

std::unique_ptr<Transfer> GroupExchange::begin(const Route& route, Pass pass, const Operand& mine, const Tensor& like,
                                               const Quantizer* behind, Directions directions,
                                               const OptionalTensor& bias, Leases* leases) const {
  if (!gathers(pass) && !adds_up(pass)) return nullptr;
  auto channel = peers(route, mine.quantized() ? mine.fp8.rowwise : mine.plain);
  if (!gathers(pass)) {
    if (channel) return peer_product_scatter(std::move(channel), pass, mine, like, bias);
    return std::make_unique<GroupTransfer>(route, *this, true, mine, like, bias);
  }
  const bool blocks = mine.quantized() && mine.fp8.scaling != TE_SCALING_TENSOR;
  if (channel && leases != nullptr && behind == nullptr && !blocks) {
    return peer_gather_product(std::move(channel), pass, mine, like, *leases);
  }
  Operand arrived = mine.quantized() ? gathered(route, mine.fp8, false, {}, leases)
                                     : Operand{gathered(route, mine.plain, {}, leases, SlotKind::kValues, behind), {}};
  if (behind != nullptr && !arrived.quantized()) arrived = operand_of(route, behind, arrived.plain, directions);
  const Tensor all = rows_like(like, like.sym_size(0) * parallel_.ranks);
  return std::make_unique<GroupTransfer>(route, *this, false, std::move(arrived), all, bias);
}

Operand GroupExchange::whole(const Route& route, Pass pass, const Operand& mine, const Quantizer* behind,
                             const Transfer* done, const Tensor& gradient, Leases* leases) const {
  if (!gathers(pass)) return mine;
  if (mine.quantized()) return gathered(route, mine.fp8, mine.fp8.columnwise.defined(), gradient, leases);
  if (done != nullptr) return done->operand();
  const Tensor all = gathered(route, mine.plain, gradient, leases, SlotKind::kValues, behind);
  return behind != nullptr ? operand_of(route, behind, all, {false, true}) : Operand{all, {}};
}

std::shared_ptr<const Exchange> exchange_of(at::ArrayRef<int64_t> packed, std::string_view group, const char* op) {
  if (packed.empty()) return nullptr;
  constexpr size_t kLeast = 4;
  const auto at = [&](size_t i) { return packed.size() > i ? packed[i] : 0; };
  TORCH_CHECK_VALUE(packed.size() >= kLeast && packed.size() <= Parallel::kPacked &&
                        (packed[0] == Parallel::kColumn || packed[0] == Parallel::kRow) &&
                        packed[2] >= Parallel::kGathered && packed[2] <= Parallel::kArrived && packed[3] >= 0 &&
                        at(4) >= 0 && at(4) <= 2 && at(5) >= Parallel::kSerial && at(5) <= Parallel::kChunked,
                    op, ": argument 'parallel' is ", packed,
                    ", wanted nothing, or integers: 1 (column) or 2 (row), sequence, recompute (0, 1 or 2), ranks, for "
                    "a row whose output is added up 0 (the group), 1 (one_shot) or 2 (two_shot), and 1 for runs over "
                    "peers.");
  const Parallel parallel{Parallel::Mode(packed[0]), packed[1] != 0, Parallel::Keeps(packed[2]), packed[3], at(4),
                          Parallel::Overlap(at(5))};
  return std::make_shared<GroupExchange>(parallel, std::string(group));
}

}  // namespace te_torch::layer

namespace te_torch {

void register_exchange_group(pybind11::module_& m) {
  namespace py = pybind11;
  using namespace layer;
  py::class_<GroupExchange, std::shared_ptr<GroupExchange>>(m, "GroupExchange")
      .def(py::init([](int64_t mode, bool sequence, int64_t recompute, int64_t ranks, const std::string& group,
                       int64_t sum, int64_t overlap) {
             const std::vector<int64_t> packed{mode, sequence, recompute, ranks, sum, overlap};
             exchange_of(packed, group, "GroupExchange");
             return std::make_shared<GroupExchange>(Parallel{Parallel::Mode(mode), sequence, Parallel::Keeps(recompute),
                                                             ranks, sum, Parallel::Overlap(overlap)},
                                                    group);
           }),
           py::arg("mode"), py::arg("sequence"), py::arg("recompute"), py::arg("ranks"), py::arg("group"),
           py::arg("sum") = 0, py::arg("overlap") = 0)
      .def_property_readonly("spec", [](const GroupExchange& e) { return e.parallel().pack(); })
      .def_property_readonly("group", &GroupExchange::group);
  m.def("set_symmetric_sum", [](const py::function& function) { lend_symmetric_sum(function.ptr()); });
}

}  // namespace te_torch
