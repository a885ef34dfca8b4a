// The state machine of a layer that is offloaded and reloaded: its states, its host memory, and the waits between
// streams. A Backend performs the copies.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "core/arena.h"
#include "ops/offload/backend.h"

namespace te::offload {

using pinned::Arena;
using pinned::Slot;

constexpr size_t kPackBelow =
    size_t(2) << 20;  // 40 us of the link; the overhead of a copy is about 2 (H200, 2026-11-20)

// The time of an enqueued operation, and its capture. serial 0: never.
struct Event {
  void* handle = nullptr;
  int64_t serial = 0;
  uint64_t capture = 0;
};

class Engine {
 public:
  Engine(const te_offload_options& options, std::unique_ptr<Backend> backend)
      : options_(options),
        backend_(std::move(backend)),
        arena_(
            pinned::account_of("offload"),
            [device = options.device](size_t bytes) { return pinned::allocate("te_offload", device, bytes); },
            [device = options.device](void* data) { pinned::release(device, data); }, options.pinned_limit,
            options.debug != 0) {}
  ~Engine() {
    for (void* handle : handles_) backend_->destroy_event(handle);
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  Backend& backend() { return *backend_; }
  const Backend& backend() const { return *backend_; }
  Arena& arena() { return arena_; }
  const std::vector<te_offload_step>& trace() const { return trace_; }
  bool debug() const { return options_.debug != 0; }

  void record(Event& event, te_stream stream, uint64_t capture) {
    if (event.handle == nullptr) event.handle = new_handle();
    backend_->record(event.handle, stream);
    event.serial = ++serial_;
    event.capture = capture;
    note({TE_OFFLOAD_STEP_RECORD, 0, stream, event.serial, nullptr, nullptr, 0});
  }

  // No wait across two captures: each joins its own work, and their graphs run in order.
  void wait(te_offload_wait which, te_stream stream, const Event& event, uint64_t capture) {
    if (event.serial == 0 || event.capture != capture || (options_.left_out & which) != 0) return;
    backend_->wait(stream, event.handle);
    note({TE_OFFLOAD_STEP_WAIT, uint32_t(which), stream, event.serial, nullptr, nullptr, 0});
  }

  void copy(void* to, const void* from, size_t bytes, te_stream stream) {
    backend_->copy(to, from, bytes, stream);
    note({TE_OFFLOAD_STEP_COPY, 0, stream, 0, from, to, bytes});
  }

  void note(const te_offload_step& step) {
    if (options_.trace != 0) trace_.push_back(step);
  }

  void retire(Event& event) {
    if (event.handle != nullptr) free_handles_.push_back(event.handle);
    event = Event{};
  }

  void keep_for_graphs(const Slot& slot) {
    captured_ += slot.bytes;
    of_graphs_.push_back(slot);
  }
  void release_captured(const char* op) {
    for (const Slot& slot : of_graphs_) arena_.give_back(op, slot);
    of_graphs_.clear();
    captured_ = 0;
  }

  te_offload_usage usage() const {
    return {arena_.reserved(), arena_.used(), arena_.peak(), captured_, arena_.slots()};
  }

  std::mutex mutex;
  int64_t layers = 0;

 private:
  void* new_handle() {
    if (free_handles_.empty()) {
      handles_.push_back(backend_->create_event());
      return handles_.back();
    }
    void* handle = free_handles_.back();
    free_handles_.pop_back();
    return handle;
  }

  te_offload_options options_;
  std::unique_ptr<Backend> backend_;
  Arena arena_;
  std::vector<te_offload_step> trace_;
  std::vector<void*> handles_, free_handles_;
  int64_t serial_ = 0;
  std::vector<Slot> of_graphs_;
  size_t captured_ = 0;
};

class Layer {
 public:
  Layer(Engine& engine, bool retain) : engine_(engine), retain_(retain) { ++engine_.layers; }
  ~Layer() {
    drop_slot();
    retire_events();
    --engine_.layers;
  }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  Engine& engine() { return engine_; }
  te_offload_state state() const { return state_; }
  te_stream last_stream() const { return last_stream_; }
  size_t staging_bytes() const { return packed_bytes_; }

