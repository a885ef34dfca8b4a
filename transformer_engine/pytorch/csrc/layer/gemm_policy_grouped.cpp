// See gemm_policy_grouped.h. If the sizes of the groups are on the host, their GEMMs run one after the other, into one
// result.
#include "layer/gemm_policy_grouped.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <optional>

#include "core/probe.h"
#include "core/rows_view.h"
#include "gemm/gemm.h"
#include "gemm/gemm_list.h"
#include "layer/gemm_policy_device.h"

namespace te_torch::layer {

namespace {

constexpr const char* kFp8OneByOne =
    "FP8 groups of a list go one by one, but for small ones of 16-bit results, with a scale each or in blocks with "
    "scales of powers of 2";

// The reason that te.explain shows for one GEMM a group; null: none.
class ListOneByOne {
 public:
  explicit ListOneByOne(const char* why) {
    if (why != nullptr && probe::active()) reason_.emplace(why);
  }

 private:
  std::optional<probe::PathReason> reason_;
};

// Of one whose plain rows are a matrix. A group alone was kept without being one of several.
Operand part_of(const DispatchMode& dispatch, const Operand& t, at::ArrayRef<Rows> groups, size_t i) {
  if (!t.groups.empty()) return t.groups[i];
  return t.quantized() ? t : Operand{rows_of_matrix(dispatch, t.plain, groups[i]), {}};
}

// The weights' products of all groups, one after the other. Holds what they read as it came: a matrix of all groups'
// rows, or an operand for each group.
class GroupedWeightProduct final : public GroupsWgrad {
 public:
  // reads: of dy and x, before their leading dimensions were folded, which has versions of its own.
  GroupedWeightProduct(Operand dy, Operand x, std::vector<Tensor> reads, Sums sums, c10::SmallVector<Rows, 8> groups,
                       at::ScalarType dtype, bool split)
      : dy_(std::move(dy)),
        x_(std::move(x)),
        reads_(std::move(reads)),
        sums_(std::move(sums)),
        groups_(std::move(groups)),
        dtype_(dtype),
        split_(split) {}

  WeightGrads compute(const DispatchMode& dispatch, bool with_bias) const override {
    return compute_at(dispatch, with_bias, {});
  }

  // The bits depend on whether the matrices' addresses are multiples of 16 bytes.
  WeightGrads compute_stacked(const DispatchMode& dispatch, bool with_bias) const override {
    const auto element = int64_t(c10::elementSize(dtype_));
    if (!dispatch.direct() || features_of(dy_) * features_of(x_) * element % 16 != 0) {
      WeightGrads grads = compute(dispatch, with_bias);
      grads.weights = {at::stack(grads.weights)};
      return grads;
    }
    const Tensor all =
        at::empty({int64_t(matrices()), features_of(dy_), features_of(x_)}, first_read()->options().dtype(dtype_));
    WeightGrads grads = compute_at(dispatch, with_bias, te_torch::matrices_of(all));
    grads.weights = {all};
    return grads;
  }

  int64_t features() const override { return features_of(dy_); }

  std::vector<Tensor> accumulate(at::ArrayRef<WeightTarget> targets, bool with_bias) const override {
    TORCH_INTERNAL_ASSERT(targets.size() == matrices());
    const DispatchMode dispatch = must_dispatch({first_read()})
                                      ? DispatchMode(Dispatched{})
                                      : DispatchMode(Direct{});  // a traced gradient accumulator's
    const char* why = each_of_fp8();
    if (by_list(dispatch)) {
      std::vector<Tensor> outs;
      std::vector<bool> add;
      for (const WeightTarget& target : targets) {
        outs.push_back(target.out);
        add.push_back(!target.overwrite);
      }
      std::vector<Tensor> biases = new_sums(with_bias);
      if (weights_by_list(dy_.plain, x_.plain, groups_, outs, add, biases, why)) {
        for (const Tensor& out : outs) note_written(out);
        return biases;
      }
    }
    const ListOneByOne reason(why);
    std::vector<Tensor> sums;
    const OneWorkspace for_all;
    for (size_t i = 0; i < matrices(); ++i) {
      const std::vector<Tensor> one = product(dispatch, i).accumulate(targets.slice(i, 1), with_bias);
      sums.insert(sums.end(), one.begin(), one.end());
    }
    return sums;
  }

