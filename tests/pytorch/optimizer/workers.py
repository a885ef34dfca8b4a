# The worker functions of optimizers' suites, which run on each of two ranks (ranks.py starts them): FSDP2 around plain
# and quantized weights.
import torch
import torch.distributed.checkpoint as dcp
from rank_workers import batch_of, fresh, whole
from ranks import here
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD

from ..tensor.workers import FSDP_SHAPES, Layer, batch

STEPS, FAMILY = 3, "TransformerLayer"
PLAIN = {
    "adam": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.1),
    "masters": lambda params: FusedAdam(params, lr=0.01, master_weights=True, exp_avg_dtype=torch.bfloat16),
    "scaled": lambda params: FusedAdam(params, lr=0.01, exp_avg_dtype=torch.float16),
    "sgd": lambda params: FusedSGD(params, lr=0.01, momentum=0.9),
}
QUANTIZED = [name for name in FSDP_SHAPES if name != "block1d"]


def adam_of(weight):
    return FusedAdam([weight], lr=2.0**-6, master_weights=True)


def one_step(module, optimizer, x):
    optimizer.zero_grad()
    module(x).float().square().mean().backward()
    optimizer.step()


def _same(a, b, what):
    a, b = (t.to_local() if isinstance(t, DTensor) else t for t in (a, b))
    assert a.dtype is b.dtype and torch.equal(a, b), what


def plain_weights(rank, folder):
    """{optimizer: parameters after STEPS}; one more step after a resume from DCP is that of the one that went on."""
    results, mesh = {}, init_device_mesh(here().type, (2,))
    for name, make in PLAIN.items():
        module = fully_shard(fresh(FAMILY), mesh=mesh)
        optimizer = make(module.parameters())
        for step in range(STEPS):
            one_step(module, optimizer, batch_of(FAMILY, step, rank))
        results[name] = whole(module)
        p = next(iter(module.parameters()))
        assert all(isinstance(t, DTensor) and t.placements == p.placements for t in optimizer.state[p].values())
        path = f"{folder}/{name}"
        dcp.save({"optimizer": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=path)
        values = {key: t.to_local().clone() for key, t in module.named_parameters()}
        other = fully_shard(fresh(FAMILY), mesh=mesh)
        again = make(other.parameters())
        into = {"optimizer": get_optimizer_state_dict(other, again)}
        dcp.load(into, checkpoint_id=path)
        with torch.no_grad():
            for key, t in other.named_parameters():
                t.to_local().copy_(values[key])
        set_optimizer_state_dict(other, again, into["optimizer"])
        for m, o in ((module, optimizer), (other, again)):
            one_step(m, o, batch_of(FAMILY, STEPS, rank))
        for key, t in whole(other).items():
            _same(t, whole(module)[key], f"{name}: {key}")
        for p, q in zip(module.parameters(), other.parameters()):
            for key, t in again.state[q].items():
                _same(t, optimizer.state[p][key], f"{name}: {key}")
    return results


def quantized_weights(rank):
    """{format: the trained values of this rank's rows}."""
    results, mesh = {}, init_device_mesh(here().type, (2,))
    for name in QUANTIZED:
        shape = FSDP_SHAPES[name]
        module = fully_shard(Layer(name, shape), mesh=mesh)
        optimizer = adam_of(module.weight)
        for step in range(STEPS):
            optimizer.zero_grad()
            module(batch(step, rank, shape)).sum().backward()
            optimizer.step()
        assert isinstance(optimizer.state[module.weight]["master_param"], DTensor)
        results[name] = module.weight.to_local().dequantize()
    return results


def gradient_that_lies_otherwise():
    """A step of rows by a gradient that is whole on each rank, and the same step without sharding."""
    mesh, values = init_device_mesh(here().type, (2,)), torch.arange(12.0, device=here()).view(4, 3)
    plain, sharded = torch.nn.Parameter(values.clone()), torch.nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
    plain.decoupled_grad = values.sin()
    sharded.decoupled_grad = DTensor.from_local(values.sin(), mesh, [Replicate()])
    for p in (plain, sharded):
        FusedAdam([p], lr=0.5, use_decoupled_grad=True).step()
    return sharded.detach().full_tensor(), plain.detach()


def everything(rank, folder):
    plain, quantized = plain_weights(rank, folder), quantized_weights(rank)
    return {"plain": plain, "quantized": quantized, "otherwise": gradient_that_lies_otherwise()}
