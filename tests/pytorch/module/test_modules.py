# What every module with parameters promises in the same words: same bits run to run, torch.compile, autocast, meta
# device, state and copies, misuse that leaves it whole. Formulas are the other suites'. Mutant: leaving `autocast_all`
# out of Op::eager (csrc/linear.cpp) turns the autocast tests red.
import contextlib
import copy
import io

import pytest
import torch
from module_contract import Tracker
from plain_modules import angles, as_tuple, randomize, run
from support import DTYPES, assert_same_bits, layouts, randn, refused, rounding, wide

import transformer_engine.pytorch as te

HIDDEN, FFN, HEADS, SEQ, BATCH = 32, 24, 4, 6, 2
HEAD = HIDDEN // HEADS
NO_DROPOUT = {"attention_dropout": 0.0}

MODULES = {
    "Linear": lambda **options: te.Linear(HIDDEN, FFN, **options),
    "LayerNormLinear": lambda **options: te.LayerNormLinear(
        HIDDEN, FFN, parameters_split=["a", "b"], return_layernorm_output=True, **options
    ),
    "LayerNormMLP": lambda **options: te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **options),
    "MultiheadAttention": lambda **options: te.MultiheadAttention(
        HIDDEN, HEADS, num_gqa_groups=2, input_layernorm=True, **NO_DROPOUT, **options
    ),
    "TransformerLayer": lambda **options: te.TransformerLayer(
        HIDDEN, FFN, HEADS, normalization="RMSNorm", hidden_dropout=0.0, **NO_DROPOUT, **options
    ),
}
every_module = pytest.mark.parametrize("name", MODULES)


def build(name, device, dtype=torch.float32, **options):
    return randomize(MODULES[name](params_dtype=dtype, device=device, **options))


def tokens(device, dtype=torch.float32, *lead, **options):
    return randn(*(lead or (SEQ, BATCH)), HIDDEN, dtype=dtype, device=device, **options)


def rotary(name, device):
    freqs = angles(SEQ, HEAD).to(device)
    return {"rotary_pos_emb": freqs} if name in ("MultiheadAttention", "TransformerLayer") else {}


def same_bits(got, wanted, what=""):
    assert list(got) == list(wanted)
    for key in wanted:
        assert_same_bits(got[key], wanted[key], f"{what} {key}")


# ---- determinism ----


@every_module
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_every_time(device, dtype, name):
    module, x = build(name, device, dtype), tokens(device, dtype)
    first = run(module, x, **rotary(name, device))
    for _ in range(3):
        same_bits(run(module, x, **rotary(name, device)), first)


def gradients_of(module):
    return {name: p.grad for name, p in module.named_parameters()}


@every_module
def test_two_calls_before_one_backward(device, name):
    """Their gradients add up as those of two separate steps do."""
    module, one, two = build(name, device), tokens(device), tokens(device)
    first, second = as_tuple(module(one)), as_tuple(module(two))
    cotangents = [torch.randn(t.shape, device=device) for t in first + second]
    torch.autograd.backward(first + second, cotangents)
    together = gradients_of(module)
    module.zero_grad()
    torch.autograd.backward(as_tuple(module(one)), cotangents[: len(first)])
    torch.autograd.backward(as_tuple(module(two)), cotangents[len(first) :])
    same_bits(gradients_of(module), together)


@pytest.mark.parametrize("name", ["LayerNormMLP", "MultiheadAttention", "TransformerLayer"])
def test_a_module_behind_itself(device, name):
    """m(m(x)): the chain rule by hand gives the same bits."""
    module, x, cotangent = build(name, device), tokens(device).requires_grad_(), tokens(device)
    module(module(x)).backward(cotangent)
    chained, x.grad = {**gradients_of(module), "x": x.grad}, None
    module.zero_grad()
    middle = module(x)
    cut = middle.detach().requires_grad_()
    module(cut).backward(cotangent)
    middle.backward(cut.grad)
    same_bits({**gradients_of(module), "x": x.grad}, chained)


