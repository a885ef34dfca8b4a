# The worker functions of test_quantized.py, which run on each rank: quantized gathers of every format, compared with
# the whole tensor quantized in one piece. A worker returns what its test compares.
import torch
import torch.distributed as dist
from quantized_cases import E5M2, FORMATS, parts_of
from ranks import here

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import gather_along_first_dim as gather

from .region_workers import told_by

# Shapes on one rank: whole blocks, no whole block of rows, columns with a pitch, three and more dimensions, one, no
# rows.
SHAPES = ((128, 256), (256, 144), (3, 128, 40), (6, 48), (2, 5, 7), (130, 20), (48,), (0, 32))
USAGES = ((True, True), (True, False), (False, True))


def values(shape, rank, dtype):
    """Each rank's are of another magnitude, so that amaxes differ."""
    generator = torch.Generator().manual_seed(rank)
    spread = 2.0 ** torch.randint(-4, 5, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * spread * (rank + 1)).to(here(), dtype)


def quantizer_of(name, rowwise, columnwise, device=None):
    options = {"scale": 0.3} if name == "delayed" else {}
    fp8_dtype = E5M2 if rowwise and not columnwise else te.DType.kFloat8E4M3
    return FORMATS[name](fp8_dtype, device or here(), rowwise=rowwise, columnwise=columnwise, **options)


def travels(name, shape, columnwise):
    """Whether FP8 data do."""
    rows = torch.Size(shape[:-1]).numel()
    if "block" in name:
        return len(shape) > 1 and (rows % 128 == 0 or (name == "block1d" and not columnwise))
    return name in ("delayed", "current")


class Counted:
    """The dtypes that all-gathers bring in."""

    def __enter__(self):
        self.dtypes, self._gather = [], dist.all_gather_into_tensor

        def noted(out, *args, **kwargs):
            self.dtypes.append(out.dtype)
            return self._gather(out, *args, **kwargs)

        dist.all_gather_into_tensor = noted
        return self

    def __exit__(self, *_):
        dist.all_gather_into_tensor = self._gather


def quantized(rank, ranks):
    """The differences, and the number of cases that were compared."""
    world, wrong, cases = dist.group.WORLD, [], 0
    dtypes = (torch.float32, torch.bfloat16)
    for number, (name, shape, usages) in enumerate((n, s, u) for n in FORMATS for s in SHAPES for u in USAGES):
        dtype = dtypes[number % 2]
        own = [values(shape, r, dtype) for r in range(ranks)]
        want = quantizer_of(name, *usages)(torch.cat(own))
        for how in ("values", "internal", "async", "quantized", "quantized in both"):
            quantizer, inp = quantizer_of(name, *usages), own[rank]
            quantizer.internal = how == "internal"
            given = quantizer
            if how.startswith("quantized"):
                if name in ("identity", "hybrid") or not travels(name, shape, usages[1] or how != "quantized"):
                    continue
                made = quantizer_of(name, *((True, True) if "both" in how else usages))
                if name == "current":
                    made.with_amax_reduction, made.dtype = True, quantizer.dtype
                made.dtype = quantizer.dtype
                inp, given = made(inp), quantizer if "both" in how else None
            with Counted() as counted:
                got, work = gather(inp, world, how == "async", given)
            if work is not None:
                work.wait()
            cases += 1
            case = f"{name} {shape} {usages} {dtype} {how}"
            if dtype is torch.bfloat16 and (dtype in counted.dtypes) == (travels(name, shape, usages[1])):
                wrong.append(f"{case}: gathered {counted.dtypes}")
            wrong += [f"{case}: {what}" for what in differences(got, want, how == "internal")]
            if given is not None and got._quantizer is not quantizer and name != "hybrid":
                wrong.append(f"{case}: its quantizer is another one")
    return wrong, cases


def differences(got, want, internal):
    if isinstance(got, torch.Tensor) == internal:
        yield f"it is a {type(got).__name__}"
    if (tuple(got.size()), got.dtype) != (tuple(want.size()), want.dtype):
        yield f"{tuple(got.size())} {got.dtype}"
    if got.get_usages() != want.get_usages():
        yield f"usages {got.get_usages()}, wanted {want.get_usages()}"
    ours, theirs = parts_of(got), parts_of(want)
    if sorted(ours) != sorted(theirs):
        yield f"parts {sorted(ours)}, wanted {sorted(theirs)}"
        return
    for field, part in theirs.items():
        its = ours[field]
        if (its.shape, its.dtype) != (part.shape, part.dtype):
            yield f"{field} is {its.dtype} {tuple(its.shape)}, wanted {part.dtype} {tuple(part.shape)}"
        elif its.numel() and not torch.equal(its.contiguous().view(torch.uint8), part.contiguous().view(torch.uint8)):
            yield f"{field} has other bytes"
        if field in ("_data", "_transpose", "_rowwise_data", "_columnwise_data") and its.stride() != part.stride():
            yield f"{field} lies otherwise: {its.stride()}, wanted {part.stride()}"


