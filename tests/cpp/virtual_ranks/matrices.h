// Matrices in host memory for tests of virtual ranks, calls with a matrix for each rank, and their products by the
// plain loop.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/dtype.h"
#include "device_buffer.h"
#include "transformer_engine/comm.h"
#include "transformer_engine/gemm.h"
#include "virtual_ranks/world.h"

namespace te::testing {

// rows x cols of T, NaN at first.
template <class T>
struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<T> values;

  Matrix() = default;
  Matrix(int64_t rows, int64_t cols) : rows(rows), cols(cols), values(static_cast<size_t>(rows * cols)) {
    if (!values.empty()) std::memset(static_cast<void*>(values.data()), kPoison, values.size() * sizeof(T));
  }
  static Matrix random(int64_t rows, int64_t cols, unsigned seed) {
    Matrix m(rows, cols);
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (T& value : m.values) value = from_float<T>(normal(generator));
    return m;
  }

  te_tensor tensor() { return {values.empty() ? nullptr : values.data(), rows, cols, cols, kDtype<T>, TE_DEVICE_CPU}; }
  Matrix slice(int64_t first, int64_t last) const {
    Matrix m(last - first, cols);
    std::copy_n(values.begin() + first * cols, m.values.size(), m.values.begin());
    return m;
  }
  bool same_bits(const Matrix& other) const {
    return rows == other.rows && cols == other.cols &&
           (values.empty() || std::memcmp(values.data(), other.values.data(), values.size() * sizeof(T)) == 0);
  }
};

// One for each rank.
template <class T>
using Sharded = std::vector<Matrix<T>>;

template <class T>
std::vector<te_tensor> tensors(Sharded<T>& sharded) {
  std::vector<te_tensor> out;
  for (Matrix<T>& matrix : sharded) out.push_back(matrix.tensor());
  return out;
}

template <class T>
Sharded<T> empty(int32_t ranks, int64_t rows, int64_t cols) {
  return Sharded<T>(static_cast<size_t>(ranks), Matrix<T>(rows, cols));
}

template <class T>
Sharded<T> random(int32_t ranks, int64_t rows, int64_t cols, unsigned seed) {
  Sharded<T> out;
  for (int32_t rank = 0; rank < ranks; ++rank) out.push_back(Matrix<T>::random(rows, cols, seed * 64 + unsigned(rank)));
  return out;
}

template <class T>
bool same_bits(const Sharded<T>& a, const Sharded<T>& b) {
  for (size_t rank = 0; rank < a.size(); ++rank) {
    if (!a[rank].same_bits(b[rank])) return false;
  }
  return a.size() == b.size();
}

template <class T>
Matrix<T> gathered(const Sharded<T>& shards) {
  Matrix<T> all(shards[0].rows * int64_t(shards.size()), shards[0].cols);
  auto to = all.values.begin();
  for (const Matrix<T>& shard : shards) to = std::copy(shard.values.begin(), shard.values.end(), to);
  return all;
}

template <class T>
Matrix<T> product(te_gemm_layout layout, Matrix<T> a, Matrix<T> b, Matrix<T>* bias = nullptr) {
  Matrix<T> d(layout == TE_GEMM_NT ? b.cols : b.rows, layout == TE_GEMM_TN ? a.rows : a.cols);
  te_gemm_problem problem{};
  problem.a = a.tensor();
  problem.b = b.tensor();
  problem.d = d.tensor();
  problem.layout = layout;
  if (bias != nullptr) {
    problem.bias = bias->tensor();
    problem.epilogue = TE_GEMM_BIAS;
  }
  TE_EXPECT_OK(te_gemm_by_loop(&problem));
  return d;
}

// Costs at which small sizes are cut into runs.
inline te_comm_costs small_costs() {
  return {.flops_per_us = 400,
          .link_bytes_per_us = 40,
          .serial_bytes_per_us = 40,
          .memory_bytes_per_us = 1000,
          .launch_us = 0.01,
          .hop_us = 0.01,
          .beside = 1,
          .units = 2,
          .tile_rows = 2,
          .tile_cols = 4,
          .least_gathered = 0,
          .least_scattered = 0};
}

// A CommCall of matrices. Queued calls refer to their memory, which must stay.
template <class T>
struct MatrixCall {
  te_comm_op op = TE_COMM_GATHER_PRODUCT;
  te_comm_schedule schedule = TE_COMM_CHUNKED;
  Sharded<T>* source = nullptr;
  Sharded<T>* weight = nullptr;
  Sharded<T>* bias = nullptr;
  Sharded<T>* out = nullptr;
  Sharded<T>* other = nullptr;
  Sharded<T>* wgrad = nullptr;
  bool weight_by_depth = false;
  bool gathered_first = false;
  bool source_ready = false;

  void queue_in(World& world) const {
    std::vector<te_tensor> lists[6];
    const te_tensor* pointers[6];
    Sharded<T>* const sharded[6] = {source, weight, bias, out, other, wgrad};
    for (int i = 0; i < 6; ++i) {
      if (sharded[i] != nullptr) lists[i] = tensors(*sharded[i]);
      pointers[i] = sharded[i] != nullptr ? lists[i].data() : nullptr;
    }
    world.queue({op, schedule, small_costs(), pointers[0], pointers[1], pointers[2], pointers[3], pointers[4],
                 pointers[5], weight_by_depth, gathered_first, source_ready});
  }
};

}  // namespace te::testing
