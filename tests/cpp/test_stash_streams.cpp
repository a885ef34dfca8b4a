// The stash on CUDA as it is used: two streams at once, captured calls that are replayed with other counts, and offsets
// beyond 2 GiB. The results must equal those of a pool on the CPU for the same calls, one after the other. Mutants: an
// entry whose word the last block does not clear, or tails that a load publishes before it has read its pages
// (stash.cu) turn these red.
#include <gtest/gtest.h>

#include <algorithm>

#include "stash_pool.h"

#if defined(TE_WITH_CUDA)

namespace te {
namespace {

using testing::Buffer;
using testing::Bytes;
using testing::cuda_ok;
using testing::StashEntry;
using testing::StashPool;

struct Stream {
  Stream() { cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream); }
  operator cudaStream_t() const { return stream; }
  cudaStream_t stream = nullptr;
};

struct Event {
  Event() { cuda_ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)); }
  ~Event() { cudaEventDestroy(event); }
  void record(cudaStream_t stream) { cuda_ok(cudaEventRecord(event, stream)); }
  void hold(cudaStream_t stream) const { cuda_ok(cudaStreamWaitEvent(stream, event, 0)); }
  cudaEvent_t event = nullptr;
};

Bytes noise(size_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes out(bytes);
  for (auto& b : out) b = static_cast<unsigned char>(random() >> 9);
  return out;
}

std::vector<int64_t> numbers(const te_stash_report& r) {
  return {int64_t(r.gate), r.flags,        r.flagged_entry, r.groups,        r.lost_groups,
          r.live_bytes,    r.stream_bytes, r.taken_bytes,   r.spilled_bytes, r.evicted_pages,
          r.device_in_use, r.device_peak,  r.host_in_use,   r.host_peak,     r.demand};
}

// Entries of one pool: each a member of 512-byte units and one of an odd width on an odd address, which share a count.
class Side {
 public:
  static constexpr int64_t kMost = 400, kOdd = 37;
  static constexpr int64_t kPages = (kMost * 512 + kMost * kOdd + 127) / 16384 + 1;

  Side(const te_stash_options& options, int entries) : pool(options) {
    for (int e = 0; e < entries; ++e) {
      entry.push_back(std::make_unique<StashEntry>(pool, kPages));
      for (const int64_t bytes : {kMost * 512, kMost * kOdd + 3}) {
        source.push_back(std::make_unique<Buffer<unsigned char>>(options.device, 1, bytes));
        target.push_back(std::make_unique<Buffer<unsigned char>>(options.device, 1, bytes));
        source.back()->fill(noise(size_t(bytes), uint32_t(source.size())));
      }
    }
  }

  te_status store(int e, const int32_t* counter, int64_t number, te_stream stream) {
    const auto table = members(source, e, counter);
    return te_stash_store(pool.handle, table.data(), 2, entry[size_t(e)]->data(), number, stream);
  }
  te_status load(int e, te_stream stream) {
    const auto table = members(target, e, nullptr);
    return te_stash_load(pool.handle, table.data(), 2, entry[size_t(e)]->data(), 0, stream);
  }
  Bytes loaded(int e, int m) const { return target[size_t(2 * e + m)]->read(); }

  StashPool pool;
  std::vector<std::unique_ptr<StashEntry>> entry;
  std::vector<std::unique_ptr<Buffer<unsigned char>>> source, target;

 private:
  std::vector<te_stash_member> members(const std::vector<std::unique_ptr<Buffer<unsigned char>>>& memory, int e,
                                       const int32_t* counter) const {
    return {{memory[size_t(2 * e)]->data(), counter, 4, TE_STASH_TAIL_ZERO, 512, kMost, 1, 0, 0, 0},
            {memory[size_t(2 * e + 1)]->data() + 3, counter, 4, TE_STASH_TAIL_TILE, kOdd, kMost, 64, 0, 0, 0}};
  }
};

// The same calls on the CPU and, on two streams, on CUDA.
class Both {
 public:
  Both(te_stash_policy policy, int64_t device_pages, int64_t host_pages, int entries, std::vector<int32_t> counts)
      : cpu(StashPool::defaults(TE_DEVICE_CPU, 16384, device_pages, host_pages, policy), entries),
        cuda(StashPool::defaults(0, 16384, device_pages, host_pages, policy), entries),
        counts_(std::move(counts)),
        counters_(0, 1, int64_t(counts_.size())),
        stored_(size_t(entries)) {
    counters_.fill(counts_);
    cuda.pool.wait();
  }

