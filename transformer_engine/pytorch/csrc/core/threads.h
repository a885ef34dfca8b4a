// Which thread a piece of work belongs to: its own, or in a backward the one that called it, as autograd runs backwards
// on threads of its own. Numbers are given once, unlike the operating system's; 0 is no thread.
#pragma once

#include <cstdint>

namespace te_torch {

int64_t this_thread();     // and the backwards that it calls from here on say it too
int64_t calling_thread();  // 0: a thread that has not asked for its number

}  // namespace te_torch
