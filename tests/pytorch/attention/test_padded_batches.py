# Padding of a batch without a mask tensor. By cumulative lengths: under a causal mask zeros around the attention of
# torch, or of cuDNN with a sink; under the others flash over the sequences as packed ones. By masks: flash over the
# tokens, which an index gathers. On a CPU stand-ins take the places of the kernels.
import contextlib
import sys

import pytest
import torch
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.backends import attention_path
from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention
from transformer_engine.pytorch.attention.memory_order import inputs_without_padding, result_without_padding, zeroed

from .batch_stand_in import batch_kernels_on_the_cpu
from .flash_stand_in import flash_on_the_cpu
from .packed_cases import check_close, gradients

FUNCTION = sys.modules["transformer_engine.pytorch.functional.attention"]


@contextlib.contextmanager
def flash_of_a_gpu(monkeypatch):
    """DotProductAttention on a CPU takes the path of a GPU."""
    choose = dot_product_attention.attention_path

    def path_of_a_gpu(device, *args, **options):
        return choose(torch.device("cuda"), *args, **options)

    monkeypatch.setattr(dot_product_attention, "attention_path", path_of_a_gpu)
    monkeypatch.setattr(FUNCTION, "_OF_GPUS", ())
    with flash_on_the_cpu(), batch_kernels_on_the_cpu():
        yield
    monkeypatch.undo()


