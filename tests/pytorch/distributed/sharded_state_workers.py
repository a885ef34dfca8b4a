# The worker functions of test_sharded_state.py, which run on each rank: modules whose parameters are divided over t
# ranks, their state dicts, and torch's distributed checkpoints of them. CUT lists the part that each rank holds,
# independently of the library.
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import here
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.distributed import load_tensor_parallel_state_dict as load
from transformer_engine.pytorch.distributed import tensor_parallel_state_dict as state_of

from .region_workers import told_by

HIDDEN, FFN, HEADS, GROUPS, HEAD = 16, 24, 8, 4, 4
MOST = 4

# Parameter: (dimension, sizes of the whole's parts, each cut by itself; their names in the state dict).
_QKV = (HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD)
CUT = {
    "split.query_weight": (0, (16,), None),
    "split.query_bias": (0, (16,), None),
    "split.key_weight": (0, (8,), None),
    "split.key_bias": (0, (8,), None),
    "row.weight": (1, (HIDDEN,), None),
    "gated.fc1_weight": (0, (FFN, FFN), ("gate", "up")),
    "gated.fc1_bias": (0, (FFN, FFN), ("gate", "up")),
    "gated.fc2_weight": (1, (FFN,), None),
    "plain.fc1_weight": (0, (FFN,), None),
    "plain.fc1_bias": (0, (FFN,), None),
    "plain.fc2_weight": (1, (FFN,), None),
    "attention.qkv.weight": (0, _QKV, ("query", "key", "value")),
    "attention.qkv.bias": (0, _QKV, ("query", "key", "value")),
    "attention.proj.weight": (1, (HEADS * HEAD,), None),
    "strided.weight": (1, (8, 8), ("0", "1")),
    "tied.weight": (1, (HIDDEN,), None),
}


