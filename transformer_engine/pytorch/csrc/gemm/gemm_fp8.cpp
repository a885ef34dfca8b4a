// Binding of gemm_fp8: products of FP8 matrices of any shape. cuBLASLt needs multiples of 16: operands whose memory
// reaches that far are passed as they are, others as zero-padded copies, and the result is cut to its shape.
#include "gemm/gemm_fp8.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include "core/op_registration.h"
#include "gemm/gemm.h"

namespace te_torch {

namespace {

template <class Int>
Int rounded_up(Int n, int64_t to) {
  return (n + (to - 1)) / to * to;
}

// One operand: data [outer, depth], and the format of its code.
struct Operand {
  const Tensor& data;
  const Tensor& scale_inv;
  te_scaling scaling;
  bool e5m2;

  Operand(const Tensor& data, const Tensor& scale_inv, int64_t code, const char* argument)
      : data(data), scale_inv(scale_inv), scaling(te_scaling(code / 2)), e5m2(code % 2 != 0) {
    TORCH_CHECK_VALUE(code >= 0 && code < 2 * te::kScalingCount, "gemm_fp8: argument '", argument, "_code' is ", code,
                      ", wanted 2 * scaling + e5m2, 0 to ", 2 * te::kScalingCount - 1, ".");
    TORCH_CHECK_VALUE(data.dim() == 2 && data.scalar_type() == at::kByte, "gemm_fp8: argument '", argument, "' is ",
                      data.scalar_type(), " ", data.sym_sizes(), ", wanted Byte [outer, depth].");
    TORCH_CHECK_VALUE(scale_inv.scalar_type() == at::kFloat && scale_inv.device() == data.device(),
                      "gemm_fp8: argument '", argument, "_scale_inv' is ", scale_inv.scalar_type(), " on ",
                      scale_inv.device(), ", wanted Float on ", data.device(), ".");
    if (scaling == TE_SCALING_TENSOR) {
      TORCH_CHECK_VALUE(scale_inv.sym_numel() == 1 || scale_inv.sym_numel() == 2, "gemm_fp8: argument '", argument,
                        "_scale_inv' has shape ", scale_inv.sym_sizes(), ", wanted one scale, or it and its inverse.");
      return;
    }
    const auto [major, minor] = te::scale_shape(scaling, outer(), depth());
    TORCH_CHECK_VALUE(scale_inv.dim() == 2 && scale_inv.sym_size(0) == major && scale_inv.sym_size(1) == minor,
                      "gemm_fp8: argument '", argument, "_scale_inv' has shape ", scale_inv.sym_sizes(), ", wanted [",
                      major, ", ", minor, "] for data of ", data.sym_sizes(), " in ", name(), " blocks.");
  }

