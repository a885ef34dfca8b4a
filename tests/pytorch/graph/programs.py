# Random programs over captured callables, as plain data: the captured modules, the order of calls, and actions of a
# user between them. A seed gives one program; program_runs.py runs it. No test is here.
import random
from dataclasses import dataclass, field

TE_FAMILIES = ("linear", "split_linear", "norm_linear", "mlp", "recomputed_mlp", "stack")
FAMILIES = (*TE_FAMILIES, "plain", "dropout")
RECIPES = (None, None, "delayed", "delayed, most recent", "current", "block")
AROUND = ("nothing", "call", "call", "step", "step")
WRITES = ("mul_ without gradients", "mul_", "mul_ of a view", "mul_ of a detached one", "a parameter")


@dataclass(frozen=True)
class Layer:
    family: str
    frozen: bool = False
    fused: bool = False  # into main_grad
    delayed: bool = False
    marked: bool = False  # skip_backward_post_hook
    inside: bool = False  # te.checkpoint inside of the captured callable
    overrides_call: bool = False  # the class overrides __call__
    joins: bool = False  # takes the result of the chunk's first layer too
    splits: bool = False  # has a second result


@dataclass(frozen=True)
class Write:
    """A write to one tensor between a forward and its backward: after the call of a layer, or after the whole entry."""

    entry: int
    layer: int
    early: bool
    result: bool  # of the layer, else its argument
    kind: str


@dataclass(frozen=True)
class Step:
    seed: int
    ways: dict[tuple[int, int], str]  # of each microbatch: backward, grad, inputs
    twice: frozenset[tuple[int, int]]  # microbatches whose backward runs again
    late: bool  # delayed weight gradients without entries wait for the end of the step
    keep_grads: bool  # .grad of the previous step stays
    quiet: tuple[int, int, int] | None  # a call without gradients before it
    evaluated: bool  # which is one in eval mode
    given_up: int | None  # before which entry
    stream: bool  # captured callables replay on a separate stream
    bad: tuple[int, str] | None  # a call that is refused: before which entry, and the fault
    hooks: bool  # gradients between layers are read, and kept
    first: bool | None  # is_first_microbatch of the first one, if weights are not cached
    write: Write | None = None


@dataclass(frozen=True)
class Program:
    seed: int
    chunks: tuple[tuple[Layer, ...], ...]
    microbatches: int
    order: tuple[float, ...] | None
    recipe: str | None
    group: bool
    reuse: bool
    retain: bool
    clone: bool
    cached: bool
    around: str  # autocast: nothing, each call, the step
    checkpoint: str  # around: nothing, each layer, the chunk
    reentrant: bool
    between: str  # layers: nothing, sin, residual
    input_grads: tuple[bool, ...]  # of each chunk's input
    protocol: bool  # grad_added_to_main_grad
    warmup: int
    fault: int  # the capture is first tried with an exception at that count; 0: it is not
    steps: tuple[Step, ...] = field(default=())

    @property
    def entries(self) -> list[float]:
        """The order as a list; without one, a single microbatch, layer by layer."""
        return [1, -1] if self.order is None else list(self.order)

    def delays(self, chunk: int) -> bool:
        return any(layer.delayed and not layer.frozen for layer in self.chunks[chunk])

    @property
    def scheduled(self) -> set[int]:
        """The chunks whose weight gradients have entries in the order."""
        return {int(-entry) - 1 for entry in self.entries if entry % 1}

    def __str__(self) -> str:
        lines = [f"program {self.seed}: order {self.order}, {self.microbatches} microbatches"]
        for i, chunk in enumerate(self.chunks):
            said = [f"{layer.family}({', '.join(k for k, v in vars(layer).items() if v is True)})" for layer in chunk]
            lines.append(f"  chunk {i + 1}: {' > '.join(said)}; its input requires a gradient: {self.input_grads[i]}")
        rest = {k: v for k, v in vars(self).items() if k not in ("seed", "order", "microbatches", "chunks", "steps")}
        lines.append("  " + ", ".join(f"{k}={v}" for k, v in rest.items() if k != "input_grads"))
        return "\n".join(lines + [f"  {step}" for step in self.steps])


def _order(pick, chunks, microbatches, scheduled, at_once):
    """A random valid order with a bounded number of microbatches in flight. at_once: weight gradients follow their
    backward directly."""
    limit = pick.randint(1, microbatches)
    forward, backward, later = ([0] * chunks for _ in range(3))
    entries = []
    while True:
        legal = []
        for c in range(chunks):
            waits = c in scheduled and later[c] < backward[c]
            if forward[c] < microbatches and forward[c] - backward[c] < limit:
                legal.append(c + 1)
            if backward[c] < forward[c] and not waits:
                legal.append(-c - 1)
            if waits:
                legal.append(-c - 1.5)
        if not legal:
            return tuple(entries)
        entry = pick.choice(legal)
        if at_once and any(e % 1 for e in legal):
            entry = next(e for e in legal if e % 1)
        entries.append(entry)
        chunk = int(abs(entry)) - 1
        (forward if entry > 0 else later if entry % 1 else backward)[chunk] += 1


