#!/usr/bin/env python
"""FSDP2 (fully_shard) around our layers: each rank has a part of every parameter, gathered layer by layer.

torchrun --nproc-per-node=2 examples/with_fsdp2.py       NCCL if each rank has a GPU, else gloo; one rank works too
Needs torch alone (the extra `fsdp2` is empty). Every rank takes its own part of the batch; prints the mean loss."""

import argparse
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transformer_engine.pytorch as te

HIDDEN, TOKENS, BATCH = 64, 32, 4


def model(device) -> torch.nn.Module:
    options = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "device": device}
    return torch.nn.Sequential(
        *(
            te.TransformerLayer(HIDDEN, 2 * HIDDEN, 4, hidden_dropout=0.0, attention_dropout=0.0, **options)
            for _ in range(2)
        )
    )


def train(device, mesh, steps: int) -> list[float]:
    torch.manual_seed(0)  # the same first weights on every rank
    network = model(device)
    for layer in network:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)  # the shards are DTensors
    batch = torch.randn(steps, TOKENS, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device)
    mine, losses = batch.chunk(mesh.size(), 2)[mesh.get_local_rank()], []
    for x in mine:
        loss = torch.nn.functional.mse_loss(network(x), x.roll(1, -1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / mesh.size())
    return losses


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args(arguments)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:  # without torchrun: one rank
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cpu")
    if torch.cuda.device_count() >= dist.get_world_size():
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    losses = train(device, mesh, args.steps)
    if dist.get_rank() == 0:
        print(f"{mesh.size()} ranks, step 1: loss {losses[0]:.6f}, step {args.steps}: loss {losses[-1]:.6f}")
    dist.barrier()  # the connections of a rank end with it
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