  void store(int e, int64_t call) {
    TE_ASSERT_OK(cpu.store(e, &counts_[size_t(call)], call, nullptr));
    load_done_.hold(stores_);
    TE_ASSERT_OK(cuda.store(e, counters_.data() + call, call, stores_.stream));
    stored_[size_t(e)].record(stores_);
    store_done_.record(stores_);
  }
  void load(int e) {
    TE_ASSERT_OK(cpu.load(e, nullptr));
    begin_load(e);
    TE_ASSERT_OK(cuda.load(e, loads_.stream));
    load_done_.record(loads_);
  }
  void drop(int e) {
    TE_ASSERT_OK(te_stash_drop(cpu.pool.handle, cpu.entry[size_t(e)]->data(), nullptr));
    begin_load(e);
    TE_ASSERT_OK(te_stash_drop(cuda.pool.handle, cuda.entry[size_t(e)]->data(), loads_.stream));
    load_done_.record(loads_);
  }
  void evict(int e, int64_t low_water) {
    TE_ASSERT_OK(te_stash_evict(cpu.pool.handle, cpu.entry[size_t(e)]->data(), low_water, nullptr));
    store_done_.hold(loads_);
    TE_ASSERT_OK(te_stash_evict(cuda.pool.handle, cuda.entry[size_t(e)]->data(), low_water, loads_.stream));
    load_done_.record(loads_);
    load_done_.hold(stores_);
    store_done_.record(stores_);
  }

  void expect_same() const {
    cuda.pool.wait();
    EXPECT_EQ(numbers(cuda.pool.report()), numbers(cpu.pool.report()));
    for (size_t e = 0; e < cpu.entry.size(); ++e) {
      EXPECT_EQ(cuda.entry[e]->map(), cpu.entry[e]->map()) << "entry " << e;
      for (int m = 0; m < 2; ++m) EXPECT_TRUE(cuda.loaded(int(e), m) == cpu.loaded(int(e), m)) << "entry " << e;
    }
  }

  Side cpu, cuda;

 private:
  void begin_load(int e) {
    stored_[size_t(e)].hold(loads_);
    if (te_stash_load_waits(cuda.pool.handle)) store_done_.hold(loads_);
  }

  std::vector<int32_t> counts_;
  Buffer<int32_t> counters_;
  Stream stores_, loads_;
  std::vector<Event> stored_;
  Event store_done_, load_done_;
};

class StashStreams : public ::testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    if (GetParam() == TE_DEVICE_CPU) GTEST_SKIP() << "one order of calls, which test_stash_pages has";
  }

  static void run(te_stash_policy policy, int calls, int check_each) {
    constexpr int kEntries = 6;
    std::mt19937 random(31);
    std::vector<int32_t> counts;
    for (int i = 0; i < calls; ++i) counts.push_back(int32_t(random() % 16 == 0 ? Side::kMost : random() % 200));
    Both both(policy, 20, 12, kEntries, counts);
    std::vector<bool> full(kEntries, false);
    for (int call = 0; call < calls; ++call) {
      const int e = int(random() % kEntries);
      const uint32_t kind = random() % 16;
      if (!full[size_t(e)]) {
        both.store(e, call);
      } else if (kind == 0) {
        both.drop(e);
      } else {
        if (kind == 1 && policy != TE_STASH_BUMP) both.evict(e, 8);
        both.load(e);
      }
      full[size_t(e)] = !full[size_t(e)];
      if (call % check_each != check_each - 1) continue;
      both.expect_same();
      if (HasFailure()) FAIL() << "call " << call;
    }
    EXPECT_GT(both.cpu.pool.report().lost_groups, 0);
    EXPECT_GT(both.cpu.pool.report().spilled_bytes, 0);
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, StashStreams, ::testing::ValuesIn(testing::devices()), testing::device_name);

TEST_P(StashStreams, TwoStreamsMakeWhatOneOrderMakes) {
  run(TE_STASH_RING, 300, 50);
  run(TE_STASH_STACK, 150, 50);
}

TEST_P(StashStreams, LargeTwoStreamsForTenThousandCycles) { run(TE_STASH_RING, 20000, 500); }

