# te.pytorch.utils and the element types: the layout of gated weights, what the device can do, NVTX ranges. Mutant:
# swapping the two factors of interleave_glu_tensor's blocks turns these red.
import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
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
    assert not hasattr(tex, "gemm")
    with pytest.raises(AttributeError, match="transformer_engine_torch has no attribute 'gemm'"):
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
