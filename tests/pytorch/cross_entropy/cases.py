"""Helpers of the suites of cross entropy on one rank: logits and targets. No test is here."""

import torch

IGNORED = -100


def draw(device, *shape, dtype=torch.float32, scale=3.0):
    """Logits and targets, some of them ignored."""
    logits = (torch.randn(shape) * scale).to(device, dtype)
    target = torch.randint(0, shape[-1], shape[:-1])
    if target.numel() > 2:
        target.view(-1)[1::4] = IGNORED
    return logits, target.to(device)
