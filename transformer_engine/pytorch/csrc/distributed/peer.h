// A channel to the other ranks of a group on this machine (transformer_engine/comm_peer.h), found by the group's name
// and a device, and a call's slot of it. Python makes channels (distributed/peer.py) and grows their slots; what is
// pushed when is layer/tp_comm_peer.h's.
#pragma once

#include <Python.h>
#include <transformer_engine/comm.h>
#include <transformer_engine/comm_peer.h>

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
  // words: uint8 on the CPU, te_comm_peer_bytes() of them. grow: (slot, bytes, text) -> (this rank's memory, every
  // rank's address as this rank sees it, what keeps these). kind: of every rank's device, by whose costs plans are
  // made; empty where they differ. The GIL is held.
  PeerChannel(std::string group, at::Device device, int64_t ranks, int64_t rank, Tensor words, double timeout_s,
              PyObject* grow, const std::string& kind);
  ~PeerChannel();
  PeerChannel(const PeerChannel&) = delete;
  PeerChannel& operator=(const PeerChannel&) = delete;

  // Null where nobody has made one.
  static std::shared_ptr<PeerChannel> of(std::string_view group, const at::Device& device);

  int64_t ranks() const { return ranks_; }
  int64_t rank() const { return rank_; }
  const at::Device& device() const { return device_; }
  const std::string& group() const { return group_; }
  te_comm_peer* get() const { return channel_; }
  const te_comm_costs& costs() const { return costs_; }
  RunStreams* streams() const { return streams_.get(); }  // null on the CPU

  // CommTimeout where the channel has failed.
  void refuse_failed() const;
  // Memory of a slot of this kind that no call has, and its number.
  struct Taken {
    int32_t slot;
    c10::Storage memory;
  };
  Taken take(SlotKind kind, int64_t bytes, const std::string& text, te_stream stream);
  void give_back(int32_t slot);
  // As if a call of this kind had wanted so many bytes.
  void reserve(SlotKind kind, int64_t bytes);

  struct Usage {
    int64_t bytes = 0, slots = 0, pooled = 0;
  };
  Usage usage() const;

  // Calls that were begun, captured ones among them.
  int64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  void count_call() { calls_.fetch_add(1, std::memory_order_relaxed); }
  // Nothing is under way, nothing was captured, and no peer is known to push late: its memory may go.
  bool may_end() const;

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
  mutable std::mutex mutex_;
  std::array<Slot, TE_COMM_PEER_SLOTS> slots_;
  std::vector<std::shared_ptr<PyObject>> outgrown_;  // graphs may have been captured over it
};

// A call at a slot, from its first push to its last reader; its end gives the slot back to the peers. One that ends
// before every rank was waited for fails the channel.
class PeerCall {
 public:
  // text: what every rank does, in the same words. sizes: of the slot, in `options`.
  PeerCall(std::shared_ptr<PeerChannel> channel, SlotKind kind, const std::string& text, at::IntArrayRef sizes,
           const at::TensorOptions& options);
  ~PeerCall();
  PeerCall(const PeerCall&) = delete;
  PeerCall& operator=(const PeerCall&) = delete;

  const Tensor& slot() const { return tensor_; }
  PeerChannel& channel() const { return *channel_; }
  // What is pushed behind comes behind what is enqueued here so far.
  void follow();
  // rows, dense, into `to`'s slot from its byte `offset` on. They are kept until the call's end.
  void push(int64_t to, int64_t offset, const Tensor& rows);
  void signal(int64_t to);
  // `mine`, dense, to every rank's slot, behind what is enqueued here so far.
  void gather(const Tensor& mine);
  // For what `from` pushes; for this rank's own rows in its slot.
  void wait(int64_t from);
  void wait_for_others();
  bool complete() const { return waited_ == channel_->ranks() - 1; }  // all others were waited for
  // The slot has been read for the last time: it is the peers' again, and t is NaN if the channel has failed by then.
  // Nothing where not all others were waited for.
  void end(const Tensor& t);
  void poison(const Tensor& t) const;  // NaN if the channel has failed by then

 private:
  te_stream stream() const;

  std::shared_ptr<PeerChannel> channel_;
  PeerChannel::Taken taken_;
  Tensor tensor_;
  std::vector<Tensor> sources_;
  int64_t waited_ = 0;
  bool ended_ = false;
};

// Every rank's t, one behind the other, in a slot until `buffers` end: all of it, in one piece, on its way from the
// start. To be waited for.
class PeerGathering {
 public:
  PeerGathering(std::shared_ptr<PeerChannel> channel, const Tensor& t, SlotKind kind, ScopedBuffers& buffers);
  PeerGathering(const PeerGathering&) = delete;
  PeerGathering& operator=(const PeerGathering&) = delete;

  Tensor wait();

 private:
  std::shared_ptr<PeerCall> call_;  // null: there is nothing to wait for
  Tensor all_;
};

std::shared_ptr<PeerGathering> begin_peer_gather(std::shared_ptr<PeerChannel> channel, const Tensor& t, SlotKind kind,
                                                 ScopedBuffers& buffers);

}  // namespace te_torch
