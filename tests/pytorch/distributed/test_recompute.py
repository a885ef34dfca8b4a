# te.checkpoint: with and without it the same bits, in outputs, in every gradient and in whatever is drawn afterwards,
# for both of torch's ways.

import functools

import pytest
import torch
from families import EVERY_FAMILY, FFN, HIDDEN, build, inputs_of
from module_contract import Tracker
from plain_modules import randomize
from support import assert_same_bits, in_threads, refused, saved_tensors
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import transformer_engine.pytorch as te

from .recompute_cases import Dropping, both_ways, same_bits, step, tokens

# ---- the same bits ----


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_every_module(device, name, dtype, use_reentrant):
    module, inputs = build(name, device, dtype), [t.requires_grad_() for t in inputs_of(name, device, dtype)]
    kept = step(lambda m, *t: m(*t), module, *inputs)
    same_bits(step(lambda m, *t: te.checkpoint(m, *t, use_reentrant=use_reentrant), module, *inputs), kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_every_module_with_a_selective_policy(device, name, dtype):
    """Under its dispatch modes as without; autocast included."""
    policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.te.linear_fwd.default])
    recomputed = functools.partial(te.checkpoint, use_reentrant=False, context_fn=policy)
    module, inputs = build(name, device, dtype), [t.requires_grad_() for t in inputs_of(name, device, dtype)]
    for enabled in (False, True):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
            kept = step(lambda m, *t: m(*t), module, *inputs)
            same_bits(step(recomputed, module, *inputs), kept)


@both_ways
@pytest.mark.parametrize("option", ["fuse_wgrad_accumulation", "delay_wgrad_compute", "both"])
def test_weight_gradients_that_go_elsewhere(device, option, use_reentrant):
    """Into main_grad or until backward_dw(): once, although the forward ran twice."""
    chosen = ("fuse_wgrad_accumulation", "delay_wgrad_compute") if option == "both" else (option,)
    module, x = te.LayerNormMLP(HIDDEN, FFN, device=device, **dict.fromkeys(chosen, True)), tokens(device)

    def gradients(call):
        for p in module.parameters():
            p.grad, p.main_grad = None, torch.ones(p.shape, device=device)
        out = call(x)
        out.backward(out.detach().cos())
        if "delay_wgrad_compute" in chosen:
            module.backward_dw()
            with refused(RuntimeError, "backward_dw", "no weight gradient"):
                module.backward_dw()
        return {
            n: p.main_grad if p.dim() > 1 and "fuse_wgrad_accumulation" in chosen else p.grad
            for n, p in module.named_parameters()
        }

    kept = gradients(module)
    same_bits(gradients(lambda t: te.checkpoint(module, t, use_reentrant=use_reentrant)), kept)


@both_ways
@pytest.mark.parametrize("retain", [False, True])
def test_dropout_and_a_tracker(device, use_reentrant, retain):
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 6)
    module, x, start = Dropping(device, tracker), tokens(device), tracker.get_states()
    kept = step(lambda m, t: m(t), module, x, tracker=tracker)
    tracker.set_states(start)

    def call(m, t):
        out = te.checkpoint(m, t, use_reentrant=use_reentrant, get_rng_state_tracker=lambda: tracker)
        if retain:  # a first backward that is thrown away, other numbers drawn between
            out.backward(torch.ones_like(out), retain_graph=True)
            m.zero_grad()
            t.grad = None
        return out

    same_bits(step(call, module, x, tracker=tracker), kept)
    with tracker.fork():
        after = torch.rand(3)
    assert not torch.equal(after, kept["drawn behind backward"][:3])


@both_ways
@pytest.mark.parametrize("tracked", [False, True])
def test_random_states_that_are_left_alone(device, use_reentrant, tracked, monkeypatch):
    """preserve_rng_state=False: nothing is read or put back, and the second run draws on. True is the default."""
    tracker = Tracker() if tracked else None
    options = {"use_reentrant": use_reentrant, "get_rng_state_tracker": (lambda: tracker) if tracked else None}
    module, x = Dropping(device), tokens(device)
    kept = step(lambda m, t: te.checkpoint(m, t, **options), module, x)
    same_bits(step(lambda m, t: te.checkpoint(m, t, preserve_rng_state=True, **options), module, x), kept)
    plain, inputs = te.LayerNormMLP(HIDDEN, FFN, device=device), tokens(device)
    want = step(lambda m, t: m(t), plain, inputs)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_rng_state", lambda *_: pytest.fail("a random state was read"))
        got = step(lambda m, t: te.checkpoint(m, t, preserve_rng_state=False, **options), plain, inputs)
    same_bits(got, want)
    drawn = []

    def drawing(t):
        drawn.append(torch.rand(1).item())
        return t.sin()  # which keeps t

    for preserve in (True, False):
        te.checkpoint(drawing, x, preserve_rng_state=preserve, **options).sum().backward()
        assert len(drawn) == 2 and (drawn[0] == drawn[1]) is preserve
        drawn.clear()


