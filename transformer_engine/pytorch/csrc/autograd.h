// The one autograd skeleton. A family (an op, or the linear layers with their prologues) is data for it: a kName, a
// State, and forward/backward written once for both routes. The skeleton does what every node must do the same way:
// run below autograd and autocast, keep tensors only through the saved-tensor door (so hooks see each of them, and
// te.memory_plan can name them), and refuse a double backward by name.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "common.h"
#include "recorder.h"

namespace te_torch {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The door for saved activations: tensors are listed in the order in which the family takes them back, each with the
// words that te.memory_plan shows for it. A Keeper without an op only collects: a family that calls another one uses
// it, and a call without gradients.
class Keeper {
 public:
  explicit Keeper(const char* op = nullptr) : op_(op) { list_.reserve(8); }
  void keep(const Tensor& t, const Kept& what) {
    if (op_ != nullptr && recorder::active() && t.defined()) recorder::tell(op_, what, t, true);
    list_.push_back(t);
  }
  void keep(const OptionalTensor& t, const Kept& what) { keep(t.has_value() ? *t : Tensor(), what); }
  template <class MaybeTensor>
  void keep_if(bool needed, const MaybeTensor& t, const Kept& what) {
    if (needed) {
      keep(t, what);
    } else {
      list_.emplace_back();
    }
  }
  // Of a collecting Keeper: what was listed.
  variable_list take() { return std::move(list_); }

  // Whether a backward will take anything back: not in a call without gradients, whoever wants some.
  bool serves_a_graph() const { return op_ != nullptr; }

  // What is not kept, because the backward computes it again.
  void recompute(const Tensor& t, const Kept& what) const {
    if (op_ != nullptr && recorder::active()) recorder::tell(op_, what, t, false);
  }

 private:
  template <class, class>
  friend struct Node;
  const char* op_;
  variable_list list_;
};

// What the family's backward asks: which of the forward's arguments want a gradient now. Slots are argument positions.
class Wanted {
 public:
  Wanted(std::initializer_list<bool> slots) {
    size_t slot = 0;
    for (const bool wanted : slots) set(slot++, wanted);
  }
  Wanted(const AutogradContext* ctx, const std::vector<int8_t>& edge_of_slot) {
    for (size_t slot = 0; slot < edge_of_slot.size(); ++slot) {
      set(slot, edge_of_slot[slot] >= 0 && ctx->needs_input_grad(static_cast<size_t>(edge_of_slot[slot])));
    }
  }
  bool operator[](size_t slot) const { return (bits_ >> slot & 1) != 0; }

 private:
  void set(size_t slot, bool wanted) { bits_ |= static_cast<uint64_t>(wanted) << slot; }
  uint64_t bits_ = 0;
};

template <class State>
struct Held : torch::CustomClassHolder {
  State state;
  std::vector<int8_t> edge_of_slot;  // autograd numbers only the tensors that are there
  int64_t slots = 0;
  std::string label;  // the module that called, while somebody records
};

namespace detail {
inline bool is_present(const Tensor& t) { return t.defined(); }
inline bool is_present(const OptionalTensor& t) { return t.has_value() && t->defined(); }
template <class T>
bool is_present(const T&) {
  return false;
}
}  // namespace detail

// Family:
//   static constexpr const char* kName;
//   struct State;                              plain values, no tensors
//   template <class Route> static variable_list forward(State&, Keeper&, const Args&...);
//   template <class Route> static variable_list backward(const State&, const Wanted&, const variable_list& saved,
//                                                        const variable_list& grads);   one entry per tensor argument
// Tensor arguments (Tensor or OptionalTensor) come first, then plain values.
template <class Family, class Route>
struct Node : torch::autograd::Function<Node<Family, Route>> {
  using Holder = Held<typename Family::State>;

  template <class... Args>
  static variable_list forward(AutogradContext* ctx, const Args&... args) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    auto holder = c10::make_intrusive<Holder>();
    holder->edge_of_slot.reserve(sizeof...(Args));
    int8_t next_edge = 0;
    (holder->edge_of_slot.push_back(detail::is_present(args) ? next_edge++ : int8_t{-1}), ...);
    holder->slots = sizeof...(Args);
    Keeper keeper(Family::kName);
    variable_list outputs = Family::template forward<Route>(holder->state, keeper, args...);
    if (recorder::active()) holder->label = recorder::label();
    ctx->save_for_backward(std::move(keeper.list_));
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
    const auto& held = static_cast<const Holder&>(*holder);
    const variable_list saved = ctx->get_saved_variables();  // may run modules, which set the label
    const recorder::Label label(held.label);
    variable_list out = Family::template backward<Route>(held.state, Wanted(ctx, held.edge_of_slot), saved, grads);
    out.resize(static_cast<size_t>(held.slots));
    return out;
  }
};

}  // namespace te_torch
