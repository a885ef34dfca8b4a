// The binding of CPU offload: an engine and its layers as objects. They own the device storages before the offload and
// after the reload, which the C API leaves to its caller. Python decides which tensors are offloaded, and when.
#pragma once

#include <transformer_engine/offload.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/common.h"

namespace te_torch {

class OffloadEngine {
 public:
  OffloadEngine(const at::Device& device, te_offload_options options);  // options.device is set from `device`
  ~OffloadEngine();
  OffloadEngine(const OffloadEngine&) = delete;
  OffloadEngine& operator=(const OffloadEngine&) = delete;

  te_offload_engine* get() const { return engine_; }
  at::Device device() const { return device_; }

 private:
  at::Device device_;
  te_offload_engine* engine_ = nullptr;
};

class OffloadLayer {
 public:
  OffloadLayer(std::shared_ptr<OffloadEngine> engine, bool retain);
  ~OffloadLayer();
  OffloadLayer(const OffloadLayer&) = delete;
  OffloadLayer& operator=(const OffloadLayer&) = delete;

  std::string state() const { return te_offload_state_name(te_offload_layer_state(layer_)); }
  int64_t mark();
  // Takes the whole storages of `tensors`. marks: one each, -1 for none.
  void start(const std::vector<Tensor>& tensors, const std::vector<int64_t>& marks);
  void join();
  void release();
  void start_reload();
  void wait_reload();
  // A view of the reloaded storage number `index`.
  Tensor pop(int64_t index, at::ScalarType dtype, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides);
  void drop(int64_t index);  // frees its device memory
  void park();
  void reset();
  int64_t bytes() const;  // offloaded

 private:
  te_stream stream() const;
  std::vector<te_offload_piece> pieces() const;

  std::shared_ptr<OffloadEngine> engine_;
  te_offload_layer* layer_ = nullptr;
  std::vector<c10::Storage> storages_;  // on the device, before release() and after start_reload()
  std::vector<size_t> sizes_;
  Tensor staging_;
};

}  // namespace te_torch
