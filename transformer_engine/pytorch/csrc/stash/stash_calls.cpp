// See stash_calls.h.
#include "stash/stash_calls.h"

#include <utility>

namespace te_torch {

StashWork StashCalls::work_of(const StashHandle& handle, std::function<void(te_stream)> start) const {
  StashWork work{std::move(start), {}};
  if (lanes_->wants_pieces()) work.pieces = handle.pieces;
  return work;
}

void StashCalls::store(StashHandle& handle) {
  auto group = std::make_shared<StashGroup>(native_, handle, handle.tail);
  const StashPointPtr produced = lanes_->now("produced");
  const auto work = work_of(handle, [group, number = stored_groups_](te_stream s) { group->store(number, s); });
  stored_ = lanes_->run(StashLane::kStore, work, {"store", handle.name}, {&produced, &started_, &loaded_});
  ++stored_groups_;
  handle.group = std::move(group);
  handle.stored = stored_;
}

StashPointPtr StashCalls::behind_store(const StashWork& work, const StashHandle& handle, const char* verb) {
  const StashPointPtr room = lanes_->now("room"), none;
  const bool waits = evicted_ || native_->load_waits();
  loaded_ = lanes_->run(StashLane::kLoad, work, {verb, handle.name},
                        {&room, &handle.stored, waits && stored_ != handle.stored ? &stored_ : &none});
  evicted_ = false;
  return loaded_;
}

void StashCalls::load(StashHandle& handle, bool keep) {
  handle.group->aim(handle);
  const auto work = work_of(handle, [group = handle.group, keep](te_stream s) { group->load(keep, s); });
  handle.back = behind_store(work, handle, "load");
}

StashPointPtr StashCalls::drop(const StashHandle& handle) {
  return behind_store(work_of(handle, [group = handle.group](te_stream s) { group->drop(s); }), handle, "drop");
}

void StashCalls::evict(const StashHandle& handle, int64_t low_water) {
  const auto work = work_of(handle, [group = handle.group, low_water](te_stream s) { group->evict(low_water, s); });
  stored_ = loaded_ = lanes_->run(StashLane::kStore, work, {"evict", handle.name}, {&loaded_, &stored_});
  evicted_ = true;
}

void StashCalls::join() const {
  for (const auto* point : {&stored_, &loaded_}) {
    if (*point) lanes_->wait(*point);
  }
}

void StashCalls::end_capture() const {
  join();
  lanes_->end_capture();
}

void StashCalls::report(const Tensor& mailbox) {
  join();
  native_->post(mailbox, lanes_->current());
  const at::Device device = lanes_->device();
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
}

void StashCalls::reset(const Tensor& mailbox) {
  join();
  native_->post(mailbox, lanes_->current());
  native_->reset(lanes_->current());
  started_ = lanes_->now("started");
  stored_.reset();
  loaded_.reset();
  stored_groups_ = 0;
  evicted_ = false;
}

}  // namespace te_torch
