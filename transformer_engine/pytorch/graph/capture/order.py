"""In which order the passes of a set of callables run, as steps. Plain data: no tensor and no module is seen here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real

from transformer_engine.pytorch.graph.describe import OP, shown

FORWARD, BACKWARD, WGRAD = "forward", "backward", "wgrad"


@dataclass(frozen=True)
class Step:
    """One pass: of which callable, with which of the sample arguments."""

    kind: str
    module: int
    sample: int


@dataclass(frozen=True)
class Schedule:
    """The steps of one training step. `scheduled_wgrad` has the modules whose delayed weight gradients have entries of
    their own in the order; those of the others may be asked for at any time after their backward."""

    steps: tuple[Step, ...]
    samples: int
    scheduled_wgrad: frozenset[int] = frozenset()


def plain_schedule(modules: int) -> Schedule:
    """One sample each, forward in order, backward in reverse: how layers of one model run."""
    steps = [Step(FORWARD, i, i) for i in range(modules)]
    for i in reversed(range(modules)):
        steps += [Step(BACKWARD, i, i), Step(WGRAD, i, i)]
    return Schedule(tuple(steps), modules)


def _layers_of_chunks(layers: int | Sequence[int] | None, chunks: int, modules: int) -> list[int]:
    if layers is None:
        if modules % chunks:
            raise ValueError(
                f"{OP}: argument '_order' has {chunks} chunks, which do not divide {modules} modules; say in "
                "'_num_layers_per_chunk' how many each chunk has."
            )
        counts = [modules // chunks] * chunks
    else:
        counts = list(layers) if isinstance(layers, Sequence) else [layers] * chunks
    good = all(isinstance(n, Integral) and not isinstance(n, bool) and n >= 0 for n in counts)
    if not good or len(counts) != chunks or sum(counts) != modules:
        raise ValueError(
            f"{OP}: argument '_num_layers_per_chunk' is {shown(layers)} for {chunks} chunks of {modules} modules in "
            "all, wanted for each chunk a number, 0 too, that add up to the modules."
        )
    return [int(n) for n in counts]


def _entry(position: int, value: object) -> tuple[str, int]:
    """(kind, chunk from 0) of one entry."""
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value == 0:
        raise ValueError(
            f"{OP}: argument '_order' has {shown(value)} at position {position}, wanted chunk numbers from 1."
        )
    exact = Fraction(int(value) if isinstance(value, Integral) else float(value))
    if exact.denominator == 1:
        return (FORWARD if exact > 0 else BACKWARD), abs(int(exact)) - 1
    if exact < -1 and exact.denominator == 2:
        return WGRAD, int(-exact) - 1
    raise ValueError(
        f"{OP}: argument '_order' has {value!r} at position {position}; the weight gradients of chunk c are -c - 0.5, "
        "no other fraction means anything."
    )


def pipeline_schedule(
    order: Sequence[int | float], layers_per_chunk: int | Sequence[int] | None, modules: int, delays: Sequence[bool]
) -> Schedule:
    """The steps that `order` asks for: +c runs chunk c's forward on its next microbatch, -c the backward of its oldest
    one, -c-0.5 the weight gradients that the latest -c left. `delays`: of each module, whether it leaves any."""
    if isinstance(order, str | bytes) or not isinstance(order, Sequence) or not order:
        raise ValueError(f"{OP}: argument '_order' is {shown(order)}, wanted a list of chunk numbers.")
    entries = [_entry(position, value) for position, value in enumerate(order)]
    chunks = max(chunk for _, chunk in entries) + 1
    missing = next(chunk for chunk in range(chunks + 1) if chunk not in {chunk for _, chunk in entries}) + 1
    if missing <= chunks:
        raise ValueError(
            f"{OP}: argument '_order' has an entry of chunk {chunks}, and none of chunk {missing}; chunks are numbered "
            "from 1 without a gap."
        )
    forwards = [sum(entry == (FORWARD, chunk) for entry in entries) for chunk in range(chunks)]
    backwards = [sum(entry == (BACKWARD, chunk) for entry in entries) for chunk in range(chunks)]
    microbatches = forwards[0]
    if microbatches == 0 or set(forwards + backwards) != {microbatches}:
        raise ValueError(
            f"{OP}: argument '_order' has {forwards} forward and {backwards} backward entries of chunks 1 to {chunks}, "
            "wanted as many of each: one for every microbatch."
        )
    counts = _layers_of_chunks(layers_per_chunk, chunks, modules)
    first = [sum(counts[:chunk]) for chunk in range(chunks)]

    def layer_steps(kind: str, chunk: int, microbatch: int) -> list[Step]:
        layers = range(counts[chunk]) if kind == FORWARD else reversed(range(counts[chunk]))
        start = first[chunk] * microbatches + microbatch * counts[chunk]
        return [Step(kind, first[chunk] + layer, start + layer) for layer in layers]

    in_chunk = [range(first[chunk], first[chunk] + counts[chunk]) for chunk in range(chunks)]
    with_entries = {chunk for kind, chunk in entries if kind == WGRAD}
    for chunk in with_entries:
        if in_chunk[chunk] and not any(delays[module] for module in in_chunk[chunk]):
            raise ValueError(
                f"{OP}: argument '_order' has {-chunk - 1.5}, but no module of chunk {chunk + 1} leaves any weight "
                "gradients; build them with delay_wgrad_compute=True and capture them in train mode, with gradients, "
                "or leave the entry out."
            )
    steps: list[Step] = []
    done = {kind: [0] * chunks for kind in (FORWARD, BACKWARD, WGRAD)}
    for position, (kind, chunk) in enumerate(entries):
        turn = done[kind][chunk]
        if kind == BACKWARD and turn >= done[FORWARD][chunk]:
            raise ValueError(
                f"{OP}: argument '_order' has {-chunk - 1} at position {position}, before the forward of "
                "that microbatch."
            )
        if (kind == WGRAD and turn >= done[BACKWARD][chunk]) or (
            kind == BACKWARD and chunk in with_entries and turn > done[WGRAD][chunk]
        ):
            raise ValueError(
                f"{OP}: argument '_order' has {shown(order[position])} at position {position}, where chunk {chunk + 1} "
                f"had {done[BACKWARD][chunk]} backward and {done[WGRAD][chunk]} weight-gradient entries; wanted one "
                f"{-chunk - 1.5} between each {-chunk - 1} and the next."
            )
        done[kind][chunk] += 1
        steps += layer_steps(kind, chunk, turn)
        if kind == BACKWARD and chunk not in with_entries:
            steps += layer_steps(WGRAD, chunk, turn)
    for chunk in with_entries:
        if done[WGRAD][chunk] != microbatches:
            raise ValueError(
                f"{OP}: argument '_order' has {done[WGRAD][chunk]} of {microbatches} weight-gradient entries of chunk "
                f"{chunk + 1}; wanted one {-chunk - 1.5} behind the last {-chunk - 1} too, or none at all."
            )
    scheduled = frozenset(module for chunk in with_entries for module in in_chunk[chunk])
    return Schedule(tuple(steps), modules * microbatches, scheduled)
