# Any order of forwards, backwards, second backwards, dropped graphs and failing layers gives the gradients of a run
# without offload, and leaves no pinned memory in use.
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.pytorch.cpu_offload import layer as offload_layer

WIDTH = 16


class Failing(Exception):
    pass


class Layer(torch.nn.Module):
    def __init__(self, ffn):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, ffn), torch.nn.Linear(ffn, WIDTH)
        self.fails = False

    def forward(self, x):
        y = torch.tanh(self.up(x))
        if self.fails:
            raise Failing
        return x + self.down(y * y)


class Run:
    """The same calls on the same layers, with a context or without; returns the gradients of each backward in order."""

    def __init__(self, layers, manual=None, context=None, sync=None):
        self.layers, self.context, self.sync, self.manual = layers, context, sync, manual
        self.flying, self.results = [], []

    def forward(self, seed, fails_at=None):
        torch.manual_seed(seed)
        x = torch.randn(8, WIDTH, requires_grad=True)
        y = x
        for i, layer in enumerate(self.layers):
            layer.fails = i == fails_at
            if self.context is None:
                y = layer(y)
                continue
            with self.context:
                y = layer(y)
            y = self.sync(y)
        self.flying.append((x, y))

    def call(self, name, argument):
        if name == "forward":
            self.forward(argument)
        elif name == "fail":
            with pytest.raises(Failing):
                self.forward(argument, argument % len(self.layers))
        elif self.flying and name in ("backward", "again"):
            x, y = self.flying[argument % len(self.flying)]
            wanted = [x, *(p for layer in self.layers for p in layer.parameters())]
            self.results += torch.autograd.grad(y.sum(), wanted, retain_graph=name == "again")
            if name == "backward":
                self.flying.pop(argument % len(self.flying))
        elif self.flying and name == "drop":
            self.flying.pop(argument % len(self.flying))
        elif self.manual is not None and name.startswith("layer"):
            calls = ("start_offload_layer", "release_activation_forward_gpu_memory", "start_reload_layer")
            try:
                getattr(self.manual, calls[argument % 3])(argument // 3 % len(self.layers))
            except RuntimeError as error:  # in a wrong state, which changes nothing
                assert "state" in str(error) or "no forward" in str(error)


CALLS = st.lists(st.tuples(st.sampled_from(["forward", "backward", "again", "drop", "fail"]), st.integers(0, 20)))
BY_HAND = st.lists(
    st.tuples(st.sampled_from(["forward", "backward", "again", "drop", "layer", "layer", "layer"]), st.integers(0, 20)),
    max_size=25,
)


def compare(calls, n, make):
    torch.manual_seed(0)
    layers = [Layer(16 + 8 * i) for i in range(n)]
    before, offload_layer.MIN_ELEMENTS = offload_layer.MIN_ELEMENTS, 64
    try:
        plain, moved = Run(layers), Run(layers, *make())
        for name, argument in calls:
            plain.call(name, argument)
            moved.call(name, argument)
    finally:
        offload_layer.MIN_ELEMENTS = before
    for i, (a, b) in enumerate(zip(moved.results, plain.results, strict=True)):
        assert_same_bits(a, b, f"gradient {i}")
    synchronizer = moved.context.offload_synchronizer
    moved.flying.clear()
    synchronizer.forget_step()
    assert synchronizer.pinned_usage()["slots"] == 0


@settings(max_examples=60, derandomize=True, deadline=None)
@given(CALLS, st.integers(1, 5), st.integers(0, 4))
def test_any_order_by_schedule(calls, n, k):
    k = min(k, n - 1)

    def make():
        return None, *te.get_cpu_offload_context(True, k, n)

    compare(calls, n, make)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(BY_HAND, st.integers(1, 4))
def test_any_order_by_hand(calls, n):
    def make():
        context, sync, manual = te.get_cpu_offload_context(True, None, n, manual_synchronization=True)
        return manual, context, sync

    compare(calls, n, make)
