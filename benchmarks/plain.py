"""The peers in plain PyTorch that more than one benchmark times: the same mathematics from torch's own parts."""

import torch
import torch.nn.functional as F


def swiglu(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class Mlp(torch.nn.Module):
    """RMSNorm, gate and up projection, SwiGLU, down projection; no bias."""

    def __init__(self, hidden, ffn_hidden, **options):
        super().__init__()
        self.norm = torch.nn.RMSNorm(hidden, eps=1e-5, **options)
        self.fc1 = torch.nn.Linear(hidden, 2 * ffn_hidden, bias=False, **options)
        self.fc2 = torch.nn.Linear(ffn_hidden, hidden, bias=False, **options)

    def forward(self, x):
        return self.fc2(swiglu(self.fc1(self.norm(x))))
