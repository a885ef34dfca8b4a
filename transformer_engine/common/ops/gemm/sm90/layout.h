// Where things lie when Hopper's tensor cores multiply: operand tiles in shared memory as TMA writes them with its 128-
// byte swizzle, the descriptors by which wgmma reads them, and which element each register of the result is. Index
// functions of the PTX ISA's tables alone, so that the host can check them; nothing here touches a device.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace te::gemm::wgmma {

// A tile of results, each consumer's half of its rows in slabs of 64, as many as one instruction has; 64 of the depth
// at a time, in a ring of four stages. 2-byte elements throughout.
constexpr int kTileDepth = 64;
constexpr int kStages = 4;
constexpr int kConsumers = 2;
constexpr int kSlabRows = 64;
constexpr int kInstructionDepth = 16;  // of one wgmma on 2-byte elements
constexpr int kCluster = 2;            // blocks whose tiles lie side by side, and which share an operand

template <int kRowsOfAll, int kColsOfAll>
struct Tile {
  static constexpr int kRows = kRowsOfAll, kCols = kColsOfAll;
  static constexpr int kConsumerRows = kRows / kConsumers;
  static constexpr int kSlabs = kConsumerRows / kSlabRows;
  static constexpr int kFragment = kCols / 2;  // float registers of one thread for a slab
};

constexpr int kLine = 128;              // bytes: one row of a box, and the span of the swizzle
constexpr int kBoxCols = kLine / 2;     // elements along a matrix's rows
constexpr int kChunk = 64 * kLine;      // bytes of 64 lines
constexpr int kAtom = 8 * kLine;        // bytes in which the swizzle repeats: 8 lines
constexpr int kSharedAlignment = 1024;  // of a tile: address bits 7 to 9 say the line within an atom

// How an operand lies in its matrix: along the depth (a box is all of the tile's rows, 64 of the depth each), or across
// it (a box is 64 of the depth, 64 of the tile's rows or columns each; boxes side by side make the tile).
enum class Major { kDepth, kAcross };

constexpr int box_lines(Major major, int extent) { return major == Major::kDepth ? extent : kTileDepth; }
constexpr int boxes(Major major, int extent) { return major == Major::kDepth ? 1 : extent / kBoxCols; }
constexpr int tile_bytes(int extent) { return extent * kLine; }
constexpr int kStageBytes = tile_bytes(384);  // of both operands: 256 x 128 or 128 x 256 results

// Which operand the blocks of a cluster have in common: the left one where their tiles are neighbours in a row.
enum class Common { kLeft, kRight };

// How a product's tiles are read.
template <class TileOf, Major kLeftMajor, Major kRightMajor, Common kInCommon>
struct Plan {
  using Tile = TileOf;
  static constexpr Major kLeft = kLeftMajor, kRight = kRightMajor;
  static constexpr Common kCommon = kInCommon;
  // Of the tile's rows and columns, what one block has copied.
  static constexpr int kLeftPart = kCommon == Common::kLeft ? Tile::kRows / kCluster : Tile::kRows;
  static constexpr int kRightPart = kCommon == Common::kRight ? Tile::kCols / kCluster : Tile::kCols;
  // The depth is rows: behind the group's own ones in its last block lie others'.
  static constexpr bool kForeignDepth = kLeft == Major::kAcross;
  static_assert(tile_bytes(Tile::kRows + Tile::kCols) == kStageBytes);
};

// Where box `i` of a tile begins in the matrix: the column, then the row, as TMA wants them.
struct BoxAt {
  int32_t col, row;
};
TE_HOST_DEVICE BoxAt box_at(Major major, int i, int32_t across, int32_t depth) {
  return major == Major::kDepth ? BoxAt{depth, across} : BoxAt{across + i * kBoxCols, depth};
}
TE_HOST_DEVICE int box_offset(int i) { return i * kChunk; }  // bytes in the tile; one box: i is 0

// The matrix descriptor: start, leading and stride byte offsets in units of 16 bytes, 128-byte swizzle.
//   kDepth:  the stride leads from 8 rows to the next 8; the leading offset is not used
//   kAcross: the stride leads from 8 of the depth to the next 8, the leading offset from 64 rows to the next 64
TE_HOST_DEVICE uint64_t descriptor(Major major, uint32_t address) {
  constexpr uint64_t kUnused = 1;
  const uint64_t leading = major == Major::kDepth ? kUnused : uint64_t(kChunk >> 4);
  const uint64_t stride = uint64_t(kAtom >> 4);
  const uint64_t swizzle_128 = 1;
  return uint64_t((address & 0x3ffff) >> 4) | leading << 16 | stride << 32 | swizzle_128 << 62;
}

// What a descriptor grows by for the next 16 of the depth.
constexpr uint64_t descriptor_step(Major major) {
  return major == Major::kDepth ? (kInstructionDepth * 2) >> 4 : (kInstructionDepth * kLine) >> 4;
}

// Bytes of a slab in the tile of the left operand: 64 lines, or one box.
constexpr int kSlabBytes = kSlabRows * kLine;
static_assert(kSlabBytes == kChunk, "a slab is one box of an operand that lies across the depth");

