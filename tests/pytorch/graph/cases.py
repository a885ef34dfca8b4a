# Shared by the tests of captured callables: a module beside its eager twin, steps of both, and the comparison of
# everything that a step changes. No test is here.
import copy

import torch
from support import assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph.backend.cpu import RecordedEvent, RecordedStream

HIDDEN, FFN, HEADS = 32, 48, 4
TOKENS = (6, 2)


def linear(**options):
    return te.Linear(HIDDEN, HIDDEN, **options)


def split_linear(**options):
    return te.Linear(HIDDEN, HIDDEN, parameters_split=["a", "b"], **options)


def norm_linear(**options):
    return te.LayerNormLinear(HIDDEN, HIDDEN, normalization="RMSNorm", **options)


def mlp(**options):
    return te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", normalization="RMSNorm", **options)


def recomputed_mlp(**options):
    return te.LayerNormMLP(HIDDEN, FFN, activation="geglu", checkpoint=True, **options)


def layer(**options):
    return te.TransformerLayer(HIDDEN, FFN, HEADS, fuse_qkv_params=True, **{"hidden_dropout": 0.0, **options})


def dropout_layer(**options):
    return layer(hidden_dropout=0.2, attention_dropout=0.0, **options)


def plain(*, device, params_dtype, **_):
    on = {"device": device, "dtype": params_dtype}
    return torch.nn.Sequential(
        torch.nn.Linear(HIDDEN, FFN, **on), torch.nn.Dropout(0.3), torch.nn.GELU(), torch.nn.Linear(FFN, HIDDEN, **on)
    )


class Records(torch.autograd.Function):
    """The identity, whose backward records an event."""

    @staticmethod
    def forward(ctx, x, event):
        ctx.event = event
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        ctx.event.record()
        return dx, None


class Recording(torch.nn.Module):
    """A module whose forward records an event after its result and, by default, whose backward records it after the
    gradient of its input."""

    def __init__(self, inner, device, *, backward=True):
        super().__init__()
        self.inner, self.event = inner, event_on(device)
        self.event_behind = self.event if backward else None

    def forward(self, x, **kwargs):
        y = self.inner(x if self.event_behind is None else Records.apply(x, self.event_behind), **kwargs)
        self.event.record()
        return y


def event_on(device):
    return torch.cuda.Event(external=True) if device == "cuda" else RecordedEvent()


def stream_on(device):
    return torch.cuda.Stream() if device == "cuda" else RecordedStream("graph")


FAMILIES = [linear, split_linear, norm_linear, mlp, recomputed_mlp, layer, dropout_layer, plain]
DELAYING = [linear, split_linear, norm_linear, mlp, recomputed_mlp]


def build(family, device, dtype=torch.float32, **options):
    module = family(device=device, params_dtype=dtype, **options)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape).to(p) * 0.1)
    return module


def twins(family, device, dtype=torch.float32, **options):
    """A module to capture, and an equal one that stays eager."""
    module = build(family, device, dtype, **options)
    return module, copy.deepcopy(module)


def tokens(device, dtype=torch.float32, *, grad=False):
    return randn(*TOKENS, HIDDEN, dtype=dtype, device=device, requires_grad=grad)


def capture(module, device, dtype=torch.float32, **options):
    return te.make_graphed_callables(module, (tokens(device, dtype, grad=True),), **options)


def leaves_of(result):
    return list(result) if isinstance(result, tuple) else [result]


def step(module, x, seed, *, call=None, **kwargs):
    """One forward and backward from that seed; returns results, the input's gradient, .grad and main_grad."""
    torch.manual_seed(seed)
    x = x.detach().clone().requires_grad_()
    outputs = leaves_of((call or module)(x, **kwargs))
    torch.autograd.backward(outputs, [torch.sin(o.detach().float() * 7).to(o) for o in outputs])
    return left_by(module) | {"x.grad": x.grad} | {f"y{i}": o.detach().clone() for i, o in enumerate(outputs)}


def left_by(module):
    left = {}
    for name, p in module.named_parameters():
        left[f"{name}.grad"] = None if p.grad is None else p.grad.clone()
        left[f"{name}.main_grad"] = p.main_grad.clone() if hasattr(p, "main_grad") else None
    return left


def assert_same_step(got, want, what=""):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name] is None) == (tensor is None), f"{what} {name}: {got[name]}, wanted {tensor}"
        if tensor is not None:
            assert_same_bits(got[name], tensor, f"{what} {name}")
