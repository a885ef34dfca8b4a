# Programs over modules whose gradients have to be the same however they are asked for: some or all of them, with a
# recomputation or without, of microbatches one after another or in flight, at once or by backward_dw(), into .grad or
# main_grad. Each takes a Program and raises where they differ.
import torch
from fp8_steps import all_scales, meta
from plain_fp8 import PlainScales, linear
from support import assert_within, fp8_sum_error, rounding

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

from .programs import (
    RECIPES,
    STATELESS,
    assert_same,
    backward_dw,
    batch_of,
    descend,
    grads_of,
    left,
    model_of,
    own,
    plain_way,
    recipe_of,
    step,
    way_of,
)


def twins(p, model, way, batches):
    """Two of the model that have run the same batches."""
    models = model.build(), model.build()
    for one in models:
        for batch in batches:
            step(one, way, batch)
            descend(one)
    p.say(f"{len(batches)} steps, then {way}")
    return models


def steps(p, models, way, most=3):
    for _ in range(p.randrange(most)):
        p.say(f"a step, {way}")
        batch = batch_of(p)
        for one in models:
            step(one, way, batch)
            descend(one)


def some_of_all(p):
    """The gradients of some tensors are those that they get where all are wanted."""
    recipe = recipe_of(p)
    model, way = model_of(p, recipe), way_of(p, recipe)
    everything, some = twins(p, model, way, [batch_of(p) for _ in range(p.randrange(3))])
    # Unwanted gradients are not quantized, and their history columns do not move. (Before a first step there are none.)
    stateless = not isinstance(recipe, DelayedScaling) and all("scale" not in name for name in left(everything))
    names = [name for name, _ in some.named_parameters()]
    whole, wanted_sums = {}, {}
    for _ in range(p.randint(1, 2) if stateless else 1):
        x, dy = batch_of(p)
        wanted = p.some(["x", *names], p.choice((0.15, 0.5))) or [p.choice(names)]
        how = "freeze" if "r" in way.checkpoint else p.choice(("freeze", "grad", "inputs"))
        p.say(f"a backward for {wanted} by {how}")
        everything.zero_grad()
        whole = step(everything, way, (x, dy)) | grads_of(everything)
        parameters = dict(some.named_parameters())
        for name, parameter in parameters.items():
            parameter.requires_grad_(how != "freeze" or name in wanted)
        t = own(x).requires_grad_("x" in wanted or how != "freeze")
        y = way.call(some, t)
        targets = {name: t if name == "x" else parameters[name] for name in wanted}
        if how == "grad":
            got = dict(zip(wanted, torch.autograd.grad(y, [*targets.values()], dy.to(y.dtype))))
            assert all(q.grad is None for q in (t, *parameters.values()) if not wanted_sums), "grad() left a .grad"
            for name, gradient in got.items():
                if name != "x":
                    q = parameters[name]
                    q.grad = gradient.clone() if q.grad is None else q.grad + gradient
        else:
            y.backward(dy.to(y.dtype), inputs=[*targets.values()] if how == "inputs" else None)
            got = {"x": t.grad}
        assert_same({"y": y.detach()}, {"y": whole["y"]})
        if "x" in wanted:
            assert_same({"dx": got["x"]}, {"dx": whole["dx"]})
        else:
            assert t.grad is None, "a gradient that was not requested"
        for name in wanted:
            if name != "x":
                before = wanted_sums.get(name)
                wanted_sums[name] = whole[name].clone() if before is None else before + whole[name]
    assert_same({n: g for n, g in grads_of(some).items() if g is not None}, wanted_sums, "sums")


def recomputed(p):
    """A recomputation changes no bit: outputs, gradients, scales, histories, of several steps."""
    recipe = recipe_of(p)
    model, way = model_of(p, recipe, most=3, made={"fp8_output": recipe is not None and p.chance(0.3)}), None
    while way is None or not way.checkpoint:
        way = way_of(p, recipe)
    keeps, recomputes = model.build(), model.build()
    plain = plain_way(way)
    for _ in range(p.randint(1, 3)):
        batches = [batch_of(p) for _ in range(p.randint(1, 2))]
        flagged = p.chance(0.3)
        for i, batch in enumerate(batches):
            way.first = plain.first = i == 0 if flagged else None
            p.say(f"a step, {way}")
            assert_same(step(recomputes, way, batch), step(keeps, plain, batch))
            assert_same(left(recomputes), left(keeps))
        if p.chance(0.3):
            p.say("an evaluation")
            evaluate(recomputes, way, batches[0])
            evaluate(keeps, plain, batches[0])
        descend(recomputes)
        descend(keeps)


