"""Writes to some rows of a quantized tensor, through a view of them. If one scale holds for all rows, the new values
must fit the scale, or the scale must fit them, and the other rows must keep their values; a direction that is not a
view is recomputed. Nothing waits for the device."""

import math
from typing import Any

import torch

from transformer_engine.pytorch.tensor import engine
from transformer_engine.pytorch.tensor.layout import COLUMNWISE, ROWWISE


class Rows:
    """The part of a quantized storage that records whether it is rows of another one.

    _rows_of: (base, the number of its first element in base); None: it is not rows of another one."""

    _rows_of: tuple[Any, int] | None = None

    def _are_rows_of(self, base: "Rows", first: int) -> None:
        """It is a view of base's rows from `first` on."""
        self._rows_of = (base, first * math.prod(base.shape[1:]))
        self._share_base(base)
        if self._member is not None:
            self._member.first = self._rows_of[1]

    def _share_base(self, other: "Rows") -> None:
        """It is a view of `other`, which may itself be rows of another one."""
        if other._rows_of is not None:
            base, first = other._rows_of
            self._rows_of = (base, first + (0 if self._rows_of is None else self._rows_of[1]))

    def _write_quantized_rows(self, src: "Rows") -> None:
        near = src.device == self.device
        src = src._twin() if near else src._like(src._copied(self.device), src.size())
        src.update_usage(rowwise_usage=True)
        with torch.no_grad():
            self._write_rows(src, src._dequantize(torch.float32))

    def _write_rows(self, written: "Rows", values: torch.Tensor, noop: torch.Tensor | None = None) -> None:
        """values: the new values. written: the same, quantized alone. noop: unless it holds 0, nothing is written."""
        base, first = self._rows_of
        base._must_hold_data("write to rows of it")
        if values.is_meta or not values.numel():
            return
        if not engine.is_plain(values, *base._tensors().values()):
            raise NotImplementedError(
                f"{type(self).__name__}: writing to rows of a tensor cannot be traced; write to it outside of "
                "torch.compile, or to the whole tensor."
            )
        if self._names("scale"):
            self._fit_rows(base, slice(first, first + values.numel()), written, values, noop)
        else:
            self._put(written._tensors(), noop)
            if not base.get_usages()[ROWWISE]:
                raise RuntimeError(
                    f"{type(self).__name__}: the tensor that it is rows of has dropped its rowwise data, which they "
                    "share; write to the whole tensor."
                )
            rowwise = {n: base._tensors()[n] for n in base._of_direction(ROWWISE)}
            if rowwise:  # a format without directions has only values
                base._put(rowwise, noop)
        base._written()
        base._took()
        if isinstance(self, torch.Tensor):
            torch.autograd.graph.increment_version(self)

    def _fit_rows(
        self, base: "Rows", rows: slice, written: "Rows", values: torch.Tensor, noop: torch.Tensor | None
    ) -> None:
        """The base keeps its scale if `values` fit into it, and every other row its bytes; otherwise all rows take the
        scale of `written`, as `values` do if the other rows are zero."""
        own = base._scale_inv
        every = base._dequantize(torch.float32).view(-1)
        every[rows] = 0
        alone = (every == 0).all()
        every[rows] = values.reshape(-1).float()
        amax = engine.amax(values)
        given = torch.where((amax > 0) & amax.isfinite(), written._scale_inv, 0.0)
        scale_inv = torch.where((given > own) | ((given > 0) & alone), given, own)
        scale_inv = torch.where(scale_inv == 0, 1.0, scale_inv)  # the base had not been written
        data = base._by_scale(every.view(base.shape), scale_inv).reshape(-1)
        data[rows] = torch.where(scale_inv == given, written._data.reshape(-1), data[rows])
        for target, its in ((base, data), (self, data[rows])):
            target._put({"_data": its.view(target.shape), "_scale_inv": scale_inv}, noop)

    def _put(self, rowwise: dict[str, torch.Tensor], noop: torch.Tensor | None) -> None:
        """Writes rowwise parts into its own directions."""
        result = self._like(rowwise, self.shape)
        result.update_usage(columnwise_usage=self.get_usages()[COLUMNWISE])
        self._take(result._tensors(), noop)
