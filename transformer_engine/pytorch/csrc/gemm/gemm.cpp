// Binding of gemm: the product of LibTorch, or that of the engine with a workspace from ATen for each call.
#include "gemm/gemm.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <transformer_engine/gemm.h>

#include "core/op_registration.h"
#include "core/tune.h"

namespace te_torch {

namespace {

te_gemm_layout layout_of(std::string_view layout) {
  if (layout == "TN") return TE_GEMM_TN;
  if (layout == "NN") return TE_GEMM_NN;
  if (layout == "NT") return TE_GEMM_NT;
  TORCH_CHECK_VALUE(false, "gemm: argument 'layout' is '", layout, "', wanted TN, NN or NT.");
}

te_gemm_epilogue epilogue_of(std::string_view epilogue) {
  if (epilogue == "none") return TE_GEMM_NONE;
  if (epilogue == "bias") return TE_GEMM_BIAS;
  if (epilogue == "gelu") return TE_GEMM_GELU;
  if (epilogue == "dgelu") return TE_GEMM_DGELU;
  if (epilogue == "bgrad") return TE_GEMM_BGRAD;
  TORCH_CHECK_VALUE(false, "gemm: argument 'epilogue' is '", epilogue, "', wanted none, bias, gelu, dgelu or bgrad.");
}

c10::SymInt rows_in(const Tensor& t) {
  c10::SymInt n = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) n = n * t.sym_size(d);
  return n;
}

struct Extents {
  c10::SymInt rows, cols, depth_a, depth_b;

  bool empty() const { return rows == 0 || cols == 0 || depth_a == 0; }
};

Extents extents_of(const Tensor& a, const Tensor& b, te_gemm_layout layout) {
  TORCH_CHECK_VALUE(a.dim() >= 1 && b.dim() >= 1, "gemm: arguments 'a' and 'b' have ", a.dim(), " and ", b.dim(),
                    " dimensions, wanted at least one.");
  if (layout == TE_GEMM_TN) return {rows_in(b), rows_in(a), a.sym_size(-1), b.sym_size(-1)};
  if (layout == TE_GEMM_NN) return {rows_in(b), a.sym_size(-1), rows_in(a), b.sym_size(-1)};
  return {b.sym_size(-1), a.sym_size(-1), rows_in(a), rows_in(b)};
}

Extents checked_extents(const Tensor& a, const Tensor& b, te_gemm_layout layout, std::string_view name) {
  check_float(a, "gemm", "a");
  check_same(b, a, "gemm", "b");
  const Extents e = extents_of(a, b, layout);
  TORCH_CHECK_VALUE(e.depth_a == e.depth_b, "gemm: argument 'b' has shape ", b.sym_sizes(),
                    ", which does not fit 'a' of ", a.sym_sizes(), " in layout ", name, ": reduced dimensions ",
                    e.depth_b, " and ", e.depth_a, ".");
  return e;
}

// Refuses a missing argument of an epilogue, and one that it does not read: an ignored bias would be a silent error.
void check_epilogue(const Tensor& a, const Extents& e, te_gemm_layout layout, te_gemm_epilogue epilogue,
                    std::string_view name, const OptionalTensor& bias, const OptionalTensor& aux,
                    at::ScalarType out_dtype) {
  TORCH_CHECK_VALUE(out_dtype == a.scalar_type() || out_dtype == at::kFloat, "gemm: argument 'out_dtype' is ",
                    out_dtype, ", wanted Float or the operands' ", a.scalar_type(), ".");
  TORCH_CHECK_VALUE(epilogue != TE_GEMM_BGRAD || layout == TE_GEMM_NT,
                    "gemm: argument 'epilogue' is 'bgrad' in a layout whose 'b' is no gradient, wanted layout NT.");
  const bool takes_bias = epilogue == TE_GEMM_BIAS || epilogue == TE_GEMM_GELU;
  TORCH_CHECK_VALUE(epilogue != TE_GEMM_BIAS || bias.has_value(), "gemm: argument 'bias' is None with epilogue '", name,
                    "', wanted a tensor.");
  TORCH_CHECK_VALUE(takes_bias || !bias.has_value(), "gemm: argument 'bias' is given, but epilogue '", name,
                    "' reads none; wanted None, or epilogue bias or gelu.");
  TORCH_CHECK_VALUE((epilogue == TE_GEMM_DGELU) == aux.has_value(), "gemm: argument 'aux' is ",
                    aux.has_value() ? "given" : "missing", " for epilogue '", name,
                    "'; dgelu reads it and no other epilogue does.");
  if (bias.has_value()) {
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == e.cols, "gemm: argument 'bias' has shape ",
                      bias->sym_sizes(), ", wanted [", e.cols, "].");
    if (bias->scalar_type() != out_dtype) check_same(*bias, a, "gemm", "bias");
    TORCH_CHECK_VALUE(bias->device() == a.device(), "gemm: argument 'bias' is on ", bias->device(), ", wanted ",
                      a.device(), ".");
  }
  if (aux.has_value()) {
    TORCH_CHECK_VALUE(aux->dim() >= 1 && rows_in(*aux) == e.rows && aux->sym_size(-1) == e.cols,
                      "gemm: argument 'aux' has shape ", aux->sym_sizes(), ", wanted [", e.rows, ", ", e.cols, "].");
    TORCH_CHECK_VALUE(aux->scalar_type() == out_dtype && aux->device() == a.device(), "gemm: argument 'aux' is ",
                      aux->scalar_type(), " on ", aux->device(), ", wanted ", out_dtype, " on ", a.device(), ".");
  }
}

