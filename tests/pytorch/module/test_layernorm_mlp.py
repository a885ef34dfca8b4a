# LayerNormMLP against its plain twin: every activation, the residual keyword, what is kept for backward (never the
# activation), what is refused.
import itertools

import pytest
import torch
from api_names import MODULES
from module_contract import check_signature, refusals, saved_shapes
from plain_modules import GATED, PlainMLP, check_against_twin, randomize, run
from support import DTYPES, assert_same_bits, randn, refused, saved_tensors
from torch.profiler import ProfilerActivity, profile

import transformer_engine.pytorch as te

HIDDEN, FFN, TOKENS = 32, 56, (5, 3)
ACTIVATIONS = list(te.functional.activation_kinds)
# Products in a row (norm, fc1, activation, fc2, forward and backward) times the longest sum (112 terms).
TIGHT = 4 * 112


def build(device, dtype=torch.float32, *, normalization="LayerNorm", zero_centered=False, **options):
    return randomize(
        te.LayerNormMLP(
            HIDDEN,
            FFN,
            normalization=normalization,
            zero_centered_gamma=zero_centered,
            params_dtype=dtype,
            device=device,
            **options,
        )
    )


def twin(*, normalization="LayerNorm", **options):
    return PlainMLP(HIDDEN, FFN, rms=normalization == "RMSNorm", **options)


def inputs(device, dtype=torch.float32, count=1, **options):
    return [randn(*TOKENS, HIDDEN, dtype=dtype, device=device, **options) for _ in range(count)]


def with_residual(module, x, residual):
    return module(x, residual=residual)


def test_gated_activations_double_the_first_product():
    assert [kind for kind, gated in te.functional.activation_kinds.items() if gated] == [
        kind for kind in ACTIVATIONS if kind in GATED
    ]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_plain(device, dtype, normalization, activation):
    shared = {"normalization": normalization, "activation": activation}
    check_against_twin(build(device, dtype, **shared), twin(**shared), *inputs(device, dtype), tight=TIGHT)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_options_match_plain(device, dtype, normalization, zero_centered, bias):
    shared = {"normalization": normalization, "zero_centered": zero_centered, "bias": bias, "activation": "swiglu"}
    check_against_twin(build(device, dtype, **shared), twin(**shared), *inputs(device, dtype), tight=TIGHT)


@pytest.mark.parametrize("params", [None, {"limit": 0.5}, {"alpha": 1.0, "glu_linear_offset": 0.25}])
def test_clamped_swiglu_parameters(device, params):
    module = build(device, activation="clamped_swiglu", activation_params=params)
    check_against_twin(module, twin(activation="clamped_swiglu", params=params), *inputs(device), tight=TIGHT)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("return_bias", [False, True])
def test_what_is_returned(device, return_bias, with_norm):
    module = build(device, return_bias=return_bias, return_layernorm_output=with_norm)
    plain = twin(return_bias=return_bias, return_norm=with_norm)
    check_against_twin(module, plain, *inputs(device), tight=TIGHT)
    x, residual = inputs(device, count=2)
    check_against_twin(module, plain, x, residual, call=with_residual, tight=TIGHT)


# ---- residual ----


@pytest.mark.parametrize("at", [None, (0,), (1,)], ids=["both", "only_y", "only_h"])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_matches_plain(device, dtype, normalization, at):
    module = build(device, dtype, normalization=normalization, activation="swiglu")
    plain = twin(normalization=normalization, activation="swiglu")
    x, residual = inputs(device, dtype, 2)
    check_against_twin(module, plain, x, residual, call=with_residual, at=at, tight=TIGHT)


def test_residual_is_the_sum_rounded_once(device):
    for dtype in DTYPES:
        module = build(device, dtype)
        x, residual = inputs(device, dtype, 2)
        y, h = module(x, residual=residual)
        assert_same_bits(h, x + residual)
        assert_same_bits(y, module(x + residual))


@pytest.mark.parametrize("wanting", ["x", "residual"])
def test_residual_with_one_input_frozen(device, wanting):
    module = build(device)
    x, residual = inputs(device, count=2)
    full = run(module, x, residual, call=with_residual)
    chosen, other = (x, residual) if wanting == "x" else (residual, x)
    module.zero_grad()
    chosen.requires_grad_()
    outputs = module(x, residual=residual)
    generator = torch.Generator().manual_seed(7)
    torch.autograd.backward(outputs, [torch.randn(t.shape, generator=generator).bfloat16().to(t) for t in outputs])
    assert_same_bits(chosen.grad, full["gradient of input 0"])
    assert other.grad is None


