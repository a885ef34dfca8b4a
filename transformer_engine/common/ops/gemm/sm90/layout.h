// Layouts that Hopper's tensor cores and TMA prescribe: operand tiles in shared memory with the 128-byte swizzle, the
// matrix descriptors of wgmma, and the element of the result that each register holds. Index functions from the tables
// of the PTX ISA alone, so that the host can check them.
#pragma once

#include "ops/gemm/sm90/config.h"

namespace te::gemm::sm90 {

// Where box `i` of a tile begins in the matrix, in TMA's order of coordinates.
struct BoxCoord {
  int32_t col, row;
};
// A box of results: `rows` of kMmaAtomM rows.
struct ResultBox {
  int32_t col, row, rows;
};
TE_HOST_DEVICE BoxCoord box_coord(Major major, int i, int32_t mn, int32_t k) {
  return major == Major::kK ? BoxCoord{k, mn} : BoxCoord{mn + i * kBoxCols, k};
}
TE_HOST_DEVICE int box_offset(int i) { return i * kBoxBytes; }  // bytes in the tile; one box: i is 0

// The matrix descriptor: start, leading and stride byte offsets in units of 16 bytes, 128-byte swizzle.
//   kK:  the stride leads from 8 rows to the next 8; the leading offset is not used
//   kMN: the stride leads from 8 of K to the next 8, the leading offset from 64 of M or N to the next 64
TE_HOST_DEVICE uint64_t descriptor(Major major, uint32_t address) {
  constexpr uint64_t kUnused = 1;
  const uint64_t leading = major == Major::kK ? kUnused : uint64_t(kBoxBytes >> 4);
  const uint64_t stride = uint64_t(kSwizzleAtom >> 4);
  const uint64_t swizzle_128 = 1;
  return uint64_t((address & 0x3ffff) >> 4) | leading << 16 | stride << 32 | swizzle_128 << 62;
}

// The increment of a descriptor for the next MMA atom along K.
constexpr uint64_t descriptor_step(Major major) {
  return major == Major::kK ? (kMmaAtomK * 2) >> 4 : (kMmaAtomK * kSwizzleRow) >> 4;
}

// Bytes of an MMA atom's rows in the tile of the left operand: 64 swizzle rows, or one box.
constexpr int kMmaAtomBytes = kMmaAtomM * kSwizzleRow;
static_assert(kMmaAtomBytes == kBoxBytes, "the rows of an MMA atom are one box of an MN-major operand");

// ---- accumulator registers ----
// Register 4 j + 2 h + c of a thread is the element at row fragment_row(thread, h) of its MMA atom and column
// 8 j + 2 (lane % 4) + c of the tile.
TE_HOST_DEVICE int fragment_row(int thread, int h) { return thread / 32 % 4 * 16 + thread % 32 / 4 + 8 * h; }
TE_HOST_DEVICE int fragment_col(int thread, int j) { return 8 * j + 2 * (thread % 4); }

// Four lanes that share a row exchange elements, so that each stores 16 bytes. With two-byte results, each lane has a
// pair of each of four neighbouring 8-column pieces; after exchanges with lane ^ 1 and lane ^ 2 it has all of piece
// `lane % 4`. This is a 4 x 4 transposition, one bit of the lane at a time.
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

// With float results, a lane has two columns of each of two neighbouring 8-column pieces; after one exchange with
// lane ^ 1 it has four columns of piece `lane % 2`, and four lanes store 64 adjacent bytes of a row.
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
TE_HOST_DEVICE uint32_t bits_in_piece(R value, int i) {  // of element i in the word that holds it
  if constexpr (sizeof(R) == 4) {
    return te::detail::bits_of(value);
  } else {
    return uint32_t(value.bits) << (i % 2 * 16);
  }
}
template <class R>
TE_HOST_DEVICE R element_of_piece(const uint32_t (&words)[4], int i) {
  if constexpr (sizeof(R) == 4) {
    return te::detail::float_of(words[i]);
  } else {
    return R{uint16_t(words[i / 2] >> (i % 2 * 16))};
  }
}

template <class R>
TE_HOST_DEVICE void store_full_piece(R* to, const uint32_t (&words)[4]) {
  *reinterpret_cast<Piece*>(to) = Piece{{words[0], words[1], words[2], words[3]}};
}
// The first `count` elements of a piece; `count` may be negative or above its size. `wide`: the row begins on 16 bytes.
template <class R>
TE_HOST_DEVICE void store_piece(R* to, const uint32_t (&words)[4], int64_t count, bool wide) {
  if (wide && count >= kPiece<R>) return store_full_piece(to, words);
  for (int i = 0; i < kPiece<R>; ++i) {
    if (i < count) to[i] = element_of_piece<R>(words, i);
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

}  // namespace te::gemm::sm90
