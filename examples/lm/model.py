"""The language model in two forms with the same mathematics: FusedLM of Transformer Engine's modules, PlainLM of
torch's.

Llama's layout: byte embedding, layers of RMSNorm > attention (grouped queries, rotary positions) > RMSNorm > SwiGLU MLP
around a residual stream, a last RMSNorm, a linear head. No dropout, no bias.
"""

import functools
import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

from .config import DTYPES, VOCAB, Config
from .moe import Mixtures, NormedMoE
from .parallel import ALONE, Ranks, memory_of_modes

ROPE_BASE = 10000.0
INIT_STD = 0.02
RECIPES = {
    "delayed": recipe.DelayedScaling,
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
}


class FusedLM(nn.Module):
    """The model made of fused modules, the subject of this example. Several ranks divide it: attention by heads, MLPs
    by hidden units, embedding and head by the vocabulary; each rank has the whole norms."""

    def __init__(self, config: Config, device: torch.device, ranks: Ranks = ALONE):
        super().__init__()
        self.ranks = ranks
        dtype = DTYPES[config.dtype]
        init = functools.partial(nn.init.normal_, std=INIT_STD)
        # The two projections that write into the residual stream start smaller, the deeper the model (as in GPT-2).
        output_init = functools.partial(nn.init.normal_, std=INIT_STD / math.sqrt(2 * config.layers))
        self.embedding = nn.Embedding(VOCAB // ranks.size, config.hidden, device=device, dtype=dtype)
        ranks.draw_rows(init, self.embedding.weight)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                config.hidden,
                config.ffn_hidden,
                config.heads,
                num_gqa_groups=config.kv_groups,
                layernorm_epsilon=config.eps,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                init_method=init,
                output_layer_init_method=output_init,
                layer_number=number,
                self_attn_mask_type="causal",
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                params_dtype=dtype,
                device=device,
                **ranks.layer_options(),
            )
            for number in range(1, config.layers + 1)
        )
        for layer in self.layers if config.experts else ():
            layer.layernorm_mlp = NormedMoE(config, init, output_init, device)
        self.norm = te.RMSNorm(
            config.hidden,
            eps=config.eps,
            sequence_parallel=ranks.sequence_parallel,
            params_dtype=dtype,
            device=device,
        )
        self.head = te.Linear(
            config.hidden,
            VOCAB,
            bias=False,
            init_method=init,
            params_dtype=dtype,
            device=device,
            **ranks.head_options(),
        )
        if config.tied:
            self.embedding.weight = self.head.weight
        angles = te.RotaryPositionEmbedding(config.head_dim, rotary_base=ROPE_BASE)(config.seq)
        self.register_buffer("angles", angles.to(device), persistent=False)
        self.mixtures = Mixtures(self.layers) if config.experts else None
        self.recipe = RECIPES[config.fp8]() if config.fp8 else None
        self.offload = te.get_cpu_offload_context(config.offload_layers > 0, config.offload_layers, config.layers)

    def quantized(self) -> te.autocast:
        """A context in which the layers multiply in FP8, if this run uses FP8."""
        return te.autocast(enabled=self.recipe is not None, recipe=self.recipe)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """int64 tokens [batch, seq] -> logits [batch, seq, 256]; divided, [seq, batch, 256 / ranks]. With targets,
        shaped like tokens, returns the mean loss in nats without holding all logits at once. The head is not
        quantized."""
        x = self.embedding(tokens) if self.ranks.size == 1 else self.ranks.embed(tokens, self.embedding.weight)
        angles = self.angles[: tokens.shape[1]]
        context, sync = self.offload
        with self.quantized():
            for layer in self.layers:
                with context:
                    x = layer(x, rotary_pos_emb=angles)
                x = sync(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x)
        return self.ranks.cross_entropy(x, self.head.weight, targets)

    def memory_of_modes(self, tokens: torch.Tensor) -> str:
        """One line of text: what a rank keeps of a layer in both modes of sequence parallelism."""
        ranks, parameter = self.ranks, self.norm.weight
        positions = tokens.shape[1] // (ranks.size if ranks.sequence_parallel else 1)
        x = parameter.new_zeros(positions, len(tokens), parameter.shape[0]).requires_grad_()
        angles = self.angles[: tokens.shape[1]]
        with self.quantized():
            return memory_of_modes(
                self,
                lambda: self(tokens, tokens),
                self.layers[0],
                (x,),
                {"rotary_pos_emb": angles},
            )

    def scaled_modules(self) -> dict[str, nn.Module]:
        """The modules with scales and amax histories between steps (delayed scaling)."""
        if not (self.recipe and self.recipe.delayed()):
            return {}
        found = {n: m for n, m in self.layers.named_modules() if isinstance(m, TransformerEngineBaseModule)}
        with self.quantized():
            for module in found.values():
                module.init_fp8_metadata()
        return {name: module for name, module in found.items() if module.get_extra_state().numel()}


