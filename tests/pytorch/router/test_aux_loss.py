"""The auxiliary loss: values and gradients against a float64 oracle, totals on the host and on the device, compile."""

import pytest
import torch
from support import DTYPES, U32, assert_within, layouts, rounding, saved_tensors, wide

from transformer_engine.pytorch import functional
from transformer_engine.pytorch.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

from .cases import draw_logits, loss_oracle

COUNTS = (torch.int32, torch.int64, torch.float32, torch.bfloat16)

# tokens, columns, num_experts, topk
SHAPES = ((1, 1, 1, 1), (5, 8, 8, 2), (64, 33, 33, 8), (65, 128, 128, 8), (700, 40, 10, 3), (3, 2048, 1024, 32))


def draw(device, tokens, columns, dtype):
    probs = draw_logits("cpu", tokens, columns, seed=columns).softmax(-1).to(dtype).to(device)
    counts = torch.randint(0, 200, (columns,), generator=torch.Generator().manual_seed(1)).to(device)
    return probs.requires_grad_(), counts


def assert_equal(got, want, what=""):
    """Scalars, of which no bytes can be viewed."""
    assert got.dtype is want.dtype and torch.equal(got, want), what


def loss_error(rows, columns):
    """Relative error, of terms that are all positive: a lane adds ceil(columns / 32) * 8 fused products in each of its
    64 rows, then 8 halvings; the sums of 64 rows take rows / 64 / 256 + 1 additions and 8 halvings more; the scale, its
    product and the counts round once each."""
    return (8 * (columns / 32 + 1) + 8 + rows / 2**14 + 9 + 3) * U32


