// See offload.h; also pack and unpack as functions of tensors.
#include "ops/offload.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <unordered_set>

#include "core/torch_api.h"
#include "saved_hooks/saved_tensor_hooks.h"

namespace te_torch {

namespace {

PyObject* pinned_memory_error = nullptr;  // a subclass of RuntimeError, created with the module

void check_memory(te_status status) {
  if (status == TE_PINNED_MEMORY) {
    PyErr_SetString(pinned_memory_error, te_last_error());
    throw pybind11::error_already_set();
  }
  check(status);
}

int32_t ordinal(const at::Device& device) { return device.is_cpu() ? TE_DEVICE_CPU : int32_t(device.index()); }

Tensor bytes_on(const at::Device& device, size_t count) {
  return at::empty({int64_t(count)}, at::TensorOptions().dtype(at::kByte).device(device));
}

std::vector<te_offload_piece> spans_of(const std::vector<Tensor>& tensors) {
  std::vector<te_offload_piece> spans;
  for (const Tensor& t : tensors) {
    TORCH_CHECK_VALUE(t.is_contiguous(), "offload_pack: argument 'tensors' has one that is not contiguous, wanted ",
                      "contiguous ones; call .contiguous().");
    spans.push_back({t.numel() == 0 ? nullptr : t.data_ptr(), t.nbytes()});
  }
  return spans;
}

size_t packed_bytes(const std::vector<te_offload_piece>& spans) {
  std::vector<size_t> sizes;
  for (const auto& span : spans) sizes.push_back(span.bytes);
  return te_offload_packed_bytes(sizes.data(), int64_t(sizes.size()));
}

void check_packed(const std::vector<Tensor>& tensors, const std::vector<te_offload_piece>& spans, const Tensor& packed,
                  const char* op) {
  const auto wanted = int64_t(packed_bytes(spans));
  TORCH_CHECK_VALUE(packed.scalar_type() == at::kByte && packed.is_contiguous() && packed.numel() >= wanted, op,
                    ": argument 'packed' is ", packed.scalar_type(), " ", packed.sizes(), ", wanted ", wanted,
                    " contiguous bytes.");
  for (const Tensor& t : tensors) {
    TORCH_CHECK_VALUE(t.device() == packed.device(), op, ": argument 'tensors' has one on ", t.device(),
                      ", wanted all on ", packed.device(), " like 'packed'.");
  }
}

}  // namespace

OffloadEngine::OffloadEngine(const at::Device& device, te_offload_options options) : device_(indexed(device)) {
  options.device = ordinal(device_);
  check(te_offload_engine_create(options, &engine_));
}

OffloadEngine::~OffloadEngine() {
  te_offload_usage usage{};
  te_offload_get_usage(engine_, &usage);
  if (usage.captured == 0) te_offload_engine_destroy(engine_);  // else a graph that copies there may still be replayed
}

OffloadLayer::OffloadLayer(std::shared_ptr<OffloadEngine> engine, bool retain) : engine_(std::move(engine)) {
  check(te_offload_layer_create(engine_->get(), retain, &layer_));
}

OffloadLayer::~OffloadLayer() {
  te_offload_layer_destroy(layer_);
}  // before the storages, as it waits for their copies

te_stream OffloadLayer::stream() const { return current_stream(engine_->device()); }

int64_t OffloadLayer::mark() {
  int64_t mark = -1;
  check(te_offload_mark(layer_, stream(), &mark));
  return mark;
}

std::vector<te_offload_piece> OffloadLayer::pieces() const {
  std::vector<te_offload_piece> pieces;
  for (size_t i = 0; i < storages_.size(); ++i) pieces.push_back({storages_[i].mutable_data(), sizes_[i]});
  return pieces;
}

void OffloadLayer::start(const std::vector<Tensor>& tensors, const std::vector<int64_t>& marks) {
  std::vector<size_t> sizes;
  for (const Tensor& t : tensors) sizes.push_back(t.storage().nbytes());
  size_t staging = 0;
  check_memory(te_offload_prepare(layer_, sizes.data(), int64_t(sizes.size()), stream(), &staging));
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  storages_.clear();
  for (const Tensor& t : tensors) storages_.push_back(t.storage());
  sizes_ = std::move(sizes);
  if (staging != 0) staging_ = bytes_on(engine_->device(), staging);
  const auto given = pieces();
  check(te_offload_start(layer_, given.data(), marks.data(), int64_t(given.size()),
                         staging == 0 ? nullptr : staging_.data_ptr(), stream()));
}

void OffloadLayer::join() { check(te_offload_join(layer_, stream())); }

void OffloadLayer::release() {
  check(te_offload_release(layer_, stream()));
  storages_.clear();
  staging_.reset();
}

void OffloadLayer::start_reload() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  TORCH_CHECK(te_offload_layer_state(layer_) == TE_OFFLOAD_FINISHED, "start_reload: the layer is in state '", state(),
              "', wanted 'offload_finished'; call it after the offload has finished.");
  std::vector<c10::Storage> fresh;
  for (const size_t size : sizes_) fresh.push_back(bytes_on(engine_->device(), size).storage());
  size_t staging = 0;
  check(te_offload_staging(layer_, &staging));
  if (staging != 0) staging_ = bytes_on(engine_->device(), staging);
  storages_ = std::move(fresh);
  const auto given = pieces();
  check(te_offload_start_reload(layer_, given.data(), int64_t(given.size()),
                                staging == 0 ? nullptr : staging_.data_ptr(), stream()));
}

