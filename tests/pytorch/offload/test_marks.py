# Marked tensors stay on the device: marked by mark_not_offload() or by the attribute alone, on the tensor, on the base
# of a view, on a view that is saved beside it, on a quantized tensor or a part of it, at any time until it has left.
import io

import pytest
import torch
from support import assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.pytorch import cpu_offload
from transformer_engine.pytorch.cpu_offload import OffloadableLayerState

from .cases import small  # noqa: F401
from .quantized_cases import FORMATS, parts, quantizers

pytestmark = pytest.mark.usefixtures("small")

MARK = "_TE_do_not_offload"


def by_attribute(t):
    setattr(t, MARK, True)


HOW = {"call": te.mark_not_offload, "attribute": by_attribute}
every_way = pytest.mark.parametrize("how", HOW)


def leaving(*tensors):
    """Offloaded bytes of a layer that saves these tensors."""
    state = OffloadableLayerState()
    saved = [state.push_tensor(t) for t in tensors]
    state.start_offload()
    assert len(saved) == len(tensors)
    return state.bytes


class Keeps(torch.autograd.Function):
    """x times the tensors that it saves; `saved` selects them."""

    @staticmethod
    def forward(ctx, x, *kept):
        ctx.save_for_backward(*kept)
        return x * sum(t.sum() for t in kept)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * sum(t.sum() for t in ctx.saved_tensors), *(None for _ in ctx.saved_tensors)


def itself(t):
    return t, [t]


def a_view_of_it(t):
    return t, [t.view(-1)[3:]]


def a_view_of_a_view(t):
    return t, [t.T[2:].unsqueeze(0)]


def a_view_without_a_graph(t):
    with torch.no_grad():
        return t, [t[1:]]


def a_view_beside_it(t):
    view = t.view(-1)
    return view, [t, view]


def a_view_before_it(t):
    view = t[:4]
    return view, [view, t]


SEEN = [itself, a_view_of_it, a_view_of_a_view, a_view_without_a_graph, a_view_beside_it, a_view_before_it]


def run(layer, x, manual):
    """(the gradient of x through the layer, its offloaded MiB)"""
    given = x.detach().clone().requires_grad_()
    if manual:
        context, sync, synchronizer = te.get_cpu_offload_context(True, None, 2, manual_synchronization=True)
    else:
        (context, sync), synchronizer = te.get_cpu_offload_context(True, 1, 2), None
    with context:
        y = layer(given)
    y = sync(y)
    if manual:
        synchronizer.start_offload_layer(0)
        synchronizer.release_activation_forward_gpu_memory(0)
    with context:
        y = y * 2.0
    y = sync(y)
    y.sum().backward()
    return given.grad, context.offload_synchronizer.get_offloaded_total_size_mb()


@every_way
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("seen", SEEN, ids=lambda seen: seen.__name__)
def test_a_plain_tensor(seen, manual, how, device):
    x = randn(3, device=device)
    expected = []
    for marked in (False, True):
        t = randn(16, 16, device=device)
        torch.manual_seed(2)
        t.copy_(torch.randn(16, 16))
        carrier, kept = seen(t)
        if marked:
            HOW[how](carrier)
        gradient, left = run(lambda x, kept=kept: Keeps.apply(x, *kept), x, manual)
        assert (left == 0) == marked
        expected.append(gradient)
    assert_same_bits(*expected)


MODULES = {
    "Linear": lambda device: te.Linear(16, 16, device=device),
    "LayerNormMLP": lambda device: te.LayerNormMLP(16, 32, device=device),
    "torch": lambda device: torch.nn.Linear(16, 16, device=device),
}


@every_way
@pytest.mark.parametrize("recomputed", [None, True, False])
@pytest.mark.parametrize("name", MODULES)
def test_a_layers_input(name, recomputed, how, device):
    """Of the saved tensors of the layer exactly the input stays, also with recomputation."""
    module, x = MODULES[name](device), randn(2, 8, 16, device=device)

    def layer(x, marked):
        x = x * 1.0
        if marked:
            HOW[how](x)
        return module(x) if recomputed is None else te.checkpoint(module, x, use_reentrant=recomputed)

    (expected, all_of_it), (gradient, left) = (run(lambda x, m=m: layer(x, m), x, False) for m in (False, True))
    assert_same_bits(gradient, expected)
    assert all_of_it - left == x.nbytes / 2**20


@every_way
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("part", [None, "first", "last"])
def test_a_quantized_tensor(part, name, how, device):
    """Every part stays, whichever was marked, and whether the tensor is saved whole or in parts."""
    for marked in (False, True):
        tensor = quantizers(device)[name](randn(64, 48, device=device))
        carrier = tensor if part is None else parts(tensor)[0 if part == "first" else -1]
        if marked:
            HOW[how](carrier)
        state = OffloadableLayerState()
        saved = [state.push_tensor(tensor)]
        state.start_offload()
        assert (state.bytes == 0) == marked
        state.release_activation_forward_gpu_memory()
        if not marked:
            state.start_reload()
        assert_same_bits(state.pop_tensor(saved[0]).dequantize(), tensor.dequantize())


