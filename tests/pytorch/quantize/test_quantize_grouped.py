# te.grouped_quantize: rows in groups as FP8. Each group's data and scales are _C.quantize's of its rows alone, byte for
# byte, the columnwise ones as panels of up to 128 rows. Mutants: scales of TENSOR that both directions share in the op,
# rowwise data without their pitch: each turns tests here red.
import pytest
import torch
from support import DTYPES, assert_same_bits, randn, refused

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import grouped_offsets

SPECS = {"current": (False, 0.0), "block1d": (True, 0.0)}  # pow_2_scales, epsilon
SPLITS = [7, 0, 130, 256, 1]
SPARE = 5
DIRECTIONS = [(True, True), (True, False), (False, True)]


def spec_of(kind, e5m2=False):
    quantizer = _C.Quantizer(kind, e5m2, *SPECS[kind])
    return quantizer, _C.ProductQuantization(quantizer, quantizer, quantizer, True, True, True).spec[:4]


def rows_of(cols, dtype, device, splits=SPLITS, spare=SPARE):
    x = randn(sum(splits) + spare, cols, dtype=dtype, device=device)
    x[sum(splits) :] = torch.nan
    return x, grouped_offsets(torch.tensor(splits, device=device), x)


def panels_of(rows):
    return -(-rows // 128)


def check_group(got, alone, first, rows, panel, group, kind):
    """`got`: the whole's (rowwise, its scales, panels, theirs); `alone`: of the group's rows."""
    data, scales, panels, panel_scales = got
    cols = alone.rowwise.shape[1]
    assert_same_bits(data[first : first + rows], alone.rowwise, "rowwise")
    own = panels[panel : panel + panels_of(rows)]
    joined = own.permute(1, 0, 2).reshape(cols, -1)
    assert_same_bits(joined[:, :rows], alone.columnwise, "columnwise")
    assert not joined[:, rows:].any(), "zeros after the last row"
    if kind == "current":
        for s in (scales, panel_scales):
            assert_same_bits(s[0, group : group + 1], alone.rowwise_scale_inv[:1], "scale")
        return
    assert_same_bits(scales[:, first : first + rows], alone.rowwise_scale_inv[:, :rows], "scales")
    assert_same_bits(panel_scales[panel : panel + len(own), :cols], alone.columnwise_scale_inv[:, :cols], "scales")


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("e5m2", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_group_is_quantized_as_if_alone(dtype, e5m2, kind, device):
    quantizer, spec = spec_of(kind, e5m2)
    for cols in (32, 130, 1):
        x, offsets = rows_of(cols, dtype, device)
        got = torch.ops.te.grouped_quantize(x, offsets, spec, True, True)
        assert got[2].shape == ((len(x) - 5) // 128 + 5, cols, 128)
        first = panel = 0
        for group, rows in enumerate(SPLITS):
            alone = _C.quantize(quantizer, x[first : first + rows].contiguous(), True, True)
            check_group(got, alone, first, rows, panel, group, kind)
            first, panel = first + rows, panel + panels_of(rows)
        for rowwise, columnwise in DIRECTIONS[1:]:
            one = torch.ops.te.grouped_quantize(x, offsets, spec, rowwise, columnwise)
            live = slice(0, sum(SPLITS)) if rowwise else slice(0, panel)
            at = 0 if rowwise else 2
            assert_same_bits(one[at][live], got[at][live])
            assert not one[2 - at].numel() and not one[3 - at].numel()


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_by_a_map(dtype, kind, device):
    _, spec = spec_of(kind)
    rows, offsets = rows_of(136, dtype, device)
    live, panels = sum(SPLITS), sum(panels_of(n) for n in SPLITS)
    tokens = randn(150, 136, dtype=dtype, device=device)
    source = torch.randint(-1, 150, (len(rows),), device=device, dtype=torch.int32)
    gathered = torch.ops.te.permute_gather_fwd(tokens, source)
    want = torch.ops.te.grouped_quantize(gathered, offsets, spec, True, True)
    got = torch.ops.te.grouped_quantize(tokens, offsets, spec, True, True, source)
    assert [one.shape for one in got] == [one.shape for one in want]
    assert_same_bits(got[0][:live], want[0][:live], "rowwise")
    assert_same_bits(got[2][:panels], want[2][:panels], "panels")
    scales = slice(live) if kind == "block1d" else slice(None)
    assert_same_bits(got[1][:, scales], want[1][:, scales], "scales")
    assert_same_bits(got[3][:panels], want[3][:panels], "scales of panels")
    for bad in (source.long(), source[None], torch.stack([source, source], 1)[:, 0]):
        with refused(ValueError, "grouped_quantize", "'row_map'", "int32"):
            torch.ops.te.grouped_quantize(tokens, offsets, spec, True, True, bad)


@pytest.mark.parametrize("kind", SPECS)
def test_no_rows_and_strided_ones(kind, device):
    _, spec = spec_of(kind)
    for splits in ([0, 0, 0], [0]):
        x, offsets = rows_of(24, torch.bfloat16, device, splits, 0)
        data, _, panels, _ = torch.ops.te.grouped_quantize(x, offsets, spec, True, True)
        assert data.shape == (0, 24) and panels.shape == (0, 24, 128)
    x, offsets = rows_of(24, torch.bfloat16, device)
    pitched = torch.empty(len(x), 31, dtype=x.dtype, device=device)[:, 3:27].copy_(x)
    live = sum(SPLITS)
    for strange in (pitched, x.t().contiguous().t()):
        got = torch.ops.te.grouped_quantize(strange, offsets, spec, True, False)
        assert_same_bits(got[0][:live], torch.ops.te.grouped_quantize(x, offsets, spec, True, False)[0][:live])


@pytest.mark.parametrize("kind", SPECS)
def test_one_groups_nan_stays_its_own(kind, device):
    _, spec = spec_of(kind)
    x, offsets = rows_of(40, torch.bfloat16, device)
    want = torch.ops.te.grouped_quantize(x, offsets, spec, True, True)
    for value in (torch.nan, torch.inf):
        bad = x.clone()
        bad[7:137] = value
        got = torch.ops.te.grouped_quantize(bad, offsets, spec, True, True)
        for rows in (slice(0, 7), slice(137, sum(SPLITS))):
            assert_same_bits(got[0][rows], want[0][rows])
        for panels in (slice(0, 1), slice(3, 6)):
            assert_same_bits(got[2][panels], want[2][panels])


@pytest.mark.parametrize("directions", DIRECTIONS)
@pytest.mark.parametrize("kind", SPECS)
def test_schemas_and_meta(kind, directions, device):
    for cols in (32, 130):
        # All rows live: opcheck compares the values of two runs, and rows of no group have none.
        x, offsets = rows_of(cols, torch.bfloat16, device, [128, 256], 0)
        torch.library.opcheck(
            torch.ops.te.grouped_quantize.default, (x, offsets, spec_of(kind)[1], *directions),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip
        source = torch.arange(384, device=device, dtype=torch.int32) % 100
        torch.library.opcheck(
            torch.ops.te.grouped_quantize.default, (x[:100], offsets, spec_of(kind)[1], *directions, source),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


def test_bad_arguments_are_named(device):
    _, spec = spec_of("current")
    x, offsets = rows_of(8, torch.bfloat16, device)
    call = torch.ops.te.grouped_quantize
    for error, words, arguments in (
        (ValueError, ("'x'", "matrix"), (x[0], offsets, spec)),
        (ValueError, ("'x'", "Double"), (x.double(), offsets, spec)),
        (ValueError, ("'offsets'", "Int"), (x, offsets.long(), spec)),
        (NotImplementedError, ("'spec'",), (x, offsets, [1, 0, 0, 0])),
        (NotImplementedError, ("block2d",), (x, offsets, [4, 0, 0, 0])),
    ):
        with refused(error, *words):
            call(*arguments, True, True)
