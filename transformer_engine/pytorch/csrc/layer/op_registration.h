// The registration of a public op that is a chain of layers, from a function that turns its schema's arguments into
// LayerArgs: the dispatcher's four keys and the function that eager Python calls.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "layer/layer.h"
#include "layer/tp_comm_group.h"

namespace te_torch::layer {

using GivenTPComm = std::shared_ptr<GroupTPComm>;

// Arguments of a layer from eager Python, as a tuple: in place of the schema's integers, and beside them.
struct EagerHandles {
  GradAccumulatorPtr grad_accumulator;
  Quantization quantization;    // with its state
  const Quantized* own_weight;  // the module's own FP8 copy of the weight, or none
  GivenTPComm tp_comm;          // none: local

  std::vector<int64_t> spec() const { return quantization != nullptr ? quantization->pack() : std::vector<int64_t>(); }

  // Returns whether an argument is one that a schema does not carry.
  bool add_to(LayerArgs& call, size_t layer_idx) const {
    call.layers[layer_idx].grad_accumulator = grad_accumulator;
    call.layers[layer_idx].quantization = quantization;
    call.layers[layer_idx].tp_comm = tp_comm;
    if (own_weight != nullptr) call.own_weights[layer_idx] = {Operand{{}, *own_weight}};
    return call.layers[layer_idx].grad_accumulator != nullptr;
  }
};

// The schema's integers and name of the TPComms, which are one for all layers but for the direction.
struct EagerParallel {
  const GivenTPComm& first;
  std::vector<int64_t> spec() const { return first != nullptr ? first->parallel().pack() : std::vector<int64_t>(); }
  std::string_view group() const { return first != nullptr ? std::string_view(first->group()) : std::string_view(); }
};

// (y, norm output, x + residual); the last is empty where there was none to return.
inline std::tuple<Tensor, Tensor, Tensor> three_outputs(const variable_list& outputs, const LayerArgs& call) {
  return {outputs[0], outputs[1], outputs.size() > 2 ? outputs[2] : call.x().new_empty({0})};
}

inline at::TensorList tensors_of(const LayerArgs& call) { return call.arguments.tensors(); }

template <class Mode>
variable_list run_inference(const LayerArgs& call) {
  LayerChain::State state;
  SaveContext nothing = SaveContext::of_none();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return LayerChain::forward<Mode>(state, nothing, tensors_of(call), call);
}

// The call's tensors with their names, but not the weights whose FP8 copies the module hands over: these serve autograd
// alone.
template <class Visit>
void visit_tensors(LayerArgs& call, Visit&& visit) {
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const int name = call.arguments.labels()[i].name, layer_idx = layer_of_weight(name);
    if (layer_idx < 0 || call.own_weights[size_t(layer_idx)].empty()) visit(name, call.arguments.tensors()[i]);
  }
}

inline void autocast_all(LayerArgs& call) {
  visit_tensors(call, [&](int name, Tensor& t) {
    const PrologueName in = prologue_name(name);
    if (in.layer_idx >= 0 && !call.layers[size_t(in.layer_idx)].prologue->is_cast(in.own)) return;
    if (at::autocast::is_autocast_enabled(t.device().type())) t = te_torch::autocast(t);
  });
}

// A weight that has an FP8 copy of its own is not cast: its dtype fits if a cast would give it the dtype of x.
inline void check_own_weights(const LayerArgs& call) {
  for (size_t i = 0; i < call.layers.size(); ++i) {
    if (call.own_weights[i].empty()) continue;
    const Tensor& x = call.x();
    for (const Tensor& weight : call.arguments.list(weight_of(i))) {
      const auto device = weight.device().type();
      const auto dtype = weight.scalar_type();
      const bool is_cast = dtype != x.scalar_type() && at::autocast::is_autocast_enabled(device) &&
                           dtype != at::kDouble && x.scalar_type() == at::autocast::get_autocast_dtype(device);
      if (!is_cast) check_same(weight, x, "linear", "weight");
    }
  }
}

// Whether this call may make the autograd node itself, with an argument that no schema has: a dispatch mode sees the
// ops inside the node. functorch needs the op as one, and without a graph no node is needed.
inline bool sees_inner_ops(const LayerArgs& call, at::ArrayRef<const Tensor*> tensors) {
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) return false;
  if (!c10::GradMode::is_enabled() || c10::InferenceMode::is_enabled()) return false;
  if (call.x().is_meta()) return false;  // torch has no autocast for it, and there are no values
  const at::TensorList weights = call.arguments.list(weight_of(0));
  return needs_graph(tensors) ||
         std::any_of(weights.begin(), weights.end(), [](const Tensor& t) { return t.requires_grad(); });
}

