// A step of Adam over lists of tensors of any dtype: by the engine, and by the room's formulas applied to one element
// after the other. For the suite of the optimizer.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "ops/optimizer/optimizer_math.h"
#include "ops/quantize/fp8.h"
#include "transformer_engine/optimizer.h"

namespace te::testing {

using Bytes = std::vector<uint8_t>;
using Floats = std::vector<float>;

// ---- elements of any dtype ----

inline float read(te_dtype dtype, const uint8_t* p) {
  uint16_t half;
  float whole;
  switch (dtype) {
    case TE_FLOAT32:
      std::memcpy(&whole, p, 4);
      return whole;
    case TE_FLOAT16:
      std::memcpy(&half, p, 2);
      return to_float(fp16{half});
    case TE_BFLOAT16:
      std::memcpy(&half, p, 2);
      return to_float(bf16{half});
    default:
      return quantize::from_fp8(*p, dtype == TE_FLOAT8_E5M2);
  }
}

inline void write(te_dtype dtype, uint8_t* p, float x) {
  switch (dtype) {
    case TE_FLOAT32:
      std::memcpy(p, &x, 4);
      return;
    case TE_FLOAT16: {
      const fp16 h = from_float<fp16>(x);
      std::memcpy(p, &h, 2);
      return;
    }
    case TE_BFLOAT16: {
      const bf16 h = from_float<bf16>(x);
      std::memcpy(p, &h, 2);
      return;
    }
    default:
      *p = uint8_t(dtype == TE_FLOAT8_E5M2 ? quantize::to_fp8<true>(x) : quantize::to_fp8<false>(x));
  }
}

inline Bytes bytes_of(te_dtype dtype, const Floats& values) {
  const size_t size = te_dtype_bytes(dtype);
  Bytes bytes(values.size() * size);
  for (size_t i = 0; i < values.size(); ++i) write(dtype, bytes.data() + i * size, values[i]);
  return bytes;
}

// A list's memory: bytes that start `offset` elements after a multiple of 256.
struct Memory {
  Memory(int32_t device, const Bytes& bytes, size_t offset)
      : offset(int64_t(offset)), buffer(device, 1, this->offset + int64_t(bytes.size())) {
    Bytes all(size_t(this->offset), uint8_t(testing::kPoison));
    all.insert(all.end(), bytes.begin(), bytes.end());
    buffer.fill(all);
  }
  void* data() const { return buffer.data() + offset; }
  Bytes read() const {
    Bytes all = buffer.read();
    for (int64_t i = 0; i < offset; ++i) EXPECT_EQ(all[size_t(i)], testing::kPoison) << "written before its start";
    EXPECT_TRUE(buffer.padding_untouched());
    all.erase(all.begin(), all.begin() + offset);
    return all;
  }
  int64_t offset;
  Buffer<uint8_t> buffer;
};

template <class T>
te_tensor one(const Buffer<T>& buffer) {
  return buffer.tensor();
}

// ---- one step, element by element ----

struct Problem {
  te_adam_plan plan{};
  float inv_scale = 1.f, clip = 1.f;
  size_t n = 0;
  Bytes list[5];
  float pair[3] = {0.25f, 0.5f, 2.f};  // old scales
  float fp8_scale = 3.7f, fp8_amax = 0.f, fp8_scale_inv = 0.f;
};

inline te_dtype dtype_of(const te_adam_plan& plan, int list) {
  const te_dtype dtypes[] = {plan.grad, plan.param, plan.exp_avg, plan.exp_avg_sq,
                             plan.master == TE_MASTER_FLOAT32 ? TE_FLOAT32 : TE_FLOAT16};
  return dtypes[list];
}

inline bool scaled(te_dtype dtype) { return dtype == TE_FLOAT16 || dtype == TE_FLOAT8_E4M3; }

inline te_adam_plan plan_of(te_dtype grad, te_dtype param, te_dtype m, te_dtype v, te_master master) {
  te_adam_plan plan{};
  plan.lr = 3e-3;
  plan.beta1 = 0.9;
  plan.beta2 = 0.98;
  plan.eps = 1e-8;
  plan.weight_decay = 0.1;
  plan.step = 3;
  plan.decoupled = 1;
  plan.bias_correction = 1;
  plan.grad = grad;
  plan.param = param;
  plan.rounding = TE_BFLOAT16;
  plan.exp_avg = m;
  plan.exp_avg_sq = v;
  plan.master = master;
  return plan;
}

inline Problem problem_of(const te_adam_plan& plan, size_t n, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Problem p;
  p.plan = plan;
  p.n = n;
  Floats values[5];
  for (size_t i = 0; i < n; ++i) {
    values[0].push_back(normal(random));
    values[1].push_back(normal(random));
    values[2].push_back(0.1f * normal(random));
    values[3].push_back(0.01f * std::fabs(normal(random)) + 1e-3f);
    values[4].push_back(values[1].back());
  }
  if (plan.master == TE_MASTER_REMAINDER) {  // weights and low halves of the same masters
    p.list[1].resize(2 * n);
    p.list[4].resize(2 * n);
    for (size_t i = 0; i < n; ++i) {
      const optimizer::Halves halves = optimizer::halves_of(values[1][i]);
      std::memcpy(p.list[1].data() + 2 * i, &halves.weight, 2);
      std::memcpy(p.list[4].data() + 2 * i, &halves.remainder, 2);
    }
  }
  for (int list = 0; list < 5; ++list) {
    if (!p.list[list].empty() || (list == 4 && plan.master == TE_MASTER_NONE)) continue;
    p.list[list] = bytes_of(dtype_of(plan, list), values[list]);
  }
  return p;
}

// The expected results.
inline Problem stepped(const Problem& given) {
  Problem p = given;
  const te_adam_plan& plan = p.plan;
  optimizer::Adam a(plan);
  a.clip = p.clip;
  const auto at = [&](int list, size_t i) { return p.list[list].data() + i * te_dtype_bytes(dtype_of(plan, list)); };
  const bool scales[3] = {scaled(plan.exp_avg), scaled(plan.exp_avg_sq), plan.master == TE_MASTER_FLOAT16};
  Floats result[3];  // exp_avg, exp_avg_sq, weight
  float amax[3] = {};
  for (size_t i = 0; i < p.n; ++i) {
    float g = read(plan.grad, at(0, i));
    if (plan.inv_scale.data != nullptr) {
      g *= p.inv_scale;
      write(plan.grad, at(0, i), g);
    }
    float m = read(plan.exp_avg, at(2, i)) * (scales[0] ? p.pair[0] : 1.f);
    float v = read(plan.exp_avg_sq, at(3, i)) * (scales[1] ? p.pair[1] : 1.f);
    float w;
    if (plan.master == TE_MASTER_REMAINDER) {
      optimizer::Halves halves;
      std::memcpy(&halves.weight, p.list[1].data() + 2 * i, 2);
      std::memcpy(&halves.remainder, p.list[4].data() + 2 * i, 2);
      w = optimizer::joined(halves.weight, halves.remainder);
    } else if (plan.master == TE_MASTER_NONE) {
      w = read(plan.param, at(1, i));
    } else {
      w = read(dtype_of(plan, 4), at(4, i)) * (scales[2] ? p.pair[2] : 1.f);
    }
    if (plan.decoupled) {
      optimizer::adam_step<true>(a, g, w, m, v);
    } else {
      optimizer::adam_step<false>(a, g, w, m, v);
    }
    const float values[3] = {m, v, w};
    for (int k = 0; k < 3; ++k) {
      result[k].push_back(values[k]);
      amax[k] = std::fmax(amax[k], std::fabs(values[k]));
    }
  }
  const te_dtype state[3] = {plan.exp_avg, plan.exp_avg_sq, TE_FLOAT16};
  for (int k = 0; k < 3; ++k) {
    if (scales[k] && p.n > 0) p.pair[k] = optimizer::state_scale(amax[k], state[k] == TE_FLOAT16 ? 32752.f : 448.f);
  }
  for (size_t i = 0; i < p.n; ++i) {
    const float w = result[2][i];
    write(plan.exp_avg, at(2, i), scales[0] ? result[0][i] / p.pair[0] : result[0][i]);
    write(plan.exp_avg_sq, at(3, i), scales[1] ? result[1][i] / p.pair[1] : result[1][i]);
    if (plan.master == TE_MASTER_REMAINDER) {
      const optimizer::Halves halves = optimizer::halves_of(w);
      std::memcpy(p.list[1].data() + 2 * i, &halves.weight, 2);
      std::memcpy(p.list[4].data() + 2 * i, &halves.remainder, 2);
      continue;
    }
    if (plan.master != TE_MASTER_NONE) write(dtype_of(plan, 4), at(4, i), scales[2] ? w / p.pair[2] : w);
    if (plan.param == TE_FLOAT8_E4M3 || plan.param == TE_FLOAT8_E5M2) {
      const float rounded = to_float(from_float<bf16>(w));
      p.fp8_amax = std::fmax(p.fp8_amax, std::fabs(rounded));
      p.fp8_scale_inv = 1.f / p.fp8_scale;
      write(plan.param, at(1, i), rounded * p.fp8_scale);
    } else {
      write(plan.param, at(1, i), w);
    }
  }
  return p;
}

// The same by the engine: tensors of these sizes, adjacent in each list, at an odd address or not.
inline Problem by_engine(int32_t device, const Problem& given, const std::vector<size_t>& sizes, size_t offset = 0) {
  Problem p = given;
  std::unique_ptr<Memory> memory[5];
  for (int list = 0; list < 5; ++list) {
    if (list == 4 && p.plan.master == TE_MASTER_NONE) continue;
    memory[list] = std::make_unique<Memory>(device, p.list[list], offset * te_dtype_bytes(dtype_of(p.plan, list)));
  }
  Buffer<float> pairs(device, 1, 9), inv_scale(device, 1, 1), clip(device, 1, 1);
  pairs.fill({p.pair[0], 0.f, p.pair[1], 0.f, p.pair[2], 0.f, p.fp8_scale, p.fp8_amax, 0.f});
  inv_scale.fill({p.inv_scale});
  clip.fill({p.clip});
  if (p.plan.inv_scale.data != nullptr) p.plan.inv_scale = one(inv_scale);
  p.plan.clip = one(clip);
  float* const at = pairs.data();
  std::vector<te_optimizer_tensor> tensors;
  std::vector<te_adam_scales> scales;
  size_t first = 0;
  for (const size_t size : sizes) {
    te_optimizer_tensor t{};
    t.numel = int64_t(size);
    for (int list = 0; list < 5; ++list) {
      if (memory[list] == nullptr || size == 0) continue;
      t.data[list] = static_cast<uint8_t*>(memory[list]->data()) + first * te_dtype_bytes(dtype_of(p.plan, list));
    }
    tensors.push_back(t);
    scales.push_back({at, at + 2, at + 4, at + 6, at + 7, at + 8, t.numel, t.numel});
    first += size;
  }
  EXPECT_EQ(first, p.n);
  TE_EXPECT_OK(te_optimizer_adam(&p.plan, tensors.data(), scales.data(), int64_t(tensors.size()), device, nullptr));
  for (int list = 0; list < 5; ++list) {
    if (memory[list] != nullptr) p.list[list] = memory[list]->read();
  }
  const Floats left = pairs.read();
  for (int k = 0; k < 3; ++k) {
    p.pair[k] = left[size_t(2 * k)];
    EXPECT_EQ(left[size_t(2 * k + 1)], 0.f) << "the place for maxima";
  }
  p.fp8_amax = left[7];
  p.fp8_scale_inv = left[8];
  return p;
}

inline void expect_same(const Problem& got, const Problem& wanted, const std::string& what) {
  const char* names[] = {"grad", "param", "exp_avg", "exp_avg_sq", "master"};
  for (int list = 0; list < 5; ++list) EXPECT_TRUE(got.list[list] == wanted.list[list]) << what << ": " << names[list];
  for (int k = 0; k < 3; ++k) EXPECT_EQ(got.pair[k], wanted.pair[k]) << what << ": scale " << k;
  EXPECT_EQ(got.fp8_amax, wanted.fp8_amax) << what;
  EXPECT_EQ(got.fp8_scale_inv, wanted.fp8_scale_inv) << what;
}

}  // namespace te::testing
