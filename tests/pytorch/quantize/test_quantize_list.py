# quantize, lists of matrices at once: bytes, scales, transposes and amaxes of each as _C.quantize makes them of it
# alone; special values of one reach no other; one buffer for all; lists that no one call takes; the flag. Mutant: parts
# that share a version (csrc/quantize/list_quantize.cpp).
import itertools

import pytest
import torch
from support import DTYPES, assert_same_bits, refused

from transformer_engine.pytorch import _C

from .cases import DIRECTIONS, KINDS, check_padding, draw, quantizer

SHAPES = ((0, 16), (5, 0), (1, 1), (17, 130), (128, 256), (129, 300))
PARTS = ("rowwise", "rowwise_scale_inv", "columnwise", "columnwise_scale_inv")
FLOATS = torch.float32


def values(count, shape, dtype, device):
    """NaN and Inf in the second, zeros as the third, subnormals as the fourth; magnitudes that differ."""
    found = [draw(*shape, FLOATS, "cpu", seed=i) * 2.0 ** (3 * i) for i in range(count)]
    for value in found[1:2]:
        value.flatten()[::7] = torch.nan
        value.flatten()[3::11] = -torch.inf
    for value in found[2:3]:
        value.zero_()
    for value in found[3:4]:
        value.copy_(torch.randint(-7, 8, shape) * torch.finfo(dtype).smallest_normal / 8)
    return [value.to(dtype).to(device) for value in found]


def quantizers(kind, count, device, **options):
    return [quantizer(kind, device, scale=0.5 + i, **options) for i in range(count)]


def states(made):
    return [(q.scale, amax_of(q)) for q in made]


def amax_of(q):
    return getattr(q, "amax", None)


