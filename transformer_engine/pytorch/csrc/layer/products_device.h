// Products over several weights whose groups of rows the device alone knows: one kernel a product, and no look at how
// many rows a group has. Plain operands alone.
#pragma once

#include "products_grouped.h"

namespace te_torch::layer {

std::shared_ptr<const Products> device_groups(Grouping grouping);

}  // namespace te_torch::layer
