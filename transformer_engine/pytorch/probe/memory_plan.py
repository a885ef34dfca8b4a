"""te.memory_plan: what a module keeps for backward, tensor by tensor, as saved-tensor hooks see it. It measures one
forward pass; it estimates nothing."""

from __future__ import annotations

import textwrap
import weakref
from dataclasses import dataclass

import torch

from transformer_engine.pytorch.distributed.usage import usage_by_name
from transformer_engine.pytorch.optimizers.adam_states import local_of
from transformer_engine.pytorch.probe.held import Held, Inner, held_by, inner_hooks_seen
from transformer_engine.pytorch.probe.one_run import (
    gradients_returned,
    nodes_behind,
    recording,
    sample_for,
    table,
    tensors_in,
)
from transformer_engine.pytorch.saved import observed


@dataclass(frozen=True)
class SavedTensor:
    """One storage. status: 'kept'; 'parameter' (one, or its FP8 copy) or 'input' (there in any case); 'offloaded' (in
    host memory until the backward); 'recomputed' (not kept; the backward recomputes it); 'optimizer' (a state that
    it keeps of a parameter); 'arena' (where layers over a group receive: distributed.comm_usage counts it, and it does
    not grow with the number of layers). bytes: the storage's, of a recomputed one what keeping it would take."""

    module: str
    op: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    status: str
    why: str
    recompute: str


class MemoryPlan:
    """rows: a SavedTensor for each storage; kept_bytes counts those that are neither parameters nor inputs, and stay on
    the device."""

    def __init__(self, rows: list[SavedTensor]) -> None:
        self.rows = rows

    def bytes_of(self, status: str) -> int:
        return sum(row.bytes for row in self.rows if row.status == status)

    @property
    def kept_bytes(self) -> int:
        return self.bytes_of("kept")

    def __str__(self) -> str:
        notes: dict[tuple[str, str], int] = {}
        cells = []
        for r in self.rows:
            note = notes.setdefault((r.why, r.recompute), len(notes) + 1)
            shape = "x".join(map(str, r.shape)) or "-"
            cells.append((r.module, r.op, _short(r.name), shape, r.dtype, r.bytes, r.status, f"[{note}]"))
        reasons = [f"[{note}] {why}; recomputing it costs: {again}" for (why, again), note in notes.items()]
        known = ("kept", "offloaded", "recomputed", "parameter", "input", "optimizer", "arena")
        statuses = dict.fromkeys((*known, *(row.status for row in self.rows)))
        totals = ", ".join(f"{status} {self.bytes_of(status):,} B" for status in statuses)
        columns = ("module", "op", "tensor", "shape", "dtype", "bytes", "status", "why")
        text = [textwrap.fill(line, 120, subsequent_indent="    ") for line in reasons]
        return "\n".join([table(columns, cells), *text, totals])

    __repr__ = __str__


def _short(name: str) -> str:
    """Of several parameters that share a storage the first, where all of them are too many."""
    first, *others = name.split(" + ")
    return name if len(name) <= 40 else f"{first} + {len(others)} more" if others else name


class _Packed:
    """What the graph holds in place of a tensor that it keeps: it lives as long as the node does. Detached, else an
    output would hold the node that holds it, which nothing could ever free."""

    __slots__ = ("__weakref__", "module", "tensor")

    def __init__(self, module: str, tensor: torch.Tensor) -> None:
        self.module, self.tensor = module, tensor.detach()


class _Observed:
    """A tensor that a context inside of the module has; where it is is known when the forward is over."""

    def __init__(self, module: str, tensor: torch.Tensor, saved: object) -> None:
        self.module, self.tensor, self.saved = module, tensor.detach(), weakref.ref(saved)

    def __call__(self) -> _Observed | None:
        return None if self.saved() is None else self

    @property
    def away(self) -> tuple[str, str] | None:
        """(status, what bringing it back costs) of one that is elsewhere until the backward."""
        saved = self.saved()
        return None if saved is None or saved.status == "kept" else (saved.status, saved.back)


class _Beside:
    """A tensor that the graph holds without saving it: its words, and the device that it would be on otherwise."""

    def __init__(self, module: str, held: Held, device: torch.device | None, op: str, why: str, recompute: str) -> None:
        self.module, self.tensor = module, held.tensor
        self.words = module, op, held.name, why, recompute
        self.away = device is not None and held.tensor.device != device


_RANDOM = "te.checkpoint and torch's: preserve_rng_state=False, where nothing is drawn"


def _packed(kept: list[Inner]) -> list[_Beside]:
    """What hooks inside of the module have made of saved tensors, and what their functions hold."""
    found, functions = [], set()
    for inner in kept:
        words = "saved-tensor hook", "hooks inside of the module packed it", "what these hooks do"
        found += [_Beside(inner.module, held, inner.device, *words) for held in held_by("packed", inner.packed)]
        if id(inner.unpack) not in functions:
            functions.add(id(inner.unpack))
            found += _functions(inner.module, inner.unpack, inner.device)
    return found


