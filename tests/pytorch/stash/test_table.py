# A stashed MoEMLP in combination with other features: in high precision and in FP8, eager, as one graph and as a graph
# for each layer, two microbatches in flight. Outputs and gradients are those of the layers without stash and graphs,
# bit for bit.
import functools
import itertools
from contextlib import nullcontext

import pytest
import torch

import transformer_engine.pytorch as te

from .cases import made, report, same
from .test_moe_mlp import HIDDEN, LAYERS, TOKENS, Mixture

pytestmark = pytest.mark.usefixtures("fp8_left_off")
ORDER = [1, 1, -1, -1]
OPTIONS = {
    "offload of other layers": {},
    "recompute around": {},
    "delayed gradients": {"delay_wgrad_compute": True},
    "frozen experts": {},
    "evaluation between steps": {},
    "keep_rows": {"keep_rows": True},
    "pre-activation in FP8": {"save_preactivation": "fp8"},
}


class Recomputed(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return te.checkpoint(self.layer, x, use_reentrant=False)


class Whole(torch.nn.Module):
    """All layers as one callable."""

    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, y):
        losses = []
        for layer in self.layers:
            out, loss = layer(y)
            y = y + out
            losses.append(loss)
        return y, sum(losses)

    def backward_dw(self):
        for layer in reversed(self.layers):
            layer.backward_dw()


class Cell:
    """One combination: the layers, and a step of two microbatches by their callables."""

    def __init__(self, mixture, how, graph):
        self.mixture, self.whole = mixture, graph == "one graph"
        layers = list(mixture.layers)
        if how == "frozen experts":
            for layer in layers:
                layer.experts.requires_grad_(False)
        if how == "recompute around":
            layers = [Recomputed(layer) for layer in layers]
        self.delayed = how == "delayed gradients"
        self.eager = [Whole(layers)] if self.whole else layers
        self.calls = self.eager * 2  # of the first microbatch, then of the second
        options = {"params_dtype": mixture.dtype, "device": mixture.device}
        self.others = torch.nn.ModuleList(te.LayerNormMLP(HIDDEN, 64, **options) for _ in range(2))
        self.offload, self.sync = nullcontext(), lambda y: y
        if how == "offload of other layers" and mixture.stash is not None:
            self.offload, self.sync = te.get_cpu_offload_context(True, 1, 2)

    def fp8(self):
        return {} if self.mixture.recipe is None else {"enabled": True, "recipe": self.mixture.recipe()}

    def capture(self, x):
        samples = tuple((x.clone().requires_grad_(),) for _ in self.calls)
        options = {"_order": ORDER, "_num_layers_per_chunk": [len(self.eager)], **self.fp8()}
        self.calls = list(te.make_graphed_callables(tuple(self.eager), samples, **options))

    def of(self, microbatch):
        return self.calls[microbatch * len(self.eager) :][: len(self.eager)]

    def evaluate(self, y):
        """By the layers themselves, as the graphs are those of training."""
        with torch.no_grad():
            return self.forward(y, [functools.partial(type(call).forward, call) for call in self.eager])

    def forward(self, y, calls):
        losses = []
        for other in self.others:
            with self.offload:
                y = y + other(y)
            y = self.sync(y)
        for call in calls:
            with te.autocast(**self.fp8()) if self.mixture.recipe else nullcontext():
                out, loss = call(y)
            y = out if self.whole else y + out
            losses.append(loss)
        return y, sum(losses)

    def step(self, *inputs):
        owners = [*self.mixture.layers, *self.others]
        for owner in owners:
            owner.zero_grad(set_to_none=True)
        leaves = [x.clone().requires_grad_() for x in inputs]
        results = [self.forward(leaf, self.of(i)) for i, leaf in enumerate(leaves)]
        for i, (y, loss) in enumerate(results):
            (y.float().square().sum() + loss).backward()
            for call in reversed(self.of(i) if self.delayed else []):
                call.backward_dw()
        outputs = [t.detach().reshape(-1) for result in results for t in result]
        return [*outputs, *(leaf.grad for leaf in leaves), *(p.grad for owner in owners for p in owner.parameters())]


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("graph", ["eager", "one graph", "graph per layer"])
@pytest.mark.parametrize("recipe", ["bfloat16", "block"])
def test_cells(recipe, graph, how, device, monkeypatch):
    from transformer_engine.pytorch.cpu_offload import layer as offload_layer

    monkeypatch.setattr(offload_layer, "MIN_ELEMENTS", 64)
    with made(device, page_bytes=512) as stash:
        mixture = Mixture(device, recipe, stash, **OPTIONS[how])
        plain = Cell(mixture.twin(), how, "eager")
        cell = Cell(mixture, how, graph)
        plain.others.load_state_dict(cell.others.state_dict())
        lives = itertools.cycle((17, TOKENS, 3, 0))

        def compare(seed):
            inputs = [mixture.tokens(next(lives), seed=seed + i) for i in range(2)]
            stash.reset()
            same(cell.step(*inputs), plain.step(*inputs), f"step {seed}")
            numbers = report(stash)
            assert numbers["flags"] == 0 and numbers["device_in_use"] == numbers["host_in_use"] == 0
            assert numbers["groups"] == (0 if how == "recompute around" else 2 * LAYERS)
            if how == "evaluation between steps":
                same(*([t.reshape(-1) for t in one.evaluate(inputs[0])] for one in (cell, plain)))

        compare(0)
        if graph != "eager":
            stash.reset()
            cell.capture(mixture.tokens(17))
        for seed in (2, 4):
            compare(seed)
