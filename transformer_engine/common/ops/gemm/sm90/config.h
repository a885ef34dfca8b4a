// Tile sizes of the Hopper kernels: CTA tiles, MMA atoms, pipeline stages, and for each kind of kernel how its operand
// tiles are read. Constants alone.
// - A CTA tile is M x N results. Two consumer warpgroups have half of its rows each, in MMA atoms of 64 rows.
// - A k_block is one pipeline stage: 128 bytes of K of each operand.
// - A cluster is two CTAs with neighbouring tiles, which share one operand by multicast.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace te::gemm::sm90 {

constexpr int kStages = 4;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kCluster = 2;    // CTAs
constexpr int kWarps = 4;      // of a warpgroup
constexpr int kWarpgroup = 32 * kWarps;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;

// Numbers of named barriers; __syncthreads() has 0.
constexpr int kConsumerBarrier = 1;
constexpr int kOrderBarrier = kConsumerBarrier + 1;  // one for each consumer

constexpr int kTileK = 64;  // of 2-byte operands
constexpr int kMmaAtomM = 64;
constexpr int kMmaAtomK = 16;

template <int kTileM, int kTileN>
struct TileShape {
  static constexpr int kM = kTileM, kN = kTileN;
  static constexpr int kConsumerM = kM / kConsumers;
  static constexpr int kMmaAtoms = kConsumerM / kMmaAtomM;  // of a consumer
  static constexpr int kFragment = kN / 2;                  // accumulator registers of one thread for an atom
};

constexpr int kSwizzleRow = 128;               // bytes: one row of a box, and the span of the swizzle
constexpr int kSwizzleAtom = 8 * kSwizzleRow;  // bytes after which the swizzle repeats
constexpr int kBoxCols = kSwizzleRow / 2;      // 2-byte elements
constexpr int kBoxBytes = 64 * kSwizzleRow;    // of a box of 64 rows
constexpr int kSharedAlignment = 1024;         // of a tile: address bits 7 to 9 are the row within a swizzle atom

// How the tile of an operand is loaded from its matrix. K-major: a box is all of the tile's rows, 64 of K each.
// MN-major: a box is 64 of K, 64 of the tile's M or N each, and several boxes make the tile.
enum class Major { kK, kMN };

constexpr int box_rows(Major major, int extent) { return major == Major::kK ? extent : kTileK; }
constexpr int boxes(Major major, int extent) { return major == Major::kK ? 1 : extent / kBoxCols; }
constexpr int tile_bytes(int extent) { return extent * kSwizzleRow; }
constexpr int kStageBytes = tile_bytes(384);  // both operands of 256 x 128 or 128 x 256 results

// The operand that the CTAs of a cluster share: the left one where their tiles are neighbours along N.
enum class Multicast { kLeft, kRight };

// How a kernel reads its operand tiles.
template <class TileShapeOf, Major kLeftMajor, Major kRightMajor, Multicast kMulticastOperand>
struct TileConfig {
  using TileShape = TileShapeOf;
  static constexpr Major kLeft = kLeftMajor, kRight = kRightMajor;
  static constexpr Multicast kMulticast = kMulticastOperand;
  // The part of M and N that one CTA loads.
  static constexpr int kLeftPart = kMulticast == Multicast::kLeft ? TileShape::kM / kCluster : TileShape::kM;
  static constexpr int kRightPart = kMulticast == Multicast::kRight ? TileShape::kN / kCluster : TileShape::kN;
  // K is rows of the matrix: in the last k_block, rows of the next group follow the group's own ones and are cleared.
  static constexpr bool kClearsTailK = kLeft == Major::kMN;
  static_assert(tile_bytes(TileShape::kM + TileShape::kN) == kStageBytes);
};

// Row products, FPROP and DGRAD: the CTAs of a cluster are neighbours along N and share the group's rows. Sharing
// weights instead would idle one CTA where groups are short.
using RowTileShape = TileShape<256, 128>;
template <Major kWeights>
using RowTileConfig = TileConfig<RowTileShape, Major::kK, kWeights, Multicast::kLeft>;

// Weight gradients of 2-byte operands: neighbours along M.
using WgradTileShape = TileShape<128, 256>;
using WgradTileConfig = TileConfig<WgradTileShape, Major::kMN, Major::kMN, Multicast::kRight>;

// All products of FP8 operands.
using Fp8TileShape = RowTileShape;
using Fp8TileConfig = TileConfig<Fp8TileShape, Major::kK, Major::kK, Multicast::kLeft>;
constexpr int kFp8TileK = kSwizzleRow;  // also the K of a block scale
constexpr int kFp8MmaAtomK = 32;
static_assert(kFp8MmaAtomK == kMmaAtomK * 2, "descriptor_step() is in bytes");

}  // namespace te::gemm::sm90