void check_out(const Tensor& a, const Extents& e, te_gemm_layout layout, const Tensor& out, bool bias_grad) {
  TORCH_CHECK_VALUE(!bias_grad || layout == TE_GEMM_NT,
                    "gemm: argument 'bias_grad' is True in a layout whose 'b' is no gradient, wanted layout NT.");
  TORCH_CHECK_VALUE(out.dim() == 2 && out.sym_size(0) == e.rows && out.sym_size(1) == e.cols,
                    "gemm: argument 'out' has shape ", out.sym_sizes(), ", wanted [", e.rows, ", ", e.cols, "].");
  TORCH_CHECK_VALUE(out.device() == a.device(), "gemm: argument 'out' is on ", out.device(), ", wanted ", a.device(),
                    ".");
  TORCH_CHECK_VALUE(out.scalar_type() == at::kFloat || out.scalar_type() == a.scalar_type(),
                    "gemm: argument 'out' has dtype ", out.scalar_type(), ", wanted Float or ", a.scalar_type(), ".");
  TORCH_CHECK_VALUE(out.is_contiguous(),
                    "gemm: argument 'out' is not contiguous, wanted a contiguous one: it is written in place.");
}

te_gemm_problem problem_of(const Tensor& a, const Tensor& b, te_gemm_layout layout, te_gemm_epilogue epilogue) {
  te_gemm_problem p{};
  p.a = view_2d(a, "gemm", "a");
  p.b = view_2d(b, "gemm", "b");
  p.bias = p.aux = absent();
  p.layout = layout;
  p.epilogue = epilogue;
  return p;
}

Tensor folded(const Tensor& t) { return t.reshape_symint({rows_in(t), t.sym_size(-1)}); }

Tensor product_cpu(const Tensor& a, const Tensor& b, te_gemm_layout layout) {
  const Tensor a2 = folded(a);
  const Tensor b2 = folded(b);
  if (layout == TE_GEMM_TN) return at::mm(b2, a2.t());
  if (layout == TE_GEMM_NN) return at::mm(b2, a2);
  return at::mm(b2.t(), a2);
}

Tensor column_sum(const Tensor& t) { return folded(t).sum(0); }

std::tuple<Tensor, Tensor> gemm_cpu(const Tensor& a, const Tensor& b, te_gemm_layout layout, te_gemm_epilogue epilogue,
                                    const OptionalTensor& bias, const OptionalTensor& aux, at::ScalarType out_dtype) {
  // Operands are widened for an output that is wider than they are, as on the GPU, and for an epilogue that changes the
  // product, as it works in float32 before the one rounding.
  const bool plain = epilogue == TE_GEMM_NONE || epilogue == TE_GEMM_BGRAD;
  const at::ScalarType wide = plain ? out_dtype : at::kFloat;
  // Rows as on the GPU: the order in which LibTorch adds up may follow an operand's strides.
  Tensor d = product_cpu(rows_of(a).to(wide), rows_of(b).to(wide), layout);
  Tensor extra = at::empty({0}, a.options());
  if (bias.has_value()) d = d + *bias;
  if (epilogue == TE_GEMM_GELU) {
    extra = d.to(out_dtype);
    d = at::gelu(d, "tanh");
  } else if (epilogue == TE_GEMM_DGELU) {
    d = at::gelu_backward(d, folded(*aux).to(wide), "tanh");
  } else if (epilogue == TE_GEMM_BGRAD) {
    extra = column_sum(rows_of(b));
  }
  return {d.to(out_dtype), extra};
}