  int64_t mark(const char* op, te_stream stream) {
    require_state(op, TE_OFFLOAD_NOT_OFFLOADED);
    marks_.emplace_back();
    engine_.record(marks_.back(), stream, enter(stream));
    return int64_t(marks_.size()) - 1;
  }

  size_t prepare(const char* op, const size_t* sizes, int64_t count, te_stream stream) {
    require_state(op, TE_OFFLOAD_NOT_OFFLOADED);
    const bool capturing = enter(stream) != 0;
    pieces_.assign(sizes, sizes + count);
    offsets_.assign(size_t(count), 0);
    packed_.clear();
    for (int64_t i = 0; i < count; ++i) {
      if (sizes[i] < kPackBelow) packed_.push_back(i);
    }
    if (packed_.size() < 2) packed_.clear();
    size_t total = 0;
    const auto place = [&](int64_t i) {
      offsets_[size_t(i)] = total;
      total += round_up(sizes[i], kAlignment);
    };
    for (const int64_t i : packed_) place(i);
    packed_bytes_ = total;
    for (int64_t i = 0; i < count; ++i) {
      if (!is_packed(i)) place(i);
    }
    if (slot_.generation != 0 && slot_.bytes < total) drop_slot();
    if (slot_.generation == 0 && total != 0) slot_ = engine_.arena().take(op, total, !capturing);
    prepared_ = true;
    return packed_bytes_;
  }

  void start(const char* op, const te_offload_piece* pieces, const int64_t* marks, int64_t count, void* staging,
             te_stream stream) {
    require_state(op, TE_OFFLOAD_NOT_OFFLOADED);
    if (!prepared_) throw Error(TE_RUNTIME_ERROR, concat(op, ": called before prepare; call prepare first."));
    check_pieces(op, pieces, count, staging);
    capture_ = enter(stream);
    home_ = stream;
    const te_stream d2h = engine_.backend().d2h();
    const auto leave = [&](int64_t i) { engine_.copy(host(i), pieces[i].data, pieces[i].bytes, d2h); };
    const auto marked = [&](int64_t i) {
      return marks != nullptr && marks[i] >= 0 && !is_packed(i) && marks_[size_t(marks[i])].capture == capture_;
    };
    for (int64_t i = 0; marks != nullptr && i < count; ++i) {
      if (marks[i] >= int64_t(marks_.size())) {
        bad_argument(op, "marks", concat(marks[i], " for piece ", i), "a mark of this layer, or -1");
      }
    }
    engine_.record(produced_, stream, capture_);
    for (size_t mark = 0; mark < marks_.size(); ++mark) {
      bool waited = false;
      for (int64_t i = 0; i < count; ++i) {
        if (!marked(i) || size_t(marks[i]) != mark) continue;
        if (!waited) engine_.wait(TE_OFFLOAD_WAIT_PRODUCED, d2h, marks_[mark], capture_);
        waited = true;
        leave(i);
      }
    }
    bool unmarked = count == 0;
    for (int64_t i = 0; i < count; ++i) unmarked |= !marked(i);
    if (unmarked) engine_.wait(TE_OFFLOAD_WAIT_PRODUCED, d2h, produced_, capture_);
    if (packed_bytes_ != 0) {
      const auto chosen = packed_of(pieces);
      engine_.backend().pack(chosen.data(), int64_t(chosen.size()), staging, d2h);
      for (size_t k = 0; k < chosen.size(); ++k) {
        auto* to = static_cast<unsigned char*>(staging) + offsets_[size_t(packed_[k])];
        engine_.note({TE_OFFLOAD_STEP_COPY, 0, d2h, 0, chosen[k].data, to, chosen[k].bytes});
      }
      engine_.copy(slot_.data, staging, packed_bytes_, d2h);
    }
    for (int64_t i = 0; i < count; ++i) {
      if (!is_packed(i) && !marked(i)) leave(i);
    }
    engine_.record(copied_, d2h, capture_);
    state_ = TE_OFFLOAD_STARTED;
  }

