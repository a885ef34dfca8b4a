# te.GroupedLinear as a module: what clients look at, its life beside recomputation, compilation, captures and copies,
# and what it refuses. Its values are test_grouped_linear.py's.
import copy
import pickle

import pytest
import torch
from api_names import MODULES
from module_contract import Tracker, check_signature
from support import assert_same_bits, randn, refused, saved_tensors

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R

from .grouped_cases import (
    RECIPES,
    SPLITS,
    K,
    N,
    as_a_loop,
    assert_same_gradients,
    build,
    give_main_grads,
    step,
    step_of_loop,
)

# ---- what clients look at ----


def test_signature_is_the_apis():
    check_signature(te.GroupedLinear, *MODULES["GroupedLinear"])


def test_parameters_share_one_buffer_and_clients_may_move_them(device):
    ours, _ = build(device=device)
    assert [n for n, _ in ours.named_parameters()] == [f"{k}{i}" for i in range(4) for k in ("weight", "bias")]
    assert len({getattr(ours, f"weight{i}").untyped_storage().data_ptr() for i in range(4)}) == 1
    x = randn(sum(SPLITS), K, device=device)
    want = ours(x, SPLITS)
    ours.weight2.data = ours.weight2.data.clone()
    assert_same_bits(ours(x, SPLITS), want)
    assert_same_bits(ours(x, torch.tensor(SPLITS)) if device == "cpu" else want, want)
    weight = ours.weight1
    assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (True, 0, 1)
    row = te.GroupedLinear(2, K, N, parallel_mode="row", tp_size=2, bias=False, device=device)
    assert row.weight0.shape == (N, K // 2) and row.weight0.partition_dim == 1 and row.in_features == K // 2
    column = te.GroupedLinear(2, K, N, parallel_mode="column", tp_size=2, bias=False, device=device)
    assert column.weight0.shape == (N // 2, K) and column.bias0.numel() == 0
    late = te.GroupedLinear(2, K, N, delay_wgrad_compute=True, device=device)
    assert late.weight0.skip_backward_post_hook and late.need_backward_dw()
    late.backward_dw()  # nothing is left: it returns


def pickled(module):
    return pickle.loads(pickle.dumps(module))


def test_marks_of_clients_survive_moves_and_copies(device):
    ours = te.GroupedLinear(4, K, N, device=device)
    for p in ours.parameters():
        p.allreduce = p.tensor_model_parallel = False  # the second one has another value from the module
    (loaded := copy.deepcopy(ours)).load_state_dict(ours.state_dict())
    loaded.reset_parameters()
    for moved in (copy.deepcopy(ours), pickled(ours), loaded, ours.to(torch.bfloat16), ours.cpu()):
        for p in moved.parameters():
            assert p.allreduce is p.tensor_model_parallel is False and hasattr(p, "partition_dim")
    meta = te.GroupedLinear(2, K, N, device="meta")
    meta.weight1.allreduce = False
    meta.to_empty(device=device)
    meta.reset_parameters()
    assert meta.weight1.allreduce is False and meta.weight1.device.type == device


def test_copies_compute_the_same(device):
    ours = te.GroupedLinear(4, K, N, device=device)
    x = randn(sum(SPLITS), K, device=device)
    for other in (copy.deepcopy(ours), pickled(ours)):
        assert_same_bits(other(x, SPLITS), ours(x, SPLITS))


def test_return_bias(device):
    ours, _ = build(device=device, return_bias=True)
    x = randn(sum(SPLITS), K, device=device)
    y, biases = ours(x, SPLITS)
    assert [b is getattr(ours, f"bias{i}") for i, b in enumerate(biases)] == [True] * 4
    plain = te.GroupedLinear(4, K, N, bias=False, return_bias=True, device=device)
    plain.load_state_dict({k: v for k, v in ours.state_dict().items() if "weight" in k})
    other, none = plain(x, SPLITS)
    assert none is None
    assert_same_bits(y, other)


def test_states_are_forked_for_each_weight(device):
    tracker = Tracker()
    te.GroupedLinear(3, K, N, device=device, get_rng_state_tracker=lambda: tracker, rng_tracker_name="expert")
    assert tracker.forks == ["expert"] * 3


@pytest.mark.parametrize("nested", [False, True])
def test_checkpoints_stacked_and_for_each_group(nested, device):
    ours, _ = build(device=device)
    other, _ = build(device=device)
    wrap = (lambda m: torch.nn.Sequential(m)) if nested else (lambda m: m)
    prefix = "0." if nested else ""
    wrap(other).load_state_dict(wrap(ours).state_dict())
    states = (
        [getattr(ours, f"weight{i}").detach() for i in range(4)],
        [getattr(ours, f"bias{i}").detach() for i in range(4)],
    )
    for join in (torch.stack, torch.cat):
        third, _ = build(device=device)
        wrap(third).load_state_dict({f"{prefix}weight": join(states[0]), f"{prefix}bias": join(states[1])})
        for a, b, c in zip(ours.parameters(), other.parameters(), third.parameters(), strict=True):
            assert_same_bits(a, b)
            assert_same_bits(a, c)


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_checkpoint_with_stacked_and_single_parameters(kind, device):
    """Stacked and for single groups, all of them or one: the stacked key is refused as unexpected, and does not replace
    the values of the single ones."""
    ours, _ = build(device=device)
    single = {name: torch.full_like(t, 2) for name, t in ours.state_dict().items() if t.is_floating_point()}
    for there in (range(4), [2]):
        given = {n: t for n, t in single.items() if kind not in n or int(n[-1]) in there}
        given[kind] = torch.stack([torch.ones_like(single[f"{kind}{i}"]) for i in range(4)])
        target, _ = build(device=device)
        with pytest.raises(RuntimeError, match=rf"Unexpected key.*: {kind}\."):
            target.load_state_dict(given)
        target.load_state_dict(given, strict=False)
        assert all(getattr(target, f"{kind}{i}").eq(2).all() for i in there)
        assert not any(getattr(target, f"{kind}{i}").eq(1).all() for i in range(4))


def test_extra_state_is_a_dict_that_clients_take_apart(device):
    ours, _ = build(device=device)
    made = RECIPES["delayed"]()
    x, dy = (randn(sum(SPLITS), width, device=device) for width in (K, N))
    step(ours, x, dy, SPLITS, made)
    state = ours.get_extra_state()
    found = pickle.loads(state.numpy().tobytes())
    assert list(found) == [
        "recipe", "extra_fp8_variables", "scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd",
    ]  # fmt: skip
    assert found["recipe"].delayed() and found["scale_fwd"].shape == (12,) and found["scale_bwd"].shape == (8,)
    assert_same_bits(found["amax_history_fwd"], ours.fp8_meta["scaling_fwd"].amax_history.cpu())
    other, _ = build(device=device)
    other.load_state_dict(ours.state_dict())
    for way in ("scaling_fwd", "scaling_bwd"):
        for what in ("scale", "amax_history"):
            assert_same_bits(getattr(other.fp8_meta[way], what), getattr(ours.fp8_meta[way], what))
    plain = te.GroupedLinear(2, K, N, device=device)
    assert plain.get_extra_state().numel() == 0


# ---- with the rest of the library ----


def assert_same_steps(first, second, x, dy, splits, recipe=None, calls=(None, None)):
    got = [step(m, x, dy, splits, recipe, call=c) for m, c in zip((first, second), calls, strict=True)]
    for a, b in zip(*got, strict=True):
        assert_same_bits(a, b)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            assert_same_bits(p.grad, q.grad)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_recomputed_and_offloaded(recipe, on_device, device):
    ours, _ = build(device=device, dtype=torch.bfloat16)
    twin = copy.deepcopy(ours)
    splits = torch.tensor(SPLITS, device=device) if on_device else SPLITS
    x, dy = (randn(sum(SPLITS), width, dtype=torch.bfloat16, device=device) for width in (K, N))
    made = RECIPES[recipe] and RECIPES[recipe]()
    for reentrant in (True, False):
        ours.zero_grad(), twin.zero_grad()
        again = lambda x, r=reentrant: te.checkpoint(twin, x, splits, use_reentrant=r)  # noqa: E731
        assert_same_steps(ours, twin, x, dy, splits, made, (None, again))


@pytest.mark.parametrize("recipe", ["none", "current", "block"])
@pytest.mark.parametrize("options", [{}, {"fuse_wgrad_accumulation": True}], ids=["plain", "main_grad"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_compiled(on_device, options, recipe, device):
    dtype = torch.bfloat16
    ours, _ = build(device=device, dtype=dtype, **options)
    twin = copy.deepcopy(ours)
    give_main_grads([ours, twin] if options else [])
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    splits = torch.tensor(SPLITS, device=device) if on_device else SPLITS
    made = RECIPES[recipe] and RECIPES[recipe]()
    for _ in range(2):
        x, dy = (randn(sum(SPLITS), width, dtype=dtype, device=device) for width in (K, N))
        with as_a_loop(recipe):  # which a compiled list is
            assert_same_steps(ours, twin, x, dy, splits, made, (None, lambda x: compiled(x, splits)))
        for i in range(4) if options else ():
            assert_same_bits(getattr(ours, f"weight{i}").main_grad, getattr(twin, f"weight{i}").main_grad)


# A compiled graph gets the sizes as router counts, whose number is known only in the run: taken as one for each group,
# and refused in the run where there are more.
@pytest.mark.parametrize("recipe", ["none", "current", "block"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_with_the_count_of_sizes(recipe, dynamic, device):
    ours, _ = build(device=device, dtype=torch.bfloat16)
    made = RECIPES[recipe] and RECIPES[recipe]()
    x, ids = randn(9, K, dtype=torch.bfloat16, device=device), torch.tensor([0, 0, 1, 1, 1, 3, 3, 3, 3], device=device)

    def counted(x, ids):
        with te.autocast(enabled=made is not None, recipe=made):
            return ours(x, torch.bincount(ids, minlength=4))

    compiled = torch.compile(counted, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for _ in range(2):
        assert_same_bits(compiled(x, ids), counted(x, ids))
        ids = ids.flip(0).sub(3).abs()
    with pytest.raises(Exception, match=r"\[7\].*wanted contiguous Int \[5\]|Runtime assertion failed"):
        compiled(x, torch.arange(9, device=device).clamp(max=5))


@pytest.mark.parametrize("recipe", RECIPES)
def test_graphed_with_splits_that_change(recipe, device):
    dtype = torch.bfloat16
    ours, _ = build(device=device, dtype=dtype)
    twin = copy.deepcopy(ours)
    rows = sum(SPLITS)
    sample = (randn(rows, K, dtype=dtype, device=device, requires_grad=True), torch.tensor(SPLITS, device=device))
    made = RECIPES[recipe] and RECIPES[recipe]()
    graphed = te.make_graphed_callables(twin, sample, enabled=made is not None, recipe=made)
    for splits in ([1, 2, 3, 4], [0, 0, 0, 0], [rows, 0, 0, 0], [40, 50, 40, 6]):
        now = torch.tensor(splits, device=device)
        x, dy = (randn(rows, width, dtype=dtype, device=device) for width in (K, N))
        assert_same_steps(ours, twin, x, dy, now, made, (None, lambda x, now=now: graphed(x, now)))


def test_autocast_frozen_weights_and_no_gradients(device):
    ours, loop = build(device=device)
    x = randn(sum(SPLITS), K, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = ours(x, SPLITS)
        assert_same_bits(y, torch.cat([one(rows) for one, rows in zip(loop, x.split(SPLITS), strict=True)]))
    assert y.dtype is torch.bfloat16
    ours.weight2.requires_grad_(False)
    step(ours, x, randn(sum(SPLITS), N, device=device), SPLITS)
    assert ours.weight2.grad is None and ours.weight0.grad is not None
    with torch.no_grad():
        assert_same_bits(ours(x, SPLITS), ours.eval()(x, SPLITS))
    with torch.inference_mode():
        assert_same_bits(ours(x, SPLITS), ours.train()(x, SPLITS))


def test_leading_dimensions_and_strides(device):
    ours, _ = build(device=device)
    x = randn(2, sum(SPLITS), K, device=device)
    splits = [2 * n for n in SPLITS]
    want = ours(x.flatten(0, 1), splits)
    assert_same_bits(ours(x, splits), want.view(2, -1, N))
    y = ours(x.transpose(0, 1), splits)
    assert y.shape == (sum(SPLITS), 2, N)
    leaf = x.clone().requires_grad_()
    ours(leaf, splits).sum().backward()  # a gradient without strides
    other = x.clone().requires_grad_()
    ours(other, splits).backward(torch.ones(2, sum(SPLITS), N, device=device))
    assert_same_bits(leaf.grad, other.grad)


def test_two_microbatches_in_flight(device):
    ours, loop = build(device=device, delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    give_main_grads([ours, *loop])
    steps = []
    for splits in (SPLITS, SPLITS[::-1]):
        x, dy = (randn(sum(splits), width, device=device) for width in (K, N))
        steps.append((splits, x, dy, ours(x.clone().requires_grad_(), splits)))
    for _, _, dy, y in reversed(steps):
        y.backward(dy)
    ours.backward_dw(), ours.backward_dw()
    for splits, x, dy, _ in reversed(steps):
        step_of_loop(loop, x, dy, splits)
    assert_same_gradients(ours, loop)


def test_memory_plan_equals_the_hooks(device):
    ours, _ = build(device=device, dtype=torch.bfloat16)
    x = randn(sum(SPLITS), K, dtype=torch.bfloat16, device=device, requires_grad=True)
    for recipe in (None, R.Float8CurrentScaling(), R.Float8BlockScaling()):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            plan = te.memory_plan(ours, x, SPLITS)
            with saved_tensors() as kept:
                y = ours(x, SPLITS)
        seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept if t.numel()}
        seen.pop(x.untyped_storage().data_ptr(), None)
        del y
        assert plan.kept_bytes + plan.bytes_of("parameter") == sum(seen.values())  # FP8 weights are parameters' copies
        assert (plan.kept_bytes > 0) == (recipe is not None)


def test_kept_weights_that_do_not_fit_are_quantized_again(device):
    """They have no columns, which a backward reads; or another dtype."""
    ours, _ = build(device=device, dtype=torch.bfloat16)
    splits, made = torch.tensor(SPLITS, device=device), R.Float8BlockScaling()
    for dtype in (torch.bfloat16, torch.float16):
        ours.to(dtype)
        x, dy = (randn(sum(SPLITS), width, dtype=dtype, device=device) for width in (K, N))
        with torch.no_grad(), te.autocast(recipe=made):
            ours(x, splits, is_first_microbatch=True)
        want = step(copy.deepcopy(ours), x, dy, splits, made)
        got = step(ours, x, dy, None, made, call=lambda x: ours(x, splits, is_first_microbatch=False))
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)


def test_more_groups_than_one_launch_quantizes(device):
    groups, options = 1030, {"params_dtype": torch.bfloat16, "bias": False, "device": device}
    ours = te.GroupedLinear(groups, 16, 16, **options)
    x = randn(groups, 16, dtype=torch.bfloat16, device=device)
    splits = torch.ones(groups, dtype=torch.int32, device=device)
    with te.autocast(recipe=R.Float8CurrentScaling()):
        if device == "cuda":
            with refused(NotImplementedError, "1024 groups", "m_splits", "list"):
                ours(x, splits)
        else:
            assert_same_bits(ours(x, splits), ours(x, [1] * groups))


# ---- bad input ----


def test_bad_input_is_named_and_harms_nothing(device):
    ours, _ = build(device=device)
    x = randn(sum(SPLITS), K, device=device)
    want = ours(x, SPLITS)
    rows = sum(SPLITS)

    def bad(*words, error=ValueError, inp=x, splits=SPLITS, **options):
        with refused(error, "GroupedLinear", *words):
            ours(inp, splits, **options)
        assert_same_bits(ours(x, SPLITS), want)

    bad("'m_splits'", str(rows), splits=[5, 0, 130, 2])
    bad("'m_splits'", "3 numbers, wanted 4", splits=[5, 0, 131])
    bad("'m_splits'", "negative", splits=[6, -1, 130, 1])
    bad("'m_splits'", "whole numbers", splits=[5.0, 0, 130, 1])
    bad("'m_splits'", "whole numbers", splits=7)
    bad("'m_splits'", "torch.int32", splits=torch.tensor([5.0, 0, 130, 1], device=device))
    bad("'m_splits'", "[4]", splits=torch.tensor([5, 0, 131], device=device))
    bad("'m_splits'", "meta", splits=torch.tensor(SPLITS, device="meta"))
    bad("'inp'", str(K), inp=randn(rows, K + 1, device=device))
    bad("'inp'", "float64", inp=randn(rows, K, device=device).double())
    bad("'inp'", error=TypeError, inp=[1.0])
    quantized = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device)(x)
    bad("'inp'", "dequantize", error=TypeError, inp=quantized)
    good = torch.empty(rows, N, device=device)
    for buffer in (
        good[:-1], good.t().contiguous().t(), good.double(), good.clone().requires_grad_(), [1.0], good.to("meta"),
    ):  # fmt: skip
        bad("'out'", "contiguous", inp=x, out=buffer)
    bad("'dgrad_out'", "shares memory with inp", dgrad_out=x)
    with refused(NotImplementedError, "double backward"):
        leaf = x.clone().requires_grad_()
        torch.autograd.grad(ours(leaf, SPLITS).sum(), leaf, create_graph=True)
    assert_same_bits(ours(x, SPLITS), want)


def test_bad_options_are_named(device, monkeypatch):
    def bad(*words, error=ValueError, **options):
        with refused(error, "GroupedLinear", *words):
            te.GroupedLinear(**{"num_gemms": 2, "in_features": K, "out_features": N, "device": device, **options})

    bad("'num_gemms'", num_gemms=0)
    bad("'bias'", "2 ranks", tp_size=2, parallel_mode="row")
    bad("'parallel_mode'", parallel_mode="diagonal")
    bad("'out_features'", tp_size=5, parallel_mode="column", bias=False)
    bad("'ub_overlap_ag'", error=NotImplementedError, ub_overlap_ag=True)
    bad("'ub_overlap_rs'", error=NotImplementedError, ub_overlap_rs=True)
    with pytest.warns(UserWarning, match="single_grouped_weight"):
        module = te.GroupedLinear(2, K, N, device=device, single_grouped_weight=True)
    assert module.single_grouped_weight is False and module.weight1.shape == (N, K)
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    bad("'single_grouped_weight'", error=NotImplementedError, single_grouped_weight=True)
    bad("'single_grouped_bias'", error=NotImplementedError, single_grouped_bias=True)


def test_recipes_that_do_not_fit_are_named(device):
    x = randn(4, K, device=device)
    part = te.GroupedLinear(2, K, N, bias=False, tp_size=2, parallel_mode="row", device=device)
    with te.autocast(recipe=R.Float8CurrentScaling()), refused(ValueError, "GroupedLinear", "Float8CurrentScaling"):
        part(randn(4, K // 2, device=device), [2, 2])
    compiled = torch.compile(part, fullgraph=True, backend="aot_eager")
    with te.autocast(recipe=R.Float8CurrentScaling()), pytest.raises(Exception, match="Float8CurrentScaling with 2"):
        compiled(randn(4, K // 2, device=device), [2, 2])
    keeps = te.GroupedLinear(2, K, N, save_original_input=True, device=device)
    with te.autocast(recipe=R.DelayedScaling()), refused(ValueError, "'save_original_input'"):
        keeps(x, [2, 2])
    fused = te.GroupedLinear(2, K, N, fuse_wgrad_accumulation=True, device=device)
    fused.weight0.main_grad = torch.zeros(N, K, device=device)
    with refused(ValueError, "'weight1'", "main_grad"):
        fused(x, [2, 2])
