# te.pytorch.utils, element types and other constants: the layout of gated weights, initialisers, what the device can
# do, NVTX ranges.
import math

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch import constants, utils
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.utils import nvtx_range_pop, nvtx_range_push


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("rest", [(), (3,), (3, 5)])
def test_interleaved_gates(device, size, rest):
    gate, up = (torch.randn(8, *rest, device=device) for _ in range(2))
    got = te.interleave_glu_tensor(torch.cat([gate, up]), size)
    wanted = [part for i in range(0, 8, size) for part in (gate[i : i + size], up[i : i + size])]
    assert_same_bits(got, torch.cat(wanted))
    assert got.is_contiguous()
    assert_same_bits(te.deinterleave_glu_tensor(got, size), torch.cat([gate, up]))


def test_interleaving_nothing_and_misuse(device):
    for function in (te.interleave_glu_tensor, te.deinterleave_glu_tensor):
        for shape in ((0, 3), (8, 0)):
            assert function(torch.ones(shape, device=device), 2).shape == shape
        for tensor, size in ((torch.ones(8, 2), 3), (torch.ones(6), 2), (torch.ones(8), 0), (torch.ones(()), 1)):
            with refused(ValueError, function.__name__, "'interleave_size'", size, tuple(tensor.shape)):
                function(tensor, size)


def test_element_types():
    import transformer_engine_torch as tex

    names = ["kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"]
    assert [item.name for item in te.DType] == names and tex.DType is te.DType
    assert TE_DType[torch.bfloat16] is te.DType.kBFloat16 and TE_DType[torch.uint8] == 0
    assert len(set(TE_DType.values())) == len(TE_DType) and set(TE_DType.values()) < set(te.DType)
    back = constants.TE_DType_To_Torch
    assert all(back[TE_DType[dtype]] is dtype for dtype in TE_DType) and len(back) == len(TE_DType)
    assert not hasattr(tex, "gemm")
    with refused(AttributeError, "transformer_engine_torch.gemm: ", "use transformer_engine.pytorch"):
        tex.gemm  # noqa: B018


def test_what_the_device_can_do():
    available, reason = te.is_bf16_available(return_reason=True)
    assert te.is_bf16_available() == available and bool(reason) != available
    major, minor, patch = te.get_cudnn_version()
    assert (major == 0) == (not torch.backends.cudnn.is_available()) and minor < 100 and patch < 1000
    if torch.cuda.is_available():
        assert te.get_device_compute_capability() == torch.cuda.get_device_capability()
    else:
        assert available
        with refused(RuntimeError, "get_device_compute_capability", "CUDA device"):
            te.get_device_compute_capability()


def test_cudnn_versions_of_both_generations(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    for number, version in ((8907, (8, 9, 7)), (91002, (9, 10, 2)), (90100, (9, 1, 0))):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda number=number: number)
        assert te.get_cudnn_version() == version


def test_nvtx_ranges_nest():
    nvtx_range_push("outer")
    nvtx_range_push("inner")
    nvtx_range_pop("inner")
    nvtx_range_pop()


# ---- initialisers, masks, sizes ----


def test_initialisers(device):
    """In place, by torch's own generator: the bits of torch.nn.init.normal_ with that deviation."""
    for make, deviation in (
        (utils.init_method_normal(0.02), 0.02),
        (utils.scaled_init_method_normal(0.02, 8), 0.02 / math.sqrt(16.0)),
    ):
        weight = torch.full((64, 32), torch.nan, device=device)
        torch.manual_seed(7)
        assert make(weight) is weight
        torch.manual_seed(7)
        assert_same_bits(weight, torch.nn.init.normal_(torch.empty_like(weight), 0.0, deviation))
    module = te.Linear(8, 8, device=device, init_method=utils.init_method_normal(0.5))
    torch.manual_seed(3)
    module.reset_parameters()
    torch.manual_seed(3)
    assert_same_bits(module.weight.detach(), torch.empty(8, 8, device=device).normal_(0.0, 0.5))


def test_attention_mask_func(device):
    scores = torch.randn(2, 1, 3, 4, device=device)
    mask = torch.rand(2, 1, 3, 4, device=device) < 0.5
    wanted = torch.where(mask, torch.tensor(-10000.0, device=device), scores)
    assert utils.attention_mask_func(scores, mask) is scores
    assert_same_bits(scores, wanted)


def test_sizes_and_constants():
    found = [utils.round_up_to_nearest_multiple(n, 16) for n in (0, 1, 16, 17, 31, 32)]
    assert found == [0, 16, 16, 32, 32, 32]
    with refused(ValueError, "round_up_to_nearest_multiple", "'multiple'", "0"):
        utils.round_up_to_nearest_multiple(3, 0)
    assert (constants.MXFP8_BLOCK_SCALING_SIZE, constants.NVFP4_BLOCK_SCALING_SIZE) == (32, 16)
    forward, backward = constants.FP8FwdTensorIdx, constants.FP8BwdTensorIdx
    assert [forward.GEMM1_INPUT, forward.GEMM1_WEIGHT, forward.GEMM1_OUTPUT, forward.GEMM2_INPUT] == [0, 1, 2, 3]
    assert [backward.GRAD_OUTPUT1, backward.GRAD_INPUT1, backward.GRAD_OUTPUT2] == [0, 1, 2]
    assert len(forward) == 9 and len(backward) == 6
    assert utils.is_non_tn_fp8_gemm_supported() == (
        torch.cuda.is_available() and te.get_device_compute_capability()[0] >= 10
    )


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 1)])
def test_products_in_other_layouts(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert utils.is_non_tn_fp8_gemm_supported() == (capability >= (10, 0))


def test_the_gpus_autocast():
    """torch's own, of CUDA: a CPU product inside stays float32."""
    with utils.gpu_autocast_ctx(enabled=torch.cuda.is_available(), dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cuda") == torch.cuda.is_available()
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        if torch.cuda.is_available():
            on_gpu = torch.ones(2, 2, device="cuda")
            assert (on_gpu @ on_gpu).dtype is torch.bfloat16
