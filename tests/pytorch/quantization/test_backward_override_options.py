# backward_override beside everything that changes when and of what a backward is taken: recomputation, kept and
# quantized weights, main_grad, delayed weight gradients, autocast, copies, compiled calls: the bits of a module without
# the option. Captured and offloaded modules are in graph/test_fp8.py and offload/test_fp8.py. Mutant: a
# parameter that is held in FP8 alone kept itself (weight_values) turns these red.
import copy
import itertools
import random

import pytest
import torch
from plain_modules import as_tuple
from support import addresses, assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch import functional

from .override_cases import assert_same, by_name, every_recipe, every_word, kept_of
from .override_reference import (
    FFN,
    HIDDEN,
    PRODUCTS,
    RECIPES,
    WORDS,
    around,
    attention,
    build,
    glu_mlp,
    linear,
    meaning,
    mlp,
    norm_linear,
    referred,
    results,
    rms_linear,
    split_linear,
    step,
    tokens,
    transformer_layer,
)

pytestmark = pytest.mark.usefixtures("fp8_left_off")


def build_like(module, family, device, dtype=torch.bfloat16):
    """Without options, of the same values."""
    plain = build(family, device, dtype)
    plain.load_state_dict(module.state_dict())
    return plain


def pair(family, device, dtype=torch.bfloat16, **options):
    """The module with the options, and one without that has its values."""
    module = build(family, device, dtype, **options)
    return module, build_like(module, family, device, dtype)


# ---- what is recomputed ----

AGAIN = [
    (norm_linear, {"recompute_norm_output": True}),
    (rms_linear, {"recompute_norm_output": True}),
    (mlp, {"recompute_norm_output": True}),
    (mlp, {"checkpoint": True}),
    (glu_mlp, {"checkpoint": True, "recompute_norm_output": True}),
]


@every_recipe
@every_word
@pytest.mark.parametrize(("family", "options"), AGAIN, ids=lambda v: v.__name__ if callable(v) else "+".join(v))
def test_what_is_made_again_has_the_same_bits(device, family, options, word, recipe):
    module, plain = pair(family, device, **options)
    assert_same(step(module, tokens(device), recipe, word), step(plain, tokens(device), recipe, word))


@every_recipe
@every_word
@pytest.mark.parametrize("reentrant", [True, False])
def test_te_checkpoint(device, reentrant, word, recipe):
    second = te.LayerNormMLP(FFN, FFN, params_dtype=torch.bfloat16, device=device)
    stack = torch.nn.Sequential(build(linear, device), second)
    wanted = step(stack, tokens(device), recipe, word)
    stack.zero_grad(set_to_none=True)
    x = tokens(device)
    with around(recipe, word):
        y = te.checkpoint(stack, x, use_reentrant=reentrant)
    assert_same(results(stack, x, y), wanted)


class Own(te.Float8CurrentScalingQuantizer):
    """A quantizer that is written in Python."""

    def quantize_impl(self, tensor):
        return super().quantize_impl(tensor)


@every_word
@pytest.mark.parametrize("options", [{}, *(o for _, o in AGAIN[2:4])], ids=["kept", "norm", "checkpoint"])
def test_quantizers_written_in_python(device, options, word):
    def answer(role):
        e5m2 = role.tensor_type.startswith("grad")
        return Own(te.DType.kFloat8E5M2 if e5m2 else te.DType.kFloat8E4M3, torch.device(device))

    module, x = build(mlp, device, **options), tokens(device)
    wanted = step(build_like(module, mlp, device), x, "current", word)
    given = x.detach().clone().requires_grad_()
    with te.autocast(recipe=CustomRecipe(qfactory=answer, backward_override=word)):
        y = module(given)
    got = results(module, given, y)
    for name, t in wanted.items():
        assert_same_bits(got[name], t, name)


@every_recipe
@every_word
@by_name([mlp, glu_mlp])
def test_a_pre_activation_that_is_kept_in_fp8(device, family, word, recipe):
    """The activation is computed from the kept tensor, with either word; dequantized by the scale of the forward."""
    module, x = build(family, device, save_preactivation="fp8"), tokens(device)
    wanted = referred(module, x, recipe, word)
    assert_same(step(module, x, recipe, word), wanted)
    module.checkpoint = True
    assert_same(step(module, x, recipe, word), wanted)


# ---- weights ----


@every_recipe
@every_word
@by_name(PRODUCTS)
def test_kept_weights(device, family, word, recipe):
    module, x = build(family, device), tokens(device)
    wanted = step(module, x, recipe, word)
    for first in (True, False, False):
        assert_same(step(module, x, recipe, word, is_first_microbatch=first), wanted)