  std::vector<Tensor> reads() const override { return reads_; }
  at::ScalarType dtype() const override { return dtype_; }
  size_t matrices() const override { return groups_.size(); }

 private:
  // given: memory for the matrices, in the direct dispatch mode alone; none: new ones.
  WeightGrads compute_at(const DispatchMode& dispatch, bool with_bias, at::ArrayRef<Tensor> given) const {
    WeightGrads all;
    const char* why = each_of_fp8();
    if (by_list(dispatch)) {
      const int64_t n = dy_.plain.size(1);
      const std::vector<Tensor> weights =
          given.empty() ? new_matrices(matrices(), n, x_.plain.size(1), x_.plain.options()) : given.vec();
      const std::vector<Tensor> biases = new_sums(with_bias);
      if (weights_by_list(dy_.plain, x_.plain, groups_, weights, std::vector<bool>(matrices()), biases, why)) {
        all.weights.assign(weights.begin(), weights.end());
        all.biases = with_bias ? Sums(biases.begin(), biases.end()) : Sums(matrices());
        return all;
      }
    }
    const ListOneByOne reason(why);
    const OneWorkspace for_all;
    for (size_t i = 0; i < matrices(); ++i) {
      WeightGrads one = product(dispatch, i).compute_at(dispatch, with_bias, given.empty() ? Tensor() : given[i]);
      all.weights.push_back(std::move(one.weights[0]));
      all.biases.push_back(std::move(one.biases[0]));
    }
    return all;
  }
  // A list has no sums yet: with sums, at least one operand is FP8.
  bool by_list(const DispatchMode& dispatch) const {
    return dispatch.direct() && dy_.plain.defined() && x_.plain.defined() && !sums_[0].defined() &&
           dtype_ == x_.plain.scalar_type();
  }
  std::vector<Tensor> new_sums(bool with_bias) const {
    if (!with_bias) return {};
    std::vector<Tensor> rows = new_matrices(matrices(), 1, dy_.plain.size(1), dy_.plain.options());
    for (Tensor& row : rows) row = row_view(row, 0);
    return rows;
  }
  const char* each_of_fp8() const { return dy_.groups.empty() && x_.groups.empty() ? nullptr : kFp8OneByOne; }
  const Tensor* first_read() const {
    const Operand& one = dy_.groups.empty() ? dy_ : dy_.groups[0];
    return one.quantized() ? &one.fp8.columnwise : &one.plain;
  }
  static int64_t features_of(const Operand& t) {
    const Operand& one = t.groups.empty() ? t : t.groups[0];
    const auto size = [](const Tensor& data, int64_t d) { return data.sym_size(d).guard_int(__FILE__, __LINE__); };
    if (!one.quantized()) return size(one.plain, -1);
    return one.fp8.columnwise.defined() ? size(one.fp8.columnwise, 0) : size(one.fp8.rowwise, -1);
  }
  MatrixWgrad product(const DispatchMode& dispatch, size_t i) const {
    return {part_of(dispatch, dy_, groups_, i), part_of(dispatch, x_, groups_, i), sums_[i], dtype_, split_};
  }

  Operand dy_, x_;
  std::vector<Tensor> reads_;
  Sums sums_;  // of each group, summed already, or undefined
  c10::SmallVector<Rows, 8> groups_;
  at::ScalarType dtype_;
  bool split_;
};

class HostGroups final : public GemmPolicy {
 public:
  explicit HostGroups(Grouping grouping) : grouping_(std::move(grouping)), groups_(rows_of_groups(grouping_.splits)) {
    if (!groups_.empty()) total_ = groups_.back().first + groups_.back().count;
  }

  const ProductQuantization* quantization(const ProductQuantization* all, size_t i) const override {
    return grouping_.quantizations.size() < 2 ? all : grouping_.quantizations[i].get();
  }
  bool quantizes_groups(const ProductQuantization* all) const override { return all != nullptr; }

