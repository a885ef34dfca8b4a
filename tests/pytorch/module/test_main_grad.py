# fuse_wgrad_accumulation: weight gradients added into main_grad, its protocol, and bad input to it and to delayed ones,
# on every module that has weights.
import copy

import pytest
import torch
from support import DTYPES, assert_same_bits, assert_within, randn, refused, rounding, sum_error, wide

import transformer_engine.pytorch as te

from .weight_grad_cases import (
    IN,
    backward,
    build,
    every_family,
    gradients,
    linear,
    microbatch,
    mlp,
    twins,
    weights,
    with_main_grads,
)

# ---- fused accumulation ----


@every_family
@pytest.mark.parametrize("delay", [False, True], ids=["immediate", "delayed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_main_grad_accumulates_in_float32(device, dtype, delay, family):
    """Compared with the float64 product of the operands of the plain module's .grad: here .grad itself in float64, so
    the bound is one rounding to the weight's dtype, a float32 sum of 15 products and the addition to the earlier
    value."""
    module, plain = twins(family, device, dtype, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    with_main_grads(module)
    before = {n: wide(p.main_grad) for n, p in weights(module).items()}
    for m in (module, plain):
        backward(m, *microbatch(device, dtype, 1))
    if delay:
        module.backward_dw()
    for name, p in weights(plain).items():
        got, start, product = weights(module)[name].main_grad, before[name], wide(p.grad)
        scale = product.abs().max() * 15
        bound = rounding(product, dtype) + sum_error(scale, 16) + rounding(start.abs() + product.abs(), torch.float32)
        assert got.dtype == torch.float32
        assert_within(got, start + product, bound, name)
        assert weights(module)[name].grad is None
    others = [name for name in gradients(plain) if name not in weights(plain)]
    assert others and all(gradients(module)[n] is not None for n in others)
    for name in others:  # a bias's sum over tokens may be another kernel's beside a float32 product
        want = wide(gradients(plain)[name])
        bound = 2 * rounding(want, dtype) + sum_error(want.abs().max() * 15, 15)
        assert_within(gradients(module)[name], want, bound, name)


@every_family
def test_delayed_main_grad_has_the_same_bits(device, family):
    delayed, now = twins(family, device, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    now = build(family, device, fuse_wgrad_accumulation=True)
    now.load_state_dict(delayed.state_dict())
    for module in (delayed, now):
        with_main_grads(module, value=0.5)
        for seed in (1, 2):
            backward(module, *microbatch(device, torch.float32, seed))
    delayed.backward_dw()
    delayed.backward_dw()
    for name, p in weights(now).items():
        assert_same_bits(weights(delayed)[name].main_grad, p.main_grad, name)


@pytest.mark.parametrize("how", ["is_first_microbatch", "overwrite_main_grad"])
@every_family
def test_first_microbatch_overwrites(device, family, how):
    module = with_main_grads(build(family, device, fuse_wgrad_accumulation=True))
    fresh = copy.deepcopy(module)
    with_main_grads(fresh, value=0.0)
    options = {"is_first_microbatch": True} if how == "is_first_microbatch" else {}
    for p in weights(module).values():
        p.main_grad.fill_(float("nan"))  # overwritten means not read
        if how == "overwrite_main_grad":
            p.overwrite_main_grad = True
    backward(module, *microbatch(device, torch.float32, 1), **options)
    backward(fresh, *microbatch(device, torch.float32, 1), is_first_microbatch=False)
    for name, p in weights(fresh).items():
        assert_same_bits(weights(module)[name].main_grad + 0.0, p.main_grad + 0.0, name)  # 0 + -0 is 0


@pytest.mark.parametrize("delay", [False, True], ids=["immediate", "delayed"])
@pytest.mark.parametrize("zero", [False, True])
@every_family
def test_a_dummy_gradient_fires_the_hooks(device, family, zero, delay):
    """An owner of main_grad sets grad_added_to_main_grad to False and waits for autograd's hooks."""
    module = with_main_grads(build(family, device, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay), value=0.0)
    fired = []
    for name, p in weights(module).items():
        p.grad_added_to_main_grad = False
        p.zero_out_wgrad = zero
        p.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    backward(module, *microbatch(device, torch.float32, 1))
    if delay:
        assert not any(p.grad_added_to_main_grad for p in weights(module).values())
        module.backward_dw()
    else:
        assert sorted(fired) == sorted(weights(module))
    for p in weights(module).values():
        assert p.grad_added_to_main_grad
        assert p.grad.shape == p.shape and p.grad.dtype == p.dtype
        assert p.main_grad.abs().sum() > 0
        if zero:
            assert p.grad.eq(0).all()


def test_dummies_share_one_buffer():
    first, second = (te.module.base.get_dummy_wgrad([3, 5], torch.float32, device="cpu") for _ in range(2))
    assert first is not second and first.data_ptr() == second.data_ptr()
    assert te.module.base.get_dummy_wgrad([3, 5], torch.float32, zero=True, device="cpu").eq(0).all()


def test_get_main_grad_is_asked_in_backward(device):
    module = build(linear, device, fuse_wgrad_accumulation=True)
    buffers = []

    def get_main_grad():
        buffers.append(torch.zeros(module.weight.shape, device=device))
        return buffers[-1]

    module.weight.get_main_grad = get_main_grad
    x, generator = microbatch(device, torch.float32, 1)
    y = module(x)
    assert not buffers
    y.backward(torch.randn(y.shape, generator=generator).to(y))
    assert len(buffers) == 1 and buffers[0].abs().sum() > 0


def test_two_uses_in_a_step_add_up(device):
    for options in ({"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}):
        module, plain = twins(linear, device, **options)
        with_main_grads(module, value=0.0)
        for m in (module, plain):
            x, _ = microbatch(device, torch.float32, 1)
            (m(x).sum() + (m(2 * x) ** 2).sum()).backward()
        if module.need_backward_dw():
            module.backward_dw()
            module.backward_dw()
        got = module.weight.grad if module.weight.grad is not None else module.weight.main_grad
        want = wide(plain.weight.grad)
        assert_within(got, want, sum_error(want.abs().max() * 30, 64), str(options))


# ---- bad input ----


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda w: None, ("main_grad None", "torch.zeros([40, 32]")),
        (lambda w: torch.zeros(3, 3, device=w.device), ("[3, 3]", "[40, 32]")),
        (lambda w: torch.zeros(w.shape, dtype=torch.int32, device=w.device), ("torch.int32", "torch.float32")),
        (lambda w: torch.zeros(w.shape, dtype=torch.bfloat16, device=w.device), ("torch.bfloat16", "torch.float32")),
        (lambda w: torch.zeros(*w.shape[::-1], device=w.device).t(), ("not contiguous", "contiguous")),
        (lambda w: torch.zeros(w.shape, device="meta"), ("meta", str(IN))),
        (lambda w: "buffer", ("'buffer'", "get_main_grad")),
    ],
    ids=["missing", "shape", "integers", "narrow", "strides", "device", "no_tensor"],
)
def test_a_bad_main_grad_is_named_before_anything_runs(device, spoil, words):
    module = build(linear, device, fuse_wgrad_accumulation=True)
    bad = spoil(module.weight)
    if bad is not None:
        module.weight.main_grad = bad
    x, generator = microbatch(device, torch.float32, 1)
    with refused(ValueError, "Linear", "'weight'", *words):
        module(x)
    module.weight.main_grad = torch.zeros_like(module.weight)
    backward(module, x, generator)
    assert module.weight.main_grad.abs().sum() > 0 and module.bias.grad is not None


def test_a_bad_lazy_main_grad_is_named_in_backward(device):
    module = build(linear, device, fuse_wgrad_accumulation=True)
    module.weight.get_main_grad = lambda: torch.zeros(2, 2, device=device)
    x, generator = microbatch(device, torch.float32, 1)
    y = module(x)
    with refused(ValueError, "Linear", "'weight'", "[2, 2]", "[40, 32]"):
        y.backward(torch.randn(y.shape, generator=generator).to(y))


@pytest.mark.parametrize("which", ["input", "gradient"])
def test_changing_what_a_gradient_is_made_of_is_named(device, which):
    module = build(linear, device, delay_wgrad_compute=True)
    x, generator = microbatch(device, torch.float32, 1)
    x = x.detach()
    y = module(x)
    dy = torch.randn(y.shape, generator=generator).to(y)
    y.backward(dy)
    (x if which == "input" else dy).zero_()
    with refused(RuntimeError, "Linear", "backward_dw", which, "'weight'", "in place", "drop_backward_dw"):
        module.backward_dw()
    assert module.weight.grad is None
    module.drop_backward_dw()


@pytest.mark.parametrize("delay", [True, False])
def test_one_row_and_a_frozen_part(device, delay):
    """An input without leading dimensions is one row."""
    found = []
    for shape in ((16,), (1, 16)):
        torch.manual_seed(0)
        options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": delay, "parameters_split": ["a", "b"]}
        module = te.Linear(16, 16, device=device, **options)
        module.a_weight.requires_grad_(False)
        module.b_weight.main_grad = torch.zeros(8, 16, device=device)
        (module(randn(*shape, device=device)).flatten() * torch.arange(16.0, device=device)).sum().backward()
        if delay:
            module.backward_dw()
        found.append((module.b_weight.main_grad, module.a_bias.grad, module.b_bias.grad))
    for got, want in zip(*found, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("option", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
def test_a_computed_weight_is_refused(device, option):
    module = torch.nn.utils.parametrizations.weight_norm(build(linear, device, **{option: True}))
    with refused(ValueError, "Linear", "'weight'", "computed from other tensors", option):
        module(microbatch(device, torch.float32, 1)[0])


def test_another_parameter_than_backward_saw_is_named(device):
    module = build(linear, device, delay_wgrad_compute=True)
    backward(module, *microbatch(device, torch.float32, 1))
    seen = module.weight
    module.weight = torch.nn.Parameter(seen.detach().clone())
    with refused(RuntimeError, "Linear", "'weight'", "not the parameter that backward() saw", "FSDP2"):
        module.backward_dw()
    module.weight = seen
    module.backward_dw()
    assert seen.grad is not None


@pytest.mark.parametrize("spoiled", ["fc1_weight", "fc2_weight"])
def test_a_main_grad_gone_bad_before_backward_dw_costs_nothing(device, spoiled):
    module, twin = (
        with_main_grads(m, value=0.0)
        for m in twins(mlp, device, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    )
    twin.fuse_wgrad_accumulation = True
    backward(module, *microbatch(device, torch.float32, 1))
    backward(twin, *microbatch(device, torch.float32, 1))
    p = module.get_parameter(spoiled)
    good, p.main_grad = p.main_grad, torch.zeros(2, 2, device=device)
    with refused(ValueError, "LayerNormMLP", spoiled, "[2, 2]"):
        module.backward_dw()
    assert all(w.main_grad.eq(0).all() for w in weights(module).values())
    p.main_grad = good
    module.backward_dw()
    for name, w in weights(twin).items():
        assert_same_bits(module.get_parameter(name).main_grad, w.main_grad, name)


@pytest.mark.parametrize("value", [2, "yes", torch.tensor(True)], ids=str)
def test_a_bad_first_microbatch_is_named(device, value):
    module = with_main_grads(build(linear, device, fuse_wgrad_accumulation=True))
    with refused(ValueError, "Linear", "'is_first_microbatch'", "True, False or None"):
        module(microbatch(device, torch.float32, 1)[0], is_first_microbatch=value)


def test_compiling_a_delayed_gradient_is_refused_by_name(device):
    module = with_main_grads(build(linear, device, delay_wgrad_compute=True))
    x, _ = microbatch(device, torch.float32, 1)
    with pytest.raises(Exception, match=r"not available under torch\.compile"):
        torch.compile(module, fullgraph=True, backend="aot_eager")(x)


def test_overlapped_communication_excludes_delay():
    from transformer_engine.pytorch.module.weight_grad import WeightGradStore

    with refused(ValueError, "delay_wgrad_compute", "ub_bulk_wgrad"):
        WeightGradStore(True, True)
    assert not WeightGradStore(False, True).delay_wgrad_compute()


@pytest.mark.parametrize("waiting", [("q_weight",), ("k_weight",), ("q_weight", "k_weight"), ()], ids=str)
def test_parts_of_a_weight_get_a_dummy_where_the_owners_of_all_wait_for_one(device, waiting):
    """For autograd they are one matrix: a dummy for one would be a gradient of made-up values for the other."""
    split = {"q": 3, "k": 5}
    module = te.Linear(IN, 8, device=device, parameters_split=split, fuse_wgrad_accumulation=True)
    with_main_grads(module)
    for name in waiting:
        getattr(module, name).grad_added_to_main_grad = False
    module(torch.ones(4, IN, device=device)).sum().backward()
    for name in ("q_weight", "k_weight"):
        parameter = getattr(module, name)
        assert (parameter.grad is not None) == (len(waiting) == 2)
        assert getattr(parameter, "grad_added_to_main_grad", None) == (True if name in waiting else None)
