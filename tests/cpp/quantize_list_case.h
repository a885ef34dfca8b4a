// A list of matrices in one device's memory, quantized at once, with guards around every output, and what te_quantize
// on the CPU makes of each alone. For the suites of quantize list.
#pragma once

#include <memory>

#include "grouped_quantize_case.h"
#include "transformer_engine/quantize_list.h"

namespace te::testing {

enum class Scale { kDelayed, kCurrent, kBlock1d, kBlock2d };

struct ListShape {
  int32_t count;
  int64_t rows, cols;
  int64_t extra_pitch = 0, extra_out = 0;  // of x, in elements; of data, in bytes
};

struct ListOptions {
  Scale scale;
  bool e5m2 = false, pow_2 = false;
  float epsilon = 0;
  bool rowwise = true, columnwise = true;
};

inline std::string name_of(const ListShape& s, const ListOptions& o) {
  return ::testing::PrintToString(std::vector<int64_t>{s.count, s.rows, s.cols, s.extra_pitch, s.extra_out,
                                                       int64_t(o.scale), o.e5m2, o.pow_2, o.rowwise, o.columnwise});
}

template <class T>
class ListCase {
 public:
  ListCase(int32_t device, const ListShape& s, const ListOptions& o, unsigned seed)
      : shape(s),
        options(o),
        scales(device, 1, 2 * s.count),
        amaxes(device, 1, 3 * s.count),
        parts(device, s.count, TE_QUANTIZE_LIST_PARTS),
        noop(device, 1, 1) {
    for (int32_t i = 0; i < s.count; ++i) {
      for (const float v : {1.5f + float(i % 7), NAN}) start_scales.push_back(v);
      for (const float v : {i % 3 == 0 ? 1e6f : 0.25f, 5.f, 7.f}) start_amaxes.push_back(v);
    }
    scales.fill(start_scales);
    amaxes.fill(start_amaxes);
    want_amaxes = start_amaxes;
    noop.fill({0.f});
    const te_dtype dtype = o.e5m2 ? TE_FLOAT8_E5M2 : TE_FLOAT8_E4M3;
    for (int32_t i = 0; i < s.count; ++i) {
      x.push_back(std::make_unique<Buffer<T>>(device, s.rows, s.cols, s.cols + s.extra_pitch));
      x.back()->fill(values_of(i, seed));
      xs.push_back(x.back()->tensor());
      outs.push_back({scaling(), kAbsent, kAbsent, kAbsent, kAbsent});
      add(device, o.rowwise, s.rows, s.cols, dtype, row_data, row_scales, outs.back().rowwise,
          outs.back().rowwise_scale_inv);
      add(device, o.columnwise, s.cols, s.rows, dtype, col_data, col_scales, outs.back().columnwise,
          outs.back().columnwise_scale_inv);
      outs.back().columnwise.dtype = dtype;  // which is asked where there is no rowwise memory
      expect_alone(i, dtype);
      scale_pointers.push_back(scales.data() + 2 * i);
      amax_pointers.push_back(amaxes.data() + 3 * i);
    }
    problem = te_quantize_list_problem{s.count,   xs.data(), outs.data(), kAbsent, o.pow_2,
                                       o.epsilon, kAbsent,   nullptr,     nullptr};
    if (o.scale == Scale::kCurrent) problem.amax_parts = parts.tensor();
    if (o.scale == Scale::kDelayed) problem.scales = scale_pointers.data();
    if (scaling() == TE_SCALING_TENSOR) problem.amaxes = amax_pointers.data();
  }

  te_scaling scaling() const {
    return options.scale == Scale::kBlock1d   ? TE_SCALING_BLOCK_1D
           : options.scale == Scale::kBlock2d ? TE_SCALING_BLOCK_2D
                                              : TE_SCALING_TENSOR;
  }

