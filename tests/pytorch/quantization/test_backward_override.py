# backward_override: FP8 products forward, products of the parameters' dtype backward, bit for bit the plain backward of
# the same operands (override_reference.py), and within float64's bounds; what is kept for it, what te.memory_plan and
# te.explain say of it, and what is refused. Mutant: an activation that is not quantized again where its
# values are read (layer_backward) turns these red.
import pytest
import torch
from support import addresses, assert_same_bits, assert_within, call_op, randn, refused, rounding, sum_error, wide

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.quantization.recipes.products import plan_of

from .override_cases import assert_same, by_name, every_recipe, every_word, kept_of
from .override_reference import (
    FAMILIES,
    FFN,
    HIDDEN,
    PRODUCTS,
    WORDS,
    around,
    build,
    linear,
    meaning,
    mlp,
    norm_linear,
    referred,
    step,
    tokens,
)

pytestmark = pytest.mark.usefixtures("fp8_left_off")


# ---- values ----


@every_recipe
@every_word
@by_name(FAMILIES)
def test_the_backward_is_the_plain_one_of_its_operands(device, family, word, recipe):
    module, x = build(family, device), tokens(device)
    assert_same(step(module, x, recipe, word), referred(module, x, recipe, word))


@every_recipe
@every_word
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_so_it_is_in_other_dtypes(device, dtype, word, recipe):
    module, x = build(mlp, device, dtype), tokens(device, dtype)
    assert_same(step(module, x, recipe, word), referred(module, x, recipe, word))


@every_recipe
@every_word
@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (2, 3, 7), (0, 4), ()], ids=str)
def test_any_number_of_tokens(device, shape, word, recipe):
    for family in (linear, mlp):
        module, x = build(family, device), tokens(device, shape=shape)
        assert_same(step(module, x, recipe, word), referred(module, x, recipe, word))


@every_recipe
@every_word
def test_within_float64s_bounds(device, word, recipe):
    """dx = dy W and dW = dy^T x of operands that float64 represents exactly: a float32 sum, rounded once."""
    module = te.Linear(HIDDEN, FFN, params_dtype=torch.bfloat16, device=device)
    x, dy = tokens(device, shape=(40,)), randn(40, FFN, dtype=torch.bfloat16, device=device)
    with around(recipe, word):
        y = module(x)
    y.backward(dy)
    operands = x.detach(), module.weight.detach()
    if word == "dequantized":
        operands = meaning(operands[0], recipe), meaning(operands[1], recipe, weight=True)
    rows, weight = map(wide, operands)
    for name, got, a, b, depth in (
        ("dx", x.grad, wide(dy), weight, FFN),
        ("dweight", module.weight.grad, wide(dy).T, rows, 40),
        ("dbias", module.bias.grad[None], torch.ones(1, 40).double(), wide(dy), 40),
    ):
        value, magnitude = a @ b, a.abs() @ b.abs()
        assert_within(got, value, sum_error(magnitude, depth) + rounding(value, torch.bfloat16), name)


@every_recipe
@every_word
def test_the_forward_is_the_recipes(device, word, recipe):
    module, x = build(mlp, device), tokens(device)
    assert_same_bits(step(module, x, recipe, word)["output 0"], step(module, x, recipe, None)["output 0"])


@every_recipe
def test_each_word_has_gradients_of_its_own(device, recipe):
    """Else a test that compares two of them could not fail."""
    module, x = build(mlp, device), tokens(device)
    found = [step(module, x, recipe, word) for word in (None, *WORDS)]
    for i in range(3):
        for name in ("input", "fc1_weight", "fc2_weight"):
            assert not torch.equal(found[i][name], found[i - 1][name]), (i, name)


@every_recipe
@every_word
def test_gradients_of_any_layout(device, word, recipe):
    module, x = build(linear, device), tokens(device)
    dy = randn(*x.shape[:-1], 2 * FFN, dtype=x.dtype, device=device)[..., ::2]
    found = []
    for given in (dy, dy.contiguous()):
        again = x.detach().clone().requires_grad_()
        with around(recipe, word):
            y = module(again)
        found.append(torch.autograd.grad(y, [again, *module.parameters()], given))
    for a, b in zip(*found, strict=True):
        assert_same_bits(a, b)


@every_recipe
@every_word
@by_name(PRODUCTS)
def test_frozen_tensors_change_no_other_gradients(device, family, word, recipe):
    module, x = build(family, device), tokens(device)
    wanted = step(module, x, recipe, word)
    for frozen in ("weight", "bias", "input"):
        for name, p in module.named_parameters():
            p.requires_grad_(not name.endswith(frozen))
        got = step(module, x, recipe, word, input_grad=frozen != "input")
        assert_same(got, {name: None if name.endswith(frozen) else t for name, t in wanted.items()})


