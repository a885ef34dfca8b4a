// The binding of rotary embeddings: two autograd nodes (for q and k, and for a packed qkv projection), schemas and
// Python functions. A node saves only the angles.
#include "autograd/autograd.h"
#include "core/op_registration.h"
#include "ops/rope_kernels.h"

namespace te_torch {

namespace {

OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

struct RopeFamily {
  static constexpr const char* kName = "rope";
  struct State {
    bool batch_first;
    bool interleaved;
  };
  enum Saved { kFreqs, kStart };

  template <class Mode>
  static variable_list forward(State& state, SaveContext& save, const Tensor& q, const OptionalTensor& k,
                               const Tensor& freqs, const OptionalTensor& start, bool batch_first, bool interleaved) {
    state = {batch_first, interleaved};
    save.keep(kFreqs, freqs, kAngles);
    save.keep(kStart, start, kAngles);
    return Mode::template call<rope_fwd>("te::rope_fwd", q, k, freqs, start, batch_first, interleaved, false);
  }

  template <class Mode>
  static variable_list backward(const State& state, const Wanted& wanted, const NamedTensors& saved,
                                const variable_list& grads) {
    const bool dq = wanted[0] && grads[0].defined();
    const bool dk = grads.size() > 1 && wanted[1] && grads[1].defined();
    if (!dq && !dk) return {};
    const Tensors out = Mode::template call<rope_fwd>(
        "te::rope_fwd", dq ? grads[0] : grads[1], dq && dk ? OptionalTensor(grads[1]) : std::nullopt, saved[kFreqs],
        saved.optional(kStart), state.batch_first, state.interleaved, true);
    return {dq ? out[0] : Tensor(), dk ? out.back() : Tensor()};
  }
};

struct RopeQkvFamily {
  static constexpr const char* kName = "rope_qkv";
  struct State {
    std::vector<int64_t> heads;
    bool batch_first;
    bool interleaved;
  };
  enum Saved { kQFreqs, kKFreqs, kStart };

  template <class Mode>
  static variable_list forward(State& state, SaveContext& save, const Tensor& qkv, const Tensor& q_freqs,
                               const OptionalTensor& k_freqs, const OptionalTensor& start, at::IntArrayRef heads,
                               bool batch_first, bool interleaved) {
    state = {heads.vec(), batch_first, interleaved};
    save.keep(kQFreqs, q_freqs, kAngles);
    save.keep(kKFreqs, k_freqs, kAngles);
    save.keep(kStart, start, kAngles);
    auto [q, k, v] = Mode::template call<rope_qkv_fwd>("te::rope_qkv_fwd", qkv, q_freqs, k_freqs, start, heads,
                                                       batch_first, interleaved);
    return {q, k, v};
  }