def _functions(module: str, function: object, device: torch.device | None) -> list[_Beside]:
    """What a function that runs in the backward holds."""
    why, again = "a function that runs in the backward holds it", "making it inside of that function"
    found = []
    for held in held_by("held", function):
        random = held.name in ("random state", "fwd_cpu_state", "fwd_device_states")
        found.append(_Beside(module, held, device, "checkpoint", why, _RANDOM if random else again))
    return found


def _on_ctx(outputs: list[torch.Tensor], device: torch.device | None) -> list[_Beside]:
    """What autograd functions hold on their ctx, a reentrant checkpoint's function among it."""
    found = []
    for node in nodes_behind(outputs):
        for name, value in vars(node).items() if hasattr(node, "__dict__") else ():
            op, why = node.name().removesuffix("Backward"), "its ctx holds it for the backward"
            if callable(value):
                found += _functions("", value, device)
            else:
                for held in held_by(name, value):
                    random = name.startswith("fwd_")
                    again = _RANDOM if random else "the forward: te.checkpoint around it"
                    found.append(_Beside("", held, device, op, why, again))
    return found


def _strided(t: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that have t's storages: itself, or the parts of a sparse one."""
    if t.layout is torch.strided:
        return [t]
    if t.layout is torch.sparse_coo:
        return [t._indices(), t._values()]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [t.crow_indices(), t.col_indices(), t.values()]
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [t.ccol_indices(), t.row_indices(), t.values()]
    raise NotImplementedError(
        f"memory_plan: a tensor {list(t.shape)} of layout {t.layout} takes part, whose storages are not known; wanted "
        "strided and sparse ones. Plan the parts of the module that have none."
    )


def _storages(tensors: list[torch.Tensor]) -> list[int]:
    return [_place(part)[0] for t in tensors for part in _strided(t)]


def _place(t: torch.Tensor) -> tuple[int, int]:
    """The storage, by identity (on the meta device data pointers are all null), and the offset in it."""
    return t.untyped_storage()._cdata, t.storage_offset()


def _saved(node: torch.autograd.graph.Node, attribute: str) -> list[torch.Tensor]:
    try:
        return tensors_in(getattr(node, attribute))
    except RuntimeError:  # written in place since, or freed: its backward would fail, and it goes without a name
        return []


def _names_in_graph(outputs: list[torch.Tensor]) -> dict[tuple[int, int], tuple[str, str]]:
    """Place of a saved tensor -> (node, attribute), for the nodes of torch's own operations."""
    names: dict[tuple[int, int], tuple[str, str]] = {}
    for node in nodes_behind(outputs):
        for attribute in dir(node):
            if attribute.startswith("_saved_"):
                what = node.name().removesuffix("Backward0"), attribute.removeprefix("_saved_")
                for tensor in _saved(node, attribute):
                    for part in _strided(tensor):
                        names.setdefault(_place(part), what)
    return names


def memory_plan(
    module: torch.nn.Module, *sample: object, optimizer: torch.optim.Optimizer | None = None, **options: object
) -> MemoryPlan:
    """Runs module(*sample, **options) once, forward alone, and lists what its graph keeps for backward when it returns.
    optimizer: what its state holds of the module's parameters is listed too, as it is: nothing before the first step.

    Without a sample, one of 16 tokens is made for our modules that have in_features or hidden_size.

    Bytes are those of distinct storages that saved-tensor hooks see. What wants a gradient decides what is kept: a
    sample that requires one, as inside a network it would, keeps more. The module, its gradients, its buffers and the
    random states are as before afterwards. fuse_wgrad_accumulation and delay_wgrad_compute keep nothing more in a
    forward; main_grad need not be there.
    Errors: TypeError for something that is not a module (an optimizer), has a compiled part, or whose input is not
    known; NotImplementedError for tensors that are neither strided nor sparse; whatever module(*sample) raises.
    """
    if not isinstance(optimizer, torch.optim.Optimizer | None):
        raise TypeError(
            f"memory_plan: argument 'optimizer' is a {type(optimizer).__name__}, wanted a torch.optim.Optimizer."
        )
    seen: list[weakref.ref[_Packed] | _Observed] = []
    with recording("memory_plan", module) as (record, labels), gradients_returned(module), torch.enable_grad():
        at_work = labels.at_work  # pack lives as long as the graph does, and is to hold neither module nor tensors

        def pack(t: torch.Tensor) -> _Packed:
            packed = _Packed(at_work[-1] if at_work else "", t)
            seen.append(weakref.ref(packed))
            return packed

        def observe(t: torch.Tensor, saved: object) -> None:
            seen.append(_Observed(at_work[-1] if at_work else "", t, saved))

        if not (sample or options):
            sample = sample_for("memory_plan", module)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor)
        with observed(observe), hooks, inner_hooks_seen(lambda: at_work[-1] if at_work else "") as inner:
            result = module(*sample, **options)
        kept = [packed for ref in seen if (packed := ref()) is not None]  # the others' graphs are gone already
        device = next((t.device for t in (*tensors_in([sample, options]), *module.parameters())), None)
        kept += _packed([packed for ref in inner if (packed := ref()) is not None])
        kept += _on_ctx(tensors_in(result), device)
        away = {_place(p.tensor)[0]: p.away for p in kept if isinstance(p, _Observed) and p.away is not None}
        away |= {_place(p.tensor)[0]: ("offloaded", p.words[-1]) for p in kept if isinstance(p, _Beside) and p.away}
        in_graph = _names_in_graph(tensors_in(result))
    names: dict[int, str] = {}
    for name, p in (*module.named_parameters(), *module.named_buffers()):  # split weights share a storage
        for storage in _storages([p]):
            names[storage] = f"{names[storage]} + {name}" if storage in names else name
    given = set(_storages(tensors_in([sample, options])))
    words = {(storage, offset): what for *what, told, storage, offset, _, _, _ in reversed(record.kept) if told}
    rows: dict[int, SavedTensor] = {}
    for entry, t in ((e, part) for e in kept for part in _strided(e.tensor)):
        storage, label = _place(t)[0], entry.module
        if t.numel() == 0 or storage in rows:
            continue
        said = words.get(_place(t)) or getattr(entry, "words", None)
        _, op, name, why, recompute = said or _torch_words(module, label, in_graph.get(_place(t)))
        name, status = names.get(storage, name), "kept"
        if storage in names:
            status = "parameter"
        elif storage in away:  # the copy of a weight that a single step makes among them
            status, recompute = away[storage]
        elif name == "quantized weight":  # a copy of a parameter is counted with it
            status = "parameter"
        elif storage in given:
            status = "input"
        size = t.untyped_storage().nbytes()
        rows[storage] = SavedTensor(label, op, name, tuple(t.shape), _name(t.dtype), size, status, why, recompute)
    again = [
        SavedTensor(label, op, name, tuple(shape), _name(dtype), size, "recomputed", why, recompute)
        for label, op, name, why, recompute, told, _, _, shape, dtype, size in record.kept
        if not told
    ]
    states = [] if optimizer is None else _states(module, optimizer)
    return MemoryPlan([*rows.values(), *again, *states, *_arenas(module)])


