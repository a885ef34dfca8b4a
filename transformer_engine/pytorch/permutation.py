"""Permutation of tokens to the order of their experts and back, and of chunks of rows. functional/permute.py computes;
docs/guide/moe.md has the layouts."""

import operator
import warnings
from collections.abc import Sequence

import torch

from transformer_engine.pytorch import functional
from transformer_engine.pytorch._internal.arguments import check_size, check_tensor
from transformer_engine.pytorch._internal.compiling import in_a_mode, refuse
from transformer_engine.pytorch._internal.recompute_phase import is_recomputed
from transformer_engine.pytorch.functional.permute import MAX_EXPERTS
from transformer_engine.pytorch.tensor.float8 import Float8Tensor
from transformer_engine.pytorch.tensor.float8_blockwise import Float8BlockwiseQTensor
from transformer_engine.pytorch.tensor.storage import QuantizedTensorStorage
from transformer_engine.pytorch.verdict import count_splits

_MASKS = (torch.bool, torch.uint8, torch.int32)


# ---- checks ----


def _has_values() -> bool:
    """Whether tensors on the CPU can be read: not those of a tracer."""
    return not torch.compiler.is_compiling() and not in_a_mode()


def _check_rows(op: str, inp: torch.Tensor, classes: tuple[type, ...] = ()) -> None:
    """inp: [tokens, hidden], plain or one of the quantized classes."""
    check_tensor(op, "inp", inp)
    if isinstance(inp, QuantizedTensorStorage):
        _check_quantized(op, inp, classes)
    if inp.dim() != 2:
        raise ValueError(f"{op}: argument 'inp' has shape {tuple(inp.shape)}, wanted [tokens, hidden].")


def _check_quantized(op: str, inp: QuantizedTensorStorage, classes: tuple[type, ...]) -> None:
    kind = type(inp).__name__
    if torch.compiler.is_compiling() and classes:
        refuse(f"{op}: argument 'inp' is a {kind}, which cannot be compiled; pass a plain tensor.", RuntimeError)
    wide = isinstance(inp, Float8BlockwiseQTensor) and inp._is_2D_scaled
    if wide or not isinstance(inp, classes):
        names = [cls.__name__ for cls in classes]
        wanted = f"a plain tensor{''.join(f', a {name}' for name in names)}"
        blocks = " of 128 x 128 blocks" if wide else ""
        refuse(f"{op}: argument 'inp' is a {kind}{blocks}, wanted {wanted}; pass its dequantize().")
    if not inp.get_usages()["rowwise"]:
        raise ValueError(
            f"{op}: argument 'inp' is a {kind} without rowwise data; call update_usage(rowwise_usage=True)."
        )


def _check_mask(op: str, inp: torch.Tensor, routing_map: torch.Tensor) -> None:
    check_tensor(op, "routing_map", routing_map)
    if routing_map.dtype not in _MASKS:
        raise ValueError(
            f"{op}: argument 'routing_map' has dtype {routing_map.dtype}, wanted bool, uint8 or int32; "
            "compare it first (routing_map > 0)."
        )
    shape = tuple(routing_map.shape)
    if len(shape) != 2 or shape[0] != inp.shape[0] or not 1 <= shape[1] <= MAX_EXPERTS:
        raise ValueError(
            f"{op}: argument 'routing_map' has shape {shape}, wanted [{inp.shape[0]}, E], E from 1 to {MAX_EXPERTS}."
        )
    _check_device(op, "routing_map", routing_map, inp)


def _check_device(op: str, argument: str, tensor: torch.Tensor, inp: torch.Tensor) -> None:
    if tensor.device != inp.device:
        raise ValueError(
            f"{op}: argument '{argument}' is on {tensor.device}, wanted {inp.device} like inp; move it with "
            ".to(device)."
        )


def _check_probs(op: str, argument: str, probs: torch.Tensor, shape: tuple[int, ...], inp: torch.Tensor) -> None:
    check_tensor(op, argument, probs)
    if not probs.is_floating_point():
        raise ValueError(f"{op}: argument '{argument}' has dtype {probs.dtype}, wanted a float dtype.")
    if tuple(probs.shape) != shape:
        raise ValueError(f"{op}: argument '{argument}' has shape {tuple(probs.shape)}, wanted {shape}.")
    _check_device(op, argument, probs, inp)


