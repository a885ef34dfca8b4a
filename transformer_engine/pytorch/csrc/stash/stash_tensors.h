// The tensors of a group: those that are saved while it is open and whose live rows are known. stash_step.h decides
// when they are stored and loaded.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "stash/stash_handle.h"

namespace te_torch {

// Takes the storages of saved tensors whose number of live rows is known.
class StashTensors : public StorageHandler, public std::enable_shared_from_this<StashTensors> {
 public:
  // counts: the counter of tensors that this library's modules keep with a row for each token.
  // warned: shared by the groups of a stash.
  StashTensors(pybind11::object name, std::optional<Tensor> counts, const at::Device& device,
               std::shared_ptr<bool> warned)
      : name_(std::move(name)), counts_(std::move(counts)), device_(device), warned_(std::move(warned)) {}

  void open(std::shared_ptr<StashHandle> handle);
  void close();  // moves the segments to the handle

  bool takes() const override { return open_; }
  std::shared_ptr<PackedStorage> take(const SaveRequest& request) override;
  void add_region(StashSegment& segment, const SaveRequest& request);  // unless the tensor is in a region already
  void release_one();  // a storage has no reader left; after the last one the handle is released
  StashHandle& handle() const { return *handle_; }

 private:
  template <class... Text>
  [[noreturn]] void refuse(const Text&... text) const;
  void check_rows(const Tensor& t, const LiveRows& live);
  void warn_if_uncounted(const Tensor& t) const;  // once for a stash, of large tensors of this library's modules

  pybind11::object name_;
  std::optional<Tensor> counts_;
  LiveGroup outer_;  // in force before open()
  at::Device device_;
  std::shared_ptr<bool> warned_;
  std::shared_ptr<StashHandle> handle_;
  bool open_ = false;
  std::optional<int64_t> rows_;  // of the tensors that `counts` counts
  int64_t regions_ = 0, readers_ = 0;
  // int32 copies of counters of dtypes that the engine does not read, by address and version. The counters themselves
  // are held so that their addresses stay in use.
  std::map<std::pair<const void*, uint32_t>, std::pair<Tensor, Tensor>> wide_;
};

// A storage with saved tensors of one group.
class Stashed : public PackedStorage {
 public:
  Stashed(std::shared_ptr<StashTensors> group, const Tensor& t);
  ~Stashed() override;

  void add(const SaveRequest& request) override;
  void fetch() override;  // loads it now unless a scheduler has
  c10::Storage restore() override;

  bool kept() const;
  const std::shared_ptr<StashSegment>& segment() const { return segment_; }

 private:
  std::shared_ptr<StashTensors> group_;
  std::shared_ptr<StashSegment> segment_;
};

}  // namespace te_torch
