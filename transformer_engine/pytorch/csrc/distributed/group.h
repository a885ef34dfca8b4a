// Collectives of layers along the first dimension, over a process group that is found by its name. Each is a function
// and a registered op (te::group_*) without a derivative.
#pragma once

#include <Python.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "core/comm_buffer_pool.h"
#include "core/common.h"

namespace te_torch {

// The group of a name. RuntimeError where it does not exist or has another number of ranks.
c10::intrusive_ptr<c10d::ProcessGroup> group_named(std::string_view name, int64_t ranks);

// While it lives, te.explain shows this path and reason for the collectives of this thread. Null: the default ones.
class CollectivePathNote {
 public:
  CollectivePathNote(const char* path, const char* reason);
  ~CollectivePathNote();
  CollectivePathNote(const CollectivePathNote&) = delete;
  CollectivePathNote& operator=(const CollectivePathNote&) = delete;

 private:
  const char *outer_path_, *outer_reason_;
};

// Concatenates every rank's t [n, ...] in the order of the ranks: [ranks * n, ...].
Tensor group_gather(const Tensor& t, std::string_view group, int64_t ranks);

// The same for a backward, with its `gradient` as an argument: a tracer would merge this gather with the forward's
// equal one and keep the result; with the argument it cannot run before the gradient exists.
Tensor group_gather_again(const Tensor& t, const Tensor& gradient, std::string_view group, int64_t ranks);

// Gather and exchange with results in pooled buffers, which live as long as `buffers`.
Tensor group_gather_pooled(const Tensor& t, std::string_view group, int64_t ranks, bool for_backward,
                           ScopedBuffers& buffers, SlotKind kind);
Tensor group_exchange_pooled(const Tensor& t, std::string_view group, int64_t ranks, ScopedBuffers& buffers);

// This rank's n rows of every rank's t [ranks * n, ...]: [ranks, n, ...], in the order of the ranks.
Tensor group_exchange(const Tensor& t, std::string_view group, int64_t ranks);

// The sum of every rank's t.
Tensor group_sum(const Tensor& t, std::string_view group, int64_t ranks);

// The same by kernels that read the other ranks' memory, torch's symmetric memory: kind 1 (one shot) or 2 (two shots).
// Calls the function set by set_symmetric_sum(); on the CPU, which has no such memory, an all-reduce.
Tensor group_symmetric_sum(const Tensor& t, std::string_view group, int64_t ranks, int64_t kind);

void set_symmetric_sum(PyObject* function);  // (tensor, group, ranks, kind) -> sum. Requires the GIL

// Sets amax, that of this rank's x, to the maximum over the ranks. The ranks have to agree on the shape and dtype of x.
void group_amax(const Tensor& amax, const Tensor& x, std::string_view group, int64_t ranks);

// Starts to sum t over the ranks in place; t may not be read or written until the work is done. asynchronous: it
// overlaps later work of the caller; else the caller waits directly after this call.
c10::intrusive_ptr<c10d::Work> begin_group_sum(const Tensor& t, std::string_view group, int64_t ranks,
                                               bool asynchronous);

}  // namespace te_torch