@both_ways
def test_a_tracker_that_is_not_ours(device, use_reentrant):
    """Any tracker with get_states, set_states and fork."""
    tracker = Tracker()
    module, x, start = Dropping(device, tracker), tokens(device), tracker.get_states()
    kept = step(lambda m, t: m(t), module, x, tracker=tracker)
    tracker.set_states(start)

    def call(m, t):
        return te.checkpoint(m, t, use_reentrant=use_reentrant, get_rng_state_tracker=lambda: tracker)

    same_bits(step(call, module, x, tracker=tracker), kept)


@both_ways
@pytest.mark.parametrize("inner", [True, False], ids=["reentrant", "not_reentrant"])
def test_checkpoints_nest(device, use_reentrant, inner):
    module, x = torch.nn.Sequential(Dropping(device), Dropping(device)), tokens(device)

    def nested(t):
        return te.checkpoint(module[1], te.checkpoint(module[0], t, use_reentrant=inner), use_reentrant=inner)

    kept = step(lambda m, t: m(t), module, x)
    same_bits(step(lambda m, t: te.checkpoint(nested, t, use_reentrant=use_reentrant), module, x), kept)


@both_ways
def test_autocast(device, use_reentrant):
    """The second run has the autocast of the first run, although the backward runs without autocast."""
    module, x = Dropping(device), tokens(device)

    def plain(m, t):
        with torch.autocast(device, dtype=torch.bfloat16):
            return m(t)

    def checkpointed(m, t):
        with torch.autocast(device, dtype=torch.bfloat16):
            return te.checkpoint(m, t, use_reentrant=use_reentrant)

    kept = step(plain, module, x)
    assert kept["output 0"].dtype == torch.bfloat16
    same_bits(step(checkpointed, module, x), kept)


@both_ways
def test_tensors_by_name_and_inside_containers(device, use_reentrant):
    module, x = Dropping(device), tokens(device)
    scale, shift, extra = (torch.randn(HIDDEN, device=device, requires_grad=True) for _ in range(3))

    def function(tensors, factor, *, shift, options):
        out = module(tensors[0], scale=tensors[1]["scale"], shift=shift)
        return {"out": out * factor, "pair": (out + options["extra"], None)}, "done"

    def plain(_, t, *rest):
        return flat(function((t, {"scale": rest[0]}), 2.0, shift=rest[1], options={"extra": rest[2]}))

    def checkpointed(_, t, *rest):
        return flat(
            te.checkpoint(
                function,
                (t, {"scale": rest[0]}),
                2.0,
                shift=rest[1],
                options={"extra": rest[2]},
                use_reentrant=use_reentrant,
            )
        )

    def flat(result):
        tensors, word = result
        assert word == "done" and tensors["pair"][1] is None
        return tensors["out"], tensors["pair"][0]

    inputs = (x, scale, shift, extra)
    same_bits(step(checkpointed, module, *inputs), step(plain, module, *inputs))


@both_ways
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1, 2)])
def test_several_outputs_of_which_some_are_used(device, use_reentrant, used):
    """One of them is a parameter: it is returned as it is, and its gradient is its own."""
    module = te.LayerNormLinear(HIDDEN, HIDDEN, return_layernorm_output=True, return_bias=True, device=device)
    x = tokens(device)

    def chosen(outputs):
        assert outputs[1] is module.bias
        return tuple(outputs[i] * 2 for i in used)

    kept = step(lambda m, t: chosen(m(t)), module, x)
    same_bits(step(lambda m, t: chosen(te.checkpoint(m, t, use_reentrant=use_reentrant)), module, x), kept)


VIEWS = {
    "transposed": lambda t: t.transpose(0, 1),
    "flat": lambda t: t.reshape(-1),
    "row": lambda t: t[None],
    "slice": lambda t: t[..., 1:],
    "expanded": lambda t: t.expand(2, *t.shape),
    "view of a view": lambda t: t.transpose(0, 1)[1:],
    "parts": lambda t: t.split(1),
    "itself": lambda t: t,
}


@both_ways
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("of", ["input", "parameter", "closure"])
def test_views_that_are_returned(device, use_reentrant, of, view):
    """Of an input, of a parameter and of a tensor with a graph from outside: gradients go through them."""
    module, inputs = te.Linear(HIDDEN, HIDDEN, device=device), [tokens(device).detach()[:, 0] for _ in range(2)]

    def call(m, x, other, around=lambda function, t: function(t)):
        outer = other * 2

        def function(t):
            seen = VIEWS[view]({"input": t, "parameter": m.weight, "closure": outer}[of])
            return m(t), *(seen if isinstance(seen, tuple) else (seen,))

        return tuple(t * 3 for t in around(function, x))

    def checkpointed(m, *t):
        return call(m, *t, around=lambda *args: te.checkpoint(*args, use_reentrant=use_reentrant))

    inputs = [t.requires_grad_() for t in inputs]
    kept = step(call, module, *inputs)
    reached = {"input": "input 0", "parameter": "weight", "closure": "input 1"}[of]
    assert kept[f"gradient of {reached}"].count_nonzero() > 0
    same_bits(step(checkpointed, module, *inputs), kept)


