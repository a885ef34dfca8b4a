"""fused_linear_cross_entropy on one rank in runs: which products, memory's law, tied weights, microbatches, second
backwards, compile. Its values are test_fused.py's."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from support import assert_same_bits, assert_within, refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch import _C

from .fused_cases import FEATURES, RECIPES, chunks_of, draw


def test_products_that_run(device):
    """te.explain: unwanted gradients of a frozen weight and of a hidden state have no product."""

    class Fused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(50, FEATURES, device=device))
            self.register_buffer("target", torch.randint(0, 50, (300,), device=device))

        def forward(self, x):
            return te.fused_linear_cross_entropy(x, self.weight, self.target)

    module = Fused()
    x = torch.randn(300, FEATURES, device=device, requires_grad=True)
    with chunks_of(128 * 50 * 4):
        found = {row.op: row.calls for row in te.explain(module, x).rows}
        assert found["linear_fwd"] == found["cross_entropy_fwd"] == found["gemm_accumulate"] == 3
        plan = te.memory_plan(module, x)
    rows = {row.name: row for row in plan.rows if row.op == "linear_cross_entropy"}
    assert rows["gradient of hidden"].bytes == x.nbytes and rows["gradient of the weight"].bytes == 50 * FEATURES * 4
    assert all(row.status == "kept" for row in rows.values())


def allocated(step):
    """The most bytes that are there at once during step(), less those before it."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = step()
        return torch.cuda.max_memory_allocated() - before, kept
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = step()
    now = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    assert most > 0
    return most, kept


@pytest.mark.parametrize("sum_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_wanted", [False, True])
def test_memory_law(device, weight_wanted, sum_dtype):
    """guide/cross_entropy.md: a chunk of logits, the gradients, and little else; never all logits. On the CPU a product
    that is added to something, or is written into memory that is there, is made beside it first, one into float32 of
    operands in float32. Mutant: chunk_rows() of all tokens."""
    tokens, classes, features = 4096, 2000, 16
    hidden, weight, _, target = draw(device, tokens, classes, torch.bfloat16, features, bias=False)
    weight.requires_grad_(weight_wanted)
    chunk = 256 * classes * 2
    with chunks_of(chunk):
        assert _C.linear_cross_entropy_chunk_rows(tokens, classes, 2, False) == 256
        most, _ = allocated(lambda: te.fused_linear_cross_entropy(hidden, weight, target, weight_grad_dtype=sum_dtype))
    weight_grad = classes * features * sum_dtype.itemsize if weight_wanted else 0
    law = chunk + weight_grad + tokens * features * 2 + tokens * 4
    beside = 64 << 20  # a product's workspace
    if device == "cpu":
        in_float32 = weight_wanted and sum_dtype is torch.float32
        beside = 256 * features * 6 + 2 * classes * features * 4 + (2 * chunk if in_float32 else 0)
    assert chunk < most <= law + beside + 65536, (most, law)
    assert law + beside + 65536 < 0.3 * tokens * classes * 2 or device != "cpu"  # of all logits


def test_the_chunk_at_its_target_size():
    """8192 x 4096 x 128256 in bf16: 501 MiB of logits and 64 MiB of hidden's gradient beside the weight's."""
    rows = _C.linear_cross_entropy_chunk_rows(8192, 128256, 2, False)
    assert rows == 2048
    assert rows * 128256 * 2 + 8192 * 4096 * 2 <= 600 << 20
    assert _C.linear_cross_entropy_chunk_rows(8192, 128256, 2, True) == 1024
    for tokens, classes in ((1, 1), (0, 7), (129, 50257), (100000, 32000), (5, 1 << 30)):
        rows = _C.linear_cross_entropy_chunk_rows(tokens, classes, 2, False)
        assert rows % 128 == 0 and (rows * classes * 2 <= 512 << 20 or rows == 128)


def test_tied_embedding_and_two_microbatches(device):
    """One weight as table and head; gradients of two losses that were made before either backward add up."""
    weight = torch.randn(50, FEATURES, device=device, requires_grad=True)
    tokens = torch.randint(0, 50, (2, 21), device=device)
    losses = [te.fused_linear_cross_entropy(F.embedding(t[:-1], weight).tanh(), weight, t[1:]) for t in tokens]
    (got,) = torch.autograd.grad((losses[0] + losses[1]) * 0.5, weight)
    plain = [F.cross_entropy(F.linear(F.embedding(t[:-1], weight).tanh(), weight), t[1:]) for t in tokens]
    (want,) = torch.autograd.grad((plain[0] + plain[1]) * 0.5, weight)
    assert_within(got, want, 1e-5)


def test_second_and_double_backward(device):
    hidden, weight, bias, target = draw(device, 20, 30)
    loss = te.fused_linear_cross_entropy(hidden, weight, target, bias)
    with refused(NotImplementedError, "linear_cross_entropy: double backward"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    loss = te.fused_linear_cross_entropy(hidden, weight, target, bias)
    torch.autograd.grad(loss * 2, weight, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second backward|inplace operation"):
        torch.autograd.grad(loss * 2, weight)
    # This one makes them in backward.
    each = te.fused_linear_cross_entropy(hidden, weight, target, bias, reduce_loss=False)
    first, second = (torch.autograd.grad(each.sum(), weight, retain_graph=True)[0] for _ in range(2))
    assert_same_bits(first, second)


def test_a_weight_written_in_between_is_noticed(device):
    """Where backward reads it. With reduce_loss it does not."""
    hidden, weight, bias, target = draw(device, 20, 30)
    each = te.fused_linear_cross_entropy(hidden, weight, target, bias, reduce_loss=False)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        each.sum().backward()


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("how", ["plain", "current"])
def test_compiled(device, how, reduce):
    hidden, weight, bias, target = draw(device, 20, 48, features=32)

    def loss_of(h, w, b, t):
        with te.autocast(enabled=how != "plain", recipe=RECIPES["current"]):
            return te.fused_linear_cross_entropy(h.sin(), w, t, b, reduce_loss=reduce)

    results = []
    for call in (loss_of, torch.compile(loss_of, backend="aot_eager", fullgraph=True)):
        loss = call(hidden, weight, bias, target)
        grads = torch.autograd.grad(loss, (hidden, weight, bias), torch.full_like(loss, 0.5))
        results.append((loss.detach().view(-1), *grads))
    for got, want in zip(*results):
        assert_same_bits(got, want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_second_run_without_its_autocast_warns(device, reentrant):
    """Its gradients are not those of the forward that ran."""
    x = torch.randn(8, 32, device=device, requires_grad=True)
    w, t = torch.randn(16, 32, device=device, requires_grad=True), torch.arange(8, device=device)
    head = lambda x: te.fused_linear_cross_entropy(x, w, t)  # noqa: E731

    def step(checkpoint, fp8):
        with te.autocast(enabled=fp8, recipe=Float8CurrentScaling()):
            loss = checkpoint(head, x, use_reentrant=reentrant)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            loss.backward()
        return [str(each.message) for each in heard if "fused_linear_cross_entropy: it ran" in str(each.message)]

    torchs = torch.utils.checkpoint.checkpoint
    for checkpoint, fp8, told in ((torchs, False, 0), (torchs, True, 1), (te.checkpoint, True, 0), (torchs, False, 0)):
        assert len(step(checkpoint, fp8)) == told, (checkpoint, fp8)
