// Allocation of pinned memory, on CUDA and on the CPU, the accounts of its owners, and te_pinned_usage.
#include "core/pinned.h"

#include <map>
#include <memory>
#include <new>
#include <string>

#include "core/device.h"

namespace te::pinned {

namespace {

// Never destroyed: an arena that a captured graph copies to may outlive static destructors.
struct Accounts {
  std::mutex mutex;
  Account all;
  std::map<std::string, std::unique_ptr<Account>> of;
};

Accounts& accounts() {
  static auto* const kAccounts = new Accounts;
  return *kAccounts;
}

te_pinned_bytes usage_of(const char* owner) {
  Accounts& known = accounts();
  if (owner == nullptr) return known.all.bytes();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto found = known.of.find(owner);
  return found == known.of.end() ? te_pinned_bytes{} : found->second->bytes();
}

}  // namespace

Account& account_of(const char* owner) {
  Accounts& known = accounts();
  const std::lock_guard<std::mutex> lock(known.mutex);
  auto& account = known.of[owner];
  if (account == nullptr) account = std::make_unique<Account>(&known.all);
  return *account;
}

void* allocate(const char* what, int32_t device, size_t bytes) {
  if (device == TE_DEVICE_CPU) return ::operator new(bytes, std::align_val_t(kAlignment), std::nothrow);
#if defined(TE_WITH_CUDA)
  const DeviceGuard guard(device);
  const RelaxedCapture relaxed;
  void* data = nullptr;
  const cudaError_t status = cudaHostAlloc(&data, bytes, cudaHostAllocPortable);
  if (status == cudaSuccess) return data;
  cudaGetLastError();  // the caller gets nullptr; clear the error
  if (status == cudaErrorMemoryAllocation) return nullptr;
  check_cuda(status, concat(what, ": cudaHostAlloc").c_str());
  return nullptr;
#else
  no_cuda(what);
#endif
}

void release(int32_t device, void* data) {
  if (device == TE_DEVICE_CPU) {
    ::operator delete(data, std::align_val_t(kAlignment));
    return;
  }
#if defined(TE_WITH_CUDA)
  const RelaxedCapture relaxed;
  cudaFreeHost(data);
#endif
}

}  // namespace te::pinned

extern "C" te_status te_pinned_usage(const char* owner, te_pinned_bytes* out) {
  return te::c_guard([&] {
    te::check_place("te_pinned_usage", "out", out);
    *out = te::pinned::usage_of(owner);
  });
}