def lengths_of(numbers, device):
    return torch.tensor([0, *numbers], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def batch(device, dtype, layout, seqs, lengths, *, fill, heads=(4, 2), width=16):
    made = []
    for seq, numbers, count in zip(
        (seqs[0], seqs[1], seqs[1]), (lengths[0], lengths[1], lengths[1]), (*heads, heads[1])
    ):
        t = torch.randn(len(numbers), seq, count, width)
        for i, n in enumerate(numbers):
            t[i, n:] = fill
        made.append((t if layout == "bshd" else t.transpose(0, 1).contiguous()).to(device, dtype))
    return made


CASES = {
    "padding": ({}, (40, 40)),
    "cross": ({}, (24, 40)),
    "window": ({"window_size": (7, 2)}, (40, 40)),
    "left window": ({"window_size": (7, -1)}, (40, 56)),
    "bottom right": ({"attn_mask_type": "padding_causal_bottom_right"}, (24, 40)),
    "causal, one tensor": ({"attn_mask_type": "padding_causal", "window_size": (5, 0)}, (24, 40)),
    "sink": ({"softmax_type": "off-by-one"}, (40, 40)),
}


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("case", CASES)
def test_flash_computes_sequences_of_a_batch(device, monkeypatch, case, layout):
    """With the values of a mask tensor in float64, whatever the padding holds."""
    torch.use_deterministic_algorithms(False)  # the fixture of all suites restores it
    options, seqs = dict(CASES[case][0]), CASES[case][1]
    options.setdefault("attn_mask_type", "padding")
    module = te.DotProductAttention(4, 16, 2, qkv_format=layout, **options)
    same = case == "causal, one tensor"
    numbers = (min(seqs), 0, 17), (min(seqs), 0, 17) if same else (seqs[1], 5, 30)
    tensors = batch(device, torch.bfloat16, layout, seqs, numbers, fill=1e20)
    of_q = lengths_of(numbers[0], device)
    told = {"cu_seqlens_q": of_q, "cu_seqlens_kv": of_q if same else lengths_of(numbers[1], device)}
    wide = [t.cpu().double() for t in tensors]
    exact = gradients(lambda *t: module(*t, **{name: t.cpu() for name, t in told.items()}), wide)
    with flash_of_a_gpu(monkeypatch) if device == "cpu" else contextlib.nullcontext():
        assert path_of(module, *tensors, **told) == "flash"
        got = gradients(lambda *t: module(*t, **told), tensors)
        again = gradients(lambda *t: module(*t, checkpoint_core_attention=True, **told), tensors)
    check_close(got, [t.to(device) for t in exact], torch.bfloat16, case, factor=2)
    assert_same_bits(again[0], got[0])
    for t, side in zip(got, (0, 0, 1, 1), strict=True):
        for i, n in enumerate(numbers[side]):
            assert not (t[i, n:] if layout == "bshd" else t[n:, i]).any()


def path_of(module, *tensors, **told):
    (row,) = [row for row in te.explain(module, *tensors, **told).rows if row.op == "attention"]
    return row.path


MASKED = {
    "padding": ({}, (40, 40), 1),
    "cross": ({}, (24, 40), 2),
    "causal": ({"attn_mask_type": "padding_causal"}, (40, 40), 1),
    "bottom right": ({"attn_mask_type": "padding_causal_bottom_right"}, (40, 40), 1),
    "sink": ({"softmax_type": "off-by-one"}, (40, 40), 2),
}


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("case", MASKED)
def test_flash_computes_the_tokens_of_masks(device, monkeypatch, case, layout):
    """Masks that hide any rows, all of a sequence and none, whatever these hold; with a mask tensor's values."""
    torch.use_deterministic_algorithms(False)  # the fixture of all suites restores it
    options, seqs, count = MASKED[case]
    module = te.DotProductAttention(4, 16, 2, qkv_format=layout, **{"attn_mask_type": "padding", **options})
    tensors = batch(device, torch.bfloat16, layout, seqs, ([seqs[0]] * 4, [seqs[1]] * 4), fill=0.0)
    masks = [torch.rand(4, 1, 1, seqs[i], device=device) < 0.4 for i in range(count)]
    for i, mask in enumerate(masks):
        mask[i], mask[2] = True, False
    told = {"attention_mask": masks[0] if count == 1 else tuple(masks)}
    hidden = [masks[0][:, 0, 0], masks[-1][:, 0, 0]]
    for t, side in zip(tensors, (0, 1, 1), strict=True):
        (t if layout == "bshd" else t.transpose(0, 1))[hidden[side]] = torch.nan
    with_zeros = [t.nan_to_num(0.0) for t in tensors]
    exact = gradients(lambda *t: module(*t, **told), [t.double() for t in with_zeros])
    with flash_of_a_gpu(monkeypatch) if device == "cpu" else contextlib.nullcontext():
        assert path_of(module, *tensors, **told) == "flash"
        got = gradients(lambda *t: module(*t, **told), tensors)
        again = gradients(lambda *t: module(*t, checkpoint_core_attention=True, **told), tensors)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        traced = gradients(lambda *t: compiled(*t, **told), tensors)
    check_close(got, exact, torch.bfloat16, case, factor=2)
    for other in (again, traced):
        assert_same_bits(other[0], got[0])
        check_close(other, got, torch.bfloat16, case)
    for t, side in zip(got, (0, 0, 1, 1), strict=True):
        assert not (t if layout == "bshd" else t.transpose(0, 1))[hidden[side]].any()


@pytest.mark.parametrize("given", ["lengths", "mask"])
def test_under_torch_func_the_mask_is_a_tensor(device, monkeypatch, given):
    """The kernels of functional.attention have no transforms."""
    module = te.DotProductAttention(4, 16, 2, qkv_format="bshd", attn_mask_type="padding")
    q, k, v = batch(device, torch.bfloat16, "bshd", (9, 9), ((9, 4), (9, 4)), fill=1.0)
    told = {"cu_seqlens_q": lengths_of((9, 4), device), "cu_seqlens_kv": lengths_of((9, 4), device)}
    if given == "mask":
        told = {"attention_mask": (torch.arange(9) >= torch.tensor([[9], [4]]))[:, None, None].to(device)}
    wanted = gradients(lambda t: module(t, k, v, **told), [q])
    with flash_of_a_gpu(monkeypatch) if device == "cpu" else contextlib.nullcontext():
        assert path_of(module, q, k, v, **told) == "flash"
        _, backward = torch.func.vjp(lambda t: module(t, k, v, **told), q)
        generator = torch.Generator().manual_seed(3)  # that of gradients()
        (got,) = backward(torch.randn(wanted[0].shape, generator=generator).to(q))
    check_close([got], wanted[1:], torch.bfloat16, given, factor=2)


@pytest.mark.gpu
def test_masks_make_no_host_wait_and_are_data_of_a_capture():
    torch.use_deterministic_algorithms(False)
    module = te.DotProductAttention(4, 64, 2, qkv_format="bshd", attn_mask_type="padding_causal")
    inputs = [torch.randn(3, 200, n, 64, device="cuda").bfloat16().requires_grad_() for n in (4, 2, 2)]
    mask, dout = torch.zeros(3, 1, 1, 200, dtype=torch.bool, device="cuda"), torch.randn(3, 200, 256, device="cuda")

    def step():
        out = module(*inputs, attention_mask=mask)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout.bfloat16())]

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for share in (0.0, 0.3, 1.0, 0.9):
        mask.copy_(torch.rand_like(mask, dtype=torch.float32) < share)
        graph.replay()
        assert_same_bits(captured[0], step()[0])
        check_close(captured, step(), torch.bfloat16, str(share))


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_a_sink_by_cudnn_sees_no_padding(device, monkeypatch, layout):
    """Zeros around the kernel: of q, k, v, the result and the incoming gradient."""
    torch.use_deterministic_algorithms(False)
    options = {"attn_mask_type": "padding_causal", "softmax_type": "learnable", "device": device}
    module = te.DotProductAttention(4, 16, 2, qkv_format=layout, **options)
    torch.nn.init.normal_(module.softmax_offset)
    numbers = (40, 0, 17)
    lengths = lengths_of(numbers, device)
    told = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    tensors = batch(device, torch.bfloat16, layout, (40, 40), (numbers, numbers), fill=torch.nan)

    def run(tensors):
        module.zero_grad()
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        out = module(*leaves, **told)
        torch.manual_seed(4)
        out.backward(torch.randn(out.shape).bfloat16().to(out))  # of padding too
        return [out.detach(), *(t.grad for t in leaves)], [module.softmax_offset.grad.clone()]

    exact, sink = run([t.nan_to_num(0.0).double() for t in tensors])
    with flash_of_a_gpu(monkeypatch) if device == "cpu" else contextlib.nullcontext():
        assert path_of(module, *tensors, **told) == "cudnn"
        got, got_sink = run(tensors)
    check_close(got, exact, torch.bfloat16, factor=2)
    check_close(got_sink, sink, torch.float32, "sink", torch.bfloat16, factor=2)
    for t in got:
        for i, n in enumerate(numbers):
            assert not (t[i, n:] if layout == "bshd" else t[n:, i]).any()


