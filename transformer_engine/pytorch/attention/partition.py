"""The division of packed sequences over the ranks of a context-parallel group, such that causal attention has the same
cost on each. Indices alone; nothing is communicated here."""

import torch

from transformer_engine.pytorch._internal.arguments import check_size
from transformer_engine.pytorch._internal.torch_private import assert_async


def thd_get_partitioned_indices(
    cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int
) -> torch.Tensor:
    """The tokens of one rank, int32 [total_tokens / world_size]: each sequence is cut into 2 * world_size equal chunks,
    and rank r has chunks r and 2 * world_size - 1 - r of each, in order.

    cu_seqlens: int32 [sequences + 1], the beginning of each sequence, and the end of the last one at total_tokens;
    their lengths are multiples of 2 * world_size. Errors: ValueError for sizes that do not fit; the values of
    cu_seqlens on a GPU are checked there, and a wrong one fails an assertion on the device.
    """
    op = "thd_get_partitioned_indices"
    check_size(op, "world_size", world_size, 1)
    check_size(op, "rank", rank)
    check_size(op, "total_tokens", total_tokens)
    if rank >= world_size:
        raise ValueError(f"{op}: argument 'rank' is {rank}, wanted one below world_size {world_size}.")
    fits = isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.dim() == 1 and len(cu_seqlens) > 0
    if not fits or cu_seqlens.dtype is not torch.int32:
        got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}" if isinstance(cu_seqlens, torch.Tensor) else cu_seqlens
        raise ValueError(f"{op}: argument 'cu_seqlens' is {got}, wanted an int32 tensor of one dimension.")
    chunks = 2 * world_size
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    divided = (lengths % chunks == 0).all() & (lengths >= 0).all()
    divided &= (cu_seqlens[0] == 0) & (cu_seqlens[-1] == total_tokens)
    wanted = f"wanted sequences from 0 to total_tokens {total_tokens} whose lengths are multiples of {chunks}"
    if cu_seqlens.is_cuda:
        assert_async(divided, f"{op}: argument 'cu_seqlens' does not fit: {wanted}")
    elif not divided:
        raise ValueError(f"{op}: argument 'cu_seqlens' is {cu_seqlens.tolist()}, {wanted}: pad them to it.")
    own = torch.arange(total_tokens // world_size, dtype=torch.int32, device=cu_seqlens.device)
    own_starts = starts // world_size
    sequence = torch.searchsorted(own_starts, own, right=True) - 1
    place = own - own_starts[sequence]
    chunk = (lengths // chunks)[sequence]
    later = torch.where(place < chunk, rank, chunks - 2 - rank)  # tokens between the first and the second chunk
    return starts[sequence] + place + later.to(torch.int32) * chunk
