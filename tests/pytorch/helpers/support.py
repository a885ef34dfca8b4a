# Helpers of all PyTorch suites: inputs of every layout, bounds built from unit roundoffs, comparisons that report the
# worst element, and checks that an error names its cause. No op's formula is here: oracles are in the op's test.
import contextlib
import threading

import pytest
import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Unit roundoff: the relative error of one rounding to nearest. SUBNORMAL: the absolute one near 0.
UNIT_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SUBNORMAL = {torch.float64: 2.0**-1075, torch.float32: 2.0**-150, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}
U32 = UNIT_ROUNDOFF[torch.float32]


def wide(t):
    """t's values as float64 on the CPU, outside autograd: what oracles compute with."""
    return t.detach().to("cpu", torch.float64)


def randn(*shape, dtype=torch.float32, device="cpu", scale=1.0, requires_grad=False):
    """Normal values drawn on the CPU in float32, so that both devices get the same ones."""
    return (torch.randn(*shape) * scale).to(dtype).to(device).requires_grad_(requires_grad)


def layouts(t):
    """(name, tensor) pairs: t's values (2-D or more) in memory layouts that are not a fresh contiguous tensor's."""

    def empty(*shape):
        return torch.empty(*shape, dtype=t.dtype, device=t.device)

    lead, last = t.shape[:-1], t.shape[-1]
    pitch = empty(*lead, last + 3)[..., :last]
    odd = empty(t.numel() + 1)[1:].view(t.shape)  # contiguous, from an address no vector load can take
    every_other = empty(*lead, 2 * last)[..., ::2]
    transposed = empty(*t.shape[:-2], last, t.shape[-2]).mT
    for name, target in (("pitch", pitch), ("odd", odd), ("every_other", every_other), ("transposed", transposed)):
        yield name, target.copy_(t.detach())


def negated_view(t):
    """t's values in a view that PyTorch negates on reading; t is float32 or float64."""
    view = torch.complex(torch.zeros_like(t), -t).conj().imag
    assert view.is_neg() and torch.equal(view, t)
    return view


# ---- bounds: float64 tensors of the oracle's shape; add them up ----


def rounding(magnitude, dtype):
    """One rounding to dtype of a value of that magnitude."""
    return UNIT_ROUNDOFF[dtype] * magnitude.abs() + SUBNORMAL[dtype]


def sum_error(magnitude, terms):
    """A float32 sum of `terms` products, in any order, with or without FMA: terms * u on the sum of the magnitudes."""
    return terms * U32 * magnitude.abs() * (1 + 2 * U32 * terms)


def fp8_sum_error(magnitude, depth, device, fast):
    """A sum of `depth` products of FP8 values: in float32 on the CPU, each of two factors that are rounded once.

    A Hopper tensor core adds 32 products and its accumulator after aligning them to the largest, keeping 13 bits beyond
    its first (DeepSeek-V3's report, section 3.5.2): 33 times 2^-13 of the magnitudes at most. Split accumulation starts
    again in float32 every 128 products, 4 such steps; fast accumulation goes on, one step per 32."""
    in_float32 = sum_error(magnitude, 2 * depth + 4)
    if device == "cpu":
        return in_float32
    steps = max(4, -(-depth // 32)) if fast else 4
    return in_float32 + magnitude * (33 * steps * 2.0**-13)


def assert_within(actual, reference, bound, what=""):
    """|actual - reference| <= bound for every element. NaN must be NaN, Inf the same Inf. Reports the worst element."""
    assert actual.shape == reference.shape, f"{what}: shape {tuple(actual.shape)}, wanted {tuple(reference.shape)}"
    got, want = wide(actual), wide(reference)
    limit = torch.as_tensor(bound, dtype=torch.float64, device=want.device).expand(want.shape)
    exact = ~want.isfinite()
    assert limit[~exact].isfinite().all(), f"{what}: a bound that is Inf or NaN admits anything"
    as_it_should = torch.where(exact, (got == want) | (got.isnan() & want.isnan()), (got - want).abs() <= limit)
    if as_it_should.all():
        return
    error = torch.where(as_it_should, -1.0, (got - want).abs().nan_to_num(torch.inf, torch.inf) / limit)
    error = error.nan_to_num(torch.inf, torch.inf)
    at = int(error.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), want.shape))
    worst = (t.flatten()[at].item() for t in (got, want, limit))
    raise AssertionError(
        f"{what}: {int((~as_it_should).sum())} of {want.numel()} elements out of bound; worst at {index}: "
        "got {:.9g}, wanted {:.9g} within {:.3g}".format(*worst)
    )


def assert_same_bits(actual, expected, what=""):
    """Equal shape, dtype and bits (0 and -0 differ, NaN equals the same NaN)."""
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, wanted {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, wanted {tuple(expected.shape)}"
    a, b = (t.detach().contiguous().view(torch.uint8) if t.numel() else t for t in (actual, expected.to(actual.device)))
    differing = int((a != b).sum())
    assert differing == 0, f"{what}: {differing} of {a.numel()} bytes differ"


# ---- behaviour ----


@contextlib.contextmanager
def saved_tensors():
    """Yields the list of tensors that the graphs built inside keep for backward, as saved-tensor hooks see them."""
    kept = []

    def pack(t):
        kept.append(t.detach())  # an output itself would hold the node that holds it, for good
        return kept[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield kept


def addresses(tensors):
    return sorted(t.data_ptr() for t in tensors)


@contextlib.contextmanager
def refused(exception, *words):
    """The block raises exactly `exception`, and its message carries every word: op, argument, got, wanted."""
    with pytest.raises(exception) as caught:
        yield
    assert caught.type is exception, f"raised {caught.type.__name__}, wanted {exception.__name__}: {caught.value}"
    for word in words:
        assert str(word) in str(caught.value), f"the message lacks {word!r}: {caught.value}"


def in_threads(count, call):
    """call(i) in `count` threads that start together; the results in order, or the first exception."""
    start, results, errors = threading.Barrier(count), [None] * count, []

    def body(i):
        try:
            start.wait()
            results[i] = call(i)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def call_op(op, **given):
    """The result of an op's overload; arguments that are not given are False, empty or None. So an option that an op
    gets later breaks no caller."""
    empty = {"bool": False, "str": "", "Optional[Tensor]": None, "List[int]": []}
    return op(*(given[a.name] if a.name in given else empty[str(a.type)] for a in op._schema.arguments))
