// Errors of the engine: one exception type, which the C boundary turns into a status and a thread-local message. Checks
// of pointer arguments, and names of arguments for messages.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "transformer_engine/transformer_engine.h"

namespace te {

class Error : public std::runtime_error {
 public:
  Error(te_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  te_status status() const { return status_; }

 private:
  te_status status_;
};

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// The sentence of a refused argument: op, argument, got, wanted, and the fix if it is not plain.
template <class Got, class Wanted>
[[noreturn]] void bad_argument(const char* op, const char* argument, const Got& got, const Wanted& wanted) {
  throw Error(TE_INVALID_ARGUMENT, concat(op, ": argument '", argument, "' is ", got, ", wanted ", wanted, "."));
}

// Object handles and addresses for results, which must not be NULL.
template <class T>
T& object(const char* op, const char* argument, T* pointer) {
  if (pointer == nullptr) bad_argument(op, argument, "NULL", "one that was created");
  return *pointer;
}
inline void check_place(const char* op, const char* argument, const void* place) {
  if (place == nullptr) bad_argument(op, argument, "NULL", "a place for the result");
}

// The name of an element of a list argument. For errors alone: it allocates.
inline std::string element_name(const char* list, int32_t i, const char* part = "") {
  return concat(list, "[", i, "]", part);
}

void set_last_error(const char* message) noexcept;  // keeps the first 1023 bytes

// Wraps every te_* body that can fail.
template <class Body>
te_status c_guard(Body&& body) noexcept {
  try {
    body();
    return TE_SUCCESS;
  } catch (const Error& e) {
    set_last_error(e.what());
    return e.status();
  } catch (const std::exception& e) {
    set_last_error(e.what());
    return TE_RUNTIME_ERROR;
  } catch (...) {
    set_last_error("unknown exception in the transformer_engine core");
    return TE_RUNTIME_ERROR;
  }
}

}  // namespace te
