// What layers hand from rank to rank: collectives along the first dimension over a process group, which is found by its
// name. Each as a function and as a registered op (te::group_*); none of them is differentiated here.
#pragma once

#include <Python.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "core/comm_buffer_pool.h"
#include "core/common.h"

namespace te_torch {

// The ranks of a group. RuntimeError where no group has that name, or one of another size.
c10::intrusive_ptr<c10d::ProcessGroup> group_named(std::string_view name, int64_t ranks);

// While it lives, te.explain hears these words of this thread's collectives: the path, and why there is no faster one.
// Null: its own.
class WhySerial {
 public:
  WhySerial(const char* path, const char* why);
  ~WhySerial();
  WhySerial(const WhySerial&) = delete;
  WhySerial& operator=(const WhySerial&) = delete;

 private:
  const char *outer_path_, *outer_why_;
};

// Every rank's t, one behind the other in the order of the ranks: [ranks * n, ...] of [n, ...].
Tensor group_gather(const Tensor& t, std::string_view group, int64_t ranks);

// The same for a backward, which has `gradient` by then. A traced graph would merge two equal gathers into one and keep
// what it brought; this one cannot be computed before the gradient is there.
Tensor group_gather_again(const Tensor& t, const Tensor& gradient, std::string_view group, int64_t ranks);

// The two, and the TPComm below, in memory that `buffers` have until the call that reads it has ended.
Tensor group_gather_leased(const Tensor& t, std::string_view group, int64_t ranks, bool again, ScopedBuffers& buffers,
                           SlotKind kind);
Tensor group_exchange_pooled(const Tensor& t, std::string_view group, int64_t ranks, ScopedBuffers& buffers);

// Of every rank's t [ranks * n, ...] the n rows that are this rank's: [ranks, n, ...], in the order of the ranks.
Tensor group_exchange(const Tensor& t, std::string_view group, int64_t ranks);

// The sum of every rank's t.
Tensor group_sum(const Tensor& t, std::string_view group, int64_t ranks);

// The same, by kernels that read the other ranks' memory: kind 1 (one shot) or 2 (two shots). Torch's symmetric memory,
// by what Python has lent; on the CPU, where there is no such memory, group_sum.
Tensor group_symmetric_sum(const Tensor& t, std::string_view group, int64_t ranks, int64_t kind);

void lend_symmetric_sum(PyObject* function);  // (tensor, group, ranks, kind) -> its sum. The GIL is held

// Makes amax, that of this rank's x, the largest of every rank's. x is what the ranks have to agree on.
void group_amax(const Tensor& amax, const Tensor& x, std::string_view group, int64_t ranks);

// The sum of every rank's t, into t, which nobody else may read or write until the work is done. aside: it runs beside
// what the caller does until then; else it is awaited at once.
c10::intrusive_ptr<c10d::Work> begin_group_sum(const Tensor& t, std::string_view group, int64_t ranks, bool aside);

}  // namespace te_torch
