// noop_cat: rows of several weights as one tensor, without a copy where they already lie one behind the other in one
// storage (parameters_split allocates them so). It copies, as torch.cat does, where they do not.
#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "common.h"

namespace te_torch {

namespace {

bool adjacent(at::TensorList parts) {
  const Tensor& first = parts[0];
  int64_t offset = first.storage_offset();
  for (const Tensor& part : parts) {
    if (!part.is_contiguous() || part.storage().unsafeGetStorageImpl() != first.storage().unsafeGetStorageImpl() ||
        part.storage_offset() != offset || part.scalar_type() != first.scalar_type() ||
        part.sizes().slice(1) != first.sizes().slice(1)) {
      return false;
    }
    offset += part.numel();
  }
  return true;
}

struct NoopCat : torch::autograd::Function<NoopCat> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const at::TensorList& parts) {
    std::vector<int64_t> rows;
    for (const Tensor& part : parts) rows.push_back(part.size(0));
    ctx->saved_data["rows"] = rows;
    if (!adjacent(parts)) return at::cat(parts);
    auto shape = parts[0].sizes().vec();
    shape[0] = 0;
    for (const int64_t n : rows) shape[0] += n;
    // A detached alias: it shares the parameters' version counter, so changing a weight between forward and backward
    // is still noticed.
    return parts[0].detach().as_strided(shape, parts[0].strides(), parts[0].storage_offset());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    return grads[0].split_with_sizes(ctx->saved_data["rows"].toIntVector(), 0);
  }
};

}  // namespace

void register_noop_cat(pybind11::module_& m) {
  m.def("noop_cat", torch::wrap_pybind_function_no_gil([](const std::vector<Tensor>& parts) {
          TORCH_CHECK_VALUE(!parts.empty(), "noop_cat: argument 'parts' is empty, wanted at least one tensor.");
          return NoopCat::apply(at::TensorList(parts));
        }));
}

}  // namespace te_torch
