// A pool with its memory, and groups of members with canaries around them, for the suites of the stash room on either
// device. Everything runs on the default stream; what is expected of a load is worked out here, byte by byte.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "device_buffer.h"
#include "transformer_engine/stash.h"

namespace te::testing {

using Bytes = std::vector<unsigned char>;

struct StashPool {
  static te_stash_options defaults(int32_t device, size_t page_bytes, int64_t device_pages, int64_t host_pages = 0,
                                   te_stash_policy policy = TE_STASH_RING) {
    te_stash_options options{};
    options.device = device;
    options.policy = policy;
    options.page_bytes = page_bytes;
    options.device_pages = device_pages;
    options.host_pages = host_pages;
    options.sm_budget = 48;
    return options;
  }

  explicit StashPool(te_stash_options given) : options(given) {
    const size_t bytes = te_stash_pages_bytes(options);
    if (bytes != 0) pages = std::make_unique<Buffer<unsigned char>>(options.device, 1, int64_t(bytes), -1, 128);
    control =
        std::make_unique<Buffer<unsigned char>>(options.device, 1, int64_t(te_stash_control_bytes(options)), -1, 128);
    options.pages = pages ? pages->data() : nullptr;
    options.control = control->data();
    TE_EXPECT_OK(te_stash_pool_create(options, nullptr, &handle));
  }
  StashPool(int32_t device, size_t page_bytes, int64_t device_pages, int64_t host_pages = 0,
            te_stash_policy policy = TE_STASH_RING)
      : StashPool(defaults(device, page_bytes, device_pages, host_pages, policy)) {}
  ~StashPool() {
    if (pages && te_stash_pages_bytes(options) < size_t(1) << 28) {
      EXPECT_TRUE(pages->padding_untouched()) << "behind the pages";
    }
    EXPECT_TRUE(control->padding_untouched()) << "behind control";
    TE_EXPECT_OK(te_stash_pool_destroy(handle));
  }

  te_stash_report report() const {
    te_stash_report report{};
    wait();
    TE_EXPECT_OK(te_stash_read(handle, &report, nullptr));
    wait();
    return report;
  }
  void reset() { TE_EXPECT_OK(te_stash_reset(handle, nullptr)); }
  void wait() const {
#if defined(TE_WITH_CUDA)
    if (options.device != TE_DEVICE_CPU) cuda_ok(cudaDeviceSynchronize());
#endif
  }

  te_stash_options options;
  std::unique_ptr<Buffer<unsigned char>> pages, control;
  te_stash_pool* handle = nullptr;
};

struct StashEntry {
  StashEntry(const StashPool& pool, int64_t most_pages)
      : pool(pool), memory(pool.options.device, 1, int64_t(te_stash_entry_bytes(most_pages)), -1, 128) {
    memory.fill(Bytes(te_stash_entry_bytes(most_pages), 0));
  }
  te_stash_entry head() const {
    te_stash_entry head{};
    pool.wait();
    TE_EXPECT_OK(te_stash_read_entry(pool.handle, memory.data(), &head, nullptr));
    pool.wait();
    return head;
  }
  std::vector<int32_t> map() const {
    int64_t count = 0;
    TE_EXPECT_OK(te_stash_read_map(pool.handle, memory.data(), nullptr, 0, &count));
    std::vector<int32_t> ids(size_t(count), -1);
    TE_EXPECT_OK(te_stash_read_map(pool.handle, memory.data(), ids.data(), count, &count));
    return ids;
  }
  void* data() const { return memory.data(); }

  const StashPool& pool;
  Buffer<unsigned char> memory;
};

struct MemberSpec {
  int64_t unit_bytes;
  int64_t most;
  te_stash_tail tail = TE_STASH_TAIL_ZERO;
  int64_t tile_units = 128;
  int64_t shift = 0;  // of the data from a multiple of 256 bytes
  int32_t counter_bytes = 4;
  int64_t behind = 0;  // units after a live one that count as alive
  int64_t repeats = 0;
  int64_t pitch = 0;

