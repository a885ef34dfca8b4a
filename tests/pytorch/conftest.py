# Fixtures of the PyTorch suites. `device` runs a test on the CPU and, where there is one, on the first GPU;
# TE_TEST_DEVICE (cpu, cuda, or cpu,cuda) says exactly which instead, and one that is missing is an error, not a skip.
import os

import pytest
import torch


def _devices():
    chosen = os.environ.get("TE_TEST_DEVICE")
    if chosen is None:
        return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    devices = chosen.split(",")
    for device in devices:
        if device not in ("cpu", "cuda"):
            raise pytest.UsageError(f"TE_TEST_DEVICE={chosen!r}: wanted cpu, cuda or cpu,cuda")
        if device == "cuda" and not torch.cuda.is_available():
            raise pytest.UsageError(f"TE_TEST_DEVICE={chosen!r}, but torch {torch.__version__} finds no CUDA device")
    return devices


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", _devices())


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(no_gpu)
