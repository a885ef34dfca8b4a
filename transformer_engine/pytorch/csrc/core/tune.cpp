// The binding of te.tune: notes the GEMM problems of a run, and gives the engine's keys, candidates and choices to
// Python, which times them. In Python a key is a dict of integers, a choice 72 bytes.
#include "core/tune.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "core/common.h"
#include "core/threads.h"

namespace te_torch {

namespace tuning {

namespace {

namespace py = pybind11;

std::atomic<int64_t> tuner{0};  // number of the thread whose GEMMs are noted
std::mutex mutex;
std::vector<te_gemm_key> noted;  // without duplicates, in the order of their first calls

// clang-format off
#define TE_KEY_FIELDS(X)                                                                     \
  X(rows) X(cols) X(depth) X(a_pitch) X(b_pitch) X(d_pitch) X(aux_pitch) X(layout)           \
  X(epilogue) X(accumulate) X(tf32) X(dtype) X(b_dtype) X(d_dtype) X(bias_dtype)             \
  X(a_scaling) X(b_scaling) X(fast_accumulation) X(a_alignment) X(b_alignment)               \
  X(d_alignment) X(aux_alignment) X(device)
// clang-format on

py::dict dict_of(const te_gemm_key& key) {
  py::dict fields;
#define TE_PUT(name) fields[#name] = int64_t(key.name);
  TE_KEY_FIELDS(TE_PUT)
#undef TE_PUT
  return fields;
}

te_gemm_key key_of(const py::dict& fields) {
  te_gemm_key key{};
#define TE_TAKE(name) key.name = fields[#name].cast<decltype(key.name)>();
  TE_KEY_FIELDS(TE_TAKE)
#undef TE_TAKE
  return key;
}

py::bytes bytes_of(const te_gemm_choice& choice) {
  return py::bytes(reinterpret_cast<const char*>(&choice), sizeof choice);
}

te_gemm_choice choice_of(const std::string& bytes) {
  te_gemm_choice choice;
  TORCH_CHECK_VALUE(bytes.size() == sizeof choice, "tune: a choice has ", bytes.size(), " bytes, wanted ",
                    sizeof choice, ".");
  std::memcpy(&choice, bytes.data(), sizeof choice);
  return choice;
}

void start() {
  const std::lock_guard<std::mutex> lock(mutex);
  TORCH_CHECK(tuner == 0, "tune: another thread is tuning; one te.tune at a time.");
  noted.clear();
  tuner = this_thread();
}

std::vector<te_gemm_key> stop() {
  const std::lock_guard<std::mutex> lock(mutex);
  tuner = 0;
  return std::move(noted);
}

std::vector<te_gemm_choice> candidates(const te_gemm_key& key, int32_t most) {
  std::vector<te_gemm_choice> choices(static_cast<size_t>(most));
  int32_t found = 0;
  check(te_gemm_candidates(&key, most, choices.data(), &found));
  choices.resize(size_t(found));
  return choices;
}

void try_choice(const te_gemm_key& key, const te_gemm_choice& choice, const std::vector<OptionalTensor>& operands,
                const Tensor& workspace, int32_t repeats) {
  const auto address = [&](size_t i) {
    return i < operands.size() && operands[i].has_value() ? operands[i]->data_ptr() : nullptr;
  };
  const te_gemm_operands pointers{address(0), address(1), address(2), address(3), address(4), address(5), address(6)};
  check(te_gemm_try(&key, &choice, &pointers, repeats, workspace.data_ptr(), size_t(workspace.numel()),
                    current_stream(workspace)));
}

}  // namespace

bool looks_on() {
  const int64_t thread = tuner.load(std::memory_order_relaxed);
  return thread != 0 && calling_thread() == thread;
}

void meet(const te_gemm_problem& problem) {
  if (!looks_on()) return;
  te_gemm_key key;
  if (te_gemm_key_of(&problem, &key) != TE_SUCCESS) return;  // an empty GEMM
  const std::lock_guard<std::mutex> lock(mutex);
  for (const te_gemm_key& other : noted) {
    if (std::memcmp(&other, &key, sizeof key) == 0) return;
  }
  if (tuner != 0) noted.push_back(key);
}

}  // namespace tuning

void register_tune(pybind11::module_& m) {
  using namespace tuning;
  m.def("gemm_key_fields", [] {
    const te_gemm_key none{};
    return dict_of(none);
  });
  m.def("tune_start", torch::wrap_pybind_function(start));
  m.def("tune_stop", [] {
    py::list keys;
    for (const te_gemm_key& key : stop()) keys.append(dict_of(key));
    return keys;
  });
  m.def("gemm_candidates", torch::wrap_pybind_function([](const py::dict& key, int32_t most) {
          py::list choices;
          for (const te_gemm_choice& choice : candidates(key_of(key), most)) choices.append(bytes_of(choice));
          return choices;
        }));
  m.def("gemm_choose",
        torch::wrap_pybind_function([](const std::vector<py::dict>& keys, const std::vector<py::bytes>& choices) {
          std::vector<te_gemm_key> of_keys;
          std::vector<te_gemm_choice> of_choices;
          for (const py::dict& key : keys) of_keys.push_back(key_of(key));
          for (const py::bytes& choice : choices) of_choices.push_back(choice_of(choice));
          TORCH_CHECK_VALUE(keys.size() == choices.size(), "tune: ", keys.size(), " keys and ", choices.size(),
                            " choices.");
          check(te_gemm_choose(of_keys.data(), of_choices.data(), int32_t(of_keys.size())));
        }));
  m.def("gemm_forget_choices", torch::wrap_pybind_function([] { check(te_gemm_forget_choices()); }));
  m.def("gemm_try", torch::wrap_pybind_function([](const py::dict& key, const py::bytes& choice,
                                                   const std::vector<OptionalTensor>& operands, const Tensor& workspace,
                                                   int32_t repeats) {
          const te_gemm_key k = key_of(key);
          const te_gemm_choice c = choice_of(choice);
          const py::gil_scoped_release no_gil;
          try_choice(k, c, operands, workspace, repeats);
        }));
  m.def("gemm_library_version", torch::wrap_pybind_function([] {
          int64_t version = 0;
          check(te_gemm_library_version(&version));
          return version;
        }));
}

}  // namespace te_torch
