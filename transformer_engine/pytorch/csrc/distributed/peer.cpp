// See peer.h.
#include "distributed/peer.h"

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <array>
#include <charconv>
#include <map>
#include <optional>
#include <sstream>

#include "core/held_object.h"

namespace te_torch {

namespace {

struct Known {
  std::string group;
  at::Device device;
  std::weak_ptr<PeerChannel> channel;
};

std::mutex& known_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

std::vector<Known>& known() {
  static auto* const channels = new std::vector<Known>;
  return *channels;
}

std::shared_ptr<PyObject>& timeout_error() {  // Python's CommTimeout
  static auto* const error = new std::shared_ptr<PyObject>;
  return *error;
}

const char* describe(te_comm_peer_trouble trouble) {
  switch (trouble) {
    case TE_COMM_PEER_LATE:
      return "is late";
    case TE_COMM_PEER_DEAD:
      return "is dead";
    case TE_COMM_PEER_OTHER:
      return "is at another call";
    default:
      return "gave up";
  }
}

// The group of this name at present, or null.
c10::intrusive_ptr<c10d::ProcessGroup> present_group(std::string_view name) {
  try {
    return c10d::resolve_process_group(std::string(name));
  } catch (const c10::Error&) {
    return {};
  }
}

}  // namespace

PeerChannel::PeerChannel(std::string group, at::Device device, int64_t ranks, int64_t rank, Tensor words,
                         double timeout_s, PyObject* grow, const std::string& kind)
    : group_(std::move(group)),
      device_(indexed(device)),
      ranks_(ranks),
      rank_(rank),
      words_(std::move(words)),
      streams_(device_.is_cpu() ? nullptr : std::make_unique<RunStreams>(device_)),
      grow_(held_object(grow)),
      process_group_(present_group(group_)) {
  size_t bytes = 0;
  int32_t known = 0;
  check(te_comm_costs_of(kind.c_str(), &costs_, &known));
  if (known == 0) costs_ = te_comm_costs_h200();
  check(te_comm_peer_bytes(int32_t(ranks), &bytes));
  TORCH_CHECK_VALUE(words_.is_cpu() && words_.is_contiguous() && words_.nbytes() >= bytes,
                    "PeerChannel: argument 'words' has ", words_.nbytes(), " bytes, wanted ", bytes, " on the CPU.");
  const te_comm_peer_options options{int32_t(ranks), int32_t(rank),
                                     device_.is_cpu() ? TE_DEVICE_CPU : int32_t(device_.index()), words_.data_ptr(),
                                     timeout_s};
  check(te_comm_peer_create(&options, &channel_));
}

PeerChannel::~PeerChannel() { te_comm_peer_destroy(channel_); }

std::shared_ptr<PeerChannel> PeerChannel::of(std::string_view group, const at::Device& device) {
  const at::Device indexed_device = indexed(device);
  const std::lock_guard<std::mutex> lock(known_mutex());
  for (const Known& each : known()) {
    if (each.device == indexed_device && each.group == group) return each.channel.lock();
  }
  return nullptr;
}

bool PeerChannel::has_met(std::string_view group, const at::Device& device) {
  const auto channel = of(group, device);
  if (channel == nullptr || !channel->met_.load(std::memory_order_acquire)) return false;
  // The weak reference keeps the address of its group from being that of another one.
  const auto present = present_group(group);
  return present && present.get() == channel->process_group_._unsafe_get_target();
}

void PeerChannel::refuse_failed() const {
  te_comm_peer_failure_info info;
  check(te_comm_peer_failure(channel_, &info));
  if (info.trouble == TE_COMM_PEER_SOUND) return;
  const char* step = info.trouble == TE_COMM_PEER_LEFT && info.peer < 0 ? "call" : info.freeing ? "free" : "arrive";
  std::ostringstream text;
  text << "the tensor-parallel group '" << group_ << "' has failed: rank " << info.rank;
  if (info.peer < 0) {
    text << " " << describe(info.trouble) << " in " << info.op;
  } else {
    text << " waited for rank " << info.peer << ", which " << describe(info.trouble);
    if (info.op[0] != 0) text << ", in " << info.op;
    if (info.other[0] != 0) text << "; rank " << info.peer << " is in " << info.other;
  }
  text << ". Results after that are NaN; make a new group.";
  const pybind11::gil_scoped_acquire gil;
  TORCH_CHECK(timeout_error() != nullptr, text.str());
  const auto type = pybind11::reinterpret_borrow<pybind11::object>(timeout_error().get());
  const pybind11::object error = type(text.str(), std::string(info.op), info.peer, info.rank, std::string(step));
  PyErr_SetObject(type.ptr(), error.ptr());
  throw_python_error();
}

PeerChannel::TakenSlot PeerChannel::take(SlotKind kind, int64_t bytes, const std::string& text, te_stream stream) {
  constexpr int32_t kEach = TE_COMM_PEER_SLOTS / 4;  // slots of each kind
  int32_t slot = kEach * int32_t(kind);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int32_t last = slot + kEach;
    while (slot < last && slots_[size_t(slot)].pooled) ++slot;
    TORCH_CHECK(
        slot < last, text,
        ": all slots of its kind are in use by calls over this group that have not ended, wanted a free one; run calls "
        "of different streams or threads one after another, or give them groups of their own.");
    slots_[size_t(slot)].pooled = true;
  }
  Slot& found = slots_[size_t(slot)];
  try {
    if (!found.memory || int64_t(found.memory.nbytes()) < bytes) {
      int32_t capturing = 0;
      if (!device_.is_cpu()) check(te_comm_is_captured(stream, &capturing));
      TORCH_CHECK(
          !capturing, text, ": ", bytes,
          " bytes of shared memory cannot be allocated during a graph capture; run the same call once before the "
          "capture, or reserve the bytes with initialize_ub.");
      grow(slot, bytes, text);
    }
  } catch (...) {
    give_back(slot);
    throw;
  }
  return {slot, found.memory};
}

