// The faces of a public op, made once from how its schema's arguments become a family's: the dispatcher's four keys and
// what eager Python calls. `Packed` holds the arguments; it names its Family, hands them to a call in the family's
// order (with), lists its tensors (each), but not the weights whose own FP8 copy the module hands over, which serve
// autograd alone (each_own), and says whether any weight wants a gradient (weights_need_graph).
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>

#include "autograd.h"
#include "weight_grad.h"

namespace te_torch {

// What eager Python hands over for each product: in place of the schema's integers, and beside them.
struct EagerHandles {
  PyObject* sink;
  Quantization quantization;    // with its state
  const Quantized* own_weight;  // the module's own FP8 copy of the weight, or none

  std::vector<int64_t> spec() const { return quantization != nullptr ? quantization->pack() : std::vector<int64_t>(); }
};

// (y, norm output, x + residual); the last is empty where there was none to return.
template <class Packed>
std::tuple<Tensor, Tensor, Tensor> three_outputs(const variable_list& outputs, const Packed& packed) {
  return {outputs[0], outputs[1], outputs.size() > 2 ? outputs[2] : packed.x.new_empty({0})};
}

template <class Route, class Packed>
variable_list run_node(const Packed& packed) {
  return packed.with([](const auto&... args) { return Node<typename Packed::Family, Route>::apply(args...); });
}

template <class Route, class Packed>
variable_list run_inference(const Packed& packed) {
  typename Packed::Family::State state;
  Keeper keeper;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return packed.with(
      [&](const auto&... args) { return Packed::Family::template forward<Route>(state, keeper, args...); });
}

template <class Packed>
void autocast_all(Packed& packed) {
  packed.each([](auto& t) { t = te_torch::autocast(t); });
}

namespace detail {
inline const Tensor* address(const Tensor& t) { return &t; }
inline const Tensor* address(const OptionalTensor& t) { return pointer_to(t); }

// An argument of a schema, from what eager Python hands over. Integers are packed for the dispatcher alone: where it is
// passed by, `extra` adds the quantization itself.
template <class T>
const T& for_schema(const T& argument) {
  return argument;
}
inline std::vector<int64_t> for_schema(const EagerHandles& handles) { return handles.spec(); }
template <class T>
const T& for_pack(const T& argument) {
  return argument;
}
inline at::ArrayRef<int64_t> for_pack(const EagerHandles&) { return {}; }
}  // namespace detail

// A weight that has an FP8 copy of its own is not cast: its dtype fits where x's is what a cast would make of it.
inline void check_own(const Tensor& weight, const Tensor& x) {
  const auto device = weight.device().type();
  const auto dtype = weight.scalar_type();
  const bool is_cast = dtype != x.scalar_type() && at::autocast::is_autocast_enabled(device) && dtype != at::kDouble &&
                       x.scalar_type() == at::autocast::get_autocast_dtype(device);
  if (!is_cast) check_same(weight, x, "linear", "weight");
}

template <class Packed>
c10::SmallVector<const Tensor*, 8> tensors_of(Packed& packed) {
  c10::SmallVector<const Tensor*, 8> list;
  packed.each([&](auto& t) { list.push_back(detail::address(t)); });
  return list;
}

// kPack turns the schema's arguments into Packed; kUnpack(outputs, packed) turns the family's outputs into the op's.
template <auto kPack, auto kUnpack, class Function = decltype(kPack)>
struct Op;

template <auto kPack, auto kUnpack, class Packed, class... Args>
struct Op<kPack, kUnpack, Packed (*)(Args...)> {
  static auto autograd(Args... args) {
    const Packed packed = kPack(args...);
    return kUnpack(run_node<Dispatched>(packed), packed);
  }

  static auto composite(Args... args) {
    const Packed packed = kPack(args...);
    return kUnpack(run_inference<Dispatched>(packed), packed);
  }

  static auto autocast(Args... args) {
    Packed packed = kPack(args...);
    autocast_all(packed);  // before autocast is excluded
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const bool inference = c10::InferenceMode::is_enabled();
    return kUnpack(inference ? run_inference<Dispatched>(packed) : run_node<Dispatched>(packed), packed);
  }

  // What Python calls in eager mode, with EagerHandles where the schema has integers of a quantization. `extra(packed)`
  // adds what is in them, and says whether something is that the schema does not carry.
  template <class Extra, class... Given>
  static auto eager(const char* name, Extra&& extra, const Given&... given) {
    Packed packed = kPack(detail::for_pack(given)...);
    const bool beyond_schema = extra(packed);
    const auto tensors = tensors_of(packed);
    if (must_dispatch(tensors)) {
      refuse_sink(beyond_schema, name);
      return Dispatched::call<&Op::autograd>(name, detail::for_schema(given)...);
    }
    autocast_all(packed);
    packed.each_own([&](const Tensor& weight) { check_own(weight, packed.x); });
    const bool graph = needs_graph(tensors) || (c10::GradMode::is_enabled() && packed.weights_need_graph());
    return kUnpack(graph ? run_node<Direct>(packed) : run_inference<Direct>(packed), packed);
  }
};

}  // namespace te_torch
