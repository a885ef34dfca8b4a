# Shared by the tests of captured pipelines: orders, a pipeline that runs one over callables, captured or eager, and
# the comparison of both. No test is here.
import copy

import pytest
import torch
from support import assert_same_bits

import transformer_engine.pytorch as te

from .cases import HIDDEN, TOKENS, assert_same_step, left_by

ONE_F_ONE_B = [1, 1, -1, 1, -1, 1, -1, -1]
INTERLEAVED = [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]
FOUR_STAGES = [
    1,
    1,
    2,
    2,
    3,
    3,
    4,
    4,
    -4,
    1,
    -4,
    1,
    -3,
    2,
    -3,
    2,
    -2,
    3,
    -2,
    3,
    -1,
    4,
    -1,
    4,
    -4,
    -4,
    -3,
    -3,
    -2,
    -2,
    -1,
    -1,
]
DELAYED = [1, 1, -1, -1.5, 1, -1, 1, -1.5, -1, -1.5, -1, -1.5]
DELAYED_CHUNKS = [1, 2, 1, 2, -2, -1, -1.5, -2.5, -2, -2.5, -1, -1.5]
ORDERS = {
    "one": [1, -1],
    "1F1B": ONE_F_ONE_B,
    "interleaved": INTERLEAVED,
    "four stages": FOUR_STAGES,
    "delayed": DELAYED,
    "delayed chunks": DELAYED_CHUNKS,
    "delayed second chunk": [1, 2, -2, -1, -2.5, 1, 2, -2, -2.5, -1],
}
every_order = pytest.mark.parametrize("name", ORDERS)


def chunks_of(order_):
    return int(max(order_))


def microbatches_of(order_):
    return sum(entry == 1 for entry in order_)


def samples(device, chunks, microbatches, layers):
    return tuple(
        (torch.randn(*TOKENS, HIDDEN, device=device).requires_grad_(),) for _ in range(chunks * microbatches * layers)
    )


class Pipeline:
    """Runs an order over callables, eager or captured, as a rank of a pipeline does: chunk inputs and output gradients
    come from outside. Results and input gradients are copied when a loss or a send would read them."""

    def __init__(self, modules, order_, layers, call, backward_dw):
        self.modules, self.order, self.layers = modules, order_, layers
        self.call, self.backward_dw = call, backward_dw
        self.chunks, self.microbatches = chunks_of(order_), microbatches_of(order_)

    def index(self, chunk, microbatch, layer):
        return chunk * self.layers * self.microbatches + microbatch * self.layers + layer

    def run(self, seed, device):
        generator = torch.Generator().manual_seed(seed)

        def draw():
            return torch.randn(*TOKENS, HIDDEN, generator=generator).to(device)

        given = {(c, m): (draw(), draw()) for c in range(self.chunks) for m in range(self.microbatches)}
        done = {kind: [0] * self.chunks for kind in "fbw"}
        alive, left = {}, {}
        torch.manual_seed(seed)
        for entry in self.order:
            chunk = int(abs(entry)) - 1
            kind = "f" if entry > 0 else "b" if entry == int(entry) else "w"
            microbatch = done[kind][chunk]
            done[kind][chunk] += 1
            x, dy = given[chunk, microbatch]
            which = [
                (chunk * self.layers + layer, self.index(chunk, microbatch, layer)) for layer in range(self.layers)
            ]
            if kind == "f":
                own = x.clone().requires_grad_()
                y = own
                for module, index in which:
                    y = self.call(module, index, y)
                alive[chunk, microbatch] = own, y
                left["y", chunk, microbatch] = y.detach().clone()
            elif kind == "b":
                own, y = alive.pop((chunk, microbatch))
                (y * y * dy).sum().backward()  # a loss that reads y as late as this
                left["dx", chunk, microbatch] = own.grad
            else:
                for module, index in reversed(which):
                    self.backward_dw(module, index)
        return left


def pipelines(modules, order_, layers, device, **options):
    """The captured pipeline and an eager one with equal modules."""
    twins = copy.deepcopy(modules)
    graphed = te.make_graphed_callables(
        tuple(modules),
        samples(device, chunks_of(order_), microbatches_of(order_), layers),
        _order=order_,
        _num_layers_per_chunk=layers,
        **options,
    )
    captured = Pipeline(
        modules, order_, layers, lambda module, i, x: graphed[i](x), lambda module, i: graphed[i].backward_dw()
    )
    eager = Pipeline(
        twins, order_, layers, lambda module, i, x: twins[module](x), lambda module, i: twins[module].backward_dw()
    )
    return graphed, captured, eager


def check(captured, eager, device, steps=2):
    for seed in range(steps):
        got, want = captured.run(seed, device), eager.run(seed, device)
        assert got.keys() == want.keys()
        for key in want:
            assert_same_bits(got[key], want[key], str(key))
        for i, (module, twin) in enumerate(zip(captured.modules, eager.modules)):
            assert_same_step(left_by(module), left_by(twin), f"module {i}, step {seed}")
    for module in (*captured.modules, *eager.modules):
        module.zero_grad()