void PeerChannel::grow(int32_t slot, int64_t bytes, const std::string& text) {
  Slot& found = slots_[size_t(slot)];
  const pybind11::gil_scoped_acquire gil;
  const pybind11::object grown = pybind11::reinterpret_borrow<pybind11::object>(grow_.get())(slot, bytes, text);
  const auto parts = grown.cast<pybind11::tuple>();
  const auto own = parts[0].cast<Tensor>();
  const auto addresses = parts[1].cast<std::vector<int64_t>>();
  TORCH_CHECK(int64_t(addresses.size()) == ranks_ && int64_t(own.nbytes()) >= bytes, "PeerChannel: got memory of ",
              own.nbytes(), " bytes and ", addresses.size(), " addresses, wanted ", bytes,
              " bytes and one for each of ", ranks_, " ranks.");
  std::vector<void*> pointers;
  for (const int64_t address : addresses) pointers.push_back(reinterpret_cast<void*>(address));
  check(te_comm_peer_slot(channel_, slot, pointers.data(), own.nbytes()));
  if (found.kept) outgrown_.push_back(found.kept);
  found.kept = held_object(grown.ptr());
  found.memory = pooled_storage(own);
}

void PeerChannel::give_back(int32_t slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  slots_[size_t(slot)].pooled = false;
}

void PeerChannel::reserve(SlotKind kind, int64_t bytes) {
  if (bytes > 0) give_back(take(kind, bytes, "initialize_ub", nullptr).slot);
}

bool PeerChannel::can_close() const {
  int32_t idle = 0;
  te_comm_peer_failure_info info;
  check(te_comm_peer_idle(channel_, &idle));
  check(te_comm_peer_failure(channel_, &info));
  return idle != 0 && info.trouble == TE_COMM_PEER_SOUND;
}

PeerChannel::Usage PeerChannel::usage() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Usage total;
  for (const Slot& slot : slots_) {
    if (!slot.memory) continue;
    total.bytes += int64_t(slot.memory.nbytes());
    ++total.slots;
    total.pooled += slot.pooled;
  }
  return total;
}

std::string call_text(std::string_view what, at::ScalarType dtype, at::IntArrayRef sizes) {
  std::string text;
  text.reserve(TE_COMM_PEER_TEXT);
  text.append(what).append(" ").append(c10::toString(dtype)).append(" [");
  std::array<char, 24> digits;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (d > 0) text.append(", ");
    text.append(digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), sizes[d]).ptr);
  }
  return text.append("]");
}

PeerCall::PeerCall(std::shared_ptr<PeerChannel> channel, SlotKind kind, const std::string& text, at::IntArrayRef sizes,
                   const at::TensorOptions& options)
    : channel_(std::move(channel)) {
  channel_->refuse_failed();
  channel_->count_call();
  const int64_t bytes = c10::multiply_integers(sizes) * int64_t(options.dtype().itemsize());
  taken_ = channel_->take(kind, bytes, text, stream());
  tensor_ = pooled_tensor(taken_.memory, sizes, options.device(channel_->device()));
  check(te_comm_peer_begin(channel_->get(), taken_.slot, text.c_str()));
}

