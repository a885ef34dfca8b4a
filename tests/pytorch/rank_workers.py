# What the suites run on each of several ranks (ranks.py starts them). A worker returns what its test compares.
import torch
import torch.distributed as dist

from transformer_engine.pytorch import distributed


def of_rank(rank, *shape):
    """Whole numbers, so that sums of them are exact in any order."""
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(rank)).float()


def collectives(rank):
    world, alone = dist.group.WORLD, [dist.new_group([r]) for r in range(2)][rank]
    x = of_rank(rank, 4, 3)
    got = {"input": x.clone()}
    for async_op in (False, True):
        for name, call in (
            ("gather", lambda a: distributed.gather_along_first_dim(x, world, async_op=a)),
            ("gather of columns", lambda a: distributed.gather_along_first_dim(x.t(), world, async_op=a)),
            ("reduce_scatter", lambda a: distributed.reduce_scatter_along_first_dim(x, world, async_op=a)),
            ("allreduce", lambda a: distributed.allreduce(x.clone(), world, async_op=a)),
            ("allreduce of everyone", lambda a: distributed.allreduce(x.clone(), async_op=a)),
        ):
            result, work = call(async_op)
            assert (work is not None) == async_op, name
            if async_op:
                work.wait()
            got[f"{name}, async_op={async_op}"] = result
    out, rows = torch.full((8, 3), torch.nan), torch.full((2, 3), torch.nan)
    assert distributed.gather_along_first_dim(x, world, output_tensor=out)[0] is out
    assert distributed.reduce_scatter_along_first_dim(x, world, output=rows)[0] is rows
    assert distributed.allreduce(x, alone)[0] is x
    got |= {"gather into a tensor": out, "reduce_scatter into a tensor": rows, "afterwards": x}
    try:
        distributed.reduce_scatter_along_first_dim(x[:3], world)
    except ValueError as error:
        got["three rows"] = str(error)
    return got
