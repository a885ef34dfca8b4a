// GemmPolicy over two weights for tests: the first third of the rows go by the first weight, the others by the second;
// a layer that has one weight uses it for both. And a linear op that has two. Nothing of the layers is repeated here.
#include <ATen/TensorOperators.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "layer/layer.h"

namespace {

using at::Tensor;
using namespace te_torch;
using layer::WeightSet;

struct Halves {
  Rows first, second;
};

// Blocks of scales are 128 rows long, and an operand is cut between them.
Halves halves(int64_t rows, bool blocks) {
  const int64_t cut = blocks ? rows / 3 / 128 * 128 : rows / 3;
  return {{0, cut}, {cut, rows - cut}};
}

int64_t rows_in(const Operand& t) {
  if (t.quantized()) return t.fp8.rowwise.defined() ? t.fp8.rowwise.size(0) : t.fp8.columnwise.size(1);
  return t.plain.dim() < 2      ? 1
         : t.plain.numel() == 0 ? t.plain.flatten(0, -2).size(0)
                                : t.plain.numel() / t.plain.size(-1);
}

// Some rows of an operand that is read columnwise.
Operand columnwise_rows(const Operand& t, const Rows& rows) {
  if (!t.quantized() || !t.fp8.columnwise.defined()) return rows_of(t, rows);  // or kept as the forward read it
  Quantized part{t.fp8.scaling,
                 t.fp8.e5m2,
                 {},
                 {},
                 t.fp8.columnwise.narrow(1, rows.first, rows.count),
                 t.fp8.columnwise_scale_inv};
  if (part.scaling == TE_SCALING_BLOCK_1D) {
    part.columnwise_scale_inv = part.columnwise_scale_inv.narrow(0, rows.first / 128, (rows.count + 127) / 128);
  }
  return {{}, part};
}

WeightSet one_of(const WeightSet& w, size_t i) {
  const size_t own = w.weights.size() == 1 ? 0 : i;
  return {{w.weights[own]}, w.biases.empty() ? w.biases : w.biases.slice(own, 1)};
}

class TwoGradients final : public WgradTask {
 public:
  TwoGradients(std::shared_ptr<WgradTask> first, std::shared_ptr<WgradTask> second, Tensor sums, bool shared)
      : parts_{std::move(first), std::move(second)}, sums_(std::move(sums)), shared_(shared) {}

  WeightGrads compute(const DispatchMode& dispatch, bool with_bias) const override {
    const bool each_bias = with_bias && !sums_.defined();
    const WeightGrads a = parts_[0]->compute(dispatch, each_bias), b = parts_[1]->compute(dispatch, each_bias);
    if (!shared_) return {{a.weights[0], b.weights[0]}, {a.biases[0], b.biases[0]}};
    const Tensor bias = sums_.defined() ? sums_ : each_bias ? a.biases[0] + b.biases[0] : Tensor();
    return {{a.weights[0] + b.weights[0]}, {bias}};
  }

  std::vector<Tensor> accumulate(at::ArrayRef<WeightTarget> targets, bool with_bias) const override {
    TORCH_CHECK(shared_, "two_weights: two weights of their own have no main_grad here.");
    const bool each_bias = with_bias && !sums_.defined();
    std::vector<Tensor> sums = parts_[0]->accumulate(targets, each_bias);
    std::vector<WeightTarget> again(targets.begin(), targets.end());
    for (WeightTarget& target : again) target.overwrite = false;
    const std::vector<Tensor> others = parts_[1]->accumulate(again, each_bias);
    for (size_t i = 0; i < sums.size(); ++i) sums[i] = sums[i] + others[i];
    int64_t first = 0;
    for (const WeightTarget& target : targets) {
      if (with_bias && sums_.defined()) sums.push_back(sums_.narrow(0, first, target.rows));
      first += target.rows;
    }
    return sums;
  }

