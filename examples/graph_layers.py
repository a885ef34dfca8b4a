#!/usr/bin/env python3
"""Capture a stack of TransformerLayers, each in its own CUDA graphs, and compare it with an eager twin: bits, host time
and memory. Then draw a timeline of a captured layer whose result is copied to the host after an event, while the main
stream continues. Without a GPU the same code runs over a recorder: it compares only the bits, and draws nothing.

    python examples/graph_layers.py [--layers 4] [--hidden 1024] [--tokens 512] [--out runs/graph]

Writes <out>/timeline.svg, drawn from CUDA events.
"""

import argparse
import copy
import os
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms need it, before CUDA starts

import torch

import transformer_engine.pytorch as te
from timeline import Bar, draw

STEPS = 50
TURNS = 4  # of the timeline


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024 if cuda else 64)
    parser.add_argument("--tokens", type=int, default=512 if cuda else 16)
    parser.add_argument("--out", type=Path, default=Path("runs/graph"))
    return parser.parse_args()


def layer_of(args: argparse.Namespace, dtype: torch.dtype) -> te.TransformerLayer:
    heads = max(1, args.hidden // 64)
    return te.TransformerLayer(
        args.hidden, 4 * args.hidden, heads, attention_dropout=0.0, params_dtype=dtype, device=args.device
    )


def step(stack: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """One forward and backward: the result, the input's gradient, the parameters'."""
    stack.zero_grad()
    x = x.detach().requires_grad_()
    y = stack(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in stack.parameters())]


def host_us(stack: torch.nn.Module, x: torch.Tensor) -> float:
    """Time to enqueue a step; waiting for the device is not included."""
    total = 0.0
    for turn in range(STEPS + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(stack, x)
        total += time.perf_counter() - start if turn >= 3 else 0.0
    return 1e6 * total / STEPS


def memory() -> str:
    used = (f() / 2**20 for f in (torch.cuda.memory_allocated, torch.cuda.memory_reserved))
    return "{:.0f} MiB allocated, {:.0f} reserved".format(*used)


def compare(args: argparse.Namespace, dtype: torch.dtype, cuda: bool) -> bool:
    """Runs the captured stack and its eager twin. Returns whether every bit was equal."""
    torch.use_deterministic_algorithms(True)  # so that attention repeats its bits, in graphs too
    stack = torch.nn.Sequential(*(layer_of(args, dtype) for _ in range(args.layers)))
    eager = copy.deepcopy(stack)
    x = torch.randn(args.tokens, 1, args.hidden, dtype=dtype, device=args.device)
    step(eager, x)
    if cuda:
        print(f"before the capture: {memory()}")
    te.make_graphed_callables(tuple(stack), tuple((x.clone().requires_grad_(),) for _ in stack))
    if cuda:
        print(f"after the capture: {memory()}")
    equal = []
    for seed in range(3):
        x = torch.randn_like(x)
        results = []
        for model in (stack, eager):
            torch.manual_seed(seed)  # the layers drop out
            results.append([t.clone() for t in step(model, x)])
        equal += [torch.equal(a, b) for a, b in zip(*results, strict=True)]
    print(f"{sum(equal)} of {len(equal)} results and gradients are equal to eager, bit for bit")
    if cuda:
        plain, captured = host_us(eager, x), host_us(stack, x)
        print(f"host time of a step: {plain:.0f} us eager, {captured:.0f} us captured")
    torch.use_deterministic_algorithms(False)
    return all(equal)


class WithTail(torch.nn.Module):
    """A layer whose result is copied to pinned memory after the event."""

    def __init__(self, args: argparse.Namespace, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer_of(args, dtype)
        self.event = torch.cuda.Event(external=True)
        self.host = torch.empty(args.tokens, 1, args.hidden, dtype=dtype, pin_memory=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.event.record()
        self.host.copy_(y, non_blocking=True)
        return y


@torch.no_grad()
def overlapped(module: WithTail, x: torch.Tensor, weight: torch.Tensor, event: torch.cuda.Event | None) -> tuple:
    """Runs TURNS turns of the captured layer on its own stream and products on the main one. Returns the bars and
    the total time, in us."""
    stream = torch.cuda.Stream()
    marks = []

    def mark(on: torch.cuda.Stream) -> torch.cuda.Event:
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record(on)
        return marks[-1]

    main = torch.cuda.current_stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # cycles, 10 ms: everything is queued before the first layer runs
    start, turns = mark(main), []
    for _ in range(TURNS):
        begin = mark(main)
        y = module(x, cuda_graph_stream=stream, cuda_graph_event=event)
        there, tail = mark(main), mark(stream)
        while_copied = y
        for _ in range(3):
            while_copied = while_copied @ weight
        turns.append((begin, there, tail, mark(main)))
    main.wait_stream(stream)
    end = mark(main)
    torch.cuda.synchronize()
    bars = []
    for turn in turns:
        begin, there, tail, done = (1e3 * start.elapsed_time(e) for e in turn)
        if event is None:  # the main stream waited for the copy too
            bars += [Bar("graph's stream", "captured layer", begin, tail), Bar("main stream", "products", there, done)]
        else:
            bars += [
                Bar("graph's stream", "captured layer", begin, there),
                Bar("graph's stream", "copy to the host", there, tail),
                Bar("main stream", "products", there, done),
            ]
    return bars, 1e3 * start.elapsed_time(end)


def overlap(args: argparse.Namespace, dtype: torch.dtype) -> None:
    wide = argparse.Namespace(**{**vars(args), "hidden": 4 * args.hidden, "tokens": 8 * args.tokens})
    module = WithTail(wide, dtype).eval()
    x = torch.randn(wide.tokens, 1, wide.hidden, dtype=dtype, device=args.device)
    weight = torch.randn(wide.hidden, wide.hidden, dtype=dtype, device=args.device) / wide.hidden**0.5
    with torch.no_grad():
        te.make_graphed_callables(module, (torch.zeros_like(x),))
    for event in (None, module.event):
        overlapped(module, x, weight, event)
    _, serial = overlapped(module, x, weight, None)
    bars, total = overlapped(module, x, weight, module.event)
    copies = [bar for bar in bars if bar.kind == "copy to the host"]
    products = [bar for bar in bars if bar.kind == "products"]
    hidden = sum(max(0.0, min(c.end, p.end) - max(c.begin, p.begin)) for c, p in zip(copies, products, strict=True))
    ratio = hidden / sum(c.end - c.begin for c in copies)
    title = f"{ratio:.0%} of the copies' time behind products of the main stream; {serial:.0f} us without the event, "
    title += f"{total:.0f} with it"
    print(title)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "timeline.svg").write_text(draw(bars, title, "us"))
    print(f"wrote {args.out / 'timeline.svg'}")


def main() -> None:
    args = parse()
    cuda = torch.device(args.device).type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    torch.manual_seed(0)
    if not compare(args, dtype, cuda):
        raise SystemExit("graph_layers.py: error: captured and eager differ")
    if cuda:
        overlap(args, dtype)
    else:
        print("no GPU: no times, and no timeline")


if __name__ == "__main__":
    main()
