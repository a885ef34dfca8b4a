// What one group stashed, from its store to its way back: storages that its saved tensors lie in (pieces) and the rows
// in them that are counted (regions). When each step happens is stash_step.h's.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "saved_hooks/saved_tensor_hooks.h"

namespace te_torch {

class StashCalls;
class StashCore;
class StashGroup;
class StashStep;
class Stashed;
struct StashPoint;

// Rows of row_bytes, one behind the other from `offset` on, in bytes of a piece's memory.
struct StashRegion {
  // The counter as it is now.
  StashRegion(int64_t at, int64_t count, int64_t bytes, int64_t unit, const Tensor& alive);

  int64_t end() const { return offset + rows * row_bytes; }
  bool changed() const;  // the counter, since

  int64_t offset, rows, row_bytes, unit_rows;
  int64_t behind = 0;  // rows that leave too, behind the live ones (autograd/rows_behind.h)
  Tensor counter;
  int64_t version;  // of the counter, when it was said
};

uint32_t version_of(const Tensor& t);  // 0 in inference mode, where nobody asks whether it changes

// Memory of which regions are stashed: the original until it is freed, then what came back.
struct StashPiece {
  StashPiece(c10::Storage memory, int64_t first, int64_t count)
      : storage(std::move(memory)), start(first), bytes(count) {}

  char* data() const { return static_cast<char*>(storage.mutable_data()) + start; }

  c10::Storage storage;  // null while it is away
  int64_t start, bytes;  // in it
  std::vector<StashRegion> regions;
};

// kept: nothing was copied. stored: its copy is under way or done, the originals are there. coming: its copy back is
// under way.
// kStored: its copy is under way or done, the originals are there. kComing: its copy back is under way.
enum class StashState : uint8_t { kKept, kStored, kAway, kComing, kBack, kGone };
const char* name_of(StashState state);

class StashHandle {
 public:
  StashHandle(pybind11::object group, pybind11::object place, int32_t rest, std::weak_ptr<StashStep> of,
              std::weak_ptr<StashCore> in)
      : name(std::move(group)), key(std::move(place)), tail(rest), step(std::move(of)), core(std::move(in)) {}
  ~StashHandle();  // one that a caller had gives its pages back; groups are told when nobody wants them any more
  StashHandle(const StashHandle&) = delete;
  StashHandle& operator=(const StashHandle&) = delete;

  void store(const std::shared_ptr<StashCalls>& calls);  // its copy starts, behind what the current stream was given
  void free();                         // the current stream waits for the copy; originals are given up
  void start_load(bool keep = false);  // its copy back starts, into memory of the current stream
  void finish_load();                  // the current stream waits for the copy back
  void stay();                         // it is read before its originals were given up: pages go back unread
  void evict(int64_t low_water);       // its pages move to the host where fewer than these are free
  void park();                         // memory that it brought back is the caller's
  // Nobody wants it any more: pages that it has go back, memory that is being copied is waited for.
  void let_go();
  void give_up();  // it is over, and the pool knows
  std::runtime_error refusal(const std::string& who) const;

  pybind11::object name, key;
  int32_t tail;
  std::weak_ptr<StashStep> step;  // whose it is
  std::weak_ptr<StashCore> core;
  StashState state = StashState::kKept;
  bool scheduled = false, evicted = false, noted = false;
  bool leaves = false;  // in a step, of one that a probe made and that stays
  std::vector<std::shared_ptr<StashPiece>> pieces;
  std::vector<std::weak_ptr<Stashed>> taken;  // told when the originals are given up
  std::optional<std::vector<std::pair<at::ScalarType, std::vector<int64_t>>>> like;  // of tensors of a caller
  std::shared_ptr<StashGroup> group;
  std::shared_ptr<StashPoint> stored, back;

 private:
  void note_captured(const StashPoint& point) const;
  bool has_members();           // drops pieces that nobody wants any more; whether a region is left
  void check_counters() const;  // raises where one was changed since it was said
  void free_originals();        // behind the copy

  std::shared_ptr<StashCalls> calls_;
};

}  // namespace te_torch
