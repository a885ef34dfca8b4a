// The state of a torch.Generator, read and written so that threads cannot lock each other out. torch's own get_state()
// makes its Python object while it holds the generator's mutex; that may run the garbage collector (Python 3.10
// and 3.11) and with it anybody's Python, and so hand the GIL to a thread that then waits for the mutex with the GIL in
// hand. The functions below release the GIL before they take the mutex, and run no Python while they hold it.
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
