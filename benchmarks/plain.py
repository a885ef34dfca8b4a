"""The peers in plain PyTorch that several benchmarks time: the same mathematics from torch's own parts."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

FASTEST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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


class Layer(torch.nn.Module):
    """Llama's layer on x [seq, batch, hidden]: RMSNorm, q, k and v in one product, rotary positions, causal attention
    with grouped keys, projection; RMSNorm, gate and up in one product, SwiGLU, down. size: seq, batch, hidden,
    ffn_hidden, heads, key-value heads; angles [seq, 1, 1, head size]."""

    def __init__(self, size, angles, **options):
        super().__init__()
        _, _, hidden, ffn_hidden, self.heads, self.groups = size
        self.head = hidden // self.heads
        self.norm = torch.nn.RMSNorm(hidden, eps=1e-5, **options)
        self.qkv = torch.nn.Linear(hidden, hidden + 2 * self.groups * self.head, bias=False, **options)
        self.proj = torch.nn.Linear(hidden, hidden, bias=False, **options)
        self.mlp = Mlp(hidden, ffn_hidden, **options)
        self.register_buffer("angles", angles)
        self.register_buffer("cos", angles.cos().to(options["dtype"]))
        self.register_buffer("sin", angles.sin().to(options["dtype"]))

    def rotate(self, x):
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat((-second, first), -1) * self.sin

    def forward(self, x):
        seq, batch, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(seq, batch, -1, self.head)
        q, k, v = qkv.split((self.heads, self.groups, self.groups), 2)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (self.rotate(q), self.rotate(k), v))
        with sdpa_kernel(FASTEST, set_priority=True):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = x + self.proj(attended.permute(2, 0, 1, 3).reshape(seq, batch, -1))
        return h + self.mlp(h)
