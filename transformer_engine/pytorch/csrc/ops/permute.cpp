// The binding of permute: the maps, four autograd nodes (tokens to rows, rows to tokens, chunks of rows, a router's
// choice to the map by rows), schemas and Python functions. A map is two-dimensional here, [T, 2 E + 1] of a mask or
// [T, k] of ids.
#include "ops/permute.h"

#include "autograd/autograd.h"
#include "core/op_registration.h"

namespace te_torch {

namespace {

// A quantized gradient goes through the dispatcher, where its class has rules, or passes its values.
template <class Mode, auto kFunction, class... Args>
auto call_for(const Tensor& gradient, const char* name, const Args&... args) {
  if (std::is_same_v<Mode, Direct> && must_dispatch({&gradient})) {
    return Dispatched::call<kFunction>(name, args...);
  }
  return Mode::template call<kFunction>(name, args...);
}

constexpr SavedInfo kMapInfo{"row map", "the backward moves rows back by it", "making it again from the routing map"};
constexpr SavedInfo kChosenInfo{"chosen experts", "the gradient flows to their probabilities", kCallers};
constexpr SavedInfo kRowProbsInfo{"probabilities of rows", "rows with a probability of 0 have no gradient",
                                  "permuting the probabilities again"};
constexpr SavedInfo kProbsInfo{"merging probabilities", "the gradient of the rows is multiplied by them", kCallers};
constexpr SavedInfo kRowsInfo{"rows to merge", "the gradient of the probabilities is their product with the gradient",
                              kCallers};

struct PermuteFamily {
  static constexpr const char* kName = "permute";
  struct State {
    bool of_mask;
  };
  enum Saved { kMap, kPadOffsets, kRowProbs };

  template <class Mode>
  static variable_list forward(State& state, SaveContext& save, const Tensor& inp, const Tensor& map, bool of_mask,
                               const OptionalTensor& probs, const OptionalTensor& pad_offsets,
                               const c10::SymInt& rows) {
    state = {of_mask};
    auto [out, row_probs, scales] = Mode::template call<permute_fwd>("te::permute_fwd", inp, map, of_mask, probs,
                                                                     pad_offsets, OptionalTensor(), rows);
    save.keep(kMap, map, kMapInfo);
    save.keep(kPadOffsets, pad_offsets, kMapInfo);
    if (probs.has_value()) save.keep(kRowProbs, row_probs, kRowProbsInfo);
    return {out, row_probs};
  }

  template <class Mode>
  static variable_list backward(const State& state, const Wanted& wanted, const NamedTensors& saved,
                                const variable_list& grads) {
    variable_list out(4);
    if (wanted[0] && grads[0].defined()) {
      out[0] = call_for<Mode, unpermute_fwd>(grads[0], "te::unpermute_fwd", grads[0], saved[kMap], state.of_mask,
                                             OptionalTensor(), saved.optional(kPadOffsets), saved.optional(kRowProbs));
    }
    if (wanted[3] && grads[1].defined()) {
      out[3] = Mode::template call<permute_probs_bwd>("te::permute_probs_bwd", grads[1], saved[kMap],
                                                      saved.optional(kPadOffsets));
    }
    return out;
  }
};

struct UnpermuteFamily {
  static constexpr const char* kName = "unpermute";
  struct State {
    bool of_mask;
    c10::SymInt rows;
  };
  enum Saved { kMap, kPadOffsets, kProbs, kRows };

  template <class Mode>
  static variable_list forward(State& state, SaveContext& save, const Tensor& inp, const Tensor& map, bool of_mask,
                               const OptionalTensor& probs, const OptionalTensor& pad_offsets) {
    state = {of_mask, inp.sym_size(0)};
    const Tensor out = Mode::template call<unpermute_fwd>("te::unpermute_fwd", inp, map, of_mask, probs, pad_offsets,
                                                          OptionalTensor());
    save.keep(kMap, map, kMapInfo);
    save.keep(kPadOffsets, pad_offsets, kMapInfo);
    save.keep(kProbs, probs, kProbsInfo);
    if (probs.has_value() && probs->requires_grad()) save.keep(kRows, inp, kRowsInfo);
    return {out};
  }

