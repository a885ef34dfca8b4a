// See group.h. torch.distributed communicates; what it is told is decided here.
#include "group.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "agreement.h"
#include "faces.h"

namespace te_torch {

namespace {

c10::SymDimVector with_first(const Tensor& t, const c10::SymInt& first) {
  c10::SymDimVector shape(t.sym_sizes().begin(), t.sym_sizes().end());
  shape[0] = first;
  return shape;
}

// Of a collective that is awaited at once. NCCL runs it on the stream that calls it then: no other stream has to be
// waited for, and memory that is given back behind it is used again behind it. Otherwise it has a stream of its own,
// and keeps what it reads and writes until it is waited for.
template <class Options>
Options at_once() {
  Options options;
  options.asyncOp = false;
  return options;
}

// Work that is queued behind everything on the current stream, and that stream behind it.
void finish(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work) work->wait();
}

thread_local const char* why_values = nullptr;

void note() {
  if (why_values != nullptr) {
    te_note_path("process group, serial, quantized behind", why_values);
  } else {
    te_note_path("process group, serial", "products that overlap with communication are not available in this version");
  }
}

void check_tensor(const Tensor& t, int64_t ranks, const char* op) {
  TORCH_CHECK_VALUE(t.dim() > 0, op, ": argument 't' has no dimensions, wanted at least one.");
  TORCH_CHECK_VALUE(ranks > 0, op, ": argument 'ranks' is ", ranks, ", wanted at least 1.");
}

void check_divides(const Tensor& t, int64_t ranks, const char* op) {
  check_tensor(t, ranks, op);
  TORCH_CHECK_VALUE(t.sym_size(0) % ranks == 0, op, ": argument 't' has ", t.sym_size(0),
                    " rows, wanted a multiple of ", ranks, ", the ranks of its group.");
}

Tensor group_gather_meta(const Tensor& t, std::string_view, int64_t ranks) {
  check_tensor(t, ranks, "group_gather");
  return t.new_empty_symint(with_first(t, t.sym_size(0) * ranks));
}

Tensor group_gather_again_meta(const Tensor& t, const Tensor&, std::string_view group, int64_t ranks) {
  return group_gather_meta(t, group, ranks);
}

Tensor group_exchange_meta(const Tensor& t, std::string_view, int64_t ranks) {
  check_divides(t, ranks, "group_exchange");
  c10::SymDimVector shape = with_first(t, t.sym_size(0) / ranks);
  shape.insert(shape.begin(), ranks);
  return t.new_empty_symint(shape);
}

Tensor group_sum_meta(const Tensor& t, std::string_view, int64_t) { return t.new_empty_symint(t.sym_sizes()); }

Tensor gather(const Tensor& t, std::string_view name, int64_t ranks, const char* op) {
  check_tensor(t, ranks, op);
  const auto group = group_named(name, ranks);
  Tensor in = t.contiguous(), out = at::empty_symint(with_first(t, t.sym_size(0) * ranks), t.options());
  note();
  check_agreement(*group, in, op);
  if (out.numel() > 0) finish(group->_allgather_base(out, in, at_once<c10d::AllgatherOptions>()));
  return out;
}

}  // namespace

GatherOfValues::GatherOfValues(const char* why) { why_values = why; }
GatherOfValues::~GatherOfValues() { why_values = nullptr; }

c10::intrusive_ptr<c10d::ProcessGroup> group_named(std::string_view name, int64_t ranks) {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  try {
    group = c10d::resolve_process_group(std::string(name));
  } catch (const c10::Error&) {
    TORCH_CHECK(false, "the process group '", name,
                "' is not there, or was destroyed; make one with torch.distributed and pass it to "
                "set_tensor_parallel_group().");
  }
  TORCH_CHECK(group->getSize() == ranks, "the process group '", name, "' has ", group->getSize(), " ranks, wanted ",
              ranks, "; pass the group that the module was made for to set_tensor_parallel_group().");
  return group;
}

Tensor group_gather(const Tensor& t, std::string_view group, int64_t ranks) {
  return gather(t, group, ranks, "group_gather");
}

Tensor group_gather_again(const Tensor& t, const Tensor&, std::string_view group, int64_t ranks) {
  return gather(t, group, ranks, "group_gather_again");
}

Tensor group_exchange(const Tensor& t, std::string_view name, int64_t ranks) {
  check_divides(t, ranks, "group_exchange");
  const auto group = group_named(name, ranks);
  Tensor in = t.contiguous(), out = at::empty_like(in);
  note();
  check_agreement(*group, in, "group_exchange");
  std::vector<int64_t> whole;  // empty: equal parts
  if (out.numel() > 0) finish(group->alltoall_base(out, in, whole, whole, at_once<c10d::AllToAllOptions>()));
  auto shape = out.sizes().vec();
  shape[0] /= ranks;
  shape.insert(shape.begin(), ranks);
  return out.view(shape);
}

c10::intrusive_ptr<c10d::Work> begin_group_sum(const Tensor& t, std::string_view name, int64_t ranks, bool aside) {
  const auto group = group_named(name, ranks);
  note();
  check_agreement(*group, t, "group_sum");
  std::vector<Tensor> tensors{t};
  const auto options = aside ? c10d::AllreduceOptions() : at_once<c10d::AllreduceOptions>();
  return t.numel() > 0 ? group->allreduce(tensors, options) : nullptr;
}

Tensor group_sum(const Tensor& t, std::string_view name, int64_t ranks) {
  const Tensor out = t.clone(at::MemoryFormat::Contiguous);
  finish(begin_group_sum(out, name, ranks, false));
  return out;
}

void group_amax(const Tensor& amax, const Tensor& x, std::string_view name, int64_t ranks) {
  const auto group = group_named(name, ranks);
  note();
  check_agreement(*group, x, "group_amax");
  std::vector<Tensor> tensors{amax};
  auto largest = at_once<c10d::AllreduceOptions>();
  largest.reduceOp = c10d::ReduceOp::MAX;
  finish(group->allreduce(tensors, largest));
}

TE_FACES(group, faces) {
  faces.op("group_gather(Tensor t, str group, int ranks) -> Tensor").kernel(group_gather).meta(group_gather_meta);
  faces.op("group_gather_again(Tensor t, Tensor gradient, str group, int ranks) -> Tensor")
      .kernel(group_gather_again)
      .meta(group_gather_again_meta);
  faces.op("group_exchange(Tensor t, str group, int ranks) -> Tensor").kernel(group_exchange).meta(group_exchange_meta);
  faces.op("group_sum(Tensor t, str group, int ranks) -> Tensor").kernel(group_sum).meta(group_sum_meta);
}

}  // namespace te_torch
