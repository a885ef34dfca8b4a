# The worker functions of test_parallel_rare.py: rare uses of tensor-parallel layers, on each of several ranks (ranks.py
# starts them). No test here: each worker returns what is wrong, as words.
import itertools

import torch
import torch.distributed as dist
from ranks import here, making_tensors_here, one_by_one, ranks_compare

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import linear

from .parallel_edge_workers import said

WIDE, NARROW = 32, 16


def layer(mode, **options):
    shared = {"sequence_parallel": True, "tp_group": dist.group.WORLD, "device": here()}
    return te.Linear(WIDE, WIDE, parallel_mode=mode, **{**shared, **options})


def width(mode):
    return WIDE if mode == "column" else NARROW


def gradients(module, x, dy):
    module.zero_grad(set_to_none=True)
    leaf = x.detach().requires_grad_()
    y = module(leaf)
    y.backward(dy)
    return [y.detach(), leaf.grad, *(p.grad for p in module.parameters())]


def strides(rank):
    """Inputs and gradients that are not contiguous, compared with contiguous ones; CPU GEMMs may differ in bits."""
    wrong = []
    for mode, sequence in itertools.product(("column", "row"), (True, False)):
        module = layer(mode, sequence_parallel=sequence)
        x = torch.randn(width(mode), 2, 4).transpose(0, 2)
        dy = torch.randn(module(x).shape[-1]).expand(module(x).shape)
        others = gradients(module, x.contiguous(), dy.contiguous())
        if not all(torch.allclose(*pair, atol=1e-5) for pair in zip(gradients(module, x, dy), others)):
            wrong.append(f"{mode} {sequence}")
    return wrong


def operators(rank):
    """group_sum leaves its input unchanged; a group whose size is not the given one is refused."""
    name, x = dist.group.WORLD.group_name, torch.full((3,), rank + 1.0)
    total = torch.ops.te.group_sum(x, name, 2)
    wrong = [] if total.tolist() == [3.0] * 3 and x.tolist() == [rank + 1.0] * 3 else ["group_sum"]
    tp_comm = _C.GroupTPComm(1, True, 1, 4, name)
    words = said(lambda: linear(torch.randn(4, WIDE), torch.randn(NARROW, WIDE), tp_comm=tp_comm))
    wrong += [] if words.startswith("RuntimeError: the process group") and "2 ranks, wanted 4" in words else [words]
    if not ranks_compare():
        return wrong
    dtype = (torch.float32, torch.int32)[rank]  # of equal size
    words = said(lambda: torch.ops.te.group_gather(torch.ones(2, dtype=dtype), name, 2))
    return wrong + ([] if "rank 0 passes Float [2]" in words and "rank 1 passes Int [2]" in words else [words])


def switched(rank):
    """sequence_parallel and what is kept may change between calls; in a group of one nothing is marked."""
    wrong, module = [], layer("column")
    x = torch.randn(4, WIDE)
    shapes = []
    for module.sequence_parallel in (True, False, True):
        shapes.append(len(module(x)))
    wrong += [] if shapes == [8, 4, 8] else [f"{shapes}"]
    alone = dist.new_group([rank], use_local_synchronization=True)
    single = te.LayerNormMLP(
        WIDE, WIDE, set_parallel_mode=True, sequence_parallel=True, tp_group=alone, tp_size=2, device=here()
    )
    marked = [name for name, p in single.named_parameters() if getattr(p, "sequence_parallel", False)]
    return wrong + ([] if not marked and (single.tp_size, single.sequence_parallel) == (1, False) else [f"{marked}"])


def delayed(rank):
    """Tensors that backward_dw() of a divided layer will read may not be written before it."""
    wrong = []
    for mode, what in itertools.product(("column", "row"), ("input", "gradient")):
        module = layer(mode, delay_wgrad_compute=True, tp_recompute_allgather=True)
        x, seen = torch.randn(4, width(mode), requires_grad=True), {}
        seen["input"] = x * 1
        y = module(seen["input"])
        seen["gradient"] = torch.ones_like(y)
        y.backward(seen["gradient"])
        with torch.no_grad():
            seen[what].add_(1)
        words = said(module.backward_dw)
        wrong += [] if "was changed in place since backward()" in words else [f"{mode} {what}: {words}"]
        module.drop_backward_dw()
    return wrong


