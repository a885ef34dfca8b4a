# te.GroupedLinear by a list of sizes under delayed and current scaling, where one grouped kernel computes small groups:
# the bits of sizes on the device in results, gradients, scales and histories, within float64's bounds; with kept
# weights, main_grad, delayed gradients, experts without rows, and memory that two experts share.
import copy

import pytest
import torch
from support import assert_same_bits, assert_within, randn

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R
from transformer_engine.pytorch import _C, functional

from .grouped_cases import RECIPES, SPLITS, K, N, build, check_experts, give_main_grads, plain_scales, step

pytestmark = pytest.mark.usefixtures("fp8_left_off")

ROWS = sum(SPLITS)
BF16 = torch.bfloat16
OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "main_grad": {"fuse_wgrad_accumulation": True},
    "main_grad of 16 bits": {"fuse_wgrad_accumulation": True},
    "delayed": {"delay_wgrad_compute": True},
    "delayed main_grad": {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True},
}
ROUTINGS = [
    (SPLITS, BF16),
    (SPLITS, torch.float16),
    ([1, 1, 1, 1], BF16),
    ([0, 3, 0, 0], torch.float16),
    ([0, 0, 0, 0], BF16),
    ([64, 33, 128, 7], BF16),
]
GROUPED = {"grouped_fp8_fprop", "grouped_fp8_dgrad", "grouped_fp8_wgrad"}
each_recipe = pytest.mark.parametrize("recipe", ["delayed", "current"])


@pytest.fixture(autouse=True)
def lists():
    """set_list_products(), restored after the test."""
    before = _C.set_list_products("grouped")
    yield _C.set_list_products
    _C.set_list_products(before)


def draw(device, rows=ROWS, dtype=BF16):
    return randn(rows, K, dtype=dtype, device=device), randn(rows, N, dtype=dtype, device=device)


def explained(module, x, splits, recipe, **told):
    """{op: its row} of a forward and backward."""
    with te.autocast(recipe=recipe):
        return {row.op: row for row in te.explain(module, x.detach().requires_grad_(), splits, **told).rows}


def state_of(module):
    kept = [module.fp8_meta[way] for way in ("scaling_fwd", "scaling_bwd") if way in module.fp8_meta]
    return [t for state in kept if hasattr(state, "amax_history") for t in (state.scale, state.amax_history)]


def assert_same_modules(ours, twin):
    for (name, p), q in zip(ours.named_parameters(), twin.named_parameters(), strict=True):
        for what in ("grad", "main_grad"):
            a, b = getattr(p, what, None), getattr(q[1], what, None)
            assert (a is None) == (b is None), f"{name}.{what}"
            if a is not None:
                assert_same_bits(a, b, f"{name}.{what}")
    for a, b in zip(state_of(ours), state_of(twin), strict=True):
        assert_same_bits(a, b, "scales and histories")


def assert_same_steps(ours, twin, splits, made, device, dtype=BF16, turns=3, **told):
    """Steps of ours by the list, of twin by the same sizes on the device."""
    there = torch.tensor(splits, device=device)
    for _ in range(turns):
        x, dy = draw(device, sum(splits), dtype)
        got = step(ours, x, dy, None, made, call=lambda x: ours(x, splits, **told))
        want = step(twin, x, dy, None, made, call=lambda x: twin(x, there, **told))
        for a, b, what in zip(got, want, ("y", "dx"), strict=True):
            assert_same_bits(a, b, what)
        assert_same_modules(ours, twin)


@each_recipe
def test_explain_names_one_call_for_each_product_and_why(recipe, lists, device):
    ours, _ = build(device=device, dtype=BF16)
    x, _ = draw(device)
    found = explained(ours, x, SPLITS, RECIPES[recipe]())
    assert set(found) >= GROUPED
    for name in GROUPED:
        assert found[name].calls == 1
        assert found[name].why_not_faster == (
            "a list of small groups: one launch for all, with the sums of sizes on the device"
        )
    assert found["grouped_quantize"].calls == 2 and found["grouped_sums"].calls == 1
    assert [row.calls for op, row in found.items() if op.startswith("quantize")] == [1], found  # of all weights
    lists("each")
    found = explained(ours, x, SPLITS, RECIPES[recipe]())
    assert not GROUPED & set(found)
    products = [row for op, row in found.items() if op.startswith("gemm")]
    assert products and all("small ones of 16-bit results" in row.why_not_faster for row in products), found


