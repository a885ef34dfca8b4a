// Saving of tensors for a node's backward. Each has a name, a description for te.memory_plan and, where the number of
// its live rows is on the device, the counter of these. A policy, which only tests replace, may recompute more tensors
// than the options of the call request.
#pragma once

#include <optional>

#include "core/comm_buffer_pool.h"
#include "core/named_tensors.h"
#include "core/probe.h"

namespace te_torch {

// The units of a counter. kRows: rows of the first dimension. kPanels: the same, where each is a panel of 128 rows of
// tokens. kColumns: columns of a matrix, whose rows are apart in memory (scales of 1 x 128 blocks).
enum class LiveUnits : uint8_t { kRows, kPanels, kColumns };

// The live rows of a saved tensor: the first counter * unit_rows of a dimension. The counter is one integer on the
// tensor's device; undefined: the tensor has data of tokens, but no counter applies.
struct LiveRows {
  at::Tensor counter;
  int64_t unit_rows = 1;
  LiveUnits units = LiveUnits::kRows;
  bool of_group = false;  // not of the node: rows after the live ones may be read too (trailing_rows.h)
};

// A group of PagedStash around the nodes of this thread. Nodes announce the counter of live tokens, if there is one,
// for the tensors that they save with a row for each token, unless they have a counter of their own.
struct LiveGroup {
  bool open = false;
  std::optional<at::Tensor> tokens = {};
};
LiveGroup set_live_group(LiveGroup group);  // returns the previous one
const LiveGroup& live_group();

// The counters of a node's tensors: of the rows of its matrices, and of the panels of an FP8 operand. Undefined: none.
struct LiveCounters {
  at::Tensor rows, panels;
  bool of_group = false;  // not of the node
};

// For a tensor that the backward reads and that can be recomputed from other saved tensors.
enum class SaveMode : uint8_t { kSave, kRecompute };

// Decides the mode for every node; `requested` is the mode by the call's options.
class TE_EXPORT SavedPolicy {
 public:
  SavedPolicy() = default;
  virtual ~SavedPolicy() = default;
  SavedPolicy(const SavedPolicy&) = delete;
  SavedPolicy& operator=(const SavedPolicy&) = delete;

  virtual SaveMode decide(const SavedInfo& info, SaveMode requested) const { return requested; }
  virtual void recomputed(const SavedInfo& info) const {}  // called by the backward that recomputes it
};

// of_graph(): for a node. collecting(): for a backward that runs a forward again. of_none(): saves nothing.
class TE_EXPORT SaveContext {
 public:
  static SaveContext of_graph(const char* op) { return SaveContext(op, true); }
  static SaveContext collecting() { return SaveContext(nullptr, true); }
  static SaveContext of_none() { return SaveContext(nullptr, false); }

  // Whether a backward will read the saved tensors: not in a call without gradients.
  bool serves_a_graph() const { return op_ != nullptr; }

  void keep(int name, const at::Tensor& t, const SavedInfo& info, uint8_t part = 0, const LiveRows* live = nullptr) {
    if (!keeps_ || !t.defined()) return;
    refuse_pooled(t, op_ != nullptr ? op_ : "recompute", info.name);
    if (op_ != nullptr && probe::active()) probe::report(op_, info, t, true);
    if (op_ != nullptr && live != nullptr) announce(t, info, *live);
    if (op_ != nullptr && live == nullptr && info.tokens) announce_tokens(t, info);
    kept_.add(name, t, part);
  }
  void keep(int name, const std::optional<at::Tensor>& t, const SavedInfo& info) {
    if (t.has_value()) keep(name, *t, info);
  }

  // Reports a tensor that is not saved, as the backward recomputes it.
  void recomputed(const at::Tensor& t, const SavedInfo& info) const {
    if (op_ != nullptr && probe::active()) probe::report(op_, info, t, false);
  }

  // The counters of the tensors that are kept from now on; they precede the group's.
  void set_live(LiveCounters live) { live_ = std::move(live); }
  const LiveCounters& live() const { return live_; }

  NamedTensors take() { return std::move(kept_); }

 private:
  SaveContext(const char* op, bool keeps) : op_(op), keeps_(keeps) {}
  void announce(const at::Tensor& t, const SavedInfo& info, const LiveRows& live) const;
  void announce_tokens(const at::Tensor& t, const SavedInfo& info) const;

  const char* op_;
  bool keeps_;
  LiveCounters live_;
  NamedTensors kept_;
};

// A tensor with data of tokens that no counter applies to: the node that saves it, and the tensor's name.
struct Uncounted {
  const char* node = nullptr;
  const char* name = nullptr;
};

// The scope of announced live rows: while the node passes its tensors to saved-tensor hooks. Another node may save all
// rows of the same tensor.
class TE_EXPORT AnnouncedRows {
 public:
  AnnouncedRows();
  ~AnnouncedRows();
  AnnouncedRows(const AnnouncedRows&) = delete;
  AnnouncedRows& operator=(const AnnouncedRows&) = delete;

  static const LiveRows* of(const at::Tensor& t);   // null without an announced counter
  static Uncounted uncounted(const at::Tensor& t);  // of nulls where the tensor is not announced as such

 private:
  size_t before_;  // number of announcements of an outer node, in whose hook this node runs
};

}  // namespace te_torch
