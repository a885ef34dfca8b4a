"""megatron-core's attention, unmodified, over our DotProductAttention: PackedSeqParams, sinks, qk-clip. Skipped
where the package is not installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

there = importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None
pytestmark = pytest.mark.skipif(not there, reason="needs the extra: pip install 'transformer_engine[megatron]'")


def test_its_calls_are_ours(device):
    """In a process of its own: on a CPU it pretends to have CUDA."""
    script = Path(__file__).with_name("megatron_attention.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, str(script), device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
