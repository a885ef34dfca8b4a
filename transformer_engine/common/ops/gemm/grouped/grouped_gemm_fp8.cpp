// grouped gemm of FP8 operands, contract and CPU path: te_gemm's FP8 product of each group. A group's panels are joined
// to the matrix that te_quantize makes of the group's rows.
#include <algorithm>
#include <cstring>
#include <vector>

#include "core/fp8.h"
#include "ops/gemm/gemm_problem.h"
#include "ops/gemm/grouped/check.h"
#include "ops/gemm/grouped/problem.h"

namespace te::gemm::grouped {

namespace {

void check_device(const char* argument, const te_tensor& t, const te_tensor& like) {
  if (t.device != like.device) bad_argument(kOp, argument, concat("on ", device_of(t)), device_of(like));
}

// Checks an operand other than a gradient.
void check_e4m3(const char* argument, const te_tensor& t, int64_t rows, int64_t columns, const te_tensor& like) {
  check_shape(kOp, argument, t, rows, columns);
  dispatch_fp8(t.dtype, kOp, argument, [](auto) {});
  check_device(argument, t, like);
  if (t.dtype == TE_FLOAT8_E5M2) {
    throw Error(TE_NOT_IMPLEMENTED,
                concat(kOp, ": ", argument, " of float8_e5m2: pass float8_e4m3; only rows may be float8_e5m2."));
  }
}

void check_scales(const char* argument, const te_tensor& t, const te_tensor& like) {
  if (t.dtype != TE_FLOAT32) bad_argument(kOp, argument, concat("of dtype ", te_dtype_name(t.dtype)), "float32");
  check_device(argument, t, like);
}

void check_result(const char* argument, const te_tensor& t, int64_t rows, int64_t columns, const te_tensor& like) {
  check_shape(kOp, argument, t, rows, columns);
  dispatch_float(t.dtype, kOp, argument, [](auto) {});
  check_device(argument, t, like);
}

void check_weight(const te_grouped_gemm_problem& p, int32_t g, int64_t outer, int64_t k) {
  const te_tensor& scales = p.weights_scale_inv[g];
  const bool blocks = p.scaling == TE_SCALING_BLOCK_1D;
  const gemm::ScaleShape s = scales_of(blocks ? TE_SCALING_BLOCK_2D : TE_SCALING_TENSOR, outer, k);
  const int64_t columns = !blocks && scales.cols == 2 ? 2 : s.columns;
  if (is_as(p.weights[g], outer, k, TE_FLOAT8_E4M3, p.rows) && is_as(scales, s.rows, columns, TE_FLOAT32, p.rows) &&
      (s.rows <= 1 || scales.row_pitch == scales.cols)) {
    return;
  }
  check_e4m3(element_name("weights", g).c_str(), p.weights[g], outer, k, p.rows);
  const std::string argument = element_name("weights_scale_inv", g);
  check_shape(kOp, argument.c_str(), scales, s.rows, columns);
  check_scales(argument.c_str(), scales, p.rows);
  if (s.rows > 1 && scales.row_pitch != scales.cols) {
    bad_argument(kOp, argument.c_str(), concat("of row pitch ", scales.row_pitch),
                 concat(scales.cols, ", its columns"));
  }
}

void check_bias(const te_grouped_gemm_problem& p, int32_t g, int64_t n) {
  te_tensor like = p.rows;
  like.dtype = p.result.dtype == TE_FLOAT16 ? TE_FLOAT16 : TE_BFLOAT16;
  if (!is_as(p.biases[g], 1, n, like.dtype, like))
    check_as(kOp, element_name("biases", g).c_str(), p.biases[g], 1, n, like);
}

ProblemShape check_rows(const te_grouped_gemm_problem& p) {
  const bool fprop = p.product == TE_GROUPED_FPROP;
  const int64_t outer = p.result.cols, k = p.rows.cols;
  const ProblemShape shape{p.rows.rows, fprop ? outer : k, fprop ? k : outer};
  check_result("result", p.result, shape.rows, outer, p.rows);
  check_presence(p, "weights_scale_inv", true, p.weights_scale_inv != nullptr);
  for (int32_t g = 0; g < p.groups; ++g) {
    check_weight(p, g, outer, k);
    if (p.biases != nullptr) check_bias(p, g, shape.n);
  }
  if (p.scaling == TE_SCALING_TENSOR) {
    check_shape(kOp, "rows_scale_inv", p.rows_scale_inv, 1, p.groups);
  } else {
    const int64_t blocks = scales_of(TE_SCALING_BLOCK_1D, shape.rows, k).rows;
    check_shape(kOp, "rows_scale_inv", p.rows_scale_inv, blocks, std::max(p.rows_scale_inv.cols, shape.rows));
  }
  check_scales("rows_scale_inv", p.rows_scale_inv, p.rows);
  return shape;
}

void check_panels(const te_grouped_gemm_problem& p, const char* argument, const te_tensor& scales, int64_t panels,
                  int64_t outer) {
  const bool blocks = p.scaling == TE_SCALING_BLOCK_1D;
  check_shape(kOp, argument, scales, blocks ? panels : 1, blocks ? (outer + 3) / 4 * 4 : p.groups);
  check_scales(argument, scales, p.rows);
}

ProblemShape check_weight_gradients(const te_grouped_gemm_problem& p) {
  const te_tensor* like = nullptr;
  for (int32_t g = 0; g < p.groups; ++g) {
    const te_tensor& result = p.results[g];
    if (result.data == nullptr) continue;
    if (like == nullptr) like = &result;
    if (like != &result && is_as(result, like->rows, like->cols, like->dtype, *like)) continue;
    check_result(element_name("results", g).c_str(), result, like->rows, like->cols, p.rows);
  }
  if (like == nullptr || like->rows * like->cols == 0) return {kMostRows, 0, 0};  // nothing to compute
  const int64_t n = like->rows, k = like->cols, panels = p.rows.rows / n;
  if (p.rows.cols != kPanelRows || p.rows.rows % n != 0) {
    bad_argument(kOp, "rows", shape_of(p.rows), concat("panels of ", n, " rows and ", kPanelRows, " columns each"));
  }
  check_e4m3("depth_rows", p.depth_rows, panels * k, kPanelRows, p.rows);
  if (p.depth_rows.rows > INT32_MAX) {
    bad_argument(kOp, "depth_rows", shape_of(p.depth_rows), "fewer than 2^31 rows");
  }
  check_panels(p, "rows_scale_inv", p.rows_scale_inv, panels, n);
  check_panels(p, "depth_rows_scale_inv", p.depth_rows_scale_inv, panels, k);
  return {std::min<int64_t>(panels * kPanelRows, kMostRows), n, k, panels};
}

}  // namespace

ProblemShape check_fp8(const te_grouped_gemm_problem& p) {
  if (p.scaling != TE_SCALING_TENSOR && p.scaling != TE_SCALING_BLOCK_1D) {
    bad_argument(kOp, "scaling", concat(int(p.scaling), " (", scaling_name(p.scaling), ")"),
                 "TE_SCALING_TENSOR or TE_SCALING_BLOCK_1D, that of rows");
  }
  if (p.product != TE_GROUPED_WGRAD) {
    check_presence(p, "depth_rows_scale_inv", false, p.depth_rows_scale_inv.data != nullptr);
    return check_rows(p);
  }
  check_presence(p, "weights_scale_inv", false, p.weights_scale_inv != nullptr);
  return check_weight_gradients(p);
}

void refuse_fp8_arguments(const te_grouped_gemm_problem& p) {
  const auto refuse = [](const char* argument, bool given) {
    if (given) bad_argument(kOp, argument, "given", "NULL or 0 without FP8 operands");
  };
  refuse("scaling", p.scaling != TE_SCALING_TENSOR);
  refuse("rows_scale_inv", p.rows_scale_inv.data != nullptr);
  refuse("depth_rows_scale_inv", p.depth_rows_scale_inv.data != nullptr);
  refuse("weights_scale_inv", p.weights_scale_inv != nullptr);
}

namespace cpu {

namespace {

// The scale of one group.
te_tensor scale_of(const te_tensor& scales, int32_t g) {
  return {static_cast<float*>(scales.data) + g, 1, 1, 1, TE_FLOAT32, scales.device};
}

void run_rows(const te_grouped_gemm_problem& p, int32_t g) {
  const int32_t first = p.offsets[g], last = p.offsets[g + 1];
  if (first == last || p.result.cols == 0) return;
  te_gemm_problem one{};
  one.layout = TE_GEMM_TN;
  one.a = p.weights[g];
  one.b = rows_of(p.rows, first, last);
  one.d = rows_of(p.result, first, last);
  one.a_scale_inv = p.weights_scale_inv[g];
  one.b_scaling = p.scaling;
  if (p.scaling == TE_SCALING_TENSOR) {
    one.b_scale_inv = scale_of(p.rows_scale_inv, g);
  } else {
    one.a_scaling = TE_SCALING_BLOCK_2D;
    one.b_scale_inv = p.rows_scale_inv;
    if (one.b.cols > 0) one.b_scale_inv.data = row_ptr<float>(p.rows_scale_inv, 0) + first;
  }
  if (p.biases != nullptr) {
    one.epilogue = TE_GEMM_BIAS;
    one.bias = p.biases[g];
  }
  gemm::cpu::run(one, gemm_shape(one));
}

// The panels of `rows` rows, joined to one matrix [outer, rows].
class Joined {
 public:
  Joined(const te_tensor& panels, int64_t first, int64_t outer, int64_t rows) {
    const int64_t count = (rows + kPanelRows - 1) / kPanelRows, pitch = count * kPanelRows;
    bytes_.resize(size_t(outer * pitch));
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t o = 0; o < outer; ++o) {
        std::memcpy(bytes_.data() + o * pitch + i * kPanelRows, row_ptr<uint8_t>(panels, (first + i) * outer + o),
                    kPanelRows);
      }
    }
    tensor = {bytes_.data(), outer, rows, pitch, panels.dtype, panels.device};
  }
  Joined(const Joined&) = delete;
  Joined& operator=(const Joined&) = delete;

