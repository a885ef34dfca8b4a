// The registration of an op, from one table: its schema, its kernels, its Meta and autograd functions, and its Python
// binding. TE_OP_REGISTRATION declares each op once; all registrations follow.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <string>

namespace te_torch {

// A table is read twice: when the library is loaded, for the dispatcher, and by the module's import, for Python.
class OpRegistration {
 public:
  explicit OpRegistration(torch::Library& dispatcher) : dispatcher_(&dispatcher) {}
  explicit OpRegistration(pybind11::module_& python) : python_(&python) {}

  class Op {
   public:
    // On the CPU and on CUDA.
    template <class F>
    Op& kernel(F* f) {
      return on(c10::DispatchKey::CPU, f).on(c10::DispatchKey::CUDA, f);
    }
    // Shapes and dtypes alone, for tracers.
    template <class F>
    Op& meta(F* f) {
      return on(c10::DispatchKey::Meta, f);
    }
    // By other ops, where no gradient is recorded; and where one is.
    template <class F>
    Op& composite(F* f) {
      return on(c10::DispatchKey::CompositeExplicitAutograd, f);
    }
    template <class F>
    Op& autograd(F* f) {
      return on(c10::DispatchKey::Autograd, f);
    }
    template <class F>
    Op& autocast(F* f) {
      return on(c10::DispatchKey::AutocastCPU, f).on(c10::DispatchKey::AutocastCUDA, f);
    }
    // A chain of layers, whose faces (composite, autograd, autocast) layer/op_registration.h makes.
    template <class Chain>
    Op& chain() {
      return composite(&Chain::composite).autograd(&Chain::autograd).autocast(&Chain::autocast);
    }
    // What Python calls by the op's name, without the GIL.
    template <class F, class... Extra>
    Op& python(F&& f, const Extra&... extra) {
      faces_.python(name_.c_str(), std::forward<F>(f), extra...);
      return *this;
    }

   private:
    friend class OpRegistration;
    Op(OpRegistration& faces, const char* schema) : faces_(faces), name_(schema, std::string_view(schema).find('(')) {}

    template <class F>
    Op& on(c10::DispatchKey key, F* f) {
      if (faces_.dispatcher_ != nullptr) faces_.dispatcher_->impl(name_.c_str(), torch::dispatch(key, f));
      return *this;
    }

    OpRegistration& faces_;
    std::string name_;
  };

  Op op(const char* schema) {
    if (dispatcher_ != nullptr) dispatcher_->def(schema);
    return Op(*this, schema);
  }

  // What Python calls that is no op.
  template <class F, class... Extra>
  void python(const char* name, F&& f, const Extra&... extra) {
    if (python_ != nullptr) python_->def(name, torch::wrap_pybind_function_no_gil(std::forward<F>(f)), extra...);
  }

 private:
  torch::Library* dispatcher_ = nullptr;
  pybind11::module_* python_ = nullptr;
};

// Held as long as the library is loaded.
class DispatcherFaces {
 public:
  DispatcherFaces(void (*table)(OpRegistration&), const char* file, uint32_t line)
      : library_(torch::Library::FRAGMENT, "te", std::nullopt, file, line) {
    OpRegistration faces(library_);
    table(faces);
  }

 private:
  torch::Library library_;
};

// The body fills `faces`; makes register_<room>, which module.cpp lists.
#define TE_OP_REGISTRATION(room, faces)                                                           \
  static void room##_faces(OpRegistration& faces);                                                \
  static const DispatcherFaces room##_in_dispatcher(&room##_faces, __FILE__, uint32_t(__LINE__)); \
  void register_##room(pybind11::module_& m) {                                                    \
    OpRegistration python(m);                                                                     \
    room##_faces(python);                                                                         \
  }                                                                                               \
  static void room##_faces(OpRegistration& faces)

}  // namespace te_torch
