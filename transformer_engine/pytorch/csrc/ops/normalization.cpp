// The binding of the norms: kernel wrappers, schemas, Meta functions, the autograd node. The engine has the formulas.
#include "ops/normalization.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <transformer_engine/normalization.h>

#include "autograd/autograd.h"
#include "core/op_registration.h"

namespace te_torch {

namespace {

constexpr const char* kOp = "normalization";

te_normalization_plan plan_of(double eps, bool rms, bool zero_centered_gamma) {
  return {rms, zero_centered_gamma, static_cast<float>(eps)};
}

bool present(const OptionalTensor& t) { return t.has_value() && t->defined(); }

void check_shape_of_x(const Tensor& t, const Tensor& x, const char* argument) {
  TORCH_CHECK_VALUE(t.sym_sizes() == x.sym_sizes(), kOp, ": argument '", argument, "' has shape ", t.sym_sizes(),
                    ", wanted ", x.sym_sizes(), " like x.");
  check_same(t, x, kOp, argument);
}

void check_parameter(const Tensor& t, const Tensor& x, at::ScalarType dtype, const char* argument) {
  TORCH_CHECK_VALUE(t.dim() == 1 && t.sym_size(0) == x.sym_size(-1), kOp, ": argument '", argument, "' has shape ",
                    t.sym_sizes(), ", wanted [", x.sym_size(-1), "], the last dimension of x.");
  TORCH_CHECK_VALUE(t.device() == x.device(), kOp, ": argument '", argument, "' is on ", t.device(), ", wanted ",
                    x.device(), " like x; move it with .to(device).");
  TORCH_CHECK_VALUE(t.scalar_type() == dtype, kOp, ": argument '", argument, "' has dtype ", t.scalar_type(),
                    ", wanted ", dtype, "; cast it with .to(dtype).");
}

bool is_16_bit(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// gamma may have another dtype than x.
void check_gamma(const Tensor& gamma, const Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() >= 1, kOp, ": argument 'x' has no dimensions, wanted at least one.");
  const auto dtype = gamma.scalar_type();
  check_parameter(gamma, x, dtype == at::kFloat || is_16_bit(dtype) ? dtype : x.scalar_type(), "gamma");
}

void check_backward(const Tensor& dy, const OptionalTensor& residual_grad, const Tensor& x, const Tensor& gamma) {
  check_gamma(gamma, x);
  check_shape_of_x(dy, x, "dy");
  if (present(residual_grad)) check_shape_of_x(*residual_grad, x, "residual_grad");
}

}  // namespace

Tensor parameter_beside(const Tensor& x, const Tensor& parameter) {
  const auto dtype = parameter.scalar_type();
  return rows_of(dtype == x.scalar_type() || !is_16_bit(dtype) ? parameter : parameter.to(at::kFloat));
}

void check_normalization(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma,
                         const OptionalTensor& beta) {
  check_gamma(gamma, x);
  if (present(residual)) check_shape_of_x(*residual, x, "residual");
  if (present(beta)) check_parameter(*beta, x, gamma.scalar_type(), "beta");
}

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> normalization_fwd_meta(const Tensor& x, const OptionalTensor& residual,
                                                                  const Tensor& gamma, const OptionalTensor& beta,
                                                                  double, bool rms, bool) {
  check_normalization(x, residual, gamma, beta);
  c10::SymInt rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows = rows * x.sym_size(d);
  const auto statistic = x.options().dtype(at::kFloat);
  return {x.new_empty_symint(x.sym_sizes()), present(residual) ? x.new_empty_symint(x.sym_sizes()) : x.new_empty({0}),
          rms ? x.new_empty({0}, statistic) : x.new_empty_symint({rows}, statistic),
          x.new_empty_symint({rows}, statistic)};
}

std::tuple<Tensor, Tensor, Tensor> normalization_bwd_meta(const Tensor& dy, const OptionalTensor& residual_grad,
                                                          const Tensor& x, const Tensor& gamma, const Tensor&,
                                                          const Tensor&, bool, bool, std::array<bool, 3> wanted) {
  check_backward(dy, residual_grad, x, gamma);
  return {wanted[0] ? x.new_empty_symint(x.sym_sizes()) : x.new_empty({0}),
          wanted[1] ? gamma.new_empty_symint(gamma.sym_sizes()) : gamma.new_empty({0}),
          wanted[2] ? gamma.new_empty_symint(gamma.sym_sizes()) : gamma.new_empty({0})};
}

struct NormalizationFamily {
  static constexpr const char* kName = kOp;
  struct State {
    bool rms = false;
    bool zero_centered_gamma = false;
  };
  enum Slot { kX, kResidual, kGamma, kBeta, kSlots };
  enum Saved { kNormInput, kSavedGamma, kMean, kRstd };

