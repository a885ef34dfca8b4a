# The worker functions of test_gradients.py, which run on each rank: modules whose parameters have gradients of the
# rank's own tokens.
import torch
import torch.distributed as dist
from ranks import at_most, here
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import allreduce_sequence_parallel_grads as allreduce
from transformer_engine.pytorch.distributed import gradients

from .region_workers import told_by

HIDDEN, TOKENS = 6, 8
RANKS = at_most(4)  # of two, a sum in bfloat16 rounds once too


def norms(dtype=torch.float32):
    """Two norms on each side of a plain layer, of which the last shares its parameters with the first."""
    torch.manual_seed(3)
    first = te.LayerNorm(HIDDEN, sequence_parallel=True, params_dtype=dtype, device=here())
    second = te.RMSNorm(HIDDEN, sequence_parallel=True, params_dtype=dtype, device=here())
    last = te.LayerNorm(HIDDEN, sequence_parallel=True, params_dtype=dtype, device=here())
    last.weight, last.bias = first.weight, first.bias
    return torch.nn.Sequential(first, torch.nn.Linear(HIDDEN, HIDDEN, dtype=dtype, device=here()), second, last)


def batch(dtype=torch.float32):
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(7)).to(here(), dtype)


def grads_of(module, x):
    (module(x) * torch.linspace(-1, 1, HIDDEN).to(x)).sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def with_grads(shapes, rank, dtype=torch.float32):
    """A module of marked parameters with whole numbers as gradients, each rank's its own."""
    module = torch.nn.Module()
    for i, shape in enumerate(shapes):
        p = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=here()))
        p.sequence_parallel = True
        p.grad = torch.full(shape, float(10 * i + rank + 1), dtype=dtype, device=here())
        module.register_parameter(f"p{i}", p)
    return module


def counted(call):
    """The result of a call, and the number of its all-reduces."""
    calls, reduce = [], dist.all_reduce

    def noted(*args, **kwargs):
        calls.append(args)
        return reduce(*args, **kwargs)

    dist.all_reduce = noted
    try:
        return call(), len(calls)
    finally:
        dist.all_reduce = reduce


def everything(rank, ranks):
    world, got = dist.group.WORLD, {}
    rows = TOKENS // ranks
    for dtype in (torch.float32, torch.bfloat16):
        module = norms(dtype)
        own = grads_of(module, batch(dtype)[rank * rows : (rank + 1) * rows])
        _, got["collectives", dtype] = counted(lambda m=module: allreduce(m, world))
        got["own", dtype] = own
        got["summed", dtype] = {name: p.grad for name, p in module.named_parameters()}
    got["again"] = []
    for _ in range(2):
        module = norms()
        grads_of(module, batch()[rank * rows : (rank + 1) * rows])
        allreduce(module, world)
        got["again"].append({name: p.grad for name, p in module.named_parameters()})

    # Where the gradient lies: main_grad, a dummy beside it, nothing at all, an expanded one, a DTensor's local part.
    module = with_grads([(3,), (2, 2), (4,), (5,), (2,)], rank)
    module.p0.main_grad = module.p0.grad.clone()
    module.p0.grad = None
    module.p1.main_grad, module.p1.grad_added_to_main_grad = module.p1.grad.clone(), True
    module.p1.get_main_grad = lambda p=module.p1: p.main_grad
    module.p1.grad = torch.full((2, 2), torch.nan, device=here())
    if rank == 0:
        module.p2.grad = None
    module.p3.grad = torch.tensor(float(rank + 1), device=here()).expand(5)
    module.p4.grad = None
    frozen = torch.nn.Parameter(torch.zeros(2, device=here()), requires_grad=False)
    frozen.sequence_parallel, module.frozen = True, frozen
    module.other = torch.nn.Parameter(torch.zeros(2, device=here()))
    module.other.grad = torch.full((2,), float(rank), device=here())
    memory = module.p0.main_grad.data_ptr(), module.p1.main_grad.data_ptr()
    allreduce(module, world)
    assert memory == (module.p0.main_grad.data_ptr(), module.p1.main_grad.data_ptr())
    assert module.p0.grad is None and module.p1.grad.isnan().all() and module.p4.grad is None
    got["places"] = [module.p0.main_grad, module.p1.main_grad, module.p2.grad, module.p3.grad, module.other.grad]

    mesh = init_device_mesh(here().type, (ranks,))
    sharded = with_grads([(2, 3)], rank)
    p = torch.nn.Parameter(DTensor.from_local(torch.zeros(2, 3, device=here()), mesh, [Shard(0)]))
    p.sequence_parallel, p.grad = True, DTensor.from_local(sharded.p0.grad, mesh, [Shard(0)])
    sharded.p0 = p
    allreduce(sharded, world)
    got["DTensor"] = p.grad.to_local()

    mesh = init_device_mesh(here().type, (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    module = te.LayerNorm(HIDDEN, sequence_parallel=True, device=here())
    fully_shard(module, mesh=mesh["dp"])  # its parameters carry no marks
    for i, p in enumerate(module.parameters()):
        whole = torch.full((HIDDEN,), 10.0 * i + mesh["tp"].get_local_rank() + 1, device=here())
        p.grad = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
    allreduce(module, mesh["tp"].get_group())
    got["FSDP2"] = [p.grad.full_tensor() for p in module.parameters()]

    small, gradients._BUCKET = gradients._BUCKET, 6
    try:
        module = with_grads([(3,), (3,), (9,), (2,)], rank)
        _, got["buckets"] = counted(lambda: allreduce(module, world))
        got["of buckets"] = [p.grad for p in module.parameters()]
    finally:
        gradients._BUCKET = small
    assert counted(lambda: allreduce(torch.nn.Linear(2, 2), world))[1] == 0
    alone = [dist.new_group([r]) for r in range(ranks)][rank]
    module = with_grads([(3,)], rank)
    assert counted(lambda: allreduce(module, alone))[1] == 0 and torch.equal(
        module.p0.grad.cpu(), torch.full((3,), rank + 1.0)
    )
    got["refused"] = refusals(rank, world)
    return got


def refusals(rank, world):
    told = {"module": told_by(allreduce, [1], world), "group": told_by(allreduce, torch.nn.Linear(2, 2), "tp")}
    sparse = with_grads([(3,), (4,)], rank)
    sparse.p1.grad = torch.eye(4, device=here())[0].to_sparse()
    told["sparse"] = told_by(allreduce, sparse, world)
    assert torch.equal(sparse.p0.grad.cpu(), torch.full((3,), rank + 1.0))
    meta = with_grads([(3,)], rank)
    meta.p1 = torch.nn.Parameter(torch.zeros(3, device="meta"))
    meta.p1.sequence_parallel = True
    told["device"] = told_by(allreduce, meta, world)
    told["others"] = told_by(allreduce, with_grads([(3,), (4,)][: rank + 1], rank), world)
    gone = dist.new_group(list(range(dist.get_world_size())))
    dist.destroy_process_group(gone)
    told["destroyed"] = told_by(allreduce, sparse, gone)
    return told
