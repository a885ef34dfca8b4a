// See stash_segments.h.
#include "stash/stash_segments.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/maximum.h>

#include <algorithm>
#include <optional>

#include "saved_hooks/saved_storages.h"

namespace te_torch {

namespace py = pybind11;

uint32_t version_of(const Tensor& t) { return t.is_inference() ? 0 : uint32_t(t._version()); }

StashRegion::StashRegion(int64_t start, int64_t row_count, int64_t bytes, int64_t unit, const Tensor& live_counter)
    : offset(start),
      rows(row_count),
      row_bytes(bytes),
      unit_rows(unit),
      counter(live_counter),
      counter_version(version_of(live_counter)) {}

bool StashRegion::is_counted_by(const Tensor& other) const {
  const auto is_other = [&](const Tensor& t) { return t.data_ptr() == other.data_ptr(); };
  return is_other(counter) || std::any_of(counters.begin(), counters.end(), is_other);
}

void StashRegion::count_also(const Tensor& other) {
  if (counters.empty()) counters.push_back(counter);
  counters.push_back(other);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  counter = at::maximum(counter.flatten(), other.flatten());
  counter_version = version_of(counter);
}

bool StashRegion::counter_changed() const { return version_of(counter) != counter_version; }

int64_t StashRegion::trailing_units() const {
  return trailing_rows / unit_rows + int64_t(trailing_rows % unit_rows != 0);
}

void register_stash_segments(py::module_& m) {
  py::class_<StashRegion>(m, "StashRegion")
      .def_readonly("offset", &StashRegion::offset)
      .def_readonly("rows", &StashRegion::rows)
      .def_readonly("row_bytes", &StashRegion::row_bytes)
      .def_readonly("unit_rows", &StashRegion::unit_rows)
      .def_readonly("repeats", &StashRegion::repeats)
      .def_property_readonly("trailing_units", &StashRegion::trailing_units)
      .def_readonly("counter", &StashRegion::counter);
  py::class_<StashSegment, std::shared_ptr<StashSegment>>(m, "StashSegment")
      .def(py::init([](const Tensor& memory) {
             return std::make_shared<StashSegment>(memory.storage(), memory.storage_offset(), memory.numel());
           }),
           py::arg("memory"), "bytes")
      .def("add", [](StashSegment& s, int64_t offset, int64_t rows, int64_t row_bytes, const Tensor& counter,
                     int64_t unit_rows) { s.regions.emplace_back(offset, rows, row_bytes, unit_rows, counter); })
      .def_readonly("bytes", &StashSegment::bytes)
      .def_readonly("regions", &StashSegment::regions)
      .def_property(
          "memory",
          [](const StashSegment& s) -> std::optional<Tensor> {
            if (!s.storage) return std::nullopt;
            return bytes_over(s.storage, s.start, s.bytes);
          },
          [](StashSegment& s, const Tensor& memory) {
            s.storage = memory.storage();
            s.start = memory.storage_offset();
          });
}

}  // namespace te_torch