namespace detail {
template <class T>
concept Handles = requires(const T& handles) {
  handles.spec();
};
// An argument of a schema, from what eager Python hands over. Handles are packed into integers for the dispatcher
// alone: where it is passed by, add_handles() adds what they hold.
template <class T>
decltype(auto) for_schema(const T& argument) {
  if constexpr (Handles<T>) {
    return argument.spec();
  } else {
    return (argument);
  }
}
template <class T>
decltype(auto) for_pack(const T& argument) {
  if constexpr (Handles<T>) {
    return at::ArrayRef<int64_t>();
  } else {
    return (argument);
  }
}

// The schema's name of the op that Python calls, as a template argument.
template <size_t kSize>
struct OpName {
  char text[kSize];
  constexpr OpName(const char (&name)[kSize]) { std::copy_n(name, kSize, text); }  // NOLINT: implicit, from a literal
};

template <class T, class... Rest>
const GivenTPComm& first_tp_comm(const T& argument, const Rest&... rest) {
  if constexpr (requires { argument.tp_comm; }) {
    return argument.tp_comm;
  } else {
    return first_tp_comm(rest...);
  }
}

// Adds what the handles among the arguments hold, those of layer 0 first. Returns whether a schema does not carry a
// part.
template <class... Given>
bool add_handles(LayerArgs& call, const Given&... given) {
  size_t layer_idx = 0;
  bool beyond_schema = false;
  const auto add = [&](const auto& argument) {
    if constexpr (requires { argument.add_to(call, layer_idx); }) {
      beyond_schema |= argument.add_to(call, layer_idx++);
    }
  };
  (add(given), ...);
  return beyond_schema;
}

// The type of a schema's argument in the Python entry.
template <class T>
using FromPython =
    std::conditional_t<std::is_same_v<T, at::ArrayRef<int64_t>>, EagerHandles,
                       std::conditional_t<std::is_same_v<T, at::ArrayRef<double>>, std::vector<double>, T>>;
}  // namespace detail

// kPack turns the schema's arguments into a LayerArgs; kUnpack(outputs, call) turns the node's outputs into the op's.
template <class Family, detail::OpName kName, auto kPack, auto kUnpack, class Function = decltype(kPack)>
struct Op;

template <class Family, detail::OpName kName, auto kPack, auto kUnpack, class... Args>
struct Op<Family, kName, kPack, kUnpack, LayerArgs (*)(Args...)> {
  static auto autograd(Args... args) {
    const LayerArgs call = kPack(args...);
    return kUnpack(Node<Family, Dispatched>::run(tensors_of(call), call), call);
  }

  static auto composite(Args... args) {
    const LayerArgs call = kPack(args...);
    return kUnpack(run_inference<Dispatched>(call), call);
  }

  static auto autocast(Args... args) {
    LayerArgs call = kPack(args...);
    autocast_all(call);  // before autocast is excluded
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const bool inference = c10::InferenceMode::is_enabled();
    return kUnpack(inference ? run_inference<Dispatched>(call) : Node<Family, Dispatched>::run(tensors_of(call), call),
                   call);
  }

  // The function of eager Python: the schema's arguments, with handles in place of each layer's quantization. A
  // TPComm's integers and name, the schema's last two, come from the handles of the first layer.
  template <class... Given>
  static auto eager(const Given&... given) {
    if constexpr (sizeof...(Given) < sizeof...(Args)) {
      const EagerParallel parallel{detail::first_tp_comm(given...)};
      return eager(given..., parallel, parallel.group());
    } else {
      LayerArgs call = kPack(detail::for_pack(given)...);
      const bool beyond_schema = detail::add_handles(call, given...);
      c10::SmallVector<const Tensor*, 8> tensors;
      visit_tensors(call, [&](int, const Tensor& t) { tensors.push_back(&t); });
      if (must_dispatch(tensors)) {
        refuse_grad_accumulator(beyond_schema, kName.text);
        if (call.return_input && sees_inner_ops(call, tensors)) {
          LayerArgs traced = kPack(detail::for_schema(given)...);
          traced.return_input = true;
          autocast_all(traced);  // before autocast is excluded
          const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
          return kUnpack(Node<Family, Dispatched>::run(tensors_of(traced), traced), traced);
        }
        return Dispatched::call<&Op::autograd>(kName.text, detail::for_schema(given)...);
      }
      autocast_all(call);
      check_own_weights(call);
      bool graph = needs_graph(tensors);
      for (size_t i = 0; !graph && c10::GradMode::is_enabled() && i < call.layers.size(); ++i) {
        for (const Tensor& weight : call.arguments.list(weight_of(i))) graph = graph || weight.requires_grad();
      }
      return kUnpack(graph ? Node<Family, Direct>::run(tensors_of(call), call) : run_inference<Direct>(call), call);
    }
  }

