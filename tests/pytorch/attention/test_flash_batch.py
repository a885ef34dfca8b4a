# A batch by the kernel flash of te::attention: sinks, windows, widths, layouts, against chunked in float64; flash whose
# backward repeats its bits. On a CPU a stand-in takes the place of PyTorch's kernel.
import contextlib
import threading
from functools import partial

import pytest
import torch
from support import assert_same_bits, refused

from .flash_stand_in import REPEATS, flash_on_the_cpu
from .packed_cases import batch_inputs, check_close, gradients

SINK = torch.tensor([0.5, -2.0, 3.0, -torch.inf])


@pytest.fixture(autouse=True)
def kernel(request):
    on_cpu = request.node.callspec.params.get("device") == "cpu"
    torch.use_deterministic_algorithms(
        True
    )  # flash takes no notice of warn_only; the fixture of all suites restores it
    with flash_on_the_cpu() if on_cpu else contextlib.nullcontext():
        yield


def attention(
    q, k, v, sink=None, *, kernel="flash", layout="bshd", window=(-1, -1), bottom_right=True, rows=(None,) * 7
):
    """(out, lse) by the op itself, which unlike the function runs flash on a CPU."""
    pattern, scores = [*window, int(bottom_right), -1, -1], [q.shape[-1] ** -0.5, 1.0, 0.0]
    out, lse, _ = torch.ops.te.attention(q, k, v, None, None, sink, list(rows), layout, kernel, pattern, scores)
    return out, lse


def check(device, dtype=torch.bfloat16, *, sink=SINK, layout="bshd", window=(-1, -1), bottom_right=True, **shape):
    """Within twice chunked's bounds of float64, as flash rounds p and ds too."""
    tensors, options = batch_inputs(device, dtype, layout=layout, **shape), {"layout": layout, "window": window}
    learned = [] if sink is None else [sink.to(device)]
    got = gradients(lambda *t: attention(*t, bottom_right=bottom_right, **options)[0], [*tensors, *learned])
    wide = [t.double() for t in tensors]
    options["kernel"] = "chunked"
    exact = gradients(lambda *t: attention(*t, bottom_right=bottom_right, **options)[0], [*wide, *learned])
    check_close(got[:4], exact[:4], dtype, str(options), factor=2)
    if learned:
        check_close(got[4:], exact[4:], torch.float32, "sink", dtype, factor=2)
    lse = attention(*tensors, *learned, bottom_right=bottom_right, layout=layout, window=window)[1]
    assert lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == tensors[0].shape[:-1]
    reference = attention(*wide, *learned, bottom_right=bottom_right, **options)[1]
    torch.testing.assert_close(lse.double(), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (9, 0), (9, 3), (9, -1), (-1, 5), (200, 0)])
def test_layouts_and_windows(device, dtype, layout, window):
    check(device, dtype, layout=layout, window=window)
    check(device, dtype, layout=layout, window=window, bottom_right=False, sink=None)


@pytest.mark.parametrize("seqs", [(1, 1), (1, 70), (63, 130), (65, 200)])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (30, 0), (30, -1), (150, 140)])
def test_fewer_queries_than_keys(device, seqs, window):
    check(device, seqs=seqs, window=window)


@pytest.mark.parametrize("seqs", [(70, 1), (130, 63)])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (30, 0)])
def test_more_queries_than_keys(device, seqs, window):
    """The first queries see none."""
    check(device, seqs=seqs, window=window)
    check(device, seqs=seqs, window=window, sink=None)


@pytest.mark.parametrize("dims", [(40, 40), (128, 128), (192, 128), (20, 20), (36, 12), (256, 256)])
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_widths_of_heads(device, dims, layout):
    check(device, dims=dims, layout=layout, window=(-1, 0), seqs=(33, 33))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_groups(device, heads):
    check(device, heads=heads, window=(-1, 0))


@pytest.mark.parametrize("shape", [{"batch": 0}, {"seqs": (0, 7)}, {"seqs": (7, 0)}, {"batch": 1, "seqs": (1, 1)}])
def test_nothing(device, shape):
    for layout in ("bshd", "sbhd"):
        check(device, layout=layout, **shape)


