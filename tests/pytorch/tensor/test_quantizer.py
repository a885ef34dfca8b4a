# Quantizers: their engine side, state, copies and answers, what they refuse; quantizers that are written in Python,
# that compose others, that quantize nothing, and those of Blackwell.
import copy

import pytest
import torch
from quantized_cases import (
    BOTH,
    E4M3,
    E5M2,
    FORMATS,
    FP8_FORMATS,
    assert_same_parts,
    assert_same_tensor,
    block1d,
    block2d,
    current,
    delayed,
    parts_of,
)
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch import _C

every_format = pytest.mark.parametrize("name", FORMATS)
every_fp8 = pytest.mark.parametrize("name", FP8_FORMATS)


@every_fp8
def test_quantizers_have_an_engine_side(device, name):
    quantizer, x = FP8_FORMATS[name](device=device), randn(6, 48, device=device)
    native = quantizer._native()
    assert native.kind == name and not native.e5m2 and quantizer._native() is native
    got = quantizer._quantize_native(x, True, False)
    assert got.columnwise is None
    wanted = FP8_FORMATS[name](device=device, columnwise=False)(x)
    assert_same_bits(got.rowwise, wanted.get_data_tensors(columnwise_data=False))
    if name == "delayed":
        quantizer.scale = torch.full_like(quantizer.scale, 2.0)
        assert quantizer._native() is not native and quantizer._native().scale.item() == 2.0


# ---- state, copies, questions ----


def test_delayed_scaling_takes_note_of_the_amax(device):
    quantizer = delayed(device=device)
    for value in (3.0, 5.0, 4.0):
        quantizer(torch.tensor([[value, -1.0]], device=device))
    assert quantizer.amax.item() == 5.0 and quantizer.scale.item() == torch.tensor(3.7).item()
    quantizer.calibrate(torch.tensor([-7.0, torch.nan], device=device))
    assert quantizer.amax.item() == 7.0
    current(device=device).calibrate(torch.ones(2, device=device))


def test_an_amax_that_is_there_already(device):
    x = randn(6, 40, device=device)
    amax = torch.full((1,), 16.0, device=device)
    quantizer = current(device=device, use_existing_amax=True, amax=amax, scale=torch.zeros(1, device=device))
    scaled = te.Float8Quantizer(torch.full((1,), 28.0, device=device), torch.zeros(1, device=device), E4M3)
    assert_same_parts(quantizer(x), scaled(x))
    assert (quantizer.scale.item(), quantizer.amax.item()) == (28.0, 16.0)
    assert quantizer._native().kind == "python" and not quantizer.is_requantization_safe()
    noted = current(device=device, amax=torch.zeros(1, device=device))
    noted(x)
    assert noted.amax.item() == x.abs().max().item()
    with refused(ValueError, "use_existing_amax", "'amax'"):
        current(use_existing_amax=True)


def test_invalid_scales_are_refused():
    one = torch.ones(1)
    for wrong in (1.0, None, one.double(), torch.ones(2)):
        for name in ("scale", "amax"):
            with refused(ValueError, "Float8Quantizer", f"'{name}'", repr(wrong), "float32 tensor of one element"):
                te.Float8Quantizer(**{"scale": one, "amax": one, "fp8_dtype": E4M3, name: wrong})


@every_format
def test_copies_of_quantizers(device, name):
    quantizer = FORMATS[name](device=device)
    x = randn(6, 48, device=device)
    wanted = quantizer(x)
    for other in (quantizer.copy(), copy.deepcopy(quantizer)):
        assert type(other) is type(quantizer)
        assert_same_tensor(other(x), wanted)
        other.set_usage(columnwise=False)
        other.internal = True
        assert quantizer.columnwise_usage and not quantizer.internal
    if name == "delayed":
        assert quantizer.copy().amax is quantizer.amax
        assert copy.deepcopy(quantizer).amax is not quantizer.amax


def test_answers():
    x = torch.ones(3, 5)
    for name, make in FORMATS.items():
        quantizer = make()
        assert quantizer.is_quantizable(x) and not quantizer.is_quantizable(x.int()), name
        assert quantizer.supports_only_rowwise_all_gather() is (name in ("delayed", "current", "identity")), name
        assert quantizer.is_requantization_safe() is (name != "delayed"), name
        for hook in (quantizer.onnx_quantize, quantizer.onnx_dequantize):
            with refused(NotImplementedError, hook.__name__, "ONNX"):
                hook(x)
    recipes = [make()._get_compatible_recipe() for make in FP8_FORMATS.values()]
    assert [r.__name__ for r in recipes] == [
        "DelayedScaling",
        "Float8CurrentScaling",
        "Float8BlockScaling",
        "Float8BlockScaling",
    ]


