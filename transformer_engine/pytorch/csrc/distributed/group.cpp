// See group.h. torch.distributed communicates.
#include "distributed/group.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <torch/csrc/utils/pybind.h>

#include "core/held_object.h"
#include "core/op_registration.h"
#include "distributed/agreement.h"
#include "distributed/fingerprints.h"

namespace te_torch {

namespace {

c10::SymDimVector with_first(const Tensor& t, const c10::SymInt& first) {
  c10::SymDimVector shape(t.sym_sizes().begin(), t.sym_sizes().end());
  shape[0] = first;
  return shape;
}

// The options of a collective that is awaited directly. NCCL then runs it on the calling stream, so that there is no
// wait for another stream, and memory freed after it can be reused in order. Otherwise it runs on a stream of its own
// and holds its tensors until it is awaited.
template <class Options>
Options synchronous() {
  Options options;
  options.asyncOp = false;
  return options;
}

// Makes the current stream wait for the work. If it raises after a difference between the ranks was found, that error
// is raised instead.
void await(c10d::ProcessGroup& group, const c10::intrusive_ptr<c10d::Work>& work) {
  try {
    if (work) work->wait();
  } catch (const std::exception&) {
    refuse_disagreement(group);
    throw;
  }
}

template <class Start>
c10::intrusive_ptr<c10d::Work> begin(c10d::ProcessGroup& group, Start&& start) {
  try {
    const EnqueueGuard guard(group);
    return start();
  } catch (const std::exception&) {
    refuse_disagreement(group);
    throw;
  }
}

template <class Start>
void finish(c10d::ProcessGroup& group, Start&& start) {
  await(group, begin(group, start));
}

thread_local const char *noted_path = nullptr, *noted_reason = nullptr;

void note() {
  te_note_path(noted_path != nullptr ? noted_path : "process group, serial",
               noted_reason != nullptr ? noted_reason
                                       : "tp_overlap='chunked' overlaps the GEMM with the transfer, under "
                                         "sequence_parallel");
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

// Memory for received data, new or pooled. Made after the ranks have agreed.
class ReceiveBuffer {
 public:
  ReceiveBuffer(at::IntArrayRef sizes, const Tensor& like, std::string_view group, ScopedBuffers* buffers,
                SlotKind kind)
      : buffer_(buffers != nullptr ? &buffers->take(sizes, like.options(), group, kind) : nullptr),
        tensor_(buffer_ != nullptr ? buffer_->tensor() : at::empty(sizes, like.options())) {}

  Tensor& tensor() { return tensor_; }
  template <class Start>
  void receive(c10d::ProcessGroup& group, Start&& start) {
    if (tensor_.numel() == 0) return;
    if (buffer_ != nullptr) buffer_->expect();
    finish(group, start);
    if (buffer_ != nullptr) buffer_->arrived();
  }

 private:
  ScopedBuffer* buffer_;
  Tensor tensor_;
};

// The Python function (tensor, group, ranks, kind) -> sum.
std::shared_ptr<PyObject>& symmetric_sum() {
  static auto* const function = new std::shared_ptr<PyObject>;
  return *function;
}

void check_symmetric(int64_t kind) {
  TORCH_CHECK_VALUE(kind == 1 || kind == 2, "group_symmetric_sum: argument 'kind' is ", kind,
                    ", wanted 1 (one_shot) or 2 (two_shot).");
}

Tensor group_symmetric_sum_meta(const Tensor& t, std::string_view, int64_t, int64_t kind) {
  check_symmetric(kind);
  return t.new_empty_symint(t.sym_sizes());
}

Tensor gather(const Tensor& t, std::string_view name, int64_t ranks, const char* op, ScopedBuffers* buffers,
              SlotKind kind) {
  check_tensor(t, ranks, op);
  const auto group = group_named(name, ranks);
  Tensor in = t.contiguous();
  note();
  check_agreement(*group, in, op);
  auto sizes = in.sizes().vec();
  sizes[0] *= ranks;
  ReceiveBuffer all(sizes, in, name, buffers, kind);
  all.receive(*group, [&] { return group->_allgather_base(all.tensor(), in, synchronous<c10d::AllgatherOptions>()); });
  return all.tensor();
}

Tensor exchange(const Tensor& t, std::string_view name, int64_t ranks, ScopedBuffers* buffers) {
  check_divides(t, ranks, "group_exchange");
  const auto group = group_named(name, ranks);
  Tensor in = t.contiguous();
  note();
  check_agreement(*group, in, "group_exchange");
  auto sizes = in.sizes().vec();
  sizes[0] /= ranks;
  sizes.insert(sizes.begin(), ranks);
  ReceiveBuffer parts(sizes, in, name, buffers, SlotKind::kInbox);
  std::vector<int64_t> equal_splits;  // empty: equal parts
  Tensor flat = parts.tensor().view(in.sizes());
  parts.receive(*group, [&] {
    return group->alltoall_base(flat, in, equal_splits, equal_splits, synchronous<c10d::AllToAllOptions>());
  });
  return parts.tensor();
}

}  // namespace

CollectivePathNote::CollectivePathNote(const char* path, const char* reason)
    : outer_path_(std::exchange(noted_path, path)), outer_reason_(std::exchange(noted_reason, reason)) {}

CollectivePathNote::~CollectivePathNote() {
  noted_path = outer_path_;
  noted_reason = outer_reason_;
}

c10::intrusive_ptr<c10d::ProcessGroup> group_named(std::string_view name, int64_t ranks) {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  try {
    group = c10d::resolve_process_group(std::string(name));
  } catch (const c10::Error&) {
    TORCH_CHECK(false, "the process group '", name,
                "' does not exist or was destroyed; make one with torch.distributed and pass it to "
                "set_tensor_parallel_group().");
  }
  TORCH_CHECK(group->getSize() == ranks, "the process group '", name, "' has ", group->getSize(), " ranks, wanted ",
              ranks, "; pass the group that the module was made for to set_tensor_parallel_group().");
  return group;
}

Tensor group_gather(const Tensor& t, std::string_view group, int64_t ranks) {
  return gather(t, group, ranks, "group_gather", nullptr, SlotKind::kValues);
}

Tensor group_gather_again(const Tensor& t, const Tensor&, std::string_view group, int64_t ranks) {
  return gather(t, group, ranks, "group_gather_again", nullptr, SlotKind::kValues);
}

Tensor group_gather_pooled(const Tensor& t, std::string_view group, int64_t ranks, bool for_backward,
                           ScopedBuffers& buffers, SlotKind kind) {
  return gather(t, group, ranks, for_backward ? "group_gather_again" : "group_gather", &buffers, kind);
}

Tensor group_exchange(const Tensor& t, std::string_view group, int64_t ranks) {
  return exchange(t, group, ranks, nullptr);
}

Tensor group_exchange_pooled(const Tensor& t, std::string_view group, int64_t ranks, ScopedBuffers& buffers) {
  return exchange(t, group, ranks, &buffers);
}

c10::intrusive_ptr<c10d::Work> begin_group_sum(const Tensor& t, std::string_view name, int64_t ranks,
                                               bool asynchronous) {
  const auto group = group_named(name, ranks);
  note();
  check_agreement(*group, t, "group_sum");
  std::vector<Tensor> tensors{t};
  const auto options = asynchronous ? c10d::AllreduceOptions() : synchronous<c10d::AllreduceOptions>();
  return t.numel() > 0 ? begin(*group, [&] { return group->allreduce(tensors, options); }) : nullptr;
}

Tensor group_sum(const Tensor& t, std::string_view name, int64_t ranks) {
  const Tensor out = t.clone(at::MemoryFormat::Contiguous);
  const auto work = begin_group_sum(out, name, ranks, false);
  await(*group_named(name, ranks), work);
  return out;
}

Tensor group_symmetric_sum(const Tensor& t, std::string_view group, int64_t ranks, int64_t kind) {
  check_symmetric(kind);
  if (t.is_cpu()) {
    const Tensor out = t.clone(at::MemoryFormat::Contiguous);
    const auto found = group_named(group, ranks);
    te_note_path("process group, serial", "kernels over symmetric memory need CUDA");
    check_agreement(*found, t, "group_symmetric_sum");
    std::vector<Tensor> tensors{out};
    if (t.numel() > 0) finish(*found, [&] { return found->allreduce(tensors, synchronous<c10d::AllreduceOptions>()); });
    return out;
  }
  group_named(group, ranks);
  te_note_path(kind == 1 ? "symmetric memory, one_shot" : "symmetric memory, two_shot", "");
  if (t.numel() == 0) return at::empty_like(t);
  const pybind11::gil_scoped_acquire gil;
  TORCH_CHECK(
      symmetric_sum() != nullptr,
      "group_symmetric_sum: the kernels over symmetric memory are not registered; import transformer_engine.pytorch "
      "before the call.");
  const pybind11::object sum = pybind11::handle(symmetric_sum().get())(t, std::string(group), ranks, kind);
  return sum.cast<Tensor>();
}

void set_symmetric_sum(PyObject* function) { symmetric_sum() = held_object(function); }

void group_amax(const Tensor& amax, const Tensor& x, std::string_view name, int64_t ranks) {
  const auto group = group_named(name, ranks);
  note();
  check_agreement(*group, x, "group_amax");
  std::vector<Tensor> tensors{amax};
  auto largest = synchronous<c10d::AllreduceOptions>();
  largest.reduceOp = c10d::ReduceOp::MAX;
  finish(*group, [&] { return group->allreduce(tensors, largest); });
}

TE_OP_REGISTRATION(group, ops) {
  ops.op("group_gather(Tensor t, str group, int ranks) -> Tensor").kernel(group_gather).meta(group_gather_meta);
  ops.op("group_gather_again(Tensor t, Tensor gradient, str group, int ranks) -> Tensor")
      .kernel(group_gather_again)
      .meta(group_gather_again_meta);
  ops.op("group_exchange(Tensor t, str group, int ranks) -> Tensor").kernel(group_exchange).meta(group_exchange_meta);
  ops.op("group_sum(Tensor t, str group, int ranks) -> Tensor").kernel(group_sum).meta(group_sum_meta);
  ops.op("group_symmetric_sum(Tensor t, str group, int ranks, int kind) -> Tensor")
      .kernel(group_symmetric_sum)
      .meta(group_symmetric_sum_meta);
}

}  // namespace te_torch
