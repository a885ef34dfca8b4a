"""The optimizer room's ops: Adam, cuts, threads, places and devices that change no bit, flags; what every op refuses.
SGD, scaling, norms and scales are test_sgd_and_scales.py's, whole optimizers the other files'."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from support import DTYPES, U32, assert_same_bits, assert_within, randn, refused, rounding, wide

from transformer_engine.pytorch import functional
from transformer_engine.pytorch.functional import optimizer as ops

from .cases import adam_oracle

SIZES = (0, 1, 7, 255, 2048, 2049, 20011)
OPTIONS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1, "step": 3}


def lists(device, n, grad=torch.float32, param=torch.float32, moment=torch.float32, seed=0):
    """A gradient, a weight, both moments."""
    torch.manual_seed(seed)
    g, p, m = (randn(n, dtype=dtype, device=device) for dtype in (grad, param, moment))
    v = (randn(n).square() * 0.01 + 1e-3).to(device, moment)
    return [g], [p], [m * 0.1], [v]


def copies(*given):
    return [[t.clone() for t in each] for each in given]


@pytest.mark.parametrize("bias_correction", (True, False))
@pytest.mark.parametrize("decoupled", (True, False))
@pytest.mark.parametrize("moment", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("grad, param", [(a, b) for a in DTYPES for b in DTYPES])
def test_adam_matches_float64(device, grad, param, moment, decoupled, bias_correction):
    options = OPTIONS | {"decoupled": decoupled, "bias_correction": bias_correction}
    clip = torch.tensor([0.5], device=device)  # exact, so that the oracle has it too
    for n in SIZES:
        given = lists(device, n, grad, param, moment)
        want, bounds = adam_oracle(*(wide(each[0]) * (0.5 if i == 0 else 1) for i, each in enumerate(given)), **options)
        functional.optimizer_adam(*given, **options, clip=clip)
        for name, got, value, bound in zip("pmv", given[1:], want, bounds, strict=True):
            assert_within(got[0], value, bound + rounding(value, got[0].dtype), f"{name} of {n}")


@pytest.mark.parametrize("param", (torch.bfloat16, torch.float16, torch.float32))
def test_masters_are_stepped_and_rounded_once(device, param):
    grads, masters, m, v = lists(device, 4099, torch.bfloat16)
    params = [masters[0].to(param).clone()]
    plain = copies(grads, masters, m, v)
    functional.optimizer_adam(grads, params, m, v, masters, **OPTIONS)
    functional.optimizer_adam(*plain, **OPTIONS)
    assert_same_bits(masters[0], plain[1][0])
    assert_same_bits(params[0], masters[0].to(param))


def test_remainders_hold_the_low_half_of_the_master(device):
    grads, masters, m, v = lists(device, 4099)
    params, remainders = [masters[0].bfloat16()], [torch.zeros(4099, dtype=torch.int16, device=device)]
    masters = [params[0].float()]
    other = copies(grads, params, m, v, masters)
    for step in range(1, 6):
        functional.optimizer_adam(grads, params, m, v, remainders, **OPTIONS | {"step": step})
        functional.optimizer_adam(*other, **OPTIONS | {"step": step})
    bits = other[4][0].view(torch.int32)
    assert_same_bits(remainders[0], bits.to(torch.int16))  # the low half
    high = (bits >> 16) + (remainders[0] < 0)
    assert_same_bits(params[0].view(torch.int16), high.to(torch.int16))
    assert bool((remainders[0] < 0).any()) and bool((remainders[0] > 0).any())


def test_fp8_weights_are_written_in_the_pass(device):
    for e5m2, dtype in ((False, torch.float8_e4m3fn), (True, torch.float8_e5m2)):
        grads, masters, m, v = lists(device, 4096)
        data = torch.empty(64, 64, dtype=torch.uint8, device=device)
        shaped = [[t.view(64, 64) for t in each] for each in (grads, [data], m, v, masters)]
        scale, amax, scale_inv = (torch.tensor([x], device=device) for x in (3.0, 0.5, 0.0))
        functional.optimizer_adam(*shaped, **OPTIONS, fp8=([scale], [amax], [scale_inv]), e5m2=e5m2)
        assert_same_bits(data, (masters[0] * 3.0).to(dtype).view(torch.uint8).view(64, 64))
        assert amax.item() == masters[0].abs().max().item() and scale_inv.item() == float(torch.tensor(1.0) / 3)


def test_arguments_on_the_device_change_no_bit(device):
    given = lists(device, 5000)
    other = copies(*given)
    functional.optimizer_adam(*given, **OPTIONS)
    lr = torch.tensor(OPTIONS["lr"], device=device)
    step = torch.tensor([OPTIONS["step"] - 1], dtype=torch.int32, device=device)
    functional.optimizer_count_step(step)
    functional.optimizer_count_step(step, torch.ones(1, device=device))  # a skipped step does not count
    assert step.item() == OPTIONS["step"]
    functional.optimizer_adam(*other, **OPTIONS | {"lr": lr, "step": step})
    for a, b in zip(given, other, strict=True):
        assert_same_bits(a[0], b[0])


@pytest.mark.parametrize("raised", (torch.tensor([1], dtype=torch.int32), torch.tensor(1.0)))
def test_a_flag_skips_the_step(device, raised):
    given = lists(device, 3000, param=torch.bfloat16)
    before = copies(*given)
    for noop in (raised, torch.zeros_like(raised)):
        scale = torch.tensor([0.5], device=device)
        functional.optimizer_adam(*given, **OPTIONS, noop=noop.to(device), inv_scale=scale)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(given, before, strict=True)) == bool(noop)
    assert_same_bits(given[0][0], before[0][0] * 0.5)  # unscaled in place


def test_inf_and_nan_pass(device):
    given = lists(device, 100)
    given[0][0][3], given[0][0][50] = torch.inf, torch.nan
    functional.optimizer_adam(*given, **OPTIONS)
    assert given[2][0][3] == torch.inf and all(t[0][50].isnan() for t in given[1:])
    assert not given[1][0][51:].isnan().any()


@hypothesis.given(cuts=st.lists(st.integers(0, 5000), max_size=6), offset=st.integers(0, 3), threads=st.integers(1, 3))
@hypothesis.settings(derandomize=True, deadline=None, max_examples=40)
def test_cuts_places_and_threads_change_no_bit(cuts, offset, threads):
    for param, moment in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        given = lists("cpu", 5000 + offset, param=param, moment=moment)
        given = [[t[offset:] for t in each] for each in given]
        whole = copies(*given)
        functional.optimizer_adam(*whole, **OPTIONS)
        ends = sorted(cuts)
        pieces = [list(each[0].tensor_split(ends)) for each in given]
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            functional.optimizer_adam(*pieces, **OPTIONS)
        finally:
            torch.set_num_threads(before)
        for a, b in zip(given, whole, strict=True):
            assert_same_bits(a[0].clone(), b[0])


def test_cuts_change_no_bit(device):
    for param in (torch.float32, torch.bfloat16):
        given = lists(device, 20011, param=param)
        whole = copies(*given)
        functional.optimizer_adam(*whole, **OPTIONS)
        for size in (1, 7, 2048, 4096, 19999):
            other = lists(device, 20011, param=param)
            functional.optimizer_adam(*([*each[0].split(max(size, 100))] for each in other), **OPTIONS)
            for a, b in zip(other, whole, strict=True):
                assert_same_bits(a[0], b[0])


def test_ten_thousand_tensors(device):
    sizes = [(i * 37) % 11 for i in range(10_000)]
    given = lists(device, sum(sizes))
    whole = copies(*given)
    functional.optimizer_adam(*whole, **OPTIONS)
    functional.optimizer_adam(*(list(each[0].split(sizes)) for each in given), **OPTIONS)
    for a, b in zip(given, whole, strict=True):
        assert_same_bits(a[0], b[0])


def test_dense_layouts_are_taken_as_they_lie(device):
    given = [[t.view(6, 5, 4, 3).to(memory_format=torch.channels_last)] for (t,) in lists(device, 360)]
    plain = [[t.contiguous()] for (t,) in given]
    functional.optimizer_adam(*given, **OPTIONS)
    functional.optimizer_adam(*plain, **OPTIONS)
    for a, b in zip(given, plain, strict=True):
        assert_same_bits(a[0].contiguous(), b[0])


def test_versions_move(device):
    given = lists(device, 8)
    before = given[1][0]._version
    functional.optimizer_adam(*given, **OPTIONS)
    assert given[1][0]._version > before
    before = given[0][0]._version
    functional.optimizer_adam(*given, **OPTIONS, inv_scale=torch.ones(1, device=device))  # unscales them in place
    assert given[0][0]._version > before
    x, y = torch.ones(4, device=device), torch.zeros(4, device=device)
    functional.optimizer_scale([x], [y], 2.0)
    assert (x._version, y._version) == (0, 1)


# ---- what is refused, with nothing changed ----


def bad_lists(device):
    """(name, words, change) of lists that a step cannot take."""

    def each(index, make):
        return lambda given: given[index].__setitem__(1, make(given[index][1]))

    yield "sparse", ("grad", "Sparse"), each(0, lambda t: t.to_sparse())
    yield "short", ("exp_avg", "shape"), each(2, lambda t: t[:5].clone())
    yield "gaps", ("param", "strides"), each(1, lambda t: torch.stack((t, t), 1)[:, 0])
    yield "integers", ("grad", "dtype"), each(0, lambda t: t.long())
    yield "doubles", ("param", "dtype"), each(1, lambda t: t.double())
    yield "half moments", ("exp_avg_sq", "scale"), each(3, lambda t: t.half())
    yield "missing", ("grads", "None"), each(0, lambda t: None)
    yield "meta", ("exp_avg", "meta"), each(2, lambda t: t.to("meta"))
    yield "same twice", ("overlap", "param"), lambda given: given[1].__setitem__(1, given[1][0])
    yield "states overlap", ("overlap", "exp_avg"), lambda given: given[3].__setitem__(1, given[2][1])
    yield "a view", ("overlap",), lambda given: given[0].__setitem__(1, given[1][0])

    def freed(given):
        given[0][1] = given[0][1].clone()
        given[0][1].untyped_storage().resize_(0)

    yield "freed", ("grad", "freed"), freed
    yield "a list too short", ("exp_avg", "tensors"), lambda given: given[2].pop()


@pytest.mark.parametrize("name", [name for name, *_ in bad_lists("cpu")])
def test_bad_lists_are_refused(device, name):
    _, words, change = next(case for case in bad_lists(device) if case[0] == name)
    given = [a + b for a, b in zip(lists(device, 8), lists(device, 8, seed=1), strict=True)]
    kept, before = [list(each) for each in given], copies(*given)
    change(given)
    with refused(ValueError, *words):
        functional.optimizer_adam(*given, **OPTIONS)
    for old, want in zip(kept, before, strict=True):
        for a, b in zip(old, want, strict=True):
            if a.untyped_storage().nbytes():
                assert_same_bits(a, b)


@pytest.mark.parametrize(
    "option, value, word",
    [("beta1", 1.0, "beta1"), ("beta2", -0.1, "beta2"), ("eps", -1.0, "eps"), ("step", 0, "step")]
    + [("lr", torch.tensor([1.0, 2.0]), "lr"), ("step", torch.tensor([1]), "step_device")]
    + [("noop", torch.zeros(1, dtype=torch.int64), "noop"), ("clip", torch.ones(1).double(), "clip")],
)
def test_bad_options_are_refused(device, option, value, word):
    given = lists(device, 8)
    before = copies(*given)
    value = value.to(device) if isinstance(value, torch.Tensor) else value
    with refused(ValueError, word):
        functional.optimizer_adam(*given, **OPTIONS | {option: value})
    for a, b in zip(given, before, strict=True):
        assert_same_bits(a[0], b[0])


def test_one_bad_dtype_among_many_changes_nothing(device):
    """The first tensors' dtypes are right, and are a launch of their own."""
    good, bad = lists(device, 8), lists(device, 8, param=torch.bfloat16)
    masters = [torch.zeros(8, dtype=torch.int16, device=device)] * 2
    before = copies(*good)
    with refused(ValueError, "bfloat16"):  # only bfloat16 weights have remainders
        functional.optimizer_adam(
            *(a + b for a, b in zip(bad, good, strict=True)), [masters[0], masters[1].clone()], **OPTIONS
        )
    for a, b in zip(good, before, strict=True):
        assert_same_bits(a[0], b[0])


