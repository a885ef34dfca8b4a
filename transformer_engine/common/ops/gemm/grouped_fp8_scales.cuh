// What scales the partial sums of FP8 operands, as wgmma_fp8_mainloop.cuh asks for it: factors of blocks, of panels, or
// one a group. Each says which ring of stages it needs, and what is copied into its stages beside the operands.
#pragma once

#include "ops/gemm/grouped_epilogue.cuh"
#include "ops/gemm/grouped_fp8_params.h"
#include "ops/gemm/wgmma_fp8_mainloop.cuh"

namespace te::gemm::grouped {

using wgmma::Fp8Partial;
using wgmma::Fp8Sums;
using wgmma::Fp8Tile;
static_assert(wgmma::kFp8Depth == kFp8Depth && Fp8Tile::kRows == RowTile::kRows && Fp8Tile::kCols == RowTile::kCols);

// Of scales that do not come with the stages.
struct NoCopies {
  template <class Ring, class Params>
  __device__ NoCopies(Ring&, const Params&, const Extent&) {}
  __device__ uint32_t bytes() const { return 0; }
  __device__ void copy(int, int) const {}
};

// One scale a row and 128 of the depth, which a thread loads a block ahead, and one for 128 x 128 of a weight: that of
// 32 blocks is loaded by 32 lanes. (One that all lanes load alike goes to a uniform register, and the warp waits.)
class BlockScales {
 public:
  using Ring = wgmma::Ring;
  using Copies = NoCopies;
  static constexpr bool kInStage = false;

  __device__ BlockScales(const Ring&, const Fp8RowParams& p, int32_t group, const Extent& e, int consumer)
      : p_(p),
        weights_(p.weight_scales[group] + int64_t(e.col / kFp8Depth) * p.weight_scales_pitch),
        blocks_(e.blocks),
        row_(e.row + consumer * Fp8Tile::kConsumerRows + wgmma::fragment_row(int(threadIdx.x), 0)) {
    if (blocks_ > 0) load(0);
  }
  __device__ __forceinline__ void next(int block) {
    const float weight = __shfl_sync(kWholeWarp, weight_, block % 32);
#pragma unroll
    for (int slab = 0; slab < Fp8Tile::kSlabs; ++slab) {
#pragma unroll
      for (int h = 0; h < 2; ++h) scale_[slab][h] = ahead_[slab][h] * weight;
    }
    if (block + 1 < blocks_) load(block + 1);
  }
  __device__ __forceinline__ void promote(int, int slab, const Fp8Partial& partial, Fp8Partial& sums) const {
#pragma unroll
    for (int i = 0; i < Fp8Tile::kFragment; ++i) sums[i] = fmaf(partial[i], scale_[slab][i / 2 % 2], sums[i]);
  }
  __device__ __forceinline__ void finish(Fp8Sums&) const {}

 private:
  __device__ __forceinline__ void load(int block) {
    if (block % 32 == 0) {
      const int of_lane = block + int(threadIdx.x) % 32;
      weight_ = wgmma::load_scale(weights_ + (of_lane < blocks_ ? of_lane : blocks_ - 1));
    }
    const float* rows = p_.row_scales + block * p_.row_scales_pitch;
    const int32_t last = p_.common.rows - 1;  // rows behind the group are not used, nor are their scales
#pragma unroll
    for (int slab = 0; slab < Fp8Tile::kSlabs; ++slab) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int32_t row = row_ + slab * wgmma::kSlabRows + 8 * h;
        ahead_[slab][h] = wgmma::load_scale(rows + (row < last ? row : last));
      }
    }
  }

  const Fp8RowParams& p_;
  const float* weights_;
  int32_t blocks_, row_;  // of the depth; the thread's first row, which ends within 32 bits
  float weight_ = 0.f;
  float ahead_[Fp8Tile::kSlabs][2] = {}, scale_[Fp8Tile::kSlabs][2] = {};
};

// One scale a panel and column of each operand. They lie in the stage, beside what they scale.
class PanelScales {
 public:
  using Ring = wgmma::ScaledRing;
  static constexpr bool kInStage = true;

