# A batch with a sink by the kernels cudnn and efficient of te::attention, against chunked in float64; when
# DotProductAttention takes them. On a CPU stand-ins take the place of PyTorch's kernels.
import contextlib

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.backends import attention_path

from .batch_stand_in import batch_kernels_on_the_cpu
from .packed_cases import batch_inputs, check_close, gradients

SINK = torch.tensor([0.5, -2.0, 3.0, -torch.inf])
CASES = [("cudnn", torch.float16), ("cudnn", torch.bfloat16)]
CASES += [("efficient", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
both = pytest.mark.parametrize("kernel, dtype", CASES, ids=str)


@pytest.fixture(autouse=True)
def kernels(request):
    torch.use_deterministic_algorithms(False)  # the fixture of all suites restores it
    given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    with batch_kernels_on_the_cpu() if given.get("device") == "cpu" else contextlib.nullcontext():
        yield


def attention(
    q, k, v, sink=None, *, kernel, layout="bshd", window=(-1, 0), bottom_right=False, cap=0.0, rows=None, scale=None
):
    """(out, lse) by the op itself, which unlike the function runs them on a CPU."""
    pattern, scores = [*window, int(bottom_right), -1, -1], [q.shape[-1] ** -0.5 if scale is None else scale, 1.0, cap]
    rows = [None] * 7 if rows is None else rows
    out, lse, _ = torch.ops.te.attention(q, k, v, None, None, sink, rows, layout, kernel, pattern, scores)
    return out, lse


def check(device, kernel, dtype, *, sink=SINK, layout="bshd", window=(-1, 0), **shape):
    """Within twice chunked's bounds of float64, as these kernels round p and ds too."""
    tensors, options = batch_inputs(device, dtype, layout=layout, **shape), {"layout": layout, "window": window}
    learned = [] if sink is None else [sink.to(device)]
    got = gradients(lambda *t: attention(*t, kernel=kernel, **options)[0], [*tensors, *learned])
    wide = [t.double() for t in tensors]
    exact = gradients(lambda *t: attention(*t, kernel="chunked", **options)[0], [*wide, *learned])
    check_close(got[:4], exact[:4], dtype, f"{kernel} {options}", factor=2)
    if learned:
        check_close(got[4:], exact[4:], torch.float32, "sink", dtype, factor=2)
    lse = attention(*tensors, *learned, kernel=kernel, **options)[1]
    assert lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == tensors[0].shape[:-1]
    reference = attention(*wide, *learned, kernel="chunked", **options)[1]
    torch.testing.assert_close(lse.double(), reference, rtol=1e-4, atol=1e-4)


@both
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_layouts_and_masks(device, kernel, dtype, layout):
    for window in ((-1, -1), (-1, 0)):
        check(device, kernel, dtype, layout=layout, window=window)
        check(device, kernel, dtype, layout=layout, window=window, sink=None)


@both
@pytest.mark.parametrize("seqs", [(2, 2), (2, 70), (63, 130), (65, 33), (64, 64)])
def test_lengths(device, kernel, dtype, seqs):
    check(device, kernel, dtype, seqs=seqs)
    check(device, kernel, dtype, seqs=seqs, window=(-1, -1))


@both
@pytest.mark.parametrize("shape", [{"dims": (128, 128)}, {"dims": (8, 40)}, {"heads": (4, 4)}, {"heads": (4, 1)}])
def test_widths_and_groups(device, kernel, dtype, shape):
    check(device, kernel, dtype, **shape)


@both
def test_no_batch(device, kernel, dtype):
    for layout in ("bshd", "sbhd"):
        check(device, kernel, dtype, batch=0, layout=layout)


@both
def test_views_and_gradients_of_any_strides(device, kernel, dtype):
    wide = torch.randn(2, 9, 4, 3 * 64 + 1, device=device).to(dtype)
    for views in (wide[..., :-1].split(64, -1), wide[..., 1:].split(64, -1)):
        got = gradients(lambda *t: attention(*t, kernel=kernel)[0], views)
        wanted = gradients(lambda *t: attention(*t, kernel=kernel)[0], [t.contiguous() for t in views])
        check_close(got, wanted, dtype, kernel)
        leaves = [t.contiguous().requires_grad_() for t in views]
        attention(*leaves, SINK.to(device), kernel=kernel)[0].sum().backward()  # the gradient has stride 0
        assert all(t.grad.isfinite().all() for t in leaves)


@both
def test_queries_in_another_order(device, kernel, dtype):
    """Torch's own forward gives such a q a result in that order, and keeps cuDNN's plan of it."""
    q, k, v = batch_inputs(device, dtype, heads=(4, 4))
    wanted = gradients(lambda *t: attention(*t, kernel=kernel)[0], (q, k, v))
    for order in ((1, 0, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3)):
        turned = q.permute(order).contiguous().permute(order)
        torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (turned, k, v)), is_causal=True)
        leaves = [t.detach().requires_grad_() for t in (turned, k, v)]
        out = attention(*leaves, kernel=kernel)[0]
        generator = torch.Generator().manual_seed(3)  # that of gradients()
        dout = torch.randn(out.shape, generator=generator).bfloat16().to(out)
        check_close([out.detach(), *torch.autograd.grad(out, leaves, dout)], wanted, dtype, kernel)


