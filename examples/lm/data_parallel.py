"""Data parallelism: replicas of the model train on their parts of a step's windows, in te.distributed's buffers, and
torch.distributed.checkpoint saves and loads them at any number of replicas, and of ranks that share the model."""

import json
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh

import transformer_engine.pytorch as te

from .checkpoint import SaveError, check_identity
from .config import Config, ExampleError
from .optimizer import BETAS, CLIP, groups_of
from .parallel import Ranks


class DataParallelAdamW:
    """The model under DistributedDataParallel, with FusedAdam under DistributedOptimizer."""

    def __init__(self, model: nn.Module, config: Config, ranks: Ranks):
        self.parameters = dict(model.named_parameters())
        self.ddp = te.distributed.DistributedDataParallel(
            te.distributed.DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=config.sharded,
                overlap_grad_reduce=config.overlap,
                overlap_param_gather=config.overlap and config.sharded,
                reproducible=config.reproducible,
            ),
            model,
            process_group=ranks.replicas_group,
        )
        masters = any(p.dtype != torch.float32 for p in self.parameters.values())
        adam = te.optimizers.FusedAdam(groups_of(self.parameters.values()), betas=BETAS, master_weights=masters)
        tp_group = ranks.group if ranks.size > 1 else None
        self.optimizer = te.optimizers.DistributedOptimizer(adam, self.ddp, clip_grad=CLIP, tp_group=tp_group)

    def accumulating(self, is_last: bool) -> AbstractContextManager:
        """Around the forward and the backward of a microbatch: only gradients of the last one are communicated."""
        return nullcontext() if is_last else self.ddp.no_sync()

    def step(self, lr: float) -> torch.Tensor:
        """Clip by the norm of the mean gradient of all replicas, update this rank's shards, begin the next step.
        Returns that norm."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def state_bytes(self) -> int:
        """Bytes of parameters, gradients, masters and moments of this rank."""
        tensors = [*self.parameters.values(), *(p.main_grad for p in self.parameters.values())]
        for state in self.optimizer.state.values():
            tensors += [getattr(value, "local", value) for value in state.values()]  # of a shard: its own elements
        return sum(t.numel() * t.element_size() for t in tensors)


def _state(model: nn.Module, optimizer: DataParallelAdamW, ranks: Ranks) -> dict:
    """Names and shapes are those of the whole model, however many ranks share it."""
    device = next(model.parameters()).device.type
    mesh = DeviceMesh.from_group(ranks.group, device) if ranks.size > 1 else None
    whole = te.distributed.tensor_parallel_state_dict(model, mesh)
    return {"model": whole, "optimizer": optimizer.optimizer.state_dict()}


def save(path: Path, model: nn.Module, optimizer: DataParallelAdamW, progress: dict, ranks: Ranks) -> None:
    """Writes beside `path` and renames: at every moment `path` or `path`.old is a whole checkpoint. Call it on all
    ranks."""
    beside, before = path.with_name(path.name + ".tmp"), path.with_name(path.name + ".old")
    if ranks.is_first:
        shutil.rmtree(beside, ignore_errors=True)
    ranks.wait()
    state = _state(model, optimizer, ranks) | {"progress": json.dumps(progress)}
    try:
        dcp.save(state, checkpoint_id=beside)
    except (CheckpointException, OSError) as error:
        raise SaveError(f"{path}: saving failed ({error}); the checkpoint that was there before is whole") from error
    ranks.wait()
    if ranks.is_first:
        shutil.rmtree(before, ignore_errors=True)
        if path.exists():
            path.rename(before)
        beside.rename(path)
        shutil.rmtree(before, ignore_errors=True)
    ranks.wait()


def restore(path: Path, model: nn.Module, optimizer: DataParallelAdamW, identity: dict, ranks: Ranks) -> int:
    """Loads the model and the optimizer, and returns the number of steps that they have taken."""
    if not path.is_dir():
        raise ExampleError(f"--resume: no folder {path}: train with --data-parallel first, or correct --out, --name")
    if not (path / ".metadata").exists():
        raise ExampleError(f"--resume: {path} has no .metadata, so it is no file of all ranks; start from step 0")
    progress = {"progress": ""}
    dcp.load(progress, checkpoint_id=path)
    progress = json.loads(progress["progress"])
    check_identity(path, progress["identity"], identity)
    state = _state(model, optimizer, ranks)
    dcp.load(state, checkpoint_id=path)
    te.distributed.load_tensor_parallel_state_dict(model, state["model"])
    optimizer.optimizer.load_state_dict(state["optimizer"])
    return progress["step"]
