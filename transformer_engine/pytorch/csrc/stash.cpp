// stash, binding: a pool and its groups as objects that own the memory which the C API leaves to its caller: pages,
// control and entries. Which tensors are a group's, on which stream and when, is Python's.
#include <transformer_engine/stash.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common.h"
#include "stash_members.h"

namespace te_torch {

namespace {

namespace py = pybind11;

te_stream as_stream(int64_t stream) { return reinterpret_cast<te_stream>(stream); }

Tensor bytes_of(const at::Device& device, size_t count, bool zeros) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  // A CPU's allocator aligns to 64 bytes, the pool wants 128.
  const int64_t size = int64_t(count) + TE_STASH_ALIGNMENT;
  const Tensor whole = zeros ? at::zeros({size}, options) : at::empty({size}, options);
  const auto past = reinterpret_cast<uintptr_t>(whole.data_ptr()) % TE_STASH_ALIGNMENT;
  const int64_t start = past == 0 ? 0 : int64_t(TE_STASH_ALIGNMENT - past);
  return whole.narrow(0, start, int64_t(count));
}

class StashPool {
 public:
  StashPool(const at::Device& device, te_stash_options options, int64_t stream) : device_(indexed(device)) {
    options.device = device_.is_cpu() ? TE_DEVICE_CPU : int32_t(device_.index());
    page_bytes_ = options.page_bytes;
    const size_t control = te_stash_control_bytes(options);
    if (control != 0) {  // else create() says what is wrong
      const size_t pages = te_stash_pages_bytes(options);
      control_ = bytes_of(device_, control, true);
      pages_ = bytes_of(device_, pages, false);
      options.control = control_.data_ptr();
      options.pages = pages == 0 ? nullptr : pages_.data_ptr();
    }
    check(te_stash_pool_create(options, as_stream(stream), &pool_));
  }
  ~StashPool() { close(); }
  StashPool(const StashPool&) = delete;
  StashPool& operator=(const StashPool&) = delete;

  te_stash_pool* get() const {
    TORCH_CHECK(pool_ != nullptr, "PagedStash: its pool is closed; make another one.");
    return pool_;
  }
  const at::Device& device() const { return device_; }
  size_t page_bytes() const { return page_bytes_; }
  Tensor gate() const { return control_.narrow(0, 0, sizeof(float)).view(at::kFloat); }
  int64_t bytes() const { return pages_.defined() ? int64_t(pages_.nbytes() + control_.nbytes()) : 0; }

  // Memory of an entry that is empty, and back: an address is used again, so that no step takes more than another.
  Tensor take_entry(int64_t most_pages) {
    auto& free = entries_[most_pages];
    if (free.empty()) return bytes_of(device_, te_stash_entry_bytes(most_pages), true);
    Tensor entry = free.back();
    free.pop_back();
    return entry;
  }
  void give_entry(int64_t most_pages, Tensor entry) {
    if (pool_ != nullptr) entries_[most_pages].push_back(std::move(entry));
  }

  void close() {
    if (pool_ != nullptr) te_stash_pool_destroy(pool_);
    pool_ = nullptr;
    entries_.clear();
    pages_.reset();
    control_.reset();
  }

 private:
  at::Device device_;
  size_t page_bytes_ = 0;
  Tensor pages_, control_;
  te_stash_pool* pool_ = nullptr;
  std::map<int64_t, std::vector<Tensor>> entries_;
};

te_stash_member member_of(int64_t rows, int64_t row_bytes, int64_t unit_rows, int32_t tail) {
  te_stash_member member{};
  member.tail = tail;
  member.unit_bytes = row_bytes == 0 ? 1 : row_bytes * unit_rows;
  member.most = row_bytes == 0 ? 0 : rows / unit_rows;
  member.tile_units = std::max<int64_t>(1, 128 / unit_rows);
  return member;
}

// What one layer keeps, from its store to the load that empties it. Holds members and counters until it was stored.
class StashGroup {
 public:
  // The handle's pieces: bytes on the pool's device.
  StashGroup(std::shared_ptr<StashPool> pool, const StashHandle& handle, int32_t tail) : pool_(std::move(pool)) {
    for (const auto& piece : handle.pieces) {
      for (const StashRegion& r : piece->regions) {
        places_.emplace_back(sizes_.size(), r.offset);
        te_stash_member& member = members_.emplace_back(member_of(r.rows, r.row_bytes, r.unit_rows, tail));
        member.counter = r.counter.data_ptr();
        member.counter_bytes = int32_t(r.counter.element_size());
        counters_.push_back(r.counter);
      }
      sizes_.push_back(piece->bytes);
    }
    place(handle);
    check(te_stash_most_pages(members_.data(), int32_t(members_.size()), pool_->page_bytes(), &most_pages_));
    entry_ = pool_->take_entry(most_pages_);
  }
  // A reset forgets what it holds. Kernels that use it run behind each other, or behind a load of another's use.
  ~StashGroup() { pool_->give_entry(most_pages_, std::move(entry_)); }
  StashGroup(const StashGroup&) = delete;
  StashGroup& operator=(const StashGroup&) = delete;

