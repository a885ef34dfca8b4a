# delay_wgrad_compute: weight gradients that wait for backward_dw(), on every module that has weights; and what delaying
# and accumulating into main_grad have in common: the parts of a split weight, threads, steps. The bitwise law: delayed
# equals immediate, over several microbatches too.
import copy
import gc
import pickle
import weakref

import pytest
import torch
from support import DTYPES, assert_same_bits, assert_within, in_threads, refused, sum_error, wide

import transformer_engine.pytorch as te
from transformer_engine.pytorch.module.weight_grad import Pending

from .weight_grad_cases import (
    assert_same_gradients,
    backward,
    build,
    every_family,
    gradients,
    linear,
    microbatch,
    mlp,
    split_linear,
    split_norm_linear,
    twins,
    weights,
    with_main_grads,
)

# ---- delayed ----


@every_family
@pytest.mark.parametrize("dtype", DTYPES)
def test_delayed_equals_immediate(device, dtype, family):
    delayed, immediate = twins(family, device, dtype, delay_wgrad_compute=True)
    for seed in (1, 2):  # .grad is set, then added to
        for module in (delayed, immediate):
            x, generator = microbatch(device, dtype, seed)
            backward(module, x, generator)
            x.grad, module.kept = None, x.grad
        assert_same_bits(delayed.kept, immediate.kept, "input's gradient")
        delayed.backward_dw()
        assert_same_gradients(gradients(delayed), gradients(immediate))


@every_family
def test_several_microbatches_are_first_in_first_out(device, family):
    delayed, immediate = twins(family, device, delay_wgrad_compute=True)
    for module in (delayed, immediate):
        for seed in (1, 2, 3):
            backward(module, *microbatch(device, torch.float32, seed))
    assert all(p.grad is None for p in weights(delayed).values())
    for _ in range(3):
        delayed.backward_dw()
    assert_same_gradients(gradients(delayed), gradients(immediate))


@every_family
def test_delayed_under_autocast(device, family):
    delayed, immediate = twins(family, device, delay_wgrad_compute=True)
    for module in (delayed, immediate):
        x, generator = microbatch(device, torch.float32, 1)
        with torch.autocast(device, torch.bfloat16):
            y = module(x)
        y.backward(torch.randn(y.shape, generator=generator).to(y))
    delayed.backward_dw()
    assert all(p.grad.dtype == torch.float32 for p in delayed.parameters())
    assert_same_gradients(gradients(delayed), gradients(immediate))


@every_family
def test_backward_dw_without_a_backward(device, family):
    module = build(family, device, delay_wgrad_compute=True)
    assert module.need_backward_dw()
    name = "fc2_weight" if "fc2_weight" in weights(module) else next(iter(weights(module)))
    with refused(RuntimeError, type(module).__name__, "backward_dw", name, "after each backward()"):
        module.backward_dw()
    backward(module, *microbatch(device, torch.float32, 1))
    module.backward_dw()
    after = {name: g.clone() for name, g in gradients(module).items()}
    ran = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: ran.append(1))
    with refused(RuntimeError, "backward_dw"):
        module.backward_dw()
    assert not ran
    assert_same_gradients(gradients(module), after)


def test_backward_dw_changes_nothing_when_one_product_has_nothing(device):
    module = build(mlp, device, delay_wgrad_compute=True)
    module.fc1_weight.requires_grad_(False)
    x, generator = microbatch(device, torch.float32, 1)
    backward(module, x, generator)
    module.fc1_weight.requires_grad_(True)
    with refused(RuntimeError, "fc1_weight"):
        module.backward_dw()
    assert module.fc2_weight.grad is None
    module.fc1_weight.requires_grad_(False)
    module.backward_dw()
    assert module.fc2_weight.grad is not None and module.fc1_weight.grad is None


def test_hooks_run_in_order_after_the_gradients(device):
    module = build(mlp, device, delay_wgrad_compute=True)
    seen = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append(module.fc1_weight.grad is not None))
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: seen.append("second"))
    backward(module, *microbatch(device, torch.float32, 1))
    assert seen == []
    module.backward_dw()
    assert seen == [True, "second"]


def test_parameters_say_that_their_gradients_come_later(device):
    later = build(mlp, device, delay_wgrad_compute=True)
    marked = {n for n, p in later.named_parameters() if getattr(p, "skip_backward_post_hook", False)}
    assert marked == {"fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"}
    now = build(mlp, device)
    assert not any(hasattr(p, "skip_backward_post_hook") for p in now.parameters())
    assert not now.need_backward_dw()
    now.backward_dw()  # nothing to do, nothing to complain of


def test_an_inference_call_leaves_nothing_behind(device):
    module = build(linear, device, delay_wgrad_compute=True)
    with torch.no_grad():
        module(microbatch(device, torch.float32, 1)[0])
    with refused(RuntimeError, "backward_dw"):
        module.backward_dw()


def test_frozen_weights_are_skipped(device):
    module, twin = twins(mlp, device, delay_wgrad_compute=True)
    for m in (module, twin):
        m.fc2_weight.requires_grad_(False)
        backward(m, *microbatch(device, torch.float32, 1))
    module.backward_dw()
    assert_same_gradients(gradients(module), gradients(twin))


def test_copies_and_pickles_have_nothing_left(device):
    module = build(mlp, device, delay_wgrad_compute=True)
    backward(module, *microbatch(device, torch.float32, 1))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.need_backward_dw()
        with refused(RuntimeError, "backward_dw"):
            other.backward_dw()
    module.backward_dw()
    assert module.fc1_weight.grad is not None


