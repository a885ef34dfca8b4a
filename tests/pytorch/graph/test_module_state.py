# The state of the modules after a capture: buffers, parameters and gradients are unchanged, whatever the forward wrote
# to them.
import copy

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph import is_graph_capturing
from transformer_engine.pytorch.graph.capture import state_guard

WIDTH = 8


class Shifted(torch.nn.Module):
    def __init__(self, device, positions):
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH, device=device)
        self.register_buffer("positions", positions)

    def forward(self, x):
        return self.inner(x) + self.positions.real.sum()


def sample(device):
    return torch.randn(4, WIDTH, device=device)


def made_in_inference_mode(make):
    def inside(device):
        with torch.inference_mode():
            return make(device)

    return inside


BUFFERS = {
    "expanded": lambda device: torch.arange(4.0, device=device)[None].expand(5, 4),
    "windows": lambda device: torch.arange(5.0, device=device).unfold(0, 3, 1),
    "of inference mode": made_in_inference_mode(lambda device: torch.arange(4.0, device=device)),
    "zeros of inference mode": made_in_inference_mode(lambda device: torch.zeros(4, device=device)),
    "conjugated": lambda device: torch.randn(4, dtype=torch.complex64, device=device).conj(),
    "negated": lambda device: torch.randn(4, dtype=torch.complex64, device=device).conj().imag,
    "sparse": lambda device: torch.eye(4, device=device).to_sparse(),
}


@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS.keys())
def test_buffers_that_are_not_written_as_others_are(device, make):
    if device == "cuda" and make is BUFFERS["sparse"]:
        pytest.skip("a sparse sum waits for the device")
    module = Shifted(device, make(device))
    module.inner.weight.grad = torch.ones_like(module.inner.weight)
    grad, positions, x = module.inner.weight.grad, module.positions.clone(), sample(device)
    want = module(x).detach()
    te.make_graphed_callables(module, (sample(device),))
    assert not is_graph_capturing()
    assert module.inner.weight.grad is grad
    assert torch.equal(module.positions.to_dense(), positions.to_dense())
    assert_same_bits(module(x), want)


def test_what_cannot_be_put_back_leaves_the_rest(device, monkeypatch):
    def raising(self):
        raise OSError("gone")

    module = Shifted(device, torch.ones(2, device=device))
    module.inner.weight.grad = torch.ones_like(module.inner.weight)
    grad, x, random = module.inner.weight.grad, sample(device), torch.get_rng_state()
    monkeypatch.setattr(state_guard.TensorBackup, "restore", raising)
    with pytest.raises(OSError, match="gone"):
        te.make_graphed_callables(module, (x,))
    assert not is_graph_capturing()
    assert module.inner.weight.grad is grad
    assert torch.equal(torch.get_rng_state(), random)
    assert "forward" not in vars(module)
    monkeypatch.undo()
    te.make_graphed_callables(module, (sample(device),))


# ---- parameters and buffers that a forward writes or replaces ----


class Averaged(torch.nn.Module):
    """Its frozen average follows the weight at each call."""

    def __init__(self, device, hidden=False):
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH, device=device)
        self.average = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, device=device), requires_grad=False)
        self.zeros = torch.nn.Parameter(torch.zeros(3, device=device), requires_grad=False)
        self.hidden, self.fails = hidden, False

    def forward(self, x):
        with torch.no_grad():
            average, zeros = (self.average.data, self.zeros.data) if self.hidden else (self.average, self.zeros)
            average.mul_(0.5).add_(self.inner.weight, alpha=0.5)
            zeros += 1
        if self.fails:
            raise OSError("forward")
        return self.inner(x)


@pytest.mark.parametrize("warmups", [0, 2])
@pytest.mark.parametrize("hidden", [False, True], ids=["counted", "by .data"])
@pytest.mark.parametrize("fails", [False, True], ids=["captured", "fails"])
def test_parameters_that_a_forward_writes_to(device, warmups, hidden, fails):
    module = Averaged(device, hidden)
    twin, x = copy.deepcopy(module), sample(device)
    module.fails = fails
    try:
        te.make_graphed_callables(module, (sample(device),), num_warmup_iters=warmups)
    except OSError:
        assert fails
    module.fails = False
    for _ in range(3):
        for got, want in zip(module.parameters(), twin.parameters()):
            assert_same_bits(got, want)
        assert_same_bits(module(x), twin(x))


