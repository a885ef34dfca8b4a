# A backward that is asked for some gradients alone, torch.autograd.grad() and backward(inputs=): main_grad, what waits
# for backward_dw() and the marks of weights are those of eager, captured or not.
import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph.backend.cpu import RecordedStream

from .cases import (
    Recording,
    assert_same_step,
    capture,
    left_by,
    linear,
    mlp,
    norm_linear,
    split_linear,
    tokens,
    twins,
)

FAMILIES = [linear, split_linear, norm_linear, mlp]


def fused_twins(family, device, *, protocol=False, **options):
    modules = twins(family, device, fuse_wgrad_accumulation=True, **options)
    for m in modules:
        for p in m.parameters():
            p.main_grad = torch.full_like(p, 0.5)
            if protocol:
                p.grad_added_to_main_grad = False
    return modules


def asked(module, x, names, way, **kwargs):
    """The results of a backward for `names`: returned gradients, .grad, main_grad and marks of weights."""
    x = x.detach().clone().requires_grad_()
    leaves = {"x": x} | dict(module.named_parameters())
    y = module(x, **kwargs)
    y = y[0] if isinstance(y, tuple) else y
    grad = torch.cos(y.detach().float() * 7).to(y)
    wanted = [leaves[name] for name in names]
    found = {}
    if way == "grad":
        given = torch.autograd.grad(y, wanted, grad, allow_unused=True)
        found = dict(zip(names, given))
    else:
        y.backward(grad, inputs=wanted)
    return found | {"x.grad": x.grad}


def no_dummies(found, module):
    """Dummy gradients have undefined values: only their presence is compared."""
    shapes = {key for key, p in module.named_parameters() if p.dim() == 2}
    for key in list(found):
        if key.removesuffix(".grad") in shapes and found[key] is not None:
            found[key] = torch.ones(1)
    return found


def assert_same_wanted(got, want, device, what):
    """Bit for bit, except biases on a GPU: eager sums a bias alone in another order than with its weight's GEMM."""
    for key in [key for key in want if device == "cuda" and key.removesuffix(".grad").endswith("bias")]:
        a, b = got.pop(key), want.pop(key)
        assert (a is None) == (b is None), f"{what} {key}: {a}, wanted {b}"
        if b is not None:
            torch.testing.assert_close(a, b)
    assert_same_step(got, want, what)


def marks(module):
    return {key: getattr(p, "grad_added_to_main_grad", None) for key, p in module.named_parameters()}


def subsets(module):
    names = [key for key, _ in module.named_parameters()]
    weights = [key for key, p in module.named_parameters() if p.dim() == 2]
    others = [name for name in names if name not in weights]
    if "a_bias" in names:  # eager sums both biases at once, in another order than with the weights
        others.append("a_weight")
    return [["x"], weights[-1:], ["x", *weights[-1:]], others, weights[:1], ["x", *names]]