PeerCall::~PeerCall() {
  try {
    end({});
  } catch (...) {  // the stream has failed
  }
  if (ended_) return;
  te_comm_peer_join(channel_->get(), taken_.slot, stream());
  te_comm_peer_give_up(channel_->get(), "a call that raised an error");
  channel_->give_back(taken_.slot);
}

void PeerCall::end(const Tensor& t) {
  if (ended_ || !complete()) return;
  const te_stream current = stream();
  check(te_comm_peer_join(channel_->get(), taken_.slot, current));
  if (tensor_.numel() > 0) fill_returned(taken_.memory, tensor_.options());
  const size_t bytes = t.defined() ? t.nbytes() : 0;
  check(te_comm_peer_done(channel_->get(), taken_.slot, TE_COMM_PEER_OTHERS, bytes > 0 ? t.data_ptr() : nullptr, bytes,
                          current));
  ended_ = true;
  channel_->give_back(taken_.slot);
}

te_stream PeerCall::stream() const { return current_stream(channel_->device()); }

void PeerCall::follow() { check(te_comm_peer_follow(channel_->get(), stream())); }

void PeerCall::push(int64_t to, int64_t offset, const Tensor& source, int64_t first, int64_t bytes) {
  TORCH_INTERNAL_ASSERT(source.is_contiguous() && first + bytes <= int64_t(source.nbytes()));
  if (sources_.empty() || !sources_.back().is_same(source)) sources_.push_back(source);
  if (bytes == 0) return;
  const char* const from = static_cast<const char*>(source.data_ptr()) + first;
  check(te_comm_peer_push(channel_->get(), taken_.slot, int32_t(to), size_t(offset), size_t(bytes), from, size_t(bytes),
                          size_t(bytes), 1));
}

void PeerCall::signal(int64_t to) { check(te_comm_peer_signal(channel_->get(), taken_.slot, int32_t(to))); }

void PeerCall::gather(const Tensor& mine) {
  follow();
  const int64_t ranks = channel_->ranks(), rank = channel_->rank(), bytes = int64_t(mine.nbytes());
  for (int64_t step = 1; step < ranks; ++step) {
    push((rank + step) % ranks, rank * bytes, mine, 0, bytes);
    signal((rank + step) % ranks);
  }
}

void PeerCall::gather_own(const Tensor& mine) {
  const int64_t bytes = int64_t(mine.nbytes());
  push(channel_->rank(), channel_->rank() * bytes, mine, 0, bytes);
}

void PeerCall::wait(int64_t from) {
  check(te_comm_peer_wait(channel_->get(), taken_.slot, int32_t(from), stream()));
  waited_ += from != channel_->rank();
}

void PeerCall::wait_for_others() {
  check(te_comm_peer_wait(channel_->get(), taken_.slot, TE_COMM_PEER_OTHERS, stream()));
  waited_ = channel_->ranks() - 1;
}

void PeerCall::poison(const Tensor& t) const {
  check(te_comm_peer_poison(channel_->get(), t.data_ptr(), t.nbytes(), stream()));
}

PeerGathering::PeerGathering(std::shared_ptr<PeerChannel> channel, const Tensor& t, SlotKind kind,
                             ScopedBuffers& buffers) {
  const Tensor in = t.contiguous();
  te_note_path("peers, serial", "nothing is computed meanwhile");
  auto sizes = in.sizes().vec();
  sizes[0] *= channel->ranks();
  const std::string text = call_text("gather", in.scalar_type(), in.sizes());
  call_ = std::make_shared<PeerCall>(std::move(channel), kind, text, sizes, in.options());
  buffers.hold(call_);
  all_ = call_->slot();
  call_->gather(in);
  call_->gather_own(in);
}

Tensor PeerGathering::wait() {
  if (const auto call = std::move(call_)) {
    call->wait_for_others();
    call->wait(call->channel().rank());
    call->poison(all_);
  }
  return all_;
}

std::shared_ptr<PeerGathering> begin_peer_gather(std::shared_ptr<PeerChannel> channel, const Tensor& t, SlotKind kind,
                                                 ScopedBuffers& buffers) {
  return std::make_shared<PeerGathering>(std::move(channel), t, kind, buffers);
}