@torch.no_grad()
def evaluate(model, way, batch):
    model.eval()
    y = way.call(model, batch[0])
    model.train()
    return y


def in_flight(p):
    """Microbatches whose backwards come in any order leave what they leave one after another, without state."""
    recipe = recipe_of(p, STATELESS)
    made = {"fuse": p.chance(0.3), "delay": p.chance(0.3)}
    model, way = model_of(p, recipe, made=made), way_of(p, recipe)
    overlapping, ordered = model.build(), model.build()
    batches = [batch_of(p) for _ in range(p.randint(2, 4))]
    order = p.sample(range(len(batches)), len(batches))
    retained = [p.chance(0.2) and not way.checkpoint and not made["delay"] for _ in batches]
    flagged, all_at_once = p.chance(0.4), p.chance(0.3)
    p.say(f"{len(batches)} in flight, backwards {order}, again {retained}, flagged {flagged}, dw last {all_at_once}")

    def forward(one, i):
        way.first = (i == order[0]) if flagged else None
        x = own(batches[i][0])
        return x, way.call(one, x)

    def backward(one, i, x, y):
        y.backward(batches[i][1].to(y.dtype), retain_graph=retained[i])
        if retained[i]:
            y.backward(batches[i][1].to(y.dtype))
        if not all_at_once:
            backward_dw(one)
        return {f"y{i}": y.detach(), f"dx{i}": x.grad}

    flying, got, wanted = {}, {}, {}
    for i in p.sample(range(len(batches)), len(batches)) if not flagged else (order[0], *sorted(order[1:])):
        flying[i] = forward(overlapping, i)
        if p.chance(0.2):
            evaluate(overlapping, plain_way(way), batches[i])
    for i in order:
        got |= backward(overlapping, i, *flying.pop(i))
        wanted |= backward(ordered, i, *forward(ordered, i))
    for one in (overlapping, ordered) if all_at_once else ():
        for _ in batches:
            backward_dw(one)
    assert_same(got, wanted)
    assert_same(left(overlapping), left(ordered))


def delayed_rule(p):
    """The rule of delayed scaling for one Linear, in plain PyTorch: forward scales move when a region ends, backward
    scales after each backward; a backward reads what its own forward has quantized."""
    recipe = recipe_of(p, ("delayed",))
    length, e5m2 = recipe.amax_history_len, recipe.fp8_format.value.max_bwd > 448
    model = model_of(p, recipe, quantized=False, most=1, only=("Linear",))
    layers = tuple((f, {**o, "parameters_split": None}) for f, o in model.layers)
    module = type(model)(model.seed, layers).build()
    plain = {name: Scales(recipe, length, name == "dy" and e5m2) for name in ("x", "weight", "dy")}
    weight, bias = module[0].weight, module[0].bias if layers[0][1]["bias"] else None
    flying = []
    for _ in range(p.randint(4, 8)):
        if not flying or p.chance(0.55):
            batch = batch_of(p)
            x = own(batch[0])
            with te.autocast(recipe=recipe):
                y = module(x)
            flying.append((batch, x, y, {name: s.scale for name, s in plain.items()}))
            for name, t in (("x", x), ("weight", weight)):
                plain[name].see(t)
                plain[name].update()
            p.say(f"forward, {len(flying)} in flight")
            continue
        (_, dy), x, y, scales = flying.pop(p.randrange(len(flying)))
        p.say("a backward")
        module.zero_grad()
        y.backward(dy)
        now = {name: Fixed(scale) for name, scale in {**scales, "dy": plain["dy"].scale}.items()}
        flat = [t.detach().flatten(0, -2) for t in (x, dy)]
        results = linear("delayed", flat[0], weight.detach(), bias, flat[1], now) if e5m2 else {}
        got = {"y": y.detach(), "dx": x.grad, "dweight": weight.grad}
        for name, (value, magnitude) in results.items():
            if name in got:
                depth = {"y": x.shape[-1], "dx": weight.shape[0], "dweight": len(flat[0])}[name]
                bound = fp8_sum_error(magnitude, depth, "cpu", False) + rounding(value, torch.float32)
                assert_within(got[name].reshape(value.shape), value, bound, name)
        plain["dy"].see(dy)
        plain["dy"].update()
        for name, way, column in (("x", "fwd", 0), ("weight", "fwd", 1), ("dy", "bwd", 0)):
            history = meta(module[0])[way].amax_history[:, column].tolist()
            assert history == plain[name].history, f"{name}: history {history}, wanted {plain[name].history}"