TEST_P(StashStreams, LargeReplaysOfACaptureDoNotDrift) {
  constexpr int kEntries = 4;
  const auto options = [](int32_t device) { return StashPool::defaults(device, 16384, 20, 9); };
  Side cpu(options(TE_DEVICE_CPU), kEntries), cuda(options(0), kEntries);
  std::vector<int32_t> counts(kEntries);
  Buffer<int32_t> counters(0, 1, kEntries);
  te_stash_report* mailbox = nullptr;
  cuda_ok(cudaMallocHost(reinterpret_cast<void**>(&mailbox), sizeof(te_stash_report)));
  const auto calls = [](Side& side, const int32_t* counter, te_stash_report* report, te_stream stream) {
    const auto handle = side.pool.handle;
    TE_ASSERT_OK(te_stash_reset(handle, stream));
    for (int e = 0; e < 3; ++e) TE_ASSERT_OK(side.store(e, counter + e, e, stream));
    TE_ASSERT_OK(te_stash_evict(handle, side.entry[0]->data(), 6, stream));
    TE_ASSERT_OK(side.load(2, stream));
    TE_ASSERT_OK(side.store(3, counter + 3, 3, stream));
    TE_ASSERT_OK(side.load(3, stream));
    TE_ASSERT_OK(te_stash_drop(handle, side.entry[1]->data(), stream));
    TE_ASSERT_OK(side.load(0, stream));
    TE_ASSERT_OK(te_stash_read(handle, report, stream));
  };
  const Stream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  calls(cuda, counters.data(), mailbox, stream.stream);
  cuda_ok(cudaStreamEndCapture(stream, &graph));
  size_t nodes = 0;
  cuda_ok(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_EQ(nodes, 11u) << "calls are one node each";
  cuda_ok(cudaGraphInstantiate(&replay, graph, 0));
  std::mt19937 random(8);
  int64_t lost = 0, spilled = 0;
  for (int i = 0; i < 2000 && !HasFailure(); ++i) {
    for (auto& count : counts) count = int32_t(random() % 5 == 0 ? Side::kMost : random() % 250);
    counters.fill(counts);
    cuda_ok(cudaGraphLaunch(replay, stream));
    te_stash_report wanted{};
    calls(cpu, counts.data(), &wanted, nullptr);
    cuda_ok(cudaStreamSynchronize(stream));
    EXPECT_EQ(numbers(*mailbox), numbers(wanted)) << "replay " << i;
    EXPECT_EQ(mailbox->step, i + 1);
    lost += wanted.lost_groups;
    spilled += wanted.spilled_bytes;
    if (i % 20 != 0) continue;
    for (const int e : {0, 2, 3}) {
      for (int m = 0; m < 2; ++m) EXPECT_TRUE(cuda.loaded(e, m) == cpu.loaded(e, m)) << "replay " << i << ", " << e;
    }
  }
  EXPECT_GT(lost, 50);
  EXPECT_GT(spilled, 0);
  cuda_ok(cudaGraphExecDestroy(replay));
  cuda_ok(cudaGraphDestroy(graph));
  cuda_ok(cudaFreeHost(mailbox));
}

TEST_P(StashStreams, CapturesHaveNumbers) {
  const Stream stream;
  uint64_t number = 7;
  std::vector<uint64_t> numbers;
  for (int i = 0; i < 2; ++i) {
    TE_ASSERT_OK(te_stash_capture(stream.stream, &number));
    EXPECT_EQ(number, 0u);
    cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    TE_EXPECT_OK(te_stash_capture(stream.stream, &number));
    numbers.push_back(number);
    cudaGraph_t graph = nullptr;
    cuda_ok(cudaStreamEndCapture(stream, &graph));
    cuda_ok(cudaGraphDestroy(graph));
  }
  EXPECT_NE(numbers[0], 0u);
  EXPECT_NE(numbers[1], 0u);
  EXPECT_NE(numbers[0], numbers[1]);
}

TEST_P(StashStreams, LargeOffsetsBeyondTwoGiB) {
  constexpr int64_t kUnit = 7168, kMost = 470000, kBytes = kUnit * kMost;  // 3.1 GiB
  constexpr size_t kPage = 524288, kChunk = 61 * 1000 * 1000;              // no multiple of anything here
  const Bytes chunk = noise(kChunk, 3);
  const int64_t pages = (kBytes + int64_t(kPage) - 1) / int64_t(kPage);
  const StashPool pool(0, kPage, pages - 700, 700);
  const StashEntry entry(pool, pages);
  Buffer<int64_t> counter(0, 1, 1);
  const auto memory = std::make_unique<Buffer<unsigned char>>(0, 1, kBytes);
  for (int64_t at = 0; at < kBytes; at += int64_t(kChunk)) {
    const auto bytes = size_t(std::min<int64_t>(int64_t(kChunk), kBytes - at));
    cuda_ok(cudaMemcpy(memory->data() + at, chunk.data(), bytes, cudaMemcpyHostToDevice));
  }
  te_stash_member member{memory->data(), counter.data(), 8, TE_STASH_TAIL_ZERO, kUnit, kMost, 1, 0, 0, 0};
  for (const int64_t count : {kMost - 1, kMost}) {
    counter.fill({count});
    TE_ASSERT_OK(te_stash_store(pool.handle, &member, 1, entry.data(), 0, nullptr));
    EXPECT_GT(entry.head().host_pages, 690);
    memory->poison();
    TE_ASSERT_OK(te_stash_load(pool.handle, &member, 1, entry.data(), 0, nullptr));
    EXPECT_EQ(pool.report().flags, 0u);
    Bytes got(kChunk);
    for (int64_t at = 0; at < kBytes; at += int64_t(kChunk)) {
      const auto bytes = std::min<int64_t>(int64_t(kChunk), kBytes - at), live = count * kUnit - at;
      cuda_ok(cudaMemcpy(got.data(), memory->data() + at, size_t(bytes), cudaMemcpyDeviceToHost));
      const int64_t same = std::min(bytes, live);
      ASSERT_TRUE(std::equal(got.begin(), got.begin() + same, chunk.begin())) << "from byte " << at;
      ASSERT_EQ(std::count(got.begin() + same, got.begin() + bytes, 0), bytes - same) << "tail, from byte " << at;
    }
    const auto last = size_t(kUnit);  // the zeros of the tail are data again for the second round
    const int64_t at = kBytes - int64_t(last), in_chunk = at % int64_t(kChunk);
    cuda_ok(cudaMemcpy(memory->data() + at, chunk.data() + in_chunk, last, cudaMemcpyHostToDevice));
  }
}

}  // namespace
}  // namespace te

#endif
