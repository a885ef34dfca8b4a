// A channel to the other ranks of a group on this machine (transformer_engine/comm_peer.h), found by the group's name
// and a device, and calls over its slots. Python creates channels (distributed/peer.py) and grows their slots;
// layer/tp_comm_peer.h decides what is pushed when.
#pragma once

#include <c10/util/SmallVector.h>
#include <Python.h>
#include <transformer_engine/comm.h>
#include <transformer_engine/comm_peer.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/comm_buffer_pool.h"
#include "core/common.h"
#include "core/run_streams.h"

namespace te_torch {

class PeerChannel {
 public:
  // words: te_comm_peer_bytes() uint8 on the CPU. grow: (slot, bytes, text) -> (this rank's memory, the address of
  // every rank's memory in this process, an owner of these). kind: the model of all ranks' devices, whose costs plans
  // use; empty where they differ. Requires the GIL.
  PeerChannel(std::string group, at::Device device, int64_t ranks, int64_t rank, Tensor words, double timeout_s,
              PyObject* grow, const std::string& kind);
  ~PeerChannel();
  PeerChannel(const PeerChannel&) = delete;
  PeerChannel& operator=(const PeerChannel&) = delete;

  // Null where there is none.
  static std::shared_ptr<PeerChannel> of(std::string_view group, const at::Device& device);
  // Whether the group that has this name at present has a channel over which its ranks have met. A new group may have
  // the name of an earlier one.
  static bool has_met(std::string_view group, const at::Device& device);
  void note_met() { met_.store(true, std::memory_order_release); }

  int64_t ranks() const { return ranks_; }
  int64_t rank() const { return rank_; }
  const at::Device& device() const { return device_; }
  const std::string& group() const { return group_; }
  te_comm_peer* get() const { return channel_; }
  const te_comm_costs& costs() const { return costs_; }
  RunStreams* streams() const { return streams_.get(); }  // null on the CPU

  // Raises CommTimeout where the channel has failed.
  void refuse_failed() const;
  // A free slot of this kind, in use until give_back().
  struct TakenSlot {
    int32_t slot;
    c10::Storage memory;
  };
  TakenSlot take(SlotKind kind, int64_t bytes, const std::string& text, te_stream stream);
  void give_back(int32_t slot);
  // Grows a slot of this kind as a call of this size would.
  void reserve(SlotKind kind, int64_t bytes);

  struct Usage {
    int64_t bytes = 0, slots = 0, pooled = 0;
  };
  Usage usage() const;

  // Number of calls that were begun, captured ones included.
  int64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  void count_call() { calls_.fetch_add(1, std::memory_order_relaxed); }
  // Whether its memory may be freed: nothing runs, nothing was captured, and no peer can still push.
  bool can_close() const;

 private:
  struct Slot {
    c10::Storage memory;
    std::shared_ptr<PyObject> kept;
    bool pooled = false;
  };
  void grow(int32_t slot, int64_t bytes, const std::string& text);

  const std::string group_;
  const at::Device device_;
  const int64_t ranks_, rank_;
  const Tensor words_;
  te_comm_costs costs_;
  const std::unique_ptr<RunStreams> streams_;
  std::shared_ptr<PyObject> grow_;
  te_comm_peer* channel_ = nullptr;
  std::atomic<int64_t> calls_{0};
  std::atomic<bool> met_{false};
  c10::weak_intrusive_ptr<c10d::ProcessGroup> process_group_;
  mutable std::mutex mutex_;
  std::array<Slot, TE_COMM_PEER_SLOTS> slots_;
  std::vector<std::shared_ptr<PyObject>> outgrown_;  // held, as captured graphs may use them
};

// The text of a call: what it is, its dtype and sizes.
std::string call_text(std::string_view what, at::ScalarType dtype, at::IntArrayRef sizes);

// A call over a slot, from its first push to its last reader. Its end returns the slot to the peers. A call that ends
// before it has waited for every rank fails the channel.
class PeerCall {
 public:
  // text: describes the call, equal on all ranks. sizes, options: of the slot.
  PeerCall(std::shared_ptr<PeerChannel> channel, SlotKind kind, const std::string& text, at::IntArrayRef sizes,
           const at::TensorOptions& options);
  ~PeerCall();
  PeerCall(const PeerCall&) = delete;
  PeerCall& operator=(const PeerCall&) = delete;

  const Tensor& slot() const { return tensor_; }
  PeerChannel& channel() const { return *channel_; }
  // Orders later pushes after the work of this stream so far.
  void follow();
  // Pushes bytes [first, first + bytes) of a dense tensor into the slot of rank `to`, from byte `offset` on. Holds the
  // tensor until the end of the call.
  void push(int64_t to, int64_t offset, const Tensor& source, int64_t first, int64_t bytes);
  void signal(int64_t to);
  // Pushes the dense `mine` to every other rank's slot, after the work of this stream so far.
  void gather(const Tensor& mine);
  // Copies it into this rank's own slot, for readers of all rows there.
  void gather_own(const Tensor& mine);
  // Waits for the pushes of rank `from`, or for this rank's own rows in its slot.
  void wait(int64_t from);
  void wait_for_others();
  bool complete() const { return waited_ == channel_->ranks() - 1; }  // whether all others were waited for
  // After the last read: returns the slot to the peers, and fills t with NaN if the channel has failed by then. Does
  // nothing unless complete().
  void end(const Tensor& t);
  void poison(const Tensor& t) const;  // fills t with NaN if the channel has failed by then

 private:
  te_stream stream() const;

  std::shared_ptr<PeerChannel> channel_;
  PeerChannel::TakenSlot taken_;
  Tensor tensor_;
  c10::SmallVector<Tensor, 1> sources_;
  int64_t waited_ = 0;
  bool ended_ = false;
};

// Gathers every rank's t into a slot that lives as long as `buffers`. The pushes start at once; wait() completes it.
class PeerGathering {
 public:
  PeerGathering(std::shared_ptr<PeerChannel> channel, const Tensor& t, SlotKind kind, ScopedBuffers& buffers);
  PeerGathering(const PeerGathering&) = delete;
  PeerGathering& operator=(const PeerGathering&) = delete;

  Tensor wait();

 private:
  std::shared_ptr<PeerCall> call_;  // null where there is nothing to wait for
  Tensor all_;
};

std::shared_ptr<PeerGathering> begin_peer_gather(std::shared_ptr<PeerChannel> channel, const Tensor& t, SlotKind kind,
                                                 ScopedBuffers& buffers);

}  // namespace te_torch
