# DotProductAttention's arguments: named errors for masks, windows, biases and tensors that do not fit; a call after a
# refused one gives the same bits. The chosen backend and its reason.
import numpy
import pytest
import torch
from module_contract import refusals
from support import assert_same_bits, randn, refused
from torch.nn.attention import SDPBackend

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.backends import attention_path, flash_takes

HIDDEN, HEADS, SEQ, BATCH = 32, 4, 7, 3
HEAD = HIDDEN // HEADS


def qkv(device):
    return tuple(randn(SEQ, BATCH, HEADS, HEAD, device=device) for _ in range(3))


CALL_REFUSED = {
    "inference_params": object(),
    "fp8_output": True,
    "score_mod": lambda score, *_: score,
}


def test_refuses_what_has_not_landed():
    refusals(te.DotProductAttention, (HEADS, HEAD), {"cp_group": object()})


@pytest.mark.parametrize("argument", CALL_REFUSED)
def test_call_refuses_what_has_not_landed(device, argument):
    with refused(NotImplementedError, "DotProductAttention", f"'{argument}'", "not available in this version"):
        te.DotProductAttention(HEADS, HEAD)(*qkv(device), **{argument: CALL_REFUSED[argument]})


@pytest.mark.parametrize(
    "options, words",
    [
        ({"attn_mask_type": "diagonal"}, ("attn_mask_type", "diagonal", "causal")),
        ({"qkv_format": "hsbd"}, ("qkv_format", "hsbd", "sbhd")),
        ({"attention_dropout": 1.0}, ("attention_dropout", "1.0")),
        ({"attention_dropout": -0.1}, ("attention_dropout", "-0.1")),
        ({"num_gqa_groups": 3}, ("num_gqa_groups", "3", str(HEADS))),
        ({"num_gqa_groups": 0}, ("num_gqa_groups", "0", str(HEADS))),
        ({"kv_channels": 0}, ("kv_channels", "0", "at least 1")),
        ({"kv_channels": -8}, ("kv_channels", "-8", "at least 1")),
        ({"num_attention_heads": 0}, ("num_attention_heads", "0", "at least 1")),
        ({"num_attention_heads": 2.0}, ("num_attention_heads", "2.0", "integer")),
        ({"attention_type": "sideways"}, ("attention_type", "sideways", "self")),
        ({"softmax_type": "hard"}, ("softmax_type", "hard", "vanilla")),
        ({"window_size": 4}, ("window_size", "4", "left, right")),
        ({"window_size": (4,)}, ("window_size", "(4,)", "left, right")),
        ({"window_size": (-2, 0)}, ("window_size", "(-2, 0)", "-1 for all")),
        ({"window_size": (2.0, 0)}, ("window_size", "(2.0, 0)", "left, right")),
        ({"window_size": (True, 0)}, ("window_size", "(True, 0)", "left, right")),
    ],
)
def test_bad_arguments(options, words):
    with refused(ValueError, "DotProductAttention", *words):
        te.DotProductAttention(**{"num_attention_heads": HEADS, "kv_channels": HEAD, **options})
    with refused(ValueError, *words):
        te.MultiheadAttention(HIDDEN, **{"num_attention_heads": HEADS, "device": "cpu", **options})


@pytest.mark.parametrize(
    "options, words",
    [
        ({"kv_channels": (8, 4, 2)}, ("kv_channels", "(8, 4, 2)", "a pair")),
        *(({"softmax_scale": scale}, ("softmax_scale", scale, "above 0")) for scale in (-0.5, 0.0, 1e999, -1e999)),
        ({"softmax_scale": float("nan")}, ("softmax_scale", "nan", "finite")),
        ({"softmax_scale": "a"}, ("softmax_scale", "'a'", "finite")),
        ({"softmax_scale": torch.ones(2)}, ("softmax_scale", "tensor([1., 1.])", "finite")),
    ],
)
def test_bad_arguments_of_the_core(options, words):
    """torch's attention of a CPU gives NaN for scales that are not above 0."""
    with refused(ValueError, "DotProductAttention", *words):
        te.DotProductAttention(**{"num_attention_heads": HEADS, "kv_channels": HEAD, **options})


