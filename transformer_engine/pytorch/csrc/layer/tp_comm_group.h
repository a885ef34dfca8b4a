// The TPComm of tensor parallelism sends rows of tokens over a process group, in one collective before or after the
// GEMM, or over a channel to peers, in chunks (tp_comm_peer.h).
// - column, sequence: fprop gathers x; dgrad's partial results are summed and scattered; wgrad gathers x again.
// - row, sequence: fprop's partial results are summed and scattered, then the bias is added; dgrad and wgrad gather dy.
// - without sequence: a column's dgrad and a row's fprop are summed, and every rank has all rows.
#pragma once

#include <string>

#include "distributed/peer.h"
#include "layer/tp_comm.h"

namespace te_torch::layer {

// As plain values: what a schema carries beside the group's name.
struct Parallel {
  enum Mode : int64_t { kColumn = 1, kRow = 2 } mode = kColumn;
  bool sequence = false;  // dimension 0 is divided over the ranks
  // The parts of a column-parallel layer's gathered input that are saved: all; none, and the backward gathers the input
  // again; or only the data that the GEMM gathers, without FP8 columnwise data, which would be gathered just to be
  // saved: for runs under a checkpoint.
  enum Keeps : int64_t { kGathered, kNothing, kArrived } keeps = kGathered;
  int64_t ranks = 1;
  // How the output of a row-parallel layer is summed if it is not scattered: by the group (0), or by kernels over
  // symmetric memory.
  int64_t sum = 0;

  // How GEMMs and communication overlap: not at all (kSerial); in chunks, over a channel to peers (distributed/peer.h);
  // or in chunks where the costs of the device predict that these are faster.
  enum Overlap : int64_t { kSerial = 0, kChunked = 1, kAuto = 2 } overlap = kSerial;

  static constexpr size_t kPacked = 6;
  std::vector<int64_t> pack() const { return {mode, sequence, keeps, ranks, sum, overlap}; }
};

class GroupTPComm final : public TPComm {
 public:
  // why_serial: the reason that te.explain shows for collectives over the group; empty: that of distributed/group.h.
  GroupTPComm(const Parallel& parallel, std::string group, std::string why_serial = {})
      : parallel_(parallel), group_(std::move(group)), why_serial_(std::move(why_serial)) {}

  const Parallel& parallel() const { return parallel_; }
  const std::string& group() const { return group_; }
  // The channel, if this collective goes over peers; else null. tokens: of all ranks.
  std::shared_ptr<PeerChannel> peers(const DispatchMode& dispatch, const Tensor& t, te_comm_op op,
                                     const c10::SymInt& tokens) const;
  const char* why_serial() const { return why_serial_.empty() ? nullptr : why_serial_.c_str(); }

  std::string_view fingerprint_group(const Tensor& x) const override;
  void check(const Tensor& x) const override;
  bool gathers(Pass pass) const override {
    return parallel_.sequence && pass == (column() ? Pass::kFprop : Pass::kDgrad);
  }
  bool adds_up(Pass pass) const override { return pass == (column() ? Pass::kDgrad : Pass::kFprop); }
  c10::SymInt rows_before(const c10::SymInt& rows) const override;
  bool keeps_gathered(bool quantized) const override {
    return parallel_.keeps == Parallel::kGathered || (parallel_.keeps == Parallel::kArrived && !quantized);
  }
  QuantizeAt quantize_at(const DispatchMode& dispatch, Pass pass, const Quantizer* quantizer,
                         const Tensor& x) const override;
  Operand quantized(const Quantizer& quantizer, const Tensor& x, QuantizeUsage usage) const override;
  std::unique_ptr<CommOp> begin(const DispatchMode& dispatch, Pass pass, const Operand& mine, const Tensor& like,
                                const Quantizer* after_gather, QuantizeUsage usage, const OptionalTensor& bias,
                                ScopedBuffers* buffers) const override;
  Operand gather_all(const DispatchMode& dispatch, Pass pass, const Operand& mine, const Quantizer* after_gather,
                     const CommOp* done, const Tensor& gradient, ScopedBuffers* buffers) const override;
  bool begins_ahead() const override { return parallel_.overlap != Parallel::kSerial; }
  std::unique_ptr<GatherFuture> begin_gather_all(const DispatchMode& dispatch, Pass pass, const Operand& mine,
                                                 const Quantizer* after_gather, const Tensor& gradient,
                                                 ScopedBuffers* buffers) const override;

 private:
  bool column() const { return parallel_.mode == Parallel::kColumn; }
  // columnwise: that direction of an FP8 operand. after_gather: quantizes a plain one in `usage`.
  std::unique_ptr<GatherFuture> gathering(const DispatchMode& dispatch, const Operand& mine, bool columnwise,
                                          const Quantizer* after_gather, QuantizeUsage usage, const Tensor& gradient,
                                          ScopedBuffers* buffers) const;

  Parallel parallel_;
  std::string group_, why_serial_;
};

// None for no integers.
std::shared_ptr<const TPComm> tp_comm_of(at::ArrayRef<int64_t> packed, std::string_view group, const char* op);

}  // namespace te_torch::layer