# ---- what is kept ----


@pytest.mark.parametrize("leading", [(512,), (128, 4)], ids=["matrix", "rows of sequences"])
def test_the_activation_is_recomputed_over_its_gradient(leading):
    """The backward has the activation's gradient, that of its operand, which is twice as large, and nothing else of
    this size: the activation itself takes the memory of the first."""
    rows, hidden, ffn = 512, 8, 256
    module = te.LayerNormMLP(hidden, ffn, activation="swiglu", device="cpu")
    for _ in range(2):
        loss = module(randn(*leading, hidden, requires_grad=True)).sum()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            loss.backward()
    events = measured.profiler.kineto_results.events()
    held = itertools.accumulate(e.nbytes() for e in events if e.name() == "[memory]")
    one = 4 * rows * ffn
    assert 3 * one <= max(held) < 3.5 * one


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_never_keeps_the_activation(device, dtype, normalization, activation, residual):
    """Kept: norm input, statistics, norm output, pre-activation, weights. Nothing else, to the byte."""
    module = build(device, dtype, normalization=normalization, activation=activation)
    x, r = inputs(device, dtype, 2, requires_grad=True)
    extra = {"residual": r} if residual else {}
    rows, size = TOKENS[0] * TOKENS[1], torch.finfo(dtype).bits // 8
    wide_ffn = FFN * (2 if activation in GATED else 1)
    statistics = 2 if normalization == "LayerNorm" else 1
    wanted = [((*TOKENS, HIDDEN), dtype)] * 2 + [((rows,), torch.float32)] * statistics + [((*TOKENS, wide_ffn), dtype)]
    wanted += [((HIDDEN,), dtype), ((wide_ffn, HIDDEN), dtype), ((HIDDEN, FFN), dtype)]
    assert saved_shapes(lambda: module(x, **extra)) == sorted(wanted, key=str)
    with saved_tensors() as kept:
        out = module(x, **extra)
    weights = HIDDEN + wide_ffn * HIDDEN + HIDDEN * FFN
    formula = rows * (2 * HIDDEN + wide_ffn) * size + rows * statistics * 4 + weights * size
    assert sum(t.nbytes for t in {(t.data_ptr(), t.shape): t for t in kept}.values()) == formula
    # Tensors that exist outside are kept themselves, not as copies.
    pointers = {t.data_ptr() for t in kept}
    assert {module.fc1_weight.data_ptr(), module.fc2_weight.data_ptr(), module.layer_norm_weight.data_ptr()} <= pointers
    assert (out[-1] if residual else x).data_ptr() in pointers


def test_keeps_less_where_less_is_wanted(device):
    module = build(device, activation="swiglu")
    (x,) = inputs(device, requires_grad=True)
    module.requires_grad_(False)
    frozen = saved_shapes(lambda: module(x))
    assert frozen.count(((*TOKENS, HIDDEN), torch.float32)) == 1, "no weight gradient takes the norm's output"
    assert saved_shapes(lambda: module(x.detach())) == []
    with torch.no_grad():
        assert saved_shapes(lambda: module(x)) == []


@pytest.mark.parametrize(
    "frozen",
    [
        ("fc1_weight",),
        ("fc2_weight",),
        ("fc1_bias", "fc2_bias"),
        ("fc1_weight", "fc1_bias", "layer_norm_weight", "layer_norm_bias"),
        ("fc1_weight", "fc2_weight"),
        ("layer_norm_weight",),
        ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"),
    ],
)
def test_frozen_parts_get_no_gradient_and_change_no_other(device, frozen):
    module, plain = build(device), twin()
    for name in frozen:
        getattr(module, name).requires_grad_(False)
        getattr(plain, name).requires_grad_(False)
    check_against_twin(module, plain, *inputs(device), tight=TIGHT, what=str(frozen))
    assert all(getattr(module, name).grad is None for name in frozen)


# ---- recomputing ----


