# Helpers of the suites of te.checkpoint: a step with and without it. No test is here.
import pytest
import torch
from families import FFN, HIDDEN, inputs_of
from plain_modules import randomize
from support import assert_same_bits

import transformer_engine.pytorch as te

both_ways = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not_reentrant"])


def tokens(device, requires_grad=True):
    return inputs_of("Linear", device)[0].requires_grad_(requires_grad)


class Dropping(torch.nn.Module):
    """A block that draws from the default state and, with a tracker, from a forked one."""

    def __init__(self, device, tracker=None):
        super().__init__()
        self.first = randomize(te.Linear(HIDDEN, HIDDEN, device=device))
        self.second = randomize(te.LayerNormMLP(HIDDEN, FFN, device=device))
        self.tracker = tracker

    def forward(self, x, scale=None, *, shift=None):
        h = torch.nn.functional.dropout(self.first(x), 0.5, True)
        h = h if scale is None else h * scale
        h = h if shift is None else h + shift
        if self.tracker is not None:
            with self.tracker.fork():
                h = torch.nn.functional.dropout(h, 0.5, True)
        return torch.nn.functional.dropout(self.second(h), 0.5, True)


def step(call, module, *inputs, seed=11, tracker=None):
    """{name: tensor} of one step from that seed: outputs, gradients, and numbers drawn after forward and backward."""
    torch.manual_seed(seed)
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    module.zero_grad()
    outputs = call(module, *leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    device = outputs[0].device
    got = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    got["drawn behind forward"] = torch.rand(4, device=device)
    torch.autograd.backward([t for t in outputs if t.requires_grad], [t.cos() for t in outputs if t.requires_grad])
    got["drawn behind backward"] = torch.cat([torch.rand(4), torch.rand(4, device=device).cpu()])
    if tracker is not None:
        got |= {f"tracker {name}": state for name, state in tracker.get_states().items()}
    got |= {f"gradient of input {i}": t.grad for i, t in enumerate(leaves) if t.requires_grad}
    return got | {f"gradient of {name}": p.grad for name, p in module.named_parameters()}


def same_bits(got, wanted):
    assert list(got) == list(wanted)
    for key, want in wanted.items():
        assert (got[key] is None) == (want is None), key
        if want is not None:
            assert_same_bits(got[key], want, key)
