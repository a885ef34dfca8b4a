// The binding of the activation ops: kernel wrappers, schemas, Meta functions, the autograd node. The engine has the
// formulas.
#include "ops/activation.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>

#include "autograd/autograd.h"
#include "core/op_registration.h"

namespace te_torch {

ActivationKind activation_kind(std::string_view name) {
  const std::string text(name);
  const int number = te_activation_kind(text.c_str());
  if (number < 0) {
    std::string known;
    for (int k = 0; k < te_activation_count(); ++k) known += std::string(k ? ", " : "") + te_activation_name(k);
    TORCH_CHECK_VALUE(false, "activation: argument 'kind' is '", text, "', wanted one of ", known, ".");
  }
  return {number, te_activation_is_gated(number) != 0};
}

te_activation_params activation_params(at::ArrayRef<double> params) {
  te_activation_params p{7.f, 1.702f, 1.f};
  if (params.empty()) return p;
  TORCH_CHECK_VALUE(params.size() == 3, "activation: argument 'params' has ", params.size(),
                    " values, wanted 3: limit, alpha, glu_linear_offset.");
  return {static_cast<float>(params[0]), static_cast<float>(params[1]), static_cast<float>(params[2])};
}

c10::SymDimVector activation_shape(const Tensor& x, bool gated) {
  TORCH_CHECK_VALUE(x.dim() >= 1, "activation: argument 'x' has no dimensions, wanted at least one.");
  c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end());
  if (gated) {
    TORCH_CHECK_VALUE(shape.back() % 2 == 0, "activation: argument 'x' has shape ", x.sym_sizes(),
                      ", wanted an even last dimension: a gated activation reads it as two halves.");
    shape.back() = shape.back() / 2;
  }
  return shape;
}

void check_activation_dy(const Tensor& dy, const Tensor& x, bool gated) {
  TORCH_CHECK_VALUE(dy.sym_sizes() == c10::SymIntArrayRef(activation_shape(x, gated)),
                    "activation: argument 'dy' has shape ", dy.sym_sizes(), ", wanted ",
                    c10::SymIntArrayRef(activation_shape(x, gated)), ".");
  check_same(dy, x, "activation", "dy");
}

namespace {

Tensor activation_fwd_meta(const Tensor& x, std::string_view kind, at::ArrayRef<double>) {
  return x.new_empty_symint(activation_shape(x, activation_kind(kind).gated));
}

std::tuple<Tensor, Tensor> activation_bwd_meta(const Tensor& dy, const Tensor& x, std::string_view kind,
                                               at::ArrayRef<double>, bool emit) {
  check_activation_dy(dy, x, activation_kind(kind).gated);
  return {x.new_empty_symint(x.sym_sizes()), emit ? x.new_empty_symint(dy.sym_sizes()) : x.new_empty({0})};
}

struct ActivationFamily {
  static constexpr const char* kName = "activation";
  struct State {
    std::string kind;
    std::vector<double> params;
  };
  enum Saved { kInput };

  template <class Mode>
  static variable_list forward(State& state, SaveContext& save, const Tensor& x, std::string_view kind,
                               at::ArrayRef<double> params) {
    state.kind = std::string(kind);
    state.params = params.vec();
    save.keep(kInput, x, {"activation input", "the derivative is taken of it", kCallers, true});
    return {Mode::template call<activation_fwd>("te::activation_fwd", x, kind, params)};
  }

