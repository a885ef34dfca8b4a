# LayerNormLinear against its plain twin: values, every gradient, what is returned, what is kept, what is refused.
import pytest
import torch
from api_names import MODULES
from module_contract import check_signature, refusals, saved_shapes
from plain_modules import PlainLayerNormLinear, check_against_twin, randomize, run, twin_of
from support import DTYPES, UNIT_ROUNDOFF, assert_same_bits, randn, refused

import transformer_engine.pytorch as te

IN, OUT, TOKENS = 48, 40, (5, 3)
# Products in a row in forward and backward (norm, GEMM) times the longest sum (40..48 terms, 15 tokens for weights).
TIGHT = 2 * 48


def build(device, dtype=torch.float32, *, normalization="LayerNorm", zero_centered=False, **options):
    return randomize(
        te.LayerNormLinear(
            IN,
            OUT,
            normalization=normalization,
            zero_centered_gamma=zero_centered,
            params_dtype=dtype,
            device=device,
            **options,
        )
    )


def twin(*, normalization="LayerNorm", splits=OUT, **options):
    return PlainLayerNormLinear(IN, splits, rms=normalization == "RMSNorm", **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_plain(device, dtype, normalization, zero_centered, bias):
    x = randn(*TOKENS, IN, dtype=dtype, device=device)
    shared = {"normalization": normalization, "zero_centered": zero_centered, "bias": bias}
    check_against_twin(build(device, dtype, **shared), twin(**shared), x, tight=TIGHT)
    module = build(device, dtype, return_layernorm_output=True, **shared)
    plain = twin(return_norm=True, **shared)
    for at in (None, (0,), (1,)):  # gradients at both outputs, at y alone, at the norm's output alone
        check_against_twin(module, plain, x, at=at, tight=TIGHT, what=f"at {at}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "split, rows",
    [
        (["query", "key"], {"query_": 20, "key_": 20}),
        ({"query": 24, "key_": 12, "value": 4}, {"query_": 24, "key_": 12, "value_": 4}),
    ],
)
def test_parameters_split(device, dtype, split, rows):
    module = build(device, dtype, parameters_split=split)
    names = {f"{name}{kind}" for name in rows for kind in ("weight", "bias")}
    assert {n for n, _ in module.named_parameters()} == names | {"layer_norm_weight", "layer_norm_bias"}
    x = randn(*TOKENS, IN, dtype=dtype, device=device)
    check_against_twin(module, twin(splits=rows), x, tight=TIGHT)
    # No gradient at y: the parts of the weight get none, as a whole weight would.
    module = build(device, dtype, parameters_split=split, return_layernorm_output=True)
    check_against_twin(module, twin(splits=rows, return_norm=True), x, at=(1,), tight=TIGHT)


def test_split_has_the_bits_of_one_weight(device):
    whole, split = build(device), build(device, parameters_split=["a", "b"])
    with torch.no_grad():
        for name, p in split.named_parameters():
            source = getattr(whole, name.removeprefix("a_").removeprefix("b_"))
            p.copy_(source if source.shape == p.shape else source.chunk(2)["ab".index(name[0])])
    x = randn(*TOKENS, IN, device=device)
    one, two = run(whole, x), run(split, x)
    assert_same_bits(two["output 0"], one["output 0"])
    assert_same_bits(two["gradient of input 0"], one["gradient of input 0"])
    for kind in ("weight", "bias"):
        parts = torch.cat([two[f"gradient of {name}_{kind}"] for name in "ab"])
        assert_same_bits(parts, one[f"gradient of {kind}"], kind)


@pytest.mark.parametrize("split", [None, ["a", "b"]])
@pytest.mark.parametrize("with_norm", [False, True])
def test_return_bias(device, split, with_norm):
    options = {"return_bias": True, "parameters_split": split, "return_layernorm_output": with_norm}
    module = build(device, **options)
    splits = {"a_": OUT // 2, "b_": OUT // 2} if split else OUT
    plain = twin(splits=splits, return_bias=True, return_norm=with_norm)
    x = randn(*TOKENS, IN, device=device)
    check_against_twin(module, plain, x, tight=TIGHT)
    results = module(x)
    assert len(results) == 2 + with_norm and results[1].shape == (OUT,)
    without = build(device, bias=False, **options)(x)
    assert len(without) == 2 + with_norm and without[1] is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalization, statistics", [("LayerNorm", 2), ("RMSNorm", 1)])
def test_keeps_norm_input_statistics_norm_output_and_weights(device, dtype, normalization, statistics):
    module = build(device, dtype, normalization=normalization)
    x = randn(*TOKENS, IN, dtype=dtype, device=device, requires_grad=True)
    rows = x.shape[0] * x.shape[1]
    wanted = [((*TOKENS, IN), dtype)] * 2 + [((rows,), torch.float32)] * statistics
    wanted += [((OUT, IN), dtype), ((IN,), dtype)]
    assert saved_shapes(lambda: module(x)) == sorted(wanted, key=str)
    # The input of a model's first layer requires no gradient; a frozen layer keeps what its input gradient reads.
    module.requires_grad_(False)
    assert ((OUT, IN), dtype) in saved_shapes(lambda: module(x))
    assert saved_shapes(lambda: module(x)).count(((*TOKENS, IN), dtype)) == 1
    assert saved_shapes(lambda: module(x.detach())) == []


@pytest.mark.parametrize(
    "frozen",
    [
        ("weight",),
        ("bias",),
        ("weight", "bias"),
        ("layer_norm_weight",),
        ("layer_norm_bias", "weight"),
        ("layer_norm_weight", "layer_norm_bias", "weight", "bias"),
    ],
)
def test_frozen_parts_get_no_gradient_and_change_no_other(device, frozen):
    module, plain = build(device), twin()
    for name in frozen:
        getattr(module, name).requires_grad_(False)
        getattr(plain, name).requires_grad_(False)
    x = randn(*TOKENS, IN, device=device)
    check_against_twin(module, plain, x, tight=TIGHT, what=str(frozen))
    assert all(getattr(module, name).grad is None for name in frozen)


def test_input_without_gradient(device):
    module = build(device)
    x = randn(*TOKENS, IN, device=device)
    wanted = run(module, x)
    module.zero_grad()
    y = module(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).bfloat16().to(y))
    for name, p in module.named_parameters():
        assert_same_bits(p.grad, wanted[f"gradient of {name}"], name)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_recomputing_the_norm_output_gives_the_same_bits(device, dtype, normalization):
    keeping = build(device, dtype, normalization=normalization)
    other = build(device, dtype, normalization=normalization, recompute_norm_output=True)
    other.load_state_dict(keeping.state_dict())
    x = randn(*TOKENS, IN, dtype=dtype, device=device)
    wanted, got = run(keeping, x), run(other, x)
    for name, value in wanted.items():
        assert_same_bits(got[name], value, name)
    x.requires_grad_()
    assert len(saved_shapes(lambda: other(x))) == len(saved_shapes(lambda: keeping(x))) - 1 + (
        normalization == "LayerNorm"  # beta is needed again; it is a parameter
    )


@pytest.mark.parametrize("wanting", [(0,), (1,), (0, 1)], ids=["only_y", "only_input", "both"])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_the_returned_input_carries_its_gradient_back(device, normalization, wanting):
    """y and x again: the gradient at x's copy joins the norm's. In float32 at the norm's end, so within one rounding of
    the separate addition's."""
    module = build(device, normalization=normalization)
    x = randn(*TOKENS, IN, device=device)
    y, again = module(x, return_input=True)
    assert again.data_ptr() == x.data_ptr() and torch.equal(y, module(x))
    got = run(module, x, call=lambda m, x: m(x, return_input=True), at=wanting)
    apart = run(module, x, call=lambda m, x: (m(x), x * 1.0), at=wanting)
    for name, value in apart.items():
        if value is None:
            assert got[name] is None, name
            continue
        limit = 4 * UNIT_ROUNDOFF[torch.float32] * value.abs().max() if "input" in name else 0.0
        assert (got[name] - value).abs().max() <= limit, name
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(x, return_input=True), (y, again), strict=True))