@pytest.mark.parametrize("on_device", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(device, shape, dtype, on_device):
    tokens, columns, experts, topk = shape
    probs, counts = draw(device, tokens, columns, dtype)
    total = torch.tensor(tokens + 2, device=device) if on_device else tokens + 2
    loss = fused_moe_aux_loss(
        probs=probs, tokens_per_expert=counts, total_num_tokens=total, num_experts=experts, topk=topk, coeff=0.01
    )
    assert loss.shape == () and loss.dtype is dtype
    exact = wide(probs).requires_grad_()
    want = loss_oracle(exact, counts.cpu(), tokens + 2, experts, topk, 0.01)
    before = want.detach() * loss_error(tokens, columns)
    assert_within(loss, want.detach(), before + rounding(want.detach() + before, dtype), "loss")
    incoming = torch.tensor(3.0, dtype=dtype, device=device)
    (got,) = torch.autograd.grad(loss, probs, incoming)
    (gradient,) = torch.autograd.grad(want, exact, wide(incoming))
    assert got.dtype is dtype and got.is_contiguous()
    before = gradient * 4 * U32  # the scale, its product with the incoming gradient, the count, their product
    assert_within(got, gradient, before + rounding(gradient + before, dtype), "gradient")


def test_counts_of_any_dtype_give_the_same_bits(device):
    probs, counts = draw(device, 100, 24, torch.float32)
    want = fused_moe_aux_loss(probs, counts, 100, 24, 2, 1.0)
    for dtype in COUNTS:
        got = fused_moe_aux_loss(probs, counts.to(dtype), 100, 24, 2, 1.0)
        assert_equal(got, want, dtype)
    assert_equal(fused_moe_aux_loss(probs, counts, torch.tensor([100], device=device), 24, 2, 1.0), want)


def test_no_tokens(device):
    """A loss of 0, and no gradient that is NaN."""
    probs, counts = (
        torch.zeros(0, 8, device=device, requires_grad=True),
        torch.zeros(8, dtype=torch.int64, device=device),
    )
    for total in (0, torch.tensor(0, device=device)):
        loss = fused_moe_aux_loss(probs, counts, total, 8, 2, 0.1)
        loss.backward()
        assert loss.item() == 0 and probs.grad.shape == (0, 8)
    some, counts = draw(device, 4, 8, torch.float32)  # tokens of this rank, none that count
    loss = fused_moe_aux_loss(some, counts, 0, 8, 2, 0.1)
    loss.backward()
    assert loss.item() == 0 and not some.grad.any()


def test_leading_dimensions_and_layouts(device):
    probs, counts = draw(device, 60, 24, torch.float32)
    want = fused_moe_aux_loss(probs, counts, 60, 24, 2, 1.0)
    assert_equal(fused_moe_aux_loss(probs.view(3, 20, 24), counts, 60, 24, 2, 1.0), want)
    for name, p in layouts(probs):
        assert_equal(fused_moe_aux_loss(p, counts, 60, 24, 2, 1.0), want, name)
    spread = torch.stack((counts, counts), 1)[:, 0]
    assert_equal(fused_moe_aux_loss(probs, spread, 60, 24, 2, 1.0), want)


def test_threads_do_not_change_the_sum():
    probs, counts = draw("cpu", 5000, 64, torch.float32)
    threads = torch.get_num_threads()
    try:
        results = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(fused_moe_aux_loss(probs, counts, 5000, 64, 2, 1.0).detach())
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert_equal(result, results[0])


def test_saves_the_counts_alone(device):
    probs, counts = draw(device, 60, 24, torch.float32)
    with saved_tensors() as kept:
        fused_moe_aux_loss(probs, counts, torch.tensor(60, device=device), 24, 2, 1.0)
    assert [t.dtype for t in kept] == [torch.int64, torch.int64] and kept[0].data_ptr() == counts.data_ptr()


def test_a_router_with_its_loss_trains(device):
    """The three functions together, as clients call them: the balanced load of logits that the loss alone moves."""
    torch.manual_seed(3)
    logits = (torch.randn(256, 8) + torch.arange(8) / 2).to(device).requires_grad_()
    optimizer = torch.optim.SGD([logits], lr=300.0)

    def load():
        routing_map, scores = fused_compute_score_for_moe_aux_loss(logits, 2, "softmax")
        counts = routing_map.sum(0)
        probs, chosen = fused_topk_with_score_function(logits, 2, False, None, None, None, "softmax", None)
        assert torch.equal(chosen, routing_map) and probs.sum(-1).allclose(torch.ones_like(probs[:, 0]))
        return fused_moe_aux_loss(scores, counts, 256, 8, 2, 1.0), counts.max().item()

    first_loss, first_load = load()
    for _ in range(20):
        optimizer.zero_grad()
        load()[0].backward()
        optimizer.step()
    last_loss, last_load = load()
    assert last_loss < first_loss and last_load < first_load / 1.5


def test_compile(device):
    """fullgraph with another number of tokens, as an int and as a tensor."""

    def step(probs, counts, total):
        as_int = fused_moe_aux_loss(probs, counts, probs.size(0), 24, 2, 0.5)
        return as_int + fused_moe_aux_loss(probs, counts, total, 24, 2, 0.5)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (30, 70):
        results = []
        for function in (step, compiled):
            probs, counts = draw(device, tokens, 24, torch.float32)
            loss = function(probs, counts, torch.tensor(tokens, device=device))
            results.append((loss.detach(), torch.autograd.grad(loss, probs)[0]))
        for eager, traced in zip(*results, strict=True):
            assert_equal(traced, eager)


def test_opcheck(device):
    ops = torch.ops.te
    probs, counts = draw(device, 30, 24, torch.float32)
    for total in ((None, 30), (torch.tensor(30, device=device), 0)):
        args = (counts, *total, 24, 2, 0.5)
        torch.library.opcheck(ops.router_aux_loss.default, (probs, *args))
        torch.library.opcheck(ops.router_aux_loss_fwd.default, (probs.detach(), *args))
        torch.library.opcheck(ops.router_aux_loss_bwd.default, (torch.tensor(2.0, device=device), *args, [30, 24]))


@pytest.mark.gpu
def test_devices_give_the_same_bits():
    for dtype in DTYPES:
        probs, counts = draw("cpu", 5000, 72, dtype)
        cpu = functional.router_aux_loss(probs, counts, 5000, num_experts=72, topk=4, coeff=0.1)
        gpu = functional.router_aux_loss(probs.cuda(), counts.cuda(), 5000, num_experts=72, topk=4, coeff=0.1)
        assert_equal(gpu.cpu(), cpu)
