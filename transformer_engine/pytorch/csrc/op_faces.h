// The faces of a public op, made once from how its schema's arguments become a family's: the dispatcher's four keys and
// what eager Python calls. `Packed` holds the arguments; it names its Family, hands them to a call in the family's
// order (with), lists its tensors (each; not the weights whose own FP8 copy the module hands over, which serve autograd
// alone), and says whether any weight wants a gradient (weights_need_graph).
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>

#include "autograd.h"
#include "weight_grad.h"

namespace te_torch {

// What eager Python hands over beside a schema's arguments, for each product.
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
}  // namespace detail

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

  // What Python calls in eager mode; `extra(packed)` adds what the schema does not carry, and says whether it did.
  template <class Extra>
  static auto eager(const char* name, Extra&& extra, Args... args) {
    Packed packed = kPack(args...);
    const bool beyond_schema = extra(packed);
    const auto tensors = tensors_of(packed);
    if (must_dispatch(tensors)) {
      refuse_sink(beyond_schema, name);
      return Dispatched::call<&Op::autograd>(name, args...);
    }
    autocast_all(packed);
    const bool graph = needs_graph(tensors) || (c10::GradMode::is_enabled() && packed.weights_need_graph());
    return kUnpack(graph ? run_node<Direct>(packed) : run_inference<Direct>(packed), packed);
  }
};

}  // namespace te_torch
