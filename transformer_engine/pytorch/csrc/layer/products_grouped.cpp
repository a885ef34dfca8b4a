// See products_grouped.h. Groups that the host knows: their products one behind the other, into one result.
#include "products_grouped.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/variable.h>

#include "gemm.h"
#include "products_device.h"

namespace te_torch::layer {

namespace {

// Below autograd a view has a version of its own: who writes into the memory has to be noticed through both.
void follow(const Tensor& view, const Tensor& base) {
  if (view.is_inference() || base.is_inference()) return;
  torch::autograd::impl::set_version_counter(view, torch::autograd::impl::version_counter(base));
}

// The weights' products of all groups, one after the other. Holds what they read as one tensor each.
class GroupedWeightProduct final : public WeightProduct {
 public:
  GroupedWeightProduct(std::vector<MatrixProduct> products, std::vector<Tensor> reads, at::ScalarType dtype)
      : products_(std::move(products)), reads_(std::move(reads)), dtype_(dtype) {}

  WeightGrads compute(const Route& route, bool with_bias) const override {
    WeightGrads all;
    OneWorkspace for_all;
    for (const MatrixProduct& product : products_) {
      WeightGrads one = product.compute(route, with_bias);
      all.weights.push_back(std::move(one.weights[0]));
      all.biases.push_back(std::move(one.biases[0]));
    }
    return all;
  }

  std::vector<Tensor> accumulate(at::ArrayRef<WeightTarget> targets, bool with_bias) const override {
    TORCH_INTERNAL_ASSERT(targets.size() == products_.size());
    std::vector<Tensor> sums;
    OneWorkspace for_all;
    for (size_t i = 0; i < products_.size(); ++i) {
      const std::vector<Tensor> one = products_[i].accumulate(targets.slice(i, 1), with_bias);
      sums.insert(sums.end(), one.begin(), one.end());
    }
    return sums;
  }

  std::vector<Tensor> reads() const override { return reads_; }
  at::ScalarType dtype() const override { return dtype_; }
  size_t matrices() const override { return products_.size(); }

 private:
  std::vector<MatrixProduct> products_;
  std::vector<Tensor> reads_;
  at::ScalarType dtype_;
};

class HostGroups final : public Products {
 public:
  explicit HostGroups(Grouping grouping) : grouping_(std::move(grouping)) {
    for (const int64_t count : grouping_.splits) {
      groups_.push_back({total_, count});
      total_ += count;
    }
  }

  const ProductQuantization* quantization(const ProductQuantization* all, size_t i) const override {
    return grouping_.quantizations.size() < 2 ? all : grouping_.quantizations[i].get();
  }
  bool quantizes_groups(const ProductQuantization* all) const override { return all != nullptr; }

  Operand quantized_groups(const Route& route, Pass pass, const Tensor& t, Directions directions,
                           Tensor* dbias) const override {
    const Tensor rows = matrix_of(t);
    Operand all;
    std::vector<Tensor> sums(groups_.size());
    bool any = false, summed = false;
    for (size_t i = 0; i < groups_.size(); ++i) {
      const ProductQuantization* q = quantization(grouping_.quantizations[0].get(), i);
      const Quantizer* quantizer = pass == Pass::kFprop ? &q->x : gradient_quantizer(q, directions);
      Tensor* sum = dbias != nullptr ? &sums[i] : nullptr;
      all.groups.push_back(operand_of(route, quantizer, part_of(route, rows, i), directions, sum));
      if (!all.groups.back().quantized()) follow(all.groups.back().plain, t);
      any = any || all.groups.back().quantized();
      summed = summed || sums[i].defined();
    }
    if (summed) {  // by all, where some groups are plain
      for (size_t i = 0; i < groups_.size(); ++i) {
        if (!sums[i].defined()) sums[i] = column_sums(part_of(route, rows, i));
      }
      *dbias = at::stack(sums);
    }
    return any ? all : Operand{t, {}};
  }

  Sums bias_gradients(const Route& route, const Tensor& dy, const Tensor& made) const override {
    if (made.defined()) return each_row(route, made);
    Sums sums;
    const Tensor rows = matrix_of(dy);
    for (size_t i = 0; i < groups_.size(); ++i) sums.push_back(column_sums(part_of(route, rows, i)));
    return sums;
  }

