# Offload inside of captured layers: the copies are nodes of the graphs (on the CPU the recorder replays them), the bits
# are those of an eager run without, memory stays what it was, and what cannot be captured is refused by name.
import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.cpu_offload import schedule
from transformer_engine.pytorch.cpu_offload.layer import OffloadableLayerState

from ..graph.cases import Records
from .cases import forward, small, step  # noqa: F401
from .graph_cases import HIDDEN, LAYERS, K, build, same

pytestmark = pytest.mark.usefixtures("small")


class Offloaded(torch.nn.Module):
    """A layer with its context inside, as captures require."""

    def __init__(self, layer, context, sync):
        super().__init__()
        self.layer, self.context, self.sync = layer, context, sync

    def forward(self, x):
        with self.context:
            x = self.layer(x)
        return self.sync(x)


def captured(layers, x, context, sync, **options):
    """Each layer captured separately, after an eager step that allocates the pinned memory."""
    wrapped = [Offloaded(layer, context, sync) for layer in layers]
    step(layers, [x], context, sync)
    samples = tuple((torch.randn_like(x).requires_grad_(),) for _ in wrapped)
    te.make_graphed_callables(
        tuple(wrapped), samples, pre_warmup_hook=context.disable, post_warmup_hook=context.enable, **options
    )
    return wrapped


@pytest.mark.parametrize("k", [1, 2, 3])
def test_captured_layers_give_the_same_bits(k, device):
    layers, x = build(device), randn(16, HIDDEN, device=device)
    context, sync = te.get_cpu_offload_context(True, k, LAYERS)
    wrapped = captured(layers, x, context, sync)
    assert context.offload_synchronizer.get_offloaded_total_size_mb() > 0
    for seed in range(3):
        torch.manual_seed(seed)
        x = randn(16, HIDDEN, device=device)
        got = [t.clone() for t in step(wrapped, [x])]
        same(got, step(layers, [x]))


def test_what_a_capture_forks_is_joined(monkeypatch):
    """The offload of layer 0 overlaps layer 1, whose end joins its copy; the release is three layers later."""
    joined = []
    monkeypatch.setattr(schedule, "stream_captures", lambda: True)
    join = OffloadableLayerState.join
    monkeypatch.setattr(OffloadableLayerState, "join", lambda state: (joined.append(state), join(state)))
    layers, x = build("cpu"), randn(16, HIDDEN, requires_grad=True)
    context, sync = te.get_cpu_offload_context(True, 1, LAYERS)
    y = forward(layers[:1], x, context, sync)
    assert joined == []
    y = forward(layers[1:2], y, context, sync)
    first = list(context.offload_synchronizer.steps())[-1].layers[0]
    assert joined == [first] and first.state == "offload_started" and not first.empty


@pytest.mark.gpu
def test_a_capture_ends_behind_the_copies_that_it_forked():
    """Only two of four layers: no later layer releases layer 0, whose copy overlaps layer 1. A capture has to join
    every stream that it forked."""
    layers, x = build("cuda"), randn(16, HIDDEN, device="cuda")
    context, sync = te.get_cpu_offload_context(True, 1, LAYERS)
    step(layers, [x], context, sync)
    want = forward(layers[:2], x)
    graph, given = torch.cuda.CUDAGraph(), x.clone().requires_grad_()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = forward(layers[:2], given, context, sync)
    assert list(context.offload_synchronizer.steps())[-1].layers[0].state == "offload_started"
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(y, want)


@pytest.mark.parametrize("way", ["te.checkpoint", "reentrant"])
def test_a_checkpoint_around_captured_layers_that_leave_is_refused(way, device):
    """It replays out of the order of the captures, for which their memory is laid out; the next step works as
    before."""
    layers, x = build(device), randn(16, HIDDEN, device=device)
    context, sync = te.get_cpu_offload_context(True, K, LAYERS)
    wrapped = captured(layers, x, context, sync)

    def again(layer, x):
        if way == "te.checkpoint":
            return te.checkpoint(layer, x)
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)

    y = x.detach().requires_grad_()
    with refused(RuntimeError, "Offloaded", "inside of a checkpoint", "put the checkpoint"):
        for layer in wrapped:
            y = again(layer, y)
        y.sum().backward()
    for layer in layers:
        layer.zero_grad()
    torch.manual_seed(1)
    x = randn(16, HIDDEN, device=device)
    got = [t.clone() for t in step(wrapped, [x])]
    same(got, step(layers, [x]))


