// TE_SCALING_TABLE for C++, for the engine and the extension: a row by its number, the shape of the scales, and the
// scale of an element. Rows and columns are those of a direction's data.
#ifndef TRANSFORMER_ENGINE_SCALING_H_
#define TRANSFORMER_ENGINE_SCALING_H_

#include <array>
#include <cstdint>

#include "transformer_engine/transformer_engine.h"

namespace te {

struct ScalingRow {
  const char* name;
  int64_t block_rows, block_cols;
  bool across;
  const char* words;

  constexpr bool is_per_tensor() const { return block_rows == 0; }
  // Whether both directions of a matrix hold the same values.
  constexpr bool same_both_ways() const { return block_rows == block_cols; }
};

inline constexpr ScalingRow kScalings[] = {
#define TE_SCALING_ROW(name, number, block_rows, block_cols, across, words) \
  {#name, block_rows, block_cols, across != 0, words},
    TE_SCALING_TABLE(TE_SCALING_ROW)
#undef TE_SCALING_ROW
};
inline constexpr int kScalingCount = int(sizeof(kScalings) / sizeof(kScalings[0]));

constexpr bool is_scaling(int64_t number) { return number >= 0 && number < kScalingCount; }
constexpr const ScalingRow& scaling_row(te_scaling scaling) { return kScalings[int(scaling)]; }

namespace detail {
template <int64_t kBlock, class Int>
constexpr Int blocks_of(const Int& n) {
  if constexpr (kBlock == 1) return n;
  return (n + (kBlock - 1)) / (kBlock > 0 ? kBlock : 1);
}

template <int64_t kRows, int64_t kCols, bool kAcross, class Int>
std::array<Int, 2> scale_shape(const Int& rows, const Int& cols) {
  if constexpr (kRows == 0) return {Int(1), Int(1)};
  const Int down = blocks_of<kRows>(rows), along = blocks_of<kCols>(cols);
  return {kAcross ? along : down, ((kAcross ? down : along) + 3) / 4 * 4};
}

template <int64_t kRows, int64_t kCols, bool kAcross>
constexpr std::array<int64_t, 2> scale_at(int64_t row, int64_t col) {
  if constexpr (kRows == 0) return {0, 0};
  const int64_t down = row / (kRows > 0 ? kRows : 1), along = col / (kCols > 0 ? kCols : 1);
  return {kAcross ? along : down, kAcross ? down : along};
}
}  // namespace detail

// The shape of the scales of [rows, cols] data; [1, 1] for one scale a tensor. Int: int64_t, or a symbolic integer.
template <class Int>
std::array<Int, 2> scale_shape(te_scaling scaling, const Int& rows, const Int& cols) {
  switch (scaling) {
#define TE_SCALING_SHAPE(name, number, block_rows, block_cols, across, words) \
  case TE_SCALING_##name:                                                     \
    return detail::scale_shape<block_rows, block_cols, across != 0>(rows, cols);
    TE_SCALING_TABLE(TE_SCALING_SHAPE)
#undef TE_SCALING_SHAPE
  }
  return {Int(0), Int(0)};
}

// Row and column of the scale of an element.
constexpr std::array<int64_t, 2> scale_at(te_scaling scaling, int64_t row, int64_t col) {
  switch (scaling) {
#define TE_SCALING_AT(name, number, block_rows, block_cols, across, words) \
  case TE_SCALING_##name:                                                  \
    return detail::scale_at<block_rows, block_cols, across != 0>(row, col);
    TE_SCALING_TABLE(TE_SCALING_AT)
#undef TE_SCALING_AT
  }
  return {0, 0};
}

}  // namespace te

#endif  // TRANSFORMER_ENGINE_SCALING_H_
