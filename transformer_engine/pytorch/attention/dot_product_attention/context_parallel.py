"""Preparation of packed batches for context parallelism, as data loaders do it on tensors alone. Attention over a
context-parallel group is not available in this version."""

import itertools

import torch

from transformer_engine.pytorch._internal.arguments import check_size, check_tensor


def pad_thd_sequences_for_cp(
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    cu_seqlens: torch.Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(input_ids, labels, cu_seqlens) with each sequence padded at its end to a multiple of divisibility_factor, which
    for n ranks is a multiple of 2 n.

    input_ids, labels: the tokens of all sequences, [t] or [1, t]; the results are [t']. cu_seqlens: [sequences + 1],
    the beginning of each sequence, and the end of the last one. Its values are read, which is a sync on a GPU.
    Errors: ValueError for sizes that do not fit.
    """
    op = "pad_thd_sequences_for_cp"
    for name, t in (("input_ids", input_ids), ("labels", labels), ("cu_seqlens", cu_seqlens)):
        check_tensor(op, name, t)
    check_size(op, "divisibility_factor", divisibility_factor, 1)
    tokens, targets = (_flat(op, name, t) for name, t in (("input_ids", input_ids), ("labels", labels)))
    starts = cu_seqlens.tolist() if cu_seqlens.dim() == 1 and len(cu_seqlens) else []
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    if not starts or starts[0] != 0 or starts[-1] != len(tokens) or min(lengths, default=0) < 0:
        raise ValueError(
            f"{op}: argument 'cu_seqlens' is {cu_seqlens.tolist()}, wanted the beginning of each sequence, from 0 on, "
            f"and the end of the last one, at {len(tokens)}."
        )
    if len(targets) != len(tokens):
        raise ValueError(f"{op}: argument 'labels' has {len(targets)} entries, wanted {len(tokens)}, as input_ids has.")
    factor = divisibility_factor
    padded = [-(-length // factor) * factor for length in lengths]
    ends = torch.tensor([0, *padded], dtype=torch.int64).cumsum(0).to(dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    total = sum(padded)
    own = torch.arange(len(tokens), device=tokens.device)
    pads = [0, *(p - length for p, length in zip(padded, lengths, strict=True))]
    sizes, shifts = (torch.tensor(t, dtype=torch.int64) for t in (lengths, pads[:-1] if lengths else []))
    places = own + shifts.cumsum(0).repeat_interleave(sizes).to(own.device)
    return (
        tokens.new_full((total,), padding_token_id).index_copy_(0, places, tokens),
        targets.new_full((total,), padding_label_id).index_copy_(0, places.to(targets.device), targets),
        ends,
    )


def _flat(op: str, name: str, t: torch.Tensor) -> torch.Tensor:
    if t.dim() == 2 and t.shape[0] == 1:
        return t[0]
    if t.dim() != 1:
        raise ValueError(f"{op}: argument '{name}' has shape {tuple(t.shape)}, wanted [tokens] or [1, tokens].")
    return t