def products(p):
    """Of one Linear without state, against the dequantized operands' products in float64."""
    name = p.choice(("current", "block"))
    recipe = RECIPES[name](p)
    rows, columns, depth = p.randint(1, 9), p.randint(1, 40), p.choice((1, 16, 33, 128, 130, 300))
    torch.manual_seed(p.getrandbits(31))
    module = te.Linear(depth, columns, bias=p.chance(0.5), device="cpu")
    x = (torch.randn(rows, depth) * torch.logspace(-3, 1, depth)[torch.randperm(depth)]).requires_grad_()
    dy = torch.randn(rows, columns) * p.choice((1e-6, 1.0, 1e4))
    p.say(f"{name}, [{rows}, {depth}] to {columns}")
    with te.autocast(recipe=recipe):
        y = module(x)
    y.backward(dy)
    bias = module.bias.detach() if module.use_bias else None
    got = {"y": y.detach(), "dx": x.grad, "dweight": module.weight.grad}
    depths = {"y": depth, "dx": columns, "dweight": rows}
    wanted = linear(name, x.detach(), module.weight.detach(), bias, dy)
    for product, t in got.items():
        value, magnitude = wanted[product]
        bound = fp8_sum_error(magnitude, depths[product] + 1, "cpu", False) + rounding(value, torch.float32)
        assert_within(t, value, bound, product)


class Scales(PlainScales):
    """Of one tensor under a recipe of any margin and algorithm."""

    def __init__(self, recipe, length, e5m2):
        super().__init__(length, e5m2)
        self.recipe = recipe

    def update(self):
        recent = [self.history[0]] if self.recipe.amax_compute_algo == "most_recent" else self.history
        self.history, kept = recent, self.history
        super().update()
        if max(recent) > 0:
            self.scale = self.scale / 2**self.recipe.margin
        self.history = [0.0, *kept[2:], kept[0]][: len(kept)]


class Fixed:
    def __init__(self, scale):
        self.scale = scale


def weight_gradients_elsewhere(p):
    """Weight gradients by backward_dw() or in main_grad are those of an immediate backward, to the bit."""
    recipe = recipe_of(p)
    quantized = recipe is not None and p.chance(0.3)
    model = model_of(p, recipe, quantized=quantized, made={"delay": p.chance(0.7), "fuse": p.chance(0.5)})
    plain = type(model)(model.seed, model.layers, model.quantized)
    way = way_of(p, recipe)
    if model.fuse:
        way.dtype = None  # main_grad takes in float32 what .grad takes in bf16
    elsewhere, here = model.build(), plain.build()
    fused = {n for n, q in elsewhere.named_parameters() if hasattr(q, "main_grad")}
    for n, q in elsewhere.named_parameters():
        if n in fused:
            q.main_grad.zero_()
    for _ in range(p.randint(1, 3)):
        batch = batch_of(p)
        p.say(f"a step, {way}")
        assert_same(step(elsewhere, way, batch), step(here, way, batch))
        got, wanted = grads_of(elsewhere), grads_of(here)
        for name in fused:
            main_grad = got.pop(f"{name}.main_grad")
            assert got[name] is None or not model.fuse, f"{name}.grad beside main_grad"
            got[name] = main_grad + 0.0
            wanted[name] = wanted[name] + 0.0  # -0 added to 0 is 0
        assert_same(got, wanted)
        assert_same(all_scales(elsewhere) or {"-": None}, all_scales(here) or {"-": None})
        elsewhere.zero_grad()
        here.zero_grad()
        for n, q in elsewhere.named_parameters():
            if n in fused:
                q.main_grad.zero_()


ORACLES = (some_of_all, recomputed, in_flight, delayed_rule, products, weight_gradients_elsewhere)
