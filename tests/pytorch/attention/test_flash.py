# Packed sequences by the kernel flash of te::attention, against float64 and against chunked: values, gradients, the
# log-sum-exp, padding of any content, sinks, windows, widths. On a CPU a stand-in takes the place of PyTorch's kernel.
import contextlib

import pytest
import torch
from support import assert_same_bits, refused

from transformer_engine.pytorch import functional

from .flash_stand_in import flash_on_the_cpu
from .packed_cases import Packed, check_close, gradients, reference

MANY = [0, 1, 63, 64, 65, 0, 129, 3]
OTHER = [5, 0, 64, 1, 130, 0, 2, 200]
MASKS = ("padding", "padding_causal", "padding_causal_bottom_right")
ROWS = ["mask", "present_q", "present_kv", "cu_seqlens_q", "cu_seqlens_kv"]
ROWS += ["cu_seqlens_q_padded", "cu_seqlens_kv_padded"]


@pytest.fixture(autouse=True)
def kernel(request):
    on_cpu = request.node.callspec.params.get("device") == "cpu" if hasattr(request.node, "callspec") else False
    # Flash takes no notice of warn_only. The fixture of all suites restores it.
    torch.use_deterministic_algorithms(True)
    with flash_on_the_cpu() if on_cpu else contextlib.nullcontext():
        yield


def attention(q, k, v, *, kernel="flash", window=(-1, -1), mask="padding", sink=None, **given):
    """(out, lse) by the op itself, which unlike the function runs flash on a CPU."""
    bounds = [given.get(f"max_seqlen_{side}", -1) for side in ("q", "kv")]
    left, right = window
    pattern = [left, 0 if "causal" in mask else right, mask != "padding_causal" or kernel == "flash", *bounds]
    scores = [q.shape[-1] ** -0.5, 1.0, 0.0]
    rows = [given.get(name) for name in ROWS]
    out, lse, _ = torch.ops.te.attention(
        q, k, v, None, None, sink, rows, "thd", kernel, list(map(int, pattern)), scores
    )
    return out, lse


def check(packed, dims, dtype, device, *, heads=4, groups=2, mask="padding", window=(-1, -1), sink=None, fill=0.0):
    """Values and gradients: float64 within twice chunked's bounds, as flash rounds p and ds too."""
    tensors = packed.tensors(heads, groups, *dims, dtype, device, fill)
    options = {"mask": mask, "window": window}
    learned = [] if sink is None else [sink.to(device)]
    given = packed.arguments(device, bounds=True)

    def ours(q, k, v, sink=None):
        return attention(q, k, v, sink=sink, **options, **given)[0].flatten(1)

    def exact(q, k, v, sink=None):
        return reference(q, k, v, packed, sink=sink, scale=dims[0] ** -0.5, **options)[0]

    got = gradients(ours, [*tensors, *learned])
    zeroed = [t.masked_fill(packed.padding(side).view(-1, 1, 1).to(device), 0.0) for t, side in zip(tensors, (0, 1, 1))]
    wanted = gradients(exact, [t.double() for t in (*zeroed, *learned)])
    check_close(got[:4], wanted[:4], dtype, f"{mask} {window} {dims}", factor=2)
    if learned:
        check_close(got[4:], wanted[4:], torch.float32, "sink", dtype, factor=2)
    for t, side in zip(got, (0, 0, 1, 1)):
        assert not t[packed.padding(side).to(device)].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("window", [(-1, -1), (5, 0), (3, 7), (0, 0), (100, 70)])
def test_many_sequences(device, mask, window, dtype):
    for packed in (Packed(MANY), Packed(MANY, gap=2), Packed(MANY, tail=300)):
        check(packed, (40, 40), dtype, device, mask=mask, window=window)


@pytest.mark.parametrize("mask", ["padding", "padding_causal_bottom_right"])
@pytest.mark.parametrize("window", [(-1, -1), (9, 2), (0, 300), (130, 140), (400, 5), (9, -1), (9, 900)])
def test_keys_of_other_lengths(device, mask, window):
    """More queries than keys too, whose first ones see none; windows wider than the bounds of one side."""
    for packed in (Packed(MANY, OTHER), Packed(OTHER, MANY, gap=3), Packed([300, 3], [2, 100], tail=5)):
        check(packed, (64, 64), torch.bfloat16, device, mask=mask, window=window)


@pytest.mark.parametrize("dims", [(n, n) for n in range(40, 264, 24)] + [(192, 128), (64, 128), (20, 20), (36, 12)])
def test_widths_of_heads(device, dims):
    check(Packed([9, 70, 0], tail=3), dims, torch.bfloat16, device, mask="padding_causal")


@pytest.mark.parametrize("heads, groups", [(1, 1), (4, 4), (6, 2), (8, 1)])
def test_groups(device, heads, groups):
    check(Packed([9, 70, 1, 1]), (64, 64), torch.float16, device, heads=heads, groups=groups, mask="padding_causal")
    check(Packed([1] * 5), (64, 64), torch.bfloat16, device, heads=heads, groups=groups)