  c10::SymInt outer() const { return data.sym_size(0); }
  c10::SymInt depth() const { return data.sym_size(1); }
  void check_memory(const char* argument) const {
    te_torch::check_memory(data, "gemm_fp8", argument);
    te_torch::check_memory(scale_inv, "gemm_fp8", argument);
  }
  std::string name() const {
    const te::ScalingRow& row = te::scaling_row(scaling);
    return row.is_per_tensor() ? "per-tensor" : c10::str(row.block_rows, " x ", row.block_cols);
  }
};

void check_fit(const Operand& a, const Operand& b, at::ScalarType out_dtype) {
  TORCH_CHECK_VALUE(a.data.device() == b.data.device(), "gemm_fp8: argument 'b' is on ", b.data.device(), ", wanted ",
                    a.data.device(), ".");
  TORCH_CHECK_VALUE(a.depth() == b.depth(), "gemm_fp8: argument 'b' has shape ", b.data.sym_sizes(),
                    ", which does not fit 'a' of ", a.data.sym_sizes(), ": reduced dimensions ", b.depth(), " and ",
                    a.depth(), ".");
  TORCH_CHECK_VALUE(out_dtype == at::kFloat || out_dtype == at::kHalf || out_dtype == at::kBFloat16,
                    "gemm_fp8: argument 'out_dtype' is ", out_dtype, ", wanted Float, Half or BFloat16.");
}

// Refuses what no FP8 product supports, on the CPU too. Not in Meta, whose NotImplementedError fake tensors take for a
// missing kernel: a compiled call is refused when it runs.
void check_pair(const Operand& a, const Operand& b, bool fast) {
  a.check_memory("a");
  b.check_memory("b");
  TORCH_CHECK_NOT_IMPLEMENTED(!(a.e5m2 && b.e5m2),
                              "gemm_fp8: arguments 'a' and 'b' are both E5M2; at most one may be, quantize the other "
                              "to E4M3.");
  const bool per_tensor = a.scaling == TE_SCALING_TENSOR;
  const bool squares = a.scaling == TE_SCALING_BLOCK_2D && b.scaling == TE_SCALING_BLOCK_2D;
  TORCH_CHECK_NOT_IMPLEMENTED(per_tensor == (b.scaling == TE_SCALING_TENSOR) && !squares,
                              "gemm_fp8: arguments 'a' and 'b' have ", a.name(), " and ", b.name(),
                              " scales; per-tensor goes with per-tensor, 1 x 128 with 1 x 128 or 128 x 128.");
  TORCH_CHECK_NOT_IMPLEMENTED(per_tensor || !fast, "gemm_fp8: argument 'fast' is True with ", a.name(),
                              " scales; fast accumulation is for per-tensor ones.");
}

void check_bias(const Operand& a, const OptionalTensor& bias) {
  if (!bias.has_value()) return;
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == a.outer(), "gemm_fp8: argument 'bias' has shape ",
                    bias->sym_sizes(), ", wanted [", a.outer(), "].");
  check_float(*bias, "gemm_fp8", "bias");
  TORCH_CHECK_VALUE(bias->device() == a.data.device(), "gemm_fp8: argument 'bias' is on ", bias->device(), ", wanted ",
                    a.data.device(), ".");
}

void check_out(const Operand& a, const Operand& b, const Tensor& out) {
  TORCH_CHECK_VALUE(out.dim() == 2 && out.sym_size(0) == b.outer() && out.sym_size(1) == a.outer(),
                    "gemm_fp8_accumulate: argument 'out' has shape ", out.sym_sizes(), ", wanted [", b.outer(), ", ",
                    a.outer(), "].");
  TORCH_CHECK_VALUE(out.device() == a.data.device(), "gemm_fp8_accumulate: argument 'out' is on ", out.device(),
                    ", wanted ", a.data.device(), ".");
  TORCH_CHECK_VALUE(
      out.is_contiguous(),
      "gemm_fp8_accumulate: argument 'out' is not contiguous, wanted a contiguous one: it is written in place.");
}

// ---- the CPU: widen, multiply ----

Tensor scales_over(const Operand& o) {
  const int64_t outer = o.data.size(0), depth = o.data.size(1);
  if (o.scaling == TE_SCALING_TENSOR) return o.scale_inv.flatten()[0];
  const te::ScalingRow& row = te::scaling_row(o.scaling);
  const auto blocks = [](int64_t n, int64_t block) { return (n + block - 1) / block; };
  const Tensor grid = row.across ? o.scale_inv.narrow(1, 0, blocks(outer, row.block_rows)).t()
                                 : o.scale_inv.narrow(1, 0, blocks(depth, row.block_cols));
  const Tensor wide = grid.repeat_interleave(row.block_cols, 1).narrow(1, 0, depth);
  return row.block_rows == 1 ? wide : wide.repeat_interleave(row.block_rows, 0).narrow(0, 0, outer);
}

Tensor widened(const Operand& o) {
  const Tensor values = o.data.contiguous().view(o.e5m2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn).to(at::kFloat);
  return values * scales_over(o);
}

// ---- the engine: the operands as te_gemm takes them ----

// An operand with outer and depth rounded up to 16. `keep` owns what was copied.
struct Padded {
  te_tensor data;
  te_tensor scales;
  Tensor keep, keep_scales;
  bool copied = false;