@every_recipe
@every_word
def test_a_graph_that_is_kept_and_two_in_flight(device, word, recipe):
    module, xs = build(mlp, device), [tokens(device, seed=seed) for seed in (3, 4)]
    wanted = [step(module, x, recipe, word)["fc1_weight"] for x in xs]
    module.zero_grad(set_to_none=True)
    with around(recipe, word):
        outputs = [module(x) for x in xs]
    for i in (1, 0, 0, 1):
        dy = torch.randn(outputs[i].shape, generator=torch.Generator().manual_seed(7)).to(outputs[i])
        outputs[i].backward(dy, retain_graph=True)
        assert_same_bits(module.fc1_weight.grad, wanted[i])
        module.zero_grad(set_to_none=True)


@every_word
def test_a_parameter_that_changes_before_its_backward(device, word):
    """High precision reads the parameter itself, as a plain backward does; the quantized operand is a copy."""
    module, x = build(linear, device), tokens(device)
    wanted = step(module, x, "current", word)["input"]
    given = x.detach().clone().requires_grad_()
    with around("current", word):
        y = module(given)
    with torch.no_grad():
        module.weight.mul_(2)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y)
    if word == "high_precision":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(dy)
    else:
        y.backward(dy)
        assert_same_bits(given.grad, wanted)


# ---- what is kept ----


@every_recipe
def test_high_precision_keeps_operands_and_no_fp8(device, recipe):
    module, x = build(linear, device), tokens(device)
    assert addresses(kept_of(module, x, recipe, "high_precision")) == addresses([x, module.weight])
    module = build(norm_linear, device)
    kept = kept_of(module, x, recipe, "high_precision")
    assert not any(t.dtype == torch.uint8 for t in kept) and x.data_ptr() in addresses(kept)
    assert sum(t.dtype == x.dtype and t.shape == x.shape for t in kept) == 2  # x, and the norm's output


@every_recipe
def test_dequantized_keeps_what_the_forward_has_read(device, recipe):
    module, x = build(linear, device), tokens(device)
    kept = kept_of(module, x, recipe, "dequantized")
    rows = x.numel() // HIDDEN
    assert sorted(tuple(t.shape) for t in kept if t.dtype == torch.uint8) == sorted([(rows, HIDDEN), (FFN, HIDDEN)])
    assert all(t.dtype in (torch.uint8, torch.float32) for t in kept)


@every_recipe
@every_word
def test_a_weight_has_no_columnwise_copy(device, word, recipe):
    module, x = build(linear, device), tokens(device)
    step(module, x, recipe, word, is_first_microbatch=True)
    assert module.runtime.quantization.weights.kept[""][1].columnwise is None
    step(module, x, recipe, None, is_first_microbatch=True)
    assert module.runtime.quantization.weights.kept[""][1].columnwise is not None


# ---- reports ----


def test_the_memory_plan_names_the_override(device):
    module, x = build(linear, device), tokens(device)

    def planned(recipe, word):
        with around(recipe, word):
            return te.memory_plan(module, x).rows

    rows = {row.name: row for row in planned("current", "high_precision")}
    assert rows["linear input"].status == "input" and rows["weight"].dtype == "bfloat16"
    assert all("backward_override is 'high_precision'" in row.why for row in rows.values())
    rows = {row.name: row for row in planned("block", "dequantized")}
    assert (rows["linear input"].dtype, rows["linear input"].status) == ("uint8", "kept")
    assert rows["quantized weight"].dtype == "uint8" and rows["quantized weight"].status == "parameter"
    assert all("backward_override is 'dequantized'" in rows[n].why for n in ("linear input", "quantized weight"))
    assert not any("backward_override" in row.why for row in planned("block", None))


@pytest.mark.parametrize(("word", "bytes_"), [("high_precision", 2), ("dequantized", 1)])
def test_the_memory_plan_has_the_bytes_of_keeping(device, word, bytes_):
    module, x = build(norm_linear, device, recompute_norm_output=True), tokens(device)
    with around("current", word):
        rows = te.memory_plan(module, x).rows
    (again,) = [row for row in rows if row.status == "recomputed"]
    size = x.numel() * bytes_  # FP8 rows start on 16 bytes, and there are a multiple of 16 of them
    assert size <= again.bytes <= size * 1.1 and "backward_override" in again.why