@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 0], [2000], [600, 520, 3], [7] * 17])
@pytest.mark.parametrize("tail", [0, 1, 700])
def test_numbers_and_lengths(device, lengths, tail):
    """None, one, two and seventeen sequences; after them less and more padding than the longest has tokens."""
    for mask in ("padding", "padding_causal"):
        check(Packed(lengths, tail=tail), (32, 32), torch.bfloat16, device, heads=2, groups=1, mask=mask)
    check(Packed(lengths, [0] * len(lengths), tail=tail), (32, 32), torch.bfloat16, device, heads=2, groups=1)


@pytest.mark.parametrize("packed", [Packed(MANY, OTHER, gap=2), Packed(MANY, tail=200)], ids=["between", "after"])
@pytest.mark.parametrize("mask", ["padding", "padding_causal_bottom_right"])
def test_sinks(device, packed, mask):
    sink = torch.tensor([0.5, -2.0, 3.0, 0.0])
    check(packed, (48, 48), torch.bfloat16, device, mask=mask, sink=sink)
    check(packed, (48, 48), torch.float16, device, mask=mask, window=(7, 0), sink=sink)
    check(packed, (48, 48), torch.bfloat16, device, mask=mask, sink=torch.full((4,), -torch.inf))


@pytest.mark.parametrize("gap, tail", [(0, 0), (4, 0), (0, 300)])
@pytest.mark.parametrize("with_sink", [False, True])
def test_the_log_sum_exp_is_chunked_s(device, gap, tail, with_sink):
    """-inf, or the sink, of queries without keys; 0 of padding."""
    packed = Packed(MANY, OTHER, gap=gap, tail=tail)
    tensors = packed.tensors(4, 2, 32, 32, torch.bfloat16, device)
    sink = torch.tensor([0.5, -2.0, 3.0, 0.0], device=device) if with_sink else None
    options = {"mask": "padding_causal_bottom_right", "sink": sink, **packed.arguments(device)}
    (out, lse), (chunked, exact) = (attention(*tensors, kernel=kernel, **options) for kernel in ("flash", "chunked"))
    assert lse.dtype == torch.float32 and lse.is_contiguous() and out.is_contiguous()
    assert lse.isneginf().any() != with_sink and not lse[packed.padding(0).to(device)].any()
    torch.testing.assert_close(lse, exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out, chunked, rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize("dtype, fill", [(torch.bfloat16, 3e38), (torch.float16, 6e4)])
@pytest.mark.parametrize("gap, tail", [(4, 0), (0, 300), (200, 0)])
def test_padding_holds_anything(device, dtype, fill, gap, tail):
    packed, results = Packed([5, 0, 40], [3, 2, 70], gap=gap, tail=tail), []
    given = packed.arguments(device, bounds=True)
    for value in (0.0, fill, -fill):
        torch.manual_seed(0)
        tensors = packed.tensors(4, 2, 16, 16, dtype, device, value)
        results.append(gradients(lambda *t: attention(*t, **given)[0], tensors))
    for other in results[1:]:
        for got, wanted in zip(other, results[0], strict=True):
            assert_same_bits(got, wanted)


@pytest.mark.parametrize("mask", ["padding", "padding_causal_bottom_right"])
def test_a_sequence_alone_has_the_same_bits(device, mask):
    """And bounds that are given change none."""
    packed = Packed([5, 300, 0, 64, 1], [9, 600, 4, 3, 70], gap=3)
    q, k, v = packed.tensors(4, 2, 32, 32, torch.bfloat16, device)
    together, _ = attention(q, k, v, mask=mask, **packed.arguments(device))
    assert_same_bits(attention(q, k, v, mask=mask, **packed.arguments(device, bounds=True))[0], together)
    for rows, keys, n_q, n_kv in zip(packed.sequences(0), packed.sequences(1), *packed.lengths, strict=True):
        alone, _ = attention(q[rows], k[keys], v[keys], mask=mask, **Packed([n_q], [n_kv]).arguments(device))
        assert_same_bits(together[rows], alone)


def test_deterministic_algorithms_repeat_the_bits(device):
    packed = Packed([700, 1300, 5])
    tensors, given = packed.tensors(8, 2, 64, 64, torch.bfloat16, device), packed.arguments(device, bounds=True)
    first = gradients(lambda *t: attention(*t, mask="padding_causal", **given)[0], tensors)
    for _ in range(3):
        for got, wanted in zip(
            gradients(lambda *t: attention(*t, mask="padding_causal", **given)[0], tensors), first, strict=True
        ):
            assert_same_bits(got, wanted)


def test_views_of_any_alignment(device):
    """Views of a packed projection as they are; others are copied first."""
    packed = Packed([9, 40])
    given, wide = packed.arguments(device), torch.randn(49, 4, 3 * 32 + 2, device=device).bfloat16()
    for offset in (0, 1):
        q, k, v = wide[..., offset : offset + 96].unflatten(-1, (3, 32)).unbind(-2)
        got = gradients(lambda *t: attention(*t, **given)[0], (q, k, v))
        inputs = [t.clone(memory_format=torch.contiguous_format) for t in (q, k, v)]
        assert_same_bits(attention(q, k, v, **given)[0], got[0])
        for ours, wanted in zip(got, gradients(lambda *t: attention(*t, **given)[0], inputs), strict=True):
            assert_same_bits(ours, wanted)
    odd = [torch.randn(49 * 4 * 32 + 1, device=device).bfloat16()[1:].view(49, 4, 32) for _ in range(3)]
    assert_same_bits(attention(*odd, **given)[0], attention(*(t.clone() for t in odd), **given)[0])


@pytest.mark.parametrize("by", ["flash", "chunked"])
def test_the_sinks_gradient_of_any_strides(device, by):
    packed, sink = Packed([9, 40]), torch.tensor([0.5, -2.0, 3.0, 1.0], device=device)
    tensors, given = packed.tensors(4, 2, 32, 32, torch.bfloat16, device), packed.arguments(device)
    out = attention(*tensors, kernel=by, sink=sink.requires_grad_(), **given)[0]
    wide = torch.randn(49, 32, 4, device=device).bfloat16().transpose(1, 2)
    results = []
    for dout in (wide, wide[:, :1].expand_as(out), wide[:1].expand_as(out)):
        for given_out in (dout, dout.contiguous()):
            results += torch.autograd.grad(out, sink, given_out, retain_graph=True)
    for got, wanted in zip(results[::2], results[1::2], strict=True):
        assert_same_bits(got, wanted)


def test_more_sequences_than_its_grid_has(device):
    starts = torch.zeros(65537, dtype=torch.int32, device=device)
    q, call = torch.randn(3, 2, 8, device=device).bfloat16(), {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    with refused(ValueError, "attention", "'flash'", "65535", "65536", "kernel='chunked'"):
        attention(q, q, q, max_seqlen_q=0, max_seqlen_kv=0, **call)


def test_opcheck(device):
    packed = Packed([3, 0, 5], gap=1)
    told = [packed.arguments(device).get(name) for name in ROWS]
    q, k, v = packed.tensors(4, 2, 16, 16, torch.bfloat16, device)
    sink, rest = torch.zeros(4, device=device), (told, "thd", "flash", [-1, 0, 1, -1, -1], [0.25, 1.0, 0.0])
    torch.library.opcheck(torch.ops.te.attention_fwd.default, (q, k, v, None, None, sink, *rest))
    out, lse, most = torch.ops.te.attention_fwd(q, k, v, None, None, sink, *rest)
    assert most.shape == (0,)
    wanted = [True, True, True, False, False, True]
    arguments = (torch.randn_like(out), None, q, k, v, None, None, sink, out, lse, *rest, wanted)
    torch.library.opcheck(torch.ops.te.attention_bwd.default, arguments)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"dtype": torch.float32}, ("float16 and bfloat16", "Float")),
        ({"width": 264}, ("at most 256", "264")),
        ({"scores": [1.0, 1.0, 2.0]}, ("'softcap'",)),
        ({"slopes": torch.ones(2)}, ("'alibi_slopes'",)),
        ({"scores": [-1.0, 1.0, 0.0]}, ("scale above 0", "-1")),
        ({"pattern": [3, 0, 0, -1, -1]}, ("'bottom_right'", "False")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_calls_that_it_does_not_take(device, change, words):
    call = {"dtype": torch.bfloat16, "width": 8, "scores": [1.0, 1.0, 0.0], "slopes": None} | change
    pattern = call.get("pattern", [-1, -1, 1, -1, -1])
    q = torch.randn(5, 2, call["width"], device=device).to(call["dtype"])
    slopes = call["slopes"] if call["slopes"] is None else call["slopes"].to(device)
    rows = [Packed([5]).arguments(device).get(name) for name in ROWS]
    with refused(ValueError, "attention", "'flash'", *words, "kernel='chunked'"):
        torch.ops.te.attention(q, q, q, None, slopes, None, rows, "thd", "flash", pattern, call["scores"])


def test_a_cpu_is_refused_by_name():
    q = torch.randn(5, 2, 8).bfloat16()
    with refused(ValueError, "attention", "'flash'", "GPU", "cpu", "kernel='chunked'"):
        functional.attention(q, q, q, layout="thd", scale=1.0, kernel="flash", **Packed([5]).arguments("cpu"))


def test_a_gradient_of_the_log_sum_exp_is_refused(device):
    q = torch.randn(5, 2, 8, device=device).bfloat16().requires_grad_()
    out, lse = attention(q, q, q, **Packed([5]).arguments(device))
    with refused(NotImplementedError, "attention", "'flash'", "log-sum-exp", "kernel='chunked'"):
        (out.sum() + lse.sum()).backward()
