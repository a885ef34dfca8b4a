# python -m transformer_engine.bench: a table of this machine, and nothing left behind.
import os
import re
import subprocess
import sys
import types

import pytest
import torch

from transformer_engine import bench


def run(*options, cwd):
    command = [sys.executable, "-m", "transformer_engine.bench", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300)


def test_it_prints_a_table_and_writes_nothing(tmp_path):
    done = run("--device", "cpu", "--seconds", "0.5", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    rows = re.findall(r"^(\w.*?)  +(\d+) +(\d+) +(\d+\.\d\d) +([\d.]+|-) +([\d.]+|-)$", done.stdout, re.M)
    assert [row[0].split()[0] for row in rows] == ["SwiGLU", "RMSNorm", "Linear", "LayerNormMLP", "AdamW"]
    for _, theirs, ours, speed, *_ in rows:
        assert float(speed) == pytest.approx(int(theirs) / int(ours), rel=0.02, abs=0.01)
    # 512 x 1408 floats of silu(gate), and of the MLP three times as much and the norm's output; ours: gate and up.
    kept = {row[0].split()[0]: row[4:] for row in rows}
    assert kept["SwiGLU"] == ("2.8", "0.0") and kept["Linear"] == ("0.0", "0.0")
    assert os.listdir(tmp_path) == []


def test_the_first_time_is_torchs(monkeypatch):
    """By a clock that only the steps move: 4 ms and 1 ms."""
    clock = [0.0]
    slow, fast = (lambda: clock.append(clock.pop() + 4e-3)), (lambda: clock.append(clock.pop() + 1e-3))
    monkeypatch.setattr(bench, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    theirs, ours = bench.measure(bench.Case("steps", None, (slow, fast)), torch.device("cpu"), 0.1)
    assert theirs == pytest.approx(4000) and ours == pytest.approx(1000)


def test_what_cannot_be_measured_is_named(tmp_path):
    for options, words in (
        (("--device", "mps"), "wanted one of cuda, cpu"),
        (("--seconds", "0"), "wanted a finite number above 0"),
        (("--seconds", "inf"), "wanted a finite number above 0"),
        *([] if torch.cuda.is_available() else [(("--device", "cuda"), "torch sees no GPU")]),
    ):
        done = run(*options, cwd=tmp_path)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.gpu
@pytest.mark.slow
def test_it_measures_a_gpu(tmp_path):
    done = run("--device", "cuda", "--seconds", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "FP8 delayed" in done.stdout and "AdamW" in done.stdout
