# Fixtures of the PyTorch suites. `device` runs a test on the CPU and, where there is one, on the first GPU;
# TE_TEST_DEVICE (cpu, cuda, or cpu,cuda) selects devices instead, and a missing one is an error, not a skip.
# `generated_seed` is the number of a random program: --generated=N of them, GENERATED of the module without it.
# Every test starts from the same seed, with no compiled code, and sees NaN in each tensor that is not written yet.
# Folders are those of the source, helpers/ has files that several share: README.md lists where a test is, and what it
# imports.
import os
import sys

import pytest

# cuBLAS reads it once: with it torch's own products repeat their bits on CUDA, as deterministic algorithms demand.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

# torch.manual_seed() formats and keeps a stack trace for each kind of device that is not there.
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


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


def pytest_configure(config):
    # The warnings of warn_only (below) about torch's own ops are expected.
    config.addinivalue_line("filterwarnings", "ignore:.*does not have a deterministic implementation.*:UserWarning")
    config.addinivalue_line("filterwarnings", "ignore:.*Deterministic behavior was enabled.*:UserWarning")
    if config.getoption("--layer-policy", None):
        from .layer.policies import install

        install(config.getoption("--layer-policy"))


def pytest_addoption(parser):
    parser.addoption(
        "--generated",
        type=int,
        metavar="N",
        help="programs of each generated suite; by default its own small number",
    )
    parser.addoption(
        "--layer-policy",
        metavar="NAME",
        help="run everything under this policy of layers (tests/layer/NAME.cpp)",
    )


def pytest_generate_tests(metafunc):
    if "generated_seed" in metafunc.fixturenames:
        count = metafunc.config.getoption("generated", None)
        metafunc.parametrize("generated_seed", range(metafunc.module.GENERATED if count is None else count))
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", _devices())


def pytest_collection_modifyitems(config, items):
    if name := config.getoption("--layer-policy", None):
        from .layer.policies import NOT_ASKED

        left_out = [item for item in items if item.name.partition("[")[0] in NOT_ASKED[name]]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if " at 0x" in item.nodeid:  # several processes would collect different tests
            raise pytest.UsageError(f"{item.nodeid}: an id with an address; name the parameters (ids=)")
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def poisoned_and_seeded():
    """at::empty fills with NaN (integers: the largest value), C++'s calls included: an element that an op did not
    write shows. torch ties that switch to its deterministic algorithms, which are put back after the test."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    _seed(1234)
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Graphs of one test would count as recompilations in the next test."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(autouse=True)
def unwatched():
    """The gates of stashes are up where a watch of their device is: rows that one test cuts would close those of the
    next, which resets no watch."""
    yield
    if (verdict := sys.modules.get("transformer_engine.pytorch.verdict")) is not None:
        verdict._watches.clear()


@pytest.fixture
def fp8_left_off():
    """A test that switches quantization on leaves it off, and no scales behind."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    yield
    assert not FP8GlobalStateManager.is_fp8_enabled()
    FP8GlobalStateManager.reset()
