# NVTE_ALLOW_NONDETERMINISTIC_ALGO=0: attention that is made then repeats its bits without torch's deterministic
# algorithms, by the backends that these leave.
import pytest
import torch
from support import assert_same_bits, refused
from torch.nn.attention import SDPBackend

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.backends import attention_path, repeats_bits

from .cases import padding_arguments
from .packed_cases import Packed, gradients

VARIABLE = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
CAUSAL, PADDED = {"mask": "causal"}, {"mask": "padding_causal"}


@pytest.fixture
def without_torchs():
    torch.use_deterministic_algorithms(False)  # the fixture of all suites restores it


@pytest.mark.parametrize("value, wanted", [(None, False), ("1", False), ("0", True)])
def test_the_variable(monkeypatch, value, wanted):
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert repeats_bits() == wanted
    assert te.DotProductAttention(2, 8)._repeats_bits == wanted


def test_a_bad_value(monkeypatch):
    monkeypatch.setenv(VARIABLE, "no")
    with refused(ValueError, "DotProductAttention", VARIABLE, "'no'", "0", "1"):
        te.DotProductAttention(2, 8)


def path_of(device="cuda", dtype=torch.bfloat16, **options):
    options = {"widest_head": 64, "repeat_bits": True, "deterministic": False, **options}
    return attention_path(torch.device(device), dtype, **options)


@pytest.mark.parametrize(
    "options, kernel",
    [
        (CAUSAL, "flash_deterministic"),
        ({"mask": "no_mask"}, "flash_deterministic"),
        ({**CAUSAL, "window": (4, 0), "seq_q": 9, "seq_kv": 9}, "flash_deterministic"),
        ({"mask": "causal_bottom_right", "seq_q": 3, "seq_kv": 5}, "flash_deterministic"),
        ({"mask": "causal_bottom_right", "seq_q": 5, "seq_kv": 3}, "flash_deterministic"),
        ({**CAUSAL, "sink": True}, "flash_deterministic"),
        ({**CAUSAL, "packed": True, "same_lengths": True}, "flash_deterministic"),
        ({**PADDED, "same_lengths": True}, "flash_deterministic"),
        ({**PADDED, "same_lengths": True, "sink": True, "repeat_bits": False}, "cudnn"),
        ({**CAUSAL, "sink": True, "repeat_bits": False}, "cudnn"),
        ({**CAUSAL, "sink": True, "away": ("NVTE_FLASH_ATTN",)}, "chunked"),
        ({**CAUSAL, "sink": True, "device": "cpu"}, "chunked"),
        ({**CAUSAL, "sink": True, "dtype": torch.float32}, "chunked"),
        ({**CAUSAL, "sink": True, "softcap": True}, "chunked"),
        ({**CAUSAL, "sink": True, "widest_head": 264}, "chunked"),
        ({**PADDED, "sink": True}, "chunked"),
        ({"mask": "arbitrary", "sink": True}, "chunked"),
        ({**CAUSAL, "sink": True, "bias": "alibi"}, "chunked"),
        ({**CAUSAL, "sink": True, "seq_q": 3, "seq_kv": 5}, "chunked"),
        ({"mask": "no_mask", "sink": True, "window": (2, 1), "seq_q": 9, "seq_kv": 5}, "chunked"),
    ],
    ids=str,
)
def test_kernels_of_a_batch(options, kernel):
    path = path_of(**options)
    assert path.kernel == kernel and path.backends == () and not path.mask_tensor and path.reason.endswith(".")
    assert path.padding_outside == (kernel != "chunked" and options["mask"] == "padding_causal")
    assert path.pattern.padding == (kernel == "chunked" and options["mask"] == "padding_causal")
    assert path.pattern.bottom_right or kernel in ("chunked", "cudnn")