@both
def test_a_part_of_the_gradients(device, kernel, dtype):
    tensors, sink = batch_inputs(device, dtype, seqs=(9, 9)), SINK.clone().to(device)
    leaves = [t.requires_grad_() for t in (*tensors, sink)]
    out = attention(*leaves, kernel=kernel)[0]
    every = torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)
    for leaf, wanted in zip(leaves, every, strict=True):
        (alone,) = torch.autograd.grad(out, [leaf], torch.ones_like(out), retain_graph=True)
        check_close([alone], [wanted], alone.dtype, kernel, dtype)


@both
def test_opcheck(device, kernel, dtype):
    q, k, v = batch_inputs(device, dtype, seqs=(5, 5), dims=(16, 16))
    sink, rest = SINK.to(device), ([None] * 7, "bshd", kernel, [-1, 0, 0, -1, -1], [0.25, 1.0, 0.0])
    torch.library.opcheck(torch.ops.te.attention_fwd.default, (q, k, v, None, None, sink, *rest))
    out, lse, _ = torch.ops.te.attention_fwd(q, k, v, None, None, sink, *rest)
    wanted = [True, True, True, False, False, True]
    arguments = (torch.randn_like(out), None, q, k, v, None, None, sink, out, lse, *rest, wanted)
    torch.library.opcheck(torch.ops.te.attention_bwd.default, arguments)


@pytest.mark.parametrize("kernel", ["cudnn", "efficient"])
@pytest.mark.parametrize(
    "change, words",
    [
        ({"window": (5, 0)}, ("'window'", "(5, 0)")),
        ({"window": (-1, 3)}, ("'window'", "(-1, 3)")),
        ({"seqs": (5, 9), "bottom_right": True}, ("'bottom_right'", "True")),
        ({"seqs": (1, 9)}, ("at least 2 queries", "1 and 9")),
        ({"seqs": (9, 1)}, ("at least 2 queries", "9 and 1")),
        ({"dims": (20, 20)}, ("multiples of 8", "20 and 20")),
        ({"dtype": torch.float64}, ("float16", "Double")),
        ({"cap": 2.0}, ("'softcap'",)),
        ({"scale": 0.0}, ("'scale'", "0")),
        ({"present": True}, ("'present_q'",)),
    ],
    ids=str,
)
def test_calls_that_they_do_not_take(device, kernel, change, words):
    change, shape = dict(change), {}
    dtype = change.pop("dtype", torch.bfloat16)
    for name in ("seqs", "dims"):
        if name in change:
            shape[name] = change.pop(name)
    if change.pop("present", False):
        change["rows"] = [None, torch.ones(2, 70, dtype=torch.bool, device=device), *[None] * 5]
    with refused(ValueError, "attention", f"'{kernel}'", *words, "kernel='chunked'"):
        attention(*batch_inputs(device, dtype, **shape), kernel=kernel, **change)


def test_what_cudnn_alone_does_not_take(device):
    for change, words in ({"dims": (136, 64)}, ("at most 128", "136 and 64")), ({}, ("float16", "Float")):
        dtype = torch.bfloat16 if change else torch.float32
        with refused(ValueError, "attention", "'cudnn'", *words, "kernel='chunked'"):
            attention(*batch_inputs(device, dtype, **change), kernel="cudnn")