def test_windows_of_numpy(device):
    """An integer of any kind."""
    window, module, tensors = (numpy.int64(2), numpy.int32(0)), te.DotProductAttention(HEADS, HEAD), qkv(device)
    wanted = module(*tensors, window_size=(2, 0))
    assert_same_bits(module(*tensors, window_size=window), wanted)
    assert_same_bits(te.DotProductAttention(HEADS, HEAD, window_size=window)(*tensors), wanted)


@pytest.mark.parametrize("cls, sizes", [(te.DotProductAttention, (HEADS, HEAD)), (te.MultiheadAttention, (32, 4))])
def test_unknown_arguments(cls, sizes):
    with pytest.raises(TypeError, match="attention_sink"):
        cls(*sizes, attention_sink=True)
    module = te.DotProductAttention(HEADS, HEAD)
    with pytest.raises(TypeError, match="attention_sink"):
        module(*qkv("cpu"), attention_sink=True)


def check_refused(device, words, tensors=None, exception=ValueError, **arguments):
    """The call is refused, and the one after it gives the bits of the one before."""
    module, good = te.DotProductAttention(HEADS, HEAD), qkv(device)
    before = module(*good)
    with refused(exception, "DotProductAttention", *words):
        module(*(good if tensors is None else tensors(*good)), **arguments)
    assert_same_bits(module(*good), before)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda q, k, v: (q, k), ("value_layer", "None")),
        (lambda q, k, v: (q[0], k, v), ("query_layer", f"({BATCH}, {HEADS}, {HEAD})", f"{HEADS}, {HEAD}")),
        (lambda q, k, v: (q, k[..., :-1], v), ("key_layer", str(HEAD - 1), str(HEAD))),
        (lambda q, k, v: (q, k[:, :, :2], v), ("key_layer", "2", str(HEADS))),
        (lambda q, k, v: (q, k.bfloat16(), v), ("key_layer", "bfloat16", "float32")),
        (lambda q, k, v: (q, k, v[:-1]), ("value_layer", str(SEQ - 1), str(SEQ))),
        (lambda q, k, v: (q, k[:, :-1], v[:, :-1]), ("key_layer", str(BATCH - 1), str(BATCH))),
        (lambda q, k, v: (q.long(), k.long(), v.long()), ("query_layer", "int64", "float32")),
        (lambda q, k, v: (q, k.to("meta"), v), ("key_layer", "meta", "float32 on c")),
    ],
)
def test_bad_inputs(device, change, words):
    check_refused(device, words, change)


def flags(*shape, device="cpu", dtype=torch.bool):
    return torch.zeros(shape, dtype=dtype, device=device)


PADDING = {
    "none": (None, ("cu_seqlens_q", "None", "attention_mask")),
    "number": (3, ("attention_mask", "3", "torch.bool")),
    "float": (lambda d: flags(BATCH, 1, 1, SEQ, device=d, dtype=torch.float32), ("attention_mask", "float32", "bool")),
    "two dimensions": (lambda d: flags(BATCH, SEQ, device=d), ("attention_mask", f"[{BATCH}, {SEQ}]", "1, 1")),
    "length": (lambda d: flags(BATCH, 1, 1, SEQ + 1, device=d), ("attention_mask", str(SEQ + 1), str(SEQ))),
    "batch": (lambda d: flags(1, 1, 1, SEQ, device=d), ("attention_mask", "[1, 1, 1, 7]", "[3, 1, 1, 7]")),
    "full": (lambda d: flags(BATCH, 1, SEQ, SEQ, device=d), ("attention_mask", "[3, 1, 7, 7]")),
    "device": (lambda d: flags(BATCH, 1, 1, SEQ, device="meta"), ("attention_mask", "meta")),
    "second": (
        lambda d: (flags(BATCH, 1, 1, SEQ, device=d), flags(BATCH, 1, 1, 2, device=d)),
        ("attention_mask[1]", "[3, 1, 1, 2]"),
    ),
    "three": (lambda d: (flags(BATCH, 1, 1, SEQ, device=d),) * 3, ("attention_mask", "3 masks", "one or two")),
}


