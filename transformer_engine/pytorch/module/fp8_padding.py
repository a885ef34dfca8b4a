"""Padding after each group of rows, up to a multiple that FP8 products need, and its removal. GroupedLinear of this
library takes groups of any size without it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transformer_engine.pytorch._internal.arguments import check_size, check_tensor
from transformer_engine.pytorch.module.group_splits import whole_numbers
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, get_align_size_for_quantization


class _Padding(torch.nn.Module):
    """num_gemms: how many groups. align_size: each group's rows are padded to a multiple of it; None: the multiple that
    the recipe in force needs (16 on Hopper)."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        check_size(type(self).__name__, "num_gemms", num_gemms, 1)
        if align_size is not None:
            check_size(type(self).__name__, "align_size", align_size, 1)
        self.num_gemms = num_gemms
        self.align_size = align_size

    def _sizes(self, inp: torch.Tensor, m_splits: Sequence[int], *, padded: bool) -> tuple[list[int], list[int]]:
        """(rows, rows with their padding) of each group. padded: inp has the padding. Raises if inp does not fit."""
        op = type(self).__name__
        check_tensor(op, "inp", inp)
        counts = whole_numbers(op, m_splits, self.num_gemms)
        align = self.align_size or get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())
        with_padding = [-(-count // align) * align for count in counts]
        wanted = sum(with_padding if padded else counts)
        if inp.dim() != 2 or inp.shape[0] != wanted:
            raise ValueError(
                f"{op}: argument 'inp' has shape {list(inp.shape)}, wanted [{wanted}, features] for m_splits {counts}"
                f"{f' padded to multiples of {align}' if padded else ''}."
            )
        return counts, with_padding


class Fp8Padding(_Padding):
    """Rows of zeros after each group, up to a multiple of align_size."""

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """-> (padded, its splits). inp itself if no group needs padding. Gradients of the padding are dropped."""
        counts, with_padding = self._sizes(inp, m_splits, padded=False)
        if counts == with_padding:
            return inp, counts
        pieces = []
        for part, count, padded_count in zip(inp.split(counts), counts, with_padding, strict=True):
            pieces += [part, inp.new_zeros(padded_count - count, inp.shape[1])]
        return torch.cat(pieces), with_padding


class Fp8Unpadding(_Padding):
    """Removes the rows that Fp8Padding added."""

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int]) -> torch.Tensor:
        """m_splits: without the padding. The gradient is zero in the padding's rows."""
        counts, with_padding = self._sizes(inp, m_splits, padded=True)
        if counts == with_padding:
            return inp
        return torch.cat([part[:count] for part, count in zip(inp.split(with_padding), counts, strict=True)])