  Tensor fprop(const Route& route, const Operand& x, const Rows*, const WeightSet& w, const Tensor& like,
               bool split) const override {
    const auto product = [&](const Operand& part, size_t i, const Tensor& shape, const Tensor& into) {
      return fprop_of(route, part, w.weights[i], w.bias(i), shape, split, into);
    };
    return over_groups(route, x, like, rows_in(w.weights[0]), grouping_.out, "out", product);
  }

  Tensor dgrad(const Route& route, const Operand& dy, const Rows*, const WeightSet& w, const Tensor& like,
               bool split) const override {
    const auto product = [&](const Operand& part, size_t i, const Tensor& shape, const Tensor& into) {
      return dgrad_of(route, part, w.weights[i], shape, split, into);
    };
    return over_groups(route, dy, like, columns_in(w.weights[0]), grouping_.dgrad_out, "dgrad_out", product);
  }

  std::shared_ptr<WeightProduct> weight_product(const Route& route, Gradient gradient, Operand x, at::ScalarType dtype,
                                                bool split) const override {
    std::vector<Tensor> reads;
    for (const Operand* t : {&gradient.dy, &x}) {
      if (t->plain.defined()) reads.push_back(t->plain);
      for (const Operand& group : t->groups) {
        if (group.plain.defined()) reads.push_back(group.plain);
      }
    }
    const Operand dy = folded(gradient.dy), rows = folded(x);
    Sums sums = gradient.dbias.defined() ? each_row(route, gradient.dbias) : Sums(groups_.size());
    std::vector<MatrixProduct> products;
    products.reserve(groups_.size());
    for (size_t i = 0; i < groups_.size(); ++i) {
      products.emplace_back(part_of(route, dy, i), part_of(route, rows, i), std::move(sums[i]), dtype, split);
    }
    return std::make_shared<GroupedWeightProduct>(std::move(products), std::move(reads), dtype);
  }

 private:
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

  Tensor part_of(const Route& route, const Tensor& rows, size_t i) const {
    return rows_of_matrix(route, rows, groups_[i]);
  }
  // Of one whose plain rows are a matrix. A group alone was kept without being one of several.
  Operand part_of(const Route& route, const Operand& t, size_t i) const {
    if (!t.groups.empty()) return t.groups[i];
    return t.quantized() ? t : Operand{part_of(route, t.plain, i), {}};
  }

  // product(operand, group, like, into) of each group: [rows, last].
  template <class Product>
  Tensor over_groups(const Route& route, const Operand& t, const Tensor& like, const c10::SymInt& last,
                     const Tensor& given, const char* argument, Product&& product) const {
    const Operand rows = folded(t);
    const Tensor all = matrix_of(like);
    const c10::SymInt beyond = all.sym_size(0) - total_;
    check_apart(given, argument, t);
    if (!route.direct()) {  // results are not written into, where somebody traces
      std::vector<Tensor> parts;
      for (size_t i = 0; i < groups_.size(); ++i) {
        parts.push_back(product(part_of(route, rows, i), i, part_of(route, all, i), {}));
      }
      parts.push_back(like.new_zeros_symint({beyond, last}));
      return with_rows_of(at::cat(parts), like);
    }
    Tensor d = given;
    if (!d.defined()) {
      d = like.new_empty_symint({all.sym_size(0), last});
      d.narrow_symint(0, total_, beyond).zero_();
    }
    OneWorkspace for_all;
    for (size_t i = 0; i < groups_.size(); ++i) {
      product(part_of(route, rows, i), i, part_of(route, all, i), part_of(route, d, i));
    }
    return given.defined() ? result_in(given, like) : with_rows_of(d, like);
  }

  Grouping grouping_;
  c10::SmallVector<Rows, 8> groups_;
  int64_t total_ = 0;
};

}  // namespace

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
                    "' lies in the memory of what this product reads, which the weights' gradients read too; give each "
                    "call memory of its own.");
}

Tensor result_in(const Tensor& given, const Tensor& like) {
  note_written(given);
  Tensor result = with_rows_of(given.detach(), like);
  follow(result, given);
  return result;
}

std::shared_ptr<const Products> grouped_products(Grouping grouping) {
  if (grouping.offsets.defined()) return device_groups(std::move(grouping));
  return std::make_shared<HostGroups>(std::move(grouping));
}

}  // namespace te_torch::layer
