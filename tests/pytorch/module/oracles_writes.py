# Programs over modules whose tensors are written: between forward and backward, and weights that are held in FP8 alone,
# in every way. Each takes a Program and raises where gradients, products or values are not those of the written tensor.
import copy

import torch
from generated import refused
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

from .oracles_gradients import evaluate, steps
from .programs import (
    CHANGED,
    FP8,
    assert_same,
    backward_dw,
    batch_of,
    grads_of,
    model_of,
    own,
    plain_way,
    recipe_of,
    step,
    way_of,
    weights_of,
)


def quantized_weights(model):
    return {n: q for n, q in model.named_parameters() if isinstance(q, te.QuantizedTensor)}


# ---- (d) writes between forward and backward ----


def write_to(p, t, x):
    """(words, call) of a write to t, a parameter or an input. Each changes values."""
    ways = {
        ".zero_()": lambda t: t.zero_(),
        ".copy_(x)": lambda t: t.copy_(x),
        ".mul_(2)": lambda t: t.mul_(2),
        ".add_(1)": lambda t: t.add_(1),
        ".detach().copy_(x)": lambda t: t.detach().copy_(x),
        ".view(-1, last).copy_(x)": lambda t: t.view(-1, t.shape[-1]).copy_(x.view(-1, x.shape[-1])),
        "[0] = x[0]": lambda t: t.__setitem__(0, x[0]),
        ".view_as().mul_(2)": lambda t: t.view_as(t).mul_(2),
    }
    if isinstance(t, te.QuantizedTensor):
        ways |= {
            ".quantize_(x)": lambda t: t.quantize_(x),
            ".data = x": lambda t: setattr(t, "data", x),
            ".data.copy_(x)": lambda t: t.data.copy_(x),
        }
    how = p.choice([*ways])
    return how, ways[how]


def written_between(p):
    """A write to a tensor that a backward still reads: an error, or the gradients of an unwritten run."""
    recipe = recipe_of(p)
    made = {"delay": p.chance(0.2)}
    model, way = model_of(p, recipe, made=made), way_of(p, recipe, checkpoint=False)
    written, untouched = model.build(), model.build()
    steps(p, (written, untouched), way)
    batch = batch_of(p)
    wanted = step(untouched, way, batch) | grads_of(untouched)
    leaf = own(batch[0])
    x = leaf.clone()
    views = {name: q.view(q.shape) for name, q in written.named_parameters()}
    y = way.call(written, x)
    targets = {"x": x, "a view of x": x[:], "y": y.detach()} | dict(written.named_parameters())
    targets |= {f"an older view of {name}": view.detach() for name, view in views.items()}
    late = made["delay"] and model.delay and p.chance(0.5)
    chosen = p.sample([*targets], p.randint(1, 2))

    def write():
        for name in chosen:
            how, call = write_to(p, targets[name], torch.randn(targets[name].shape, generator=generator) * 3)
            p.say(f"{name}{how}{' before backward_dw()' if late else ''}")
            with torch.no_grad():
                if (error := refused(call, targets[name])) is not None:
                    p.say(f"  refused: {error}")

    generator = torch.Generator().manual_seed(p.getrandbits(31))
    error = None
    try:
        if not late:
            write()
        y.backward(batch[1].to(y.dtype))
        if late:
            write()
        backward_dw(written)
    except RuntimeError as raised:
        error = raised
        assert any(words in str(error) for words in CHANGED), error
    if error is None:
        got = {"dx": leaf.grad} | grads_of(written)
        assert_same(got, {name: t for name, t in wanted.items() if name != "y"})
    else:
        p.say(f"  {str(error)[:80]}")


# ---- (e), (i) weights held in FP8 alone ----


def put(p, weight, value, model, name, *, exact=False):
    """Writes value into a quantized weight, in one of many ways; exact: that leave out no bit of it."""
    ways = {
        "copy_": lambda: weight.copy_(value),
        ".data.copy_": lambda: weight.data.copy_(value),
        ".data =": lambda: setattr(weight, "data", value),
        "detach().copy_": lambda: weight.detach().copy_(value),
        "view().copy_": lambda: weight.view(1, *value.shape).copy_(value[None]),
        "quantize_": lambda: weight.quantize_(value),
        "[:] =": lambda: weight.__setitem__(slice(None), value),
        "bf16 copy_": lambda: weight.copy_(value.bfloat16().float()),
        "zero_, add_": lambda: weight.zero_().add_(value),
        "load_state_dict": lambda: model.load_state_dict({name: value}, strict=False),
        "a step": lambda: stepped(weight, value),
    }
    how = p.choice([*ways][:-1] if exact else [*ways])
    p.say(f"{name} takes values by {how}")
    with torch.no_grad():
        ways[how]()
    return how


def stepped(weight, value):
    weight.grad = weight.dequantize() - value
    torch.optim.SGD([weight], 1.0).step()
    weight.grad = None