  Operand quantized_groups(const DispatchMode& dispatch, Pass pass, const Operand& plain, QuantizeUsage usage,
                           Tensor* dbias) const override {
    const Tensor t = gathered_rows(dispatch, plain), rows = matrix_of(t);
    Operand all;
    std::vector<Tensor> sums(groups_.size());
    bool any = false, summed = false;
    for (size_t i = 0; i < groups_.size(); ++i) {
      const ProductQuantization* q = quantization(grouping_.quantizations[0].get(), i);
      const Quantizer* quantizer = pass == Pass::kFprop ? &q->x : gradient_quantizer(q, usage);
      Tensor* sum = dbias != nullptr ? &sums[i] : nullptr;
      all.groups.push_back(operand_of(dispatch, quantizer, part_of(dispatch, rows, i), usage, sum));
      if (!all.groups.back().quantized()) share_version(all.groups.back().plain, t);
      any = any || all.groups.back().quantized();
      summed = summed || sums[i].defined();
    }
    if (summed) {  // by all, where some groups are plain
      for (size_t i = 0; i < groups_.size(); ++i) {
        if (!sums[i].defined()) sums[i] = column_sums(part_of(dispatch, rows, i));
      }
      *dbias = at::stack(sums);
    }
    return any ? all : Operand{t, {}};
  }

  Operand quantized_again(const DispatchMode& dispatch, const Operand& plain, QuantizeUsage usage,
                          at::TensorList used) const override {
    const Tensor t = gathered_rows(dispatch, plain), rows = matrix_of(t);
    Operand all;
    bool any = false;
    size_t next = 0;
    for (size_t i = 0; i < groups_.size(); ++i) {
      const Quantizer& quantizer = quantization(grouping_.quantizations[0].get(), i)->x;
      const Tensor part = part_of(dispatch, rows, i), scales = has_one_scale(i) ? used[next++] : Tensor();
      all.groups.push_back(recomputed_operand(dispatch, &quantizer, scales, part, usage));
      if (!all.groups.back().quantized()) share_version(all.groups.back().plain, t);
      any = any || all.groups.back().quantized();
    }
    return any ? all : Operand{t, {}};
  }

  std::vector<Tensor> used_scales(const Operand& operand) const override {
    std::vector<Tensor> used;
    for (size_t i = 0; i < operand.groups.size(); ++i) {
      if (has_one_scale(i)) used.push_back(operand.groups[i].fp8.rowwise_scale_inv);
    }
    return used;
  }

  LiveCounters live_counters(const Operand&) const override { return {live_rows_of(grouping_), {}}; }

  std::shared_ptr<const GemmPolicy> with_scales(at::TensorList used) const override {
    Grouping grouping = grouping_;
    grouping.quantizations.clear();
    size_t next = 0;
    for (size_t i = 0; i < groups_.size(); ++i) {
      const ProductQuantization& q = *quantization(grouping_.quantizations[0].get(), i);
      grouping.quantizations.push_back(te_torch::with_scales(q, has_one_scale(i) ? used[next++] : Tensor()));
    }
    return std::make_shared<HostGroups>(std::move(grouping));
  }

  Sums bias_gradients(const DispatchMode& dispatch, const Tensor& dy, const Tensor& sums) const override {
    return sums.defined() ? each_row(dispatch, sums) : column_sums_of(dispatch, dy, groups_);
  }

  Tensor fprop(const DispatchMode& dispatch, const Operand& x, const Rows*, const WeightSet& weights,
               const Tensor& like, bool split) const override {
    WeightSet matrices;
    const WeightSet& w = matrices_of(dispatch, weights, matrices);
    const auto product = [&](const Operand& part, size_t i, const Tensor& shape, const Tensor& into) {
      return fprop_of(dispatch, part, w.weights[i], w.bias(i), shape, split, into);
    };
    return over_groups(dispatch, x, w, false, like, rows_in(w.weights[0]), grouping_.out, "out", product);
  }

  Tensor dgrad(const DispatchMode& dispatch, const Operand& dy, const Rows*, const WeightSet& weights,
               const Tensor& like, bool split) const override {
    WeightSet matrices;
    const WeightSet& w = matrices_of(dispatch, weights, matrices);
    const auto product = [&](const Operand& part, size_t i, const Tensor& shape, const Tensor& into) {
      return dgrad_of(dispatch, part, w.weights[i], shape, split, into);
    };
    return over_groups(dispatch, dy, w, true, like, columns_in(w.weights[0]), grouping_.dgrad_out, "dgrad_out",
                       product);
  }

