# The suites' own tools: a comparison that cannot fail proves nothing, so each is shown to fail.
import math

import pytest
import support
import torch


def test_uninitialised_memory_is_poisoned(device):
    assert torch.empty(1000, device=device).isnan().all()
    assert torch.empty(1000, device=device, dtype=torch.bfloat16).new_empty(7).isnan().all()


def test_seed_is_the_same_for_every_test():
    assert torch.initial_seed() == 1234


@pytest.mark.parametrize("dtype", support.DTYPES)
def test_rounding_bounds_casts_tightly(dtype):
    values = torch.cat([torch.randn(4096, dtype=torch.float64), torch.tensor([0.0, 1e-7, 3e-8, 1e-40])])
    support.assert_within(values.to(dtype), values, support.rounding(values, dtype))
    with pytest.raises(AssertionError, match="out of bound"):
        support.assert_within(values.to(dtype), values, 0.7 * support.rounding(values, dtype))


def test_nan_and_infinity_are_compared_exactly():
    nan, inf = math.nan, math.inf
    special = torch.tensor([nan, inf, -inf, 1.0])
    support.assert_within(special, special, 0.0)
    for wrong in ([0.0, inf, -inf, 1.0], [nan, -inf, -inf, 1.0], [nan, inf, nan, 1.0], [nan, inf, -inf, nan]):
        with pytest.raises(AssertionError, match="1 of 4 elements"):
            support.assert_within(torch.tensor(wrong), special, 100.0)


def test_a_bound_that_admits_anything_is_refused():
    for bound in (math.inf, math.nan):
        with pytest.raises(AssertionError, match="admits anything"):
            support.assert_within(torch.zeros(2), torch.zeros(2), bound)


def test_worst_element_is_reported():
    got = torch.tensor([[0.0, 1.0], [5.0, 1.0]])
    with pytest.raises(AssertionError, match=r"op: 3 of 4 .* worst at \(1, 0\): got 5, wanted 0 within 0.5"):
        support.assert_within(got, torch.zeros(2, 2), 0.5, "op")


def test_same_bits_distinguishes_zeros():
    support.assert_same_bits(torch.tensor([math.nan, 0.0]), torch.tensor([math.nan, 0.0]))
    with pytest.raises(AssertionError, match="bytes differ"):
        support.assert_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    with pytest.raises(AssertionError, match="dtype"):
        support.assert_same_bits(torch.tensor([0.0]), torch.tensor([0.0], dtype=torch.float16))


def test_layouts_keep_the_values(device):
    t = support.randn(3, 4, 5, device=device)
    seen = dict(support.layouts(t))
    assert len(seen) == 4
    for name, other in seen.items():
        support.assert_same_bits(other, t, name)
        assert other.stride() != t.stride() or other.data_ptr() % 16, name


def test_refused_needs_the_type_and_every_word():
    def fail():
        raise ValueError("op: argument 'x'")

    with support.refused(ValueError, "op", "'x'"):
        fail()
    for exception, words in ((RuntimeError, ()), (ValueError, ("'y'",)), (Exception, ())):
        with pytest.raises((AssertionError, ValueError)):
            with support.refused(exception, *words):
                fail()


def test_thread_errors_reach_the_caller():
    assert support.in_threads(3, lambda i: i * i) == [0, 1, 4]
    with pytest.raises(ZeroDivisionError):
        support.in_threads(2, lambda i: 1 // i)