def _row_count(op: str, num_out_tokens: int | torch.Tensor, least: int) -> int:
    """num_out_tokens as an integer; a tensor must be on the CPU, as reading another one would wait for its device."""
    argument = "num_out_tokens"
    if isinstance(num_out_tokens, torch.Tensor):
        fits = num_out_tokens.dim() == 0 and num_out_tokens.device.type == "cpu"
        if not fits or num_out_tokens.is_floating_point():
            raise ValueError(
                f"{op}: argument '{argument}' is a {num_out_tokens.dtype} tensor of {num_out_tokens.dim()} dimensions "
                f"on {num_out_tokens.device}, wanted an integer, or an integer tensor without dimensions on the CPU."
            )
        num_out_tokens = num_out_tokens.item()
    elif not torch.compiler.is_compiling():
        try:
            num_out_tokens = operator.index(num_out_tokens)
        except TypeError:
            raise ValueError(f"{op}: argument '{argument}' is {num_out_tokens!r}, wanted an integer.") from None
    if num_out_tokens < least:
        raise ValueError(f"{op}: argument '{argument}' is {num_out_tokens}, wanted at least {least}.")
    return num_out_tokens


# ---- tokens to rows ----


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens in the order of their experts, within an expert in their own order: (rows, row_id_map).

    routing_map, map_type "mask": [T, E], bool, uint8 or int32, not 0 where a token is routed to an expert; "index": the
    expert ids [T, k], int32 (other integers are cast, with a warning).
    num_out_tokens: the number of rows, an integer or a CPU tensor without dimensions; for "index", 0 is T * k. Pairs
    past it are dropped; rows past the pairs are 0. max_token_num: without an effect.
    row_id_map: int32, for moe_unpermute: [T, 2 E + 1], or [T * k].
    inp: [T, hidden], float32, float16 or bfloat16; or a Float8Tensor, or a Float8BlockwiseQTensor of 1 x 128 blocks,
    with rowwise data: the rows are of the same class, with the same bytes, and the gradient is plain (not compiled).
    Errors: ValueError naming the argument. Ids outside of [0, 1024) are a ValueError on the CPU; on a GPU, where the
    host does not wait, such a pair is dropped, and te.verdict.watch() counts it as cut.
    """
    op = "moe_permute"
    if map_type == "index":
        return _permute_by_ids(op, inp, routing_map, num_out_tokens)
    if map_type != "mask":
        raise ValueError(f"{op}: argument 'map_type' is {map_type!r}, wanted 'mask' or 'index'.")
    rows, _, row_id_map = _permute_by_mask(op, inp, routing_map, num_out_tokens, 1)
    return rows, row_id_map


def _permute_by_ids(
    op: str, inp: torch.Tensor, ids: torch.Tensor, num_out_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_rows(op, inp, (Float8Tensor, Float8BlockwiseQTensor))
    check_tensor(op, "routing_map", ids)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise ValueError(f"{op}: argument 'routing_map' has dtype {ids.dtype}, wanted expert ids in int32.")
    if ids.dim() != 2 or ids.shape[0] != inp.shape[0]:
        raise ValueError(f"{op}: argument 'routing_map' has shape {tuple(ids.shape)}, wanted [{inp.shape[0]}, k].")
    _check_device(op, "routing_map", ids, inp)
    if ids.dtype is not torch.int32:
        if not torch.compiler.is_compiling():
            warnings.warn(f"{op}: argument 'routing_map' has dtype {ids.dtype} and is cast to int32.", stacklevel=3)
        ids = ids.int()
    pairs = ids.shape[0] * ids.shape[1]
    rows = _row_count(op, num_out_tokens, 0)
    if ids.is_cuda and not torch.compiler.is_compiling():
        count_splits(op, ids.device)
    try:
        _, row_map, _, _ = functional.permute_row_map(ids, (0, MAX_EXPERTS), pairs, strict=not is_recomputed())
    except ValueError as error:
        raise ValueError(
            str(error).replace("te_permute_row_map: argument 'ids'", f"{op}: argument 'routing_map'")
        ) from None
    out, _ = functional.permute(inp, row_map, pairs if rows == 0 else rows, of_mask=False)
    return out, row_map.view(-1)


def _permute_by_mask(
    op: str,
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int,
    least_rows: int,
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, their probabilities, row_id_map)"""
    _check_rows(op, inp, (Float8Tensor, Float8BlockwiseQTensor))
    _check_mask(op, inp, routing_map)
    if probs is not None:
        _check_probs(op, "probs", probs, tuple(routing_map.shape), inp)
    rows = _row_count(op, num_out_tokens, 0 if inp.shape[0] == 0 else least_rows)
    row_id_map = functional.permute_mask_map(routing_map)
    out, row_probs = functional.permute(inp, row_id_map, rows, of_mask=True, probs=probs, pad_offsets=pad_offsets)
    return out, row_probs, row_id_map


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """moe_permute by a mask, with the probabilities [T, E] of a float dtype: (rows, the rows' probabilities,
    row_id_map).

    A routed pair whose probability is exactly 0 gets a row of 0, without a gradient. The gradient of probs is 0 where
    nothing is routed or the pair is dropped.
    """
    return _permute_by_mask("moe_permute_with_probs", inp, routing_map, num_out_tokens, 1, probs)


