// activation straight to FP8 through the C API, on every device here: the bytes, scales, amaxes and column sums of the
// activation followed by a quantization, for every kind, both dtypes' sizes, every scaling; errors.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "transformer_engine/activation.h"
#include "transformer_engine/quantize.h"

namespace te {
namespace {

using testing::Buffer;

constexpr te_activation_params kDefaults{7.f, 1.702f, 1.f};
constexpr te_tensor kAbsent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};
constexpr te_scaling kScalings[] = {TE_SCALING_TENSOR, TE_SCALING_BLOCK_1D, TE_SCALING_BLOCK_2D};

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <class T>
std::vector<T> draw(int64_t n, unsigned seed, float width) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> normal(0, width);
  std::vector<T> out;
  for (int64_t i = 0; i < n; ++i) out.push_back(from_float<T>(normal(engine)));
  return out;
}

// A matrix in FP8, both ways, with all that a plan leaves; two of them can be compared.
struct Target {
  te_scaling scaling;
  int64_t rows, cols;
  Buffer<uint8_t> row, col;
  Buffer<float> row_scale, col_scale, parts, amax, sums;

  static int64_t scale_rows(te_scaling s, int64_t rows, int64_t cols) {
    return s == TE_SCALING_TENSOR ? 1 : up(s == TE_SCALING_BLOCK_1D ? cols : rows, 128) / 128;
  }
  static int64_t scale_cols(te_scaling s, int64_t rows, int64_t cols) {
    return s == TE_SCALING_TENSOR ? 2 : up(s == TE_SCALING_BLOCK_1D ? rows : up(cols, 128) / 128, 4);
  }

  Target(int32_t device, te_scaling s, int64_t rows, int64_t cols)
      : scaling(s),
        rows(rows),
        cols(cols),
        row(device, rows, up(cols, 16)),
        col(device, cols, up(rows, 16)),
        row_scale(device, scale_rows(s, rows, cols), scale_cols(s, rows, cols)),
        col_scale(device, scale_rows(s, cols, rows), scale_cols(s, cols, rows)),
        parts(device, 1, TE_QUANTIZE_PARTS),
        amax(device, 1, 1),
        sums(device, up(rows, 128) / 128, cols) {}

  te_quantized view() const {
    te_tensor r = row.tensor(TE_FLOAT8_E4M3), c = col.tensor(TE_FLOAT8_E4M3);
    r.cols = cols;
    c.cols = rows;
    return {scaling, r, c, row_scale.tensor(), col_scale.tensor()};
  }

  te_quantize_plan plan() const {
    te_quantize_plan p{kAbsent, kAbsent, kAbsent, sums.tensor(), kAbsent, 0, 0};
    if (scaling == TE_SCALING_TENSOR) {
      p.amax_parts = parts.tensor();
      p.amax = amax.tensor();
    }
    return p;
  }

  void expect_equal(const Target& other, const std::string& what) const {
    EXPECT_EQ(row.read(), other.row.read()) << what;
    EXPECT_EQ(col.read(), other.col.read()) << what;
    EXPECT_EQ(row_scale.read(), other.row_scale.read()) << what;
    EXPECT_EQ(col_scale.read(), other.col_scale.read()) << what;
    EXPECT_EQ(sums.read(), other.sums.read()) << what;
    if (scaling == TE_SCALING_TENSOR) {
      EXPECT_EQ(amax.read(), other.amax.read()) << what;
    }
    EXPECT_TRUE(row.padding_untouched() && col.padding_untouched() && sums.padding_untouched()) << what;
    EXPECT_TRUE(row_scale.padding_untouched() && col_scale.padding_untouched()) << what;
  }
};

class ActivationQuantized : public ::testing::TestWithParam<int32_t> {};

INSTANTIATE_TEST_SUITE_P(On, ActivationQuantized, ::testing::ValuesIn(testing::devices()), testing::device_name);

struct Shape {
  int64_t rows, cols, extra_pitch;
};
// Elementwise access, gate and up meeting inside a block, whole blocks, an input pitch that breaks 16 bytes.
constexpr Shape kShapes[] = {{1, 1, 0}, {5, 33, 0}, {140, 136, 0}, {130, 256, 8}, {131, 128, 1}};

