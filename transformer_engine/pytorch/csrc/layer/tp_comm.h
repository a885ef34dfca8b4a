// A TPComm runs the collective of tensor parallelism around a layer's GEMM: it gives the GEMM rows of its operand as
// they arrive, and sends rows of its result away.
// - A local layer has none.
#pragma once

#include <transformer_engine/gemm.h>

#include <ATen/ops/empty.h>

#include <memory>
#include <optional>
#include <string_view>

#include "core/comm_buffer_pool.h"
#include "core/rows_view.h"
#include "gemm/product.h"

namespace te_torch::layer {

// A GEMM by its operand: the layer's operand, or the gradient of the result.
enum class Pass : uint8_t { kFprop, kDgrad };

// A result that a GEMM may compute in chunks of rows: its columns, and the tile of the algorithm.
struct ChunkedResult {
  int64_t columns;
  te_gemm_tile tile;
};

// The communication of one GEMM.
class TE_EXPORT CommOp {
 public:
  CommOp() = default;
  virtual ~CommOp() = default;
  CommOp(const CommOp&) = delete;
  CommOp& operator=(const CommOp&) = delete;

  // The operand of the GEMM. Only the rows that next_chunk() has named are valid.
  virtual const Operand& operand() const = 0;
  // Null: rows arrive in chunks. Else all rows have arrived, next_chunk() is not called, and the GEMM's result has the
  // leading dimensions and the dtype of this tensor.
  virtual const Tensor* at_once() const { return nullptr; }
  // All rows of the GEMM, if it may run in chunks; else 0.
  virtual int64_t rows() const { return 0; }
  // Called first. result: if chunks of its rows have the bits of one GEMM over all rows.
  virtual void plan_chunks(const std::optional<ChunkedResult>& result) {}
  // The buffer for the result of all rows, [rows, cols] of its dtype; undefined: any, and store_chunk() moves it.
  virtual Tensor output_buffer() const { return {}; }
  // The operand's rows of a chunk.
  virtual Operand part(const Rows& rows) const { return rows_of(operand(), rows); }
  // Names the next rows that have arrived; an operand without rows has one empty chunk. False: no chunk is left. It may
  // set another current stream for part(), the GEMM of these rows and store_chunk(), until it returns false.
  virtual bool next_chunk(Rows& rows) = 0;
  // Takes these rows of the GEMM's result, [rows, features]; rows is null for all at once.
  virtual void store_chunk(const Rows* rows, const Tensor& result) = 0;
  // Waits, and returns the layer's result after all chunks are stored.
  virtual Tensor finish() = 0;
};

// A gather of an operand's rows from all ranks. The call that has begun it must wait for it.
class TE_EXPORT GatherFuture {
 public:
  GatherFuture() = default;
  virtual ~GatherFuture() = default;
  GatherFuture(const GatherFuture&) = delete;
  GatherFuture& operator=(const GatherFuture&) = delete;

  virtual Operand wait() = 0;
};

// When an operand is quantized: by its producer, before the gather; by the TPComm, by a scale from the amax of all
// ranks; or after the gather.
enum class QuantizeAt : uint8_t { kBeforeGather, kWithSharedAmax, kAfterGather };

class TE_EXPORT TPComm {
 public:
  TPComm() = default;
  virtual ~TPComm() = default;
  TPComm(const TPComm&) = delete;
  TPComm& operator=(const TPComm&) = delete;

