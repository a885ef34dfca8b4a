"""A stack of MoE blocks whose experts compute in buffers of static shape. How many rows are alive is on the device
alone; the caller chooses what keeps them for the backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.stash import PagedStash

SKEWS = ("balanced", "zipf", "hot")
HOT = 1.0  # added to the score of the hot expert; scores are from 0 to 1


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
    save_preactivation: str | None = None

    @property
    def balanced_rows(self) -> int:
        return self.tokens * self.k * self.here // self.experts

    @property
    def rows(self) -> int | None:
        """Rows of a buffer, in whole 128s: at most one for each token and each of its experts that is here."""
        if self.capacity is None:
            return None
        wanted = -(-self.capacity * self.tokens * self.k * self.here // self.experts)
        return int(min(-(-wanted // 128) * 128, self.tokens * min(self.k, self.here)))

    @property
    def row_bytes(self) -> int:
        """Bytes that a layer keeps for a row: gate and up in bf16 or, with save_preactivation="fp8", in bytes with a
        float32 scale for each 128 of them, the weight in float32, and the number of its token, of which the row is
        gathered again."""
        wide = 2 * self.ffn
        return (2 * wide if self.save_preactivation is None else wide + 4 * (wide // 128)) + 4 + 4


class MoEBlock(torch.nn.Module):
    """x + experts(norm(x)). options: of te.MoEMLP."""

    def __init__(
        self, config: Config, number: int, device: torch.device, stash: PagedStash | None, **options: object
    ) -> None:
        super().__init__()
        self.config, self.number = config, number
        self.norm = te.RMSNorm(config.hidden, params_dtype=torch.bfloat16, device=device)
        self.moe = te.MoEMLP(
            config.hidden,
            config.ffn,
            config.experts,
            config.k,
            experts=(0, config.here),
            capacity_factor=config.capacity,
            score_function="sigmoid",
            expert_bias=True,
            save_preactivation=config.save_preactivation,
            params_dtype=torch.bfloat16,
            device=device,
            stash=stash,
            **options,
        )
        torch.nn.init.normal_(self.moe.router.weight, std=config.hidden**-0.5)

    @torch.no_grad()
    def skew(self, name: str) -> None:
        """Bias of the router: none, some experts more than others, or one hot expert, which every second layer has
        here."""
        experts, bias = self.config.experts, torch.zeros(self.config.experts)
        if name == "zipf":
            ranks = torch.randperm(experts, generator=torch.Generator().manual_seed(self.number))
            bias = -torch.log1p(ranks.float()) / 4
        elif name == "hot":
            bias[0 if self.number % 2 == 0 else experts - 1] = HOT
        self.moe.router.expert_bias.copy_(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + (self.counted(normed) if self.config.capacity is None else self.moe(normed)[0])

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        """The mixture with as many rows as there are, for which the host waits."""
        moe, here = self.moe, slice(0, self.config.here)
        routing = moe.router(x)
        sizes = routing.tokens_per_expert[here]
        rows, weights, places = te.moe_permute_with_probs(
            x, routing.probs[:, here], routing.routing_map[:, here], max(int(sizes.sum()), 1)
        )
        return te.moe_unpermute(moe.experts(rows, sizes, weights), places, restore_shape=x.shape)


class MoEStack(torch.nn.Module):
    def __init__(
        self, config: Config, device: torch.device, stash: PagedStash | None = None, **options: object
    ) -> None:
        super().__init__()
        self.config = config
        self.blocks = torch.nn.ModuleList(MoEBlock(config, i, device, stash, **options) for i in range(config.layers))

    def skew(self, name: str) -> None:
        for block in self.blocks:
            block.skew(name)

    def forward(self, x: torch.Tensor, around=None) -> torch.Tensor:
        """around: (context, sync) of te.get_cpu_offload_context."""
        for block in self.blocks:
            if around is None:
                x = block(x)
            else:
                with around[0]:
                    x = block(x)
                x = around[1](x)
        return x
