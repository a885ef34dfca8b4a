// Reads and writes the state of a torch.Generator without a deadlock between threads. torch's get_state() creates a
// Python object while it holds the generator's mutex. That may run the garbage collector (Python 3.10 and 3.11) and
// other Python code, which may give the GIL to a thread that waits for the mutex while it holds the GIL. The functions
// below release the GIL before they take the mutex, and run no Python code while they hold it.
#include <ATen/core/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>

#include "core/common.h"

namespace te_torch {

void register_random_state(pybind11::module_& m) {
  m.def("get_random_state", [](at::Generator generator) {
    const pybind11::gil_scoped_release no_gil;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    return generator.get_state();
  });
  m.def("set_random_state", [](at::Generator generator, const Tensor& state) {
    const pybind11::gil_scoped_release no_gil;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  });
}

}  // namespace te_torch
