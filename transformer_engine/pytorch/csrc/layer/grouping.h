// Groups of consecutive rows, one for each weight of a layer: what GemmPolicies over groups share.
// - The host knows the groups' sizes, or the device alone.
// - Rows after the last group belong to no group.
#pragma once

#include "layer/gemm_policy.h"

namespace te_torch::layer {

struct Grouping {
  // Rows of each group. None: the device knows, and where each group's rows start is in `offsets`, int32 [groups + 1].
  // Both: the host knows, and grouped kernels compute all groups at once.
  std::vector<int64_t> splits;
  Tensor offsets;
  // One for all groups, or one for each; none: plain products.
  std::vector<Quantization> quantizations;
  // Buffers of the results, whose rows of no group stay as they are. Undefined: new tensors, with zeros in such rows.
  Tensor out, dgrad_out;
  // With splits and offsets: marks the groups that the kernel leaves to a GEMM of their own.
  std::vector<uint8_t> fprop_each = {}, dgrad_each = {};
  // The caller's offsets, where `splits` was read from them; the last one counts the live rows.
  Tensor read_offsets = {};
};

c10::SmallVector<Rows, 8> rows_of_groups(at::ArrayRef<int64_t> splits);
// The sums of each group's columns.
Sums column_sums_of(const DispatchMode& dispatch, const Tensor& dy, at::ArrayRef<Rows> groups);

// The counter of the rows of all groups, the last of their offsets; undefined for sizes that are in a list.
Tensor live_rows_of(const Grouping& grouping);

// Raises where a buffer of the caller's shares memory with what the product reads.
void check_apart(const Tensor& given, const char* argument, const Operand& read);

// The result in a buffer of the caller's, without the buffer's graph.
Tensor result_in(const Tensor& given, const Tensor& like);

// Below autograd a view has a version of its own: gives it that of its base, so that writes are noticed through both.
void share_version(const Tensor& view, const Tensor& base);

}  // namespace te_torch::layer
