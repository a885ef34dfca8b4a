// Groups of consecutive rows, one for each weight of a layer, for the GemmPolicies over groups.
// - The sizes of the groups are on the host, or on the device alone.
// - Rows after the last group belong to no group.
#pragma once

#include "layer/gemm_policy.h"

namespace te_torch::layer {

struct Grouping {
  // splits: the rows of each group; empty if they are on the device alone. offsets: int32 [groups + 1], where each
  // group's rows start. With both, grouped kernels compute all groups at once.
  std::vector<int64_t> splits;
  Tensor offsets;
  // One for all groups, or one for each; empty: GEMMs without quantization.
  std::vector<Quantization> quantizations;
  // Buffers of the results; rows of no group are not written. Undefined: new tensors, with zeros in rows of no group.
  Tensor out, dgrad_out;
  // Whether nothing reads the rows of no group of new results, which may then hold anything.
  bool tail_unread = false, dgrad_tail_unread = false;
  // With splits and offsets: marks the groups that the kernel leaves to a GEMM of their own.
  std::vector<uint8_t> fprop_each = {}, dgrad_each = {};
  // With splits and offsets: whether the bits are those of a separate layer for each group, else those of sizes on the
  // device.
  bool bits_of_loop = false;
  // The caller's offsets, where `splits` was read from them; the last one counts the live rows.
  Tensor read_offsets = {};
  // Whether the weights are one tensor [groups, N, K], whose gradient is one too.
  bool stacked = false;
};

c10::SmallVector<Rows, 8> rows_of_groups(at::ArrayRef<int64_t> splits);
// The sums of each group's columns.
Sums column_sums_of(const DispatchMode& dispatch, const Tensor& dy, at::ArrayRef<Rows> groups);

// The weights as a matrix for each group: w itself, or `matrices`, which this fills from a stacked plain weight.
const WeightSet& matrices_of(const DispatchMode& dispatch, const WeightSet& w, WeightSet& matrices);

// The weight gradients of all groups: a matrix for each.
class GroupsWgrad : public WgradTask {
 public:
  // compute() with one tensor [groups, N, K] in place of the matrices, to the same bits.
  virtual WeightGrads compute_stacked(const DispatchMode& dispatch, bool with_bias) const = 0;
  virtual int64_t features() const = 0;  // N
};
// The task as autograd and accumulators see it. stacked: of one weight [groups, N, K], whose gradient is one tensor and
// whose target, in main_grad, may be some groups' part of it.
std::shared_ptr<WgradTask> wgrad_of(std::shared_ptr<GroupsWgrad> groups, bool stacked);

// The counter of the rows of all groups, the last of their offsets; undefined for sizes that are in a list.
Tensor live_rows_of(const Grouping& grouping);
Tensor last_offset(const Tensor& offsets);  // as a vector of one

// Raises ValueError if a buffer of the caller shares memory with an operand of the GEMM.
void check_apart(const Tensor& given, const char* argument, const Operand& read);

// The result in a buffer of the caller's, without the buffer's graph.
Tensor result_in(const Tensor& given, const Tensor& like);

// Below autograd a view has a version of its own: gives it that of its base, so that autograd detects writes through
// both.
void share_version(const Tensor& view, const Tensor& base);

}  // namespace te_torch::layer
