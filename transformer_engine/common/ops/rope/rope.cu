// rope, CUDA path: a warp processes one position and up to about 24 heads of q, k and v. Its lanes load the 16-byte
// vectors of the next heads ahead of use, into slots of shared memory that no other lane touches; compute each sine and
// cosine of the position once for the warp; and keep those of their columns in registers over all heads. There is no
// barrier. Memory-bound: 4 bytes an element of q and k for 16-bit types, and the angles.
#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "core/device.h"
#include "ops/rope/rope.cuh"

namespace te::rope::cuda {

namespace {

constexpr int kWarps = 4;        // of a block, independent of each other
constexpr int kBlocksPerSm = 6;  // leaves 80 registers for a thread
constexpr int kDepth = 3;        // heads that a lane loads ahead
constexpr int kItems = 6;        // steps of a warp over the heads; more heads are split over more warps
constexpr int kWarpsWanted = 132 * kWarps * kBlocksPerSm;  // fewer positions are split further, to fill an H200

// A vector in its memory format.
template <class T, int N>
using Raw = std::conditional_t<N == 1, T, uint4>;

template <class T, int N>
__device__ __forceinline__ void store(T* to, const Raw<T, N>& x) {
  Packed<T, N> packed;
  memcpy(&packed, &x, sizeof(x));
  store_packed<T, N>(to, packed);
}

template <class T, int N, bool kInterleaved>
__device__ __forceinline__ void rotate(Raw<T, N> (&x)[2], const SlotAngles<N>& angles) {
  Packed<T, N> packed[2];
  memcpy(packed, x, sizeof(packed));
  float in[2][N], out[2][N];
  widen<T, N>(packed[0], in[0]);
  widen<T, N>(packed[1], in[1]);
#pragma unroll
  for (int element = 0; element < 2 * N; ++element) {
    const int partner = partner_of<N, kInterleaved>(element);
    out[element / N][element % N] = rotated(in[element / N][element % N], in[partner / N][partner % N],
                                            angles.cosine[element], angles.weight[element]);
  }
  packed[0] = narrow<T, N>(out[0]);
  packed[1] = narrow<T, N>(out[1]);
  memcpy(x, packed, sizeof(packed));
}

// The columns of a lane in each of its heads.
struct Columns {
  int first;        // of A
  int low_to_high;  // from A to B; 0: no B
  bool rotates;
  bool works;

  template <int N, bool kInterleaved>
  static __device__ __forceinline__ Columns of(const KernelPlan& plan, int slot, int head_of_warp) {
    const bool rotates = slot < plan.rot_slots;
    const int copied = plan.rot_dim + (slot - plan.rot_slots) * 2 * N;
    const int first = !rotates ? copied : kInterleaved ? slot * 2 * N : slot * N;
    const int low_to_high = rotates && !kInterleaved ? plan.rot_dim / 2 : first + N < plan.head_dim ? N : 0;
    return {first, low_to_high, rotates, slot < plan.slots && head_of_warp < plan.heads_at_once};
  }
};

// The heads of a warp in one part: [begin, end), counted within the part.
struct Heads {
  int begin, end;
};

__device__ __forceinline__ Heads heads_of(const KernelPlan& plan, const KernelPart& part, int split) {
  const int first = split * plan.split_heads;
  return {max(first - part.first_head, 0), min(first + plan.split_heads - part.first_head, part.heads)};
}

// Loads the heads of a warp in their order, one step (plan.heads_at_once heads) after another.
template <class T, int N>
class Asker {
 public:
  __device__ __forceinline__ Asker(const KernelPlan& plan, const Position& at, int split, const Columns& columns,
                                   int head_of_warp, Raw<T, N>* slots)
      : plan_(plan), at_(at), split_(split), columns_(columns), head_of_warp_(head_of_warp), slots_(slots) {}

  // Every call commits one group of copies, empty past the last head.
  __device__ __forceinline__ void next() {
    while (heads_.begin >= heads_.end && ++part_ < kParts) {
      const KernelPart& part = plan_.parts[part_];
      heads_ = heads_of(plan_, part, split_);
      in_ = static_cast<const T*>(part.in) + position_offset(part.in_strides, at_) + columns_.first;
    }
    if (part_ < kParts) {
      const KernelPart& part = plan_.parts[part_];
      const int head = heads_.begin + head_of_warp_;
      if (columns_.works && head < heads_.end) {
        const T* from = in_ + head_offset(part.in_strides, part.in_group, head);
        copy(slots_ + turn_ * 2 * kWarp, from);
        if (columns_.low_to_high != 0) copy(slots_ + turn_ * 2 * kWarp + kWarp, from + columns_.low_to_high);
      }
      heads_.begin += plan_.heads_at_once;
    }
    __pipeline_commit();
    turn_ = turn_ + 1 == kDepth ? 0 : turn_ + 1;
  }

