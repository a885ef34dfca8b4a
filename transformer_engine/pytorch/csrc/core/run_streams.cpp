// See run_streams.h.
#include "core/run_streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace te_torch {

RunStreams::RunStreams(const c10::Device& device)
    : side_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)),
      fork_(device.type()),
      arrived_(device.type()),
      join_(device.type()) {}

void RunStreams::change_to(const c10::Stream& stream) const {
  c10::impl::VirtualGuardImpl(stream.device_type()).exchangeStream(stream);
}

void RunStreams::turn() {
  if (!caller_.has_value()) {
    caller_ = c10::impl::VirtualGuardImpl(side_.device_type()).getStream(side_.device());
    on_side_ = has_arrived_ = false;
    fork_.record(*caller_);
    fork_.block(side_);
    return;
  }
  on_side_ = !on_side_;
  const c10::Stream& next = on_side_ ? side_ : *caller_;
  if (has_arrived_) arrived_.block(next);
  change_to(next);
}

void RunStreams::arrived() {
  arrived_.record(on_side_ ? side_ : *caller_);
  has_arrived_ = true;
}

void RunStreams::end() {
  if (!caller_.has_value()) return;
  const c10::Stream caller = *caller_;
  caller_.reset();
  change_to(caller);
  join_.record(side_);
  join_.block(caller);
}

}  // namespace te_torch
