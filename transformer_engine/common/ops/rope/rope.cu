// rope, CUDA path: a block takes one position (a few, where heads are few) with all heads of q, k and v. Its threads
// first ask for their 16-byte vectors of both halves, then make each sine and cosine of the position once, in shared
// memory, then rotate and store. Bound by memory: 4 bytes an element of q and k for 16-bit types, and the angles.
#include "core/device.h"
#include "core/vec.cuh"
#include "ops/rope/rope_math.h"

namespace te::rope::cuda {

namespace {

constexpr int kHeadsInFlight = 2;      // heads a thread has loads out for at once: 64 bytes
constexpr int kMaxThreads = 224;       // of one position
constexpr int kResidentThreads = 896;  // of an SM, whose registers then allow 72 to each
constexpr int kMinThreads = 128;       // of a block, by taking several positions
constexpr int kMaxSlots = 128;         // of a block at a time; bounds shared memory to 32 KiB
constexpr int kMaxPositions = 64;      // of a block: the hardware's limit on blockDim.z

struct Strides {
  int64_t seq, batch, group, head;
};

struct KernelPart {
  const void* in;
  void* out;
  Strides in_strides, out_strides;
  int32_t in_group, out_group;  // heads per group; 0: one group
};

// A slot is what one thread takes of one head: two vectors A and B of N elements. In the rotated columns its 2 N
// elements are N whole pairs (A low and B high ones, or, interleaved, 2 N neighbours); beyond, they are copied.
struct KernelPlan {
  KernelPart parts[kParts];
  const float* freqs[2];  // of q, of k
  int64_t freqs_pitch[2];
  int64_t freqs_rows[2];
  const int32_t* start;
  uint32_t positions, batch;
  int32_t head_dim, rot_dim, slots, rot_slots, tables;
  int32_t q_heads, qk_heads, heads;
  int32_t passes;  // over the heads
  int32_t rounds;  // passes, for each run of blockDim.x slots
  bool backward;
};

struct Position {
  uint32_t s, b;
  bool live;
};

__device__ __forceinline__ Position position_of(const KernelPlan& plan, uint32_t position) {
  return {position / plan.batch, position % plan.batch, position < plan.positions};
}

__device__ __forceinline__ int64_t position_offset(const Strides& strides, const Position& at) {
  return at.s * strides.seq + at.b * strides.batch;
}

__device__ __forceinline__ int64_t head_offset(const Strides& strides, int32_t heads_per_group, int32_t head) {
  const int32_t group = heads_per_group == 0 ? 0 : head / heads_per_group;
  return group * strides.group + (head - group * heads_per_group) * strides.head;
}

// The angles of a position in shared memory: per table (q's, k's) cosines and signed sines for the 2 N elements of
// each slot, in fours, so that neighbouring slots read neighbouring 16 bytes.
template <int N>
struct AngleTable {
  static constexpr int kElements = 2 * N;
  static constexpr int kGroup = N < 4 ? N : 4;

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

// Called by all threads of a position; `first_slot` is the first of the blockDim.x slots at hand.
template <int N, bool kInterleaved>
__device__ __forceinline__ void fill_angles(const KernelPlan& plan, const Position& at, int first_slot, float* tables) {
  using Table = AngleTable<N>;
  const int slots = blockDim.x;
  const int span = slots * N;  // columns of A (interleaved: half of the columns)
  const int64_t row = at.s + (plan.start == nullptr ? 0 : plan.start[at.b]);
  for (int table = 0; table < plan.tables; ++table) {
    float* cosines = tables + table * Table::floats(slots);
    float* weights = cosines + Table::kElements * slots;
    const bool known = row >= 0 && row < plan.freqs_rows[table];
    const float* angles = plan.freqs[table] + row * plan.freqs_pitch[table];
    for (int i = threadIdx.y * slots + threadIdx.x; i < 2 * span; i += slots * blockDim.y) {
      int slot, element, column;
      bool low;
      if (kInterleaved) {
        slot = i / Table::kElements;
        element = i % Table::kElements;
        low = element % 2 == 0;
        column = first_slot * Table::kElements + i;
      } else {
        low = i < span;
        const int rest = low ? i : i - span;
        slot = rest / N;
        element = rest % N + (low ? 0 : N);
        column = first_slot * N + rest + (low ? 0 : plan.rot_dim / 2);
      }
      if (first_slot + slot >= plan.rot_slots) continue;
      const SinCos value = sin_cos(known ? angles[column] : te::detail::float_of(kNaNBits));
      const int weighs = plan.backward ? partner_of<N, kInterleaved>(element) : element;
      cosines[Table::place(element, slot, slots)] = value.cos;
      weights[Table::place(weighs, slot, slots)] = signed_sine(low, value.sin);
    }
  }
}

// A vector as it was loaded. Not a Packed: the compiler splits one into its 16-bit elements as soon as it arrives, and
// so waits for it before the next load.
template <class T, int N>
using Raw = std::conditional_t<N == 1, T, uint4>;

template <class T, int N, bool kInterleaved>
__device__ __forceinline__ void rotate(Raw<T, N> (&x)[2], const float* cosines) {
  using Table = AngleTable<N>;
  constexpr int kGroup = Table::kGroup;
  const float* weights = cosines + Table::kElements * blockDim.x;
  Packed<T, N> packed[2];
  memcpy(packed, x, sizeof(packed));
  float in[2][N], out[2][N];
  widen<T, N>(packed[0], in[0]);
  widen<T, N>(packed[1], in[1]);
#pragma unroll
  for (int first = 0; first < Table::kElements; first += kGroup) {
    const int place = Table::place(first, threadIdx.x, blockDim.x);
    const auto c = load_packed<float, kGroup>(cosines + place);
    const auto w = load_packed<float, kGroup>(weights + place);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int element = first + i;
      const int partner = partner_of<N, kInterleaved>(element);
      out[element / N][element % N] =
          rotated(in[element / N][element % N], in[partner / N][partner % N], c.v[i], w.v[i]);
    }
  }
  packed[0] = narrow<T, N>(out[0]);
  packed[1] = narrow<T, N>(out[1]);
  memcpy(x, packed, sizeof(packed));
}

// What a thread holds of one head: addresses at position (0, 0), and which tensor they belong to.
template <class T>
struct Item {
  const T* in;
  T* out;
  int part;  // -1: nothing
};

template <class T>
__device__ __forceinline__ Item<T> item_of(const KernelPlan& plan, int head, int column) {
  const int part = head < plan.q_heads ? 0 : head < plan.qk_heads ? 1 : 2;
  head -= part == 0 ? 0 : part == 1 ? plan.q_heads : plan.qk_heads;
  const KernelPart& p = plan.parts[part];
  return {static_cast<const T*>(p.in) + head_offset(p.in_strides, p.in_group, head) + column,
          static_cast<T*>(p.out) + head_offset(p.out_strides, p.out_group, head) + column, part};
}

template <class T, int N, bool kInterleaved>
__global__ void __launch_bounds__(kMaxThreads, kResidentThreads / kMaxThreads)
    rotate_kernel(const __grid_constant__ KernelPlan plan) {
  extern __shared__ __align__(16) float shared[];
  const int table_floats = AngleTable<N>::floats(blockDim.x);
  float* tables = shared + threadIdx.z * plan.tables * table_floats;
  const int rounds = plan.rounds;
  Item<T> items[kHeadsInFlight];
  int low_to_high = 0;  // columns from A to B; 0: no B

  for (uint32_t first = blockIdx.x * blockDim.z; first < plan.positions; first += gridDim.x * blockDim.z) {
    const Position at = position_of(plan, first + threadIdx.z);
    for (int round = 0; round < rounds; ++round) {
      const int first_slot = round / plan.passes * blockDim.x;
      const int slot = first_slot + threadIdx.x;
      const bool rotates = slot < plan.rot_slots;
      // One round, the usual case: what a thread takes of a position does not change, and is found once.
      if (rounds > 1 || first == blockIdx.x * blockDim.z) {
        const int copied = plan.rot_dim + (slot - plan.rot_slots) * 2 * N;
        const int column = !rotates ? copied : kInterleaved ? slot * 2 * N : slot * N;
        low_to_high = rotates && !kInterleaved ? plan.rot_dim / 2 : column + N < plan.head_dim ? N : 0;
#pragma unroll
        for (int i = 0; i < kHeadsInFlight; ++i) {
          const int head = (round % plan.passes * kHeadsInFlight + i) * blockDim.y + threadIdx.y;
          items[i].part = -1;
          if (slot < plan.slots && head < plan.heads) items[i] = item_of<T>(plan, head, column);
        }
      }
      Raw<T, N> x[kHeadsInFlight][2];
#pragma unroll
      for (int i = 0; i < kHeadsInFlight; ++i) {
        if (!at.live || items[i].part < 0) continue;
        const T* in = items[i].in + position_offset(plan.parts[items[i].part].in_strides, at);
        x[i][0] = *reinterpret_cast<const Raw<T, N>*>(in);
        if (low_to_high != 0) x[i][1] = *reinterpret_cast<const Raw<T, N>*>(in + low_to_high);
      }
      if (round % plan.passes == 0) {
        __syncthreads();  // the last angles have been read
        if (at.live) fill_angles<N, kInterleaved>(plan, at, first_slot, tables);
        __syncthreads();
      }
#pragma unroll
      for (int i = 0; i < kHeadsInFlight; ++i) {
        if (!at.live || items[i].part < 0) continue;
        const float* angles = tables + (items[i].part == 1 && plan.tables == 2 ? table_floats : 0);
        if (rotates && items[i].part < 2) rotate<T, N, kInterleaved>(x[i], angles);
        T* out = items[i].out + position_offset(plan.parts[items[i].part].out_strides, at);
        *reinterpret_cast<Raw<T, N>*>(out) = x[i][0];
        if (low_to_high != 0) *reinterpret_cast<Raw<T, N>*>(out + low_to_high) = x[i][1];
      }
    }
  }
}

// Whether every vector of t at columns that are multiples of the vector's width lies on 16 bytes.
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
  for (int i = 0; i < kParts; ++i) {
    const auto strides = [](const te_rope_tensor& t) {
      return Strides{t.seq_stride, t.batch_stride, t.group_stride, t.head_stride};
    };
    const te_rope_tensor& in = parts.part[i].in;
    const te_rope_tensor& out = parts.part[i].out;
    k.parts[i] = {
        in.data, out.data, strides(in), strides(out), int32_t(in.heads_per_group), int32_t(out.heads_per_group)};
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
  k.q_heads = int32_t(plan.q_heads);
  k.qk_heads = int32_t(plan.q_heads + plan.k_heads);
  k.heads = int32_t(plan.q_heads + plan.k_heads + plan.v_heads);
  k.backward = plan.backward != 0;
  return k;
}

template <class T, int N>
void launch(const te_rope_plan& plan, const Parts& parts, cudaStream_t stream) {
  KernelPlan k = kernel_plan_of(plan, parts, N);
  // Slots by heads by positions: the fewest passes over the heads, with as few threads as they need.
  const int x = std::min(k.slots, kMaxSlots);
  const int most_heads = kHeadsInFlight * (kMaxThreads / x);
  k.passes = (k.heads + most_heads - 1) / most_heads;
  k.rounds = k.passes * ((k.slots + x - 1) / x);
  const int heads_at_once = (k.heads + k.passes - 1) / k.passes;
  const int y = (heads_at_once + kHeadsInFlight - 1) / kHeadsInFlight;
  const int z = std::min(kMaxPositions, std::max(1, kMinThreads / (x * y)));
  const dim3 block(x, y, z);
  const int64_t needed = (k.positions + z - 1) / z;
  const int64_t resident = int64_t(device_properties(plan.device).sm_count) * (kResidentThreads / (x * y * z));
  const dim3 grid(static_cast<unsigned>(std::min(needed, resident)));
  const size_t shared = sizeof(float) * size_t(z * k.tables * AngleTable<N>::floats(x));
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
    throw Error(TE_NOT_IMPLEMENTED, "te_rope_apply: 2^31 positions, 2^30 heads or a head_dim of 2^30, and more.");
  }
  dispatch_float(plan.dtype, "te_rope_apply", "plan.dtype", [&](auto t) {
    using T = decltype(t);
    bool vectors = plan.rot_dim % (2 * kVec<T>) == 0 && plan.head_dim % kVec<T> == 0;
    for (const Part& part : parts.part) {
      vectors = vectors && aligned16(plan, part.in, part.heads) && aligned16(plan, part.out, part.heads);
    }
    if (vectors) {
      launch<T, kVec<T>>(plan, parts, cudaStream_t(stream));
    } else {
      launch<T, 1>(plan, parts, cudaStream_t(stream));
    }
  });
  check_launch("te_rope_apply");
}

}  // namespace te::rope::cuda
