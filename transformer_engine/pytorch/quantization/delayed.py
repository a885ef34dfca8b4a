"""Delayed scaling: scales computed from the amaxes of earlier steps. The kernels write each amax into the newest row of
a history; between steps the device computes scales from the histories of all modules, without a sync with the host."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

import torch

from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.compiling import outside_of_modes
from transformer_engine.pytorch._internal.torch_private import foreach_copy_

_FLOAT = torch.finfo(torch.float32)


def _scale_of(amax: torch.Tensor, largest: float, margin: int) -> torch.Tensor:
    """Equal to te_quantize_update_scales to the bit for a finite, positive amax: number / tensor is rounded twice."""
    quotient = torch.full_like(amax, largest, dtype=torch.float32) / amax
    return (quotient / 2**margin).clamp(_FLOAT.tiny, _FLOAT.max)


class ScalingState:
    """The scales and amax histories of a module's tensors of one direction, one column a tensor.

    scale [n]; amax_history [length, n], row 0 is being written, the others go from the oldest to the newest; scale_inv
    [n]. Both tensors keep their memory unless the length or the device changes: kernels and captured graphs hold views.
    stepped: the scales were computed from this history, for the present values: a weight that gets new values follows
    it. gathered: columns of tensors that the ranks of a group hold in parts, and the group's name: one scale for all.
    """

    def __init__(self, rule: DelayedScaling, columns: int, device: torch.device, *, forward: bool) -> None:
        with torch.inference_mode(False):  # tensors from inside could not be written outside
            self.scale = torch.ones(columns, dtype=torch.float32, device=device)
            self.amax_history = torch.zeros(rule.amax_history_len, columns, dtype=torch.float32, device=device)
        self.forward = forward
        self.rule = rule
        self.stepped = False
        self.gathered: tuple[str, list[int]] | None = None
        self._used: torch.Tensor | None = None
        self._update: tuple | None = None
        self._left: list[torch.Tensor] = []  # rows 0 of histories that were replaced since the last update
        self._views: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def _largest(self, rule: DelayedScaling) -> float:
        return rule.fp8_format.value.max_fwd if self.forward else rule.fp8_format.value.max_bwd

    @property
    def fp8_max(self) -> float:
        return self._largest(self.rule)

    @torch.no_grad()
    def adopt(self, rule: DelayedScaling) -> None:
        """Continues under another rule: scales for the largest value of one format are converted to another format."""
        before, self.rule = self.fp8_max, rule
        if self.fp8_max != before:
            self.scale *= self.fp8_max / before
            self.changed()
        self.resize(rule.amax_history_len)

    @torch.no_grad()
    def take(self, rule: DelayedScaling, scale: torch.Tensor, amax_history: torch.Tensor) -> None:
        """Copies scales and a history made under `rule`, converted to its own rule and length, into its memory."""
        self.scale.copy_(scale)
        if self._largest(rule) != self.fp8_max:
            self.scale *= self.fp8_max / self._largest(rule)
        _copy_rows(self.amax_history, amax_history)
        self.stepped = False
        self.changed()

    @torch.no_grad()
    def move(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.scale, self.amax_history = self.scale.to(device), self.amax_history.to(device)
        self.changed()

    @property
    def scale_inv(self) -> torch.Tensor:
        return self.scale.reciprocal()

    def scale_of(self, column: int) -> torch.Tensor:
        """[1]: the same view while the memory is the same."""
        return self._view("scale", self.scale, column)

    def amax_of(self, column: int) -> torch.Tensor:
        """[1], of row 0: the same view while the memory is the same."""
        return self._view("amax", self.amax_history, column)

    def _view(self, name: str, of: torch.Tensor, column: int) -> torch.Tensor:
        found = self._views.get((name, column))
        if found is None or found[0] is not of:
            with outside_of_modes():
                row = of if of.dim() == 1 else of[0]
                found = self._views[name, column] = of, row[column : column + 1]
        return found[1]

    # ---- weights that are held in FP8 alone ----

    @torch.no_grad()
    def forget(self, column: int) -> None:
        """Clears the history of a weight that gets values unrelated to its present ones."""
        self.amax_history[:, column] = 0
        self.stepped = False

    @torch.no_grad()
    def fit(self, column: int, amax: torch.Tensor, noop: torch.Tensor | None = None) -> None:
        """Sets the scale that the recipe computes from `amax`, float32 [1], for new values of a weight; the kernel will
        write their amax again. noop: unless it holds 0, nothing changes."""
        scale, newest = self.scale_of(column), self.amax_of(column)
        fitted = _scale_of(amax, self.fp8_max, self.rule.margin)
        taken = (amax > 0) & amax.isfinite()
        cleared = torch.zeros_like(newest)
        if noop is not None:
            taken, cleared = taken & (noop == 0), torch.where(noop == 0, cleared, newest)
        scale.copy_(torch.where(taken, fitted, scale))
        newest.copy_(cleared)
        self.changed()

    @torch.no_grad()
    def cover(self, column: int, amax: torch.Tensor) -> None:
        """For data with this amax that have a scale of their own: later scales cover them too."""
        newest = self.amax_of(column)
        newest.copy_(torch.fmax(newest, amax))

    @torch.no_grad()
    def cover_unknown(self, column: int, amax: torch.Tensor) -> None:
        """cover(), unless the newest amax already belongs to the values that these data were rounded from: a checkpoint
        or a pickle restores both, and the larger amax of the data would change later steps. Rounding to FP8 adds 1/8 at
        most (half a step of E5M2)."""
        self.cover(column, torch.where(amax <= self.amax_of(column) * 1.125, 0, amax))

    @torch.no_grad()
    def resize(self, length: int) -> None:
        """Keeps row 0, which is being written, and the newest of the other rows, which are the last; new rows are 0."""
        if length == len(self.amax_history):
            return
        old = self.amax_history
        with torch.inference_mode(False):
            self.amax_history = torch.empty(length, old.shape[1], dtype=torch.float32, device=old.device)
        _copy_rows(self.amax_history, old)
        self._left.append(old[0])  # a backward whose forward has run writes its amaxes there

    @torch.no_grad()
    def take_left(self) -> None:
        """Takes over the amaxes that were written into histories of another length."""
        left, self._left = self._left, []
        for row in left:
            self.amax_history[0] = torch.fmax(self.amax_history[0], row.to(self.amax_history.device))

    def used(self) -> torch.Tensor:
        """A copy of the scales until the next update; one copy for all callers until then."""
        if self._used is None:
            with outside_of_modes():
                self._used = self.scale.detach().clone()
        return self._used

    def changed(self) -> None:
        """Invalidates the copy of used(): the scales have changed."""
        self._used = None

    def update_arguments(self) -> tuple | None:
        """The arguments of _C.update_scales; None if functions of the caller compute the scales."""
        kept = self._update
        if kept is None or kept[0] is not self.rule or kept[1] is not self.amax_history or kept[2] is not self.scale:
            arguments = _arguments(self.rule, self.amax_history, self.scale, self.fp8_max)
            kept = self._update = self.rule, self.amax_history, self.scale, arguments
        return kept[3]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_used": None, "_update": None, "_left": [], "_views": {}}


class Column:
    """One tensor's place in a scaling state: its scale and its newest amax, in the state's present memory.
    held: of a weight that exists in FP8 alone and is not quantized from high precision in each step."""

    __slots__ = ("held", "index", "state")

    def __init__(self, state: ScalingState, index: int, held: bool = False) -> None:
        self.state, self.index, self.held = state, index, held

    @property
    def scale(self) -> torch.Tensor:
        return self.state.scale_of(self.index)

    @property
    def amax(self) -> torch.Tensor:
        return self.state.amax_of(self.index)


def _copy_rows(to: torch.Tensor, history: torch.Tensor) -> None:
    """Row 0, and the newest of the others, which are the last; missing rows become 0."""
    if len(to) == len(history):
        to.copy_(history)
        return
    kept = min(len(to), len(history)) - 1
    to[0] = history[0]
    to[1 : len(to) - kept] = 0
    to[len(to) - kept :] = history[len(history) - kept :]


class Region:
    """The states of one outermost autocast that wait for new scales: forward states until the region ends, backward
    states until a backward through it has ended.

    claimed: the owner of a graph has taken the first module's part. by_hand: the owner registers states.
    """

    __slots__ = ("__weakref__", "_backward", "_forward", "_watch", "by_hand", "claimed")

    def __init__(self) -> None:
        # In the order of registration, which is the same on all ranks: id -> (weak state, group).
        self._forward: dict[int, tuple] = {}
        self._backward: dict[int, tuple] = {}
        self._watch: _C.BackwardWatch | None = None
        self.by_hand = self.claimed = False

    @property
    def followed(self) -> bool:
        """Whether a module with gradients has run: its backward updates the scales."""
        return self._watch is not None

    def add(self, state: ScalingState, group: object | None, *, forward: bool) -> None:
        table = self._forward if forward else self._backward
        table[id(state)] = (weakref.ref(state), group)

    def add_all(self, forward: dict[int, tuple], backward: dict[int, tuple]) -> None:
        """As add, for prepared entries: id -> (weak state, group). An existing entry stays."""
        for table, entries in ((self._forward, forward), (self._backward, backward)):
            if not table:
                table.update(entries)
                continue
            for key, entry in entries.items():
                if key not in table or table[key][0]() is None:
                    table[key] = entry

    def has(self, state: ScalingState) -> bool:
        entry = self._forward.get(id(state))
        return entry is not None and entry[0]() is state

    def waits(self) -> bool:
        """Whether a caller outside must update the backward states."""
        return self.by_hand and not self.followed and bool(self._backward)

    def update_forward(self) -> None:
        entries, self._forward = self._forward, {}
        update(entries.values())

    def update_backward(self) -> None:
        _update_table(self._backward)

    def watch(self) -> _C.BackwardWatch:
        """The watch that updates backward scales when a backward has ended. It outlives the region if a graph still
        follows."""
        if self._watch is None:
            self._watch = _C.BackwardWatch(functools.partial(_update_table, self._backward))
        return self._watch

    def follow(self, output: torch.Tensor) -> None:
        """output: of a module with gradients."""
        (self._watch or self.watch()).follow(output)


def _update_table(table: dict[int, tuple]) -> None:
    """Each backward of a region writes new amaxes: the entries stay for another backward (retain_graph)."""
    update(list(table.values()))  # a concurrent forward may add entries


def update(entries: Iterable[tuple]) -> None:
    """New scales for (weak state, group) entries: amaxes are reduced once for each group and device, then all scales
    are computed at once."""
    alive = [(state, group) for ref, group in entries if (state := ref()) is not None]
    for state, _ in alive:
        if state._left:
            state.take_left()
    _reduce_amaxes(alive)
    updates = []
    for state, _ in alive:
        arguments = state.update_arguments()
        if arguments is None:
            _update_by_functions(state.rule, state.amax_history, state.scale, state.fp8_max)
        else:
            updates.append(arguments)
        state.stepped = True
        state.changed()
    for batch in _by_device(updates).values():
        _C.update_scales(batch)


def _by_device(updates: list[tuple]) -> dict[torch.device, list[tuple]]:
    devices: dict[torch.device, list[tuple]] = {}
    for entry in updates:
        devices.setdefault(entry[0].device, []).append(entry)
    return devices


def _reduce_amaxes(entries: list[tuple]) -> None:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    groups: dict[tuple, list[torch.Tensor]] = {}
    for state, group in entries:
        newest = state.amax_history[0]
        if state.rule.reduce_amax and distributed.get_world_size(group) > 1:
            groups.setdefault((group, state.scale.device), []).append(newest)
        if state.gathered is not None:  # regardless of the rule: ranks with another scale could not read these
            name, columns = state.gathered
            key = distributed.distributed_c10d._resolve_process_group(name), state.scale.device
            groups.setdefault(key, []).extend(newest[column : column + 1] for column in columns)
    for (group, _), rows in groups.items():
        amaxes = torch.cat(rows)
        distributed.all_reduce(amaxes, op=distributed.ReduceOp.MAX, group=group)
        foreach_copy_(rows, list(amaxes.split([row.numel() for row in rows])))


def _amax_and_scale_update(
    amax_history: torch.Tensor, scale: torch.Tensor, fp8_max: float, recipe: DelayedScaling
) -> None:
    """New scales [n] from a history [length, n], whose rows roll on, both in place: for tensors of the caller. A
    module's own scales are updated without it."""
    arguments = _arguments(recipe, amax_history, scale, fp8_max)
    if arguments is None:
        _update_by_functions(recipe, amax_history, scale, fp8_max)
    else:
        _C.update_scales([arguments])


