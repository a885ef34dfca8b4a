// GemmPolicy over several weights, one for each group of consecutive rows (grouping.h). The products of a group are
// those of a layer of its own. No group communicates.
#pragma once

#include "layer/grouping.h"

namespace te_torch::layer {

// For groups whose sizes are on the device alone it returns the policy of gemm_policy_device.h.
TE_EXPORT std::shared_ptr<const GemmPolicy> grouped_gemm_policy(Grouping grouping);

}  // namespace te_torch::layer
