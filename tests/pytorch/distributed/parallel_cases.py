# Modules divided over the ranks of a group beside the same module whole: what each rank should have of its parameters,
# tokens and gradients. No test and no process group is made here.
from contextlib import nullcontext

import torch

import transformer_engine.pytorch as te

HIDDEN, WIDE = 32, 48


def part(whole, rank, ranks, dim, pieces=1):
    """A rank's part along `dim`, of each of `pieces` equal pieces, or of pieces of these sizes."""
    pieces = whole.chunk(pieces, dim) if isinstance(pieces, int) else whole.split(pieces, dim)
    return torch.cat([piece.chunk(ranks, dim)[rank] for piece in pieces], dim).contiguous()


def parameter_part(name, whole, parameter, rank, ranks, pieces):
    """The part of a parameter that this rank holds, by the marks on the parameter."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    return part(whole, rank, ranks, parameter.partition_dim, pieces.get(name, 1))


def collectives(work):
    """Names of the collectives in which work() sends tensors, without those by which ranks agree on the CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        work()
    events = profile.profiler.kineto_results.events()
    return sorted(e.name() for e in events if e.name().startswith("c10d::") and "long int" not in e.dtypes())


class Twins:
    """The module whole and divided, of equal values. pieces: parameters that are divided piece by piece.

    inputs, outputs: along which dimension the rank has a part of them (None: it has all)."""

    def __init__(self, make, group, rank, *, inputs, outputs, pieces=None, columns=None, **options):
        self.columns = columns  # of the output, each divided by itself
        self.group, self.rank, self.ranks = group, rank, group.size()
        self.inputs, self.outputs, self.pieces = inputs, outputs, pieces or {}
        torch.manual_seed(5)
        self.whole = make()
        with torch.no_grad():
            for parameter in self.whole.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        self.divided = make(tp_group=group, **options)
        with torch.no_grad():
            for name, parameter in self.divided.named_parameters():
                parameter.copy_(self.of(name, dict(self.whole.named_parameters())[name]))

    def of(self, name, whole):
        parameter = dict(self.divided.named_parameters())[name]
        return parameter_part(name, whole, parameter, self.rank, self.ranks, self.pieces)

    def tokens(self, t, dim):
        return t if dim is None else t.chunk(self.ranks, dim)[self.rank].contiguous()

    def results(self, t):
        if self.columns is None or self.outputs != -1:
            return self.tokens(t, self.outputs)
        return torch.cat([self.tokens(piece, -1) for piece in t.split(self.columns, -1)], -1)

    def compare(self, x, dy, tolerance, around=None, **call):
        """The differences between the two, as words; empty if all is equal."""
        around = around or nullcontext
        with around():
            y = self.whole(xw := x.clone().requires_grad_(), **call)
        y.backward(dy)
        xd = self.tokens(x, self.inputs).clone().requires_grad_()
        with around():
            yd = self.divided(xd, **call)
        yd.backward(self.results(dy))
        if self.divided.need_backward_dw():
            self.whole.backward_dw()
            self.divided.backward_dw()
        te.distributed.allreduce_sequence_parallel_grads(self.divided, self.group)
        found = {"out": (yd, self.results(y)), "dx": (xd.grad, self.tokens(xw.grad, self.inputs))}
        whole = dict(self.whole.named_parameters())
        for name, parameter in self.divided.named_parameters():
            for attribute in ("grad", "main_grad"):
                got = getattr(parameter, attribute, None)
                if got is not None:
                    found[f"{name}.{attribute}"] = (got, self.of(name, getattr(whole[name], attribute)))
        wrong = []
        for name, (got, wanted) in found.items():
            try:
                if isinstance(tolerance, float):  # of the whole tensor
                    error = (got - wanted).norm() / wanted.norm().clamp_min(1e-9)
                    assert got.shape == wanted.shape and error <= tolerance, f"relative error {error:.3f}"
                else:
                    torch.testing.assert_close(got.detach(), wanted.detach(), **tolerance)
            except AssertionError as error:
                wrong.append(f"{name}: {error}")
        return wrong, {name: got.detach().clone() for name, (got, _) in found.items()}
