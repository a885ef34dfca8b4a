# Plain-PyTorch twins of the fused modules: the same parameter names and formulas in torch's own operations, nothing of
# the library. In float64 on the CPU they are the oracle; in a module's own dtype they say how exact one can expect it
# to be. `check_against_twin` compares a module with both.
import copy

import torch
import torch.nn.functional as tnf
from activation_oracles import GATED, ORACLE
from support import UNIT_ROUNDOFF, wide
from torch import nn

# torch's own, which round once; the other kinds round as their oracle is written.
TORCHS_OWN = {
    "gelu": lambda x: tnf.gelu(x, approximate="tanh"),
    "geglu": lambda x: tnf.gelu(x, approximate="tanh"),
    "silu": tnf.silu,
    "swiglu": tnf.silu,
}


def activate(x, kind, params=None):
    parts = x.chunk(2, dim=-1) if kind in GATED else (x,)
    if kind == "clamped_swiglu":
        p = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0, **(params or {})}
        a, b = parts
        a = a.clamp(max=p["limit"])
        return a * torch.sigmoid(p["alpha"] * a) * (b.clamp(-p["limit"], p["limit"]) + p["glu_linear_offset"])
    if kind in TORCHS_OWN:
        y = TORCHS_OWN[kind](parts[0])
        return y * parts[1] if kind in GATED else y
    return ORACLE[kind](*parts, torch.sigmoid)


def angles(seq, dim, *, interleaved=False, base=10000.0, stretch=1.0):
    """float32 [seq, 1, 1, dim], as RotaryPositionEmbedding gives them."""
    row = torch.arange(seq)[:, None] * stretch / base ** (torch.arange(0, dim, 2) / dim)
    row = row.repeat_interleave(2, dim=-1) if interleaved else torch.cat((row, row), dim=-1)
    return row[:, None, None, :].float()