def quantized_or_not(p):
    """Weights held in FP8 alone: the bits of plain ones that hold the same values, which each forward quantizes."""
    recipe = recipe_of(p, ("current", "block"))
    model = model_of(p, recipe, quantized=True)
    way = way_of(p, recipe)
    plain_model = type(model)(model.seed, model.layers)
    held, plain = model.build(), plain_model.build()
    plain.load_state_dict({n: v.clone() for n, v in weights_of(held).items()}, strict=False)
    generator = torch.Generator().manual_seed(p.getrandbits(31))
    for i in range(p.randint(1, 4)):
        for name, weight in quantized_weights(held).items():
            if p.chance(0.6) or i == 0:
                value = (torch.randn(weight.shape, generator=generator) * p.choice((0.01, 0.3, 3.0))).bfloat16().float()
                before = weight.dequantize().detach()
                how = put(p, weight, value, held, name, exact=way.dtype is not None)
                plain.get_parameter(name).data.copy_(before - (before - value) if how == "a step" else value)
        batch, first = batch_of(p), p.choice((None, None, True))
        way.first = first
        p.say(f"a step, {way}")
        assert_same(step(held, way, batch), step(plain, way, batch))
        got, wanted = grads_of(held), grads_of(plain)
        assert_same(got, wanted)
        held.zero_grad()
        plain.zero_grad()
        if p.chance(0.3):
            assert_same_bits(evaluate(held, way, batch), evaluate(plain, plain_way(way), batch), "an evaluation")


EVENTS = ("step", "step", "write", "write", "write", "length", "another recipe", "eval", "copy", "load")


def written_weights(p):
    """A weight that is written holds what was written, by one rounding of its format: its scale fits. Under delayed
    scaling a write between steps may be clipped once, when the amaxes of earlier steps know nothing of its size."""
    recipe = recipe_of(p, FP8)
    model, way = model_of(p, recipe, quantized=True), way_of(p, recipe)
    one = model.build()
    generator = torch.Generator().manual_seed(p.getrandbits(31))
    known = dict.fromkeys(quantized_weights(one), 0.0)  # how large values the scale was made for, at least
    for _ in range(p.randint(3, 8)):
        event = p.choice(EVENTS)
        p.say(f"-- {event}")
        if event == "step":
            step(one, way, batch_of(p))
            known = {n: w.detach().dequantize().abs().max().item() for n, w in quantized_weights(one).items()}
        elif event == "another recipe":
            other = way_of(p, recipe_of(p, FP8))
            error = refused(step, one, other, batch_of(p))
            assert error is None or type(recipe).__name__ in str(error), error
            known = dict.fromkeys(known, 0.0) if error is None else known
        elif event == "length" and isinstance(recipe, DelayedScaling):
            length = p.randint(1, 8)
            p.say(f"adjust_amax_history_length({length})")
            for module in one.modules():
                if hasattr(module, "adjust_amax_history_length") and getattr(module, "fp8_meta", None):
                    module.adjust_amax_history_length(length)
        elif event == "eval":
            evaluate(one, plain_way(way), batch_of(p))
            known = dict.fromkeys(known, float("inf"))  # out of training each write brings its scale
        elif event == "copy":
            one = copy.deepcopy(one)
        elif event == "load":
            state = {n: torch.randn(w.shape, generator=generator) * 4 for n, w in quantized_weights(one).items()}
            one.load_state_dict(state, strict=False)
            for name, value in state.items():
                fits(one.get_parameter(name), value, name)
            known = dict.fromkeys(known, float("inf"))
        elif event == "write":
            for name in p.some([*known], 0.6):
                weight = one.get_parameter(name)
                value = torch.randn(weight.shape, generator=generator) * p.choice((0.01, 0.3, 3.0))
                how = put(p, weight, value, one, name)
                stays = isinstance(recipe, DelayedScaling) and how != "load_state_dict" and stepped_scales(one, name)
                if stays and float(value.abs().max()) > known[name]:
                    p.say("  which may be clipped")
                    step(one, way, batch_of(p))
                    put(p, weight, value, one, name)
                rounds = how in ("zero_, add_", "a step", "bf16 copy_")
                fits(weight, value, name, twice=rounds)


def stepped_scales(model, name):
    module = model.get_submodule(name.rpartition(".")[0])
    state = module.fp8_meta.get("scaling_fwd")
    return state is not None and getattr(state, "stepped", True)


def fits(weight, value, name, twice=False):
    """|value| 2^-4 is half a unit of E4M3's last place; near 0 half its smallest number, of a scale that fits the
    largest value, or one up to 2^12 times as large."""
    bound = (value.abs() * 2.0**-4).clamp(min=float(value.abs().max()) / 448 * 2.0**-10 * 2.0**12)
    off = (weight.dequantize() - value).abs() > bound * (2 if twice else 1) * 1.01
    assert not off.any(), (
        f"{name}: {int(off.sum())} of {off.numel()} values are not what was written: the largest is "
        f"{weight.dequantize().abs().max().item():.5g}, wanted {value.abs().max().item():.5g}"
    )


ORACLES = (written_between, quantized_or_not, written_weights)
