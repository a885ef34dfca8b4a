# Manual offload inside of and between captured layers: the copies are nodes of the graphs, or overlap the work
# between them.
import gc

import pytest
import torch
from support import randn

import transformer_engine.pytorch as te

from ..graph.cases import Records
from .cases import forward, small, step  # noqa: F401
from .graph_cases import HIDDEN, LAYERS, build, same

pytestmark = pytest.mark.usefixtures("small")


class ByHand(torch.nn.Module):
    """A layer that records an event after its result; after it, in the same graph, the layer is offloaded and released.
    The CPU backend has neither streams nor events, and runs the same calls."""

    def __init__(self, inner, number, offload=None):
        super().__init__()
        self.inner, self.number, self.offload = inner, number, offload
        self.alive = 0  # bytes after the last forward, the captured one
        cuda = next(inner.parameters()).is_cuda
        self.event = torch.cuda.Event(external=True) if cuda else None

    def forward(self, x):
        if self.event is not None:
            x = Records.apply(x, self.event)
        if self.offload is None:
            x = self.inner(x)
        else:
            with self.offload[0]:
                x = self.inner(x)
        if self.event is not None:
            self.event.record()
        if self.offload is not None:
            _, sync, manual = self.offload
            x = sync(x)
            manual.start_offload_layer(self.number)
            manual.release_activation_forward_gpu_memory(self.number)
        self.alive = torch.cuda.memory_allocated() if self.event is not None else 0
        return x


def captured_by_hand(layers, x, offload, pinned, warm=lambda: None):
    """Each layer separately; offload: None for a run without. `warm` is called between warm-up and captures."""
    stack = [ByHand(layer, i, offload) for i, layer in enumerate(layers)]
    hooks = {"post_warmup_hook": warm}
    if offload is not None:
        context = offload[0]
        context.offload_synchronizer.reserve_pinned(pinned, x.device)
        hooks = {"pre_warmup_hook": context.disable, "post_warmup_hook": lambda: (context.enable(), warm())}
    samples = tuple((torch.randn_like(x).requires_grad_(),) for _ in stack)
    te.make_graphed_callables(tuple(stack), samples, **hooks)
    return stack


def test_by_hand_between_captured_layers(device):
    """Eager work between the graphs continues at each event; released memory is NaN until it is reused."""
    layers, side = build(device), torch.cuda.Stream() if device == "cuda" else None
    offload = te.get_cpu_offload_context(True, None, LAYERS, manual_synchronization=True)
    manual = offload[2]
    manual.debug = True
    x = randn(64, HIDDEN, device=device)
    step(layers, [x], *offload[:2])  # eager, without offload
    stack = captured_by_hand(layers, x, offload, 4 << 20)
    assert manual.get_offloaded_total_size_mb() > 0
    between = [randn(HIDDEN, HIDDEN, device=device, scale=HIDDEN**-0.5) for _ in layers]

    def run(modules, x, **on):
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        y = given = x.clone().requires_grad_()
        for module, weight in zip(modules, between, strict=True):
            event = {"cuda_graph_event": module.event} if on else {}
            y = torch.tanh(module(y, **on, **event).mm(weight))
        junk = torch.full((16 << 20,), torch.nan, device=device)  # in released eager memory
        del junk
        y.backward(torch.cos(y.detach()))
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        return [t.clone() for t in (y.detach(), given.grad, *(p.grad for m in layers for p in m.parameters()))]

    for seed in range(3):
        torch.manual_seed(seed)
        x = randn(64, HIDDEN, device=device)
        same(run(stack, x, **({"cuda_graph_stream": side} if side else {})), run(layers, x))


@pytest.mark.gpu
def test_a_copy_by_hand_overlaps_eager_work():
    """Eager work starts at the event of the layer, and ends while its graph still copies."""
    tokens, hidden, ffn = 8192, 1024, 8192
    options = {"activation": "swiglu", "params_dtype": torch.bfloat16, "device": "cuda"}
    layer, side = te.LayerNormMLP(hidden, ffn, **options), torch.cuda.Stream()
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    expected = [t.clone() for t in step([layer], [x])]
    offload = te.get_cpu_offload_context(True, None, 1, manual_synchronization=True)
    (module,) = captured_by_hand([layer], x, offload, 512 << 20)
    moved = offload[2].get_offloaded_total_size_mb() * 2**20
    assert moved >= 2 * tokens * 2 * ffn  # gate and up, 256 MiB: 4.6 ms at 55 GB/s
    weight = torch.randn(hidden, hidden, dtype=torch.bfloat16, device="cuda")

    def timed():
        """(results, ms from the event to the end of the eager work, ms from there to the end of the graph)"""
        layer.zero_grad(set_to_none=True)
        began, done, copied = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        given = x.clone().requires_grad_()
        y = module(given, cuda_graph_stream=side, cuda_graph_event=module.event)
        began.record()
        work = y.detach()
        for _ in range(4):
            work = work @ weight  # 17 GFLOP each, 0.1 ms in all
        done.record()
        copied.record(side)
        torch.cuda.synchronize()
        y.backward(torch.ones_like(y))
        torch.cuda.current_stream().wait_stream(side)
        results = [y.detach().clone(), given.grad.clone(), *(p.grad.clone() for p in layer.parameters())]
        return results, began.elapsed_time(done), done.elapsed_time(copied)

    timed()  # cuBLAS creates its handles
    for _ in range(3):
        results, working, copying = timed()
        same(results, expected)
        assert working > 0 and copying > 0.5 * moved / 64e9 * 1e3, (working, copying)  # no link exceeds 64 GB/s


@pytest.mark.gpu
def test_layers_by_hand_take_less_memory():
    """The saved tensors of six captured layers stay on the host until their backward. There are many tokens, so that
    the gradients, which stay, need less than was freed: 16 MiB a layer in the backward, where 72 MiB are saved."""
    count, tokens, hidden, ffn = 6, 8192, 512, 4096
    kept = tokens * (hidden + ffn) * 2  # the outputs of the norm and of fc1; the input is a static tensor, and stays

    def captured_memory(leave):
        layers = [te.LayerNormMLP(hidden, ffn, params_dtype=torch.bfloat16) for _ in range(count)]
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
        offload = te.get_cpu_offload_context(True, None, count, manual_synchronization=True) if leave else None
        start = {}

        def warm():  # the warm-up saves all of them in either case
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            start["alive"], start["pool"] = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

        stack = captured_by_hand(layers, x, offload, 512 << 20, warm)
        torch.cuda.empty_cache()
        figures = {
            "left": int(offload[2].get_offloaded_total_size_mb() * 2**20) if leave else 0,
            "after the forwards": stack[-1].alive - stack[0].alive,
            "at most": torch.cuda.max_memory_allocated() - start["alive"],
            "pool": torch.cuda.memory_reserved() - start["pool"],
        }
        print(figures, "after each forward:", [(module.alive - start["alive"]) >> 20 for module in stack], "MiB")
        for module in stack:
            module.reset()
        return figures

    without, by_hand = captured_memory(False), captured_memory(True)
    gain = {name: without[name] - by_hand[name] for name in without}
    shown = f"kept by a layer {kept}, without {without}, by hand {by_hand}"
    assert by_hand["left"] >= count * kept, shown
    assert gain["after the forwards"] >= 0.98 * (count - 1) * kept, shown
    # The last forward briefly keeps its layer too, and so does each backward, beside gradients of earlier layers.
    assert gain["at most"] >= 3 * kept and gain["pool"] >= 3 * kept, shown
