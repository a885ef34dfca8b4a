# Workers of test_optimizer.py and test_files.py: weights held in FP8 whose rows are off 16 bytes, beside others.
import torch
from ranks import here

import transformer_engine.pytorch as te
from transformer_engine.pytorch.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from transformer_engine.pytorch.data_parallel.optimizer import DistributedOptimizer
from transformer_engine.pytorch.tensor.layout import data_bytes, fold

from .cases import RECIPES, raised

WIDTHS = (24, 40, 33, 32, 150)  # of rows: off 16, but for 32; the last layer gives 24 features
WAYS = {
    "whole": {},
    "sharded": {"use_distributed_optimizer": True},
    "gathers overlapped": {"use_distributed_optimizer": True, "overlap_param_gather": True, "debug": True},
    "by group": {"use_distributed_optimizer": True, "overlap_param_gather": True},
}
STEPS = 4


def ladder(recipe, held, widths=WIDTHS):
    """The same values on every rank. held: in FP8; else in bfloat16, which each forward quantizes."""
    torch.manual_seed(11)
    options = {"bias": False, "params_dtype": torch.bfloat16, "device": here(), "fuse_wgrad_accumulation": True}
    options["init_method"] = lambda w: torch.nn.init.normal_(w, std=0.2)
    with te.quantized_model_init(True, RECIPES[recipe](), preserve_high_precision_init_val=True):
        module = torch.nn.Sequential(*(te.Linear(k, n, **options) for k, n in zip(widths, (*widths[1:], 24))))
    if held:
        return module
    plain = torch.nn.Sequential(*(te.Linear(k, n, **options) for k, n in zip(widths, (*widths[1:], 24))))
    with torch.no_grad():
        for p, q in zip(module.parameters(), plain.parameters(), strict=True):
            q.copy_(p.get_high_precision_init_val())
    return plain


def made(recipe, held, way, widths=WIDTHS):
    module = ladder(recipe, held, widths)
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=1500, reproducible=True, **WAYS[way]
    )
    ddp = DistributedDataParallel(config, module)
    adam = te.optimizers.FusedAdam(module.parameters(), lr=0.02, master_weights=True)
    by_group = way == "by group"
    return module, ddp, DistributedOptimizer(adam, ddp, overlap_param_gather_with_optimizer_step=by_group)


def loss_of(recipe, ddp, rank, step):
    x = torch.randn(16, WIDTHS[0], generator=torch.Generator().manual_seed(100 * step + rank))
    with te.autocast(recipe=RECIPES[recipe]()):
        return ddp(x.to(here(), torch.bfloat16)).float().square().mean()


def train(recipe, ddp, optimizer, rank, steps):
    """[(loss, norm) of each step]. One rank skips the third step."""
    found = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(recipe, ddp, rank, step)
        loss.backward()
        optimizer.found_inf = torch.tensor(float(step == 2 and rank == 0), device=here())
        found.append((float(loss.detach()), float(optimizer.step())))
    return found


def bytes_of(p):
    return getattr(p, p._gathered[0])


