# Gradients and results that a graph would lose without an error: tensors that a function closes over, a capture without
# gradients, parameters frozen or not since the capture, tensors inside of unknown classes.
import copy
import dataclasses
import enum

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te

from .cases import HIDDEN, assert_same_step, build, capture, left_by, linear, mlp, step, tokens, twins

OP = "make_graphed_callables"

# ---- tensors in closures ----


def closures(device):
    """name -> (a callable, the shapes of tensors whose gradients a replay cannot compute)."""
    module, plain = build(linear, device), torch.nn.Linear(HIDDEN, HIDDEN, device=device)
    scale = torch.ones(HIDDEN, device=device, requires_grad=True)
    derived = scale * 2
    weights = f"[{HIDDEN}, {HIDDEN}]"
    return {
        "a lambda over a module": (lambda x: module(x), weights),
        "over torch's own": (lambda x: plain(x), weights),
        "a bound method": (module.forward, weights),
        "a tensor": (lambda x: x * scale, f"[{HIDDEN}]"),
        "a result of a tensor": (lambda x: x * derived, f"[{HIDDEN}]"),
        "a tensor that is returned": (lambda x: (x * 2, scale), f"[{HIDDEN}]"),
        "under a checkpoint": (lambda x: te.checkpoint(module, x, use_reentrant=False), weights),
    }


CLOSURES = list(closures("cpu"))


@pytest.mark.parametrize("warmups", [0, 1])
@pytest.mark.parametrize("grad", [False, True], ids=["input", "input with gradient"])
@pytest.mark.parametrize("name", CLOSURES)
def test_what_a_function_closes_over_gets_no_gradient(device, name, grad, warmups):
    function, shape = closures(device)[name]
    with refused(ValueError, OP, "callable 0", "Pass the module itself", "as an argument", shape):
        te.make_graphed_callables(function, (tokens(device, grad=grad),), num_warmup_iters=warmups)


def test_a_tensor_that_a_module_does_not_own(device):
    other = torch.ones(HIDDEN, device=device, requires_grad=True)

    class Borrowing(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * other

    with refused(ValueError, OP, "callable 0 (Borrowing)", f"[[{HIDDEN}]]"):
        capture(Borrowing(HIDDEN, HIDDEN, device=device), device)


def test_what_is_closed_over_without_a_gradient(device):
    module = build(linear, device).requires_grad_(False)
    graphed = te.make_graphed_callables(lambda x: module(x), (tokens(device, grad=True),))
    x = tokens(device, grad=True)
    graphed(x).sum().backward()
    twin = x.detach().clone().requires_grad_()
    module(twin).sum().backward()
    assert_same_bits(x.grad, twin.grad)


# ---- captured without gradients ----


def test_captured_without_gradients_and_called_with(device):
    module, eager = twins(mlp, device)
    with torch.no_grad():
        capture(module, device)
    with refused(RuntimeError, "LayerNormMLP", "torch.no_grad()", "argument 0", "capture it with gradients"):
        module(tokens(device, grad=True))
    x = tokens(device)
    with torch.no_grad():
        assert_same_bits(module(x), eager(x))
    frozen, twin = twins(mlp, device)
    with torch.no_grad():
        te.make_graphed_callables(frozen, (tokens(device),))
    with refused(RuntimeError, "LayerNormMLP", "torch.no_grad()", f"[{HIDDEN}]"):
        frozen(x)
    frozen.requires_grad_(False)
    assert_same_bits(frozen(x), twin(x))
    assert not frozen(x).requires_grad


# ---- frozen and unfrozen ----


@pytest.mark.parametrize("all_of_them", [False, True], ids=["one", "all"])
def test_a_parameter_that_is_unfrozen_later(device, all_of_them):
    module, eager = twins(linear, device)
    for m in (module, eager):
        m.bias.requires_grad_(False)
        m.weight.requires_grad_(not all_of_them)
    te.make_graphed_callables(module, (tokens(device),))
    x = tokens(device)
    module.bias.requires_grad_()
    with refused(RuntimeError, "Linear", f"[[{HIDDEN}]]", "freeze", "capture again"):
        module(x)
    with torch.no_grad():
        assert_same_bits(module(x), eager(x))
    module.bias.requires_grad_(False)
    assert_same_bits(module(x), eager(x))


@pytest.mark.parametrize("delay", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
def test_a_parameter_that_is_frozen_later(device, fuse, delay):
    module, eager = twins(linear, device, fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay)
    whole = copy.deepcopy(eager)  # stays unfrozen, as in the graph: a bias alone is summed in another order on a GPU
    for m in (module, eager, whole):
        m.weight.main_grad = torch.ones_like(m.weight)
        m.weight.grad_added_to_main_grad = False
    capture(module, device)
    for m in (module, eager):
        m.weight.requires_grad_(False)
    for seed in range(2):
        x = tokens(device)
        got, want, _ = step(module, x, seed), step(eager, x, seed), step(whole, x, seed)
        if delay:
            module.backward_dw(), whole.backward_dw()  # eager: the bias has its gradient already
        assert_same_bits(got["x.grad"], want["x.grad"])
        assert_same_bits(module.bias.grad, whole.bias.grad)
        for m in (module, eager):
            assert m.weight.main_grad.eq(1).all() and m.weight.grad is None
            assert m.weight.grad_added_to_main_grad is False
    for m in (module, eager):
        m.weight.requires_grad_()
        m.zero_grad()
    x = tokens(device)
    step(module, x, 3), step(eager, x, 3)
    if delay:
        module.backward_dw(), eager.backward_dw()
    assert_same_bits(module.weight.main_grad, eager.weight.main_grad)
    if not fuse:
        assert_same_step(left_by(module), left_by(eager))


# ---- results ----


@dataclasses.dataclass
class Held:
    y: torch.Tensor
    n: int = 3


class Listed(list):
    pass


@pytest.mark.parametrize("wrap", [Held, lambda y: {"a": [Held(y)]}, lambda y: Listed([y]), lambda y: {y}])
@pytest.mark.parametrize("warmups", [0, 1])
def test_tensors_inside_of_a_class(device, wrap, warmups):
    def function(x):
        return x * 2, wrap(x * 3)

    with refused(ValueError, OP, "callable 0 (function)", "tuples, lists or dicts", "torch.utils._pytree"):
        te.make_graphed_callables(function, (tokens(device, grad=True),), num_warmup_iters=warmups)


@dataclasses.dataclass
class Known:
    y: torch.Tensor


torch.utils._pytree.register_pytree_node(Known, lambda k: ([k.y], None), lambda leaves, _: Known(*leaves))
Color = enum.Enum("Color", "red")


def test_classes_that_are_known_and_constants(device):
    def function(x):
        return Known(x * 2), 3, "a", None, 1.5, True, x.dtype, x.device, x.shape, Color.red, 2j

    graphed = te.make_graphed_callables(function, (tokens(device, grad=True),))
    for _ in range(2):
        x = tokens(device, grad=True)
        known, *rest = graphed(x)
        assert_same_bits(known.y, x * 2)
        known.y.sum().backward()
        assert x.grad.eq(2).all()
        assert rest == list(function(x)[1:])
