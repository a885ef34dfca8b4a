// Costs of kinds of devices, from which plans are made. An entry is the first output of `benchmarks/bench_overlap.py`
// between devices of that kind; "auto" overlaps on such devices alone.
#include <cmath>
#include <initializer_list>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "core/error.h"
#include "ops/comm/plan.h"

namespace te::comm {

namespace {

struct Entry {
  const char* kind;
  te_comm_costs costs;
};

constexpr std::initializer_list<Entry> kMeasured = {
    {"NVIDIA H200",
     {.flops_per_us = 7.22263e+08,
      .link_bytes_per_us = 381370,
      .serial_bytes_per_us = 381300,
      .memory_bytes_per_us = 3.62871e+06,
      .launch_us = 4.4736,
      .hop_us = 32.4352,
      .beside = 1,
      .units = 132,
      .tile_rows = 128,
      .tile_cols = 256,
      .least_gathered = 2048,
      .least_scattered = 2048}},
};

std::mutex& overrides_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::map<std::string, te_comm_costs>& overrides() {
  static std::map<std::string, te_comm_costs> costs;
  return costs;
}

std::optional<te_comm_costs> costs_of(const std::string& kind) {
  {
    const std::lock_guard<std::mutex> guard(overrides_mutex());
    const auto found = overrides().find(kind);
    if (found != overrides().end()) return found->second;
  }
  for (const Entry& entry : kMeasured) {
    if (kind == entry.kind) return entry.costs;
  }
  return std::nullopt;
}

}  // namespace

void check_costs(const char* op, const char* argument, const te_comm_costs& c) {
  const auto positive = [&](const char* name, double value) {
    if (value > 0 && value < HUGE_VAL) return;
    bad_argument(op, concat(argument, ".", name).c_str(), value, "a number > 0");
  };
  positive("flops_per_us", c.flops_per_us);
  positive("link_bytes_per_us", c.link_bytes_per_us);
  positive("serial_bytes_per_us", c.serial_bytes_per_us);
  positive("memory_bytes_per_us", c.memory_bytes_per_us);
  positive("launch_us", c.launch_us);
  positive("hop_us", c.hop_us);
  positive("beside", c.beside);
  positive("units", c.units);
  positive("tile_rows", c.tile_rows);
  positive("tile_cols", c.tile_cols);
  const auto rows = [&](const char* name, int32_t value) {
    if (value < 0) bad_argument(op, concat(argument, ".", name).c_str(), value, "a number >= 0");
  };
  rows("least_gathered", c.least_gathered);
  rows("least_scattered", c.least_scattered);
}

}  // namespace te::comm

extern "C" {

te_comm_costs te_comm_costs_h200(void) {
  return {.flops_per_us = 690e6,
          .link_bytes_per_us = 350e3,
          .serial_bytes_per_us = 350e3,
          .memory_bytes_per_us = 4100e3,
          .launch_us = 3,
          .hop_us = 5,
          .beside = 1,
          .units = 132,
          .tile_rows = 128,
          .tile_cols = 256,
          .least_gathered = 0,
          .least_scattered = 0};
}

te_status te_comm_costs_of(const char* kind, te_comm_costs* costs, int32_t* known) {
  return te::c_guard([&] {
    const char* op = "te_comm_costs_of";
    if (kind == nullptr) te::bad_argument(op, "kind", "NULL", "a device's name");
    te::check_place(op, "costs", costs);
    te::check_place(op, "known", known);
    const auto found = te::comm::costs_of(kind);
    *known = found.has_value();
    if (found) *costs = *found;
  });
}

te_status te_comm_lend_costs(const char* kind, const te_comm_costs* costs) {
  return te::c_guard([&] {
    const char* op = "te_comm_lend_costs";
    if (kind == nullptr) te::bad_argument(op, "kind", "NULL", "a device's name");
    if (costs != nullptr) te::comm::check_costs(op, "costs", *costs);
    const std::lock_guard<std::mutex> guard(te::comm::overrides_mutex());
    te::comm::overrides().erase(kind);
    if (costs != nullptr) te::comm::overrides().emplace(kind, *costs);
  });
}

}  // extern "C"