# ---- bad input ----


@every_format
def test_what_cannot_be_quantized(name):
    quantizer = FORMATS[name]()
    for bad in (torch.ones(2, 3, dtype=torch.int32), torch.ones(2, 3, dtype=torch.float64), torch.ones(2).bool()):
        with refused(ValueError, type(quantizer).__name__, "'tensor'", bad.dtype, "wanted float32"):
            quantizer(bad)
    with refused(ValueError, type(quantizer).__name__, "float8_e4m3fn"):
        quantizer(torch.ones(2, 3).to(torch.float8_e4m3fn))
    with refused(TypeError, type(quantizer).__name__, "'tensor'", "list"):
        quantizer([1.0])


@every_format
def test_a_quantized_tensor_is_quantized_by_its_values(name):
    t = FORMATS[name]()(randn(6, 40))
    assert_same_parts(current()(t), current()(t.dequantize()))


@every_fp8
def test_destinations_that_do_not_fit(name):
    quantizer, x = FP8_FORMATS[name](), randn(6, 40)
    t = quantizer(x)
    with refused(ValueError, "update_quantized", "'dst'", (6, 40), (3, 40)):
        quantizer.update_quantized(x[:3], t)
    with refused(ValueError, "update_quantized", "'dst'", "Tensor"):
        quantizer.update_quantized(x, torch.ones(6, 40))
    with refused(ValueError, "update_quantized", "'dst'", "fp8_dtype"):
        FP8_FORMATS[name](E5M2).update_quantized(x, t)
    other = block1d() if name in ("delayed", "current") else current()
    with refused(ValueError, "update_quantized", "'dst'", type(t).__name__):
        other.update_quantized(x, t)
    if name.startswith("block"):
        with refused(ValueError, "update_quantized", "is_2D_scaled"):
            FP8_FORMATS["block2d" if name == "block1d" else "block1d"]().update_quantized(x, t)
    assert_same_tensor(t, FP8_FORMATS[name]()(x))


def test_settings_that_do_not_fit():
    for bad in (torch.float32, 3, "E4M3", None, True):
        with refused(ValueError, "Float8BlockQuantizer", "'fp8_dtype'", repr(bad)):
            te.Float8BlockQuantizer(bad, **BOTH)
    with refused(ValueError, "'block_scaling_dim'", 3):
        te.Float8BlockQuantizer(E4M3, **BOTH, block_scaling_dim=3)
    for make in (current, block1d):
        with refused(ValueError, "'amax_epsilon'", -1.0):
            make(amax_epsilon=-1.0)
    assert te.Float8BlockQuantizer(torch.float8_e5m2, **BOTH).dtype is E5M2
    for name, make in FORMATS.items():
        quantizer = make(rowwise=False, columnwise=False)
        if name != "identity":
            with refused(ValueError, type(quantizer).__name__, "columnwise_usage are False"):
                quantizer(torch.ones(2, 3))
    with refused(ValueError, "Float8Tensor", "'data'", "float32"):
        te.Float8Tensor(
            shape=(2,), dtype=torch.float32, data=torch.ones(2), fp8_scale_inv=torch.ones(1), fp8_dtype=E4M3
        )
    with refused(ValueError, "Float8Tensor", "'dtype'", "int32"):
        te.Float8Tensor(shape=(2,), dtype=torch.int32, data=None, fp8_scale_inv=None, fp8_dtype=E4M3)


# ---- written in Python ----


