"""te.memory_plan: the tensors that a module saves for the backward, as saved-tensor hooks see them.

- It measures one forward, and estimates nothing.
"""

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
    """One storage. status: 'kept'; 'parameter' (or its FP8 copy) or 'input', which exist in any case; 'offloaded' (in
    host memory until the backward); 'recomputed' (not kept; the backward recomputes it); 'optimizer' (an optimizer
    state of a parameter); 'gradient' (a buffer of a DistributedDataParallel); 'arena' (receive buffers of layers over a
    group: distributed.comm_usage counts them, and they do not grow with the number of layers). bytes: of the storage,
    or those that keeping a recomputed one would need."""

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
    """rows: a SavedTensor for each storage. kept_bytes: of those on the device that are neither parameters nor
    inputs."""

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
        reasons = [f"[{note}] {why}; recomputing it costs: {cost}" for (why, cost), note in notes.items()]
        known = ("kept", "offloaded", "recomputed", "parameter", "gradient", "input", "optimizer", "arena")
        statuses = dict.fromkeys((*known, *(row.status for row in self.rows)))
        totals = ", ".join(f"{status} {self.bytes_of(status):,} B" for status in statuses)
        columns = ("module", "op", "tensor", "shape", "dtype", "bytes", "status", "why")
        text = [textwrap.fill(line, 120, subsequent_indent="    ") for line in reasons]
        return "\n".join([table(columns, cells), *text, totals])

    __repr__ = __str__


def _short(name: str) -> str:
    """Shortens a long list of parameters that share a storage to the first one and a count."""
    first, *others = name.split(" + ")
    return name if len(name) <= 40 else f"{first} + {len(others)} more" if others else name


class _Packed:
    """Represents a saved tensor in the graph, and lives as long as its node. The tensor is detached: otherwise an
    output and its node would hold each other and never be freed."""

    __slots__ = ("__weakref__", "module", "tensor")

    def __init__(self, module: str, tensor: torch.Tensor) -> None:
        self.module, self.tensor = module, tensor.detach()


class _Observed:
    """A tensor that a context inside of the module handles; its location is known after the forward."""

    def __init__(self, module: str, tensor: torch.Tensor, saved: object) -> None:
        self.module, self.tensor, self.saved = module, tensor.detach(), weakref.ref(saved)

    def __call__(self) -> _Observed | None:
        return None if self.saved() is None else self

    @property
    def away(self) -> tuple[str, str] | None:
        """(status, cost of bringing it back) if it is not on the device until the backward."""
        saved = self.saved()
        return None if saved is None or saved.status == "kept" else (saved.status, saved.back)


class _Held:
    """A tensor that the graph holds without saving it, with its description. away: it is not on the device."""

    def __init__(self, module: str, held: Held, device: torch.device | None, op: str, why: str, recompute: str) -> None:
        self.module, self.tensor = module, held.tensor
        self.description = module, op, held.name, why, recompute
        self.away = device is not None and held.tensor.device != device


_RANDOM = "nothing in a checkpoint that draws no random numbers: preserve_rng_state=False"


def _packed(kept: list[Inner]) -> list[_Held]:
    """The tensors in objects that hooks inside of the module packed, and in the functions of these hooks."""
    found, functions = [], set()
    for inner in kept:
        why = "saved-tensor hook", "hooks inside of the module packed it", "the work of these hooks"
        found += [_Held(inner.module, held, inner.device, *why) for held in held_by("packed", inner.packed)]
        if id(inner.unpack) not in functions:
            functions.add(id(inner.unpack))
            found += _functions(inner.module, inner.unpack, inner.device)
    return found


def _functions(module: str, function: object, device: torch.device | None) -> list[_Held]:
    """The tensors that a function holds which runs in the backward."""
    why, cost = "a function that runs in the backward holds it", "computing it inside of that function"
    found = []
    for held in held_by("held", function):
        random = held.name in ("random state", "fwd_cpu_state", "fwd_device_states")
        found.append(_Held(module, held, device, "checkpoint", why, _RANDOM if random else cost))
    return found