template <class T>
void check(int32_t device, int kind, Shape s, te_scaling scaling) {
  const std::string what = std::string(te_activation_name(kind)) + " " + std::to_string(s.cols) + " scaling " +
                           std::to_string(scaling) + " bytes " + std::to_string(sizeof(T));
  const int64_t wide = s.cols * (te_activation_is_gated(kind) ? 2 : 1);
  Buffer<T> x(device, s.rows, wide, wide + s.extra_pitch), dx(device, s.rows, wide), y(device, s.rows, s.cols);
  Buffer<T> dy(device, s.rows, s.cols, s.cols + s.extra_pitch);
  x.fill(draw<T>(s.rows * wide, 1, 2));
  dy.fill(draw<T>(s.rows * s.cols, 2, 1));
  const te_tensor in = x.tensor(), up = dy.tensor();
  TE_ASSERT_OK(te_activation_backward(kind, kDefaults, up, in, dx.tensor(), y.tensor(), nullptr));

  Target plain(device, scaling, s.rows, s.cols), fused(device, scaling, s.rows, s.cols);
  const te_quantize_plan plain_plan = plain.plan(), fused_plan = fused.plan();
  const te_quantized plain_view = plain.view(), fused_view = fused.view();
  TE_ASSERT_OK(te_quantize_amax(y.tensor(), plain.parts.tensor(), kAbsent, nullptr));
  TE_ASSERT_OK(te_quantize(&plain_plan, y.tensor(), &plain_view, nullptr));
  TE_ASSERT_OK(te_activation_forward_amax(kind, kDefaults, in, fused.parts.tensor(), kAbsent, nullptr));
  TE_ASSERT_OK(te_activation_forward_quantize(kind, kDefaults, in, &fused_plan, &fused_view, nullptr));
  fused.expect_equal(plain, "forward " + what);

  Target plain_dx(device, scaling, s.rows, wide), fused_dx(device, scaling, s.rows, wide);
  Target again(device, scaling, s.rows, s.cols);
  const te_quantize_plan plain_dx_plan = plain_dx.plan(), fused_dx_plan = fused_dx.plan();
  const te_quantized plain_dx_view = plain_dx.view(), fused_dx_view = fused_dx.view(), again_view = again.view();
  te_quantize_plan again_plan = again.plan();
  again_plan.amax_parts = plain_plan.amax_parts;
  TE_ASSERT_OK(te_quantize_amax(dx.tensor(), plain_dx.parts.tensor(), kAbsent, nullptr));
  TE_ASSERT_OK(te_quantize(&plain_dx_plan, dx.tensor(), &plain_dx_view, nullptr));
  TE_ASSERT_OK(te_activation_backward_amax(kind, kDefaults, up, in, fused_dx.parts.tensor(), kAbsent, nullptr));
  TE_ASSERT_OK(te_activation_backward_quantize(kind, kDefaults, up, in, &fused_dx_plan, &fused_dx_view, &again_plan,
                                               &again_view, nullptr));
  fused_dx.expect_equal(plain_dx, "backward " + what);
  again.expect_equal(plain, "y of backward " + what);

  fused_dx.row.poison();
  TE_ASSERT_OK(te_activation_backward_quantize(kind, kDefaults, up, in, &fused_dx_plan, &fused_dx_view, nullptr,
                                               nullptr, nullptr));
  fused_dx.expect_equal(plain_dx, "backward without y " + what);
}

TEST_P(ActivationQuantized, EqualsActivationThenQuantize) {
  for (int kind = 0; kind < te_activation_count(); ++kind) {
    for (const Shape& s : kShapes) {
      for (const te_scaling scaling : kScalings) {
        check<float>(GetParam(), kind, s, scaling);
        check<fp16>(GetParam(), kind, s, scaling);
        check<bf16>(GetParam(), kind, s, scaling);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(ActivationQuantized, BadArgumentsAreNamedAndNothingIsWritten) {
  const int swiglu = te_activation_kind("swiglu");
  Buffer<float> x(GetParam(), 4, 32), dy(GetParam(), 4, 16);
  Target y(GetParam(), TE_SCALING_BLOCK_1D, 4, 16), dx(GetParam(), TE_SCALING_BLOCK_1D, 4, 32);
  const te_quantize_plan plan = y.plan(), dx_plan = dx.plan();
  const te_quantized view = y.view(), dx_view = dx.view();
  te_tensor odd = x.tensor(), narrow = dy.tensor(), integer = x.tensor();
  odd.cols = 31;
  narrow.cols = 15;
  integer.dtype = TE_INT32;
  const auto refused = [](te_status status, const char* argument) {
    EXPECT_EQ(status, TE_INVALID_ARGUMENT) << argument;
    EXPECT_NE(std::string(te_last_error()).find(argument), std::string::npos) << argument << ": " << te_last_error();
    EXPECT_NE(std::string(te_last_error()).find("te_activation_"), std::string::npos) << te_last_error();
  };
  const auto forward = [&](int kind, te_tensor in, const te_quantize_plan& p, const te_quantized& out) {
    return te_activation_forward_quantize(kind, kDefaults, in, &p, &out, nullptr);
  };
  refused(forward(-1, x.tensor(), plan, view), "'kind'");
  refused(forward(swiglu, odd, plan, view), "'x'");
  refused(forward(swiglu, integer, plan, view), "'x'");
  refused(forward(swiglu, x.tensor(), plan, dx_view), "'out.rowwise'");
  const auto backward = [&](te_tensor up, const te_quantized& gradient, const te_quantized& again) {
    return te_activation_backward_quantize(swiglu, kDefaults, up, x.tensor(), &dx_plan, &gradient, &plan, &again,
                                           nullptr);
  };
  refused(backward(narrow, dx_view, view), "'dy'");
  refused(backward(dy.tensor(), view, view), "'dx.rowwise'");
  refused(backward(dy.tensor(), dx_view, dx_view), "'y.rowwise'");
  refused(te_activation_forward_amax(swiglu, kDefaults, x.tensor(), y.amax.tensor(), kAbsent, nullptr), "'parts'");
  refused(te_activation_backward_amax(swiglu, kDefaults, narrow, x.tensor(), y.parts.tensor(), kAbsent, nullptr),
          "'dy'");
  for (const uint8_t byte : dx.row.read()) EXPECT_EQ(byte, testing::kPoison) << "a refused call wrote";
}

}  // namespace
}  // namespace te
