# Rows of a quantized tensor on one device written with values from another one, as a checkpoint's tensors do.
import pytest
import torch
from quantized_cases import FP8_FORMATS, assert_same_tensor
from support import randn


@pytest.mark.parametrize("name", [name for name in FP8_FORMATS if name != "block1d"])  # of both directions: no rows
@pytest.mark.parametrize("part", [slice(0, 128), slice(128, 256), slice(0, 256)], ids=["first", "last", "all"])
def test_rows_take_values_from_the_cpu(name, part, device):
    whole, written = randn(256, 128), randn(part.stop - part.start, 128, scale=3.0)
    source = FP8_FORMATS[name](device="cpu")(written)
    near, far = (FP8_FORMATS[name](device=device)(whole.to(device)) for _ in range(2))
    near[part].copy_(source.to(device))
    far[part].copy_(source)
    assert_same_tensor(far, near)
    assert far.device.type == torch.device(device).type and far.dequantize().isfinite().all()
