// See threads.h. torch passes the thread-local Python objects of a thread to the threads of its backward. The one set
// here holds no Python object, so that a thread may end without the GIL.
#include "core/threads.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <memory>
#include <string>

namespace te_torch {

namespace {

using Carried = at::impl::ThreadLocalPythonObjects;

struct Thread : c10::SafePyObject {
  explicit Thread(int64_t which) : SafePyObject(nullptr, nullptr), number(which) {}
  int64_t number;
};

const std::string& key() {
  static const auto* const name = new std::string("transformer_engine.thread");
  return *name;
}

bool in_backward() { return torch::autograd::get_current_graph_task_id() >= 0; }

std::atomic<int64_t> given{0};
thread_local int64_t own = 0;
thread_local bool registered = false;

}  // namespace

int64_t this_thread() {
  if (own == 0) own = ++given;
  if (!registered && !in_backward()) {  // torch drops objects set in a backward at its end
    Carried::set(key(), std::make_shared<Thread>(own));
    registered = true;
  }
  return own;
}

int64_t calling_thread() {
  if (!in_backward() || !Carried::contains(key())) return own;
  return static_cast<const Thread&>(*Carried::get(key())).number;
}

void register_threads(pybind11::module_& m) {
  m.def("this_thread", this_thread);
  m.def("calling_thread", calling_thread);
}

}  // namespace te_torch
