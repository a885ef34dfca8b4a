// The kernels of the activation with a scale for each row themselves, on emulated blocks (emulated_quantize.h), with
// the exponential of the CPU path, whose bits they give: both widths of access, warps without a row, columns beyond the
// lanes, the counter of live rows.
#include "emulated_quantize.h"

#include <gtest/gtest.h>

#include "activation_scaled_case.h"
#include "core/cpu_chunk.h"
#include "ops/activation/activation_scaled.cuh"

namespace te {
namespace {

using namespace testing;
using activation::kScaledRows;
using activation::kScaledThreads;
using activation::ScaledInput;

struct CpuExp {
  static float exp(float x) { return cpu::exp(x); }
  static float reciprocal(float x) { return 1.f / x; }
};

template <class T>
struct HostStore {
  T* data;
  int64_t pitch;

  template <int N>
  void store(int64_t row, int64_t col, const float (&values)[N]) const {
    const Packed<T, N> packed = narrow<T, N>(values);
    std::memcpy(static_cast<void*>(data + row * pitch + col), &packed, sizeof(packed));
  }
};

template <class T>
HostStore<T> store_of(const te_tensor& t) {
  return {static_cast<T*>(t.data), t.row_pitch};
}

template <class Op, int N, class T, class S>
void emulate(ScaledCase<T, S>& c, unsigned seed) {
  const te_tensor x = c.x.tensor(), dy = c.dy.tensor(), live = c.live();
  const ScaledInput<T, S> in{static_cast<const T*>(x.data),          x.row_pitch, c.scale.data(),
                             static_cast<const int32_t*>(live.data), x.rows,      c.shape.cols};
  const auto blocks = unsigned((x.rows + kScaledRows - 1) / kScaledRows);
  run_blocks(blocks, kScaledThreads, seed,
             [&] { activation::scaled_forward_kernel<Op, CpuExp, N>(kDefaults, in, store_of<T>(c.y.tensor())); });
  run_blocks(blocks, kScaledThreads, seed + 1, [&] {
    activation::scaled_backward_kernel<Op, CpuExp, N>(kDefaults, in, static_cast<const T*>(dy.data), dy.row_pitch,
                                                      store_of<T>(c.dx.tensor()), c.dscale.data(),
                                                      store_of<T>(c.again.tensor()));
  });
}

template <class Op, class T, class S>
void check(const char* name, const ScaledShape& shape, unsigned seed) {
  ScaledCase<T, S> c(TE_DEVICE_CPU, te_activation_kind(name), shape);
  const bool wide = aligned16(c.x.tensor()) && aligned16(c.dy.tensor()) && shape.cols % kVec<T> == 0;
  wide ? emulate<Op, kVec<T>>(c, seed) : emulate<Op, 1>(c, seed);
  c.expect_as_separate();
}

TEST(ActivationKernels, RowsWithScalesAsTheCpuPath) {
  unsigned seed = 1;
  for (const ScaledShape& shape : kScaledShapes) {
    seed += 2;  // one combination of dtypes each, in turn
    if (seed % 3 == 0) {
      check<activation::Gated<activation::Silu>, bf16, float>("swiglu", shape, seed);
      check<activation::Plain<activation::Gelu>, fp16, fp16>("gelu", shape, seed);
    } else if (seed % 3 == 1) {
      check<activation::Gated<activation::Silu>, float, float>("swiglu", shape, seed);
      check<activation::Plain<activation::Srelu>, bf16, bf16>("srelu", shape, seed);
    } else {
      check<activation::ClampedSwiglu, fp16, float>("clamped_swiglu", shape, seed);
      check<activation::Plain<activation::Silu>, float, float>("silu", shape, seed);
    }
    if (HasFatalFailure()) return;
  }
}

TEST(ActivationKernels, ResultsThatAreNotWantedStay) {
  using Op = activation::Gated<activation::Silu>;
  ScaledCase<bf16, float> c(TE_DEVICE_CPU, te_activation_kind("swiglu"), {9, 64, 0, 7});
  const te_tensor x = c.x.tensor(), dy = c.dy.tensor();
  const ScaledInput<bf16, float> in{c.x.data(), x.row_pitch, c.scale.data(), c.counter.data(), x.rows, 64};
  run_blocks(2, kScaledThreads, 1, [&] {
    activation::scaled_backward_kernel<Op, CpuExp, 8>(kDefaults, in, c.dy.data(), dy.row_pitch,
                                                      store_of<bf16>(c.dx.tensor()), static_cast<float*>(nullptr),
                                                      HostStore<bf16>{nullptr, 0});
  });
  for (const float v : c.dscale.read()) EXPECT_TRUE(std::isnan(v));
  for (const bf16 v : c.again.read()) EXPECT_TRUE(std::isnan(to_float(v)));
}

}  // namespace
}  // namespace te
