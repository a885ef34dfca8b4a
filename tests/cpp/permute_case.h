// Shared by the suites of permute: routings, a problem with tensors at pitches of their own, and its run on the CPU.
#pragma once

#include <random>
#include <vector>

#include "device_buffer.h"
#include "transformer_engine/permute.h"

namespace te::testing {

struct PermuteShape {
  int64_t tokens, experts, topk, hidden, rows;  // rows of the buffer
  int64_t pitch = 0;                            // elements beyond a row
  bool pads = false;
};

inline const PermuteShape kPermuteShapes[] = {
    {0, 3, 1, 8, 5},
    {1, 1, 1, 1, 1},
    {7, 4, 2, 33, 14},
    {40, 9, 3, 64, 130, 8, true},
    {150, 5, 4, 17, 500, 3},
    {200, 70, 6, 8, 1200, 1},
    {13, 40, 40, 24, 640, 0, true},
    {131, 8, 2, 264, 270, 0},
};

// [tokens, experts] bytes, topk of each token; expert 0 has none if there are enough others.
inline std::vector<uint8_t> mask_of(const PermuteShape& s, unsigned seed) {
  std::mt19937 engine(seed);
  std::vector<uint8_t> mask(size_t(s.tokens * s.experts), 0);
  std::vector<int64_t> experts(static_cast<size_t>(s.experts));
  for (int64_t t = 0; t < s.tokens; ++t) {
    for (int64_t e = 0; e < s.experts; ++e) experts[size_t(e)] = e;
    std::shuffle(experts.begin() + (s.experts > s.topk ? 1 : 0), experts.end(), engine);
    for (int64_t i = 0; i < s.topk; ++i) {
      mask[size_t(t * s.experts + experts[size_t(s.experts > s.topk ? i + 1 : i)])] = uint8_t(1 + engine() % 3);
    }
  }
  return mask;
}

inline std::vector<int32_t> ids_of(const PermuteShape& s, unsigned seed, int32_t least = -1) {
  std::mt19937 engine(seed);
  std::vector<int32_t> ids(size_t(s.tokens * s.topk));
  for (int32_t& id : ids) id = int32_t(engine() % unsigned(s.experts - least)) + least;
  return ids;
}

// topk different experts of each token, in no order.
inline std::vector<int32_t> choice_of(const PermuteShape& s, unsigned seed) {
  std::mt19937 engine(seed);
  std::vector<int32_t> ids, experts;
  for (int32_t e = 0; e < int32_t(s.experts); ++e) experts.push_back(e);
  for (int64_t t = 0; t < s.tokens; ++t) {
    std::shuffle(experts.begin(), experts.end(), engine);
    ids.insert(ids.end(), experts.begin(), experts.begin() + s.topk);
  }
  return ids;
}

template <class T>
std::vector<T> drawn(int64_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> value;
  std::vector<T> values(static_cast<size_t>(count));
  for (T& v : values) {
    if constexpr (std::is_same_v<T, uint8_t>) {
      v = uint8_t(engine());
    } else {
      v = from_float<T>(value(engine));
    }
  }
  return values;
}

inline void expect_error(te_status status, const std::string& op, const std::string& argument, const std::string& got) {
  EXPECT_EQ(status, TE_INVALID_ARGUMENT);
  const std::string text = te_last_error();
  EXPECT_NE(text.find(op + ": argument '" + argument + "' is"), std::string::npos) << text;
  EXPECT_NE(text.find(got), std::string::npos) << text;
}

// Values that no map has; the poison of integers is -1, which maps have.
inline void spoil(Buffer<int32_t>& map) {
  const te_tensor t = map.tensor();
  map.fill(std::vector<int32_t>(size_t(t.rows * t.cols), -7));
}

// Tensors of a routing: the map of its mask or of its ids, rows, tokens, probabilities. Outputs are poisoned.
template <class T, class P>
struct PermuteCase {
  PermuteCase(int32_t on, const PermuteShape& shape, bool of_mask, unsigned seed)
      : s(shape),
        device(on),
        columns(of_mask ? s.experts : s.topk),
        map(on, s.tokens, of_mask ? 2 * s.experts + 1 : s.topk),
        pad_offsets(on, 1, s.experts),
        tokens(on, s.tokens, s.hidden, s.hidden + s.pitch),
        rows(on, s.rows, s.hidden, s.hidden + s.pitch),
        probs(on, s.tokens, columns, columns + 3),
        row_probs(on, 1, s.rows),
        scales(on, 3, s.tokens + 4),
        covered(on, 1, s.rows) {
    make_map(of_mask, seed);
    std::vector<int64_t> pads(size_t(s.experts), 0);
    for (int64_t e = 1; e < s.experts; ++e) pads[size_t(e)] = pads[size_t(e) - 1] + (e + seed) % 3;
    pad_offsets.fill(pads);
    tokens.fill(drawn<T>(s.tokens * s.hidden, seed + 1));
    rows.fill(drawn<T>(s.rows * s.hidden, seed + 2));
    std::vector<P> values = drawn<P>(s.tokens * columns, seed + 3);
    for (size_t i = 0; i < values.size(); i += 5) values[i] = from_float<P>(i % 2 ? 0.f : -0.f);
    probs.fill(values);
    values = drawn<P>(s.rows, seed + 5);
    for (size_t i = 0; i < values.size(); i += 4) values[i] = from_float<P>(0.f);
    row_probs.fill(values);
    scales.fill(drawn<float>(3 * (s.tokens + 4), seed + 4));
  }

