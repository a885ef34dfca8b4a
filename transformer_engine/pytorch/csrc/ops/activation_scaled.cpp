// The binding of activations with a scale for each row: kernel wrappers, schemas, Meta functions, the autograd node.
// Only layers pass a counter of live rows.
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "autograd/autograd.h"
#include "core/op_registration.h"
#include "ops/activation.h"

namespace te_torch {

namespace {

constexpr const char* kName = "scaled_activation";

void check_scale(const Tensor& x, const Tensor& scale, const OptionalTensor& live) {
  const auto rows = x.sym_sizes().slice(0, size_t(std::max<int64_t>(x.dim() - 1, 0)));
  TORCH_CHECK_VALUE(scale.sym_sizes() == rows, kName, ": argument 'scale' has shape ", scale.sym_sizes(), ", wanted ",
                    rows, ", one number for each row of x.");
  TORCH_CHECK_VALUE(scale.scalar_type() == at::kFloat || scale.scalar_type() == x.scalar_type(), kName,
                    ": argument 'scale' has dtype ", scale.scalar_type(), ", wanted float32 or x's ", x.scalar_type(),
                    "; cast it with .to(dtype).");
  TORCH_CHECK_VALUE(scale.device() == x.device(), kName, ": argument 'scale' is on ", scale.device(), ", wanted ",
                    x.device(), " like x; move it with .to(device).");
  if (!live.has_value()) return;
  TORCH_CHECK_VALUE(live->scalar_type() == at::kInt && live->sym_numel() == 1 && live->device() == x.device(), kName,
                    ": argument 'live' is ", live->scalar_type(), " ", live->sym_sizes(), " on ", live->device(),
                    ", wanted one int32 on ", x.device(), ".");
}

// [1, rows], contiguous.
Tensor row_of(const Tensor& t) {
  if (t.dim() == 1 && t.is_contiguous() && !t.is_neg()) return t;  // view_2d() has it as one row
  return t.resolve_neg().contiguous().view({1, t.numel()});
}

Tensor fwd_meta(const Tensor& x, const Tensor& scale, const OptionalTensor& live, std::string_view kind,
                at::ArrayRef<double>) {
  const c10::SymDimVector shape = activation_shape(x, activation_kind(kind).gated);
  check_scale(x, scale, live);
  return x.new_empty_symint(shape);
}

std::tuple<Tensor, Tensor, Tensor> bwd_meta(const Tensor& dy, const Tensor& x, const Tensor& scale,
                                            const OptionalTensor& live, std::string_view kind, at::ArrayRef<double>,
                                            bool needs_dscale, bool emit) {
  check_activation_dy(dy, x, activation_kind(kind).gated);
  check_scale(x, scale, live);
  return {x.new_empty_symint(x.sym_sizes()),
          needs_dscale ? scale.new_empty_symint(scale.sym_sizes()) : scale.new_empty({0}),
          emit ? x.new_empty_symint(dy.sym_sizes()) : x.new_empty({0})};
}

struct ScaledFamily {
  static constexpr const char* kName = te_torch::kName;
  struct State {
    std::string kind;
    std::vector<double> params;
  };
  enum Saved { kInput, kScale };

  template <class Mode>
  static variable_list forward(State& state, SaveContext& save, const Tensor& x, const Tensor& scale,
                               std::string_view kind, at::ArrayRef<double> params) {
    state.kind = std::string(kind);
    state.params = params.vec();
    save.keep(kInput, x, {"activation input", "the derivative is taken of it", kCallers, true});
    save.keep(kScale, scale, {"row scale", "the gradient of the rows is multiplied by it", kCallers});
    return {Mode::template call<scaled_activation_fwd>("te::scaled_activation_fwd", x, scale, OptionalTensor(), kind,
                                                       params)};
  }

