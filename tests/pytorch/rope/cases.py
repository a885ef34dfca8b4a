"""Helpers of the suites of rotary embedding: drawn inputs. No test is here."""

import torch


def draw(device, *shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def angles(device, positions, rot_dim, seed=1):
    """Each element its own angle, from 1e-6 to 1e5."""
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, (positions, rot_dim), generator=generator) * 2 - 1
    return (sign * 10 ** (torch.rand(positions, rot_dim, generator=generator) * 11 - 6)).to(device)[:, None, None]
