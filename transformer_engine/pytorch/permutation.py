"""Permutation of tokens to experts and back: the names that clients import. Not available in this version."""

from collections.abc import Sequence

import torch

from transformer_engine.pytorch._internal.absent import absent

_PERMUTATION = "MoE permutation is"
_TORCH = "use torch.index_select and index_add"


@absent(_PERMUTATION, _TORCH)
def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens in the order of their experts, and the map back."""


@absent(_PERMUTATION, _TORCH)
def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As moe_permute, the probabilities too."""


@absent(_PERMUTATION, _TORCH)
def moe_permute_and_pad_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    align_size: int,
) -> tuple[torch.Tensor, ...]:
    """As moe_permute_with_probs, each expert's tokens padded to a multiple."""


@absent(_PERMUTATION, _TORCH)
def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Sequence[int] | None = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Back to the order of the tokens, their experts' results added up."""


@absent(_PERMUTATION, _TORCH)
def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    """Chunks of rows in another order."""


@absent(_PERMUTATION, _TORCH)
def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As moe_sort_chunks_by_index, the probabilities too."""
