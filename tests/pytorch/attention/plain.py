# Plain-PyTorch twins of MultiheadAttention and TransformerLayer with every option: fused parameters, norms of q and k,
# cross-attention, orders of norm and residual. Same parameter names, nothing of the library; dropout is not theirs.
# `check_options` compares a module with its twin, each called with its own arguments.
import torch
from plain_modules import (
    Parameters,
    PlainLayerNormLinear,
    PlainLinear,
    PlainMLP,
    PlainNorm,
    attend,
    compare,
    on_cpu,
    rotate,
    run,
    twin_of,
)
from support import wide
from torch import nn


class PlainHeadNorm(Parameters):
    """q_norm and k_norm: over the last dimension, written out; L2 has no parameters."""

    def __init__(self, kind, width, eps):
        super().__init__()
        self.kind, self.eps = kind, eps
        self.declare(weight=None if kind == "L2Normalization" else (width,))
        self.declare(bias=(width,) if kind == "LayerNorm" else None)

    def forward(self, x):
        work = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.kind == "LayerNorm":
            work = work - work.mean(-1, keepdim=True)
        square = work.square()
        total = square.sum(-1, keepdim=True) if self.kind == "L2Normalization" else square.mean(-1, keepdim=True)
        work = work / (total + self.eps).sqrt()
        work = work if self.weight is None else work * self.weight
        return (work if self.bias is None else work + self.bias).to(x.dtype)


class OutputNorm(PlainNorm):
    """The norm after the layer, whose parameters are called weight and bias."""

    def __init__(self, hidden, *, rms, zero_centered):
        super().__init__()
        self.rms, self.zero_centered, self.eps = rms, zero_centered, 1e-5
        self.declare(weight=(hidden,), bias=None if rms else (hidden,))

    layer_norm_weight = property(lambda self: self.weight)
    layer_norm_bias = property(lambda self: self.bias)

    def forward(self, x):
        return self.norm(x)