def test_views_and_gradients_of_any_strides(device):
    qkv = torch.randn(2, 9, 4, 3 * 64, device=device).bfloat16()
    for layout in ("bshd", "sbhd"):
        views = qkv.split(64, -1)
        wanted = gradients(lambda *t: attention(*t, layout=layout)[0], [t.contiguous() for t in views])  # noqa: B023
        for got, want in zip(gradients(lambda *t: attention(*t, layout=layout)[0], views), wanted):  # noqa: B023
            assert_same_bits(got, want)
        leaves = [t.contiguous().requires_grad_() for t in views]
        attention(*leaves, SINK.to(device), layout=layout)[0].sum().backward()  # the gradient has stride 0
        assert all(t.grad.isfinite().all() for t in leaves)


def test_opcheck(device):
    q, k, v = batch_inputs(device, torch.bfloat16, seqs=(5, 5), dims=(16, 16))
    sink, rest = SINK.to(device), ([None] * 7, "bshd", "flash_deterministic", [-1, 0, 1, -1, -1], [0.25, 1.0, 0.0])
    torch.library.opcheck(torch.ops.te.attention_fwd.default, (q, k, v, None, None, sink, *rest))
    out, lse, _ = torch.ops.te.attention_fwd(q, k, v, None, None, sink, *rest)
    wanted = [True, True, True, False, False, True]
    arguments = (torch.randn_like(out), None, q, k, v, None, None, sink, out, lse, *rest, wanted)
    torch.library.opcheck(torch.ops.te.attention_bwd.default, arguments)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"bottom_right": False, "seqs": (5, 9), "window": (-1, 0)}, ("'bottom_right'", "False")),
        ({"seqs": (9, 5), "window": (3, 2)}, ("beyond the diagonal", "9 queries", "5 keys")),
        ({"seqs": (9, 5), "window": (3, -1)}, ("beyond the diagonal", "9 queries", "5 keys")),
        ({"rows": [None, "present", None]}, ("'present_q'",)),
    ],
)
def test_calls_that_it_does_not_take(device, change, words):
    tensors = batch_inputs(device, torch.bfloat16, seqs=change.pop("seqs", (5, 5)))
    if "rows" in change:
        change = {"rows": [None, torch.ones(2, 5, dtype=torch.bool, device=device), *[None] * 5]}
    with refused(ValueError, "attention", "'flash'", *words, "kernel='chunked'"):
        attention(*tensors, **change)


@pytest.mark.parametrize("on, warns", [(False, False), (True, True), (True, False)])
def test_the_deterministic_one_restores_torchs_flags(device, on, warns):
    tensors, flags = batch_inputs(device, torch.bfloat16), []
    wanted = gradients(lambda *t: attention(*t)[0], tensors)
    torch.use_deterministic_algorithms(on, warn_only=warns)
    torch.utils.deterministic.fill_uninitialized_memory = warns
    try:
        leaves = [t.clone().requires_grad_() for t in tensors]
        leaves[0].register_hook(lambda _: flags.append(torch.are_deterministic_algorithms_enabled()))
        for _ in range(2):
            got = gradients(lambda *t: attention(*t, kernel="flash_deterministic")[0], tensors)
            for ours, want in zip(got, wanted, strict=True):
                assert_same_bits(ours, want)
        attention(*leaves, kernel="flash_deterministic")[0].sum().backward()
        assert flags == [on] and (device != "cpu" or all(REPEATS[-3:]))
        assert torch.are_deterministic_algorithms_enabled() == on
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warns
        assert torch.utils.deterministic.fill_uninitialized_memory == warns
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_threads_take_turns_with_torchs_flag(device):
    """Each backward is under the flag, and after all of them it is off."""
    torch.use_deterministic_algorithms(False)
    tensors, results = batch_inputs(device, torch.bfloat16), []
    call = partial(attention, kernel="flash_deterministic")
    wanted = gradients(lambda *t: call(*t)[0], tensors)
    REPEATS.clear()

    def several():
        results.extend(gradients(lambda *t: call(*t)[0], tensors) for _ in range(4))

    threads = [threading.Thread(target=several) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torch.are_deterministic_algorithms_enabled() and len(results) == 12
    assert device != "cpu" or REPEATS == [True] * 12
    for got in results:
        for ours, want in zip(got, wanted, strict=True):
            assert_same_bits(ours, want)