def _on_ctx(outputs: list[torch.Tensor], device: torch.device | None) -> list[_Held]:
    """The tensors that autograd functions hold on their ctx, including the function of a reentrant checkpoint."""
    found = []
    for node in nodes_behind(outputs):
        for name, value in vars(node).items() if hasattr(node, "__dict__") else ():
            op, why = node.name().removesuffix("Backward"), "its ctx holds it for the backward"
            if callable(value):
                found += _functions("", value, device)
            else:
                for held in held_by(name, value):
                    random = name.startswith("fwd_")
                    cost = _RANDOM if random else "the forward: te.checkpoint around it"
                    found.append(_Held("", held, device, op, why, cost))
    return found


def _strided(t: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with the storages of t: t itself, or the parts of a sparse tensor."""
    if t.layout is torch.strided:
        return [t]
    if t.layout is torch.sparse_coo:
        return [t._indices(), t._values()]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [t.crow_indices(), t.col_indices(), t.values()]
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [t.ccol_indices(), t.row_indices(), t.values()]
    raise NotImplementedError(
        f"memory_plan: a tensor {list(t.shape)} has layout {t.layout}, whose storages are unknown; wanted strided and "
        "sparse tensors. Plan the parts of the module without such tensors."
    )


def _storages(tensors: list[torch.Tensor]) -> list[int]:
    return [_place(part)[0] for t in tensors for part in _strided(t)]


def _place(t: torch.Tensor) -> tuple[int, int]:
    """The storage, by identity (on the meta device data pointers are all null), and the offset in it."""
    return t.untyped_storage()._cdata, t.storage_offset()


def _saved(node: torch.autograd.graph.Node, attribute: str) -> list[torch.Tensor]:
    try:
        return tensors_in(getattr(node, attribute))
    except RuntimeError:  # overwritten in place, or freed: its backward would fail, and it has no name here
        return []


def _names_in_graph(outputs: list[torch.Tensor]) -> dict[tuple[int, int], tuple[str, str]]:
    """(storage, offset) of a saved tensor -> (node, attribute), for nodes of torch's own operations."""
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
    """Runs module(*sample, **options) once, forward only, and lists what its graph saves for the backward.
    optimizer: its present state of the module's parameters is listed too; there is none before the first step. A
    te.distributed.DistributedDataParallel adds its buffers, a DistributedOptimizer the states of this rank's shards.

    Without a sample, one of 16 tokens is made for modules of this library that have in_features or hidden_size.

    Bytes are those of distinct storages that saved-tensor hooks see. Saved tensors depend on which inputs require a
    gradient: a sample that requires one, as inside a network, saves more. The module, its gradients, its buffers and
    the random states are the same afterwards. fuse_wgrad_accumulation and delay_wgrad_compute save nothing more in a
    forward; main_grad need not exist.
    Errors: TypeError for a value other than a module (or an optimizer), a module with a compiled part, or one whose
    input is unknown; NotImplementedError for tensors that are neither strided nor sparse; errors of module(*sample).
    """
    if not isinstance(optimizer, torch.optim.Optimizer | None):
        raise TypeError(
            f"memory_plan: argument 'optimizer' is a {type(optimizer).__name__}, wanted a torch.optim.Optimizer."
        )
    seen: list[weakref.ref[_Packed] | _Observed] = []
    with recording("memory_plan", module) as (record, labels), gradients_returned(module), torch.enable_grad():
        at_work = labels.at_work  # `pack` lives as long as the graph, so it must not refer to the module or to tensors

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
        kept = [packed for ref in seen if (packed := ref()) is not None]  # the graphs of others are freed
        device = next((t.device for t in (*tensors_in([sample, options]), *module.parameters())), None)
        kept += _packed([packed for ref in inner if (packed := ref()) is not None])
        kept += _on_ctx(tensors_in(result), device)
        away = {_place(p.tensor)[0]: p.away for p in kept if isinstance(p, _Observed) and p.away is not None}
        away |= {_place(p.tensor)[0]: ("offloaded", p.description[-1]) for p in kept if isinstance(p, _Held) and p.away}
        in_graph = _names_in_graph(tensors_in(result))
    names: dict[int, str] = {}
    for name, p in (*module.named_parameters(), *module.named_buffers()):  # split weights share a storage
        for storage in _storages([p]):
            names[storage] = f"{names[storage]} + {name}" if storage in names else name
    given = set(_storages(tensors_in([sample, options])))
    descriptions = {(storage, offset): what for *what, live, storage, offset, _, _, _ in reversed(record.kept) if live}
    rows: dict[int, SavedTensor] = {}
    for entry, t in ((e, part) for e in kept for part in _strided(e.tensor)):
        storage, label = _place(t)[0], entry.module
        if t.numel() == 0 or storage in rows:
            continue
        description = descriptions.get(_place(t)) or getattr(entry, "description", None)
        _, op, name, why, recompute = description or _describe_torch(module, label, in_graph.get(_place(t)))
        name, status = names.get(storage, name), "kept"
        if storage in names:
            status = "parameter"
        elif storage in away:  # includes the copy of a weight that one step makes
            status, recompute = away[storage]
        elif name == "quantized weight":  # a copy of a parameter is counted with it
            status = "parameter"
        elif storage in given:
            status = "input"
        size = t.untyped_storage().nbytes()
        rows[storage] = SavedTensor(label, op, name, tuple(t.shape), _name(t.dtype), size, status, why, recompute)
    recomputed = [
        SavedTensor(label, op, name, tuple(shape), _name(dtype), size, "recomputed", why, recompute)
        for label, op, name, why, recompute, live, _, _, shape, dtype, size in record.kept
        if not live
    ]
    for label, owner in module.named_modules():
        if hasattr(owner, "_held_memory"):  # its parameters too, of which a forward saves some
            _add_held(rows, label, owner)
    states = [] if optimizer is None else _states(module, optimizer)
    return MemoryPlan([*rows.values(), *recomputed, *states, *_arenas(module)])


def _add_held(rows: dict[int, SavedTensor], label: str, owner: object) -> None:
    """Rows of the storages that a wrapper or an optimizer of data parallelism holds, each once."""
    op, cost = type(owner).__name__, "it cannot be recomputed"
    reason = "the next step reads it"
    why = {"parameter": "the model", "gradient": "gradients of a step add up in it", "optimizer": reason}
    for name, t, status in owner._held_memory():
        size = t.untyped_storage().nbytes()
        if size:
            row = SavedTensor(label, op, name, tuple(t.shape), _name(t.dtype), size, status, why[status], cost)
            rows.setdefault(_place(t)[0], row)


def _arenas(module: torch.nn.Module) -> list[SavedTensor]:
    """The present receive buffers of each group that layers of the module are divided over."""
    rows: dict[str, SavedTensor] = {}
    for label, owner in module.named_modules():
        group = getattr(owner, "_tp_group_name", None)
        if group is None or group in rows:
            continue
        size, slots, _ = usage_by_name(group)
        why = f"calls over the group '{group}' receive into them"
        fields = (label, "tensor parallel", f"buffers in use: {slots}", (size,), "uint8", size, "arena", why)
        rows[group] = SavedTensor(*fields, "te.destroy_ub() frees those that no call uses and no peer pushes to")
    return [row for row in rows.values() if row.bytes]


def _states(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[SavedTensor]:
    """The optimizer states of the module's parameters, including scales of scaled states."""
    rows: dict[int, SavedTensor] = {}
    if hasattr(optimizer, "_held_memory"):
        _add_held(rows, "", optimizer)
        return list(rows.values())
    op, why, cost = type(optimizer).__name__, "the next step reads it", "it cannot be recomputed"
    for name, p in module.named_parameters():
        kept = list((optimizer.state.get(p) or {}).items())
        kept += [(f"scale of {n}", t) for n, t in getattr(optimizer, "_scales", {}).get(p, {}).items()]
        owner, _, own = name.rpartition(".")
        for state, given in kept:
            for t in tensors_in(local_of(given)):
                size = t.untyped_storage().nbytes()
                row = SavedTensor(
                    owner, op, f"{own}: {state}", tuple(t.shape), _name(t.dtype), size, "optimizer", why, cost
                )
                rows.setdefault(_place(t)[0], row)
    return list(rows.values())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe_torch(module: torch.nn.Module, label: str, found: tuple[str, str] | None) -> tuple[str, ...]:
    """The description of a tensor that an operation of torch saves."""
    op, name = found or ("torch", "saved tensor")
    attention = label.endswith("core_attention") or type(module).__name__ == "DotProductAttention"
    cost = (
        "attention's forward: checkpoint_core_attention=True" if attention else "the forward: te.checkpoint around it"
    )
    return label, op, name, f"the backward of {op} reads it", cost
