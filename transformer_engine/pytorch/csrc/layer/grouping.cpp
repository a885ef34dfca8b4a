// See grouping.h.
#include "layer/grouping.h"

#include <torch/csrc/autograd/variable.h>

#include "core/rows_view.h"

namespace te_torch::layer {

c10::SmallVector<Rows, 8> rows_of_groups(at::ArrayRef<int64_t> splits) {
  c10::SmallVector<Rows, 8> groups;
  int64_t first = 0;
  for (const int64_t count : splits) {
    groups.push_back({first, count});
    first += count;
  }
  return groups;
}

Sums column_sums_of(const DispatchMode& dispatch, const Tensor& dy, at::ArrayRef<Rows> groups) {
  Sums sums;
  const Tensor matrix = matrix_of(dy);
  for (const Rows& rows : groups) sums.push_back(column_sums(rows_of_matrix(dispatch, matrix, rows)));
  return sums;
}

const WeightSet& matrices_of(const DispatchMode& dispatch, const WeightSet& w, WeightSet& matrices) {
  const Operand& first = w.weights[0];
  if (w.weights.size() != 1 || first.quantized() || first.plain.dim() != 3) return w;
  for (const Tensor& matrix : matrices_in(dispatch, first.plain)) matrices.weights.push_back({matrix, {}});
  matrices.biases = w.biases;
  return matrices;
}

namespace {

class StackedWgrad final : public WgradTask {
 public:
  explicit StackedWgrad(std::shared_ptr<GroupsWgrad> groups) : groups_(std::move(groups)) {}

  WeightGrads compute(const DispatchMode& dispatch, bool with_bias) const override {
    return groups_->compute_stacked(dispatch, with_bias);
  }
  std::vector<Tensor> accumulate(at::ArrayRef<WeightTarget> targets, bool with_bias) const override {
    std::vector<WeightTarget> each;
    each.reserve(matrices());
    for (const WeightTarget& target : targets) add_matrices(target, each);
    TORCH_CHECK_VALUE(each.size() == matrices(), "weight gradient: targets of ", each.size(), " groups, wanted ",
                      matrices(), ".");
    std::vector<Tensor> sums = groups_->accumulate(each, with_bias);
    for (const WeightTarget& target : targets) {
      // Views of the direct dispatch mode have versions of their own.
      if (target.out.defined() && !must_dispatch({&target.out})) note_written(target.out);
    }
    return sums;
  }
  std::vector<Tensor> reads() const override { return groups_->reads(); }
  at::ScalarType dtype() const override { return groups_->dtype(); }
  size_t matrices() const override { return groups_->matrices(); }

 private:
  void add_matrices(const WeightTarget& target, std::vector<WeightTarget>& each) const {
    if (!target.out.defined()) {
      each.insert(each.end(), size_t(target.rows), {Tensor(), groups_->features(), target.overwrite});
      return;
    }
    const DispatchMode dispatch = must_dispatch({&target.out}) ? DispatchMode(Dispatched{}) : DispatchMode(Direct{});
    for (const Tensor& matrix : matrices_in(dispatch, target.out)) {
      each.push_back({matrix, groups_->features(), target.overwrite});
    }
  }

  std::shared_ptr<GroupsWgrad> groups_;
};

}  // namespace

std::shared_ptr<WgradTask> wgrad_of(std::shared_ptr<GroupsWgrad> groups, bool stacked) {
  if (!stacked) return groups;
  return std::make_shared<StackedWgrad>(std::move(groups));
}

Tensor last_offset(const Tensor& offsets) {
  const int64_t last = offsets.size(0) - 1;
  return must_dispatch({&offsets}) ? offsets.narrow(0, last, 1) : element_view(offsets, last);
}

Tensor live_rows_of(const Grouping& grouping) {
  const bool listed = grouping.offsets.defined() && !grouping.splits.empty();  // the offsets were made of the list
  const Tensor& offsets = grouping.offsets.defined() ? grouping.offsets : grouping.read_offsets;
  if (listed || !offsets.defined()) return {};
  Tensor last = last_offset(offsets);
  share_version(last, offsets);
  return last;
}

void check_apart(const Tensor& given, const char* argument, const Operand& read) {
  for (const Operand& group : read.groups) check_apart(given, argument, group);
  if (!given.defined() || !read.plain.defined() || given.numel() == 0 || read.plain.numel() == 0) return;
  const auto span = [](const Tensor& t) {
    int64_t last = 0;
    for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
    const auto* first = static_cast<const char*>(t.const_data_ptr());
    return std::pair(first, first + (last + 1) * t.element_size());
  };
  const auto a = span(given), b = span(read.plain);
  TORCH_CHECK_VALUE(a.second <= b.first || b.second <= a.first, "grouped_linear: argument '", argument,
                    "' shares memory with an operand of this GEMM, which the weights' gradients read too; give each "
                    "call memory of its own.");
}

Tensor result_in(const Tensor& given, const Tensor& like) {
  note_written(given);
  Tensor result = with_rows_of(given.detach(), like);
  share_version(result, given);
  return result;
}

void share_version(const Tensor& view, const Tensor& base) {
  if (view.is_inference() || base.is_inference()) return;
  torch::autograd::impl::set_version_counter(view, torch::autograd::impl::version_counter(base));
}

}  // namespace te_torch::layer