std::tuple<Tensor, Tensor> gemm_meta(const Tensor& a, const Tensor& b, std::string_view layout,
                                     std::string_view epilogue, const OptionalTensor& bias, const OptionalTensor& aux,
                                     std::optional<at::ScalarType> out_dtype) {
  const Extents e = checked_extents(a, b, layout_of(layout), layout);
  const auto options = a.options().dtype(out_dtype.value_or(a.scalar_type()));
  const te_gemm_epilogue kind = epilogue_of(epilogue);
  check_epilogue(a, e, layout_of(layout), kind, epilogue, bias, aux, out_dtype.value_or(a.scalar_type()));
  const Tensor d = at::empty_symint({e.rows, e.cols}, options);
  if (kind == TE_GEMM_GELU) return {d, at::empty_symint({e.rows, e.cols}, options)};
  if (kind == TE_GEMM_BGRAD) return {d, at::empty_symint({e.rows}, a.options())};
  return {d, at::empty({0}, a.options())};
}

Tensor gemm_accumulate_meta(const Tensor& a, const Tensor& b, std::string_view layout, Tensor& out, bool bias_grad,
                            bool) {
  const Extents e = checked_extents(a, b, layout_of(layout), layout);
  check_out(a, e, layout_of(layout), out, bias_grad);
  return bias_grad ? at::empty_symint({e.rows}, a.options()) : at::empty({0}, a.options());
}

}  // namespace

namespace {

Tensor new_workspace(size_t bytes, const Tensor& like) {
  return at::empty({static_cast<int64_t>(bytes)}, like.options().dtype(at::kByte));
}

thread_local OneWorkspace* innermost = nullptr;

}  // namespace

OneWorkspace::OneWorkspace() : outer_(std::exchange(innermost, this)) {}

OneWorkspace::~OneWorkspace() { innermost = outer_; }

const Tensor& OneWorkspace::at_least(size_t bytes, te_stream stream, const Tensor& like) {
  const bool serves = memory_.defined() && stream_ == stream && memory_.device() == like.device();
  if (!serves || memory_.nbytes() < bytes) {
    memory_ = new_workspace(bytes, like);
    stream_ = stream;
  }
  return memory_;
}

namespace {
thread_local int64_t runs_of = 0;
}  // namespace

RunsOf::RunsOf(int64_t rows) : outer_(std::exchange(runs_of, rows)) {}
RunsOf::~RunsOf() { runs_of = outer_; }

std::optional<te_gemm_tile> runs_match_full(const Tensor& a, const Tensor& b, std::string_view layout,
                                            const OptionalTensor& bias, int64_t rows) {
  const Tensor left = rows_of(a), right = rows_of(b);  // as each run's are brought in
  te_gemm_problem p = problem_of(left, right, layout_of(layout), bias.has_value() ? TE_GEMM_BIAS : TE_GEMM_NONE);
  if (bias.has_value()) p.bias = view_2d(*bias, "gemm", "bias");
  p.b.rows = rows;
  const int64_t cols = p.layout == TE_GEMM_TN ? p.a.rows : p.a.cols;
  p.d = {p.b.data, rows, cols, cols, p.b.dtype, p.b.device};
  p.allow_tf32 = a.scalar_type() == at::kFloat && at::globalContext().allowTF32CuBLAS();
  tuning::meet(p);
  int32_t does = 0;
  te_gemm_tile tile{};
  check(te_gemm_takes_runs(&p, &does, &tile));
  return does != 0 ? std::optional(tile) : std::nullopt;
}