def _chunk(pick, few, delayed, checkpoint):
    count = 1 if checkpoint == "layer" and delayed else pick.choice((1, 1, 2, 3, 4) if not few else (1, 2))
    layers = []
    for i in range(count):
        family = pick.choice(TE_FAMILIES if delayed else FAMILIES)
        ours = family in TE_FAMILIES
        layers.append(
            Layer(
                family,
                frozen=pick.random() < 0.15 and not (delayed and i == 0),
                fused=ours and pick.random() < 0.3,
                delayed=delayed and ours,
                marked=pick.random() < 0.15,
                inside=not checkpoint and pick.random() < 0.2,
                overrides_call=pick.random() < 0.15,
                joins=i >= 2 and pick.random() < 0.6,
                splits=i == count - 1 and pick.random() < 0.15,
            )
        )
    return tuple(layers)


def _step(pick, program, last):
    passes = [(c, m) for c in range(len(program.chunks)) for m in range(program.microbatches)]
    delayed = {c for c, chunk in enumerate(program.chunks) if any(layer.delayed for layer in chunk)}
    recomputes = any(layer.inside for chunk in program.chunks for layer in chunk) and program.reentrant
    ways = {}
    for c, m in passes:
        free = program.input_grads[c] and not program.checkpoint and not recomputes
        ways[c, m] = pick.choice(("backward",) * 3 + ("grad", "inputs")) if free else "backward"
    again = program.retain and not program.checkpoint and not any(x.inside for chunk in program.chunks for x in chunk)
    twice = frozenset(p for p in passes if again and p[0] not in delayed and pick.random() < 0.5)
    target = pick.choice(passes)
    write = None
    entries = program.entries
    if last and pick.random() < 0.35 and not program.checkpoint and not program.group:
        entry = pick.choice([i for i, e in enumerate(entries) if e > 0])
        chunk = program.chunks[int(entries[entry]) - 1]
        layer, early, result = pick.randrange(len(chunk)), pick.random() < 0.5, pick.random() < 0.5
        write = Write(entry, layer, early, result, pick.choice(WRITES))
    return Step(
        seed=pick.randrange(10**6),
        ways=ways,
        twice=twice,
        late=pick.random() < 0.5,
        keep_grads=pick.random() < 0.3,
        quiet=(*target, pick.randrange(len(program.chunks[target[0]])))
        if pick.random() < 0.2 and write is None
        else None,
        evaluated=pick.random() < 0.4 and (program.recipe is None or program.around != "nothing"),
        given_up=pick.randrange(1, len(entries)) if pick.random() < 0.15 and not last else None,
        stream=pick.random() < 0.15,
        bad=(pick.randrange(len(entries)), pick.choice(("shape", "dtype", "missing", "keyword")))
        if pick.random() < 0.15
        else None,
        hooks=not program.checkpoint and pick.random() < 0.3,
        first=pick.choice((None, False, True)),
        write=write,
    )


def captures_group(seed: int) -> bool:
    """Whether the capture gets the group as an argument, too."""
    return seed % 2 == 1


def generated(seed: int, *, group: bool = False) -> Program:
    """group: two ranks run it, and amaxes are reduced over a group of some of them."""
    pick = random.Random(seed if not group else f"group {seed}")
    recipe = pick.choice(("delayed", "delayed, most recent") if group else RECIPES)
    ordered = pick.random() < 0.75
    microbatches = pick.randint(1, 3) if ordered else 1
    count = pick.choice((1, 1, 2, 3)) if ordered else 1
    checkpoint = pick.choice(("", "", "", "layer", "chunk"))
    chunks = tuple(_chunk(pick, count > 1, pick.random() < 0.3, checkpoint) for _ in range(count))
    delayed = {c for c, chunk in enumerate(chunks) if any(layer.delayed for layer in chunk)}
    # A recomputation replays graphs before those of pending weight gradients: then nothing may be pending.
    scheduled = {c for c in delayed if checkpoint or pick.random() < 0.7}
    program = Program(
        seed=seed,
        chunks=chunks,
        microbatches=microbatches,
        order=_order(pick, count, microbatches, scheduled, bool(checkpoint)) if ordered else None,
        recipe=recipe,
        group=group,
        reuse=ordered and pick.random() < 0.5,
        retain=pick.random() < 0.25,
        clone=pick.random() < 0.85,
        cached=recipe is not None and pick.random() < 0.4,
        around=pick.choice(("call", "step") if group and not captures_group(seed) else AROUND),
        checkpoint=checkpoint,
        reentrant=bool(checkpoint) or pick.random() < 0.5,
        between=pick.choice(("nothing", "nothing", "sin", "residual")),
        input_grads=tuple(
            bool(checkpoint) or chunk[0].frozen or pick.random() < 0.8 or chunk[0].joins for chunk in chunks
        ),
        protocol=pick.random() < 0.4,
        warmup=pick.randint(1, 2),
        fault=pick.randint(1, 12) if pick.random() < 0.15 and not group else 0,
    )
    steps = pick.randint(2, 3)
    object.__setattr__(program, "steps", tuple(_step(pick, program, i == steps - 1) for i in range(steps)))
    return program
