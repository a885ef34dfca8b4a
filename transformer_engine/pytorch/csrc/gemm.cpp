// gemm, binding: LibTorch's product on the CPU, te_gemm on CUDA with its workspace taken from ATen for each call.
#include "gemm.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <transformer_engine/gemm.h>

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

struct Extents {
  c10::SymInt rows, cols, depth_a, depth_b;
};

Extents extents_of(const Tensor& a, const Tensor& b, te_gemm_layout layout) {
  const auto rows = [](const Tensor& t) {
    c10::SymInt n = 1;
    for (int64_t d = 0; d + 1 < t.dim(); ++d) n = n * t.sym_size(d);
    return n;
  };
  TORCH_CHECK_VALUE(a.dim() >= 1 && b.dim() >= 1, "gemm: arguments 'a' and 'b' have ", a.dim(), " and ", b.dim(),
                    " dimensions, wanted at least one.");
  if (layout == TE_GEMM_TN) return {rows(b), rows(a), a.sym_size(-1), b.sym_size(-1)};
  if (layout == TE_GEMM_NN) return {rows(b), a.sym_size(-1), rows(a), b.sym_size(-1)};
  return {b.sym_size(-1), a.sym_size(-1), rows(a), rows(b)};
}

Extents checked_extents(const Tensor& a, const Tensor& b, te_gemm_layout layout, std::string_view name) {
  check_same(b, a, "gemm", "b");
  const Extents e = extents_of(a, b, layout);
  TORCH_CHECK_VALUE(e.depth_a == e.depth_b, "gemm: argument 'b' has shape ", b.sym_sizes(),
                    ", which does not fit 'a' of ", a.sym_sizes(), " in layout ", name, ": reduced dimensions ",
                    e.depth_b, " and ", e.depth_a, ".");
  return e;
}

void run_cuda(te_gemm_problem& problem, const Tensor& like) {
  problem.allow_tf32 = like.scalar_type() == at::kFloat && at::globalContext().allowTF32CuBLAS();
  size_t bytes = 0;
  check(te_gemm_workspace(&problem, &bytes));
  // From the caching allocator for each call: a cached workspace would be raced on by side streams, and one born in a
  // graph capture would live in the graph's pool.
  const Tensor workspace =
      bytes > 0 ? at::empty({static_cast<int64_t>(bytes)}, like.options().dtype(at::kByte)) : Tensor();
  check(te_gemm(&problem, bytes > 0 ? workspace.data_ptr() : nullptr, bytes, current_stream(like)));
}

Tensor product_cpu(const Tensor& a, const Tensor& b, te_gemm_layout layout) {
  const Tensor a2 = a.reshape({-1, a.size(-1)});
  const Tensor b2 = b.reshape({-1, b.size(-1)});
  if (layout == TE_GEMM_TN) return at::mm(b2, a2.t());
  if (layout == TE_GEMM_NN) return at::mm(b2, a2);
  return at::mm(b2.t(), a2);
}

Tensor column_sum(const Tensor& t) { return t.reshape({-1, t.size(-1)}).sum(0); }

std::tuple<Tensor, Tensor> gemm_cpu(const Tensor& a, const Tensor& b, te_gemm_layout layout, te_gemm_epilogue epilogue,
                                    const OptionalTensor& bias, const OptionalTensor& aux, at::ScalarType out_dtype) {
  // An output wider than the operands is a product of widened operands, as it is on the GPU.
  const bool widen = out_dtype != a.scalar_type();
  Tensor d = widen ? product_cpu(a.to(out_dtype), b.to(out_dtype), layout) : product_cpu(a, b, layout);
  Tensor extra = at::empty({0}, a.options());
  if (bias.has_value() && epilogue != TE_GEMM_BGRAD) d = d + *bias;
  if (epilogue == TE_GEMM_GELU) {
    extra = d;
    d = at::gelu(d, "tanh");
  } else if (epilogue == TE_GEMM_DGELU) {
    d = at::gelu_backward(d, *aux, "tanh");
  } else if (epilogue == TE_GEMM_BGRAD) {
    extra = column_sum(b);
  }
  return {d, extra};
}

