// A layer runs a prologue, a GEMM with its tensor-parallel communication, and epilogues. A chain of layers is one
// autograd node: the result of a layer is the input of the next layer's prologue (an MLP: norm, GEMM, activation,
// GEMM).
// - This header has data and policies; forward.cpp and backward.cpp run them.
#pragma once

#include "autograd/autograd.h"
#include "layer/epilogue.h"
#include "layer/prologue.h"
#include "layer/tp_comm.h"
#include "wgrad/grad_accumulator.h"

namespace te_torch::layer {

// A layer as plain values and shared policies, which the autograd node holds.
struct LayerConfig {
  ProloguePtr prologue = plain_prologue();
  Epilogues epilogues = {bias_epilogue()};        // the bias is the first, if there is one
  std::shared_ptr<const TPComm> tp_comm;          // null in a call: that of defaults(); else null: local
  std::shared_ptr<const GemmPolicy> gemm_policy;  // null in a call: that of defaults()
  bool stacked = false;                           // the weights are one tensor [groups, out_features, in_features]
  Quantization quantization;
  GradAccumulatorPtr grad_accumulator;
  // Whether the GEMM's operand is saved or recomputed (by the options; the output of an activation is always
  // recomputed).
  SaveMode operand = SaveMode::kSave;
  // After another layer in a chain: whether the output of that layer is saved or recomputed, and whether it is saved as
  // E4M3 in blocks of 1 x 128.
  SaveMode input = SaveMode::kSave;
  bool input_in_fp8 = false;
};

using LayerConfigs = c10::SmallVector<LayerConfig, 2>;

struct LayerArgs {
  NamedTensors arguments;
  mutable LayerConfigs layers;  // the forward takes them into the node's state
  // Of each layer: the module's FP8 copies of its weights, or none.
  c10::SmallVector<c10::SmallVector<Operand, 1>, 2> own_weights;
  bool return_output = true;  // the norm's output is one of the node's
  bool return_input = false;  // x is an output too, so that a residual's gradient joins in the backward

  const Tensor& x() const { return arguments[kX]; }
};

// The policies of a layer that has none of its own. Only tests change them.
struct Defaults {
  std::shared_ptr<const TPComm> tp_comm;
  std::shared_ptr<const GemmPolicy> gemm_policy;
  std::shared_ptr<const SavedPolicy> saved;
};
TE_EXPORT Defaults& defaults();

// A family of autograd/autograd.h but for its name. Outputs: y; after a norm also the norm's output, and x + residual
// (or x itself, if return_input) after it.
struct TE_EXPORT LayerChain {
  struct State {
    LayerConfigs layers;
    bool return_output = true;
    at::ScalarType dtype = at::kFloat;
    std::shared_ptr<const SavedPolicy> policy;
    ArgumentPlaces places;
    size_t tensors = 0;  // arguments
  };

  // Mode: Direct or Dispatched. Defined in forward.cpp and backward.cpp. autograd needs the call's tensors as a list.
  template <class Mode>
  static variable_list forward(State& state, SaveContext& save, at::TensorList, const LayerArgs& call);
  template <class Mode>
  static variable_list backward(const State& state, const Wanted& needed, const NamedTensors& saved,
                                const variable_list& grads);
};

// ---- what forward.cpp and backward.cpp share ----

// The names of a layer's saved tensors, after those of earlier layers.
enum SavedName : int {
  kInput,
  kWeight,
  kOperand,
  kUsedScales,
  kPackedInput,
  kWholeOperand,   // an operand as it was gathered, where it is kept so
  kWeightValues,   // the weight that the backward reads, where the recomputed GEMM reads its FP8 copy
  kSavedPrologue,  // what the prologue saves, and what the epilogues do
  kSavedEpilogue = kSavedPrologue + kOwnNames,
  kSavedNames = kSavedEpilogue + kOwnNames
};
constexpr int saved_name(size_t layer_idx, SavedName name) { return static_cast<int>(layer_idx) * kSavedNames + name; }

struct LayerInput {
  PrologueInput prologue;
  at::TensorList weights;
  OwnTensors epilogue;
  at::ArrayRef<Operand> own;  // FP8 copies of the weights, made before; none: the product quantizes them itself
};

// How a layer's forward keeps what its backward reads. kForRecompute: enough to run prologue and product once more.
enum class SaveFor : uint8_t { kBackward, kRecompute };

struct LayerOutput {
  Tensor y;
  PrologueOutput prologue;
};

LayerOutput layer_forward(const DispatchMode& dispatch, const LayerConfig& config, size_t layer_idx, SaveContext& save,
                          const LayerInput& in, const WantedGradients& wanted, SaveFor save_for, bool want_output);

// How many epilogues, from the first on, the GEMM computes.
size_t fused_epilogues(const LayerConfig& config);

// The pre-activation in E4M3, and what that means.
Operand packed_input(const DispatchMode& dispatch, const Tensor& input);

}  // namespace te_torch::layer
