// Many tensors in one launch: the table of their memory is a kernel argument, and each block processes a chunk of one
// tensor. Also lists of elements whose type is known at compile time, or at run time.
#pragma once

#include <algorithm>

#include "core/device.h"
#include "core/fp8.h"
#include "core/reduce.cuh"
#include "core/vec.cuh"
#include "ops/optimizer/paths.h"
#include "ops/quantize/fp8.h"

namespace te::optimizer::cuda {

constexpr int kThreads = 256;
constexpr int kVector = 4;  // elements of an access: 16 bytes of float32
constexpr int kUnroll = 2;  // accesses to each list that a thread has in flight: at least 8 of 16 bytes in all
constexpr int kChunk = kThreads * kVector * kUnroll;
constexpr int kArgumentBytes = 32764;  // limit of kernel arguments since CUDA 12.1

// ---- the table ----

struct Nothing {};

// kOther: bytes of the launch's other arguments. Extra: data of a tensor other than its lists.
template <int kLists, class Extra = Nothing, int kOther = 256>
struct Table {
  static constexpr int kLength = kLists;
  using ExtraType = Extra;
  static constexpr int kExtra = std::is_empty_v<Extra> ? 0 : int(sizeof(Extra));
  static constexpr int kMost = (kArgumentBytes - kOther - 64) / (8 * kLists + 8 + 4 + kExtra);

  void* data[kLists][kMost];
  int64_t numel[kMost];
  Extra extra[std::is_empty_v<Extra> ? 1 : kMost];
  int32_t first_chunk[kMost + 1];
  int32_t count;
};

struct Place {
  int tensor;
  int64_t first;  // element
  int n;          // elements
};

template <class T>
__device__ __forceinline__ Place place_of(const T& table, int64_t chunk_elements) {
  int low = 0, high = table.count - 1;  // the last tensor whose first chunk is at or before this one
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.first_chunk[middle] <= int32_t(blockIdx.x)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int64_t first = int64_t(int32_t(blockIdx.x) - table.first_chunk[low]) * chunk_elements;
  return {low, first, int(min(chunk_elements, table.numel[low] - first))};
}

// Fills launch.table as often as needed, and calls go(launch, blocks) each time. extra(i): the Extra of tensor i.
template <class Launch, class ExtraOf, class Go>
void for_tables(const char* op, Launch& launch, Tensors tensors, int64_t count, int64_t chunk_elements, ExtraOf&& extra,
                Go&& go) {
  auto& table = launch.table;
  using T = std::remove_reference_t<decltype(table)>;
  for (int64_t i = 0; i < count;) {
    int64_t chunks = 0;
    table.count = 0;
    for (; i < count && table.count < T::kMost; ++i) {
      const te_optimizer_tensor& t = tensors[i];
      if (t.numel == 0) continue;
      const int64_t more = (t.numel + chunk_elements - 1) / chunk_elements;
      if (chunks + more > INT32_MAX) {
        if (chunks == 0) {
          throw Error(TE_NOT_IMPLEMENTED, concat(op, ": a tensor of ", t.numel, " elements, wanted at most ",
                                                 int64_t(INT32_MAX) * chunk_elements, "."));
        }
        break;
      }
      const int at = table.count++;
      for (int list = 0; list < T::kLength; ++list) table.data[list][at] = t.data[list];
      table.numel[at] = t.numel;
      if constexpr (!std::is_empty_v<typename T::ExtraType>) table.extra[at] = extra(i);
      table.first_chunk[at] = int32_t(chunks);
      chunks += more;
    }
    if (table.count != 0) go(launch, unsigned(chunks));
  }
  check_launch(op);
}

inline auto no_extra() {
  return [](int64_t) { return Nothing{}; };
}

// ---- flags, scalars, maxima ----

struct Flag {
  void* data = nullptr;
  bool is_float = false;

  Flag() = default;
  explicit Flag(const te_tensor& t) : data(t.data), is_float(t.dtype == TE_FLOAT32) {}

  __device__ __forceinline__ bool is_set() const {
    if (data == nullptr) return false;
    const uint32_t bits = *static_cast<const uint32_t*>(data);
    return (is_float ? bits & 0x7fffffffu : bits) != 0;
  }
  __device__ __forceinline__ void set() const {  // by many blocks, with the same bits
    if (data != nullptr) *static_cast<uint32_t*>(data) = is_float ? 0x3f800000u : 1u;
  }
};

inline const float* floats_at(const te_tensor& t) { return static_cast<const float*>(t.data); }

__device__ __forceinline__ float value_or(const float* p, float otherwise) { return p == nullptr ? otherwise : *p; }

// The largest of the threads' x >= 0, in thread 0; maxima do not depend on order. Two calls need a barrier between
// their uses of `scratch`.
__device__ __forceinline__ float block_max(float x, float (&scratch)[kThreads / kWarp]) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  __syncthreads();
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 1; i < kThreads / kWarp; ++i) x = fmaxf(x, scratch[i]);
  }
  return x;
}

// Floats >= 0 compare like their bits as integers.
__device__ __forceinline__ void raise(float* place, float amax) {
  if (amax > 0.f) atomicMax(reinterpret_cast<int*>(place), __float_as_int(amax));
}

// ---- lists ----

struct Any {};     // the type is a run-time value of the launch
struct Absent {};  // the list does not exist

// Elements [i, i + N) of a list, in their memory format and as floats.
template <class T>
struct List {
  template <int N>
  using Raw = Packed<T, N>;

