// normalization with its output in FP8 through the C API, on every device here: every byte, scale and statistic equal
// to te_normalization_forward followed by te_quantize, outputs poisoned before, padding left alone; refusals by name.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "transformer_engine/normalization.h"
#include "transformer_engine/quantize.h"

namespace te {
namespace {

using testing::Buffer;

constexpr te_tensor kAbsent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Case {
  int64_t rows, hidden;
  bool rms, residual;
  te_scaling scaling;
  bool current;  // TENSOR: by its own amax, else by a given scale
};

std::vector<Case> cases() {
  std::vector<Case> all;
  // Narrow rows, one launch's ends (1032 and 8192), and beyond; odd ones; several bands and an end within one.
  const int64_t shapes[][2] = {{5, 72},    {130, 1032}, {1300, 2056}, {257, 8192},
                               {20, 8200}, {33, 1001},  {0, 2048},    {1, 1}};
  for (const auto& shape : shapes) {
    for (const bool rms : {false, true}) {
      for (const bool residual : {false, true}) {
        all.push_back({shape[0], shape[1], rms, residual, TE_SCALING_BLOCK_1D, false});
        all.push_back({shape[0], shape[1], rms, residual, TE_SCALING_BLOCK_2D, false});
        all.push_back({shape[0], shape[1], rms, residual, TE_SCALING_TENSOR, false});
        all.push_back({shape[0], shape[1], rms, residual, TE_SCALING_TENSOR, true});
      }
    }
  }
  return all;
}

// FP8 buffers of both directions, poisoned.
struct Output {
  Output(int32_t device, const Case& c)
      : rowwise(device, c.rows, c.hidden, up(c.hidden, 16)),
        columnwise(device, c.hidden, c.rows, up(c.rows, 16)),
        row_scales(device, lines(c, c.rows, c.hidden), width(c, c.rows, c.hidden)),
        column_scales(device, lines(c, c.hidden, c.rows), width(c, c.hidden, c.rows)),
        amax(device, 1, 1),
        view{c.scaling, rowwise.tensor(TE_FLOAT8_E4M3), columnwise.tensor(TE_FLOAT8_E4M3), row_scales.tensor(),
             column_scales.tensor()} {
    amax.fill({0.f});
  }

  static int64_t blocks(int64_t n) { return up(n, 128) / 128; }
  static int64_t lines(const Case& c, int64_t rows, int64_t cols) {
    return c.scaling == TE_SCALING_TENSOR ? 1 : c.scaling == TE_SCALING_BLOCK_1D ? blocks(cols) : blocks(rows);
  }
  static int64_t width(const Case& c, int64_t rows, int64_t cols) {
    return c.scaling == TE_SCALING_TENSOR ? 2 : up(c.scaling == TE_SCALING_BLOCK_1D ? rows : blocks(cols), 4);
  }

  Buffer<uint8_t> rowwise, columnwise;
  Buffer<float> row_scales, column_scales, amax;
  te_quantized view;
};

// A norm in one device's memory.
struct Norm {
  Norm(int32_t device, const Case& c)
      : x(device, c.rows, c.hidden),
        residual(device, c.rows, c.hidden),
        h(device, c.rows, c.hidden),
        y(device, c.rows, c.hidden),
        gamma(device, 1, c.hidden),
        beta(device, 1, c.hidden),
        mean(device, 1, c.rows),
        rstd(device, 1, c.rows),
        scale(device, 1, 1),
        parts(device, 1, TE_QUANTIZE_PARTS),
        workspace(device, 1, int64_t(te_normalization_forward_quantize_workspace(c.rows))),
        c(c) {
    std::mt19937_64 engine(7);
    std::normal_distribution<double> normal;
    for (Buffer<bf16>* buffer : {&x, &residual, &gamma, &beta}) {
      const te_tensor t = buffer->tensor();
      std::vector<double> values;
      for (int64_t i = 0; i < t.rows * t.cols; ++i) values.push_back(normal(engine));
      buffer->fill(testing::rounded<bf16>(values));
    }
    scale.fill({41.f});
  }

  te_quantize_plan quantize_plan(const Output& out) const {
    te_quantize_plan plan{};
    plan.scale = plan.amax_parts = plan.amax = plan.column_sums = plan.noop = kAbsent;
    if (c.scaling != TE_SCALING_TENSOR) return plan;
    (c.current ? plan.amax_parts : plan.scale) = c.current ? parts.tensor() : scale.tensor();
    plan.amax = out.amax.tensor();
    return plan;
  }
  te_tensor other() const { return c.residual ? residual.tensor() : kAbsent; }
  te_tensor sum() const { return c.residual ? h.tensor() : kAbsent; }
  te_tensor shift() const { return c.rms ? kAbsent : beta.tensor(); }
  te_tensor means() const { return c.rms ? kAbsent : mean.tensor(); }

