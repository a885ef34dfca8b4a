# Packed modules on a GPU take flash, and batches with sinks: te.explain names it, NVTE_FLASH_ATTN=0 leaves chunked,
# whose values it has; no wait for the device, captured replays with changing lengths, compiled and recomputed calls,
# lengths that do not fit.
import subprocess
import sys

import pytest
import torch
from plain_modules import angles, randomize
from support import assert_same_bits

import transformer_engine.pytorch as te

from .packed_cases import Packed, check_close, gradients

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic():
    """Flash takes no notice of warn_only; the fixture of all suites restores it."""
    torch.use_deterministic_algorithms(True)


HEADS, GROUPS, HEAD, TOKENS = 8, 2, 64, 640
LENGTHS = [1, 200, 0, 63, 300]


def module(**options):
    options = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "device": "cuda", **options}
    return te.DotProductAttention(HEADS, HEAD, GROUPS, **options)


def tensors(packed, dtype=torch.bfloat16):
    return packed.tensors(HEADS, GROUPS, HEAD, HEAD, dtype, "cuda")


def path(module, inputs, **call):
    (row,) = [row for row in te.explain(module, *inputs, **call).rows if row.op == "attention"]
    return row.path


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("options", [{}, {"window_size": (64, 0)}, {"attn_mask_type": "padding"}], ids=str)
def test_it_has_chunked_s_values(monkeypatch, dtype, kind, options):
    packed = Packed(LENGTHS, tail=70)
    inputs, call = tensors(packed, dtype), packed.arguments("cuda", bounds=True)
    options = {"softmax_type": kind, **options}
    flash = module(**options)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    chunked = module(**options)
    assert path(flash, inputs, **call) == "flash" and path(chunked, inputs, **call) == "chunked"
    got, wanted = (gradients(lambda *t, m=m: m(*t, **call), inputs) for m in (flash, chunked))
    check_close(got, wanted, dtype, kind, factor=2)
    if kind == "learnable":
        for m in (flash, chunked):
            m(*inputs, **call).float().square().sum().backward()
        check_close([flash.softmax_offset.grad], [chunked.softmax_offset.grad], torch.float32, "sink", dtype, factor=2)


def test_what_flash_does_not_take_is_chunked():
    packed, other = Packed(LENGTHS), Packed(LENGTHS, list(LENGTHS))
    call, two = packed.arguments("cuda"), other.arguments("cuda")
    assert path(module(), tensors(packed), **call) == "flash"
    mask = torch.zeros(1, dtype=torch.bool, device="cuda")
    assert path(module(), tensors(packed), attention_mask=mask, **call) == "flash"  # thd reads no mask
    assert path(module(), tensors(packed), **two) == "chunked"  # two tensors may differ, the diagonal begins top left
    assert path(module(attn_mask_type="padding_causal_bottom_right"), tensors(packed), **two) == "flash"
    assert path(module(), tensors(packed, torch.float32), **call) == "chunked"
    assert path(module(), tensors(packed), softcap=3.0, **call) == "chunked"
    assert path(module(return_max_logit=True), tensors(packed), **call) == "chunked"
    assert path(module(), tensors(packed), core_attention_bias_type="alibi", **call) == "chunked"


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize(
    "options",
    [{}, {"window_size": (64, 0)}, {"attn_mask_type": "no_mask"}, {"attn_mask_type": "padding_causal"}],
    ids=str,
)
def test_a_batch_with_a_sink_has_chunked_s_values(monkeypatch, layout, options):
    """Padding by one tensor of lengths; its content has no effect."""
    options = {"attn_mask_type": "causal", "qkv_format": layout, "softmax_type": "learnable", **options}
    flash, call, results = module(**options), {}, []
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    chunked = module(**options)
    shape = (2, 300) if layout == "bshd" else (300, 2)
    inputs = [torch.randn(*shape, n, HEAD, device="cuda").bfloat16() for n in (HEADS, GROUPS, GROUPS)]
    fills = [0.0]
    if options["attn_mask_type"] == "padding_causal":
        lengths = torch.tensor([0, 300, 341], dtype=torch.int32, device="cuda")
        call, fills = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}, [0.0, 3e38]
    for fill in fills:
        for t in inputs:
            (t[1] if layout == "bshd" else t[:, 1])[41:] = fill if call else 0.5
        assert path(flash, inputs, **call) == "flash" and path(chunked, inputs, **call) == "chunked"
        results.append(gradients(lambda *t, m=flash: m(*t, **call), inputs))
    check_close(results[0], gradients(lambda *t: chunked(*t, **call), inputs), torch.bfloat16, str(options), factor=2)
    for got, wanted in zip(results[-1], results[0], strict=True):
        assert_same_bits(got, wanted)
    for m in (flash, chunked):
        m(*inputs, **call).float().square().sum().backward()
    sinks = [flash.softmax_offset.grad], [chunked.softmax_offset.grad]
    check_close(*sinks, torch.float32, "sink", torch.bfloat16, factor=2)


