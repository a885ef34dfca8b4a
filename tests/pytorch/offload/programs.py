# Generated programs under offload: `make` draws one from a seed as plain data; program_runs.py runs it. No test is
# here.
import dataclasses
import random

from quantized_cases import FORMATS

from transformer_engine.common import recipe as recipes

from .layers import CHECKPOINTS, KINDS, PLAIN, USAGES, Spec

RECIPES = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
}
CALLS = {  # manual calls: the state of the layer before and after
    "start_offload_layer": ("not_offloaded", "offload_started"),
    "release_activation_forward_gpu_memory": ("offload_started", "offload_finished"),
    "start_reload_layer": ("offload_finished", "reload_started"),
}


class Refused(Exception):
    """A backward whose error names a tensor that was overwritten."""


@dataclasses.dataclass
class Program:
    seed: int
    layers: list
    k: int
    manual: bool
    retain: bool
    debug: bool
    recipe: str | None
    around: tuple | None  # (first layer, one after the last, checkpoint)
    input_gradient: bool
    steps: list

    @property
    def numbered(self):
        """The layers that the context counts: those outside of a checkpoint."""
        inside = range(*self.around[:2]) if self.around else ()
        return [i for i in range(len(self.layers)) if i not in inside]


def make(seed):
    draw = random.Random(seed)

    def chance(p):
        return draw.random() < p

    def spec():
        kind = draw.choice(KINDS)
        one = Spec(kind, frozen=chance(0.1), pieces=1 + chance(0.2), ready=chance(0.2))
        one.inside = draw.choice(list(CHECKPOINTS)) if chance(0.2) else None
        one.mark = draw.choice(["call", "attribute"]) if chance(0.15) else ""
        if kind == "keeps":
            names = [draw.choice(PLAIN) if chance(0.6) else quantized() for _ in range(draw.randint(1, 5))]
            one.kept = tuple((name, mark(name) if chance(0.25) else "") for name in names)
        return one

    def quantized():
        return f"{draw.choice(list(FORMATS))}:{draw.choice(list(USAGES))}"

    def mark(name):
        return draw.choice(["call", "attribute"] + ["part"] * (":" in name))

    n = draw.randint(1, 6)
    layers = [spec() for _ in range(n)]
    around = None
    if chance(0.15):
        first = draw.randrange(n)
        around = first, draw.randint(first + 1, n), draw.choice(list(CHECKPOINTS))
    program = Program(
        seed,
        layers,
        0,
        chance(0.4),
        chance(0.2),
        chance(0.5),
        draw.choice(list(RECIPES)) if chance(0.2) else None,
        around,
        chance(0.85),
        [],
    )
    if program.recipe:  # torch's checkpoints do not restore te.autocast
        for one in layers:
            one.inside = one.inside and one.inside.replace("torch", "te")
        program.around = around and (*around[:2], around[2].replace("torch", "te"))
    program.k = draw.randrange(max(1, len(program.numbered)))
    program.steps = [_step(program, draw) for _ in range(draw.randint(2, 3))]
    return program


def _step(program, draw):
    """Actions: forwards in parts, one at a time, and backwards, evaluations and manual calls in between."""
    n, actions, waiting = len(program.layers), [], []
    reentrant = any(spec.inside and "reentrant" in spec.inside for spec in program.layers)
    reentrant |= program.around is not None and "reentrant" in program.around[2]

    def chance(p):
        return draw.random() < p

    def calls(tidy):
        """{layer: manual calls after it}"""
        numbers = range(len(program.numbered))
        if not program.manual:
            return {}
        if tidy:
            wanted = list(CALLS)[: draw.randint(1, 3)]
            return {layer: [(name, number) for name in wanted] for number, layer in enumerate(program.numbered)}
        return {
            layer: [(draw.choice(list(CALLS)), draw.choice(numbers)) for _ in range(draw.randint(0, 2))]
            for layer in range(n)
            if numbers
        }

    def backward():
        microbatch = waiting.pop(draw.randrange(len(waiting)))
        ways = ["whole"] * 3 + ["twice", "fails", "fails, again", "dropped"]
        ways += [] if reentrant else ["split", "part"]
        back = {i: [("start_reload_layer", number)] for number, i in enumerate(program.numbered)} if chance(0.5) else {}
        actions.append(("backward", microbatch, draw.choice(ways), draw.randrange(n), back if program.manual else {}))

    def in_between():
        if chance(0.15):
            actions.append(("evaluate", draw.choice(["no_grad", "inference"]), calls(True)))
        if chance(0.25) and waiting:
            backward()

    for microbatch in range(draw.randint(1, 3)):
        if chance(0.1):
            actions.append(("evaluate", "disabled", {}))
        inner = range(program.around[0] + 1, program.around[1]) if program.around else ()
        cuts = [i for i in range(1, n + 1) if i not in inner]
        at, end = 0, draw.choice(cuts) if chance(0.1) else n
        fails = draw.choice([None, *program.numbered]) if chance(0.2) else None
        writes, tidy = [i for i in range(n) if chance(0.07)], chance(0.6)
        while at < end:
            to = draw.choice([i for i in cuts if at < i <= end])
            if fails is not None and at <= fails < to:
                where = draw.choice(["inside", "before the end", "behind"])
                actions.append(("fail", microbatch, at, fails, where, chance(0.5), chance(0.5)))
                break
            actions.append(("forward", microbatch, at, to, writes, calls(tidy)))
            at = to
            if at < end:
                in_between()
        else:
            if end < n:
                actions.append(("exit", microbatch, chance(0.5)))
            else:
                waiting.append(microbatch)
        in_between()
    while waiting:
        backward()
    if chance(0.2) and program.numbered:
        actions.insert(0, ("aside",))
    return actions