  template <class Mode>
  static variable_list backward(const State& state, const Wanted& wanted, const NamedTensors& saved,
                                const variable_list& grads) {
    const Tensor& grad = grads[0];
    const bool to_rows = wanted[0], to_probs = wanted[3];
    if (!grad.defined() || !(to_rows || to_probs)) return {};
    const OptionalTensor pad_offsets = saved.optional(kPadOffsets);
    if (!saved.has(kProbs)) {
      return {std::get<0>(call_for<Mode, permute_fwd>(grad, "te::permute_fwd", grad, saved[kMap], state.of_mask,
                                                      OptionalTensor(), pad_offsets, OptionalTensor(), state.rows))};
    }
    const auto [dinp, dprobs] = call_for<Mode, unpermute_bwd>(
        grad, "te::unpermute_bwd", grad, saved[kMap], state.of_mask,
        to_probs ? saved.optional(kRows) : OptionalTensor(), saved[kProbs], pad_offsets, state.rows, to_rows);
    return {to_rows ? dinp : Tensor(), Tensor(), Tensor(), to_probs ? dprobs : Tensor()};
  }
};

// Every row has one place on either side, so that the gradient is a gather too.
struct PermuteGatherFamily {
  static constexpr const char* kName = "permute_gather";
  struct State {};
  enum Saved { kDestination };

  template <class Mode>
  static variable_list forward(State&, SaveContext& save, const Tensor& inp, const Tensor& source,
                               const Tensor& destination, const OptionalTensor& probs) {
    save.keep(kDestination, destination, kMapInfo);
    const Tensor out = Mode::template call<permute_gather_fwd>("te::permute_gather_fwd", inp, source);
    if (!probs.has_value()) return {out, at::empty({0}, inp.options().dtype(at::kFloat))};
    return {out, Mode::template call<permute_gather_fwd>("te::permute_gather_fwd", *probs, source)};
  }

  template <class Mode>
  static variable_list backward(const State&, const Wanted& wanted, const NamedTensors& saved,
                                const variable_list& grads) {
    variable_list out(4);
    for (const auto& [slot, grad] : {std::pair<size_t, Tensor>{0, grads[0]}, {3, grads[1]}}) {
      if (!wanted[slot] || !grad.defined()) continue;
      out[slot] = call_for<Mode, permute_gather_fwd>(grad, "te::permute_gather_fwd", grad, saved[kDestination]);
    }
    return out;
  }
};

// Memory of the caller's for the tokens of every expert, which autograd does not see; undefined: none.
struct CountsInto {
  Tensor counts;
};

template <class Mode>
Routed routed(const Tensor& probs, const Tensor& chosen, int64_t first, int64_t last, const c10::SymInt& rows,
              bool count, const Tensor& into) {
  if constexpr (std::is_same_v<Mode, Direct>) {
    return Direct::call<permute_routing_into>("te::permute_routing_fwd", probs, chosen, first, last, rows.expect_int(),
                                              count, into, Tensor());
  } else {
    return Mode::template call<permute_routing_fwd>("te::permute_routing_fwd", probs, chosen, first, last, rows, count);
  }
}

// The probabilities of the rows alone have a gradient.
struct RoutingFamily {
  static constexpr const char* kName = "permute_routing";
  struct State {
    c10::SymInt experts;
  };
  enum Saved { kIds, kMap };

  template <class Mode>
  static variable_list forward(State& state, SaveContext& save, const Tensor& probs, const Tensor& chosen,
                               int64_t first, int64_t last, const c10::SymInt& rows, bool count,
                               const CountsInto& into) {
    state = {probs.sym_size(1)};
    const auto [row_probs, token_of_row, row_of_pair, offsets, counts] =
        routed<Mode>(probs, chosen, first, last, rows, count, into.counts);
    save.keep(kIds, chosen, kChosenInfo);
    save.keep(kMap, row_of_pair, kMapInfo);
    if (into.counts.defined()) return {row_probs, token_of_row, row_of_pair, offsets};  // no output of the node
    return {row_probs, token_of_row, row_of_pair, offsets, counts};
  }

