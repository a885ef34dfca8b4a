# LayerNorm and RMSNorm, the modules: parameters, names and options that clients rely on, and a forward and backward
# that is torch.nn's up to rounding. The arithmetic has its own suite, normalization/test_normalization.py.
import copy
import pickle

import pytest
import torch
from support import DTYPES, addresses, assert_same_bits, randn, refused, saved_tensors

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling

NORMS = (te.LayerNorm, te.RMSNorm)
TWINS = {te.LayerNorm: torch.nn.LayerNorm, te.RMSNorm: torch.nn.RMSNorm}
EITHER = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)


def names(norm):
    return ["weight", "bias"] if norm is te.LayerNorm else ["weight"]


def randomize(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return module


@EITHER
def test_parameters_and_state(norm):
    module = norm(16, device="cpu")
    assert [name for name, _ in module.named_parameters()] == names(norm)
    assert torch.equal(module.weight, torch.ones(16))
    if norm is te.LayerNorm:
        assert torch.equal(module.bias, torch.zeros(16))
    assert [key for key in module.state_dict() if key != "_extra_state"] == names(norm)
    twin = TWINS[norm](16)
    module.load_state_dict(randomize(twin).state_dict())  # a checkpoint of the plain module, no extra state
    assert_same_bits(module.weight, twin.weight)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same_bits(other.weight, module.weight)
    assert (module.eps, module.zero_centered_gamma, module.sequence_parallel) == (1e-5, False, False)
    assert not hasattr(module.weight, "sequence_parallel")
    assert type(module).__module__.startswith("transformer_engine.pytorch")


@EITHER
def test_arguments(norm):
    for module in (norm(normalized_shape=8, device="cpu"), norm(hidden_size=8, device="cpu"), norm([8], device="cpu")):
        assert module.weight.shape == (8,)
    module = norm(8, sequence_parallel=True, dtype=torch.float16, device="cpu", sm_margin={"forward": 1})
    assert module.weight.dtype is torch.float16 and module.sequence_parallel
    assert all(parameter.sequence_parallel is True for parameter in module.parameters())
    assert norm(8, params_dtype=torch.bfloat16, device="cpu").weight.dtype is torch.bfloat16
    assert norm(8, sequence_parallel=False, device="cpu").weight.sequence_parallel is False
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        assert norm(8, device="cpu").weight.dtype is torch.float16
    finally:
        torch.set_default_dtype(default)


@EITHER
def test_wrong_arguments_are_named(norm):
    name = norm.__name__
    with refused(ValueError, name, "'normalized_shape'", "missing"):
        norm(device="cpu")
    with refused(ValueError, name, "'normalized_shape'", "0"):
        norm(0, device="cpu")
    with refused(ValueError, name, "'normalized_shape'", "'hidden_size'", "8", "9"):
        norm(8, hidden_size=9, device="cpu")
    with refused(ValueError, name, "'params_dtype'", "'dtype'"):
        norm(8, params_dtype=torch.float32, dtype=torch.float16, device="cpu")
    for wrong in (-1, 1.5, True, {"sideways": 1}, {"forward": -1}):
        with refused(ValueError, name, "'sm_margin'"):
            norm(8, sm_margin=wrong, device="cpu")
    with refused(TypeError, "'elementwise_affine'"):
        norm(8, elementwise_affine=False, device="cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@EITHER
def test_behaves_as_the_plain_module(norm, dtype, device):
    """Within two roundings of the dtype: torch rounds where it does, on values of at most about 10."""
    for shape in (32, (4, 8)):
        module = randomize(norm(shape, params_dtype=dtype, device=device))
        twin = TWINS[norm](shape, eps=1e-5, dtype=dtype, device=device)
        twin.load_state_dict(module.state_dict(), strict=False)
        x = (
            randn(3, 5, 4, 8, dtype=dtype, device=device)
            if shape != 32
            else randn(3, 5, 32, dtype=dtype, device=device)
        )
        x.requires_grad_()
        other = x.detach().clone().requires_grad_()
        dy = randn(*x.shape, dtype=dtype, device=device)
        y, want = module(x), twin(other)
        y.backward(dy)
        want.backward(dy)
        close = {"rtol": 0, "atol": 16 * 2 * torch.finfo(dtype).eps}
        torch.testing.assert_close(y, want, **close)
        torch.testing.assert_close(x.grad, other.grad, **close)
        for name in names(norm):  # 15 rows: sums of up to about 30
            close = {"rtol": 0, "atol": 64 * torch.finfo(dtype).eps}
            torch.testing.assert_close(getattr(module, name).grad, getattr(twin, name).grad, **close)


@EITHER
def test_zero_centered_weight_starts_at_the_identity(norm, device):
    module, plain = norm(16, zero_centered_gamma=True, device=device), norm(16, device=device)
    assert not module.weight.any()
    x = randn(4, 16, device=device)
    assert_same_bits(module(x), plain(x))


@EITHER
def test_meta_device(norm, device):
    module = norm(8, device="meta")
    assert all(parameter.is_meta for parameter in module.parameters())
    assert module(torch.empty(3, 8, device="meta")).shape == (3, 8)
    assert norm(8, sequence_parallel=True, device="meta").weight.sequence_parallel is True
    module = module.to_empty(device=device)
    module.reset_parameters()
    assert_same_bits(module.weight, torch.ones(8, device=device))


@EITHER
def test_attributes_before_init(norm):
    class Client(norm):
        def __init__(self):
            self.config = {"set": "before"}
            super().__init__(8, device="cpu")

    assert Client().config == {"set": "before"}


@EITHER
def test_wrong_input_is_named(norm, device):
    with refused(ValueError, norm.__name__, "'inp'", "(2, 8)", "(4, 8)"):
        norm((4, 8), device=device)(torch.ones(2, 8, device=device))
    with refused(ValueError, norm.__name__, "'inp'", "wanted 8", "[2, 7]"):
        norm(8, device=device)(torch.ones(2, 7, device=device))


@pytest.mark.gpu
@EITHER
def test_device_defaults_to_cuda(norm):
    module = norm(8)
    assert module.weight.is_cuda
    with refused(ValueError, norm.__name__, "'inp'", "is on cpu", "cuda"):
        module(torch.ones(2, 8))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default without a GPU")
@EITHER
def test_device_defaults_to_the_cpu(norm):
    assert norm(8).weight.device.type == "cpu"


def gradients_of(module, x, dy, call=None):
    x = x.detach().requires_grad_()
    out = (module if call is None else call)(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *module.parameters()], dy.to(out.dtype))]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("own", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EITHER
def test_an_input_of_another_dtype_than_the_weight(norm, dtype, own, compiled, device):
    """Computed in float32, as beside a float32 weight of the same values; the result has the input's dtype, gradients
    their owner's, rounded once; no copy of the weight is kept."""
    for zero_centered in (False, True):
        module = randomize(norm(32, zero_centered_gamma=zero_centered, params_dtype=own, device=device))
        x, dy = (randn(6, 4, 32, dtype=dtype, device=device) for _ in range(2))
        wide = copy.deepcopy(module).float()
        call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else None
        got, wanted = gradients_of(module, x, dy, call), gradients_of(wide, x, dy)
        assert got[0].dtype == got[1].dtype == dtype
        for a, b in zip(got[:2], wanted[:2], strict=True):
            assert_same_bits(a, b)
        for a, b in zip(got[2:], wanted[2:], strict=True):
            assert_same_bits(a, b.to(own))
        assert_same_bits(module(x), got[0])
        with torch.no_grad():
            assert_same_bits(module(x), got[0])
        if not compiled:
            with saved_tensors() as kept:
                out = module(x.requires_grad_())
            statistics = [t for t in kept if t.data_ptr() not in addresses([x, module.weight])]
            assert [t.shape for t in statistics] == [(24,)] * (len(wanted) - 2) and out.requires_grad


@pytest.mark.parametrize("own", DTYPES, ids=str)
@EITHER
def test_autocast_decides_the_dtype(norm, own, device):
    module, x = randomize(norm(32, params_dtype=own, device=device)), randn(6, 32, device=device)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype=dtype):
            assert_same_bits(module(x), copy.deepcopy(module).to(dtype)(x.to(dtype)))


