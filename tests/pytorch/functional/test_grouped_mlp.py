# functional.grouped_mlp: to the bit grouped_linear, an activation, a product with each row's scale, grouped_linear; its
# values and gradients against float64; rows of no group, NaN throughout, reach nothing; what is kept for backward.
import pytest
import torch
from fp8_products import RECIPES, product
from support import assert_same_bits, randn, refused, saved_tensors, wide

from transformer_engine.pytorch import _C, functional
from transformer_engine.pytorch.functional import activation, grouped_linear, grouped_mlp, grouped_offsets

SPLITS = [5, 0, 130, 1]
TOTAL, SPARE, K, HIDDEN = sum(SPLITS), 4, 64, 48
BF16 = torch.bfloat16


def quantizations(recipe, device, groups=4):
    """Of both products; of delayed scaling one for each group, with a state of its own."""
    if recipe == "none":
        return (), ()
    each = groups if recipe == "delayed" else 1
    return tuple([product(recipe, device, scale=2.0 + i).native for _ in range(each)] for i in range(2))


KINDS = ("none", *RECIPES)


def reversed_map(rows, device):
    """One row for each token, the last one first."""
    order = torch.arange(rows - 1, -1, -1, dtype=torch.int32, device=device)
    return order, order.unsqueeze(1)


class Case:
    """Leaves x, weights of both products and the scale of each row; dy. Rows of no group are NaN."""

    def __init__(self, device, dtype=BF16, kind="swiglu", spare=SPARE, scale_dtype=torch.float32, splits=SPLITS):
        self.kind, self.splits, self.device, total = kind, splits, device, sum(splits)
        wide_hidden = HIDDEN * (2 if functional.activation_kinds[kind] else 1)
        self.x, self.dy = (randn(total + spare, K, dtype=dtype, device=device) for _ in range(2))
        self.scale = randn(total + spare, dtype=scale_dtype, device=device)
        for t in (self.x, self.dy, self.scale):
            t[total:] = torch.nan
        self.weights = [
            [randn(*shape, dtype=dtype, device=device, scale=0.2, requires_grad=True) for _ in splits]
            for shape in ((wide_hidden, K), (K, HIDDEN))
        ]
        self.leaves = [self.x.requires_grad_(), self.scale.requires_grad_(), *self.weights[0], *self.weights[1]]

    def groups(self, on_device):
        if not on_device:
            return {"splits": self.splits, "offsets": None}
        counts = torch.tensor(self.splits, device=self.device)
        return {"splits": (), "offsets": grouped_offsets(counts, self.x)}

    def fused(self, on_device, quantized=((), ()), **options):
        groups = self.groups(on_device)
        y = grouped_mlp(
            self.x, groups.pop("offsets"), *self.weights, self.scale, kind=self.kind, quantizations=quantized, **groups,
            **options,
        )  # fmt: skip
        return self.gradients(y)

    def composed(self, on_device, quantized=((), ()), of_preactivation=lambda h: h):
        groups = self.groups(on_device)
        h = grouped_linear(self.x, self.weights[0], quantizations=quantized[0], **groups)
        # Zero times the NaN of a row of no group is NaN in a product of torch.
        inside = torch.arange(h.shape[0], device=self.device) < sum(self.splits)
        scale = torch.where(inside, self.scale, 0.0)
        a = (activation(of_preactivation(h), self.kind) * scale.unsqueeze(-1)).to(h.dtype)
        return self.gradients(grouped_linear(a, self.weights[1], quantizations=quantized[1], **groups))

    def gradients(self, y):
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.dy)]