void run_gemm(const GemmPath& path, te_gemm_problem& problem, const Tensor& like) {
  if (path.by == GemmBy::kCpuLoop) {
    check(te_gemm_by_loop(&problem));
    return path.note();
  }
  problem.allow_tf32 = like.scalar_type() == at::kFloat && at::globalContext().allowTF32CuBLAS();
  problem.whole_rows = runs_of;
  if (runs_of == 0) tuning::meet(problem);
  size_t bytes = 0;
  check(te_gemm_workspace(&problem, &bytes));
  const te_stream stream = current_stream(like);
  // From the caching allocator for each call: a cached workspace would be raced on by side streams, and one born in a
  // graph capture would live in the graph's pool.
  const Tensor workspace = bytes == 0             ? Tensor()
                           : innermost != nullptr ? innermost->at_least(bytes, stream, like)
                                                  : new_workspace(bytes, like);
  check(te_gemm(&problem, bytes > 0 ? workspace.data_ptr() : nullptr, bytes, stream));
  path.note();
}

namespace {

// into: the memory of d; undefined: a new tensor. An extra that the epilogue does not have is undefined.
std::tuple<Tensor, Tensor> gemm_at(const Tensor& a_in, const Tensor& b_in, std::string_view layout_name,
                                   std::string_view epilogue_name, const OptionalTensor& bias_in,
                                   const OptionalTensor& aux_in, std::optional<at::ScalarType> out_dtype_in,
                                   const Tensor& into) {
  const te_gemm_layout layout = layout_of(layout_name);
  const te_gemm_epilogue epilogue = epilogue_of(epilogue_name);
  const Extents e = checked_extents(a_in, b_in, layout, layout_name);
  const at::ScalarType out_dtype = out_dtype_in.value_or(a_in.scalar_type());
  check_epilogue(a_in, e, layout, epilogue, epilogue_name, bias_in, aux_in, out_dtype);
  const c10::NoGradGuard no_graph;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // of the CPU's products
  check_memory(a_in, "gemm", "a");
  check_memory(b_in, "gemm", "b");
  const GemmPath path = gemm_path({a_in.is_cpu(), a_in.scalar_type(), out_dtype, e.empty(), epilogue});
  if (path.by == GemmBy::kLibTorch) {
    path.note();
    return gemm_cpu(a_in, b_in, layout, epilogue, bias_in, aux_in, out_dtype);
  }
  if (path.apart) {
    const Tensor d = std::get<0>(gemm(a_in, b_in, layout_name, "none", std::nullopt, std::nullopt, out_dtype));
    path.note();
    return {d, column_sum(b_in)};
  }
  const int64_t rows = e.rows.expect_int();
  const int64_t cols = e.cols.expect_int();
  const Tensor a = rows_of(a_in);
  const Tensor b = rows_of(b_in);
  const Tensor d = into.defined() ? into : at::empty({rows, cols}, a.options().dtype(out_dtype));
  const OptionalTensor bias = bias_in.has_value() ? OptionalTensor(bias_in->contiguous()) : std::nullopt;
  const OptionalTensor aux = aux_in.has_value() ? OptionalTensor(rows_of(*aux_in)) : std::nullopt;
  te_gemm_problem problem = problem_of(a, b, layout, epilogue);
  problem.d = view_2d(d, "gemm", "d");
  problem.bias = view_2d(bias, "gemm", "bias");
  problem.aux = view_2d(aux, "gemm", "aux");
  Tensor extra;
  if (epilogue == TE_GEMM_GELU) {
    extra = at::empty({rows, cols}, d.options());
    problem.aux = view_2d(extra, "gemm", "aux");
  } else if (epilogue == TE_GEMM_BGRAD) {
    extra = at::empty({rows}, a.options());
    problem.bias = view_2d(extra, "gemm", "bias");
  }
  run_gemm(path, problem, a);
  return {d, extra};
}

}  // namespace

std::tuple<Tensor, Tensor> gemm(const Tensor& a, const Tensor& b, std::string_view layout, std::string_view epilogue,
                                const OptionalTensor& bias, const OptionalTensor& aux,
                                std::optional<at::ScalarType> out_dtype) {
  auto [d, extra] = gemm_at(a, b, layout, epilogue, bias, aux, out_dtype, {});
  return {std::move(d), extra.defined() ? std::move(extra) : at::empty({0}, a.options())};
}

