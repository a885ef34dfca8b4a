"""A stack of MoE blocks in torch's own operations, whose experts compute in buffers of static shape. Which rows are
alive is on the device alone; the caller chooses what keeps them for the backward."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.functional import activation
from transformer_engine.pytorch.stash import PagedStash

SKEWS = ("balanced", "zipf", "hot")
HOT = 4.0  # added to the logit of the hot expert; the other logits are about N(0, 1)


@dataclass(frozen=True)
class Config:
    """The first `here` of `experts` are computed; a buffer has room for `capacity` times the rows of a balanced
    routing. capacity None: the host waits for the number of rows, which is the size of the shapes."""

    layers: int
    tokens: int
    hidden: int
    ffn: int
    experts: int
    here: int
    k: int
    capacity: float | None

    @property
    def balanced_rows(self) -> int:
        return self.tokens * self.k * self.here // self.experts

    @property
    def rows(self) -> int | None:
        """Rows of a buffer: at most the number of pairs of a token and an expert."""
        return None if self.capacity is None else min(round(self.capacity * self.balanced_rows), self.tokens * self.k)

    @property
    def row_bytes(self) -> int:
        """Bytes that a layer keeps for a row in bf16: input and output of its experts, gate and up, their product,
        weight."""
        return 2 * (2 * self.hidden + 3 * self.ffn + 1)


class Places:
    """The row of each pair of a token and an expert: pairs are ordered by expert, and those of experts elsewhere come
    last. count: the number of live rows, one integer on the device, even if the buffer has fewer. Without `rows` the
    host waits for it."""

    def __init__(self, chosen: torch.Tensor, here: int, rows: int | None) -> None:
        expert = chosen.flatten().clamp(max=here)
        order = expert.argsort(stable=True)
        ends = (expert[:, None] == torch.arange(here, device=expert.device)).sum(0).cumsum(0)
        self.count = ends[-1:]
        rows = int(self.count) if rows is None else rows
        self.ends = ends.clamp(max=rows).to(torch.int32)  # of the experts' rows, as grouped_mm takes them
        self.pairs = order[:rows]
        row = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        self.is_here = row < self.ends[-1]
        self.row = row.clamp(max=max(rows - 1, 0))
        self.k = chosen.shape[1]

    def collect(self, rows: torch.Tensor, k: int) -> torch.Tensor:
        """Each token's sum over its k rows here; other rows are not read."""
        if rows.shape[0] == 0:
            return rows.new_zeros(self.row.numel() // k, *rows.shape[1:])
        found = rows.index_select(0, self.row)
        is_here = self.is_here.view(-1, *[1] * (rows.ndim - 1))
        found = torch.where(is_here, found, torch.zeros((), dtype=rows.dtype, device=rows.device))
        return found.view(-1, k, *rows.shape[1:]).sum(1) if k > 1 else found


class ToRows(torch.autograd.Function):
    """Gathers rows of [tokens, ...] (k for each), or of [pairs, ...] (k = 1), one for each row of the buffer."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, places: Places, k: int) -> torch.Tensor:
        ctx.places, ctx.k = places, k
        return x.index_select(0, places.pairs // k)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.places.collect(grad, ctx.k), None, None


class ToTokens(torch.autograd.Function):
    """The transpose of the gather: each token gets the sum of its rows."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, places: Places) -> torch.Tensor:
        ctx.places = places
        return places.collect(y, places.k)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad.index_select(0, ctx.places.pairs // ctx.places.k), None


class MoEBlock(torch.nn.Module):
    """x + experts(norm(x))."""

    def __init__(self, config: Config, number: int, device: torch.device) -> None:
        super().__init__()
        self.config, self.number = config, number
        self.norm = te.RMSNorm(config.hidden, params_dtype=torch.bfloat16, device=device)

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape, dtype=torch.bfloat16, device=device) * shape[-2] ** -0.5)

        self.router = weight(config.hidden, config.experts)
        self.gate_up = weight(config.here, config.hidden, 2 * config.ffn)
        self.down = weight(config.here, config.ffn, config.hidden)
        self.register_buffer("bias", torch.zeros(config.experts, device=device))

    def skew(self, name: str) -> None:
        """Bias of the router: none, some experts more than others, or one hot expert, which every second layer has
        here."""
        experts, bias = self.config.experts, torch.zeros(self.config.experts)
        if name == "zipf":
            ranks = torch.randperm(experts, generator=torch.Generator().manual_seed(self.number))
            bias = -torch.log1p(ranks.float())
        elif name == "hot":
            bias[0 if self.number % 2 == 0 else experts - 1] = HOT
        self.bias.copy_(bias)

    def forward(self, x: torch.Tensor, stash: PagedStash | None) -> torch.Tensor:
        normed = self.norm(x)
        logits = (normed @ self.router).float() + self.bias
        chosen = logits.topk(self.config.k).indices
        weights = logits.softmax(-1).gather(1, chosen).to(torch.bfloat16)
        places = Places(chosen, self.config.here, self.config.rows)
        if stash is None:
            return x + self.experts(normed, weights, places, lambda t: t, contextlib.nullcontext())

        def counted(t: torch.Tensor) -> torch.Tensor:
            stash.mark_pageable(t, places.count)
            return t

        normed = stash.pre_schedule(normed)
        # Nothing reads a row after the live ones, so a reload need not write there.
        group = stash.group(self.number, places.count, tail="keep")
        return x + stash.post_schedule(self.experts(normed, weights, places, counted, group))

    def experts(self, normed, weights, places: Places, counted, group) -> torch.Tensor:
        """Rows after the live ones hold anything: grouped_mm does not write there, and collect() does not read
        there."""
        mm = torch.nn.functional.grouped_mm  # on the CPU it is a loop of the same products
        with group:
            rows = counted(ToRows.apply(normed, places, places.k))
            gate_up = counted(mm(rows, self.gate_up, offs=places.ends))
            hidden = counted(activation(gate_up, "swiglu"))
            result = counted(mm(hidden, self.down, offs=places.ends))
            weight = counted(ToRows.apply(weights.flatten(), places, 1))
            return ToTokens.apply(result * weight[:, None], places)


class MoEStack(torch.nn.Module):
    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.blocks = torch.nn.ModuleList(MoEBlock(config, i, device) for i in range(config.layers))

    def skew(self, name: str) -> None:
        for block in self.blocks:
            block.skew(name)

    def forward(self, x: torch.Tensor, stash: PagedStash | None = None, around=None) -> torch.Tensor:
        """around: (context, sync) of te.get_cpu_offload_context."""
        for block in self.blocks:
            if around is None:
                x = block(x, stash)
            else:
                with around[0]:
                    x = block(x, stash)
                x = around[1](x)
        return x
