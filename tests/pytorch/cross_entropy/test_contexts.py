"""parallel_cross_entropy on one rank, in PyTorch's contexts: the gradient over the logits and its detection, second
backwards, compile, capture, checkpoints. test_cross_entropy.py checks its values."""

import copy

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch import functional

from .cases import draw


def test_gradient_lies_over_the_logits(device):
    """And is handed out there, untouched where the incoming gradient is 1."""
    logits, target = draw(device, 3, 4, 77)
    leaf = logits.clone().requires_grad_()
    x = leaf * 1
    version = x._version
    loss = te.parallel_cross_entropy(x, target, reduce_loss=True)
    made = x.detach().clone()
    assert x._version > version and not torch.equal(made, logits)
    (got,) = torch.autograd.grad(loss, x)
    assert got.data_ptr() == x.data_ptr()
    assert_same_bits(got, made)


def test_a_leafs_gradient_is_its_memory(device):
    """guide/cross_entropy.md documents it; a copy would take as long as the loss. Mutant: scaled() returns grad
    itself."""
    logits, target = draw(device, 3, 4, 77)
    want = torch.autograd.grad(te.parallel_cross_entropy(x := logits.clone().requires_grad_(), target).sum(), x)[0]
    leaf = logits.clone().requires_grad_()
    te.parallel_cross_entropy(leaf, target).sum().backward()
    assert leaf.grad.data_ptr() == leaf.data_ptr()
    assert_same_bits(leaf.grad, want)


def test_a_row_without_change_is_not_written(device):
    logits, target = draw(device, 4, 60)
    leaf = logits.clone().requires_grad_()
    x = leaf * 1
    loss = te.parallel_cross_entropy(x, target)
    made = x.detach().clone()
    torch.autograd.grad(loss, x, torch.tensor([1.0, 2.0, 1.0, 0.5], device=device))
    assert_same_bits(x[0].detach(), made[0])
    assert_same_bits(x[1].detach(), made[1] * 2)
    assert_same_bits(x[3].detach(), made[3] * 0.5)


def test_without_a_gradient_logits_stay(device):
    logits, target = draw(device, 3, 50)
    before, version = logits.clone(), logits._version
    wanted = te.parallel_cross_entropy(logits.clone().requires_grad_() * 1, target)
    assert_same_bits(te.parallel_cross_entropy(logits, target), wanted)
    with torch.no_grad():
        te.parallel_cross_entropy(logits.requires_grad_(), target)
    with torch.inference_mode():
        te.parallel_cross_entropy(logits.detach().clone(), target)
    assert logits._version == version
    assert_same_bits(logits, before)


