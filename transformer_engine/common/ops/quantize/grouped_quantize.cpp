// grouped quantize, contract and CPU path (the specification): the loop of te_quantize over each panel of each group.
#include "transformer_engine/grouped_quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/device.h"
#include "ops/quantize/fp8.h"
#include "ops/quantize/grouped_walk.h"
#include "ops/quantize/maxima.h"
#include "ops/quantize/store.h"
#include "transformer_engine/quantize.h"
#include "transformer_engine/scaling.h"

namespace te::quantize::grouped {

namespace cuda {
void run(const te_grouped_quantize_problem& problem, te_stream stream);
void count_panels(const int32_t* offsets, int32_t groups, int32_t* panels, te_stream stream);
}  // namespace cuda

namespace {

constexpr const char* kOp = "te_grouped_quantize";
constexpr te_tensor kAbsent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};

int64_t rows_of_all(const te_grouped_quantize_problem& p) { return is_absent(p.row_map) ? p.x.rows : p.row_map.cols; }

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// ---- contract ----

void check_data(const char* argument, const te_tensor& t, const te_tensor& x) {
  if (t.dtype != TE_FLOAT8_E4M3 && t.dtype != TE_FLOAT8_E5M2) {
    bad_argument(kOp, argument, concat("of dtype ", te_dtype_name(t.dtype)), "float8_e4m3 or float8_e5m2");
  }
  if (t.device != x.device) bad_argument(kOp, argument, concat("on ", device_of(t)), device_of(x));
  if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) {
    bad_argument(kOp, argument, "at an odd address", "data on a multiple of 16 bytes");
  }
}

void check_rowwise(const te_grouped_quantize_problem& p) {
  const int64_t rows = rows_of_all(p), cols = p.x.cols;
  check_shape(kOp, "rowwise", p.rowwise, rows, cols);
  check_data("rowwise", p.rowwise, p.x);
  if (p.rowwise.row_pitch % 16 != 0) {
    bad_argument(kOp, "rowwise", concat("of row pitch ", p.rowwise.row_pitch), "a multiple of 16 bytes");
  }
  const auto [down, along] = scale_shape(TE_SCALING_BLOCK_1D, rows, cols);
  const bool tensor = p.scaling == TE_SCALING_TENSOR;
  check_floats(kOp, "rowwise_scale_inv", p.rowwise_scale_inv, tensor ? 1 : down, tensor ? p.groups : along, p.x.device);
}

void check_panels(const te_grouped_quantize_problem& p) {
  const int64_t rows = rows_of_all(p), cols = p.x.cols, most = most_panels(rows, p.groups);
  check_shape(kOp, "panels", p.panels, p.panels.rows, kPanelRows);
  const int64_t panels = cols > 0 ? p.panels.rows / cols : most;
  if (panels * cols != p.panels.rows || panels < most) {
    bad_argument(kOp, "panels", shape_of(p.panels),
                 concat(cols, " rows a panel and ", most, " panels or more, which ", p.groups, " groups of ", rows,
                        " rows may need"));
  }
  if (p.panels.row_pitch != kPanelRows) {
    bad_argument(kOp, "panels", concat("of row pitch ", p.panels.row_pitch), kPanelRows);
  }
  check_data("panels", p.panels, p.x);
  const bool tensor = p.scaling == TE_SCALING_TENSOR;
  const int64_t down = cols > 0 ? panels : p.panels_scale_inv.rows;  // without columns P is not known
  check_floats(kOp, "panels_scale_inv", p.panels_scale_inv, tensor ? 1 : down, tensor ? p.groups : up(cols, 4),
               p.x.device);
}

void check_scales(const te_grouped_quantize_problem& p) {
  const bool given = p.scales != nullptr, parts = !is_absent(p.amax_parts);
  if (p.scaling != TE_SCALING_TENSOR) {
    const auto refuse = [](const char* argument, bool given) {
      if (given) bad_argument(kOp, argument, "given", "NULL: block scaling makes its own scales");
    };
    refuse("scales", given);
    refuse("amax_parts", parts);
    refuse("amaxes", p.amaxes != nullptr);
    return;
  }
  if (given == parts) {
    bad_argument(kOp, "scales", given ? "given beside amax_parts" : "NULL, as is amax_parts",
                 "one of them: scales for delayed scaling, amax_parts for current scaling");
  }
  if (parts) check_floats(kOp, "amax_parts", p.amax_parts, 1, TE_GROUPED_QUANTIZE_PARTS + p.groups, p.x.device);
  for (int32_t g = 0; given && g < p.groups; ++g) {
    if (p.scales[g] == nullptr) bad_argument(kOp, element_name("scales", g).c_str(), "NULL", "a float on x's device");
  }
}

