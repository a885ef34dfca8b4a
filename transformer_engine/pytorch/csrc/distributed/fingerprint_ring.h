// The memory in which a rank says what it does (fingerprints.h): one writer, and readers in other processes that never
// hold it up. Memory without a name, found by the other ranks of the same machine as /proc/<pid>/fd/<number>.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "distributed/agreement.h"

namespace te_torch {

struct Fingerprint {
  uint64_t all = 0;  // a hash of this one and of all before it
  SaidNumbers said{};
};

struct RingMemory;

class FingerprintRing {
 public:
  static constexpr uint64_t kRecords = 1024;  // the newest; an older one is known by `all` alone

  // This rank's own. RuntimeError where the machine has no memory for it.
  static std::unique_ptr<FingerprintRing> make();
  // Another rank's, by what its address() says; null where that is another machine's, or not there any more.
  static std::unique_ptr<FingerprintRing> open(const std::string& address);
  ~FingerprintRing();
  FingerprintRing(const FingerprintRing&) = delete;
  FingerprintRing& operator=(const FingerprintRing&) = delete;

  // For the other ranks: "pid descriptor cookie". The cookie tells this ring from any other.
  std::string address() const;

  // By one thread at a time.
  void post(const SaidNumbers& said);
  uint64_t posted() const;
  // Whether record `number`, from 1, is still there.
  bool read(uint64_t number, Fingerprint& found) const;

  // Which rings this rank compares: a hash of their cookies, the same on all ranks that have met each other; 0 before.
  void set_met(uint64_t met);
  uint64_t met() const;

 private:
  FingerprintRing(int descriptor, RingMemory* memory) : descriptor_(descriptor), memory_(memory) {}

  int descriptor_;
  RingMemory* memory_;
  uint64_t all_ = 0;
};

}  // namespace te_torch