@pytest.mark.parametrize("warmups", [0, 2])
def test_an_embedding_that_renormalizes(device, warmups):
    module = torch.nn.Embedding(5, WIDTH, max_norm=1.0, device=device)
    twin = copy.deepcopy(module)
    te.make_graphed_callables(module, (torch.tensor([0, 3], device=device),), num_warmup_iters=warmups)
    assert_same_bits(module.weight, twin.weight)
    for indices in ([1, 2], [3, 3], [0, 4]):
        given = torch.tensor(indices, device=device)
        assert_same_bits(module(given), twin(given))
        assert_same_bits(module.weight, twin.weight)


class Counting(torch.nn.Module):
    def __init__(self, device, how):
        super().__init__()
        self.register_buffer("n", torch.ones(1, device=device))
        self.how = how

    def forward(self, x):
        if self.how == "replaced":
            self.n = self.n + 1
        elif self.how == "in place":
            self.n.add_(1)
        elif "table" not in dict(self.named_buffers()):
            self.register_buffer("table", torch.full((1,), 3.0, device=x.device))
        return x * self.n + (self.table if self.how == "made once" else 0)


@pytest.mark.parametrize("warmups", [0, 3])
def test_a_buffer_that_is_replaced_is_refused(device, warmups):
    module = torch.nn.Sequential(Counting(device, "replaced"))
    before, x = module[0].n, sample(device)
    with refused(ValueError, "make_graphed_callables", "'0.n'", "self.n.add_(1)"):
        te.make_graphed_callables(module, (x,), num_warmup_iters=warmups)
    assert module[0].n is before
    assert_same_bits(before, torch.ones(1, device=device))
    assert not is_graph_capturing()


@pytest.mark.parametrize("how", ["in place", "made once"])
def test_buffers_that_stay(device, how):
    """The graph reads a buffer that the first forward of the warm-up creates."""
    module = Counting(device, how)
    twin, x = copy.deepcopy(module), sample(device)
    te.make_graphed_callables(module, (sample(device),))
    assert_same_bits(module.n, twin.n)
    for _ in range(3):
        assert_same_bits(module(x), twin(x))
        assert_same_bits(module.n, twin.n)


# ---- hooks of parameters ----


def doubled(grad):
    return grad * 2


@pytest.mark.parametrize("late", [False, True], ids=["before the capture", "after it"])
def test_hooks_of_parameters_run_once(device, late):
    """As in eager: around each replay, none inside the capture; post-accumulate hooks see the whole .grad."""
    module, x, calls, sums = torch.nn.Linear(WIDTH, WIDTH, device=device), sample(device), [], []
    twin = copy.deepcopy(module)

    def register():
        for one in (module, twin):
            one.weight.register_hook(doubled)
        module.weight.register_hook(lambda grad: calls.append(1))
        module.weight.register_post_accumulate_grad_hook(lambda p: sums.append(p.grad.clone()))

    if not late:
        register()
    te.make_graphed_callables(module, (sample(device),))
    if late:
        register()
    assert not calls and not sums
    for step in range(1, 4):
        for y in (module(x), twin(x)):
            y.backward(torch.ones_like(y))  # that of sum() has zero strides, for which cuBLAS uses another GEMM
        assert len(calls) == len(sums) == step
        assert_same_bits(module.weight.grad, twin.weight.grad)
        assert_same_bits(sums[-1], twin.weight.grad)
        assert_same_bits(module.bias.grad, twin.bias.grad)


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise OSError("backward")


def test_hooks_of_parameters_stay_where_a_capture_fails(device):
    inner = torch.nn.Linear(WIDTH, WIDTH, device=device)
    handle = inner.weight.register_hook(doubled)
    with pytest.raises(OSError, match="backward"):
        te.make_graphed_callables(torch.nn.Sequential(inner, Apart()), (sample(device),))
    inner(torch.ones(1, WIDTH, device=device)).sum().backward()
    assert_same_bits(inner.weight.grad, torch.full_like(inner.weight, 2))
    handle.remove()
    inner(torch.ones(1, WIDTH, device=device)).sum().backward()
    assert_same_bits(inner.weight.grad, torch.full_like(inner.weight, 3))


class Apart(torch.nn.Module):
    def forward(self, x):
        return Raising.apply(x)


@pytest.mark.parametrize("warmups", [0, 2])
def test_sparse_gradients_are_refused(device, warmups):
    module = torch.nn.Embedding(5, WIDTH, sparse=True, device=device)
    indices = torch.tensor([1, 3], device=device)
    with refused(ValueError, "make_graphed_callables", "parameter of shape [5, 8]", "Embedding", "sparse=False"):
        te.make_graphed_callables(module, (indices,), num_warmup_iters=warmups)
    assert not is_graph_capturing()
    module(indices).sum().backward()
    assert module.weight.grad.is_sparse
