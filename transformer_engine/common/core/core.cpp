// State of the library that belongs to no op: last error, dtype table, thread-pool hook, library handles, device
// properties.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

#include "core/device.h"
#include "core/dtype.h"
#include "core/error.h"
#include "core/parallel_for.h"

namespace te {

namespace {

thread_local char last_error[1024] = "";

thread_local const char* noted_path = nullptr;
thread_local const char* noted_reason = nullptr;

std::atomic<te_parallel_for_hook> parallel_hook{nullptr};

struct LibraryNames {
  const char* name;
  std::vector<const char*> sonames;  // most specific first: the major version the headers were written for
};

const LibraryNames& names_of(const char* name) {
  if (name == nullptr) name = "NULL";
  static const LibraryNames kLibraries[] = {
      {"cublasLt", {"libcublasLt.so.13", "libcublasLt.so.12"}},
      {"nccl", {"libnccl.so.2"}},
      {"cuda", {"libcuda.so.1"}},
  };
  for (const auto& library : kLibraries) {
    if (std::string(library.name) == name) return library;
  }
  throw Error(TE_INVALID_ARGUMENT,
              concat("te_probe_library: argument 'name' is '", name, "', wanted one of cublasLt, nccl, cuda."));
}

}  // namespace

void set_last_error(const char* message) noexcept { std::snprintf(last_error, sizeof last_error, "%s", message); }

void run_blocks(int64_t n_blocks, void (*body)(void*, int64_t), void* context) {
  const te_parallel_for_hook hook = parallel_hook.load(std::memory_order_acquire);
  if (hook != nullptr && n_blocks > 1) {
    hook(n_blocks, body, context);
    return;
  }
  for (int64_t block = 0; block < n_blocks; ++block) body(context, block);
}

void no_cuda(const char* op) {
  throw Error(TE_NOT_IMPLEMENTED,
              concat(op,
                     ": got a CUDA tensor, but this build has no CUDA kernels; rebuild where nvcc is found "
                     "(TE_WITH_CUDA=ON prints why it is not), or move the tensor to the CPU."));
}

void* open_library(const char* name) {
  static std::mutex mutex;
  static std::map<std::string, void*> handles;
  const LibraryNames& library = names_of(name);
  const std::lock_guard<std::mutex> lock(mutex);
  void*& handle = handles[library.name];
  if (handle != nullptr) return handle;
  std::string tried;
  const auto attempt = [&](const std::string& path, int flags) {
    if (handle != nullptr) return;
    handle = dlopen(path.c_str(), flags | RTLD_LAZY | RTLD_LOCAL);
    if (handle == nullptr && !(flags & RTLD_NOLOAD)) tried += concat("\n  ", path, ": ", dlerror());
  };
  for (const char* soname : library.sonames) attempt(soname, RTLD_NOLOAD);
  for (const char* soname : library.sonames) attempt(soname, 0);
  const char* home = std::getenv("CUDA_HOME");
  for (const char* soname : library.sonames) {
    attempt(concat(home != nullptr ? home : "/usr/local/cuda", "/lib64/", soname), 0);
  }
  if (handle == nullptr) {
    throw Error(TE_RUNTIME_ERROR, concat("cannot open the ", name, " library; tried:", tried,
                                         "\nImport torch first (its CUDA build carries it), or set CUDA_HOME."));
  }
  return handle;
}

void* library_symbol(const char* library, const char* symbol) {
  void* found = dlsym(open_library(library), symbol);
  if (found == nullptr) {
    throw Error(TE_RUNTIME_ERROR, concat("the ", library, " library here has no symbol ", symbol,
                                         "; it is older than this build expects."));
  }
  return found;
}

const te_device_properties& device_properties(int32_t device) {
#if defined(TE_WITH_CUDA)
  static std::mutex mutex;
  static std::map<int32_t, te_device_properties> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  const auto attribute = [device](cudaDeviceAttr which) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, device), "te_get_device_properties");
    return value;
  };
  te_device_properties p{};
  p.sm_count = attribute(cudaDevAttrMultiProcessorCount);
  p.capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
  p.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  p.shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return known.emplace(device, p).first->second;
#else
  (void)device;
  no_cuda("te_get_device_properties");
#endif
}

size_t captured_events(te_stream stream, void** events, size_t capacity) {
#if defined(TE_WITH_CUDA)
  const char* op = "te_captured_events";
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamGetCaptureInfo(cudaStream_t(stream), &status, &id, &graph), op);
  if (status != cudaStreamCaptureStatusActive) return 0;
  size_t n_nodes = 0;
  check_cuda(cudaGraphGetNodes(graph, nullptr, &n_nodes), op);
  std::vector<cudaGraphNode_t> nodes(n_nodes);
  check_cuda(cudaGraphGetNodes(graph, nodes.data(), &n_nodes), op);
  size_t found = 0;
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type;
    const cudaError_t known = cudaGraphNodeGetType(node, &type);
    if (known == cudaErrorUnknown) {  // stream memory operations, which the runtime has no name for
      cudaGetLastError();
      continue;
    }
    check_cuda(known, op);
    if (type != cudaGraphNodeTypeEventRecord) continue;
    cudaEvent_t event = nullptr;
    check_cuda(cudaGraphEventRecordNodeGetEvent(node, &event), op);
    if (found < capacity) events[found] = event;
    ++found;
  }
  return found;
#else
  (void)stream, (void)events, (void)capacity;
  throw Error(TE_NOT_IMPLEMENTED, "te_captured_events: this build has no CUDA, and a CPU captures nothing.");
#endif
}

}  // namespace te

extern "C" {

const char* te_last_error(void) { return te::last_error; }

void te_note_path(const char* path, const char* why_not_faster) {
  te::noted_path = path;
  te::noted_reason = why_not_faster;
}

void te_noted_path(const char** path, const char** why_not_faster) {
  *path = te::noted_path;
  *why_not_faster = te::noted_reason;
}

const char* te_version(void) { return TE_VERSION; }

const char* te_dtype_name(te_dtype dtype) {
  switch (dtype) {
#define TE_DTYPE_NAME(id, value, name, bytes) \
  case id:                                    \
    return name;
    TE_DTYPE_TABLE(TE_DTYPE_NAME)
#undef TE_DTYPE_NAME
  }
  return nullptr;
}

size_t te_dtype_bytes(te_dtype dtype) {
  switch (dtype) {
#define TE_DTYPE_BYTES(id, value, name, bytes) \
  case id:                                     \
    return bytes;
    TE_DTYPE_TABLE(TE_DTYPE_BYTES)
#undef TE_DTYPE_BYTES
  }
  return 0;
}

void te_set_parallel_for(te_parallel_for_hook hook) { te::parallel_hook.store(hook, std::memory_order_release); }

int te_built_with_cuda(void) {
#if defined(TE_WITH_CUDA)
  return 1;
#else
  return 0;
#endif
}

te_status te_get_device_properties(int32_t device, te_device_properties* out) {
  return te::c_guard([&] { *out = te::device_properties(device); });
}

te_status te_probe_library(const char* name) {
  return te::c_guard([&] { te::open_library(name); });
}

te_status te_captured_events(te_stream stream, void** events, size_t capacity, size_t* count) {
  return te::c_guard([&] {
    if (count == nullptr || (events == nullptr && capacity != 0)) {
      throw te::Error(TE_INVALID_ARGUMENT,
                      te::concat("te_captured_events: argument '", count == nullptr ? "count" : "events",
                                 "' is NULL, wanted an address; 'events' may be NULL only with a capacity of 0."));
    }
    *count = te::captured_events(stream, events, capacity);
  });
}

}  // extern "C"
