// A GemmPolicy computes the GEMMs of a layer over its weights: over one weight here, over one for each group of rows in
// gemm_policy_grouped.h.
// - The layer code is written once over it. Formats of operands are in gemm/product.h.
#pragma once

#include <memory>

#include "layer/tp_comm.h"
#include "wgrad/wgrad_task.h"

namespace te_torch::layer {

// The weights of one layer as its products read them, and its biases: none, or one for each weight. Over groups the
// plain weights may be one stacked tensor [groups, N, K].
struct WeightSet {
  c10::SmallVector<Operand, 1> weights;
  at::TensorList biases;

  OptionalTensor bias(size_t i) const { return biases.empty() ? OptionalTensor() : OptionalTensor(biases[i]); }
};

// The gradient of a GEMM's result: [..., features], with its column sums if quantizing has computed them (of groups,
// [groups, features]).
struct Gradient {
  Operand dy;
  Tensor dbias;
};

using Sums = c10::SmallVector<Tensor, 1>;  // one for each bias
Tensor column_sums(const Tensor& dy);
Tensor matrix_of(const Tensor& t);                                           // leading dimensions folded
Tensor gathered_rows(const DispatchMode& dispatch, const Operand& operand);  // by its row_map, if it has one
Tensor with_rows_of(const Tensor& matrix, const Tensor& like);               // with like's leading dimensions
// Some rows of a matrix, and all of them one by one.
Tensor rows_of_matrix(const DispatchMode& dispatch, const Tensor& matrix, const Rows& rows);
Sums each_row(const DispatchMode& dispatch, const Tensor& matrix);
// The matrices of a contiguous tensor [matrices, rows, columns].
std::vector<Tensor> matrices_in(const DispatchMode& dispatch, const Tensor& stacked);

// The products of one matrix. into: where the result goes, [rows, features] of like's dtype, by the direct dispatch
// mode alone; undefined: a new one, with like's leading dimensions.
Tensor fprop_of(const DispatchMode& dispatch, const Operand& x, const Operand& weight, const OptionalTensor& bias,
                const Tensor& like, bool split, const Tensor& into);
Tensor dgrad_of(const DispatchMode& dispatch, const Operand& dy, const Operand& weight, const Tensor& like, bool split,
                const Tensor& into);

class TE_EXPORT GemmPolicy {
 public:
  GemmPolicy() = default;
  virtual ~GemmPolicy() = default;
  GemmPolicy(const GemmPolicy&) = delete;
  GemmPolicy& operator=(const GemmPolicy&) = delete;

  // How weight number i and its rows are quantized; null: not at all. all: the layer's quantization.
  virtual const ProductQuantization* quantization(const ProductQuantization* all, size_t i) const { return all; }
  // Whether fprop() adds the biases.
  virtual bool adds_bias() const { return true; }
  // Whether this policy receives operands in high precision and quantizes each group of rows by itself.
  virtual bool quantizes_groups(const ProductQuantization* all) const { return false; }
  // Quantizes each group by its quantization(). dbias: receives the column sums of each group; null: not wanted.
  virtual Operand quantized_groups(const DispatchMode&, Pass, const Operand& plain, QuantizeUsage,
                                   Tensor* dbias) const {
    return {};
  }
  // Quantizes the forward's operand again, to the same bits. used: the used_scales() of that operand.
  virtual Operand quantized_again(const DispatchMode&, const Operand& plain, QuantizeUsage, at::TensorList used) const {
    return {};
  }
  // The same policy, which quantizes the forward's operands by the scales that were used before, and touches no state.
  virtual std::shared_ptr<const GemmPolicy> with_scales(at::TensorList used) const { return nullptr; }
  // The scales of the forward's operand that recomputing it needs: those of a whole tensor, or of a whole group.
  virtual std::vector<Tensor> used_scales(const Operand& operand) const;
  // The counters of an operand as the forward saves it, where the sizes of groups of rows are on the device; none: all
  // rows are live.
  virtual LiveCounters live_counters(const Operand& kept) const { return {}; }
  // The gradients of the biases if no weight needs a gradient. sums: the column sums, if they are known.
  virtual Sums bias_gradients(const DispatchMode&, const Tensor& dy, const Tensor& sums) const;

  // y[..., N] of x[..., K]; `like` has its leading dimensions and its dtype. rows: which of all rows these are; null
  // for all. split: float32 accumulation throughout.
  virtual Tensor fprop(const DispatchMode& dispatch, const Operand& x, const Rows* rows, const WeightSet& w,
                       const Tensor& like, bool split) const = 0;
  // Computes some rows into [rows, N], with the bits that they have in the GEMM of all `total_rows` rows.
  virtual Tensor fprop_into(const DispatchMode& dispatch, const Operand& x, const Rows* rows, const WeightSet& w,
                            const Tensor& like, bool split, int64_t total_rows, const Tensor& into) const {
    return into.copy_(fprop(dispatch, x, rows, w, like, split));
  }
  virtual Tensor dgrad_into(const DispatchMode& dispatch, const Operand& dy, const Rows* rows, const WeightSet& w,
                            const Tensor& like, bool split, int64_t total_rows, const Tensor& into) const {
    return into.copy_(dgrad(dispatch, dy, rows, w, like, split));
  }
  // Whether fprop_into() or dgrad_into() keep that promise for all rows of this operand: the tile of the algorithm, all
  // 0 if it is unknown; none if they do not.
  virtual std::optional<te_gemm_tile> takes_runs(Pass pass, const Operand& some, int64_t total_rows, const WeightSet& w,
                                                 const Tensor& like, bool split) const {
    return std::nullopt;
  }
  // dx[..., K] of dy[..., N].
  virtual Tensor dgrad(const DispatchMode& dispatch, const Operand& dy, const Rows* rows, const WeightSet& w,
                       const Tensor& like, bool split) const = 0;
  // The task that computes the gradients of the weights.
  virtual std::shared_ptr<WgradTask> wgrad_task(const DispatchMode& dispatch, Gradient gradient, Operand x,
                                                at::ScalarType dtype, bool split) const = 0;
};

class TE_EXPORT SingleProduct : public GemmPolicy {
 public:
  Tensor fprop(const DispatchMode& dispatch, const Operand& x, const Rows* rows, const WeightSet& w, const Tensor& like,
               bool split) const override;
  Tensor dgrad(const DispatchMode& dispatch, const Operand& dy, const Rows* rows, const WeightSet& w,
               const Tensor& like, bool split) const override;
  Tensor fprop_into(const DispatchMode& dispatch, const Operand& x, const Rows* rows, const WeightSet& w,
                    const Tensor& like, bool split, int64_t total_rows, const Tensor& into) const override;
  Tensor dgrad_into(const DispatchMode& dispatch, const Operand& dy, const Rows* rows, const WeightSet& w,
                    const Tensor& like, bool split, int64_t total_rows, const Tensor& into) const override;
  std::optional<te_gemm_tile> takes_runs(Pass pass, const Operand& some, int64_t total_rows, const WeightSet& w,
                                         const Tensor& like, bool split) const override;
  std::shared_ptr<WgradTask> wgrad_task(const DispatchMode& dispatch, Gradient gradient, Operand x,
                                        at::ScalarType dtype, bool split) const override;
};

}  // namespace te_torch::layer
