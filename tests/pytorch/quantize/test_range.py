# quantize, ranges of a matrix by the functional forms: the largest of their amaxes is that of the whole; bytes and
# scales equal those of the whole quantized at once wherever it is cut, into the whole and alone; versions,
# torch.compile, opcheck, errors.
import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import DTYPES, assert_same_bits, refused

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import quantize_range_amax, quantize_range_cast

from .cases import draw, quantizer, same_bytes

KINDS = {"delayed": 0, "current": 0, "block2d": 2}


def amaxes_for(kind, shape, device):
    blocks = [math.ceil(n / 128) for n in shape] if kind == "block2d" else [1]
    return torch.empty(blocks, device=device)


def cut_and_cast(kind, q, x, dtype, cuts, alone, data, scale_inv):
    """Each part apart, from the largest amaxes of all; the bytes of all."""
    shape, flat = tuple(x.shape), x.reshape(-1)
    parts = [(a, flat[a:b]) for a, b in itertools.pairwise(cuts)]
    found = []
    for start, part in parts:
        found.append(amaxes_for(kind, shape, x.device))
        quantize_range_amax(part, found[-1], shape, start, dtype, scaling=KINDS[kind])
    amaxes = torch.stack(found).amax(0)
    for start, part in parts:
        target = torch.empty(len(part), dtype=torch.uint8, device=x.device) if alone else data
        extra = {"scale": q.scale, "amax": q.amax} if kind == "delayed" else {}
        quantize_range_cast(part, target, scale_inv, shape, start, dtype, q.spec, amaxes=amaxes, **extra)
        if alone:
            data.view(-1)[start : start + len(part)] = target
    return amaxes


