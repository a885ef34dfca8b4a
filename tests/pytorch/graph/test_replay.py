# A captured callable at a call: what it refuses, and what it takes in another form than it was captured with.
import copy
import gc
import weakref

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te

from .cases import (
    HIDDEN,
    assert_same_step,
    build,
    capture,
    layer,
    left_by,
    linear,
    mlp,
    plain,
    step,
    tokens,
    twins,
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[:-1], ["argument 0", "[5, 2, 32]", "[6, 2, 32]"]),
        (lambda x: x.to(torch.bfloat16), ["argument 0", "bfloat16", "float32"]),
        (lambda x: x.detach(), ["argument 0", "requires_grad"]),
        (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), ["argument 0", "strides [32, 192, 1]"]),
        (lambda x: x.to("meta"), ["argument 0", "meta"]),
        (lambda x: 3, ["argument 0", "3"]),
        (lambda x: None, ["argument 0", "None"]),
    ],
    ids=["shape", "dtype", "gradient", "strides", "device", "number", "none"],
)
def test_an_argument_of_another_form(device, change, words):
    module = build(mlp, device)
    capture(module, device)
    module(tokens(device, grad=True))
    static = module.forward.record.forward_graph.inputs[0]
    before = static.detach().clone()
    with refused(ValueError, "graphed callable 0 (LayerNormMLP)", *words):
        module(change(tokens(device, grad=True)))
    assert_same_bits(static, before)


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"a": x}, lambda x: (x,)], ids=["list", "dict", "tuple"])
def test_one_argument_that_holds_one_tensor(device, wrap):
    def double(tree):
        (x,) = tree.values() if isinstance(tree, dict) else tree
        return x * 2

    graphed = te.make_graphed_callables(double, (wrap(tokens(device, grad=True)),))
    x = tokens(device, grad=True)
    y = graphed(wrap(x))
    assert_same_bits(y, x * 2)
    y.sum().backward()
    assert x.grad.eq(2).all()
    with refused(TypeError, "double", "captured with the arguments"):
        graphed(x)


def test_a_result_does_not_keep_the_inputs(device):
    module = torch.nn.Linear(HIDDEN, HIDDEN, device=device)
    capture(module, device)
    source = tokens(device, grad=True)
    x = source * 1
    kept = weakref.ref(x)
    y = module(x)
    del x
    gc.collect()
    assert kept() is None
    y.sum().backward()
    assert source.grad is not None


def test_strides_of_single_elements_do_not_matter(device):
    graphed = te.make_graphed_callables(lambda x: x * 2, (torch.ones(4, 1, 8, device=device),))
    x = torch.randn(4, 8, device=device).as_strided((4, 1, 8), (8, 77, 1))
    assert_same_bits(graphed(x), x * 2)


def scaled(x, *, scale=1.0, y=None, z=None):
    return x * scale if y is None else x * scale + y


def test_other_arguments(device):
    sample = {"scale": 2.0, "y": tokens(device)}
    graphed = te.make_graphed_callables(scaled, (tokens(device),), sample_kwargs=sample)
    x, y = tokens(device), tokens(device)
    assert_same_bits(graphed(x, scale=2.0, y=y), scaled(x, scale=2.0, y=y))
    assert_same_bits(graphed(x, y=y, scale=2.0), scaled(x, scale=2.0, y=y))
    for kwargs, words in (
        ({"scale": 2.0}, ["missing", "'y'"]),
        ({"scale": 2.0, "y": y, "z": 1}, ["not captured", "'z'"]),
        ({"scale": 2.0, "z": None}, ["missing", "'y'", "[] were not captured"]),
    ):
        with refused(TypeError, "scaled", *words):
            graphed(x, **kwargs)
    with refused(TypeError, "captured with the arguments"):
        graphed(x, x, scale=2.0, y=y)
    for scale in (3.0, 2, "2.0"):
        with refused(ValueError, "'scale'", repr(scale), "2.0"):
            graphed(x, scale=scale, y=y)
    for given, words in ((y[:1], "[1, 2, 32]"), (None, "is None")):
        with refused(ValueError, "'y'", words):
            graphed(x, scale=2.0, y=given)


def test_keywords_that_were_not_captured_may_be_none(device):
    """Like the calls of frameworks: with all keywords of the layer, most of them None."""
    graphed = te.make_graphed_callables(scaled, (tokens(device),), sample_kwargs={"y": tokens(device)})
    x, y = tokens(device), tokens(device)
    assert_same_bits(graphed(x, z=None, y=y, anything=None), scaled(x, y=y))
    plain = te.make_graphed_callables(scaled, (tokens(device),))
    assert_same_bits(plain(x, y=None, z=None), scaled(x))
    with refused(TypeError, "scaled", "['y'] were not captured", "None"):
        plain(x, y=y, z=None)
    module, eager = twins(layer, device)
    capture(module, device)
    none = {"attention_mask": None, "encoder_output": None, "inference_params": None, "rotary_pos_emb": None}
    assert_same_step(step(module, x, 1, **none), step(eager, x, 1, **none))


def test_gradients_are_not_asked_for_where_none_are_recorded(device):
    module, eager = twins(linear, device)
    capture(module, device)
    x = tokens(device)
    with torch.no_grad():
        assert_same_bits(module(x), eager(x))