  te_permute_map map_of() const {
    return {map.tensor(), s.pads && is_mask ? pad_offsets.tensor() : te_tensor{}, int32_t(is_mask)};
  }

  PermuteShape s;
  int32_t device;
  int64_t columns;
  bool is_mask = false;
  Buffer<int32_t> map;
  Buffer<int64_t> pad_offsets;
  Buffer<T> tokens, rows;
  Buffer<P> probs, row_probs;
  Buffer<float> scales;
  Buffer<uint8_t> covered;

 private:
  void make_map(bool of_mask, unsigned seed) {
    is_mask = of_mask;
    spoil(map);
    if (of_mask) {
      Buffer<uint8_t> mask(device, s.tokens, s.experts, s.experts + 2);
      Buffer<int32_t> counts(device, (s.tokens + TE_PERMUTE_CHUNK - 1) / TE_PERMUTE_CHUNK, s.experts);
      mask.fill(mask_of(s, seed));
      TE_EXPECT_OK(te_permute_mask_map(mask.tensor(), map.tensor(), counts.tensor(), nullptr));
      return;
    }
    Buffer<int32_t> ids(device, s.tokens, s.topk), token_of_row(device, 1, s.rows);
    ids.fill(ids_of(s, seed));
    te_permute_row_map_plan plan{};
    plan.ids = ids.tensor();
    plan.row_of_pair = map.tensor();
    plan.token_of_row = token_of_row.tensor();
    plan.rows = s.rows;
    plan.last_expert = int32_t(s.experts);
    TE_EXPECT_OK(te_permute_row_map(&plan, nullptr));
  }
};

// The outputs of te_permute_forward.
template <class T, class P>
struct Forwarded {
  explicit Forwarded(const PermuteCase<T, P>& c, bool with_probs, bool with_scales)
      : out(c.device, c.s.rows, c.s.hidden, c.s.hidden + c.s.pitch),
        probs(c.device, 1, c.s.rows),
        scales(c.device, 3, (c.s.rows + 3) / 4 * 4, (c.s.rows + 3) / 4 * 4 + 2) {
    plan.map = c.map_of();
    plan.inp = c.tokens.tensor();
    plan.out = out.tensor();
    plan.covered = c.covered.tensor();
    if (with_probs) plan.probs = c.probs.tensor(), plan.out_probs = probs.tensor();
    if (with_scales) plan.scales = c.scales.tensor(), plan.out_scales = scales.tensor();
  }

  Buffer<T> out;
  Buffer<P> probs;
  Buffer<float> scales;
  te_permute_forward_plan plan{};
};

template <class T>
void expect_same_bytes(const Buffer<T>& got, const Buffer<T>& want, const std::string& what) {
  const std::vector<T> a = got.read(), b = want.read();
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) ASSERT_EQ(std::memcmp(&a[i], &b[i], sizeof(T)), 0) << what << " at " << i;
  EXPECT_TRUE(got.padding_untouched()) << what;
}

inline std::string name_of(const PermuteShape& s) {
  return std::to_string(s.tokens) + " tokens, " + std::to_string(s.experts) + " experts, hidden " +
         std::to_string(s.hidden) + ", rows " + std::to_string(s.rows);
}

}  // namespace te::testing
