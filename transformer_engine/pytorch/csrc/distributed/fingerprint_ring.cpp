// See fingerprint_ring.h. A record is a seqlock: a reader reads its number before and after the data.
#include "distributed/fingerprint_ring.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <sstream>

namespace te_torch {

namespace {

constexpr uint64_t kMagic = 0x74656669'6e676572;  // "tefinger"

struct Record {
  std::atomic<uint64_t> number, all;
  std::array<std::atomic<int64_t>, kCallNumbers> call;
};

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15;
  return hash ^ (hash >> 29);
}

}  // namespace

struct RingMemory {
  std::atomic<uint64_t> magic, cookie, met, posted;
  std::array<Record, FingerprintRing::kRecords> records;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes share these words");

namespace {

RingMemory* map(int descriptor, int protection) {
  void* const memory = mmap(nullptr, sizeof(RingMemory), protection, MAP_SHARED, descriptor, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<RingMemory*>(memory);
}

uint64_t random_cookie() {
  std::random_device device;
  return (uint64_t(device()) << 32 | device()) | 1;
}

}  // namespace

std::unique_ptr<FingerprintRing> FingerprintRing::make() {
  const int descriptor = memfd_create("te_fingerprints", MFD_CLOEXEC);
  RingMemory* memory = nullptr;
  if (descriptor >= 0 && ftruncate(descriptor, sizeof(RingMemory)) == 0)
    memory = map(descriptor, PROT_READ | PROT_WRITE);
  if (memory == nullptr) {
    const int error = errno;
    if (descriptor >= 0) close(descriptor);
    TORCH_CHECK(false, "no ", sizeof(RingMemory),
                " bytes of shared memory to compare the calls of the ranks: ", std::strerror(error));
  }
  memory->cookie.store(random_cookie());
  memory->magic.store(kMagic);
  return std::unique_ptr<FingerprintRing>(new FingerprintRing(descriptor, memory));
}

std::unique_ptr<FingerprintRing> FingerprintRing::open(const std::string& address) {
  std::istringstream fields(address);
  uint64_t pid = 0, number = 0, cookie = 0;
  if (!(fields >> pid >> number >> cookie)) return nullptr;
  std::ostringstream path;
  path << "/proc/" << pid << "/fd/" << number;
  const int descriptor = ::open(path.str().c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return nullptr;
  struct stat file {};
  const bool sized = fstat(descriptor, &file) == 0 && S_ISREG(file.st_mode) && file.st_size == sizeof(RingMemory);
  RingMemory* const memory = sized ? map(descriptor, PROT_READ) : nullptr;
  close(descriptor);
  if (memory == nullptr) return nullptr;
  std::unique_ptr<FingerprintRing> ring(new FingerprintRing(-1, memory));
  return memory->magic.load() == kMagic && memory->cookie.load() == cookie ? std::move(ring) : nullptr;
}

FingerprintRing::~FingerprintRing() {
  munmap(memory_, sizeof(RingMemory));
  if (descriptor_ >= 0) close(descriptor_);
}

std::string FingerprintRing::address() const {
  std::ostringstream fields;
  fields << getpid() << ' ' << descriptor_ << ' ' << memory_->cookie.load();
  return fields.str();
}

void FingerprintRing::post(const CallNumbers& call) {
  for (const int64_t number : call) all_ = mix(all_, uint64_t(number));
  const uint64_t number = memory_->posted.load(std::memory_order_relaxed) + 1;
  Record& record = memory_->records[number % kRecords];
  record.number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  record.all.store(all_, std::memory_order_relaxed);
  for (size_t i = 0; i < call.size(); ++i) record.call[i].store(call[i], std::memory_order_relaxed);
  record.number.store(number, std::memory_order_release);
  memory_->posted.store(number, std::memory_order_release);
}

uint64_t FingerprintRing::posted() const { return memory_->posted.load(std::memory_order_acquire); }

bool FingerprintRing::read(uint64_t number, Fingerprint& found) const {
  const Record& record = memory_->records[number % kRecords];
  if (record.number.load(std::memory_order_acquire) != number) return false;
  found.all = record.all.load(std::memory_order_relaxed);
  for (size_t i = 0; i < found.call.size(); ++i) found.call[i] = record.call[i].load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  return record.number.load(std::memory_order_relaxed) == number;
}

void FingerprintRing::set_met(uint64_t met) { memory_->met.store(met, std::memory_order_release); }
uint64_t FingerprintRing::met() const { return memory_->met.load(std::memory_order_acquire); }

}  // namespace te_torch
