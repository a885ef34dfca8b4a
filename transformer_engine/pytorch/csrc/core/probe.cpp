// See probe.h. A process has one recording at a time, of the calls of one thread and of the backwards that it calls.
#include "core/probe.h"

#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <transformer_engine/transformer_engine.h>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>

#include "core/threads.h"

namespace te_torch {

namespace probe {

namespace {

struct SavedRow {
  std::string label;
  const char* op;
  SavedInfo info;
  bool kept;
  // Weak: memory is freed as without a recording, but no later storage gets the same address, which is the row's key.
  // Data pointers are no keys, as all of them are null on the meta device.
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
  int64_t offset;  // in elements
  std::vector<int64_t> shape;
  at::ScalarType dtype;
  size_t bytes;
};

struct PathRow {
  std::string label;
  std::string op, path, why_not_faster;
};

std::atomic<int64_t> recorder{0};  // the number of the thread that records
std::mutex mutex;
std::vector<SavedRow> saved_rows;
std::vector<PathRow> path_rows;
thread_local std::string current_label;
thread_local const char* path_reason = nullptr;

}  // namespace

bool active() {
  const int64_t thread = recorder.load(std::memory_order_relaxed);
  return thread != 0 && calling_thread() == thread;
}

const std::string& label() { return current_label; }

Label::Label(const std::string& label) {
  if (active()) {
    outer_ = std::exchange(current_label, label);
  }
}

Label::~Label() {
  if (active()) current_label = std::move(outer_);
}

void report(const char* op, const SavedInfo& info, const at::Tensor& t, bool kept) {
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
  if (t.has_storage()) storage.emplace(t.storage().getWeakStorageImpl());
  const std::lock_guard<std::mutex> lock(mutex);
  saved_rows.push_back({current_label, op, info, kept, std::move(storage), t.storage_offset(), t.sizes().vec(),
                        t.scalar_type(), t.nbytes()});
}

PathReason::PathReason(const char* reason) : outer_(std::exchange(path_reason, reason)) {}
PathReason::~PathReason() { path_reason = outer_; }

void CallRecord::begin(const char* op) {
  op_ = op;
  throws_ = std::uncaught_exceptions();
  shown_ = new at::RecordFunction(at::RecordScope::FUNCTION);
  if (shown_->isActive()) shown_->before(op, c10::ArrayRef<const c10::IValue>{});
  te_note_path(nullptr, nullptr);
}

void CallRecord::end() {
  const std::unique_ptr<at::RecordFunction> ended(shown_);
  if (std::uncaught_exceptions() > throws_) return;
  const char* path = nullptr;
  const char* why_not_faster = nullptr;
  te_noted_path(&path, &why_not_faster);
  if (path == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex);
  std::string reason = why_not_faster == nullptr ? "" : why_not_faster;
  if (path_reason != nullptr) reason = reason.empty() ? path_reason : path_reason + ("; " + reason);
  path_rows.push_back({current_label, op_, path, std::move(reason)});
}

}  // namespace probe

void register_probe(pybind11::module_& m) {
  namespace py = pybind11;
  using namespace probe;
  m.def("start_recording", torch::wrap_pybind_function([] {
          const std::lock_guard<std::mutex> lock(mutex);
          TORCH_CHECK(recorder == 0,
                      "te.memory_plan and te.explain: another recording runs in this process; wait for its end.");
          saved_rows.clear();
          path_rows.clear();
          recorder.store(this_thread(), std::memory_order_relaxed);
        }));
  m.def("stop_recording", [] {
    std::vector<SavedRow> saved;
    std::vector<PathRow> paths;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      recorder.store(0, std::memory_order_relaxed);
      saved.swap(saved_rows);
      paths.swap(path_rows);
    }
    current_label.clear();
    py::list saved_list, path_list;  // made without the lock: Python code may run here, and call what takes it
    for (const auto& row : saved) {
      const uintptr_t storage = row.storage ? reinterpret_cast<uintptr_t>(row.storage->_unsafe_get_target()) : 0;
      saved_list.append(py::make_tuple(row.label, row.op, row.info.name, row.info.reason, row.info.recompute_cost,
                                       row.kept, storage, row.offset, row.shape, row.dtype, row.bytes));
    }
    for (const auto& row : paths) path_list.append(py::make_tuple(row.label, row.op, row.path, row.why_not_faster));
    return py::make_tuple(saved_list, path_list);
  });
  m.def("is_recording", active);
  m.def("record_path", [](const std::string& op, const std::string& path, const std::string& why_not_faster) {
    const std::lock_guard<std::mutex> lock(mutex);
    path_rows.push_back({current_label, op, path, why_not_faster});
  });
  m.def("set_recording_label", [](const std::string& label) { current_label = label; });
}

}  // namespace te_torch