  // Outputs: y; with a residual also h = x + residual, the saved norm input.
  template <class Mode>
  static variable_list forward(State& state, SaveContext& save, const Tensor& x, const OptionalTensor& residual,
                               const Tensor& gamma, const OptionalTensor& beta, double eps, bool rms,
                               bool zero_centered_gamma) {
    state = {rms, zero_centered_gamma};
    const auto [y, h, mean, rstd] = Mode::template call<normalization_fwd>("te::normalization_fwd", x, residual, gamma,
                                                                           beta, eps, rms, zero_centered_gamma);
    const bool added = present(residual);
    save.keep(kNormInput, added ? h : x, {"norm input", "the backward normalizes it again", kCallers, true});
    save.keep(kSavedGamma, gamma, kParameter);
    if (!rms) save.keep(kMean, mean, statistic_of(x));
    save.keep(kRstd, rstd, statistic_of(x));
    return added ? variable_list{y, h} : variable_list{y};
  }

  template <class Mode>
  static variable_list backward(const State& state, const Wanted& wanted, const NamedTensors& saved,
                                const variable_list& grads) {
    const Tensor& dy = grads[0];
    const Tensor dh = grads.size() > 1 ? grads[1] : Tensor();
    const std::array<bool, 3> outputs{wanted[kX] || wanted[kResidual], wanted[kGamma], wanted[kBeta]};
    variable_list out(kSlots);
    Tensor dx = dh;
    if (dy.defined()) {
      const OptionalTensor residual_grad = dh.defined() && outputs[0] ? OptionalTensor(dh) : OptionalTensor();
      const Tensor mean = state.rms ? saved[kRstd].new_empty({0}) : saved[kMean];
      std::tie(dx, out[kGamma], out[kBeta]) = Mode::template call<normalization_bwd>(
          "te::normalization_bwd", dy, residual_grad, saved[kNormInput], saved[kSavedGamma], mean, saved[kRstd],
          state.rms, state.zero_centered_gamma, outputs);
    }
    if (wanted[kX]) out[kX] = dx;
    if (wanted[kResidual]) out[kResidual] = dx;
    if (!wanted[kGamma]) out[kGamma] = Tensor();
    if (!wanted[kBeta]) out[kBeta] = Tensor();
    return out;
  }
};

using Outputs = std::tuple<Tensor, Tensor>;  // y, and x + residual or an empty tensor

Outputs pair_of(const variable_list& outputs, const Tensor& x) {
  return {outputs[0], outputs.size() > 1 ? outputs[1] : x.new_empty({0})};
}

Outputs normalization_autograd(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma,
                               const OptionalTensor& beta, double eps, bool rms, bool zero_centered_gamma) {
  return pair_of(Node<NormalizationFamily, Dispatched>::run(x, residual, gamma, beta, eps, rms, zero_centered_gamma),
                 x);
}

Outputs normalization_dispatched(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma,
                                 const OptionalTensor& beta, double eps, bool rms, bool zero_centered_gamma) {
  const auto outputs = Dispatched::call<normalization_fwd>("te::normalization_fwd", x, residual, gamma, beta, eps, rms,
                                                           zero_centered_gamma);
  return {std::get<0>(outputs), std::get<1>(outputs)};
}

Outputs normalization_autocast(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma,
                               const OptionalTensor& beta, double eps, bool rms, bool zero_centered_gamma) {
  const Tensor x_cast = autocast(x), gamma_cast = autocast(gamma);  // casts before autocast is excluded
  const OptionalTensor residual_cast = autocast(residual), beta_cast = autocast(beta);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return Dispatched::call<normalization_autograd>("te::normalization", x_cast, residual_cast, gamma_cast, beta_cast,
                                                  eps, rms, zero_centered_gamma);
}

// Called by Python in eager mode.
Outputs normalization(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma, const OptionalTensor& beta,
                      double eps, bool rms, bool zero_centered_gamma) {
  if (must_dispatch({&x, pointer_to(residual), &gamma, pointer_to(beta)})) {
    return Dispatched::call<normalization_autograd>("te::normalization", x, residual, gamma, beta, eps, rms,
                                                    zero_centered_gamma);
  }
  const Tensor x_cast = autocast(x), gamma_cast = autocast(gamma);
  const OptionalTensor residual_cast = autocast(residual), beta_cast = autocast(beta);
  if (!needs_graph({&x_cast, pointer_to(residual_cast), &gamma_cast, pointer_to(beta_cast)})) {
    const auto outputs = normalization_fwd(x_cast, residual_cast, gamma_cast, beta_cast, eps, rms, zero_centered_gamma);
    return {std::get<0>(outputs), std::get<1>(outputs)};
  }
  return pair_of(Node<NormalizationFamily, Direct>::run(x_cast, residual_cast, gamma_cast, beta_cast, eps, rms,
                                                        zero_centered_gamma),
                 x_cast);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> normalization_fwd(const Tensor& x, const OptionalTensor& residual,
                                                             const Tensor& gamma, const OptionalTensor& beta,
                                                             double eps, bool rms, bool zero_centered_gamma) {
  check_normalization(x, residual, gamma, beta);
  const Tensor in = rows_of(x), scale = parameter_beside(x, gamma);
  const bool added = present(residual);
  const OptionalTensor other = added ? OptionalTensor(rows_of(*residual)) : OptionalTensor();
  const OptionalTensor shift = present(beta) ? OptionalTensor(parameter_beside(x, *beta)) : OptionalTensor();
  const te_tensor source = view_2d(in, kOp, "x");
  const auto statistic = in.options().dtype(at::kFloat);
  const Tensor y = at::empty(in.sizes(), in.options());
  const Tensor h = at::empty(added ? in.sizes() : at::IntArrayRef{0}, in.options());
  const Tensor mean = at::empty({rms ? 0 : source.rows}, statistic);
  const Tensor rstd = at::empty({source.rows}, statistic);
  check(te_normalization_forward(plan_of(eps, rms, zero_centered_gamma), source, view_2d(other, kOp, "residual"),
                                 view_2d(scale, kOp, "gamma"), view_2d(shift, kOp, "beta"), view_2d(y, kOp, "y"),
                                 added ? view_2d(h, kOp, "h") : absent(), view_2d(mean, kOp, "mean"),
                                 view_2d(rstd, kOp, "rstd"), current_stream(in)));
  return {y, h, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> normalization_bwd(const Tensor& dy, const OptionalTensor& residual_grad,
                                                     const Tensor& x, const Tensor& gamma, const Tensor& mean,
                                                     const Tensor& rstd, bool rms, bool zero_centered_gamma,
                                                     std::array<bool, 3> wanted) {
  check_backward(dy, residual_grad, x, gamma);
  const te_normalization_plan plan = plan_of(0, rms, zero_centered_gamma);
  const Tensor in = rows_of(x), grad = rows_of(dy), scale = parameter_beside(x, gamma);
  const OptionalTensor other = present(residual_grad) ? OptionalTensor(rows_of(*residual_grad)) : OptionalTensor();
  const te_tensor source = view_2d(in, kOp, "x");
  const Tensor dx = at::empty(wanted[0] ? in.sizes() : at::IntArrayRef{0}, in.options());
  const Tensor dgamma = at::empty(wanted[1] ? scale.sizes() : at::IntArrayRef{0}, scale.options());
  const Tensor dbeta = at::empty(wanted[2] ? scale.sizes() : at::IntArrayRef{0}, scale.options());
  Tensor workspace;
  te_tensor scratch = absent();
  if (in.is_cuda() && (wanted[1] || wanted[2])) {
    const size_t bytes = te_normalization_backward_workspace(plan, source.rows, source.cols);
    workspace = at::empty({static_cast<int64_t>(bytes)}, in.options().dtype(at::kByte));
    scratch = view_2d(workspace, kOp, "workspace");
  }
  check(te_normalization_backward(plan, view_2d(grad, kOp, "dy"), view_2d(other, kOp, "residual_grad"), source,
                                  view_2d(scale, kOp, "gamma"), view_2d(mean, kOp, "mean"), view_2d(rstd, kOp, "rstd"),
                                  wanted[0] ? view_2d(dx, kOp, "dx") : absent(),
                                  wanted[1] ? view_2d(dgamma, kOp, "dgamma") : absent(),
                                  wanted[2] ? view_2d(dbeta, kOp, "dbeta") : absent(), scratch, current_stream(in)));
  const auto dtype = gamma.scalar_type();
  return dtype == scale.scalar_type() ? std::tuple(dx, dgamma, dbeta)
                                      : std::tuple(dx, dgamma.to(dtype), dbeta.to(dtype));
}

TE_OP_REGISTRATION(normalization, ops) {
  ops.op("normalization_fwd(Tensor x, Tensor? residual, Tensor gamma, Tensor? beta, float eps, bool rms, bool "
         "zero_centered_gamma) -> (Tensor, Tensor, Tensor, Tensor)")
      .kernel(normalization_fwd)
      .meta(normalization_fwd_meta)
      .python(normalization_fwd);
  ops.op("normalization_bwd(Tensor dy, Tensor? residual_grad, Tensor x, Tensor gamma, Tensor mean, Tensor rstd, bool "
         "rms, bool zero_centered_gamma, bool[3] wanted) -> (Tensor, Tensor, Tensor)")
      .kernel(normalization_bwd)
      .meta(normalization_bwd_meta)
      .python(normalization_bwd);
  ops.op("normalization(Tensor x, Tensor? residual, Tensor gamma, Tensor? beta, float eps, bool rms, bool "
         "zero_centered_gamma) -> (Tensor, Tensor)")
      .composite(normalization_dispatched)
      .autograd(normalization_autograd)
      .autocast(normalization_autocast)
      .python(normalization);
}

}  // namespace te_torch