  Buffer<bf16> x, residual, h, y, gamma, beta;
  Buffer<float> mean, rstd, scale, parts;
  Buffer<uint8_t> workspace;
  Case c;
  te_normalization_plan plan{c.rms, 1, 1e-5f};
};

template <class T>
std::vector<uint32_t> bits(const std::vector<T>& values) {
  std::vector<uint32_t> out;
  for (const T& v : values) {
    uint32_t u = 0;
    std::memcpy(&u, &v, sizeof v);
    out.push_back(u);
  }
  return out;
}

class NormalizationQuantize : public ::testing::TestWithParam<int32_t> {};

INSTANTIATE_TEST_SUITE_P(On, NormalizationQuantize, ::testing::ValuesIn(testing::devices()), testing::device_name);

TEST_P(NormalizationQuantize, BytesAreThoseOfBothSteps) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(::testing::Message() << "[" << c.rows << ", " << c.hidden << "] rms " << c.rms << " residual "
                                      << c.residual << " scaling " << c.scaling << " current " << c.current);
    const int32_t device = GetParam();
    Norm steps(device, c), fused(device, c);
    Output want(device, c), got(device, c), again(device, c);
    TE_ASSERT_OK(te_normalization_forward(steps.plan, steps.x.tensor(), steps.other(), steps.gamma.tensor(),
                                          steps.shift(), steps.y.tensor(), steps.sum(), steps.means(),
                                          steps.rstd.tensor(), nullptr));
    if (c.current) {
      TE_ASSERT_OK(te_quantize_amax(steps.y.tensor(), steps.parts.tensor(), kAbsent, nullptr));
    }
    const te_quantize_plan plan = steps.quantize_plan(want);
    TE_ASSERT_OK(te_quantize(&plan, steps.y.tensor(), &want.view, nullptr));

    const te_quantize_plan own = fused.quantize_plan(got);
    TE_ASSERT_OK(te_normalization_forward_quantize(fused.plan, fused.x.tensor(), fused.other(), fused.gamma.tensor(),
                                                   fused.shift(), fused.sum(), fused.means(), fused.rstd.tensor(), &own,
                                                   &got.view, fused.workspace.tensor(), nullptr));
    EXPECT_EQ(bits(fused.rstd.read()), bits(steps.rstd.read()));
    if (!c.rms) {
      EXPECT_EQ(bits(fused.mean.read()), bits(steps.mean.read()));
    }
    if (c.residual) {
      EXPECT_EQ(bits(fused.h.read()), bits(steps.h.read()));
    }

    const te_tensor h = c.residual ? fused.h.tensor() : fused.x.tensor();
    te_quantize_plan known = fused.quantize_plan(again);
    TE_ASSERT_OK(te_normalization_quantize(fused.plan, h, fused.means(), fused.rstd.tensor(), fused.gamma.tensor(),
                                           fused.shift(), &known, &again.view, nullptr));
    for (const Output* out : {&got, &again}) {
      ASSERT_EQ(out->rowwise.read(), want.rowwise.read());
      ASSERT_EQ(out->columnwise.read(), want.columnwise.read());
      ASSERT_EQ(bits(out->row_scales.read()), bits(want.row_scales.read()));
      ASSERT_EQ(bits(out->column_scales.read()), bits(want.column_scales.read()));
      ASSERT_EQ(bits(out->amax.read()), bits(want.amax.read()));
    }
    EXPECT_TRUE(got.row_scales.padding_untouched() && got.column_scales.padding_untouched());
    EXPECT_TRUE(fused.h.padding_untouched() && fused.rstd.padding_untouched());
  }
}

TEST_P(NormalizationQuantize, RunsRepeatTheirBits) {
  const Case c{1500, 4096, true, true, TE_SCALING_BLOCK_1D, false};
  Norm norm(GetParam(), c);
  Output first(GetParam(), c), again(GetParam(), c);
  const te_quantize_plan plan = norm.quantize_plan(first);
  for (Output* out : {&first, &again}) {
    TE_ASSERT_OK(te_normalization_forward_quantize(norm.plan, norm.x.tensor(), norm.other(), norm.gamma.tensor(),
                                                   norm.shift(), norm.sum(), norm.means(), norm.rstd.tensor(), &plan,
                                                   &out->view, norm.workspace.tensor(), nullptr));
  }
  EXPECT_EQ(again.rowwise.read(), first.rowwise.read());
  EXPECT_EQ(again.columnwise.read(), first.columnwise.read());
}

TEST_P(NormalizationQuantize, RefusalsAreNamedAndWriteNothing) {
  const Case c{20, 48, false, true, TE_SCALING_TENSOR, false};
  Norm norm(GetParam(), c);
  Output out(GetParam(), c);
  struct Call {
    te_tensor x, gamma, mean, rstd, workspace;
    te_quantize_plan quantize;
    te_quantized view;
  };
  const Call good{norm.x.tensor(),         norm.gamma.tensor(),     norm.means(), norm.rstd.tensor(),
                  norm.workspace.tensor(), norm.quantize_plan(out), out.view};
  struct Bad {
    const char* argument;
    std::function<void(Call&)> change;
  };
  std::vector<Bad> bad = {
      {"'gamma'", [](Call& q) { q.gamma.cols -= 1; }},
      {"'mean'", [](Call& q) { q.mean = kAbsent; }},
      {"'rstd'", [](Call& q) { q.rstd = kAbsent; }},
      {"'plan'", [](Call& q) { q.quantize.scale = kAbsent; }},
      {"'out.rowwise'", [](Call& q) { q.view.rowwise.cols -= 1; }},
      {"'parts'", [](Call& q) { q.quantize.amax_parts = q.quantize.scale, q.quantize.scale = kAbsent; }},
  };
  if (GetParam() != TE_DEVICE_CPU) bad.push_back({"'workspace'", [](Call& q) { q.workspace.cols = 1; }});
  for (const Bad& b : bad) {
    Call q = good;
    b.change(q);
    EXPECT_EQ(te_normalization_forward_quantize(norm.plan, q.x, norm.other(), q.gamma, norm.shift(), norm.sum(), q.mean,
                                                q.rstd, &q.quantize, &q.view, q.workspace, nullptr),
              TE_INVALID_ARGUMENT)
        << b.argument;
    EXPECT_NE(std::string(te_last_error()).find(b.argument), std::string::npos)
        << b.argument << ": " << te_last_error();
  }
  for (const uint8_t byte : out.rowwise.read()) ASSERT_EQ(byte, testing::kPoison) << "a refused call wrote";
}

}  // namespace
}  // namespace te
