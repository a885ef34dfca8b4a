# te.GroupedLinear in FP8 with sizes on the device: compared with plain PyTorch's products of fake-quantized values in
# float64, each expert quantized as if alone, on both devices. On a CPU it is also a loop of te.Linear bit for bit
# (test_grouped_linear.py). Mutants: scales of expert 0 for all, panels that the backward reads from row 0, tails that
# are not zeroed, kept panels replaced by the input: each turns tests here red.
import copy

import pytest
import torch
from support import assert_same_bits, assert_within, randn, refused, rounding, saved_tensors

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R
from transformer_engine.pytorch.verdict import SplitVerdict, reset_split_verdict, split_verdict

from .grouped_cases import (
    RECIPES,
    SPLITS,
    K,
    N,
    assert_same_gradients,
    build,
    check_experts,
    give_main_grads,
    plain_scales,
    step,
    step_of_loop,
)

pytestmark = pytest.mark.usefixtures("fp8_left_off")

FP8 = [name for name in RECIPES if name != "none"]
TOTAL = sum(SPLITS)
every_recipe = pytest.mark.parametrize("recipe", FP8)


def splits_of(counts, device):
    return torch.tensor(counts, device=device)


def draw(rows, device, dtype=torch.bfloat16):
    return (randn(rows, width, dtype=dtype, device=device) for width in (K, N))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_recipe
def test_against_float64(recipe, dtype, device):
    """Three steps, for delayed scales; rows of no group hold NaN."""
    ours, _ = build(device=device, dtype=dtype)
    made = RECIPES[recipe]()
    scales = [plain_scales() for _ in SPLITS]
    for turn in range(3):
        x, dy = (t * 2.0**turn for t in draw(TOTAL + 3, device, dtype))
        x[TOTAL:], dy[TOTAL:] = torch.nan, torch.nan
        ours.zero_grad()
        y, dx = step(ours, x, dy, splits_of(SPLITS, device), made)
        assert not y[TOTAL:].any() and not dx[TOTAL:].any()
        check_experts(ours, x, dy, y, dx, recipe, scales)
        for of_expert in scales:
            for one in of_expert.values():
                one.update()
    if recipe == "delayed":
        forward, backward = ours.fp8_meta["scaling_fwd"], ours.fp8_meta["scaling_bwd"]
        for i, of_expert in enumerate(scales):
            columns = (("x", forward, 3 * i), ("weight", forward, 3 * i + 1), ("dy", backward, 2 * i))
            for name, state, column in columns:
                assert state.scale[column].item() == of_expert[name].scale.item(), (i, name)
                assert state.amax_history[:, column].tolist() == of_expert[name].history, (i, name)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@every_recipe
def test_one_experts_nan_stays_its_own(recipe, value, device):
    ours, _ = build(device=device, dtype=torch.bfloat16)
    x, dy = draw(TOTAL, device)
    splits, fresh = splits_of(SPLITS, device), copy.deepcopy(ours)
    want = step(ours, x, dy, splits, RECIPES[recipe]())
    gradients = [p.grad for p in ours.parameters()]
    bad_x, bad_dy = x.clone(), dy.clone()
    bad_x[5:135], bad_dy[5:135] = value, value
    got = step(fresh, bad_x, bad_dy, splits, RECIPES[recipe]())
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a[:5], b[:5])
        assert_same_bits(a[135:], b[135:])
        own = a[5:135]
        if value == torch.inf:  # it saturates, at a scale of 1 or the one before
            assert own.isfinite().all() and not torch.equal(own, b[5:135])
        else:
            assert not own.isfinite().any()
    for (name, p), g in zip(fresh.named_parameters(), gradients, strict=True):
        if not name.endswith("2"):
            assert_same_bits(p.grad, g, name)


