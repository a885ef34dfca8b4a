"""te.memory_plan: what a module keeps for backward, tensor by tensor, as saved-tensor hooks see it. It measures one
forward pass; it estimates nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transformer_engine.pytorch.recording import recording, table, tensors_in


@dataclass(frozen=True)
class SavedTensor:
    """One storage. status: 'kept', 'parameter' or 'input' (there in any case), or 'recomputed' (not kept; the backward
    computes it again). bytes: the storage's, of a recomputed one what keeping it would take."""

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
    """rows: a SavedTensor for each storage; kept_bytes counts those that are neither parameters nor inputs."""

    def __init__(self, rows: list[SavedTensor]) -> None:
        self.rows = rows

    def bytes_of(self, status: str) -> int:
        return sum(row.bytes for row in self.rows if row.status == status)

    @property
    def kept_bytes(self) -> int:
        return self.bytes_of("kept")

    def __str__(self) -> str:
        cells = [
            (r.module, r.op, r.name, "x".join(map(str, r.shape)) or "-", r.dtype, r.bytes, r.status, r.why, r.recompute)
            for r in self.rows
        ]
        totals = ", ".join(
            f"{status} {self.bytes_of(status):,} B" for status in ("kept", "recomputed", "parameter", "input")
        )
        columns = ("module", "op", "tensor", "shape", "dtype", "bytes", "status", "why", "recomputing it costs")
        return f"{table(columns, cells)}\n{totals}"

    __repr__ = __str__


def _place(t: torch.Tensor) -> tuple[int, int]:
    return t.untyped_storage().data_ptr(), t.storage_offset()


def _names_in_graph(outputs: list[torch.Tensor]) -> dict[tuple[int, int], tuple[str, str]]:
    """Place of a saved tensor -> (node, attribute), for the nodes of torch's own operations."""
    names: dict[tuple[int, int], tuple[str, str]] = {}
    seen, todo = set(), [t.grad_fn for t in outputs if t.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions if following is not None]
        for attribute in dir(node):
            if attribute.startswith("_saved_"):
                for tensor in tensors_in(getattr(node, attribute)):
                    what = node.name().removesuffix("Backward0"), attribute.removeprefix("_saved_")
                    names.setdefault(_place(tensor), what)
    return names


def memory_plan(module: torch.nn.Module, *sample: object, **options: object) -> MemoryPlan:
    """Runs module(*sample, **options) once, forward alone, and lists what its graph keeps for backward.

    Bytes are those of distinct storages that saved-tensor hooks see. What wants a gradient decides what is kept: a
    sample that requires one, as inside a network it would, keeps more. The module, its gradients and the random states
    are as before afterwards.
    Errors: TypeError for something that is not a module, or is compiled; whatever module(*sample) raises.
    """
    seen: list[tuple[str, torch.Tensor]] = []
    with recording("memory_plan", module) as (record, labels), torch.enable_grad():

        def pack(t: torch.Tensor) -> torch.Tensor:
            seen.append((labels.at_work[-1] if labels.at_work else "", t))
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            outputs = tensors_in(module(*sample, **options))
    names: dict[int, str] = {}
    for name, p in (*module.named_parameters(), *module.named_buffers()):  # split weights share a storage
        names[_place(p)[0]] = f"{names[_place(p)[0]]} + {name}" if _place(p)[0] in names else name
    given = {_place(t)[0] for t in tensors_in([sample, options])}
    words = {(storage, offset): what for *what, kept, storage, offset, _, _, _ in reversed(record.kept) if kept}
    in_graph = _names_in_graph(outputs)
    rows: dict[int, SavedTensor] = {}
    for label, t in seen:
        storage = _place(t)[0]
        if t.numel() == 0 or storage in rows:
            continue
        _, op, name, why, recompute = words.get(_place(t)) or _torch_words(module, label, in_graph.get(_place(t)))
        name, status = names.get(storage, name), "kept"
        if storage in names:
            status = "parameter"
        elif storage in given:
            status = "input"
        size = t.untyped_storage().nbytes()
        rows[storage] = SavedTensor(label, op, name, tuple(t.shape), _name(t.dtype), size, status, why, recompute)
    again = [
        SavedTensor(label, op, name, tuple(shape), _name(dtype), size, "recomputed", why, recompute)
        for label, op, name, why, recompute, kept, _, _, shape, dtype, size in record.kept
        if not kept
    ]
    return MemoryPlan([*rows.values(), *again])


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
