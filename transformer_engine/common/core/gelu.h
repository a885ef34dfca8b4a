// GELU by its tanh approximation, value and slope, for the activation op and for the epilogues of gemm on the CPU. x *
// sigmoid(2 u) with u = sqrt(2/pi) (x + 0.044715 x^3) equals x/2 (1 + tanh u) without the cancellation of its left
// tail.
#pragma once

#include "core/dtype.h"

namespace te {

template <class Real>
struct GeluAt {
  Real value, slope;
};

// Exp: exponential and reciprocal of Real.
template <class Exp, class Real>
TE_HOST_DEVICE GeluAt<Real> gelu(Real x) {
  constexpr Real kTwoSqrt2OverPi = Real(1.5957691216057308), kCubic = Real(0.044715);
  constexpr Real kOne = Real(1), kThree = Real(3);
  const Real x2 = x * x;
  const Real s = Exp::reciprocal(kOne + Exp::exp(-(kTwoSqrt2OverPi * x * (kOne + kCubic * x2))));
  const Real du = kTwoSqrt2OverPi * (kOne + kThree * kCubic * x2);
  return {x * s, s + (s == Real(0) || s == kOne ? Real(0) : x * s * (kOne - s) * du)};  // avoids 0 * Inf for large |x|
}

}  // namespace te
