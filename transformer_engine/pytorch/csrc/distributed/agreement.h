// What the ranks of a group say before they send: over gloo a rank that brings something else to a collective ends the
// other processes, or hangs them. All questions have one form, so that ranks in different places understand each other.
// Over NCCL nobody is asked: what a rank says is compared beside its work (fingerprints.h).
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <string>
#include <vector>

#include "core/common.h"

namespace te_torch {

// What a rank is about to do: in which operation, how (a hash of what else has to be equal), with what.
struct Said {
  static constexpr int64_t kRaised = -1;  // how: it does not come, as an error has ended its call of op

  std::string op;  // at most 48 characters of it travel
  int64_t how = 0;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;  // at most 12

  bool operator==(const Said& other) const {
    return op == other.op && how == other.how && dtype == other.dtype && sizes == other.sizes;
  }
};

// The same as numbers, for other processes: 48 bytes of op, how, dtype, the count of sizes, 12 sizes.
inline constexpr size_t kSaidNumbers = 21;
using SaidNumbers = std::array<int64_t, kSaidNumbers>;
SaidNumbers numbers_of(const Said& said);
Said said_of(const SaidNumbers& numbers);

// "rank 1 brings Float [128, 32] to group_gather".
std::string words_of(size_t rank, const Said& said);

// In the order of the ranks. Waits for all of them. ValueError where another one's call was ended by an error.
std::vector<Said> every_rank_says(c10d::ProcessGroup& group, const Said& mine);

// Raises the same ValueError on every rank where they bring different tensors, or are in different operations; over
// NCCL at the group's next call, and what waits meanwhile is aborted. RuntimeError where gloo would be captured in a
// graph.
void check_agreement(c10d::ProcessGroup& group, const Tensor& t, const char* op);

// Around the beginning of what the ranks of `group` do together with t: where an error ends it on this rank before they
// have met, the others, which wait for it, are told, and raise a ValueError too. An empty name: there are no others.
class HeardByRanks {
 public:
  HeardByRanks(std::string_view group, const Tensor& t, const char* op);
  ~HeardByRanks();
  HeardByRanks(const HeardByRanks&) = delete;
  HeardByRanks& operator=(const HeardByRanks&) = delete;

 private:
  std::string_view group_;
  const Tensor& t_;
  const char* op_;
  int errors_;
  uint64_t asked_;  // how often this thread had asked by then
};

}  // namespace te_torch
