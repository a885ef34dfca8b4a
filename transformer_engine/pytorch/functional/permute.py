"""Tokens in the order of their experts and back, chunks of rows, and the maps of both, as functions of a map. Formulas:
transformer_engine/permute.h. permutation.py has the functions that clients call."""

import torch

from transformer_engine.pytorch import _C

MAX_EXPERTS = 1024


def permute_mask_map(routing_map: torch.Tensor) -> torch.Tensor:
    """[T, E] (bool, uint8 or int32) -> the map, int32 [T, 2 E + 1]: of each token the rows of its experts, ascending;
    from column E on these experts; their number in the last column; -1 elsewhere."""
    if torch.compiler.is_compiling():
        return torch.ops.te.permute_mask_map(routing_map)
    return _C.permute_mask_map(routing_map)


def permute_row_map(
    ids: torch.Tensor, experts: tuple[int, int], rows: int, strict: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The map by rows of expert ids, int32 [T, k], for experts [first, last) alone: (token of each row [rows], row of
    each pair [T, k], offsets [experts + 1], panels [1]), all int32, in one launch.

    -1: a row without a token; a pair of another expert, or whose row is not below `rows`. offsets: the experts' first
    rows, at most `rows`. panels: the sum of their ceil(rows / 128). strict: an id outside of the range is a
    ValueError on the CPU; on a GPU te.verdict.watch() counts its pair as cut."""
    args = (ids, *experts, rows, strict)
    if torch.compiler.is_compiling():
        return torch.ops.te.permute_row_map(*args)
    return _C.permute_row_map(*args)


def permute_routing(
    probs: torch.Tensor,
    chosen: torch.Tensor,
    experts: tuple[int, int],
    rows: int,
    *,
    count: bool = True,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The map by rows of a router's choice, with the probabilities of the rows: (row_probs [rows], token of each row
    [rows], rows of each token [T, k], offsets [experts + 1], tokens of every expert int64 [E]), in one launch.

    probs [T, E], a float dtype; chosen int32 [T, k]; experts: as permute_row_map. The rows of a token are in the order
    of its experts. A pair whose probability is exactly 0 has a place among the rows, but the row has no token and the
    token has no row. Maps as permute_row_map's; row_probs is 0 past the last row. The gradient of probs is 0 where
    there is no row. count: te.verdict.split_verdict() counts the pairs of these experts that `rows` does not hold, as
    by grouped_offsets(), and raises its capacity_factor where there are such pairs. counts: int64 [E], which receives
    the tokens of every expert in place of a new tensor. Saves: chosen and the rows of each token."""
    args = (probs, chosen, *experts, rows, count)
    if torch.compiler.is_compiling():
        *routed, new = torch.ops.te.permute_routing(*args)
        return (*routed, new if counts is None else counts.copy_(new))
    return _C.permute_routing(*args, counts)


def permute_chunk_map(
    split_sizes: torch.Tensor, sorted_index: torch.Tensor, rows: int, count: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(source, destination), int32 [rows], of chunks of rows in another order: out[i] = inp[source[i]]. Both tensors
    int64, on the device of the rows. count: on a GPU, te.verdict counts sizes below 0, and as cut rows beyond `rows`,
    rows of chunks that the order leaves out, and its entries that name no chunk or one of another entry."""
    if torch.compiler.is_compiling():
        return torch.ops.te.permute_chunk_map(split_sizes, sorted_index, rows, count)
    return _C.permute_chunk_map(split_sizes, sorted_index, rows, count)


def permute(
    inp: torch.Tensor,
    row_map: torch.Tensor,
    rows: int,
    *,
    of_mask: bool,
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token of inp [T, H] in its rows of [rows, H], other rows 0, and the probabilities of the rows ([0] without
    probs). row_map: of permute_mask_map, or the row of each pair of permute_row_map. probs [T, E] and pad_offsets
    (int64 [E], added to an expert's rows) need the former; a probability of exactly 0 gives a row of 0.

    Saves: row_map, pad_offsets, the probabilities of the rows."""
    args = (inp, row_map, of_mask, probs, pad_offsets, rows)
    if torch.compiler.is_compiling():
        return torch.ops.te.permute(*args)
    return _C.permute(*args)


def unpermute(
    inp: torch.Tensor,
    row_map: torch.Tensor,
    *,
    of_mask: bool,
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of each token's rows [T, H], times probs ([T, E] or [T, k]), in the order of the map: in float32, rounded
    once. Saves: row_map, pad_offsets, probs, and inp if probs require a gradient."""
    args = (inp, row_map, of_mask, probs, pad_offsets)
    if torch.compiler.is_compiling():
        return torch.ops.te.unpermute(*args)
    return _C.unpermute(*args)


def permute_gather(
    inp: torch.Tensor, source: torch.Tensor, destination: torch.Tensor, probs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row i is inp[source[i]]; probs [rows] likewise ([0] without them). The gradient is the same by `destination`."""
    args = (inp, source, destination, probs)
    if torch.compiler.is_compiling():
        return torch.ops.te.permute_gather(*args)
    return _C.permute_gather(*args)
