# 100 steps of examples/train_lm.py in fp32, with accumulated gradients, clipping and tied embeddings: divided over 2
# and over 4 processes against the whole model, from one checkpoint, in every mode. Beside the suites that each commit
# runs.
import pytest
import torch
from ranks import on_ranks

from pytorch.examples import workers

STEPS, BOUND = 101, 1e-4


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """(folder with the checkpoint of the first step, [(loss, norm)] of the whole model from there on)."""
    folder = tmp_path_factory.mktemp("runs")
    workers.begin(folder)
    return folder, workers.go_on(folder, "whole", STEPS)[0]


@pytest.mark.parametrize("mode", workers.MODES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_and_norms_are_the_whole_models(start, ranks, mode):
    folder, whole = start
    seen = [shown[mode][0] for shown in on_ranks(workers.divided, str(folder), STEPS, [mode], ranks=ranks)]
    assert len(whole) == len(seen[0]) == 100 and all(other == seen[0] for other in seen)
    off = (torch.tensor(seen[0], dtype=torch.float64) - torch.tensor(whole, dtype=torch.float64)).abs()
    loss, norm = off.amax(0).tolist()
    print(
        f"{ranks} ranks, {mode}: loss {whole[0][0]:.4f} to {whole[-1][0]:.4f}, at most {loss:.1e} off, "
        f"norm {whole[0][1]:.3f} to {whole[-1][1]:.3f}, at most {norm:.1e} off"
    )
    assert loss <= BOUND and norm <= BOUND
