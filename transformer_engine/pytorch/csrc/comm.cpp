// comm, binding: kernel wrapper, schema and Meta function of the ordered sum. It is called inside nodes and has no
// autograd of its own.
#include "comm.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace te_torch {

namespace {

void check_partials(const Tensor& partials, const OptionalTensor& bias) {
  const char* op = "comm_ordered_sum";
  check_float(partials, op, "partials");
  TORCH_CHECK_VALUE(partials.dim() >= 2 && partials.sym_size(0) >= 1, op, ": argument 'partials' has shape ",
                    partials.sym_sizes(), ", wanted [ranks, ..., cols] with one rank at least.");
  if (!bias.has_value()) return;
  check_same(*bias, partials, op, "bias");
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == partials.sym_size(-1), op, ": argument 'bias' has shape ",
                    bias->sym_sizes(), ", wanted [", partials.sym_size(-1), "].");
}

Tensor comm_ordered_sum_meta(const Tensor& partials, const OptionalTensor& bias) {
  check_partials(partials, bias);
  return partials.new_empty_symint(partials.sym_sizes().slice(1));
}

// What Python calls in eager mode.
Tensor ordered_sum(const Tensor& partials, const OptionalTensor& bias) {
  if (!must_dispatch({&partials, pointer_to(bias)})) return comm_ordered_sum(partials, bias);
  return Dispatched::call<comm_ordered_sum>("te::comm_ordered_sum", partials, bias);
}

}  // namespace

Tensor comm_ordered_sum(const Tensor& partials, const OptionalTensor& bias) {
  const char* op = "comm_ordered_sum";
  check_partials(partials, bias);
  const Tensor in = rows_of(partials);
  const Tensor added = bias.has_value() ? rows_of(*bias) : Tensor();
  const Tensor out = at::empty(in.sizes().slice(1), in.options());
  const te_tensor inbox = view_2d(in, op, "partials"), target = view_2d(out, op, "out");
  std::vector<te_tensor> ranks(static_cast<size_t>(in.size(0)), inbox);
  const int64_t step = target.rows * inbox.row_pitch * in.element_size();
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    ranks[rank].rows = target.rows;
    if (inbox.data != nullptr) ranks[rank].data = static_cast<char*>(inbox.data) + int64_t(rank) * step;
  }
  check(te_comm_ordered_sum(ranks.data(), int32_t(ranks.size()),
                            added.defined() ? view_2d(added, op, "bias") : absent(), target, current_stream(in)));
  return out;
}

TORCH_LIBRARY_FRAGMENT(te, m) { m.def("comm_ordered_sum(Tensor partials, Tensor? bias) -> Tensor"); }
TORCH_LIBRARY_IMPL(te, CPU, m) { m.impl("comm_ordered_sum", comm_ordered_sum); }
TORCH_LIBRARY_IMPL(te, CUDA, m) { m.impl("comm_ordered_sum", comm_ordered_sum); }
TORCH_LIBRARY_IMPL(te, Meta, m) { m.impl("comm_ordered_sum", comm_ordered_sum_meta); }

void register_comm(pybind11::module_& m) { m.def("comm_ordered_sum", torch::wrap_pybind_function_no_gil(ordered_sum)); }

}  // namespace te_torch
