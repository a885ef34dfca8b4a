// See collective_call.h.
#include "distributed/collective_call.h"

#include <algorithm>
#include <cstring>
#include <sstream>

namespace te_torch {

namespace {

constexpr size_t kNameWords = 6, kMaxSizes = 12;
enum Position : size_t { kOp = 0, kVariant = kNameWords, kDtype, kDim, kFirstSize, kCount = kFirstSize + kMaxSizes };
static_assert(kCount == kCallNumbers);

}  // namespace

CallNumbers encode_call(const CollectiveCall& call) {
  CallNumbers numbers{};
  std::memcpy(numbers.data() + kOp, call.op.data(), std::min(call.op.size(), kNameWords * sizeof(int64_t)));
  numbers[kVariant] = call.variant;
  numbers[kDtype] = int64_t(call.dtype);
  numbers[kDim] = int64_t(std::min(call.sizes.size(), kMaxSizes));
  std::copy_n(call.sizes.begin(), numbers[kDim], numbers.begin() + kFirstSize);
  return numbers;
}

CollectiveCall decode_call(const CallNumbers& numbers) {
  char name[kNameWords * sizeof(int64_t) + 1] = {};
  std::memcpy(name, numbers.data() + kOp, sizeof(name) - 1);
  const int64_t* const sizes = numbers.data() + kFirstSize;
  return {name, numbers[kVariant], at::ScalarType(numbers[kDtype]), {sizes, sizes + numbers[kDim]}};
}

std::string describe_call(size_t rank, const CollectiveCall& call) {
  std::ostringstream text;
  if (call.variant == CollectiveCall::kRaised) {
    text << "rank " << rank << " does not join: its call of " << call.op << " has raised an error there";
  } else {
    text << "rank " << rank << " passes " << call.dtype << " " << at::IntArrayRef(call.sizes) << " to " << call.op;
  }
  return text.str();
}

}  // namespace te_torch