def square_blocks(rank):
    """Gathered in blocks of 128 x 128, input or gradient: the bits of the module whole."""
    wrong, ranks = [], dist.get_world_size()
    if here().type == "cuda":  # whose products add up in another order for a part than for the whole
        return []
    _C.set_cpu_products("loop")
    for mode, rows in itertools.product(("column", "row"), (128, 64)):
        blocks = {"x_block_scaling_dim": 1, "w_block_scaling_dim": 1, "grad_block_scaling_dim": 1}
        blocks["x_block_scaling_dim" if mode == "column" else "grad_block_scaling_dim"] = 2
        recipe, of_weight = Float8BlockScaling(**blocks), 0 if mode == "column" else 1
        torch.manual_seed(4)
        weight, x, dy = torch.randn(512, 512), torch.randn(rows * ranks, 512), torch.randn(rows * ranks, 512)
        inputs, outputs = (0, 1) if mode == "column" else (1, 0)
        found = []
        for options in ({}, {"parallel_mode": mode, "sequence_parallel": True, "tp_group": dist.group.WORLD}):
            module = te.Linear(512, 512, bias=False, device=here(), **options)
            own = (lambda t, dim: t.chunk(ranks, dim)[rank].contiguous()) if options else (lambda t, dim: t)
            with torch.no_grad():
                module.weight.copy_(own(weight, of_weight))
            leaf = own(x, inputs).clone().requires_grad_()
            with te.autocast(enabled=True, recipe=recipe):
                y = module(leaf)
            y.backward(own(dy, outputs))
            found.append([y.detach(), leaf.grad, module.weight.grad])
        (y, dx, dw), (own_y, own_dx, own_dw) = found
        # Sums over ranks are not compared.
        wanted, got = (y, own_y) if mode == "column" else (dx, own_dx)
        if not torch.equal(got, wanted.chunk(ranks, 1)[rank]) or not torch.equal(
            own_dw, dw.chunk(ranks, of_weight)[rank]
        ):
            wrong.append(f"{mode} {rows}")
    _C.set_cpu_products("libtorch")
    return wrong


def compiled_main_grad(rank):
    """Two backwards into main_grad, compiled and eager."""
    wrong = []
    for mode in ("column", "row"):
        module = layer(mode, fuse_wgrad_accumulation=True)
        torch._dynamo.reset()
        x, found = torch.randn(4, width(mode)), []
        for call in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
            module.weight.main_grad = torch.full(module.weight.shape, 0.5)
            for _ in range(2):
                call(x).square().sum().backward()
            found.append(module.weight.main_grad)
        wrong += [] if torch.equal(*found) else [mode]
    return wrong


def late_weights(rank):
    """A weight's FP8 gradient has the same bits where it is asked for later, or alone: what came for the input's own
    gradient is gone then, or never came."""
    wrong = []
    for mode, rows in itertools.product(("column", "row"), (128, 64)):
        torch.manual_seed(rank)
        x, dy, found = torch.randn(rows, width(mode)), torch.randn(2 * rows, WIDE), []
        for delay, alone in ((False, False), (True, False), (False, True)):
            module = layer(mode, delay_wgrad_compute=delay, init_method=torch.nn.init.ones_)
            with te.autocast(enabled=True, recipe=Float8BlockScaling()):
                y = module(x.clone().requires_grad_(not alone))
            y.backward(dy[: y.shape[0], : y.shape[1]])
            if delay:
                module.backward_dw()
            found.append(module.weight.grad)
        wrong += [] if all(torch.equal(found[0], other) for other in found[1:]) else [f"{mode} {rows}"]
    return wrong


WORKERS = (strides, operators, switched, delayed, square_blocks, compiled_main_grad, late_weights)


def everything(rank):
    """One start of the ranks for all of them."""
    with making_tensors_here():
        return one_by_one(rank, WORKERS)