Tensor gemm_into(const Tensor& a, const Tensor& b, std::string_view layout, std::string_view epilogue,
                 const OptionalTensor& bias, const Tensor& d) {
  // The choice of an algorithm depends on d's alignment, and with it the bits.
  const bool aligned = reinterpret_cast<uintptr_t>(d.data_ptr()) % 16 == 0;
  auto [result, extra] = gemm_at(a, b, layout, epilogue, bias, std::nullopt, d.scalar_type(), aligned ? d : Tensor());
  if (!result.is_same(d)) d.copy_(result);
  return std::move(extra);
}

Tensor gemm_accumulate(const Tensor& a_in, const Tensor& b_in, std::string_view layout_name, Tensor& out,
                       bool bias_grad, bool overwrite) {
  const te_gemm_layout layout = layout_of(layout_name);
  const Extents e = checked_extents(a_in, b_in, layout, layout_name);
  check_out(a_in, e, layout, out, bias_grad);
  check_memory(out, "gemm", "out");
  const c10::NoGradGuard no_graph;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // of the CPU's products
  check_memory(a_in, "gemm", "a");
  check_memory(b_in, "gemm", "b");
  const GemmPath path = gemm_path({a_in.is_cpu(), a_in.scalar_type(), out.scalar_type(), e.empty(),
                                   bias_grad ? TE_GEMM_BGRAD : TE_GEMM_NONE, at::kFloat, true});
  if (path.by == GemmBy::kLibTorch) {
    path.note();
    const auto [d, extra] = gemm_cpu(a_in, b_in, layout, bias_grad ? TE_GEMM_BGRAD : TE_GEMM_NONE, std::nullopt,
                                     std::nullopt, out.scalar_type());
    overwrite ? out.copy_(d) : out.add_(d);
    return extra;
  }
  const Tensor a = rows_of(a_in);
  const Tensor b = rows_of(b_in);
  const Tensor extra = at::empty({bias_grad ? e.rows.expect_int() : 0}, a.options());
  if (path.by == GemmBy::kZeros) {
    path.note();
    if (overwrite) out.zero_();
    if (bias_grad) extra.copy_(column_sum(b));
    return extra;
  }
  const bool fused = bias_grad && !path.apart;
  if (bias_grad && !fused) extra.copy_(column_sum(b));
  te_gemm_problem problem = problem_of(a, b, layout, fused ? TE_GEMM_BGRAD : TE_GEMM_NONE);
  problem.d = view_2d(out, "gemm", "out");
  if (fused) problem.bias = view_2d(extra, "gemm", "bias");
  problem.accumulate = overwrite ? 0 : 1;
  run_gemm(path, problem, a);
  note_written(out);
  return extra;
}

TE_OP_REGISTRATION(gemm, ops) {
  ops.op("gemm(Tensor a, Tensor b, str layout, str epilogue, Tensor? bias, Tensor? aux, ScalarType? out_dtype) -> "
         "(Tensor, Tensor)")
      .kernel(gemm)
      .meta(gemm_meta)
      .python([](const Tensor& a, const Tensor& b, const std::string& layout, const std::string& epilogue,
                 const OptionalTensor& bias, const OptionalTensor& aux, std::optional<at::ScalarType> dtype) {
        if (must_dispatch({&a, &b, pointer_to(bias), pointer_to(aux)})) {
          return Dispatched::call<gemm>("te::gemm", a, b, std::string_view(layout), std::string_view(epilogue), bias,
                                        aux, dtype);
        }
        return gemm(a, b, layout, epilogue, bias, aux, dtype);
      });
  ops.op("gemm_accumulate(Tensor a, Tensor b, str layout, Tensor(a!) out, bool bias_grad, bool overwrite) -> Tensor")
      .kernel(gemm_accumulate)
      .meta(gemm_accumulate_meta)
      .python(
          [](const Tensor& a, const Tensor& b, const std::string& layout, Tensor out, bool bias_grad, bool overwrite) {
            if (must_dispatch({&a, &b, &out})) {
              return Dispatched::call<gemm_accumulate>("te::gemm_accumulate", a, b, std::string_view(layout), out,
                                                       bias_grad, overwrite);
            }
            return gemm_accumulate(a, b, layout, out, bias_grad, overwrite);
          });
}

}  // namespace te_torch
