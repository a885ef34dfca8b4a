// The one autograd skeleton. A family (an op, or the layers of layer/) is data for it: a kName, a State, and forward
// and backward written once for both routes. The skeleton does what every node must do the same way: run below autograd
// and autocast, keep tensors only through a SaveContext (saved.h), and refuse a double backward by name.
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

// Autograd's numbers of a forward's arguments. Each argument has a slot, a list of tensors one for each of them; a
// gradient is returned for every slot. Edges are counted over those slots alone in which there is a tensor.
class Slots {
 public:
  void add(const Tensor&) { first_.push_back(next_), push(true); }  // which torch numbers, there or not
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

// What a family's backward asks: which of the forward's tensors want a gradient now.
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
  NamedTensors::Labels labels;   // of the saved tensors
  SavedLeaves leaves;            // those of them that autograd was not given
  std::string module;            // that called, while somebody records
  std::vector<NodePtr> through;  // leaves' that the engine was not told of
};

// Family:
//   static constexpr const char* kName;
//   static constexpr bool kManyLeaves;         there or not: arguments may be hundreds of leaves
//   struct State;                              plain values, no tensors
//   template <class DispatchMode> static variable_list forward(State&, SaveContext&, const Args&...);
//   template <class DispatchMode> static variable_list backward(const State&, const Wanted&, const NamedTensors& saved,
//                                                        const variable_list& grads);   a gradient for each slot
// Args: Tensor, OptionalTensor, at::TensorList and plain values, in any order; trailing slots may be left out.
template <class Family, class DispatchMode>
struct Node : torch::autograd::Function<Node<Family, DispatchMode>> {
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
    variable_list outputs = Family::template forward<DispatchMode>(holder->state, save, args...);
    for (const Tensor& output : outputs) refuse_pooled(output, Family::kName, "an output");
    if (probe::active()) holder->module = probe::label();
    NamedTensors kept = save.take();
    holder->labels = kept.labels();
    if constexpr (kManyLeaves) holder->leaves.take(kept.tensors());
    ctx->save_for_backward(std::move(kept.tensors()));
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
    TORCH_CHECK(held.through.empty(), Family::kName,
                ": a backward through this graph failed while it added gradients to .grad, and some of the graph is "
                "gone; run forward again.");
    if constexpr (kManyLeaves) held.leaves.give(tensors);
    const NamedTensors saved(std::move(tensors), held.labels);
    const probe::Label label(held.module);
    variable_list out = Family::template backward<DispatchMode>(held.state, Wanted(ctx, held.slots), saved, grads);
    for (const Tensor& gradient : out) refuse_pooled(gradient, Family::kName, "a gradient");
    out.resize(held.slots.size());
    if constexpr (kManyLeaves) {
      held.leaves.end_with_graph();
      give(held, out);
    }
    return out;
  }

 private:
  static constexpr bool kManyLeaves = requires { Family::kManyLeaves; }
  &&std::is_same_v<DispatchMode, Direct>;

  static void give(Holder& held, variable_list& out) {
    std::vector<Tensor*> of_edges;
    of_edges.reserve(out.size());
    for (size_t slot = 0; slot < out.size(); ++slot) {
      if (held.slots.edge(slot) >= 0) of_edges.push_back(&out[slot]);
    }
    give_to_leaves(of_edges, held.through);
  }
};

}  // namespace te_torch