  static __device__ __forceinline__ bool is_wide(const void* data, te_dtype) {
    return reinterpret_cast<uintptr_t>(data) % (kVector * sizeof(T)) == 0;
  }
  template <int N>
  static __device__ __forceinline__ Raw<N> load(const void* data, int64_t i, te_dtype) {
    return load_packed<T, N>(static_cast<const T*>(data) + i);
  }
  template <int N>
  static __device__ __forceinline__ void open(const Raw<N>& raw, te_dtype, float (&x)[N]) {
    widen<T, N>(raw, x);
  }
  template <int N>
  static __device__ __forceinline__ void store(void* data, int64_t i, te_dtype, const float (&x)[N]) {
    store_packed<T, N>(static_cast<T*>(data) + i, narrow<T, N>(x));
  }
};

template <>
struct List<Absent> {
  template <int N>
  struct Raw {};

  static __device__ __forceinline__ bool is_wide(const void*, te_dtype) { return true; }
  template <int N>
  static __device__ __forceinline__ Raw<N> load(const void*, int64_t, te_dtype) {
    return {};
  }
};

template <>
struct List<Any> {
  template <int N>
  struct Raw {
    uint32_t words[N];
  };

  static __device__ __forceinline__ int bytes_of(te_dtype dtype) {
    return dtype == TE_FLOAT32 ? 4 : dtype == TE_FLOAT16 || dtype == TE_BFLOAT16 ? 2 : 1;
  }
  static __device__ __forceinline__ bool is_wide(const void* data, te_dtype dtype) {
    return (reinterpret_cast<uintptr_t>(data) & unsigned(kVector * bytes_of(dtype) - 1)) == 0;
  }

  template <int N>
  static __device__ __forceinline__ Raw<N> load(const void* data, int64_t i, te_dtype dtype) {
    switch (bytes_of(dtype)) {
      case 4:
        return of(load_packed<uint32_t, N>(static_cast<const uint32_t*>(data) + i));
      case 2:
        return of(load_packed<bf16, N>(static_cast<const bf16*>(data) + i));
      default:
        return of(load_packed<e4m3, N>(static_cast<const e4m3*>(data) + i));
    }
  }
  template <int N>
  static __device__ __forceinline__ void open(const Raw<N>& raw, te_dtype dtype, float (&x)[N]) {
    switch (dtype) {
      case TE_FLOAT32:
        return widen<float, N>(as<float>(raw), x);
      case TE_FLOAT16:
        return widen<fp16, N>(as<fp16>(raw), x);
      case TE_BFLOAT16:
        return widen<bf16, N>(as<bf16>(raw), x);
      default:
        return widen<e4m3, N>(as<e4m3>(raw), x);
    }
  }
  template <int N>
  static __device__ __forceinline__ void store(void* data, int64_t i, te_dtype dtype, const float (&x)[N]) {
    switch (dtype) {
      case TE_FLOAT32:
        return List<float>::store<N>(data, i, dtype, x);
      case TE_FLOAT16:
        return List<fp16>::store<N>(data, i, dtype, x);
      case TE_BFLOAT16:
        return List<bf16>::store<N>(data, i, dtype, x);
      case TE_FLOAT8_E5M2:
        return store_fp8<true>(static_cast<uint8_t*>(data) + i, x);
      default:
        return store_fp8<false>(static_cast<uint8_t*>(data) + i, x);
    }
  }

  // The 16-bit patterns of a list of integers.
  template <int N>
  static __device__ __forceinline__ Packed<bf16, N> bits16(const Raw<N>& raw) {
    return as<bf16>(raw);
  }

 private:
  template <class T, int N>
  static __device__ __forceinline__ Raw<N> of(const Packed<T, N>& x) {
    Raw<N> raw;
    memcpy(&raw, &x, sizeof(x));
    return raw;
  }
  template <class T, int N>
  static __device__ __forceinline__ Packed<T, N> as(const Raw<N>& raw) {
    Packed<T, N> x;
    memcpy(&x, &raw, sizeof(x));
    return x;
  }
  template <bool kE5m2, int N>
  static __device__ __forceinline__ void store_fp8(uint8_t* target, const float (&x)[N]) {
    if constexpr (N == kVector) {
      *reinterpret_cast<uint32_t*>(target) = quantize::to_fp8_word<kE5m2>(x[0], x[1], x[2], x[3]);
    } else {
      *target = uint8_t(quantize::to_fp8_word<kE5m2>(x[0], 0.f, 0.f, 0.f));
    }
  }
};

// ---- a block's chunk ----

// body: Raw<N> load<N>(i), then begin(), which returns false to stop, then finish<N>(raw, i). All loads of a chunk are
// in flight before begin() waits.
template <class Body>
__device__ __forceinline__ bool run_chunk(Body& body, const Place& at, bool wide) {
  const int thread = int(threadIdx.x);
  if (wide && at.n == kChunk) {
    typename Body::template Raw<kVector> raw[kUnroll];
    const int64_t first = at.first + thread * kVector;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) raw[u] = body.template load<kVector>(first + u * (kThreads * kVector));
    if (!body.begin()) return false;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) body.template finish<kVector>(raw[u], first + u * (kThreads * kVector));
    return true;
  }
  if (!body.begin()) return false;
  const int vectors = wide ? at.n / kVector : 0;
  for (int v = thread; v < vectors; v += kThreads) {
    const int64_t i = at.first + v * kVector;
    body.template finish<kVector>(body.template load<kVector>(i), i);
  }
  for (int e = vectors * kVector + thread; e < at.n; e += kThreads) {
    body.template finish<1>(body.template load<1>(at.first + e), at.first + e);
  }
  return true;
}

}  // namespace te::optimizer::cuda
