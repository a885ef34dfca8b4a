# The backward reads main_grad from the parameter: replaced, taken away or asked for between forward and backward, added
# to by threads, failing. The products that a module keeps hold no parameter, and are neither copied nor pickled.
# Mutant: WeightGradProduct handing main_grads on from forward turns test_the_backward_reads_main_grad red.
import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from support import assert_same_bits, in_threads, refused

import transformer_engine.pytorch as te

from .weight_grad_cases import (
    FAMILIES,
    backward,
    build,
    every_family,
    linear,
    microbatch,
    mlp,
    split_linear,
    weights,
    with_main_grads,
)


def gradients_of(module, seed):
    """main_grads of one microbatch into zeros."""
    other = with_main_grads(copy.deepcopy(module), value=0.0)
    backward(other, *microbatch(next(module.parameters()).device, torch.float32, seed))
    return {name: p.main_grad for name, p in weights(other).items()}


def forward_and_dy(module, device, seed):
    x, generator = microbatch(device, torch.float32, seed)
    y = module(x)
    return y, torch.randn(y.shape, generator=generator).to(y)


@every_family
def test_the_backward_reads_main_grad(device, family):
    """Two microbatches under way, each main_grad replaced after both forwards: the old ones get nothing."""
    module = with_main_grads(build(family, device, fuse_wgrad_accumulation=True), value=0.0)
    want = [gradients_of(module, seed) for seed in (1, 2)]
    passes = [forward_and_dy(module, device, seed) for seed in (1, 2)]
    old = {name: p.main_grad for name, p in weights(module).items()}
    for (y, dy), wanted in zip(passes, want, strict=True):
        for p in weights(module).values():
            p.main_grad = torch.zeros_like(p)
        y.backward(dy)
        for name, p in weights(module).items():
            assert_same_bits(p.main_grad, wanted[name], name)
    assert all(t.eq(0).all() for t in old.values())


@pytest.mark.parametrize("family", [linear, split_linear, mlp], ids=lambda f: f.__name__)
def test_a_main_grad_taken_away_is_named(device, family):
    module = with_main_grads(build(family, device, fuse_wgrad_accumulation=True), value=0.0)
    name, last = list(weights(module).items())[-1]
    y, dy = forward_and_dy(module, device, 1)
    kept = last.main_grad
    del last.main_grad
    with refused(ValueError, type(module).__name__, f"'{name}'", "main_grad None", "get_main_grad"):
        y.backward(dy, retain_graph=True)
    assert all(p.main_grad.eq(0).all() for p in weights(module).values() if p is not last)
    last.main_grad = kept
    y.backward(dy)
    assert kept.abs().sum() > 0


@every_family
def test_get_main_grad_is_called_once_for_each_backward(device, family):
    module = build(family, device, fuse_wgrad_accumulation=True)
    asked = []

    def getter(name, p):
        main_grad = torch.zeros_like(p)
        return lambda: asked.append(name) or main_grad

    for name, p in weights(module).items():
        p.get_main_grad = getter(name, p)
    for seed in (1, 2):
        y, dy = forward_and_dy(module, device, seed)
        assert not asked
        y.backward(dy)
        assert sorted(asked) == sorted(weights(module))
        asked.clear()


class Failed(Exception):
    pass


@pytest.mark.parametrize("family", [linear, split_linear], ids=lambda f: f.__name__)
def test_a_get_main_grad_that_fails_leaves_everything_as_it_was(device, family):
    module = with_main_grads(build(family, device, fuse_wgrad_accumulation=True), value=0.0)
    for p in weights(module).values():
        p.grad_added_to_main_grad = False
    last = list(weights(module).values())[-1]

    def fails():
        raise Failed("not now")

    last.get_main_grad = fails
    y, dy = forward_and_dy(module, device, 1)
    with pytest.raises(Failed, match="not now"):
        y.backward(dy, retain_graph=True)
    for p in weights(module).values():
        assert p.main_grad.eq(0).all() and not p.grad_added_to_main_grad
    assert all(p.grad is None for p in module.parameters())
    del last.get_main_grad
    y.backward(dy)
    for name, want in gradients_of(module, 1).items():
        assert_same_bits(module.get_parameter(name).main_grad, want, name)


def test_what_get_main_grad_sets_holds_for_its_backward(device):
    """Frameworks return a fresh buffer and request that it is overwritten at once."""
    module = build(linear, device, fuse_wgrad_accumulation=True)
    weight = module.weight

    def get_main_grad():
        weight.overwrite_main_grad = True
        weight.main_grad = torch.full_like(weight, float("nan"))
        return weight.main_grad

    weight.get_main_grad = get_main_grad
    backward(module, *microbatch(device, torch.float32, 1))
    assert weight.main_grad.isfinite().all()


@pytest.mark.parametrize("how", ["property", "class"])
def test_attributes_may_belong_to_the_class(device, how):
    class Owned(torch.nn.Parameter):
        added = None

        @property
        def main_grad(self):
            return type(self).kept

        if how == "class":
            grad_added_to_main_grad = False
        else:

            @property
            def grad_added_to_main_grad(self):
                return self.added

            @grad_added_to_main_grad.setter
            def grad_added_to_main_grad(self, value):
                type(self).added = value

    module = build(linear, device, fuse_wgrad_accumulation=True)
    module.weight = Owned(module.weight.detach())
    Owned.kept = torch.zeros_like(module.weight)
    backward(module, *microbatch(device, torch.float32, 1))
    assert Owned.kept.abs().sum() > 0 and module.weight.grad_added_to_main_grad is True
    assert module.weight.grad is not None