@every_module
def test_without_a_graph_the_bits_are_the_same(device, name):
    module, x = build(name, device), tokens(device)
    wanted = as_tuple(module(x))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            outputs = as_tuple(module(x))
        assert not any(t.requires_grad for t in outputs)
        for got, want in zip(outputs, wanted, strict=True):
            assert_same_bits(got, want, context.__name__)


# ---- torch.compile ----


def close_to(got, wanted, dtype, what):
    """The same kernels in the same order, but for what the compiler may fuse around them: a few roundings. Softmax does
    not see a key's bias: what that gradient holds is rounding, of the size of the other gradients'."""
    largest = max(wide(t).abs().max() for t in wanted.values())
    for key, want in wanted.items():
        top = largest if key.endswith("key_bias") else wide(want).abs().max()
        limit = 8 * rounding(top, dtype)
        assert got[key].dtype == want.dtype, f"{what} {key}: {got[key].dtype}"
        error = (wide(got[key]) - wide(want)).abs().max()
        assert error <= limit, f"{what} {key}: {error:.3g} from eager, wanted {limit:.3g}"


def compiled_run(module, x, *, backend="aot_eager", dynamic=None, around=contextlib.nullcontext, **kwargs):
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=dynamic)

    def call(_, *inputs):
        with around():
            return compiled(*inputs, **kwargs)

    return run(module, x, call=call)


@every_module
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_equals_eager(device, dtype, name):
    module, x = build(name, device, dtype), tokens(device, dtype)
    wanted = run(module, x, **rotary(name, device))
    close_to(compiled_run(module, x, **rotary(name, device)), wanted, dtype, name)


@every_module
def test_compiled_once_for_any_length(device, name):
    module = build(name, device)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for seq, batch in ((5, 2), (7, 3), (11, 5)):
        x = tokens(device, torch.float32, seq, batch)
        with torch.compiler.set_stance("default" if seq == 5 else "fail_on_recompile"):
            got = run(module, x, call=lambda _, t: compiled(t))
        close_to(got, run(module, x), torch.float32, f"{name} [{seq}, {batch}]")


@pytest.mark.slow
@every_module
def test_inductor_equals_eager(device, name):
    module, x = build(name, device), tokens(device)
    wanted = run(module, x, **rotary(name, device))
    close_to(compiled_run(module, x, backend="inductor", **rotary(name, device)), wanted, torch.float32, name)


# ---- autocast ----


def in_bfloat16(module):
    return copy.deepcopy(module).to(torch.bfloat16)


@every_module
def test_autocast_is_the_module_in_bfloat16(device, name):
    """Inputs and parameters are cast, gradients are cast back: the bits of a bfloat16 module, in float32."""
    module = build(name, device)
    x = tokens(device)

    def call(m, t):
        with torch.autocast(device, dtype=torch.bfloat16):
            return m(t, **rotary(name, device))

    got = run(module, x, call=call)
    wanted = run(in_bfloat16(module), x.bfloat16(), **rotary(name, device))
    for key, want in wanted.items():
        gradient = key.startswith("gradient") and key != "gradient of input 0"
        assert got[key].dtype == (torch.float32 if gradient else x.dtype if "input" in key else torch.bfloat16), key
        assert_same_bits(got[key].bfloat16(), want, key)


@every_module
def test_autocast_around_and_inside_compile(device, name):
    module, x = build(name, device), tokens(device)

    def autocast():
        return torch.autocast(device, dtype=torch.bfloat16)

    def inside(m, t):
        with autocast():
            return m(t)

    wanted = run(module, x, call=inside)
    close_to(compiled_run(module, x, around=autocast), wanted, torch.bfloat16, "around")
    torch._dynamo.reset()
    compiled = torch.compile(inside, fullgraph=True, backend="aot_eager")
    close_to(run(module, x, call=compiled), wanted, torch.bfloat16, "inside")


# ---- construction, meta device, state, copies ----

TAGS = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")


def tags_of(module):
    return {name: {tag: getattr(p, tag, None) for tag in TAGS} for name, p in module.named_parameters()}


