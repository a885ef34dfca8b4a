// A tensor's memory under a storage of its own: for savers, which take what lies in one storage for one tensor, or
// write the whole storage for each part of it. Nothing is copied, and what is written through one is read through the
// other.
#pragma once

#include "core/common.h"

namespace te_torch {

// `t` in a storage that holds nothing else, and that keeps the memory; `t` itself where it lies so already, has no
// memory, or wants a gradient. Both have one version.
Tensor own_storage(const Tensor& t);

// The inverse: `t`, detached, in the storage that its own is a part of; `t` itself where its storage is no part.
Tensor whole_storage(const Tensor& t);

}  // namespace te_torch