@every_recipe
@every_word
@pytest.mark.parametrize("options", [{}, {"checkpoint": True}], ids=["kept", "checkpoint"])
def test_a_kept_weight_that_is_older_than_the_parameter(device, options, word, recipe):
    """The forward uses the old copy, and dequantized reads its values; high precision reads the parameter as it is."""
    module, plain = pair(mlp, device, **options)
    x = tokens(device)
    for m in (module, plain):
        step(m, x, recipe, word, is_first_microbatch=True)
        with torch.no_grad():
            m.fc1_weight.mul_(1.5)
            m.fc2_weight.mul_(0.7)
    got = step(module, x, recipe, word, is_first_microbatch=False)
    assert_same(got, step(plain, x, recipe, word, is_first_microbatch=False))
    module.zero_grad(set_to_none=True)
    older = build(linear, device)
    old = older.weight.detach().clone()
    step(older, x, recipe, word, is_first_microbatch=True)
    with torch.no_grad():
        older.weight.mul_(1.5)
    got = step(older, x, recipe, word, is_first_microbatch=False)
    read = older.weight.detach() if word == "high_precision" else meaning(old, recipe, weight=True)
    given = x.detach().clone().requires_grad_()
    wanted = results(older, given, functional.linear(given, read.requires_grad_()))
    assert_same_bits(got["input"], wanted["input"])


@every_recipe
@every_word
@pytest.mark.parametrize("keeps", [None, True], ids=["anew", "kept"])
@pytest.mark.parametrize(
    ("family", "options"),
    [(linear, {}), (norm_linear, {}), (mlp, {}), (mlp, {"checkpoint": True})],
    ids=["linear", "norm_linear", "mlp", "checkpoint"],
)
def test_float32_parameters_under_autocast(device, family, options, keeps, word, recipe):
    """A kept copy is of the cast parameter, which a backward in high precision reads cast as well."""
    module = build(family, device, torch.float32, **options)
    cast = build(family, device)
    cast.load_state_dict(module.state_dict())
    x = tokens(device)
    with torch.autocast(device, torch.bfloat16):
        got = step(module, x, recipe, word, is_first_microbatch=keeps)
    wanted = step(cast, x, recipe, word)
    for name, t in wanted.items():
        assert_same_bits(got[name].to(t.dtype), t, name)


