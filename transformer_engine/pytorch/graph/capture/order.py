"""The order in which forwards, backwards and weight gradients of a set of callables run, as a list of steps.

- Plain data, without tensors and modules.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real

from transformer_engine.pytorch.graph.describe import OP, short_repr

FORWARD, BACKWARD, WGRAD = "forward", "backward", "wgrad"


@dataclass(frozen=True)
class Step:
    """One forward, backward or weight-gradient step: the indices of its callable and of its sample arguments."""

    kind: str
    module: int
    sample: int


@dataclass(frozen=True)
class Schedule:
    """The steps of one training step. scheduled_wgrad: the modules whose delayed weight gradients have entries in the
    order; for the others backward_dw() may be called at any time after the backward."""

    steps: tuple[Step, ...]
    samples: int
    scheduled_wgrad: frozenset[int] = frozenset()


def sequential_schedule(modules: int) -> Schedule:
    """One sample for each module, forward in order and backward in reverse, as the layers of a model run."""
    steps = [Step(FORWARD, i, i) for i in range(modules)]
    for i in reversed(range(modules)):
        steps += [Step(BACKWARD, i, i), Step(WGRAD, i, i)]
    return Schedule(tuple(steps), modules)


def _layers_per_chunk(layers: int | Sequence[int] | None, chunks: int, modules: int) -> list[int]:
    if layers is None:
        if modules % chunks:
            raise ValueError(
                f"{OP}: argument '_order' has {chunks} chunks, which do not divide {modules} modules; pass the number "
                "of modules of each chunk in '_num_layers_per_chunk'."
            )
        counts = [modules // chunks] * chunks
    else:
        counts = list(layers) if isinstance(layers, Sequence) else [layers] * chunks
    good = all(isinstance(n, Integral) and not isinstance(n, bool) and n >= 0 for n in counts)
    if not good or len(counts) != chunks or sum(counts) != modules:
        raise ValueError(
            f"{OP}: argument '_num_layers_per_chunk' is {short_repr(layers)} for {chunks} chunks and {modules} "
            "modules, wanted a number from 0 up for each chunk; their sum has to be the number of modules."
        )
    return [int(n) for n in counts]


def _parse_entry(position: int, value: object) -> tuple[str, int]:
    """(kind, chunk from 0) of one entry of an order."""
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value == 0:
        raise ValueError(
            f"{OP}: argument '_order' has {short_repr(value)} at position {position}, wanted chunk numbers from 1."
        )
    exact = Fraction(int(value) if isinstance(value, Integral) else float(value))
    if exact.denominator == 1:
        return (FORWARD if exact > 0 else BACKWARD), abs(int(exact)) - 1
    if exact < -1 and exact.denominator == 2:
        return WGRAD, int(-exact) - 1
    raise ValueError(
        f"{OP}: argument '_order' has {value!r} at position {position}; the only fractions allowed are -c - 0.5, for "
        "the weight gradients of chunk c."
    )


def pipeline_schedule(
    order: Sequence[int | float],
    layers_per_chunk: int | Sequence[int] | None,
    modules: int,
    delays_wgrad: Sequence[bool],
) -> Schedule:
    """The steps of `order`: +c runs the forward of chunk c on its next microbatch, -c the backward of its oldest one,
    -c-0.5 the weight gradients that the latest -c delayed. delays_wgrad: for each module, whether it delays any."""
    if isinstance(order, str | bytes) or not isinstance(order, Sequence) or not order:
        raise ValueError(f"{OP}: argument '_order' is {short_repr(order)}, wanted a list of chunk numbers.")
    entries = [_parse_entry(position, value) for position, value in enumerate(order)]
    chunks = max(chunk for _, chunk in entries) + 1
    missing = next(chunk for chunk in range(chunks + 1) if chunk not in {chunk for _, chunk in entries}) + 1
    if missing <= chunks:
        raise ValueError(
            f"{OP}: argument '_order' has an entry of chunk {chunks}, but none of chunk {missing}; number the chunks "
            "from 1 without a gap."
        )
    forwards = [sum(entry == (FORWARD, chunk) for entry in entries) for chunk in range(chunks)]
    backwards = [sum(entry == (BACKWARD, chunk) for entry in entries) for chunk in range(chunks)]
    microbatches = forwards[0]
    if microbatches == 0 or set(forwards + backwards) != {microbatches}:
        raise ValueError(
            f"{OP}: argument '_order' has {forwards} forward and {backwards} backward entries of chunks 1 to {chunks}, "
            "wanted the same number of each: one for every microbatch."
        )
    counts = _layers_per_chunk(layers_per_chunk, chunks, modules)
    first = [sum(counts[:chunk]) for chunk in range(chunks)]

    def layer_steps(kind: str, chunk: int, microbatch: int) -> list[Step]:
        layers = range(counts[chunk]) if kind == FORWARD else reversed(range(counts[chunk]))
        start = first[chunk] * microbatches + microbatch * counts[chunk]
        return [Step(kind, first[chunk] + layer, start + layer) for layer in layers]

    in_chunk = [range(first[chunk], first[chunk] + counts[chunk]) for chunk in range(chunks)]
    with_entries = {chunk for kind, chunk in entries if kind == WGRAD}
    for chunk in with_entries:
        if in_chunk[chunk] and not any(delays_wgrad[module] for module in in_chunk[chunk]):
            raise ValueError(
                f"{OP}: argument '_order' has {-chunk - 1.5}, but no module of chunk {chunk + 1} delays weight "
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
                "that microbatch, wanted after it."
            )
        if (kind == WGRAD and turn >= done[BACKWARD][chunk]) or (
            kind == BACKWARD and chunk in with_entries and turn > done[WGRAD][chunk]
        ):
            raise ValueError(
                f"{OP}: argument '_order' has {short_repr(order[position])} at position {position}, after "
                f"{done[BACKWARD][chunk]} backward and {done[WGRAD][chunk]} weight-gradient entries of chunk "
                f"{chunk + 1}; wanted one {-chunk - 1.5} between each {-chunk - 1} and the next."
            )
        done[kind][chunk] += 1
        steps += layer_steps(kind, chunk, turn)
        if kind == BACKWARD and chunk not in with_entries:
            steps += layer_steps(WGRAD, chunk, turn)
    for chunk in with_entries:
        if done[WGRAD][chunk] != microbatches:
            raise ValueError(
                f"{OP}: argument '_order' has {done[WGRAD][chunk]} of {microbatches} weight-gradient entries of chunk "
                f"{chunk + 1}; wanted one {-chunk - 1.5} after the last {-chunk - 1} too, or none at all."
            )
    scheduled = frozenset(module for chunk in with_entries for module in in_chunk[chunk])
    return Schedule(tuple(steps), modules * microbatches, scheduled)