void OffloadLayer::wait_reload() {
  check(te_offload_wait_reload(layer_, stream()));
  staging_.reset();  // after the wait nothing reads it
}

Tensor OffloadLayer::pop(int64_t index, at::ScalarType dtype, int64_t offset, at::IntArrayRef sizes,
                         at::IntArrayRef strides) {
  TORCH_CHECK(te_offload_layer_state(layer_) == TE_OFFLOAD_RELOAD_STARTED, "pop_tensor: the layer is in state '",
              state(), "', wanted 'reload_started'; call start_reload() first.");
  TORCH_CHECK_INDEX(index >= 0 && index < int64_t(storages_.size()) && storages_[size_t(index)], "pop_tensor: storage ",
                    index, " is not on the device; call start_reload() first.");
  wait_reload();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensor t = at::empty({0}, at::TensorOptions().dtype(dtype).device(engine_->device()));
  return t.set_(storages_[size_t(index)], offset, sizes, strides);
}

void OffloadLayer::drop(int64_t index) {
  // In other states there is nothing on the device, or a copy may still read it.
  if (te_offload_layer_state(layer_) != TE_OFFLOAD_RELOAD_STARTED) return;
  TORCH_CHECK_INDEX(index >= 0 && index < int64_t(storages_.size()), "drop: argument 'index' is ", index,
                    ", wanted 0 to ", int64_t(storages_.size()) - 1, ".");
  wait_reload();
  storages_[size_t(index)] = c10::Storage();
}

void OffloadLayer::park() {
  check(te_offload_park(layer_, stream()));
  storages_.clear();
  staging_.reset();
}

void OffloadLayer::reset() {
  check(te_offload_reset(layer_, stream()));
  storages_.clear();
  sizes_.clear();
  staging_.reset();
}

int64_t OffloadLayer::bytes() const {
  int64_t total = 0;
  for (const size_t size : sizes_) total += int64_t(size);
  return total;
}

namespace {

// Whether the graph has a path from a tensor to the node `wanted`, whose topological number is `topological`: nodes
// with a path to it have greater numbers. `wanted` is compared, never dereferenced.
bool follows(const Tensor& tensor, int64_t wanted, uint64_t topological) {
  std::vector<torch::autograd::Node*> waiting;
  std::unordered_set<torch::autograd::Node*> seen;
  const auto visit = [&](const NodePtr& node) {
    if (node != nullptr && (node->topological_nr() > topological || reinterpret_cast<int64_t>(node.get()) == wanted) &&
        seen.insert(node.get()).second) {
      waiting.push_back(node.get());
    }
  };
  visit(tensor.grad_fn());
  while (!waiting.empty()) {
    auto* node = waiting.back();
    waiting.pop_back();
    if (reinterpret_cast<int64_t>(node) == wanted) return true;
    for (const auto& edge : node->next_edges()) visit(edge.function);
  }
  return false;
}

}  // namespace