  std::shared_ptr<WgradTask> wgrad_task(const DispatchMode& dispatch, Gradient gradient, Operand x,
                                        at::ScalarType dtype, bool split) const override {
    std::vector<Tensor> reads;
    for (const Operand* t : {&gradient.dy, &x}) {
      if (t->plain.defined()) reads.push_back(t->plain);
      for (const Operand& group : t->groups) {
        if (group.plain.defined()) reads.push_back(group.plain);
      }
    }
    Sums sums = gradient.dbias.defined() ? each_row(dispatch, gradient.dbias) : Sums(groups_.size());
    return wgrad_of(std::make_shared<GroupedWeightProduct>(folded(gradient.dy), folded(x), std::move(reads),
                                                           std::move(sums), groups_, dtype, split),
                    grouping_.stacked);
  }

 private:
  // Whether group i's rows are quantized by one scale, which the backward needs.
  bool has_one_scale(size_t i) const {
    const auto kind = quantization(grouping_.quantizations[0].get(), i)->x.spec.kind;
    return kind == QuantizeSpec::kCurrent || kind == QuantizeSpec::kDelayed;
  }
  static c10::SymInt rows_in(const Operand& weight) {
    const Tensor& t = !weight.quantized() ? weight.plain : weight.fp8.rowwise;
    return t.defined() ? t.sym_size(0) : weight.fp8.columnwise.sym_size(1);
  }
  static c10::SymInt columns_in(const Operand& weight) {
    const Tensor& t = !weight.quantized() ? weight.plain : weight.fp8.rowwise;
    return t.defined() ? t.sym_size(1) : weight.fp8.columnwise.sym_size(0);
  }
  static Operand folded(const Operand& t) {
    return t.groups.empty() && !t.quantized() ? Operand{matrix_of(t.plain), {}} : t;
  }

  Tensor part_of(const DispatchMode& dispatch, const Tensor& rows, size_t i) const {
    return rows_of_matrix(dispatch, rows, groups_[i]);
  }
  Operand part_of(const DispatchMode& dispatch, const Operand& t, size_t i) const {
    return layer::part_of(dispatch, t, groups_, i);
  }

  bool by_list(const Operand& rows, const WeightSet& w, bool across, const Tensor& like, const Tensor& d,
               const char*& why) const {
    if (!rows.groups.empty()) why = kFp8OneByOne;
    if (rows.quantized() || groups_.empty() || like.scalar_type() != d.scalar_type()) return false;
    c10::SmallVector<const Tensor*, 8> weights;
    for (const Operand& weight : w.weights) {
      if (weight.quantized()) return false;
      weights.push_back(&weight.plain);
    }
    return rows_by_list(rows.plain, weights, across, across ? at::TensorList() : w.biases, groups_, d, why);
  }

  // product(operand, group, like, into) of each group: [rows, last].
  template <class Product>
  Tensor over_groups(const DispatchMode& dispatch, const Operand& t, const WeightSet& w, bool across,
                     const Tensor& like, const c10::SymInt& last, const Tensor& given, const char* argument,
                     Product&& product) const {
    const Operand rows = folded(t);
    const Tensor all = matrix_of(like);
    const c10::SymInt beyond = all.sym_size(0) - total_;
    check_apart(given, argument, t);
    if (!dispatch.direct()) {  // a traced call returns new results
      std::vector<Tensor> parts;
      for (size_t i = 0; i < groups_.size(); ++i) {
        parts.push_back(product(part_of(dispatch, rows, i), i, part_of(dispatch, all, i), {}));
      }
      parts.push_back(like.new_zeros_symint({beyond, last}));
      return with_rows_of(at::cat(parts), like);
    }
    Tensor d = given;
    if (!d.defined()) {
      d = like.new_empty_symint({all.sym_size(0), last});
      d.narrow_symint(0, total_, beyond).zero_();
    }
    const char* why = nullptr;
    if (!by_list(rows, w, across, like, d, why)) {
      const ListOneByOne reason(why);
      const OneWorkspace for_all;
      for (size_t i = 0; i < groups_.size(); ++i) {
        product(part_of(dispatch, rows, i), i, part_of(dispatch, all, i), part_of(dispatch, d, i));
      }
    }
    return given.defined() ? result_in(given, like) : with_rows_of(d, like);
  }

  Grouping grouping_;
  c10::SmallVector<Rows, 8> groups_;
  int64_t total_ = 0;
};

}  // namespace

std::shared_ptr<const GemmPolicy> grouped_gemm_policy(Grouping grouping) {
  if (grouping.offsets.defined()) return device_groups(std::move(grouping));
  return std::make_shared<HostGroups>(std::move(grouping));
}

}  // namespace te_torch::layer
