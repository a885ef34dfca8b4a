// tune, what the gemm binding calls: while te.tune looks on, each problem that meets cuBLASLt is noted.
#pragma once

#include <transformer_engine/gemm.h>

namespace te_torch::tuning {

// Off, it costs one relaxed load. From any thread: backward runs on autograd's.
void meet(const te_gemm_problem& problem);
bool looks_on();

}  // namespace te_torch::tuning
