// Called by the GEMM binding: while te.tune records, each problem for cuBLASLt is noted.
#pragma once

#include <transformer_engine/gemm.h>

namespace te_torch::tuning {

// Costs one relaxed load when off. Called on any thread, as backwards run on autograd's.
void meet(const te_gemm_problem& problem);
bool looks_on();

}  // namespace te_torch::tuning