  template <class Mode>
  static variable_list backward(const State& state, const Wanted& wanted, const NamedTensors& saved,
                                const variable_list& grads) {
    if (!(wanted[0] || wanted[1]) || !grads[0].defined()) return {};
    auto [dx, dscale, y] = Mode::template call<scaled_activation_bwd>(
        "te::scaled_activation_bwd", grads[0], saved[kInput], saved[kScale], OptionalTensor(),
        std::string_view(state.kind), at::ArrayRef<double>(state.params), wanted[1], false);
    return {dx, wanted[1] ? dscale : Tensor()};
  }
};

Tensor scaled_autograd(const Tensor& x, const Tensor& scale, std::string_view kind, at::ArrayRef<double> params) {
  return Node<ScaledFamily, Dispatched>::run(x, scale, kind, params)[0];
}

Tensor scaled_dispatched(const Tensor& x, const Tensor& scale, std::string_view kind, at::ArrayRef<double> params) {
  return Dispatched::call<scaled_activation_fwd>("te::scaled_activation_fwd", x, scale, OptionalTensor(), kind, params);
}

// The scale keeps its dtype.
Tensor scaled_autocast(const Tensor& x, const Tensor& scale, std::string_view kind, at::ArrayRef<double> params) {
  const Tensor input = autocast(x);  // casts before autocast is excluded
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return Dispatched::call<scaled_autograd>("te::scaled_activation", input, scale, kind, params);
}

// Called by Python in eager mode.
Tensor scaled_activation(const Tensor& x, const Tensor& scale, const std::string& kind,
                         const std::vector<double>& params) {
  const std::string_view name(kind);
  const at::ArrayRef<double> numbers(params);
  if (must_dispatch({&x, &scale})) {
    return Dispatched::call<scaled_autograd>("te::scaled_activation", x, scale, name, numbers);
  }
  const Tensor input = autocast(x);
  if (!needs_graph({&input, &scale})) return scaled_activation_fwd(input, scale, {}, name, numbers);
  return Node<ScaledFamily, Direct>::run(input, scale, name, numbers)[0];
}

}  // namespace

Tensor scaled_activation_fwd(const Tensor& x, const Tensor& scale, const OptionalTensor& live, std::string_view kind,
                             at::ArrayRef<double> params) {
  const ActivationKind k = activation_kind(kind);
  const c10::SymDimVector shape = activation_shape(x, k.gated);
  check_scale(x, scale, live);
  const Tensor in = rows_of(x), scales = row_of(scale);
  const Tensor y = at::empty(C10_AS_INTARRAYREF_SLOW(shape), in.options());
  check(te_activation_scaled_forward(k.number, activation_params(params), view_2d(in, kName, "x"),
                                     view_2d(scales, kName, "scale"), view_2d(live, kName, "live"),
                                     view_2d(y, kName, "y"), current_stream(in)));
  return y;
}

namespace {

// zero_tail: dscale is 0 in rows that are not alive, where the engine writes nothing.
std::tuple<Tensor, Tensor, Tensor> bwd(const Tensor& dy, const Tensor& x, const Tensor& scale,
                                       const OptionalTensor& live, std::string_view kind, at::ArrayRef<double> params,
                                       bool needs_dscale, bool emit, bool zero_tail) {
  const ActivationKind k = activation_kind(kind);
  check_activation_dy(dy, x, k.gated);
  check_scale(x, scale, live);
  const Tensor grad = rows_of(dy), in = rows_of(x), scales = row_of(scale);
  const Tensor dx = at::empty(in.sizes(), in.options());
  const Tensor y = emit ? at::empty(grad.sizes(), in.options()) : at::empty({0}, in.options());
  Tensor dscale;
  if (needs_dscale) {
    const bool zeros = zero_tail && live.has_value();
    dscale = zeros ? at::zeros(scale.sizes(), scale.options()) : at::empty(scale.sizes(), scale.options());
  } else {
    dscale = at::empty({0}, scale.options());
  }
  check(te_activation_scaled_backward(k.number, activation_params(params), view_2d(grad, kName, "dy"),
                                      view_2d(in, kName, "x"), view_2d(scales, kName, "scale"),
                                      view_2d(live, kName, "live"), view_2d(dx, kName, "dx"),
                                      needs_dscale ? view_2d(row_of(dscale), kName, "dscale") : absent(),
                                      emit ? view_2d(y, kName, "y") : absent(), current_stream(in)));
  return {dx, dscale, y};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> scaled_activation_bwd(const Tensor& dy, const Tensor& x, const Tensor& scale,
                                                         const OptionalTensor& live, std::string_view kind,
                                                         at::ArrayRef<double> params, bool needs_dscale, bool emit) {
  return bwd(dy, x, scale, live, kind, params, needs_dscale, emit, true);
}

std::tuple<Tensor, Tensor, Tensor> scaled_activation_bwd_of_live(const Tensor& dy, const Tensor& x, const Tensor& scale,
                                                                 const OptionalTensor& live, std::string_view kind,
                                                                 at::ArrayRef<double> params, bool needs_dscale,
                                                                 bool emit) {
  return bwd(dy, x, scale, live, kind, params, needs_dscale, emit, false);
}

TE_OP_REGISTRATION(activation_scaled, ops) {
  ops.op("scaled_activation_fwd(Tensor x, Tensor scale, Tensor? live, str kind, float[] params) -> Tensor")
      .kernel(scaled_activation_fwd)
      .meta(fwd_meta)
      .python([](const Tensor& x, const Tensor& scale, const OptionalTensor& live, const std::string& kind,
                 const std::vector<double>& params) { return scaled_activation_fwd(x, scale, live, kind, params); });
  ops.op("scaled_activation_bwd(Tensor dy, Tensor x, Tensor scale, Tensor? live, str kind, float[] params, "
         "bool needs_dscale, bool emit) -> (Tensor, Tensor, Tensor)")
      .kernel(scaled_activation_bwd)
      .meta(bwd_meta)
      .python([](const Tensor& dy, const Tensor& x, const Tensor& scale, const OptionalTensor& live,
                 const std::string& kind, const std::vector<double>& params, bool needs_dscale,
                 bool emit) { return scaled_activation_bwd(dy, x, scale, live, kind, params, needs_dscale, emit); });
  ops.op("scaled_activation(Tensor x, Tensor scale, str kind, float[] params) -> Tensor")
      .composite(scaled_dispatched)
      .autograd(scaled_autograd)
      .autocast(scaled_autocast)
      .python(scaled_activation);
}

}  // namespace te_torch
