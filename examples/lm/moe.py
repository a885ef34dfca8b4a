"""A mixture of experts in the place of each layer's MLP: the modules, their loss, and the load of the experts."""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import nn

import transformer_engine.pytorch as te

from .config import DTYPES, Config

PAGE_BYTES = 64 * 1024  # of the stash
AUX_LOSS = 0.01  # coefficient of the loss that balances the experts, for each layer


class NormedMoE(nn.Module):
    """RMSNorm and te.MoEMLP. An expert has ffn_hidden / topk hidden units, so that a token's experts multiply as much
    as the MLP of the dense model."""

    def __init__(self, config: Config, init: Callable, output_init: Callable, device: torch.device):
        super().__init__()
        factory = {"params_dtype": DTYPES[config.dtype], "device": device}
        self.norm = te.RMSNorm(config.hidden, eps=config.eps, **factory)
        self.moe = te.MoEMLP(
            config.hidden,
            config.expert_hidden,
            config.experts,
            config.topk,
            activation="swiglu",
            aux_loss_coeff=AUX_LOSS,
            init_method=init,
            output_layer_init_method=output_init,
            **factory,
        )
        self.aux_loss: torch.Tensor | None = None  # of the last forward
        self.captured = False

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        first = () if is_first_microbatch is None else (is_first_microbatch,)
        eager = self.captured and not self.training  # the graph is that of train mode
        call = functools.partial(te.MoEMLP.forward, self.moe) if eager else self.moe
        y, self.aux_loss = call(self.norm(x), *first)
        return y


class Mixtures:
    """Those of all layers of a model, after a forward."""

    def __init__(self, layers: Iterable[nn.Module]):
        self.parts = [layer.layernorm_mlp for layer in layers]
        self.pages: te.stash.PagedStash | None = None

    def stash(self, config: Config) -> None:
        """From now on the rows that the experts keep for the backward leave for pinned host memory, but for the last
        layer's. All experts are here, so that all rows are live, and their number and that of the pages are known."""
        weight = self.parts[0].moe.experts.fc1.weight
        rows = config.tokens // config.accumulate * config.topk
        row_bytes = 2 * config.expert_hidden * weight.element_size() + 8  # the pre-activation, a probability, a token
        pages = len(self.parts) * (rows * row_bytes // PAGE_BYTES + 2)
        self.pages = te.stash.PagedStash(
            PAGE_BYTES, device_pages=0, host_pages=pages, device=weight.device, overflow="raise_at_step_end"
        )
        for part in self.parts:
            part.moe.stash = self.pages

    def begin(self) -> None:
        """Before the forward of a microbatch, each of which is a step of the stash."""
        if self.pages is not None:
            self.pages.reset()

    def capture(self, config: Config, recipe: object | None) -> None:
        """From now on each mixture replays a CUDA graph of its own, forward and backward, in train mode and for these
        shapes. On a CPU the calls are recorded and checked in the same way."""
        moes = tuple(part.moe for part in self.parts)
        like = moes[0].router.weight
        shape = (config.batch // config.accumulate, config.seq, config.hidden)
        samples = tuple((like.new_zeros(shape, requires_grad=True),) for _ in moes)
        te.make_graphed_callables(moes, samples, enabled=recipe is not None, recipe=recipe)
        for part in self.parts:
            part.captured = True

    def aux_loss(self) -> torch.Tensor:
        """The sum of the layers' losses."""
        return torch.stack([part.aux_loss for part in self.parts]).sum()

    def tokens(self) -> torch.Tensor:
        """int64 [layers, experts]: the tokens of each expert. A copy, as the next forward overwrites the counts."""
        return torch.stack([part.moe.tokens_per_expert for part in self.parts])


def shares(tokens: torch.Tensor) -> list[float]:
    """Each expert's share of all pairs of a token and an expert, the mean of the layers."""
    return (tokens / tokens.sum(1, keepdim=True)).mean(0).tolist()