@every_way
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_tensor_that_is_taken_apart(name, how, device):
    """As modules save it: the hooks see plain tensors."""
    tensor = quantizers(device)[name](randn(64, 48, device=device))
    assert not hasattr(tensor, MARK)
    HOW[how](tensor)
    plain, _ = te.prepare_for_saving(tensor)
    assert getattr(tensor, MARK) is True and all(getattr(t, MARK) is True for t in plain if t is not None)
    assert leaving(*(t for t in plain if t is not None)) == 0


@every_way
@pytest.mark.parametrize("name", FORMATS)
def test_a_view_of_a_quantized_tensor(name, how, device):
    for marked in (False, True):
        tensor = quantizers(device)[name](randn(64, 48, device=device))
        if marked:
            HOW[how](tensor)
        for view in (tensor.view(2, 32, 48), tensor.view(-1, 48), tensor.detach()):
            shared = {t.untyped_storage().data_ptr() for t in parts(view)}
            shared &= {t.untyped_storage().data_ptr() for t in parts(tensor)}
            assert len(shared) == len(parts(view))
            assert (leaving(view) == 0) == marked


def test_a_part_that_comes_later(device):
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device)
    quantizer.set_usage(rowwise=True, columnwise=False)
    tensor = quantizer(randn(64, 48, device=device))
    by_attribute(tensor)
    tensor.update_usage(columnwise_usage=True)
    made = tensor.get_data_tensors()[1]
    assert getattr(made, MARK) is True
    delattr(tensor, MARK)
    assert not any(hasattr(t, MARK) for t in (tensor, *parts(tensor)))
    with pytest.raises(AttributeError, match=MARK):
        getattr(tensor, MARK)


def keeps_its_result(x):
    return torch.tanh(x * 3)


@every_way
@pytest.mark.parametrize("when", ["before it starts", "while it leaves", "when it has left"])
def test_a_mark_on_what_sync_returns(when, how, device):
    """The layer saves it: it stays if it is marked before its offload, and is right in any case."""
    x = randn(16, 16, device=device, requires_grad=True)
    (expected,) = torch.autograd.grad(keeps_its_result(x).sum(), x)
    context, sync, manual = te.get_cpu_offload_context(True, None, 2, manual_synchronization=True)
    with context:
        y = keeps_its_result(x)
    y = sync(y)
    calls = [manual.start_offload_layer, manual.release_activation_forward_gpu_memory]
    for call, moment in zip([*calls, None], ["before it starts", "while it leaves", "when it has left"], strict=True):
        if moment == when:
            HOW[how](y)
        if call is not None:
            call(0)
    memory = manual.layer_states[0].taken
    held = [m for m in memory if m.tensor is not None and m.tensor.data_ptr() == y.data_ptr()]
    assert len(held) == (when != "when it has left")
    assert_same_bits(torch.autograd.grad(y.sum(), x)[0], expected)


def test_by_the_default_schedule_it_is_the_next_layers_input(device):
    """The result of a layer is marked after sync_fn: the next layer saves it, and it stays."""
    x = randn(16, 16, device=device, requires_grad=True)
    weights = [randn(16, 16, device=device, requires_grad=True) for _ in range(3)]

    def layers(context, sync, mark):
        y = x
        for weight in weights:
            with context:
                y = y.mm(weight)  # saves its input
            y = sync(y)
            if mark:
                by_attribute(y)
        return torch.autograd.grad(y.sum(), [x, *weights]), context.offload_synchronizer.get_offloaded_total_size_mb()

    (expected, left), (gradients, less) = (layers(*te.get_cpu_offload_context(True, 2, 3), m) for m in (False, True))
    for a, b in zip(gradients, expected, strict=True):
        assert_same_bits(a, b)
    assert left - less == x.nbytes / 2**20  # the input of layer 1; that of layer 0 is no result


def test_what_marks_say(device):
    t, other = randn(16, 16, device=device), randn(16, 16, device=device)
    view = t[2:]
    te.mark_not_offload(view, None, other)
    assert getattr(view, MARK) is True and getattr(other, MARK) is True
    cpu_offload.mark_activation_offload(t, other)  # which does not permit moving a marked tensor
    assert leaving(t, other) == 0
    setattr(other, MARK, False)  # the declaration about its memory holds
    fresh = randn(16, 16, device=device)
    setattr(fresh, MARK, False)  # an attribute that is False is no mark
    assert leaving(other, fresh) == fresh.nbytes


@pytest.mark.parametrize("name", ["plain", *FORMATS])
def test_a_marked_tensor_in_a_file(name, device):
    tensor = randn(16, 16, device=device)
    tensor = tensor if name == "plain" else quantizers(device)[name](tensor)
    te.mark_not_offload(tensor)
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    back = torch.load(file, weights_only=True)
    assert getattr(back, MARK) is True
    values = (back, tensor) if name == "plain" else (back.dequantize(), tensor.dequantize())
    assert_same_bits(*values)
