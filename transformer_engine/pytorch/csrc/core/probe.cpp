// See probe.h. One recording at a time in the process, of one thread's calls and of the backwards that it calls.
#include "core/probe.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <transformer_engine/transformer_engine.h>

#include <atomic>
#include <mutex>

#include "core/threads.h"

namespace te_torch {

namespace probe {

namespace {

struct KeptRow {
  std::string label;
  const char* op;
  SavedInfo what;
  bool kept;
  // Weak: memory is freed as without a recording, but no later storage gets the same address, which is the row's key
  // (data pointers are none: on the meta device all of them are null).
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
std::vector<KeptRow> kept_rows;
std::vector<PathRow> path_rows;
thread_local std::string current_label;
thread_local const char* because = nullptr;

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

void report(const char* op, const SavedInfo& what, const at::Tensor& t, bool kept) {
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
  if (t.has_storage()) storage.emplace(t.storage().getWeakStorageImpl());
  const std::lock_guard<std::mutex> lock(mutex);
  kept_rows.push_back({current_label, op, what, kept, std::move(storage), t.storage_offset(), t.sizes().vec(),
                       t.scalar_type(), t.nbytes()});
}

Because::Because(const char* why) : outer_(std::exchange(because, why)) {}
Because::~Because() { because = outer_; }

void begin_call() { te_note_path(nullptr, nullptr); }

void end_call(const char* op) {
  const char* path = nullptr;
  const char* why_not_faster = nullptr;
  te_noted_path(&path, &why_not_faster);
  if (path == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex);
  std::string why = why_not_faster == nullptr ? "" : why_not_faster;
  if (because != nullptr) why = why.empty() ? because : because + ("; " + why);
  path_rows.push_back({current_label, op, path, std::move(why)});
}

}  // namespace probe

void register_probe(pybind11::module_& m) {
  namespace py = pybind11;
  using namespace probe;
  m.def("start_recording", torch::wrap_pybind_function([] {
          const std::lock_guard<std::mutex> lock(mutex);
          TORCH_CHECK(recorder == 0,
                      "te.memory_plan and te.explain: another recording is under way in this process; wait for it.");
          kept_rows.clear();
          path_rows.clear();
          recorder.store(this_thread(), std::memory_order_relaxed);
        }));
  m.def("stop_recording", [] {
    std::vector<KeptRow> said_kept;
    std::vector<PathRow> said_paths;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      recorder.store(0, std::memory_order_relaxed);
      said_kept.swap(kept_rows);
      said_paths.swap(path_rows);
    }
    current_label.clear();
    py::list kept, paths;  // without the lock: what Python does meanwhile may be a call that waits for it
    for (const auto& row : said_kept) {
      const uintptr_t storage = row.storage ? reinterpret_cast<uintptr_t>(row.storage->_unsafe_get_target()) : 0;
      kept.append(py::make_tuple(row.label, row.op, row.what.name, row.what.why, row.what.recompute, row.kept, storage,
                                 row.offset, row.shape, row.dtype, row.bytes));
    }
    for (const auto& row : said_paths) paths.append(py::make_tuple(row.label, row.op, row.path, row.why_not_faster));
    return py::make_tuple(kept, paths);
  });
  m.def("is_recording", active);
  m.def("record_path", [](const std::string& op, const std::string& path, const std::string& why_not_faster) {
    const std::lock_guard<std::mutex> lock(mutex);
    path_rows.push_back({current_label, op, path, why_not_faster});
  });
  m.def("set_recording_label", [](const std::string& label) { current_label = label; });
}

}  // namespace te_torch