def reset(module):
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


@every_module
@pytest.mark.parametrize("to_empty", [True, False])
def test_meta_device_then_real(device, name, to_empty):
    torch.manual_seed(3)
    wanted = MODULES[name](device=device)
    module = MODULES[name](device="meta")
    assert all(p.is_meta for p in module.parameters()) and tags_of(module) == tags_of(wanted)
    x = tokens("meta")
    assert [t.shape for t in as_tuple(module(x))] == [t.shape for t in as_tuple(wanted(tokens(device)))]
    if to_empty:
        module.to_empty(device=device)
    torch.manual_seed(3)
    reset(module)
    assert tags_of(module) == tags_of(wanted)
    for key, p in module.named_parameters():
        assert_same_bits(p, wanted.get_parameter(key).to(p.device), key)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    assert {p.device.type for p in module.parameters()} == {device if to_empty else default}


@every_module
def test_where_and_in_what_it_is_built(device, name):
    default = "cuda" if torch.cuda.is_available() else "cpu"
    for given in (device, torch.device(device), None):
        module = MODULES[name](device=given)
        assert {p.device.type for p in module.parameters()} == {default if given is None else device}
        assert {p.dtype for p in module.parameters()} == {torch.float32}
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert {p.dtype for p in MODULES[name](device=device).parameters()} == {torch.bfloat16}
        assert {p.dtype for p in MODULES[name](device=device, params_dtype=torch.float16).parameters()} == {
            torch.float16
        }
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.gpu
@every_module
def test_device_by_number(name):
    assert {p.device for p in MODULES[name](device=0).parameters()} == {torch.device("cuda", 0)}


@every_module
def test_initialisation(name):
    seen = []
    MODULES[name](device="cpu", init_method=lambda w: seen.append(w.dim()))
    assert seen and set(seen) == {2}, "init_method is for weights alone"
    module = MODULES[name](device="cpu")
    for key, p in module.named_parameters():
        if p.dim() > 1:  # normal(0, 0.023): within five standard errors
            assert (
                abs(p.mean()) < 5 * 0.023 / p.numel() ** 0.5
                and abs(p.std() - 0.023) < 5 * 0.023 / (2 * p.numel()) ** 0.5
            )
        else:
            assert p.eq(1 if key.endswith("layer_norm_weight") else 0).all()
    tracker = Tracker()
    before = torch.get_rng_state()
    forked = MODULES[name](device="cpu", get_rng_state_tracker=lambda: tracker)
    assert torch.equal(before, torch.get_rng_state()), "weights are drawn from the tracker's state"
    second = Tracker()
    again = MODULES[name](device="cpu", get_rng_state_tracker=lambda: second)
    same_bits(dict(again.named_parameters()), dict(forked.named_parameters()))


@every_module
def test_subclass_that_sets_attributes_before_init(name):
    base = type(MODULES[name](device="meta"))
    sizes = {"Linear": (8, 8), "LayerNormLinear": (8, 8), "LayerNormMLP": (8, 8), "MultiheadAttention": (8, 2)}

    class Client(base):
        def __init__(self, *args, **kwargs):
            self.config = {"client": True}
            self.is_first_microbatch = True
            super().__init__(*args, **kwargs)

    client = Client(*sizes.get(name, (8, 8, 2)), device="cpu", init_method=lambda w: None)
    assert client.config == {"client": True} and client.is_first_microbatch
    assert base.__module__.startswith("transformer_engine.pytorch")


@every_module
def test_state_travels(device, name):
    module, x = build(name, device), tokens(device)
    wanted = as_tuple(module(x))
    state = module.state_dict()
    extra = {key: t for key, t in state.items() if key.endswith("_extra_state")}
    assert extra and all(t.dtype == torch.uint8 and t.numel() == 0 for t in extra.values())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    without = {key: t for key, t in loaded.items() if key not in extra}
    for given in (loaded, without):
        other = MODULES[name](device=device)
        assert str(other.load_state_dict(given)) == "<All keys matched successfully>"
        for got, want in zip(as_tuple(other(x)), wanted, strict=True):
            assert_same_bits(got, want)
    del without[next(iter(without))]
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict(without)
    key = next(iter(extra))
    with refused(ValueError, "_extra_state", "3 bytes"):
        module.load_state_dict({**loaded, key: torch.zeros(3, dtype=torch.uint8)})