  explicit Padded(const Operand& o) {
    const int64_t outer = o.data.size(0), depth = o.data.size(1);
    const int64_t rows = rounded_up(outer, 16), pitch = rounded_up(depth, 16);
    keep = o.data;
    const bool dense = keep.stride(1) == 1 && keep.stride(0) == pitch;
    const int64_t reach = keep.storage_offset() + rows * pitch;
    if (!dense || int64_t(keep.storage().nbytes()) < reach || reinterpret_cast<uintptr_t>(keep.data_ptr()) % 16 != 0) {
      keep = at::zeros({rows, pitch}, o.data.options());
      keep.narrow(0, 0, outer).narrow(1, 0, depth).copy_(o.data);
      copied = true;
    }
    data = {keep.data_ptr(), rows, pitch, pitch, o.e5m2 ? TE_FLOAT8_E5M2 : TE_FLOAT8_E4M3, device()};
    keep_scales = o.scale_inv.contiguous();
    const bool odd = reinterpret_cast<uintptr_t>(keep_scales.data_ptr()) % 16 != 0;
    if (o.scaling == TE_SCALING_TENSOR) {
      if (odd) keep_scales = keep_scales.clone(), copied = true;
      scales = {keep_scales.data_ptr(), 1, 1, 1, TE_FLOAT32, device()};
      return;
    }
    const bool along_rows = te::scaling_row(o.scaling).across;  // each row of scales has one for each row of data
    const bool short_rows = along_rows && keep_scales.size(1) != rows;
    if (odd || short_rows) {
      const int64_t wide = along_rows ? rows : keep_scales.size(1);
      keep_scales = at::zeros({o.scale_inv.size(0), wide}, o.scale_inv.options());
      keep_scales.narrow(1, 0, o.scale_inv.size(1)).copy_(o.scale_inv);
      copied = true;
    }
    scales = {keep_scales.data_ptr(), keep_scales.size(0), keep_scales.size(1),
              keep_scales.size(1),    TE_FLOAT32,          device()};
  }

  int32_t device() const { return keep.get_device(); }
};

te_gemm_problem problem_of(const Padded& a, const Operand& a_operand, const Padded& b, const Operand& b_operand,
                           bool fast) {
  te_gemm_problem p{};
  p.a = a.data;
  p.b = b.data;
  p.bias = p.aux = absent();
  p.layout = TE_GEMM_TN;
  p.a_scale_inv = a.scales;
  p.b_scale_inv = b.scales;
  p.a_scaling = a_operand.scaling;
  p.b_scaling = b_operand.scaling;
  p.fast_accumulation = fast ? 1 : 0;
  return p;
}

void note_copies(const GemmPath& path, bool copied) {
  if (copied && path.by == GemmBy::kCublasLt)
    te_note_path("cuBLASLt on padded copies", "FP8 products take addresses and sizes in multiples of 16");
}

// The bias as the epilogue reads it, as long as d is wide.
Tensor padded_bias(const Tensor& bias, int64_t cols) {
  if (bias.size(0) == cols && bias.is_contiguous() && reinterpret_cast<uintptr_t>(bias.data_ptr()) % 16 == 0) {
    return bias;
  }
  const Tensor wide = at::zeros({cols}, bias.options());
  wide.narrow(0, 0, bias.size(0)).copy_(bias);
  return wide;
}

// into: memory for the result, used if it fits; undefined: a new tensor.
Tensor product_by_engine(const GemmPath& path, const Operand& a, const Operand& b, at::ScalarType out_dtype,
                         const OptionalTensor& bias, bool fast, const Tensor& into) {
  const int64_t rows = b.data.size(0), cols = a.data.size(0);
  const Padded left(a), right(b);
  const bool fits_into = into.defined() && right.data.rows == rows && left.data.rows == cols &&
                         reinterpret_cast<uintptr_t>(into.data_ptr()) % 16 == 0;
  const Tensor d = fits_into ? into : at::empty({right.data.rows, left.data.rows}, a.data.options().dtype(out_dtype));
  te_gemm_problem p = problem_of(left, a, right, b, fast);
  p.d = view_2d(d, "gemm_fp8", "d");
  Tensor wide_bias;
  if (bias.has_value()) {
    wide_bias = padded_bias(*bias, left.data.rows);
    p.bias = view_2d(wide_bias, "gemm_fp8", "bias");
    p.epilogue = TE_GEMM_BIAS;
  }
  run_gemm(path, p, a.data);
  note_copies(path, left.copied || right.copied);
  if (d.size(1) != cols) return d.narrow(0, 0, rows).narrow(1, 0, cols).contiguous();
  if (d.size(0) == rows) return d;
  // No view of d: one made without a graph could not be changed in place.
  return at::empty({0}, d.options()).set_(d.storage(), 0, {rows, cols}, {cols, 1});
}

bool is_empty(const Operand& a, const Operand& b) { return a.data.numel() == 0 || b.data.numel() == 0; }

Tensor product(const Operand& a, const Operand& b, at::ScalarType out_dtype, const OptionalTensor& bias, bool fast,
               const Tensor& into = {}) {
  const c10::NoGradGuard no_graph;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // of the CPU's product
  const GemmPath path =
      gemm_path({a.data.is_cpu(), at::kByte, out_dtype, is_empty(a, b), bias.has_value() ? TE_GEMM_BIAS : TE_GEMM_NONE,
                 bias.has_value() ? bias->scalar_type() : at::kFloat});
  if (path.by == GemmBy::kZeros) {
    path.note();
    const int64_t rows = b.data.size(0), cols = a.data.size(0);
    const Tensor zero = at::zeros({rows, cols}, a.data.options().dtype(out_dtype));
    return bias.has_value() ? at::add(zero, bias->to(out_dtype)) : zero;
  }
  if (path.by == GemmBy::kLibTorch) {
    path.note();
    Tensor d = at::mm(widened(b), widened(a).t());
    if (bias.has_value()) d.add_(*bias);
    return d.to(out_dtype);
  }
  if (path.apart) {  // the bias: added in float32, rounded once
    return product_by_engine(path, a, b, at::kFloat, std::nullopt, fast, {}).add_(*bias).to(out_dtype);
  }
  return product_by_engine(path, a, b, out_dtype, bias, fast, into);
}

Tensor gemm_fp8_meta(const Tensor& a, const Tensor& a_scale_inv, int64_t a_code, const Tensor& b,
                     const Tensor& b_scale_inv, int64_t b_code, at::ScalarType out_dtype, const OptionalTensor& bias,
                     bool fast) {
  const Operand left(a, a_scale_inv, a_code, "a"), right(b, b_scale_inv, b_code, "b");
  check_fit(left, right, out_dtype);
  check_bias(left, bias);
  return at::empty_symint({right.outer(), left.outer()}, a.options().dtype(out_dtype));
}

void gemm_fp8_accumulate_meta(const Tensor& a, const Tensor& a_scale_inv, int64_t a_code, const Tensor& b,
                              const Tensor& b_scale_inv, int64_t b_code, Tensor& out, bool, bool fast) {
  const Operand left(a, a_scale_inv, a_code, "a"), right(b, b_scale_inv, b_code, "b");
  check_fit(left, right, out.scalar_type());
  check_out(left, right, out);
}

}  // namespace

