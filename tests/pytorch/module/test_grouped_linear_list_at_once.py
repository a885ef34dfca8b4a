# te.GroupedLinear by a list of sizes whose groups one grouped kernel computes: that it does, when, and the bits of a
# loop of Linears all the same, in bf16 and in FP8 blocks: with buffers, kept weights, delayed gradients, experts
# without rows, memory that two experts share, groups that cuBLASLt adds up in parts, and captured. Mutants: no group
# left to te_gemm (Plan::leaves), a rule that takes all lists (list_refuses), one round for shared buffers (rounds_of),
# sums of the kernel (sums_as_quantized), te_gemm_splits that keeps its table over a choice.
import copy

import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R
from transformer_engine.pytorch import _C

from .grouped_cases import SPLITS, K, N, assert_same_gradients, build, give_main_grads, step, step_of_loop

pytestmark = pytest.mark.usefixtures("fp8_left_off")

ROWS = sum(SPLITS)
OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "main_grad": {"fuse_wgrad_accumulation": True},
    "main_grad, no bias": {"bias": False, "fuse_wgrad_accumulation": True},
    "main_grad of 16 bits": {"bias": False, "fuse_wgrad_accumulation": True},
    "delayed": {"delay_wgrad_compute": True},
    "keeps": {"save_original_input": True},
}
PRODUCTS = ("fprop", "dgrad", "wgrad")


@pytest.fixture
def lists():
    """set_list_products(), restored after the test."""
    before = _C.set_list_products("grouped")
    yield _C.set_list_products
    _C.set_list_products(before)


def draw(device, dtype=torch.bfloat16, rows=ROWS):
    return randn(rows, K, dtype=dtype, device=device), randn(rows, N, dtype=dtype, device=device)


def made(blocks):
    return R.Float8BlockScaling() if blocks else None


def ops(module, x, splits, recipe):
    """How often each op was called."""
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        rows = te.explain(module, x.detach().requires_grad_(), splits).rows
    return {row.op: row for row in rows}


def names(blocks, grad_accumulator=False):
    adds = grad_accumulator or not blocks
    return {f"grouped_{'fp8_' if blocks else ''}{p}{'_accumulate' if p == 'wgrad' and adds else ''}" for p in PRODUCTS}


@pytest.mark.parametrize("blocks", [False, True], ids=["bf16", "blocks"])
def test_explain_names_one_call_for_each_product_and_why(blocks, lists, device):
    ours, _ = build(device=device, dtype=torch.bfloat16, bias=False)
    x, _ = draw(device)
    found = ops(ours, x, SPLITS, made(blocks))
    assert names(blocks) <= set(found)
    for name in names(blocks):
        assert found[name].calls == 1
        assert "a list of small groups" in found[name].why_not_faster, found[name]
    assert not blocks or found["grouped_quantize"].calls == 2
    lists("each")
    found = ops(ours, x, SPLITS, made(blocks))
    assert not names(blocks) & set(found)
    why = "powers of 2" if blocks else "set_list_products('each') selects it"
    products = [row for op, row in found.items() if op.startswith(("gemm", "linear"))]
    assert products and all(why in row.why_not_faster for row in products), found