def unquantized_twin(fused: FusedLM, config: Config, device: torch.device) -> FusedLM:
    """The same model with the same first weights, its products in config.dtype."""
    twin = FusedLM(replace(config, fp8=None, offload_layers=0), device)
    twin.load_state_dict(fused.state_dict())
    return twin


def dense_twin(fused: FusedLM, config: Config, device: torch.device) -> FusedLM:
    """The model with an MLP in the place of the experts. A token has the same work in both; attention, embedding and
    head start from the same weights."""
    twin = FusedLM(replace(config, experts=0, topk=0, offload_layers=0), device)
    shared = {name: value for name, value in fused.state_dict().items() if ".layernorm_mlp." not in name}
    twin.load_state_dict(shared, strict=False)
    return twin


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, halves as pairs: x [batch, seq, heads, d], cos and sin [seq, 1, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class PlainLayer(nn.Module):
    """One layer in plain PyTorch, with q, k, v in one product and gate, up in one product, as the fused layer has."""

    def __init__(self, config: Config, **factory):
        super().__init__()
        hidden, kv = config.hidden, config.kv_groups * config.head_dim
        self.heads, self.kv_groups, self.head_dim = config.heads, config.kv_groups, config.head_dim
        self.attention_norm = nn.RMSNorm(hidden, eps=config.eps, **factory)
        self.qkv = nn.Linear(hidden, hidden + 2 * kv, bias=False, **factory)
        self.proj = nn.Linear(hidden, hidden, bias=False, **factory)
        self.mlp_norm = nn.RMSNorm(hidden, eps=config.eps, **factory)
        self.gate_up = nn.Linear(hidden, 2 * config.ffn_hidden, bias=False, **factory)
        self.down = nn.Linear(config.ffn_hidden, hidden, bias=False, **factory)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, seq, -1, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_groups, self.kv_groups), dim=2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, seq, hidden))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class PlainLM(nn.Module):
    """The twin: the same model in plain PyTorch, for comparing loss, speed and memory."""

    def __init__(self, config: Config, device: torch.device):
        super().__init__()
        factory = {"device": device, "dtype": DTYPES[config.dtype]}
        self.embedding = nn.Embedding(VOCAB, config.hidden, **factory)
        self.layers = nn.ModuleList(PlainLayer(config, **factory) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.eps, **factory)
        self.head = nn.Linear(config.hidden, VOCAB, bias=False, **factory)
        if config.tied:
            self.head.weight = self.embedding.weight
        frequencies = ROPE_BASE ** (-torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim)
        angles = torch.outer(torch.arange(config.seq, device=device).float(), frequencies).repeat(1, 2)[:, None]
        self.register_buffer("cos", angles.cos().to(factory["dtype"]), persistent=False)
        self.register_buffer("sin", angles.sin().to(factory["dtype"]), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().view(-1, VOCAB), targets.reshape(-1))


@torch.no_grad()
def plain_twin(fused: FusedLM, config: Config, device: torch.device) -> PlainLM:
    """A PlainLM that holds copies of the fused model's weights; every parameter of it is written."""
    plain = PlainLM(config, device)
    plain.embedding.weight.copy_(fused.embedding.weight)
    for ours, theirs in zip(fused.layers, plain.layers, strict=True):
        qkv, mlp = ours.self_attention.layernorm_qkv, ours.layernorm_mlp
        theirs.attention_norm.weight.copy_(qkv.layer_norm_weight)
        theirs.qkv.weight.copy_(torch.cat((qkv.query_weight, qkv.key_weight, qkv.value_weight)))
        theirs.proj.weight.copy_(ours.self_attention.proj.weight)
        theirs.mlp_norm.weight.copy_(mlp.layer_norm_weight)
        theirs.gate_up.weight.copy_(mlp.fc1_weight)  # [gate; up]: silu acts on the first half of the rows
        theirs.down.weight.copy_(mlp.fc2_weight)
    plain.norm.weight.copy_(fused.norm.weight)
    plain.head.weight.copy_(fused.head.weight)
    return plain