@pytest.mark.parametrize("recipe", [None, DelayedScaling(), Float8BlockScaling()], ids=["none", "delayed", "block"])
@pytest.mark.parametrize("options", [{}, {"recompute_norm_output": True}], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", [te.LayerNormLinear, te.LayerNormMLP])
def test_a_fused_norms_weight_of_another_dtype(kind, options, recipe, device):
    for norm_dtype in (torch.float16, torch.float32):
        module = randomize(kind(32, 48, params_dtype=torch.bfloat16, device=device, **options))
        for parameter in (module.layer_norm_weight, module.layer_norm_bias):
            parameter.data = parameter.data.to(norm_dtype)
        wide, results = copy.deepcopy(module), []
        wide.layer_norm_weight.data, wide.layer_norm_bias.data = (
            t.data.float() for t in (wide.layer_norm_weight, wide.layer_norm_bias)
        )
        x = randn(8, 32, dtype=torch.bfloat16, device=device)
        for part in (module, wide):
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                out = part(x)
            out.sum().backward()
            results.append([out, *(p.grad for p in part.parameters())])
        for got, wanted in zip(*results, strict=True):
            assert_same_bits(got, wanted.to(got.dtype))


@EITHER
def test_compiled_bits_equal_eager(norm, device):
    module = randomize(norm((2, 8), device=device))
    x = randn(3, 2, 8, device=device, requires_grad=True)
    dy = randn(3, 2, 8, device=device)
    y = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    assert_same_bits(y, module(x))
    for got, want in zip(
        torch.autograd.grad(y, [x, *module.parameters()], dy),
        torch.autograd.grad(module(x), [x, *module.parameters()], dy),
        strict=True,
    ):
        assert_same_bits(got, want)
