// Calls Python after a backward through the modules of a region has ended: delayed scaling updates its scales then.
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include <mutex>

#include "core/held_object.h"

namespace te_torch {

namespace {

using at::Tensor;

// Every module has a number, as any of them may get no gradient; module 0 runs first, so that its backward runs last.
// The module that the first backward reaches is the leader: only backwards that reach the leader or module 0 count, so
// that the microbatches of one region update its scales once.
class BackwardWatch : public std::enable_shared_from_this<BackwardWatch> {
 public:
  explicit BackwardWatch(PyObject* ended) : ended_(held_object(ended)) {}

  // For callers that report `reached` themselves.
  int64_t take() { return places_++; }

  void follow(const Tensor& output, std::optional<int64_t> place) {
    const int64_t at = place.has_value() ? *place : take();
    output.register_hook([watch = shared_from_this(), at](const Tensor&) { watch->reached(at); });
  }

  // Whether a backward runs on this thread: inside a recomputation's backward, the outer one.
  bool reached(int64_t place) {
    if (torch::autograd::get_current_graph_task_id() < 0) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (leader_ < 0) leader_ = place;
    if ((place != 0 && place != leader_) || !due_.expired()) return true;
    // Held by the backward alone, so that a failed backward drops it.
    auto due = std::make_shared<std::shared_ptr<BackwardWatch>>(shared_from_this());
    due_ = due;
    torch::autograd::Engine::get_default_engine().queue_callback([due = std::move(due)] { (*due)->call_ended(); });
    return true;
  }

 private:
  void call_ended() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      due_.reset();
    }
    const pybind11::gil_scoped_acquire gil;
    const THPObjectPtr result(PyObject_CallNoArgs(ended_.get()));
    if (!result) {
      python_error error;
      error.persist();
      throw error;
    }
  }

  std::shared_ptr<PyObject> ended_;
  int64_t places_ = 0;  // under the GIL
  std::mutex mutex_;    // devices run backward on threads of their own
  int64_t leader_ = -1;
  std::weak_ptr<std::shared_ptr<BackwardWatch>> due_;
};

}  // namespace

void register_backward_watch(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<BackwardWatch, std::shared_ptr<BackwardWatch>>(m, "BackwardWatch")
      .def(py::init([](const py::function& ended) { return std::make_shared<BackwardWatch>(ended.ptr()); }),
           py::arg("ended"), "ended(): called when a backward that reached what is watched has ended.")
      .def("take", &BackwardWatch::take)
      .def("follow", &BackwardWatch::follow, py::arg("output"), py::arg("place") = py::none())
      .def("reached", &BackwardWatch::reached);
}

}  // namespace te_torch
