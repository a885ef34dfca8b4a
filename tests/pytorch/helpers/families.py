# One small instance of each module family, with the inputs it takes, for the suites that treat all of them alike.
# module/test_modules.py has those with parameters and a single input; here are the norms and the attention too.
import torch
from plain_modules import as_tuple
from support import randn

import transformer_engine.pytorch as te

HIDDEN, FFN, HEADS, SEQ, BATCH = 16, 24, 2, 6, 4
HEAD = HIDDEN // HEADS
NO_DROPOUT = {"attention_dropout": 0.0}

FAMILIES = {
    "Linear": lambda **options: te.Linear(HIDDEN, HIDDEN, **options),
    "split Linear": lambda **options: te.Linear(HIDDEN, HIDDEN, parameters_split=["a", "b"], **options),
    "LayerNorm": lambda **options: te.LayerNorm(HIDDEN, **options),
    "RMSNorm": lambda **options: te.RMSNorm(HIDDEN, zero_centered_gamma=True, **options),
    "LayerNormLinear": lambda **options: te.LayerNormLinear(HIDDEN, HIDDEN, normalization="RMSNorm", **options),
    "LayerNormMLP": lambda **options: te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **options),
    "recomputing LayerNormMLP": lambda **options: te.LayerNormMLP(HIDDEN, FFN, checkpoint=True, **options),
    "MultiheadAttention": lambda **options: te.MultiheadAttention(
        HIDDEN, HEADS, input_layernorm=True, **NO_DROPOUT, **options
    ),
    "TransformerLayer": lambda **options: te.TransformerLayer(
        HIDDEN, FFN, HEADS, fuse_qkv_params=True, hidden_dropout=0.0, **NO_DROPOUT, **options
    ),
}
WITHOUT_PARAMETERS = {
    "DotProductAttention": lambda **_: te.DotProductAttention(HEADS, HEAD),
    "grouped DotProductAttention": lambda **_: te.DotProductAttention(HEADS, HEAD, 1, attn_mask_type="no_mask"),
}
EVERY_FAMILY = FAMILIES | WITHOUT_PARAMETERS


def build(name, device, dtype=torch.float32):
    """A module whose parameters are neither zero nor one."""
    module = EVERY_FAMILY[name](params_dtype=dtype, device=device)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape).to(p) * 0.3)
    return module


def inputs_of(name, device, dtype=torch.float32, *, seq=SEQ, batch=BATCH):
    if "DotProductAttention" in name:
        groups = 1 if "grouped" in name else HEADS
        return [randn(seq, batch, n, HEAD, dtype=dtype, device=device) for n in (HEADS, groups, groups)]
    return [randn(seq, batch, HIDDEN, dtype=dtype, device=device)]


def loss_of(result):
    """A number in which every element of every output has its own weight."""
    total = 0.0
    for t in as_tuple(result):
        weights = torch.linspace(-1.0, 1.0, t.numel()).view(t.shape).to(t)
        total = total + (t * weights).sum()
    return total


def train(module, batches, optimizer):
    """One optimizer step for each batch; the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(module(batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().view(1))
    return losses