// ---- the result's registers ----
// Register 4 j + 2 h + c of a thread is the element at row fragment_row(thread, h) of its slab and column
// 8 j + 2 (lane % 4) + c of the tile.
TE_HOST_DEVICE int fragment_row(int thread, int h) { return thread / 32 % 4 * 16 + thread % 32 / 4 + 8 * h; }
TE_HOST_DEVICE int fragment_col(int thread, int j) { return 8 * j + 2 * (thread % 4); }

// Four lanes that share a row trade, so that each stores 16 bytes. Of two-byte results, every lane has a pair of each
// of four neighbouring 8-column pieces; after exchanges with lane ^ 1 and lane ^ 2 it has piece `lane % 4` whole. A
// 4 x 4 transposition: bit by bit, a lane gives what belongs to its partner and takes what belongs to it.
template <int kBit>
TE_HOST_DEVICE void give_pairs(int lane, const uint32_t (&v)[4], uint32_t (&out)[2]) {
  constexpr int kOther = 3 - kBit;  // the index bit that stays
  const bool high = (lane & kBit) != 0;
  out[0] = high ? v[0] : v[kBit];
  out[1] = high ? v[kOther] : v[kBit + kOther];
}
template <int kBit>
TE_HOST_DEVICE void take_pairs(int lane, uint32_t (&v)[4], const uint32_t (&in)[2]) {
  constexpr int kOther = 3 - kBit;
  if ((lane & kBit) != 0) {
    v[0] = in[0];
    v[kOther] = in[1];
  } else {
    v[kBit] = in[0];
    v[kBit + kOther] = in[1];
  }
}

TE_HOST_DEVICE int pairs_col(int lane, int four) { return 32 * four + 8 * (lane % 4); }

// Of float results, a lane has two columns of each of two neighbouring 8-column pieces; after one exchange with
// lane ^ 1 it has four columns of piece `lane % 2`. So four lanes store 64 bytes of a row side by side.
TE_HOST_DEVICE void give_floats(int lane, const float (&v)[4], float (&out)[2]) {
  const bool other = lane % 2 == 0;
  out[0] = other ? v[2] : v[0];
  out[1] = other ? v[3] : v[1];
}
TE_HOST_DEVICE void take_floats(int lane, float (&v)[4], const float (&in)[2]) {
  if (lane % 2 != 0) {
    v[0] = in[0];
    v[1] = in[1];
  } else {
    v[2] = in[0];
    v[3] = in[1];
  }
}
TE_HOST_DEVICE int floats_col(int lane, int two) { return 16 * two + lane % 2 * 8 + lane % 4 / 2 * 4; }

// ---- 16 bytes of a result's row ----

template <class R>
constexpr int kPiece = 16 / int(sizeof(R));  // elements

struct alignas(16) Piece {
  uint32_t words[4];
};

template <class R>
TE_HOST_DEVICE uint32_t bits_in_piece(R value, int i) {  // where element i lies in its word
  if constexpr (sizeof(R) == 4) {
    return te::detail::bits_of(value);
  } else {
    return uint32_t(value.bits) << (i % 2 * 16);
  }
}
template <class R>
TE_HOST_DEVICE R of_piece(const uint32_t (&words)[4], int i) {
  if constexpr (sizeof(R) == 4) {
    return te::detail::float_of(words[i]);
  } else {
    return R{uint16_t(words[i / 2] >> (i % 2 * 16))};
  }
}

template <class R>
TE_HOST_DEVICE void store_whole_piece(R* to, const uint32_t (&words)[4]) {
  *reinterpret_cast<Piece*>(to) = Piece{{words[0], words[1], words[2], words[3]}};
}
// The first `count` elements of a piece, which may be more than it has or less than one; `wide` where 16 bytes may be
// moved at once.
template <class R>
TE_HOST_DEVICE void store_piece(R* to, const uint32_t (&words)[4], int64_t count, bool wide) {
  if (wide && count >= kPiece<R>) return store_whole_piece(to, words);
  for (int i = 0; i < kPiece<R>; ++i) {
    if (i < count) to[i] = of_piece<R>(words, i);
  }
}
template <class R>
TE_HOST_DEVICE void load_piece(const R* from, uint32_t (&words)[4], int64_t count, bool wide) {
  if (wide && count >= kPiece<R>) {
    const Piece piece = *reinterpret_cast<const Piece*>(from);
    for (int i = 0; i < 4; ++i) words[i] = piece.words[i];
    return;
  }
  for (uint32_t& word : words) word = 0;
  for (int i = 0; i < kPiece<R>; ++i) {
    if (i < count) words[i * int(sizeof(R)) / 4] |= bits_in_piece(from[i], i);
  }
}

// ---- the ring of stages ----
// Full and empty barriers complete once a round; a producer finds fresh empty barriers as if they had completed.
struct RingPlace {
  uint32_t step = 0;
  static_assert((kStages & (kStages - 1)) == 0, "steps may wrap around");
  TE_HOST_DEVICE int stage() const { return int(step % kStages); }
  TE_HOST_DEVICE uint32_t full_parity() const { return step / kStages & 1u; }
  TE_HOST_DEVICE uint32_t empty_parity() const { return full_parity() ^ 1u; }
  TE_HOST_DEVICE void advance() { ++step; }
};

}  // namespace te::gemm::wgmma