def marked(linear):
    """A module that is not part of the library: its parameters of FSDP2 have to be marked again."""
    for name, value in {"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 2}.items():
        setattr(linear.weight, name, value)
    return linear


class Parts(torch.nn.Module):
    def __init__(self, parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        raise NotImplementedError


def build(ranks):
    """A rank's modules."""
    n, options = ranks, {"device": here()}
    divided = {"tp_size": n, **options}
    attention = te.MultiheadAttention(
        HIDDEN,
        HEADS,
        HEAD,
        num_gqa_groups=GROUPS,
        set_parallel_mode=True,
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,
        **divided,
    )
    rows = {"query": 16, "key": 8}
    module = Parts(
        {
            "split": te.Linear(HIDDEN, 24, parallel_mode="column", parameters_split=rows, **divided),
            "row": te.Linear(HIDDEN, 8, parallel_mode="row", **divided),
            "gated": te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", set_parallel_mode=True, **divided),
            "plain": te.LayerNormMLP(HIDDEN, FFN, set_parallel_mode=True, **divided),
            "attention": attention,
            "strided": marked(torch.nn.Linear(16 // n, 3, bias=False, **options)),
            "norm": te.RMSNorm(HIDDEN, **options),
            "tied": te.Linear(HIDDEN, 8, bias=False, parallel_mode="row", **divided),
        }
    )
    module.tied.weight = module.row.weight
    return module


def whole():
    """{name: values} of the module of one rank."""
    generator = torch.Generator().manual_seed(11)
    found = {
        n: torch.randn(p.shape, generator=generator).to(here())
        for n, p in build(1).named_parameters(remove_duplicate=False)
    }
    return found | {"tied.weight": found["row.weight"]}


def shard_of(name, values, rank, ranks):
    if name not in CUT:
        return values
    dim, sizes, _ = CUT[name]
    return torch.cat([part.chunk(ranks, dim)[rank] for part in values.split(sizes, dim)], dim)


def filled(rank, ranks):
    module = build(ranks)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(shard_of(name, whole()[name], rank, ranks))
    return module


def wrong_parameters(module, rank, ranks, what):
    for name, p in module.named_parameters(remove_duplicate=False):
        values = p.full_tensor() if isinstance(p, DTensor) else p
        if not torch.equal(values, shard_of(name, whole()[name], rank, ranks)):
            yield f"{what}: {name}"


def wrong_state(state, module, ranks):
    """The entries of a state dict that differ from CUT, or that do not share the parameters' memory."""
    keys = [f"{name}.{part}" for name, (_, _, parts) in CUT.items() for part in parts or ()]
    keys += [n for n, _ in module.named_parameters(remove_duplicate=False) if n not in CUT or CUT[n][2] is None]
    if sorted(keys) != sorted(key for key in state if not key.endswith("_extra_state")):
        yield f"keys: {sorted(state)}"
    owner = dict(module.named_parameters(remove_duplicate=False))
    for key in keys:
        name = key if key in owner else key.rpartition(".")[0]
        value, local = state[key], state[key]
        if name in CUT:
            if not isinstance(value, DTensor) or value.placements != (Shard(CUT[name][0]),):
                yield f"{key}: {type(value)}"
                continue
            dim, sizes, parts = CUT[name]
            local = value.to_local()
            if value.shape[dim] != sizes[parts.index(key.rpartition(".")[2]) if parts else 0]:
                yield f"{key}: {tuple(value.shape)}"
        memory = owner[name].untyped_storage()
        if not memory.data_ptr() <= local.data_ptr() < memory.data_ptr() + memory.nbytes():
            yield f"{key}: not the parameter's memory"


def zeroed(module):
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    return module


def round_trips(rank, folder):
    """The errors after checkpoints of 1, 2 and 4 ranks were loaded at each of these sizes, on four processes."""
    wrong, meshes = [], {}
    for n in (1, 2, 4):
        meshes[n] = init_device_mesh(here().type, (MOST // n, n), mesh_dim_names=("dp", "tp"))
    meshes[4] = init_device_mesh(here().type, (4,))
    for n, mesh in meshes.items():
        module = filled(rank % n, n)
        state = state_of(module, mesh)
        wrong += [f"{n}: {what}" for what in wrong_state(state, module, n)]
        dcp.save(state, checkpoint_id=f"{folder}/{n}")
    for saved in meshes:
        for n, mesh in meshes.items():
            if saved == n != 2:
                continue
            module = zeroed(build(n))
            state = state_of(module, mesh)
            dcp.load(state, checkpoint_id=f"{folder}/{saved}")
            wrong += wrong_parameters(module, rank % n, n, f"{saved} -> {n}")
            load(module, state)
            wrong += wrong_parameters(module, rank % n, n, f"{saved} -> {n}, taken")
    module = zeroed(build(2))  # from a state dict of other memory
    load(module, state_of(filled(rank % 2, 2), meshes[2]))
    wrong += wrong_parameters(module, rank % 2, 2, "of another module")
    wrong += fsdp2(rank, meshes[2], folder)
    wrong += fp8(rank, meshes[2], folder)
    return wrong, refusals(meshes)


def fsdp2(rank, mesh, folder):
    module = fully_shard(filled(rank % 2, 2), mesh=mesh["dp"])
    marked(module.strided)
    dcp.save(state_of(module, mesh), checkpoint_id=f"{folder}/fsdp2")
    for saved in ("fsdp2", 4):
        other = fully_shard(zeroed(build(2)), mesh=mesh["dp"])
        marked(other.strided)
        state = state_of(other, mesh)
        dcp.load(state, checkpoint_id=f"{folder}/{saved}")
        load(other, state)
        yield from wrong_parameters(other, rank % 2, 2, f"{saved} -> FSDP2")
    other = zeroed(build(4))
    dcp.load(state_of(other, dist.device_mesh.init_device_mesh(here().type, (4,))), checkpoint_id=f"{folder}/fsdp2")
    yield from wrong_parameters(other, rank, 4, "FSDP2 -> 4")


def fp8(rank, mesh, folder):
    """_extra_state is written, and taken by load_tensor_parallel_state_dict."""

    def linear():
        return te.Linear(16, 32, parallel_mode="column", tp_group=mesh["tp"].get_group(), device=here())

    module = linear()
    with te.autocast(recipe=DelayedScaling(amax_history_len=2)):
        module(torch.full((16, 16), 3.0, device=here())).sum().backward()
    state = state_of(module, mesh)
    want = state["_extra_state"].clone()
    dcp.save(state, checkpoint_id=f"{folder}/fp8")
    other = linear()
    with te.autocast(recipe=DelayedScaling(amax_history_len=2)):
        other(torch.full((16, 16), 0.1, device=here())).sum().backward()
    state = state_of(other, mesh)
    dcp.load(state, checkpoint_id=f"{folder}/fp8")
    load(other, state)
    if not want.numel() or not torch.equal(other.state_dict()["_extra_state"], want):
        yield "_extra_state"


def refusals(meshes):
    told, mesh = {}, meshes[2]
    told["module"] = told_by(state_of, [1], mesh)
    told["mesh"] = told_by(state_of, torch.nn.Linear(2, 2), dist.group.WORLD)
    others = init_device_mesh(here().type, (2, 2), mesh_dim_names=("a", "b"))
    told["dimensions"] = told_by(state_of, torch.nn.Linear(2, 2), others)
    told["size"] = told_by(state_of, build(2), meshes[4])
    told["no mesh"] = told_by(state_of, build(2), None)
    unmarked = te.LayerNormMLP(8, 8, tp_size=2, device=here())
    told["unmarked"] = told_by(state_of, unmarked, mesh)
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        quantized = te.Linear(16, 16, device=here())
    told["quantized"] = told_by(state_of, quantized, mesh)
    told["quantized, loaded"] = told_by(load, quantized, {})
    module = build(2)
    partial = state_of(module, mesh)
    del partial["gated.fc1_weight.up"]
    told["partial"] = told_by(load, module, partial)
    stride = torch.nn.Linear(3, 3, bias=False)
    stride.weight.tensor_model_parallel, stride.weight.partition_dim, stride.weight.partition_stride = True, 0, 2
    told["stride"] = told_by(state_of, stride, mesh)
    stride.weight.partition_dim = 2
    told["dimension"] = told_by(state_of, stride, mesh)
    return told
