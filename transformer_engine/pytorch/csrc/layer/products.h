// The products of a layer over its weights, as a policy: over one weight here. Forward, input gradient and weight
// gradient are written once over it; which formats the operands have is product.h's business.
#pragma once

#include <memory>

#include "product.h"
#include "weight_product.h"

namespace te_torch::layer {

// The weights of one layer as its products read them, and its biases: none, or one for each weight.
struct WeightSet {
  c10::SmallVector<Operand, 1> weights;
  at::TensorList biases;
};

// The operand of a gradient that arrives: [..., features], with the column sums where they were made with it.
struct Gradient {
  Operand dy;
  Tensor dbias;
};

class TE_EXPORT Products {
 public:
  Products() = default;
  virtual ~Products() = default;
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  // y[..., N] of x[..., K]; `like` has its leading dimensions and its dtype. rows: which of all rows these are; null
  // for all. split: float32 accumulation throughout.
  virtual Tensor fprop(const Route& route, const Operand& x, const Rows* rows, const WeightSet& w, const Tensor& like,
                       bool split) const = 0;
  // dx[..., K] of dy[..., N].
  virtual Tensor dgrad(const Route& route, const Operand& dy, const Rows* rows, const WeightSet& w, const Tensor& like,
                       bool split) const = 0;
  // What the gradients of the weights are made of.
  virtual std::shared_ptr<WeightProduct> weight_product(const Route& route, Gradient gradient, Operand x,
                                                        at::ScalarType dtype, bool split) const = 0;
};

class TE_EXPORT SingleProduct : public Products {
 public:
  Tensor fprop(const Route& route, const Operand& x, const Rows* rows, const WeightSet& w, const Tensor& like,
               bool split) const override;
  Tensor dgrad(const Route& route, const Operand& dy, const Rows* rows, const WeightSet& w, const Tensor& like,
               bool split) const override;
  std::shared_ptr<WeightProduct> weight_product(const Route& route, Gradient gradient, Operand x, at::ScalarType dtype,
                                                bool split) const override;
};

}  // namespace te_torch::layer
