// A tensor's memory as a storage of its own, for code that saves whole storages, once for each tensor in them. Nothing
// is copied: both tensors share the memory.
#pragma once

#include "core/common.h"

namespace te_torch {

// `t` in a storage that holds nothing else and keeps the memory alive. Returns `t` itself if its storage is that
// already, if it has no memory, or if it requires a gradient. Both share one version counter.
Tensor own_storage(const Tensor& t);

// The inverse: `t`, detached, in the storage that its own storage is a part of; `t` itself if its storage is no part.
Tensor whole_storage(const Tensor& t);

}  // namespace te_torch
