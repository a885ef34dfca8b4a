// A policy of saved tensors for tests: whatever can be recomputed is not kept, and each time it is made is counted.
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <mutex>
#include <string>

#include "layer/layer.h"

namespace {

std::mutex mutex;  // backwards run on threads of their own
std::map<std::string, int> counts;

class MadeAgain final : public te_torch::SavedPolicy {
 public:
  te_torch::SaveMode decide(const te_torch::SavedInfo&, te_torch::SaveMode) const override {
    return te_torch::SaveMode::kRecompute;
  }
  void recomputed(const te_torch::SavedInfo& what) const override {
    const std::lock_guard<std::mutex> lock(mutex);
    ++counts[what.name];
  }
};

}  // namespace

PYBIND11_MODULE(recomputed, m) {
  using te_torch::layer::defaults;
  m.def("install", [] { defaults().saved = std::make_shared<MadeAgain>(); });
  m.def("remove", [] { defaults().saved = std::make_shared<te_torch::SavedPolicy>(); });
  m.def("counts", [] {
    const std::lock_guard<std::mutex> lock(mutex);
    return std::exchange(counts, {});
  });
}
