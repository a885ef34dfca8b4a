#!/usr/bin/env python3
"""Move the saved tensors of the first k of n TransformerLayers to pinned memory and back, eager and in captured layers.
It checks that the bits are the same as without, compares predicted and measured device memory, and prints step times
and a timeline of copies against compute. Without a GPU the host copies and captures run over a recorder: only the bits
count.

    python examples/offload_graph.py [--layers 6] [--offload 3] [--hidden 4096] [--tokens 4096] [--out runs/offload]

Writes <out>/timeline.svg.
"""

import argparse
import itertools
import os
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms need it, before CUDA starts

import torch

import transformer_engine.pytorch as te
from timeline import Bar, draw

STEPS = 5


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--offload", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=4096 if cuda else 256)
    parser.add_argument("--tokens", type=int, default=4096 if cuda else 1024)
    parser.add_argument("--out", type=Path, default=Path("runs/offload"))
    return parser.parse_args(argv)


class Layer(torch.nn.Module):
    """A TransformerLayer in its offload context; a capture includes the context."""

    def __init__(self, layer: te.TransformerLayer, context: object, sync: object) -> None:
        super().__init__()
        self.layer, self.context, self.sync = layer, context, sync

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.context:
            x = self.layer(x)
        return self.sync(x)


def step(stack: list[torch.nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    """One forward and backward: the result, the input's gradient, the parameters'. Gradients keep their memory."""
    for module in stack:
        module.zero_grad(set_to_none=False)
    torch.manual_seed(1)  # the layers drop out
    x = x.detach().requires_grad_()
    y = x
    for module in stack:
        y = module(y)
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, *(p.grad for module in stack for p in module.parameters())]


def bits(stack: list[torch.nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    torch.use_deterministic_algorithms(True)  # without it attention's backward does not repeat its bits
    try:
        return [t.clone() for t in step(stack, x)]
    finally:
        torch.use_deterministic_algorithms(False)


def measure(stack: list[torch.nn.Module], x: torch.Tensor, cuda: bool) -> tuple[float, float]:
    """Milliseconds of a step, and MiB of its peak above the start."""
    for _ in range(2):
        step(stack, x)
    if not cuda:
        start = time.perf_counter()
        step(stack, x)
        return 1e3 * (time.perf_counter() - start), float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(STEPS):
        step(stack, x)
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / STEPS, (torch.cuda.max_memory_allocated() - before) / 2**20


def predict(layers: list[torch.nn.Module], kept_layers: int, x: torch.Tensor) -> dict[str, float]:
    """MiB of a step's peak, term by term. The peak is in the backward of a layer after which others still come back:
    the number of layers on the device is the number that stay, plus autograd's gradients between layers and the tensors
    of the caller."""
    own = te.memory_plan(layers[0], x.detach().requires_grad_()).kept_bytes / 2**20
    result = x.nbytes / 2**20
    return {
        f"{kept_layers} layers with their inputs, {own + result:.0f} each": kept_layers * (own + result),
        "work of one layer's backward": measure(layers[:1], x, True)[1] - own - 2 * result,
        "the result, its gradient, and the one between two layers": 3 * result,
    }


class Clock:
    """Instants on streams, or on a CPU of the host, where work is complete when a call returns."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda

    def now(self, stream: torch.cuda.Stream | None = None) -> object:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream() if stream is None else stream)
        return event

    def ms(self, start: object, end: object) -> float:
        return start.elapsed_time(end) if self.cuda else 1e3 * (end - start)


def spans_of(layers: list, x: torch.Tensor, context: object, sync: object, cuda: bool) -> list[Bar]:
    """An eager step, in ms. A copy begins when its stream has finished the previous one and the compute stream reaches
    the call that starts it. It ends at an event after it on its own stream."""
    clock, synchronizer = Clock(cuda), context.offload_synchronizer
    if cuda:
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # cycles, 10 ms: the host is ahead from the start
    out_stream, back_stream = synchronizer.copy_streams(x.device)
    start, spans = clock.now(), []
    y = x.detach().requires_grad_()
    last_copy: list[object] = [None]

    def came_back(layer: int) -> None:
        """The backward reaches the layer; another one may have started to come back."""
        began = clock.now()
        returning = layer - (len(layers) - args_offload - 1)
        if 0 <= returning < args_offload:
            spans.append(("to the device", returning, last_copy[0], reached[layer], clock.now(back_stream)))
            last_copy[0] = spans[-1][-1]
        edges.append((layer, began))

    args_offload = synchronizer.num_offloaded_layers
    reached, edges = {}, []
    for i, layer in enumerate(layers):
        began = clock.now()
        with context:
            y = layer(y)
        inner, ready = y, clock.now()
        spans.append(("compute", i, None, began, ready))
        y = sync(y)
        if i < args_offload:
            spans.append(("to the host", i, last_copy[0], ready, clock.now(out_stream)))
            last_copy[0] = spans[-1][-1]
        y.register_hook(lambda _, i=i: reached.__setitem__(i, clock.now()))
        inner.register_hook(lambda _, i=i: came_back(i))
    last_copy[0] = None
    y.backward(torch.ones_like(y))
    edges.append((-1, clock.now()))
    if cuda:
        torch.cuda.synchronize()
    spans += [("compute", layer, None, a, b) for (layer, a), (_, b) in itertools.pairwise(edges)]
    bars = []
    for lane, layer, behind, begin, end in spans:
        first = max(clock.ms(start, t) for t in (behind, begin) if t is not None)
        bars.append(Bar(lane, lane, first, max(first, clock.ms(start, end)), str(layer)))
    return bars


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    cuda = torch.device(args.device).type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    torch.manual_seed(0)
    heads = max(1, args.hidden // 128)
    layers = [
        te.TransformerLayer(
            args.hidden, 4 * args.hidden, heads, attention_dropout=0.0, params_dtype=dtype, device=args.device
        )
        for _ in range(args.layers)
    ]
    x = torch.randn(args.tokens, 1, args.hidden, dtype=dtype, device=args.device)
    context, sync = te.get_cpu_offload_context(True, args.offload, args.layers)
    stack = [Layer(layer, context, sync) for layer in layers]

    expected = bits(layers, x)
    equal = {"eager": bits(stack, x)}
    moved = context.offload_synchronizer.get_offloaded_total_size_mb()
    (time_without, peak_without), (time_with, peak_with) = measure(layers, x, cuda), measure(stack, x, cuda)
    terms = predict(layers, args.layers - args.offload, x) if cuda else {}
    bars = spans_of(layers, x, context, sync, cuda)

    torch.use_deterministic_algorithms(True)  # in the graphs too
    te.make_graphed_callables(
        tuple(stack),
        tuple((torch.randn_like(x).requires_grad_(),) for _ in stack),
        pre_warmup_hook=context.disable,
        post_warmup_hook=context.enable,
    )
    torch.use_deterministic_algorithms(False)
    equal["captured"] = bits(stack, x)

    same = {how: all(map(torch.equal, expected, results)) for how, results in equal.items()}
    for how, is_same in same.items():
        print(f"{how}: outputs and gradients {'are' if is_same else 'are NOT'} those of a run without, bit for bit")
    print(f"{args.offload} of {args.layers} layers offloaded: {moved:.0f} MiB leave in a step")
    print(f"step: {time_without:.2f} ms without, {time_with:.2f} ms with ({time_with / time_without - 1:+.1%})")
    if cuda:
        for what, mib in terms.items():
            print(f"  {mib:6.0f} MiB  {what}")
        predicted = sum(terms.values())
        print(
            f"peak above the start: {peak_without:.0f} MiB without; with: {predicted:.0f} predicted, {peak_with:.0f} "
            f"measured ({peak_with / predicted - 1:+.1%})"
        )
    usage = context.offload_synchronizer.pinned_usage()
    print(f"pinned: {usage['reserved'] / 2**20:.0f} MiB, at most {usage['peak'] / 2**20:.0f} in use")
    args.out.mkdir(parents=True, exist_ok=True)
    title = f"{args.offload} of {args.layers} layers offloaded, eager, {max(bar.end for bar in bars):.1f} ms"
    (args.out / "timeline.svg").write_text(draw(bars, title, "ms"))
    print(f"wrote {args.out / 'timeline.svg'}")
    return 0 if all(same.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
