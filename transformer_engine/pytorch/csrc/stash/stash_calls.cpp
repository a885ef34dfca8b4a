// See stash_calls.h.
#include "stash/stash_calls.h"

#include <utility>

namespace te_torch {

StashWork StashCalls::work_of(const StashCopy& copy, std::function<void(te_stream)> start) const {
  StashWork work{std::move(start), {}};
  if (streams_->needs_segments()) work.segments = copy.segments;
  return work;
}

void StashCalls::store(StashCopy& copy) {
  auto group = std::make_shared<StashGroup>(native_, copy.segments, copy.tail);
  const StashEventPtr produced = streams_->now("produced");
  const auto work = work_of(copy, [group, number = stored_groups_](te_stream s) { group->store(number, s); });
  stored_ = streams_->run(StashStreamId::kStore, work, {"store", copy.name}, {&produced, &started_, &loaded_});
  ++stored_groups_;
  copy.group = std::move(group);
  copy.stored = stored_;
  note_captured(stored_);
}

StashEventPtr StashCalls::after_store(const StashWork& work, const StashCopy& copy, const char* verb) {
  const StashEventPtr memory = streams_->now("memory"), none;
  const bool waits = evicted_ || native_->load_waits();
  loaded_ = streams_->run(StashStreamId::kLoad, work, {verb, copy.name},
                          {&memory, &copy.stored, waits && stored_ != copy.stored ? &stored_ : &none});
  evicted_ = false;
  return loaded_;
}

void StashCalls::load(StashCopy& copy, bool keep) {
  copy.group->set_targets(copy.segments);
  const auto work = work_of(copy, [group = copy.group, keep](te_stream s) { group->load(keep, s); });
  copy.loaded = after_store(work, copy, "load");
  note_captured(copy.loaded);
}

StashEventPtr StashCalls::drop(const StashCopy& copy) {
  return after_store(work_of(copy, [group = copy.group](te_stream s) { group->drop(s); }), copy, "drop");
}

void StashCalls::evict(const StashCopy& copy, int64_t low_water) {
  const auto work = work_of(copy, [group = copy.group, low_water](te_stream s) { group->evict(low_water, s); });
  stored_ = loaded_ = streams_->run(StashStreamId::kStore, work, {"evict", copy.name}, {&loaded_, &stored_});
  evicted_ = true;
}

void StashCalls::join() const {
  for (const auto* event : {&stored_, &loaded_}) {
    if (*event) streams_->wait(*event);
  }
}

void StashCalls::report(const Tensor& mailbox) {
  join();
  native_->post(mailbox, streams_->current());
  const at::Device device = streams_->device();
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
}

void StashCalls::reset(const Tensor& mailbox) {
  join();
  native_->post(mailbox, streams_->current());
  native_->reset(streams_->current());
  started_ = streams_->now("started");
  stored_.reset();
  loaded_.reset();
  stored_groups_ = 0;
  evicted_ = false;
}

}  // namespace te_torch
