# The worker functions of the suites of quantized tensors, which run on each of several ranks (ranks.py starts them).
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from quantized_cases import FORMATS, current, parts_of
from ranks import here
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from transformer_engine.pytorch import _C

STEPS, RATE = 3, 2.0**-4
FSDP_SHAPES = {"delayed": (6, 40), "current": (7, 40), "block2d": (256, 48), "identity": (6, 40)}


class Layer(torch.nn.Module):
    """y = x w^T with a quantized w; keeps what its forward was given."""

    def __init__(self, name, shape):
        super().__init__()
        values = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
        self.weight = torch.nn.Parameter(FORMATS[name](device=here())(values.to(here())))
        self.seen = None

    def forward(self, x):
        self.seen = self.weight.detach().clone()
        return torch.nn.functional.linear(x, self.weight)


def batch(step, rank, shape):
    """Whole numbers, so that gradients and their sums are exact in any order."""
    seed = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-2, 3, (4, shape[1]), generator=seed).float().to(here())


def step_of(module, optimizer, x):
    optimizer.zero_grad()
    module(x).sum().backward()
    optimizer.step()


def plain(t):
    return {"class": type(t).__name__, "parts": parts_of(t), "usages": t.get_usages()}


def fsdp2(rank, folder):
    """{format: what the forwards saw, and the trained values}, the weight sharded; also through DCP."""
    results, mesh = {}, init_device_mesh(here().type, (2,))
    for name, shape in FSDP_SHAPES.items():
        module = fully_shard(Layer(name, shape), mesh=mesh)
        local = module.weight.to_local()
        assert type(local) is type(FORMATS[name](device=here())(torch.ones(2, 40, device=here()))), type(local)
        assert isinstance(module.weight, torch.nn.Parameter)
        optimizer = torch.optim.SGD(module.parameters(), RATE, foreach=rank == 0)
        seen = []
        for step in range(STEPS):
            step_of(module, optimizer, batch(step, rank, shape))
            seen.append(plain(module.seen))
        local = module.weight.to_local()
        dcp.save(module.state_dict(), checkpoint_id=f"{folder}/{name}")
        other = fully_shard(Layer(name, shape), mesh=mesh)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        other.load_state_dict(state)
        again = other.weight.to_local()
        for field, part in parts_of(local).items():
            assert torch.equal(parts_of(again)[field], part), f"{name}: {field}"
        results[name] = seen, plain(local), local.dequantize()
    return results


def fsdp2_refusals(rank):
    """The errors of the formats whose blocks a shard would split."""
    mesh, found = init_device_mesh(here().type, (2,)), {}
    for name, shape in (("block1d", (256, 48)), ("block2d", (130, 48)), ("hybrid", (256, 48))):
        module = fully_shard(Layer(name, shape), mesh=mesh)
        try:
            module(torch.ones(2, 48, device=here()))
        except NotImplementedError as error:
            found[name] = str(error)
    return found


def ddp(rank):
    """The trained parts of every format."""
    results = {}
    for name in FORMATS:
        module = Layer(name, (6, 40))
        wrapper = DistributedDataParallel(module)
        optimizer = torch.optim.SGD(wrapper.parameters(), RATE)
        for step in range(STEPS):
            step_of(wrapper, optimizer, batch(step, rank, (6, 40)))
        results[name] = parts_of(module.weight)
    return results


def reduced_amax(rank):
    """Current scaling of the halves of one tensor, their amax agreed on."""
    x = torch.arange(-40.0, 40.0, device=here()).view(2, 4, 10)[rank]
    quantizer = current(device=here(), with_amax_reduction=True, amax_reduction_group=dist.group.WORLD)
    native = quantizer._native()
    through_engine = _C.quantize(native, x, True, False)
    return parts_of(quantizer(x)), native.kind, through_engine.rowwise


def everything(rank, folder):
    """All of the above: starting processes takes longer than they do."""
    warnings.simplefilter("ignore")
    return {
        "fsdp2": fsdp2(rank, folder),
        "refusals": fsdp2_refusals(rank),
        "ddp": ddp(rank),
        "amax": reduced_amax(rank),
    }