Tensor gemm_fp8_op(const Tensor& a, const Tensor& a_scale_inv, int64_t a_code, const Tensor& b,
                   const Tensor& b_scale_inv, int64_t b_code, at::ScalarType out_dtype, const OptionalTensor& bias,
                   bool fast) {
  const Operand left(a, a_scale_inv, a_code, "a"), right(b, b_scale_inv, b_code, "b");
  check_fit(left, right, out_dtype);
  check_pair(left, right, fast);
  check_bias(left, bias);
  return product(left, right, out_dtype, bias, fast);
}

void gemm_fp8_into(const Quantized& a, bool a_columnwise, const Quantized& b, bool b_columnwise, const Tensor& d,
                   const OptionalTensor& bias, bool fast) {
  const Fp8Operand l(a, a_columnwise, "a"), r(b, b_columnwise, "b");
  const Operand left(l.data, l.scale_inv, l.code, "a"), right(r.data, r.scale_inv, r.code, "b");
  check_fit(left, right, d.scalar_type());
  check_pair(left, right, fast);
  check_bias(left, bias);
  const Tensor result = product(left, right, d.scalar_type(), bias, fast, d);
  if (!result.is_same(d)) d.copy_(result);
}

std::optional<te_gemm_tile> fp8_runs_match_full(const Quantized& a, bool a_columnwise, const Quantized& b,
                                                at::ScalarType out_dtype, const OptionalTensor& bias, bool fast,
                                                int64_t rows) {
  const Fp8Operand l(a, a_columnwise, "a"), r(b, false, "b");
  const Operand left(l.data, l.scale_inv, l.code, "a"), right(r.data, r.scale_inv, r.code, "b");
  const GemmPath path =
      gemm_path({false, at::kByte, out_dtype, is_empty(left, right), bias.has_value() ? TE_GEMM_BIAS : TE_GEMM_NONE,
                 bias.has_value() ? bias->scalar_type() : at::kFloat});
  const int64_t cols = left.data.size(0), depth = left.data.size(1);
  const bool fits = rows % 16 == 0 && cols % 16 == 0 && depth % 16 == 0 && left.data.is_contiguous();
  if (path.by != GemmBy::kCublasLt || path.apart || !fits || right.scaling != TE_SCALING_TENSOR) {
    return std::nullopt;
  }
  const Padded first(left), second(right);
  te_gemm_problem p = problem_of(first, left, second, right, fast);
  p.b.rows = rows;
  p.d = {p.b.data, rows, cols, cols, dtype_of(out_dtype, "gemm_fp8", "d"), p.b.device};
  if (bias.has_value()) {
    p.bias = view_2d(*bias, "gemm_fp8", "bias");
    p.epilogue = TE_GEMM_BIAS;
  }
  int32_t does = 0;
  te_gemm_tile tile{};
  check(te_gemm_takes_runs(&p, &does, &tile));
  return does != 0 ? std::optional(tile) : std::nullopt;
}

