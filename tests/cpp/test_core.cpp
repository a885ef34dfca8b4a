// The core's shared helpers: dtype conversions, the CPU exponential, parallel_for, errors, library probing. The results
// of an op are tested with that op.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "core/cpu_chunk.h"
#include "core/fp8.h"
#include "core/parallel_for.h"
#include "device_buffer.h"
#include "transformer_engine/activation.h"

namespace te {
namespace {

using detail::bits_of;
using detail::float_of;

// ---- dtype conversions, against double arithmetic on the format's definition ----

// Value of a small float with `mantissa` explicit bits and `exponent` exponent bits, from IEEE 754's definition.
double value_of(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1. : 1.;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa == 0 ? sign * INFINITY : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return sign * std::ldexp(double(mantissa), 1 - bias - mantissa_bits);
  return sign * std::ldexp(double(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
}

// A 16-bit format's conversions over all its patterns: widening is exact, narrowing undoes it, and between each pair
// of neighbours the midpoint goes to the even one and anything beside it to the nearer one.
template <class T>
void check_format(int exponent_bits, int mantissa_bits) {
  const uint16_t inf = uint16_t(((1 << exponent_bits) - 1) << mantissa_bits);
  for (uint32_t pattern = 0; pattern < 0x10000u; ++pattern) {
    const T x{uint16_t(pattern)};
    const double want = value_of(x.bits, exponent_bits, mantissa_bits);
    const float got = to_float(x);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << std::hex << pattern;
      const T back = from_float<T>(got);
      EXPECT_GT(back.bits & 0x7fff, inf) << "NaN became a number: " << std::hex << pattern;
      EXPECT_EQ(back.bits & 0x8000, x.bits & 0x8000) << std::hex << pattern;
      continue;
    }
    ASSERT_EQ(double(got), want) << std::hex << pattern;
    ASSERT_EQ(std::signbit(got), (pattern & 0x8000) != 0) << std::hex << pattern;
    ASSERT_EQ(from_float<T>(got).bits, x.bits) << std::hex << pattern;
    if (std::isinf(want)) continue;
    // The next pattern away from zero; past the largest finite one, IEEE rounds as if it were the next power of two.
    const T next{uint16_t(pattern + 1)};
    const double above = (next.bits & 0x7fff) == inf ? std::copysign(std::ldexp(1., 1 << (exponent_bits - 1)), want)
                                                     : value_of(next.bits, exponent_bits, mantissa_bits);
    // Exact in float unless x is bf16 at the very bottom; nextafter below covers that end as well.
    const float middle = float((want + above) / 2);
    if (double(middle) != (want + above) / 2) continue;
    const uint16_t even = pattern & 1 ? next.bits : x.bits;
    EXPECT_EQ(from_float<T>(middle).bits, even) << std::hex << pattern;
    EXPECT_EQ(from_float<T>(std::nextafterf(middle, 0.f)).bits, x.bits) << std::hex << pattern;
    EXPECT_EQ(from_float<T>(std::nextafterf(middle, std::copysign(INFINITY, middle))).bits, next.bits)
        << std::hex << pattern;
  }
}

TEST(Dtype, HalfConvertsExactlyAndRoundsToNearestEven) { check_format<fp16>(5, 10); }
TEST(Dtype, BfloatConvertsExactlyAndRoundsToNearestEven) { check_format<bf16>(8, 7); }

// Both FP8 formats over all patterns, from their definitions (OFP8: E4M3 spends no exponent on Inf and NaN).
TEST(Dtype, Fp8WidensExactly) {
  for (int pattern = 0; pattern < 256; ++pattern) {
    const double sign = pattern & 0x80 ? -1 : 1;
    const int mantissa = pattern & 7, exponent = pattern >> 3 & 15;
    const double want = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(mantissa + 8, exponent - 10);
    const float got = to_float(e4m3{uint8_t(pattern)});
    ASSERT_EQ(std::signbit(got), sign < 0) << std::hex << pattern;
    if ((pattern & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(got)) << std::hex << pattern;
    } else {
      EXPECT_EQ(double(got), sign * want) << std::hex << pattern;
    }
    const double half = value_of(uint16_t(pattern << 8), 5, 10);
    const float wide = to_float(e5m2{uint8_t(pattern)});
    ASSERT_EQ(std::signbit(wide), sign < 0) << std::hex << pattern;
    if (std::isnan(half)) {
      EXPECT_TRUE(std::isnan(wide)) << std::hex << pattern;
    } else {
      EXPECT_EQ(double(wide), half) << std::hex << pattern;
    }
  }
  EXPECT_EQ(to_float(e4m3{0x7e}), kFp8Max<e4m3>);
  EXPECT_EQ(to_float(e5m2{0x7b}), kFp8Max<e5m2>);
}

// The chunked conversions of the CPU paths are the same function, element by element: patterns from the whole range
// (every 65521st float, NaN and subnormals among them), in lengths that end inside a vector.
template <class T>
void check_chunks() {
  uint32_t pattern = 0;
  for (int64_t n = 0; n < 600; ++n) {
    std::vector<float> values(static_cast<size_t>(n)), back(values.size() + 1, 7.f);
    for (float& v : values) v = float_of(pattern += 65521u);
    std::vector<T> stored(values.size() + 1, T{0x1234});
    cpu::store_chunk(stored.data(), values.data(), n);
    const float* loaded = cpu::load_chunk(stored.data(), back.data(), n);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(stored[i].bits, from_float<T>(values[i]).bits) << std::hex << bits_of(values[i]);
      ASSERT_EQ(bits_of(loaded[i]), bits_of(to_float(stored[i]))) << std::hex << stored[i].bits;
    }
    EXPECT_EQ(stored.back().bits, 0x1234) << n;
    EXPECT_EQ(back.back(), 7.f) << n;
  }
}

TEST(Chunk, HalfConvertsAsOneByOne) { check_chunks<fp16>(); }
TEST(Chunk, BfloatConvertsAsOneByOne) { check_chunks<bf16>(); }

TEST(Chunk, FloatsAreUsedInPlace) {
  float data[4] = {1, 2, 3, 4}, buffer[4] = {};
  EXPECT_EQ(cpu::load_chunk(data, buffer, 4), data);
  EXPECT_EQ(cpu::chunk_target(data, buffer), data);
  cpu::store_chunk(data, data, 4);
  cpu::store_chunk(buffer, data, 3);
  EXPECT_EQ(buffer[2], 3.f);
  EXPECT_EQ(buffer[3], 0.f);
}

TEST(Dtype, FloatsBeyondTheFormatBecomeInfOrZero) {
  EXPECT_EQ(from_float<fp16>(65520.f).bits, 0x7c00);  // the first float that rounds to Inf
  EXPECT_EQ(from_float<fp16>(std::nextafterf(65520.f, 0.f)).bits, 0x7bff);
  EXPECT_EQ(from_float<fp16>(-1e30f).bits, 0xfc00);
  EXPECT_EQ(from_float<fp16>(std::numeric_limits<float>::denorm_min()).bits, 0);
  EXPECT_EQ(from_float<bf16>(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(from_float<bf16>(std::numeric_limits<float>::denorm_min()).bits, 0);
  EXPECT_EQ(from_float<bf16>(float_of(0x7f800001u)).bits & 0x7fc0, 0x7fc0) << "a signalling NaN must not become Inf";
}

TEST(Dtype, TableAnswersByNumberAndRefusesOthers) {
  EXPECT_STREQ(te_dtype_name(TE_BFLOAT16), "bfloat16");
  EXPECT_EQ(te_dtype_bytes(TE_INT64), 8u);
  EXPECT_EQ(te_dtype_bytes(TE_FLOAT8_E5M2), 1u);
  EXPECT_EQ(te_dtype_name(te_dtype(99)), nullptr);
  EXPECT_EQ(te_dtype_bytes(te_dtype(99)), 0u);
}

// ---- exp ----

// Distance from the exact value in units of the last place of the correctly rounded result.
double ulps(float got, float x) {
  const double exact = std::exp(double(x));
  const float nearest = float(exact);
  if (std::isinf(nearest) || std::isinf(got)) return got == nearest ? 0. : INFINITY;
  const double ulp = double(std::nextafterf(nearest, INFINITY)) - double(nearest);
  return std::fabs(double(got) - exact) / ulp;
}

TEST(CpuExp, StaysWithinItsBound) {
  // Every 61st float pattern up to |x| = 104, both signs: 37 million values, subnormal results included.
  double worst = 0;
  float worst_at = 0;
  for (uint64_t u = 0; u <= 0x42d00000u; u += 61) {  // |x| up to 104
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const float x = float_of(uint32_t(u) | sign);
      const double error = ulps(cpu::exp(x), x);
      if (error > worst) worst = error, worst_at = x;
    }
  }
  RecordProperty("worst_ulp", std::to_string(worst));
  EXPECT_LE(worst, 1.) << "at " << worst_at;
}

TEST(CpuExp, EndsAndSpecialValues) {
  EXPECT_EQ(cpu::exp(0.f), 1.f);
  EXPECT_EQ(cpu::exp(-0.f), 1.f);
  EXPECT_EQ(cpu::exp(INFINITY), INFINITY);
  EXPECT_EQ(cpu::exp(-INFINITY), 0.f);
  EXPECT_EQ(cpu::exp(std::numeric_limits<float>::max()), INFINITY);
  EXPECT_EQ(cpu::exp(std::numeric_limits<float>::lowest()), 0.f);
  EXPECT_TRUE(std::isnan(cpu::exp(std::numeric_limits<float>::quiet_NaN())));
}

// ---- lane_sum ----

TEST(LaneSum, AddsSixteenLanesThenTheLanesInOrder) {
  for (const int64_t n : {0, 1, 15, 16, 17, 31, 32, 33, 256, 1000}) {
    std::vector<float> x(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) x[size_t(i)] = std::sin(float(i)) * std::pow(10.f, float(i % 7));
    float lanes[16] = {};
    for (int64_t i = 0; i < n; ++i) lanes[i % 16] += x[size_t(i)];
    float want = 0.f;
    for (const float lane : lanes) want += lane;
    EXPECT_EQ(bits_of(cpu::lane_sum(n, [&](int64_t i) { return x[size_t(i)]; })), bits_of(want)) << n;
    const auto both = cpu::lane_sums(n, [&](int64_t i) { return std::pair(-x[size_t(i)], x[size_t(i)]); });
    EXPECT_EQ(bits_of(both.second), bits_of(want)) << n;
    EXPECT_EQ(both.first, -want) << n;
  }
}

// ---- parallel_for ----

std::atomic<int64_t> hook_calls{0};

// A pool of three threads that take blocks from the back, in no useful order.
void threaded_hook(int64_t n_blocks, void (*body)(void*, int64_t), void* context) {
  ++hook_calls;
  std::atomic<int64_t> next{n_blocks};
  const auto work = [&] {
    for (int64_t block = --next; block >= 0; block = --next) body(context, block);
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back(work);
  for (auto& thread : threads) thread.join();
}

// The hook is reached through an entry point, since the library owns the loop: relu of [rows, 7], 2340 rows a block.
class Hook : public ::testing::Test {
 protected:
  void SetUp() override { hook_calls = 0; }
  void TearDown() override { te_set_parallel_for(nullptr); }
};

te_status relu_rows(const testing::Buffer<float>& x, const testing::Buffer<float>& y) {
  return te_activation_forward(te_activation_kind("relu"), {7.f, 1.702f, 1.f}, x.tensor(), y.tensor(), nullptr);
}

TEST_F(Hook, EveryBlockOnceAndTheSameBitsAsTheSerialLoop) {
  const int64_t rows = 10007, cols = 7;
  testing::Buffer<float> x(TE_DEVICE_CPU, rows, cols), serial(TE_DEVICE_CPU, rows, cols),
      pooled(TE_DEVICE_CPU, rows, cols);
  std::vector<float> values;
  for (int64_t i = 0; i < rows * cols; ++i) values.push_back(std::sin(float(i)));
  x.fill(values);
  TE_ASSERT_OK(relu_rows(x, serial));
  EXPECT_EQ(hook_calls, 0);
  te_set_parallel_for(threaded_hook);
  TE_ASSERT_OK(relu_rows(x, pooled));
  EXPECT_EQ(hook_calls, 1);
  for (float& v : values) v = std::max(v, 0.f);
  EXPECT_EQ(serial.read(), values);
  EXPECT_EQ(pooled.read(), values);
  EXPECT_TRUE(pooled.padding_untouched());
}

TEST_F(Hook, OneBlockOrNoneStaysOnTheCallingThread) {
  te_set_parallel_for(threaded_hook);
  testing::Buffer<float> x(TE_DEVICE_CPU, 1, 7), y(TE_DEVICE_CPU, 1, 7), none(TE_DEVICE_CPU, 0, 7);
  x.fill({1, -2, 3, -4, 5, -6, 7});
  TE_ASSERT_OK(relu_rows(x, y));
  TE_ASSERT_OK(relu_rows(none, none));
  EXPECT_EQ(hook_calls, 0);
  EXPECT_EQ(y.read(), (std::vector<float>{1, 0, 3, 0, 5, 0, 7}));
}

// ---- errors ----

TEST(Error, MessageNamesTheCulpritAndBelongsToItsThread) {
  EXPECT_EQ(te_probe_library("one"), TE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(te_last_error()).find("'one'"), std::string::npos) << te_last_error();
  std::thread([] {
    EXPECT_STREQ(te_last_error(), "") << "a fresh thread has no failure";
    EXPECT_EQ(te_probe_library("two"), TE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(te_last_error()).find("'two'"), std::string::npos) << te_last_error();
  }).join();
  EXPECT_NE(std::string(te_last_error()).find("'one'"), std::string::npos) << "another thread's failure came through";
}

TEST(Error, LongMessagesAreCutNotOverrun) {
  const std::string name(5000, 'x');
  EXPECT_EQ(te_probe_library(name.c_str()), TE_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(te_last_error()).size(), 1023u);
}

TEST(Error, UnopenableLibraryNamesEverythingTried) {
  // A machine may lack the library; a failure must list the paths that were tried.
  for (const char* name : {"cublasLt", "nccl", "cuda"}) {
    const te_status status = te_probe_library(name);
    if (status == TE_SUCCESS) continue;
    EXPECT_EQ(status, TE_RUNTIME_ERROR);
    const std::string message = te_last_error();
    EXPECT_NE(message.find(std::string("lib") + name), std::string::npos) << message;
    EXPECT_NE(message.find("CUDA_HOME"), std::string::npos) << message;
  }
}

TEST(Error, NullLibraryNameIsRefused) { EXPECT_EQ(te_probe_library(nullptr), TE_INVALID_ARGUMENT); }

// ---- events of a capture ----

TEST(CapturedEvents, ArgumentsAreChecked) {
  size_t count = 7;
  EXPECT_EQ(te_captured_events(nullptr, nullptr, 0, nullptr), TE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(te_last_error()).find("'count'"), std::string::npos) << te_last_error();
  EXPECT_EQ(te_captured_events(nullptr, nullptr, 1, &count), TE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(te_last_error()).find("'events'"), std::string::npos) << te_last_error();
  if (!te_built_with_cuda()) {
    EXPECT_EQ(te_captured_events(nullptr, nullptr, 0, &count), TE_NOT_IMPLEMENTED);
  }
  EXPECT_EQ(count, 7u);
}

#if defined(TE_WITH_CUDA)
// Those recorded for the outside, not those that order the capture itself, nor what is recorded before or beside it.
TEST(CapturedEvents, AreThoseForTheOutside) {
  if (!testing::has_gpu()) GTEST_SKIP();
  using testing::cuda_ok;
  cudaStream_t stream, beside;
  cudaEvent_t outside[2], inside;
  cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cuda_ok(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
  for (cudaEvent_t* event : {&outside[0], &outside[1], &inside}) {
    cuda_ok(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }
  size_t count = 7;
  cuda_ok(cudaEventRecord(outside[1], stream));
  TE_ASSERT_OK(te_captured_events(stream, nullptr, 0, &count));
  EXPECT_EQ(count, 0u) << "nothing is captured";
  cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  cuda_ok(cudaEventRecord(inside, stream));
  cuda_ok(cudaStreamWaitEvent(beside, inside, 0));
  cuda_ok(cudaEventRecordWithFlags(outside[0], beside, cudaEventRecordExternal));
  cuda_ok(cudaEventRecord(inside, beside));
  cuda_ok(cudaStreamWaitEvent(stream, inside, 0));
  void* events[2] = {nullptr, nullptr};
  TE_ASSERT_OK(te_captured_events(stream, events, 2, &count));
  EXPECT_EQ(count, 1u);
  EXPECT_EQ(events[0], outside[0]);
  EXPECT_EQ(events[1], nullptr);
  cudaGraph_t graph;
  cuda_ok(cudaStreamEndCapture(stream, &graph));
  cuda_ok(cudaGraphDestroy(graph));
  for (cudaEvent_t event : {outside[0], outside[1], inside}) cuda_ok(cudaEventDestroy(event));
  cuda_ok(cudaStreamDestroy(stream));
  cuda_ok(cudaStreamDestroy(beside));
}
#endif

// Tests configured without a CUDA compiler would pass by a CUDA engine's kernels without a look.
TEST(Build, TestsReachTheKernelsThatTheEngineHas) {
#if !defined(TE_WITH_CUDA)
  EXPECT_FALSE(te_built_with_cuda()) << "configure the tests where nvcc is on PATH, or set CUDACXX";
#endif
}

TEST(Version, IsTheApiLevel) { EXPECT_STREQ(te_version(), "2.20.0"); }

}  // namespace
}  // namespace te
