# Workers of test_stacked_ranks.py: mixtures of stacked experts over ranks, and as they were.
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import here
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import transformer_engine.pytorch as te
from transformer_engine.pytorch.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from transformer_engine.pytorch.data_parallel.optimizer import DistributedOptimizer

from .cases import BF16, EXPERTS, FFN, HIDDEN, TOKENS, TOPK, as_before, in_todays_names

OPTIMIZERS = {
    "masters": lambda params: te.optimizers.FusedAdam(params, lr=1e-2, weight_decay=0.1, master_weights=True),
    "fused_sgd": lambda params: te.optimizers.FusedSGD(params, lr=1e-2, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
}


def layer(before=False, **options):
    """The same one on every rank; one rank's experts are those of the whole layer."""
    torch.manual_seed(0)
    whole = te.MoEMLP(HIDDEN, FFN, EXPERTS, TOPK, params_dtype=BF16, device=here(), **options)
    return as_before(whole) if before else whole


def made(name, before=False, sharded=True, bucket_size=3000):
    module = layer(before, fuse_wgrad_accumulation=True, aux_loss_coeff=0.01)
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=sharded,
        use_distributed_optimizer=sharded,
        bucket_size=bucket_size,
    )
    ddp = DistributedDataParallel(config, module)
    return module, ddp, DistributedOptimizer(OPTIMIZERS[name](module.parameters()), ddp)


def batch(step):
    """The same on all ranks, whose mean it is then."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(TOKENS, HIDDEN, generator=generator).to(here(), BF16)


def train(ddp, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        y, loss = ddp(batch(step))
        (y.float().square().mean() + loss).backward()
        optimizer.step()


def weights_of(module):
    state = {n: p.detach().clone() for n, p in module.state_dict().items() if n.endswith("weight") or n[-1].isdigit()}
    return in_todays_names(state)


def save(rank, folder, before):
    """Files of both forms of state dicts, and the weights two steps later."""
    found = {}
    for name in OPTIMIZERS:
        module, ddp, optimizer = made(name, before)
        train(ddp, optimizer, range(2))
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        state["by name"] = get_optimizer_state_dict(module, optimizer)
        dcp.save(state, checkpoint_id=f"{folder}/{name}")
        train(ddp, optimizer, range(2, 4))
        found[name] = weights_of(module)
    return found


def load(rank, folder, sharded, bucket_size, kept=None):
    """The weights two steps after the file. kept: where the run is saved in the other form and read from it first."""
    found = {}
    for name in OPTIMIZERS:
        module, ddp, optimizer = made(name, False, sharded, bucket_size)
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if kept is not None:
            by_name = {"optimizer": get_optimizer_state_dict(module, optimizer)}
            dcp.save(by_name, checkpoint_id=f"{kept}/{name}")
            module, ddp, optimizer = made(name, False, sharded, bucket_size + 1000)
            module.load_state_dict(state["model"])
            by_name = {"optimizer": get_optimizer_state_dict(module, optimizer)}
            dcp.load(by_name, checkpoint_id=f"{kept}/{name}")
            set_optimizer_state_dict(module, optimizer, by_name["optimizer"])
        train(ddp, optimizer, range(2, 4))
        found[name] = weights_of(module)
    return found


def convert(rank, folder, sharded, form):
    """The weights two steps after a file of before, converted; and the errors of the file itself."""
    found = {}
    for name in OPTIMIZERS:
        module, ddp, optimizer = made(name, False, sharded)
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        state["by name"] = get_optimizer_state_dict(module, optimizer)
        for part in state:
            try:
                dcp.load({part: state[part]}, checkpoint_id=f"{folder}/{name}")
            except CheckpointException as error:
                found[name, part] = str(error)
        old = torch.load(f"{folder}/{name}.pt", weights_only=False)
        module.load_state_dict(old["model"])
        if form == "optimizer":  # the file has numbers as words
            old[form]["state"] = {int(number): state for number, state in old[form]["state"].items()}
        optimizer.load_state_dict(old[form])
        train(ddp, optimizer, range(2, 4))
        found[name] = weights_of(module)
    return found


def part_of_a_file(rank, file):
    """A state dict of before, of this rank's shards alone, through a file of torch.save."""
    _, ddp, optimizer = made("masters", True)
    train(ddp, optimizer, range(1))
    torch.save(optimizer.state_dict(), f"{file}{rank}")
    _, ddp, optimizer = made("masters")
    try:
        optimizer.load_state_dict(torch.load(f"{file}{rank}", weights_only=False))
    except ValueError as error:
        return str(error)
    return None


def whole_states(rank, before):
    """The weights of a run, and of one in the other form that goes on from its states, whose shards are whole here."""
    runs = [made("masters", form) for form in (before, not before)]
    (module, ddp, optimizer), (other, _, second) = runs
    train(ddp, optimizer, range(2))
    te.distributed.ensure_params_ready(module.parameters())
    other.load_state_dict(module.state_dict())
    second.load_state_dict(optimizer.state_dict())
    for module, ddp, optimizer in runs:
        train(ddp, optimizer, range(2, 4))
        te.distributed.ensure_params_ready(module.parameters())
    return [weights_of(module) for module, _, _ in runs]


def beside_ddp(rank, before):
    """Each rank has half of the experts; the router is shared. The weights after two steps, and the buffers' sizes."""
    whole = layer()
    first = rank * EXPERTS // 2
    module = te.MoEMLP(
        HIDDEN, FFN, EXPERTS, TOPK, experts=(first, first + EXPERTS // 2), params_dtype=BF16, device=here(),
        fuse_wgrad_accumulation=True,
    )  # fmt: skip
    state = whole.state_dict()
    own = {n: state[n][first : first + EXPERTS // 2] for n in ("experts.fc1.weight", "experts.fc2.weight")}
    module.load_state_dict(state | own)
    module = as_before(module) if before else module
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    alone = [dist.new_group([r]) for r in range(2)][rank]
    ddp = DistributedDataParallel(config, module, expert_process_group=alone)
    optimizer = DistributedOptimizer(OPTIMIZERS["masters"](module.parameters()), ddp, clip_grad=1.0)
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        ddp(batch(step))[0].float().sum().backward()
        norms.append(float(optimizer.step()))
    te.distributed.ensure_params_ready(module.parameters())
    return weights_of(module), norms, [b.numel_unpadded for b in ddp.expert_parallel_buffers]


def sharded_by_fsdp2(rank, experts):
    """A rank's parts of both stacks, and y, whole gradients and weights after a step, beside one process."""
    got = []
    for shard in (False, True):
        torch.manual_seed(0)
        module = te.MoEMLP(HIDDEN, FFN, experts, TOPK, params_dtype=BF16, device=here())
        if shard:
            fully_shard(module, mesh=init_device_mesh(here().type, (dist.get_world_size(),)))
        optimizer = te.optimizers.FusedAdam(module.parameters(), lr=0.1, master_weights=True)
        y, _ = module(batch(0))
        y.float().square().sum().backward()
        named = dict(module.named_parameters())
        local = [p.to_local().shape for n, p in named.items() if n.startswith("experts")] if shard else []
        grads = {n: p.grad for n, p in named.items()}
        optimizer.step()
        found = (
            {"y": y.detach()} | {f"{n}.grad": g for n, g in grads.items()} | {n: p.detach() for n, p in named.items()}
        )
        got.append({n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()})
    return local, *got