def moe_permute_and_pad_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    align_size: int,
    num_out_tokens: int | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """moe_permute_with_probs with each expert's rows rounded up to a multiple of align_size: (rows, the rows'
    probabilities, row_id_map, pad_offsets, target_tokens_per_expert). Padding rows and their probabilities are 0.

    tokens_per_expert: integers [E], the mask's column sums, on any device. pad_offsets: int64 [E], for moe_unpermute;
    None if nothing is padded. target_tokens_per_expert: int64 [E].
    num_out_tokens (ours): the number of rows. Without it their number is read on the host, which waits for the device;
    with it nothing waits, pairs past it are dropped, and pad_offsets is always a tensor.
    """
    op = "moe_permute_and_pad_with_probs"
    check_tensor(op, "inp", inp)
    _check_mask(op, inp, routing_map)
    check_tensor(op, "tokens_per_expert", tokens_per_expert)
    check_size(op, "align_size", align_size, 1)
    counts = tokens_per_expert
    if counts.is_floating_point() or counts.dtype is torch.bool or tuple(counts.shape) != tuple(routing_map.shape[1:]):
        raise ValueError(
            f"{op}: argument 'tokens_per_expert' is {counts.dtype} of shape {tuple(counts.shape)}, wanted integers of "
            f"shape {tuple(routing_map.shape[1:])}."
        )
    counts = counts.long()
    target = (counts + (align_size - 1)) // align_size * align_size
    padding = target - counts
    pad_offsets = padding.cumsum(0) - padding
    if num_out_tokens is None:
        num_out_tokens, padded = torch.stack((target.sum(), padding.sum())).tolist()
        pad_offsets = pad_offsets if padded else None
    if pad_offsets is not None:
        pad_offsets = pad_offsets.to(inp.device)
    if routing_map.is_cpu and counts.is_cpu and _has_values():
        _check_counts(op, routing_map, counts)
    out, row_probs, row_id_map = _permute_by_mask(op, inp, routing_map, num_out_tokens, 0, probs, pad_offsets)
    return out, row_probs, row_id_map, pad_offsets, target


def _check_counts(op: str, routing_map: torch.Tensor, counts: torch.Tensor) -> None:
    found = (routing_map != 0).sum(0)
    if not torch.equal(found, counts):
        raise ValueError(
            f"{op}: argument 'tokens_per_expert' is {counts.tolist()!r:.200}, wanted the column sums of routing_map, "
            f"{found.tolist()!r:.200}."
        )