@pytest.mark.parametrize(("splits", "dtype"), ROUTINGS, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@each_recipe
def test_the_bits_are_those_of_sizes_on_the_device(recipe, options, splits, dtype, device):
    ours, _ = build(device=device, dtype=dtype, **OPTIONS[options])
    twin = copy.deepcopy(ours)
    give_main_grads([ours, twin] if "main_grad" in options else [], dtype if "16" in options else torch.float32)
    assert_same_steps(ours, twin, splits, RECIPES[recipe](), device, dtype)


def test_a_kept_input(device):
    """Quantized again in the backward; delayed scaling refuses the option."""
    ours, _ = build(device=device, dtype=BF16, save_original_input=True)
    twin, _ = build(device=device, dtype=BF16)
    twin.load_state_dict(ours.state_dict())
    assert_same_steps(ours, twin, SPLITS, R.Float8CurrentScaling(), device)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@each_recipe
def test_against_float64(recipe, dtype, device):
    """Three steps, for delayed scales."""
    ours, _ = build(device=device, dtype=dtype)
    made, scales = RECIPES[recipe](), [plain_scales() for _ in SPLITS]
    for turn in range(3):
        x, dy = (t * 2.0**turn for t in draw(device, dtype=dtype))
        ours.zero_grad()
        y, dx = step(ours, x, dy, SPLITS, made)
        check_experts(ours, x, dy, y, dx, recipe, scales)
        for of_expert in scales:
            for one in of_expert.values():
                one.update()


@each_recipe
def test_each_group_is_quantized_as_before(recipe, lists, device):
    """Scales, histories and, on a CPU, all bits are those of groups one by one."""
    ours, _ = build(device=device, dtype=BF16)
    twin, made = copy.deepcopy(ours), RECIPES[recipe]()
    for _ in range(3):
        x, dy = draw(device)
        got = step(ours, x, dy, SPLITS, made)
        lists("each")
        want = step(twin, x, dy, SPLITS, made)
        lists("grouped")
        if device == "cpu":
            for a, b in zip(got, want, strict=True):
                assert_same_bits(a, b)
            assert_same_modules(ours, twin)
        for a, b in zip(state_of(ours), state_of(twin), strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("options", ["plain", "main_grad", "delayed"])
@each_recipe
def test_weights_kept_over_microbatches(recipe, options, device):
    """Later microbatches quantize no weight."""
    ours, _ = build(device=device, dtype=BF16, **OPTIONS[options])
    twin, made = copy.deepcopy(ours), RECIPES[recipe]()
    give_main_grads([ours, twin] if "main_grad" in options else [])
    for first in (True, False, False, True):
        assert_same_steps(ours, twin, SPLITS, made, device, turns=1, is_first_microbatch=first)
    found = explained(ours, draw(device)[0], SPLITS, made, is_first_microbatch=False)
    assert "grouped_fp8_fprop" in found and not [op for op in found if op.startswith("quantize")], found


@each_recipe
def test_weights_held_in_fp8(recipe, device):
    made = RECIPES[recipe]()
    ours, _ = build(device=device, dtype=BF16, quantized=made)
    assert_same_steps(ours, copy.deepcopy(ours), SPLITS, made, device)
    found = explained(ours, draw(device)[0], SPLITS, made)
    assert "grouped_fp8_fprop" in found and not [op for op in found if op.startswith("quantize")], found


@each_recipe
def test_results_into_poisoned_memory_of_the_callers(recipe, device):
    ours, _ = build(device=device, dtype=BF16)
    twin, made = copy.deepcopy(ours), RECIPES[recipe]()
    x, dy = draw(device)
    out, dgrad_out = (torch.full((ROWS, width), torch.nan, dtype=BF16, device=device) for width in (N, K))
    got = step(ours, x, dy, None, made, call=lambda x: ours(x, SPLITS, out=out, dgrad_out=dgrad_out))
    want = step(twin, x, dy, torch.tensor(SPLITS, device=device), made)
    for a, b, buffer in zip(got, want, (out, dgrad_out), strict=True):
        assert_same_bits(a, b)
        assert a.data_ptr() == buffer.data_ptr()
    assert_same_modules(ours, twin)


@pytest.mark.parametrize("overwrite", [False, True])
@each_recipe
def test_two_experts_that_share_a_main_grad(recipe, overwrite, device):
    """One comes after the other, in their order; sizes on the device refuse them. A += rounds once, or twice."""
    ours, _ = build(device=device, dtype=BF16, bias=False, fuse_wgrad_accumulation=True)
    alone, made = copy.deepcopy(ours), RECIPES[recipe]()
    give_main_grads([ours, alone])
    ours.weight2.main_grad = ours.weight0.main_grad
    ours.weight2.overwrite_main_grad = overwrite
    for i in range(4):
        getattr(alone, f"weight{i}").overwrite_main_grad = True
    x, dy = draw(device)
    step(ours, x, dy, SPLITS, made), step(alone, x, dy, SPLITS, made)
    first, second = (getattr(alone, f"weight{i}").main_grad.double() for i in (0, 2))
    want = second if overwrite else 0.5 + first + second
    bound = 4 * 2.0**-24 * (0.5 + first.abs() + second.abs())
    assert_within(ours.weight2.main_grad, want, torch.zeros_like(bound) if overwrite else bound)


def test_a_state_for_all_groups_stays_one_by_one(lists, device):
    """Delayed scaling by one quantizer: each group has to add its amax before the next one."""

    def quantizer(scale, e5m2=False):
        state = torch.tensor([scale], device=device), torch.zeros(1, device=device)
        return _C.Quantizer("delayed", e5m2=e5m2, scale=state[0], amax=state[1])

    weights = [randn(N, K, dtype=BF16, device=device) for _ in SPLITS]
    x, found = draw(device)[0], []
    one = _C.ProductQuantization(quantizer(8.0), quantizer(16.0), quantizer(32.0, True), False, True, True)
    for by in ("grouped", "each"):
        lists(by)
        found.append(functional.grouped_linear(x, weights, splits=SPLITS, quantizations=[one]))
    assert_same_bits(*found)


@pytest.mark.parametrize("options", [{"dtype": torch.float32}, {"override": "high_precision"}], ids=str)
def test_what_goes_one_by_one(options, device):
    ours, _ = build(device=device, dtype=options.get("dtype", BF16))
    x, _ = draw(device, dtype=options.get("dtype", BF16))
    made = R.Float8CurrentScaling(backward_override=options.get("override"))
    assert not GROUPED & set(explained(ours, x, SPLITS, made))


# ---- what a device alone can show ----


def wide(experts, n, k, **options):
    return te.GroupedLinear(experts, k, n, bias=False, params_dtype=BF16, device="cuda", **options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("experts", "rows", "n", "k", "together"),
    [(64, 256, 512, 512, True), (128, 512, 1536, 2048, True), (2, 4096, 8192, 4096, False), (1, 64, 256, 256, False)],
)
@each_recipe
def test_small_groups_go_together_and_large_ones_keep_their_bits(recipe, experts, rows, n, k, together, lists):
    ours, made = wide(experts, n, k), RECIPES[recipe]()
    twin = copy.deepcopy(ours)
    x, dy = (randn(experts * rows, width, dtype=BF16, device="cuda") for width in (k, n))
    splits = [rows] * experts
    results = []
    for module, by in ((ours, "fastest"), (twin, "each")):
        lists(by)
        results.append([*step(module, x, dy, splits, made), *(p.grad for p in module.parameters())])
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        if together:  # of products whose operands are the same: one more rounding of a sum in float32
            assert_within(a.double(), b.double(), 2.0**-6 * b.double().abs().max(), str(i))
        else:
            assert_same_bits(a, b, str(i))
    lists("fastest")
    found = set(explained(ours, x, splits, made))
    assert found >= GROUPED if together else not GROUPED & found


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"fuse_wgrad_accumulation": True}], ids=["grad", "main_grad"])
@each_recipe
def test_many_experts_have_the_bits_of_sizes_on_the_device(recipe, options, lists):
    """Sizes of all kinds, that change from call to call, by the rule that is there."""
    lists("fastest")
    experts, n, k = 300, 768, 512
    ours, made = wide(experts, n, k, **options), RECIPES[recipe]()
    twin, generator = copy.deepcopy(ours), torch.Generator().manual_seed(3)
    give_main_grads([ours, twin] if options else [])
    for _ in range(3):
        splits = torch.randint(0, 500, (experts,), generator=generator)
        splits[torch.randint(0, experts, (40,), generator=generator)] = 0
        x, dy = (randn(int(splits.sum()), width, dtype=BF16, device="cuda") for width in (k, n))
        got, want = step(ours, x, dy, splits.tolist(), made), step(twin, x, dy, splits.cuda(), made)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)
        assert_same_modules(ours, twin)


@pytest.mark.gpu
@each_recipe
def test_no_wait_for_the_device(recipe):
    ours, _ = build(device="cuda", dtype=BF16)
    x, dy = draw("cuda")
    made = RECIPES[recipe]()
    step(ours, x, dy, SPLITS, made)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(ours, x, dy, SPLITS, made)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@each_recipe
def test_captured(recipe):
    ours, _ = build(device="cuda", dtype=BF16)
    twin, made = copy.deepcopy(ours), RECIPES[recipe]()

    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = twin

        def forward(self, x):
            return self.experts(x, SPLITS)

    sample = randn(ROWS, K, dtype=BF16, device="cuda", requires_grad=True)
    graphed = te.make_graphed_callables(Fixed(), (sample,), enabled=True, recipe=made)
    for _ in range(3):
        x, dy = draw("cuda")
        ours.zero_grad(), twin.zero_grad()
        want = step(ours, x, dy, SPLITS, made)
        got = step(twin, x, dy, None, made, call=graphed)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)
        for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
            assert_same_bits(p.grad, q.grad)
