// rope, state of a warp of the CUDA path: the plan of a launch, the address of a head, and the angles of a position.
#pragma once

#include "core/reduce.cuh"
#include "core/vec.cuh"
#include "ops/rope/rope_math.h"

namespace te::rope::cuda {

constexpr int kPairsAtOnce = 2;  // pairs whose angles a lane loads at once

struct Strides {
  int64_t seq, batch, group, head;
};

// Exact division by a constant of numbers below 2^31: n * ceil(2^shift / by) >> shift. by = 0: the quotient is 0.
struct Divisor {
  uint32_t by, magic, shift;

  static Divisor of(uint32_t by) {
    if (by == 0) return {0, 0, 0};
    uint32_t bits = 0;
    while ((uint64_t(1) << bits) < by) ++bits;
    return {by, uint32_t(((uint64_t(1) << (31 + bits)) + by - 1) / by), 31 + bits};
  }
  __device__ __forceinline__ int32_t quotient(int32_t n) const {
    return by == 0 ? 0 : int32_t((uint64_t(uint32_t(n)) * magic) >> shift);
  }
};

struct KernelPart {
  const void* in;
  void* out;
  Strides in_strides, out_strides;
  Divisor in_group, out_group;  // heads per group; 0: one group
  int32_t first_head, heads;    // among the heads of q, k and v
};

// A slot is a lane's share of one head: two vectors A and B of N elements. In the rotated columns its 2 N elements are
// N complete pairs (A low and B high ones, or, interleaved, 2 N neighbours); other columns are copied.
struct KernelPlan {
  KernelPart parts[kParts];
  const float* freqs[2];  // of q, of k
  int64_t freqs_pitch[2];
  int64_t freqs_rows[2];
  const int32_t* start;
  uint32_t positions, batch;
  int32_t head_dim, rot_dim, slots, rot_slots, tables;
  int32_t width;          // slots a warp takes at a time
  int32_t heads_at_once;  // heads whose slots fill the warp
  uint32_t splits;        // warps of a position
  int32_t split_heads;    // heads of a warp
  bool backward;
};

struct Position {
  uint32_t s, b;
};

__device__ __forceinline__ int64_t position_offset(const Strides& strides, const Position& at) {
  return at.s * strides.seq + at.b * strides.batch;
}

__device__ __forceinline__ int64_t head_offset(const Strides& strides, const Divisor& heads_per_group, int32_t head) {
  const int32_t group = heads_per_group.quotient(head);
  return group * strides.group + (head - group * int32_t(heads_per_group.by)) * strides.head;
}

// The angles of a position in shared memory: cosines and signed sines for the 2 N elements of each slot, in fours, so
// that neighbouring slots read neighbouring 16 bytes.
template <int N>
struct AngleTable {
  static constexpr int kElements = 2 * N;
  static constexpr int kGroup = N == 1 ? 2 : 4;

  static TE_HOST_DEVICE int floats(int slots) { return 2 * kElements * slots; }
  static __device__ __forceinline__ int place(int element, int slot, int slots) {
    return (element / kGroup * slots + slot) * kGroup + element % kGroup;
  }
};

// The other element of a pair, among the 2 N of a slot.
template <int N, bool kInterleaved>
__device__ __forceinline__ constexpr int partner_of(int element) {
  return element ^ (kInterleaved ? 1 : N);
}

// By all lanes of a warp; `first_slot` is the first of the current plan.width slots.
template <int N, bool kInterleaved>
__device__ __forceinline__ void fill_angles(const KernelPlan& plan, const Position& at, int table, int first_slot,
                                            float* cosines) {
  using Table = AngleTable<N>;
  const int slots = plan.width;
  float* weights = cosines + Table::kElements * slots;
  const int64_t row = at.s + (plan.start == nullptr ? 0 : plan.start[at.b]);
  const bool known = row >= 0 && row < plan.freqs_rows[table];
  const float* angles =
      plan.freqs[table] + row * plan.freqs_pitch[table] + first_slot * (kInterleaved ? Table::kElements : N);
  const int low_to_high = kInterleaved ? 1 : plan.rot_dim / 2;
  const int pairs = min(slots, plan.rot_slots - first_slot) * N;
  for (int first = threadIdx.x; first < pairs; first += kWarp * kPairsAtOnce) {
    float low[kPairsAtOnce], high[kPairsAtOnce];
#pragma unroll
    for (int k = 0; k < kPairsAtOnce; ++k) {
      const int pair = first + k * kWarp;
      low[k] = high[k] = te::detail::float_of(kNaNBits);
      if (pair >= pairs || !known) continue;
      low[k] = angles[kInterleaved ? 2 * pair : pair];
      high[k] = angles[(kInterleaved ? 2 * pair : pair) + low_to_high];
    }
#pragma unroll
    for (int k = 0; k < kPairsAtOnce; ++k) {
      const int pair = first + k * kWarp;
      if (pair >= pairs) continue;
      const SinCos of_low = sin_cos(low[k]);
      SinCos of_high = of_low;
      if (low[k] != high[k]) of_high = sin_cos(high[k]);  // rare: the two angles of a pair are mostly equal
      const int slot = pair / N;
      const int low_at = Table::place(kInterleaved ? pair % N * 2 : pair % N, slot, slots);
      const int high_at = Table::place(kInterleaved ? pair % N * 2 + 1 : pair % N + N, slot, slots);
      cosines[low_at] = of_low.cos;
      cosines[high_at] = of_high.cos;
      weights[plan.backward ? high_at : low_at] = signed_sine(true, of_low.sin);
      weights[plan.backward ? low_at : high_at] = signed_sine(false, of_high.sin);
    }
  }
}

// A lane's angles of a slot.
template <int N>
struct SlotAngles {
  float cosine[2 * N];
  float weight[2 * N];

  __device__ __forceinline__ void read(const float* cosines, int slot, int slots) {
    using Table = AngleTable<N>;
    constexpr int kGroup = Table::kGroup;
#pragma unroll
    for (int first = 0; first < 2 * N; first += kGroup) {
      const float* from = cosines + Table::place(first, slot, slots);
      load_group<kGroup>(from, cosine + first);
      load_group<kGroup>(from + Table::kElements * slots, weight + first);
    }
  }

 private:
  template <int K>
  static __device__ __forceinline__ void load_group(const float* from, float* to) {
    using Group = std::conditional_t<K == 2, float2, float4>;
    const Group group = *reinterpret_cast<const Group*>(from);
    memcpy(to, &group, sizeof(group));
  }
};

}  // namespace te::rope::cuda
