// noop_cat: concatenates the rows of several weights, without a copy where they are consecutive in one storage, as
// parameters_split allocates them. Otherwise it copies like torch.cat.
#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "core/own_storage.h"

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

// Parts that a state dict has given storages of their own (core/own_storage.h), as tensors in their base storage, if
// they are adjacent there; else empty.
std::vector<Tensor> in_base_storage(at::TensorList parts) {
  std::vector<Tensor> bases;
  for (const Tensor& part : parts) {
    bases.push_back(whole_storage(part));
    if (bases.back().is_same(part)) return {};
  }
  return adjacent(bases) ? bases : std::vector<Tensor>();
}

// The rows of each part and, without a copy, the version of each: the result shares the version counter of the first
// part alone, and parts that a load or a move has made adjacent have their own counters.
struct Seen : torch::CustomClassHolder {
  std::vector<int64_t> rows;
  std::vector<c10::VariableVersion> counters;
  std::vector<uint32_t> versions;
};

struct NoopCat : torch::autograd::Function<NoopCat> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const at::TensorList& parts) {
    auto seen = c10::make_intrusive<Seen>();
    for (const Tensor& part : parts) seen->rows.push_back(part.size(0));
    const bool apart = !adjacent(parts);
    const std::vector<Tensor> bases = apart ? in_base_storage(parts) : std::vector<Tensor>();
    const bool copies = apart && bases.empty();
    for (const Tensor& part : parts) {
      if (copies || part.is_inference()) continue;
      seen->counters.push_back(torch::autograd::impl::version_counter(part));
      seen->versions.push_back(seen->counters.back().current_version());
    }
    auto shape = parts[0].sizes().vec();
    shape[0] = 0;
    for (const int64_t n : seen->rows) shape[0] += n;
    ctx->set_materialize_grads(false);
    ctx->saved_data["seen"] = c10::IValue::make_capsule(std::move(seen));
    if (copies) return at::cat(parts);
    const Tensor& first = apart ? bases[0] : parts[0];
    return first.detach().as_strided(shape, first.strides(), first.storage_offset());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto holder = ctx->saved_data.at("seen").toCapsule();
    const auto& seen = static_cast<const Seen&>(*holder);
    for (size_t i = 0; i < seen.counters.size(); ++i) {
      TORCH_CHECK(
          seen.counters[i].current_version() == seen.versions[i], "noop_cat: part ", i,
          " of the joined weights was modified in place between forward and backward, so the gradients would be "
          "wrong; run the backward first.");
    }
    if (!grads[0].defined()) return torch::autograd::variable_list(seen.rows.size());
    return grads[0].split_with_sizes(seen.rows, 0);
  }
};

}  // namespace

void register_noop_cat(pybind11::module_& m) {
  m.def("rows_in_order", [](const std::vector<Tensor>& parts) {
    const bool storages = std::all_of(parts.begin(), parts.end(), [](const Tensor& t) { return t.has_storage(); });
    return storages && (parts.empty() || adjacent(parts) || !in_base_storage(parts).empty());
  });
  m.def("noop_cat", torch::wrap_pybind_function_no_gil([](const std::vector<Tensor>& parts) {
          TORCH_CHECK_VALUE(!parts.empty(), "noop_cat: argument 'parts' is empty, wanted at least one tensor.");
          return NoopCat::apply(at::TensorList(parts));
        }));
}

}  // namespace te_torch