def assert_same(got, want, scale_at=2):
    """Bit for bit but for the gradient of the scale, which torch sums in another order."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if i != scale_at:
            assert_same_bits(a, b, i)
        else:  # a sum of HIDDEN terms that are 1 on average, in float32
            most = 2.0**-8 if a.dtype != torch.float32 else 1e-4
            assert (wide(a) - wide(b)).abs().max() <= most * max(1.0, float(wide(b).abs().max()))


@pytest.mark.parametrize("kind", ["swiglu", "gelu", "srelu"])
@pytest.mark.parametrize("recipe", KINDS)
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_is_the_composition(on_device, recipe, kind, device):
    case = Case(device, kind=kind, spare=SPARE if on_device else 0)
    got = case.fused(on_device, quantizations(recipe, device))
    want = case.composed(on_device, quantizations(recipe, device))
    assert_same(got, want)
    for t in (got[0], got[1], got[2]):
        assert not t[TOTAL:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("same_scale", [False, True])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_dtypes(on_device, same_scale, dtype, device):
    if dtype is torch.float32 and device == "cuda" and on_device:
        pytest.skip("groups on the device are multiplied in 16 bits")
    scale_dtype = dtype if same_scale else torch.float32
    case = Case(device, dtype, spare=SPARE if on_device else 0, scale_dtype=scale_dtype)
    assert_same(case.fused(on_device), case.composed(on_device))


@pytest.mark.parametrize("splits", [[0, 0, 0], [0, 200, 0], [64, 64, 64], [17]], ids=str)
@pytest.mark.parametrize("recipe", KINDS)
def test_routings(recipe, splits, device):
    case = Case(device, splits=splits)
    made = [quantizations(recipe, device, len(splits)) for _ in range(2)]
    assert_same(case.fused(True, made[0]), case.composed(True, made[1]))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_against_float64(dtype, device):
    """Relative to the norm of each: the operands and results of six products are rounded, independent errors add up by
    their squares; 64 u bounds them for factors between products of at most 10."""
    on_device = dtype is BF16
    case = Case(device, dtype, spare=0)
    got = case.fused(on_device)
    copies = [wide(leaf).requires_grad_() for leaf in case.leaves]
    x, scale, weights = copies[0], copies[1], copies[2:]
    parts = []
    for g, rows in enumerate(x.split(SPLITS)):
        a, b = (rows @ weights[g].T).chunk(2, -1)
        row_scale = scale.split(SPLITS)[g].unsqueeze(-1)
        parts.append((torch.nn.functional.silu(a) * b * row_scale) @ weights[len(SPLITS) + g].T)
    y = torch.cat(parts)
    want = [y.detach(), *torch.autograd.grad(y, copies, wide(case.dy))]
    unit = 2.0**-9 if dtype is BF16 else 2.0**-24
    for i, (ours, exact) in enumerate(zip(got, want, strict=True)):
        assert (wide(ours) - exact).norm() <= 64 * unit * exact.norm(), i


@pytest.mark.parametrize("recipe", KINDS)
def test_rows_of_no_group_reach_nothing(recipe, device):
    """New memory is NaN here (conftest.py): an element that was read before it was written would show."""
    for result in Case(device).fused(True, quantizations(recipe, device)):
        assert result.isfinite().all()


@pytest.mark.parametrize("recipe", ["none", "block"])
def test_pre_activation_in_fp8(recipe, device):
    """The backward reads the values of E4M3 in blocks of 1 x 128."""
    case = Case(device)

    packer = _C.Quantizer("block1d", False, True, 0.0)

    def in_e4m3(h):  # the values of its rows; the gradient passes
        packed = _C.dequantize(_C.quantize(packer, h.detach(), True, False), h.dtype)
        return h + (packed.view(h.shape) - h).detach()

    got = case.fused(True, quantizations(recipe, device), fp8_pre_activation=True)
    assert_same_bits(got[0], case.fused(True, quantizations(recipe, device))[0])
    assert_same(got[1:], case.composed(True, quantizations(recipe, device), in_e4m3)[1:], scale_at=1)
    with saved_tensors() as saved:
        case.fused(True, quantizations(recipe, device), fp8_pre_activation=True)
    assert any(t.dtype == torch.uint8 and t.shape == (TOTAL + SPARE, 2 * HIDDEN) for t in saved)


@pytest.mark.parametrize("wanted", ["x", "scale", "weights1", "weights2"])
@pytest.mark.parametrize("recipe", ["none", "block"])
def test_only_one_needs_a_gradient(recipe, wanted, device):
    case = Case(device)
    all_of_them = case.fused(True, quantizations(recipe, device))
    n = len(SPLITS)
    place = {"x": [0], "scale": [1], "weights1": range(2, 2 + n), "weights2": range(2 + n, 2 + 2 * n)}[wanted]
    for i, leaf in enumerate(case.leaves):
        leaf.requires_grad_(i in place)
    case.leaves = [case.leaves[i] for i in place]
    got = case.fused(True, quantizations(recipe, device))
    for a, b in zip(got, [all_of_them[0], *(all_of_them[1 + i] for i in place)], strict=True):
        assert_same_bits(a, b)


def test_without_a_scale(device):
    case = Case(device)
    del case.leaves[1]
    scale, case.scale = case.scale, None
    got = case.fused(True)
    case.scale = torch.ones_like(scale)
    want = case.fused(True)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


def test_what_is_kept(device):
    """x, the pre-activation, the scale and the weights, and nothing else of that size."""
    case = Case(device)
    with saved_tensors() as saved:
        grouped_mlp(case.x, case.groups(True)["offsets"], *case.weights, case.scale)
    rows = TOTAL + SPARE
    shapes = sorted(tuple(t.shape) for t in saved if t.shape[0] == rows)
    assert shapes == sorted([(rows,), (rows, K), (rows, 2 * HIDDEN)])
    assert len(saved) == 3 + 2 * len(SPLITS)


@pytest.mark.parametrize("recipe", ["none", "current", "block"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_compiled(on_device, recipe, device):
    case = Case(device, spare=SPARE if on_device else 0)
    want = case.fused(on_device, quantizations(recipe, device))
    groups = case.groups(on_device)
    spec = [] if recipe == "none" else list(product(recipe, device).spec)

    def call(x, scale, weights1, weights2):
        return grouped_mlp(
            x, groups["offsets"], weights1, weights2, scale, splits=groups["splits"], quantizations=(spec, spec)
        )

    y = torch.compile(call, fullgraph=True, backend="aot_eager")(case.x, case.scale, *case.weights)
    for a, b in zip(case.gradients(y), want, strict=True):
        assert_same_bits(a, b)


def test_autocast_keeps_the_scale(device):
    case = Case(device, torch.float32, spare=0)
    leaves = [t.detach().bfloat16() for t in (case.x, *case.weights[0], *case.weights[1])]
    n = len(SPLITS)
    want = grouped_mlp(leaves[0], None, leaves[1 : 1 + n], leaves[1 + n :], case.scale.detach(), splits=SPLITS)
    with torch.autocast(device, dtype=BF16):
        for eager in (True, False):
            arguments = (case.x, *case.weights, case.scale, None, SPLITS, None, None, False)
            arguments = (*arguments, "swiglu", [], False, False, [], [])
            y = (
                grouped_mlp(case.x, None, *case.weights, case.scale, splits=SPLITS)
                if eager
                else torch.ops.te.grouped_mlp(*arguments)
            )
            assert_same_bits(y, want)


@pytest.mark.parametrize("recipe", ["none", "block"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("of_tokens", [False, True], ids=["rows", "tokens"])
def test_opcheck(of_tokens, on_device, recipe, device):
    case = Case(device, spare=0)
    groups = case.groups(on_device)
    spec = [] if recipe == "none" else list(product(recipe, device).spec)
    row_map = (None, None, False)
    if of_tokens:
        case.x = randn(TOTAL, K, dtype=BF16, device=device).requires_grad_()
        row_map = (*reversed_map(TOTAL, device), True)
    arguments = (case.x, *case.weights, case.scale, groups["offsets"], list(groups["splits"]), *row_map)
    options = ("swiglu", [], of_tokens, False, spec, spec)
    torch.library.opcheck(torch.ops.te.grouped_mlp.default, (*arguments, *options))
    main_grads = [torch.zeros_like(w, dtype=torch.float32) for weights in case.weights for w in weights]
    targets = [n for i, weights in enumerate(case.weights) for w in weights for n in (i, w.shape[0], 0)]
    # As for grouped_linear: what its backward adds to is no result, so that the checks of a backward do not apply.
    torch.library.opcheck(
        torch.ops.te.grouped_mlp.main_grad,
        (*arguments, *options, main_grads, targets),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_errors(device):
    case = Case(device, spare=0)
    offsets = case.groups(True)["offsets"]
    one, two = case.weights
    with refused(ValueError, "grouped_mlp", "'x'", "[1, 136, 64]"):
        grouped_mlp(case.x.unsqueeze(0), offsets, one, two, case.scale)
    with refused(ValueError, "grouped_mlp", "'weights1'", "'weights2'", "4", "3"):
        grouped_mlp(case.x, offsets, one, two[:3], case.scale)
    with refused(ValueError, "grouped_mlp", "[64, 96]", "2 * hidden"):
        grouped_mlp(case.x, offsets, one, [torch.cat((w, w), 1) for w in two], case.scale)
    with refused(ValueError, "grouped_mlp", "'weights1'", "0"):
        grouped_mlp(case.x, offsets, [], [], case.scale)
    with refused(ValueError, "grouped_mlp", "'offsets'", "[4]", "[5]"):
        grouped_mlp(case.x, offsets[:4], one, two, case.scale)
    with refused(ValueError, "grouped_mlp", "'m_splits'", "135"):
        grouped_mlp(case.x, None, one, two, case.scale, splits=[5, 0, 129, 1])
    with refused(ValueError, "scaled_activation", "'scale'", "[135]"):
        grouped_mlp(case.x, offsets, one, two, case.scale[:135])
    with refused(ValueError, "activation", "'kind'"):
        grouped_mlp(case.x, offsets, one, two, case.scale, kind="no such")
