# te.GroupedLinear: a linear layer for each group of rows. With sizes on the host it is a loop of te.Linear, bit for
# bit, whatever the recipe and the options (test_grouped_linear_list_fp8.py has the exception, small groups with a scale
# each on CUDA); with sizes on the device this holds on the CPU too. Mutants:
# `groups_.push_back({total_, count})` with first 0, quantizers of group 0 for all (`quantization()` -> all), the tail
# not zeroed, `how` of accumulate swapped, dbias of the wrong group: each turns tests here red.
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DTYPES, assert_same_bits, randn, refused, saved_tensors

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R
from transformer_engine.pytorch.verdict import SplitVerdict, reset_split_verdict, split_verdict

from .grouped_cases import (
    RECIPES,
    SPLITS,
    K,
    N,
    as_a_loop,
    assert_same_gradients,
    build,
    give_main_grads,
    one_by_one,
    step,
    step_of_loop,
)

# bias, main_grad, and gradients that are left to backward_dw(), each with each.
OPTIONS = [
    {"bias": bias, "fuse_wgrad_accumulation": fused, "delay_wgrad_compute": late}
    for bias, fused, late in itertools.product((False, True), repeat=3)
]


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: " ".join(k for k, v in o.items() if v) or "plain")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype, quantized", [*((dtype, False) for dtype in DTYPES), (torch.bfloat16, True)])
def test_it_is_a_loop_of_linears(dtype, quantized, recipe, options, on_device, device):
    """quantized: the weights are FP8 alone."""
    if quantized and recipe == "none":
        pytest.skip("no FP8 to hold weights in")
    if on_device and device == "cuda" and (recipe != "none" or dtype is torch.float32):
        pytest.skip("float32 is refused, FP8 is summed otherwise than by cuBLASLt: test_grouped_linear_fp8.py")
    made = RECIPES[recipe] and RECIPES[recipe]()
    ours, loop = build(device=device, dtype=dtype, quantized=made if quantized else None, **options)
    splits = torch.tensor(SPLITS, device=device) if on_device else SPLITS
    if options.get("fuse_wgrad_accumulation"):
        give_main_grads([ours, *loop])
    for _ in range(3):  # delayed scales change, gradients add up
        x, dy = (randn(sum(SPLITS), width, dtype=dtype, device=device) for width in (K, N))
        with as_a_loop(recipe):
            got = step(ours, x, dy, splits, made)
        want = step_of_loop(loop, x, dy, SPLITS, made)
        for a, b, what in zip(got, want, ("y", "dx"), strict=True):
            assert_same_bits(a, b, what)
        # cuBLASLt splits the few rows of such small gradients as it likes, and rounds elsewhere; so do 3 sums.
        assert_same_gradients(ours, loop, ulps=4 if on_device and device == "cuda" else 0)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "none"])
def test_weights_in_fp8_alone_and_cached_weights(recipe, cached, device):
    made = RECIPES[recipe]()
    ours, loop = build(device=device, dtype=torch.bfloat16, quantized=None if cached else made)
    for first in (True, False, True):
        x, dy = (randn(sum(SPLITS), width, dtype=torch.bfloat16, device=device) for width in (K, N))
        told = {"is_first_microbatch": first} if cached else {}
        with as_a_loop(recipe):
            got = step(ours, x, dy, None, made, call=lambda x, told=told: ours(x, SPLITS, **told))
        want = []
        for linear, rows, gradient in zip(loop, x.split(SPLITS), dy.split(SPLITS), strict=True):
            want.append(step(linear, rows, gradient, None, made, call=lambda x, one=linear, told=told: one(x, **told)))
        for a, b in zip(got, zip(*want, strict=True), strict=True):
            assert_same_bits(a, torch.cat(b))
        assert_same_gradients(ours, loop)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_a_kept_input_gives_the_same_bits(recipe, device):
    made = RECIPES[recipe]()
    ours, _ = build(device=device, dtype=torch.bfloat16)
    keeps = te.GroupedLinear(len(SPLITS), K, N, params_dtype=torch.bfloat16, device=device, save_original_input=True)
    keeps.load_state_dict(ours.state_dict())
    x, dy = (randn(sum(SPLITS), width, dtype=torch.bfloat16, device=device) for width in (K, N))
    for a, b in zip(step(ours, x, dy, SPLITS, made), step(keeps, x, dy, SPLITS, made), strict=True):
        assert_same_bits(a, b)
    for p, q in zip(ours.parameters(), keeps.parameters(), strict=True):
        assert_same_bits(p.grad, q.grad)
    with te.autocast(recipe=made), saved_tensors() as kept:
        x.requires_grad_()
        keeps(x, SPLITS)
    assert any(t.data_ptr() == x.data_ptr() for t in kept)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(splits=st.lists(st.integers(0, 300), min_size=1, max_size=6), spare=st.integers(0, 9), seed=st.integers(0, 9))
