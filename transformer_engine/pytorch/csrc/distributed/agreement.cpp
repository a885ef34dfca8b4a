// See agreement.h. The answers travel as numbers, in one gather.
#include "distributed/agreement.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <transformer_engine/comm.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <sstream>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "distributed/fingerprints.h"

namespace te_torch {

namespace {

constexpr size_t kName = 6, kSizes = 12;
enum Place : size_t { kOp = 0, kHow = kName, kDtype, kDim, kFirstSize, kNumbers = kFirstSize + kSizes };
static_assert(kNumbers == kSaidNumbers);

bool communicates_by(c10d::ProcessGroup& group, c10::DeviceType type, const char* backend) {
  for (const at::Device& device : group.getDeviceTypes()) {
    if (device.type() == type) return group.getBackend(type)->getBackendName() == backend;
  }
  return false;
}

bool by_gloo(c10d::ProcessGroup& group, c10::DeviceType type) { return communicates_by(group, type, "gloo"); }

// Whether what a rank says is compared beside its work.
bool posts(c10d::ProcessGroup& group, const Tensor& t) {
  return !t.is_cpu() && communicates_by(group, t.device().type(), "nccl");
}

// Whether the ranks are asked before they communicate t.
bool asks(c10d::ProcessGroup& group, const Tensor& t) {
  return t.is_cpu() || (by_gloo(group, t.device().type()) && by_gloo(group, c10::kCPU));
}

bool is_captured(const Tensor& t) {
  int32_t captured = 0;
  if (!t.is_cpu()) check(te_comm_is_captured(current_stream(t), &captured));
  return captured != 0;
}

thread_local uint64_t asked = 0;

}  // namespace

SaidNumbers numbers_of(const Said& said) {
  SaidNumbers numbers{};
  std::memcpy(numbers.data() + kOp, said.op.data(), std::min(said.op.size(), kName * sizeof(int64_t)));
  numbers[kHow] = said.how;
  numbers[kDtype] = int64_t(said.dtype);
  numbers[kDim] = int64_t(std::min(said.sizes.size(), kSizes));
  std::copy_n(said.sizes.begin(), numbers[kDim], numbers.begin() + kFirstSize);
  return numbers;
}

Said said_of(const SaidNumbers& numbers) {
  char name[kName * sizeof(int64_t) + 1] = {};
  std::memcpy(name, numbers.data() + kOp, sizeof(name) - 1);
  const int64_t* const sizes = numbers.data() + kFirstSize;
  return {name, numbers[kHow], at::ScalarType(numbers[kDtype]), {sizes, sizes + numbers[kDim]}};
}

std::string words_of(size_t rank, const Said& said) {
  std::ostringstream words;
  if (said.how == Said::kRaised) {
    words << "rank " << rank << " does not come: its call of " << said.op
          << " was ended by an error, which is raised there";
  } else {
    words << "rank " << rank << " brings " << said.dtype << " " << at::IntArrayRef(said.sizes) << " to " << said.op;
  }
  return words.str();
}

std::vector<Said> every_rank_says(c10d::ProcessGroup& group, const Said& mine) {
  ++asked;
  Tensor own = at::empty({1, int64_t(kNumbers)}, at::kLong),
         all = at::empty({group.getSize(), int64_t(kNumbers)}, at::kLong);
  const SaidNumbers numbers = numbers_of(mine);
  std::copy(numbers.begin(), numbers.end(), own.data_ptr<int64_t>());
  const auto work = group._allgather_base(all, own);
  if (work) work->wait();
  std::vector<Said> every;
  for (int64_t rank = 0; rank < group.getSize(); ++rank) {
    SaidNumbers theirs;
    std::copy_n(all.data_ptr<int64_t>() + rank * int64_t(kNumbers), kNumbers, theirs.begin());
    every.push_back(said_of(theirs));
  }
  for (size_t rank = 0; rank < every.size(); ++rank) {
    TORCH_CHECK_VALUE(mine.how == Said::kRaised || every[rank].how != Said::kRaised, mine.op, ": rank ", rank,
                      " of the process group '", group.getGroupName(), "' does not come: its call of ", every[rank].op,
                      " was ended by an error, which is raised there.");
  }
  return every;
}

HeardByRanks::HeardByRanks(std::string_view group, const Tensor& t, const char* op)
    : group_(group), t_(t), op_(op), errors_(std::uncaught_exceptions()), asked_(asked) {}

HeardByRanks::~HeardByRanks() {
  if (group_.empty() || std::uncaught_exceptions() == errors_ || asked != asked_) return;
  try {
    const auto group = c10d::resolve_process_group(std::string(group_));
    const Said raised{op_, Said::kRaised, t_.scalar_type(), {}};
    if (is_captured(t_)) return;
    if (posts(*group, t_)) {
      post_fingerprint(*group, t_.device().type(), raised);
    } else if (asks(*group, t_)) {
      every_rank_says(*group, raised);
    }
  } catch (const std::exception&) {  // NOLINT: the error that is on its way came first
  }
}

void check_agreement(c10d::ProcessGroup& group, const Tensor& t, const char* op) {
  const Said mine{op, 0, t.scalar_type(), t.sizes().vec()};
  if (posts(group, t)) {
    ++asked;
    if (is_captured(t)) {
      stop_comparing(group, t.device().type());
    } else {
      post_fingerprint(group, t.device().type(), mine);
    }
    return;
  }
  if (!t.is_cpu() && !by_gloo(group, t.device().type())) return;
  TORCH_CHECK(!is_captured(t), op, ": the process group '", group.getGroupName(),
              "' communicates by gloo, which cannot be captured in a graph; make a group of nccl for ", t.device(),
              ", or leave the layer out of the capture.");
  if (!asks(group, t)) return;
  const std::vector<Said> every = every_rank_says(group, mine);
  if (std::all_of(every.begin(), every.end(), [&](const Said& said) { return said == every[0]; })) return;
  std::ostringstream words;
  for (size_t rank = 0; rank < every.size(); ++rank) {
    words << (rank > 0 ? ", " : "") << words_of(rank, every[rank]);
  }
  TORCH_CHECK_VALUE(false, "the ranks of the process group '", group.getGroupName(),
                    "' call different things: ", words.str(),
                    "; wanted the same layer on each, with equally many tokens.");
}

void register_agreement(pybind11::module_& m) {
  m.def("every_rank_says",
        torch::wrap_pybind_function_no_gil([](const std::string& group, const std::string& op, int64_t how,
                                              at::ScalarType dtype, const std::vector<int64_t>& sizes) {
          const auto every = every_rank_says(*c10d::resolve_process_group(group), {op, how, dtype, sizes});
          std::vector<std::tuple<std::string, int64_t, at::ScalarType, std::vector<int64_t>>> told;
          for (const Said& said : every) {
            told.emplace_back(said.op, said.how, said.dtype, said.sizes);
          }
          return told;
        }));
}

}  // namespace te_torch
