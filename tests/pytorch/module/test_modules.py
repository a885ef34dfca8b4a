# The promises of every module with parameters: same bits run to run, torch.compile, autocast, meta device, state and
# copies, misuse that leaves it whole. Other suites check the formulas.
import contextlib
import copy

import pytest
import torch
from plain_modules import angles, as_tuple, run
from support import DTYPES, assert_same_bits, layouts, refused, rounding, wide

import transformer_engine.pytorch as te

from .cases import BATCH, HEADS, HIDDEN, SEQ, build, every_module, same_bits, through_a_file, tokens

HEAD = HIDDEN // HEADS


def rotary(name, device):
    freqs = angles(SEQ, HEAD).to(device)
    return {"rotary_pos_emb": freqs} if name in ("MultiheadAttention", "TransformerLayer") else {}


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
    """The gradient that .sum().backward() sends is one number with strides 0."""
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
