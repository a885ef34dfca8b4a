// 16-byte (or narrower, or one-element) memory access of the CUDA paths, widened to float. aligned16() decides on the
// host, once per launch, whether 16 bytes may be used; kernels take the width as a template argument.
#pragma once

#include <type_traits>

#include "core/dtype.h"
#include "core/tensor.h"

namespace te {

// Elements in one 16-byte access.
template <class T>
constexpr int kVec = 16 / int(sizeof(T));

// True if every row of t starts on 16 bytes, and for an absent tensor.
inline bool aligned16(const te_tensor& t) {
  if (t.data == nullptr) return true;
  const auto address = reinterpret_cast<uintptr_t>(t.data);
  return address % 16 == 0 && (t.rows <= 1 || (t.row_pitch * int64_t(te_dtype_bytes(t.dtype))) % 16 == 0);
}

// Records (te_note_path) that a kernel uses 16-byte accesses, or why it uses one element at a time.
inline void note_width(bool aligned, bool divides, const char* wide_path = "CUDA, 16-byte accesses") {
  if (aligned && divides) return te_note_path(wide_path, "");
  te_note_path("CUDA, one element at a time", divides ? "rows of a tensor do not start on multiples of 16 bytes"
                                                      : "the last dimension is not a multiple of 16 bytes");
}

// True for elements that are processed as pairs, one 32-bit word each: the compiler would use one register for each
// 16-bit value.
template <class T, int N>
constexpr bool kPaired = sizeof(T) == 2 && N % 2 == 0;

// N elements in their memory format; N * sizeof(T) is a multiple of 16, or 8, or 4, or N is 1.
template <class T, int N>
struct alignas(N == 1 ? alignof(T) : (N * sizeof(T) < 16 ? N * sizeof(T) : 16)) Packed {
  std::conditional_t<kPaired<T, N>, uint32_t, T> v[kPaired<T, N> ? N / 2 : N];
};

// The type of one access of that many bytes.
template <int kBytes>
using Word = std::conditional_t<kBytes % 16 == 0, uint4, std::conditional_t<kBytes == 8, uint2, uint32_t>>;

// To and from global memory. Both are explicit: the compiler may split a struct assignment into words (an eighth more
// time in the activation's backward).
template <class T, int N>
__device__ __forceinline__ Packed<T, N> load_packed(const T* p) {
  Packed<T, N> x;
  if constexpr (N == 1) {
    x.v[0] = *p;
  } else {
    using W = Word<sizeof(x)>;
    W raw[sizeof(x) / sizeof(W)];
#pragma unroll
    for (int i = 0; i < int(sizeof(x) / sizeof(W)); ++i) raw[i] = reinterpret_cast<const W*>(p)[i];
    memcpy(&x, raw, sizeof(x));
  }
  return x;
}

template <class T, int N>
__device__ __forceinline__ void store_packed(T* p, const Packed<T, N>& x) {
  if constexpr (N == 1) {
    *p = x.v[0];
  } else if constexpr (sizeof(x) < 16) {
    Word<sizeof(x)> raw;
    memcpy(&raw, &x, sizeof(x));
    *reinterpret_cast<Word<sizeof(x)>*>(p) = raw;
  } else {
    uint4 raw[sizeof(x) / sizeof(uint4)];
    memcpy(raw, &x, sizeof(x));
#pragma unroll
    for (int i = 0; i < int(sizeof(x) / sizeof(uint4)); ++i) {
      asm volatile(
          "st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(reinterpret_cast<uint4*>(p) + i)),
          "r"(raw[i].x), "r"(raw[i].y), "r"(raw[i].z), "r"(raw[i].w)
          : "memory");
    }
  }
}

template <class T, int N>
__device__ __forceinline__ void widen(const Packed<T, N>& x, float (&out)[N]) {
  if constexpr (kPaired<T, N>) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if constexpr (std::is_same_v<T, bf16>) {
        out[2 * i] = __uint_as_float(x.v[i] << 16);
        out[2 * i + 1] = __uint_as_float(x.v[i] & 0xffff0000u);
      } else {
        out[2 * i] = to_float(fp16{uint16_t(x.v[i])});
        out[2 * i + 1] = to_float(fp16{uint16_t(x.v[i] >> 16)});
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(x.v[i]);
  }
}

// Rounds pairs with one instruction.
template <class T, int N>
__device__ __forceinline__ Packed<T, N> narrow(const float (&x)[N]) {
  Packed<T, N> out;
  if constexpr (kPaired<T, N>) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if constexpr (std::is_same_v<T, bf16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        memcpy(&out.v[i], &pair, 4);
      } else {
        const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
        memcpy(&out.v[i], &pair, 4);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out.v[i] = from_float<T>(x[i]);
  }
  return out;
}

template <class T, int N>
__device__ __forceinline__ void load_floats(const T* p, float (&out)[N]) {
  widen<T, N>(load_packed<T, N>(p), out);
}

}  // namespace te