  te_tensor tensor;

 private:
  std::vector<uint8_t> bytes_;
};

void run_weight_gradient(const te_grouped_gemm_problem& p, const ProblemShape& shape, int32_t g, int64_t panel) {
  const int64_t rows = p.offsets[g + 1] - p.offsets[g], end = panel + panels_of(rows);
  te_gemm_problem one{};
  one.layout = TE_GEMM_TN;
  one.d = p.results[g];
  one.accumulate = p.accumulate != nullptr && p.accumulate[g] != 0;
  if (one.d.data == nullptr || (one.accumulate != 0 && rows == 0)) return;
  const Joined x(p.depth_rows, panel, shape.k, rows), dy(p.rows, panel, shape.n, rows);
  one.a = x.tensor;
  one.b = dy.tensor;
  one.a_scaling = one.b_scaling = p.scaling;
  const bool blocks = p.scaling == TE_SCALING_BLOCK_1D;
  one.a_scale_inv = blocks ? rows_of(p.depth_rows_scale_inv, panel, end) : scale_of(p.depth_rows_scale_inv, g);
  one.b_scale_inv = blocks ? rows_of(p.rows_scale_inv, panel, end) : scale_of(p.rows_scale_inv, g);
  gemm::cpu::run(one, gemm_shape(one));
}

}  // namespace

void run_fp8(const te_grouped_gemm_problem& p, const ProblemShape& shape) {
  if (p.product != TE_GROUPED_WGRAD) {
    for (int32_t g = 0; g < p.groups; ++g) run_rows(p, g);
    return;
  }
  if (shape.n * shape.k == 0) return;
  std::vector<int64_t> before(1, 0);
  for (int32_t g = 0; g < p.groups; ++g) before.push_back(before.back() + panels_of(p.offsets[g + 1] - p.offsets[g]));
  if (before.back() > shape.panels) {
    bad_argument(kOp, "offsets", concat("of ", before.back(), " panels"),
                 concat("at most the ", shape.panels, " panels of rows"));
  }
  for (int32_t g = 0; g < p.groups; ++g) run_weight_gradient(p, shape, g, before[size_t(g)]);
}

}  // namespace cpu

}  // namespace te::gemm::grouped