# ---- rows to tokens ----


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Sequence[int] | None = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of each token's rows, times merging_probs, experts ascending: in float32, rounded once.

    row_id_map: as moe_permute returned it, map_type as there. merging_probs: [T, E] for "mask", [T, k] for "index",
    where each pair is a token if there are none. restore_shape: (T, hidden), for "mask" by default inp's shape.
    pad_offsets: of moe_permute_and_pad_with_probs. probs: the deprecated name of merging_probs.
    inp: [rows, hidden], float32, float16 or bfloat16, plain. Without merging_probs the incoming gradient may be a
    Float8Tensor, or a Float8BlockwiseQTensor of 1 x 128 blocks; the gradient of inp is of the same class then.
    Errors: ValueError naming the argument.
    """
    op = "moe_unpermute"
    if probs is not None:
        if merging_probs is not None:
            raise ValueError(f"{op}: arguments 'merging_probs' and 'probs' are both given; 'probs' is its former name.")
        warnings.warn(
            f"{op}: argument 'probs' is deprecated, it is 'merging_probs' now.", DeprecationWarning, stacklevel=2
        )
        merging_probs = probs
    _check_rows(op, inp)
    check_tensor(op, "row_id_map", row_id_map)
    if row_id_map.dtype is not torch.int32:
        raise ValueError(f"{op}: argument 'row_id_map' has dtype {row_id_map.dtype}, wanted int32.")
    _check_device(op, "row_id_map", row_id_map, inp)
    if map_type not in ("mask", "index"):
        raise ValueError(f"{op}: argument 'map_type' is {map_type!r}, wanted 'mask' or 'index'.")
    if map_type == "mask":
        row_map = _mask_map(op, inp, row_id_map, merging_probs, restore_shape, pad_offsets)
    else:
        row_map = _index_map(op, inp, row_id_map, merging_probs, restore_shape, pad_offsets)
    if merging_probs is not None and merging_probs.dtype is torch.float64:
        merging_probs = merging_probs.float()
    return functional.unpermute(inp, row_map, of_mask=map_type == "mask", probs=merging_probs, pad_offsets=pad_offsets)


def _as_tuple(shape: object) -> object:
    """A shape in any sequence, array or tensor of whole numbers as a tuple, which compares as a whole; other objects as
    they are."""
    if isinstance(shape, Sequence):
        return tuple(shape)
    try:
        return tuple(map(operator.index, shape))
    except (TypeError, ValueError, RuntimeError):
        return shape


def _check_restored(op: str, restore_shape: Sequence[int], tokens: int, hidden: int, default: bool) -> None:
    shape = _as_tuple(restore_shape)
    if not isinstance(shape, tuple) or shape != (tokens, hidden):
        why = "it is inp's shape by default; pass restore_shape=(T, hidden)" if default else "as the map has it"
        raise ValueError(f"{op}: argument 'restore_shape' is {shape!r}, wanted ({tokens}, {hidden}): {why}.")


def _mask_map(
    op: str,
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None,
    restore_shape: Sequence[int] | None,
    pad_offsets: torch.Tensor | None,
) -> torch.Tensor:
    shape = tuple(row_id_map.shape)
    if len(shape) != 2 or shape[1] % 2 != 1 or not 3 <= shape[1] <= 2 * MAX_EXPERTS + 1:
        raise ValueError(f"{op}: argument 'row_id_map' has shape {shape}, wanted [T, 2 E + 1] for a mask.")
    tokens, experts = shape[0], (shape[1] - 1) // 2
    default = restore_shape is None
    _check_restored(op, inp.shape if default else restore_shape, tokens, inp.shape[1], default)
    if merging_probs is not None:
        _check_probs(op, "merging_probs", merging_probs, (tokens, experts), inp)
    if pad_offsets is not None:
        check_tensor(op, "pad_offsets", pad_offsets)
        if pad_offsets.dtype is not torch.int64 or tuple(pad_offsets.shape) != (experts,):
            raise ValueError(
                f"{op}: argument 'pad_offsets' is {pad_offsets.dtype} of shape {tuple(pad_offsets.shape)}, wanted "
                f"int64 of shape ({experts},), as moe_permute_and_pad_with_probs returned it."
            )
        _check_device(op, "pad_offsets", pad_offsets, inp)
    return row_id_map


def _index_map(
    op: str,
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None,
    restore_shape: Sequence[int] | None,
    pad_offsets: torch.Tensor | None,
) -> torch.Tensor:
    """[T, k]; [T * k, 1] without probabilities."""
    if row_id_map.dim() != 1:
        raise ValueError(f"{op}: argument 'row_id_map' has shape {tuple(row_id_map.shape)}, wanted [T * k] for ids.")
    if pad_offsets is not None:
        raise ValueError(f"{op}: argument 'pad_offsets' is given, wanted None with map_type 'index'.")
    pairs = row_id_map.shape[0]
    if merging_probs is None:
        row_map = row_id_map.view(pairs, 1)
    else:
        check_tensor(op, "merging_probs", merging_probs)
        shape = tuple(merging_probs.shape)
        if len(shape) != 2 or shape[0] * shape[1] != pairs:
            raise ValueError(f"{op}: argument 'merging_probs' has shape {shape}, wanted [T, k] of {pairs} pairs.")
        _check_probs(op, "merging_probs", merging_probs, shape, inp)
        row_map = row_id_map.view(shape)
    if restore_shape is not None:
        _check_restored(op, restore_shape, row_map.shape[0], inp.shape[1], False)
    return row_map


# ---- chunks ----


def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    """Chunks of rows in another order: chunk sorted_index[i] of inp comes i-th. Rows past the sum of split_sizes stay.

    inp: [T, hidden], of any dtype, or a Float8Tensor with rowwise data (not compiled; its gradient is plain).
    split_sizes, sorted_index: integers [chunks], on the CPU or inp's device; sorted_index is a permutation.
    Errors: ValueError naming the argument. Sizes below 0 or above T in sum, and an index without each chunk once, are a
    ValueError for CPU tensors; on a GPU, where the host does not wait, sizes are cut, such rows may be 0, and
    te.verdict.watch() reports them.
    """
    return _sort_chunks("moe_sort_chunks_by_index", inp, split_sizes, sorted_index, None)[0]


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """moe_sort_chunks_by_index, the rows' probabilities [T] too: (rows, their probabilities)."""
    op = "moe_sort_chunks_by_index_with_probs"
    check_tensor(op, "probs", probs)
    return _sort_chunks(op, inp, split_sizes, sorted_index, probs)


