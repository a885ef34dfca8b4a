// The tensors of a chain of layers under names: its arguments, and those of each layer's prologue and epilogues.
#pragma once

#include "core/named_tensors.h"
#include "core/probe.h"

namespace te_torch::layer {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Arguments of a chain: x, then for each layer its weights, and tensors that the prologue and the epilogues name
// themselves, from 0 on.
inline constexpr int kOwnNames = 6;  // of a prologue; of the epilogues of a layer
enum ArgumentName : int { kX, kFirstWeight };
constexpr int weight_of(size_t layer_idx) { return kFirstWeight + static_cast<int>(layer_idx) * (1 + 2 * kOwnNames); }
constexpr int prologue_of(size_t layer_idx, int own = 0) { return weight_of(layer_idx) + 1 + own; }
constexpr int epilogue_of(size_t layer_idx, int own = 0) { return prologue_of(layer_idx, kOwnNames) + own; }
inline constexpr int kBias = 0;  // a name of the epilogues: one for each weight, or none
constexpr int bias_of(size_t layer_idx) { return epilogue_of(layer_idx, kBias); }
// The layer whose weights go by this name; -1: of no layer.
constexpr int layer_of_weight(int name) {
  return name >= kFirstWeight && (name - kFirstWeight) % (1 + 2 * kOwnNames) == 0
             ? (name - kFirstWeight) / (1 + 2 * kOwnNames)
             : -1;
}

// The layer and the own name of a prologue's tensor; {-1, 0} for any other.
struct PrologueName {
  int layer_idx, own;
};
constexpr PrologueName prologue_name(int name) {
  const int per_layer = weight_of(1) - weight_of(0),
            own = name < kFirstWeight ? -1 : (name - kFirstWeight) % per_layer - 1;
  return own >= 0 && own < kOwnNames ? PrologueName{(name - kFirstWeight) / per_layer, own} : PrologueName{-1, 0};
}

// Those of one prologue or epilogue, among all.
class OwnTensors {
 public:
  OwnTensors(const NamedTensors& all, int first) : all_(&all), first_(first) {}

  const Tensor& operator[](int own) const { return (*all_)[first_ + own]; }
  OptionalTensor optional(int own) const { return all_->optional(first_ + own); }
  at::TensorList list(int own) const { return all_->list(first_ + own); }

 private:
  const NamedTensors* all_;
  int first_;
};

// A tensor that a prologue or an epilogue saves for its backward, under a name of its own.
struct OwnSaved {
  int own;
  Tensor tensor;
  const SavedInfo* info;
  bool is_argument = false;      // needed to run forward() again, too
  bool recompute_reads = false;  // only recompute() reads it
};
using OwnSaves = c10::SmallVector<OwnSaved, 4>;

// Gradients of such tensors; and which are wanted, as bits of their names.
using OwnGradients = c10::SmallVector<std::pair<int, Tensor>, 3>;
struct OwnWanted {
  uint32_t bits = 0;

  bool any() const { return bits != 0; }
  bool operator[](int own) const { return (bits >> own & 1) != 0; }
};

// The place of a name's tensors in the list of all arguments.
struct ArgumentPlace {
  int name;
  size_t first, count;
};
using ArgumentPlaces = c10::SmallVector<ArgumentPlace, 8>;
ArgumentPlaces places_of(const NamedTensors& arguments);
const ArgumentPlace* find_place(const ArgumentPlaces& places, int name);  // null: there is none

// Which gradients of a layer are wanted.
struct WantedGradients {
  bool operand = false;  // of the GEMM's operand: of x, of an earlier layer, or of the prologue's tensors
  bool input = false;    // of the prologue's input
  bool weight = false;
  OwnWanted prologue, epilogue;

  bool bias() const { return epilogue[kBias]; }
  // Whether a gradient has to reach the result of the GEMM.
  bool gemm() const { return operand || weight || bias(); }
};

// The gradients that each layer computes. `is_wanted(place)`: whether the argument at a place needs a gradient. any:
// whether a gradient reaches the last layer's GEMM or an earlier layer.
struct WantedByLayer {
  c10::SmallVector<WantedGradients, 2> layers;
  bool any = false;

  template <class IsWanted>
  WantedByLayer(size_t count, const ArgumentPlaces& places, IsWanted&& is_wanted) : layers(count) {
    bool x = false;
    for (const ArgumentPlace& place : places) {
      bool wanted = false;
      for (size_t i = 0; !wanted && i < place.count; ++i) wanted = is_wanted(place.first + i);
      if (wanted) place.name == kX ? void(x = true) : note(place.name);
    }
    follow(x);
  }

 private:
  void note(int name);
  void follow(bool x);
};

}  // namespace te_torch::layer
