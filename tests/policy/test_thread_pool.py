"""The CPU paths run on PyTorch's own threads: they start its pool, and no second one. It measures no speed.

Mutant: drop -fopenmp from parallel_for.cpp (ATen's parallel_for is then serial) -> the pool is never started."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = """
import os
import torch
from transformer_engine.pytorch import functional
threads = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(4)
x = torch.empty(256, 4096)  # not randn or ones: filling could start the pool
before = threads()
functional.activation(x, "swiglu")
ours = threads()
torch.add(x, x)
print(ours - before, threads() - before)
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="counts threads through Linux's /proc")
def test_one_thread_pool():
    env = os.environ | {"OMP_NUM_THREADS": "4"}  # xdist workers run with 1
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "3"]  # the caller is the fourth