def _arenas(module: torch.nn.Module) -> list[SavedTensor]:
    """What is there now to receive in, for each group that the module's layers are divided over."""
    rows: dict[str, SavedTensor] = {}
    for label, owner in module.named_modules():
        group = getattr(owner, "_tp_group_name", None)
        if group is None or group in rows:
            continue
        size, slots, _ = usage_by_name(group)
        why = f"calls over the group '{group}' receive in them"
        words = (label, "tensor parallel", f"slots on lease: {slots}", (size,), "uint8", size, "arena", why)
        rows[group] = SavedTensor(*words, "te.destroy_ub() frees what no call has and peers do not push to")
    return [row for row in rows.values() if row.bytes]


def _states(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[SavedTensor]:
    """What the optimizer keeps of the module's parameters, scales of scaled states included."""
    rows: dict[int, SavedTensor] = {}
    op, why, again = type(optimizer).__name__, "the next step reads it", "nothing does"
    for name, p in module.named_parameters():
        kept = list((optimizer.state.get(p) or {}).items())
        kept += [(f"scale of {n}", t) for n, t in getattr(optimizer, "_scales", {}).get(p, {}).items()]
        owner, _, own = name.rpartition(".")
        for state, given in kept:
            for t in tensors_in(local_of(given)):
                size = t.untyped_storage().nbytes()
                row = SavedTensor(
                    owner, op, f"{own}: {state}", tuple(t.shape), _name(t.dtype), size, "optimizer", why, again
                )
                rows.setdefault(_place(t)[0], row)
    return list(rows.values())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _torch_words(module: torch.nn.Module, label: str, found: tuple[str, str] | None) -> tuple[str, ...]:
    """What can be said of a tensor that one of torch's operations keeps."""
    op, name = found or ("torch", "saved tensor")
    attention = label.endswith("core_attention") or type(module).__name__ == "DotProductAttention"
    cost = (
        "attention's forward: checkpoint_core_attention=True" if attention else "the forward: te.checkpoint around it"
    )
    return label, op, name, f"the backward of {op} reads it", cost