  // The process group whose ranks compare fingerprints before a call's first collective; empty: they compare them in
  // another way. x: the input of the call.
  virtual std::string_view fingerprint_group(const Tensor& x) const { return {}; }
  // Refuses an x that cannot be communicated.
  virtual void check(const Tensor& x) const {}
  // Whether the operand of this pass is gathered from all ranks.
  virtual bool gathers(Pass) const { return false; }
  // Whether the result of this pass is summed over ranks. The CommOp adds the bias after that.
  virtual bool adds_up(Pass) const { return false; }
  // The size of dimension 0 of fprop's operand, if the result has `rows` rows there.
  virtual c10::SymInt rows_before(const c10::SymInt& rows) const { return rows; }
  // Whether the operand that the forward has gathered is saved; if not, the backward gathers it again. quantized: FP8
  // would be saved.
  virtual bool keeps_gathered(bool quantized) const { return false; }
  virtual QuantizeAt quantize_at(const DispatchMode&, Pass, const Quantizer*, const Tensor& x) const {
    return QuantizeAt::kBeforeGather;
  }
  // For QuantizeAt::kWithSharedAmax.
  virtual Operand quantized(const Quantizer& quantizer, const Tensor& x, QuantizeUsage usage) const { return {x, {}}; }

  // Begins the communication of a GEMM; returns null if the pass is local.
  // - mine: the operand of this process; like: has its leading dimensions and the dtype of the result.
  // - after_gather: quantizes the gathered operand in `usage`; null: it stays as it was sent.
  // - bias: of a pass that adds_up().
  // - buffers: of the call that reads the gathered operand; null: that is saved, and needs memory of its own.
  // - A traced call receives all rows at once.
  virtual std::unique_ptr<CommOp> begin(const DispatchMode& dispatch, Pass pass, const Operand& mine,
                                        const Tensor& like, const Quantizer* after_gather, QuantizeUsage usage,
                                        const OptionalTensor& bias, ScopedBuffers* buffers) const = 0;
  // The operand of this pass with the rows of all ranks, for the weight's gradient: FP8 columnwise, or rowwise if it
  // has only that. done: a CommOp of the same pass and call, or null. gradient: the incoming one of a backward;
  // undefined in a forward. buffers: as for begin().
  virtual Operand gather_all(const DispatchMode& dispatch, Pass pass, const Operand& mine,
                             const Quantizer* after_gather, const CommOp* done, const Tensor& gradient,
                             ScopedBuffers* buffers) const = 0;
  // Whether beginning that early saves time.
  virtual bool begins_ahead() const { return false; }
  // Returns null if this operand cannot be gathered asynchronously.
  virtual std::unique_ptr<GatherFuture> begin_gather_all(const DispatchMode& dispatch, Pass pass, const Operand& mine,
                                                         const Quantizer* after_gather, const Tensor& gradient,
                                                         ScopedBuffers* buffers) const {
    return nullptr;
  }
};

// The result of a GEMM whose communication may not be finished.
struct PendingResult {
  std::unique_ptr<CommOp> comm_op;
  Tensor local;  // the result, without a CommOp

  bool defined() const { return comm_op != nullptr || local.defined(); }
  Tensor result() const { return comm_op != nullptr ? comm_op->finish() : local; }
};

// Calls product(operand, rows, like, into) for all rows, in chunks or at once (rows is null then). Its result has the
// leading dimensions of `like`, and is in `into` if that is defined. ahead(CommOp) calls plan_chunks().
template <class Product, class Ahead>
PendingResult through(std::unique_ptr<CommOp> comm_op, const Operand& mine, const Tensor& like, Product&& product,
                      Ahead&& ahead) {
  if (comm_op == nullptr) return {nullptr, product(mine, static_cast<const Rows*>(nullptr), like, Tensor())};
  ahead(*comm_op);
  if (const Tensor* all = comm_op->at_once()) {
    comm_op->store_chunk(nullptr, product(comm_op->operand(), static_cast<const Rows*>(nullptr), *all, Tensor()));
    return {std::move(comm_op), {}};
  }
  const Tensor buffer = comm_op->output_buffer();
  Rows rows;
  while (comm_op->next_chunk(rows)) {
    const Tensor into = buffer.defined() ? rows_view(buffer, rows.first, rows.count) : Tensor();
    const Tensor shape = into.defined() ? into : at::empty({rows.count, 0}, like.options());
    comm_op->store_chunk(&rows, product(comm_op->part(rows), &rows, shape, into));
  }
  return {std::move(comm_op), {}};
}

}  // namespace te_torch::layer
