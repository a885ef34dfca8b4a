"""examples/train_lm.py --data-parallel: replicas in two processes have the losses and gradient norms of one process,
and their checkpoints go on at any number of replicas. Tensor parallelism beside it: in four processes."""

import shutil

import pytest
import torch
from ranks import on_ranks

from lm.config import ExampleError

from . import workers

pytestmark = pytest.mark.dist
STEPS, BACK = 4, 6
REPRODUCIBLE = workers.REPLICATED["reproducible"][:-2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, what one process shows, what each of two ranks shows by the run's name)."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.py").write_bytes(workers.TEXT)
    whole, _ = workers.train(folder, "whole", "--steps", str(BACK))
    return folder, whole, on_ranks(workers.replicated, str(folder), STEPS, workers.REPLICATED)


def assert_close(seen, wanted):
    assert len(seen) == len(wanted) > 0
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["plain", "overlap", "sharded", "reproducible"])
def test_losses_and_norms_are_those_of_one_process(runs, name):
    folder, whole, (first, second) = runs
    assert first[name][0] == second[name][0]
    assert_close(first[name][0], whole[:STEPS])
    assert min(norm for _, norm in whole) > 1.0  # every step was clipped
    assert "data parallel: 2 replicas" in first[name][1] and not second[name][1]
    assert (folder / name / "checkpoint").is_dir() and not (folder / name / "checkpoint.tmp").exists()


def test_overlap_changes_no_bit(runs):
    first = runs[2][0]
    assert first["plain"][0] == first["overlap"][0]


def test_delayed_scaling_lowers_the_loss(runs):
    seen, _ = runs[2][0]["fp8"]
    assert seen[-1][0] < seen[0][0]


def test_two_replicas_are_one_with_two_microbatches(runs):
    """To the bit, by sums in the order of the replicas."""
    folder, _, (first, _) = runs
    alone, _ = workers.train(folder, "alone", "--steps", str(STEPS), *REPRODUCIBLE)
    assert alone == first["reproducible"][0]


def test_one_process_goes_on_from_two_replicas(runs):
    folder, whole, _ = runs
    shutil.copytree(folder / "sharded", folder / "back")
    back, shown = workers.train(folder, "back", "--resume", "--steps", str(BACK), *workers.REPLICATED["sharded"])
    assert f"resumed at step {STEPS} from" in shown
    assert_close(back, whole[STEPS:])


def test_two_replicas_go_on_from_one_process(runs):
    folder, whole, _ = runs
    workers.train(folder, "one", "--steps", str(STEPS), *workers.REPLICATED["plain"])
    options = {"one": (*workers.REPLICATED["sharded"], "--resume")}
    (first, _) = on_ranks(workers.replicated, str(folder), BACK, options)
    assert_close(first["one"][0], whole[STEPS:])


def test_with_tensor_parallelism(runs):
    folder, _, _ = runs
    tp = ("--tp", "2", "--sequence-parallel")
    whole = on_ranks(workers.replicated, str(folder), BACK, {"tp": tp})[0]["tp"][0]
    options = {"both": (*workers.REPLICATED["sharded"], *tp)}
    ranks = on_ranks(workers.replicated, str(folder), STEPS, options, ranks=4)
    assert all(rank["both"][0] == ranks[0]["both"][0] for rank in ranks)
    assert_close(ranks[0]["both"][0], whole[:STEPS])
    # Its checkpoint is that of the whole model: two replicas go on from it.
    (first, _) = on_ranks(workers.replicated, str(folder), BACK, {"both": (*workers.REPLICATED["sharded"], "--resume")})
    assert_close(first["both"][0], whole[STEPS:])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--sharded",), "--sharded: wanted --data-parallel beside it"),
        ((workers.DATA, "--compile"), "--data-parallel: not with --compile"),
        ((workers.DATA, "--tp", "2"), "--tp 2: there are 1 processes, wanted a multiple of 2"),
        ((workers.DATA, "--resume"), r"--resume: no folder .*checkpoint: train with --data-parallel first"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, options, error):
    (tmp_path / "text.py").write_bytes(workers.TEXT)
    with pytest.raises(ExampleError, match=error):
        workers.train(tmp_path, "run", *options)


def test_another_runs_checkpoint_is_refused(runs):
    folder, _, _ = runs
    shutil.copytree(folder / "plain", folder / "other")
    with pytest.raises(ExampleError, match=r"of another run .*seed 0 there, 1 here"):
        workers.train(folder, "other", "--resume", "--steps", str(BACK), workers.DATA, "--seed", "1")