def rotate(x, freqs, *, batch_first, interleaved):
    """x [s, b, h, d] (or b first); freqs [s, 1, 1, r], r <= d. In float32 at least, rounded to x's dtype."""
    work = torch.promote_types(x.dtype, torch.float32)
    freqs = freqs.to(work)[: x.shape[1 if batch_first else 0]]
    if batch_first:
        freqs = freqs.transpose(0, 1)
    part, rest = x[..., : freqs.shape[-1]].to(work), x[..., freqs.shape[-1] :]
    if interleaved:
        other = torch.stack((-part[..., 1::2], part[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = part.chunk(2, dim=-1)
        other = torch.cat((-second, first), dim=-1)
    return torch.cat(((part * freqs.cos() + other * freqs.sin()).to(x.dtype), rest), dim=-1)


def attend_masked(q, k, v, visible, bias, scale):
    """visible: True where a query sees a key; a query that sees none gives zeros. In float64 written out."""
    unseen = ~visible.any(-1, keepdim=True)
    if q.dtype == torch.float64:
        scores = q @ k.mT * scale + (0.0 if bias is None else bias)
        top = scores.detach().masked_fill(~visible, -torch.inf).amax(-1, keepdim=True).masked_fill(unseen, 0.0)
        weights = (scores - top).clamp(max=1.0).exp() * visible
        return weights / weights.sum(-1, keepdim=True).masked_fill(unseen, 1.0) @ v
    mask = visible | unseen
    mask = mask if bias is None else bias.masked_fill(~mask, -torch.inf)
    return tnf.scaled_dot_product_attention(q, k, v, mask, scale=scale).masked_fill(unseen, 0.0)


def attend(query, key, value, *, causal, batch_first, scale=None, visible=None, bias=None):
    """query [s, b, h, d], key and value with h / n heads. In float64 written out, else torch's own attention.
    With `visible` [b, h, s, s_kv] (what each query sees; causal is not read) and `bias`, added to the scaled scores."""
    to_bhsd = (0, 2, 1, 3) if batch_first else (1, 2, 0, 3)
    repeats = query.shape[2] // key.shape[2]
    q, k, v = (t.permute(to_bhsd) for t in (query, key, value))
    k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
    if visible is not None:
        out = attend_masked(q, k, v, visible, bias, q.shape[-1] ** -0.5 if scale is None else scale)
    elif query.dtype == torch.float64:
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        out = scores.softmax(-1) @ v
    else:
        out = tnf.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return out.permute((0, 2, 1, 3) if batch_first else (2, 0, 1, 3)).flatten(2)


class Parameters(nn.Module):
    """Holds parameters by name; the values come from the fused module through `twin_of`."""

    def declare(self, **shapes):
        for name, shape in shapes.items():
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.zeros(shape)))


class PlainNorm(Parameters):
    def declare_norm(self, hidden, *, rms, zero_centered, eps=1e-5):
        self.rms, self.zero_centered, self.eps = rms, zero_centered, eps
        self.declare(layer_norm_weight=(hidden,), layer_norm_bias=None if rms else (hidden,))

    def norm(self, x):
        gamma = 1 + self.layer_norm_weight if self.zero_centered else self.layer_norm_weight
        if self.rms:
            return tnf.rms_norm(x, gamma.shape, gamma, self.eps)
        return tnf.layer_norm(x, gamma.shape, gamma, self.layer_norm_bias, self.eps)


class PlainLinear(Parameters):
    """y = x [w of each split]^T + [b of each split]."""

    def __init__(self, in_features, splits, *, bias=True):
        super().__init__()
        self.declare_linear(in_features, splits, bias=bias)

    def declare_linear(self, in_features, splits, *, bias):
        self.splits = splits if isinstance(splits, dict) else {"": splits}
        self.declare(**{f"{name}weight": (rows, in_features) for name, rows in self.splits.items()})
        self.declare(**{f"{name}bias": (rows,) if bias else None for name, rows in self.splits.items()})

    def joined_bias(self):
        parts = [getattr(self, f"{name}bias") for name in self.splits]
        return None if parts[0] is None else torch.cat(parts)

    def product(self, x, *, add_bias=True):
        weight = torch.cat([getattr(self, f"{name}weight") for name in self.splits])
        return tnf.linear(x, weight, self.joined_bias() if add_bias else None)

    def forward(self, x):
        return self.product(x)


class PlainLayerNormLinear(PlainNorm, PlainLinear):
    """Returns what the fused module returns: y, the bias with return_bias, the norm's output with return_norm."""

    def __init__(
        self, in_features, splits, *, rms=False, zero_centered=False, bias=True, return_bias=False, return_norm=False
    ):
        nn.Module.__init__(self)
        self.declare_norm(in_features, rms=rms, zero_centered=zero_centered)
        self.declare_linear(in_features, splits, bias=bias)
        self.return_bias, self.return_norm = return_bias, return_norm

    def forward(self, x):
        normed = self.norm(x)
        results = [self.product(normed, add_bias=not self.return_bias)]
        results += [self.joined_bias()] if self.return_bias else []
        results += [normed] if self.return_norm else []
        return tuple(results) if len(results) > 1 else results[0]


class PlainMLP(PlainNorm):
    """As LayerNormMLP; with a residual the sum is returned last."""

    def __init__(
        self,
        hidden,
        ffn,
        *,
        activation="gelu",
        params=None,
        rms=False,
        zero_centered=False,
        bias=True,
        return_bias=False,
        return_norm=False,
    ):
        super().__init__()
        self.activation, self.params = activation, params
        self.return_bias, self.return_norm = return_bias, return_norm
        self.declare_norm(hidden, rms=rms, zero_centered=zero_centered)
        rows = ffn * (2 if activation in GATED else 1)
        self.declare(fc1_weight=(rows, hidden), fc1_bias=(rows,) if bias else None)
        self.declare(fc2_weight=(hidden, ffn), fc2_bias=(hidden,) if bias else None)

    def forward(self, x, residual=None):
        h = x if residual is None else x + residual
        normed = self.norm(h)
        inner = activate(tnf.linear(normed, self.fc1_weight, self.fc1_bias), self.activation, self.params)
        results = [tnf.linear(inner, self.fc2_weight, None if self.return_bias else self.fc2_bias)]
        results += [self.fc2_bias] if self.return_bias else []
        results += [normed] if self.return_norm else []
        results += [] if residual is None else [h]
        return tuple(results) if len(results) > 1 else results[0]


class PlainAttention(nn.Module):
    """As MultiheadAttention; `freqs` is None, the angles, or a pair of them."""

    def __init__(
        self,
        hidden,
        heads,
        groups=None,
        *,
        input_layernorm=False,
        causal=True,
        batch_first=False,
        interleaved=False,
        bias=True,
        rms=False,
        zero_centered=False,
        head_dim=None,
        return_bias=False,
        return_norm=False,
    ):
        super().__init__()
        groups, self.head_dim = groups or heads, head_dim or hidden // heads
        self.options = {"causal": causal, "batch_first": batch_first}
        self.interleaved, self.return_bias, self.return_norm = interleaved, return_bias, return_norm
        self.widths = [heads * self.head_dim, groups * self.head_dim, groups * self.head_dim]
        splits = dict(zip(("query_", "key_", "value_"), self.widths, strict=True))
        if input_layernorm:
            self.layernorm_qkv = PlainLayerNormLinear(
                hidden, splits, rms=rms, zero_centered=zero_centered, bias=bias, return_norm=True
            )
        else:
            self.qkv = PlainLinear(hidden, splits, bias=bias)
        self.proj = PlainLinear(heads * self.head_dim, hidden, bias=bias)

    def forward(self, x, rotary_pos_emb=None):
        qkv, normed = self.layernorm_qkv(x) if hasattr(self, "layernorm_qkv") else (self.qkv(x), None)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in qkv.split(self.widths, dim=-1))
        if rotary_pos_emb is not None:
            pair = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            layout = {"batch_first": self.options["batch_first"], "interleaved": self.interleaved}
            q, k = (rotate(t, freqs, **layout) for t, freqs in zip((q, k), pair, strict=True))
        results = [self.proj.product(attend(q, k, v, **self.options), add_bias=not self.return_bias)]
        results += [self.proj.joined_bias()] if self.return_bias else []
        results += [normed] if self.return_norm else []
        return tuple(results) if len(results) > 1 else results[0]