def heads_in_order(projected, counts, head_dim, groups):
    """The heads of q, k and v (or of k and v) picked one by one from rows that are [parts] of each group in turn."""
    blocks = projected.unflatten(-1, (-1, head_dim))
    parts, at = [[] for _ in counts], 0
    for _ in range(groups):
        for part, count in zip(parts, counts, strict=True):
            for _ in range(count // groups):
                part.append(blocks[..., at, :])
                at += 1
    return [torch.stack(part, dim=-2) for part in parts]


class OptionAttention(nn.Module):
    def __init__(
        self,
        hidden,
        heads,
        groups=None,
        *,
        input_layernorm=False,
        cross=False,
        fused=False,
        weight_interleaved=True,
        qk_norm=None,
        before_rope=False,
        rms=False,
        zero_centered=False,
        bias=True,
        causal=True,
        batch_first=False,
        return_bias=False,
        return_norm=False,
    ):
        super().__init__()
        groups, self.head_dim, self.cross = groups or heads, hidden // heads, cross
        self.counts = (heads, groups, groups)
        self.groups = groups if fused and weight_interleaved else 1
        self.options = {"causal": causal, "batch_first": batch_first}
        self.before_rope, self.return_bias, self.return_norm = before_rope, return_bias, return_norm

        def projection(parts, with_norm):
            names = {f"{name}_": count * self.head_dim for name, count in parts.items()}
            splits = sum(names.values()) if fused else names
            if with_norm:
                options = {"rms": rms, "zero_centered": zero_centered, "return_norm": True}
                return PlainLayerNormLinear(hidden, splits, bias=bias, **options)
            return PlainLinear(hidden, splits, bias=bias)

        queries, pairs = {"query": heads}, {"key": groups, "value": groups}
        names = ("layernorm_query", "query_layer") if cross else ("layernorm_qkv", "qkv")
        self.first = names[0] if input_layernorm else names[1]
        self.add_module(self.first, projection(queries if cross else queries | pairs, input_layernorm))
        if cross:
            self.key_value = projection(pairs, False)
        self.q_norm = PlainHeadNorm(qk_norm, self.head_dim, 1e-6) if qk_norm else None
        self.k_norm = PlainHeadNorm(qk_norm, self.head_dim, 1e-6) if qk_norm else None
        self.proj = PlainLinear(hidden, hidden, bias=bias)

    def forward(self, x, encoder_output=None, rotary_pos_emb=None, visible=None, bias=None):
        first, normed = getattr(self, self.first)(x), None
        if isinstance(first, tuple):
            first, normed = first
        if self.cross:
            (q,) = heads_in_order(first, self.counts[:1], self.head_dim, 1)
            k, v = heads_in_order(self.key_value(encoder_output), self.counts[1:], self.head_dim, self.groups)
        else:
            q, k, v = heads_in_order(first, self.counts, self.head_dim, self.groups)
        steps = [self._norm, self._rotate] if self.before_rope else [self._rotate, self._norm]
        for step in steps:
            q, k = step(q, k, rotary_pos_emb)
        context = attend(q, k, v, **self.options, visible=visible, bias=bias)
        results = [self.proj.product(context, add_bias=not self.return_bias)]
        results += [self.proj.joined_bias()] if self.return_bias else []
        results += [normed] if self.return_norm else []
        return tuple(results) if len(results) > 1 else results[0]

    def _norm(self, q, k, _):
        return (q, k) if self.q_norm is None else (self.q_norm(q), self.k_norm(k))

    def _rotate(self, q, k, freqs):
        if freqs is None:
            return q, k
        pair = freqs if isinstance(freqs, tuple) else (freqs, freqs)
        layout = {"batch_first": self.options["batch_first"], "interleaved": False}
        return rotate(q, pair[0], **layout), rotate(k, pair[1], **layout)


class OptionLayer(nn.Module):
    def __init__(
        self,
        hidden,
        ffn,
        heads,
        groups=None,
        *,
        decoder=False,
        parallel=False,
        after_norm=False,
        output_norm=False,
        cross_causal=False,
        **options,
    ):
        super().__init__()
        norm = {name: options.get(name, False) for name in ("rms", "zero_centered")}
        self.parallel, self.after_norm, self.output_norm = parallel, after_norm, output_norm
        self.self_attention = OptionAttention(
            hidden,
            heads,
            groups,
            input_layernorm=not output_norm,
            return_norm=after_norm and not output_norm,
            **options,
        )
        self.inter_attention = None
        if decoder:
            options = {**options, "causal": cross_causal}
            self.inter_attention = OptionAttention(
                hidden, heads, groups, input_layernorm=True, cross=True, return_norm=after_norm, **options
            )
        self.layernorm_mlp = PlainMLP(hidden, ffn, **norm, bias=options.get("bias", True), return_norm=after_norm)
        self.layernorm = OutputNorm(hidden, **norm) if output_norm else None

    def forward(self, x, encoder_output=None, rotary_pos_emb=None, visible=None, cross_visible=None):
        if self.parallel:
            return x + self.self_attention(x, None, rotary_pos_emb, visible) + self.layernorm_mlp(x)
        h = self._add(x, self.self_attention(x, None, rotary_pos_emb, visible))
        if self.inter_attention is not None:
            h = self._add(h, self.inter_attention(h, encoder_output, rotary_pos_emb, cross_visible))
        h = self._add(h, self.layernorm_mlp(h))
        return self.layernorm(h) if self.output_norm else h

    @staticmethod
    def _add(x, branch):
        branch, x = branch if isinstance(branch, tuple) else (branch, x)
        return x + branch


def check_options(module, twin, *inputs, ours, plain, tight, what="", rms_factor=2):
    """Outputs and every gradient of module(*inputs, **ours) against twin(*inputs, **plain), as check_against_twin."""
    parameter = next(module.parameters())
    dtype, device = parameter.dtype, parameter.device
    got = run(module, *inputs, **ours)
    near = run(twin_of(twin, module, dtype, device), *inputs, **plain)
    exact = run(twin_of(twin, module), *(wide(t) for t in inputs), **on_cpu(plain))
    assert sorted(got) == sorted(exact), f"{what}: {list(got)} against {list(exact)}"
    compare(got, near, exact, dtype, tight, what, rms_factor)