  int64_t buffers() const { return std::max<int64_t>(repeats, 1); }
  int64_t bytes() const { return (buffers() - 1) * pitch + unit_bytes * most; }

  int64_t tail_end(int64_t count) const {
    if (tail == TE_STASH_TAIL_KEEP) return count;
    if (tail == TE_STASH_TAIL_ZERO) return most;
    int64_t end = count;
    while (end % tile_units != 0 && end < most) ++end;
    return end;
  }
};

// Members with what they hold, their targets and their counters.
class Group {
 public:
  static constexpr int64_t kAround = 64;  // bytes before and after a member that must stay unchanged

  Group(int32_t device, std::vector<MemberSpec> specs, uint32_t seed = 1) : device_(device), specs_(std::move(specs)) {
    std::mt19937 random(seed);
    for (const MemberSpec& spec : specs_) {
      const int64_t all = kAround + spec.shift + spec.bytes() + kAround;
      Bytes values(size_t(all), 0);
      for (auto& v : values) v = static_cast<unsigned char>(random() >> 11);
      values_.push_back(values);
      sources_.push_back(std::make_unique<Buffer<unsigned char>>(device, 1, 256 + all));
      targets_.push_back(std::make_unique<Buffer<unsigned char>>(device, 1, 256 + all));
      counters_.push_back(std::make_unique<Buffer<unsigned char>>(device, 1, 8));
      write_source(values_.size() - 1);
    }
    set(std::vector<int64_t>(specs_.size(), 0));
  }

  void set(const std::vector<int64_t>& counts) {
    counts_ = counts;
    for (size_t m = 0; m < specs_.size(); ++m) {
      Bytes raw(8, 0xcc);
      const int64_t wide = counts[m];
      const auto narrow = int32_t(counts[m]);
      if (specs_[m].counter_bytes == 8) std::memcpy(raw.data(), &wide, 8);
      if (specs_[m].counter_bytes == 4) std::memcpy(raw.data(), &narrow, 4);
      if (specs_[m].counter_bytes == 1) raw[0] = static_cast<unsigned char>(counts[m]);
      counters_[m]->fill(raw);
    }
  }
  // The sources are overwritten on purpose: only the pages have their values now.
  void spoil_sources() {
    for (auto& source : sources_) source->poison();
  }
  void restore_sources() {
    for (size_t m = 0; m < specs_.size(); ++m) write_source(m);
  }
  void poison_targets() {
    for (size_t m = 0; m < specs_.size(); ++m) {
      Bytes all(values_[m].size() + 256, kBefore);
      targets_[m]->fill(all);
    }
  }

  std::vector<te_stash_member> stored() const { return members(sources_); }
  std::vector<te_stash_member> loaded() const { return members(targets_); }
  int32_t size() const { return int32_t(specs_.size()); }

  int64_t most_pages(size_t page_bytes) const {
    int64_t pages = -1;
    const auto table = stored();
    TE_EXPECT_OK(te_stash_most_pages(table.data(), size(), page_bytes, &pages));
    return pages;
  }
  int64_t live(size_t m) const {
    return counts_[m] <= 0 ? 0 : std::min(std::min(counts_[m], specs_[m].most) + specs_[m].behind, specs_[m].most);
  }
  int64_t stream_bytes() const {
    int64_t bytes = 0;
    for (size_t m = 0; m < specs_.size(); ++m)
      bytes += (live(m) * specs_[m].unit_bytes + 127) / 128 * 128 * specs_[m].buffers();
    return bytes;
  }
  int64_t live_bytes() const {
    int64_t bytes = 0;
    for (size_t m = 0; m < specs_.size(); ++m) bytes += live(m) * specs_[m].unit_bytes * specs_[m].buffers();
    return bytes;
  }