@pytest.mark.parametrize("case", PADDING)
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_bad_masks(device, mask, case):
    made, words = PADDING[case]
    given = made(device) if callable(made) else made
    check_refused(device, words, attn_mask_type=mask, attention_mask=given)


def test_one_mask_for_two_lengths(device):
    words = ("attention_mask", "[3, 1, 1, 7]", "[3, 1, 1, 2]", "tuple of two")
    mask = flags(BATCH, 1, 1, SEQ, device=device)
    check_refused(device, words, lambda q, k, v: (q, k[:2], v[:2]), attn_mask_type="padding", attention_mask=mask)


@pytest.mark.parametrize("softcap", ["a", -1.0, float("inf"), torch.ones(2)], ids=str)
def test_bad_softcaps(device, softcap):
    check_refused(device, ("'softcap'", repr(softcap), "a finite number above 0"), softcap=softcap)


@pytest.mark.parametrize(
    "lengths, words",
    [
        (lambda d: (None, flags(BATCH + 1, device=d, dtype=torch.int32)), ("cu_seqlens_q", "None")),
        (lambda d: (flags(BATCH + 1, device=d, dtype=torch.int32), None), ("cu_seqlens_kv", "None")),
        (lambda d: (flags(BATCH, device=d, dtype=torch.int32),) * 2, ("cu_seqlens_q", "[3]", "[4]")),
        (lambda d: (flags(BATCH + 1, device=d, dtype=torch.int64),) * 2, ("cu_seqlens_q", "int64", "int32")),
        (lambda d: (flags(BATCH + 1, device="meta", dtype=torch.int32),) * 2, ("cu_seqlens_q", "meta")),
    ],
)
def test_bad_lengths(device, lengths, words):
    q, kv = lengths(device)
    check_refused(device, words, attn_mask_type="padding", cu_seqlens_q=q, cu_seqlens_kv=kv)


@pytest.mark.parametrize(
    "mask, words",
    [
        (lambda d: None, ("None", "torch.bool")),
        (lambda d: flags(SEQ, SEQ, device=d), (f"[{SEQ}, {SEQ}]", "1 or 3, 1 or 4, 1 or 7, 7")),
        (lambda d: flags(2, 1, SEQ, SEQ, device=d), ("[2, 1, 7, 7]", "1 or 3")),
        (lambda d: flags(1, 3, SEQ, SEQ, device=d), ("[1, 3, 7, 7]", "1 or 4")),
        (lambda d: flags(1, 1, SEQ, 1, device=d), ("[1, 1, 7, 1]", "7]")),
        (lambda d: flags(1, 1, SEQ, SEQ, device=d, dtype=torch.float32), ("float32", "bool")),
        (lambda d: (flags(1, 1, SEQ, SEQ, device=d),), ("tensor", "torch.bool")),
    ],
)
def test_bad_arbitrary_masks(device, mask, words):
    check_refused(device, ("attention_mask", *words), attn_mask_type="arbitrary", attention_mask=mask(device))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"core_attention_bias_type": "sideways"}, ("core_attention_bias_type", "sideways", "alibi")),
        ({"core_attention_bias": (1, 1, 7, 7)}, ("core_attention_bias", "'no_bias'", "post_scale_bias")),
        ({"core_attention_bias_type": "alibi", "core_attention_bias": (1, 1, 7, 7)}, ("core_attention_bias", "alibi")),
        ({"core_attention_bias_type": "pre_scale_bias"}, ("core_attention_bias", "None", "pre_scale_bias")),
        ({"core_attention_bias_type": "post_scale_bias", "core_attention_bias": (7, 7)}, ("[7, 7]", "1 or 3")),
        ({"core_attention_bias_type": "post_scale_bias", "core_attention_bias": (1, 2, 7, 7)}, ("[1, 2, 7, 7]",)),
        ({"core_attention_bias_type": "alibi", "alibi_slopes": (3,)}, ("alibi_slopes", "[3]", "[4]")),
        ({"core_attention_bias_type": "alibi", "alibi_slopes": (2, 4)}, ("alibi_slopes", "[2, 4]", "[3, 4]")),
    ],
)
def test_bad_biases(device, arguments, words):
    made = {name: randn(*v, device=device) if isinstance(v, tuple) else v for name, v in arguments.items()}
    check_refused(device, words, **made)


