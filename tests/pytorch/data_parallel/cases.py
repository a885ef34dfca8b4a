# Models whose gradients are whole numbers, so that sums of them are exact in any order, and one process that sees the
# whole batch.
import contextlib
import copy
import datetime
import traceback

import torch
import torch.distributed as dist
from ranks import here

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

WIDTH, ROWS = 32, 16
RECIPES = {
    "delayed": lambda: DelayedScaling(reduce_amax=False),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}
LIMITS = {"fused": {"low": -1, "high": 2}}  # its gradients are reduced in bfloat16, which is exact up to 256
MODELS = ("plain", "fused", "main_grad", "delayed_wgrad", *RECIPES)


def whole(generator, *shape, low=-2, high=3):
    return torch.randint(low, high, shape, generator=generator).float()


class Plain(torch.nn.Module):
    """A weight that is used twice, one under two names, and an odd size."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.twice = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = torch.nn.Linear(WIDTH, 7)
        self.alias = self.last

    def forward(self, x):
        return self.last(self.twice(self.twice(self.first(x))))


class Beside(torch.nn.Module):
    """Two products of one input. Its largest value is 7, as that of the weights and of the output's gradient: 448 / 7
    is a power of two, so that FP8 keeps whole numbers up to 15 as they are."""

    def __init__(self, **options):
        super().__init__()
        self.one, self.other = te.Linear(WIDTH, WIDTH, **options), te.Linear(WIDTH, WIDTH, **options)

    def forward(self, x):
        return self.one(x) + self.other(x)


def build(name, held_in_fp8=False):
    """The same whole-number weights on every rank; those that are held in FP8 as they are drawn."""
    if name == "plain":
        module = Plain()
    else:
        options = {"params_dtype": torch.bfloat16, "device": here()}
        if name != "fused":
            options["fuse_wgrad_accumulation"] = True
        if held_in_fp8:
            with te.quantized_model_init(True, RECIPES[name](), preserve_high_precision_init_val=True):
                return Beside(**options)
        if name == "delayed_wgrad":
            options["delay_wgrad_compute"] = True
        two = Beside(**options) if name in RECIPES else None
        module = two or torch.nn.Sequential(te.Linear(WIDTH, WIDTH, **options), te.Linear(WIDTH, WIDTH, **options))
    module.to(here())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(whole(generator, *p.shape, low=-1, high=2))
            p.view(-1)[0] = 7.0 if name in RECIPES else 1.0
    return module


def batch(name, rank, microbatch, step=0):
    generator = torch.Generator().manual_seed(1000 * step + 100 * microbatch + rank)
    x = whole(generator, ROWS, WIDTH, **LIMITS.get(name, {}))
    if name in RECIPES:
        x[0, 0] = 7.0
    return x.to(here(), torch.float32 if name == "plain" else torch.bfloat16)


def backward(name, module, x, inner=None):
    """inner: the module itself, where `module` wraps it."""
    inner = module if inner is None else inner
    context = te.autocast(enabled=True, recipe=RECIPES[name]()) if name in RECIPES else contextlib.nullcontext()
    with context:
        y = module(x)
    weights = whole(torch.Generator().manual_seed(7), *y.shape, **LIMITS.get(name, {})).to(y)
    if name in RECIPES:
        weights[0, 0] = 7.0
    (y * weights).sum().backward()
    if name == "delayed_wgrad":
        for part in inner:
            part.backward_dw()


def reference(name, module, ranks, microbatches, step=0):
    """{parameter's name: float32 sum of the gradients of all ranks' batches}, of a copy of the module."""
    alone = copy.deepcopy(module)
    total = {n: torch.zeros(p.shape, device=here()) for n, p in alone.named_parameters()}
    for rank in range(ranks):
        for microbatch in range(microbatches):
            for p in alone.parameters():
                p.main_grad, p.grad = torch.zeros(p.shape, device=here()), None
            backward(name, alone, batch(name, rank, microbatch, step))
            for n, p in alone.named_parameters():
                total[n] += p.main_grad
                total[n] += 0 if p.grad is None else p.grad
    return total


def own_part(ddp, param):
    """(elements [start, end) of a parameter that are this rank's after a reduction, their gradients)."""
    group = ddp.param_to_bucket_group[param]
    bucket = group.param_to_bucket[param]
    start, end = bucket.buffer.where(param)
    if not group.is_sharded:
        return 0, param.numel(), param.main_grad.reshape(-1)
    first, last = bucket.layout.shard(bucket.buffer.comm.rank, bucket.buffer.comm.size)
    first, last = max(first, start), min(last, end)
    return first - start, max(first, last) - start, bucket.buffer.grad_data[first : max(first, last)]


def raised(kind, call):
    """The text of what call() raises."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"nothing was raised, wanted {kind.__name__}")


def each(rank, ranks, cases):
    """{case: its traceback, or ''}. cases: name -> (worker, further arguments). Ends where another rank waits for one
    that raised."""
    found, store = {}, dist.distributed_c10d._get_default_store()
    for name, (call, case) in cases.items():
        try:
            call(rank, ranks, *case)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        store.set(f"{name} of {rank}", "ended")
        if found[name]:
            try:
                store.wait([f"{name} of {other}" for other in range(ranks)], datetime.timedelta(seconds=10))
            except RuntimeError:
                raise AssertionError(f"{name}: {found[name]}") from None
    return found