@pytest.mark.parametrize("by", ["grouped", "alternating"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [SPLITS, [1, 1, 1, 1], [0, 3, 0, 0], [0, 0, 0, 0], [64, 33, 128, 7]], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_blocks_have_the_bits_of_a_loop(options, splits, dtype, by, lists, device):
    lists(by)
    ours, loop = build(device=device, dtype=dtype, **OPTIONS[options])
    give_main_grads([ours, *loop] if "main_grad" in options else [], dtype if "16" in options else torch.float32)
    for _ in range(2):
        x, dy = draw(device, dtype, sum(splits))
        got, want = step(ours, x, dy, splits, made(True)), step_of_loop(loop, x, dy, splits, made(True))
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)
        assert_same_gradients(ours, loop)


@pytest.mark.parametrize("quantized", [False, True])
def test_weights_kept_over_microbatches_and_held_in_fp8(quantized, lists, device):
    recipe = made(True)
    ours, loop = build(device=device, dtype=torch.bfloat16, quantized=recipe if quantized else None)
    for first in (True, False):
        x, dy = draw(device)
        told = {} if quantized else {"is_first_microbatch": first}
        got = step(ours, x, dy, None, recipe, call=lambda x, told=told: ours(x, SPLITS, **told))
        for a, b in zip(got, step_of_loop(loop, x, dy, SPLITS, recipe), strict=True):
            assert_same_bits(a, b)
        assert_same_gradients(ours, loop)


@pytest.mark.parametrize("by", ["grouped", "alternating"])
@pytest.mark.parametrize("blocks", [False, True], ids=["bf16", "blocks"])
def test_results_into_poisoned_memory_of_the_callers(blocks, by, lists, device):
    lists(by if blocks else "grouped")
    ours, loop = build(device=device, dtype=torch.bfloat16)
    x, dy = draw(device)
    out, dgrad_out = (torch.full((ROWS, width), torch.nan, dtype=x.dtype, device=device) for width in (N, K))
    got = step(ours, x, dy, None, made(blocks), call=lambda x: ours(x, SPLITS, out=out, dgrad_out=dgrad_out))
    want = step_of_loop(loop, x, dy, SPLITS, made(blocks))
    for a, b, buffer in zip(got, want, (out, dgrad_out), strict=True):
        assert_same_bits(a, b)
        assert a.data_ptr() == buffer.data_ptr()
    assert_same_gradients(ours, loop)
    if not blocks:  # else the rows are read before anything is written
        rows = out.view(-1)[: ROWS * K].view(ROWS, K)
        with refused(ValueError, "'out'", "shares memory with inp"):
            ours(rows, SPLITS, out=out)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("blocks", [False, True], ids=["bf16", "blocks"])
def test_two_experts_that_share_a_main_grad(blocks, overwrite, lists, device):
    """One comes after the other, in their order."""
    both = []
    ours, _ = build(device=device, dtype=torch.bfloat16, bias=False, fuse_wgrad_accumulation=True)
    x, dy = draw(device)
    for by in ("each", "grouped"):
        lists(by)
        module = copy.deepcopy(ours)
        give_main_grads([module])
        module.weight2.main_grad = module.weight0.main_grad
        module.weight2.overwrite_main_grad = overwrite
        step(module, x, dy, SPLITS, made(blocks))
        both.append([getattr(module, f"weight{i}").main_grad for i in range(4)])
    for i, (a, b) in enumerate(zip(*both, strict=True)):
        assert_same_bits(a, b, str(i))


@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("blocks", [False, True], ids=["bf16", "blocks"])
def test_a_main_grad_that_is_overwritten_beside_others(blocks, which, lists, device):
    ours, loop = build(device=device, dtype=torch.bfloat16, bias=False, fuse_wgrad_accumulation=True)
    give_main_grads([ours, *loop])
    for weight in (getattr(ours, f"weight{which}"), loop[which].weight):
        weight.overwrite_main_grad = True
    x, dy = draw(device)
    step(ours, x, dy, SPLITS, made(blocks))
    step_of_loop(loop, x, dy, SPLITS, made(blocks))
    assert_same_gradients(ours, loop)


def test_quantizers_that_differ_stay_one_by_one(lists, device):
    def factory(role):
        shape = {"block_scaling_dim": 2} if role.tensor_type == "weight" else {"block_scaling_dim": 1}
        power = role.name.rpartition(".")[2] != "1"
        return te.Float8BlockQuantizer(
            te.DType.kFloat8E4M3, rowwise=True, columnwise=True, force_pow_2_scales=power, **shape
        )

    recipe = R.CustomRecipe(qfactory=factory)
    ours, _ = build(device=device, dtype=torch.bfloat16, bias=False)
    x, _ = draw(device)
    assert not names(True) & set(ops(ours, x, SPLITS, recipe))


@pytest.mark.parametrize("which", ["fp8_quant_fwd_inp", "fp8_quant_bwd_grad"])
def test_scales_without_powers_of_2_stay_one_by_one(which, lists, device):
    recipe = R.Float8BlockScaling(**{which: R.QParams(power_2_scale=False)})
    ours, loop = build(device=device, dtype=torch.bfloat16, bias=False)
    x, dy = draw(device)
    assert not names(True) & set(ops(ours, x, SPLITS, recipe))
    for a, b in zip(step(ours, x, dy, SPLITS, recipe), step_of_loop(loop, x, dy, SPLITS, recipe), strict=True):
        assert_same_bits(a, b)
    assert_same_gradients(ours, loop)


def test_the_loop_of_a_cpu_is_obeyed(lists):
    """By sums long enough to be rounded otherwise by LibTorch."""
    module = te.GroupedLinear(2, 512, 64, bias=False, params_dtype=torch.float16, device="cpu")
    x, found = randn(160, 512, dtype=torch.float16), []
    before = _C.set_cpu_products("loop")
    try:
        for by in ("each", "grouped"):
            lists(by)
            with te.autocast(recipe=R.Float8BlockScaling()):
                found.append(module(x, [100, 60]))
    finally:
        _C.set_cpu_products(before)
    assert_same_bits(*found)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_backward_in_another_precision(override, lists, device):
    recipe = R.Float8BlockScaling(backward_override=override)
    ours, loop = build(device=device, dtype=torch.bfloat16)
    x, dy = draw(device)
    for a, b in zip(step(ours, x, dy, SPLITS, recipe), step_of_loop(loop, x, dy, SPLITS, recipe), strict=True):
        assert_same_bits(a, b)
    assert_same_gradients(ours, loop)


def test_an_unknown_mode_is_named(lists):
    with pytest.raises(ValueError, match="is 'all', wanted 'fastest', 'each', 'grouped' or 'alternating'"):
        _C.set_list_products("all")


# ---- what a device alone can show ----


def wide(experts, n, k, device="cuda", **options):
    return te.GroupedLinear(experts, k, n, bias=False, params_dtype=torch.bfloat16, device=device, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [False, True], ids=["bf16", "blocks"])
@pytest.mark.parametrize(
    ("experts", "rows", "n", "k", "together"),
    [(64, 256, 512, 512, True), (128, 512, 1536, 2048, True), (2, 4096, 8192, 4096, False), (1, 64, 256, 256, False)],
)
def test_small_groups_go_together_and_large_ones_alone(experts, rows, n, k, together, blocks, lists):
    lists("fastest")
    x = randn(experts * rows, k, dtype=torch.bfloat16, device="cuda")
    found = set(ops(wide(experts, n, k), x, [rows] * experts, made(blocks)))
    assert names(blocks) <= found if together else not names(blocks) & found


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"fuse_wgrad_accumulation": True}], ids=["grad", "main_grad"])
@pytest.mark.parametrize("blocks", [False, True], ids=["bf16", "blocks"])
def test_many_experts_have_the_bits_of_products_one_by_one(blocks, options, lists):
    """Sizes of all kinds, that change from call to call, by the rule that is there."""
    experts, n, k = 300, 768, 512
    ours = wide(experts, n, k, **options)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        splits = torch.randint(0, 500, (experts,), generator=generator)
        splits[torch.randint(0, experts, (40,), generator=generator)] = 0
        splits = splits.tolist()
        x, dy = (randn(sum(splits), width, dtype=torch.bfloat16, device="cuda") for width in (k, n))
        results = []
        for by in ("fastest", "each"):
            lists(by)
            ours.zero_grad()
            give_main_grads([ours] if options else [])
            got = step(ours, x, dy, splits, made(blocks))
            results.append([*got, *(p.main_grad if options else p.grad for p in ours.parameters())])
        for i, (a, b) in enumerate(zip(*results, strict=True)):
            assert_same_bits(a, b, str(i))


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "odd", "product"), [(2880, 16, 0), (2880, 16, 1), (128, 5000, 2)], ids=PRODUCTS)
def test_groups_that_cublaslt_adds_up_in_parts(width, odd, product, lists):
    """Unasked, or by whatever algorithm is chosen for one count: that group follows by te_gemm."""
    experts = 8
    splits = [64] * experts
    splits[3] = odd
    x, dy = (randn(sum(splits), width, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    ours = wide(experts, width, width)

    def run(by, splits=splits):
        lists(by)
        ours.zero_grad()
        got = step(ours, x, dy, splits)
        return [*got, *(p.grad for p in ours.parameters())]

    def same(a, b):
        return [torch.equal(p, q) for p, q in zip(a, b, strict=True)]

    kernels = run("fastest", torch.tensor(splits, device="cuda"))
    assert all(same(run("fastest"), run("each")))
    assert not all(same(run("each"), kernels)), "nothing is split here unasked"
    _C.tune_start()
    run("each")
    keys = [key for key in _C.tune_stop() if key["layout"] == product]
    keys = [key for key in keys if key["depth" if product == 2 else "rows"] == odd]
    assert len(keys) == 1, keys
    try:
        for choice in _C.gemm_candidates(keys[0], 64):
            _C.gemm_choose(keys, [choice])
            assert all(same(run("grouped"), run("each")))
    finally:
        _C.gemm_forget_choices()
    assert all(same(run("fastest"), run("each")))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(256, 8192), (8192, 256)], ids=["fprop", "dgrad"])