def same(got, want, what):
    for name in PARTS:
        one, other = getattr(got, name), getattr(want, name)
        assert (one is None) == (other is None), (what, name)
        if one is not None:
            assert_same_bits(one, other, f"{what} {name}")
            if "scale" not in name:
                assert one.stride() == other.stride(), (what, name)
                check_padding(one, f"{what} {name}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_as_alone(kind, dtype, device):
    for shape, directions, e5m2 in itertools.product(SHAPES, DIRECTIONS, (False, True)):
        xs = values(6, shape, dtype, device)
        amaxes = [[torch.full((1,), 0.25, device=device) for _ in xs] for _ in range(2)]
        of_list, alone = (
            [
                _C.Quantizer(kind, e5m2, scale=torch.tensor([0.5 + i], device=device), amax=amax)
                if kind == "delayed"
                else quantizer(kind, device, e5m2)
                for i, amax in enumerate(each)
            ]
            for each in amaxes
        )
        made = _C.quantize_list(of_list, xs, *directions)
        for i, x in enumerate(xs):
            want = _C.quantize(alone[i], x, *directions)
            same(made[i], want, f"{shape} {directions} e5m2={e5m2} number {i}")
            assert (made[i].scaling, made[i].e5m2) == (want.scaling, e5m2)
        assert amaxes[0] == amaxes[1]


@pytest.mark.parametrize("kind", KINDS)
def test_special_values_reach_no_other(kind, device):
    xs = values(4, (130, 48), FLOATS, device)
    before = _C.quantize_list(quantizers(kind, 4, device), xs, True, True)
    for special in (torch.nan, torch.inf):
        xs[1].fill_(special)
        after = _C.quantize_list(quantizers(kind, 4, device), xs, True, True)
        for i in (0, 2, 3):
            same(after[i], before[i], f"number {i} beside {special}")


# Each direction's data, and their scales, are parts of one buffer.
@pytest.mark.parametrize("kind", KINDS)
def test_one_buffer(kind, device):
    made = _C.quantize_list(quantizers(kind, 5, device), values(5, (33, 48), FLOATS, device), True, True)
    for name in PARTS:
        parts = [getattr(one, name) for one in made]
        assert len({part.untyped_storage().data_ptr() for part in parts}) == 1, name
        assert len({part.data_ptr() for part in parts}) == 5, name
        assert all(part.data_ptr() % 16 == 0 for part in parts), name
    version = made[0].rowwise._version
    made[1].rowwise.fill_(1)  # matrices of their own for autograd
    assert made[0].rowwise._version == version


# Another shape, dtype, layout, options, kinds that differ, one in Python's place: one by one, as _C.quantize does it.
def test_lists_that_no_one_call_takes(device):
    x = draw(16, 32, FLOATS, device)
    same_kind = quantizers("current", 2, device)
    cases = (
        (same_kind, [x, x[:8]]),
        (same_kind, [x, x.bfloat16()]),
        (same_kind, [x, x.t().contiguous().t()]),
        (same_kind, [x, torch.cat([x, x], 1)[:, :32]]),
        (same_kind, [x.view(2, 8, 32), x.view(2, 8, 32)]),
        (same_kind, [x, torch.complex(x, x).conj().imag]),
        (same_kind[:1], [x]),
        ([same_kind[0], quantizer("current", device, e5m2=True)], [x, x]),
        ([same_kind[0], quantizer("block2d", device)], [x, x]),
        ([], []),
    )
    for made_by, xs in cases:
        for got, quantize, value in zip(_C.quantize_list(made_by, xs, True, True), made_by, xs, strict=True):
            same(got, _C.quantize(quantize, value, True, True), "one by one")
    with refused(ValueError, "quantize", "'quantizer'", "none"):
        _C.quantize_list([_C.Quantizer("none")] * 2, [x, x], True, True)
    with refused(ValueError, "quantize", "'x'", "Double"):
        _C.quantize_list(same_kind, [x.double(), x.double()], True, True)
    with refused(ValueError, "quantize_list", "'quantizers'", "1", "2"):
        _C.quantize_list(same_kind[:1], [x, x], True, True)
    with refused(ValueError, "quantize_list_into", "'outs'", "2"):
        _C.quantize_list_into(same_kind, [x, x], [])
    with refused(ValueError, "quantize_list", "'quantizers'", "None at 1"):
        _C.quantize_list([same_kind[0], None], [x, x], True, True)


# A list refuses the states that a single matrix refuses: it would read past their end, or as another dtype.
@pytest.mark.parametrize("where", ["scale", "amax"])
@pytest.mark.parametrize("wrong", [torch.ones(2), torch.ones(1, dtype=torch.float64)])
def test_states_that_do_not_fit(wrong, where, device):
    x = draw(16, 32, FLOATS, device)
    state = {name: torch.ones(1, device=device) for name in ("scale", "amax")} | {where: wrong.to(device)}
    odd = _C.Quantizer("delayed", False, **state)
    with pytest.raises(ValueError) as alone:
        _C.quantize(odd, x, True, True)
    with pytest.raises(ValueError) as of_list:
        _C.quantize_list([quantizer("delayed", device), odd], [x, x], True, True)
    assert str(of_list.value) == str(alone.value) and where in str(alone.value)


@pytest.mark.parametrize("kind", KINDS)
def test_into_existing_outputs_unless_a_flag_is_set(kind, device):
    old, new = (values(3, (17, 48), torch.bfloat16, device)[:1] * 3 for _ in range(2))
    new = [x * 2 for x in new]
    made_by = quantizers(kind, 3, device)
    kept = _C.quantize_list(made_by, old, True, True)
    # The last one lies elsewhere, with another pitch: no one call takes it.
    for outs in (kept, [*kept[:2], _C.quantize(made_by[2], old[2], True, False)]):
        wanted = [_C.quantize(q, x, True, o.columnwise is not None) for q, x, o in zip(made_by, old, outs, strict=True)]
        flag = torch.ones(1, device=device)
        _C.quantize_list_into(made_by, old, outs)
        _C.quantize_list_into(made_by, new, outs, flag)
        for got, want in zip(outs, wanted, strict=True):
            same(got, want, "flag set")
        versions = [one.rowwise._version for one in outs]
        flag.zero_()
        _C.quantize_list_into(made_by, new, outs, flag)
        for got, made, x, before in zip(outs, made_by, new, versions, strict=True):
            same(got, _C.quantize(made, x, True, got.columnwise is not None), "flag not set")
            assert got.rowwise._version > before
