"""megatron-core's GPT trains on our layers, unmodified: its layer spec, grouped products of a mixture, data-parallel
buffers and optimizer, as examples/with_megatron_core.py calls them. On a CPU its calls of CUDA are answered by
megatron_on_cpu.py. Skipped, by name, where the package is not installed."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchrun import TORCHRUN

from . import megatron_on_cpu

EXAMPLE = Path(__file__).parents[3] / "examples" / "with_megatron_core.py"
SMALL = ("--steps=5", "--hidden=128", "--vocab=64", "--sequence=32", "--batch=2")
LOSS = re.compile(r"step (\d+): loss (\d+\.\d+)")
there = importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None
pytestmark = [
    pytest.mark.skipif(not there, reason="needs the extra: pip install 'transformer_engine[megatron]'"),
    pytest.mark.slow,
]
CASES = {
    "dense": (),
    "dense, delayed": ("--fp8=delayed", "--distributed-optimizer"),
    "dense, blockwise": ("--fp8=blockwise", "--steps=3"),
    "mixture": ("--experts=4",),
    "mixture, tensorwise": ("--experts=4", "--fp8=tensorwise", "--distributed-optimizer"),
}


def run(*command):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *_, last = sorted((int(step), float(loss)) for step, loss in LOSS.findall(done.stdout))  # of every rank
    assert first[0] == 1 < last[0]
    assert last[1] < first[1]
    return done.stdout


def ranks(count):
    return *TORCHRUN[1:3], f"--nproc-per-node={count}", *TORCHRUN[4:]


@pytest.mark.parametrize("case", CASES)
def test_trains_on_a_cpu(case):
    out = run(megatron_on_cpu.__file__, *SMALL, *CASES[case])
    assert "LayerNormColumnParallelLinear" in out
    assert ("GroupedLinear" in out) == ("mixture" in case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_trains_on_a_gpu(case):
    run(*ranks(1), EXAMPLE, *CASES[case])


@pytest.mark.gpu
@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("options", [("--experts=4", "--ep=2"), ("--tp=2",), ("--tp=2", "--fp8=delayed")], ids=" ".join)
def test_trains_on_two_gpus(options):
    run(*ranks(2), EXAMPLE, *options)