  void join(const char* op, te_stream stream) {
    require_state(op, TE_OFFLOAD_STARTED);
    engine_.wait(TE_OFFLOAD_WAIT_COPIED, stream, copied_, enter(stream));
  }

  void release(const char* op, te_stream stream) {
    require_state(op, TE_OFFLOAD_STARTED);
    want_same_kind(op, stream);
    engine_.wait(TE_OFFLOAD_WAIT_COPIED, stream, copied_, enter(stream));
    state_ = TE_OFFLOAD_FINISHED;
  }

  void start_reload(const char* op, const te_offload_piece* pieces, int64_t count, void* staging, te_stream stream) {
    require_state(op, TE_OFFLOAD_FINISHED);
    want_same_kind(op, stream);
    check_pieces(op, pieces, count, staging);
    if (slot_.generation != 0) engine_.arena().check(op, slot_);
    const uint64_t capture = enter(stream);
    home_ = stream;
    const te_stream h2d = engine_.backend().h2d();
    engine_.record(room_, stream, capture);
    engine_.wait(TE_OFFLOAD_WAIT_ROOM, h2d, room_, capture);
    engine_.wait(TE_OFFLOAD_WAIT_ON_HOST, h2d, copied_, capture);
    if (packed_bytes_ != 0) {
      engine_.copy(staging, slot_.data, packed_bytes_, h2d);
      const auto chosen = packed_of(pieces);
      engine_.backend().unpack(staging, chosen.data(), int64_t(chosen.size()), h2d);
      for (size_t k = 0; k < chosen.size(); ++k) {
        const auto* from = static_cast<unsigned char*>(staging) + offsets_[size_t(packed_[k])];
        engine_.note({TE_OFFLOAD_STEP_COPY, 0, h2d, 0, from, chosen[k].data, chosen[k].bytes});
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      if (!is_packed(i)) engine_.copy(pieces[i].data, host(i), pieces[i].bytes, h2d);
    }
    engine_.record(reloaded_, h2d, capture);
    waited_.clear();
    state_ = TE_OFFLOAD_RELOAD_STARTED;
  }

  void wait_reload(const char* op, te_stream stream) {
    require_state(op, TE_OFFLOAD_RELOAD_STARTED);
    const uint64_t capture = enter(stream);
    if (std::find(waited_.begin(), waited_.end(), stream) != waited_.end()) return;
    engine_.wait(TE_OFFLOAD_WAIT_RELOADED, stream, reloaded_, capture);
    waited_.push_back(stream);
  }

  void park(const char* op, te_stream stream) {
    require_state(op, TE_OFFLOAD_RELOAD_STARTED);
    wait_reload(op, stream);
    state_ = TE_OFFLOAD_FINISHED;
  }

  void reset(te_stream stream) {
    enter(stream);
    give_up(stream);
    if (home_ != stream) give_up(home_);  // its allocator may reuse the memory, on whichever stream a graph is dropped
    if (reloaded_.capture == 0) settle(TE_OFFLOAD_WAIT_SLOT, engine_.backend().d2h(), reloaded_);
    if (!retain_ || capture_ != 0) drop_slot();
    retire_events();
    prepared_ = false;
    capture_ = 0;
    state_ = TE_OFFLOAD_NOT_OFFLOADED;
  }

 private:
  // `stream` may use the pieces' memory from this call on.
  void give_up(te_stream stream) {
    if (state_ == TE_OFFLOAD_STARTED) settle(TE_OFFLOAD_WAIT_COPIED, stream, copied_);
    const bool waited = std::find(waited_.begin(), waited_.end(), stream) != waited_.end();
    if (state_ == TE_OFFLOAD_RELOAD_STARTED && !waited) settle(TE_OFFLOAD_WAIT_RELOADED, stream, reloaded_);
  }

  void settle(te_offload_wait which, te_stream stream, const Event& event) {
    const uint64_t capture = engine_.backend().capture_of(stream);
    if (event.serial != 0 && event.capture == 0 && capture != 0) {
      engine_.backend().wait_on_host(event.handle);  // a graph's node cannot wait for work outside of the graph
    } else {
      engine_.wait(which, stream, event, capture);
    }
  }

  uint64_t enter(te_stream stream) {
    last_stream_ = stream;
    return engine_.backend().capture_of(stream);
  }

  void require_state(const char* op, te_offload_state state) const {
    if (state_ == state) return;
    throw Error(TE_RUNTIME_ERROR, concat(op, ": the layer is in state '", te_offload_state_name(state_),
                                         "', but this call needs '", te_offload_state_name(state), "'."));
  }

  // A graph repeats its copies at each replay; copies outside of it are not part of it.
  void want_same_kind(const char* op, te_stream stream) const {
    const bool capturing = engine_.backend().capture_of(stream) != 0;
    if (capturing == (capture_ != 0)) return;
    throw Error(TE_RUNTIME_ERROR, concat(op, ": the layer was offloaded ", capture_ != 0 ? "inside" : "outside",
                                         " of a CUDA graph's capture, and ",
                                         capturing ? "a capture is in progress" : "none is in progress",
                                         " now. Capture its forward and its backward, or neither."));
  }

  void check_pieces(const char* op, const te_offload_piece* pieces, int64_t count, const void* staging) const {
    if (count != int64_t(pieces_.size())) bad_argument(op, "count", count, concat(pieces_.size(), ", as prepared"));
    for (int64_t i = 0; i < count; ++i) {
      if (pieces[i].bytes != pieces_[size_t(i)]) {
        bad_argument(op, "pieces", concat(pieces[i].bytes, " bytes for piece ", i), concat(pieces_[size_t(i)]));
      }
      if (pieces[i].data == nullptr && pieces[i].bytes != 0) bad_argument(op, "pieces", "NULL", "device memory");
    }
    if (packed_bytes_ != 0 && staging == nullptr) {
      bad_argument(op, "staging", "NULL", concat(packed_bytes_, " bytes of device memory"));
    }
  }

  bool is_packed(int64_t i) const { return std::binary_search(packed_.begin(), packed_.end(), i); }
  unsigned char* host(int64_t i) const { return slot_.data + offsets_[size_t(i)]; }

  std::vector<te_offload_piece> packed_of(const te_offload_piece* pieces) const {
    std::vector<te_offload_piece> chosen;
    for (const int64_t i : packed_) chosen.push_back(pieces[i]);
    return chosen;
  }

  void drop_slot() {
    if (slot_.generation == 0) return;
    if (capture_ != 0) {
      engine_.keep_for_graphs(slot_);
    } else {
      // Poison must not overtake copies that still read or write the slot.
      if (engine_.debug() && reloaded_.serial != 0) engine_.backend().wait_on_host(reloaded_.handle);
      if (engine_.debug() && copied_.serial != 0) engine_.backend().wait_on_host(copied_.handle);
      engine_.arena().give_back("te_offload_reset", slot_);
    }
    slot_ = Slot{};
  }

  void retire_events() {
    for (Event* event : {&produced_, &copied_, &room_, &reloaded_}) engine_.retire(*event);
    for (Event& event : marks_) engine_.retire(event);
    marks_.clear();
  }

  Engine& engine_;
  const bool retain_;
  te_offload_state state_ = TE_OFFLOAD_NOT_OFFLOADED;
  bool prepared_ = false;
  std::vector<size_t> pieces_, offsets_;  // sizes as prepared; offsets in the slot
  std::vector<int64_t> packed_;           // the small ones, ascending, at the start of the slot
  size_t packed_bytes_ = 0;
  Slot slot_;
  uint64_t capture_ = 0;  // of the copy out
  Event produced_, copied_, room_, reloaded_;
  std::vector<Event> marks_;
  std::vector<te_stream> waited_;
  te_stream last_stream_ = nullptr, home_ = nullptr;  // home: the stream of the call that started the copy
};

}  // namespace te::offload
