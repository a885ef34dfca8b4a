// Checks of te_tensor arguments that all ops share, and access to rows. Nothing is copied.
#pragma once

#include "core/dtype.h"
#include "core/error.h"

namespace te {

inline bool is_absent(const te_tensor& t) { return t.data == nullptr && t.rows == 0 && t.cols == 0; }

inline std::string shape_of(const te_tensor& t) { return concat("[", t.rows, ", ", t.cols, "]"); }

inline std::string device_of(const te_tensor& t) {
  return t.device == TE_DEVICE_CPU ? std::string("cpu") : concat("cuda:", t.device);
}

// The tensor is well formed; other checks rely on it.
inline void check_tensor(const char* op, const char* argument, const te_tensor& t) {
  if (te_dtype_name(t.dtype) == nullptr) bad_argument(op, argument, concat("of dtype ", int(t.dtype)), "a te_dtype");
  if (t.rows < 0 || t.cols < 0) bad_argument(op, argument, shape_of(t), "sizes >= 0");
  if (t.row_pitch < t.cols) bad_argument(op, argument, concat("of row pitch ", t.row_pitch), concat(">= ", t.cols));
  if (t.data == nullptr && t.rows * t.cols != 0) bad_argument(op, argument, "NULL", "a data pointer");
}

inline void check_shape(const char* op, const char* argument, const te_tensor& t, int64_t rows, int64_t cols) {
  check_tensor(op, argument, t);
  if (t.rows != rows || t.cols != cols) bad_argument(op, argument, shape_of(t), concat("[", rows, ", ", cols, "]"));
}

inline void check_like(const char* op, const char* argument, const te_tensor& t, const te_tensor& like) {
  if (t.dtype != like.dtype) {
    bad_argument(op, argument, concat("of dtype ", te_dtype_name(t.dtype)), te_dtype_name(like.dtype));
  }
  if (t.device != like.device) bad_argument(op, argument, concat("on ", device_of(t)), device_of(like));
}

// Shape, dtype and device at once.
inline void check_as(const char* op, const char* argument, const te_tensor& t, int64_t rows, int64_t cols,
                     const te_tensor& like) {
  check_shape(op, argument, t, rows, cols);
  check_like(op, argument, t, like);
}

inline void check_floats(const char* op, const char* argument, const te_tensor& t, int64_t rows, int64_t cols,
                         int32_t device) {
  check_as(op, argument, t, rows, cols, te_tensor{nullptr, 0, 0, 0, TE_FLOAT32, device});
}

template <class T>
T* row_ptr(const te_tensor& t, int64_t row) {
  return static_cast<T*>(t.data) + row * t.row_pitch;
}

// Rows [first, last).
inline te_tensor rows_of(const te_tensor& t, int64_t first, int64_t last) {
  te_tensor part = t;
  part.rows = last - first;
  if (t.data != nullptr) {
    part.data = static_cast<char*>(t.data) + first * t.row_pitch * int64_t(te_dtype_bytes(t.dtype));
  }
  return part;
}

}  // namespace te