  template <class Mode>
  static variable_list backward(const State& state, const Wanted& wanted, const NamedTensors& saved,
                                const variable_list& grads) {
    if (!wanted[0] || !(grads[0].defined() || grads[1].defined() || grads[2].defined())) return {};
    return {Mode::template call<rope_qkv_bwd>("te::rope_qkv_bwd", optional(grads[0]), optional(grads[1]),
                                              optional(grads[2]), saved[kQFreqs], saved.optional(kKFreqs),
                                              saved.optional(kStart), at::IntArrayRef(state.heads), state.batch_first,
                                              state.interleaved)};
  }
};

Tensors rope_autograd(const Tensor& q, const OptionalTensor& k, const Tensor& freqs, const OptionalTensor& start,
                      bool batch_first, bool interleaved) {
  return Node<RopeFamily, Dispatched>::run(q, k, freqs, start, batch_first, interleaved);
}

Tensors rope_dispatched(const Tensor& q, const OptionalTensor& k, const Tensor& freqs, const OptionalTensor& start,
                        bool batch_first, bool interleaved) {
  return Dispatched::call<rope_fwd>("te::rope_fwd", q, k, freqs, start, batch_first, interleaved, false);
}

Three rope_qkv_autograd(const Tensor& qkv, const Tensor& q_freqs, const OptionalTensor& k_freqs,
                        const OptionalTensor& start, at::IntArrayRef heads, bool batch_first, bool interleaved) {
  const variable_list out =
      Node<RopeQkvFamily, Dispatched>::run(qkv, q_freqs, k_freqs, start, heads, batch_first, interleaved);
  return {out[0], out[1], out[2]};
}

Three rope_qkv_dispatched(const Tensor& qkv, const Tensor& q_freqs, const OptionalTensor& k_freqs,
                          const OptionalTensor& start, at::IntArrayRef heads, bool batch_first, bool interleaved) {
  return Dispatched::call<rope_qkv_fwd>("te::rope_qkv_fwd", qkv, q_freqs, k_freqs, start, heads, batch_first,
                                        interleaved);
}

// Called by Python in eager mode.
Tensors rope(const Tensor& q, const OptionalTensor& k, const Tensor& freqs, const OptionalTensor& start,
             bool batch_first, bool interleaved) {
  if (must_dispatch({&q, pointer_to(k), &freqs, pointer_to(start)})) {
    return Dispatched::call<rope_autograd>("te::rope", q, k, freqs, start, batch_first, interleaved);
  }
  if (!needs_graph({&q, pointer_to(k)})) return rope_fwd(q, k, freqs, start, batch_first, interleaved, false);
  return Node<RopeFamily, Direct>::run(q, k, freqs, start, batch_first, interleaved);
}

Three rope_qkv(const Tensor& qkv, const Tensor& q_freqs, const OptionalTensor& k_freqs, const OptionalTensor& start,
               const std::vector<int64_t>& heads, bool batch_first, bool interleaved) {
  const at::IntArrayRef h(heads);
  if (must_dispatch({&qkv, &q_freqs, pointer_to(k_freqs), pointer_to(start)})) {
    return Dispatched::call<rope_qkv_autograd>("te::rope_qkv", qkv, q_freqs, k_freqs, start, h, batch_first,
                                               interleaved);
  }
  if (!needs_graph({&qkv})) return rope_qkv_fwd(qkv, q_freqs, k_freqs, start, h, batch_first, interleaved);
  const variable_list out = Node<RopeQkvFamily, Direct>::run(qkv, q_freqs, k_freqs, start, h, batch_first, interleaved);
  return {out[0], out[1], out[2]};
}

}  // namespace

TE_OP_REGISTRATION(rope, ops) {
  ops.op("rope_fwd(Tensor q, Tensor? k, Tensor freqs, Tensor? start_positions, bool batch_first, bool interleaved, "
         "bool backward) -> Tensor[]")
      .kernel(rope_fwd)
      .meta(rope_fwd_meta)
      .python(rope_fwd);
  ops.op("rope_qkv_fwd(Tensor qkv, Tensor q_freqs, Tensor? k_freqs, Tensor? start_positions, int[] heads, bool "
         "batch_first, bool interleaved) -> (Tensor, Tensor, Tensor)")
      .kernel(rope_qkv_fwd)
      .meta(rope_qkv_fwd_meta);
  ops.op("rope_qkv_bwd(Tensor? dq, Tensor? dk, Tensor? dv, Tensor q_freqs, Tensor? k_freqs, Tensor? start_positions, "
         "int[] heads, bool batch_first, bool interleaved) -> Tensor")
      .kernel(rope_qkv_bwd)
      .meta(rope_qkv_bwd_meta);
  ops.op("rope(Tensor q, Tensor? k, Tensor freqs, Tensor? start_positions, bool batch_first, bool interleaved) -> "
         "Tensor[]")
      .composite(rope_dispatched)
      .autograd(rope_autograd)
      .python(rope);
  ops.op("rope_qkv(Tensor qkv, Tensor q_freqs, Tensor? k_freqs, Tensor? start_positions, int[] heads, bool "
         "batch_first, bool interleaved) -> (Tensor, Tensor, Tensor)")
      .composite(rope_qkv_dispatched)
      .autograd(rope_qkv_autograd)
      .python(rope_qkv);
}

}  // namespace te_torch
