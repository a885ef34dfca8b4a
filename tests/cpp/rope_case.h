// Tensors to rotate, of every layout, in one device's memory, and the long double oracle of their rotation. For the
// suite of rope; computes nothing by the engine itself.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "rounding.h"
#include "transformer_engine/rope.h"

namespace te::testing {

using Real = long double;

enum Layout { kSbhd, kBshd, kPacked };  // kPacked: inputs [seq, batch, groups, (g + 2) * head_dim], outputs bshd

struct Case {
  int64_t seq, batch, q_heads, k_heads, v_heads, head_dim, rot_dim;
  bool interleaved = false;
  Layout layout = kSbhd;
  bool own_k_freqs = false;
  bool starts = false;
};

// 16-byte access and elementwise access on the GPU, whole and partial rotation, half a copied slot, more heads than a
// warp takes, more slots than a warp takes, nothing at all.
const Case kCases[] = {
    {5, 3, 32, 8, 0, 128, 128},
    {5, 3, 32, 8, 0, 128, 128, true},
    {3, 2, 8, 2, 2, 128, 64, false, kPacked},
    {3, 2, 8, 2, 2, 64, 32, true, kPacked, true, true},
    {9, 4, 1, 1, 0, 64, 64, false, kBshd, true, true},
    {2, 1, 3, 0, 0, 24, 16, true, kBshd},
    {2, 3, 2, 1, 1, 24, 16, false, kBshd},
    {4, 2, 3, 2, 1, 65, 64, false, kSbhd, true},
    {4, 2, 3, 2, 1, 67, 6, true, kBshd, false, true},
    {1, 1, 1, 0, 0, 2, 2},
    {2, 2, 90, 6, 6, 128, 96, false, kSbhd, true},
    {2, 2, 5, 2, 0, 301, 300, true, kBshd, true},
    {2, 1, 5, 2, 1, 2560, 2560, false, kSbhd, false, true},
    {2, 1, 5, 2, 1, 2304, 2112, true},
    {3, 2, 2, 2, 0, 16, 0},
    {0, 3, 2, 1, 0, 16, 8},
    {3, 0, 2, 1, 1, 16, 8},
    {3, 2, 0, 0, 0, 16, 8},
    {3, 2, 0, 4, 0, 32, 32},
    {3, 2, 2, 1, 0, 0, 0},
};

inline int64_t heads_of(const Case& c, int part) { return part == 0 ? c.q_heads : part == 1 ? c.k_heads : c.v_heads; }

// Random data of one case, in the memory of one device. Parts are q, k, v.
template <class T>
class Problem {
 public:
  Problem(int32_t device, const Case& c, bool backward = false) : c(c) {
    std::mt19937_64 engine(7);
    std::normal_distribution<double> normal;
    const int64_t positions = c.seq * c.batch;
    const int64_t all = (c.q_heads + c.k_heads + c.v_heads) * positions * c.head_dim;
    std::vector<double> values;
    for (int64_t i = 0; i < all; ++i) values.push_back(normal(engine));
    x = testing::rounded<T>(values);
    in = std::make_unique<Buffer<T>>(device, 1, all);
    in->fill(x);
    rows = c.seq + (c.starts ? 4 : 0);
    for (auto& f : freqs) {
      // From tiny to 1e5, each element its own.
      std::uniform_real_distribution<double> exponent(-6, 5);
      std::vector<float> angles;
      for (int64_t i = 0; i < rows * c.rot_dim; ++i) {
        angles.push_back(float(std::pow(10, exponent(engine)) * (i % 3 == 0 ? -1 : 1)));
      }
      f.host = angles;
      f.memory = std::make_unique<Buffer<float>>(device, rows, c.rot_dim, c.rot_dim + 3);
      f.memory->fill(angles);
    }
    for (int64_t b = 0; b < c.batch; ++b) start_host.push_back(c.starts ? int32_t((b * 3) % 5) : 0);
    start = std::make_unique<Buffer<int32_t>>(device, 1, c.batch);
    start->fill(start_host);

    plan.seq = c.seq;
    plan.batch = c.batch;
    plan.q_heads = c.q_heads;
    plan.k_heads = c.k_heads;
    plan.v_heads = c.v_heads;
    plan.head_dim = c.head_dim;
    plan.rot_dim = c.rot_dim;
    plan.interleaved = c.interleaved;
    plan.backward = backward;
    plan.dtype = testing::kDtype<T>;
    plan.device = device;
    te_rope_tensor* const inputs[] = {&plan.q, &plan.k, &plan.v};
    te_rope_tensor* const outputs[] = {&plan.q_out, &plan.k_out, &plan.v_out};
    int64_t before = 0;
    for (int part = 0; part < 3; ++part) {
      const int64_t heads = heads_of(c, part);
      out[part] = std::make_unique<Buffer<T>>(device, 1, positions * heads * c.head_dim);
      *inputs[part] = dense(in->data() + before, c.layout, heads);
      *outputs[part] = dense(out[part]->data(), c.layout, heads);
      before += positions * heads * c.head_dim;
    }
    if (c.layout == kPacked) pack();
    plan.q_freqs = freqs[0].memory->tensor();
    if (c.own_k_freqs) plan.k_freqs = freqs[1].memory->tensor();
    if (c.starts) plan.start_positions = start->tensor();
  }

