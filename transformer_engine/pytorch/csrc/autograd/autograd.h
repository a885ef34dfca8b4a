// The template of all autograd nodes. A family (an op, or the layers of layer/) has a kName, a State, and a forward and
// backward for both dispatch modes. The template runs them below autograd and autocast, saves tensors through a
// SaveContext (saved.h) and refuses a double backward.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "autograd/accumulators.h"
#include "autograd/saved.h"
#include "autograd/saved_leaves.h"
#include "core/common.h"
#include "core/torch_api.h"

namespace te_torch {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Autograd's numbers of a forward's arguments. Each argument has a slot, a list of tensors one for each tensor; a
// gradient is returned for every slot. Slots with a tensor have an edge number.
class Slots {
 public:
  void add(const Tensor&) { first_.push_back(next_), push(true); }  // torch numbers it even if it is undefined
  void add(const OptionalTensor& t) { first_.push_back(next_), push(t.has_value() && t->defined()); }
  void add(const at::TensorList& list) {
    first_.push_back(next_);
    for (size_t i = 0; i < list.size(); ++i) push(true);
  }
  template <class T>
  void add(const T&) {
    first_.push_back(next_), push(false);
  }

  size_t size() const { return edges_.size(); }
  size_t of(size_t argument, size_t element = 0) const { return static_cast<size_t>(first_[argument]) + element; }
  int32_t edge(size_t slot) const { return edges_[slot]; }  // -1: no tensor

 private:
  void push(bool tensor) { edges_.push_back(tensor ? edge_++ : -1), ++next_; }

  c10::SmallVector<int32_t, 12> first_, edges_;
  int32_t next_ = 0, edge_ = 0;
};

// Which of the forward's tensors need a gradient in this backward.
class Wanted {
 public:
  Wanted(const AutogradContext* ctx, const Slots& slots) : ctx_(ctx), slots_(slots) {}
  bool operator[](size_t argument) const { return at(argument, 0); }
  bool at(size_t argument, size_t element) const {
    const int32_t edge = slots_.edge(slots_.of(argument, element));
    return edge >= 0 && ctx_->needs_input_grad(static_cast<size_t>(edge));
  }

 private:
  const AutogradContext* ctx_;
  const Slots& slots_;
};

template <class State>
struct Held : torch::CustomClassHolder {
  State state;
  Slots slots;
  NamedTensors::Labels labels;      // of the saved tensors
  SavedLeaves leaves;               // saved tensors that autograd does not hold
  std::string module;               // the calling module, in a recording
  std::vector<NodePtr> leaf_nodes;  // those that have run without the engine
};

// Family:
//   static constexpr const char* kName;
//   static constexpr bool kManyLeaves;         optional: arguments may be hundreds of leaves
//   struct State;                              plain values, no tensors
//   template <class Mode> static variable_list forward(State&, SaveContext&, const Args&...);
//   template <class Mode> static variable_list backward(const State&, const Wanted&, const NamedTensors& saved,
//                                                        const variable_list& grads);   a gradient for each slot
// Args: Tensor, OptionalTensor, at::TensorList and plain values, in any order; trailing slots may be left out.
template <class Family, class Mode>
struct Node : torch::autograd::Function<Node<Family, Mode>> {
  using Holder = Held<typename Family::State>;

  template <class... Args>
  static variable_list run(const Args&... args) {
    const AnnouncedRows until_saved;
    return Node::apply(args...);
  }

  template <class... Args>
  static variable_list forward(AutogradContext* ctx, const Args&... args) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    auto holder = c10::make_intrusive<Holder>();
    (holder->slots.add(args), ...);
    SaveContext save = SaveContext::of_graph(Family::kName);
    variable_list outputs = Family::template forward<Mode>(holder->state, save, args...);
    for (const Tensor& output : outputs) refuse_pooled(output, Family::kName, "an output");
    if (probe::active()) holder->module = probe::label();
    NamedTensors saved = save.take();
    holder->labels = saved.labels();
    if constexpr (kManyLeaves) holder->leaves.take(saved.tensors());
    ctx->save_for_backward(std::move(saved.tensors()));
    ctx->saved_data["held"] = c10::IValue::make_capsule(std::move(holder));
    ctx->set_materialize_grads(false);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !c10::GradMode::is_enabled(), Family::kName,
        ": double backward is not supported (backward ran with create_graph=True); use plain torch modules where a "
        "gradient of a gradient is needed.");
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto holder = ctx->saved_data.at("held").toCapsule();
    auto& held = static_cast<Holder&>(*holder);
    variable_list tensors = ctx->get_saved_variables();  // may run modules, which set the label
    TORCH_CHECK(held.leaf_nodes.empty(), Family::kName,
                ": a backward through this graph failed while it added gradients to .grad, and a part of the graph "
                "was freed; run forward again.");
    if constexpr (kManyLeaves) held.leaves.give(Family::kName, tensors);
    const NamedTensors saved(std::move(tensors), held.labels);
    const probe::Label label(held.module);
    variable_list out = Family::template backward<Mode>(held.state, Wanted(ctx, held.slots), saved, grads);
    for (const Tensor& gradient : out) refuse_pooled(gradient, Family::kName, "a gradient");
    out.resize(held.slots.size());
    if constexpr (kManyLeaves) {
      held.leaves.end_with_graph();
      accumulate_leaves(held, out);
    }
    return out;
  }

 private:
  static constexpr bool kManyLeaves = requires { Family::kManyLeaves; }
  &&std::is_same_v<Mode, Direct>;

  static void accumulate_leaves(Holder& held, variable_list& out) {
    std::vector<Tensor*> gradients;
    gradients.reserve(out.size());
    for (size_t slot = 0; slot < out.size(); ++slot) {
      if (held.slots.edge(slot) >= 0) gradients.push_back(&out[slot]);
    }
    accumulate_in_leaves(gradients, held.leaf_nodes);
  }
};

}  // namespace te_torch