@pytest.mark.parametrize("blocks", [False, True], ids=["bf16", "blocks"])
def test_deep_products_that_cublaslt_adds_up_in_parts_by_default(blocks, n, k, lists):
    experts = 24
    ours = wide(experts, n, k)
    splits = torch.randint(0, 40, (experts,), generator=torch.Generator().manual_seed(5)).tolist()
    x, dy = (randn(sum(splits), width, dtype=torch.bfloat16, device="cuda") for width in (k, n))
    results = []
    for by in ("fastest", "each"):
        lists(by)
        ours.zero_grad()
        results.append([*step(ours, x, dy, splits, made(blocks)), *(p.grad for p in ours.parameters())])
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert_same_bits(a, b, str(i))


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [False, True], ids=["bf16", "blocks"])
def test_captured_with_inputs_that_change(blocks, lists):
    ours, _ = build(device="cuda", dtype=torch.bfloat16)
    twin = copy.deepcopy(ours)
    splits = list(SPLITS)

    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = twin

        def forward(self, x):
            return self.experts(x, splits)

    sample = randn(ROWS, K, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    graphed = te.make_graphed_callables(Fixed(), (sample,), enabled=blocks, recipe=made(blocks))
    splits[:] = [1, 1, 1, ROWS - 3]  # a graph keeps what it was captured with
    for _ in range(3):
        x, dy = draw("cuda")
        ours.zero_grad(), twin.zero_grad()
        want = step(ours, x, dy, SPLITS, made(blocks))
        got = step(twin, x, dy, None, made(blocks), call=graphed)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)
        for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
            assert_same_bits(p.grad, q.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [False, True], ids=["bf16", "blocks"])
def test_no_wait_for_the_device(blocks, lists):
    ours, _ = build(device="cuda", dtype=torch.bfloat16)
    x, dy = draw("cuda")
    step(ours, x, dy, SPLITS, made(blocks))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(ours, x, dy, SPLITS, made(blocks))
    finally:
        torch.cuda.set_sync_debug_mode("default")
