# Checks that the suites of all fused modules share: signatures as the API lists them, refusals, saved tensors, and a
# replacement for the tracker of random states. No formula is here.
import contextlib
import inspect

import torch
from support import refused, saved_tensors


def parameters_of(text):
    """[(name, default)] of a parameter list written as the API documents it."""
    signature = inspect.signature(eval(f"lambda {' '.join(text.split())}: None"))
    return [(p.name, p.default) for p in signature.parameters.values()]


def check_signature(cls, init, forward, *, ours_init=(), ours=()):
    """__init__ and forward have these names and defaults in this order; `ours_init` and `ours` are their keyword-only
    names beyond them. device's default is None here: CUDA where there is one, else the CPU."""
    for function, text, mine in ((cls.__init__, init, ours_init), (cls.forward, forward, ours)):
        signature = inspect.signature(function)
        found = [p for p in signature.parameters.values() if p.name != "self"]
        beyond = [p.name for p in found if p.kind is p.KEYWORD_ONLY]
        assert beyond == list(mine), f"keyword-only: {beyond}"
        got = [(p.name, p.default) for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert len(got) + len(beyond) == len(found), "no *args, no **kwargs: clients inspect the signature"
        assert got == [(name, None if name == "device" else default) for name, default in parameters_of(text)]


def refusals(cls, positional, arguments):
    """Each argument by itself raises NotImplementedError naming the class and the argument."""
    for name, value in arguments.items():
        with refused(NotImplementedError, cls.__name__, f"'{name}'", "not available in this version"):
            cls(*positional, **{name: value})


def saved_shapes(call):
    """[(shape, dtype)] of the tensors that the graph of call() keeps, each storage once; empty tensors do not count."""
    with saved_tensors() as kept:
        result = call()
    seen = {(t.data_ptr(), tuple(t.shape)): t for t in kept if t.numel()}
    del result
    return sorted(((tuple(t.shape), t.dtype) for t in seen.values()), key=str)


class Tracker:
    """A tracker of random states with the API's methods: fork() runs the block on a generator of its own."""

    def __init__(self, seed=99):
        self.forks = []
        self.state = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        self.forks.append(name)
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(outside)

    def get_states(self):
        return {"model-parallel-rng": self.state.clone()}

    def set_states(self, states):
        self.state = states["model-parallel-rng"].clone()
