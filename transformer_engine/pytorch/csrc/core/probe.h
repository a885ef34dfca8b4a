// Recording for te.memory_plan and te.explain: while a recording runs, each node reports its saved tensors and each
// engine call its path. Without one it costs a relaxed load. It never changes what runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace at {
struct RecordFunction;
}

// For policies built outside of the extension (tests/layer).
#define TE_EXPORT __attribute__((visibility("default")))

namespace te_torch {

// The description of a saved tensor.
struct SavedInfo {
  const char* name;
  const char* reason;          // which computation of the backward reads it
  const char* recompute_cost;  // the cost of recomputing it, and the option that does so
  bool tokens = false;         // its first dimension is that of the tokens: a matrix, or a vector
  bool vector = false;         // of one value for each token
};

inline constexpr const char* kCallers =
    "the caller's tensor: saving it costs memory only where the caller would free it";
inline constexpr SavedInfo kParameter{"parameter", "the gradient of its input reads it",
                                      "a parameter: kept in any case"};
inline constexpr SavedInfo kStatistic{"norm statistic", "the norm's backward reads one value a row",
                                      "reading the norm's input once", true, true};
inline constexpr SavedInfo kAngles{"rotary angles", "the backward rotates the gradient by them", kCallers};

namespace probe {

TE_EXPORT bool active();

// The module that runs on this thread, set from Python; a backward restores the label of its forward.
TE_EXPORT const std::string& label();

class TE_EXPORT Label {
 public:
  explicit Label(const std::string& label);
  ~Label();
  Label(const Label&) = delete;
  Label& operator=(const Label&) = delete;

 private:
  std::string outer_;
};

// kept: saved for the backward; else the backward recomputes it.
TE_EXPORT void report(const char* op, const SavedInfo& info, const at::Tensor& tensor, bool kept);

// While it lives, te.explain shows `reason` before the engine's own reason for each call of this thread; null: nothing.
class TE_EXPORT PathReason {
 public:
  explicit PathReason(const char* reason);
  ~PathReason();
  PathReason(const PathReason&) = delete;
  PathReason& operator=(const PathReason&) = delete;

 private:
  const char* outer_;
};

// A call of the engine on this thread: a recording notes the path that the engine took since then, and a profiler shows
// the op. A call that throws has no path.
class CallRecord {
 public:
  explicit CallRecord(const char* op) {
    if (active()) begin(op);
  }
  ~CallRecord() {
    if (op_ != nullptr) end();
  }
  CallRecord(const CallRecord&) = delete;
  CallRecord& operator=(const CallRecord&) = delete;

 private:
  void begin(const char* op);
  void end();

  const char* op_ = nullptr;  // null without a recording
  at::RecordFunction* shown_ = nullptr;
  int throws_ = 0;  // exceptions under way where the call began
};

}  // namespace probe
}  // namespace te_torch
