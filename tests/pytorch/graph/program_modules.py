# The modules that the programs of programs.py run: this library's and torch's, in a wrapper that checkpoints,
# joins, raises on demand, or overrides __call__. No test is here.
import copy

import torch

import transformer_engine.pytorch as te

HIDDEN, FFN = 32, 48


class Tripped(Exception):
    """The exception of a module in a warm-up or a capture."""


class Wire:
    """Counts runs of modules, and raises in one of them. Copies share the counter."""

    left = 0

    def __deepcopy__(self, memo):
        return self

    def pull(self):
        self.left -= 1
        if self.left == 0:
            raise Tripped


class _Trip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wire):
        ctx.wire = wire
        wire.pull()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        ctx.wire.pull()
        return dx, None


class Wrapped(torch.nn.Module):
    def __init__(self, inner, layer, reentrant, wire):
        super().__init__()
        self.inner, self.layer, self.reentrant, self.wire = inner, layer, reentrant, wire

    def forward(self, x, other=None, **kwargs):
        if self.layer.inside:
            y = te.checkpoint(self.inner, x, use_reentrant=self.reentrant, **kwargs)
        else:
            y = self.inner(x, **kwargs)
        if other is not None:
            y = y + torch.sin(other)
        y = _Trip.apply(y, self.wire)
        return (y, torch.cos(y)) if self.layer.splits else y


class CallOverride(Wrapped):
    def __call__(self, *args, **kwargs):
        y = super().__call__(*args, **kwargs)
        return (y[0] * 0.5, y[1]) if self.layer.splits else y * 0.5


class Stack(torch.nn.Module):
    """Two modules that run in another order than they are registered in."""

    def __init__(self, options):
        super().__init__()
        self.second, self.first = te.Linear(HIDDEN, HIDDEN, **options), te.Linear(HIDDEN, HIDDEN, **options)

    def forward(self, x, **kwargs):
        return self.second(self.first(x, **kwargs), **kwargs)


def _inner(layer, dtype, device):
    options = {"device": device, "params_dtype": dtype}
    if layer.family in ("plain", "dropout"):
        on = {"device": device, "dtype": dtype}
        first, second = torch.nn.Linear(HIDDEN, FFN, **on), torch.nn.Linear(FFN, HIDDEN, **on)
        drop = torch.nn.Dropout(0.3) if layer.family == "dropout" else torch.nn.Identity()
        return torch.nn.Sequential(first, drop, torch.nn.GELU(), second)
    options |= {"fuse_wgrad_accumulation": layer.fused, "delay_wgrad_compute": layer.delayed}
    if layer.family == "linear":
        return te.Linear(HIDDEN, HIDDEN, **options)
    if layer.family == "split_linear":
        return te.Linear(HIDDEN, HIDDEN, parameters_split=["a", "b"], **options)
    if layer.family == "norm_linear":
        return te.LayerNormLinear(HIDDEN, HIDDEN, normalization="RMSNorm", **options)
    if layer.family == "stack":
        return Stack(options)
    checkpoint = layer.family == "recomputed_mlp"
    return te.LayerNormMLP(HIDDEN, FFN, activation="geglu" if checkpoint else "relu", checkpoint=checkpoint, **options)


def build(program, device):
    """The modules of all chunks, chunk by chunk."""
    torch.manual_seed(program.seed)
    wire, dtype = Wire(), torch.float32 if program.recipe is None else torch.bfloat16
    modules = torch.nn.ModuleList()
    for layer in (layer for chunk in program.chunks for layer in chunk):
        module = (CallOverride if layer.overrides_call else Wrapped)(
            _inner(layer, dtype, device), layer, program.reentrant, wire
        )
        for p in module.parameters():
            with torch.no_grad():
                p.copy_(torch.randn(p.shape).to(p) * 0.2)
            if layer.fused and p.dim() == 2:
                p.main_grad = torch.full_like(p, 0.5, dtype=torch.float32)
                if program.protocol:
                    p.grad_added_to_main_grad = False
            if layer.marked:
                p.skip_backward_post_hook = True
            p.requires_grad_(not layer.frozen)
        modules.append(module)
    return modules


def twin(modules):
    other = copy.deepcopy(modules)
    for p, q in zip(modules.parameters(), other.parameters()):
        for name in ("grad", "main_grad", "grad_added_to_main_grad", "skip_backward_post_hook"):
            if hasattr(p, name):
                setattr(q, name, copy.deepcopy(getattr(p, name)))
    return other
