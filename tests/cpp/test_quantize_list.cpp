// quantize list: bytes, scales, transposes and amaxes of each matrix as te_quantize of it alone, special values that
// reach no other matrix, the flag, refusals that write nothing.
#include "quantize_list_case.h"

#include <functional>

namespace te {
namespace {

using namespace testing;

class QuantizeList : public ::testing::TestWithParam<int32_t> {};

INSTANTIATE_TEST_SUITE_P(On, QuantizeList, ::testing::ValuesIn(testing::devices()), testing::device_name);

template <class T>
void check(int32_t device, const ListShape& s, const ListOptions& o, unsigned seed) {
  ListCase<T> c(device, s, o, seed);
  if (::testing::Test::HasFatalFailure()) return;
  const std::string what = name_of(s, o) + " " + te_dtype_name(kDtype<T>);
  TE_ASSERT_OK(te_quantize_list(&c.problem, nullptr)) << what;
  c.expect(what);
}

TEST_P(QuantizeList, BytesOfEachMatrixAlone) {
  const ListShape shapes[] = {
      {1, 5, 16},       {4, 0, 16},       {3, 16, 0},          {5, 1, 1},           {6, 127, 48},
      {4, 128, 128, 8}, {5, 129, 136, 3}, {4, 33, 260, 0, 16}, {7, 260, 33, 1, 32}, {4, 300, 200, 0, 144},
      {4, 256, 512},
  };
  unsigned seed = 1;
  for (const ListShape& s : shapes) {
    for (const ListOptions& o : kListOptions) {
      for_dtypes([&](auto t) { check<decltype(t)>(GetParam(), s, o, ++seed); });
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(QuantizeList, MoreThanALaunchTakes) {
  for (const Scale scale : {Scale::kDelayed, Scale::kCurrent, Scale::kBlock2d}) {
    check<bf16>(GetParam(), {TE_QUANTIZE_LIST_MATRICES + 3, 3, 24}, {scale}, 5);
  }
}

TEST_P(QuantizeList, NoneAtAll) {
  const te_quantize_list_problem none{};
  TE_EXPECT_OK(te_quantize_list(&none, nullptr));
}

// Values of one matrix do not reach another: the second without its NaN and Inf leaves the others' bytes unchanged.
TEST_P(QuantizeList, SpecialValuesStayTheirMatrix) {
  for (const ListOptions& o : kListOptions) {
    ListCase<float> c(GetParam(), {4, 130, 40}, o, 3);
    for (const float v : {NAN, INFINITY}) {
      c.x[1]->fill(std::vector<float>(130 * 40, v));
      TE_ASSERT_OK(te_quantize_list(&c.problem, nullptr));
      for (const size_t i : {size_t(0), size_t(2), size_t(3)}) {
        if (o.rowwise) c.row_data[i]->expect("rowwise");
        if (o.columnwise) c.col_data[i]->expect("columnwise");
        if (o.rowwise) c.row_scales[i]->expect("rowwise_scale_inv");
      }
    }
  }
}

TEST_P(QuantizeList, TheFlagLeavesEverything) {
  for (const ListOptions& o : kListOptions) {
    ListCase<bf16> c(GetParam(), {3, 20, 40}, o, 3);
    c.problem.noop = c.noop.tensor();
    c.noop.fill({2.f});
    TE_ASSERT_OK(te_quantize_list(&c.problem, nullptr));
    c.expect_untouched("flag");
    c.noop.fill({0.f});
    TE_ASSERT_OK(te_quantize_list(&c.problem, nullptr));
    c.expect("no flag " + name_of(c.shape, o));
  }
}

// Scales of both directions in one memory; an amax that is not wanted; current scaling without any.
TEST_P(QuantizeList, OneMemoryForScalesAndAmaxesThatAreNotWanted) {
  for (const Scale scale : {Scale::kDelayed, Scale::kCurrent}) {
    ListCase<float> c(GetParam(), {3, 20, 40}, {scale}, 3);
    c.amax_pointers[1] = nullptr;
    c.want_amaxes[3] = c.start_amaxes[3];
    for (te_quantized& out : c.outs) out.columnwise_scale_inv = out.rowwise_scale_inv;
    for (auto& scales : c.col_scales) scales->want.assign(scales->want.size(), NAN), scales->buffer.poison();
    TE_ASSERT_OK(te_quantize_list(&c.problem, nullptr));
    for (size_t i = 0; i < 3; ++i) {
      c.row_scales[i]->expect("shared");
      c.row_data[i]->expect("rowwise");
      c.col_data[i]->expect("columnwise");
    }
    EXPECT_EQ(c.amaxes.read(), c.want_amaxes);
    c.problem.amaxes = nullptr;
    TE_ASSERT_OK(te_quantize_list(&c.problem, nullptr));
    EXPECT_EQ(c.amaxes.read(), c.want_amaxes);
  }
}

TEST_P(QuantizeList, BadArgumentsAreNamedAndNothingIsWritten) {
  using C = ListCase<float>;
  const auto other = [](te_tensor& t) { t.device = t.device == TE_DEVICE_CPU ? 0 : TE_DEVICE_CPU; };
  const float* none[3] = {nullptr, nullptr, nullptr};
  struct Bad {
    const char* argument;
    Scale scale;
    std::function<void(C&)> change;
  };
  const Scale blocks = Scale::kBlock2d, current = Scale::kCurrent, delayed = Scale::kDelayed;
  const Bad cases[] = {
      {"'count'", blocks, [](C& c) { c.problem.count = -1; }},
      {"'xs'", blocks, [](C& c) { c.problem.xs = nullptr; }},
      {"'outs'", blocks, [](C& c) { c.problem.outs = nullptr; }},
      {"'xs[0]'", blocks, [](C& c) { c.xs[0].dtype = TE_INT32; }},
      {"'xs[0]'", blocks, [](C& c) { c.xs[0].data = nullptr; }},
      {"'xs[1]'", blocks, [](C& c) { c.xs[1].data = nullptr; }},
      {"'xs[1]'", blocks, [](C& c) { c.xs[1].dtype = TE_BFLOAT16; }},
      {"'xs[2]'", blocks, [](C& c) { --c.xs[2].rows; }},
      {"'xs[2]'", blocks, [](C& c) { ++c.xs[2].row_pitch; }},
      {"'xs[2]'", blocks, [&](C& c) { other(c.xs[2]); }},
      {"'outs[1].scaling'", blocks, [](C& c) { c.outs[1].scaling = TE_SCALING_BLOCK_1D; }},
      {"'outs[0].rowwise'", blocks, [](C& c) { c.outs[0].rowwise.dtype = TE_UINT8; }},
      {"'outs[0].rowwise'", blocks, [](C& c) { ++c.outs[0].rowwise.rows; }},
      {"'outs[0].columnwise'", blocks, [](C& c) { c.outs[0].columnwise.dtype = TE_FLOAT8_E5M2; }},
      {"'outs[1].rowwise'", blocks, [](C& c) { c.outs[1].rowwise = kAbsent; }},
      {"'outs[1].columnwise'", blocks, [](C& c) { c.outs[1].columnwise.dtype = TE_FLOAT8_E5M2; }},
      {"'outs[2].columnwise'", blocks, [](C& c) { c.outs[2].columnwise.row_pitch += 16; }},
      {"'outs[2].columnwise'", blocks,
       [](C& c) { c.outs[2].columnwise.data = static_cast<uint8_t*>(c.outs[2].columnwise.data) + 8; }},
      {"'outs[1].rowwise_scale_inv'", blocks, [](C& c) { c.outs[1].rowwise_scale_inv.data = nullptr; }},
      {"'outs[2].columnwise_scale_inv'", current, [](C& c) { c.outs[2].columnwise_scale_inv.cols = 1; }},
      {"'plan.amax_epsilon'", blocks, [](C& c) { c.problem.amax_epsilon = -1; }},
      {"'plan.noop'", blocks, [](C& c) { c.problem.noop = c.noop.tensor(), c.problem.noop.dtype = TE_INT32; }},
      {"'scales'", blocks, [&](C& c) { c.problem.scales = none; }},
      {"'amaxes'", blocks, [](C& c) { c.problem.amaxes = c.amax_pointers.data(); }},
      {"'amax_parts'", blocks, [](C& c) { c.problem.amax_parts = c.parts.tensor(); }},
      {"'scales'", current, [](C& c) { c.problem.scales = c.scale_pointers.data(); }},
      {"'scales'", current, [](C& c) { c.problem.amax_parts = kAbsent; }},
      {"'amax_parts'", current, [](C& c) { --c.problem.amax_parts.rows; }},
      {"'amax_parts'", current, [](C& c) { ++c.problem.amax_parts.row_pitch; }},
      {"'amax_parts'", current, [&](C& c) { other(c.problem.amax_parts); }},
      {"'scales[1]'", delayed, [](C& c) { c.scale_pointers[1] = nullptr; }},
  };
  for (const Bad& bad : cases) {
    C c(GetParam(), {3, 20, 40}, {bad.scale}, 1);
    bad.change(c);
    EXPECT_EQ(te_quantize_list(&c.problem, nullptr), TE_INVALID_ARGUMENT) << bad.argument;
    const std::string said = te_last_error();
    EXPECT_NE(said.find(bad.argument), std::string::npos) << bad.argument << ": " << said;
    EXPECT_NE(said.find("te_quantize_list"), std::string::npos) << said;
    c.expect_untouched(bad.argument);
  }
}

}  // namespace
}  // namespace te