def bytes_moved(rank, ranks):
    """Of a bfloat16 gather and of a quantized one, in each format."""
    moved, real = {}, dist.all_gather_into_tensor
    x = values((256, 256), rank, torch.bfloat16)
    for name in (None, "delayed", "current", "block1d", "block2d"):
        for usages in USAGES if name else [None]:
            sizes = []
            dist.all_gather_into_tensor = lambda out, *a, s=sizes, **k: (s.append(out.nbytes), real(out, *a, **k))[1]
            try:
                gather(x, dist.group.WORLD, quantizer=quantizer_of(name, *usages) if name else None)
            finally:
                dist.all_gather_into_tensor = real
            moved[name, usages] = sum(sizes)
    return moved


def notes(rank, ranks):
    """Amaxes and scales that quantizers note."""
    x, world = values((128, 128), rank, torch.float32), dist.group.WORLD
    delayed, current = quantizer_of("delayed", True, True), quantizer_of("current", True, True)
    current.amax, current.scale = torch.zeros(1, device=here()), torch.zeros(1, device=here())
    gather(x, world, quantizer=delayed)
    gather(x, world, quantizer=current)
    existing = te.Float8CurrentScalingQuantizer(
        te.DType.kFloat8E4M3, here(), use_existing_amax=True, amax=torch.full((1,), rank + 5.0, device=here())
    )
    got = gather(x, world, quantizer=existing)[0]
    assert not current.use_existing_amax and not current.with_amax_reduction
    return {
        "delayed": delayed.amax,
        "current": current.amax,
        "scale": current.scale,
        "existing": got._scale_inv,
        "kept": existing.amax,
    }


def refusals(rank, ranks):
    """Ranks that bring different things are refused on the CPU alone, which the group reaches too."""
    world, x = dist.group.WORLD, values((128, 128), rank, torch.float32)
    told, on_cpu, delayed = {}, x.cpu(), quantizer_of("delayed", True, True, "cpu")
    told["scales"] = told_by(gather, quantizer_of("current", True, True)(x), world)
    uneven = te.Float8Quantizer(torch.full((1,), rank + 1.0), torch.zeros(1), te.DType.kFloat8E4M3)
    told["delayed scales"] = told_by(gather, on_cpu, world, quantizer=uneven)
    told["rows"] = told_by(gather, quantizer_of("block2d", True, True)(x[:100]), world)
    rowwise = quantizer_of("block1d", True, False)
    inp, both = rowwise(x), rowwise.copy()
    both.set_usage(columnwise=True)
    told["directions"] = told_by(gather, inp, world, quantizer=both)
    told["format"] = told_by(
        gather, quantizer_of("block2d", True, True)(x), world, quantizer=quantizer_of("delayed", True, True)
    )
    told["hybrid"] = told_by(gather, quantizer_of("hybrid", True, True)(x), world)
    told["output"] = told_by(gather, x, world, quantizer=quantizer_of("delayed", True, True), output_tensor=x)
    told["dtype"] = told_by(gather, x.int(), world, quantizer=quantizer_of("delayed", True, True))
    told["uneven"] = told_by(gather, on_cpu[rank:], world, quantizer=delayed)
    mixed = quantizer_of(("delayed", "block2d")[rank], True, True, "cpu")
    told["mixed"] = told_by(gather, on_cpu, world, quantizer=mixed)
    told["nothing"] = told_by(gather, x, world, quantizer=quantizer_of("delayed", False, False))
    told["quantizer"] = told_by(gather, x, world, quantizer="fp8")
    told["device"] = told_by(
        gather, torch.ones(2, 2, device="meta"), world, quantizer=quantizer_of("delayed", True, True)
    )
    assert told_by(gather, x, world, quantizer=quantizer_of("delayed", True, True)) is None
    return told


def everything(rank, ranks):
    return {f.__name__: f(rank, ranks) for f in (quantized, bytes_moved, notes, refusals)}