def test_biases_of_another_type_or_device(device):
    post, alibi = ({"core_attention_bias_type": kind} for kind in ("post_scale_bias", "alibi"))
    whole = flags(1, 1, SEQ, SEQ, device=device, dtype=torch.int32)
    check_refused(device, ("core_attention_bias", "int32", "floating"), **post, core_attention_bias=whole)
    check_refused(device, ("core_attention_bias", "meta"), **post, core_attention_bias=whole.float().to("meta"))
    check_refused(device, ("alibi_slopes", "bfloat16", "float32"), **alibi, alibi_slopes=randn(4).bfloat16().to(device))
    check_refused(device, ("alibi_slopes", "0.5"), **alibi, alibi_slopes=0.5)


# ---- which backend ----

CUDNN, FLASH, EFFICIENT, MATH = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
TENSOR = {"mask": "padding"}


PADDED = {"mask": "padding_causal_bottom_right"}


@pytest.mark.parametrize(
    "options, backends, is_causal, mask_tensor, words",
    [
        ({"mask": "causal"}, (CUDNN, FLASH, EFFICIENT, MATH), True, False, ("cuDNN", "fastest")),
        ({"mask": "no_mask"}, (CUDNN, FLASH, EFFICIENT, MATH), False, False, ("cuDNN", "fastest")),
        ({"mask": "causal_bottom_right"}, (CUDNN, FLASH, EFFICIENT, MATH), True, False, ("cuDNN", "fastest")),
        ({"mask": "causal", "dtype": torch.float32}, (CUDNN, FLASH, EFFICIENT, MATH), True, False, ("float32",)),
        ({"mask": "causal", "deterministic": True}, (FLASH, MATH), True, False, ("Deterministic", "flash")),
        ({"mask": "causal_bottom_right", "seq_q": 3, "seq_kv": 5}, (FLASH,), False, False, ("window",)),
        ({"mask": "causal_bottom_right", "seq_q": 5, "seq_kv": 3}, (CUDNN, EFFICIENT, MATH), False, True, ("tensor",)),
        ({"mask": "causal", "window": (4, 0)}, (FLASH,), False, False, ("window",)),
        ({"mask": "no_mask", "window": (4, 2), "deterministic": True}, (FLASH,), False, False, ("window",)),
        ({"mask": "causal", "window": (4, 0), "seq_q": 6, "seq_kv": 9}, (CUDNN, EFFICIENT, MATH), False, True, ()),
        ({"mask": "causal", "window": (4, 0), "flash_fits": False}, (CUDNN, EFFICIENT, MATH), False, True, ("tensor",)),
        ({"mask": "causal", "window": (4, 0), "dtype": torch.float32}, (EFFICIENT, MATH), False, True, ("float32",)),
        ({"mask": "causal", "window": (4, 0), "bias": "alibi"}, (CUDNN, EFFICIENT, MATH), False, True, ("tensor",)),
        ({"mask": "causal", "bias": "alibi"}, (CUDNN, EFFICIENT, MATH), False, True, ("tensor",)),
        (TENSOR, (CUDNN, EFFICIENT, MATH), False, True, ("mask tensor", "cuDNN")),
        ({**TENSOR, "deterministic": True}, (MATH,), False, True, ("Deterministic", "mask tensor")),
        ({**TENSOR, "dtype": torch.float32}, (EFFICIENT, MATH), False, True, ("float32",)),
        ({**TENSOR, "bias": "post_scale_bias", "bias_grad": True}, (EFFICIENT, MATH), False, True, ("gradient",)),
        ({"mask": "causal", "sink": True}, (), False, False, ("sink", "log-sum-exp")),
        ({"mask": "causal", "softcap": True}, (), False, False, ("soft-capped",)),
        ({"mask": "causal", "max_logit": True, "device": "cpu"}, (), False, False, ("largest logit",)),
        ({**PADDED, "same_lengths": True}, (CUDNN, FLASH, EFFICIENT, MATH), True, False, ("cuDNN", "fastest")),
        ({**PADDED, "same_lengths": True, "window": (4, 0)}, (FLASH,), False, False, ("window",)),
        ({**PADDED, "same_lengths": True, "bias": "alibi"}, (CUDNN, EFFICIENT, MATH), False, True, ("tensor",)),
        ({**PADDED, "same_lengths": True, "seq_q": 5, "seq_kv": 9}, (CUDNN, EFFICIENT, MATH), False, True, ("tensor",)),
        (PADDED, (CUDNN, EFFICIENT, MATH), False, True, ("tensor",)),
        ({"mask": "causal", "device": "cpu"}, None, True, False, ("CPU",)),
        ({"mask": "causal", "device": "cpu", "dropout": 0.1}, None, True, False, ("dropout",)),
    ],
)
def test_paths(options, backends, is_causal, mask_tensor, words):
    options = {"device": "cuda", "dtype": torch.bfloat16, "deterministic": False, **options}
    path = attention_path(torch.device(options.pop("device")), options.pop("dtype"), **options)
    assert (path.backends, path.is_causal, path.mask_tensor) == (backends, is_causal, mask_tensor)
    assert path.flash_window == ("window" in words) and bool(path.kernel) == (backends == ())
    assert path.reason.endswith(".") and "\n" not in path.reason
    assert all(word in path.reason for word in words), path.reason


