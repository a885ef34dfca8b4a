// What a group of the stash keeps, as its members: storages that its saved tensors lie in (pieces) and the rows in them
// that are counted (regions). When they leave and come back is Python's (stash/handle.py, stash/step.py).
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "saved_door.h"

namespace te_torch {

// Rows of row_bytes, one behind the other from `offset` on, in bytes of a piece's memory.
struct StashRegion {
  int64_t offset, rows, row_bytes, unit_rows;
  Tensor counter;
  int64_t version;  // of the counter, when it was said

  int64_t end() const { return offset + rows * row_bytes; }
};

// Memory of which regions are stashed: the original until it is freed, then what came back.
struct StashPiece {
  StashPiece(c10::Storage memory, int64_t first, int64_t count)
      : storage(std::move(memory)), start(first), bytes(count) {}

  char* data() const { return static_cast<char*>(storage.mutable_data()) + start; }

  c10::Storage storage;  // null while it is away
  int64_t start, bytes;  // in it
  std::vector<StashRegion> regions;
};

class Stashed;

// kept: nothing was copied. stored: its copy is under way or done, the originals are there. coming: its copy back is
// under way.
enum class StashState : uint8_t { kKept, kStored, kAway, kComing, kBack, kGone };

// What one group stashed: the part of stash/handle.py that each tensor asks.
class StashHandle {
 public:
  explicit StashHandle(pybind11::object group) : name(std::move(group)) {}
  virtual ~StashHandle() = default;
  StashHandle(const StashHandle&) = delete;
  StashHandle& operator=(const StashHandle&) = delete;

  bool has_members();           // drops pieces that nobody wants any more; whether a region is left
  void check_counters() const;  // raises where one was changed since it was said
  void free_originals();        // behind the copy
  void park();
  void give_up();

  pybind11::object name;
  StashState state = StashState::kKept;
  std::vector<std::shared_ptr<StashPiece>> pieces;
  std::vector<std::weak_ptr<Stashed>> taken;  // told when the originals are given up
};

// The client of the saved door: what is saved while it is open and says how many of its rows are alive is its own.
class StashMembers : public Client, public std::enable_shared_from_this<StashMembers> {
 public:
  // counts: said of what our own nodes keep a row of for each token.
  StashMembers(pybind11::object name, std::optional<Tensor> counts, const at::Device& device)
      : name_(std::move(name)), counts_(std::move(counts)), device_(device) {}

  void open(pybind11::object handle);
  void close();  // what leaves is the handle's

  bool takes() const override { return open_; }
  std::shared_ptr<Taken> take(const Offered& offered) override;
  void place(StashPiece& piece, const Offered& offered);  // the tensor lies in a region, or makes a new one
  void dropped();  // a storage of it is wanted by nobody any more; with the last one the group is
  StashHandle& handle() const { return *own_; }
  const pybind11::object& python_handle() const { return handle_; }

 private:
  template <class... Words>
  [[noreturn]] void refuse(const Words&... words) const;
  void check_rows(const Tensor& t, const LiveRows& live);

  pybind11::object name_;
  std::optional<Tensor> counts_, before_;  // before: the counts around it
  at::Device device_;
  pybind11::object handle_;
  StashHandle* own_ = nullptr;
  bool open_ = false;
  std::optional<int64_t> rows_;  // of the tensors that our nodes count by `counts`
  int64_t members_ = 0, wanted_ = 0;
  // Copies of counters that the engine does not read, by address and version, and the counters, which hold addresses.
  std::map<std::pair<const void*, uint32_t>, std::pair<Tensor, Tensor>> wide_;
};

// A storage that saved tensors of one group lie in.
class Stashed : public Taken {
 public:
  Stashed(std::shared_ptr<StashMembers> group, const Tensor& t);
  ~Stashed() override;

  void add(const Offered& offered) override;
  void fetch() override;  // what nobody has brought back is brought back now
  c10::Storage restore() override;

  bool kept() const;
  const std::shared_ptr<StashPiece>& piece() const { return piece_; }

 private:
  std::shared_ptr<StashMembers> group_;
  std::shared_ptr<StashPiece> piece_;
};

}  // namespace te_torch
