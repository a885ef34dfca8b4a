# Data parallel around tensor parallel: DDP and FSDP2 over one dimension of a mesh, divided layers over the other,
# against the undivided layers on all data; a checkpoint of four processes read by one.
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import on_ranks

from transformer_engine.pytorch import distributed

from . import mesh_workers as workers

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


def test_two_by_two_trains_as_one_process_does(tmp_path):
    wanted, start = workers.whole(), workers.parameters_of(workers.stack(), None)
    for found in on_ranks(workers.trained, str(tmp_path), ranks=workers.DATA * workers.TENSOR):
        for way, parameters in found.items():
            assert parameters.keys() == wanted.keys()
            for name, want in wanted.items():
                torch.testing.assert_close(parameters[name], want.cpu(), rtol=1e-5, atol=1e-6, msg=f"{way}: {name}")
    moved = [(want - start[name]).abs().max() for name, want in wanted.items() if "key_bias" not in name]
    assert min(moved) > 1e-4  # a hundred times what ways may differ by

    module = workers.stack()
    state = distributed.tensor_parallel_state_dict(module, None)
    dcp.load(state, checkpoint_id=tmp_path)
    distributed.load_tensor_parallel_state_dict(module, state)
    for name, t in workers.parameters_of(module, None).items():
        assert torch.equal(t.cpu(), found["FSDP2", False][name]), name
