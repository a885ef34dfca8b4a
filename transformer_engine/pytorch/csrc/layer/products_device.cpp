// See products_device.h.
#include "products_device.h"

#include "gemm_grouped.h"

namespace te_torch::layer {

namespace {

std::vector<Tensor> sums_of(const Route& route, const Tensor& dy, const Tensor& offsets) {
  return route.call<grouped_sums>("te::grouped_sums", dy, offsets);
}

class DeviceWeightProduct final : public WeightProduct {
 public:
  DeviceWeightProduct(Tensor dy, Tensor x, Tensor offsets) : dy_(std::move(dy)), x_(std::move(x)), offsets_(offsets) {}

  WeightGrads compute(const Route& route, bool with_bias) const override {
    const Tensor dy = matrix_of(dy_);
    const std::vector<Tensor> weights = route.call<grouped_wgrad>("te::grouped_wgrad", dy, matrix_of(x_), offsets_);
    const std::vector<Tensor> sums = with_bias ? sums_of(route, dy, offsets_) : std::vector<Tensor>(weights.size());
    return {{weights.begin(), weights.end()}, {sums.begin(), sums.end()}};
  }

  std::vector<Tensor> accumulate(at::ArrayRef<WeightTarget> targets, bool with_bias) const override {
    std::vector<Tensor> outs;
    std::vector<int64_t> how;
    for (const WeightTarget& target : targets) {
      how.push_back(!target.out.defined() ? -1 : target.overwrite ? 1 : 0);
      if (target.out.defined()) outs.push_back(target.out);
    }
    const Route route = must_dispatch({&dy_}) ? Route(Dispatched{}) : Route(Direct{});  // a traced sink's
    const Tensor dy = matrix_of(dy_);
    route.call<grouped_wgrad_accumulate>("te::grouped_wgrad_accumulate", dy, matrix_of(x_), offsets_,
                                         at::TensorList(outs), at::ArrayRef<int64_t>(how));
    return with_bias ? sums_of(route, dy, offsets_) : std::vector<Tensor>();
  }

  std::vector<Tensor> reads() const override { return {dy_, x_}; }
  at::ScalarType dtype() const override { return x_.scalar_type(); }
  size_t matrices() const override { return size_t(offsets_.size(0) - 1); }

 private:
  Tensor dy_, x_, offsets_;
};

class DeviceGroups final : public Products {
 public:
  explicit DeviceGroups(Grouping grouping) : grouping_(std::move(grouping)) {}

  Tensor fprop(const Route& route, const Operand& x, const Rows*, const WeightSet& w, const Tensor& like,
               bool) const override {
    const std::vector<Tensor> weights = plain(w);
    const Tensor rows = matrix_of(x.plain);
    check_apart(grouping_.out, "out", x);
    if (grouping_.out.defined()) {
      Direct::call<grouped_fprop_into>("te::grouped_fprop", rows, at::TensorList(weights), w.biases, grouping_.offsets,
                                       grouping_.out);
      return result_in(grouping_.out, like);
    }
    return with_rows_of(
        route.call<grouped_fprop>("te::grouped_fprop", rows, at::TensorList(weights), w.biases, grouping_.offsets),
        like);
  }

  Tensor dgrad(const Route& route, const Operand& dy, const Rows*, const WeightSet& w, const Tensor& like,
               bool) const override {
    const std::vector<Tensor> weights = plain(w);
    const Tensor rows = matrix_of(dy.plain);
    check_apart(grouping_.dgrad_out, "dgrad_out", dy);
    if (grouping_.dgrad_out.defined()) {
      Direct::call<grouped_dgrad_into>("te::grouped_dgrad", rows, at::TensorList(weights), grouping_.offsets,
                                       grouping_.dgrad_out);
      return result_in(grouping_.dgrad_out, like);
    }
    return with_rows_of(
        route.call<grouped_dgrad>("te::grouped_dgrad", rows, at::TensorList(weights), grouping_.offsets), like);
  }

  std::shared_ptr<WeightProduct> weight_product(const Route&, Gradient gradient, Operand x, at::ScalarType,
                                                bool) const override {
    return std::make_shared<DeviceWeightProduct>(std::move(gradient.dy.plain), std::move(x.plain), grouping_.offsets);
  }

  Sums bias_gradients(const Route& route, const Tensor& dy, const Tensor&) const override {
    const std::vector<Tensor> sums = sums_of(route, matrix_of(dy), grouping_.offsets);
    return {sums.begin(), sums.end()};
  }

 private:
  static std::vector<Tensor> plain(const WeightSet& w) {
    std::vector<Tensor> weights;
    for (const Operand& weight : w.weights) weights.push_back(weight.plain);
    return weights;
  }

  Grouping grouping_;
};

}  // namespace

std::shared_ptr<const Products> device_groups(Grouping grouping) {
  TORCH_CHECK_NOT_IMPLEMENTED(grouping.quantizations.empty(),
                              "grouped_linear: FP8 products of groups whose sizes the device alone knows are not "
                              "available in this version; pass 'm_splits' as a list of integers.");
  return std::make_shared<DeviceGroups>(std::move(grouping));
}

}  // namespace te_torch::layer