@settings(derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.sampled_from((1, 3, 127, 130, 260)),
    cols=st.sampled_from((1, 8, 130, 264, 300)),
    source=st.sampled_from(DTYPES),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(sorted(KINDS)),
    e5m2=st.booleans(),
    pow_2=st.booleans(),
    where=st.lists(st.floats(0, 1), max_size=3),
    alone=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_cut_gives_the_whole(device, rows, cols, source, dtype, kind, e5m2, pow_2, where, alone, seed):
    x = draw(rows, cols, source, device, seed)
    cuts = [0, *sorted(int(f * x.numel()) for f in where), x.numel()]
    q, whole = quantizer(kind, device, e5m2, pow_2, 0.25), quantizer(kind, device, e5m2, pow_2, 0.25)
    want = _C.quantize(whole, x.to(dtype), True, False)
    data = torch.empty(rows, cols, dtype=torch.uint8, device=device)
    scale_inv = torch.empty_like(want.rowwise_scale_inv)
    cut_and_cast(kind, q, x, dtype, cuts, alone, data, scale_inv)
    same_bytes(data, want.rowwise.cpu(), e5m2, f"{kind} {cuts}")
    assert_same_bits(scale_inv.cpu(), want.rowwise_scale_inv.cpu(), f"{kind} {cuts}")
    if kind == "delayed":
        assert_same_bits(q.amax.cpu(), whole.amax.cpu(), "amax")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_nothing_but_the_range_is_touched(kind, device):
    """Other bytes stay: those of other ranges, those between the columns and the pitch, and other uses of the
    buffer."""
    buffer = torch.full((130 * 272 + 32,), 0xAB, dtype=torch.uint8, device=device)
    data = buffer[16:].as_strided((130, 264), (272, 1))
    x = draw(130, 264, torch.float32, device)
    start, length = 5 * 264 + 7, 100 * 264
    part = x.view(-1)[start : start + length]
    amaxes, q = amaxes_for(kind, (130, 264), device), quantizer(kind, device)
    scale_inv = _C.quantize(q, x, True, False).rowwise_scale_inv
    quantize_range_amax(part, amaxes, (130, 264), start, torch.bfloat16, scaling=KINDS[kind])
    before = [t._version for t in (data, scale_inv)]
    scale = {"scale": q.scale} if kind == "delayed" else {}
    quantize_range_cast(part, data, scale_inv, (130, 264), start, torch.bfloat16, q.spec, amaxes=amaxes, **scale)
    assert [t._version > b for t, b in zip((data, scale_inv), before)] == [True, True]
    written = torch.zeros(130, 264, dtype=torch.bool, device=device)
    written.view(-1)[start : start + length] = True
    assert (data[~written] == 0xAB).all() and (data[written] != 0xAB).any()
    data.fill_(0xAB)
    assert (buffer == 0xAB).all()


def test_compiled_and_watched(device):
    """The same bits under torch.compile, and schemas that say what is written."""
    x = draw(130, 40, torch.float32, device).view(-1)
    q = quantizer("block2d", device)

    def both(x, data, scale_inv, amaxes):
        quantize_range_amax(x, amaxes, (130, 40), 0, torch.bfloat16, scaling=2)
        quantize_range_cast(x, data, scale_inv, (130, 40), 0, torch.bfloat16, q.spec, amaxes=amaxes)

    def fresh():
        empty = torch.zeros(130, 40, dtype=torch.uint8, device=device)
        return empty, torch.zeros(2, 4, device=device), torch.zeros(2, 1, device=device)

    eager, compiled = fresh(), fresh()
    both(x, *eager)
    torch.compile(both, backend="aot_eager", fullgraph=True)(x, *compiled)
    for a, b in zip(eager, compiled):
        assert_same_bits(a.cpu(), b.cpu(), "compiled")
    data, _, amaxes = fresh()
    torch.library.opcheck(torch.ops.te.quantize_range_amax.default, (x, amaxes.clone(), 130, 40, 0, torch.bfloat16, 2))
    one = torch.ones(1, device=device)
    torch.library.opcheck(
        torch.ops.te.quantize_range_cast.default,
        (x, data, torch.ones(1, device=device), one, one * 2, one * 3, 130, 40, 0, torch.bfloat16,
         quantizer("delayed", device).spec),
    )  # fmt: skip


def test_bad_input_is_named(device):
    x, amaxes = torch.ones(100, device=device), torch.empty(1, device=device)
    data, scale_inv = torch.full((20, 30), 7, dtype=torch.uint8, device=device), torch.full((1,), 7.0, device=device)
    current, delayed, block1d = (quantizer(kind, device).spec for kind in ("current", "delayed", "block1d"))

    def amax(x=x, amaxes=amaxes, shape=(20, 30), start=0, dtype=torch.bfloat16, scaling=0):
        quantize_range_amax(x, amaxes, shape, start, dtype, scaling=scaling)

    def cast(spec=current, data=data, scale_inv=scale_inv, start=0, **more):
        quantize_range_cast(x, data, scale_inv, (20, 30), start, torch.bfloat16, spec, **{"amaxes": amaxes, **more})

    for error, call, message in (
        (ValueError, lambda: amax(x=x.double()), "argument 'x' has dtype Double"),
        (ValueError, lambda: amax(x=x[::2]), "argument 'x' has shape [50] and strides [2]"),
        (ValueError, lambda: amax(x=x.view(10, 10)), "argument 'x' has shape [10, 10]"),
        (ValueError, lambda: amax(start=501), "elements 501 to 601, wanted some of the 600"),
        (ValueError, lambda: amax(dtype=torch.int32), "argument 'rounded_to' is Int"),
        (ValueError, lambda: amax(scaling=7), "argument 'scaling' is 7"),
        (ValueError, lambda: amax(scaling=2, amaxes=amaxes.expand(2)), "argument 'amaxes' is [1, 2], wanted [1, 1]"),
        (NotImplementedError, lambda: amax(scaling=1), "1x128 blocks"),
        (NotImplementedError, lambda: cast(spec=block1d), "1x128 blocks"),
        (
            NotImplementedError,
            lambda: cast(spec=[5, 0, 0, 0]),
            "argument 'spec' is of a quantizer that is not built in",
        ),
        (ValueError, lambda: cast(spec=delayed), "argument 'scale' is missing"),
        (ValueError, lambda: cast(scale=amaxes), "argument 'scale' is given"),
        (ValueError, lambda: cast(amaxes=None), "argument 'amaxes' is [0, 0]"),
        (ValueError, lambda: cast(data=data.view(30, 20)), "argument 'data' is [30, 20], wanted [20, 30]"),
        (ValueError, lambda: cast(data=data.float()), "argument 'data' has shape [20, 30]"),
        (ValueError, lambda: cast(start=-1), "argument 'range' is elements -1"),
        (ValueError, lambda: cast(scale_inv=torch.empty(3, device=device)), "argument 'scale_inv' is [1, 3]"),
    ):
        with refused(error, message):
            call()
    assert (data == 7).all() and (scale_inv == 7).all()
