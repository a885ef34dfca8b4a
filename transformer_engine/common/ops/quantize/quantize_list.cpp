// quantize list, contract and CPU path (the specification): te_quantize of one matrix after the other.
#include "transformer_engine/quantize_list.h"

#include <cmath>

#include "core/device.h"
#include "ops/quantize/fp8.h"
#include "ops/quantize/store.h"
#include "transformer_engine/quantize.h"

namespace te::quantize::list {

namespace cuda {
void run(const te_quantize_list_problem& list, te_stream stream);
}  // namespace cuda

namespace {

constexpr const char* kOp = "te_quantize_list";
constexpr te_tensor kAbsent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};

te_tensor one_float(const float* x, int32_t device) {
  return x == nullptr ? kAbsent : te_tensor{const_cast<float*>(x), 1, 1, 1, TE_FLOAT32, device};
}

// The plan of te_quantize for matrix i, without the source of its scale.
te_quantize_plan plan_of(const te_quantize_list_problem& p, int32_t i) {
  te_quantize_plan plan{kAbsent, kAbsent, kAbsent, kAbsent, p.noop, p.pow_2_scales, p.amax_epsilon};
  const int32_t device = p.xs[i].device;
  if (p.scales != nullptr) plan.scale = one_float(p.scales[i], device);
  if (p.amaxes != nullptr) plan.amax = one_float(p.amaxes[i], device);
  return plan;
}

// ---- contract ----

void check_scales(const te_quantize_list_problem& p) {
  const bool given = p.scales != nullptr, parts = !is_absent(p.amax_parts);
  const bool tensor = p.outs[0].scaling == TE_SCALING_TENSOR;
  const auto refuse = [&](const char* argument, bool given) {
    if (given && !tensor) bad_argument(kOp, argument, "given", "NULL: block scaling makes its own scales");
  };
  refuse("scales", given);
  refuse("amax_parts", parts);
  refuse("amaxes", p.amaxes != nullptr);
  if (!tensor) return;
  if (given == parts) {
    bad_argument(kOp, "scales", given ? "given beside amax_parts" : "NULL, as is amax_parts",
                 "one of them: scales for delayed scaling, amax_parts for current scaling");
  }
  for (int32_t i = 0; given && i < p.count; ++i) {
    if (p.scales[i] == nullptr) bad_argument(kOp, element_name("scales", i).c_str(), "NULL", "a float on xs' device");
  }
  if (!parts) return;
  te_tensor like = p.xs[0];
  like.dtype = TE_FLOAT32;
  check_as(kOp, "amax_parts", p.amax_parts, p.count, TE_QUANTIZE_LIST_PARTS, like);
  if (p.amax_parts.row_pitch != TE_QUANTIZE_LIST_PARTS && p.count > 1) {
    bad_argument(kOp, "amax_parts", concat("of row pitch ", p.amax_parts.row_pitch), TE_QUANTIZE_LIST_PARTS);
  }
}

bool is_uniform(const te_tensor& a, const te_tensor& b) {
  const bool same_presence = (a.data == nullptr) == (b.data == nullptr);
  return same_presence && a.rows == b.rows && a.cols == b.cols && a.row_pitch == b.row_pitch && a.dtype == b.dtype &&
         a.device == b.device;
}

[[noreturn]] void refuse_unlike(const std::string& argument, const te_tensor& t, const te_tensor& first) {
  const auto words = [](const te_tensor& one) {
    const char* dtype = te_dtype_name(one.dtype);
    return concat(one.data == nullptr ? "without data, " : "", shape_of(one), " of row pitch ", one.row_pitch, ", ",
                  dtype != nullptr ? dtype : "of no dtype", ", on ", device_of(one));
  };
  bad_argument(kOp, argument.c_str(), words(t), concat("like the first tensor: ", words(first)));
}

void check_starts(int32_t i, const char* part, const te_tensor& data) {
  if (reinterpret_cast<uintptr_t>(data.data) % 16 != 0) {
    bad_argument(kOp, element_name("outs", i, part).c_str(), "at an odd address", "data on a multiple of 16 bytes");
  }
}

// For a matrix after the first, whose contract has been checked. There may be hundreds.
void check_next(const te_quantize_list_problem& p, int32_t i) {
  const te_quantized &out = p.outs[i], &first = p.outs[0];
  if (!is_uniform(p.xs[i], p.xs[0])) refuse_unlike(element_name("xs", i), p.xs[i], p.xs[0]);
  if (out.scaling != first.scaling) {
    bad_argument(kOp, element_name("outs", i, ".scaling").c_str(), int(out.scaling), int(first.scaling));
  }
  const auto part = [&](const char* name, const te_tensor& t, const te_tensor& of_first) {
    if (!is_uniform(t, of_first)) refuse_unlike(element_name("outs", i, name), t, of_first);
  };
  part(".rowwise", out.rowwise, first.rowwise);
  part(".columnwise", out.columnwise, first.columnwise);
  part(".rowwise_scale_inv", out.rowwise_scale_inv, first.rowwise_scale_inv);
  part(".columnwise_scale_inv", out.columnwise_scale_inv, first.columnwise_scale_inv);
  check_starts(i, ".rowwise", out.rowwise);
  check_starts(i, ".columnwise", out.columnwise);
}

void check(const te_quantize_list_problem& p) {
  if (p.count < 0) bad_argument(kOp, "count", p.count, "a number >= 0");
  if (p.count == 0) return;
  if (p.xs == nullptr) bad_argument(kOp, "xs", "NULL", concat(p.count, " matrices"));
  if (p.outs == nullptr) bad_argument(kOp, "outs", "NULL", concat(p.count, " quantized matrices"));
  check_tensor(kOp, "xs[0]", p.xs[0]);
  dispatch_float(p.xs[0].dtype, kOp, "xs[0]", [](auto) {});
  check_scales(p);
  te_quantize_plan plan = plan_of(p, 0);
  if (!is_absent(p.amax_parts)) {
    plan.amax_parts = p.amax_parts;
    plan.amax_parts.rows = 1;
  }
  check_quantization(kOp, plan, p.xs[0].rows, p.xs[0].cols, p.xs[0], p.outs[0], "outs[0]");
  for (int32_t i = 1; i < p.count; ++i) check_next(p, i);
}

}  // namespace

namespace cpu {

namespace {

void run(const te_quantize_list_problem& p) {
  float parts[TE_QUANTIZE_PARTS];
  for (int32_t i = 0; i < p.count; ++i) {
    te_quantize_plan plan = plan_of(p, i);
    if (!is_absent(p.amax_parts)) {
      plan.amax_parts = {parts, 1, TE_QUANTIZE_PARTS, TE_QUANTIZE_PARTS, TE_FLOAT32, TE_DEVICE_CPU};
      quantize::cpu::amax(p.xs[i], plan.amax_parts, p.noop);
    }
    quantize::cpu::quantize(plan, p.xs[i], p.outs[i]);
  }
}

}  // namespace

}  // namespace cpu

}  // namespace te::quantize::list

extern "C" {

te_status te_quantize_list(const te_quantize_list_problem* problem, te_stream stream) {
  return te::c_guard([&] {
    using namespace te::quantize::list;
    check(*problem);
    if (problem->count == 0) return;
    TE_ON_DEVICE_OF(kOp, problem->xs[0], cpu::run(*problem), cuda::run(*problem, stream));
  });
}

}  // extern "C"
