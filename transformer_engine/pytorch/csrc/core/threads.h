// The thread that work belongs to: in a backward the thread that called it, as autograd runs backwards on threads of
// its own. A number is never reused, unlike the operating system's ids; 0 is no thread.
#pragma once

#include <cstdint>

namespace te_torch {

int64_t this_thread();     // backwards that it calls after this get the same number
int64_t calling_thread();  // 0 for a thread that has not called this_thread()

}  // namespace te_torch