void register_peer(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<PeerChannel, std::shared_ptr<PeerChannel>>(m, "PeerChannel")
      .def(py::init([](const std::string& group, const at::Device& device, int64_t ranks, int64_t rank,
                       const Tensor& words, double timeout_s, const py::function& grow, const std::string& kind) {
             auto channel =
                 std::make_shared<PeerChannel>(group, device, ranks, rank, words, timeout_s, grow.ptr(), kind);
             const std::lock_guard<std::mutex> lock(known_mutex());
             std::erase_if(known(), [&](const Known& each) {
               return each.channel.expired() || (each.group == group && each.device == channel->device());
             });
             known().push_back({group, channel->device(), channel});
             return channel;
           }),
           py::arg("group"), py::arg("device"), py::arg("ranks"), py::arg("rank"), py::arg("words"),
           py::arg("timeout_s"), py::arg("grow"), py::arg("kind") = "")
      .def_static("has_met", &PeerChannel::has_met, py::arg("group"), py::arg("device"))
      .def("note_met", &PeerChannel::note_met)
      .def("refuse_failed", &PeerChannel::refuse_failed)
      .def("give_up",
           [](PeerChannel& c, const std::string& text) { check(te_comm_peer_give_up(c.get(), text.c_str())); })
      .def(
          "reserve",
          [](PeerChannel& c, int64_t bytes) {
            c.reserve(SlotKind::kValues, bytes);
            c.reserve(SlotKind::kInbox, bytes);
          },
          "For what layers gather, and for what they add up.")
      .def_property_readonly("calls", &PeerChannel::calls)
      .def("can_close", &PeerChannel::can_close)
      .def("usage", [](const PeerChannel& c) {
        const PeerChannel::Usage found = c.usage();
        return py::make_tuple(found.bytes, found.slots, found.pooled);
      });
  m.def("peer_words_bytes", [](int64_t ranks) {
    size_t bytes = 0;
    check(te_comm_peer_bytes(int32_t(ranks), &bytes));
    return int64_t(bytes);
  });
  m.def(
      "comm_least_rows",
      [](const std::string& kind) -> std::optional<std::pair<int32_t, int32_t>> {
        te_comm_costs costs;
        int32_t known = 0;
        check(te_comm_costs_of(kind.c_str(), &costs, &known));
        if (known == 0) return std::nullopt;
        return std::pair(costs.least_gathered, costs.least_scattered);
      },
      "Tokens of all ranks from which on gathers, and scatters, go over peers; None of a kind that was not measured.");
  m.def(
      "lend_comm_costs",
      [](const std::string& kind, const std::optional<std::map<std::string, double>>& changed) {
        if (!changed.has_value()) {
          check(te_comm_lend_costs(kind.c_str(), nullptr));
          return;
        }
        te_comm_costs costs = te_comm_costs_h200();
        const std::map<std::string, double*> rates{
            {"flops_per_us", &costs.flops_per_us},
            {"link_bytes_per_us", &costs.link_bytes_per_us},
            {"serial_bytes_per_us", &costs.serial_bytes_per_us},
            {"memory_bytes_per_us", &costs.memory_bytes_per_us},
            {"launch_us", &costs.launch_us},
            {"hop_us", &costs.hop_us},
            {"beside", &costs.beside},
        };
        const std::map<std::string, int32_t*> counts{{"units", &costs.units},
                                                     {"tile_rows", &costs.tile_rows},
                                                     {"tile_cols", &costs.tile_cols},
                                                     {"least_gathered", &costs.least_gathered},
                                                     {"least_scattered", &costs.least_scattered}};
        for (const auto& [name, value] : *changed) {
          if (const auto rate = rates.find(name); rate != rates.end()) {
            *rate->second = value;
          } else if (const auto count = counts.find(name); count != counts.end()) {
            *count->second = int32_t(value);
          } else {
            TORCH_CHECK_VALUE(false, "lend_comm_costs: argument 'costs' has '", name,
                              "', wanted names of te_comm_costs.");
          }
        }
        check(te_comm_lend_costs(kind.c_str(), &costs));
      },
      "For tests: these costs, others an H200's, as if this kind of device had been measured; None takes them back.");
  m.def("set_comm_timeout", [](const py::object& error) { timeout_error() = held_object(error.ptr()); });
}

}  // namespace te_torch
