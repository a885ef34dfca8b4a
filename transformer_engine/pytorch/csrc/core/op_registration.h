// The registration of an op, from one table: its schema, its kernels, its Meta and autograd functions, and its Python
// binding. TE_OP_REGISTRATION declares each op once; all registrations follow.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <string>

namespace te_torch {

// A table runs twice: for the dispatcher when the library is loaded, and for Python when the module is imported.
class OpRegistration {
 public:
  explicit OpRegistration(torch::Library& dispatcher) : dispatcher_(&dispatcher) {}
  explicit OpRegistration(pybind11::module_& python) : python_(&python) {}

  class Op {
   public:
    // For CPU and CUDA.
    template <class F>
    Op& kernel(F* f) {
      return on(c10::DispatchKey::CPU, f).on(c10::DispatchKey::CUDA, f);
    }
    // Shapes and dtypes, for tracers.
    template <class F>
    Op& meta(F* f) {
      return on(c10::DispatchKey::Meta, f);
    }
    // Implementations by other ops, without and with a recorded gradient.
    template <class F>
    Op& composite(F* f) {
      return on(c10::DispatchKey::CompositeExplicitAutograd, f);
    }
    // By other ops alone, which tracers and autograd see in its place.
    template <class F>
    Op& composite_implicit(F* f) {
      return on(c10::DispatchKey::CompositeImplicitAutograd, f);
    }
    template <class F>
    Op& autograd(F* f) {
      return on(c10::DispatchKey::Autograd, f);
    }
    template <class F>
    Op& autocast(F* f) {
      return on(c10::DispatchKey::AutocastCPU, f).on(c10::DispatchKey::AutocastCUDA, f);
    }
    // For a chain of layers: composite, autograd and autocast come from layer/op_registration.h.
    template <class Chain>
    Op& chain() {
      return composite(&Chain::composite).autograd(&Chain::autograd).autocast(&Chain::autocast);
    }
    // The Python function of the op's name; it runs without the GIL.
    template <class F, class... Extra>
    Op& python(F&& f, const Extra&... extra) {
      registration_.python(name_.c_str(), std::forward<F>(f), extra...);
      return *this;
    }

   private:
    friend class OpRegistration;
    Op(OpRegistration& registration, const char* schema)
        : registration_(registration), name_(schema, std::string_view(schema).find('(')) {}

    template <class F>
    Op& on(c10::DispatchKey key, F* f) {
      if (registration_.dispatcher_ != nullptr) registration_.dispatcher_->impl(name_.c_str(), torch::dispatch(key, f));
      return *this;
    }

    OpRegistration& registration_;
    std::string name_;
  };

  Op op(const char* schema) {
    if (dispatcher_ != nullptr) dispatcher_->def(schema);
    return Op(*this, schema);
  }

  // Registers a Python function without an op.
  template <class F, class... Extra>
  void python(const char* name, F&& f, const Extra&... extra) {
    if (python_ != nullptr) python_->def(name, torch::wrap_pybind_function_no_gil(std::forward<F>(f)), extra...);
  }

 private:
  torch::Library* dispatcher_ = nullptr;
  pybind11::module_* python_ = nullptr;
};

// Registers a table with the dispatcher while the library is loaded.
class DispatcherRegistration {
 public:
  DispatcherRegistration(void (*table)(OpRegistration&), const char* file, uint32_t line)
      : library_(torch::Library::FRAGMENT, "te", std::nullopt, file, line) {
    OpRegistration ops(library_);
    table(ops);
  }

 private:
  torch::Library library_;
};

// The body fills `ops`. Defines register_<name>, which module.cpp lists.
#define TE_OP_REGISTRATION(name, ops)                                                                  \
  static void name##_ops(OpRegistration& ops);                                                         \
  static const DispatcherRegistration name##_in_dispatcher(&name##_ops, __FILE__, uint32_t(__LINE__)); \
  void register_##name(pybind11::module_& m) {                                                         \
    OpRegistration python(m);                                                                          \
    name##_ops(python);                                                                                \
  }                                                                                                    \
  static void name##_ops(OpRegistration& ops)

}  // namespace te_torch
