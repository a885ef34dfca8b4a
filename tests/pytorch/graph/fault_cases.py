# Shared by the tests of failing captures: a module that raises at a chosen place, and every stage of a capture at
# which it, a hook or delayed weight gradients can raise. No test is here.
import gc
from functools import partial

import torch

import transformer_engine.pytorch as te


class Fault(Exception):
    pass


class Faulty(torch.nn.Module):
    """Raises in the `count`-th forward, or in the `count`-th backward."""

    def __init__(self, inner, where=None, count=0):
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros(1, device=next(inner.parameters()).device))
        self.where, self.count, self.seen = where, count, {"forward": 0, "backward": 0}

    def _pass(self, kind):
        self.seen[kind] += 1
        if self.where == kind and self.seen[kind] == self.count:
            raise Fault(kind)

    def forward(self, x, **kwargs):
        self._pass("forward")
        self.calls += 1
        x = torch.nn.functional.dropout(x, 0.3)
        ballast = torch.empty(2**20, device=x.device, dtype=x.dtype)
        y = Through.apply(self.inner(x, **kwargs), self) + 0 * ballast[:1].fill_(1)
        return y


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.module._pass("backward")
        return dy.clone(), None


def failing_hook(when, count):
    seen = []

    def hook(_):
        seen.append(1)
        if len(seen) == count:
            raise Fault(when)

    return {"capture_time_hooks": [{when: {0: hook}}]}


def raising():
    raise Fault("hook")


WARMUPS = 2
# (where the module raises, in which call, a function that makes the arguments of make_graphed_callables)
STAGES = {
    "pre_warmup_hook": (None, 0, lambda: {"pre_warmup_hook": raising}),
    "post_warmup_hook": (None, 0, lambda: {"post_warmup_hook": raising}),
    "warm-up 1": ("forward", 1, dict),
    "warm-up 2": ("forward", 2, dict),
    "warm-up 2 backward": ("backward", 2, dict),
    "forward capture": ("forward", WARMUPS + 1, dict),
    "backward capture": ("backward", WARMUPS + 1, dict),
    "wgrad warm-up": ("wgrad", 1, dict),
    "wgrad capture": ("wgrad", WARMUPS + 1, dict),
    **{
        f"{when} {count}": (None, 0, partial(failing_hook, when, count))
        for when in ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
        for count in (1, WARMUPS + 1)
    },
}


def allocated(device):
    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def faulty_backward_dw(monkeypatch, count):
    """LayerNormMLP raises in the `count`-th backward_dw()."""
    original, calls = te.LayerNormMLP.backward_dw, []

    def backward_dw(self):
        calls.append(1)
        if len(calls) == count:
            raise Fault("wgrad")
        original(self)

    monkeypatch.setattr(te.LayerNormMLP, "backward_dw", backward_dw)