GPU = {"device": "cuda", "dtype": torch.bfloat16, "mask": "padding", "lengths": 3, "seq_q": 9, "seq_kv": 9}


@pytest.mark.parametrize(
    "options, kernel",
    [
        ({}, "flash"),
        ({"mask": "padding_causal_bottom_right"}, "flash"),
        ({"mask": "padding_causal"}, ""),  # two tensors of lengths: its diagonal begins top left
        ({"mask": "padding_causal", "same_lengths": True}, ""),  # zeros around cuDNN
        ({"mask": "padding_causal", "same_lengths": True, "seq_kv": 12}, "flash"),
        ({"window": (4, 2)}, "flash"),
        ({"window": (4, 2), "bottom_right": False}, ""),
        ({"deterministic": True}, "flash"),
        ({"repeat_bits": True}, "flash_deterministic"),
        ({"sink": True}, "flash"),
        ({"softcap": True}, "chunked"),
        ({"lengths": 0}, ""),
        ({"lengths": 21846}, ""),
        ({"seq_q": 0}, ""),
        ({"dropout": 0.1}, ""),
        ({"bias": "alibi"}, ""),
        ({"widest_head": 264}, ""),
        ({"dtype": torch.float32}, ""),
        ({"device": "cpu"}, ""),
        ({"away": ("NVTE_FLASH_ATTN",)}, ""),
        ({"flash_impl": "FA4"}, "flash"),
        ({"flash_impl": "FA4", "window": (4, 2)}, ""),
        ({"masks": 1}, "flash"),
        ({"masks": 2}, "flash"),
        ({"masks": 2, "seq_kv": 12, "sink": True}, "flash"),
        ({"masks": 1, "window": (4, 2)}, ""),  # it counts the hidden keys
        ({"masks": 1, "mask": "padding_causal"}, "flash"),
        ({"masks": 1, "mask": "padding_causal_bottom_right"}, "flash"),
        ({"masks": 1, "mask": "padding_causal", "window": (4, 0)}, ""),
        ({"masks": 2, "mask": "padding_causal"}, ""),
        ({"masks": 2, "mask": "padding_causal_bottom_right"}, ""),
        ({"masks": 2, "mask": "padding_causal", "sink": True}, "chunked"),
        ({"masks": 1, "dropout": 0.1}, ""),
    ],
    ids=str,
)
def test_which_padding_flash_takes(options, kernel):
    options = {"deterministic": False, "widest_head": 64, **GPU, **options}
    path = attention_path(torch.device(options.pop("device")), options.pop("dtype"), **options)
    assert path.kernel == kernel and path.as_packed == (kernel.startswith("flash"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_zeros_in_padding(device, dtype, layout):
    """The engine's zeros are those of a pass over the tensor, forward and backward; views in another order have it."""
    seqs, numbers = (9, 9), ((9, 0, 4), (9, 0, 4))
    cumulative, batch_first = lengths_of(numbers[0], device), layout == "bshd"
    tensors = batch(device, dtype, layout, seqs, numbers, fill=torch.nan)
    present = torch.arange(9, device=device) < torch.tensor(numbers[0], device=device)[:, None]
    padding = ~(present if batch_first else present.t())[:, :, None, None]
    for views in (tensors, [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors]):
        leaves = [t.requires_grad_() for t in views]
        made = inputs_without_padding(tuple(leaves), cumulative, batch_first)
        for ours, leaf in zip(made, leaves, strict=True):
            assert_same_bits(ours.detach(), zeroed(leaf.detach(), padding))
            assert ours.is_contiguous() or views is not tensors
        (grad,) = torch.autograd.grad(made[0].sum(), leaves[0])
        wanted = torch.ones_like(grad) if views is tensors else torch.ones_like(grad).masked_fill(padding, 0.0)
        assert_same_bits(grad, wanted)  # those of attention are zeros there already
        out = result_without_padding(leaves[0], cumulative, batch_first)
        assert_same_bits(out.detach(), zeroed(leaves[0].detach(), padding))
        dout = torch.randn_like(out)
        (grad,) = torch.autograd.grad(out, leaves[0], dout, retain_graph=True)
        assert_same_bits(grad, dout.masked_fill(padding, 0.0))
        (again,) = torch.autograd.grad(out, leaves[0], dout, create_graph=True)
        assert_same_bits(again.detach(), grad)


def test_zeros_of_no_rows_and_under_torch_func(device):
    none = [torch.zeros(2, 0, 4, 8, device=device)] * 3
    assert all(t.shape == none[0].shape for t in inputs_without_padding(tuple(none), lengths_of((0, 0), device), True))
    x, cumulative = torch.randn(3, 2, 5, 4, 8, device=device), lengths_of((3, 5), device)
    made = torch.func.vmap(lambda t: result_without_padding(t, cumulative, True))(x)
    assert not made[:, 0, 3:].any() and made[:, 1].all()


def test_opcheck(device):
    tensors = [torch.randn(2, 5, n, 8, device=device) for n in (4, 2, 2)]
    op = torch.ops.te.attention_without_padding.default
    torch.library.opcheck(op, (tensors, lengths_of((3, 5), device), True))