  template <class Mode>
  static variable_list backward(const State& state, const Wanted& wanted, const NamedTensors& saved,
                                const variable_list& grads) {
    if (!wanted[0] || !grads[0].defined()) return {};
    return {Mode::template call<permute_routing_bwd>("te::permute_routing_bwd", grads[0], saved[kIds], saved[kMap],
                                                     state.experts)};
  }
};

using Two = std::tuple<Tensor, Tensor>;

Routed routed_of(const variable_list& out, const Tensor& into) {
  return {out[0], out[1], out[2], out[3], into.defined() ? into : out[4]};
}

Routed routing_autograd(const Tensor& probs, const Tensor& chosen, int64_t first, int64_t last, c10::SymInt rows,
                        bool count) {
  return routed_of(Node<RoutingFamily, Dispatched>::run(probs, chosen, first, last, rows, count, CountsInto{}), {});
}

Routed routing_dispatched(const Tensor& probs, const Tensor& chosen, int64_t first, int64_t last, c10::SymInt rows,
                          bool count) {
  return Dispatched::call<permute_routing_fwd>("te::permute_routing_fwd", probs, chosen, first, last, rows, count);
}

}  // namespace

Routed permute_routing(const Tensor& probs, const Tensor& chosen, int64_t first, int64_t last, int64_t row_count,
                       bool count, const OptionalTensor& counts) {
  const c10::SymInt rows(row_count);
  const CountsInto into{counts.value_or(Tensor())};
  if (must_dispatch({&probs, &chosen, pointer_to(counts)})) {
    Routed out = Dispatched::call<routing_autograd>("te::permute_routing", probs, chosen, first, last, rows, count);
    if (into.counts.defined()) std::get<4>(out) = into.counts.copy_(std::get<4>(out));
    return out;
  }
  if (!needs_graph({&probs})) return routed<Direct>(probs, chosen, first, last, rows, count, into.counts);
  return routed_of(Node<RoutingFamily, Direct>::run(probs, chosen, first, last, rows, count, into), into.counts);
}

namespace {

Two permute_autograd(const Tensor& inp, const Tensor& map, bool of_mask, const OptionalTensor& probs,
                     const OptionalTensor& pad_offsets, c10::SymInt rows) {
  const variable_list out = Node<PermuteFamily, Dispatched>::run(inp, map, of_mask, probs, pad_offsets, rows);
  return {out[0], out[1]};
}

Two permute_dispatched(const Tensor& inp, const Tensor& map, bool of_mask, const OptionalTensor& probs,
                       const OptionalTensor& pad_offsets, c10::SymInt rows) {
  auto [out, row_probs, scales] =
      Dispatched::call<permute_fwd>("te::permute_fwd", inp, map, of_mask, probs, pad_offsets, OptionalTensor(), rows);
  return {out, row_probs};
}

// Called by Python in eager mode, like those below.
Two permute(const Tensor& inp, const Tensor& map, bool of_mask, const OptionalTensor& probs,
            const OptionalTensor& pad_offsets, int64_t row_count) {
  const c10::SymInt rows(row_count);
  if (must_dispatch({&inp, &map, pointer_to(probs), pointer_to(pad_offsets)})) {
    return Dispatched::call<permute_autograd>("te::permute", inp, map, of_mask, probs, pad_offsets, rows);
  }
  if (!needs_graph({&inp, pointer_to(probs)})) {
    auto [out, row_probs, scales] =
        Direct::call<permute_fwd>("te::permute_fwd", inp, map, of_mask, probs, pad_offsets, OptionalTensor(), rows);
    return {out, row_probs};
  }
  const variable_list out = Node<PermuteFamily, Direct>::run(inp, map, of_mask, probs, pad_offsets, rows);
  return {out[0], out[1]};
}

Tensor unpermute_autograd(const Tensor& inp, const Tensor& map, bool of_mask, const OptionalTensor& probs,
                          const OptionalTensor& pad_offsets) {
  return Node<UnpermuteFamily, Dispatched>::run(inp, map, of_mask, probs, pad_offsets)[0];
}

Tensor unpermute_dispatched(const Tensor& inp, const Tensor& map, bool of_mask, const OptionalTensor& probs,
                            const OptionalTensor& pad_offsets) {
  return Dispatched::call<unpermute_fwd>("te::unpermute_fwd", inp, map, of_mask, probs, pad_offsets, OptionalTensor());
}

Tensor unpermute(const Tensor& inp, const Tensor& map, bool of_mask, const OptionalTensor& probs,
                 const OptionalTensor& pad_offsets) {
  if (must_dispatch({&inp, &map, pointer_to(probs), pointer_to(pad_offsets)})) {
    return Dispatched::call<unpermute_autograd>("te::unpermute", inp, map, of_mask, probs, pad_offsets);
  }
  if (!needs_graph({&inp, pointer_to(probs)})) {
    return Direct::call<unpermute_fwd>("te::unpermute_fwd", inp, map, of_mask, probs, pad_offsets, OptionalTensor());
  }
  return Node<UnpermuteFamily, Direct>::run(inp, map, of_mask, probs, pad_offsets)[0];
}

Two permute_gather_autograd(const Tensor& inp, const Tensor& source, const Tensor& destination,
                            const OptionalTensor& probs) {
  const variable_list out = Node<PermuteGatherFamily, Dispatched>::run(inp, source, destination, probs);
  return {out[0], out[1]};
}

Two permute_gather_dispatched(const Tensor& inp, const Tensor& source, const Tensor& destination,
                              const OptionalTensor& probs) {
  PermuteGatherFamily::State state;
  SaveContext save = SaveContext::of_none();
  const variable_list out = PermuteGatherFamily::forward<Dispatched>(state, save, inp, source, destination, probs);
  return {out[0], out[1]};
}

Two permute_gather(const Tensor& inp, const Tensor& source, const Tensor& destination, const OptionalTensor& probs) {
  if (must_dispatch({&inp, &source, &destination, pointer_to(probs)})) {
    return Dispatched::call<permute_gather_autograd>("te::permute_gather", inp, source, destination, probs);
  }
  if (needs_graph({&inp, pointer_to(probs)})) {
    const variable_list out = Node<PermuteGatherFamily, Direct>::run(inp, source, destination, probs);
    return {out[0], out[1]};
  }
  PermuteGatherFamily::State state;
  SaveContext save = SaveContext::of_none();
  const variable_list out = PermuteGatherFamily::forward<Direct>(state, save, inp, source, destination, probs);
  return {out[0], out[1]};
}

}  // namespace

TE_OP_REGISTRATION(permute, ops) {
  ops.op("permute_mask_map(Tensor routing_map) -> Tensor")
      .kernel(permute_mask_map)
      .meta(permute_mask_map_meta)
      .python([](const Tensor& mask) {
        if (must_dispatch({&mask})) return Dispatched::call<permute_mask_map>("te::permute_mask_map", mask);
        return permute_mask_map(mask);
      });
  ops.op("permute_row_map(Tensor ids, int first_expert, int last_expert, SymInt rows, bool strict) -> (Tensor, Tensor, "
         "Tensor, Tensor)")
      .kernel(permute_row_map)
      .meta(permute_row_map_meta)
      .python([](const Tensor& ids, int64_t first, int64_t last, int64_t rows, bool strict) {
        const c10::SymInt count(rows);
        if (!must_dispatch({&ids})) return permute_row_map(ids, first, last, count, strict);
        return Dispatched::call<permute_row_map>("te::permute_row_map", ids, first, last, count, strict);
      });
  ops.op("permute_routing_fwd(Tensor probs, Tensor chosen, int first_expert, int last_expert, SymInt rows, bool "
         "count) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
      .kernel(permute_routing_fwd)
      .meta(permute_routing_fwd_meta);
  ops.op("permute_routing_bwd(Tensor grad, Tensor chosen, Tensor row_of_pair, SymInt experts) -> Tensor")
      .kernel(permute_routing_bwd)
      .meta(permute_routing_bwd_meta);
  ops.op("permute_routing(Tensor probs, Tensor chosen, int first_expert, int last_expert, SymInt rows, bool "
         "count) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
      .composite(routing_dispatched)
      .autograd(routing_autograd)
      .python(permute_routing);
  ops.op("permute_chunk_map(Tensor split_sizes, Tensor sorted_index, SymInt rows, bool count=True) -> (Tensor, Tensor)")
      .kernel(permute_chunk_map)
      .meta(permute_chunk_map_meta)
      .python([](const Tensor& sizes, const Tensor& order, int64_t row_count, bool count) {
        const c10::SymInt rows(row_count);
        if (!must_dispatch({&sizes, &order})) return permute_chunk_map(sizes, order, rows, count);
        return Dispatched::call<permute_chunk_map>("te::permute_chunk_map", sizes, order, rows, count);
      });
  ops.op("permute_fwd(Tensor inp, Tensor map, bool of_mask, Tensor? probs, Tensor? pad_offsets, Tensor? scales, SymInt "
         "rows) -> (Tensor, Tensor, Tensor)")
      .kernel(permute_fwd)
      .meta(permute_fwd_meta);
  ops.op("permute_probs_bwd(Tensor grad, Tensor map, Tensor? pad_offsets) -> Tensor")
      .kernel(permute_probs_bwd)
      .meta(permute_probs_bwd_meta);
  ops.op("unpermute_fwd(Tensor inp, Tensor map, bool of_mask, Tensor? probs, Tensor? pad_offsets, Tensor? row_probs) "
         "-> "
         "Tensor")
      .kernel(unpermute_fwd)
      .meta(unpermute_fwd_meta);
  ops.op("unpermute_bwd(Tensor grad, Tensor map, bool of_mask, Tensor? inp, Tensor probs, Tensor? pad_offsets, SymInt "
         "rows, bool to_rows) -> (Tensor, Tensor)")
      .kernel(unpermute_bwd)
      .meta(unpermute_bwd_meta);
  ops.op("permute_gather_fwd(Tensor inp, Tensor source) -> Tensor")
      .kernel(permute_gather_fwd)
      .meta(permute_gather_fwd_meta);
  ops.op("permute(Tensor inp, Tensor map, bool of_mask, Tensor? probs, Tensor? pad_offsets, SymInt rows) -> (Tensor, "
         "Tensor)")
      .composite(permute_dispatched)
      .autograd(permute_autograd)
      .python(permute);
  ops.op("unpermute(Tensor inp, Tensor map, bool of_mask, Tensor? probs, Tensor? pad_offsets) -> Tensor")
      .composite(unpermute_dispatched)
      .autograd(unpermute_autograd)
      .python(unpermute);
  ops.op("permute_gather(Tensor inp, Tensor source, Tensor destination, Tensor? probs) -> (Tensor, Tensor)")
      .composite(permute_gather_dispatched)
      .autograd(permute_gather_autograd)
      .python(permute_gather);
}

}  // namespace te_torch