@every_recipe
@every_word
@pytest.mark.parametrize("options", [{}, {"checkpoint": True}], ids=["kept", "checkpoint"])
def test_weights_held_in_fp8_alone(device, options, word, recipe):
    """There is no other weight than the one that its data mean: both words read that."""
    with te.quantized_model_init(recipe=RECIPES[recipe]()):
        module = te.LayerNormMLP(HIDDEN, FFN, params_dtype=torch.bfloat16, device=device, **options)
    values = te.LayerNormMLP(HIDDEN, FFN, params_dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        for name, p in values.named_parameters():
            source = module.get_parameter(name)
            p.copy_(source.dequantize() if isinstance(source, te.QuantizedTensor) else source)
    x = tokens(device)
    got, wanted = step(module, x, recipe, word), referred(values, x, recipe, word)
    assert got.keys() == wanted.keys()
    for name, t in wanted.items():
        assert_same_bits(got[name], t, name)  # what FP8 data mean becomes the same data again


@every_word
def test_weights_held_in_fp8_alone_keep_no_columnwise_data(device, word):
    with te.quantized_model_init(recipe=RECIPES["current"]()):
        module = te.Linear(HIDDEN, FFN, params_dtype=torch.bfloat16, device=device)
    x = tokens(device)
    first = step(module, x, "current", None)
    assert module.weight._native().columnwise is not None
    step(module, x, "current", word)
    assert module.weight._native().columnwise is None
    kept = kept_of(module, x, "current", word)
    assert not any(isinstance(t, te.QuantizedTensor) for t in kept)  # whose memory no product could read
    assert module.weight._native().rowwise.data_ptr() in addresses(kept)
    assert_same(step(module, x, "current", None), first)


# ---- weight gradients elsewhere ----


def with_main_grads(module):
    for p in module.parameters():
        if p.dim() == 2:
            p.main_grad = torch.full(p.shape, 0.5, device=p.device)
    return module


def main_grads(module):
    return {name: p.main_grad for name, p in module.named_parameters() if p.dim() == 2}


@every_recipe
@every_word
@by_name(PRODUCTS)
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delayed"])
def test_main_grads(device, family, delay, word, recipe):
    """All but the weights' gradients are as ever. These are products in float32, added in float32: to the bit what is
    added to the gradients of float32 modules without."""
    options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": delay}
    module, plain = pair(family, device, torch.float32, **options)
    x = tokens(device, torch.float32)
    got, wanted = step(with_main_grads(module), x, recipe, word), step(plain, x, recipe, word)
    if delay:
        assert all((t == 0.5).all() for t in main_grads(module).values())
        module.backward_dw()
        got |= {name: p.grad for name, p in module.named_parameters()}
    found = main_grads(module)
    assert_same({n: t for n, t in got.items() if n not in found}, {n: t for n, t in wanted.items() if n not in found})
    for name, t in found.items():
        if device == "cpu":
            assert_same_bits(t, 0.5 + wanted[name], name)
        else:  # cuBLASLt adds inside of the product
            torch.testing.assert_close(t, 0.5 + wanted[name], rtol=1e-4, atol=1e-4)


# The output of a norm, and its FP8 values, are no input of a module.
FED_BY_HAND = [(linear, WORDS[0]), (split_linear, WORDS[0]), (norm_linear, WORDS[0]), (rms_linear, WORDS[0])]
FED_BY_HAND += [(linear, WORDS[1]), (split_linear, WORDS[1])]


@every_recipe
@pytest.mark.parametrize(("family", "word"), FED_BY_HAND, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_main_grads_are_those_of_a_plain_module(device, family, word, recipe):
    """Bit for bit, of the same operand and the same gradient of the output."""
    module = with_main_grads(build(family, device, fuse_wgrad_accumulation=True))
    x = tokens(device)
    step(module, x, recipe, word)
    found = main_grads(module)
    with_main_grads(module).zero_grad(set_to_none=True)
    given = (meaning(x, recipe) if word == "dequantized" else x.detach().clone()).requires_grad_()
    results(module, given, module(given))
    for name, t in main_grads(module).items():
        assert_same_bits(found[name], t, name)


@every_recipe
@every_word
@by_name(PRODUCTS)
def test_delayed_weight_gradients(device, family, word, recipe):
    module, plain = pair(family, device, delay_wgrad_compute=True)
    xs = [tokens(device, seed=seed) for seed in (3, 4)]
    for m in (module, plain):
        m.zero_grad(set_to_none=True)
        for x in xs:
            given = x.detach().clone().requires_grad_()
            with around(recipe, word):
                outputs = as_tuple(m(given))
            results(m, given, outputs)
    module.backward_dw()
    module.backward_dw()
    for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert_same_bits(p.grad, q.grad, name)


# ---- copies, graphs, compiled calls ----


@every_recipe
@every_word
def test_copies_and_recipes_in_turn(device, word, recipe):
    module, x = build(mlp, device), tokens(device)
    wanted = {w: step(module, x, recipe, w) for w in (word, None)}
    twin = copy.deepcopy(module)
    for w in (None, word, word, None):
        assert_same(step(twin, x, recipe, w, is_first_microbatch=True), wanted[w])
        assert_same(step(twin, x, recipe, w, is_first_microbatch=False), wanted[w])


COMPILED = [
    *itertools.product((linear, split_linear, norm_linear, mlp, attention), ({},)),
    (mlp, {"checkpoint": True}),
    (norm_linear, {"recompute_norm_output": True}),
    (mlp, {"save_preactivation": "fp8"}),
]


@every_recipe
@every_word
@pytest.mark.parametrize(("family", "options"), COMPILED, ids=lambda v: v.__name__ if callable(v) else "+".join(v))
def test_compiled_is_eager(device, family, options, word, recipe):
    module, x = build(family, device, **options), tokens(device)
    wanted = step(module, x, recipe, word)
    module.zero_grad(set_to_none=True)

    def call(t):
        with around(recipe, word):
            return module(t)

    given = x.detach().clone().requires_grad_()
    assert_same(results(module, given, torch.compile(call, fullgraph=True, backend="aot_eager")(given)), wanted)


@every_word
def test_compiled_main_grads(device, word):
    module = build(mlp, device, fuse_wgrad_accumulation=True)
    weights = [p for p in module.parameters() if p.dim() == 2]
    found = []
    for compiling in (False, True):
        for p in weights:
            p.main_grad = torch.ones(p.shape, device=device)

        def call(t):
            with around("block", word):
                return module(t)

        module.zero_grad(set_to_none=True)
        x = tokens(device)
        y = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiling else call)(x)
        results(module, x, y)
        found.append([p.main_grad for p in weights])
    for a, b in zip(*found, strict=True):
        assert_same_bits(a, b)
        assert not (a == 1).all()


# ---- everything at once ----

OPTIONS = {
    linear: ({},),
    split_linear: ({},),
    norm_linear: ({}, {"recompute_norm_output": True}),
    mlp: ({}, {"checkpoint": True}, {"recompute_norm_output": True}, {"checkpoint": True, "save_preactivation": "fp8"}),
    glu_mlp: ({}, {"checkpoint": True, "recompute_norm_output": True}, {"save_preactivation": "fp8"}),
    transformer_layer: ({}, {"recompute_norm_output": True}),
}
GENERATED = 12


def test_generated_steps(device, generated_seed):
    """Any module with any of its options, steps of any recipe and word, with kept weights or not, checkpointed or not,
    of any number of tokens: the bits of the reference."""
    draw = random.Random(generated_seed)
    family = draw.choice(list(OPTIONS))
    options = draw.choice(OPTIONS[family])
    module = build(family, device, **options)
    for turn in range(4):
        recipe, word = draw.choice(list(RECIPES)), draw.choice(WORDS)
        x = tokens(device, shape=(draw.choice((1, 5, 40)), draw.choice((1, 4))), seed=turn)
        call = {"is_first_microbatch": draw.choice((None, True))}
        wanted = referred(module, x, recipe, word)
        if draw.random() < 0.5:
            assert_same(step(module, x, recipe, word, **call), wanted)
            continue
        module.zero_grad(set_to_none=True)
        given, reentrant = x.detach().clone().requires_grad_(), draw.random() < 0.5
        with around(recipe, word):
            y = te.checkpoint(module, given, use_reentrant=reentrant, **call)
        assert_same(results(module, given, y), wanted)
