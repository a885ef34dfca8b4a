// What a group of the stash keeps, as its members: what is saved while it is open, and says which of its rows count.
// When they leave and come back is stash_step.h's.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "stash/stash_handle.h"

namespace te_torch {

// The StorageHandler: what is saved while it is open and says how many of its rows are alive is its own.
class StashMembers : public StorageHandler, public std::enable_shared_from_this<StashMembers> {
 public:
  // counts: said of what our own nodes keep a row of for each token.
  StashMembers(pybind11::object name, std::optional<Tensor> counts, const at::Device& device)
      : name_(std::move(name)), counts_(std::move(counts)), device_(device) {}

  void open(std::shared_ptr<StashHandle> handle);
  void close();  // what leaves is the handle's

  bool takes() const override { return open_; }
  std::shared_ptr<PackedStorage> take(const SaveRequest& offered) override;
  void place(StashPiece& piece, const SaveRequest& offered);  // the tensor lies in a region, or makes a new one
  void dropped();  // a storage of it is wanted by nobody any more; with the last one the group is
  StashHandle& handle() const { return *handle_; }

 private:
  template <class... Words>
  [[noreturn]] void refuse(const Words&... words) const;
  void check_rows(const Tensor& t, const LiveRows& live);

  pybind11::object name_;
  std::optional<Tensor> counts_, before_;  // before: the counts around it
  at::Device device_;
  std::shared_ptr<StashHandle> handle_;
  bool open_ = false;
  std::optional<int64_t> rows_;  // of the tensors that our nodes count by `counts`
  int64_t members_ = 0, wanted_ = 0;
  // Copies of counters that the engine does not read, by address and version, and the counters, which hold addresses.
  std::map<std::pair<const void*, uint32_t>, std::pair<Tensor, Tensor>> wide_;
};

// A storage that saved tensors of one group lie in.
class Stashed : public PackedStorage {
 public:
  Stashed(std::shared_ptr<StashMembers> group, const Tensor& t);
  ~Stashed() override;

  void add(const SaveRequest& offered) override;
  void fetch() override;  // what nobody has brought back is brought back now
  c10::Storage restore() override;

  bool kept() const;
  const std::shared_ptr<StashPiece>& piece() const { return piece_; }

 private:
  std::shared_ptr<StashMembers> group_;
  std::shared_ptr<StashPiece> piece_;
};

}  // namespace te_torch