void check_offsets(const te_grouped_quantize_problem& p) {
  const auto refuse = [&](int32_t g, const char* wanted) {
    bad_argument(kOp, element_name("offsets", g).c_str(), p.offsets[g], wanted);
  };
  if (p.offsets[0] != 0) refuse(0, "0");
  for (int32_t g = 0; g < p.groups; ++g) {
    if (p.offsets[g + 1] < p.offsets[g]) refuse(g + 1, "no less than the offset before it");
  }
  if (p.offsets[p.groups] > rows_of_all(p)) {
    refuse(p.groups, "no more than the rows there are (te_grouped_offsets cuts them)");
  }
}

void check_row_map(const te_grouped_quantize_problem& p) {
  const te_tensor& map = p.row_map;
  if (is_absent(map)) return;
  check_tensor(kOp, "row_map", map);
  if (map.dtype != TE_INT32) bad_argument(kOp, "row_map", concat("of dtype ", te_dtype_name(map.dtype)), "int32");
  if (map.device != p.x.device) bad_argument(kOp, "row_map", concat("on ", device_of(map)), device_of(p.x));
  if (map.rows != 1) bad_argument(kOp, "row_map", shape_of(map), "one row, with the row of x for each row");
  if (map.cols > INT32_MAX) bad_argument(kOp, "row_map", shape_of(map), "fewer than 2^31 rows");
}

void check(const te_grouped_quantize_problem& p) {
  check_tensor(kOp, "x", p.x);
  dispatch_float(p.x.dtype, kOp, "x", [](auto) {});
  check_row_map(p);
  if (p.x.rows > INT32_MAX) bad_argument(kOp, "x", shape_of(p.x), "fewer than 2^31 rows");
  if (p.groups < 1 || p.groups > kMostGroups) {
    bad_argument(kOp, "groups", p.groups, concat("1 to ", kMostGroups, "; more groups take more calls"));
  }
  if (p.offsets == nullptr) bad_argument(kOp, "offsets", "NULL", "int32 [groups + 1] on x's device");
  if (p.scaling != TE_SCALING_TENSOR && p.scaling != TE_SCALING_BLOCK_1D) {
    bad_argument(kOp, "scaling", int(p.scaling), "TE_SCALING_TENSOR or TE_SCALING_BLOCK_1D");
  }
  if (!(p.amax_epsilon >= 0.f && std::isfinite(p.amax_epsilon))) {
    bad_argument(kOp, "amax_epsilon", p.amax_epsilon, "a finite number >= 0");
  }
  const bool rowwise = !is_absent(p.rowwise), panels = !is_absent(p.panels);
  if (!rowwise && !panels && rows_of_all(p) * p.x.cols != 0) {
    bad_argument(kOp, "rowwise", "absent, as is panels", "one of them, or both");
  }
  const auto refuse = [](const char* argument, bool is_present, bool given) {
    if (!is_present && given) bad_argument(kOp, argument, "given", "NULL without the data that it belongs to");
  };
  refuse("rowwise_scale_inv", rowwise, p.rowwise_scale_inv.data != nullptr);
  refuse("panels_scale_inv", panels, p.panels_scale_inv.data != nullptr);
  if (rowwise) check_rowwise(p);
  if (panels) check_panels(p);
  if (rowwise && panels && p.rowwise.dtype != p.panels.dtype) {
    bad_argument(kOp, "panels", concat("of dtype ", te_dtype_name(p.panels.dtype)), te_dtype_name(p.rowwise.dtype));
  }
  check_scales(p);
  if (p.x.device == TE_DEVICE_CPU) check_offsets(p);
}

}  // namespace

// ---- the CPU path ----