PACKED = {"mask": "padding_causal", "packed": True, "same_lengths": True, "widest_head": 128}


@pytest.mark.parametrize(
    "options, kernel, words",
    [
        ({}, "flash", ("Packed", "thd", "flash")),
        ({"deterministic": True, "sink": True, "window": (4, 0)}, "flash", ("thd",)),
        ({"same_lengths": False}, "chunked", ("bottom right", "cu_seqlens_q", "one tensor")),
        ({"same_lengths": False, "mask": "padding"}, "flash", ("thd",)),
        ({"same_lengths": False, "mask": "padding", "window": (4, 2)}, "flash", ("thd",)),
        ({"same_lengths": False, "mask": "padding", "window": (4, 2), "bottom_right": False}, "chunked", ("top left",)),
        ({"same_lengths": False, "mask": "padding_causal_bottom_right"}, "flash", ("thd",)),
        ({"device": "cpu"}, "chunked", ("GPU",)),
        ({"dtype": torch.float32}, "chunked", ("16-bit", "float32")),
        ({"widest_head": 264}, "chunked", ("256",)),
        ({"bias": "alibi"}, "chunked", ("ALiBi",)),
        ({"softcap": True}, "chunked", ("soft-capped",)),
        ({"max_logit": True}, "chunked", ("largest logit",)),
        ({"away": ("NVTE_FLASH_ATTN",)}, "chunked", ("NVTE_FLASH_ATTN=0",)),
        ({"away": ("NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")}, "flash", ("thd",)),
    ],
)
def test_the_kernel_of_packed_sequences(options, kernel, words):
    options = {"device": "cuda", "dtype": torch.bfloat16, **PACKED, **options}
    path = attention_path(torch.device(options.pop("device")), options.pop("dtype"), **options)
    assert path.kernel == kernel and path.backends == () and all(word in path.reason for word in words), path.reason
    assert path.pattern.bottom_right or kernel == "chunked"


