"""FusedSGD: five steps against torch.optim.SGD in float64 for every option, first runs, state, what is refused."""

import copy

import pytest
import torch
from support import DTYPES, U32, UNIT_ROUNDOFF, assert_same_bits, assert_within, refused, wide

from transformer_engine.pytorch import quantized_model_init
from transformer_engine.pytorch.optimizers import FusedSGD

from .cases import give_grads, parameters


@pytest.mark.parametrize("momentum, dampening, nesterov", [(0.0, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True)])
@pytest.mark.parametrize("weight_decay", (0.0, 0.1))
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_match_torchs(device, dtype, weight_decay, momentum, dampening, nesterov):
    """In float64, from the same gradients. A step rounds the weight and the buffer once to their dtype and their sums 8
    times in float32; what is in the buffer by mistake leaves it by the momentum: 1 / (1 - 0.9) times as much."""
    ours, exact = parameters(device, dtype), [torch.nn.Parameter(wide(p)) for p in parameters(device, dtype)]
    options = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
    lr, u = 0.1, UNIT_ROUNDOFF[dtype] + 8 * U32
    a, b = FusedSGD(ours, lr=lr, **options), torch.optim.SGD(exact, lr=lr, **options)
    bounds = [torch.zeros(p.shape, dtype=torch.float64) for p in ours]
    for step in range(5):
        give_grads(ours, step)
        for p, q in zip(ours, exact, strict=True):
            q.grad = wide(p.grad)
        a.step()
        b.step()
        for p, q, bound in zip(ours, exact, bounds, strict=True):
            bound += u * (q.detach().abs() + 0.5) + lr * 20 * u * (10 + q.detach().abs()) + lr * weight_decay * bound
            assert_within(p, q.detach(), bound, f"step {step}")
    kept = {s[name].dtype for s in a.state.values() for name in s}
    assert kept == ({dtype} if momentum else set())


def test_decay_after_momentum(device):
    (p,) = parameters(device, sizes=(50,))
    before = p.detach().clone()
    give_grads([p])
    optimizer = FusedSGD([p], lr=0.5, momentum=0.9, weight_decay=0.1, wd_after_momentum=True)
    optimizer.step()
    assert_same_bits(optimizer.state[p]["momentum_buffer"], p.grad)
    want = wide(before) - 0.5 * (wide(p.grad) + 0.1 * wide(before))
    assert_within(p, want, 4 * U32 * (wide(before).abs() + wide(p.grad).abs()))


def test_a_parameter_that_joins_later(device):
    """Its first step is a first run, however many steps the others of its group have done."""
    a, b = parameters(device, sizes=(9, 9)), parameters(device, sizes=(9, 9))
    together, alone = FusedSGD(a, lr=0.1, momentum=0.9, dampening=0.5), []
    alone = [FusedSGD([p], lr=0.1, momentum=0.9, dampening=0.5) for p in b]
    for step in range(3):
        give_grads(a, step)
        give_grads(b, step)
        if step == 0:
            a[1].grad = b[1].grad = None
        together.step()
        for each in alone:
            each.step()
    for p, q in zip(a, b, strict=True):
        assert_same_bits(p, q)


def test_resume_and_copies(device):
    params = parameters(device)
    first = FusedSGD(params, lr=0.1, momentum=0.9, wd_after_momentum=True, weight_decay=0.1)
    give_grads(params)
    first.step()
    clones = [torch.nn.Parameter(p.detach().clone()) for p in params]
    second = FusedSGD(clones, lr=0.5, momentum=0.9, wd_after_momentum=True)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    third = copy.deepcopy(first)
    for optimizer in (first, second, third):
        give_grads(optimizer.param_groups[0]["params"], 1)
        optimizer.step()
    for p, q, r in zip(params, clones, third.param_groups[0]["params"], strict=True):
        assert_same_bits(p, q)
        assert_same_bits(p, r)


def test_gradients_that_lie_otherwise(device):
    p = torch.nn.Parameter(torch.ones(3, 2, device=device))
    p.grad = torch.arange(6.0, device=device).view(2, 3).t()
    want = p.detach() - p.grad
    optimizer = FusedSGD([p], lr=1.0)
    optimizer.step()
    assert_same_bits(p, want)
    optimizer.zero_grad(set_to_none=False)
    assert not p.grad.any()
    optimizer.zero_grad()
    assert p.grad is None
    p.grad, before = torch.full((1, 1), 0.5, device=device).expand(3, 2), p.detach().clone()
    optimizer.step()  # memory of fewer elements than the shape has is not a freed storage
    assert_same_bits(p, before - 0.5)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"lr": -1.0}, ("lr", "-1.0")),
        ({"lr": 0.1, "momentum": -0.5}, ("momentum", "-0.5")),
        ({"lr": 0.1, "nesterov": True}, ("nesterov", "momentum=0.0")),
        ({"lr": 0.1, "nesterov": True, "momentum": 0.9, "dampening": 0.1}, ("nesterov", "dampening=0.1")),
    ],
)
def test_bad_options(device, options, words):
    with refused(ValueError, "FusedSGD", *words):
        FusedSGD(parameters(device), **options)