def test_threads_share_a_module(device):
    module, twin = twins(mlp, device, delay_wgrad_compute=True)
    in_threads(4, lambda i: backward(module, *microbatch(device, torch.float32, 5)))
    for _ in range(4):
        backward(twin, *microbatch(device, torch.float32, 5))
        module.backward_dw()
    # Four equal gradients: their sum does not depend on the threads' order.
    assert_same_gradients(
        {n: g for n, g in gradients(module).items() if n.startswith("fc")},
        {n: g for n, g in gradients(twin).items() if n.startswith("fc")},
    )


# ---- parts of a split weight, each for itself ----


@pytest.mark.parametrize("frozen", [("query",), ("key",), ("query", "value")])
@pytest.mark.parametrize("option", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
@pytest.mark.parametrize("family", [split_linear, split_norm_linear], ids=lambda f: f.__name__)
def test_frozen_parts_of_a_split_weight(device, family, option, frozen):
    """A part that is frozen needs no main_grad and gets nothing; the others get theirs; biases are for themselves."""
    module, plain = twins(family, device, **{option: True})
    for m in (module, plain):
        for part in frozen:
            getattr(m, f"{part}_weight").requires_grad_(False)
        m.key_bias.requires_grad_(False)
    for p in weights(module).values():
        if p.requires_grad:
            p.main_grad = torch.zeros_like(p)
    for m in (module, plain):
        backward(m, *microbatch(device, torch.float32, 1))
    if option == "delay_wgrad_compute":
        module.backward_dw()
        assert_same_gradients(gradients(module), gradients(plain))
        return
    for name, p in plain.named_parameters():
        own = module.get_parameter(name)
        got = getattr(own, "main_grad", None) if p.dim() == 2 else own.grad
        assert (got is None) == (p.grad is None), name
        if got is not None:
            assert_within(got, wide(p.grad), sum_error(wide(p.grad).abs().max() * 15, 16), name)
        assert own.grad is None or p.dim() == 1


# ---- several threads, several steps ----


def test_threads_lose_no_addition(device):
    """256 additions of ones: exact in float32 in any order."""
    module = te.Linear(256, 256, bias=False, fuse_wgrad_accumulation=True, device=device)
    module.weight.main_grad = torch.zeros_like(module.weight)
    x = torch.ones(1, 256, device=device)

    def steps(_):
        for _ in range(64):
            module(x).sum().backward()

    in_threads(4, steps)
    assert module.weight.main_grad.eq(256).all()


def test_freezing_after_backward_leaves_nothing_for_later(device):
    module, twin = twins(linear, device, delay_wgrad_compute=True)
    backward(module, *microbatch(device, torch.float32, 1))
    module.weight.requires_grad_(False)
    module.backward_dw()
    assert module.weight.grad is None
    module.weight.requires_grad_(True)
    module.zero_grad()
    for m in (module, twin):
        backward(m, *microbatch(device, torch.float32, 2))
    module.backward_dw()
    assert_same_gradients(gradients(module), gradients(twin))


def test_a_step_given_up_can_be_dropped(device):
    module, twin = twins(mlp, device, delay_wgrad_compute=True)
    backward(module, *microbatch(device, torch.float32, 1))
    module.drop_backward_dw()
    for m in (module, twin):
        m.zero_grad()
        backward(m, *microbatch(device, torch.float32, 2))
    module.backward_dw()
    assert_same_gradients(gradients(module), gradients(twin))
    with refused(RuntimeError, "backward_dw"):
        module.backward_dw()


def test_what_waits_lives_no_longer_than_the_module(device):
    module = build(mlp, device, delay_wgrad_compute=True)
    x, generator = microbatch(device, torch.float32, 1)
    y = module(x)
    dy = torch.randn(y.shape, generator=generator).to(y)
    y.backward(dy)
    kept = weakref.ref(dy)
    gc.disable()
    try:
        del module, y, dy
        assert kept() is None, "a reference cycle holds the gradient"
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "assign"])
def test_copies_carry_the_marks_of_parameters(device, how):
    module = build(mlp, device, delay_wgrad_compute=True, set_parallel_mode=True)
    if how == "assign":
        other = build(mlp, device, delay_wgrad_compute=True, set_parallel_mode=True)
        other.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    else:
        other = copy.deepcopy(module) if how == "deepcopy" else pickle.loads(pickle.dumps(module))
    for name, p in module.named_parameters():
        assert vars(other.get_parameter(name)) == vars(p), name


@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
def test_a_gradient_whose_computation_fails_is_still_there(device, monkeypatch, fused):
    """Memory that runs out in backward_dw() costs a call, not the gradient."""
    module, plain = twins(linear, device, fuse_wgrad_accumulation=fused, delay_wgrad_compute=True)
    if fused:
        with_main_grads(module, value=0.0)
    for m in (module, plain):
        backward(m, *microbatch(device, torch.float32, 1))
    compute = Pending.compute

    def fails(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Pending, "compute", fails)
    with pytest.raises(torch.OutOfMemoryError):
        module.backward_dw()
    monkeypatch.setattr(Pending, "compute", compute)
    module.backward_dw()
    got = {n: p.main_grad if fused else p.grad for n, p in weights(module).items()}
    for name, p in weights(plain).items():
        torch.testing.assert_close(got[name], p.grad)