class Halving(te.Quantizer):
    """A client's: half of each value, by another quantizer."""

    def __init__(self, inner):
        super().__init__(rowwise=True, columnwise=True)
        self.inner = inner

    def quantize_impl(self, tensor):
        inner = self.inner.copy()
        inner.internal = self.internal
        inner.set_usage(rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
        return inner.quantize_impl(tensor * 0.5)


def test_a_quantizer_written_in_python(device):
    """The engine calls it, and it is differentiable like the others."""
    quantizer, x = Halving(block2d(device=device)), randn(6, 48, device=device, requires_grad=True)
    wanted = block2d(device=device)(x.detach() * 0.5)
    t = quantizer(x)
    assert_same_parts(t, wanted)
    t.dequantize().sum().backward()
    assert_same_bits(x.grad, torch.ones_like(x))
    native = quantizer._native()
    assert native.kind == "python" and quantizer._native() is not native
    made = _C.quantize(native, x.detach(), False, True)
    assert made.rowwise is None and made.scaling == 2
    assert_same_bits(made.columnwise, wanted._columnwise_data)
    assert_same_bits(made.columnwise_scale_inv, wanted._columnwise_scale_inv)


def test_a_subclass_of_a_built_in_is_python_where_it_changes_how(device):
    class Named(te.Float8CurrentScalingQuantizer):
        label = "mine"

    class Clipped(te.Float8CurrentScalingQuantizer):
        def quantize_impl(self, tensor):
            return super().quantize_impl(tensor.clamp(-1, 1))

    x = randn(6, 48, device=device) * 3
    assert Named(E4M3, device)._native().kind == "current"
    clipped = Clipped(E4M3, device)
    assert clipped._native().kind == "python"
    wanted = current(device=device)(x.clamp(-1, 1))
    assert_same_parts(clipped(x), wanted)
    assert_same_bits(_C.quantize(clipped._native(), x, True, False).rowwise, wanted._data)


@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("family", ["Linear", "LayerNormMLP"])
def test_what_a_quantizer_in_python_leaves_out_is_named(device, role, family):
    """In a module too: what it returned, and what was wanted."""

    class Lazy(te.Float8CurrentScalingQuantizer):
        how = None

        def quantize_impl(self, tensor):
            if self.how == "rowwise alone":
                self.set_usage(rowwise=True, columnwise=False)
                return super().quantize_impl(tensor)
            return None if self.how == "nothing" else tensor

    def step():
        module = getattr(te, family)(32, 32, device=device)
        with te.autocast(
            recipe=recipe.CustomRecipe(qfactory=lambda r: Lazy(E4M3, device) if r.tensor_type == role else None)
        ):
            y = module(randn(16, 32, device=device, requires_grad=True))
        y.sum().backward()

    for Lazy.how, kind, words in (
        ("rowwise alone", ValueError, ("Float8Tensor", "without columnwise data")),
        ("nothing", TypeError, ("a NoneType", "wanted a quantized tensor")),
        ("the tensor", TypeError, ("wanted a quantized tensor",)),
    ):
        with refused(kind, "Lazy.quantize_impl", *words):
            step()
        if Lazy.how != "rowwise alone":
            with refused(kind, "Lazy.quantize_impl", *words):
                Lazy(E4M3, device)(randn(4, 4, device=device))


def test_a_quantizer_without_a_body_is_named():
    bare = te.Quantizer(rowwise=True, columnwise=False)
    for call in (lambda: bare(torch.ones(2, 3)), lambda: bare._quantize_native(torch.ones(2, 3), True, False)):
        with refused(NotImplementedError, "Quantizer", "quantize_impl"):
            call()


# ---- hybrid and identity ----


@pytest.mark.parametrize(
    ("shape", "dim", "rowwise", "columnwise"),
    [((130, 300), 1, (3, 132), (2, 300)), ((130, 300), 2, (2, 4), (3, 4)), ((2, 65, 1300), 2, (2, 12), (11, 4))],
)
def test_shapes_of_block_layouts(shape, dim, rowwise, columnwise):
    """With M rows and K columns [ceil(K / 128), roundup(M, 4)] of 1 x 128 blocks, of 128 x 128 ones [ceil(M / 128),
    roundup(ceil(K / 128), 4)]; columnwise the same of the transpose. Those of the tensors that it makes."""
    quantizer = te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)
    made = quantizer(torch.ones(shape))
    assert quantizer.get_scale_shape(shape, False) == rowwise == made._rowwise_scale_inv.shape
    assert quantizer.get_scale_shape(list(shape), columnwise=True) == columnwise == made._columnwise_scale_inv.shape
    transposed = (shape[-1], *shape[:-1])
    assert quantizer.get_columnwise_shape(shape) == transposed == made._columnwise_data.shape


@pytest.mark.parametrize("rowwise", FP8_FORMATS)
@pytest.mark.parametrize("columnwise", FP8_FORMATS)
def test_each_direction_by_its_own_quantizer(device, rowwise, columnwise):
    x = randn(33, 48, device=device)
    pair = FP8_FORMATS[rowwise](E4M3, device), FP8_FORMATS[columnwise](E5M2, device)
    quantizer = te.HybridQuantizer(rowwise_quantizer=pair[0], columnwise_quantizer=pair[1])
    t = quantizer(x)
    wanted_rows = FP8_FORMATS[rowwise](E4M3, device, columnwise=False)(x)
    wanted_columns = FP8_FORMATS[columnwise](E5M2, device, rowwise=False)(x)
    assert_same_tensor(t.rowwise_storage, wanted_rows)
    assert_same_tensor(t.columnwise_storage, wanted_columns)
    assert_same_bits(t.dequantize(), wanted_rows.dequantize())
    assert pair[0].columnwise_usage and pair[1].rowwise_usage  # the given ones are left as they were
    assert t.get_data_tensors()[0] is t.rowwise_storage.get_data_tensors(columnwise_data=False)
    t.update_usage(rowwise_usage=False)
    assert_same_bits(t.dequantize(), wanted_columns.dequantize())
    with refused(NotImplementedError, "update_usage", "rowwise", "set_usage"):
        t.update_usage(rowwise_usage=True)
    again = te.HybridQuantizer(
        rowwise_quantizer=pair[0], columnwise_quantizer=pair[1], columnwise_source="rowwise_dequantized"
    )
    assert_same_tensor(
        again(x).columnwise_storage, FP8_FORMATS[columnwise](E5M2, device, rowwise=False)(wanted_rows.dequantize())
    )


