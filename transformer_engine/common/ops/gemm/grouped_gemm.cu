// grouped gemm, CUDA path: refuses what it cannot do.
#include "core/device.h"
#include "ops/gemm/grouped.h"

namespace te::gemm::grouped::cuda {

void run(const te_grouped_gemm_problem&, const Extents&, te_stream) {
  throw Error(TE_NOT_IMPLEMENTED, "te_grouped_gemm: device splits on CUDA; pass m_splits as a list (host splits).");
}

}  // namespace te::gemm::grouped::cuda