  void expect(const std::string& what) const {
    for (int32_t i = 0; i < shape.count; ++i) {
      const std::string which = what + " matrix " + std::to_string(i);
      if (options.rowwise) row_data[size_t(i)]->expect(which + " rowwise");
      if (options.rowwise) row_scales[size_t(i)]->expect(which + " rowwise_scale_inv");
      if (options.columnwise) col_data[size_t(i)]->expect(which + " columnwise");
      if (options.columnwise) col_scales[size_t(i)]->expect(which + " columnwise_scale_inv");
      EXPECT_TRUE(x[size_t(i)]->padding_untouched()) << which;
      if (::testing::Test::HasFatalFailure()) return;
    }
    EXPECT_TRUE(parts.padding_untouched()) << what;
    const std::vector<float> got = amaxes.read();
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], want_amaxes[i]) << what << " amaxes " << i;
  }
  void expect_untouched(const std::string& what) const {
    for (const auto* list : {&row_data, &col_data}) {
      for (const auto& data : *list) {
        for (const uint8_t byte : data->buffer.read()) ASSERT_EQ(byte, kPoison) << what;
      }
    }
    for (const auto* list : {&row_scales, &col_scales}) {
      for (const auto& scale : *list) {
        for (const float v : scale->buffer.read()) ASSERT_TRUE(std::isnan(v)) << what;
      }
    }
    EXPECT_EQ(amaxes.read(), start_amaxes) << what;
  }

  ListShape shape;
  ListOptions options;
  std::vector<std::unique_ptr<Buffer<T>>> x;
  std::vector<std::unique_ptr<Guarded<uint8_t>>> row_data, col_data;
  std::vector<std::unique_ptr<Guarded<float>>> row_scales, col_scales;
  Buffer<float> scales, amaxes, parts, noop;
  std::vector<float> start_scales, start_amaxes, want_amaxes;
  std::vector<te_tensor> xs;
  std::vector<te_quantized> outs;
  std::vector<const float*> scale_pointers;
  std::vector<float*> amax_pointers;
  te_quantize_list_problem problem;

 private:
  // NaN is everywhere but in matrices 2 and 3; matrix 1 has Inf, 2 is zeros, 3 is subnormal. Magnitudes differ.
  std::vector<T> values_of(int32_t i, unsigned seed) const {
    std::vector<T> values = draw<T>(shape.rows * shape.cols, seed * 1000 + unsigned(i));
    for (size_t j = 0; j < values.size(); ++j) {
      float v = std::ldexp(to_float(values[j]), int(i % 5) - 2);
      if (i == 1 && j % 37 == 5) v = j % 2 == 0 ? INFINITY : -INFINITY;
      if (i == 2) v = j % 2 == 0 ? 0.f : -0.f;
      if (i == 3) v = std::ldexp(float(int(j % 13) - 6), std::is_same_v<T, fp16> ? -24 : -133);
      values[j] = from_float<T>(v);
    }
    return values;
  }

  void add(int32_t device, bool wanted, int64_t rows, int64_t cols, te_dtype dtype,
           std::vector<std::unique_ptr<Guarded<uint8_t>>>& all,
           std::vector<std::unique_ptr<Guarded<float>>>& all_scales, te_tensor& data, te_tensor& scale_inv) const {
    if (!wanted) return;
    const int64_t pitch = up(cols, 16) + shape.extra_out;
    all.push_back(std::make_unique<Guarded<uint8_t>>(device, rows, pitch, pitch));
    data = all.back()->tensor(dtype);
    data.cols = cols;
    const bool lying = options.scale == Scale::kBlock1d, whole = scaling() == TE_SCALING_TENSOR;
    const int64_t down = whole ? 1 : up(lying ? cols : rows, kBlock) / kBlock;
    const int64_t along = whole ? 2 : lying ? up(rows, 4) : up(up(cols, kBlock) / kBlock, 4);
    all_scales.push_back(std::make_unique<Guarded<float>>(device, down, along, along + (lying || whole ? 4 : 0)));
    scale_inv = all_scales.back()->tensor();
  }

  // The last matrix that was added, by te_quantize in memory of its own.
  void expect_alone(int32_t i, te_dtype dtype) {
    constexpr int32_t cpu = TE_DEVICE_CPU;
    Buffer<T> alone(cpu, shape.rows, shape.cols);
    alone.fill(x.back()->read());
    Buffer<float> maxima(cpu, 1, TE_QUANTIZE_PARTS), scale(cpu, 1, 1), amax(cpu, 1, 1);
    scale.fill({start_scales[size_t(2 * i)]});
    amax.fill({start_amaxes[size_t(3 * i)]});
    te_quantize_plan plan{kAbsent, kAbsent, kAbsent, kAbsent, kAbsent, options.pow_2, options.epsilon};
    if (options.scale == Scale::kDelayed) plan.scale = scale.tensor();
    if (options.scale == Scale::kCurrent) {
      TE_ASSERT_OK(te_quantize_amax(alone.tensor(), maxima.tensor(), kAbsent, nullptr));
      plan.amax_parts = maxima.tensor();
    }
    if (scaling() == TE_SCALING_TENSOR) plan.amax = amax.tensor();
    te_quantized out = outs.back();
    std::vector<std::unique_ptr<Buffer<uint8_t>>> data;
    std::vector<std::unique_ptr<Buffer<float>>> scales_of;
    const auto apart = [&](te_tensor& t, te_tensor& s) {
      data.push_back(std::make_unique<Buffer<uint8_t>>(cpu, t.rows, t.row_pitch));
      scales_of.push_back(std::make_unique<Buffer<float>>(cpu, s.rows, s.cols, s.row_pitch));
      const int64_t cols = t.cols;
      t = data.back()->tensor(dtype);
      t.cols = cols;
      s = scales_of.back()->tensor();
    };
    if (options.rowwise) apart(out.rowwise, out.rowwise_scale_inv);
    if (options.columnwise) apart(out.columnwise, out.columnwise_scale_inv);
    TE_ASSERT_OK(te_quantize(&plan, alone.tensor(), &out, nullptr));
    if (scaling() == TE_SCALING_TENSOR) want_amaxes[size_t(3 * i)] = amax.read()[0];
    size_t next = 0;
    const auto take = [&](Guarded<uint8_t>& bytes, Guarded<float>& floats) {
      const std::vector<uint8_t> all = data[next]->read();
      const std::vector<float> all_scales = scales_of[next++]->read();
      for (int64_t j = 0; j < int64_t(all.size()); ++j) bytes.at(j / bytes.cols, j % bytes.cols) = all[size_t(j)];
      for (int64_t j = 0; j < int64_t(all_scales.size()); ++j) {
        floats.at(j / floats.cols, j % floats.cols) = all_scales[size_t(j)];
      }
    };
    if (options.rowwise) take(*row_data.back(), *row_scales.back());
    if (options.columnwise) take(*col_data.back(), *col_scales.back());
  }
};

// One of each kind, and of what they are made with.
inline constexpr ListOptions kListOptions[] = {
    {Scale::kDelayed},
    {Scale::kDelayed, true, false, 0, true, false},
    {Scale::kDelayed, false, false, 0, false, true},
    {Scale::kCurrent},
    {Scale::kCurrent, true, true, 0.5f, true, false},
    {Scale::kCurrent, false, true, 0, false, true},
    {Scale::kBlock2d, false, true},
    {Scale::kBlock2d, true, false, 0.5f, true, false},
    {Scale::kBlock2d, false, true, 0, false, true},
    {Scale::kBlock1d},
    {Scale::kBlock1d, true, true, 0, true, false},
    {Scale::kBlock1d, false, true, 0.5f, false, true},
};

}  // namespace te::testing
