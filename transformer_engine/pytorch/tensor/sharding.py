"""FSDP2's hooks of quantized tensors: shards are sent quantized, and the whole tensor is assembled from them. The
format declares which parts are gathered; no process group is made here."""

import math
from typing import Any, ClassVar

import torch

from transformer_engine.pytorch.tensor import layout
from transformer_engine.pytorch.tensor.layout import COLUMNWISE
from transformer_engine.pytorch.tensor.subviews import buffer_of


class Sharding:
    """The parts of a quantized storage that are gathered along its first dimension, and their return."""

    _gathered: ClassVar[tuple[str, ...]] = ()  # parts that are gathered along their first dimension
    _rows_per_scale: ClassVar[int] = 1  # a shard's rows are a multiple of it

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """The parts that are gathered. Errors: NotImplementedError if this layout cannot be gathered."""
        return self._gathered

    def fsdp_extract_buffers(self) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """(the parts that are gathered, everything else that a gathered one needs)."""
        fields = self.fsdp_buffer_fields()
        self.update_usage(rowwise_usage=True)
        rest = {n: t for n, t in self._tensors().items() if n in self._names("scale")}
        return tuple(getattr(self, name) for name in fields), rest

    def fsdp_assign_gathered(self, gathered: tuple[torch.Tensor, ...], rest: dict[str, Any]) -> None:
        """Takes gathered parts; a direction that is derived from them is recomputed, in its old memory if it has
        one."""
        before = {n: getattr(self, n) for n in self._of_direction(COLUMNWISE)}
        for name in self._parts:
            setattr(self, name, rest.get(name))
        for name, tensor in zip(self.fsdp_buffer_fields(), gathered):
            setattr(self, name, tensor)
        if any(t is not None for t in before.values()):
            self.update_usage(columnwise_usage=True)
            for name, old in before.items():
                setattr(self, name, _relaid(self._kind(name), old).copy_(getattr(self, name)))
            self._restored(COLUMNWISE)

    def _before_sharding(self, group: Any) -> None:
        """Called before its tensor becomes one of several shards."""


class FSDPHooks:
    """fsdp_pre_all_gather and fsdp_post_all_gather, as torch.distributed.fsdp.fully_shard calls them."""

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """(the gathered tensors, the metadata of fsdp_post_all_gather). Errors: NotImplementedError if blocks of scales
        would span two shards."""
        ranks, block_rows = mesh.size(), self._rows_per_scale
        rows = math.ceil(outer_size[0] / ranks)
        if ranks > 1 and block_rows > 1 and (rows % block_rows or outer_size[0] % ranks):
            raise NotImplementedError(
                f"{type(self).__name__}: a shape of {tuple(outer_size)} on {ranks} ranks has shards of {rows} rows, "
                f"wanted multiples of {block_rows}: a block of scales cannot be split. Quantize per tensor, or use "
                "fewer ranks."
            )
        self._before_sharding(mesh.get_group())
        tensors, rest = self._twin().fsdp_extract_buffers()
        return tuple(_of_rows(t, rows if block_rows == 1 else None) for t in tensors), (rest, outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """(the whole tensor, the memory that it uses); with `out`, that one takes the gathered parts."""
        rest, size = metadata
        data, *scales = all_gather_outputs
        gathered = (data[: size[0]].view(size), *scales)
        if out is not None:
            out.fsdp_assign_gathered(gathered, rest)
            return None
        parts = dict(zip(self.fsdp_buffer_fields(), gathered)) | rest
        result = self._like(parts, size)
        inner = list(all_gather_outputs)
        if self._quantizer is not None and self._quantizer.columnwise_usage:
            result.update_usage(columnwise_usage=True)
            result._keeps_columnwise = True
            inner += [buffer_of(getattr(result, n)) for n in result._of_direction(COLUMNWISE)]
        return result, tuple(inner)


def _relaid(kind: str, old: torch.Tensor) -> torch.Tensor:
    """The part in old's memory, which has been freed and allocated again: its padding is zeroed again."""
    return layout.lay_out(buffer_of(old), kind, old.shape) if kind in layout.DATA else old


def _of_rows(t: torch.Tensor, rows: int | None) -> torch.Tensor:
    """t with so many rows, padded by zeros: shards have equal sizes."""
    if rows is None or t.shape[0] == rows:
        return t.contiguous()
    padded = t.new_zeros((rows, *t.shape[1:]))
    padded[: t.shape[0]] = t
    return padded
