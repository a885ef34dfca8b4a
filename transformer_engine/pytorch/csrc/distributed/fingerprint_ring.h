// Shared memory for a rank's fingerprints (fingerprints.h): one writer, and readers in other processes that never block
// it. It has no name; other ranks of the same machine open it as /proc/<pid>/fd/<number>.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "distributed/collective_call.h"

namespace te_torch {

struct Fingerprint {
  uint64_t all = 0;  // a hash of this call and all before it
  CallNumbers call{};
};

struct RingMemory;

class FingerprintRing {
 public:
  static constexpr uint64_t kRecords = 1024;  // the newest ones; the hash `all` covers older ones

  // This rank's ring. RuntimeError where the machine has no memory for it.
  static std::unique_ptr<FingerprintRing> make();
  // Another rank's ring, by its address(); null where it is on another machine or gone.
  static std::unique_ptr<FingerprintRing> open(const std::string& address);
  ~FingerprintRing();
  FingerprintRing(const FingerprintRing&) = delete;
  FingerprintRing& operator=(const FingerprintRing&) = delete;

  // For the other ranks: "pid descriptor cookie". The cookie is unique to this ring.
  std::string address() const;

  // Called by one thread at a time.
  void post(const CallNumbers& call);
  uint64_t posted() const;
  // Reads record `number`, from 1; false where it was overwritten.
  bool read(uint64_t number, Fingerprint& found) const;

  // A hash of the cookies of all rings of the group, 0 until this rank has found them. Equal on all ranks that compare
  // each other.
  void set_met(uint64_t met);
  uint64_t met() const;

 private:
  FingerprintRing(int descriptor, RingMemory* memory) : descriptor_(descriptor), memory_(memory) {}

  int descriptor_;
  RingMemory* memory_;
  uint64_t all_ = 0;
};

}  // namespace te_torch
