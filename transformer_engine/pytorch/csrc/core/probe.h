// What te.memory_plan and te.explain ask of the extension: while somebody records, each node tells what it keeps for
// backward and each engine call which path it took. Off, it costs one relaxed load; it never changes what runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

// What policies built outside of the extension (tests/layer) reach.
#define TE_EXPORT __attribute__((visibility("default")))

namespace te_torch {

// A tensor kept for backward, in words.
struct SavedInfo {
  const char* name;       // what it is
  const char* why;        // who reads it
  const char* recompute;  // what not keeping it would cost, and the option that does so
  bool tokens = false;    // its first dimension is that of the tokens
};

inline constexpr const char* kCallers = "the caller's tensor: keeping it costs only what freeing it would give back";
inline constexpr SavedInfo kParameter{"parameter", "the gradients behind it read it", "a parameter: kept in any case"};
inline constexpr SavedInfo kStatistic{"norm statistic", "the norm's backward reads one value a row",
                                      "reading the norm's input once", true};
inline constexpr SavedInfo kAngles{"rotary angles", "the backward turns the gradient back by them", kCallers};

namespace probe {

TE_EXPORT bool active();

// The module at work on this thread, as set from Python; backward restores the label of its forward.
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

// kept: it is held for backward; else the backward recomputes it.
TE_EXPORT void report(const char* op, const SavedInfo& what, const at::Tensor& tensor, bool kept);

// While it lives, what this thread calls says `why` before what the engine says; null: nothing.
class TE_EXPORT Because {
 public:
  explicit Because(const char* why);
  ~Because();
  Because(const Because&) = delete;
  Because& operator=(const Because&) = delete;

 private:
  const char* outer_;
};

// The path that the engine noted since the last begin_call on this thread.
void begin_call();
void end_call(const char* op);

}  // namespace probe
}  // namespace te_torch