def test_the_engine_reads_a_hybrid_of_one_format(device):
    x = randn(32, 48, device=device)
    one = te.HybridQuantizer(rowwise_quantizer=block1d(device=device), columnwise_quantizer=block1d(device=device))
    native, wanted = _C.quantize(one._native(), x, True, True), block1d(device=device)(x)
    assert_same_bits(native.rowwise, wanted._rowwise_data)
    assert_same_bits(native.columnwise, wanted._columnwise_data)
    two = te.HybridQuantizer(
        rowwise_quantizer=block1d(device=device), columnwise_quantizer=block1d(E5M2, device=device)
    )
    assert _C.quantize(two._native(), x, False, True).e5m2
    with refused(NotImplementedError, "one format from both directions"):
        two(x)._native()


def test_hybrids_of_nothing():
    with refused(TypeError, "HybridQuantizer", "'rowwise_quantizer'", "NoneType"):
        te.HybridQuantizer(rowwise_quantizer=None, columnwise_quantizer=current())
    with refused(ValueError, "HybridQuantizer", "'columnwise_source'", "'other'"):
        te.HybridQuantizer(rowwise_quantizer=current(), columnwise_quantizer=current(), columnwise_source="other")


def test_identity_keeps_values(device):
    x = randn(6, 40, device=device)
    t = te.IdentityQuantizer()(x)
    assert t._hp_data.data_ptr() == x.data_ptr() and te.IdentityQuantizer()._native().kind == "none"
    assert_same_bits(t.dequantize(), x)
    half = te.IdentityQuantizer(dtype=torch.bfloat16)(x)
    assert half.dtype is torch.float32 and half._hp_data.dtype is torch.bfloat16
    assert_same_bits(half.dequantize(), x.bfloat16().float())
    with refused(ValueError, "IdentityQuantizer", "'dtype'", "int32"):
        te.IdentityQuantizer(dtype=torch.int32)
    t.update_usage(rowwise_usage=False)
    assert t.get_usages() == BOTH
    t.update_usage(rowwise_usage=False, columnwise_usage=False)
    assert parts_of(t) == {}


# ---- Blackwell's ----


def test_formats_of_blackwell_are_made_and_asked_and_refuse_use():
    x = torch.ones(32, 32)
    for quantizer, recipe_class in (
        (te.MXFP8Quantizer(E4M3, with_2d_quantization=True), recipe.MXFP8BlockScaling),
        (te.NVFP4Quantizer(with_rht=True, stochastic_rounding=True), recipe.NVFP4BlockScaling),
    ):
        assert quantizer._get_compatible_recipe() is recipe_class and not quantizer.is_quantizable(x)
        for other in (quantizer.copy(), copy.deepcopy(quantizer)):
            other.set_usage(columnwise=False)
            assert quantizer.columnwise_usage and type(other) is type(quantizer)
        name = type(quantizer).__name__
        for call in (
            lambda q=quantizer: q(x),
            lambda q=quantizer: q.quantize_impl(x),
            lambda q=quantizer: q.update_quantized(x, x),
            lambda q=quantizer: q.make_empty((32, 32)),
            lambda q=quantizer: q.multi_quantize([x]),
            lambda q=quantizer: q._native(),
        ):
            with refused(NotImplementedError, name, "Blackwell", "Float8BlockQuantizer"):
                call()
    for cls in (te.MXFP8Tensor, te.MXFP8TensorStorage, te.NVFP4Tensor, te.NVFP4TensorStorage):
        assert not isinstance(x, cls)
        with refused(NotImplementedError, cls.__name__, "Blackwell"):
            cls(rowwise_data=x)
    assert isinstance(te.MXFP8Quantizer(torch.float8_e4m3fn), te.Quantizer)
    assert delayed()._get_compatible_recipe() is recipe.DelayedScaling
