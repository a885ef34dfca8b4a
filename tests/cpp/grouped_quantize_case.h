// A grouped quantization in one device's memory, with guards around every output, and what te_quantize on the CPU makes
// of each group alone. For the suite of grouped quantize.
#pragma once

#include <algorithm>
#include <memory>

#include "quantize_case.h"
#include "transformer_engine/grouped_quantize.h"

namespace te::testing {

// A poisoned matrix with a poisoned row before and after it, wider than its tensor, and its expected contents.
template <class T>
struct Guarded {
  Buffer<T> buffer;
  int64_t rows, cols, pitch;
  std::vector<T> want;

  Guarded(int32_t device, int64_t rows, int64_t cols, int64_t pitch)
      : buffer(device, rows + 2, pitch), rows(rows), cols(cols), pitch(pitch), want(size_t((rows + 2) * pitch)) {
    std::memset(static_cast<void*>(want.data()), kPoison, want.size() * sizeof(T));
  }
  te_tensor tensor(te_dtype dtype = kDtype<T>) const {
    te_tensor t = buffer.tensor(dtype);
    return {buffer.data() + pitch, rows, cols, pitch, t.dtype, t.device};
  }
  T& at(int64_t row, int64_t col) { return want[size_t((row + 1) * pitch + col)]; }
  void expect(const std::string& what) const {
    const std::vector<T> got = buffer.read();
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(T)), 0)
          << what << " at " << int64_t(i) / pitch - 1 << ", " << int64_t(i) % pitch << ": " << double(got[i])
          << ", wanted " << double(want[i]);
    }
    EXPECT_TRUE(buffer.padding_untouched()) << what;
  }
};

enum class Mode { kBlocks, kCurrent, kDelayed };

struct GroupedQuantizeShape {
  std::vector<int32_t> splits;
  int64_t tail, cols;
  int64_t extra_pitch = 0, extra_out = 0, spare_panels = 0;

  int64_t live() const {
    int64_t sum = 0;
    for (const int32_t n : splits) sum += n;
    return sum;
  }
};

struct GroupedQuantizeOptions {
  Mode mode;
  bool e5m2, pow_2;
  float epsilon;
  bool rowwise = true, panels = true;
};

template <class T>
class GroupedQuantizeCase {
 public:
  GroupedQuantizeCase(int32_t device, const GroupedQuantizeShape& s, const GroupedQuantizeOptions& o, unsigned seed)
      : shape(s),
        options(o),
        groups(int32_t(s.splits.size())),
        rows(s.live() + s.tail),
        x(device, rows, s.cols, s.cols + s.extra_pitch),
        offsets(device, 1, groups + 1),
        row_data(device, rows, up(s.cols, 16) + s.extra_out, up(s.cols, 16) + s.extra_out),
        panel_data(device, panels() * s.cols, kBlock, kBlock),
        row_scales(device, blocks() ? blocks_of(s.cols) : 1, blocks() ? up(rows, 4) : groups,
                   (blocks() ? up(rows, 4) : groups) + 3),
        panel_scales(device, blocks() ? panels() : 1, blocks() ? up(s.cols, 4) : groups,
                     (blocks() ? up(s.cols, 4) : groups) + 4),
        scales(device, 1, 2 * groups),
        amaxes(device, 1, 3 * groups),
        parts(device, 1, TE_GROUPED_QUANTIZE_PARTS + groups) {
    fill(seed);
    expect_groups();
    problem = te_grouped_quantize_problem{};
    problem.x = x.tensor();
    problem.groups = groups;
    problem.offsets = offsets.data();
    problem.scaling = scaling();
    const te_dtype dtype = o.e5m2 ? TE_FLOAT8_E5M2 : TE_FLOAT8_E4M3;
    if (o.rowwise) {
      problem.rowwise = row_data.tensor(dtype);
      problem.rowwise.cols = s.cols;
      problem.rowwise_scale_inv = row_scales.tensor();
    }
    if (o.panels) {
      problem.panels = panel_data.tensor(dtype);
      problem.panels_scale_inv = panel_scales.tensor();
    }
    problem.pow_2_scales = o.pow_2;
    problem.amax_epsilon = o.epsilon;
    for (int32_t g = 0; g < groups; ++g) {
      scale_pointers.push_back(scales.data() + 2 * g);
      amax_pointers.push_back(amaxes.data() + 3 * g);
    }
    if (o.mode == Mode::kCurrent) problem.amax_parts = parts.tensor();
    if (o.mode == Mode::kDelayed) problem.scales = scale_pointers.data();
    if (!blocks()) problem.amaxes = amax_pointers.data();
  }