namespace cpu {

namespace {

te_tensor one_float(const float* x) { return {const_cast<float*>(x), 1, 1, 1, TE_FLOAT32, TE_DEVICE_CPU}; }

// Element `at` of the scales of TENSOR.
te_tensor scale_at(const te_tensor& scales, int32_t at) {
  return scales.data == nullptr ? kAbsent : one_float(row_ptr<const float>(scales, 0) + at);
}

// Rows [first, first + rows) of x, which are of group g: those of its panel number `panel`, or none.
te_quantized part_of(const te_grouped_quantize_problem& p, int32_t g, int64_t panel, int64_t first, int64_t rows) {
  te_quantized out{p.scaling, rows_of(p.rowwise, first, first + rows), p.panels, p.rowwise_scale_inv,
                   p.panels_scale_inv};
  if (out.columnwise.data != nullptr) {
    out.columnwise = rows_of(p.panels, panel * p.x.cols, (panel + 1) * p.x.cols);
    out.columnwise.cols = rows;
  }
  if (is_absent(p.panels)) out.columnwise.dtype = p.rowwise.dtype;  // which is read if rowwise is absent
  if (p.scaling == TE_SCALING_TENSOR) {
    out.rowwise_scale_inv = scale_at(p.rowwise_scale_inv, g);
    out.columnwise_scale_inv = scale_at(p.panels_scale_inv, g);
    return out;
  }
  if (out.rowwise_scale_inv.data != nullptr) {
    out.rowwise_scale_inv.data = row_ptr<float>(p.rowwise_scale_inv, 0) + first;
    out.rowwise_scale_inv.cols = rows;  // no padding: the next group follows
  }
  out.columnwise_scale_inv = rows_of(p.panels_scale_inv, panel, panel + (p.panels_scale_inv.data == nullptr ? 0 : 1));
  return out;
}

// Returns the group's number of panels.
int64_t run_group(const te_grouped_quantize_problem& p, int32_t g, int64_t panel) {
  const int64_t first = p.offsets[g], last = p.offsets[g + 1];
  te_quantize_plan plan{kAbsent, kAbsent, kAbsent, kAbsent, kAbsent, p.pow_2_scales, p.amax_epsilon};
  float parts[TE_QUANTIZE_PARTS];
  if (p.scales != nullptr) plan.scale = one_float(p.scales[g]);
  if (!is_absent(p.amax_parts)) {
    plan.amax_parts = {parts, 1, TE_QUANTIZE_PARTS, TE_QUANTIZE_PARTS, TE_FLOAT32, TE_DEVICE_CPU};
    quantize::cpu::amax(rows_of(p.x, first, last), plan.amax_parts, kAbsent);
  }
  if (p.amaxes != nullptr && p.amaxes[g] != nullptr) plan.amax = one_float(p.amaxes[g]);
  int64_t count = 0;
  for (int64_t row = first; row < last; row += kPanelRows) {
    const int64_t rows = std::min<int64_t>(kPanelRows, last - row);
    quantize::cpu::quantize(plan, rows_of(p.x, row, row + rows), part_of(p, g, panel + count++, row, rows));
  }
  if (count > 0 || p.scaling != TE_SCALING_TENSOR) return count;
  te_quantized scale = part_of(p, g, 0, first, 0);  // of no rows: the scale alone
  scale.rowwise.data = scale.columnwise.data = nullptr;
  scale.rowwise.row_pitch = scale.columnwise.row_pitch = 0;
  quantize::cpu::quantize(plan, rows_of(p.x, first, first), scale);
  return count;
}

// The rows of x that the map names, in `memory`.
te_tensor gathered(const te_grouped_quantize_problem& p, std::vector<char>& memory) {
  const size_t bytes = size_t(p.x.cols) * te_dtype_bytes(p.x.dtype);
  const auto* map = row_ptr<const int32_t>(p.row_map, 0);
  memory.assign(size_t(p.row_map.cols) * bytes, 0);
  for (int64_t row = 0; row < p.row_map.cols && bytes > 0; ++row) {
    if (map[row] < 0 || map[row] >= p.x.rows) continue;
    std::memcpy(memory.data() + size_t(row) * bytes, rows_of(p.x, map[row], map[row] + 1).data, bytes);
  }
  return {memory.data(), p.row_map.cols, p.x.cols, p.x.cols, p.x.dtype, TE_DEVICE_CPU};
}

void run(const te_grouped_quantize_problem& p) {
  if (!is_absent(p.row_map)) {
    std::vector<char> memory;
    te_grouped_quantize_problem plain = p;
    plain.x = gathered(p, memory);
    plain.row_map = kAbsent;
    return run(plain);
  }
  int64_t panel = 0;
  for (int32_t g = 0; g < p.groups; ++g) panel += run_group(p, g, panel);
  const te_tensor& scales = p.rowwise_scale_inv;
  for (int64_t block = 0; p.scaling == TE_SCALING_BLOCK_1D && block < scales.rows; ++block) {
    std::fill(row_ptr<float>(scales, block) + p.x.rows, row_ptr<float>(scales, block) + scales.cols, 0.f);
  }
}

}  // namespace

void count_panels(const int32_t* offsets, int32_t groups, int32_t* panels) {
  uint32_t sum = 0;
  for (int32_t g = 0; g < groups; ++g) sum += panels_between(offsets, g);
  *panels = int32_t(sum);
}

}  // namespace cpu

}  // namespace te::quantize::grouped

extern "C" {

te_status te_grouped_quantize(const te_grouped_quantize_problem* problem, te_stream stream) {
  return te::c_guard([&] {
    using namespace te::quantize::grouped;
    check(*problem);
    TE_ON_DEVICE_OF(kOp, problem->x, cpu::run(*problem), cuda::run(*problem, stream));
  });
}

te_status te_grouped_panels(const int32_t* offsets, int32_t groups, int32_t device, int32_t* panels, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    using namespace te::quantize::grouped;
    const char* op = "te_grouped_panels";
    if (groups < 1) bad_argument(op, "groups", groups, ">= 1");
    if (offsets == nullptr) bad_argument(op, "offsets", "NULL", "int32 [groups + 1] on `device`");
    if (panels == nullptr) bad_argument(op, "panels", "NULL", "int32 [1] on `device`");
    const te_tensor where{nullptr, 0, 0, 0, TE_INT32, device};
    TE_ON_DEVICE_OF(op, where, cpu::count_panels(offsets, groups, panels),
                    cuda::count_panels(offsets, groups, panels, stream));
  });
}

}  // extern "C"