def _sort_chunks(
    op: str,
    inp: torch.Tensor,
    split_sizes: torch.Tensor,
    sorted_index: torch.Tensor,
    probs: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_rows(op, inp, (Float8Tensor,))
    chunks = {"split_sizes": split_sizes, "sorted_index": sorted_index}
    for name, t in chunks.items():
        check_tensor(op, name, t)
        if t.is_floating_point() or t.dtype is torch.bool or t.dim() != 1 or t.shape != split_sizes.shape:
            raise ValueError(
                f"{op}: argument '{name}' is {t.dtype} of shape {tuple(t.shape)}, wanted integers of shape "
                f"[{split_sizes.numel()}], one for each chunk."
            )
    if probs is not None:
        _check_probs(op, "probs", probs, (inp.shape[0],), inp)
    if _has_values():
        _check_chunks(op, inp.shape[0], **chunks)
        if inp.is_cuda:
            count_splits(op, inp.device)
    sizes, order = (t.to(inp.device, torch.int64) for t in (split_sizes, sorted_index))
    source, destination = functional.permute_chunk_map(sizes, order, inp.shape[0], not is_recomputed())
    return functional.permute_gather(inp, source, destination, probs)


def _check_chunks(op: str, rows: int, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> None:
    """Those on the CPU."""
    chunks = split_sizes.numel()
    if sorted_index.is_cpu and sorted(order := sorted_index.tolist()) != list(range(chunks)):
        raise ValueError(f"{op}: argument 'sorted_index' is {order!r:.200}, wanted a permutation of 0 to {chunks - 1}.")
    if split_sizes.is_cpu and (min(sizes := split_sizes.tolist(), default=0) < 0 or sum(sizes) > rows):
        raise ValueError(
            f"{op}: argument 'split_sizes' is {sizes!r:.200}, wanted sizes of at least 0 with a sum of at most {rows}, "
            "the rows of inp."
        )
