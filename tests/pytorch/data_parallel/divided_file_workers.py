# Workers of test_divided_files.py: runs of two replicas and of a model that two ranks share, with the same gradients.
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import here
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

import transformer_engine.pytorch as te
from transformer_engine.pytorch.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from transformer_engine.pytorch.data_parallel.optimizer import _cuts_of

from ..distributed.sharded_state_workers import filled, shard_of, whole
from .cases import raised
from .optimizer_workers import OPTIMIZERS


class Run:
    """tp: how many ranks share the model; the others are replicas."""

    def __init__(self, tp, name, sharded):
        ranks = dist.get_world_size()
        self.tp, self.mesh = tp, init_device_mesh(here().type, (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
        self.module = filled(self.mesh.get_local_rank("tp"), tp)
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=sharded, overlap_param_gather=sharded, bucket_size=700
        )
        self.ddp = DistributedDataParallel(config, self.module, process_group=self.mesh.get_group("dp"))
        self.optimizer = te.optimizers.DistributedOptimizer(
            OPTIMIZERS[name](self.module.parameters()), self.ddp, tp_group=self.mesh.get_group("tp") if tp > 1 else None
        )

    def own(self, name, values):
        return shard_of(name, values, self.mesh.get_local_rank("tp"), self.tp)

    def train(self, steps):
        """The gradients are those of the whole model, and all replicas bring the same."""
        for step in steps:
            self.optimizer.zero_grad()
            for name, p in self.module.named_parameters():
                p.main_grad.copy_(self.own(name, whole()[name]) * (0.5 + step))
            self.optimizer.step()

    def state(self):
        model = te.distributed.tensor_parallel_state_dict(self.module, self.mesh if self.tp > 1 else None)
        return {"model": model, "optimizer": get_optimizer_state_dict(self.module, self.optimizer)}

    def load(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        te.distributed.load_tensor_parallel_state_dict(self.module, state["model"])
        set_optimizer_state_dict(self.module, self.optimizer, state["optimizer"])

    def weights(self):
        self.module.state_dict()  # waits for gathers
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}


def there_and_back(rank, folder, cases):
    """Two steps of replicas, two of a divided model, two of replicas, each from the file of the one before: the weights
    are those of a run of replicas that never stopped."""
    for name, sharded in cases:
        straight = Run(1, name, sharded)
        straight.train(range(2))
        dcp.save(straight.state(), checkpoint_id=f"{folder}/{name}-{sharded}-1")
        last = straight
        for number, tp in ((1, dist.get_world_size()), (2, 1)):
            run, steps = Run(tp, name, sharded), range(2 * number, 2 * number + 2)
            run.train(range(1))  # what is not loaded differs
            run.load(f"{folder}/{name}-{sharded}-{number}")
            run.train(steps)
            straight.train(steps)
            for key, value in straight.weights().items():
                got = run.weights()[key]
                assert torch.equal(got, run.own(key, value)), f"{name}, {sharded}, tp {tp}: {key}"
            dcp.save(run.state(), checkpoint_id=f"{folder}/{name}-{sharded}-{number + 1}")
            if tp > 1:
                last = run
        both = last.optimizer.state_dict(), straight.optimizer.state_dict()
        refused = raised(ValueError, lambda one=last, state=both[1]: one.optimizer.load_state_dict(state))
        assert "wanted" in refused
        last.optimizer.load_state_dict(both[0])
    last.module.row.weight.partition_dim = -1
    last.optimizer._cuts = _cuts_of([last.ddp], last.mesh.get_group("tp"))
    text = raised(ValueError, last.optimizer.state_dict)
    assert "'row.weight' of shape" in text and "partition_dim" in text, text
    return True