@every_recipe
def test_an_expert_does_not_see_the_others_or_the_room(recipe, device):
    """Its bits do not depend on the other experts, on its offset or on the number of rows."""
    made = R.Float8CurrentScaling if recipe == "delayed" else RECIPES[recipe]
    ours, _ = build(device=device, dtype=torch.bfloat16)
    x, dy = draw(TOTAL, device)
    y, dx = step(ours, x, dy, splits_of(SPLITS, device), made())
    alone = ours.weight2.grad.clone()
    ours.zero_grad()
    more = [draw(n, device) for n in (41, 300)]
    xs, dys = zip(*((tuple(m)) for m in more), strict=True)
    wide_x, wide_dy = (torch.cat((t[0], own[5:135], t[1])) for t, own in ((xs, x), (dys, dy)))
    other_y, other_dx = step(ours, wide_x, wide_dy, splits_of([0, 41, 130, 77], device), made())
    assert_same_bits(other_y[41:171], y[5:135])
    assert_same_bits(other_dx[41:171], dx[5:135])
    assert_same_bits(ours.weight2.grad, alone)


@every_recipe
@pytest.mark.parametrize("fused", [False, True])
def test_no_tokens(recipe, fused, device):
    ours, _ = build(device=device, dtype=torch.bfloat16, fuse_wgrad_accumulation=fused)
    give_main_grads([ours] if fused else [])
    splits = splits_of([0] * 4, device)
    for rows in (0, 7):
        x, dy = draw(rows, device)
        ours.zero_grad()
        y, dx = step(ours, x, dy, splits, RECIPES[recipe]())
        assert y.shape == (rows, N) and not y.any() and not dx.any()
    for i in range(4):
        weight = getattr(ours, f"weight{i}")
        assert bool((weight.main_grad == 0.5).all()) if fused else not weight.grad.any()
        assert not getattr(ours, f"bias{i}").grad.any()


@every_recipe
def test_cut_rows_are_counted_and_change_no_other(recipe, device):
    ours, _ = build(device=device, dtype=torch.bfloat16)
    x, dy = draw(TOTAL, device)
    made = RECIPES[recipe]()
    want = step(copy.deepcopy(ours), x, dy, splits_of([5, 0, 131, 0], device), made)
    reset_split_verdict(device)
    got = step(ours, x, dy, splits_of([5, -3, 2**20, 9], device), made)
    assert split_verdict(device) == SplitVerdict(negative=1, cut=5 + 2**20 + 9 - TOTAL)
    reset_split_verdict(device)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


@every_recipe
def test_results_into_poisoned_memory_of_the_callers(recipe, device):
    ours, _ = build(device=device, dtype=torch.bfloat16)
    x, dy = draw(TOTAL + 3, device)
    splits, made = splits_of(SPLITS, device), RECIPES[recipe]()
    want = step(copy.deepcopy(ours), x, dy, splits, made)
    out, dgrad_out = (torch.full((TOTAL + 3, width), torch.nan, dtype=x.dtype, device=device) for width in (N, K))
    got = step(ours, x, dy, None, made, call=lambda x: ours(x, splits, out=out, dgrad_out=dgrad_out))
    for a, b, buffer in zip(got, want, (out, dgrad_out), strict=True):
        assert_same_bits(a[:TOTAL], b[:TOTAL])
        assert_same_bits(buffer, a)
        assert buffer[TOTAL:].isnan().all()


