// The Gpu of grouped/launches.h on emulated CTAs: tensor maps, and launches of kernels.
#pragma once

#include "emulated_sm90.h"

#include "ops/gemm/grouped/traits.cuh"

namespace te::testing {

// Runs a launch's clusters one after the other.
struct EmulatedGrouped {
  int multiprocessors;
  unsigned seed;

  int32_t sms() const { return multiprocessors; }
  bool wide(const te_tensor& t) const {
    return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.row_pitch * int64_t(te_dtype_bytes(t.dtype)) % 16 == 0;
  }
  CUtensorMap map(const te_tensor& t, int box_rows) const {
    CUtensorMap m{};
    m.data = static_cast<const unsigned char*>(t.data);
    m.rows = t.rows;
    m.cols = t.cols;
    m.pitch = t.row_pitch;
    m.box_rows = box_rows;
    m.element = int(te_dtype_bytes(t.dtype));
    return m;
  }
  CUtensorMap result_map(const te_tensor& t) const { return map(t, gemm::sm90::kMmaAtomM); }
  template <class Traits>
  void start(const typename Traits::Params& params, int32_t ctas) const {
    static_assert(gemm::sm90::kSharedBytes<Traits> <= int(gpu::kSharedBytes), "a Hopper block has 227 KiB");
    for (unsigned i = 0; i < unsigned(ctas); i += gemm::sm90::kCluster) {
      gpu::Cluster cluster(gemm::sm90::kCluster, gemm::sm90::kThreads, seed + i);
      cluster.run(i, unsigned(ctas), [&] { gemm::sm90::grouped_kernel<Traits>(params); });
    }
  }
};

}  // namespace te::testing