def test_a_stale_reader_raises(device):
    logits, target = draw(device, 3, 50)
    x = logits.clone().requires_grad_() * 1
    reader = (x * x).sum()
    te.parallel_cross_entropy(x, target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        reader.backward()


def test_two_losses_of_the_same_logits_notice(device):
    logits, target = draw(device, 3, 50)
    x = logits.clone().requires_grad_() * 1
    first = te.parallel_cross_entropy(x, target).sum()
    with refused(RuntimeError, "parallel_cross_entropy", "'inp'", "earlier loss"):
        te.parallel_cross_entropy(x, target)
    for view in (x[:], x.detach(), x.view(3, 50, 1)[..., 0]):
        with refused(RuntimeError, "parallel_cross_entropy", "'inp'", "earlier loss"):
            te.parallel_cross_entropy(view, target)
    x.detach().copy_(logits)
    te.parallel_cross_entropy(x[:], target)  # logits again
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()
    leaf = logits.clone().requires_grad_()
    te.parallel_cross_entropy(leaf, target).sum().backward()
    with torch.no_grad():
        leaf.copy_(logits)
    te.parallel_cross_entropy(leaf, target)  # logits again


SECOND = {
    "no_grad": (torch.no_grad, lambda x, t: te.parallel_cross_entropy(x, t)),
    "inference_mode": (torch.inference_mode, lambda x, t: te.parallel_cross_entropy(x, t, 0.1, True)),
    "detached": (torch.enable_grad, lambda x, t: te.parallel_cross_entropy(x.detach(), t)),
    "one row": (torch.no_grad, lambda x, t: te.parallel_cross_entropy(x[1:2], t[1:2])),
    "functional": (torch.no_grad, functional.cross_entropy),
    "compiled": (torch.no_grad, lambda x, t: torch.compile(te.parallel_cross_entropy, backend="aot_eager")(x, t)),
    "compiled, with a gradient": (
        torch.enable_grad,
        lambda x, t: torch.compile(te.parallel_cross_entropy, backend="aot_eager")(x, t),
    ),
    "dispatched": (torch.no_grad, lambda x, t: torch.ops.te.cross_entropy(x, t, 0.0, False, -100, "", 1)),
}


@pytest.mark.parametrize("behind", ["forward", "backward"])
@pytest.mark.parametrize("name", SECOND)
def test_a_second_loss_never_takes_a_gradient_for_logits(device, name, behind):
    """Also if it requires no gradient itself, and after a backward that has scaled the gradient."""
    logits, target = draw(device, 3, 50)
    for leaf in (logits.clone().requires_grad_(), None):
        x = logits.clone().requires_grad_() * 1 if leaf is None else leaf
        loss = te.parallel_cross_entropy(x, target).sum()
        if behind == "backward":
            (loss * 2).backward()
        mode, call = SECOND[name]
        with mode(), refused(RuntimeError, "cross_entropy", "earlier loss", "clone()"):
            call(x, target)
        with torch.no_grad():
            x.copy_(logits)
            te.parallel_cross_entropy(x, target)


def test_losses_of_slices(device):
    """Memory beside a slice's gradient is not taken for a gradient."""
    logits, target = draw(device, 6, 50)
    x = logits.clone().requires_grad_() * 1
    want = te.parallel_cross_entropy(logits, target)
    for first in (0, 2, 4):
        here = slice(first, first + 2)
        loss = te.parallel_cross_entropy(x[here], target[here])
        assert_same_bits(loss.detach(), want[here])
        loss.sum().backward(retain_graph=True)
    with torch.no_grad(), refused(RuntimeError, "earlier loss"):
        te.parallel_cross_entropy(x[3:5], target[3:5])


def test_memory_that_comes_again_is_no_gradient(device):
    """Another tensor may have the address of one that is gone."""
    target = torch.zeros(4, dtype=torch.int64, device=device)
    for _ in range(50):
        x = torch.randn(4, 33, device=device, requires_grad=True)
        te.parallel_cross_entropy(x, target)
        del x


def test_a_view_of_a_leaf_is_not_overwritten(device):
    logits, target = draw(device, 3, 50)
    leaf = logits.clone().requires_grad_()
    with refused(RuntimeError, "parallel_cross_entropy", "'inp'", "view of a leaf"):
        te.parallel_cross_entropy(leaf.view(3, 50), target)
    assert_same_bits(leaf.detach(), logits)


@pytest.mark.parametrize("hooks", [False, True])
def test_a_second_backward_raises(device, hooks):
    """The first has scaled what the second would scale; hooks hide the version."""
    logits, target = draw(device, 3, 50)
    x = logits.clone().requires_grad_() * 1
    pack = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    if hooks:
        with pack:
            loss = te.parallel_cross_entropy(x, target, reduce_loss=True)
    else:
        loss = te.parallel_cross_entropy(x, target, reduce_loss=True)
    torch.autograd.grad(loss * 2, x, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second backward" if hooks else r"second backward|inplace operation"):
        torch.autograd.grad(loss * 2, x, retain_graph=True)


def test_double_backward_is_refused(device):
    logits, target = draw(device, 3, 50)
    x = logits.clone().requires_grad_() * 1
    loss = te.parallel_cross_entropy(x, target, reduce_loss=True)
    with refused(NotImplementedError, "cross_entropy: double backward"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_two_microbatches_in_flight(device):
    pairs = [draw(device, 5, 90) for _ in range(2)]
    leaves = [logits.clone().requires_grad_() for logits, _ in pairs]
    losses = [te.parallel_cross_entropy(leaf * 1, t, reduce_loss=True) for leaf, (_, t) in zip(leaves, pairs)]
    (losses[0] * 0.5 + losses[1] * 0.25).backward()
    for leaf, (logits, target), factor in zip(leaves, pairs, (0.5, 0.25)):
        alone = logits.clone().requires_grad_()
        (te.parallel_cross_entropy(alone * 1, target, reduce_loss=True) * factor).backward()
        assert_same_bits(leaf.grad, alone.grad)


@pytest.mark.parametrize("reduce", [False, True])
def test_compiled(device, reduce):
    """As eager, bit for bit, and the logits stay."""
    logits, target = draw(device, 5, 61)

    def loss_of(x, t):
        y = x * 2
        return te.parallel_cross_entropy(y, t, 0.1, reduce), y

    results = []
    for call in (loss_of, torch.compile(loss_of, backend="aot_eager", fullgraph=True)):
        leaf = logits.clone().requires_grad_()
        loss, y = call(leaf, target)
        results.append(
            (loss.detach().view(-1), torch.autograd.grad(loss, leaf, torch.full_like(loss, 0.5))[0], y.detach())
        )
    assert_same_bits(results[0][0], results[1][0])
    assert_same_bits(results[0][1], results[1][1])
    assert_same_bits(results[1][2], logits * 2)


class Head(torch.nn.Module):
    def __init__(self, device, reduce=True, fused=False):
        super().__init__()
        self.fused = fused
        self.linear = te.Linear(32, 70, bias=False, device=device)
        self.register_buffer("target", torch.randint(0, 70, (6, 2), device=device))
        self.reduce = reduce

    def forward(self, x):
        if self.fused:
            return te.fused_linear_cross_entropy(x, self.linear.weight, self.target, reduce_loss=self.reduce)
        return te.parallel_cross_entropy(self.linear(x), self.target, 0.1, self.reduce, is_cg_capturable=True)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("reduce", [False, True])
def test_captured_equals_eager(device, reduce, fused):
    captured = Head(device, reduce, fused)
    eager = copy.deepcopy(captured)
    te.make_graphed_callables(captured, (torch.randn(6, 2, 32, device=device, requires_grad=True),))
    for step in range(3):
        x = torch.randn(6, 2, 32, device=device)
        target = torch.randint(0, 70, (6, 2), device=device)
        left = []
        for module in (captured, eager):
            module.target.copy_(target)
            module.zero_grad()
            leaf = x.clone().requires_grad_()
            loss = module(leaf)
            loss.backward(torch.full_like(loss, 1.0 if step == 0 else 0.5))
            left.append((loss.detach().clone().view(-1), leaf.grad, module.linear.weight.grad))
        for got, want in zip(*left):
            assert_same_bits(got, want, f"step {step}")


class Loss(torch.nn.Module):
    def __init__(self, target):
        super().__init__()
        self.register_buffer("target", target)

    def forward(self, logits):
        return te.parallel_cross_entropy(logits, self.target, 0.1, True)


@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_captured_with_logits_as_the_argument(device, iterations):
    """Each replay brings new ones, and so do the runs before."""
    logits, target = draw(device, 4, 50)
    loss = Loss(target)
    te.make_graphed_callables(loss, (logits.clone().requires_grad_(),), num_warmup_iters=iterations)
    for step in range(3):
        leaf, other = (torch.full_like(logits, step).add_(logits).mul_(step).requires_grad_() for _ in range(2))
        replayed = loss(leaf)
        replayed.backward()
        want = te.parallel_cross_entropy(other, target, 0.1, True)
        want.backward()
        assert_same_bits(replayed.detach().clone().view(1), want.detach().view(1))
        assert_same_bits(leaf.grad, other.grad)


def test_recomputed_in_a_checkpoint(device):
    head = Head(device)
    x = torch.randn(6, 2, 32, device=device)
    grads = []
    for call in (head, lambda x: torch.utils.checkpoint.checkpoint(head, x, use_reentrant=False)):
        head.zero_grad()
        leaf = x.clone().requires_grad_()
        call(leaf).backward()
        grads.append((leaf.grad, head.linear.weight.grad))
    for got, want in zip(*grads):
        assert_same_bits(got, want)


def test_kept_and_explained(device):
    """The logits' memory and nothing else; the paths of both passes."""
    head = Head(device)
    x = torch.randn(6, 2, 32, device=device, requires_grad=True)
    plan = te.memory_plan(head, x)
    rows = {(row.op, row.name): row for row in plan.rows}
    assert rows["cross_entropy", "gradient of the logits"].bytes == 12 * 70 * 4 == plan.kept_bytes
    found = {row.op: row for row in te.explain(head, x).rows}
    kernel = "CPU loop" if device == "cpu" else "CUDA"
    assert kernel in found["cross_entropy_fwd"].path and kernel in found["cross_entropy_bwd"].path


def test_no_wait_for_the_device(device):
    if device == "cpu":
        pytest.skip("a CPU has nothing to wait for")
    logits, target = draw(device, 32, 1000)
    for reduce in (False, True):
        leaf = logits.clone().requires_grad_()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = te.parallel_cross_entropy(leaf * 1, target, 0.1, reduce)
            loss.backward(torch.full_like(loss, 0.5))
        finally:
            torch.cuda.set_sync_debug_mode("default")
