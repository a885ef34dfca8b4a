# Helpers of the suites of te.Linear. No test is here.
import torch
from support import assert_same_bits

import transformer_engine.pytorch as te


def twins(device, k=16, n=24, bias=True, dtype=torch.float32):
    """A te.Linear and a torch.nn.Linear with the same weights."""
    ours = te.Linear(k, n, bias=bias, device=device, params_dtype=dtype)
    plain = torch.nn.Linear(k, n, bias=bias, device=device, dtype=dtype)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            getattr(ours, name).copy_(parameter)
    return ours, plain


def step(module, x, dy):
    """(output, gradient of x, gradient of each parameter) of one forward and backward."""
    x = x.detach().requires_grad_()
    module.zero_grad(set_to_none=True)
    y = module(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def assert_same_step(got, want, what=""):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b, what)