def test_backward_of_an_older_call_or_twice(device):
    module = build(mlp, device)
    capture(module, device)
    first = module(tokens(device, grad=True))
    second = module(tokens(device, grad=True))
    with refused(RuntimeError, "LayerNormMLP", "another call", "'_order'"):
        first.sum().backward()
    second.sum().backward(retain_graph=True)
    with refused(RuntimeError, "LayerNormMLP", "ran already", "retain_graph_in_backward"):
        second.sum().backward()


def test_backward_twice_where_it_was_captured_for_it(device):
    module, eager = twins(mlp, device)
    capture(module, device, retain_graph_in_backward=True)
    x = tokens(device)
    for m in (module, eager):
        y = m(x.requires_grad_())
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
    for (name, p), q in zip(module.named_parameters(), eager.parameters()):
        assert_same_bits(p.grad, q.grad, name)


def test_double_backward(device):
    module = build(linear, device)
    capture(module, device)
    x = tokens(device, grad=True)
    with refused(NotImplementedError, "Linear", "double backward", "create_graph=True"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)


def test_functional_transforms(device):
    graphed = te.make_graphed_callables(lambda x: x * 2, (tokens(device, grad=True),))
    with refused(NotImplementedError, "torch.func", "reset()"):
        torch.func.grad(lambda x: graphed(x).sum())(tokens(device, grad=True))


def test_another_mode(device):
    """Evaluation between training steps, and training of a module captured in eval mode: eager, with a warning."""
    for captured in (True, False):
        module, eager = twins(plain, device)
        module.train(captured)
        capture(module, device)
        x = tokens(device)
        for count, train in enumerate((not captured, captured, not captured)):
            module.train(train), eager.train(train)
            if train is captured:
                got = step(module, x, 1)
            else:
                with pytest.warns(UserWarning, match=f"Sequential.*without the graph, {count // 2 + 1} times"):
                    got = step(module, x, 1)
            assert_same_step(got, step(eager, x, 1))


def test_a_pass_of_an_order_in_another_mode(device):
    module, eager = twins(linear, device)
    graphed = te.make_graphed_callables(
        (module,),
        ((tokens(device, grad=True),), (tokens(device, grad=True),)),
        _order=[1, 1, -1, -1],
        _reuse_graph_input_output_buffers=True,
    )
    x = tokens(device)
    with torch.no_grad(), pytest.warns(UserWarning, match="without the graph"):
        module.eval()
        assert_same_bits(graphed[1](x[:1]), eager(x[:1]))  # of any shape, since it runs eager code
    module.train()
    for g in graphed:
        assert_same_step(step(module, x, 1, call=g), step(eager, x, 1))


def test_another_mode_leaves_weight_gradients_to_the_module(device):
    module, eager = twins(linear, device, delay_wgrad_compute=True)
    capture(module, device)
    x = tokens(device)
    for train in (False, True, False):
        module.train(train), eager.train(train)
        if train:
            step(module, x, 1)
            with torch.no_grad(), pytest.warns(UserWarning, match="without the graph"):
                module.eval()(x)  # in between: those of the graph are still pending
        else:
            with pytest.warns(UserWarning, match="without the graph"):
                step(module, x, 1)
        step(eager, x, 1)
        assert module.need_backward_dw() == eager.need_backward_dw()
        for m in (module, eager):
            m.backward_dw()
        assert_same_step(left_by(module), left_by(eager))


def test_another_mode_gets_is_first_microbatch(device):
    module, eager = twins(linear, device, fuse_wgrad_accumulation=True)
    for m in (module, eager):
        m.weight.main_grad = torch.ones_like(m.weight)
    capture(module, device)
    module.eval(), eager.eval()
    x = tokens(device)
    for first in (True, False):
        with pytest.warns(UserWarning, match="without the graph"):
            got = step(module, x, 1, is_first_microbatch=first)
        assert_same_step(got, step(eager, x, 1, is_first_microbatch=first))


@pytest.mark.parametrize("way", ["sum", "view", "another replay"])
def test_gradients_of_what_an_argument_was_made_of_accumulate(device, way):
    """A leaf before operations that pass a gradient on unchanged gets no gradient that a later replay overwrites."""
    layers = [build(linear, device), build(linear, device)]
    eager = copy.deepcopy(layers)
    for module in layers:
        capture(module, device)
    base, left = tokens(device), []
    for stack in (layers, eager):
        offset = tokens(device).zero_().requires_grad_()
        for scale in (1, 10, 100):
            x = {"sum": base + offset, "view": offset.view(-1, HIDDEN).view(offset.shape), "another replay": offset}[
                way
            ]
            y = stack[1](stack[0](x)) if way == "another replay" else stack[0](x)
            y.backward(torch.full_like(y, scale))
        left.append(offset.grad)
    assert_same_bits(*left)


def test_replays_in_inference_mode(device):
    module, eager = twins(mlp, device)
    capture(module, device)
    x = tokens(device)
    with torch.inference_mode():
        assert_same_bits(module(x), eager(x))
    assert_same_step(step(module, x, 1), step(eager, x, 1))
