// Scales of FP8 partial sums for mainloop_fp8.cuh: of blocks, of panels, or one for each group. Each class names the
// pipeline that it needs, and the scales that are loaded into its stages with the operands.
#pragma once

#include "ops/gemm/sm90/epilogue.cuh"
#include "ops/gemm/sm90/mainloop_fp8.cuh"

namespace te::gemm::sm90 {

// Of scales that are not loaded into the stages.
struct NoLoads {
  template <class Pipeline, class Params>
  __device__ NoLoads(Pipeline&, const Params&, const WorkTile&) {}
  __device__ uint32_t bytes() const { return 0; }
  __device__ void load(int, int) const {}
};

// One scale for 1 x 128 of the rows, which a thread loads one k_block ahead, and one for 128 x 128 of a weight, which
// 32 lanes load for 32 k_blocks. (A load of one address by all lanes goes to a uniform register, and the warp waits.)
class BlockScales {
 public:
  using Pipeline = SmemPipeline;
  using Loads = NoLoads;
  static constexpr bool kInStage = false;

  template <class Params>
  __device__ BlockScales(const Pipeline&, const Params& p, int32_t group, const WorkTile& tile, int consumer)
      : pitch_(p.row_scales_pitch), k_blocks_(tile.k_blocks) {
    const int thread = read_thread_idx(), lane = thread % 32;
    weights_ = p.weight_scales[group] + int64_t(tile.n / kFp8TileK) * p.weight_scales_pitch + lane;
    weights_left_ = tile.k_blocks - lane;
    const int32_t row = tile.m + consumer * Fp8TileShape::kConsumerM + fragment_row(thread, 0);
    rows_ = p.row_scales + row;
    left_ = p.common.rows - row;
    if (k_blocks_ > 0) load(0);
  }
  __device__ __forceinline__ void next(int k_block) {
    const float weight = __shfl_sync(kFullWarp, weight_, k_block % 32);
#pragma unroll
    for (int atom = 0; atom < Fp8TileShape::kMmaAtoms; ++atom) {
#pragma unroll
      for (int h = 0; h < 2; ++h) scale_[atom][h] = ahead_[atom][h] * weight;
    }
    fence_accumulators(scale_);  // before the next loads, which would otherwise take further registers
    if (k_block + 1 < k_blocks_) load(k_block + 1);
  }
  __device__ __forceinline__ void promote(int, int atom, const Fp8Partial& partial, Fp8Partial& accum) const {
#pragma unroll
    for (int i = 0; i < Fp8TileShape::kFragment; ++i) accum[i] = fmaf(partial[i], scale_[atom][i / 2 % 2], accum[i]);
  }
  __device__ __forceinline__ void finish(Fp8Accum&) const {}

 private:
  __device__ __forceinline__ void load(int k_block) {
    if (k_block % 32 == 0) {
      if (weights_left_ > 0) weight_ = load_scale(weights_);
      weights_ += 32;
      weights_left_ -= 32;
    }
#pragma unroll
    for (int atom = 0; atom < Fp8TileShape::kMmaAtoms; ++atom) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = atom * kMmaAtomM + 8 * h;
        if (row < left_) ahead_[atom][h] = load_scale(rows_ + row);  // rows beyond the last are not used
      }
    }
    rows_ += pitch_;
  }

  const float *weights_, *rows_;  // the lane's next weight scale; the next scale of the thread's first row
  int64_t pitch_;
  int32_t k_blocks_, weights_left_, left_;  // k_blocks from weights_ on; rows from the thread's first on
  float weight_ = 0.f;
  float ahead_[Fp8TileShape::kMmaAtoms][2] = {}, scale_[Fp8TileShape::kMmaAtoms][2] = {};
};

// One scale for each panel and column of each operand, in the stage of their operands.
template <class Params>
class PanelScales {
 public:
  using Pipeline = ScaledSmemPipeline;
  static constexpr bool kInStage = true;

