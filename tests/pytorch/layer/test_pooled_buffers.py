# Pooled buffers below unchanged layers (tests/layer/borrowed.cpp; one process): a gathered tensor returns to the pool
# with its call, and a use that would outlive the call is refused. "shared" is the mutant kept as a test: one buffer for
# all layers, without the pool. By hand: a SaveContext, a node or weight_gradients() (csrc/layer/backward.cpp) that lets
# such a tensor pass, a first slot that is taken without a look at `pooled` (comm_buffer_pool.cpp), turn these red.
import contextlib

import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C

from .policies import policy

LAYERS, MICROBATCHES = 3, 2


@pytest.fixture(autouse=True)
def filled_with_nan():
    _C.release_comm_buffers()
    before = _C.poison_comm_buffers(True)
    yield
    _C.poison_comm_buffers(before)


@contextlib.contextmanager
def borrowed(mode):
    policy("borrowed").install(mode)
    try:
        yield
    finally:
        policy("borrowed").remove()


def leased():
    return _C.comm_buffer_usage("tests")[2]


def stack(device):
    torch.manual_seed(1)
    return torch.nn.Sequential(*(te.Linear(32, 32, device=device) for _ in range(LAYERS)))


def interleaved(module, xs):
    """Layer by layer, one microbatch after the other; the backwards in reverse."""
    module.zero_grad()
    leaves = [x.clone().requires_grad_() for x in xs]
    results = list(leaves)
    for layer in module:
        results = [layer(x) for x in results]
    for y in reversed(results):
        y.square().sum().backward()
    return results, [leaf.grad for leaf in leaves], [p.grad.clone() for p in module.parameters()]


def test_stacked_layers(device):
    module = stack(device)
    xs = [randn(8, 32, device=device) for _ in range(MICROBATCHES)]
    plain = interleaved(module, xs)
    with borrowed("again"):
        again = interleaved(module, xs)
    for one, other in zip(again, plain, strict=True):
        for a, b in zip(one, other, strict=True):
            assert_same_bits(a, b)
    assert leased() == 0 and _C.comm_buffer_usage("tests")[1] == 1
    with borrowed("shared"):  # outputs are right, weight gradients wrong, and no error is raised
        outputs, _, gradients = interleaved(module, xs)
    for a, b in zip(outputs, plain[0], strict=True):
        assert_same_bits(a, b)
    assert not torch.allclose(gradients[0], plain[2][0], rtol=0.1)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("kept", ("linear: ", "gathered input")),
        ("returned", ("linear: an output",)),
        ("stored", ("weight gradient: ",)),
    ],
)
def test_uses_that_outlive_the_call_are_refused(mode, words, device):
    module = te.Linear(32, 32, device=device, fuse_wgrad_accumulation=mode == "stored")
    if mode == "stored":
        module.weight.main_grad = torch.zeros(32, 32, device=device)
    x = randn(8, 32, device=device)
    with borrowed(mode), refused(RuntimeError, *words, "pooled", "clone()"):
        module(x.requires_grad_()).sum().backward()
    assert leased() == 0
    y = module(x)
    assert y.isfinite().all() and not _C.is_pooled(y)


def test_what_a_call_raises_gives_back(device):
    module = te.Linear(32, 32, device=device)
    x = randn(8, 32, device=device).requires_grad_()

    def fail(t):
        raise LookupError("in the middle")

    with borrowed("again"):
        y = module(x)
        with pytest.raises(LookupError), torch.autograd.graph.saved_tensors_hooks(fail, fail):
            module(x)
        assert leased() == 0
        with pytest.raises(ValueError, match="last dimension"):
            module(x[:, :16])
        assert leased() == 0
        y.sum().backward()
    assert leased() == 0 and x.grad.isfinite().all() and module.weight.grad.isfinite().all()


def test_a_slot_is_taken_once(device):
    assert not policy("borrowed").two_at_once(randn(8, 32, device=device))
    assert _C.comm_buffer_usage("tests") == (2 * 8 * 32 * 4, 2, 0)


def test_memory_is_let_go(device):
    module, x = te.Linear(32, 32, device=device), randn(8, 32, device=device)
    with borrowed("again"):
        module(x)
        assert _C.comm_buffer_usage("tests") == (8 * 32 * 4, 1, 0)
        module(randn(4, 32, device=device))
        assert _C.comm_buffer_usage("tests") == (8 * 32 * 4, 1, 0)  # large enough
        module(randn(16, 32, device=device))
        assert _C.comm_buffer_usage("tests") == (16 * 32 * 4, 1, 0)
        _C.release_comm_buffers()
        assert _C.comm_buffer_usage("tests") == (0, 0, 0)
        assert module(x).isfinite().all()
