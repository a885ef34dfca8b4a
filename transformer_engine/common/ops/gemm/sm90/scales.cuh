// What scales the partial sums of FP8 operands, as mainloop_fp8.cuh asks for it: factors of blocks, of panels, or
// one a group. Each says which ring of stages it needs, and what is copied into its stages beside the operands.
#pragma once

#include "ops/gemm/grouped/params_fp8.h"
#include "ops/gemm/sm90/epilogue.cuh"
#include "ops/gemm/sm90/mainloop_fp8.cuh"

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
      : pitch_(p.row_scales_pitch), blocks_(e.blocks) {
    const int thread = wgmma::thread_here(), lane = thread % 32;
    weights_ = p.weight_scales[group] + int64_t(e.col / kFp8Depth) * p.weight_scales_pitch + lane;
    weights_left_ = e.blocks - lane;
    const int32_t row = e.row + consumer * Fp8Tile::kConsumerRows + wgmma::fragment_row(thread, 0);
    rows_ = p.row_scales + row;
    left_ = p.common.rows - row;
    if (blocks_ > 0) load(0);
  }
  __device__ __forceinline__ void next(int block) {
    const float weight = __shfl_sync(kWholeWarp, weight_, block % 32);
#pragma unroll
    for (int slab = 0; slab < Fp8Tile::kSlabs; ++slab) {
#pragma unroll
      for (int h = 0; h < 2; ++h) scale_[slab][h] = ahead_[slab][h] * weight;
    }
    wgmma::hold(scale_);  // before the next loads, which else take registers of their own
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
      if (weights_left_ > 0) weight_ = wgmma::load_scale(weights_);
      weights_ += 32;
      weights_left_ -= 32;
    }
#pragma unroll
    for (int slab = 0; slab < Fp8Tile::kSlabs; ++slab) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = slab * wgmma::kSlabRows + 8 * h;
        if (row < left_) ahead_[slab][h] = wgmma::load_scale(rows_ + row);  // behind the last one nobody uses it
      }
    }
    rows_ += pitch_;
  }

  const float *weights_, *rows_;  // what this lane loads next; of its rows, that of the first
  int64_t pitch_;
  int32_t blocks_, weights_left_, left_;  // of the depth, from weights_ on; rows from the thread's first on
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
  // Kept nowhere, since a producer has few registers.
  class Copies {
   public:
    __device__ Copies(Ring& ring, const Fp8WeightParams& p, const Extent& e) : ring_(ring), p_(p), e_(e) {}
    __device__ __forceinline__ uint32_t bytes() const { return left_bytes() + right_bytes(); }
    __device__ __forceinline__ void copy(int stage, int block) const {
      copy_row(ring_.scales[stage], p_.left_scales, block, e_.row, left_bytes(), stage);
      copy_row(ring_.scales[stage] + Fp8Tile::kRows, p_.right_scales, block, e_.col, right_bytes(), stage);
    }

   private:
    __device__ __forceinline__ uint32_t left_bytes() const { return bytes_of(e_.row_end - e_.row, Fp8Tile::kRows); }
    __device__ __forceinline__ uint32_t right_bytes() const { return bytes_of(e_.col_end - e_.col, Fp8Tile::kCols); }
    __device__ __forceinline__ void copy_row(float* to, const Fp8WeightParams::Scales& scales, int block, int32_t col,
                                             uint32_t bytes, int stage) const {
      if (bytes == 0) return;
      wgmma::copy_bytes(to, scales.data + (e_.depth + block) * scales.pitch + col, &ring_.full[stage], bytes);
    }
    static __device__ __forceinline__ uint32_t bytes_of(int32_t left, int most) {
      return left <= 0 ? 0u : left >= most ? uint32_t(most) * 4u : uint32_t(left + 3) / 4u * 16u;
    }

    Ring& ring_;
    const Fp8WeightParams& p_;
    const Extent& e_;
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
