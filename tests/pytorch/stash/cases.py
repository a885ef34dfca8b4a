# Helpers of the stash suites: counters, members of every kind, steps of layers with and without a stash, and originals
# that are overwritten once a stash has let them go, so that nothing passes by reading them.
import contextlib
import ctypes
from pathlib import Path

import torch
from support import assert_same_bits, randn

import transformer_engine
import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C
from transformer_engine.pytorch import saved as door
from transformer_engine.pytorch.stash import PagedStash
from transformer_engine.pytorch.stash.segments import bytes_of

GARBAGE = 0xA5
ROWS, WIDTH, LIVE = 24, 16, 7


def count(value, device, dtype=torch.int32):
    return torch.tensor([value], dtype=dtype, device=device)


def filled(rows, row_bytes, dtype, device, seed=0):
    """rows x row_bytes of random bits, some of them NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, generator=generator)
    return values.to(device).view(dtype)


def scribble(*tensors):
    """Overwrites the bytes without a change of versions."""
    for t in tensors:
        if t.numel():
            start, size = t.storage_offset() * t.element_size(), t.numel() * t.element_size()
            bytes_of(t, start, size).fill_(GARBAGE)


def same(results, expected, what=""):
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert (a is None) == (b is None), f"{what} result {i}"
        if a is not None:
            assert_same_bits(a, b, f"{what} result {i}")


@contextlib.contextmanager
def made(device, close=True, **options):
    """A stash with pages of 256 bytes, closed after the test."""
    options = {"page_bytes": 256, "device_pages": 4096, **options}
    stash = PagedStash(device=device, **options)
    try:
        yield stash
    finally:
        if close:
            stash.close()


def report(stash):
    return stash.verdict(wait=True).report


def pinned_bytes(owner="stash"):
    """The pinned host memory of an owner, as the engine counts it."""
    (path,) = Path(transformer_engine.__file__).parent.rglob("libtransformer_engine.so")
    counts = (ctypes.c_size_t * 4)()  # te_pinned_bytes
    assert ctypes.CDLL(str(path)).te_pinned_usage(owner.encode(), counts) == 0
    return counts[0]


class Originals:
    """Inside of it, memory that groups take is noted; overwrite() overwrites memory that they have released."""

    def __init__(self):
        self.noted, self.overwritten = {}, 0

    def __enter__(self):
        self.observed = door.observed(self._note)
        self.observed.__enter__()
        return self

    def __exit__(self, *_):
        self.observed.__exit__(None, None, None)

    def _note(self, tensor, saved):
        memory = getattr(saved, "memory", None)
        if isinstance(memory, _C.Stashed):
            storage = tensor.untyped_storage()
            _, memories = self.noted.setdefault(storage._cdata, (bytes_of(tensor, 0, storage.nbytes()), set()))
            memories.add(memory)

    def overwrite(self, *also):
        """The number of overwritten bytes: memory that was released and has no other owner, and `also`."""
        also, done = {t.untyped_storage()._cdata for t in also}, 0
        for key, (alias, memories) in self.noted.items():
            let_go = all(memory.tensor is None for memory in memories)
            if let_go and (key in also or _holders(alias.untyped_storage()) == _ONE):
                alias.fill_(GARBAGE)
                done += alias.numel()
        self.noted.clear()
        self.overwritten += done
        return done


def _holders(storage):
    return torch._C._storage_Use_Count(storage._cdata)


_probe = torch.zeros(4)
_ONE = _holders(_probe.untyped_storage())


class Layers(torch.nn.Module):
    """A stack whose layers are groups of a stash, if one is passed."""

    def __init__(self, *layers, scheduled=True, tail="zero", prepare=None):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.scheduled, self.tail, self.prepare = scheduled, tail, prepare

    def forward(self, x, counter, stash=None, names=None):
        for i, layer in enumerate(self.layers):
            if stash is None:
                x = self.run(layer, x, counter)
                continue
            x = stash.pre_schedule(x) if self.scheduled else x
            with stash.group(names[i] if names else i, counter, tail=self.tail):
                x = self.run(layer, x, counter)
            x = stash.post_schedule(x) if self.scheduled else x
        return x

    def run(self, layer, x, counter):
        return layer(x) if self.prepare is None else self.prepare(layer, x, counter)


def dead_rows_zero(x, live):
    x = x.clone()
    x[live:] = 0
    return x


def step(module, inputs, counters, stash=None, gradient=None, overwrite=True, order="fifo"):
    """Results and gradients of a step over microbatches, all in flight before the first backward; only live rows count
    for the loss. Memory that groups let go is overwritten in between, and its bytes are returned too."""
    module.zero_grad(set_to_none=True)
    given = [x.detach().clone().requires_grad_() for x in inputs]
    with Originals() as originals:
        outputs = [module(x, c, stash) for x, c in zip(given, counters, strict=True)]
        results = [y.detach().clone() for y in outputs]
        if overwrite and stash is not None:
            stash.step.free_leaving()
            originals.overwrite(*given)
        pairs = list(zip(outputs, counters, strict=True))
        for y, c in reversed(pairs) if order == "lifo" else pairs:
            g = torch.ones_like(y) if gradient is None else gradient(y)
            rows = torch.arange(len(y), device=y.device) < c
            y.backward(g * rows.view(-1, *(1,) * (y.dim() - 1)))
    grads = [x.grad[: int(c)] for x, c in zip(given, counters, strict=True)]
    results = [y[: int(c)] for y, c in zip(results, counters, strict=True)]
    return results + grads + [p.grad for p in module.parameters()], originals.overwritten


def layers_of(device, n=3, **how):
    return Layers(*(te.Linear(WIDTH, WIDTH, device=device) for _ in range(n)), **how)


def given(device, live=LIVE):
    return dead_rows_zero(randn(ROWS, WIDTH, device=device), live)


class Whole:
    """A step of a stack, after an error, gives the bits of a step without a stash."""

    def __init__(self, stash, device):
        self.stash, self.module, self.x, self.counter = stash, layers_of(device), given(device), count(LIVE, device)
        self.expected, _ = step(self.module, [self.x], [self.counter])

    def __call__(self, record=False):
        self.stash.reset(record=record)
        found, overwritten = step(self.module, [self.x], [self.counter], self.stash)
        same(found, self.expected)
        assert overwritten
        numbers = report(self.stash)
        assert numbers["flags"] == 0 and numbers["device_in_use"] == 0