@pytest.mark.parametrize("options", [{}, {"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}], ids=str)
@pytest.mark.parametrize("cached", [False, True])
@every_recipe
def test_weights_in_fp8_alone_and_cached_weights(recipe, cached, options, device):
    """Later microbatches use the copies of the first one; both equal a new quantization."""
    made = RECIPES[recipe]()
    ours, _ = build(device=device, dtype=torch.bfloat16, quantized=None if cached else made, **options)
    twin = copy.deepcopy(ours)
    give_main_grads([ours, twin] if "fuse_wgrad_accumulation" in options else [])
    splits = splits_of(SPLITS, device)
    for first in (True, False):
        x, dy = draw(TOTAL, device)
        told = {"is_first_microbatch": first} if cached else {}
        got = step(ours, x, dy, None, made, call=lambda x, told=told: ours(x, splits, **told))
        if recipe == "delayed" and cached:
            assert all(t.isfinite().all() for t in got)  # a weight that is quantized again has a newer scale
            continue
        for a, b in zip(got, step(twin, x, dy, splits, made), strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("recipe", [R.Float8CurrentScaling, R.Float8BlockScaling])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_a_backward_in_another_precision(quantized, keeps, recipe, override, device):
    if keeps and override == "dequantized":
        pytest.skip("refused: such a backward reads no original")
    made = recipe(backward_override=override)
    model = made if quantized else None
    ours, loop = build(device=device, dtype=torch.bfloat16, quantized=model, save_original_input=keeps)
    x, dy = draw(TOTAL, device)
    y, dx = step(ours, x, dy, splits_of(SPLITS, device), made)
    want_y, want_dx = step_of_loop(loop, x, dy, SPLITS, made)
    if device == "cpu":
        assert_same_bits(y, want_y)
        assert_same_bits(dx, want_dx)
        return assert_same_gradients(ours, loop)
    # cuBLASLt sums FP8 products otherwise; what a plain backward makes is near to it.
    assert_within(dx, want_dx.double(), 2.0**-6 * want_dx.abs().max().double(), "dx")
    return assert_same_gradients(ours, loop, ulps=8)


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_a_kept_input_gives_the_same_bits(recipe, device):
    made = RECIPES[recipe]()
    ours, _ = build(device=device, dtype=torch.bfloat16)
    keeps = te.GroupedLinear(4, K, N, params_dtype=torch.bfloat16, device=device, save_original_input=True)
    keeps.load_state_dict(ours.state_dict())
    x, dy = draw(TOTAL, device)
    splits = splits_of(SPLITS, device)
    for a, b in zip(step(ours, x, dy, splits, made), step(keeps, x, dy, splits, made), strict=True):
        assert_same_bits(a, b)
    for p, q in zip(ours.parameters(), keeps.parameters(), strict=True):
        assert_same_bits(p.grad, q.grad)
    with te.autocast(recipe=made), saved_tensors() as kept:
        x.requires_grad_()
        keeps(x, splits)
    assert any(t.data_ptr() == x.data_ptr() for t in kept)


@every_recipe
def test_two_microbatches_in_flight(recipe, device):
    ours, _ = build(device=device, dtype=torch.bfloat16, delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    other = copy.deepcopy(ours)
    give_main_grads([ours, other])
    made = RECIPES["current" if recipe == "delayed" else recipe]()
    steps = []
    for counts in (SPLITS, SPLITS[::-1]):
        x, dy = draw(TOTAL, device)
        splits = splits_of(counts, device)
        with te.autocast(recipe=made):
            y = ours(x.clone().requires_grad_(), splits)
        splits.fill_(3)  # the backward reads the forward's offsets, not this tensor
        steps.append((counts, x, dy, y))
    for _, _, dy, y in reversed(steps):
        y.backward(dy)
    ours.backward_dw(), ours.backward_dw()
    for counts, x, dy, _ in reversed(steps):
        step(other, x, dy, splits_of(counts, device), made)
    for i in range(4):
        assert_same_bits(getattr(ours, f"weight{i}").main_grad, getattr(other, f"weight{i}").main_grad)
        assert_same_bits(getattr(ours, f"bias{i}").grad, getattr(other, f"bias{i}").grad)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.filterwarnings("ignore:.*its quantizers are made again")
def test_gradients_add_up_over_recipes(fused, device):
    ours, loop = build(device=device, dtype=torch.bfloat16, fuse_wgrad_accumulation=fused)
    give_main_grads([ours, *loop] if fused else [])
    single = [copy.deepcopy(ours) for _ in RECIPES]
    for name, fresh in zip(("current", "block", "none"), single, strict=False):
        x, dy = draw(TOTAL, device)
        made = RECIPES[name] and RECIPES[name]()
        step(ours, x, dy, splits_of(SPLITS, device), made)
        give_main_grads([fresh] if fused else [])
        step(fresh, x, dy, splits_of(SPLITS, device), made)
    for i in range(4):
        what = "main_grad" if fused else "grad"
        parts = [getattr(getattr(m, f"weight{i}"), what).double() for m in single[:3]]
        start = 0.5 if fused else 0.0
        exact = start + sum(p - start for p in parts)
        got = getattr(getattr(ours, f"weight{i}"), what)
        magnitude = 1.0 + sum(p.abs() for p in parts)
        assert_within(got, exact, 4 * rounding(magnitude, got.dtype), f"weight{i}")


def test_explain_names_one_call_for_each_product(device):
    ours, _ = build(device=device, dtype=torch.bfloat16)
    x = randn(TOTAL, K, dtype=torch.bfloat16, device=device, requires_grad=True)
    with te.autocast(recipe=R.Float8BlockScaling()):
        rows = {row.op: row for row in te.explain(ours, x, splits_of(SPLITS, device)).rows}
    for op, calls in (("quantize", 2), ("fp8_fprop", 1), ("fp8_dgrad", 1), ("fp8_wgrad", 1), ("sums", 1)):
        assert rows[f"grouped_{op}"].calls == calls
    assert device == "cpu" or "wgmma" in rows["grouped_fp8_fprop"].path


# ---- what a device alone can show ----


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", [{}, {"fuse_wgrad_accumulation": True}], ids=["plain", "main_grad"])
def test_no_wait_for_the_device(options, recipe):
    ours, _ = build(device="cuda", dtype=torch.bfloat16, **options)
    give_main_grads([ours] if options else [])
    x, dy = draw(TOTAL, "cuda")
    splits, made = splits_of(SPLITS, "cuda"), RECIPES[recipe] and RECIPES[recipe]()
    step(ours, x, dy, splits, made)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(ours, x, dy, splits, made)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_thousand_replays_with_other_splits(recipe):
    ours, _ = build(device="cuda", dtype=torch.bfloat16)
    twin = copy.deepcopy(ours)
    sample = (randn(TOTAL, K, dtype=torch.bfloat16, device="cuda", requires_grad=True), splits_of(SPLITS, "cuda"))
    made = RECIPES[recipe] and RECIPES[recipe]()
    graphed = te.make_graphed_callables(twin, sample, enabled=made is not None, recipe=made)
    held, differing = None, torch.zeros(1000, dtype=torch.int64, device="cuda")  # bytes of each turn
    for turn in range(1000):
        cuts = torch.randint(0, TOTAL + 1, (3,)).sort().values.tolist()
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, TOTAL - turn % 3], strict=True)]
        now = splits_of([max(n, 0) for n in counts], "cuda")
        x, dy = draw(TOTAL, "cuda")
        ours.zero_grad(), twin.zero_grad()
        results = [
            [*step(m, x, dy, now, made, call=lambda x, c=c, s=now: c(x, s)), *(p.grad for p in m.parameters())]
            for m, c in ((ours, ours), (twin, graphed))
        ]
        for a, b in zip(*results, strict=True):
            differing[turn] += (a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum()
        del results, a, b
        if turn == 10:
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= held + 2**16
    assert not differing.any(), f"these replays differ: {differing.nonzero().flatten().tolist()}"


@pytest.mark.gpu
def test_what_the_device_cannot_do_is_refused():
    ours, _ = build(device="cuda", dtype=torch.float32)
    x, splits = randn(TOTAL, K, device="cuda"), splits_of(SPLITS, "cuda")
    with te.autocast(recipe=R.Float8CurrentScaling()), refused(NotImplementedError, "float32", "m_splits", "list"):
        ours(x, splits)
    ours, _ = build(device="cuda", dtype=torch.bfloat16)

    def factory(role):
        if role.name.rpartition(".")[2] == "1":
            return None
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cuda")

    mixed = R.CustomRecipe(qfactory=factory)
    with te.autocast(recipe=mixed), refused(NotImplementedError, "from group to group", "m_splits", "list"):
        ours(x.bfloat16(), splits)
