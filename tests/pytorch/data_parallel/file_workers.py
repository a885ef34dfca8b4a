# Workers of test_files.py: a run that is saved, and others of another cut that go on from it.
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import here
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transformer_engine.pytorch as te
from transformer_engine.pytorch.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from transformer_engine.pytorch.data_parallel.optimizer import DistributedOptimizer

from .cases import backward, batch, build
from .optimizer_workers import OPTIMIZERS
from .pitched_workers import bytes_of, ladder, loss_of

HELD = {f"{recipe}, held": recipe for recipe in ("delayed", "current", "block")}  # rows in FP8, off 16 bytes


def made(model, name, sharded, bucket_size):
    """The data of all ranks are the same, so that their number changes no gradient; a third of three times a gradient
    may be another number, so that two of three ranks bring zeros."""
    module = ladder(HELD[model], True) if model in HELD else build(model)
    if model not in HELD:
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(2.0**-6)
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=dist.get_world_size() != 3,
        overlap_param_gather=sharded,
        use_distributed_optimizer=sharded,
        bucket_size=bucket_size,
        reproducible=True,
    )
    ddp = DistributedDataParallel(config, module, calculate_per_token_loss=dist.get_world_size() == 3)
    return module, ddp, DistributedOptimizer(OPTIMIZERS[name](module.parameters()), ddp)


def train(model, module, ddp, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        if model in HELD:
            loss_of(HELD[model], ddp, 0, step).backward()
        else:
            backward(model, ddp, batch(model, 0, 0, step), module)
        if dist.get_world_size() == 3 and dist.get_rank():
            ddp.scale_gradients(0.0)
        optimizer.step()


def weights_of(module):
    """Bytes of those that are held in FP8."""
    state = {n: p for n, p in module.state_dict().items() if isinstance(p, torch.Tensor)}
    return {n: (bytes_of(p) if hasattr(p, "_gathered") else p).clone() for n, p in state.items()}


def save(rank, folder, cases):
    """Saved in the middle of an overlapped gather. Returns the weights then and two steps later."""
    found = {}
    for model, name in cases:
        module, ddp, optimizer = made(model, name, True, 1100)
        train(model, module, ddp, optimizer, range(2))
        state = {"model": module.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer)}
        dcp.save(state, checkpoint_id=f"{folder}/{model}, {name}")
        train(model, module, ddp, optimizer, range(2, 4))
        found[model, name] = weights_of(module)
    return found


def load(rank, folder, cases, sharded, bucket_size):
    """The weights two steps after the file."""
    found = {}
    for model, name in cases:
        module, ddp, optimizer = made(model, name, sharded, bucket_size)
        state = {"model": module.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer)}
        dcp.load(state, checkpoint_id=f"{folder}/{model}, {name}")
        module.load_state_dict(state["model"])
        set_optimizer_state_dict(module, optimizer, state["optimizer"])
        train(model, module, ddp, optimizer, range(2, 4))
        found[model, name] = weights_of(module)
    return found


def fsdp2(rank, folder):
    """States that FSDP2's FusedAdam has, loaded from the sharded optimizer's file, whole; and the way back."""
    module = fully_shard(build("plain"), mesh=init_device_mesh(here().type, (dist.get_world_size(),)))
    adam = te.optimizers.FusedAdam(module.parameters(), lr=1e-2, weight_decay=0.1, master_weights=True)
    for p in module.parameters():
        adam.initialize_state(p)
    adam.param_groups[0]["step"] = 0  # as in one that has taken a step: what is not there is not loaded
    state = {"optimizer": get_optimizer_state_dict(module, adam)}
    dcp.load(state, checkpoint_id=f"{folder}/plain, fused_adam")
    set_optimizer_state_dict(module, adam, state["optimizer"])
    whole = {
        n: {name: value.full_tensor() for name, value in adam.state[p].items()} for n, p in module.named_parameters()
    }
    dcp.save({"optimizer": get_optimizer_state_dict(module, adam)}, checkpoint_id=f"{folder}/fsdp2")
    plain, _, optimizer = made("plain", "fused_adam", True, 700)
    back = {"optimizer": get_optimizer_state_dict(plain, optimizer)}
    dcp.load(back, checkpoint_id=f"{folder}/fsdp2")
    set_optimizer_state_dict(plain, optimizer, back["optimizer"])
    names = {p: n for n, p in plain.named_parameters()}
    parts = {}
    for shard in (s for own in optimizer._shards for s in own):
        kept = optimizer._steps.keeper.state[shard.weight]
        for name, value in kept.items():
            wanted = whole[names[shard.param]][name].reshape(-1)[shard.start : shard.end]
            assert torch.equal(value.reshape(-1), wanted), (names[shard.param], name)
            parts[names[shard.param], name] = value.numel()
    assert parts
    return whole