def test_what_helps_packed_sequences_without_a_kernel():
    """Flash where it takes them, else chunked alone."""
    device, both = torch.device("cuda"), {"NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN"}
    with refused(RuntimeError, "NVTE_FLASH_ATTN=0, NVTE_UNFUSED_ATTN=0", "set one of them to 1"):
        attention_path(device, torch.bfloat16, away=both, **PACKED)
    with refused(RuntimeError, "call: NVTE_UNFUSED_ATTN=0 disables the plain one; set it to 1", "float32"):
        attention_path(device, torch.float32, away=both, **PACKED)


def test_torchs_deterministic_mode_is_the_default(device):
    ask = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "mask": "causal"}
    assert attention_path(**ask).backends == (FLASH, MATH), "the tests run under deterministic algorithms"
    torch.use_deterministic_algorithms(False)  # the fixture that set it restores it
    assert attention_path(**ask).backends[0] == CUDNN


@pytest.mark.parametrize(
    "head_dims, takes", [((64, 64), True), ((256, 256), True), ((64, 32), False), ((20, 20), False)]
)
def test_the_heads_that_flash_takes(head_dims, takes):
    assert flash_takes(head_dims) is takes and not flash_takes((264, 264))


@pytest.mark.gpu
def test_the_kernels_are_the_path_s():
    """te.explain's paths for windows, biases and plain masks match the names of the kernels that ran."""
    tensors = [randn(64, 2, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)]
    module = te.DotProductAttention(4, 64)
    torch.use_deterministic_algorithms(False)  # the fixture that set it restores it
    for arguments, backend in (
        ({}, "cuDNN"),
        ({"window_size": (8, 0)}, "flash"),
        ({"core_attention_bias_type": "alibi"}, "cuDNN"),
    ):
        paths = [row.path for row in te.explain(module, *tensors, **arguments).rows if row.op == "attention"]
        assert paths == [backend]
        with torch.profiler.profile() as profile:
            module(*tensors, **arguments)
        names = " ".join(event.key for event in profile.key_averages())
        assert ("flash_fwd" in names) == (backend == "flash") and ("cudnn" in names) == (backend == "cuDNN"), names


@pytest.mark.parametrize("which", ["q", "kv"])
def test_lengths_that_no_batch_has(which):
    """A sequence longer than the tensor, one of less than nothing, a first entry that is not 0; what a batch may have
    goes through. Each side by its own length."""
    layer = te.DotProductAttention(2, 4, attn_mask_type="padding", qkv_format="bshd")
    q, kv = randn(2, 5, 2, 4), randn(2, 3, 2, 4)
    most = {"q": 5, "kv": 3}[which]

    def call(cumulative):
        given = {"cu_seqlens_q": torch.tensor([0, 5, 7]), "cu_seqlens_kv": torch.tensor([0, 3, 4])}
        given[f"cu_seqlens_{which}"] = torch.tensor(cumulative)
        return layer(q, kv, kv, **{name: t.int() for name, t in given.items()})

    for cumulative in ([0, most + 1, most + 2], [0, -1, 2], [0, 2, 1], [1, 2, 3], [-1, 0, 1]):
        with refused(ValueError, "DotProductAttention", f"'cu_seqlens_{which}'", str(cumulative), f"the {most} tokens"):
            call(cumulative)
    for cumulative in ([0, most, 2 * most], [0, 0, 0], [0, 1, most + 1]):
        assert call(cumulative).isfinite().all()