REFUSED = {
    "symmetric_ar_type": "multimem_all_reduce",
}


@pytest.mark.parametrize("argument", REFUSED)
def test_refuses_what_has_not_landed(argument):
    refusals(te.LayerNormLinear, (IN, OUT), {argument: REFUSED[argument]})


def test_a_quantized_input_gradient_is_refused_by_name(device):
    module, x = te.LayerNormLinear(16, 24, device=device), randn(3, 16, device=device)
    with refused(NotImplementedError, "LayerNormLinear", "'fp8_grad'", "not available"):
        module(x, fp8_grad=True)
    assert_same_bits(module(x, fp8_output=True), module(x))  # there is no format outside of autocast


@pytest.mark.parametrize(
    "options, words",
    [
        ({"normalization": "BatchNorm"}, ("normalization", "BatchNorm", "RMSNorm")),
        ({"parallel_mode": "diagonal"}, ("parallel_mode", "diagonal", "column")),
        ({"parameters_split": ["a", "b", "c"]}, ("parameters_split", "3", str(OUT))),
        ({"parameters_split": {"a": 7}}, ("parameters_split", "7", str(OUT))),
    ],
)
def test_bad_arguments(options, words):
    with refused(ValueError, "LayerNormLinear", *words):
        te.LayerNormLinear(IN, OUT, device="cpu", **options)


def test_signature():
    check_signature(
        te.LayerNormLinear,
        *MODULES["LayerNormLinear"],
        ours_init=("recompute_norm_output", "tp_recompute_allgather", "tp_overlap"),
        ours=("return_input",),
    )


def test_state_and_attributes(device):
    module = te.LayerNormLinear(
        IN,
        OUT,
        eps=1e-6,
        zero_centered_gamma=True,
        parallel_mode="column",
        sequence_parallel=True,
        ub_name="qkv",
        device=device,
    )
    assert list(module.state_dict()) == ["layer_norm_weight", "layer_norm_bias", "weight", "bias", "_extra_state"]
    wanted = {
        "in_features": IN,
        "out_features": OUT,
        "use_bias": True,
        "return_bias": False,
        "tp_size": 1,
        "tp_group": None,
        "sequence_parallel": False,  # active only with tp_size > 1
        "parallel_mode": "column",
        "eps": 1e-6,
        "zero_centered_gamma": True,
        "normalization": "LayerNorm",
        "ub_name": "qkv",
        "fuse_wgrad_accumulation": False,
    }
    assert {name: getattr(module, name) for name in wanted} == wanted
    tags = [(p.tensor_model_parallel, p.partition_dim, p.partition_stride) for p in (module.weight, module.bias)]
    assert tags == [(True, 0, 1), (True, 0, 1)]
    assert module.layer_norm_weight.sequence_parallel is False and module.layer_norm_bias.sequence_parallel is False
    assert module.layer_norm_weight.eq(0).all() and module.bias.eq(0).all()
    rms = te.LayerNormLinear(IN, OUT, normalization="RMSNorm", bias=False, device=device)
    assert list(rms.state_dict()) == ["layer_norm_weight", "weight", "_extra_state"]
    assert rms.layer_norm_bias is None and rms.layer_norm_weight.eq(1).all()
    assert twin_of(PlainLayerNormLinear(IN, OUT, rms=True, bias=False), rms).weight.shape == (OUT, IN)