std::tuple<Tensor, Tensor> gemm_meta(const Tensor& a, const Tensor& b, std::string_view layout,
                                     std::string_view epilogue, const OptionalTensor&, const OptionalTensor&,
                                     std::optional<at::ScalarType> out_dtype) {
  const Extents e = checked_extents(a, b, layout_of(layout), layout);
  const auto options = a.options().dtype(out_dtype.value_or(a.scalar_type()));
  const te_gemm_epilogue kind = epilogue_of(epilogue);
  const Tensor d = at::empty_symint({e.rows, e.cols}, options);
  if (kind == TE_GEMM_GELU) return {d, at::empty_symint({e.rows, e.cols}, options)};
  if (kind == TE_GEMM_BGRAD) return {d, at::empty_symint({e.rows}, a.options())};
  return {d, at::empty({0}, a.options())};
}

Tensor gemm_accumulate_meta(const Tensor& a, const Tensor& b, std::string_view layout, Tensor&, bool bias_grad) {
  const Extents e = checked_extents(a, b, layout_of(layout), layout);
  return bias_grad ? at::empty_symint({e.rows}, a.options()) : at::empty({0}, a.options());
}

}  // namespace

std::tuple<Tensor, Tensor> gemm(const Tensor& a_in, const Tensor& b_in, std::string_view layout_name,
                                std::string_view epilogue_name, const OptionalTensor& bias_in,
                                const OptionalTensor& aux_in, std::optional<at::ScalarType> out_dtype_in) {
  const te_gemm_layout layout = layout_of(layout_name);
  const te_gemm_epilogue epilogue = epilogue_of(epilogue_name);
  const Extents e = checked_extents(a_in, b_in, layout, layout_name);
  const at::ScalarType out_dtype = out_dtype_in.value_or(a_in.scalar_type());
  TORCH_CHECK_VALUE(epilogue != TE_GEMM_BIAS || bias_in.has_value(),
                    "gemm: argument 'bias' is missing for epilogue bias.");
  TORCH_CHECK_VALUE(epilogue != TE_GEMM_DGELU || aux_in.has_value(),
                    "gemm: argument 'aux' is missing for epilogue dgelu.");
  if (a_in.is_cpu()) {
    dtype_of(a_in, "gemm", "a");
    return gemm_cpu(a_in, b_in, layout, epilogue, bias_in, aux_in, out_dtype);
  }
  const Tensor a = rows_of(a_in);
  const Tensor b = rows_of(b_in);
  const int64_t rows = e.rows.expect_int();
  const int64_t cols = e.cols.expect_int();
  const Tensor d = at::empty({rows, cols}, a.options().dtype(out_dtype));
  const OptionalTensor bias = bias_in.has_value() ? OptionalTensor(bias_in->contiguous()) : std::nullopt;
  const OptionalTensor aux = aux_in.has_value() ? OptionalTensor(rows_of(*aux_in)) : std::nullopt;
  te_gemm_problem problem{view_2d(a, "gemm", "a"),
                          view_2d(b, "gemm", "b"),
                          view_2d(d, "gemm", "d"),
                          view_2d(bias, "gemm", "bias"),
                          view_2d(aux, "gemm", "aux"),
                          layout,
                          epilogue,
                          0,
                          0};
  Tensor extra = at::empty({0}, a.options());
  if (epilogue == TE_GEMM_GELU) {
    extra = at::empty({rows, cols}, d.options());
    problem.aux = view_2d(extra, "gemm", "aux");
  } else if (epilogue == TE_GEMM_BGRAD) {
    extra = at::empty({rows}, a.options());
    problem.bias = view_2d(extra, "gemm", "bias");
  }
  run_cuda(problem, a);
  return {d, extra};
}