def through_a_file(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@every_module
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_compute_the_same_and_are_their_own(device, name, how):
    module, x = build(name, device), tokens(device)
    wanted = run(module, x)
    if how == "deepcopy":
        other = copy.deepcopy(module)
    else:
        other = through_a_file(module)
    same_bits(run(other, x), wanted)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    same_bits(run(module, x), wanted)


@every_module
def test_moves_and_casts(device, name):
    module, x = build(name, "cpu"), tokens(device)
    moved = copy.deepcopy(module).to(device).to(torch.bfloat16)
    wanted = build(name, device, torch.bfloat16)
    wanted.load_state_dict(module.state_dict())
    same_bits(run(moved, x.bfloat16()), run(wanted, x.bfloat16()))


def test_split_weights_stay_side_by_side(device):
    """Through moves, casts, copies and the meta device: joining them is a view, and they stay the same objects."""

    def joins_without_copy(module):
        for names in (module.weight_names, module.bias_names):
            parts = [getattr(module, name) for name in names]
            assert te.functional.noop_cat(parts).data_ptr() == parts[0].data_ptr()

    module = build("LayerNormLinear", "cpu")
    parameters = list(module.parameters())
    joins_without_copy(module.to(device))
    joins_without_copy(module.to(torch.bfloat16))
    assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))
    joins_without_copy(copy.deepcopy(module))
    joins_without_copy(through_a_file(module))
    joins_without_copy(MODULES["LayerNormLinear"](device="meta").to_empty(device=device))
    meta = MODULES["LayerNormLinear"](device="meta")
    meta.reset_parameters()
    joins_without_copy(meta)
    module.a_weight = torch.nn.Parameter(module.a_weight.float())  # a part of another dtype is the user's business
    module.to(device)


# ---- misuse ----


def bad_inputs(name, device):
    yield "last dim", tokens(device)[..., :-1], ValueError, (str(HIDDEN - 1), str(HIDDEN))
    yield "integers", torch.ones(SEQ, BATCH, HIDDEN, dtype=torch.int64, device=device), ValueError, ("dtype", "wanted")
    yield "dtype mix", tokens(device, torch.bfloat16), ValueError, ("torch.bfloat16", "torch.float32")
    yield "float64", tokens(device).double(), ValueError, ("torch.float64", "wanted")
    yield "meta", tokens("meta"), ValueError, ("meta",)
    if device == "cuda":
        yield "wrong device", tokens("cpu"), ValueError, ("cpu", "cuda")
    yield "no dimensions", torch.ones((), device=device), ValueError, ("dimension",)


@every_module
def test_bad_inputs_and_the_same_bits_after_them(device, name):
    module, x = build(name, device), tokens(device)
    wanted = run(module, x)
    for what, bad, exception, words in bad_inputs(name, device):
        with refused(exception, *words):
            module(bad)
        same_bits(run(module, x), wanted, f"after {what}")