def test_any_routing(splits, spare, seed):
    """Rows after the last group belong to none: zeros, in results and in gradients."""
    torch.manual_seed(seed)
    ours, loop = build(len(splits), device="cpu")
    total = sum(splits)
    x, dy = randn(total + spare, K), randn(total + spare, N)
    dy[total:] = torch.nan
    y, dx = step(ours, x, dy, torch.tensor(splits))
    want_y, want_dx = step_of_loop(loop, x[:total], dy[:total], splits)
    assert_same_bits(y[:total], want_y)
    assert_same_bits(dx[:total], want_dx)
    assert not y[total:].any() and not dx[total:].any()
    assert_same_gradients(ours, loop)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_no_tokens(on_device, device):
    dtype = torch.bfloat16
    ours, _ = build(device=device, dtype=dtype, fuse_wgrad_accumulation=True)
    give_main_grads([ours])
    splits = torch.zeros(len(SPLITS), dtype=torch.int32, device=device) if on_device else [0] * len(SPLITS)
    y, dx = step(ours, randn(0, K, dtype=dtype, device=device), randn(0, N, dtype=dtype, device=device), splits)
    assert y.shape == (0, N) and dx.shape == (0, K)
    assert all(bool((getattr(ours, f"weight{i}").main_grad == 0.5).all()) for i in range(4))
    x = randn(0, K, dtype=dtype, device=device)
    ours(x, splits, is_first_microbatch=True).sum().backward()
    assert not any(getattr(ours, f"weight{i}").main_grad.any() for i in range(4))
    assert not any(getattr(ours, f"bias{i}").grad.any() for i in range(4))


def test_one_groups_nan_stays_its_own(device):
    ours, _ = build(device=device, dtype=torch.bfloat16)
    x, dy = (randn(sum(SPLITS), width, dtype=torch.bfloat16, device=device) for width in (K, N))
    for value, splits in itertools.product((torch.nan, torch.inf), (SPLITS, torch.tensor(SPLITS, device=device))):
        ours.zero_grad()
        bad_x, bad_dy = x.clone(), dy.clone()
        bad_x[5:135] = value
        bad_dy[5:135] = value
        y, dx = step(ours, bad_x, bad_dy, splits)
        for t in (y, dx):
            assert t[:5].isfinite().all() and t[135:].isfinite().all() and not t[5:135].isfinite().any()
        for i in (0, 1, 3):
            assert getattr(ours, f"weight{i}").grad.isfinite().all() and getattr(ours, f"bias{i}").grad.isfinite().all()


# Which roles of which groups a factory quantizes; the others stay plain.
MIXES = {
    "one group alone": lambda group, role: group == "0",
    "not the first": lambda group, role: group != "0",
    "one gradient not": lambda group, role: (group, role) != ("1", "grad_output"),
    "the first gradient not": lambda group, role: (group, role) != ("0", "grad_output"),
    "one weight not": lambda group, role: (group, role) != ("0", "weight"),
    "one input alone": lambda group, role: group != "1" or role == "input",
    "weights, and one group": lambda group, role: role == "weight" or group == "3",
    "inputs alone": lambda group, role: role == "input",
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_a_factory_may_quantize_some_groups_and_not_others(mix, late, device):
    """Operands of one call may be plain and FP8, group by group."""
    quantizes = MIXES[mix]

    def factory(role):
        if not quantizes(role.name.rpartition(".")[2], role.tensor_type):
            return None
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device)

    ours, loop = build(device=device, dtype=torch.bfloat16, delay_wgrad_compute=late)
    for i, linear in enumerate(loop):
        linear.name = f"loop.{i}"
    x, dy = (randn(sum(SPLITS), width, dtype=torch.bfloat16, device=device) for width in (K, N))
    made = R.CustomRecipe(qfactory=factory)
    got, want = step(ours, x, dy, SPLITS, made), step_of_loop(loop, x, dy, SPLITS, made)
    for a, b, what in zip(got, want, ("y", "dx"), strict=True):
        assert_same_bits(a, b, what)
    assert_same_gradients(ours, loop)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("recipe", [R.Float8CurrentScaling, R.Float8BlockScaling])