def test_the_host_does_not_wait():
    """With bounds; padding between sequences and after them."""
    attention = module(softmax_type="learnable")
    for packed in (Packed(LENGTHS, tail=9), Packed(LENGTHS, gap=3)):
        inputs, call = [t.requires_grad_() for t in tensors(packed)], packed.arguments("cuda", bounds=True)
        attention(*inputs, **call).sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            attention(*inputs, **call).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("padded", [False, True])
def test_captured_replays_with_changing_lengths(padded):
    """One capture, forward and backward; each replay has the bits of an eager call with its lengths."""
    attention = module(softmax_type="off-by-one")
    inputs = [torch.randn(TOKENS, n, HEAD, device="cuda").bfloat16().requires_grad_() for n in (HEADS, GROUPS, GROUPS)]
    lengths = torch.zeros(6, dtype=torch.int32, device="cuda")
    starts = torch.zeros_like(lengths) if padded else None
    call = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, "max_seqlen_q": 400, "max_seqlen_kv": 400}
    if padded:
        call |= {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}
    cotangent = torch.randn(TOKENS, HEADS * HEAD, device="cuda").bfloat16()

    def step():
        out = attention(*inputs, **call)
        return [out.detach(), *torch.autograd.grad(out, inputs, cotangent)]

    def fill(sizes):
        sums = torch.tensor([0, *sizes]).cumsum(0)
        lengths.copy_(sums)
        if padded:
            starts.copy_(sums + 8 * torch.arange(len(sums)))

    choices = [[1, 200, 0, 63, 300], [0] * 5, [400, 1, 1, 1, 100], [50] * 5, [0, 0, 0, 0, 333]]
    fill(choices[0])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for number in range(1000):
        fill(choices[number % len(choices)])
        graph.replay()
        if number < 2 * len(choices):
            for got, wanted in zip(captured, step(), strict=True):
                assert_same_bits(got, wanted)


WRONG = """
import sys, torch, transformer_engine.pytorch as te
kernel, change = sys.argv[1], eval(sys.argv[2])
numbers = {"cu_seqlens_q": [0, 3, 7], "cu_seqlens_kv": [0, 3, 7]} | change
call = {name: n if isinstance(n, int) else torch.tensor(n, dtype=torch.int32).cuda() for name, n in numbers.items()}
q = torch.zeros(7, 2, 64, dtype=torch.bfloat16 if kernel == "flash" else torch.float32, device="cuda")
bounds = {"max_seqlen_q": 8, "max_seqlen_kv": 8}
te.DotProductAttention(2, 64, qkv_format="thd", attn_mask_type="padding")(q, q, q, **bounds | call)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("kernel", ["flash", "chunked"])
@pytest.mark.parametrize(
    "change, name",
    [
        ({"cu_seqlens_q": [0, 4, 3]}, "'cu_seqlens_q'"),
        ({"cu_seqlens_kv": [0, 4, 8]}, "'cu_seqlens_kv'"),
        ({"cu_seqlens_q_padded": [0, 2, 7]}, "'cu_seqlens_q_padded'"),
        ({"max_seqlen_kv": 3}, "'max_seqlen_kv'"),
        ({}, None),
    ],
    ids=str,
)
def test_lengths_that_do_not_fit_are_a_device_assertion_that_names_them(kernel, change, name):
    """In a process of its own, which loses its context."""
    done = subprocess.run([sys.executable, "-c", WRONG, kernel, repr(change)], capture_output=True, text=True)
    assert (done.returncode == 0) == (name is None), done.stderr[-2000:]
    assert name is None or (name in done.stderr and "device-side assert" in done.stderr), done.stderr[-2000:]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_and_recomputed_calls_are_the_eager_one(checkpointed):
    packed = Packed(LENGTHS, tail=9)
    attention, inputs = module(), tensors(packed)
    call = packed.arguments("cuda", bounds=True)
    eager = gradients(lambda *t: attention(*t, **call), inputs)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for run in (attention, compiled):
        got = gradients(lambda *t, r=run: r(*t, checkpoint_core_attention=checkpointed, **call), inputs)
        for ours, wanted in zip(got, eager, strict=True):
            assert_same_bits(ours, wanted)


def test_a_layer_is_the_loop_over_its_sequences():
    """Values within the roundings of a layer in bfloat16: a norm and four products."""
    options = {"self_attn_mask_type": "padding_causal", "attn_input_format": "thd", "params_dtype": torch.bfloat16}
    options |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cuda"}
    layer = randomize(te.TransformerLayer(HEADS * HEAD, 768, HEADS, GROUPS, **options))
    packed, freqs = Packed(LENGTHS, gap=2), angles(320, HEAD).to("cuda")
    x = torch.randn(packed.rows[0], HEADS * HEAD, device="cuda").bfloat16()
    out = layer(x, rotary_pos_emb=freqs, **packed.arguments("cuda"))
    for rows, n in zip(packed.sequences(0), LENGTHS, strict=True):
        if n:
            alone = layer(x[rows], rotary_pos_emb=freqs, **Packed([n]).arguments("cuda"))
            check_close([out[rows]], [alone], torch.bfloat16, str(n))