@both
def test_a_gradient_of_the_log_sum_exp_is_refused(device, kernel, dtype):
    leaves = [t.requires_grad_() for t in batch_inputs(device, dtype, seqs=(5, 5))]
    lse = attention(*leaves, kernel=kernel)[1]
    with refused(NotImplementedError, f"'{kernel}'", "log-sum-exp", "kernel='chunked'"):
        lse.sum().backward()


CAUSAL = {"mask": "causal", "seq_q": 9, "seq_kv": 9}


@pytest.mark.parametrize(
    "options, kernel",
    [
        ({}, "cudnn"),
        ({"mask": "no_mask", "seq_kv": 7}, "cudnn"),
        ({"mask": "causal_bottom_right"}, "cudnn"),
        ({"mask": "padding_causal", "same_lengths": True}, "cudnn"),
        ({"mask": "padding_causal"}, "chunked"),
        ({"mask": "causal_bottom_right", "seq_kv": 12}, "flash"),
        ({"mask": "causal_bottom_right", "seq_q": 1}, "flash"),
        ({"mask": "causal", "seq_q": 1}, "chunked"),
        ({"window": (4, 0)}, "flash"),
        ({"widest_head": 136}, "flash"),
        ({"flash_fits": False}, "flash"),
        ({"deterministic": True}, "flash"),
        ({"repeat_bits": True}, "flash_deterministic"),
        ({"flash_impl": "FA3"}, "flash"),
        ({"softcap": True}, "chunked"),
        ({"max_logit": True}, "chunked"),
        ({"bias": "alibi"}, "chunked"),
        ({"mask": "arbitrary"}, "chunked"),
        ({"packed": True, "mask": "padding_causal", "same_lengths": True}, "flash"),
        ({"away": ("NVTE_FUSED_ATTN",)}, "flash"),
        ({"away": ("NVTE_FLASH_ATTN",)}, "cudnn"),
        ({"away": ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")}, "chunked"),
        ({"dtype": torch.float32}, "efficient"),
        ({"dtype": torch.float32, "away": ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")}, "chunked"),
        ({"dtype": torch.float32, "deterministic": True}, "chunked"),
        ({"dtype": torch.float32, "window": (4, 0)}, "chunked"),
        ({"dtype": torch.float64}, "chunked"),
        ({"device": "cpu"}, "chunked"),
        ({"sink": False}, ""),
    ],
    ids=str,
)
def test_which_calls_take_them(options, kernel):
    options = {"sink": True, "deterministic": False, "widest_head": 64, **CAUSAL, **options}
    device, dtype = torch.device(options.pop("device", "cuda")), options.pop("dtype", torch.bfloat16)
    path = attention_path(device, dtype, **options)
    assert path.kernel == kernel and path.padding_outside == (kernel == "cudnn" and "padding" in options["mask"])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, kernel", [(torch.bfloat16, "cudnn"), (torch.float16, "cudnn"), (torch.float32, "efficient")]
)
@pytest.mark.parametrize("mask", ["causal", "no_mask", "padding_causal"])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_modules_take_them(dtype, kernel, mask, layout):
    """With the values of chunked, for any content of the padding; compiled and recomputed calls are the same."""
    options = {"qkv_format": layout, "attn_mask_type": mask, "softmax_type": "learnable", "device": "cuda"}
    ours, call = te.DotProductAttention(4, 64, 2, **options), {}
    torch.nn.init.normal_(ours.softmax_offset)
    tensors = batch_inputs("cuda", dtype, layout=layout)
    if mask == "padding_causal":
        lengths = torch.tensor([0, 70, 111], dtype=torch.int32, device="cuda")
        call = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
        for t in tensors:
            (t[1] if layout == "bshd" else t[:, 1])[41:] = 6e4
    (row,) = [row for row in te.explain(ours, *tensors, **call).rows if row.op == "attention"]
    assert row.path == kernel
    got = gradients(lambda *t: ours(*t, **call), tensors)
    torch.use_deterministic_algorithms(True)  # leaves flash and chunked
    check_close(got, gradients(lambda *t: ours(*t, **call), tensors), dtype, mask, factor=2)
    torch.use_deterministic_algorithms(False)
    compiled = torch.compile(ours, fullgraph=True)
    for again in (lambda *t: compiled(*t, **call), lambda *t: ours(*t, checkpoint_core_attention=True, **call)):
        out = again(*tensors)
        assert_same_bits(out.detach(), got[0])
        check_close(gradients(again, tensors), got, dtype, mask)