Tensor gemm_accumulate(const Tensor& a_in, const Tensor& b_in, std::string_view layout_name, Tensor& out,
                       bool bias_grad) {
  const te_gemm_layout layout = layout_of(layout_name);
  const Extents e = checked_extents(a_in, b_in, layout, layout_name);
  const int64_t rows = e.rows.expect_int();
  const int64_t cols = e.cols.expect_int();
  TORCH_CHECK_VALUE(out.dim() == 2 && out.size(0) == rows && out.size(1) == cols, "gemm: argument 'out' has shape ",
                    out.sizes(), ", wanted [", rows, ", ", cols, "].");
  TORCH_CHECK_VALUE(out.device() == a_in.device(), "gemm: argument 'out' is on ", out.device(), ", wanted ",
                    a_in.device(), ".");
  TORCH_CHECK_VALUE(out.scalar_type() == at::kFloat || out.scalar_type() == a_in.scalar_type(),
                    "gemm: argument 'out' has dtype ", out.scalar_type(), ", wanted Float or ", a_in.scalar_type(),
                    ".");
  TORCH_CHECK_VALUE(out.is_contiguous(), "gemm: argument 'out' is not contiguous, and it is written in place.");
  if (a_in.is_cpu()) {
    dtype_of(a_in, "gemm", "a");
    const auto [d, extra] = gemm_cpu(a_in, b_in, layout, bias_grad ? TE_GEMM_BGRAD : TE_GEMM_NONE, std::nullopt,
                                     std::nullopt, out.scalar_type());
    out.add_(d);
    return extra;
  }
  const Tensor a = rows_of(a_in);
  const Tensor b = rows_of(b_in);
  const Tensor extra = at::empty({bias_grad ? rows : 0}, a.options());
  if (a.numel() == 0 || b.numel() == 0) {  // adds nothing
    if (bias_grad) extra.copy_(column_sum(b));
    return extra;
  }
  te_gemm_problem problem{view_2d(a, "gemm", "a"),
                          view_2d(b, "gemm", "b"),
                          view_2d(out, "gemm", "out"),
                          bias_grad ? view_2d(extra, "gemm", "bias") : absent(),
                          absent(),
                          layout,
                          bias_grad ? TE_GEMM_BGRAD : TE_GEMM_NONE,
                          1,
                          0};
  run_cuda(problem, a);
  return extra;
}

TORCH_LIBRARY_FRAGMENT(te, m) {
  m.def(
      "gemm(Tensor a, Tensor b, str layout, str epilogue, Tensor? bias, Tensor? aux, ScalarType? out_dtype) -> "
      "(Tensor, Tensor)");
  m.def("gemm_accumulate(Tensor a, Tensor b, str layout, Tensor(a!) out, bool bias_grad) -> Tensor");
}
TORCH_LIBRARY_IMPL(te, CPU, m) {
  m.impl("gemm", gemm);
  m.impl("gemm_accumulate", gemm_accumulate);
}
TORCH_LIBRARY_IMPL(te, CUDA, m) {
  m.impl("gemm", gemm);
  m.impl("gemm_accumulate", gemm_accumulate);
}
TORCH_LIBRARY_IMPL(te, Meta, m) {
  m.impl("gemm", gemm_meta);
  m.impl("gemm_accumulate", gemm_accumulate_meta);
}

void register_gemm(pybind11::module_& m) {
  m.def("gemm", torch::wrap_pybind_function_no_gil([](const Tensor& a, const Tensor& b, const std::string& layout,
                                                      const std::string& epilogue, const OptionalTensor& bias,
                                                      const OptionalTensor& aux, std::optional<at::ScalarType> dtype) {
          if (must_dispatch({&a, &b})) {
            return Dispatched::call<gemm>("te::gemm", a, b, std::string_view(layout), std::string_view(epilogue), bias,
                                          aux, dtype);
          }
          return gemm(a, b, layout, epilogue, bias, aux, dtype);
        }));
  m.def("gemm_accumulate", torch::wrap_pybind_function_no_gil(
                               [](const Tensor& a, const Tensor& b, const std::string& layout, Tensor out,
                                  bool bias_grad) { return gemm_accumulate(a, b, layout, out, bias_grad); }));
}

}  // namespace te_torch
