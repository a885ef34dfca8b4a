# NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN=0 remove backends from attention that is made then; if no
# backend is left, the error names the variables.
import itertools

import pytest
import torch
from support import UNIT_ROUNDOFF, assert_same_bits, assert_within, randn, refused, wide
from torch.nn.attention import SDPBackend

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.backends import attention_path, taken_away

FLASH, CUDNN, PLAIN = VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
SETS = [away for n in range(4) for away in itertools.combinations(VARIABLES, n)]
HEADS, GROUPS, HEAD = 4, 2, 8


@pytest.fixture
def without(monkeypatch):
    def switch(*names):
        for name in VARIABLES:
            monkeypatch.setenv(name, "0" if name in names else "1")

    return switch


def heads(device, dtype=torch.float32, *, seq=6):
    return [randn(seq, 2, n, HEAD, dtype=dtype, device=device, requires_grad=True) for n in (HEADS, GROUPS, GROUPS)]


def backend(module, tensors, **options):
    return next(
        (row.path, row.why_not_faster) for row in te.explain(module, *tensors, **options).rows if row.op == "attention"
    )


@pytest.mark.parametrize("away", SETS, ids="+".join)
def test_what_is_left_on_the_cpu(without, away):
    """Its fused attention is flash and fused: it goes with both."""
    tensors = heads("cpu")
    fused = not {FLASH, CUDNN} <= set(away)
    without(*away)
    module = te.DotProductAttention(HEADS, HEAD, GROUPS)
    without()
    reference = te.DotProductAttention(HEADS, HEAD, GROUPS)(*tensors)
    if not fused and PLAIN in away:
        with refused(RuntimeError, "DotProductAttention: no backend is left", *(f"{name}=0" for name in away)):
            module(*tensors)
        return
    path, why = backend(module, tensors)
    assert path == ("torch's fused CPU attention" if fused else "torch's plain attention")
    assert fused or ("NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0" in why)
    out = module(*tensors)
    if fused:
        assert_same_bits(out, reference)
    bound = 64 * UNIT_ROUNDOFF[torch.float32] * max(t.abs().max().item() for t in tensors)
    assert_within(out, wide(reference), bound)  # sums of 6 products, in another order
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in tensors)


def test_what_the_fused_one_of_the_cpu_does_not_take(without):
    without(PLAIN)
    dropping = te.DotProductAttention(HEADS, HEAD, GROUPS, attention_dropout=0.5)
    with refused(RuntimeError, "no backend is left", "NVTE_UNFUSED_ATTN=0 disables the plain one", "dropout"):
        dropping(*heads("cpu"))
    assert backend(dropping.eval(), heads("cpu"))[0] == "torch's fused CPU attention"
    bias = randn(1, HEADS, 6, 6, requires_grad=True)
    biased = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    with refused(RuntimeError, "no backend is left", "NVTE_UNFUSED_ATTN=0", "gradient"):
        dropping(*heads("cpu"), **biased)
    other_heads = te.DotProductAttention(HEADS, (HEAD, 4), GROUPS)
    q, k, v = heads("cpu")
    with refused(RuntimeError, "no backend is left", "NVTE_UNFUSED_ATTN=0", "set it to 1"):
        other_heads(q, k, v[..., :4])


_F, _C, _E, _M = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


@pytest.mark.parametrize(
    ("away", "options", "backends"),
    [
        ((FLASH,), {}, (_C, _E, _M)),
        ((CUDNN,), {}, (_F, _E, _M)),
        ((PLAIN,), {}, (_C, _F, _E)),
        ((FLASH, PLAIN), {}, (_C, _E)),
        ((CUDNN, PLAIN), {}, (_F, _E)),
        ((FLASH, CUDNN), {}, (_M,)),
        ((FLASH, CUDNN, PLAIN), {}, None),
        ((FLASH,), {"deterministic": True}, (_M,)),
        ((FLASH, PLAIN), {"deterministic": True}, None),
        ((CUDNN,), {"mask": "padding"}, (_E, _M)),
        ((FLASH, CUDNN), {"mask": "padding"}, (_M,)),
        ((PLAIN,), {"mask": "padding", "deterministic": True}, None),
        ((FLASH,), {"window": (4, 0)}, (_C, _E, _M)),  # by a mask tensor
        ((CUDNN, PLAIN), {"window": (4, 0)}, (_F,)),
    ],
)
def test_what_is_left_on_a_gpu(away, options, backends):
    ask = {"mask": "causal", "deterministic": False, **options, "away": away}
    if backends is None:
        with refused(RuntimeError, *(f"{name}=0" for name in away)):
            attention_path(torch.device("cuda"), torch.bfloat16, **ask)
        return
    path = attention_path(torch.device("cuda"), torch.bfloat16, **ask)
    assert path.backends == backends and path.flash_window == (backends == (_F,) and "window" in options)
    assert path.mask_tensor == (options.get("mask") == "padding" or (FLASH in away and "window" in options))
    assert path.repeat_groups == (path.mask_tensor and CUDNN in away)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("away", "name"),
    [((), "cuDNN"), ((CUDNN,), "flash"), ((FLASH, PLAIN), "cuDNN"), ((FLASH, CUDNN), "torch's plain attention")],
)
def test_what_runs_on_a_gpu(without, away, name):
    torch.use_deterministic_algorithms(False)  # the fixture that set it restores it
    without(*away)
    tensors = [randn(64, 2, n, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for n in (4, 2, 2)]
    assert backend(te.DotProductAttention(4, 64, 2), tensors)[0] == name


def test_compiled(without, device):
    without(FLASH, CUDNN)
    module, tensors = te.DotProductAttention(HEADS, HEAD, GROUPS), heads(device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(*tensors), module(*tensors))


def test_what_the_variables_may_be(monkeypatch):
    monkeypatch.setenv(FLASH, "false")
    with refused(ValueError, "DotProductAttention", "NVTE_FLASH_ATTN is 'false'", "wanted 0", "or 1"):
        te.DotProductAttention(HEADS, HEAD)
    monkeypatch.delenv(FLASH)
    assert taken_away() == frozenset()


def test_chunked_is_the_plain_backend(without):
    """NVTE_UNFUSED_ATTN=0 disables it, the others do not."""
    tensors = heads("cpu")
    without(PLAIN)
    module = te.DotProductAttention(HEADS, HEAD, GROUPS, softmax_type="off-by-one")
    with refused(RuntimeError, "DotProductAttention: no backend is left", f"{PLAIN}=0", "sink", "set it to 1"):
        module(*tensors)
    without(CUDNN, PLAIN)
    module = te.DotProductAttention(HEADS, HEAD, GROUPS, softmax_type="off-by-one")
    with refused(RuntimeError, f"no backend is left for this call: {PLAIN}=0 disables the plain one; set it to 1"):
        module(*tensors)  # the other variable would not help
    without(FLASH, CUDNN)
    module = te.DotProductAttention(HEADS, HEAD, GROUPS, softmax_type="off-by-one")
    assert backend(module, tensors)[0] == "chunked"
