# Programs over modules about what calls leave behind: exceptions, copies and files, contexts. Each takes a Program and
# raises where a model that has been through it differs from one that has not.
import copy
import io

import torch
import torch.distributed.checkpoint as dcp
from fp8_steps import all_scales
from generated import refused
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.quantization.state.autocast_state import current_state

from .oracles_gradients import steps
from .programs import (
    FP8,
    assert_same,
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
    weights_of,
)

# ---- (f) exceptions, and what they leave ----


class Failed(Exception):
    pass


def fail(*_):
    raise Failed


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t.view_as(t)

    @staticmethod
    def backward(ctx, gradient):
        raise Failed


def failing(p, model, way, batch):
    """Fails somewhere; whether its forward had ended."""
    kinds = ("a hook", "inside", "backward", "bad shape", "bad dtype", "bad weight", "reset", "body")
    kind, at = p.choice(kinds), p.randrange(len(model))
    p.say(f"a step that fails: {kind} at layer {at}, {way}")
    x, dy = own(batch[0]), batch[1]
    if kind == "body":
        try:
            with te.autocast(recipe=way.recipe):
                fail()
        except Failed:
            return False
    if kind == "a hook":
        handle = model[at].register_forward_pre_hook(fail)
        try:
            way.call(model, x)
        except Failed:
            return False
        finally:
            handle.remove()
        raise AssertionError("the hook's error is lost")
    if kind in ("inside", "backward"):
        way.hooks = {at: fail if kind == "inside" else FailsInBackward.apply}
        try:
            y = way.call(model, x)
            y.backward(dy.to(y.dtype))
        except Failed:
            return kind == "backward"
        finally:
            way.hooks = {}
        raise AssertionError("the error is lost")
    if kind == "reset":
        with te.autocast(enabled=way.recipe is not None, recipe=way.recipe):
            FP8GlobalStateManager.reset()
        return False
    bad = {"bad shape": x[..., :-1], "bad dtype": x.to(torch.int32), "bad weight": x[0, 0, :5]}[kind]
    error = refused(lambda: way.call(model, bad.detach()))
    assert error is not None, f"{kind} was taken"
    return False


def after_exceptions(p):
    """A step after a failed one is the step of a model that never failed; nothing stays switched on."""
    recipe = recipe_of(p)
    made = {"delay": p.chance(0.2), "fuse": p.chance(0.2)}
    model, way = model_of(p, recipe, made=made), way_of(p, recipe)
    failed, whole = model.build(), model.build()
    models = failed, whole
    stateless = not isinstance(recipe, DelayedScaling)
    for _ in range(p.randint(1, 3)):
        steps(p, models, way)
        batch = batch_of(p)
        if not stateless:  # amaxes that a failed forward has noted count: those of the same batch change nothing
            p.say("a step, the same batch twice")
            for one in models:
                step(one, way, batch)
        before = grads_of(whole)
        ended = failing(p, failed, way, batch)
        state = current_state()
        now = state.depth, state.enabled, state.calibrating, state.region
        assert now == (0, False, False, None), f"{now} stays switched on"
        if ended and not stateless:
            return  # its forward's scales moved, and of its backward what had been computed was noted
        failed.zero_grad()
        for module in failed.modules():
            if hasattr(module, "drop_backward_dw"):
                module.drop_backward_dw()
        whole.zero_grad()
        if model.fuse:
            for one in models:
                for q in one.parameters():
                    if hasattr(q, "main_grad"):
                        q.main_grad.zero_()
        del before
        p.say(f"a step, {way}")
        assert_same(step(failed, way, batch), step(whole, way, batch))
        assert_same(left(failed), left(whole))


# ---- (h) copies and files ----


def travelled(p, model, one, recipe):
    """The model after a round trip."""
    ways = ["state_dict", "deepcopy", "state_dict in a file", "dcp", "itself"]
    if not isinstance(model.quantized, DelayedScaling):
        ways += ["torch.save", "assign"]  # delayed scales then follow the rounded FP8 values
    how = p.choice(ways)
    p.say(f"a round trip by {how}")
    if how == "deepcopy":
        return copy.deepcopy(one)
    if how == "torch.save":
        return torch.load(file_of(one), weights_only=False)
    other = model.build()
    if how == "dcp":
        return through_dcp(one, other, recipe)
    state = one.state_dict()
    if how == "state_dict in a file":
        state = torch.load(file_of(state), weights_only=True)
    if how == "itself":
        one.load_state_dict(copy.deepcopy(state))
        return one
    if how == "assign":
        state = copy.deepcopy(state)
    other.load_state_dict(state, assign=how == "assign")
    return other


