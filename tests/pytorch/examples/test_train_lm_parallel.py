"""examples/train_lm.py divided over two processes: the losses and gradient norms of the whole model from one
checkpoint, and checkpoints that any number of processes reads. qa/L2_convergence has more steps, and four processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import must_have_devices, on_cuda, on_ranks
from safetensors.torch import load_file
from torchrun import TORCHRUN

import train_lm
from lm.config import ExampleError

from . import workers

pytestmark = pytest.mark.dist
STEPS, BACK = 5, 7


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, what the whole model shows, what each of two ranks shows by mode)."""
    folder = tmp_path_factory.mktemp("runs")
    workers.begin(folder)
    whole, _ = workers.go_on(folder, "whole", BACK)
    return folder, whole, on_ranks(workers.divided, str(folder), STEPS, list(workers.MODES), True)


@pytest.mark.parametrize("mode", workers.MODES)
def test_losses_and_norms_are_the_whole_models(runs, mode):
    _, whole, (first, second) = runs
    assert len(first[mode][0]) == STEPS - 1 and first[mode][0] == second[mode][0]
    torch.testing.assert_close(torch.tensor(first[mode][0]), torch.tensor(whole[: STEPS - 1]), rtol=1e-4, atol=1e-4)
    assert min(norm for _, norm in whole) > 1.0  # every step was clipped


def test_recomputing_changes_no_bit_and_keeps_less(runs):
    folder, _, (first, second) = runs
    assert first["sequence"][0] == first["sequence_kept"][0]
    again, kept = (load_file(folder / f"{m}2" / "checkpoint.safetensors") for m in ("sequence", "sequence_kept"))
    assert again.keys() == kept.keys() and all(torch.equal(again[name], kept[name]) for name in again)
    shown = first["sequence"][1]
    (line,) = [line for line in shown.splitlines() if line.startswith("memory: each rank keeps ")]
    of_layer = line.partition(";")[0].replace(" MiB", "").split()  # on CUDA peaks of the model follow the semicolon
    less, more = (float(word.replace(",", "")) for word in of_layer if word[0].isdigit())
    # Of a layer q, k, v and the MLP gather: 2 x (1 - 1/2) x positions x windows x hidden of four bytes, to two digits.
    assert abs(more - less - workers.TINY.tokens * workers.TINY.hidden * 4 / 2**20) <= 0.01
    assert "divided over 2 ranks" in shown and "the tied embedding and head" in shown
    assert not second["sequence"][1]  # one process prints for all


def test_the_whole_model_goes_on_from_a_divided_ones_checkpoint(runs):
    folder, whole, _ = runs
    start, there = (load_file(folder / name / "checkpoint.safetensors") for name in ("start", "sequence2"))
    assert {n: t.shape for n, t in start.items()} == {n: t.shape for n, t in there.items()}
    back, _ = workers.go_on(folder, "back", BACK, of="sequence2")
    assert len(back) == BACK - STEPS
    torch.testing.assert_close(torch.tensor(back), torch.tensor(whole[STEPS - 1 :]), rtol=1e-4, atol=1e-4)


def test_fp8_on_fresh_weights(runs):
    (first, _), (second, _) = (rank["fp8"] for rank in runs[2])
    assert first == second and first[-1][0] < first[0][0]


def test_torchrun_starts_it(tmp_path):
    if on_cuda():
        must_have_devices(2)
    (tmp_path / "text.py").write_bytes(workers.TEXT)
    call = f"workers.train({str(tmp_path)!r}, 'run', '--tp', '2', '--steps', '2')"
    code = f"from pytorch.examples import workers; print({call}[1])"
    command = [*TORCHRUN, "--no-python", sys.executable]
    tests = Path(workers.__file__).parents[2]
    paths = [str(path) for path in (tests, tests / "pytorch/helpers", Path(train_lm.__file__).parent)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, environment.get("PYTHONPATH")]))
    done = subprocess.run([*command, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step    2/2") == 1
    assert (tmp_path / "run" / "checkpoint.safetensors").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tp", "2"), r"--tp 2: .* there are 1: start it by `torchrun --nproc-per-node=2`, or give --tp 1"),
        (("--tp", "3"), r"--tp 3: does not divide the toy preset's 4 heads, 4 groups of heads, 256 bytes"),
        (("--sequence-parallel",), "--sequence-parallel: wanted --tp N"),
        (("--tp", "2", "--no-recompute-allgather"), "--no-recompute-allgather: wanted --sequence-parallel"),
        (("--tp", "2", "--compile"), "--tp 2: not with --compile"),
        (("--tp", "2", "--optimizer", "torch"), "--tp 2: not with .*--optimizer torch"),
        (("--tp", "2", "--fp8", "delayed"), "--tp 2: not with .*--fp8 delayed"),
        (("--accumulate", "3"), "--accumulate 3: wanted a divisor of the preset's 4 windows"),
    ],
)
def test_options_that_exclude_each_other_are_named(tmp_path, options, message):
    (tmp_path / "text.py").write_bytes(workers.TEXT)
    with pytest.raises(ExampleError, match=message):
        workers.train(tmp_path, "run", *options)