  template <class Mode>
  static variable_list backward(const State& state, const Wanted& wanted, const NamedTensors& saved,
                                const variable_list& grads) {
    if (!wanted[0] || !grads[0].defined()) return {};
    return {std::get<0>(Mode::template call<activation_bwd>("te::activation_bwd", grads[0], saved[kInput],
                                                            std::string_view(state.kind),
                                                            at::ArrayRef<double>(state.params), false))};
  }
};

Tensor activation_autograd(const Tensor& x, std::string_view kind, at::ArrayRef<double> params) {
  return Node<ActivationFamily, Dispatched>::run(x, kind, params)[0];
}

Tensor activation_dispatched(const Tensor& x, std::string_view kind, at::ArrayRef<double> params) {
  return Dispatched::call<activation_fwd>("te::activation_fwd", x, kind, params);
}

Tensor activation_autocast(const Tensor& x, std::string_view kind, at::ArrayRef<double> params) {
  const Tensor input = autocast(x);  // casts before autocast is excluded
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return Dispatched::call<activation_autograd>("te::activation", input, kind, params);
}

// Called by Python in eager mode.
Tensor activation(const Tensor& x, const std::string& kind, const std::vector<double>& params) {
  if (must_dispatch({&x}))
    return Dispatched::call<activation_autograd>("te::activation", x, std::string_view(kind),
                                                 at::ArrayRef<double>(params));
  const Tensor input = autocast(x);
  if (!needs_graph({&input})) return activation_fwd(input, kind, params);
  return Node<ActivationFamily, Direct>::run(input, std::string_view(kind), at::ArrayRef<double>(params))[0];
}

}  // namespace

Tensor activation_fwd(const Tensor& x, std::string_view kind, at::ArrayRef<double> params) {
  const ActivationKind k = activation_kind(kind);
  const Tensor in = rows_of(x);
  const te_tensor source = view_2d(in, "activation", "x");
  const Tensor y = at::empty(C10_AS_INTARRAYREF_SLOW(activation_shape(in, k.gated)), in.options());
  check(te_activation_forward(k.number, activation_params(params), source, view_2d(y, "activation", "y"),
                              current_stream(in)));
  return y;
}

namespace {

// y: none, or where it goes.
Tensor activation_bwd_into(const Tensor& dy, const Tensor& x, std::string_view kind, at::ArrayRef<double> params,
                           const Tensor& y) {
  const ActivationKind k = activation_kind(kind);
  check_activation_dy(dy, x, k.gated);
  const Tensor in = rows_of(x);
  const Tensor dx = at::empty(in.sizes(), in.options());
  check(te_activation_backward(k.number, activation_params(params), view_2d(dy, "activation", "dy"),
                               view_2d(in, "activation", "x"), view_2d(dx, "activation", "dx"),
                               y.defined() ? view_2d(y, "activation", "y") : absent(), current_stream(in)));
  return dx;
}

}  // namespace

std::tuple<Tensor, Tensor> activation_bwd(const Tensor& dy, const Tensor& x, std::string_view kind,
                                          at::ArrayRef<double> params, bool emit) {
  const Tensor grad = rows_of(dy);
  const Tensor y = emit ? at::empty(grad.sizes(), grad.options()) : Tensor();
  const Tensor dx = activation_bwd_into(grad, x, kind, params, y);
  return {dx, emit ? y : at::empty({0}, x.options())};
}

std::tuple<Tensor, Tensor> activation_bwd_over_dy(const Tensor& dy, const Tensor& x, std::string_view kind,
                                                  at::ArrayRef<double> params) {
  const Tensor grad = rows_of(dy);
  const Tensor dx = activation_bwd_into(grad, x, kind, params, grad);
  return {dx, grad};
}

TE_OP_REGISTRATION(activation, ops) {
  ops.op("activation_fwd(Tensor x, str kind, float[] params) -> Tensor")
      .kernel(activation_fwd)
      .meta(activation_fwd_meta)
      .python([](const Tensor& x, const std::string& kind, const std::vector<double>& params) {
        return activation_fwd(x, kind, params);
      });
  ops.op("activation_bwd(Tensor dy, Tensor x, str kind, float[] params, bool emit) -> (Tensor, Tensor)")
      .kernel(activation_bwd)
      .meta(activation_bwd_meta)
      .python([](const Tensor& dy, const Tensor& x, const std::string& kind, const std::vector<double>& params,
                 bool emit) { return activation_bwd(dy, x, kind, params, emit); });
  ops.op("activation(Tensor x, str kind, float[] params) -> Tensor")
      .composite(activation_dispatched)
      .autograd(activation_autograd)
      .autocast(activation_autocast)
      .python(activation);
  ops.python("activation_kinds", [] {
    std::vector<std::tuple<std::string, bool>> kinds;
    for (int k = 0; k < te_activation_count(); ++k)
      kinds.emplace_back(te_activation_name(k), te_activation_is_gated(k));
    return kinds;
  });
}

}  // namespace te_torch
