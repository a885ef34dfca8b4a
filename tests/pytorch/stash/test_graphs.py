# A stash in layers that make_graphed_callables captures one by one: passes of the warm-up are steps, so is the capture.
# Waits and refusals are in test_captures.py.
import pytest
import torch

import transformer_engine.pytorch as te

from .cases import LIVE, WIDTH, count, given, made, report, same


class Layer(torch.nn.Module):
    def __init__(self, stash, number, device):
        super().__init__()
        self.stash, self.number = stash, number
        self.inner = te.LayerNormMLP(WIDTH, 48, device=device)

    def forward(self, x, counter):
        if self.stash is None:
            return self.inner(x)
        x = self.stash.pre_schedule(x)
        with self.stash.group(self.number, counter):
            x = self.inner(x)
        return self.stash.post_schedule(x)


def run(layers, x, counter):
    y = leaf = x.clone().requires_grad_()
    for layer in layers:
        y = layer(y, counter)
    y[:LIVE].sum().backward()
    found = [leaf.grad[:LIVE], *(p.grad.clone() for layer in layers for p in layer.parameters())]
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("first", ["eager", "none"])
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("warm", [0, 1, 3])
def test_warm_ups(warm, hook, first, device):
    """Each warm-up pass is a step; without warm-ups the capture is the first step."""
    if warm == 0 and first == "none":
        pytest.skip("a pool is not made inside of a capture")
    counter, x = count(LIVE, device), given(device)
    with made(device, device_pages=None, factor=2.0, page_bytes=128) as stash:
        layers = [Layer(stash, i, device) for i in range(3)]
        plain = [Layer(None, i, device) for i in range(3)]
        for a, b in zip(layers, plain, strict=True):
            b.load_state_dict(a.state_dict())
        expected = run(plain, x, counter)
        for _ in range(2 if first == "eager" else 0):
            stash.reset()
            same(run(layers, x, counter), expected)
        stash.reset()
        samples = tuple((x.clone().requires_grad_(), counter.clone()) for _ in layers)
        graphed = te.make_graphed_callables(
            tuple(layers), samples, num_warmup_iters=warm, post_warmup_hook=stash.reset if hook else None
        )
        for _ in range(3):
            stash.reset()
            same(run(graphed, x, counter), expected)
            numbers = report(stash)
            assert numbers["flags"] == 0 and numbers["groups"] == 2 and numbers["device_in_use"] == 0


@pytest.mark.parametrize("told", [True, False])
def test_microbatches(told, device):
    """Two in flight, by a recorded order or by schedule_from_order()."""
    order, counter, x = [1, 1, -1, -1], count(LIVE, device), given(device)
    with made(device, device_pages=None, factor=2.0, page_bytes=128) as stash:
        layers = [Layer(stash, i, device) for i in range(2)]
        plain = [Layer(None, i, device) for i in range(2)]
        for a, b in zip(layers, plain, strict=True):
            b.load_state_dict(a.state_dict())

        def both(passes):
            leaves, results = [x.clone().requires_grad_(), (2 * x).requires_grad_()], []
            for m, y in enumerate(leaves):
                for call in passes[2 * m : 2 * m + 2]:
                    y = call(y, counter)
                results.append(y)
            for y in results:  # the oldest first
                y[:LIVE].sum().backward()
            owners = plain if passes[0] is plain[0] else layers
            found = [t.grad[:LIVE] for t in leaves] + [p.grad.clone() for m in owners for p in m.parameters()]
            for m in owners:
                m.zero_grad(set_to_none=True)
            return found

        expected = both(plain * 2)
        if told:
            stash.schedule_from_order(order, 2)
        stash.reset()
        same(both(layers * 2), expected)
        stash.reset()
        samples = tuple((x.clone().requires_grad_(), counter.clone()) for _ in range(4))
        passes = te.make_graphed_callables(tuple(layers), samples, _order=order, _num_layers_per_chunk=[2])
        for _ in range(3):
            stash.reset()
            same(both(passes), expected)
            numbers = report(stash)
            assert numbers["flags"] == 0 and numbers["groups"] > 0 and numbers["device_in_use"] == 0
