# The tensors that te.GroupedLinear keeps for its backward where one call computes all groups, for sizes on the device
# and for lists at once: their bytes equal te.memory_plan's, and they move to host memory and back. Mutants: kept panels
# replaced by the input, bytes of tensors in place of their storages' in probe/memory_plan.py, tensors that come back as
# zeros (cpu_offload): each turns tests here red.
import pytest
import torch
from support import assert_same_bits, randn, saved_tensors

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C

from ..offload.cases import small as small  # a fixture
from .grouped_cases import RECIPES, SPLITS, K, build

pytestmark = pytest.mark.usefixtures("fp8_left_off")

TOTAL = sum(SPLITS)
every_recipe = pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "none"])


def splits_of(counts, device):
    return torch.tensor(counts, device=device)


@pytest.fixture
def lists_at_once():
    before = _C.set_list_products("grouped")
    yield
    _C.set_list_products(before)


def plan_and_hooks(ours, x, splits, recipe):
    """(te.memory_plan's report, bytes of the distinct storages that hooks see, without the input's)."""
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        plan = te.memory_plan(ours, x, splits)
        with saved_tensors() as kept:
            y = ours(x, splits)
    seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept if t.numel()}
    seen.pop(x.untyped_storage().data_ptr(), None)
    del y
    return plan, sum(seen.values())


def check_plan(ours, x, splits, recipe):
    plan, seen = plan_and_hooks(ours, x, splits, recipe)
    assert plan.kept_bytes + plan.bytes_of("parameter") == seen > 0, plan  # FP8 weights are copies of parameters
    return plan


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"save_original_input": True}], ids=str)
@pytest.mark.parametrize("recipe", ["none", "current", "block"])
def test_memory_plan_equals_the_hooks_for_device_splits(recipe, options, device):
    ours, _ = build(device=device, dtype=torch.bfloat16, **options)
    x = randn(TOTAL, K, dtype=torch.bfloat16, device=device, requires_grad=True)
    check_plan(ours, x, splits_of(SPLITS, device), RECIPES[recipe] and RECIPES[recipe]())


@pytest.mark.usefixtures("lists_at_once")
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"save_original_input": True}], ids=str)
@pytest.mark.parametrize("recipe", ["none", "current", "block"])
def test_memory_plan_equals_the_hooks_for_lists_at_once(recipe, options, device):
    ours, _ = build(device=device, dtype=torch.bfloat16, **options)
    x = randn(TOTAL, K, dtype=torch.bfloat16, device=device, requires_grad=True)
    made = RECIPES[recipe] and RECIPES[recipe]()
    with te.autocast(enabled=made is not None, recipe=made):
        ops = {row.op for row in te.explain(ours, x, SPLITS).rows}
    assert any("grouped_" in op and "fprop" in op for op in ops), ops
    check_plan(ours, x, SPLITS, made)


@every_recipe
def test_what_is_kept_is_panels_and_nothing_for_each_group(recipe, device):
    rows, features, experts = 4096, 256, 8
    ours = te.GroupedLinear(experts, features, 64, params_dtype=torch.bfloat16, device=device)
    x = randn(rows, features, dtype=torch.bfloat16, device=device, requires_grad=True)
    splits = splits_of([rows // experts] * experts, device)
    plan = check_plan(ours, x, splits, RECIPES[recipe]())
    panels = [row for row in plan.rows if row.name == "linear input"]
    assert [list(row.shape) for row in panels] == [[(rows - experts) // 128 + experts, features, 128]]
    weights = sum(row.bytes for row in plan.rows if row.name == "scales") if recipe != "block" else 2**14
    assert plan.kept_bytes <= 1.04 * (rows + 127 * experts) * features + weights


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("recipe", RECIPES)
def test_offloaded(recipe, device):
    """Panels leave and come back: those of the first of two layers."""
    layers = [te.GroupedLinear(4, 64, 64, params_dtype=torch.bfloat16, device=device) for _ in range(2)]
    splits, made = splits_of(SPLITS, device), RECIPES["current" if recipe == "delayed" else recipe]
    x = randn(TOTAL, 64, dtype=torch.bfloat16, device=device)
    results = []
    for enabled in (False, True):
        context, sync = te.get_cpu_offload_context(enabled, 1, 2)
        leaf = x.clone().requires_grad_()
        y = leaf
        for layer in layers:
            layer.zero_grad()
            with context, te.autocast(enabled=made is not None, recipe=made and made()):
                y = layer(y, splits)
            y = sync(y)
        if enabled:
            assert context.offload_synchronizer.get_offloaded_total_size_mb() > 0
        y.backward(torch.ones_like(y))
        results.append([y.detach(), leaf.grad, *(p.grad.clone() for layer in layers for p in layer.parameters())])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
