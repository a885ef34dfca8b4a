// A rank's call of a collective as data: agreement.h compares it between the ranks before the collective,
// fingerprints.h while it runs.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/common.h"

namespace te_torch {

struct CollectiveCall {
  static constexpr int64_t kRaised = -1;  // variant: an error has ended the rank's call of op before the collective

  std::string op;       // at most 48 characters are compared
  int64_t variant = 0;  // a hash of everything else that has to be equal
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;  // at most 12

  bool operator==(const CollectiveCall& other) const {
    return op == other.op && variant == other.variant && dtype == other.dtype && sizes == other.sizes;
  }
};

// The same as numbers, for other processes: 48 bytes of op, variant, dtype, the count of sizes, 12 sizes.
inline constexpr size_t kCallNumbers = 21;
using CallNumbers = std::array<int64_t, kCallNumbers>;
CallNumbers encode_call(const CollectiveCall& call);
CollectiveCall decode_call(const CallNumbers& numbers);

// "rank 1 passes Float [128, 32] to group_gather".
std::string describe_call(size_t rank, const CollectiveCall& call);

}  // namespace te_torch