def test_a_stack_captured_as_one(device):
    """All layers in one callable, with copies beside GEMMs in one graph."""
    layers, x = build(device), randn(16, HIDDEN, device=device)
    context, sync = te.get_cpu_offload_context(True, K, LAYERS)
    whole = torch.nn.Sequential(*(Offloaded(layer, context, sync) for layer in layers))
    step(layers, [x], context, sync)
    te.make_graphed_callables(whole, (torch.randn_like(x).requires_grad_(),))
    for seed in range(3):
        torch.manual_seed(seed)
        x = randn(16, HIDDEN, device=device)
        got = [t.clone() for t in step([whole], [x])]
        same(got, step(layers, [x]))


@pytest.mark.parametrize("reuse", [False, True])
def test_an_order_of_several_microbatches(reuse, device):
    layers = build(device)
    context, sync = te.get_cpu_offload_context(True, K, LAYERS)
    wrapped = [Offloaded(layer, context, sync) for layer in layers]
    inputs = [randn(16, HIDDEN, device=device) for _ in range(2)]
    expected = step(layers, inputs)
    step(layers, inputs, context, sync)
    samples = tuple((torch.randn_like(inputs[0]).requires_grad_(),) for _ in range(2 * LAYERS))
    passes = te.make_graphed_callables(
        tuple(wrapped),
        samples,
        _order=[1, 1, -1, -1],
        _num_layers_per_chunk=LAYERS,
        _reuse_graph_input_output_buffers=reuse,
        pre_warmup_hook=context.disable,
        post_warmup_hook=context.enable,
    )
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    given, outputs = [x.clone().requires_grad_() for x in inputs], []
    for microbatch, x in enumerate(given):
        for run in passes[microbatch * LAYERS : (microbatch + 1) * LAYERS]:
            x = run(x)
        outputs.append(x)
    results = [y.detach().clone() for y in outputs]
    for y in outputs:
        y.backward(torch.ones_like(y))
    results += [x.grad for x in given] + [p.grad for layer in layers for p in layer.parameters()]
    same(results, expected)