  te_rope_tensor dense(T* data, Layout layout, int64_t heads) const {
    const int64_t token = heads * c.head_dim;
    if (layout == kSbhd) return {data, c.batch * token, token, c.head_dim, 0, 0};
    return {data, token, c.seq * token, c.head_dim, 0, 0};
  }

  // [seq, batch, groups, (g + 1 + 1) * head_dim]: g heads of q, one of k, one of v in each group.
  void pack() {
    const int64_t g = c.q_heads / c.k_heads;
    const int64_t group = (g + 2) * c.head_dim;
    const int64_t token = c.k_heads * group;
    plan.q = {in->data(), c.batch * token, token, c.head_dim, group, g};
    plan.k = {in->data() + g * c.head_dim, c.batch * token, token, group, 0, 0};
    plan.v = {in->data() + (g + 1) * c.head_dim, c.batch * token, token, group, 0, 0};
  }

  // The oracle's view of the data: offset of an element of a tensor whose memory starts at `base`.
  static int64_t offset(const te_rope_tensor& t, const T* base, int64_t s, int64_t b, int64_t h) {
    const int64_t g = t.heads_per_group;
    const int64_t head = g == 0 ? h * t.head_stride : h / g * t.group_stride + h % g * t.head_stride;
    return static_cast<const T*>(t.data) - base + s * t.seq_stride + b * t.batch_stride + head;
  }

  Real angle(int part, int64_t s, int64_t b, int64_t i) const {
    const auto& f = freqs[part == 1 && c.own_k_freqs ? 1 : 0];
    return f.host[size_t((s + start_host[size_t(b)]) * c.rot_dim + i)];
  }

  int64_t partner(int64_t i) const {
    const int64_t half = c.rot_dim / 2;
    return c.interleaved ? (i ^ 1) : i < half ? i + half : i - half;
  }
  bool is_low(int64_t i) const { return c.interleaved ? i % 2 == 0 : i < c.rot_dim / 2; }

  // Every element of every output: got == wanted, within the bound or (copied ones) bit for bit.
  void expect_oracle() const {
    const te_rope_tensor* const inputs[] = {&plan.q, &plan.k, &plan.v};
    const te_rope_tensor* const outputs[] = {&plan.q_out, &plan.k_out, &plan.v_out};
    for (int part = 0; part < 3; ++part) {
      const std::vector<T> got = out[part]->read();
      EXPECT_TRUE(out[part]->padding_untouched());
      for_each(part, [&](int64_t s, int64_t b, int64_t h, int64_t i) {
        const T* x_head = x.data() + offset(*inputs[part], in->data(), s, b, h);
        const T y = got[size_t(offset(*outputs[part], out[part]->data(), s, b, h) + i)];
        const std::string what = concat("part ", part, " s ", s, " b ", b, " h ", h, " i ", i);
        if (part == 2 || i >= c.rot_dim) {
          ASSERT_EQ(std::memcmp(&y, x_head + i, sizeof(T)), 0) << what;
          return;
        }
        // Forward: y[i] = x[i] cos(a[i]) -+ x[p] sin(a[i]). The transpose's row i is the forward's column i, where x[p]
        // meets the sine of p's angle with p's sign.
        const int64_t p = partner(i);
        const Real own = double(to_float(x_head[i])), other = double(to_float(x_head[p]));
        const Real sine = plan.backward ? std::sin(angle(part, s, b, p)) * (is_low(p) ? -1 : 1)
                                        : std::sin(angle(part, s, b, i)) * (is_low(i) ? -1 : 1);
        const Real want = own * std::cos(angle(part, s, b, i)) + other * sine;
        // With u = 2^-24: sine and cosine are within 2 u, the product and the sum round by u each, so the result is
        // within 4 u (|x| + |partner|) before the store's half unit.
        const Real before = 4 * Real(0x1p-24) * (std::fabs(own) + std::fabs(other));
        const Real bound = before + Rounding<T>::kRelative * (std::fabs(want) + before) + Rounding<T>::kAbsolute;
        ASSERT_LE(std::fabs(Real(to_float(y)) - want), bound) << what << " got " << to_float(y) << " want " << want;
      });
    }
  }

  template <class F>
  void for_each(int part, F&& f) const {
    for (int64_t s = 0; s < c.seq; ++s) {
      for (int64_t b = 0; b < c.batch; ++b) {
        for (int64_t h = 0; h < heads_of(c, part); ++h) {
          for (int64_t i = 0; i < c.head_dim; ++i) {
            f(s, b, h, i);
            if (::testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }

  struct Freqs {
    std::vector<float> host;
    std::unique_ptr<Buffer<float>> memory;
  };
  Case c;
  te_rope_plan plan{};
  int64_t rows = 0;
  std::vector<T> x;
  std::unique_ptr<Buffer<T>> in, out[3];
  Freqs freqs[2];
  std::vector<int32_t> start_host;
  std::unique_ptr<Buffer<int32_t>> start;
};

template <class F>
void for_dtypes(F&& f) {
  f(float{});
  f(fp16{});
  f(bf16{});
}

inline std::string describe(const Case& c) {
  return concat("[", c.seq, ", ", c.batch, ", ", c.q_heads, "+", c.k_heads, "+", c.v_heads, ", ", c.head_dim, "] rot ",
                c.rot_dim, c.interleaved ? " interleaved" : "");
}

}  // namespace te::testing