class PlainLayer(nn.Module):
    """As TransformerLayer, without dropout."""

    def __init__(self, hidden, ffn, heads, groups=None, *, activation="gelu", params=None, **options):
        super().__init__()
        norm = {name: options[name] for name in ("rms", "zero_centered", "bias") if name in options}
        self.self_attention = PlainAttention(hidden, heads, groups, input_layernorm=True, **options)
        self.layernorm_mlp = PlainMLP(hidden, ffn, activation=activation, params=params, **norm)

    def forward(self, x, rotary_pos_emb=None):
        h = x + self.self_attention(x, rotary_pos_emb=rotary_pos_emb)
        return h + self.layernorm_mlp(h)


# ---- comparing ----


def randomize(module):
    """Parameters that hide nothing: no zero bias, no gamma of ones, weights that keep activations near 1."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape) / (p.shape[-1] ** 0.5 if p.dim() > 1 else 3.0)
            owner = module.get_submodule(name.rpartition(".")[0])
            around_one = name.endswith("layer_norm_weight") and not owner.zero_centered_gamma
            p.copy_(noise + (1.0 if around_one else 0.0))
    return module


def twin_of(twin, module, dtype=torch.float64, device="cpu"):
    """The twin with the module's parameter values; strict, so the names have to be the same."""
    twin = copy.deepcopy(twin).to(device=device, dtype=dtype)
    twin.load_state_dict({k: v for k, v in module.state_dict().items() if not k.endswith("_extra_state")})
    return twin


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def run(module, *inputs, at=None, call=None, **kwargs):
    """{name: tensor} of the outputs and of every gradient of module(*inputs, **kwargs), or of call(module, *inputs).
    at: indices of the outputs where gradients arrive (all).
    The same cotangents, representable in bfloat16, arrive at the same outputs of every module that is run."""
    inputs = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    module.zero_grad()
    outputs = as_tuple(call(module, *inputs) if call else module(*inputs, **kwargs))
    results = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(t.shape, generator=generator).bfloat16().to(t) for t in outputs]
    chosen = [i for i, t in enumerate(outputs) if t.requires_grad and (at is None or i in at)]
    torch.autograd.backward([outputs[i] for i in chosen], [cotangents[i] for i in chosen])
    results.update({f"gradient of input {i}": t.grad for i, t in enumerate(inputs)})
    results.update({f"gradient of {name}": p.grad for name, p in module.named_parameters()})
    return results


