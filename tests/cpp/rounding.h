// Half a unit of a dtype, relative and at the bottom of its range: what one rounding may cost.
#pragma once

#include "core/dtype.h"

namespace te::testing {

template <class T>
struct Rounding;
template <>
struct Rounding<float> {
  static constexpr double kRelative = 0x1p-24, kAbsolute = 0x1p-150;
};
template <>
struct Rounding<fp16> {
  static constexpr double kRelative = 0x1p-11, kAbsolute = 0x1p-25;
};
template <>
struct Rounding<bf16> {
  static constexpr double kRelative = 0x1p-8, kAbsolute = 0x1p-134;
};

}  // namespace te::testing