  // eager() with the types of Python, for an op whose schema ends with a TPComm.
  template <size_t... kPlaces>
  static constexpr auto with_python_types(std::index_sequence<kPlaces...>) {
    return &Op::template eager<detail::FromPython<std::tuple_element_t<kPlaces, std::tuple<Args...>>>...>;
  }
  static constexpr auto python() { return with_python_types(std::make_index_sequence<sizeof...(Args) - 2>()); }
};

#define TE_PARALLEL "int[] parallel, str group"  // of a schema
#define TE_PARALLEL_DEFAULT "int[] parallel=[], str group=''"
#define TE_MAIN_GRADS ", Tensor[] main_grads, int[] targets"  // of a schema

// An op whose weights' gradients are added to main_grads: its overload `main_grad`. `targets` has three integers for
// each parameter: the GEMM whose weight it is rows of, the number of rows, and 0 (+=), 1 (=) or -1 (no gradient, and no
// tensor in `main_grads`).
template <class Family, auto kPack, auto kUnpack, class Function = decltype(kPack)>
struct MainGradOp;

template <class Family, auto kPack, auto kUnpack, class... Args>
struct MainGradOp<Family, kPack, kUnpack, LayerArgs (*)(Args...)> {
  static LayerArgs pack(Args... args, at::TensorList main_grads, at::ArrayRef<int64_t> targets) {
    LayerArgs call = kPack(args...);
    c10::SmallVector<std::vector<WeightTarget>, 2> lists(call.layers.size());
    TORCH_CHECK_VALUE(targets.size() % 3 == 0, Family::kName, ": argument 'targets' has ", targets.size(),
                      " integers, wanted three for each parameter.");
    size_t next = 0;
    for (size_t i = 0; i < targets.size(); i += 3) {
      TORCH_CHECK_VALUE(targets[i] >= 0 && size_t(targets[i]) < lists.size(), Family::kName,
                        ": argument 'targets' names product ", targets[i], ", wanted one below ", lists.size(), ".");
      TORCH_CHECK_VALUE(targets[i + 2] < 0 || next < main_grads.size(), Family::kName, ": argument 'main_grads' has ",
                        main_grads.size(), " tensors, wanted one for each of 'targets' that is not -1.");
      WeightTarget target{{}, targets[i + 1], targets[i + 2] == 1};
      if (targets[i + 2] >= 0) target.out = main_grads[next++];
      lists[size_t(targets[i])].push_back(std::move(target));
    }
    for (size_t i = 0; i < lists.size(); ++i) {
      if (!lists[i].empty()) call.layers[i].grad_accumulator = traced_grad_accumulator(std::move(lists[i]));
    }
    return call;
  }

  using type = Op<Family, "", &pack, kUnpack>;
};

}  // namespace te_torch::layer

// Converts from a tuple, whose members are in the order of the struct.
template <>
struct pybind11::detail::type_caster<te_torch::layer::EagerHandles> {
  PYBIND11_TYPE_CASTER(te_torch::layer::EagerHandles, const_name("tuple"));
  bool load(handle source, bool convert) {
    if (!PyTuple_CheckExact(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != 4) return false;
    make_caster<te_torch::GradAccumulatorPtr> grad_accumulator;
    make_caster<std::shared_ptr<te_torch::ProductQuantization>> quantization;
    make_caster<const te_torch::Quantized*> own_weight;
    make_caster<te_torch::layer::GivenTPComm> tp_comm;
    Py_ssize_t next = 0;
    const auto load = [&](auto& caster) {
      const handle member = PyTuple_GET_ITEM(source.ptr(), next++);
      return member.is_none() || caster.load(member, convert);  // a caster looks for conversions before it sees None
    };
    if (!(load(grad_accumulator) && load(quantization) && load(own_weight) && load(tp_comm))) return false;
    value = {cast_op<const te_torch::GradAccumulatorPtr&>(grad_accumulator),
             cast_op<const std::shared_ptr<te_torch::ProductQuantization>&>(quantization),
             cast_op<const te_torch::Quantized*>(own_weight), cast_op<const te_torch::layer::GivenTPComm&>(tp_comm)};
    return true;
  }
};
