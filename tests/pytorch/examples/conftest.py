# Fixtures of the tests of examples/train_lm.py.
import pytest
import torch

from lm.config import PRESETS

from .train_lm_cases import TEXT, TINY


@pytest.fixture
def tiny_toy(monkeypatch):
    """The command line's toy preset, tiny; torch's global switches as they were."""
    monkeypatch.setitem(PRESETS, "toy", TINY)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.py"
    path.write_bytes(TEXT)
    return path