  void expect(const std::string& what) const {
    row_data.expect(what + " rowwise");
    panel_data.expect(what + " panels");
    row_scales.expect(what + " rowwise_scale_inv");
    panel_scales.expect(what + " panels_scale_inv");
    EXPECT_TRUE(parts.padding_untouched()) << what;
    const std::vector<float> got = amaxes.read();
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], want_amaxes[i]) << what << " amaxes " << i;
  }
  void poison() {
    for (Buffer<uint8_t>* b : {&row_data.buffer, &panel_data.buffer}) b->poison();
    for (Buffer<float>* b : {&row_scales.buffer, &panel_scales.buffer, &parts}) b->poison();
    amaxes.fill(start_amaxes);
  }

  bool blocks() const { return options.mode == Mode::kBlocks; }
  te_scaling scaling() const { return blocks() ? TE_SCALING_BLOCK_1D : TE_SCALING_TENSOR; }
  static int64_t blocks_of(int64_t n) { return up(n, kBlock) / kBlock; }
  int64_t panels() const {
    const int64_t m = std::min<int64_t>(groups, rows);
    return (rows - m) / kBlock + m + shape.spare_panels;
  }

  GroupedQuantizeShape shape;
  GroupedQuantizeOptions options;
  int32_t groups;
  int64_t rows;
  Buffer<T> x;
  Buffer<int32_t> offsets;
  Guarded<uint8_t> row_data, panel_data;
  Guarded<float> row_scales, panel_scales;
  Buffer<float> scales, amaxes, parts;
  std::vector<float> start_scales, start_amaxes, want_amaxes;
  std::vector<const float*> scale_pointers;
  std::vector<float*> amax_pointers;
  te_grouped_quantize_problem problem;

 private:
  // Group 1 has Inf, the tail nothing else; NaN is everywhere. Groups' magnitudes differ.
  void fill(unsigned seed) {
    std::vector<int32_t> all(1, 0);
    for (const int32_t n : shape.splits) all.push_back(all.back() + n);
    offsets.fill(all);
    values = draw<T>(rows * shape.cols, seed);
    for (int64_t i = 0; i < rows * shape.cols; ++i) {
      const auto g = std::upper_bound(all.begin(), all.end(), int32_t(i / shape.cols)) - all.begin() - 1;
      float v = std::ldexp(to_float(values[size_t(i)]), int(g % 5) - 2);
      if (g == groups || (g == 1 && i % 37 == 5)) v = i % 2 == 0 ? INFINITY : -INFINITY;
      values[size_t(i)] = from_float<T>(v);
    }
    x.fill(values);
    for (int32_t g = 0; g < groups; ++g) {
      for (const float v : {1.5f + float(g % 7), NAN}) start_scales.push_back(v);
      for (const float v : {g % 3 == 0 ? 1e6f : 0.25f, 5.f, 7.f}) start_amaxes.push_back(v);
    }
    scales.fill(start_scales);
    want_amaxes = start_amaxes;
    amaxes.fill(start_amaxes);
  }

  void expect_groups() {
    int64_t first = 0, panel = 0;
    for (int32_t g = 0; g < groups; ++g) {
      expect_group(g, first, panel);
      if (::testing::Test::HasFatalFailure()) return;
      first += shape.splits[size_t(g)];
      panel += blocks_of(shape.splits[size_t(g)]);
    }
    if (!blocks() || !options.rowwise) return;
    for (int64_t b = 0; b < blocks_of(shape.cols); ++b) {
      for (int64_t r = rows; r < up(rows, 4); ++r) row_scales.at(b, r) = 0.f;
    }
  }

  // By te_quantize of the group's rows in memory of their own.
  void expect_group(int32_t g, int64_t first, int64_t panel) {
    constexpr int32_t cpu = TE_DEVICE_CPU;
    const int64_t n = shape.splits[size_t(g)], k = shape.cols, row_pitch = row_data.pitch;
    const te_dtype dtype = options.e5m2 ? TE_FLOAT8_E5M2 : TE_FLOAT8_E4M3;
    Buffer<T> part(cpu, n, k);
    part.fill({values.begin() + first * k, values.begin() + (first + n) * k});
    Buffer<uint8_t> row(cpu, n, row_pitch), col(cpu, k, up(n, kBlock));
    Buffer<float> row_scale(cpu, blocks() ? blocks_of(k) : 1, blocks() ? up(n, 4) : 1);
    Buffer<float> col_scale(cpu, blocks() ? blocks_of(n) : 1, blocks() ? up(k, 4) : 1);
    Buffer<float> maxima(cpu, 1, TE_QUANTIZE_PARTS), scale(cpu, 1, 1), amax(cpu, 1, 1);
    scale.fill({start_scales[size_t(2 * g)]});
    amax.fill({start_amaxes[size_t(3 * g)]});
    te_quantize_plan plan{kAbsent, kAbsent, kAbsent, kAbsent, kAbsent, options.pow_2, options.epsilon};
    if (options.mode == Mode::kDelayed) plan.scale = scale.tensor();
    if (options.mode == Mode::kCurrent) {
      TE_ASSERT_OK(te_quantize_amax(part.tensor(), maxima.tensor(), kAbsent, nullptr));
      plan.amax_parts = maxima.tensor();
    }
    if (!blocks()) plan.amax = amax.tensor();
    te_tensor row_tensor = row.tensor(dtype), col_tensor = col.tensor(dtype);
    row_tensor.cols = k;
    col_tensor.cols = n;
    const te_quantized out{scaling(), row_tensor, col_tensor, row_scale.tensor(), col_scale.tensor()};
    TE_ASSERT_OK(te_quantize(&plan, part.tensor(), &out, nullptr));
    want_amaxes[size_t(3 * g)] = blocks() ? want_amaxes[size_t(3 * g)] : amax.read()[0];
    take(g, first, panel, n, row.read(), col.read(), row_scale.read(), col_scale.read());
  }

  void take(int32_t g, int64_t first, int64_t panel, int64_t n, const std::vector<uint8_t>& row,
            const std::vector<uint8_t>& col, const std::vector<float>& row_scale, const std::vector<float>& col_scale) {
    const int64_t k = shape.cols, width = up(n, kBlock);
    if (options.rowwise) {
      for (int64_t i = 0; i < n * row_data.pitch; ++i) {
        row_data.at(first + i / row_data.pitch, i % row_data.pitch) = row[size_t(i)];
      }
      for (int64_t b = 0; blocks() && b < blocks_of(k); ++b) {
        for (int64_t r = 0; r < n; ++r) row_scales.at(b, first + r) = row_scale[size_t(b * up(n, 4) + r)];
      }
      if (!blocks()) row_scales.at(0, g) = row_scale[0];
    }
    if (!options.panels) return;
    for (int64_t i = 0; i < k * width; ++i) {
      const int64_t c = i / width, r = i % width;
      panel_data.at((panel + r / kBlock) * k + c, r % kBlock) = col[size_t(i)];
    }
    for (int64_t i = 0; blocks() && i < blocks_of(n) * up(k, 4); ++i) {
      panel_scales.at(panel + i / up(k, 4), i % up(k, 4)) = col_scale[size_t(i)];
    }
    if (!blocks()) panel_scales.at(0, g) = col_scale[0];
  }

  std::vector<T> values;
};

}  // namespace te::testing