@pytest.mark.parametrize("way", ["grad", "backward"])
@pytest.mark.parametrize("protocol", [False, True], ids=["main_grad", "with dummies"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_main_grad(device, family, protocol, way):
    module, eager = fused_twins(family, device, protocol=protocol)
    capture(module, device)
    touched = set()
    for names in subsets(eager):
        for first in (None, True):
            before, x, left = left_by(eager), tokens(device), []
            for m in (module, eager):
                found = asked(m, x, names, way, is_first_microbatch=first)
                left.append(no_dummies(found | left_by(m), m))
            assert_same_wanted(*left, device, f"{names}, {first}")
            assert marks(module) == marks(eager), names
            for key, p in eager.named_parameters():
                if p.dim() == 2 and not torch.equal(p.main_grad, before[f"{key}.main_grad"]):
                    assert key in names, f"{names}: main_grad of {key}"
                    touched.add(key)
            for m in (module, eager):
                for p in m.parameters():
                    p.grad = None
                    if protocol:
                        p.grad_added_to_main_grad = False
    assert touched == {key for key, p in eager.named_parameters() if p.dim() == 2}


@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_delayed_weight_gradients(device, family, fuse):
    """Gradients that a backward does not compute are not delayed: backward_dw() has nothing to do, and raises."""
    build_twins = fused_twins if fuse else twins
    module, eager = build_twins(family, device, delay_wgrad_compute=True)
    capture(module, device)
    everything = ["x", *dict(eager.named_parameters())]
    for names in (["x"], everything, ["x"]):
        x, left = tokens(device), []
        for m in (module, eager):
            left.append(asked(m, x, names, "backward"))
            if names == ["x"]:
                with refused(RuntimeError, "backward_dw()"):
                    m.backward_dw()
            else:
                m.backward_dw()
            left[-1] |= left_by(m)
        assert_same_step(*left, f"{names}")
    module(tokens(device, grad=True))  # nothing is pending


@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
def test_delayed_weight_gradients_of_some_parameters(device, fuse):
    """Of a weight in several parameters, only those passed as inputs."""
    build_twins = fused_twins if fuse else twins
    module, eager = build_twins(split_linear, device, delay_wgrad_compute=True)
    capture(module, device)
    for names in (["a_weight"], ["x", "b_weight", "b_bias"], ["b_weight", "a_bias"], ["a_weight", "b_weight"]):
        x, left = tokens(device), []
        for m in (module, eager):
            before = left_by(m)
            left.append(asked(m, x, names, "backward"))
            m.backward_dw()
            left[-1] |= left_by(m)
            for key, p in m.named_parameters():
                kind = "main_grad" if fuse and p.dim() == 2 else "grad"
                old, new = before[f"{key}.{kind}"], getattr(p, kind)
                changed = (old is None) != (new is None) or (old is not None and not torch.equal(old, new))
                assert changed is (key in names), f"{names}: {key}"
        assert_same_wanted(*left, device, f"{names}")


def test_a_delayed_bias_without_its_weight_is_refused(device):
    module, _ = twins(mlp, device, delay_wgrad_compute=True)
    capture(module, device)
    before = left_by(module)
    with refused(RuntimeError, "LayerNormMLP", "fc2_bias", "fc2_weight", "backward_dw()"):
        asked(module, tokens(device), ["fc1_weight", "fc2_bias"], "backward")
    assert_same_step(left_by(module), before)
    asked(module, tokens(device), ["fc1_weight", "fc1_bias", "layer_norm_weight"], "backward")
    module.backward_dw()
    given = {key for key, p in module.named_parameters() if p.grad is not None}
    assert given == {"fc1_weight", "fc1_bias", "layer_norm_weight"}


def test_another_main_grad_leaves_all_of_them(device):
    """Even if the gradient of the call should have replaced the first one."""
    module, _ = fused_twins(mlp, device)
    capture(module, device)
    kept, module.fc2_weight.main_grad = module.fc2_weight.main_grad, torch.zeros_like(module.fc2_weight)
    y = module(tokens(device, grad=True), is_first_microbatch=True)
    with refused(RuntimeError, "LayerNormMLP", "main_grad", "capture again"):
        y.sum().backward()
    assert module.fc1_weight.main_grad.eq(0.5).all() and kept.eq(0.5).all()


def test_a_gradient_of_the_input_in_a_pipeline(device):
    """Like an adversarial step, or a penalty, between forward and backward of a step."""
    module, eager = fused_twins(mlp, device)
    sample = tuple((tokens(device, grad=True),) for _ in range(2))
    graphed = te.make_graphed_callables((module,), sample, _order=[1, 1, -1, -1])
    for _ in range(2):
        inputs, left = [tokens(device) for _ in range(2)], []
        for calls, m in ((graphed, module), ((eager, eager), eager)):
            first = inputs[0].clone().requires_grad_()
            (dx,) = torch.autograd.grad(calls[0](first).square().sum(), first)
            moved = [(inputs[0] + dx.sign()).requires_grad_(), inputs[1].clone().requires_grad_()]
            results = [call(x) for call, x in zip(calls, moved)]
            for y in results:
                y.square().sum().backward()
            left.append({"dx": dx, "0": moved[0].grad, "1": moved[1].grad} | left_by(m))
        assert_same_step(*left)


def test_on_a_stream_of_its_own_what_was_added_is_taken_back_behind_the_whole_graph():
    module = Recording(fused_twins(linear, "cpu")[0], "cpu")
    capture(module, "cpu")
    stream, main = RecordedStream("graph"), module.forward.record.backend.current_stream()
    x, before = tokens("cpu", grad=True), module.inner.weight.main_grad.clone()
    y = module(x, cuda_graph_stream=stream, cuda_graph_event=module.event)
    main.log.clear()
    torch.autograd.grad(y.sum(), x)
    assert list(main.log) == [("main", "waits for", "graph")]
    assert_same_bits(module.inner.weight.main_grad, before)
