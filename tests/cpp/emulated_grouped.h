// What a plan of grouped products asks of a GPU, on emulated blocks: maps of matrices, and the start of a kernel.
#pragma once

#include "emulated_wgmma.h"

#include "ops/gemm/sm90/kernel.cuh"

namespace te::testing {

// Runs a launch's clusters one after the other.
struct EmulatedGrouped {
  int multiprocessors;
  unsigned seed;

  int32_t sms() const { return multiprocessors; }
  bool wide(const te_tensor& t) const {
    return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.row_pitch * int64_t(te_dtype_bytes(t.dtype)) % 16 == 0;
  }
  CUtensorMap map(const te_tensor& t, int lines) const {
    CUtensorMap m{};
    m.data = static_cast<const unsigned char*>(t.data);
    m.rows = t.rows;
    m.cols = t.cols;
    m.pitch = t.row_pitch;
    m.lines = lines;
    m.element = int(te_dtype_bytes(t.dtype));
    return m;
  }
  template <class Job>
  void start(const typename Job::Params& params, int32_t blocks) const {
    static_assert(gemm::grouped::kSharedBytes<Job> <= int(gpu::kSharedBytes), "a Hopper block has 227 KiB");
    for (unsigned i = 0; i < unsigned(blocks); i += gemm::wgmma::kCluster) {
      gpu::Cluster cluster(gemm::wgmma::kCluster, gemm::wgmma::kThreads, seed + i);
      cluster.run(i, unsigned(blocks), [&] { gemm::grouped::grouped_kernel<Job>(params); });
    }
  }
};

}  // namespace te::testing
