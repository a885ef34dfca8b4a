// The activations: value and derivative, shared by the CPU and the CUDA path, and their table. To add an activation:
// write its struct, add its row. `Exp` is the path's exponential.
#pragma once

#include "core/dtype.h"
#include "core/gelu.h"
#include "transformer_engine/activation.h"

namespace te::activation {

using Params = te_activation_params;

struct ValueAndSlope {
  float value;
  float slope;
};

template <class Exp>
TE_HOST_DEVICE float sigmoid(float x) {
  return Exp::reciprocal(1.f + Exp::exp(-x));
}

struct Gelu {
  template <class Exp>
  TE_HOST_DEVICE static ValueAndSlope at(float x) {
    const auto [value, slope] = gelu<Exp>(x);
    return {value, slope};
  }
};

struct Qgelu {
  template <class Exp>
  TE_HOST_DEVICE static ValueAndSlope at(float x) {
    const float s = sigmoid<Exp>(1.702f * x);
    return {x * s, s * (1.f + 1.702f * x * (1.f - s))};
  }
};

struct Relu {
  template <class Exp>
  TE_HOST_DEVICE static ValueAndSlope at(float x) {
    return {x <= 0.f ? 0.f : x, x <= 0.f ? 0.f : 1.f};  // NaN passes
  }
};

struct Srelu {
  template <class Exp>
  TE_HOST_DEVICE static ValueAndSlope at(float x) {
    const float r = x <= 0.f ? 0.f : x;
    return {r * r, 2.f * r};
  }
};

struct Silu {
  template <class Exp>
  TE_HOST_DEVICE static ValueAndSlope at(float x) {
    const float s = sigmoid<Exp>(x);
    return {x * s, s * (1.f + x * (1.f - s))};
  }
};

struct Sigmoid {
  template <class Exp>
  TE_HOST_DEVICE static ValueAndSlope at(float x) {
    const float s = sigmoid<Exp>(x);
    return {s, s * (1.f - s)};
  }
};

struct Gradients {
  float y;
  float da;
  float db;
};

// y = act(a).
template <class Act>
struct Plain {
  static constexpr bool kGated = false;
  template <class Exp>
  TE_HOST_DEVICE static float forward(float a, float, const Params&) {
    return Act::template at<Exp>(a).value;
  }
  template <class Exp>
  TE_HOST_DEVICE static Gradients backward(float dy, float a, float, const Params&) {
    const ValueAndSlope f = Act::template at<Exp>(a);
    return {f.value, dy * f.slope, 0.f};
  }
};

// y = act(a) * b.
template <class Act>
struct Gated {
  static constexpr bool kGated = true;
  template <class Exp>
  TE_HOST_DEVICE static float forward(float a, float b, const Params&) {
    return Act::template at<Exp>(a).value * b;
  }
  template <class Exp>
  TE_HOST_DEVICE static Gradients backward(float dy, float a, float b, const Params&) {
    const ValueAndSlope f = Act::template at<Exp>(a);
    return {f.value * b, dy * b * f.slope, dy * f.value};
  }
};

// A clamped operand has no gradient; at the limit itself it has one, as in torch.clamp. NaN passes.
struct ClampedSwiglu {
  static constexpr bool kGated = true;
  template <class Exp>
  TE_HOST_DEVICE static float forward(float a, float b, const Params& params) {
    return backward<Exp>(0.f, a, b, params).y;
  }
  template <class Exp>
  TE_HOST_DEVICE static Gradients backward(float dy, float a, float b, const Params& params) {
    const float p = a > params.limit ? params.limit : a;
    const float clamped = b > params.limit ? params.limit : (b < -params.limit ? -params.limit : b);
    const float q = clamped + params.glu_linear_offset;
    const float s = sigmoid<Exp>(params.alpha * p);
    const float slope = s * (1.f + params.alpha * p * (1.f - s));
    return {p * s * q, a > params.limit ? 0.f : dy * q * slope, clamped == b || b != b ? dy * (p * s) : 0.f};
  }
};

// X(name, struct)
#define TE_ACTIVATION_TABLE(X) \
  X(gelu, Plain<Gelu>)         \
  X(geglu, Gated<Gelu>)        \
  X(glu, Gated<Sigmoid>)       \
  X(qgelu, Plain<Qgelu>)       \
  X(qgeglu, Gated<Qgelu>)      \
  X(relu, Plain<Relu>)         \
  X(reglu, Gated<Relu>)        \
  X(srelu, Plain<Srelu>)       \
  X(sreglu, Gated<Srelu>)      \
  X(silu, Plain<Silu>)         \
  X(swiglu, Gated<Silu>)       \
  X(clamped_swiglu, ClampedSwiglu)

enum Kind : int {
#define TE_ACTIVATION_ENUMERATOR(name, type) kind_##name,
  TE_ACTIVATION_TABLE(TE_ACTIVATION_ENUMERATOR)
#undef TE_ACTIVATION_ENUMERATOR
      kCount
};

// Calls f(type{}) with the functor of a kind, which the caller has checked to be in range.
template <class F>
void dispatch(int kind, F&& f) {
  switch (kind) {
#define TE_ACTIVATION_CASE(name, ...) \
  case kind_##name:                   \
    return f(__VA_ARGS__{});
    TE_ACTIVATION_TABLE(TE_ACTIVATION_CASE)
#undef TE_ACTIVATION_CASE
  }
}

}  // namespace te::activation
