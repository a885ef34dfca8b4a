# Layers of the generated offload programs: modules of this library and of torch, and one that saves chosen tensors
# (views, memory that is saved twice, quantized and marked tensors), counts the bytes that may be offloaded, and checks
# the tensors in the backward.
import dataclasses

import torch
from quantized_cases import FORMATS
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from transformer_engine.pytorch import cpu_offload
from transformer_engine.pytorch.cpu_offload import layer as offload_layer

WIDTH, TOKENS = 32, 16
MARK = "_TE_do_not_offload"
KINDS = ("torch", "tanh", "linear", "mlp", "alias", "in place", "drops", "slices", "keeps", "keeps")
PLAIN = (
    "x",
    "x.T",
    "x[1:]",
    "buffer",
    "buffer.T",
    "buffer[3:5]",
    "bytes of it",
    "tiny",
    "a view of weights",
    "complex",
)
USAGES = {"both": (True, True), "rows": (True, False), "columns": (False, True)}
CHECKPOINTS = {
    "te": lambda f, x: te.checkpoint(f, x, use_reentrant=False),
    "te reentrant": lambda f, x: te.checkpoint(f, x, use_reentrant=True),
    "torch": lambda f, x: torch_checkpoint(f, x, use_reentrant=False),
    "torch reentrant": lambda f, x: torch_checkpoint(f, x, use_reentrant=True),
}


@dataclasses.dataclass
class Spec:
    """One layer: its kind, the checkpoint inside of it, the tensors that it saves ((name, mark) for kind "keeps")."""

    kind: str
    inside: str | None = None
    frozen: bool = False
    pieces: int = 1
    ready: bool = False
    mark: str = ""  # of its input
    kept: tuple = ()


def set_mark(t, how):
    if how == "call":
        te.mark_not_offload(t)
    elif how == "attribute":
        setattr(t, MARK, True)
    elif how == "part":
        setattr(parts_of(t)[-1], MARK, True)


def parts_of(t):
    """The plain tensors of a quantized tensor, or the tensor itself; the argument is unchanged."""
    if not hasattr(t, "prepare_for_saving"):
        return [t]
    return [part for part in te.prepare_for_saving(t.detach())[0] if part is not None]


def signature(t):
    """A number that depends on each element and its position."""
    t = t.dequantize() if hasattr(t, "dequantize") and hasattr(t, "prepare_for_saving") else t
    t = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).float().reshape(-1)
    return (torch.tanh(t) * torch.linspace(0.5, 1.5, t.numel(), device=t.device)).mean()


class Keeps(torch.autograd.Function):
    """x times a number computed from all tensors that it saves; marked ones must not have moved."""

    @staticmethod
    def forward(ctx, x, where, *kept):
        ctx.save_for_backward(*kept)
        ctx.where = where
        return x * (1 + 0.1 * sum(signature(t) for t in kept))

    @staticmethod
    def backward(ctx, gradient):
        kept = ctx.saved_tensors
        for t, where in zip(kept, ctx.where, strict=True):
            assert where is None or [part.data_ptr() for part in parts_of(t)] == where, "a marked tensor was moved"
        return gradient * (1 + 0.1 * sum(signature(t) for t in kept)), None, *(None for _ in kept)


class Layer(torch.nn.Module):
    def __init__(self, spec, device, recomputed=False):
        super().__init__()
        self.spec, self.device = spec, device
        self.recomputed = recomputed or spec.inside is not None  # its saved tensors are recomputed in the backward
        self.expected_bytes = None  # bytes saved last that may be offloaded; None: unknown
        options = {"device": device}
        if spec.kind == "mlp":
            self.inner = te.LayerNormMLP(WIDTH, 2 * WIDTH, activation="swiglu", **options)
        elif spec.kind == "linear":
            self.inner = te.Linear(WIDTH, WIDTH, **options)
        else:
            self.inner = torch.nn.Linear(WIDTH, 3 * WIDTH if spec.kind == "slices" else WIDTH, **options)
        self.requires_grad_(not spec.frozen)

    def forward(self, x):
        """The first part."""
        self.expected_bytes = None
        set_mark(x, self.spec.mark)
        if self.spec.ready:
            cpu_offload.start_offload(x, offload_base_tensor=True)
        return self.body(x) if self.spec.inside is None else CHECKPOINTS[self.spec.inside](self.body, x)

    def second(self, x):
        """The second part, if the layer has two."""
        return torch.sin(x) * 2

    def body(self, x):
        kind = self.spec.kind
        if kind == "keeps":
            return self.keeps(x)
        y = self.inner(x)
        if kind == "torch":
            y = x + torch.nn.functional.gelu(y)
        elif kind == "tanh":
            y = torch.tanh(y)
        elif kind == "alias":
            y = y * y.view(-1, WIDTH) + y.mT.mT * x.view_as(x)
        elif kind == "in place":
            y = torch.relu_(y.mul_(1.5)) + x
        elif kind == "drops":
            y = torch.nn.functional.dropout(y, 0.3) * x
        elif kind == "slices":
            q, k, v = y.chunk(3, -1)
            y = q * torch.sigmoid(k) + v
        return y

    def keeps(self, x):
        made = {"x": x.detach() if x.is_inference() else x, "buffer": torch.sin(x.detach()) * 2}
        buffer = made["buffer"]
        made |= {"x.T": x.T, "x[1:]": x[1:], "buffer.T": buffer.T, "buffer[3:5]": buffer[3:5]}
        made |= {"bytes of it": buffer.view(torch.uint8)[:, ::3], "tiny": buffer[0, :8].clone()}
        made |= {"a view of weights": self.inner.weight.view(-1), "complex": torch.complex(buffer, x.detach()).conj()}
        kept = []
        for name, mark in self.spec.kept:
            if name not in made:
                form, usage = name.split(":")
                quantizer = FORMATS[form](device=self.device)
                quantizer.set_usage(**dict(zip(("rowwise", "columnwise"), USAGES[usage], strict=True)))
                made[name] = quantizer(buffer * 1.0)
            set_mark(made[name], mark)
            kept.append(made[name])
        where = [
            [part.data_ptr() for part in parts_of(t)] if mark and name != "a view of weights" else None
            for t, (name, mark) in zip(kept, self.spec.kept, strict=True)
        ]
        if self.recomputed or torch.is_inference_mode_enabled():
            where = [None] * len(kept)
        elif x.requires_grad and torch.is_grad_enabled():
            self.expected_bytes = self.bytes_that_may_leave(kept)
        return Keeps.apply(x, where, *kept)

    def bytes_that_may_leave(self, kept):
        """Counts each storage once, if a tensor in it is large enough and none is marked."""
        found = {}
        for t in kept:
            parts = parts_of(t)
            marked = any(getattr(p, MARK, False) or getattr(p._base, MARK, False) for p in parts)
            marked = marked or getattr(t, MARK, False)
            for part in parts:
                if isinstance(part._base, torch.nn.Parameter):
                    continue
                storage = part.untyped_storage()
                entry = found.setdefault(storage.data_ptr(), [storage.nbytes(), False, False])
                entry[1] |= part.numel() >= offload_layer.MIN_ELEMENTS
                entry[2] |= marked
        return sum(size for size, large, marked in found.values() if large and not marked)
