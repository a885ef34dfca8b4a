# te.GroupedLinear for any result of a router: drawn lists of sizes, and one list of each kind, in bfloat16 on either
# device, with sizes on the host or on the device. Values that are not finite in one group's rows stay in that group.
# Oracle: a loop of te.Linear. Mutants: a group's rows from the next group's first (run_rows), offsets one late, a tail
# that is multiplied, wgrad's rows to a whole tile.
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import assert_same_bits, assert_within, randn

from .grouped_cases import K, N, assert_same_gradients, build, step, step_of_loop

BF16 = torch.bfloat16
KINDS = {
    "even": [64, 64, 64, 64],
    "Zipf": [211, 105, 70, 52, 42, 35],
    "one expert": [0, 0, 300, 0],
    "a single group": [17],
    "empty": [0, 0, 0],
    "odd": [1, 299, 3, 129, 127, 255],
}


def assert_close(got, want, device, what):
    """The CPU's are a loop's bits; on CUDA cuBLASLt may split the reduction of a product of few rows."""
    if device == "cpu":
        assert_same_bits(got, want, what)
    else:
        most = 4 * torch.finfo(got.dtype).eps * (float(want.abs().max()) if want.numel() else 0.0)
        assert_within(got, want, most, what)


def check(splits, spare, seed, on_device, device):
    torch.manual_seed(seed)
    ours, loop = build(len(splits), device=device, dtype=BF16)
    total, spare = sum(splits), spare if on_device else 0
    x, dy = (randn(total + spare, width, dtype=BF16, device=device) for width in (K, N))
    dy[total:] = torch.nan
    sizes = torch.tensor(splits, device=device) if on_device else splits
    y, dx = step(ours, x, dy, sizes)
    want_y, want_dx = step_of_loop(loop, x[:total], dy[:total], splits)
    assert_close(y[:total], want_y, device, "y")
    assert_close(dx[:total], want_dx, device, "dx")
    assert not y[total:].any() and not dx[total:].any()
    assert_same_gradients(ours, loop, ulps=0 if device == "cpu" else 4)
    return ours, x, dy, sizes, y, dx


routings = st.lists(st.integers(0, 300), min_size=1, max_size=6)
quiet = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(max_examples=30, **quiet)
@given(splits=routings, spare=st.integers(0, 9), seed=st.integers(0, 9), on_device=st.booleans())
def test_any_routing(splits, spare, seed, on_device, device):
    check(splits, spare, seed, on_device, device)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_routing(kind, on_device, device):
    check(KINDS[kind], 5, 0, on_device, device)


@settings(max_examples=25, **quiet)
@given(
    data=st.data(), splits=routings, value=st.sampled_from([torch.nan, torch.inf, -torch.inf]), on_device=st.booleans()
)
def test_what_is_not_finite_stays_in_its_group(data, splits, value, on_device, device):
    ours, x, dy, sizes, y, dx = check(splits, 0, 1, on_device, device)
    bad = data.draw(st.integers(0, len(splits) - 1))
    gradients = [p.grad.clone() for p in ours.parameters()]
    ours.zero_grad()
    first = sum(splits[:bad])
    rows = slice(first, first + splits[bad])
    bad_x, bad_dy = x.clone(), dy.clone()
    bad_x[rows], bad_dy[rows] = value, value
    got_y, got_dx = step(ours, bad_x, bad_dy, sizes)
    for got, want in ((got_y, y), (got_dx, dx)):
        assert not got[rows].isfinite().any()
        got[rows] = want[rows]
        assert_same_bits(got, want)
    for (name, p), want in zip(ours.named_parameters(), gradients, strict=True):
        if name not in (f"weight{bad}", f"bias{bad}"):
            assert_same_bits(p.grad, want, name)
        else:
            assert splits[bad] == 0 or not p.grad.isfinite().any(), name
