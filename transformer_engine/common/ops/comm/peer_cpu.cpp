// The operations of a channel on the CPU, where the calling thread copies, sets words and waits for them.
#include <sched.h>
#include <unistd.h>

#include <cstring>

#include "ops/comm/peer.h"

namespace te::comm {

namespace {

constexpr int kSpins = 200;  // reads of a word before the thread sleeps between reads

class CpuVerbs final : public Verbs {
 public:
  explicit CpuVerbs(const Words& words) : words_(words) {}

  void follow(te_stream) override {}
  void join(int32_t, te_stream) override {}

  void copy(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t row_bytes,
            int64_t rows) override {
    if (target_pitch == row_bytes && source_pitch == row_bytes) {
      std::memcpy(target, source, row_bytes * size_t(rows));
      return;
    }
    for (size_t row = 0; row < size_t(rows); ++row) {
      std::memcpy(static_cast<char*>(target) + row * target_pitch,
                  static_cast<const char*>(source) + row * source_pitch, row_bytes);
    }
  }

  void copy_own(int32_t, void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t row_bytes,
                int64_t rows) override {
    copy(target, target_pitch, source, source_pitch, row_bytes, rows);
  }
  void wait_own(int32_t, te_stream) override {}

  void set(bool, te_stream, Part<uint32_t*> values, uint32_t to) override {
    for (uint32_t* value : values) word(*value).store(to, std::memory_order_release);
  }

  void wait(bool, te_stream, Part<Awaited> all, uint32_t wanted) override {
    for (const Awaited& each : all) word(*each.expected).store(wanted);
    for (const Awaited& each : all) {
      wait_for(*each.value, wanted);
      word(*each.expected).store(0);
      word(*each.value).store(0);
    }
  }

  void poison(void* data, size_t bytes, const uint32_t*, te_stream) override {
    if (bytes != 0 && words_.failed()) std::memset(data, 0xff, bytes);
  }

  bool idle() const override { return true; }

 private:
  void wait_for(uint32_t& value, uint32_t wanted) const {
    int spins = 0;
    while (word(value).load(std::memory_order_acquire) != wanted) {
      if (words_.failed()) break;
      if (++spins < kSpins) {
        sched_yield();
      } else {
        usleep(50);
      }
    }
  }

  const Words words_;
};

}  // namespace

std::unique_ptr<Verbs> cpu_verbs(const Words& words) { return std::make_unique<CpuVerbs>(words); }

}  // namespace te::comm