  te_status store(const StashPool& pool, const StashEntry& entry, int64_t number = 0) const {
    const auto table = stored();
    return te_stash_store(pool.handle, table.data(), size(), entry.data(), number, nullptr);
  }
  te_status load(const StashPool& pool, const StashEntry& entry, bool keep = false) const {
    const auto table = loaded();
    return te_stash_load(pool.handle, table.data(), size(), entry.data(), keep, nullptr);
  }

  enum class Found { kStored, kLost, kNothing };
  // Every byte of every target: live parts, tails, and bytes that must stay unchanged.
  void expect_targets(Found found = Found::kStored) const {
    for (size_t m = 0; m < specs_.size(); ++m) {
      const MemberSpec& spec = specs_[m];
      const int64_t count = found == Found::kNothing ? spec.most : live(m);
      const int64_t begin = start(m), end = begin + count * spec.unit_bytes;
      Bytes wanted(values_[m].size() + 256, kBefore);
      for (int64_t repeat = 0; repeat < spec.buffers(); ++repeat) {
        const int64_t more = repeat * spec.pitch;
        for (int64_t i = begin + more; i < end + more; ++i) {
          wanted[size_t(i)] = found == Found::kStored ? values_[m][size_t(i - begin)] : 0xff;
        }
        const int64_t tail = begin + more + spec.tail_end(count) * spec.unit_bytes;
        for (int64_t i = end + more; i < tail; ++i) wanted[size_t(i)] = 0;
      }
      const Bytes got = targets_[m]->read();
      const auto wrong = std::mismatch(wanted.begin(), wanted.end(), got.begin());
      EXPECT_TRUE(wrong.first == wanted.end())
          << "member " << m << " of " << spec.unit_bytes << " x " << spec.most << ", count " << counts_[m] << ": byte "
          << (wrong.first - wanted.begin()) - begin << " of " << end - begin << " live ones is " << int(*wrong.second)
          << ", wanted " << int(*wrong.first);
    }
  }
  void expect_sources() const {
    for (size_t m = 0; m < specs_.size(); ++m) {
      const Bytes got = sources_[m]->read();
      EXPECT_TRUE(std::equal(values_[m].begin(), values_[m].end(), got.begin() + start(m))) << "member " << m;
    }
  }

 private:
  static constexpr unsigned char kBefore = 0xa7;  // of targets: neither 0 nor 0xff

  int64_t start(size_t m) const { return 256 / 2 + specs_[m].shift; }

  void write_source(size_t m) {
    Bytes all(values_[m].size() + 256, kBefore);
    std::copy(values_[m].begin(), values_[m].end(), all.begin() + start(m));
    sources_[m]->fill(all);
  }

  std::vector<te_stash_member> members(const std::vector<std::unique_ptr<Buffer<unsigned char>>>& memory) const {
    std::vector<te_stash_member> table;
    for (size_t m = 0; m < specs_.size(); ++m) {
      const MemberSpec& spec = specs_[m];
      table.push_back({memory[m]->data() + start(m), counters_[m]->data(), spec.counter_bytes, spec.tail,
                       spec.unit_bytes, spec.most, spec.tile_units, spec.behind, spec.repeats, spec.pitch});
    }
    return table;
  }

  int32_t device_;
  std::vector<MemberSpec> specs_;
  std::vector<int64_t> counts_;
  std::vector<Bytes> values_;
  std::vector<std::unique_ptr<Buffer<unsigned char>>> sources_, targets_, counters_;
};

// There and back, with nothing left of the sources in between.
inline void round_trip(const StashPool& pool, const StashEntry& entry, Group& group,
                       const std::vector<int64_t>& counts) {
  group.set(counts);
  group.poison_targets();
  TE_ASSERT_OK(group.store(pool, entry));
  group.spoil_sources();
  TE_ASSERT_OK(group.load(pool, entry));
  group.expect_targets();
  group.restore_sources();
}

}  // namespace te::testing
