# Weight gradients that are not simply returned: fuse_wgrad_accumulation (main_grad and its protocol) and
# delay_wgrad_compute (backward_dw), on every module that has weights. The bitwise laws: delayed equals immediate, over
# several microbatches too; overwriting equals a fresh product. Mutant: `sums.append(F.gemm_accumulate(..., overwrite=
# False))` in module/weight_grad.py turns test_first_microbatch_overwrites red.
import copy
import pickle

import pytest
import torch
from plain_modules import randomize
from support import DTYPES, assert_same_bits, assert_within, in_threads, randn, refused, rounding, sum_error, wide

import transformer_engine.pytorch as te

IN, TOKENS = 32, (5, 3)
SPLIT = {"query": 24, "key": 8, "value": 8}


def linear(**options):
    return te.Linear(IN, 40, **options)


def split_linear(**options):
    return te.Linear(IN, 40, parameters_split=SPLIT, **options)


def norm_linear(**options):
    return te.LayerNormLinear(IN, 40, **options)


def split_norm_linear(**options):
    return te.LayerNormLinear(IN, 40, parameters_split=SPLIT, normalization="RMSNorm", **options)


def mlp(**options):
    return te.LayerNormMLP(IN, 24, activation="swiglu", **options)


def recomputed_mlp(**options):
    return te.LayerNormMLP(IN, 24, activation="geglu", checkpoint=True, **options)


def recomputed_norm(**options):
    return te.LayerNormMLP(IN, 24, activation="srelu", recompute_norm_output=True, **options)


FAMILIES = [linear, split_linear, norm_linear, split_norm_linear, mlp, recomputed_mlp, recomputed_norm]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)


def build(family, device, dtype=torch.float32, **options):
    return randomize(family(device=device, params_dtype=dtype, **options))


def twins(family, device, dtype=torch.float32, **options):
    """The module with the options, and one without any that has the same parameters."""
    module, immediate = build(family, device, dtype, **options), build(family, device, dtype)
    immediate.load_state_dict(module.state_dict())
    return module, immediate


def weights(module):
    return {name: p for name, p in module.named_parameters() if p.dim() == 2}


def with_main_grads(module, dtype=torch.float32, value=None):
    for p in weights(module).values():
        p.main_grad = (
            randn(*p.shape, dtype=dtype, device=p.device) if value is None else torch.full_like(p, value).to(dtype)
        )
    return module


def microbatch(device, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*TOKENS, IN, generator=generator).to(dtype).to(device)
    return x.requires_grad_(), generator


def backward(module, x, generator, **options):
    y = module(x, **options)
    y.backward(torch.randn(y.shape, generator=generator).to(y))
    return y


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


def assert_same_gradients(got, want):
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert (got[name] is None) == (gradient is None), name
        if gradient is not None:
            assert_same_bits(got[name], gradient, name)


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


# ---- fused accumulation ----


@every_family
@pytest.mark.parametrize("delay", [False, True], ids=["immediate", "delayed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_main_grad_accumulates_in_float32(device, dtype, delay, family):
    """Against the float64 product of what the plain module's own .grad is made of: here .grad itself in float64, so the
    bound is one rounding to the weight's dtype, a float32 sum of 15 products and the addition to what was there."""
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
    """What an owner of main_grad asks for: it sets grad_added_to_main_grad to False and waits for autograd's hooks."""
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


@pytest.mark.parametrize("option", ["fuse_wgrad_accumulation", "delay_wgrad_compute"])
def test_compiling_is_refused_by_name(device, option):
    module = with_main_grads(build(linear, device, **{option: True}))
    x, _ = microbatch(device, torch.float32, 1)
    with pytest.raises(Exception, match=r"not available under torch\.compile"):
        torch.compile(module, fullgraph=True, backend="aot_eager")(x)


def test_overlapped_communication_excludes_delay():
    from transformer_engine.pytorch.module.weight_grad import WeightGradStore

    with refused(ValueError, "delay_wgrad_compute", "ub_bulk_wgrad"):
        WeightGradStore(True, True)
    assert not WeightGradStore(False, True).delay_wgrad_compute()