@every_word
def test_explain_names_the_override(device, word):
    module, x = build(mlp, device), tokens(device)
    with around("current", word):
        rows = te.explain(module, x).rows
    by_op = {}
    for row in rows:
        by_op.setdefault(row.op, []).append(row)
    for op in ("linear_dgrad", "linear_wgrad"):
        assert sum(row.calls for row in by_op[op]) == 2
        assert all(f"backward_override is '{word}'" in row.why_not_faster for row in by_op[op])
    told = {row.op for row in rows if "backward_override" in row.why_not_faster}
    assert told <= {"linear_dgrad", "linear_wgrad", "dequantize"}
    with around("current", None):
        rows = te.explain(module, x).rows
    assert not any("backward_override" in row.why_not_faster for row in rows)


# ---- the recipe ----


@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling])
def test_unknown_words(kind):
    with refused(ValueError, kind.__name__, "'backward_override'", "'bf16'", *WORDS):
        kind(backward_override="bf16")
    made = kind()
    with refused(ValueError, kind.__name__, "'backward_override'", "True", *WORDS):
        made.backward_override = True
    assert made.backward_override is None


def test_the_environment_has_the_default(monkeypatch):
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequantized")
    assert Float8CurrentScaling().backward_override == Float8BlockScaling().backward_override == "dequantized"
    assert Float8BlockScaling(backward_override=None).backward_override is None
    assert Float8BlockScaling(backward_override="high_precision").backward_override == "high_precision"
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "")
    assert Float8CurrentScaling().backward_override is None
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "bf16")
    with refused(ValueError, "NVTE_BACKWARD_OVERRIDE", "'bf16'", *WORDS):
        Float8CurrentScaling()
    assert Float8CurrentScaling(backward_override=None).backward_override is None


def test_delayed_scaling_has_none(monkeypatch, device):
    for word in WORDS:
        with refused(ValueError, "DelayedScaling", "'backward_override'", repr(word)):
            DelayedScaling(backward_override=word)
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequantized")
    made = DelayedScaling(amax_history_len=7)
    assert made.backward_override is None
    with pytest.warns(UserWarning, match="DelayedScaling: the environment's NVTE_BACKWARD_OVERRIDE is 'dequantized'"):
        plan_of(made)


def test_a_factory_may_not_ask_for_it(device):
    def delayed(role):
        return te.DelayedScalingRequest()

    recipe = CustomRecipe(qfactory=delayed, backward_override="dequantized")
    with te.autocast(recipe=recipe), refused(ValueError, "CustomRecipe", "'backward_override'", "delayed"):
        build(linear, device)(tokens(device))


@every_word
def test_quantizers_of_a_factory(device, word):
    """They make what Float8CurrentScaling makes."""

    def answer(role):
        e5m2 = role.tensor_type.startswith("grad")
        dtype = te.DType.kFloat8E5M2 if e5m2 else te.DType.kFloat8E4M3
        return te.Float8CurrentScalingQuantizer(dtype, torch.device(device))

    module, x = build(mlp, device), tokens(device)
    wanted = step(module, x, "current", word)
    module.zero_grad(set_to_none=True)
    given = x.detach().clone().requires_grad_()
    with te.autocast(recipe=CustomRecipe(qfactory=answer, backward_override=word)):
        y = module(given)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y))
    # the output, too, but for whether the forward's product adds up fast, which no CPU does
    for name, p in module.named_parameters():
        assert_same_bits(p.grad, wanted[name], name)


@every_recipe
def test_the_original_input_and_what_the_quantized_one_means_are_two_things(device, recipe):
    module, x = build(linear, device, save_original_input=True), tokens(device)
    with around(recipe, "dequantized"), refused(ValueError, "Linear", "'save_original_input'", "dequantized"):
        module(x)
    plain = build(linear, device)
    plain.load_state_dict(module.state_dict())
    assert_same(step(module, x, recipe, "high_precision"), step(plain, x, recipe, "high_precision"))

    def compiled(t):
        with around(recipe, "dequantized"):
            return module(t)

    with pytest.raises(ValueError, match=r"^Linear: argument 'save_original_input' is True"):
        torch.compile(compiled, fullgraph=True, backend="aot_eager")(x)


def test_integers_that_say_something_else_are_named():
    with refused(ValueError, "ProductQuantization", "3", "0 (quantized), 1 (high precision) or 2 (dequantized)"):
        none = _C.Quantizer("none", False, False, 0.0)
        _C.ProductQuantization(none, none, none, True, True, True, 3)
    spec = plan_of(Float8CurrentScaling(backward_override="dequantized")).quantization.spec
    assert spec[-1] == 2 and len(spec) == 16
    x, weight = torch.randn(4, 16), torch.randn(16, 16)
    with refused(ValueError, "linear", "'quantization'", "-1"):
        call_op(torch.ops.te.linear.default, x=x, weight=weight, quantization=[*spec[:-1], -1])
    with refused(ValueError, "linear", "'quantization'", "15", "16"):
        call_op(torch.ops.te.linear.default, x=x, weight=weight, quantization=spec[:-1])