def file_of(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def through_dcp(one, other, recipe):
    """state_dict() of a new model has scales under an autocast with its recipe."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        dcp.save(one.state_dict(), checkpoint_id=folder, no_dist=True)
        with te.autocast(enabled=bool(all_scales(one)), recipe=recipe):
            state = other.state_dict()
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        other.load_state_dict(state)
    return other


def round_trips(p):
    """Steps after a copy or a file are the steps of the original."""
    recipe = recipe_of(p)
    model, way = model_of(p, recipe), way_of(p, recipe)
    original, copied = model.build(), model.build()
    for _ in range(p.randint(1, 2)):
        steps(p, (original, copied), way)
        copied.zero_grad()
        original.zero_grad()
        copied = travelled(p, model, copied, recipe)
        copied.zero_grad()
        assert_same(weights_of(copied), weights_of(original), "values")
        batch = batch_of(p)
        p.say(f"a step, {way}")
        assert_same(step(copied, way, batch), step(original, way, batch))
        got, wanted = ({**grads_of(m), **all_scales(m)} for m in (copied, original))
        assert_same(got, wanted)


# ---- (k) contexts ----


def without_gradients(p):
    """A forward without gradients gives a training forward's bits."""
    recipe = recipe_of(p)
    model, way = model_of(p, recipe), way_of(p, recipe)
    one = model.build()
    steps(p, (one,), way)
    batch = batch_of(p)
    context = p.choice((torch.no_grad, torch.inference_mode))
    train = p.chance(0.5)
    p.say(f"{context.__name__}, training={train}, {way}; then a step")
    before = all_scales(one)
    one.train(train)
    with context():
        y = plain_way(way).call(one, batch[0].detach())
    one.train()
    if before:  # a first call makes them
        assert_same(all_scales(one), before, "without gradients")
    assert_same_bits(y, step(one, way, batch)["y"], "y")


def calibrated(p):
    """Calibration computes in high precision, to the bit, and the scales are made of the largest amaxes it has seen."""
    recipe = recipe_of(p, ("delayed",))
    model = model_of(p, None, quantized=False)
    calibrating, plain = model.build(), model.build()
    seen = []
    calibrating[0].register_forward_pre_hook(lambda module, args: seen.append(float(args[0].abs().max())))
    batches = [batch_of(p) for _ in range(p.randint(1, 3))]
    training = p.chance(0.7)
    p.say(f"{len(batches)} calls that calibrate, training={training}")
    for one in (calibrating, plain):
        one.train(training)
    with torch.set_grad_enabled(p.chance(0.5)), te.autocast(enabled=False, calibrating=True, recipe=recipe):
        got = [calibrating(x).detach() for x, _ in batches]
    for y, (x, _) in zip(got, batches):
        assert_same_bits(y, plain(x).detach(), "y")
    if isinstance(calibrating[0], te.Linear):
        state = calibrating[0].fp8_meta["scaling_fwd"]
        weights = [getattr(plain[0], name).detach().abs().max().item() for name in plain[0].weight_names]
        for column, amax in ((0, max(seen)), (1, max(weights))):
            wanted = torch.tensor([state.fp8_max]) / torch.tensor([amax]) / 2**recipe.margin
            assert_same_bits(state.scale[column : column + 1], wanted, f"scale of column {column}")


def flags_left_on(p):
    """Flags of captured graphs do not change eager calls."""
    recipe = recipe_of(p, FP8)
    model, way = model_of(p, recipe), way_of(p, recipe)
    flagged, plain = model.build(), model.build()
    for i in range(3):
        batch = batch_of(p)
        way.first = p.choice((None, True)) if i else None
        if p.chance(0.7):
            p.say("set_skip_fp8_weight_update_tensor(True)")
            FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(True)
        try:
            got = step(flagged, way, batch)
            descend(flagged)
        finally:
            FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(None)
        p.say(f"a step, {way}")
        assert_same(got, step(plain, way, batch))
        descend(plain)
        assert_same(weights_of(flagged), weights_of(plain))


ORACLES = (
    after_exceptions,
    round_trips,
    without_gradients,
    calibrated,
    flags_left_on,
)