@every_module
def test_double_backward_is_refused_by_name(device, name):
    module, x = build(name, device), tokens(device).requires_grad_()
    wanted = run(module, x)
    out = as_tuple(module(x))[0]
    with refused(NotImplementedError, "double backward"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    same_bits(run(module, x), wanted)


@every_module
def test_input_changed_in_place_before_backward_is_noticed(device, name):
    module, x = build(name, device), tokens(device)
    inner = x.clone().requires_grad_() * 1
    out = as_tuple(module(inner))[0]
    with torch.no_grad():
        inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@every_module
@pytest.mark.parametrize("how", ["built", "moved", "loaded"])
def test_weights_changed_in_place_before_backward_are_noticed(device, name, how):
    for key, p in build(name, "cpu").named_parameters():
        if p.dim() < 2:
            continue
        module, x = build(name, device), tokens(device).requires_grad_()
        if how == "moved":
            module.double().float()
        elif how == "loaded":
            module = through_a_file(module)
        out = as_tuple(module(x))[0]
        with torch.no_grad():
            module.get_parameter(key).add_(1)
        with pytest.raises(RuntimeError, match=r"modified (by an inplace operation|in ?place)"):
            out.sum().backward()


@every_module
def test_inputs_in_any_layout(device, name):
    """A norm reads every layout in one order on the CPU. A product may not: torch's CPU product reads a transposed one
    as it lies, and cuBLASLt has other algorithms for other alignments."""
    module, x = build(name, device), tokens(device)
    wanted = run(module, x)
    for layout, other in layouts(x):
        leaf = other.requires_grad_()
        module.zero_grad()
        outputs = as_tuple(module(leaf))
        generator = torch.Generator().manual_seed(7)
        torch.autograd.backward(outputs, [torch.randn(t.shape, generator=generator).bfloat16().to(t) for t in outputs])
        got = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
        got["gradient of input 0"] = leaf.grad.contiguous()
        got.update({f"gradient of {key}": p.grad for key, p in module.named_parameters()})
        close_to(got, wanted, torch.float32, layout)
        if device == "cpu" and name != "Linear":
            same_bits(got, wanted, layout)


@every_module
@pytest.mark.parametrize("lead", [(0, BATCH), (SEQ, 0), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_and_single(device, dtype, name, lead):
    module, x = build(name, device, dtype), tokens(device, dtype, *lead).requires_grad_()
    outputs = as_tuple(module(x))
    assert all(t.shape[:2] == lead for t in outputs)
    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    assert x.grad.shape == x.shape and x.grad.isfinite().all()
    for key, p in module.named_parameters():
        assert p.grad.isfinite().all() and (x.numel() or p.grad.eq(0).all()), key


@every_module
def test_gradient_of_stride_0(device, name):
    """What .sum().backward() sends is one number seen everywhere."""
    module, x = build(name, device), tokens(device).requires_grad_()
    as_tuple(module(x))[0].sum().backward()
    summed, x.grad = {**gradients_of(module), "x": x.grad}, None
    module.zero_grad()
    out = as_tuple(module(x))[0]
    out.backward(torch.ones_like(out))
    same_bits({**gradients_of(module), "x": x.grad}, summed)


@every_module
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_stay_where_they_belong(device, name, value):
    """They reach their own token's output, in attention (torch's own) that of its sequence, and nothing else."""
    module, x = build(name, device), tokens(device)
    clean = as_tuple(module(x))
    x[3, 0, 5] = value
    touched = torch.zeros(SEQ, BATCH, dtype=torch.bool, device=device)
    touched[slice(None) if name in ("MultiheadAttention", "TransformerLayer") else 3, 0] = True
    for got, want in zip(as_tuple(module(x)), clean, strict=True):
        assert not got[3, 0].isfinite().all()
        assert_same_bits(got[~touched], want[~touched])


@pytest.mark.parametrize(
    "cls, sizes, argument",
    [
        (te.Linear, (-1, 4), "in_features"),
        (te.Linear, (4, -1), "out_features"),
        (te.LayerNormLinear, (-1, 4), "in_features"),
        (te.LayerNormLinear, (4, -1), "out_features"),
        (te.LayerNormMLP, (-1, 4), "hidden_size"),
        (te.LayerNormMLP, (4, -1), "ffn_hidden_size"),
        (te.LayerNorm, (-1,), "normalized_shape"),
        (te.RMSNorm, (-1,), "normalized_shape"),
        (te.MultiheadAttention, (-1, 1), "hidden_size"),
        (te.TransformerLayer, (4, -1, 1), "ffn_hidden_size"),
    ],
)
def test_sizes_below_zero_are_refused_by_name(cls, sizes, argument):
    with refused(ValueError, f"'{argument}'", "-1", "at least"):
        cls(*sizes, device="cpu")