 private:
  static __device__ __forceinline__ void copy(Raw<T, N>* to, const T* from) {
    if constexpr (N == 1) {
      *to = *from;
    } else {
      __pipeline_memcpy_async(to, from, sizeof(*to));
    }
  }

  const KernelPlan& plan_;
  const Position at_;
  const int split_;
  const Columns columns_;
  const int head_of_warp_;
  Raw<T, N>* const slots_;
  Heads heads_{0, 0};
  const T* in_ = nullptr;
  int part_ = -1;
  int turn_ = 0;
};

template <class T, int N, bool kInterleaved>
__global__ void __launch_bounds__(kWarp* kWarps, kBlocksPerSm) rotate_kernel(const __grid_constant__ KernelPlan plan) {
  extern __shared__ uint4 shared[];
  Raw<T, N>* const rings = reinterpret_cast<Raw<T, N>*>(shared);
  Raw<T, N>* const ring = rings + threadIdx.y * kDepth * 2 * kWarp + threadIdx.x;
  float* const table =
      reinterpret_cast<float*>(rings + kWarps * kDepth * 2 * kWarp) + threadIdx.y * AngleTable<N>::floats(plan.width);
  const uint32_t work = blockIdx.x * kWarps + threadIdx.y;
  const uint32_t position = work / plan.splits;
  if (position >= plan.positions) return;
  const int split = int(work % plan.splits);
  const Position at{position / plan.batch, position % plan.batch};
  const int head_of_warp = int(threadIdx.x) / plan.width;
  const int slot_of_warp = int(threadIdx.x) % plan.width;

  for (int first_slot = 0; first_slot < plan.slots; first_slot += plan.width) {
    const auto columns = Columns::of<N, kInterleaved>(plan, first_slot + slot_of_warp, head_of_warp);
    Asker<T, N> asker(plan, at, split, columns, head_of_warp, ring);
#pragma unroll 1
    for (int i = 0; i < kDepth; ++i) asker.next();
    SlotAngles<N> angles;
    int held = -1;  // the table that `angles` was read from
    int turn = 0;
    for (int part = 0; part < kParts; ++part) {
      const KernelPart& p = plan.parts[part];
      const Heads heads = heads_of(plan, p, split);
      if (heads.begin >= heads.end) continue;
      const int wanted = part == 1 ? plan.tables - 1 : 0;
      if (part < 2 && held != wanted) {
        __syncwarp();  // all lanes have read the last angles
        fill_angles<N, kInterleaved>(plan, at, wanted, first_slot, table);
        __syncwarp();
        angles.read(table, slot_of_warp, plan.width);
        held = wanted;
      }
      T* const out = static_cast<T*>(p.out) + position_offset(p.out_strides, at) + columns.first;
      for (int first = heads.begin; first < heads.end; first += plan.heads_at_once) {
        __pipeline_wait_prior(kDepth - 1);
        const int head = first + head_of_warp;
        if (columns.works && head < heads.end) {
          Raw<T, N> x[2] = {ring[turn * 2 * kWarp], ring[turn * 2 * kWarp + kWarp]};  // the second may not exist
          if (columns.rotates && part < 2) rotate<T, N, kInterleaved>(x, angles);
          T* const to = out + head_offset(p.out_strides, p.out_group, head);
          store<T, N>(to, x[0]);
          if (columns.low_to_high != 0) store<T, N>(to + columns.low_to_high, x[1]);
        }
        turn = turn + 1 == kDepth ? 0 : turn + 1;
        asker.next();
      }
    }
  }
}

// Whether every vector of t at columns that are multiples of the vector's width starts on 16 bytes.
bool aligned16(const te_rope_plan& plan, const te_rope_tensor& t, int64_t heads) {
  const auto bytes = int64_t(te_dtype_bytes(plan.dtype));
  const auto fits = [bytes](int64_t size, int64_t stride) { return size <= 1 || stride * bytes % 16 == 0; };
  const int64_t group = t.heads_per_group == 0 ? heads : t.heads_per_group;
  return heads == 0 ||
         (reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && fits(plan.seq, t.seq_stride) &&
          fits(plan.batch, t.batch_stride) && fits(group, t.head_stride) && fits(heads / group, t.group_stride));
}

KernelPlan kernel_plan_of(const te_rope_plan& plan, const Parts& parts, int n) {
  KernelPlan k{};
  int32_t heads = 0;
  for (int i = 0; i < kParts; ++i) {
    const auto strides = [](const te_rope_tensor& t) {
      return Strides{t.seq_stride, t.batch_stride, t.group_stride, t.head_stride};
    };
    const te_rope_tensor& in = parts.part[i].in;
    const te_rope_tensor& out = parts.part[i].out;
    k.parts[i] = {in.data,
                  out.data,
                  strides(in),
                  strides(out),
                  Divisor::of(uint32_t(in.heads_per_group)),
                  Divisor::of(uint32_t(out.heads_per_group)),
                  heads,
                  int32_t(parts.part[i].heads)};
    heads += int32_t(parts.part[i].heads);
  }
  k.tables = plan.k_freqs.data != nullptr ? 2 : 1;
  for (int i = 0; i < k.tables; ++i) {
    const te_tensor& freqs = *parts.part[i].freqs;
    k.freqs[i] = static_cast<const float*>(freqs.data);
    k.freqs_pitch[i] = freqs.row_pitch;
    k.freqs_rows[i] = freqs.rows;
  }
  k.start = static_cast<const int32_t*>(plan.start_positions.data);
  k.positions = uint32_t(plan.seq * plan.batch);
  k.batch = uint32_t(plan.batch);
  k.head_dim = int32_t(plan.head_dim);
  k.rot_dim = int32_t(plan.rot_dim);
  k.rot_slots = int32_t(plan.rot_dim / (2 * n));
  k.slots = k.rot_slots + int32_t((plan.head_dim - plan.rot_dim + 2 * n - 1) / (2 * n));
  k.backward = plan.backward != 0;
  k.width = std::min(k.slots, kWarp);
  k.heads_at_once = kWarp / k.width;
  const int64_t turns = (heads + k.heads_at_once - 1) / k.heads_at_once;
  const int64_t wanted = std::max<int64_t>((turns + kItems - 1) / kItems, kWarpsWanted / k.positions);
  const int64_t splits = std::min({wanted, turns, int64_t(UINT32_MAX) / k.positions});
  k.split_heads = int32_t((turns + splits - 1) / splits) * k.heads_at_once;
  k.splits = uint32_t((heads + k.split_heads - 1) / k.split_heads);
  return k;
}

template <class T, int N>
void launch(const te_rope_plan& plan, const Parts& parts, cudaStream_t stream) {
  const KernelPlan k = kernel_plan_of(plan, parts, N);
  const dim3 block(kWarp, kWarps);
  const dim3 grid(unsigned((uint64_t(k.positions) * k.splits + kWarps - 1) / kWarps));
  const size_t shared =
      kWarps * (sizeof(Raw<T, N>) * kDepth * 2 * kWarp + sizeof(float) * size_t(AngleTable<N>::floats(k.width)));
  if (plan.interleaved) {
    rotate_kernel<T, N, true><<<grid, block, shared, stream>>>(k);
  } else {
    rotate_kernel<T, N, false><<<grid, block, shared, stream>>>(k);
  }
}

}  // namespace

void apply(const te_rope_plan& plan, te_stream stream) {
  const Parts parts = parts_of(plan);
  const int64_t heads = plan.q_heads + plan.k_heads + plan.v_heads;
  if (plan.seq * plan.batch * heads * plan.head_dim == 0) return;
  if (plan.seq * plan.batch > INT32_MAX || heads > INT32_MAX / 2 || plan.head_dim > INT32_MAX / 2) {
    throw Error(TE_NOT_IMPLEMENTED,
                "te_rope_apply: at least 2^31 positions, 2^30 heads or a head_dim of 2^30; pass q and k in parts.");
  }
  dispatch_float(plan.dtype, "te_rope_apply", "plan.dtype", [&](auto t) {
    using T = decltype(t);
    const bool divides = plan.rot_dim % (2 * kVec<T>) == 0 && plan.head_dim % kVec<T> == 0;
    bool aligned = true;
    for (const Part& part : parts.part) {
      aligned = aligned && aligned16(plan, part.in, part.heads) && aligned16(plan, part.out, part.heads);
    }
    note_width(aligned, divides);
    if (aligned && divides) {
      launch<T, kVec<T>>(plan, parts, cudaStream_t(stream));
    } else {
      launch<T, 1>(plan, parts, cudaStream_t(stream));
    }
  });
  check_launch("te_rope_apply");
}

}  // namespace te::rope::cuda
