# Layers that a stash's suites run: modules of ours, torch's own operations that declare their tensors. No test is here.
import torch
from support import randn

import transformer_engine.pytorch as te
from transformer_engine.pytorch import saved as door

from .cases import Layers, dead_rows_zero, report, same, step

ROWS, HIDDEN = 40, 32


class Declared(torch.nn.Module):
    """torch's own operations, with their saved tensors declared."""

    def __init__(self, device):
        super().__init__()
        self.weight = torch.nn.Parameter(randn(HIDDEN, HIDDEN, device=device, scale=0.2))
        self.stash = None

    def forward(self, x, counter):
        x = self.declared(x * 1, counter)
        y = self.declared(x @ self.weight, counter)
        z = self.declared(torch.tanh(y), counter)  # tanh saves it too, without a declaration
        a, b = self.declared(y.sin(), counter), self.declared(x.cos(), counter)
        return self.declared(z.bfloat16(), counter).sin().float() + z * (a * b)

    @staticmethod
    def declared(t, counter):
        door.mark_pageable(t, counter)
        return t


def declared(layer, x, counter):
    return layer(x, counter)


def ours(kind, device):
    if kind == "linear":
        return [te.Linear(HIDDEN, HIDDEN, bias=i == 1, device=device) for i in range(3)]
    if kind == "layernorm linear":
        return [
            te.LayerNormLinear(HIDDEN, HIDDEN, normalization=n, device=device)
            for n in ("LayerNorm", "RMSNorm", "RMSNorm")
        ]
    if kind == "norms":
        return [
            te.RMSNorm(HIDDEN, device=device),
            te.LayerNorm(HIDDEN, device=device),
            te.RMSNorm(HIDDEN, device=device),
        ]
    return [te.LayerNormMLP(HIDDEN, 48, activation=kind, device=device, bias=i != 1) for i in range(3)]


def stack(kind, device, **how):
    if kind == "declared":
        return Layers(*(Declared(device) for _ in range(3)), prepare=declared, **how)
    return Layers(*ours(kind, device), **how)


def inputs_of(device, lives):
    return [dead_rows_zero(randn(ROWS, HIDDEN, device=device), n) for n in lives]


def agree(stash, module, inputs, counters, steps=2, expected=None, **how):
    """Steps with a stash give the bits of steps without one; the report counts the live bytes."""
    expected = expected or step(module, inputs, counters, **how)[0]
    for i in range(steps):
        found, overwritten = step(module, inputs, counters, stash, **how)
        same(found, expected, f"step {i}")
        assert overwritten or stash._pool is None, "nothing was stashed"
        numbers = report(stash) if stash._pool is not None else None
        if numbers:
            assert numbers["flags"] == 0 and numbers["device_in_use"] == numbers["host_in_use"] == 0
        stash.reset()
    return numbers