  __device__ PanelScales(const Ring& ring, const Fp8WeightParams&, int32_t, const Extent&, int consumer)
      : ring_(ring), consumer_(consumer) {}
  __device__ void next(int) const {}
  __device__ __forceinline__ void promote(int stage, int slab, const Fp8Partial& partial, Fp8Partial& sums) const {
    struct alignas(8) Two {
      float of[2];
    };
    const int thread = int(threadIdx.x);
    const float* rows = ring_.scales[stage] + consumer_ * Fp8Tile::kConsumerRows + slab * wgmma::kSlabRows;
    const float* cols = ring_.scales[stage] + Fp8Tile::kRows;
    const float row[2] = {rows[wgmma::fragment_row(thread, 0)], rows[wgmma::fragment_row(thread, 1)]};
#pragma unroll
    for (int j = 0; j < Fp8Tile::kFragment / 4; ++j) {
      if (j % 4 == 0) wgmma::keep_order();  // else all scales are loaded at once, into registers that are not there
      const Two col = *reinterpret_cast<const Two*>(cols + wgmma::fragment_col(thread, j));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[4 * j + i] = fmaf(partial[4 * j + i], row[i / 2] * col.of[i % 2], sums[4 * j + i]);
      }
    }
  }
  __device__ __forceinline__ void finish(Fp8Sums&) const {}

  // What a tile has of a panel's scales, for the producer: whole pieces of 16 bytes, as the scales' rows are padded.
  class Copies {
   public:
    __device__ Copies(Ring& ring, const Fp8WeightParams& p, const Extent& e)
        : ring_(ring),
          left_(p.left_scales.data + e.depth * p.left_scales.pitch + e.row),
          right_(p.right_scales.data + e.depth * p.right_scales.pitch + e.col),
          left_pitch_(p.left_scales.pitch),
          right_pitch_(p.right_scales.pitch),
          left_bytes_(bytes_of(e.row_end - e.row, Fp8Tile::kRows)),
          right_bytes_(bytes_of(e.col_end - e.col, Fp8Tile::kCols)) {}
    __device__ uint32_t bytes() const { return left_bytes_ + right_bytes_; }
    __device__ void copy(int stage, int block) const {
      float* to = ring_.scales[stage];
      uint64_t* full = &ring_.full[stage];
      if (left_bytes_ > 0) wgmma::copy_bytes(to, left_ + block * left_pitch_, full, left_bytes_);
      if (right_bytes_ > 0) wgmma::copy_bytes(to + Fp8Tile::kRows, right_ + block * right_pitch_, full, right_bytes_);
    }

   private:
    static __device__ uint32_t bytes_of(int32_t left, int most) {
      return left <= 0 ? 0u : left >= most ? uint32_t(most) * 4u : uint32_t(left + 3) / 4u * 16u;
    }

    Ring& ring_;
    const float *left_, *right_;
    int64_t left_pitch_, right_pitch_;
    uint32_t left_bytes_, right_bytes_;
  };

 private:
  const Ring& ring_;
  int consumer_;
};

// One scale a group and operand.
class GroupScale {
 public:
  using Ring = wgmma::Ring;
  using Copies = NoCopies;
  static constexpr bool kInStage = false;

  __device__ GroupScale(const Ring&, const Fp8RowParams& p, int32_t group, const Extent& e, int)
      : GroupScale(p.row_scales[group], p.weight_scales[group][0], e) {}
  __device__ GroupScale(const Ring&, const Fp8WeightParams& p, int32_t group, const Extent& e, int)
      : GroupScale(p.left_scales.data[group], p.right_scales.data[group], e) {}
  __device__ void next(int) const {}
  __device__ __forceinline__ void promote(int, int, const Fp8Partial& partial, Fp8Partial& sums) const {
#pragma unroll
    for (int i = 0; i < Fp8Tile::kFragment; ++i) sums[i] += partial[i];
  }
  __device__ __forceinline__ void finish(Fp8Sums& sums) const {
#pragma unroll
    for (auto& slab : sums) {
#pragma unroll
      for (float& sum : slab) sum = wgmma::product_of(sum, scale_);
    }
  }

 private:
  __device__ GroupScale(float left, float right, const Extent& e) : scale_(e.blocks > 0 ? left * right : 1.f) {}

  float scale_;  // 1 where nothing is summed up, whatever the scales are
};

}  // namespace te::gemm::grouped
