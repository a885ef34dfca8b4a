// The collective of tensor parallelism around a layer's GEMM: hands the GEMM rows of its operand as they arrive, and
// takes rows of its result away. A local layer has none.
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "core/comm_buffer_pool.h"
#include "gemm/product.h"

namespace te_torch::layer {

// The product, by what it reads: the layer's operand, or the gradient of its result.
enum class Pass : uint8_t { kFprop, kDgrad };

// One product's way through a TPComm.
class TE_EXPORT CommOp {
 public:
  CommOp() = default;
  virtual ~CommOp() = default;
  CommOp(const CommOp&) = delete;
  CommOp& operator=(const CommOp&) = delete;

  // What the product reads; of its rows only those that next_chunk() has named.
  virtual const Operand& operand() const = 0;
  // Null: rows arrive in runs. Else all are here, next_chunk() is not asked, and the product's result has the leading
  // dimensions and the dtype of this.
  virtual const Tensor* at_once() const { return nullptr; }
  // All rows of the product, where runs of them may be asked for; else 0.
  virtual int64_t rows() const { return 0; }
  // Before either is asked: the columns of the result, where runs of its rows have the bits of the whole.
  virtual void plan_chunks(std::optional<int64_t> columns) {}
  // Where the result of all rows is to be, [rows, cols]; undefined: anywhere, and store_chunk() moves it.
  virtual Tensor output_buffer() const { return {}; }
  // What the product reads of these rows.
  virtual Operand part(const Rows& rows) const { return rows_of(operand(), rows); }
  // The next rows that have arrived; of an operand without rows, once, none of them. False: there are no more. The
  // current stream may be another one from here on, for part(), the product of these rows and store_chunk(), until it
  // is false.
  virtual bool next_chunk(Rows& rows) = 0;
  // These rows of the product's result, [rows, features]; rows is null for all of them at once.
  virtual void store_chunk(const Rows* rows, const Tensor& result) = 0;
  // What goes on in place of the result, when all rows were taken. What has to be waited for is, here.
  virtual Tensor finish() = 0;
};

// An operand of which all ranks' rows are on their way: to be waited for, in the call that has begun it.
class TE_EXPORT GatherFuture {
 public:
  GatherFuture() = default;
  virtual ~GatherFuture() = default;
  GatherFuture(const GatherFuture&) = delete;
  GatherFuture& operator=(const GatherFuture&) = delete;

  virtual Operand wait() = 0;
};

// When an operand that is handed over is quantized: by who makes it, as without a TPComm; by the TPComm, with what
// all ranks have to say about its scale; or when all of it has arrived.
enum class QuantizeAt : uint8_t { kBeforeGather, kWithSharedAmax, kAfterGather };

class TE_EXPORT TPComm {
 public:
  TPComm() = default;
  virtual ~TPComm() = default;
  TPComm(const TPComm&) = delete;
  TPComm& operator=(const TPComm&) = delete;

  // The process group whose ranks ask each other before a call's first collective, or none: ranks that hear of each
  // other in another way. x: what the call is given.
  virtual std::string_view asking_group(const Tensor& x) const { return {}; }
  // Refuses an x that cannot be handed over, before anything is done with it.
  virtual void check(const Tensor& x) const {}
  // Whether what the product of this pass reads comes from others too.
  virtual bool gathers(Pass) const { return false; }
  // Whether others add to the result of this pass: a bias is added after them then, by the CommOp.
  virtual bool adds_up(Pass) const { return false; }
  // Of fprop: the size of its operand's dimension 0 whose result has `rows` there.
  virtual c10::SymInt rows_before(const c10::SymInt& rows) const { return rows; }
  // Whether what the forward has gathered of its operand is kept for the backward, which gathers it again otherwise.
  // quantized: what would be kept comes in FP8.
  virtual bool keeps_gathered(bool quantized) const { return false; }
  virtual QuantizeAt quantize_at(const DispatchMode&, Pass, const Quantizer*, const Tensor& x) const {
    return QuantizeAt::kBeforeGather;
  }
  // Of QuantizeAt::kWithSharedAmax.
  virtual Operand quantized(const Quantizer& quantizer, const Tensor& x, QuantizeUsage usage) const { return {x, {}}; }

  // `mine` is what this process has; `like` has its leading dimensions and the dtype of the result. behind: quantizes
  // what has arrived in `directions`; null: it comes as it was sent. bias: of a pass that adds up. Null: all is here
  // and stays here; in a call that is traced (dispatch mode) rows do not arrive one behind the other. buffers: of the
  // call of a node's forward or backward that reads what arrives, and that goes on without it; null where somebody
  // keeps it.
  virtual std::unique_ptr<CommOp> begin(const DispatchMode& dispatch, Pass pass, const Operand& mine,
                                        const Tensor& like, const Quantizer* behind, QuantizeUsage usage,
                                        const OptionalTensor& bias, ScopedBuffers* buffers) const = 0;
  // All rows of what the product of this pass reads, for the product of a weight's gradient, which reads both; of an
  // FP8 operand columnwise, or rowwise where it has that alone. done: of the same pass, in the same call, or null.
  // gradient: what the backward came with; undefined in a forward. buffers: as of begin().
  virtual Operand whole(const DispatchMode& dispatch, Pass pass, const Operand& mine, const Quantizer* behind,
                        const CommOp* done, const Tensor& gradient, ScopedBuffers* buffers) const = 0;
  // Whether time is won by beginning that ahead of what is computed before it is read.
  virtual bool begins_ahead() const { return false; }
  // Null: not by this operand's.
  virtual std::unique_ptr<GatherFuture> begin_whole(const DispatchMode& dispatch, Pass pass, const Operand& mine,
                                                    const Quantizer* behind, const Tensor& gradient,
                                                    ScopedBuffers* buffers) const {
    return nullptr;
  }
};

// A product's result on its way.
struct PendingResult {
  std::unique_ptr<CommOp> comm_op;
  Tensor local;  // where there is none

  bool defined() const { return comm_op != nullptr || local.defined(); }
  Tensor result() const { return comm_op != nullptr ? comm_op->finish() : local; }
};

// product(operand, rows, like, into) for all rows; rows is null for the whole. Its result has the leading dimensions of
// `like`, and is made in `into` where that is defined. ahead(CommOp): what a CommOp wants to know first.
template <class Product, class Ahead>
PendingResult through(std::unique_ptr<CommOp> comm_op, const Operand& mine, const Tensor& like, Product&& product,
                      Ahead&& ahead) {
  if (comm_op == nullptr) return {nullptr, product(mine, static_cast<const Rows*>(nullptr), like, Tensor())};
  ahead(*comm_op);
  if (const Tensor* all = comm_op->at_once()) {
    comm_op->store_chunk(nullptr, product(comm_op->operand(), static_cast<const Rows*>(nullptr), *all, Tensor()));
    return {std::move(comm_op), {}};
  }
  const Tensor room = comm_op->output_buffer();
  Rows rows;
  while (comm_op->next_chunk(rows)) {
    const Tensor shape = like.new_empty({0}).expand({rows.count, 0});
    const Tensor into = room.defined() ? room.narrow(0, rows.first, rows.count) : Tensor();
    comm_op->store_chunk(&rows, product(comm_op->part(rows), &rows, shape, into));
  }
  return {std::move(comm_op), {}};
}

}  // namespace te_torch::layer
