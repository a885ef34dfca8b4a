// See tp_comm_group.h. Collectives are distributed/group.h's, formats quantize/quantize.h's.
#include "layer/tp_comm_group.h"

#include <ATen/TensorOperators.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <limits>

#include "distributed/group.h"
#include "layer/tp_comm_peer.h"
#include "ops/comm.h"

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

// Stacked matrices [rows, n], as [ranks * rows, >= n], side by side: [rows, ranks * n].
Tensor side_by_side(const DispatchMode& dispatch, const Tensor& t, int64_t ranks, const c10::SymInt& n) {
  const Tensor parts = t.view_symint({ranks, t.sym_size(0) / ranks, t.sym_size(1)}).narrow_symint(2, 0, n);
  return dispatch.call<comm_interleave>("te::comm_interleave", parts);
}

// Why such a quantizer runs after the gather, though FP8 would be half of the bytes.
const char* why_values(const Quantizer& after_gather) {
  switch (after_gather.spec.kind) {
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

// The rows of an operand. columnwise: counted in its columnwise FP8 data.
c10::SymInt rows_in(const Operand& mine, bool columnwise) {
  if (mine.quantized()) return columnwise ? mine.fp8.columnwise.sym_size(1) : mine.fp8.rowwise.sym_size(0);
  c10::SymInt rows = 1;
  for (int64_t d = 0; d + 1 < mine.plain.dim(); ++d) rows = rows * mine.plain.sym_size(d);
  return rows;
}

// The rows of one tensor from all ranks: still arriving from peers, or complete.
class GatheredTensor {
 public:
  GatheredTensor() = default;
  // buffers: null: the rows are saved, in memory of their own. tokens: of all ranks.
  GatheredTensor(const DispatchMode& dispatch, const GroupTPComm& tp_comm, const Tensor& t, const c10::SymInt& tokens,
                 const Tensor& gradient, ScopedBuffers* buffers, SlotKind kind) {
    const std::string_view name(tp_comm.group());
    const int64_t ranks = tp_comm.parallel().ranks;
    const bool regather = gradient.defined();
    if (auto channel = tp_comm.peers(dispatch, t, TE_COMM_GATHER_PRODUCT, tokens)) {
      keeps_ = buffers == nullptr;
      if (keeps_) own_ = std::make_unique<ScopedBuffers>();
      ScopedBuffers& held = keeps_ ? *own_ : *buffers;
      pending_ = Direct::call<begin_peer_gather>("te::peer_gather", std::move(channel), t, kind, held);
    } else if (buffers != nullptr && dispatch.direct()) {
      arrived_ = Direct::call<group_gather_pooled>(regather ? "te::group_gather_again" : "te::group_gather", t, name,
                                                   ranks, regather, *buffers, kind);
    } else if (regather) {
      arrived_ = dispatch.call<group_gather_again>("te::group_gather_again", t, gradient, name, ranks);
    } else {
      arrived_ = dispatch.call<group_gather>("te::group_gather", t, name, ranks);
    }
  }

  Tensor wait() {
    if (pending_ == nullptr) return arrived_;
    const Tensor all = pending_->wait();
    return keeps_ ? all.clone() : all;
  }

 private:
  bool keeps_ = false;
  std::unique_ptr<ScopedBuffers> own_;
  std::shared_ptr<PeerGathering> pending_;
  Tensor arrived_;
};

class GroupGather final : public GatherFuture {
 public:
  GroupGather(const DispatchMode& dispatch, const GroupTPComm& tp_comm, const Operand& mine, bool columnwise,
              const Quantizer* after_gather, QuantizeUsage usage, const Tensor& gradient, ScopedBuffers* buffers)
      : dispatch_(dispatch),
        ranks_(tp_comm.parallel().ranks),
        mine_(mine),
        columnwise_(columnwise),
        after_gather_(after_gather),
        usage_(usage) {
    const CollectivePathNote reason(after_gather != nullptr ? "process group, serial, quantized after" : nullptr,
                                    after_gather != nullptr ? why_values(*after_gather) : tp_comm.why_serial());
    const auto gather = [&](const Tensor& t, bool put_together, SlotKind kind) {
      return GatheredTensor(dispatch, tp_comm, t, rows_ * ranks_, gradient, put_together ? &own_ : buffers, kind);
    };
    rows_ = rows_in(mine, columnwise);
    if (!mine.quantized()) {
      data_ = gather(mine.plain, false, SlotKind::kValues);
      return;
    }
    const Quantized& q = mine.fp8;
    data_ = columnwise ? gather(q.columnwise, true, SlotKind::kColumns) : gather(q.rowwise, false, SlotKind::kValues);
    if (q.scaling == TE_SCALING_TENSOR) return;
    TORCH_INTERNAL_ASSERT(rows_ % kBlock == 0);
    scales_ = gather(columnwise ? q.columnwise_scale_inv : q.rowwise_scale_inv, along(), SlotKind::kScales);
  }

  Operand wait() override {
    Tensor all = data_.wait();
    if (!mine_.quantized()) {
      return after_gather_ != nullptr ? operand_of(dispatch_, after_gather_, all, usage_) : Operand{all, {}};
    }
    const Quantized& mine = mine_.fp8;
    if (columnwise_) all = side_by_side(dispatch_, all, ranks_, rows_);
    Tensor scales = columnwise_ ? mine.columnwise_scale_inv : mine.rowwise_scale_inv;
    if (mine.scaling != TE_SCALING_TENSOR) {
      scales = scales_.wait();
      if (along()) scales = side_by_side(dispatch_, scales, ranks_, columnwise_ ? rows_ / kBlock : rows_);
    }
    Quantized q{mine.scaling, mine.e5m2, {}, {}, {}, {}};
    (columnwise_ ? q.columnwise : q.rowwise) = all;
    (columnwise_ ? q.columnwise_scale_inv : q.rowwise_scale_inv) = scales;
    return {{}, q};
  }

 private:
  // Blocks whose scales lie along the rows: those of 1 x 128 rowwise, of 128 x 128 columnwise.
  bool along() const { return columnwise_ != te::scaling_row(mine_.fp8.scaling).across; }

  const DispatchMode dispatch_;
  const int64_t ranks_;
  const Operand mine_;
  const bool columnwise_;
  const Quantizer* const after_gather_;
  const QuantizeUsage usage_;
  c10::SymInt rows_;   // of this rank
  ScopedBuffers own_;  // of gathered tensors that are copied into memory of their own
  GatheredTensor data_, scales_;
};

class GroupCommOp final : public CommOp {
 public:
  GroupCommOp(const DispatchMode& dispatch, const GroupTPComm& tp_comm, bool adds_up, Operand arrived, Tensor like,
              const OptionalTensor& bias)
      : dispatch_(dispatch),
        parallel_(tp_comm.parallel()),
        group_(tp_comm.group()),
        why_serial_(tp_comm.why_serial()),
        adds_up_(adds_up),
        arrived_(std::move(arrived)),
        like_(std::move(like)),
        bias_(bias) {}

  const Operand& operand() const override { return arrived_; }
  const Tensor* at_once() const override { return &like_; }
  bool next_chunk(Rows&) override { return false; }

  void store_chunk(const Rows*, const Tensor& result) override {
    result_ = result;
    if (!adds_up_) return;
    const CollectivePathNote reason(nullptr, why_serial_);
    if (parallel_.sequence) {
      const std::string_view name(group_);
      ScopedBuffers buffers;  // end here: only the sum is used further on
      const Tensor partials =
          dispatch_.direct()
              ? Direct::call<group_exchange_pooled>("te::group_exchange", result, name, parallel_.ranks, buffers)
              : Dispatched::call<group_exchange>("te::group_exchange", result, name, parallel_.ranks);
      result_ = dispatch_.call<comm_ordered_sum>("te::comm_ordered_sum", partials, bias_);
    } else if (parallel_.sum != 0 && parallel_.mode == Parallel::kRow) {
      result_ = dispatch_.call<group_symmetric_sum>("te::group_symmetric_sum", result, std::string_view(group_),
                                                    parallel_.ranks, parallel_.sum);
    } else if (dispatch_.direct()) {
      result_ = result.contiguous();
      // The weight's gradient overlaps the sum of a column's input gradient; nothing overlaps that of a row's output.
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
  DispatchMode dispatch_;
  const Parallel parallel_;
  const std::string group_;
  const char* const why_serial_;  // the TPComm's
  bool adds_up_;
  Operand arrived_;
  Tensor like_, result_;
  OptionalTensor bias_;
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace

std::shared_ptr<PeerChannel> GroupTPComm::peers(const DispatchMode& dispatch, const Tensor& t, te_comm_op op,
                                                const c10::SymInt& tokens) const {
  if (parallel_.overlap == Parallel::kSerial || !parallel_.sequence || !dispatch.direct()) return nullptr;
  auto channel = PeerChannel::of(group_, t.device());
  if (!channel || parallel_.overlap != Parallel::kAuto) return channel;
  const te_comm_costs& costs = channel->costs();
  const bool few = tokens < (op == TE_COMM_GATHER_PRODUCT ? costs.least_gathered : costs.least_scattered);
  return few ? nullptr : channel;
}

std::string_view GroupTPComm::fingerprint_group(const Tensor& x) const {
  const bool gathers = column() && parallel_.sequence;
  const c10::SymInt tokens = rows_in({x, {}}, false) * (gathers ? parallel_.ranks : 1);
  const te_comm_op op = gathers ? TE_COMM_GATHER_PRODUCT : TE_COMM_PRODUCT_SCATTER;
  return peers(DispatchMode(Direct{}), x, op, tokens) == nullptr ? std::string_view(group_) : std::string_view();
}

void GroupTPComm::check(const Tensor& x) const {
  if (!parallel_.sequence) return;
  TORCH_CHECK_VALUE(x.dim() > 1, "linear: argument 'x' has shape ", x.sym_sizes(),
                    ", wanted at least two dimensions, the first of them tokens, with sequence_parallel.");
  if (column()) return;
  TORCH_CHECK_VALUE(x.sym_size(0) % parallel_.ranks == 0, "linear: argument 'x' has ", x.sym_size(0),
                    " tokens along dimension 0, which the ", parallel_.ranks,
                    " ranks of the tensor-parallel group do not divide; pad it.");
}

c10::SymInt GroupTPComm::rows_before(const c10::SymInt& rows) const {
  if (!parallel_.sequence) return rows;
  return column() ? rows / parallel_.ranks : rows * parallel_.ranks;
}

QuantizeAt GroupTPComm::quantize_at(const DispatchMode& dispatch, Pass pass, const Quantizer* quantizer,
                                    const Tensor& x) const {
  if (!gathers(pass) || quantizer == nullptr || !quantizer->active()) return QuantizeAt::kBeforeGather;
  switch (quantizer->spec.kind) {
    case QuantizeSpec::kCurrent:
      return dispatch.direct() ? QuantizeAt::kWithSharedAmax : QuantizeAt::kAfterGather;
    case QuantizeSpec::kBlock1d:
    case QuantizeSpec::kBlock2d: {
      c10::SymInt rows = 1;
      for (int64_t d = 0; d + 1 < x.dim(); ++d) rows = rows * x.sym_size(d);
      return rows % kBlock == 0 ? QuantizeAt::kBeforeGather : QuantizeAt::kAfterGather;
    }
    case QuantizeSpec::kPython:  // a part may be quantized otherwise than all rows
      return QuantizeAt::kAfterGather;
    default:
      return QuantizeAt::kBeforeGather;
  }
}

Operand GroupTPComm::quantized(const Quantizer& quantizer, const Tensor& x, QuantizeUsage usage) const {
  const CollectivePathNote reason(nullptr, why_serial());
  const Tensor amax = Direct::call<quantize_amax>("te::quantize_amax", x);
  Direct::call<group_amax>("te::group_amax", amax, x, std::string_view(group_), parallel_.ranks);
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  const Quantized out = empty_quantized(quantizer.spec, rows, x.size(-1), usage, x.options());
  return {{}, Direct::call<quantize_into>("te::quantize", quantizer, x, out, Tensor(), amax)};
}

std::unique_ptr<GatherFuture> GroupTPComm::gathering(const DispatchMode& dispatch, const Operand& mine, bool columnwise,
                                                     const Quantizer* after_gather, QuantizeUsage usage,
                                                     const Tensor& gradient, ScopedBuffers* buffers) const {
  return std::make_unique<GroupGather>(dispatch, *this, mine, columnwise, after_gather, usage, gradient, buffers);
}

std::unique_ptr<CommOp> GroupTPComm::begin(const DispatchMode& dispatch, Pass pass, const Operand& mine,
                                           const Tensor& like, const Quantizer* after_gather, QuantizeUsage usage,
                                           const OptionalTensor& bias, ScopedBuffers* buffers) const {
  if (!gathers(pass) && !adds_up(pass)) return nullptr;
  const c10::SymInt tokens = rows_in(mine, false) * (gathers(pass) ? parallel_.ranks : 1);
  const te_comm_op op = gathers(pass) ? TE_COMM_GATHER_PRODUCT : TE_COMM_PRODUCT_SCATTER;
  auto channel = peers(dispatch, mine.quantized() ? mine.fp8.rowwise : mine.plain, op, tokens);
  const bool automatic = parallel_.overlap == Parallel::kAuto;
  if (!gathers(pass)) {
    if (channel) return peer_product_scatter(std::move(channel), automatic, pass, mine, like, bias);
    return std::make_unique<GroupCommOp>(dispatch, *this, true, mine, like, bias);
  }
  const bool blocks = mine.quantized() && mine.fp8.scaling != TE_SCALING_TENSOR;
  if (channel && after_gather == nullptr && !blocks) {
    return peer_gather_product(std::move(channel), automatic, pass, mine, like, buffers);
  }
  Operand arrived = gathering(dispatch, mine, false, after_gather, usage, {}, buffers)->wait();
  const Tensor all = rows_like(like, like.sym_size(0) * parallel_.ranks);
  return std::make_unique<GroupCommOp>(dispatch, *this, false, std::move(arrived), all, bias);
}

Operand GroupTPComm::gather_all(const DispatchMode& dispatch, Pass pass, const Operand& mine,
                                const Quantizer* after_gather, const CommOp* done, const Tensor& gradient,
                                ScopedBuffers* buffers) const {
  if (!gathers(pass)) return mine;
  if (!mine.quantized() && done != nullptr) return buffers != nullptr ? done->operand() : off_pool(done->operand());
  return gathering(dispatch, mine, mine.fp8.columnwise.defined(), after_gather, {false, true}, gradient, buffers)
      ->wait();
}

std::unique_ptr<GatherFuture> GroupTPComm::begin_gather_all(const DispatchMode& dispatch, Pass pass,
                                                            const Operand& mine, const Quantizer* after_gather,
                                                            const Tensor& gradient, ScopedBuffers* buffers) const {
  const bool columnwise = mine.fp8.columnwise.defined();
  const Tensor& data = !mine.quantized() ? mine.plain : columnwise ? mine.fp8.columnwise : mine.fp8.rowwise;
  if (!gathers(pass)) return nullptr;
  const c10::SymInt tokens = rows_in(mine, columnwise) * parallel_.ranks;
  if (peers(dispatch, data, TE_COMM_GATHER_PRODUCT, tokens) == nullptr) return nullptr;
  return gathering(dispatch, mine, columnwise, after_gather, {false, true}, gradient, buffers);
}

std::shared_ptr<const TPComm> tp_comm_of(at::ArrayRef<int64_t> packed, std::string_view group, const char* op) {
  if (packed.empty()) return nullptr;
  struct Field {
    const char* name;
    int64_t least, most;
    const char* wanted;
  };
  static constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  static constexpr std::array<Field, Parallel::kPacked> kFields{{
      {"mode", Parallel::kColumn, Parallel::kRow, "1 (column) or 2 (row)"},
      {"sequence", 0, 1, "0 or 1"},
      {"recompute", Parallel::kGathered, Parallel::kArrived, "0 (kept), 1 (gathered again) or 2 (as it came)"},
      {"ranks", 0, kAny, "their number"},
      {"sum", 0, 2, "0 (the group), 1 (one_shot) or 2 (two_shot)"},
      {"overlap", Parallel::kSerial, Parallel::kAuto, "0 (serial), 1 (in runs over peers) or 2 (where that is faster)"},
  }};
  constexpr size_t kLeast = 4;  // the others are 0 where they are left out
  TORCH_CHECK_VALUE(packed.size() >= kLeast && packed.size() <= kFields.size(), op, ": argument 'parallel' has ",
                    packed.size(), " integers, wanted none, or ", kLeast, " to ", kFields.size(),
                    ": mode, sequence, recompute, ranks, sum, overlap.");
  for (size_t i = 0; i < packed.size(); ++i) {
    const Field& field = kFields[i];
    TORCH_CHECK_VALUE(packed[i] >= field.least && packed[i] <= field.most, op, ": argument 'parallel' has ", packed[i],
                      " as its number ", i, ", ", field.name, "; wanted ", field.wanted, ".");
  }
  const auto at = [&](size_t i) { return packed.size() > i ? packed[i] : 0; };
  const Parallel parallel{Parallel::Mode(packed[0]), packed[1] != 0, Parallel::Keeps(packed[2]), packed[3], at(4),
                          Parallel::Overlap(at(5))};
  return std::make_shared<GroupTPComm>(parallel, std::string(group));
}

}  // namespace te_torch::layer

namespace te_torch {

void register_tp_comm_group(pybind11::module_& m) {
  namespace py = pybind11;
  using namespace layer;
  py::class_<GroupTPComm, std::shared_ptr<GroupTPComm>>(m, "GroupTPComm")
      .def(py::init([](int64_t mode, bool sequence, int64_t recompute, int64_t ranks, const std::string& group,
                       int64_t sum, int64_t overlap, const std::string& why_serial) {
             const std::vector<int64_t> packed{mode, sequence, recompute, ranks, sum, overlap};
             tp_comm_of(packed, group, "GroupTPComm");
             return std::make_shared<GroupTPComm>(Parallel{Parallel::Mode(mode), sequence, Parallel::Keeps(recompute),
                                                           ranks, sum, Parallel::Overlap(overlap)},
                                                  group, why_serial);
           }),
           py::arg("mode"), py::arg("sequence"), py::arg("recompute"), py::arg("ranks"), py::arg("group"),
           py::arg("sum") = 0, py::arg("overlap") = 0, py::arg("why_serial") = "")
      .def(
          "reaches",
          [](const GroupTPComm& e, const at::Device& device) {
            return e.parallel().overlap == Parallel::kSerial || PeerChannel::has_met(e.group(), device);
          },
          "Whether the group's ranks have met on this device, if the communication goes over peers.")
      .def_property_readonly("spec", [](const GroupTPComm& e) { return e.parallel().pack(); })
      .def_property_readonly("group", &GroupTPComm::group);
  m.def("set_symmetric_sum", [](const py::function& function) { set_symmetric_sum(function.ptr()); });
}

}  // namespace te_torch