def _arguments(rule: DelayedScaling, history: torch.Tensor, scale: torch.Tensor, largest: float) -> tuple | None:
    """The arguments of _C.update_scales; None if functions of the caller compute the scales."""
    if callable(rule.amax_compute_algo) or rule.scaling_factor_compute_algo is not None:
        return None
    return history, scale, largest, rule.margin, rule.amax_compute_algo == "most_recent", False


@torch.no_grad()
def _update_by_functions(rule: DelayedScaling, history: torch.Tensor, scale: torch.Tensor, largest: float) -> None:
    """Algorithms of the caller: amax_compute_algo(history) -> amaxes, scaling_factor_compute_algo(amaxes, scales,
    fp8_max, recipe) -> scales. A missing one is replaced by the rule of te_quantize_update_scales."""
    algorithm = rule.amax_compute_algo
    if callable(algorithm):
        amax = algorithm(history)
    elif algorithm == "most_recent":
        amax = history[0].clone()
    else:
        amax = history.nan_to_num(nan=0.0, posinf=torch.inf).amax(0)
    _must_fit("amax_compute_algo", amax, scale)
    if rule.scaling_factor_compute_algo is not None:
        new = rule.scaling_factor_compute_algo(amax, scale, largest, rule)
    else:
        result = _scale_of(amax, largest, rule.margin)
        new = torch.where((amax > 0) & amax.isfinite(), result, scale)
    _must_fit("scaling_factor_compute_algo", new, scale)
    scale.copy_(new)
    history.copy_(torch.where(history[0] == 0, history, history.roll(-1, 0)))
    history[0].zero_()


def _must_fit(name: str, value: object, scale: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != scale.shape or value.is_complex():
        found = f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(
            f"DelayedScaling: argument '{name}' returned {found}, wanted real numbers {list(scale.shape)}."
        )
