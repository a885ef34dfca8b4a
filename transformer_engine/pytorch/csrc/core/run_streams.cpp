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
  if (!here_.has_value()) {
    here_ = c10::impl::VirtualGuardImpl(side_.device_type()).getStream(side_.device());
    beside_ = before_ = false;
    fork_.record(*here_);
    fork_.block(side_);
    return;
  }
  beside_ = !beside_;
  const c10::Stream& next = beside_ ? side_ : *here_;
  if (before_) arrived_.block(next);
  change_to(next);
}

void RunStreams::arrived() {
  arrived_.record(beside_ ? side_ : *here_);
  before_ = true;
}

void RunStreams::end() {
  if (!here_.has_value()) return;
  const c10::Stream here = *here_;
  here_.reset();
  change_to(here);
  join_.record(side_);
  join_.block(here);
}

}  // namespace te_torch
