# Masked attention under dropout, recomputation, torch.compile, and on the GPU's own backends.
import pytest
import torch
import torch._dynamo.testing
from module_contract import Tracker
from plain_modules import run
from support import DTYPES, assert_same_bits, randn

import transformer_engine.pytorch as te
from transformer_engine.pytorch.constants import AttnBiasTypes as BIASES
from transformer_engine.pytorch.constants import AttnMaskTypes as MASKS

from .cases import BATCH, HEAD, HEADS, LENGTHS, by_hand, check, cumulative, padding_arguments, qkv


def test_dropout_only_drops_what_is_seen(device):
    p, seq = 0.3, 64
    module = te.DotProductAttention(1, seq, attention_dropout=p, attn_mask_type="arbitrary")
    hidden = torch.rand(1, 1, seq, seq, device=device) < 0.5
    q, v = torch.zeros(seq, 1, 1, seq, device=device), torch.eye(seq, device=device)[:, None, None, :]
    kept = module(q, q, v, hidden)[:, 0]
    seen = ~hidden[0, 0]
    assert kept[~seen].eq(0).all()
    share = (kept[seen] == 0).float().mean().item()
    assert abs(share - p) < 5 * (p * (1 - p) / seen.sum().item()) ** 0.5  # five standard deviations of a binomial
    wanted = (1 / seen.sum(-1, keepdim=True) / (1 - p)).expand_as(kept)
    torch.testing.assert_close(kept[kept != 0], wanted[kept != 0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("mask", ["padding_causal", "causal_bottom_right", "arbitrary"])
def test_recomputation_has_the_same_bits(device, mask, tracked):
    if tracked and device != "cpu":
        pytest.skip("the stand-in tracker holds the CPU's state alone")
    tracker = Tracker()
    options = {"get_rng_state_tracker": lambda: tracker} if tracked else {}
    module = te.DotProductAttention(HEADS, HEAD, attention_dropout=0.3, attn_mask_type=mask, **options)
    tensors = [*qkv(device, seqs=(5, 9)), randn(1, HEADS, 5, 9, device=device)]
    arguments = {"core_attention_bias_type": "post_scale_bias"}
    if mask == "padding_causal":
        arguments |= padding_arguments("lengths", LENGTHS[5, 9], (5, 9), device)
    if mask == "arbitrary":
        arguments["attention_mask"] = torch.rand(1, 1, 5, 9, device=device) < 0.5

    def call(m, q, k, v, bias):
        return m(q, k, v, core_attention_bias=bias, **arguments)

    results = []
    for recompute in (False, True):
        torch.manual_seed(5)
        tracker.__init__()
        arguments["checkpoint_core_attention"] = recompute
        results.append(run(module, *tensors, call=call))
    for name in results[0]:
        assert_same_bits(results[1][name], results[0][name], name)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
def test_compiled_equals_eager(device, mask, bias):
    arguments = {"attn_mask_type": mask, "window_size": (2, 2), "core_attention_bias_type": bias}
    tensors = qkv(device, seqs=(5, 9))
    if bias.endswith("scale_bias"):
        tensors = (*tensors, randn(1, HEADS, 5, 9, device=device))
    if "padding" in mask:
        arguments |= padding_arguments("lengths", LENGTHS[5, 9], (5, 9), device)
    if mask == "arbitrary":
        arguments["attention_mask"] = torch.rand(1, 1, 5, 9, device=device) < 0.5
    module = te.DotProductAttention(HEADS, HEAD)

    def call(m, q, k, v, *rest):
        return m(q, k, v, **arguments, **({"core_attention_bias": rest[0]} if rest else {}))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, wanted = run(module, *tensors, call=compiled), run(module, *tensors, call=call)
    for name in wanted:
        if device == "cpu":  # CUDA's plain attention is decomposed into other products
            assert_same_bits(got[name], wanted[name], name)
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-5, atol=1e-5)


OPEN_LENGTHS = {
    "window": {"window_size": (3, 0)},
    "bottom right": {"attn_mask_type": "causal_bottom_right"},
    "padding": {"attn_mask_type": "padding_causal"},
    "alibi": {"core_attention_bias_type": "alibi"},
}


@pytest.mark.parametrize("kind", OPEN_LENGTHS)
def test_compiled_once_for_any_length(device, kind):
    """Sizes that torch.compile leaves open stay open: after the second length nothing is compiled again."""
    arguments, module = OPEN_LENGTHS[kind], te.DotProductAttention(HEADS, HEAD)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def compiled(q, k, v, lengths):
        return module(q, k, v, cu_seqlens_q=lengths, cu_seqlens_kv=lengths, **arguments)

    counts = []
    for seq in (8, 12, 20, 33):
        tensors, lengths = qkv(device, seqs=(seq, seq)), cumulative([seq, 3, 0], device)
        wanted = module(*tensors, cu_seqlens_q=lengths, cu_seqlens_kv=lengths, **arguments)
        torch.testing.assert_close(compiled(*tensors, lengths), wanted, rtol=1e-5, atol=1e-6)
        counts.append(counter.frame_count)
    assert counts[1:] == counts[1:2] * 3


# ---- the GPU's own ----


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_window_of_flash_compiles_repeats_and_recomputes(dtype, layout):
    """Under deterministic algorithms, with dropout and without."""
    tensors = qkv("cuda", dtype, layout=layout, groups=2, seqs=(65, 130), head=64)
    arguments = {"attn_mask_type": "causal_bottom_right", "window_size": (20, 0)}
    for dropout in (0.0, 0.2):
        module = te.DotProductAttention(HEADS, 64, 2, qkv_format=layout, attention_dropout=dropout)

        def call(m, q, k, v, **extra):
            torch.manual_seed(5)
            return m(q, k, v, **arguments, **extra)

        wanted = run(module, *tensors, call=call)
        others = [run(module, *tensors, call=call)]
        others.append(run(module, *tensors, call=lambda m, *t: call(m, *t, checkpoint_core_attention=True)))
        if not dropout:
            compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
            others.append(run(module, *tensors, call=lambda m, *t: compiled(*t, **arguments)))  # noqa: B023
        for got in others:
            for name in wanted:
                assert_same_bits(got[name], wanted[name], name)


@pytest.mark.gpu
def test_a_window_of_flash_takes_views_and_strange_strides():
    module, arguments = te.DotProductAttention(HEADS, 64, qkv_format="bshd"), {"window_size": (20, 0)}
    packed = randn(BATCH, 70, HEADS, 3 * 64, dtype=torch.bfloat16, device="cuda")
    views = packed.split(64, dim=-1)
    wanted = run(module, *(t.contiguous() for t in views), **arguments)
    turned = [t.transpose(1, 3).contiguous().transpose(1, 3) for t in views]
    for tensors in (views, turned):
        out = module(*tensors, **arguments)
        assert_same_bits(out, wanted["output 0"])
    leaves = [t.detach().requires_grad_() for t in turned]
    module(*leaves, **arguments).sum().backward()  # the gradient that comes in has stride 0
    assert all(t.grad.isfinite().all() for t in leaves)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", ["no_bias", "post_scale_bias", "alibi"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fastest_backends_match_plain(dtype, mask, bias):
    """The other tests run under deterministic algorithms, which leave plain attention; the default is this."""
    torch.use_deterministic_algorithms(False)  # the fixture that set it restores it
    for seqs, head, groups in (((128, 128), 64, 4), ((65, 65), 128, 2), ((33, 80), 64, 1)):
        lengths = ([seqs[0], seqs[0] // 2, 0], [seqs[1], seqs[1] // 3, 5])
        arguments = {"attn_mask_type": mask, "window_size": (20, 9), "core_attention_bias_type": bias}
        tensors = list(qkv("cuda", dtype, groups=groups, seqs=seqs, head=head))
        added = None
        if bias == "post_scale_bias":
            tensors.append(randn(1, HEADS, *seqs, dtype=dtype, device="cuda"))
            added = lambda b: b  # noqa: E731
        elif bias == "alibi":
            arguments["alibi_slopes"] = torch.zeros(HEADS, device="cuda")
        if "padding" in mask:
            arguments |= padding_arguments("two masks", lengths, seqs, "cuda")
        arbitrary = None
        if mask == "arbitrary":
            arbitrary = torch.rand(BATCH, 1, *seqs) < 0.4
            arguments["attention_mask"] = arbitrary.cuda()
        visible = by_hand(mask, seqs, window=(20, 9), lengths=lengths, arbitrary=arbitrary)
        check(te.DotProductAttention(HEADS, head, groups), tensors, arguments, visible, bias=added)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
def test_masks_are_built_without_waiting_for_the_device(mask):
    torch.use_deterministic_algorithms(False)
    tensors = qkv("cuda", torch.bfloat16)
    arguments = {"attn_mask_type": mask, "window_size": (2, 2), "core_attention_bias_type": "alibi"}
    if "padding" in mask:
        arguments |= padding_arguments("lengths", LENGTHS[7, 7], (7, 7), "cuda")
    if mask == "arbitrary":
        arguments["attention_mask"] = torch.rand(1, 1, 7, 7, device="cuda") < 0.5
    module = te.DotProductAttention(HEADS, HEAD)
    module(*tensors, **arguments)  # libraries load
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(*tensors, **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