def check_against_twin(module, twin, *inputs, tight, what="", **kwargs):
    """Every output and gradient of `module` against its twin.

    The worst-case bound of a composite is too large, so plain torch in the same dtype gives the bound: the error
    against the float64 twin is at most twice the plain twin's, as root mean square plus one rounding of the tensor's,
    and at its largest (one draw of few elements) four times plus two roundings of the largest element. In float32 the
    error must in addition stay below `tight` unit roundoffs of the largest element: the caller's count of
    (products in a row) * (terms of the longest sum).
    A gradient that is zero by symmetry is held against the largest other gradient.
    """
    parameter = next(module.parameters())
    dtype, device = parameter.dtype, parameter.device
    got = run(module, *inputs, **kwargs)
    near = run(twin_of(twin, module, dtype, device), *inputs, **kwargs)
    exact = run(twin_of(twin, module), *(wide(t) for t in inputs), **on_cpu(kwargs))
    assert list(got) == list(exact), f"{what}: {list(got)} against {list(exact)}"
    compare(got, near, exact, dtype, tight, what)


def rms(t):
    return t.square().mean().sqrt()


def on_cpu(value):
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, tuple):
        return tuple(on_cpu(v) for v in value)
    return {k: on_cpu(v) for k, v in value.items()} if isinstance(value, dict) else value


def compare(got, near, exact, dtype, tight, what="", rms_factor=2):
    u = UNIT_ROUNDOFF[dtype]
    largest = max(wide(t).abs().max() for n, t in exact.items() if t is not None and t.numel() and "gradient" in n)
    for name, reference in exact.items():
        assert (got[name] is None) == (reference is None), f"{what} {name}: {got[name]}, wanted {reference}"
        if reference is None or reference.numel() == 0:
            continue
        assert got[name].shape == reference.shape, f"{what} {name}: shape {got[name].shape}"
        assert got[name].dtype == near[name].dtype, f"{what} {name}: dtype {got[name].dtype}"
        reference = wide(reference)
        top = reference.abs().max()
        degenerate = top < 1e-12 * largest
        if degenerate:
            top = largest
        error, yardstick = (wide(r[name]) - reference for r in (got, near))
        measures = [("rms", rms, rms_factor, 1), ("largest", lambda t: t.abs().max(), 4, 2)]
        few = reference.numel() < 16  # their root mean square is as much one draw as their largest is
        for kind, measure, times, roundings in measures[few:]:
            e, y = measure(error), measure(yardstick)
            limit = times * y + roundings * u * (top if degenerate else measure(reference))
            assert e <= limit, f"{what} {name}: {kind} error {e:.3g}, wanted {limit:.3g}; plain torch's is {y:.3g}"
        if dtype == torch.float32:
            limit = tight * u * top
            assert error.abs().max() <= limit, (
                f"{what} {name}: {error.abs().max():.3g} from float64, wanted {limit:.3g}"
            )
