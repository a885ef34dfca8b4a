"""The number of rows of each group of a call: known to the host, or to the device alone. Checks of buffers that results
are written into. No product is computed here."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from transformer_engine.pytorch import functional
from transformer_engine.pytorch._internal.compiling import differs
from transformer_engine.pytorch._internal.recompute_phase import is_recomputed
from transformer_engine.pytorch.verdict import count_splits


@dataclass(frozen=True)
class Splits:
    """Either the rows of each group, on the host, or the start of each group's rows, on the device."""

    host: Sequence[int] = ()
    offsets: torch.Tensor | None = None

    def parts(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """The rows of each group. Waits for the device if the splits are on the device."""
        rows = rows.flatten(0, -2) if rows.dim() > 1 else rows.unsqueeze(0)
        counts = self.host if self.offsets is None else self.offsets.diff().tolist()
        first = 0
        for count in counts:
            yield rows[first : first + count]
            first += count


def splits_of(op: str, m_splits: object, inp: torch.Tensor, groups: int) -> Splits:
    """Checks the argument `m_splits`; a recomputation does not count bad splits again. A Splits is returned as it is.

    Errors: ValueError if it does not fit."""
    if isinstance(m_splits, Splits):
        return m_splits
    if not isinstance(m_splits, torch.Tensor):
        return Splits(_checked(op, whole_numbers(op, m_splits, groups), inp))
    integers = m_splits.dtype in (torch.int32, torch.int64) and m_splits.layout is torch.strided
    if not integers or m_splits.dim() != 1 or differs(m_splits.shape[0], groups):
        raise ValueError(
            f"{op}: argument 'm_splits' is a {m_splits.dtype} tensor of shape {list(m_splits.shape)}, wanted "
            f"torch.int32 or torch.int64 [{groups}]."
        )
    if m_splits.device == inp.device:
        if inp.is_cuda and not torch.compiler.is_compiling():
            count_splits(op, inp.device)
        return Splits(offsets=functional.grouped_offsets(m_splits, inp, count=not is_recomputed()))
    if m_splits.device.type != "cpu":
        raise ValueError(
            f"{op}: argument 'm_splits' is on {m_splits.device}, wanted {inp.device}, inp's, or the CPU; move it."
        )
    return Splits(_checked(op, whole_numbers(op, m_splits, groups), inp))


def whole_numbers(op: str, m_splits: object, groups: int) -> list[int]:
    """Numbers of rows, one for each group. Waits for the device if `m_splits` is on the device."""
    try:
        counts = [operator.index(count) for count in (m_splits.tolist() if hasattr(m_splits, "tolist") else m_splits)]
    except TypeError:
        raise ValueError(
            f"{op}: argument 'm_splits' is {m_splits!r}, wanted {groups} whole numbers, in a list or a tensor."
        ) from None
    if len(counts) != groups:
        raise ValueError(f"{op}: argument 'm_splits' has {len(counts)} numbers, wanted {groups}, one for each group.")
    if min(counts) < 0:
        raise ValueError(f"{op}: argument 'm_splits' is {counts}, wanted numbers of rows, none of them negative.")
    return counts


def _checked(op: str, counts: list[int], inp: torch.Tensor) -> list[int]:
    rows = inp.shape[:-1].numel()
    if sum(counts) != rows:
        raise ValueError(
            f"{op}: argument 'm_splits' is {counts}, which adds up to {sum(counts)}, wanted inp's {rows} rows."
        )
    return counts


def check_buffer(op: str, argument: str, buffer: object, inp: torch.Tensor, width: int, dtype: torch.dtype) -> None:
    """Raises if a result [inp's rows, width] cannot be written into `buffer`."""
    rows = inp.shape[:-1].numel()
    wanted = f"wanted a contiguous {dtype} [{rows}, {width}] on {inp.device} without requires_grad"
    if type(buffer) is not torch.Tensor:
        raise ValueError(f"{op}: argument '{argument}' is a {type(buffer).__name__}, {wanted}.")
    fits = (tuple(buffer.shape), buffer.dtype, buffer.device) == ((rows, width), dtype, inp.device)
    if not fits or not buffer.is_contiguous() or buffer.requires_grad:
        layout = "" if buffer.is_contiguous() else ", not contiguous"
        grad = ", which requires a gradient" if buffer.requires_grad else ""
        raise ValueError(
            f"{op}: argument '{argument}' is {buffer.dtype} {list(buffer.shape)} on {buffer.device}{layout}{grad}, "
            f"{wanted}."
        )
    if buffer.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{op}: argument '{argument}' was made in inference mode, wanted memory that autograd can follow; make it "
            "outside."
        )
    if _meets(buffer, inp):
        raise ValueError(f"{op}: argument '{argument}' shares memory with inp, which the backward reads; {wanted}.")


def _meets(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they may share memory: the bytes that they span overlap."""
    if not (one.numel() and other.numel()):
        return False
    reach = [1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in (one, other)]
    spans = [(t.data_ptr(), t.data_ptr() + n * t.element_size()) for t, n in zip((one, other), reach, strict=True)]
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]
