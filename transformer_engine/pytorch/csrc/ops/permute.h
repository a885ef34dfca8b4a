// The kernels of permute with their Meta functions: checks, allocation, calls of the engine. Contracts:
// transformer_engine/permute.h.
#pragma once

#include "core/common.h"

namespace te_torch {

// [T, E] (bool, uint8 or int32) -> the map, int32 [T, 2 E + 1].
Tensor permute_mask_map(const Tensor& routing_map);
Tensor permute_mask_map_meta(const Tensor& routing_map);

// ids int32 [T, k] -> (token of each row [rows], row of each pair [T, k], offsets [experts + 1], panels [1]), int32.
// An id outside of [first, last) has no row. strict: on the CPU it is an error, on a GPU split_counters counts its pair
// as cut.
using Maps = std::tuple<Tensor, Tensor, Tensor, Tensor>;
Maps permute_row_map(const Tensor& ids, int64_t first, int64_t last, c10::SymInt rows, bool strict);
Maps permute_row_map_meta(const Tensor& ids, int64_t first, int64_t last, c10::SymInt rows, bool strict);

// The map of a router's choice: probs [T, E] and chosen int32 [T, k] -> (their probabilities [rows], token of each row
// [rows], rows of each token [T, k] by their experts, offsets [experts + 1], tokens of every expert int64 [E]).
// count: pairs that have no row are counted by split_counters. into: receives the tokens of every expert, in place of a
// new tensor; undefined: none. zero: one float32 that receives 0; undefined: none.
using Routed = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
Routed permute_routing_fwd(const Tensor& probs, const Tensor& chosen, int64_t first, int64_t last, c10::SymInt rows,
                           bool count);
Routed permute_routing_into(const Tensor& probs, const Tensor& chosen, int64_t first, int64_t last, int64_t rows,
                            bool count, const Tensor& into, const Tensor& zero);
Routed permute_routing_fwd_meta(const Tensor& probs, const Tensor& chosen, int64_t first, int64_t last,
                                c10::SymInt rows, bool count);
// The gradient [T, experts] of probs, from that of the rows' [rows].
Tensor permute_routing_bwd(const Tensor& grad, const Tensor& chosen, const Tensor& row_of_pair, c10::SymInt experts);
Tensor permute_routing_bwd_meta(const Tensor& grad, const Tensor& chosen, const Tensor& row_of_pair,
                                c10::SymInt experts);

// Called by Python in eager mode.
Routed permute_routing(const Tensor& probs, const Tensor& chosen, int64_t first, int64_t last, int64_t rows, bool count,
                       const OptionalTensor& counts);

// (source, destination), int32 [rows]. count: on a GPU, split_counters counts chunks that do not fit.
std::tuple<Tensor, Tensor> permute_chunk_map(const Tensor& sizes, const Tensor& order, c10::SymInt rows, bool count);
std::tuple<Tensor, Tensor> permute_chunk_map_meta(const Tensor& sizes, const Tensor& order, c10::SymInt rows,
                                                  bool count);

// (rows [rows, H], their probabilities [rows] or [0], scales [blocks, roundup(rows, 4)] or [0]).
using Permuted = std::tuple<Tensor, Tensor, Tensor>;
Permuted permute_fwd(const Tensor& inp, const Tensor& map, bool of_mask, const OptionalTensor& probs,
                     const OptionalTensor& pad_offsets, const OptionalTensor& scales, c10::SymInt rows);
Permuted permute_fwd_meta(const Tensor& inp, const Tensor& map, bool of_mask, const OptionalTensor& probs,
                          const OptionalTensor& pad_offsets, const OptionalTensor& scales, c10::SymInt rows);

// The gradient [T, E] of a mask's probabilities, from that of the rows' [rows].
Tensor permute_probs_bwd(const Tensor& grad, const Tensor& map, const OptionalTensor& pad_offsets);
Tensor permute_probs_bwd_meta(const Tensor& grad, const Tensor& map, const OptionalTensor& pad_offsets);

Tensor unpermute_fwd(const Tensor& inp, const Tensor& map, bool of_mask, const OptionalTensor& probs,
                     const OptionalTensor& pad_offsets, const OptionalTensor& row_probs);
Tensor unpermute_fwd_meta(const Tensor& inp, const Tensor& map, bool of_mask, const OptionalTensor& probs,
                          const OptionalTensor& pad_offsets, const OptionalTensor& row_probs);

// (dinp [rows, H] or [0], dprobs like probs, or [0] without inp).
std::tuple<Tensor, Tensor> unpermute_bwd(const Tensor& grad, const Tensor& map, bool of_mask, const OptionalTensor& inp,
                                         const Tensor& probs, const OptionalTensor& pad_offsets, c10::SymInt rows,
                                         bool to_rows);
std::tuple<Tensor, Tensor> unpermute_bwd_meta(const Tensor& grad, const Tensor& map, bool of_mask,
                                              const OptionalTensor& inp, const Tensor& probs,
                                              const OptionalTensor& pad_offsets, c10::SymInt rows, bool to_rows);

// inp [rows, H] or [rows], of any dtype.
Tensor permute_gather_fwd(const Tensor& inp, const Tensor& source);
Tensor permute_gather_fwd_meta(const Tensor& inp, const Tensor& source);

}  // namespace te_torch
