// Recording for te.memory_plan and te.explain: while a recording runs, each node reports its saved tensors and each
// engine call its path. Without one it costs a relaxed load. It never changes what runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

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

// end_call() records the path that the engine has noted since begin_call() on this thread.
void begin_call();
void end_call(const char* op);

}  // namespace probe
}  // namespace te_torch