@pytest.mark.parametrize(
    "options",
    [
        {**CAUSAL, "dropout": 0.1},
        {**CAUSAL, "dtype": torch.float32},
        {**CAUSAL, "away": ("NVTE_FLASH_ATTN",)},
        {**CAUSAL, "window": (4, 0), "dropout": 0.1, "seq_q": 9, "seq_kv": 9},
        {**CAUSAL, "window": (4, 0), "seq_q": 6, "seq_kv": 9},
        {"mask": "padding"},
        {"mask": "arbitrary"},
        {**CAUSAL, "bias": "post_scale_bias", "bias_grad": True},
        {**CAUSAL, "widest_head": 264, "flash_fits": False},
    ],
    ids=str,
)
def test_what_is_left_to_the_plain_backend(options):
    path = path_of(**options)
    assert path.backends == (SDPBackend.MATH,) and not path.kernel and not path.flash_window
    assert path.repeat_groups == path.mask_tensor and VARIABLE in path.reason


@pytest.mark.parametrize("warns, kernel", [(False, ""), (True, "flash_deterministic")])
def test_torchs_flag_comes_first(without_torchs, warns, kernel):
    """But not one that warns alone, of which flash takes no notice."""
    torch.use_deterministic_algorithms(True, warn_only=warns)
    assert path_of(**CAUSAL, deterministic=None).kernel == kernel
    assert path_of(**CAUSAL, deterministic=None, packed=True, same_lengths=True).kernel == (kernel or "flash")


def test_it_changes_no_result_of_a_cpu(monkeypatch, without_torchs):
    tensors = [torch.randn(7, 2, n, 8) for n in (4, 2, 2)]
    wanted = gradients(te.DotProductAttention(4, 8, 2), tensors)
    monkeypatch.setenv(VARIABLE, "0")
    for got, want in zip(gradients(te.DotProductAttention(4, 8, 2), tensors), wanted, strict=True):
        assert_same_bits(got, want)


SEQ = 1500
GPU_CASES = {
    "causal": ({}, {}, "flash_deterministic"),
    "no mask": ({"attn_mask_type": "no_mask"}, {}, "flash_deterministic"),
    "window": ({"window_size": (300, 0)}, {}, "flash_deterministic"),
    "sink": ({"softmax_type": "learnable", "device": "cuda"}, {}, "flash_deterministic"),
    "dropout": ({"attention_dropout": 0.1}, {}, "torch's plain attention"),
    "padding": ({"attn_mask_type": "padding"}, "masks", "torch's plain attention"),
    "padding, causal": ({"attn_mask_type": "padding_causal"}, "lengths", "flash_deterministic"),
    "packed": ({"attn_mask_type": "padding_causal", "qkv_format": "thd"}, "packed", "flash_deterministic"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_backwards_repeat_their_bits(monkeypatch, without_torchs, name):
    options, call, kernel = GPU_CASES[name]
    monkeypatch.setenv(VARIABLE, "0")
    module = te.DotProductAttention(8, 64, 2, **{"qkv_format": "bshd", **options})
    tensors = [torch.randn(2, SEQ, n, 64, device="cuda").bfloat16() for n in (8, 2, 2)]
    if call == "packed":
        packed = Packed([SEQ, 700, 3])
        tensors, call = packed.tensors(8, 2, 64, 64, torch.bfloat16, "cuda"), packed.arguments("cuda", bounds=True)
    elif call == "lengths":
        given = torch.tensor([0, SEQ, SEQ + 900], dtype=torch.int32, device="cuda")
        call = {"cu_seqlens_q": given, "cu_seqlens_kv": given}
    elif call == "masks":
        call = padding_arguments("one mask", ([SEQ, 900],) * 2, (SEQ, SEQ), "cuda")

    def run():
        torch.manual_seed(3)
        return gradients(lambda *t: module(*t, **call), tensors)

    (row,) = [row for row in te.explain(module, *tensors, **call).rows if row.op == "attention"]
    assert row.path == kernel
    wanted = run()
    for _ in range(5):
        for got, want in zip(run(), wanted, strict=True):
            assert_same_bits(got, want)
