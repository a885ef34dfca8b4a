// Functions that the ops over groups of rows (grouped_linear.cpp, grouped_mlp.cpp) share: checks of arguments, a layer
// of such a call, and the arguments of eager Python that no schema has.
#pragma once

#include "layer/grouping.h"
#include "layer/layer.h"

namespace te_torch::layer {

// Raises ValueError unless there is a weight of one shape for each group, or one stacked tensor of all
// (core/grouped_operands.h), no biases or as many, and splits that add up to the rows where there are no offsets.
void check_groups(const char* op, const c10::SymInt& rows, const char* weights_name, at::TensorList weights,
                  at::TensorList biases, const OptionalTensor& offsets, at::ArrayRef<int64_t> splits);
c10::SymInt rows_in(const char* op, const Tensor& x);  // raises ValueError for a tensor without dimensions

// Adds the weights and biases to the arguments, and sets up layer number layer_idx for them.
void add_grouped_layer(LayerArgs& call, size_t layer_idx, const char* op, at::TensorList weights, at::TensorList biases,
                       const OptionalTensor& offsets, at::ArrayRef<int64_t> splits, at::ArrayRef<int64_t> quantization);

using GroupQuantizations = std::vector<std::shared_ptr<ProductQuantization>>;

// Arguments of a layer from eager Python: in place of the schema's integers, and beside them.
struct GroupedHandles {
  const OptionalTensor& offsets;
  const std::vector<int64_t>& splits;
  GradAccumulatorPtr grad_accumulator;
  const GroupQuantizations& quantizations;    // none, one for all, or one for each group
  const std::vector<Quantized>& own_weights;  // none, or one for each group
  const OptionalTensor& out;
  const OptionalTensor& dgrad_out;
  bool tail_unread = false, dgrad_tail_unread = false;  // see Grouping

  std::vector<int64_t> spec() const {
    return quantizations.empty() ? std::vector<int64_t>() : quantizations[0]->pack();
  }
  bool fits_schema() const { return quantizations.size() < 2 && !out.has_value() && !dgrad_out.has_value(); }
  // Returns whether an argument is one that a schema does not carry.
  bool add_to(LayerArgs& call, size_t layer_idx) const;
};

}  // namespace te_torch::layer
