// See agreement.h. Calls are sent as numbers, in one gather.
#include "distributed/agreement.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <transformer_engine/comm.h>

#include <algorithm>
#include <exception>
#include <sstream>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "distributed/fingerprints.h"

namespace te_torch {

namespace {

bool has_backend(c10d::ProcessGroup& group, c10::DeviceType type, const char* backend) {
  for (const at::Device& device : group.getDeviceTypes()) {
    if (device.type() == type) return group.getBackend(type)->getBackendName() == backend;
  }
  return false;
}

bool uses_gloo(c10d::ProcessGroup& group, c10::DeviceType type) { return has_backend(group, type, "gloo"); }

// Whether calls are compared while they run.
bool compares_while_running(c10d::ProcessGroup& group, const Tensor& t) {
  return !t.is_cpu() && has_backend(group, t.device().type(), "nccl");
}

// Whether calls are compared before they start.
bool compares_before(c10d::ProcessGroup& group, const Tensor& t) {
  return t.is_cpu() || (uses_gloo(group, t.device().type()) && uses_gloo(group, c10::kCPU));
}

bool is_captured(const Tensor& t) {
  int32_t captured = 0;
  if (!t.is_cpu()) check(te_comm_is_captured(current_stream(t), &captured));
  return captured != 0;
}

thread_local uint64_t comparisons = 0;

}  // namespace

std::vector<CollectiveCall> gather_calls(c10d::ProcessGroup& group, const CollectiveCall& mine) {
  ++comparisons;
  Tensor own = at::empty({1, int64_t(kCallNumbers)}, at::kLong),
         all = at::empty({group.getSize(), int64_t(kCallNumbers)}, at::kLong);
  const CallNumbers numbers = encode_call(mine);
  std::copy(numbers.begin(), numbers.end(), own.data_ptr<int64_t>());
  const auto work = group._allgather_base(all, own);
  if (work) work->wait();
  std::vector<CollectiveCall> calls;
  for (int64_t rank = 0; rank < group.getSize(); ++rank) {
    CallNumbers theirs;
    std::copy_n(all.data_ptr<int64_t>() + rank * int64_t(kCallNumbers), kCallNumbers, theirs.begin());
    calls.push_back(decode_call(theirs));
  }
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    TORCH_CHECK_VALUE(mine.variant == CollectiveCall::kRaised || calls[rank].variant != CollectiveCall::kRaised,
                      mine.op, ": rank ", rank, " of the process group '", group.getGroupName(),
                      "' does not join: its call of ", calls[rank].op,
                      " has raised an error there. Fix the error of that rank.");
  }
  return calls;
}

RankErrorGuard::RankErrorGuard(std::string_view group, const Tensor& t, const char* op)
    : group_(group), t_(t), op_(op), errors_(std::uncaught_exceptions()), comparisons_(comparisons) {}

RankErrorGuard::~RankErrorGuard() {
  if (group_.empty() || std::uncaught_exceptions() == errors_ || comparisons != comparisons_) return;
  try {
    const auto group = c10d::resolve_process_group(std::string(group_));
    const CollectiveCall raised{op_, CollectiveCall::kRaised, t_.scalar_type(), {}};
    if (is_captured(t_)) return;
    if (compares_while_running(*group, t_)) {
      post_fingerprint(*group, t_.device().type(), raised);
    } else if (compares_before(*group, t_)) {
      gather_calls(*group, raised);
    }
  } catch (const std::exception&) {  // NOLINT: the error that is being thrown came first
  }
}

void check_agreement(c10d::ProcessGroup& group, const Tensor& t, const char* op) {
  const CollectiveCall mine{op, 0, t.scalar_type(), t.sizes().vec()};
  if (compares_while_running(group, t)) {
    ++comparisons;
    if (is_captured(t)) {
      stop_comparing(group, t.device().type());
    } else {
      post_fingerprint(group, t.device().type(), mine);
    }
    return;
  }
  if (!t.is_cpu() && !uses_gloo(group, t.device().type())) return;
  TORCH_CHECK(!is_captured(t), op, ": the process group '", group.getGroupName(),
              "' uses gloo, which cannot be captured in a graph; make a group with nccl for ", t.device(),
              ", or leave the layer out of the capture.");
  if (!compares_before(group, t)) return;
  const std::vector<CollectiveCall> calls = gather_calls(group, mine);
  if (std::all_of(calls.begin(), calls.end(), [&](const CollectiveCall& call) { return call == calls[0]; })) return;
  std::ostringstream text;
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    text << (rank > 0 ? ", " : "") << describe_call(rank, calls[rank]);
  }
  TORCH_CHECK_VALUE(false, "the ranks of the process group '", group.getGroupName(),
                    "' call different things: ", text.str(),
                    "; wanted the same layer on each, with equally many tokens.");
}

void register_agreement(pybind11::module_& m) {
  m.def("gather_calls",
        torch::wrap_pybind_function_no_gil([](const std::string& group, const std::string& op, int64_t variant,
                                              at::ScalarType dtype, const std::vector<int64_t>& sizes) {
          const auto calls = gather_calls(*c10d::resolve_process_group(group), {op, variant, dtype, sizes});
          std::vector<std::tuple<std::string, int64_t, at::ScalarType, std::vector<int64_t>>> fields;
          for (const CollectiveCall& call : calls) {
            fields.emplace_back(call.op, call.variant, call.dtype, call.sizes);
          }
          return fields;
        }));
}

}  // namespace te_torch