void register_offload(pybind11::module_& m) {
  namespace py = pybind11;
  pinned_memory_error =
      PyErr_NewException("transformer_engine.pytorch._C.PinnedMemoryError", PyExc_RuntimeError, nullptr);
  m.attr("PinnedMemoryError") = py::reinterpret_borrow<py::object>(pinned_memory_error);
  const auto wrapped = [](auto method) { return torch::wrap_pybind_function(method); };
  py::class_<OffloadEngine, std::shared_ptr<OffloadEngine>>(m, "OffloadEngine")
      .def(py::init(wrapped([](const at::Device& device, int64_t stream, int64_t pinned_limit, bool debug, bool trace,
                               int64_t left_out) {
             te_offload_options options{};
             options.stream = reinterpret_cast<te_stream>(stream);
             options.pinned_limit = size_t(pinned_limit);
             options.debug = debug;
             options.trace = trace;
             options.left_out = uint32_t(left_out);
             return std::make_shared<OffloadEngine>(device, options);
           })),
           py::arg("device"), py::arg("stream") = 0, py::arg("pinned_limit") = 0, py::arg("debug") = false,
           py::arg("trace") = false, py::arg("left_out") = 0)
      .def("reserve",
           wrapped([](OffloadEngine& e, int64_t bytes) { check_memory(te_offload_reserve(e.get(), size_t(bytes))); }))
      .def("trim", wrapped([](OffloadEngine& e) { check(te_offload_trim(e.get())); }))
      .def("release_captured", wrapped([](OffloadEngine& e) { check(te_offload_release_captured(e.get())); }))
      .def("usage", wrapped([](OffloadEngine& e) {
             te_offload_usage usage{};
             check(te_offload_get_usage(e.get(), &usage));
             py::dict fields;
             fields["reserved"] = usage.reserved;
             fields["used"] = usage.used;
             fields["peak"] = usage.peak;
             fields["captured"] = usage.captured;
             fields["slots"] = usage.slots;
             return fields;
           }))
      .def("streams", wrapped([](OffloadEngine& e) {
             te_stream d2h = nullptr, h2d = nullptr;
             check(te_offload_streams(e.get(), &d2h, &h2d));
             return std::pair(reinterpret_cast<int64_t>(d2h), reinterpret_cast<int64_t>(h2d));
           }))
      .def("trace", wrapped([](OffloadEngine& e) {
             int64_t count = 0;
             check(te_offload_get_trace(e.get(), 0, 0, nullptr, &count));
             std::vector<te_offload_step> steps(static_cast<size_t>(count));
             check(te_offload_get_trace(e.get(), 0, count, steps.data(), &count));
             py::list rows;
             for (const auto& s : steps) {
               rows.append(py::make_tuple(s.kind, s.wait, reinterpret_cast<int64_t>(s.stream), s.event,
                                          reinterpret_cast<int64_t>(s.from), reinterpret_cast<int64_t>(s.to), s.bytes));
             }
             return rows;
           }));
  py::class_<OffloadLayer>(m, "OffloadLayer")
      .def(py::init<std::shared_ptr<OffloadEngine>, bool>(), py::arg("engine"), py::arg("retain") = false)
      .def_property_readonly("state", &OffloadLayer::state)
      .def_property_readonly("bytes", &OffloadLayer::bytes)
      .def("mark", wrapped([](OffloadLayer& l) { return l.mark(); }))
      .def("start", wrapped([](OffloadLayer& l, const std::vector<Tensor>& tensors, const std::vector<int64_t>& marks) {
             l.start(tensors, marks);
           }))
      .def("join", wrapped([](OffloadLayer& l) { l.join(); }))
      .def("release", wrapped([](OffloadLayer& l) { l.release(); }))
      .def("start_reload", wrapped([](OffloadLayer& l) { l.start_reload(); }))
      .def("wait_reload", wrapped([](OffloadLayer& l) { l.wait_reload(); }))
      .def("pop", wrapped([](OffloadLayer& l, int64_t index, const Saved& saved) {
             return l.pop(index, saved.dtype, saved.offset, saved.sizes, saved.strides);
           }))
      .def("drop", wrapped([](OffloadLayer& l, int64_t index) { l.drop(index); }))
      .def("park", wrapped([](OffloadLayer& l) { l.park(); }))
      .def("reset", wrapped([](OffloadLayer& l) { l.reset(); }));
  m.def("offload_pack", wrapped([](const std::vector<Tensor>& tensors, const Tensor& packed) {
          const auto spans = spans_of(tensors);
          check_packed(tensors, spans, packed, "offload_pack");
          check(te_offload_pack(spans.data(), int64_t(spans.size()), packed.data_ptr(), ordinal(packed.device()),
                                current_stream(packed.device())));
          note_written(packed);
        }));
  m.def("offload_unpack", wrapped([](const Tensor& packed, const std::vector<Tensor>& tensors) {
          const auto spans = spans_of(tensors);
          check_packed(tensors, spans, packed, "offload_unpack");
          check(te_offload_unpack(packed.data_ptr(), spans.data(), int64_t(spans.size()), ordinal(packed.device()),
                                  current_stream(packed.device())));
          for (const Tensor& t : tensors) note_written(t);
        }));
  m.def("offload_node_of", [](const Tensor& tensor) {
    const auto& node = tensor.grad_fn();
    return std::pair(reinterpret_cast<int64_t>(node.get()), node == nullptr ? uint64_t(0) : node->topological_nr());
  });
  m.def("offload_follows",
        [](const Tensor& tensor, int64_t node, uint64_t topological) { return follows(tensor, node, topological); });
  m.def("offload_packed_bytes", [](const std::vector<int64_t>& sizes) {
    const std::vector<size_t> unsigned_sizes(sizes.begin(), sizes.end());
    return te_offload_packed_bytes(unsigned_sizes.data(), int64_t(unsigned_sizes.size()));
  });
}

}  // namespace te_torch
