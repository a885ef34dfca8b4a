// How the core fails: one exception type, turned into a status and a thread-local message at the C boundary, once.
// Nothing here prints or aborts.
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

// The house's sentence: op, argument, what was got, what was wanted, and (when it is not plain) the fix.
template <class Got, class Wanted>
[[noreturn]] void bad_argument(const char* op, const char* argument, const Got& got, const Wanted& wanted) {
  throw Error(TE_INVALID_ARGUMENT, concat(op, ": argument '", argument, "' is ", got, ", wanted ", wanted, "."));
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
