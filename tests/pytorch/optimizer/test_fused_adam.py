"""FusedAdam on plain tensors: each step against float64 from the states it began with, the oracle against torch's Adam
and AdamW over many steps; formats of states; groups, missing gradients, schedulers, GradScaler, torch.compile."""

import pytest
import torch
from support import DTYPES, assert_same_bits, assert_within, randn, rounding, wide

from transformer_engine.pytorch.optimizers import FusedAdam

from .cases import (
    adam_oracle,
    assert_same,
    everything,
    give_grads,
    kept_error,
    more_steps,
    parameters,
    trained,
)

STATES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}


def check_step(optimizer, step, **oracle):
    """Every weight and state of one more step against float64, from the states that are there."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    give_grads(params, step)
    before = []
    for p in params:
        if optimizer.state.get(p):
            before.append([wide(optimizer.get_unscaled_state(p, n)).clone() for n in ("exp_avg", "exp_avg_sq")])
        else:
            before.append([torch.zeros(p.shape, dtype=torch.float64)] * 2)
        master = optimizer.master_weights and optimizer.state.get(p)
        before[-1].append(wide(optimizer.get_unscaled_state(p, "master_param") if master else p).clone())
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == step + 1
    for p, (m, v, w) in zip(params, before, strict=True):
        (w, m, v), bounds = adam_oracle(wide(p.grad), w, m, v, step=step + 1, **oracle)
        for name, want, bound in (("exp_avg", m, bounds[1]), ("exp_avg_sq", v, bounds[2])):
            kept = kept_error(want, getattr(optimizer, f"{name}_dtype"), name == "exp_avg_sq")
            assert_within(optimizer.get_unscaled_state(p, name), want, 2 * bound + kept, name)
        if optimizer.master_weights:
            kept = kept_error(w, optimizer.master_weight_dtype)
            assert_within(optimizer.get_unscaled_state(p, "master_param"), w, 2 * bounds[0] + kept, "master")
        assert_within(p, w, 2 * bounds[0] + rounding(w, p.dtype), "weight")


@pytest.mark.parametrize("bias_correction", (True, False))
@pytest.mark.parametrize("adam_w_mode", (True, False))
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_match_float64(device, dtype, adam_w_mode, bias_correction):
    optimizer = FusedAdam(
        parameters(device, dtype), **OPTIONS, adam_w_mode=adam_w_mode, bias_correction=bias_correction
    )
    oracle = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1}
    for step in range(3):
        check_step(optimizer, step, **oracle, decoupled=adam_w_mode, bias_correction=bias_correction)


@pytest.mark.parametrize("exp_avg_sq", STATES)
@pytest.mark.parametrize("exp_avg", STATES)
@pytest.mark.parametrize("master", (None, torch.float32, torch.float16))
def test_every_format_of_states_matches_float64(device, exp_avg, exp_avg_sq, master):
    fp8 = torch.uint8 in (exp_avg, exp_avg_sq)
    if fp8 and master is torch.float16:
        pytest.skip("refused: test_errors")
    options = {} if master is None else {"master_weights": True, "master_weight_dtype": master}
    weight = torch.float32 if fp8 and master is None else torch.bfloat16
    optimizer = FusedAdam(
        parameters(device, weight), **OPTIONS, exp_avg_dtype=exp_avg, exp_avg_sq_dtype=exp_avg_sq, **options
    )
    for p in optimizer.param_groups[0]["params"]:
        optimizer.initialize_state(p)
    for step in range(3):
        check_step(optimizer, step, lr=3e-3, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.1)
    kept = optimizer.state[optimizer.param_groups[0]["params"][-1]]
    assert (kept["exp_avg"].dtype, kept["exp_avg_sq"].dtype) == (exp_avg, exp_avg_sq)
    assert ("master_param" in kept) == (master is not None)


@pytest.mark.parametrize("adam_w_mode", (True, False))
def test_the_oracle_is_torchs(adam_w_mode):
    """In float64, where nothing but the order of operations differs."""
    p = torch.nn.Parameter(randn(500).double())
    theirs = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)([p], **OPTIONS)
    w, m, v = p.detach().clone(), torch.zeros(500).double(), torch.zeros(500).double()
    for step in range(1, 21):
        p.grad = randn(500).double()
        (w, m, v), _ = adam_oracle(
            p.grad, w, m, v, lr=3e-3, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.1, step=step,
            decoupled=adam_w_mode,
        )  # fmt: skip
        theirs.step()
        assert (p - w).abs().max() < 1e-13


def test_remainders_are_masters(device):
    """The low half of the masters that one keeps whole; the weight is the high half, plus one where it is < 0."""
    options = OPTIONS | {"master_weights": True}
    a, b = (trained(parameters(device, torch.bfloat16), 6, **options, store_param_remainders=r) for r in (True, False))
    for p, q in zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True):
        remainder, bits = a.state[p]["master_param"], b.state[q]["master_param"].view(torch.int32)
        assert_same_bits(remainder, bits.to(torch.int16))
        assert_same_bits(p.detach().view(torch.int16), ((bits >> 16) + (remainder < 0)).to(torch.int16))


def test_remainders_beside_other_weights(device):
    """Those have float32 masters, as in any model with float32 norms."""
    params = parameters(device, torch.bfloat16, (50,)) + parameters(device, torch.float32, (40,), seed=1)
    optimizer = trained(params, 2, master_weights=True, store_param_remainders=True)
    assert [optimizer.state[p]["master_param"].dtype for p in params] == [torch.int16, torch.float32]
    assert_same_bits(optimizer.state[params[1]]["master_param"], params[1].detach())


def test_masters_begin_with_the_weights(device):
    for dtype, master in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        params = parameters(device, dtype)
        before = [p.detach().float() for p in params]
        optimizer = FusedAdam(params, lr=0.0, master_weights=True, master_weight_dtype=master)
        more_steps(optimizer, 1)
        for p, w in zip(params, before, strict=True):
            assert_within(optimizer.get_unscaled_state(p, "master_param"), wide(w), kept_error(wide(w), master))


@pytest.mark.parametrize(
    "options, dtype, bytes_beside",
    [
        ({"master_weights": True}, torch.bfloat16, 12),
        ({"master_weights": True, "store_param_remainders": True}, torch.bfloat16, 10),
        ({"master_weights": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
         torch.bfloat16, 8),
        ({"master_weights": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16,
          "store_param_remainders": True}, torch.bfloat16, 6),
        ({"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}, torch.float32, 2),
    ],
    ids=str,
)  # fmt: skip
def test_bytes_a_parameter(device, options, dtype, bytes_beside):
    params = parameters(device, dtype, (4096,))
    optimizer = trained(params, 2, **options)
    size = sum(t.numel() * t.element_size() for t in optimizer.state[params[0]].values())
    assert size == bytes_beside * 4096
    assert all(t.numel() == 2 for t in optimizer._scales.get(params[0], {}).values())


def test_ten_thousand_tensors_are_one(device):
    sizes = [(i * 37) % 11 for i in range(10_000)]
    flat = parameters(device, torch.bfloat16, (sum(sizes),))
    cut = [torch.nn.Parameter(t.clone()) for t in flat[0].detach().split(sizes)]
    one, many = (FusedAdam(p, master_weights=True, weight_decay=0.1) for p in (flat, cut))
    for step in range(2):
        give_grads(flat, step)
        for p, g in zip(cut, flat[0].grad.split(sizes), strict=True):
            p.grad = g
        one.step()
        many.step()
    assert_same_bits(torch.cat([p.detach() for p in cut]), flat[0].detach())
    for name in ("exp_avg", "exp_avg_sq", "master_param"):
        assert_same_bits(torch.cat([many.state[p][name] for p in cut]), one.state[flat[0]][name], name)


def test_groups_have_their_own_options(device):
    """As optimizers of their own would step them, whatever the dtypes; an empty group counts its steps too."""
    options = [{"lr": 1e-2, "weight_decay": 0.3}, {"lr": 1e-3, "betas": (0.5, 0.6), "eps": 1e-4}]
    dtypes = (torch.float32, torch.bfloat16)

    def both():
        return [parameters(device, d, (70, 7)) for d in dtypes]

    together = FusedAdam([{"params": p, **o} for p, o in zip(both(), options, strict=True)] + [{"params": []}])
    alone = [FusedAdam(p, **o) for p, o in zip(both(), options, strict=True)]
    for step in range(3):
        for one in (together, *alone):
            for group in one.param_groups:
                give_grads(group["params"], step)
            one.step()
    for group, one in zip(together.param_groups, alone, strict=False):
        for p, q in zip(group["params"], one.param_groups[0]["params"], strict=True):
            assert_same_bits(p, q)
    assert [group["step"] for group in together.param_groups] == [3, 3, 3]


def test_one_group_of_many_kinds(device):
    params = [p for d in DTYPES for p in parameters(device, d, (33, 0, 5))]
    optimizer = FusedAdam(params, **OPTIONS)
    for step in range(2):
        check_step(optimizer, step, lr=3e-3, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.1)


def test_parameters_without_a_gradient_stay(device):
    params = parameters(device)
    optimizer = FusedAdam(params, lr=0.1)
    give_grads(params)
    params[3].grad = None
    before = params[3].detach().clone()
    optimizer.step()
    assert_same_bits(params[3], before)
    assert not optimizer.state.get(params[3]) and optimizer.state[params[4]]
    give_grads(params, 1)
    optimizer.step()
    assert optimizer.state[params[3]] and not torch.equal(params[3], before)


def test_parameters_and_states_that_change_hands(device):
    """A step caches its checks of objects, and checks another object again."""
    a, b = trained(parameters(device), 1), trained(parameters(device), 1)
    params = list(a.param_groups[0]["params"])
    for p in params:
        a.state[p] = {name: t.clone() for name, t in a.state[p].items()}
    more_steps(a, 1, 1)
    more_steps(b, 1, 1)
    assert_same(everything(a), everything(b))
    new = torch.nn.Parameter(params[4].detach().clone())
    a.param_groups[0]["params"][4] = new
    kept = params[4].detach().clone()
    more_steps(a, 1, 2)
    assert_same_bits(params[4], kept)
    assert a.state[new] and not torch.equal(new, kept)


def test_decoupled_gradients(device):
    a, b = (parameters(device, torch.bfloat16) for _ in range(2))
    plain, decoupled = FusedAdam(a, master_weights=True), FusedAdam(b, master_weights=True, use_decoupled_grad=True)
    give_grads(a)
    for p, q in zip(a[1:], b[1:], strict=True):
        q.decoupled_grad = p.grad
    a[0].grad = None
    plain.step()
    decoupled.step()
    for p, q in zip(a, b, strict=True):
        assert_same_bits(p, q)
    decoupled.zero_grad(set_to_none=False)
    assert not b[4].decoupled_grad.any()
    decoupled.zero_grad()
    assert all(q.decoupled_grad is None for q in b)


def test_float32_gradients_of_bfloat16_weights_are_not_copied(device):
    """They are read as they are: what they are beyond bfloat16 counts."""
    p = parameters(device, torch.bfloat16, (500,))
    p[0].decoupled_grad = randn(500, device=device)
    optimizer = FusedAdam(p, use_decoupled_grad=True, master_weights=True, betas=(0.5, 0.9))
    optimizer.step()
    assert_same_bits(optimizer.state[p[0]]["exp_avg"], 0.5 * p[0].decoupled_grad)


def test_gradients_that_lie_otherwise(device):
    p = torch.nn.Parameter(randn(6, 5, device=device))
    q = torch.nn.Parameter(p.detach().clone())
    p.grad = randn(5, 6, device=device).t()
    q.grad = p.grad.contiguous()
    FusedAdam([p]).step()
    FusedAdam([q]).step()
    assert_same_bits(p, q)


def test_inf_and_nan_pass(device):
    params = parameters(device, sizes=(9, 9))
    give_grads(params)
    params[0].grad[2], params[0].grad[5] = torch.inf, torch.nan
    optimizer = FusedAdam(params)
    optimizer.step()
    assert params[0][2].isnan() and params[0][5].isnan() and params[1].isfinite().all()
    assert optimizer.state[params[0]]["exp_avg"][2] == torch.inf


def test_closure_schedulers_and_tensors_as_lr(device):
    a, b = parameters(device), parameters(device)
    ours, theirs = FusedAdam(a, lr=0.1), FusedAdam(b, lr=torch.tensor(0.1))
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step) for o in (ours, theirs)]
    for step in range(3):
        for params, optimizer, schedule in zip((a, b), (ours, theirs), schedules, strict=True):
            give_grads(params, step)
            assert optimizer.step(lambda: 7.0) == 7.0
            schedule.step()
    for p, q in zip(a, b, strict=True):
        assert_same_bits(p, q)
    x = a[4]

    def closure():
        ours.zero_grad()
        loss = x.square().sum()
        loss.backward()
        return loss

    before = x.detach().clone()
    assert ours.step(closure).requires_grad and not torch.equal(x, before)


def test_hooks_run(device):
    optimizer, seen = FusedAdam(parameters(device)), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("behind"))
    more_steps(optimizer, 1)
    assert seen == ["before", "behind"]


def test_gradscaler_skips_and_unscales(device):
    a, b = parameters(device), parameters(device)
    ours, plain = FusedAdam(a, lr=0.1), FusedAdam(b, lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    for step in range(3):
        give_grads(a, step, scale=1024.0)
        scaler.scale(torch.zeros(1, device=device))
        if step == 1:
            a[3].grad[0] = torch.inf
            before = everything(ours)
        scaler.step(ours)
        scaler.update()
        if step == 1:
            assert_same(everything(ours), before)
            scaler.update(1024.0)
        else:
            give_grads(b, step)
            plain.step()
    for p, q in zip(a, b, strict=True):
        assert_same_bits(p, q)


def test_versions_move(device):
    """A backward that saved a weight detects the step."""
    x, w = randn(3, 3, device=device, requires_grad=True), torch.nn.Parameter(randn(3, 3, device=device))
    y = (x @ w).sum()
    w.grad = torch.ones_like(w)
    FusedAdam([w]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_compiled_around_the_step(device):
    def run(compiled):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8, device=device)
        optimizer = FusedAdam(model.parameters(), lr=0.1, weight_decay=0.1)
        x = randn(4, 8, device=device)

        def step():
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        call = torch.compile(step, backend="aot_eager") if compiled else step
        return [call() for _ in range(3)], everything(optimizer)

    (losses, state), (wanted_losses, wanted) = run(True), run(False)
    assert_same(state, wanted)
    assert all(torch.equal(a, b) for a, b in zip(losses, wanted_losses, strict=True))


@pytest.mark.gpu
def test_cpu_and_gpu_give_the_same_bits():
    for options in ({}, {"master_weights": True}, {"exp_avg_dtype": torch.bfloat16, "adam_w_mode": False}):
        found = [everything(trained(parameters(d, torch.bfloat16), 4, **OPTIONS, **options)) for d in ("cuda", "cpu")]
        assert_same({name: t.cpu() for name, t in found[0].items()}, found[1])


@pytest.mark.gpu
def test_one_group_on_several_devices():
    params = parameters("cpu") + parameters("cuda")
    optimizer, alone = (FusedAdam(p, **OPTIONS) for p in (params, parameters("cpu")))
    for step in range(2):
        give_grads(alone.param_groups[0]["params"], step)
        for p, q in zip(params, alone.param_groups[0]["params"] * 2, strict=True):
            p.grad = q.grad.to(p.device)
        optimizer.step()
        alone.step()
    for p, q in zip(params, alone.param_groups[0]["params"] * 2, strict=True):
        assert_same_bits(p.detach().cpu(), q.detach())
