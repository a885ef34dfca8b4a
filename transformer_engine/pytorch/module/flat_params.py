"""Parameters that are consecutive rows of one product's matrix, as views of one buffer. An owner of memory (a
data-parallel buffer) can place them in its own. No product is computed here, and none is split."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from transformer_engine.pytorch import _C

_numbers = itertools.count()


def row_marks(count: int) -> list[dict[str, tuple[int, int, int]]]:
    """A mark for each of `count` parameters: (number of the flat parameter in this process, index, count). Plain
    numbers, so that a file of parameters can be read with weights_only."""
    number = next(_numbers) if count > 1 else None
    return [{} if number is None else {"row_unit": (number, i, count)} for i in range(count)]


class FlatParams:
    """Parameters of a module whose rows, in order, are the weight or the bias of one product.

    If they are consecutive in one storage, a forward joins them without a copy. names: in their order. shape: of all
    rows together; dtype and device: of the first."""

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
        """Whether the rows are consecutive in one storage."""
        return self._unfit() is None and _C.rows_in_order(self.parameters)

    @torch.no_grad()
    def place(self, buffer: torch.Tensor) -> None:
        """Copies the values into `buffer` and makes the parameters views of it, in order. They stay the same objects,
        with their gradients, marks and hooks, and stay in `buffer` until they move to another device or dtype.

        buffer: contiguous, with the dtype, the device and the number of elements of these parameters, of any shape; it
        may overlap their present memory. A callable that was captured before still reads the old memory.
        Errors: ValueError for a buffer or parameters that do not fit; nothing is changed then."""
        self._check(buffer)
        buffer, parts = buffer.detach().view(self.shape), self.parameters
        if _C.rows_in_order(parts) and _location(parts[0])[:2] == _location(buffer)[:2]:
            return
        values = [p.detach() for p in parts]
        if any(_overlap(value, buffer) for value in values):
            values = [value.clone() for value in values]
            # a backward that runs later may read memory that is overwritten here
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
            raise ValueError(
                f"{op}: argument 'buffer' is {list(buffer.shape)}, but its memory has been freed; allocate it "
                "again first."
            )

    def _unfit(self) -> str | None:
        """Why the parameters cannot be rows of one tensor, or None."""
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
        """Makes the rows consecutive, unless an owner of memory placed them: each parameter must fill its storage, or
        be part of a storage of their joint size, which is how a module allocates them."""
        parts = self.parameters
        if self._unfit() is not None or parts[0].is_meta:
            return
        for part in parts:  # a tensor that a state dict returned and that was assigned: back to the memory it came from
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
    """Storage and offset of a tensor: one without elements has no address."""
    return t.untyped_storage()._cdata, t.storage_offset(), t.dtype


def _extent(t: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first byte and after its last one. The rest of its storage may belong to other tensors."""
    elements = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    return t.data_ptr(), t.data_ptr() + elements * t.element_size()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (first, last), (other_first, other_last) = _extent(one), _extent(other)
    return first < other_last and other_first < last


def flat_params_of(module: torch.nn.Module) -> list[FlatParams]:
    """The flat parameters of this module, without its submodules; a parameter in one piece is not among them."""
    ours = module._parameters
    several = [names for names in module._unit_names() if len(names) > 1]
    return [FlatParams(module, names) for names in several if all(ours.get(name) is not None for name in names)]


def flatten_moved(module: torch.nn.Module, before: dict[tuple[str, ...], list[object]]) -> None:
    """Makes those consecutive again that have moved since `before`."""
    for flat in flat_params_of(module):
        if flat._locations() != before.get(flat.names):
            flat._flatten()


@contextmanager
def kept_flat(module: torch.nn.Module) -> Iterator[None]:
    """Wraps code that may move a module's parameters: flat parameters keep their memory unless it moves them, and are
    made consecutive again if it does."""
    before = {flat.names: flat._locations() for flat in flat_params_of(module)}
    yield
    module._settle(before)


def renumber_marks(tags: Iterable[dict[str, object]]) -> None:
    """Gives the marks of a copied module numbers of their own."""
    numbers: defaultdict[int, int] = defaultdict(lambda: next(_numbers))
    for marks in tags:
        if "row_unit" in marks:
            number, *rest = marks["row_unit"]
            marks["row_unit"] = (numbers[number], *rest)