def test_threads_add_to_one_main_grad_while_others_ask_for_theirs(device):
    """A thread that waits for its turn at a main_grad lets the interpreter go on: getters that need it are in between.
    Sums of ones are exact in any order. A deadlock ends the test by its join."""
    shared = torch.zeros(256, 256, device=device)
    modules = []
    for i in range(4):
        module = te.Linear(256, 256, bias=False, fuse_wgrad_accumulation=True, device=device)
        if i % 2:
            module.weight.get_main_grad = lambda: shared
        else:
            module.weight.main_grad = shared
        module.weight.grad_added_to_main_grad = False
        modules.append(module)
    x = torch.ones(1, 256, device=device)

    def steps(i):
        for _ in range(16):
            modules[i](x).sum().backward()

    threads = [threading.Thread(target=steps, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "threads wait for each other"
    assert shared.eq(64).all()


def test_several_targets_are_taken_in_one_order(device):
    """Two modules whose parts share main_grads the other way round."""
    split = {"a": 8, "b": 8}
    buffers = [torch.zeros(8, 32, device=device) for _ in range(2)]
    modules = []
    for order in (buffers, buffers[::-1]):
        options = {"bias": False, "parameters_split": split, "device": device}
        module = te.Linear(32, 16, fuse_wgrad_accumulation=True, **options)
        module.a_weight.main_grad, module.b_weight.main_grad = order
        modules.append(module)
    x = torch.ones(1, 32, device=device)

    def steps(i):
        for _ in range(64):
            modules[i % 2](x).sum().backward()

    in_threads(4, steps)
    assert all(buffer.eq(256).all() for buffer in buffers)


# ---- what lives how long ----


@pytest.mark.parametrize("delay", [False, True], ids=["immediate", "delayed"])
@every_family
def test_a_replaced_parameter_dies(device, family, delay):
    """Also while its module lives on: what was made of it at earlier calls does not hold it, and nothing is a cycle."""
    module = build(family, device, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    with_main_grads(module, value=0.0)
    backward(module, *microbatch(device, torch.float32, 1))
    if delay:
        module.backward_dw()
    gone = []
    gc.disable()
    try:
        for name, p in list(weights(module).items()):
            gone += [weakref.ref(p), weakref.ref(p.main_grad)]
            setattr(module, name, torch.nn.Parameter(p.detach().clone()))
        del p
        assert not any(ref() is not None for ref in gone)
    finally:
        gc.enable()
    with_main_grads(module, value=0.0)  # the new ones get theirs
    backward(module, *microbatch(device, torch.float32, 2))
    if delay:
        module.backward_dw()
    assert all(p.main_grad.abs().sum() > 0 for p in weights(module).values())


@pytest.mark.parametrize("delay", [False, True], ids=["immediate", "delayed"])
def test_a_call_that_gets_no_backward_leaves_nothing(device, delay):
    module = build(linear, device, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    with_main_grads(module, value=0.0)
    y, _ = forward_and_dy(module, device, 1)
    parameter, main_grad = weakref.ref(module.weight), weakref.ref(module.weight.main_grad)
    gc.disable()
    try:
        del module
        assert parameter() is not None, "the node needs it"
        del y
        assert parameter() is None and main_grad() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_copies_of_a_module_that_has_run(device, family, how):
    module = with_main_grads(build(family, device, fuse_wgrad_accumulation=True), value=0.0)
    backward(module, *microbatch(device, torch.float32, 1))
    other = copy.deepcopy(module) if how == "deepcopy" else pickle.loads(pickle.dumps(module))
    for m in (module, other):
        with_main_grads(m, value=0.0)
    backward(other, *microbatch(device, torch.float32, 2))
    assert all(p.main_grad.eq(0).all() for p in weights(module).values())
    backward(module, *microbatch(device, torch.float32, 2))
    for name, p in weights(module).items():
        assert_same_bits(other.get_parameter(name).main_grad, p.main_grad, name)


def test_errors_name_the_class_that_a_module_has_now(device):
    module = with_main_grads(build(linear, device, fuse_wgrad_accumulation=True), value=0.0)
    backward(module, *microbatch(device, torch.float32, 1))
    module.__class__ = type("Renamed", (te.Linear,), {})
    del module.weight.main_grad
    with refused(ValueError, "Renamed: ", "'weight'", "main_grad None"):
        module(microbatch(device, torch.float32, 1)[0])


@pytest.mark.parametrize("value", [True, 1, 1.0], ids=repr)
def test_what_equals_true_is_the_first_microbatch(device, value):
    module = with_main_grads(build(linear, device, fuse_wgrad_accumulation=True))
    module.weight.main_grad.fill_(float("nan"))
    backward(module, *microbatch(device, torch.float32, 1), is_first_microbatch=value)
    assert module.weight.main_grad.isfinite().all()


def test_what_waits_holds_no_graph(device):
    """The operand that waits may be an output of the node, whose gradient accumulator leads to the store that holds it:
    a module that is given up with a gradient left would live on. Mutant: weight_gradient without detach()."""
    module = te.LayerNormLinear(8, 8, return_layernorm_output=True, delay_wgrad_compute=True, device=device)
    y, norm_output = module(torch.randn(4, 8, device=device, requires_grad=True))
    (y.sum() + norm_output.sum()).backward()
    parameter = weakref.ref(module.weight)
    del module, y, norm_output
    gc.collect()
    assert parameter() is None