def halves(device, dtype, option, **shared):
    """The module that keeps everything and the one with the option, with the same parameters."""
    keeping, other = build(device, dtype, **shared), build(device, dtype, **shared, **{option: True})
    other.load_state_dict(keeping.state_dict())
    return keeping, other


@pytest.mark.parametrize("option", ["checkpoint", "recompute_norm_output"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_recomputing_gives_the_same_bits(device, dtype, normalization, activation, residual, option):
    shared = {"normalization": normalization, "activation": activation, "return_layernorm_output": True}
    keeping, other = halves(device, dtype, option, **shared)
    args = inputs(device, dtype, 2 if residual else 1)
    options = {"call": with_residual} if residual else {}
    wanted, got = (run(module, *args, **options) for module in (keeping, other))
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_same_bits(got[name], value, name)


@pytest.mark.parametrize("option", ["checkpoint", "recompute_norm_output"])
@pytest.mark.parametrize("at", [(0,), (1,), (2,)], ids=["only_y", "only_norm", "only_h"])
def test_recomputing_with_gradients_at_some_outputs(device, at, option):
    keeping, other = halves(device, torch.float32, option, activation="swiglu", return_layernorm_output=True)
    wanted, got = (run(m, *inputs_of(device), call=with_residual, at=at) for m in (keeping, other))
    for name, value in wanted.items():
        assert (value is None) == (got[name] is None), name
        if value is not None:
            assert_same_bits(got[name], value, name)


def inputs_of(device):
    torch.manual_seed(3)
    return inputs(device, count=2)


def test_checkpoint_keeps_the_input_alone(device):
    module = build(device, activation="swiglu", normalization="RMSNorm", bias=False, checkpoint=True)
    (x,) = inputs(device, requires_grad=True)
    parameters = [(tuple(p.shape), p.dtype) for p in module.parameters()]
    assert saved_shapes(lambda: module(x)) == sorted([((*TOKENS, HIDDEN), torch.float32), *parameters], key=str)
    module.requires_grad_(False)
    assert saved_shapes(lambda: module(x.detach())) == []


def test_recompute_norm_output_keeps_everything_else(device):
    keeping, other = halves(device, torch.bfloat16, "recompute_norm_output", activation="swiglu")
    (x,) = inputs(device, torch.bfloat16, requires_grad=True)
    more = saved_shapes(lambda: keeping(x))
    less = saved_shapes(lambda: other(x))
    assert more.count(((*TOKENS, HIDDEN), torch.bfloat16)) == 2 and less.count(((*TOKENS, HIDDEN), torch.bfloat16)) == 1


@pytest.mark.parametrize("option", ["checkpoint", "recompute_norm_output"])
@pytest.mark.parametrize("frozen", [("fc1_weight",), ("fc2_weight",), ("layer_norm_weight", "layer_norm_bias"), "most"])
def test_recomputing_with_frozen_parts(device, frozen, option):
    keeping, other = halves(device, torch.float32, option, activation="swiglu")
    if frozen == "most":
        frozen = [name for name, _ in keeping.named_parameters() if name != "fc2_bias"]
    (x,) = inputs(device)
    results = []
    for module in (keeping, other):
        for name in frozen:
            getattr(module, name).requires_grad_(False)
        module(x).square().sum().backward()
        results.append({name: p.grad for name, p in module.named_parameters()})
    for name, value in results[0].items():
        assert (value is None) == (results[1][name] is None) == (name in frozen), name
        if value is not None:
            assert_same_bits(results[1][name], value, name)


@pytest.mark.parametrize("option", ["checkpoint", "recompute_norm_output"])
def test_recomputing_compiles(device, option):
    _, module = halves(device, torch.float32, option, activation="swiglu")
    (x,) = inputs(device)
    wanted = run(module, x)
    got = run(torch.compile(module, fullgraph=True, backend="aot_eager"), x)
    for (name, value), other in zip(wanted.items(), got.values(), strict=True):
        assert_same_bits(other, value, name)


# ---- refusals, signature, state ----

REFUSED = {
    "symmetric_ar_type": "multimem_all_reduce",
}


@pytest.mark.parametrize("argument", REFUSED)
def test_refuses_what_has_not_landed(argument):
    refusals(te.LayerNormMLP, (HIDDEN, FFN), {argument: REFUSED[argument]})


@pytest.mark.parametrize(
    "options, words",
    [
        ({"activation": "tanh"}, ("activation", "tanh", "swiglu")),
        ({"activation": "gelu", "activation_params": {"limit": 1.0}}, ("activation_params", "clamped_swiglu")),
        (
            {"activation": "clamped_swiglu", "activation_params": {"limit": "x"}},
            ("activation_params", "'x'", "numbers"),
        ),
        ({"activation": "clamped_swiglu", "activation_params": {"alpha": None}}, ("activation_params", "numbers")),
        ({"activation": "clamped_swiglu", "activation_params": {"beta": 1.0}}, ("activation_params", "beta", "alpha")),
        ({"normalization": "BatchNorm"}, ("normalization", "BatchNorm", "RMSNorm")),
    ],
)
def test_bad_arguments(options, words):
    with refused(ValueError, "LayerNormMLP", *words):
        te.LayerNormMLP(HIDDEN, FFN, device="cpu", **options)


@pytest.mark.parametrize(
    "residual, words",
    [
        (torch.zeros(1, HIDDEN), ("residual", "[1, 32]", "[5, 3, 32]")),
        (torch.zeros(*TOKENS, HIDDEN, dtype=torch.bfloat16), ("residual", "BFloat16", "Float")),
        (torch.zeros(*TOKENS, HIDDEN, dtype=torch.int64), ("residual", "Long", "Float")),
    ],
)
def test_bad_residual(residual, words):
    module, (x,) = build("cpu"), inputs("cpu")
    with refused(ValueError, *words):
        module(x, residual=residual)


def test_signature():
    check_signature(
        te.LayerNormMLP,
        *MODULES["LayerNormMLP"],
        ours_init=("recompute_norm_output", "save_preactivation", "tp_recompute_allgather", "tp_overlap"),
        ours=("residual",),
    )


def test_state_and_attributes(device):
    module = te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", set_parallel_mode=True, device=device)
    names = ["layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias", "_extra_state"]
    assert list(module.state_dict()) == names
    assert module.fc1_weight.shape == (2 * FFN, HIDDEN) and module.fc2_weight.shape == (HIDDEN, FFN)
    tags = [
        (p.tensor_model_parallel, p.partition_dim, p.partition_stride)
        for p in (module.fc1_weight, module.fc1_bias, module.fc2_weight, module.fc2_bias)
    ]
    assert tags == [(True, 0, 1), (True, 0, 1), (True, 1, 1), (False, -1, 1)]
    for p in (module.layer_norm_weight, module.layer_norm_bias, module.fc2_bias):
        assert p.sequence_parallel is False
    bare = te.LayerNormMLP(HIDDEN, FFN, normalization="RMSNorm", bias=False, device=device)
    assert list(bare.state_dict()) == ["layer_norm_weight", "fc1_weight", "fc2_weight", "_extra_state"]
    assert bare.fc1_bias is None and bare.fc2_bias is None and bare.fc1_weight.shape == (FFN, HIDDEN)


def test_each_product_has_its_own_initialisation(device):
    module = te.LayerNormMLP(
        HIDDEN,
        FFN,
        init_method=torch.nn.init.ones_,
        output_layer_init_method=lambda w: None if w is None else w.fill_(2.0),
        device=device,
    )
    assert module.fc1_weight.eq(1).all() and module.fc2_weight.eq(2).all() and module.fc1_bias.eq(0).all()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_gradient_of_the_first_bias_alone(device, checkpoint):
    """Mutant: forward.cpp leaves a layer's bias out of the tensors that are prepared for the next layer."""
    torch.manual_seed(3)
    module = te.LayerNormMLP(32, 48, checkpoint=checkpoint, device=device)
    x = torch.randn(8, 32, device=device)
    module(x).square().sum().backward()
    wanted, module.fc1_bias.grad = module.fc1_bias.grad, None
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name == "fc1_bias")
    module(x).square().sum().backward()
    # Here the 8 numbers, each below 0.01, are summed without a product; with one, cuBLASLt or runs of rows sum them in
    # another order.
    torch.testing.assert_close(module.fc1_bias.grad, wanted, rtol=0, atol=8 * 8 * 0.01 * 2**-24)
