// Memory for tests on either device: allocated poisoned, filled from and read back to host vectors. The same test body
// runs over devices(): the CPU, and the first GPU where the build has CUDA kernels and a GPU is there. Not for timing:
// every transfer waits.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "transformer_engine/transformer_engine.h"
#if defined(TE_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace te::testing {

// Every byte 0xFF: NaN in all float dtypes, -1 in the integers. An element that the op left out stays NaN.
constexpr int kPoison = 0xff;

template <class T>
constexpr te_dtype kDtype = TE_UINT8;
template <>
inline constexpr te_dtype kDtype<float> = TE_FLOAT32;
template <>
inline constexpr te_dtype kDtype<fp16> = TE_FLOAT16;
template <>
inline constexpr te_dtype kDtype<bf16> = TE_BFLOAT16;
template <>
inline constexpr te_dtype kDtype<int32_t> = TE_INT32;
template <>
inline constexpr te_dtype kDtype<int64_t> = TE_INT64;

#if defined(TE_WITH_CUDA)
inline void cuda_ok(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status));
}
#endif

inline bool has_gpu() {
#if defined(TE_WITH_CUDA)
  if (!te_built_with_cuda()) return false;  // the engine under test may be another build than the tests
  int count = 0;
  const bool found = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  if (!found) cudaGetLastError();  // no GPU is a valid answer; clear the error
  return found;
#else
  return false;
#endif
}

// Values of te_tensor.device: the CPU, then GPU 0 if any. For INSTANTIATE_TEST_SUITE_P(..., ValuesIn(devices())).
inline std::vector<int32_t> devices() {
  return has_gpu() ? std::vector<int32_t>{TE_DEVICE_CPU, 0} : std::vector<int32_t>{TE_DEVICE_CPU};
}

inline std::string device_name(const ::testing::TestParamInfo<int32_t>& info) {
  return info.param == TE_DEVICE_CPU ? "cpu" : "cuda";
}

// From one place of a device to another.
inline void copy_bytes(void* to, const void* from, size_t bytes, int32_t device) {
  if (bytes == 0) return;
#if defined(TE_WITH_CUDA)
  if (device != TE_DEVICE_CPU) return cuda_ok(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice));
#endif
  (void)device;
  std::memcpy(to, from, bytes);
}

// rows x cols elements at a row pitch, with `guard` elements beyond the last row. Poisoned; freed with the object.
// bfloat16, float16 and float are held as te::bf16, te::fp16 and float.
template <class T>
class Buffer {
 public:
  Buffer(int32_t device, int64_t rows, int64_t cols, int64_t row_pitch = -1, int64_t guard = 16)
      : device_(device), rows_(rows), cols_(cols), row_pitch_(row_pitch < 0 ? cols : row_pitch) {
    count_ = rows_ * row_pitch_ + guard;
    if (device_ == TE_DEVICE_CPU) {
      data_ = static_cast<T*>(::operator new(bytes(), std::align_val_t(256)));
    } else {
#if defined(TE_WITH_CUDA)
      cuda_ok(cudaSetDevice(device_));
      cuda_ok(cudaMalloc(reinterpret_cast<void**>(&data_), bytes()));
#else
      throw std::logic_error("a CUDA buffer in a CPU build");
#endif
    }
    poison();
  }
  ~Buffer() {
    if (device_ == TE_DEVICE_CPU) {
      ::operator delete(data_, std::align_val_t(256));
    } else {
#if defined(TE_WITH_CUDA)
      cudaFree(data_);
#endif
    }
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void poison() {
    if (device_ == TE_DEVICE_CPU) {
      std::memset(static_cast<void*>(data_), kPoison, bytes());
    } else {
#if defined(TE_WITH_CUDA)
      cuda_ok(cudaMemset(data_, kPoison, bytes()));
#endif
    }
  }

  // `values` is rows x cols without pitch; the pitch's tail keeps its poison.
  void fill(const std::vector<T>& values) {
    if (int64_t(values.size()) != rows_ * cols_) throw std::logic_error("Buffer::fill: wrong number of values");
    std::vector<T> all = read_all();
    for (int64_t r = 0; r < rows_; ++r) {
      std::copy_n(values.begin() + r * cols_, cols_, all.begin() + r * row_pitch_);
    }
    copy(data_, all.data(), true);
  }

  // The rows x cols elements, without pitch. Waits for the device.
  std::vector<T> read() const {
    const std::vector<T> all = read_all();
    std::vector<T> values;
    for (int64_t r = 0; r < rows_; ++r) {
      const auto row = all.begin() + r * row_pitch_;
      values.insert(values.end(), row, row + cols_);
    }
    return values;
  }

  // True while every byte outside the rows x cols elements (the pitch's tail, the guard) still has its poison.
  bool padding_untouched() const {
    const std::vector<T> all = read_all();
    for (int64_t i = 0; i < count_; ++i) {
      const bool inside = i < rows_ * row_pitch_ && i % row_pitch_ < cols_;
      const auto* raw = reinterpret_cast<const unsigned char*>(&all[size_t(i)]);
      for (size_t b = 0; b < sizeof(T) && !inside; ++b) {
        if (raw[b] != kPoison) return false;
      }
    }
    return true;
  }

  te_tensor tensor(te_dtype dtype = kDtype<T>) const { return {data_, rows_, cols_, row_pitch_, dtype, device_}; }
  T* data() const { return data_; }

 private:
  size_t bytes() const { return size_t(count_) * sizeof(T); }

  std::vector<T> read_all() const {
    std::vector<T> all(static_cast<size_t>(count_));
    copy(all.data(), data_, false);
    return all;
  }

  void copy(T* target, const T* source, bool upload) const {
    if (device_ == TE_DEVICE_CPU) {
      std::memcpy(static_cast<void*>(target), static_cast<const void*>(source), bytes());
      return;
    }
#if defined(TE_WITH_CUDA)
    cuda_ok(cudaDeviceSynchronize());
    cuda_ok(cudaMemcpy(target, source, bytes(), upload ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost));
#else
    (void)upload;
#endif
  }

  int32_t device_;
  int64_t rows_, cols_, row_pitch_;
  int64_t count_ = 0;
  T* data_ = nullptr;
};

template <class T>
std::vector<double> widened(const std::vector<T>& values) {
  std::vector<double> out;
  for (const T& v : values) out.push_back(double(to_float(v)));
  return out;
}

template <class T>
std::vector<T> rounded(const std::vector<double>& values) {
  std::vector<T> out;
  for (const double v : values) out.push_back(from_float<T>(float(v)));
  return out;
}

}  // namespace te::testing

// The status of a te_* call that must succeed; its message when it does not.
#define TE_EXPECT_OK(call) EXPECT_EQ((call), TE_SUCCESS) << te_last_error()
#define TE_ASSERT_OK(call) ASSERT_EQ((call), TE_SUCCESS) << te_last_error()