  void store(int64_t number, int64_t stream) {
    check(te_stash_store(pool_->get(), members_.data(), int32_t(members_.size()), entry_.data_ptr(), number,
                         as_stream(stream)));
    stored_ = true;
  }
  // The store has run: nobody reads the members or their counters any more.
  void forget_members() {
    counters_.clear();
    for (auto& member : members_) {
      member.data = nullptr;
      member.counter = nullptr;
    }
  }
  // Memory for load(), of the sizes that were stored, on the current stream.
  void bring(StashHandle& handle) const {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto options = at::TensorOptions().dtype(at::kByte).device(pool_->device());
    for (size_t i = 0; i < sizes_.size(); ++i) {
      StashPiece& piece = *handle.pieces.at(i);
      piece.storage = at::empty({sizes_[i]}, options).storage();
      piece.start = 0;
    }
  }
  void load(const StashHandle& handle, bool keep, int64_t stream) {
    place(handle);
    check(te_stash_load(pool_->get(), members_.data(), int32_t(members_.size()), entry_.data_ptr(), keep,
                        as_stream(stream)));
    stored_ = keep;
  }
  void drop(int64_t stream) {
    if (stored_) check(te_stash_drop(pool_->get(), entry_.data_ptr(), as_stream(stream)));
    stored_ = false;
  }
  void evict(int64_t low_water, int64_t stream) {
    check(te_stash_evict(pool_->get(), entry_.data_ptr(), low_water, as_stream(stream)));
  }
  py::dict read(int64_t stream) const {
    te_stash_entry head{};
    check(te_stash_read_entry(pool_->get(), entry_.data_ptr(), &head, as_stream(stream)));
    py::dict fields;
    fields["state"] = head.state;
    fields["number"] = head.number;
    fields["pages"] = head.pages;
    fields["host_pages"] = head.host_pages;
    fields["live_bytes"] = head.live_bytes;
    fields["stream_bytes"] = head.stream_bytes;
    return fields;
  }
  std::vector<int32_t> map() const {
    int64_t count = 0;
    check(te_stash_read_map(pool_->get(), entry_.data_ptr(), nullptr, 0, &count));
    std::vector<int32_t> ids(size_t(count), -1);
    check(te_stash_read_map(pool_->get(), entry_.data_ptr(), ids.data(), count, &count));
    return ids;
  }
  int64_t most_pages() const { return most_pages_; }

 private:
  void place(const StashHandle& handle) {
    for (size_t i = 0; i < members_.size(); ++i) {
      const auto [piece, offset] = places_[i];
      members_[i].data = members_[i].most == 0 ? nullptr : handle.pieces.at(piece)->data() + offset;
    }
  }

  std::shared_ptr<StashPool> pool_;
  std::vector<std::pair<size_t, int64_t>> places_;  // of members: in which piece, at which byte of it
  std::vector<Tensor> counters_;
  std::vector<int64_t> sizes_;  // of pieces
  std::vector<te_stash_member> members_;
  int64_t most_pages_ = 0;
  Tensor entry_;
  bool stored_ = false;
};

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
                               int64_t policy, int64_t sm_budget, bool trap, bool debug, int64_t stream) {
             te_stash_options options{};
             options.policy = int32_t(policy);
             options.page_bytes = size_t(page_bytes);
             options.device_pages = device_pages;
             options.host_pages = host_pages;
             options.sm_budget = int32_t(sm_budget);
             options.trap = trap;
             options.debug = debug;
             return std::make_shared<StashPool>(device, options, stream);
           })),
           py::arg("device"), py::kw_only(), py::arg("page_bytes"), py::arg("device_pages"), py::arg("host_pages"),
           py::arg("policy"), py::arg("sm_budget"), py::arg("trap"), py::arg("debug"), py::arg("stream"))
      .def_property_readonly("gate", &StashPool::gate)
      .def_property_readonly("bytes", &StashPool::bytes)
      .def_property_readonly("load_waits", [](const StashPool& p) { return te_stash_load_waits(p.get()) != 0; })
      .def("reset", wrapped([](StashPool& p, int64_t stream) { check(te_stash_reset(p.get(), as_stream(stream))); }))
      .def("post", wrapped([](StashPool& p, const Tensor& mailbox, int64_t stream) {
             check(te_stash_post(p.get(), static_cast<te_stash_report*>(mailbox.data_ptr()), as_stream(stream)));
           }))
      .def("close", wrapped([](StashPool& p) { p.close(); }));
  py::class_<StashGroup>(m, "StashGroup")
      .def(py::init(wrapped([](std::shared_ptr<StashPool> pool, const StashHandle& handle, int64_t tail) {
        return std::make_unique<StashGroup>(std::move(pool), handle, int32_t(tail));
      })))
      .def("store", wrapped([](StashGroup& g, int64_t number, int64_t stream) { g.store(number, stream); }))
      .def("forget_members", wrapped([](StashGroup& g) { g.forget_members(); }))
      .def("bring", wrapped([](const StashGroup& g, StashHandle& handle) { g.bring(handle); }))
      .def("load", wrapped([](StashGroup& g, const StashHandle& handle, bool keep, int64_t stream) {
             g.load(handle, keep, stream);
           }))
      .def("drop", wrapped([](StashGroup& g, int64_t stream) { g.drop(stream); }))
      .def("evict", wrapped([](StashGroup& g, int64_t low, int64_t stream) { g.evict(low, stream); }))
      .def("read", wrapped([](const StashGroup& g, int64_t stream) { return g.read(stream); }))
      .def("map", wrapped([](const StashGroup& g) { return g.map(); }))
      .def_property_readonly("most_pages", &StashGroup::most_pages);
  m.attr("stash_report_bytes") = sizeof(te_stash_report);
  m.def("stash_report_in", wrapped(report_in));
  m.def("stash_most_pages", wrapped([](const std::vector<Tensor>& data, int64_t page_bytes) {
          std::vector<te_stash_member> members;
          for (const Tensor& t : data) members.push_back(member_of(1, int64_t(t.nbytes()), 1, TE_STASH_TAIL_KEEP));
          int64_t pages = 0;
          check(te_stash_most_pages(members.data(), int32_t(members.size()), size_t(page_bytes), &pages));
          return pages;
        }));
}

}  // namespace te_torch
