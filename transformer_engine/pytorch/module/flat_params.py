"""Parameters that are consecutive rows of one product's matrix, as units: what lays them side by side, and how an owner
of memory (a data-parallel buffer) takes them as they are. No product is computed here, and none is split."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from transformer_engine.pytorch import _C

_numbers = itertools.count()


def row_marks(count: int) -> list[dict[str, tuple[int, int, int]]]:
    """A mark for each of `count` parameters of one unit: (the unit's number in this process, its place, their count).
    Plain numbers, so that a file of parameters can be read with weights_only."""
    number = next(_numbers) if count > 1 else None
    return [{} if number is None else {"row_unit": (number, i, count)} for i in range(count)]


class FlatParams:
    """Parameters of a module whose rows, one behind the other, are the weight or the bias of one product.

    Where they lie so in one storage a forward joins them without a copy. names: in their order. shape: of all rows
    together; dtype and device: of the first."""

    def __init__(self, module: torch.nn.Module, names: Sequence[str]) -> None:
        self._module = module
        self.names = tuple(names)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [self._module._parameters[name] for name in self.names]

    @property
    def shape(self) -> torch.Size:
        parts = self.parameters
        return torch.Size((sum(p.shape[0] for p in parts), *parts[0].shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def __repr__(self) -> str:
        return f"FlatParams({', '.join(self.names)}: {self.dtype} {list(self.shape)} on {self.device})"

    def in_order(self) -> bool:
        """Whether the rows lie one behind the other in one storage."""
        return self._unfit() is None and _C.rows_in_order(self.parameters)

    @torch.no_grad()
    def place(self, buffer: torch.Tensor) -> None:
        """Copies the values into `buffer` and makes the parameters views of it, in order. They stay the same objects,
        with their gradients, marks and hooks, and stay there until they are moved to another device or dtype.

        buffer: contiguous, of the unit's dtype and device, with as many elements as its shape, whatever its own shape;
        it may overlap the memory that the parameters are in. A callable that was captured before reads the old memory.
        Errors: ValueError for a buffer or parameters that do not fit; nothing is changed then."""
        self._check(buffer)
        buffer, parts = buffer.detach().view(self.shape), self.parameters
        if _C.rows_in_order(parts) and _location(parts[0])[:2] == _location(buffer)[:2]:
            return
        values = [p.detach() for p in parts]
        if any(_overlap(value, buffer) for value in values):
            values = [value.clone() for value in values]
            # a backward behind this may read what is written over
            torch.autograd.graph.increment_version([p for p in parts if not p.is_inference()])
        for value, rows in zip(values, self._split(buffer), strict=True):
            rows.copy_(value)
        self._take(buffer)

    def _check(self, buffer: torch.Tensor) -> None:
        op = f"{type(self._module).__name__}: row_units(): place"
        unfit = self._unfit()
        if unfit is not None:
            raise ValueError(f"{op}: {', '.join(self.names)} are {unfit}.")
        wanted = f"wanted a contiguous {self.dtype} {list(self.shape)}, or as many elements in a row, on {self.device}"
        if not isinstance(buffer, torch.Tensor) or type(buffer) not in (torch.Tensor, torch.nn.Parameter):
            raise ValueError(f"{op}: argument 'buffer' is a {type(buffer).__name__}, {wanted}.")
        strided = buffer.layout is torch.strided
        fits = (buffer.dtype, buffer.device, buffer.numel()) == (self.dtype, self.device, self.shape.numel())
        if not (fits and strided and buffer.is_contiguous() and not buffer.is_neg()):
            layout = "" if strided and buffer.is_contiguous() and not buffer.is_neg() else ", not contiguous"
            raise ValueError(
                f"{op}: argument 'buffer' is {buffer.dtype} {list(buffer.shape)} on {buffer.device}{layout}, {wanted}."
            )
        if buffer.is_inference():
            raise ValueError(
                f"{op}: argument 'buffer' was made in inference mode, wanted memory that training can write; "
                "make it outside."
            )
        end = (buffer.storage_offset() + buffer.numel()) * buffer.element_size()
        if buffer.numel() and buffer.untyped_storage().nbytes() < end:
            raise ValueError(f"{op}: argument 'buffer' is {list(buffer.shape)}, but its memory has been freed.")

    def _unfit(self) -> str | None:
        """Why the parameters cannot be rows of one tensor as they are, or None."""
        parts = self.parameters
        if any(type(p) is not torch.nn.Parameter for p in parts):
            return f"{sorted({type(p).__name__ for p in parts})}, wanted plain parameters"
        if len({(p.dtype, p.device, p.shape[1:]) for p in parts}) > 1:
            kinds = [f"{p.dtype} {list(p.shape)} on {p.device}" for p in parts]
            return f"{', '.join(kinds)}, wanted one dtype, device and row length; convert the module first"
        if len({id(p) for p in parts}) < len(parts):
            return "partly one parameter, wanted one for each name"
        return None

    def _split(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return buffer.split([p.shape[0] for p in self.parameters])

    def _take(self, buffer: torch.Tensor) -> None:
        for part, rows in zip(self.parameters, self._split(buffer), strict=True):
            part.data = rows

    def _locations(self) -> list[object]:
        return [_location(p) if type(p) is torch.nn.Parameter else id(p) for p in self.parameters]

    @torch.no_grad()
    def _flatten(self) -> None:
        """Lays the rows side by side, unless an owner laid them out: each has to fill its storage, or to lie in one as
        large as the unit, which is how a module lays them."""
        parts = self.parameters
        if self._unfit() is not None or parts[0].is_meta:
            return
        for part in parts:  # what a state dict handed out, assigned: back into the memory that it is a part of
            rows = part.detach()
            buffer = _C.whole_storage(rows)
            if buffer is not rows:
                part.data = buffer
        if _C.rows_in_order(parts):
            return
        size = self.shape.numel() * self.dtype.itemsize
        if all(p.untyped_storage().nbytes() in (p.nbytes, size) for p in parts):
            self._take(torch.cat([p.detach() for p in parts]))


def _location(t: torch.Tensor) -> tuple[object, ...]:
    """Where it lies. By storage and offset: a tensor without elements has no address."""
    return t.untyped_storage()._cdata, t.storage_offset(), t.dtype


def _extent(t: torch.Tensor) -> tuple[int, int]:
    """Addresses of its first byte and behind its last one. What lies behind that in its storage is another's."""
    elements = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    return t.data_ptr(), t.data_ptr() + elements * t.element_size()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (first, last), (other_first, other_last) = _extent(one), _extent(other)
    return first < other_last and other_first < last


def flat_params_of(module: torch.nn.Module) -> list[FlatParams]:
    """The units of this module alone, without its submodules; parameters that are no part of one are not here."""
    ours = module._parameters
    several = [names for names in module._unit_names() if len(names) > 1]
    return [FlatParams(module, names) for names in several if all(ours.get(name) is not None for name in names)]


def flatten_moved(module: torch.nn.Module, before: dict[tuple[str, ...], list[object]]) -> None:
    """Joins the units that do not lie where they lay before."""
    for flat in flat_params_of(module):
        if flat._locations() != before.get(flat.names):
            flat._flatten()


@contextmanager
def kept_flat(module: torch.nn.Module) -> Iterator[None]:
    """Around what may move a module's parameters: units stay where they are while nothing moves them, and are joined
    again behind what does."""
    before = {flat.names: flat._locations() for flat in flat_params_of(module)}
    yield
    module._settle(before)


def renumber_marks(tags: Iterable[dict[str, object]]) -> None:
    """A copy of a module has units of its own: in the marks of its parameters."""
    numbers: defaultdict[int, int] = defaultdict(lambda: next(_numbers))
    for marks in tags:
        if "row_unit" in marks:
            number, *rest = marks["row_unit"]
            marks["row_unit"] = (numbers[number], *rest)