@pytest.mark.parametrize("quantized", [False, True])
def test_a_backward_in_another_precision(quantized, recipe, override, device):
    made = recipe(backward_override=override)
    ours, loop = build(device=device, dtype=torch.bfloat16, quantized=made if quantized else None)
    x, dy = (randn(sum(SPLITS), width, dtype=torch.bfloat16, device=device) for width in (K, N))
    got, want = step(ours, x, dy, SPLITS, made), step_of_loop(loop, x, dy, SPLITS, made)
    for a, b, what in zip(got, want, ("y", "dx"), strict=True):
        assert_same_bits(a, b, what)
    assert_same_gradients(ours, loop)


def first_group_alone(device, roles=("input", "weight", "grad_output")):
    def factory(role):
        if role.name.rpartition(".")[2] != "0" or role.tensor_type not in roles:
            return None
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device)

    return R.CustomRecipe(qfactory=factory)


@pytest.mark.parametrize("what", ["x", "dy"])
def test_writes_to_groups_that_stay_plain_are_noticed(what, device):
    """They are views, made below autograd: of the caller's tensor, and of its version."""
    x, dy = randn(6, K, device=device), randn(6, N, device=device)
    late = te.GroupedLinear(2, K, N, bias=False, delay_wgrad_compute=True, device=device)
    with te.autocast(recipe=first_group_alone(device)):
        y = late(x, [3, 3])
    if what == "x":
        plain = te.GroupedLinear(2, K, N, bias=False, device=device)
        with te.autocast(recipe=first_group_alone(device)):
            other = plain(x, [3, 3])
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward(dy)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(dy)
        return
    y.backward(dy)
    dy.mul_(2)
    with refused(RuntimeError, "GroupedLinear", "changed in place"):
        late.backward_dw()


def test_kept_weights_of_groups_that_a_factory_leaves_alone(device):
    x = randn(6, K, device=device)
    module, linear = te.GroupedLinear(2, K, N, device=device), te.Linear(K, N, device=device)
    with te.autocast(recipe=first_group_alone(device, roles=("input",))):
        assert_same_bits(module(x, [3, 3], is_first_microbatch=True), module(x, [3, 3]))
    with te.autocast(recipe=first_group_alone(device)), refused(NotImplementedError, "GroupedLinear", "some groups"):
        module(x, [3, 3], is_first_microbatch=True)
    with te.autocast(recipe=R.CustomRecipe(qfactory=lambda role: None)):
        assert_same_bits(linear(x, is_first_microbatch=True), linear(x))


def test_a_factory_gets_roles_of_groups_from_subclasses_too(device):
    class Mine(te.GroupedLinear):
        pass

    seen = set()
    made = R.CustomRecipe(qfactory=lambda role: seen.add(role.module_type))
    with te.autocast(recipe=made):
        Mine(2, K, N, device=device)(randn(3, K, device=device), [1, 2])
    assert seen == {"grouped_linear"}


# ---- device splits: corrected and reported ----


def test_bad_splits_are_cut_and_counted(device):
    dtype = torch.bfloat16
    ours, loop = build(device=device, dtype=dtype)
    x = randn(10, K, dtype=dtype, device=device)
    reset_split_verdict(device)
    y = ours(x, torch.tensor([4, -3, 9, 2**62], device=device))
    assert split_verdict(device)[0] == 1 and split_verdict(device)[1] > 3
    assert_same_bits(y[:4], loop[0](x[:4]))
    assert_same_bits(y[4:], loop[2](x[4:]))
    ours(x, torch.tensor([1, 2, 3, 4], dtype=torch.int32, device=device))
    assert split_verdict(device)[0] == 1  # it stays
    reset_split_verdict(device)
    assert split_verdict(device) == SplitVerdict(0, 0)


def test_splits_may_change_after_the_forward(device):
    dtype = torch.bfloat16
    ours, loop = build(device=device, dtype=dtype, delay_wgrad_compute=True)
    x, dy = (randn(sum(SPLITS), width, dtype=dtype, device=device) for width in (K, N))
    splits = torch.tensor(SPLITS, device=device)
    y = ours(x.requires_grad_(), splits)
    splits.zero_()
    y.backward(dy)
    splits.fill_(7)
    ours.backward_dw()
    step_of_loop(loop, x.detach(), dy, SPLITS)
    assert_same_gradients(ours, loop)