def check_memory(module, ddp):
    """Rows off 16 bytes are on their pitch, and zeros fill it; columns are the transpose of the rows; each row of
    layout() has the memory beside the buffer."""
    beside = {row.name: row.pitch_bytes for row in ddp.layout()}
    sharded = ddp.config.use_distributed_optimizer
    buffer = ddp.buffers[0].param_data
    for name, p in module.named_parameters():
        data, (rows, cols) = bytes_of(p), fold(p.shape)
        pitch = -(-cols // 16) * 16
        assert rows == 1 or data.stride() == (pitch, 1), name
        inside = sharded and data.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert inside == (sharded and cols % 16 == 0), name
        assert beside[name] == (data_bytes(rows, cols) if sharded and cols % 16 else 0), name
        if not inside:
            memory = torch.as_strided(data, (rows, pitch), (pitch, 1))
            assert not memory[:, cols:].any(), f"{name}: padding"
        columns = p.get_data_tensors(rowwise_data=True, columnwise_data=True)[1]
        if columns is not None:
            assert torch.equal(columns, data.t()), name


def trains(rank, ranks, recipe, widths=WIDTHS):
    """Losses and weights are those of bfloat16 weights that each forward quantizes, to the bit, and norms within their
    float32's rounding, however weights are held; under delayed scaling, where the two have other histories, those of
    whole weights."""
    plain, plain_ddp, plain_optimizer = made(recipe, False, "whole", widths)
    wanted = train(recipe, plain_ddp, plain_optimizer, rank, range(STEPS))
    values = None
    for way in WAYS:
        module, ddp, optimizer = made(recipe, True, way, widths)
        got = train(recipe, ddp, optimizer, rank, range(STEPS))
        ddp.state_dict()  # waits for the gather
        check_memory(module, ddp)
        weights = {n: bytes_of(p).clone() for n, p in module.named_parameters()}
        if recipe == "delayed":
            wanted, values = (got, weights) if values is None else (wanted, values)
        elif values is None:
            values = {}
            for (n, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
                values[n] = bytes_of(p._quantizer(q.detach()))
        for (loss, norm), (its_loss, its_norm) in zip(got, wanted, strict=True):
            assert loss == its_loss and abs(norm - its_norm) <= 2.0**-22 * its_norm, f"{way}: {got}, wanted {wanted}"
        assert len({loss for loss, _ in got}) == STEPS
        for n, value in values.items():
            assert torch.equal(weights[n], value), f"{way}: {n}"


def own_elements(ddp, p):
    """Whether each element of the weight is in this rank's shard."""
    bucket = ddp.param_to_bucket_group[p].param_to_bucket[p]
    number = torch.arange(p.numel(), device=here()).view(p.shape) + bucket.buffer.where(p)[0]
    first, last = bucket.layout.shard(bucket.buffer.comm.rank, bucket.buffer.comm.size)
    return (number >= first) & (number < last)


def other_writers(rank, ranks):
    """A load, a broadcast and other code write the weight's own memory, which a gather keeps."""
    module, ddp, _ = made("current", True, "sharded")
    other = ladder("current", True)
    with torch.no_grad():
        for p in other.parameters():
            p.copy_(p.dequantize() * 0.5)
    wanted = {n: bytes_of(p).clone() for n, p in other.named_parameters()}

    def check(what):
        ddp.start_param_sync(force_sync=True)
        for n, p in module.named_parameters():
            assert torch.equal(bytes_of(p), wanted[n]), f"{what}: {n}"
        check_memory(module, ddp)

    module.load_state_dict(other.state_dict())
    check("a load")
    for p in module.parameters():
        if rank:
            bytes_of(p).fill_(0)
    ddp.broadcast_params()
    check("a broadcast")
    for n, p in module.named_parameters():
        wanted[n] = wanted[n].flip(0)
        bytes_of(p).copy_(torch.where(own_elements(ddp, p), wanted[n], 0))
    ddp.reset_param_sync_dispatch_state()
    check("bytes that each rank wrote")
    before = bytes_of(module[0].weight)
    module[0].weight._data = before.clone()
    text = raised(RuntimeError, ddp.zero_grad_buffer)
    assert "'0.weight' has moved to other memory" in text, text
    module[0].weight._data = before
    ddp.zero_grad_buffer()


def debugged(rank, ranks):
    """Elements of other ranks are NaN from a step until they are gathered."""
    module, ddp, _ = made("current", True, "gathers overlapped")
    before = [bytes_of(p).clone() for p in module.parameters()]
    ddp.reset_param_sync_dispatch_state()
    for p, value in zip(module.parameters(), before):
        assert torch.equal(bytes_of(p), torch.where(own_elements(ddp, p), value, 0x7F))
    ddp.start_param_sync(force_sync=True)
    for p, value in zip(module.parameters(), before):
        assert torch.equal(bytes_of(p), value)


def rows_without_a_pitch(rank, ranks):
    """A weight that was made of dense bytes gets its pitch from the wrapper, which products read in place."""
    module = ladder("current", True)
    weight = module[0].weight
    value, weight._data = bytes_of(weight).clone(), bytes_of(weight).clone(memory_format=torch.contiguous_format)
    assert weight._data.is_contiguous()
    DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=True), module)
    assert weight._data.stride() == (32, 1) and torch.equal(weight._data, value)


def graphed(rank, ranks):
    """Layers that were captured by themselves train as eager layers: each replay reads the rows of the last gather."""
    recipe, losses = RECIPES["current"](), []
    for captured in (False, True):
        module, ddp, optimizer = made("current", True, "gathers overlapped")
        layers = tuple(module)
        if captured:
            options = {"dtype": torch.bfloat16, "device": here(), "requires_grad": True}
            samples = tuple((torch.randn(16, layer.in_features, **options),) for layer in layers)
            layers = te.make_graphed_callables(layers, samples, enabled=True, recipe=recipe)
        losses.append([])
        for step in range(STEPS):
            x = torch.randn(16, WIDTHS[0], generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            y = x.to(here(), torch.bfloat16).requires_grad_()
            with te.autocast(recipe=recipe):
                for layer in layers:
                    y = layer(y)
            loss = y.float().square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))
        ddp.state_dict()
    assert losses[0] == losses[1] and len(set(losses[0])) == STEPS, losses


CASES = {f"rows off 16 bytes, {recipe}": (trains, (recipe,)) for recipe in RECIPES}
CASES["rows off 16 bytes, one row"] = trains, ("current", (24, 1, 40))
for case in (other_writers, debugged, rows_without_a_pitch, graphed):
    CASES[f"rows off 16 bytes, {case.__name__}"] = case, ()