@both_ways
@pytest.mark.parametrize("made", ["leaf of a buffer", "view without gradients"])
def test_views_from_outside_that_are_returned(device, use_reentrant, made):
    """A leaf that is a view of a buffer keeps its own gradient; a view of a leaf made under no_grad does too: autograd
    accumulates in it as in a leaf."""

    start = tokens(device)

    def gradients(around):
        x = start.detach().clone().requires_grad_()
        base = torch.ones(HIDDEN, device=device, requires_grad=made != "leaf of a buffer")
        with torch.no_grad():
            outer = base[1:].requires_grad_()
        first, second = around(lambda t: (t.sin(), outer), x)
        (first.sum() + (3 * second).sum()).backward()
        return {"x": x.grad, "outer": outer.grad, "base": base.grad}

    kept = gradients(lambda function, *t: function(*t))
    assert kept["outer"].eq(3).all()
    same_bits(gradients(lambda *t: te.checkpoint(*t, use_reentrant=use_reentrant)), kept)


@both_ways
def test_a_frozen_parameter_that_is_returned_stays_itself(device, use_reentrant):
    module = te.LayerNormMLP(HIDDEN, HIDDEN, return_bias=True, device=device)
    module.fc2_bias.requires_grad_(False)
    x = tokens(device)
    kept = step(lambda m, t: m(t)[0], module, x)
    for _ in range(2):

        def checkpointed(m, t):
            out, bias = te.checkpoint(m, t, use_reentrant=use_reentrant)
            assert bias is m.fc2_bias and bias.is_leaf and not bias.requires_grad
            return out

        same_bits(step(checkpointed, module, x), kept)


def test_a_tensor_from_outside_that_requires_no_grad_is_refused(device):
    """torch makes it the checkpoint's own result, and the backward would call itself without end. A view or a copy that
    the function makes of it is its own."""
    buffer, x = torch.ones(HIDDEN, device=device), tokens(device)
    for seen in (lambda: buffer.clone(), lambda: buffer[1:]):
        out, _ = te.checkpoint(lambda t, seen=seen: (t.sin(), seen()), x)
        out.sum().backward()
    out, _ = te.checkpoint(lambda t: (t.sin(), buffer), x)
    with pytest.raises(ValueError, match=r"checkpoint: result 1 of the function is a \[\d+\] tensor from outside"):
        out.sum().backward()


@both_ways
def test_inputs_that_want_no_gradient_leave_the_parameters_theirs(device, use_reentrant):
    """The first block of a model: its input is data."""
    module, x = Dropping(device), tokens(device, requires_grad=False)
    kept = step(lambda m, t: m(t), module, x)
    same_bits(step(lambda m, t: te.checkpoint(m, t, use_reentrant=use_reentrant), module, x), kept)


@both_ways
def test_without_gradients_it_is_a_plain_call(device, use_reentrant):
    module, x = Dropping(device), tokens(device)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.manual_seed(2)
            wanted = module(x)
            torch.manual_seed(2)
            with saved_tensors() as kept:
                got = te.checkpoint(module, x, use_reentrant=use_reentrant)
        assert_same_bits(got, wanted)
        assert not got.requires_grad and not kept


@both_ways
def test_it_keeps_its_inputs_alone(device, use_reentrant):
    module, x = te.LayerNormMLP(HIDDEN, FFN, device=device), tokens(device)
    with saved_tensors() as kept:
        te.checkpoint(module, x, use_reentrant=use_reentrant)
    assert [t.data_ptr() for t in kept if t.numel()] == [x.data_ptr()]


@both_ways
def test_the_module_is_called_twice_and_frozen_weights_stay_so(device, use_reentrant):
    module, x = te.LayerNormMLP(HIDDEN, FFN, device=device), tokens(device)
    module.fc1_weight.requires_grad_(False)
    calls = []

    def counted(t):
        calls.append(torch.is_grad_enabled())
        return module(t)

    te.checkpoint(counted, x, use_reentrant=use_reentrant).sum().backward()
    assert calls == [not use_reentrant, True]
    assert module.fc1_weight.grad is None and module.fc2_weight.grad is not None


@both_ways
def test_threads(device, use_reentrant):
    """Several threads through one module: each gradient of an input has the bits of the serial run."""
    module = randomize(te.LayerNormMLP(HIDDEN, FFN, device=device))
    inputs = [tokens(device) for _ in range(4)]

    def gradient(i):
        x = inputs[i].detach().clone().requires_grad_()
        out = te.checkpoint(module, x, use_reentrant=use_reentrant)
        return torch.autograd.backward(out, out.detach().cos()) or x.grad

    wanted = [gradient(i) for i in range(4)]
    for got, want in zip(in_threads(4, gradient), wanted, strict=True):
        assert_same_bits(got, want)