def test_other_lists_are_refused(device):
    x, flag = torch.ones(8, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    with refused(ValueError, "overlap"):
        functional.optimizer_scale([x[:4], x[2:6]], [x[:4], x[2:6]], 2.0)
    with refused(ValueError, "overlap"):
        functional.optimizer_scale([x[:4]], [x[2:6]], 2.0)
    with refused(ValueError, "tensors", "Long"):
        functional.optimizer_l2norm([x, x.long()], noop=flag)
    with refused(ValueError, "strides"):
        functional.optimizer_l2norm([x[::2]], noop=flag)
    with refused(ValueError, "nesterov"):
        functional.optimizer_sgd([x.clone()], [x], lr=0.1, nesterov=True)
    with refused(ValueError, "momentum", "tensors"):
        functional.optimizer_sgd([x.clone()], [x], lr=0.1, momentum=0.9)
    with refused(ValueError, "max_fp8"):
        functional.optimizer_compute_scales([x], [x.clone()], [x.clone()], max_fp8=0.0)
    assert (x == 1).all() and flag.item() == 0


# ---- torch.compile ----


def test_compiled_is_eager(device):
    flag = torch.zeros(1, dtype=torch.int32, device=device)

    def step(g, p, m, v, inv_scale):
        functional.optimizer_scale([g], [g], inv_scale, noop=flag)
        norm, _ = functional.optimizer_l2norm([g], noop=flag)
        functional.optimizer_adam([g], [p], [m], [v], **OPTIONS, noop=flag)
        functional.optimizer_sgd([g], [p], lr=0.1)
        return norm * 2

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    scale = torch.tensor([0.5], device=device)
    eager_args, compiled_args = ([t[0] for t in lists(device, 300)] for _ in range(2))
    assert_same_bits(compiled(*compiled_args, scale), step(*eager_args, scale))
    for a, b in zip(compiled_args, eager_args, strict=True):
        assert_same_bits(a, b)


def test_opcheck(device):
    te = torch.ops.te
    flag, one = torch.zeros(1, dtype=torch.int32, device=device), torch.ones(1, device=device)
    given = lists(device, 40)
    tail = (flag, None, None, one, None, 1e-3, 0.9, 0.99, 1e-8, 0.1, 2, True, True, False)
    torch.library.opcheck(te.optimizer_adam.default, (*given, [], [], [], [], *tail))
    torch.library.opcheck(te.optimizer_sgd.default, (*given[:3], [], flag, 0.1, 0.0, 0.9, 0.0, True, False, False, 1.0))
    torch.library.opcheck(te.optimizer_scale.default, (given[0], given[1], flag, 2.0, None))
    torch.library.opcheck(te.optimizer_l2norm.default, (given[0], flag, one, True))
    torch.library.opcheck(te.optimizer_compute_scales.default, ([one], [one.clone()], [one.clone()], 448.0, False, 0.0))
    torch.library.opcheck(te.optimizer_count_step.default, (torch.ones(1, dtype=torch.int32, device=device), flag))


def test_every_op_has_a_functional_form():
    registered = {
        n.removeprefix("te::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("te::optimizer_")
    }
    assert registered == {name for name in vars(ops) if name.startswith("optimizer_")}


# ---- what a GPU shows ----


@pytest.mark.gpu
def test_cpu_and_gpu_give_the_same_bits():
    for grad, param, moment in (
        (torch.float32,) * 3,
        (torch.bfloat16,) * 3,
        (torch.float16, torch.float16, torch.float32),
    ):
        on_cpu = lists("cpu", 70001, grad, param, moment)
        on_gpu = [[t.cuda() for t in each] for each in on_cpu]
        for given in (on_cpu, on_gpu):
            functional.optimizer_adam(*given, **OPTIONS)
        for a, b in zip(on_gpu, on_cpu, strict=True):
            assert_same_bits(a[0].cpu(), b[0])


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_to_31_elements():
    n = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 12 * n:
        pytest.skip("takes 24 GiB of a GPU")
    g, p, m, v = (torch.full((n,), x, dtype=torch.bfloat16, device="cuda") for x in (0.5, 1.0, 0.0, 0.0))
    ends = [[t[:4096].clone(), t[-4096:].clone()] for t in (g, p, m, v)]
    functional.optimizer_adam([g], [p], [m], [v], **OPTIONS)
    functional.optimizer_adam(*ends, **OPTIONS)
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    for t, (first, last) in zip((g, p, m, v), ends, strict=True):
        assert_same_bits(t[:4096], first)
        assert_same_bits(t[-4096:], last)
        assert_same_bits(t[2**31 - 2048 : 2**31 + 2048], first)
    norm = functional.optimizer_l2norm([g], noop=flag)[0].item()
    assert abs(norm - 0.5 * n**0.5) <= 3 * U32 * norm
    functional.optimizer_scale([g], [g], 2.0, noop=flag)
    assert (g == 1).all() and flag.item() == 0


@pytest.mark.gpu
def test_a_captured_step_reads_arguments_on_the_device():
    given, other = lists("cuda", 5000), lists("cuda", 5000)
    lr, step = torch.tensor(1e-2, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    noop = torch.zeros(1, device="cuda")

    def one(tensors, count, lr):
        functional.optimizer_count_step(count, noop)
        functional.optimizer_adam(*tensors, **OPTIONS | {"lr": lr, "step": count}, noop=noop)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one(given, step, lr)
    count = torch.zeros_like(step)
    for turn in range(4):
        lr.fill_(0.01 * (turn + 1))
        noop.fill_(turn == 2)
        graph.replay()
        one(other, count, lr)
    assert step.item() == count.item() == 3
    for a, b in zip(given, other, strict=True):
        assert_same_bits(a[0], b[0])
