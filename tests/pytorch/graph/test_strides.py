# Tensors whose elements share memory, expanded ones above all: refused as samples at once, whatever their size, and
# right as results and gradients.
import random

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph.memory import buffers

OP = "make_graphed_callables"


@pytest.mark.parametrize("where", ["sample_args", "sample_kwargs"])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2**19, 2**19), (0, 0)), ((2**19, 2**19), (0, 1)), ((2**19, 2**19), (1, 1)), ((1, 2**19, 2**19), (7, 1, 1))],
    ids=["a number", "a row", "windows", "a batch of windows"],
)
def test_samples_that_share_memory_are_refused_at_once(device, where, shape, strides):
    """A table of their elements would exceed any memory."""
    sample = torch.zeros(2**20, device=device).as_strided(shape, strides)
    positional = where == "sample_args"
    with refused(ValueError, OP, "sample argument", f"strides {list(strides)}", "contiguous"):
        te.make_graphed_callables(
            lambda x, mask=None: x * 2,
            (torch.ones(2, device=device), *([sample] if positional else [])),
            sample_kwargs={} if positional else {"mask": sample},
        )


def test_internal_overlap_against_a_table_of_all_elements():
    generator = random.Random(1)
    memory, found = torch.arange(700.0), {True: 0, False: 0}
    for _ in range(3000):
        rank = generator.randint(0, 4)
        shape = [generator.randint(0, 5) if generator.random() < 0.05 else generator.randint(1, 5) for _ in range(rank)]
        strides = [generator.randint(0, 9) if generator.random() < 0.8 else generator.randint(1, 40) for _ in shape]
        t = memory.as_strided(shape, strides)
        places = t.flatten().tolist()
        want = len(set(places)) < len(places)
        assert buffers.has_internal_overlap(t) is want, (shape, strides)
        found[want] += 1
    assert min(found.values()) > 200, found


def expanded(x):
    return x.sum(0, keepdim=True).expand(4, 8)


def windows(x):
    return x.flatten().unfold(0, 4, 1)


def expanded_beside(x):
    return x * 2, x.sum().expand(3), x.detach()[:1].expand(4, 8)


def loss(x):  # its gradient is one number, expanded
    return x.sum().view(1)


@pytest.mark.parametrize("function", [expanded, windows, expanded_beside, loss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("reuse", [False, True], ids=["own", "reuse"])
def test_results_and_gradients_that_share_memory(device, function, reuse):
    """Each element of a result may get a different gradient."""

    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    graphed = te.make_graphed_callables(
        (Module(),),
        tuple((torch.zeros(4, 8, device=device).requires_grad_(),) for _ in range(2)),
        _order=[1, -1, 1, -1],
        _reuse_graph_input_output_buffers=reuse,
    )
    for call in (*graphed, *graphed):
        x = torch.randn(4, 8, device=device).requires_grad_()
        twin = x.detach().clone().requires_grad_()
        both = [r if isinstance(r, tuple) else (r,) for r in (call(x), function(twin))]
        for got, wanted in zip(*both):
            assert_same_bits(got, wanted)
            assert got.stride() == wanted.stride()
        grads = [torch.randn(t.shape, device=device) for t in both[1] if t.requires_grad]
        for results in both:
            torch.autograd.backward([t for t in results if t.requires_grad], grads)
        assert_same_bits(x.grad, twin.grad)