def test_bad_gradients_change_nothing(device):
    """The second group's are wrong; the first group is as before too."""

    def freed(t):
        t.untyped_storage().resize_(0)
        return t

    for words, spoil in (
        (("gradient of parameter 1", "sparse_coo"), lambda p: setattr(p, "grad", torch.zeros_like(p).to_sparse())),
        (("gradient of parameter 1", "freed"), lambda p: freed(p.grad)),
    ):
        params = parameters(device, sizes=(5, 6, 7))
        optimizer = FusedSGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1, momentum=0.9)
        give_grads(params)
        spoil(params[2])
        before = [p.detach().clone() for p in params]
        with refused(ValueError, "FusedSGD", *words):
            optimizer.step()
        for p, q in zip(params, before, strict=True):
            assert_same_bits(p.detach(), q)
        assert not any(optimizer.state.values())


@pytest.mark.parametrize(
    "words, buffer",
    [
        (("strides", "(1, 3)"), lambda p: torch.ones(4, 3, device=p.device).t()),
        (("[12]", "[3, 4]"), lambda p: torch.ones(12, device=p.device)),
        (("3.0", "dense"), lambda p: 3.0),
        (("sparse", "dense"), lambda p: torch.ones_like(p).to_sparse()),
    ],
    ids=["strides", "shape", "number", "sparse"],
)
def test_bad_buffers_change_nothing(device, words, buffer):
    params = [torch.nn.Parameter(torch.ones(3, 4, device=device)) for _ in range(2)]
    optimizer = FusedSGD([{"params": [p]} for p in params], lr=0.1, momentum=0.9)
    give_grads(params)
    optimizer.step()
    optimizer.state[params[1]]["momentum_buffer"] = buffer(params[1].detach())
    before = [p.detach().clone() for p in params]
    with refused(ValueError, "FusedSGD", "momentum_buffer", *words):
        optimizer.step()
    for p, q in zip(params, before, strict=True):
        assert_same_bits(p.detach(), q)


def test_memory_that_overlaps(device):
    """In one group and in two; one gradient of two parameters is allowed, and so are neighbours."""
    whole = torch.randn(20, device=device)
    for groups in (lambda p: p, lambda p: [{"params": [q]} for q in p]):
        params, before = [torch.nn.Parameter(whole[:12]), torch.nn.Parameter(whole[8:])], whole.clone()
        give_grads(params)
        with refused(ValueError, "overlap", "param"):
            FusedSGD(groups(params), lr=0.1).step()
        params = [torch.nn.Parameter(whole[:8]), torch.nn.Parameter(whole[8:16])]
        params[0].grad = params[1].grad = torch.zeros(8, device=device)
        FusedSGD(groups(params), lr=0.1, momentum=0.9).step()
        params[1].grad = params[0].detach()
        with refused(ValueError, "overlap", "grad"):
            FusedSGD(groups(params), lr=0.1).step()
        assert_same_bits(whole, before)


def test_quantized_weights_are_refused(device):
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    with quantized_model_init(recipe=Float8CurrentScaling()):
        layer = te.Linear(32, 32, device=device)
    layer.weight.grad = torch.zeros(32, 32, device=device)
    with refused(ValueError, "FusedSGD", "Float8Tensor", "FusedAdam"):
        FusedSGD(layer.parameters(), lr=0.1).step()


def test_buffers_have_the_layout_of_gradients(device):
    """torch.optim.SGD's momentum has the layout of its gradient; the parameter is transposed."""
    weights = [torch.nn.Parameter(torch.randn(5, 6, device=device).t()) for _ in range(2)]
    weights[1].data.copy_(weights[0].data)
    grads = [torch.randn(6, 5, device=device) for _ in range(2)]
    theirs = torch.optim.SGD(weights[:1], lr=0.1, momentum=0.9)
    weights[0].grad = grads[0]
    theirs.step()
    ours = FusedSGD(weights[1:], lr=0.1, momentum=0.9)
    ours.load_state_dict(theirs.state_dict())
    weights[1].data.copy_(weights[0].data)
    for weight, optimizer in zip(weights, (theirs, ours), strict=True):
        weight.grad = grads[1]
        optimizer.step()
    torch.testing.assert_close(weights[1], weights[0])


@pytest.mark.parametrize("name", ["found_inf", "grad_scale"])
def test_a_gate_that_it_does_not_read_is_refused(device, name):
    (weight,) = params = parameters(device)[:1]
    give_grads(params)
    optimizer, before = FusedSGD(params, lr=0.1), weight.detach().clone()
    setattr(optimizer, name, torch.ones((), device=device))
    with refused(ValueError, "FusedSGD", f"'{name}' is set", "skip a step"):
        optimizer.step()
    assert_same_bits(weight, before)