@pytest.mark.gpu
def test_what_the_device_cannot_do_is_refused():
    ours, _ = build(device="cuda", dtype=torch.float32)
    splits = torch.tensor(SPLITS, device="cuda")
    with refused(NotImplementedError, "m_splits"):
        ours(randn(sum(SPLITS), K, device="cuda"), splits)


# ---- buffers of the caller ----


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_results_into_the_callers_memory(on_device, device):
    dtype, spare = torch.bfloat16, 3 if on_device else 0
    ours, _ = build(device=device, dtype=dtype)
    rows = sum(SPLITS) + spare
    splits = torch.tensor(SPLITS, device=device) if on_device else SPLITS
    x, dy = (randn(rows, width, dtype=dtype, device=device) for width in (K, N))
    want = step(ours, x, dy, splits)
    gradients = [p.grad.clone() for p in ours.parameters()]
    ours.zero_grad()
    out, dgrad_out = (torch.full((rows, width), 7.0, dtype=dtype, device=device) for width in (N, K))
    version = out._version
    got = step(ours, x, dy, None, call=lambda x: ours(x, splits, out=out, dgrad_out=dgrad_out))
    live = sum(SPLITS)
    for a, b, buffer in zip(got, want, (out, dgrad_out), strict=True):
        assert_same_bits(a[:live], b[:live])
        assert_same_bits(buffer, a)
        assert (buffer[live:] == 7).all()
    assert got[0].data_ptr() == out.data_ptr() and out._version > version and out.grad_fn is None
    for p, g in zip(ours.parameters(), gradients, strict=True):
        assert_same_bits(p.grad, g)


def test_a_buffer_that_was_saved_may_not_be_written_again(device):
    ours, _ = build(device=device)
    x, out = randn(sum(SPLITS), K, device=device), torch.empty(sum(SPLITS), N, device=device)
    y = ours(x, SPLITS, out=out)
    loss = (y * y).sum()
    ours(x, SPLITS, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_buffer_apart_from_the_gradient_that_arrives(device):
    """Two layers with one workspace: the second would overwrite a gradient that the first layer's weight gradients
    read."""
    first, second = (te.GroupedLinear(2, K, K, device=device) for _ in range(2))
    x, workspace = randn(6, K, device=device, requires_grad=True), torch.empty(6, K, device=device)
    for splits in ([2, 4], torch.tensor([2, 4], device=device)):
        y = second(first(x, splits, dgrad_out=workspace), splits, dgrad_out=workspace)
        with refused(ValueError, "'dgrad_out'", "memory"):
            y.sum().backward()
        second(first(x, splits, dgrad_out=torch.empty_like(workspace)), splits, dgrad_out=workspace).sum().backward()
        if device == "cuda":
            break  # float32 with sizes on the device is refused there


def test_buffers_are_refused_where_they_cannot_be(device):
    ours, _ = build(device=device)
    x = randn(sum(SPLITS), K, device=device)
    with torch.inference_mode():
        made = torch.empty(sum(SPLITS), N, device=device)
    with refused(ValueError, "GroupedLinear", "'out'", "inference"):
        ours(x, SPLITS, out=made)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"'dgrad_out'.*torch\.compile"):
        compiled(x, SPLITS, out=torch.empty(sum(SPLITS), N, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [False, True], ids=["bf16", "blocks"])
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("experts, rows, n, k", [(8, 16384, 28672, 4096), (128, 65536, 1536, 2048)])
def test_large_groups_have_the_bits_of_lists(experts, rows, n, k, skewed, blocks):
    """Where cuBLASLt does not split the reduction, as it does not at these shapes (test_gemm_splits prints where): one
    accumulator each, in order."""
    shares = 1 / torch.arange(1.0, experts + 1) if skewed else torch.ones(experts)
    splits = (rows * shares / shares.sum()).long().tolist()
    splits[0] += rows - sum(splits)
    ours = te.GroupedLinear(experts, k, n, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x, dy = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for width in (k, n))
    found = []
    with one_by_one():
        for how in (splits, torch.tensor(splits, device="cuda")):
            leaf = x.clone().requires_grad_()
            with te.autocast(enabled=blocks, recipe=RECIPES["block"]() if blocks else None):
                y = ours(leaf, how)
            grads = torch.autograd.grad(y, (leaf, *ours.parameters()), dy)
            found.append((y.detach(), *grads))
    for number, (by_list, by_tensor) in enumerate(zip(*found, strict=True)):
        assert_same_bits(by_tensor, by_list, f"y, dx, and weights' gradients in order: {number}")