@pytest.mark.parametrize("steps", [500])
def test_many_captured_steps(steps, device):
    """Memory does not grow, and a short training has the same losses to the last step."""
    torch.manual_seed(3)
    layers, x = build(device), randn(16, HIDDEN, device=device)
    start = [{name: t.clone() for name, t in layer.state_dict().items()} for layer in layers]
    context, sync = te.get_cpu_offload_context(True, K, LAYERS)
    steps = steps if device == "cuda" else steps // 20

    def train(stack, run):
        for layer, state in zip(layers, start, strict=True):
            layer.load_state_dict(state)
        optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=1e-2)
        losses, memory = [], set()
        for i in range(steps):
            optimizer.zero_grad(set_to_none=True)
            loss = run(stack, x.clone().requires_grad_()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if i >= 3:
                pinned = context.offload_synchronizer.pinned_usage()
                used = torch.cuda.memory_allocated() - 512 * i if device == "cuda" else 0  # a loss is kept for a step
                memory.add((pinned["reserved"], pinned["used"], used))
        return torch.stack(losses), memory

    expected, _ = train(layers, forward)
    wrapped = captured(layers, x, context, sync)
    losses, memory = train(wrapped, forward)
    assert_same_bits(losses, expected)
    assert len({row[:2] for row in memory}) == 1
    assert max(row[2] for row in memory) - min(row[2] for row in memory) <= 1 << 20


def test_recomputed_and_delayed_inside_of_a_capture(device):
    layers, x = build(device, delay_wgrad_compute=True), randn(16, HIDDEN, device=device)
    context, sync = te.get_cpu_offload_context(True, K, LAYERS)

    def run(stack):
        results = step(stack, [x])[:2]
        for module in stack:
            module.backward_dw() if hasattr(module, "backward_dw") else module.layer.backward_dw()
        return results + [p.grad.clone() for layer in layers for p in layer.parameters()]

    expected = run(layers)
    wrapped = [Offloaded(layer, context, sync) for layer in layers]
    run(wrapped)
    te.make_graphed_callables(
        tuple(wrapped),
        tuple((torch.randn_like(x).requires_grad_(),) for _ in wrapped),
        pre_warmup_hook=context.disable,
        post_warmup_hook=context.enable,
    )
    same(run(wrapped), expected)


@pytest.mark.gpu
def test_a_capture_without_pinned_memory_is_refused():
    layers, x = build("cuda"), randn(16, HIDDEN, device="cuda")
    context, sync = te.get_cpu_offload_context(True, K, LAYERS)
    wrapped = [Offloaded(layer, context, sync) for layer in layers]
    samples = tuple((torch.randn_like(x).requires_grad_(),) for _ in wrapped)
    hooks = {"pre_warmup_hook": context.disable, "post_warmup_hook": context.enable}
    with refused(te.cpu_offload.PinnedMemoryError, "capture", "reserve"):
        te.make_graphed_callables(tuple(wrapped), samples, **hooks)
    context.offload_synchronizer.forget_step()
    expected = step(layers, [x])
    same(step(layers, [x], context, sync), expected)  # no memory of the attempt is left
    context.offload_synchronizer.reserve_pinned(1 << 20)
    te.make_graphed_callables(tuple(wrapped), samples, **hooks)
    same([t.clone() for t in step(wrapped, [x])], expected)
    synchronizer = context.offload_synchronizer
    assert synchronizer.pinned_usage()["captured"] > 0
    for module in wrapped:
        module.reset()
    synchronizer.release_pinned(graphs_are_gone=True)
    assert synchronizer.pinned_usage()["reserved"] == 0


@pytest.mark.gpu
def test_captured_layers_take_less_memory():
    def pool(k):
        layers = [te.LayerNormMLP(1024, 4096, params_dtype=torch.bfloat16) for _ in range(6)]
        x = torch.randn(4096, 1024, dtype=torch.bfloat16, device="cuda")
        context, sync = te.get_cpu_offload_context(k > 0, k, 6)
        wrapped = [Offloaded(layer, context, sync) for layer in layers]
        step(layers, [x], *((context, sync) if k else ()))
        hooks = {"pre_warmup_hook": context.disable, "post_warmup_hook": context.enable} if k else {}
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        samples = tuple((torch.randn_like(x).requires_grad_(),) for _ in wrapped)
        te.make_graphed_callables(tuple(wrapped), samples, **hooks)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - before

    kept = 4096 * 4096 * 2  # the fc1 output of a layer; its input is a static tensor
    # Two layers are on the device at a time, one is being offloaded, and reloaded inputs have separate memory.
    assert pool(0) - pool(4) >= 2 * kept


class Behind(torch.nn.Module):
    """A layer that records an event after its result; the copies of its graph may still run then."""

    def __init__(self, inner, context, sync):
        super().__init__()
        self.inner, self.context, self.sync = inner, context, sync
        self.event = torch.cuda.Event(external=True)

    def forward(self, x):
        x = Records.apply(x, self.event)
        with self.context:
            x = self.inner(x)
        self.event.record()
        return self.sync(x)


@pytest.mark.gpu
def test_copies_after_an_event():
    """Graphs on a separate stream; the main stream continues at the event of each layer."""
    layers, x = build("cuda"), randn(4096, HIDDEN, device="cuda")
    expected = step(layers, [x])
    context, sync = te.get_cpu_offload_context(True, K, LAYERS)
    step(layers, [x], context, sync)
    stack = [Behind(layer, context, sync) for layer in layers]
    te.make_graphed_callables(
        tuple(stack),
        tuple((torch.randn_like(x).requires_grad_(),) for _ in stack),
        pre_warmup_hook=context.disable,
        post_warmup_hook=context.enable,
    )
    side = torch.cuda.Stream()
    for _ in range(3):
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        given = x.clone().requires_grad_()
        y = given
        for module in stack:
            y = module(y, cuda_graph_stream=side, cuda_graph_event=module.event)
        y.backward(torch.ones_like(y))
        torch.cuda.current_stream().wait_stream(side)
        same([y.detach(), given.grad, *(p.grad for layer in layers for p in layer.parameters())], expected)


def test_the_example(tmp_path, device, monkeypatch, capsys):
    import offload_graph

    sizes = ["--layers", "3", "--offload", "1", "--hidden", "128", "--tokens", "32"]
    assert offload_graph.main(["--device", device, *sizes, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("bit for bit") == 2
    picture = (tmp_path / "timeline.svg").read_text()
    assert picture.startswith("<svg") and all(
        f">{lane} 0: " in picture for lane in ("compute", "to the host", "to the device")
    )
