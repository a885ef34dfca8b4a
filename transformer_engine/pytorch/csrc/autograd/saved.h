// How a node saves tensors for its backward: each has a name, the text that te.memory_plan shows for it and, where only
// the device knows how many of its rows are alive, that counter. A policy, which only tests replace, may have more
// recomputed than the call's options ask.
#pragma once

#include <optional>

#include "core/comm_buffer_pool.h"
#include "core/named_tensors.h"
#include "core/probe.h"

namespace te_torch {

// The rows of a kept tensor that are alive: the first counter * unit_rows of its first dimension. The counter, one
// integer, lies on the tensor's device.
struct LiveRows {
  at::Tensor counter;
  int64_t unit_rows = 1;
};

// Within a group whose live tokens are counted (Python's stash), every node on this thread announces that counter for
// what it keeps a row of for each token. Sets it, and returns the one before.
std::optional<at::Tensor> set_live_tokens(std::optional<at::Tensor> counter);

// What becomes of a tensor that the backward reads and that can be recomputed from what is kept in any case.
enum class SaveMode : uint8_t { kSave, kRecompute };

// Decides that for every node; `asked` is what the call's options say. One that always recomputes is a test.
class TE_EXPORT SavedPolicy {
 public:
  SavedPolicy() = default;
  virtual ~SavedPolicy() = default;
  SavedPolicy(const SavedPolicy&) = delete;
  SavedPolicy& operator=(const SavedPolicy&) = delete;

  virtual SaveMode decide(const SavedInfo& what, SaveMode asked) const { return asked; }
  virtual void recomputed(const SavedInfo& what) const {}  // said by the backward that does it
};

// A SaveContext without a graph keeps nothing; one that collects serves a backward that runs a forward again.
class TE_EXPORT SaveContext {
 public:
  static SaveContext of_graph(const char* op) { return SaveContext(op, true); }
  static SaveContext collecting() { return SaveContext(nullptr, true); }
  static SaveContext of_none() { return SaveContext(nullptr, false); }

  // Whether a backward will take anything back: not in a call without gradients, whoever wants some.
  bool serves_a_graph() const { return op_ != nullptr; }

  void keep(int name, const at::Tensor& t, const SavedInfo& what, uint8_t part = 0, const LiveRows* live = nullptr) {
    if (!keeps_ || !t.defined()) return;
    refuse_pooled(t, op_ != nullptr ? op_ : "recompute", what.name);
    if (op_ != nullptr && probe::active()) probe::report(op_, what, t, true);
    if (op_ != nullptr && live != nullptr) announce(t, *live);
    if (op_ != nullptr && live == nullptr && what.tokens) announce_tokens(t);
    kept_.add(name, t, part);
  }
  void keep(int name, const std::optional<at::Tensor>& t, const SavedInfo& what) {
    if (t.has_value()) keep(name, *t, what);
  }

  // What is not kept, because the backward recomputes it.
  void recomputed(const at::Tensor& t, const SavedInfo& what) const {
    if (op_ != nullptr && probe::active()) probe::report(op_, what, t, false);
  }

  NamedTensors take() { return std::move(kept_); }

 private:
  SaveContext(const char* op, bool keeps) : op_(op), keeps_(keeps) {}
  static void announce(const at::Tensor& t, const LiveRows& live);
  static void announce_tokens(const at::Tensor& t);

  const char* op_;
  bool keeps_;
  NamedTensors kept_;
};

// Announced live rows stand while the node that keeps the tensors hands them to saved-tensor hooks, and no longer: the
// same tensor may be kept whole by another node.
class TE_EXPORT AnnouncedRows {
 public:
  AnnouncedRows();
  ~AnnouncedRows();
  AnnouncedRows(const AnnouncedRows&) = delete;
  AnnouncedRows& operator=(const AnnouncedRows&) = delete;

  static const LiveRows* of(const at::Tensor& t);  // null: none were

 private:
  size_t before_;  // those of a node around this one, which runs in a hook of that one's
};

}  // namespace te_torch
