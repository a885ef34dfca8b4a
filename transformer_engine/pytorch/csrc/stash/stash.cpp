// Python classes of the pool, its groups and the calls on it. Benchmarks and tests also use them directly.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>
#include <vector>

#include "core/common.h"
#include "stash/stash_handle.h"

namespace te_torch {

namespace {

namespace py = pybind11;

te_stream as_stream(int64_t stream) { return reinterpret_cast<te_stream>(stream); }

py::object report_in(const Tensor& mailbox) {
  te_stash_report report{};
  if (!te_stash_report_in(mailbox.data_ptr(), &report)) return py::none();
  py::dict fields;
#define TE_FIELD(name) fields[#name] = report.name
  TE_FIELD(gate), TE_FIELD(flags), TE_FIELD(step), TE_FIELD(flagged_entry), TE_FIELD(groups), TE_FIELD(lost_groups);
  TE_FIELD(live_bytes), TE_FIELD(stream_bytes), TE_FIELD(taken_bytes), TE_FIELD(spilled_bytes);
  TE_FIELD(evicted_pages), TE_FIELD(device_in_use), TE_FIELD(device_peak), TE_FIELD(host_in_use);
  TE_FIELD(host_peak), TE_FIELD(demand);
#undef TE_FIELD
  return fields;
}

}  // namespace

void register_stash(py::module_& m) {
  const auto wrapped = [](auto method) { return torch::wrap_pybind_function(method); };
  py::class_<StashPool, std::shared_ptr<StashPool>>(m, "StashPool")
      .def(py::init(wrapped([](const at::Device& device, int64_t page_bytes, int64_t device_pages, int64_t host_pages,
                               int64_t policy, int64_t sm_budget, bool trap, bool debug, const Tensor& gate,
                               int64_t stream) {
             te_stash_options options{};
             options.policy = int32_t(policy);
             options.page_bytes = size_t(page_bytes);
             options.device_pages = device_pages;
             options.host_pages = host_pages;
             options.sm_budget = int32_t(sm_budget);
             options.trap = trap;
             options.debug = debug;
             return std::make_shared<StashPool>(device, options, gate, as_stream(stream));
           })),
           py::arg("device"), py::kw_only(), py::arg("page_bytes"), py::arg("device_pages"), py::arg("host_pages"),
           py::arg("policy"), py::arg("sm_budget"), py::arg("trap"), py::arg("debug"), py::arg("gate"),
           py::arg("stream"))
      .def_property_readonly("bytes", &StashPool::bytes)
      .def_property_readonly("device_pages", &StashPool::device_pages)
      .def("reset", wrapped([](StashPool& p, int64_t stream) { p.reset(as_stream(stream)); }))
      .def("close", wrapped([](StashPool& p) { p.close(); }));
  py::class_<StashGroup, std::shared_ptr<StashGroup>>(m, "StashGroup")
      .def(py::init(wrapped([](std::shared_ptr<StashPool> pool, const StashHandle& handle, int64_t tail) {
        return std::make_shared<StashGroup>(std::move(pool), handle.segments, int32_t(tail));
      })))
      .def("store", wrapped([](StashGroup& g, int64_t number, int64_t stream) { g.store(number, as_stream(stream)); }))
      .def("allocate", wrapped([](const StashGroup& g, StashHandle& handle) { g.allocate(handle.segments); }))
      .def("load", wrapped([](StashGroup& g, const StashHandle& handle, bool keep, int64_t stream) {
             g.set_targets(handle.segments);
             g.load(keep, as_stream(stream));
           }))
      .def("read", wrapped([](const StashGroup& g, int64_t stream) {
             const te_stash_entry head = g.read(as_stream(stream));
             py::dict fields;
#define TE_FIELD(name) fields[#name] = head.name
             TE_FIELD(state), TE_FIELD(number), TE_FIELD(pages), TE_FIELD(host_pages), TE_FIELD(live_bytes);
             TE_FIELD(stream_bytes);
#undef TE_FIELD
             return fields;
           }))
      .def("map", wrapped([](const StashGroup& g) { return g.map(); }))
      .def_property_readonly("most_pages", &StashGroup::most_pages);
  py::class_<StashCalls, std::shared_ptr<StashCalls>>(m, "StashCalls")
      .def(py::init(wrapped([](std::shared_ptr<StashPool> native, std::shared_ptr<StashStreams> streams) {
             return std::make_shared<StashCalls>(std::move(native), std::move(streams));
           })),
           py::arg("native"), py::arg("streams"))
      .def_property_readonly("native", &StashCalls::native)
      .def_readwrite("captured", &StashCalls::captured)
      .def("load", wrapped([](StashCalls& c, StashHandle& handle, bool keep) { c.load(handle, keep); }))
      .def("join", wrapped([](const StashCalls& c) { c.join(); }))
      .def("report", wrapped([](StashCalls& c, const Tensor& mailbox) { c.report(mailbox); }))
      .def("reset", wrapped([](StashCalls& c, const Tensor& mailbox) { c.reset(mailbox); }));
  m.attr("stash_max_tensors") = TE_STASH_MOST_MEMBERS;
  m.attr("stash_report_bytes") = sizeof(te_stash_report);
  m.def("stash_report_in", wrapped(report_in));
  m.def("stash_most_pages", wrapped([](const std::vector<Tensor>& data, int64_t page_bytes) {
          std::vector<te_stash_member> parts;
          for (const Tensor& t : data) parts.push_back(stash_member_of(1, int64_t(t.nbytes()), 1, TE_STASH_TAIL_KEEP));
          int64_t pages = 0;
          check(te_stash_most_pages(parts.data(), int32_t(parts.size()), size_t(page_bytes), &pages));
          return pages;
        }));
}

}  // namespace te_torch
