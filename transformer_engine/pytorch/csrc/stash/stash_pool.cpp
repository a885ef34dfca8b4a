// See stash_pool.h.
#include "stash/stash_pool.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "core/common.h"
#include "saved_hooks/saved_tensor_hooks.h"

namespace te_torch {

namespace {

Tensor bytes_of(const at::Device& device, size_t count, bool zeros) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  // A CPU's allocator aligns to 64 bytes, the pool needs 128.
  const int64_t size = int64_t(count) + TE_STASH_ALIGNMENT;
  const Tensor buffer = zeros ? at::zeros({size}, options) : at::empty({size}, options);
  const auto past = reinterpret_cast<uintptr_t>(buffer.data_ptr()) % TE_STASH_ALIGNMENT;
  const int64_t start = past == 0 ? 0 : int64_t(TE_STASH_ALIGNMENT - past);
  return buffer.narrow(0, start, int64_t(count));
}

}  // namespace

StashPool::StashPool(const at::Device& device, te_stash_options options, const Tensor& gate, te_stream stream)
    : device_(indexed(device)), page_bytes_(options.page_bytes), device_pages_(options.device_pages), gate_(gate) {
  TORCH_CHECK_VALUE(gate.scalar_type() == at::kFloat && gate.numel() == 1 && gate.device() == device_,
                    "StashPool: argument 'gate' is ", name_of(gate.scalar_type()), " ", gate.sizes(), " on ",
                    gate.device(), ", wanted one float32 on ", device_, ".");
  options.device = device_.is_cpu() ? TE_DEVICE_CPU : int32_t(device_.index());
  options.gate = gate.data_ptr<float>();
  const size_t control = te_stash_control_bytes(options);
  if (control != 0) {  // else te_stash_pool_create() reports the wrong option
    const size_t pages = te_stash_pages_bytes(options);
    control_ = bytes_of(device_, control, true);
    pages_ = bytes_of(device_, pages, false);
    options.control = control_.data_ptr();
    options.pages = pages == 0 ? nullptr : pages_.data_ptr();
  }
  check(te_stash_pool_create(options, stream, &pool_));
}

Tensor StashPool::take_entry(int64_t most_pages) {
  auto& free = entries_[most_pages];
  if (free.empty()) return bytes_of(device_, te_stash_entry_bytes(most_pages), true);
  Tensor entry = std::move(free.back());
  free.pop_back();
  return entry;
}

void StashPool::close() {
  if (pool_ != nullptr) te_stash_pool_destroy(pool_);
  pool_ = nullptr;
  entries_.clear();
  pages_.reset();
  control_.reset();
  gate_.reset();
}

te_stash_member stash_member_of(int64_t rows, int64_t row_bytes, int64_t unit_rows, int32_t tail) {
  te_stash_member member{};
  member.tail = tail;
  member.unit_bytes = row_bytes == 0 ? 1 : row_bytes * unit_rows;
  member.most = row_bytes == 0 ? 0 : rows / unit_rows;
  member.tile_units = std::max<int64_t>(1, 128 / unit_rows);
  return member;
}

StashGroup::StashGroup(std::shared_ptr<StashPool> pool, const StashSegments& segments, int32_t tail)
    : pool_(std::move(pool)) {
  for (const auto& segment : segments) {
    for (const StashRegion& r : segment->regions) {
      positions_.emplace_back(sizes_.size(), r.offset);
      te_stash_member& member = members_.emplace_back(stash_member_of(r.rows, r.row_bytes, r.unit_rows, tail));
      if (r.panels) member.tile_units = 1;  // a panel is 128 rows
      member.repeats = r.repeats;
      member.pitch = r.pitch;
      member.counter = r.counter.data_ptr();
      member.behind = r.trailing_units();
      member.counter_bytes = int32_t(r.counter.element_size());
      counters_.push_back(r.counter);
    }
    sizes_.push_back(segment->bytes);
  }
  set_addresses(members_, segments);
  check(te_stash_most_pages(members_.data(), int32_t(members_.size()), pool_->page_bytes(), &most_pages_));
  entry_ = pool_->take_entry(most_pages_);
}

void StashGroup::set_targets(const StashSegments& segments) {
  targets_ = members_;
  set_addresses(targets_, segments);
}

void StashGroup::set_addresses(std::vector<te_stash_member>& parts, const StashSegments& segments) const {
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto [segment, offset] = positions_[i];
    parts[i].data = parts[i].most == 0 ? nullptr : segments.at(segment)->data() + offset;
  }
}

void StashGroup::store(int64_t number, te_stream stream) {
  check(te_stash_store(pool_->get(), members_.data(), int32_t(members_.size()), entry_.data_ptr(), number, stream));
  stored_ = true;
}

void StashGroup::allocate(StashSegments& segments) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto options = at::TensorOptions().dtype(at::kByte).device(pool_->device());
  for (size_t i = 0; i < sizes_.size(); ++i) {
    StashSegment& segment = *segments.at(i);
    segment.storage = at::empty({sizes_[i]}, options).storage();
    segment.start = 0;
  }
}

void StashGroup::load(bool keep, te_stream stream) {
  check(te_stash_load(pool_->get(), targets_.data(), int32_t(targets_.size()), entry_.data_ptr(), keep, stream));
  stored_ = keep;
}

void StashGroup::drop(te_stream stream) {
  if (stored_) check(te_stash_drop(pool_->get(), entry_.data_ptr(), stream));
  stored_ = false;
}

void StashGroup::evict(int64_t low_water, te_stream stream) {
  check(te_stash_evict(pool_->get(), entry_.data_ptr(), low_water, stream));
}

te_stash_entry StashGroup::read(te_stream stream) const {
  te_stash_entry head{};
  check(te_stash_read_entry(pool_->get(), entry_.data_ptr(), &head, stream));
  return head;
}

std::vector<int32_t> StashGroup::map() const {
  int64_t count = 0;
  check(te_stash_read_map(pool_->get(), entry_.data_ptr(), nullptr, 0, &count));
  std::vector<int32_t> ids(size_t(count), -1);
  check(te_stash_read_map(pool_->get(), entry_.data_ptr(), ids.data(), count, &count));
  return ids;
}

}  // namespace te_torch
