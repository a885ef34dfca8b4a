# Transformer layers on a mesh of data-parallel and tensor-parallel ranks (ranks.py starts them), trained a few steps.
import torch
import torch.distributed.checkpoint as dcp
from ranks import at_most, here
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import transformer_engine.pytorch as te
from transformer_engine.pytorch import distributed

TENSOR = 2
DATA = at_most(2 * TENSOR) // TENSOR
HIDDEN, TOKENS, BATCH, STEPS, RATE = 32, 8, 4, 3, 0.1


def stack(**parallel):
    """With biases and norms: gradients that are of a rank's own tokens."""
    torch.manual_seed(3)
    options = {"num_gqa_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation": "swiglu"}
    options |= dict.fromkeys(("init_method", "output_layer_init_method"), lambda w: torch.nn.init.normal_(w, std=0.2))
    layers = (te.TransformerLayer(HIDDEN, 2 * HIDDEN, 4, device=here(), **options, **parallel) for _ in range(2))
    return torch.nn.Sequential(*layers)


def batch(step):
    return torch.randn(TOKENS, BATCH, HIDDEN, generator=torch.Generator().manual_seed(step)).to(here())


def loss_of(y):
    """Of what a rank has of the batch's tokens, by their number in all of its data-parallel part."""
    return (y - 1.0).square().sum() / (TOKENS * BATCH // DATA * HIDDEN)


def optimizer_of(module):
    return torch.optim.SGD(module.parameters(), RATE, momentum=0.9)


def whole():
    """The undivided layers, trained on all data: {name: value}."""
    module = stack()
    optimizer = optimizer_of(module)
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss_of(module(batch(step))) / DATA).backward()
        optimizer.step()
    return {name: t.clone() for name, t in parameters_of(module, None).items()}


def parameters_of(module, mesh):
    state = distributed.tensor_parallel_state_dict(module, mesh)
    return {name: t for name, t in state.items() if isinstance(t, torch.Tensor) and "_extra_state" not in name}


def divided(mesh, sequence):
    """Layers with the parts that the undivided ones have."""
    module = stack(set_parallel_mode=True, tp_group=mesh.get_group(), sequence_parallel=sequence)
    start = parameters_of(stack(), None)
    for name, t in parameters_of(module, mesh).items():
        if isinstance(t, DTensor):
            t.to_local().copy_(start[name].chunk(TENSOR, t.placements[0].dim)[mesh.get_local_rank()])
        else:
            t.copy_(start[name])
    return module


def trained(rank, folder):
    """{way: {name: trained value, put together}}; what FSDP2 trained is also saved by DCP."""
    mesh = init_device_mesh(here().type, (DATA, TENSOR), mesh_dim_names=("dp", "tp"))
    found = {}
    for way, sequence in (("DDP", True), ("DDP", False), ("FSDP2", True), ("FSDP2", False)):
        module = divided(mesh["tp"], sequence)
        if way == "DDP":
            runs = DistributedDataParallel(module, process_group=mesh["dp"].get_group())
        else:
            for layer in module:
                fully_shard(layer, mesh=mesh["dp"])
            runs = fully_shard(module, mesh=mesh["dp"])
        optimizer = optimizer_of(module)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = batch(step).chunk(DATA, 1)[mesh.get_local_rank("dp")]
            if sequence:
                x = x.chunk(TENSOR, 0)[mesh.get_local_rank("tp")]
            loss_of(runs(x)).backward()
            distributed.allreduce_sequence_parallel_grads(module, mesh["tp"].get_group())
            optimizer.step()
        state = parameters_of(module, mesh["tp"])
        found[way, sequence] = {n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in state.items()}
    dcp.save(distributed.tensor_parallel_state_dict(module, mesh["tp"]), checkpoint_id=folder)
    return found