void gemm_fp8_accumulate_op(const Tensor& a, const Tensor& a_scale_inv, int64_t a_code, const Tensor& b,
                            const Tensor& b_scale_inv, int64_t b_code, Tensor& out, bool overwrite, bool fast) {
  const Operand left(a, a_scale_inv, a_code, "a"), right(b, b_scale_inv, b_code, "b");
  check_fit(left, right, out.scalar_type());
  check_pair(left, right, fast);
  check_out(left, right, out);
  check_memory(out, "gemm_fp8_accumulate", "out");
  const c10::NoGradGuard no_graph;
  const bool wide =
      out.size(0) % 16 == 0 && out.size(1) % 16 == 0 && reinterpret_cast<uintptr_t>(out.data_ptr()) % 16 == 0;
  const GemmPath path = gemm_path(
      {out.is_cpu(), at::kByte, out.scalar_type(), is_empty(left, right), TE_GEMM_NONE, at::kFloat, true, wide});
  if (path.apart) {
    const Tensor d = product(left, right, at::kFloat, std::nullopt, fast);
    path.note();
    overwrite ? out.copy_(d) : out.add_(d);
    return;
  }
  const Padded left_padded(left), right_padded(right);
  te_gemm_problem p = problem_of(left_padded, left, right_padded, right, fast);
  p.d = view_2d(out, "gemm_fp8_accumulate", "out");
  p.accumulate = overwrite ? 0 : 1;
  run_gemm(path, p, a);
  note_copies(path, left_padded.copied || right_padded.copied);
  note_written(out);
}

TE_OP_REGISTRATION(gemm_fp8, ops) {
  ops.op("gemm_fp8(Tensor a, Tensor a_scale_inv, int a_code, Tensor b, Tensor b_scale_inv, int b_code, ScalarType "
         "out_dtype, Tensor? bias, bool fast) -> Tensor")
      .kernel(gemm_fp8_op)
      .meta(gemm_fp8_meta)
      .python(
          [](const Quantized& a, bool a_columnwise, const Quantized& b, bool b_columnwise, at::ScalarType out_dtype,
             const OptionalTensor& bias, bool fast) {
            const Fp8Operand left(a, a_columnwise, "a"), right(b, b_columnwise, "b");
            if (must_dispatch({&left.data, &left.scale_inv, &right.data, &right.scale_inv, pointer_to(bias)})) {
              return gemm_fp8<Dispatched>(a, a_columnwise, b, b_columnwise, out_dtype, bias, fast);
            }
            return gemm_fp8(a, a_columnwise, b, b_columnwise, out_dtype, bias, fast);
          },
          pybind11::arg("a"), pybind11::arg("a_columnwise"), pybind11::arg("b"), pybind11::arg("b_columnwise"),
          pybind11::arg("out_dtype"), pybind11::arg("bias") = pybind11::none(), pybind11::arg("fast") = false);
  ops.op("gemm_fp8_accumulate(Tensor a, Tensor a_scale_inv, int a_code, Tensor b, Tensor b_scale_inv, int b_code, "
         "Tensor(a!) out, bool overwrite, bool fast) -> ()")
      .kernel(gemm_fp8_accumulate_op)
      .meta(gemm_fp8_accumulate_meta)
      .python(
          [](const Quantized& a, bool a_columnwise, const Quantized& b, bool b_columnwise, Tensor out, bool overwrite,
             bool fast) {
            const Fp8Operand left(a, a_columnwise, "a"), right(b, b_columnwise, "b");
            if (must_dispatch({&left.data, &left.scale_inv, &right.data, &right.scale_inv, &out})) {
              return gemm_fp8_accumulate<Dispatched>(a, a_columnwise, b, b_columnwise, out, overwrite, fast);
            }
            gemm_fp8_accumulate(a, a_columnwise, b, b_columnwise, out, overwrite, fast);
          },
          pybind11::arg("a"), pybind11::arg("a_columnwise"), pybind11::arg("b"), pybind11::arg("b_columnwise"),
          pybind11::arg("out"), pybind11::arg("overwrite"), pybind11::arg("fast") = false);
}

}  // namespace te_torch