  __device__ PanelScales(const Pipeline& pipeline, const Params&, int32_t, const WorkTile&, int consumer)
      : pipeline_(pipeline), consumer_(consumer) {}
  __device__ void next(int) const {}
  __device__ __forceinline__ void promote(int stage, int atom, const Fp8Partial& partial, Fp8Partial& accum) const {
    struct alignas(8) Two {
      float of[2];
    };
    const int thread = int(threadIdx.x);
    const float* row_scales = pipeline_.scales[stage] + consumer_ * Fp8TileShape::kConsumerM + atom * kMmaAtomM;
    const float* col_scales = pipeline_.scales[stage] + Fp8TileShape::kM;
    const float row[2] = {row_scales[fragment_row(thread, 0)], row_scales[fragment_row(thread, 1)]};
#pragma unroll
    for (int j = 0; j < Fp8TileShape::kFragment / 4; ++j) {
      if (j % 4 == 0) compiler_fence();  // or all scales are loaded at once and registers spill
      const Two col = *reinterpret_cast<const Two*>(col_scales + fragment_col(thread, j));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        accum[4 * j + i] = fmaf(partial[4 * j + i], row[i / 2] * col.of[i % 2], accum[4 * j + i]);
      }
    }
  }
  __device__ __forceinline__ void finish(Fp8Accum&) const {}

  // The producer's loads of a tile's scales: multiples of 16 bytes, to which the rows of scales are padded. Addresses
  // are recomputed at each load, since a producer has few registers.
  class Loads {
   public:
    __device__ Loads(Pipeline& pipeline, const Params& p, const WorkTile& tile)
        : pipeline_(pipeline), p_(p), tile_(tile) {}
    __device__ __forceinline__ uint32_t bytes() const { return left_bytes() + right_bytes(); }
    __device__ __forceinline__ void load(int stage, int k_block) const {
      load_row(pipeline_.scales[stage], p_.left_scales, k_block, tile_.m, left_bytes(), stage);
      load_row(pipeline_.scales[stage] + Fp8TileShape::kM, p_.right_scales, k_block, tile_.n, right_bytes(), stage);
    }

   private:
    __device__ __forceinline__ uint32_t left_bytes() const { return bytes_of(tile_.m_end - tile_.m, Fp8TileShape::kM); }
    __device__ __forceinline__ uint32_t right_bytes() const {
      return bytes_of(tile_.n_end - tile_.n, Fp8TileShape::kN);
    }
    __device__ __forceinline__ void load_row(float* to, const typename Params::Scales& scales, int k_block, int32_t col,
                                             uint32_t bytes, int stage) const {
      if (bytes == 0) return;
      bulk_load(to, scales.data + (tile_.k + k_block) * scales.pitch + col, &pipeline_.full[stage], bytes);
    }
    static __device__ __forceinline__ uint32_t bytes_of(int32_t left, int most) {
      return left <= 0 ? 0u : left >= most ? uint32_t(most) * 4u : uint32_t(left + 3) / 4u * 16u;
    }

    Pipeline& pipeline_;
    const Params& p_;
    const WorkTile& tile_;
  };

 private:
  const Pipeline& pipeline_;
  int consumer_;
};

// One scale for each group and operand.
class GroupScale {
 public:
  using Pipeline = SmemPipeline;
  using Loads = NoLoads;
  static constexpr bool kInStage = false;

  template <class Params>
  __device__ GroupScale(const Pipeline&, const Params& p, int32_t group, const WorkTile& tile, int)
      : GroupScale(p.left_scale(group), p.right_scale(group), tile) {}
  __device__ void next(int) const {}
  __device__ __forceinline__ void promote(int, int, const Fp8Partial& partial, Fp8Partial& accum) const {
#pragma unroll
    for (int i = 0; i < Fp8TileShape::kFragment; ++i) accum[i] += partial[i];
  }
  __device__ __forceinline__ void finish(Fp8Accum& accum) const {
#pragma unroll
    for (auto& atom : accum) {
#pragma unroll
      for (float& value : atom) value = multiply_rn(value, scale_);
    }
  }

 private:
  __device__ GroupScale(float left, float right, const WorkTile& tile)
      : scale_(tile.k_blocks > 0 ? left * right : 1.f) {}

  float scale_;  // 1 where K is empty, for any scales
};

}  // namespace te::gemm::sm90