  std::vector<Tensor> reads() const override {
    std::vector<Tensor> all = parts_[0]->reads();
    for (const Tensor& t : parts_[1]->reads()) all.push_back(t);
    return all;
  }
  at::ScalarType dtype() const override { return parts_[0]->dtype(); }

 private:
  std::shared_ptr<WgradTask> parts_[2];
  Tensor sums_;
  bool shared_;
};

class TwoWeights final : public layer::SingleProduct {
 public:
  explicit TwoWeights(bool shared) : shared_(shared) {}

  Tensor fprop(const DispatchMode& dispatch, const Operand& x, const Rows* rows, const WeightSet& w, const Tensor& like,
               bool split) const override {
    return over_both(dispatch, x, w, like, [&](const Operand& part, const WeightSet& one, const Tensor& shape) {
      return SingleProduct::fprop(dispatch, part, rows, one, shape, split);
    });
  }
  Tensor dgrad(const DispatchMode& dispatch, const Operand& dy, const Rows* rows, const WeightSet& w,
               const Tensor& like, bool split) const override {
    return over_both(dispatch, dy, w, like, [&](const Operand& part, const WeightSet& one, const Tensor& shape) {
      return SingleProduct::dgrad(dispatch, part, rows, one, shape, split);
    });
  }
  std::shared_ptr<WgradTask> wgrad_task(const DispatchMode& dispatch, layer::Gradient gradient, Operand x,
                                        at::ScalarType dtype, bool split) const override {
    if (!dispatch.direct()) return SingleProduct::wgrad_task(dispatch, std::move(gradient), std::move(x), dtype, split);
    const auto [first, second] = halves(rows_in(x), x.quantized() || gradient.dy.quantized());
    const auto part = [&](const Rows& rows) {
      return SingleProduct::wgrad_task(dispatch, {columnwise_rows(gradient.dy, rows), {}}, columnwise_rows(x, rows),
                                       dtype, split);
    };
    return std::make_shared<TwoGradients>(part(first), part(second), gradient.dbias, shared_);
  }

 private:
  template <class Product>
  static Tensor over_both(const DispatchMode& dispatch, const Operand& t, const WeightSet& w, const Tensor& like,
                          Product&& product) {
    if (!dispatch.direct()) return product(t, one_of(w, 0), like);
    const auto [first, second] = halves(rows_in(t), t.quantized());
    const auto part = [&](const Rows& rows, size_t i) {
      return product(rows_of(t, rows), one_of(w, i), like.new_empty({0}).expand({rows.count, 0}));
    };
    const Tensor both = at::cat({part(first, 0), part(second, 1)});
    std::vector<int64_t> shape = like.sizes().vec();
    shape.back() = both.size(-1);
    return both.view(shape);
  }

  bool shared_;
};

struct TwoChain : layer::LayerChain {
  static constexpr const char* kName = "two_weights";
};

Tensor two_linear(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                  const std::shared_ptr<ProductQuantization>& quantization) {
  layer::LayerArgs call;
  call.layers.emplace_back();
  call.layers[0].gemm_policy = std::make_shared<TwoWeights>(false);
  call.layers[0].quantization = quantization;
  call.own_weights.resize(1);
  call.arguments.add(layer::kX, x);
  for (const Tensor& weight : weights) call.arguments.add(layer::weight_of(0), weight);
  for (const Tensor& bias : biases) call.arguments.add(layer::bias_of(0), bias);
  return Node<TwoChain, Direct>::run(at::TensorList(call.arguments.tensors()), call)[0];
}

}  // namespace

PYBIND11_MODULE(two_weights, m) {
  using te_torch::layer::defaults;
  m.def("install", [] { defaults().gemm_policy = std::make_shared<TwoWeights>(true); });
  m.def("remove", [] { defaults().gemm_policy = std::make_shared<layer::SingleProduct>(); });
  m.def("linear", torch::wrap_pybind_function_no_gil(two_linear));
}
