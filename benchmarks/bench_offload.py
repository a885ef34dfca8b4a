"""CPU offload (targets.py case O): the link, the kernels that gather small pieces, a step, and its peak memory.

Bytes: link b (pinned memory's are not counted), pack 2b (read and written). The link's layer keeps the bytes of a
LayerNormMLP of 8192 tokens, 4096 and 14336 wide. The step's layer has a forward that takes longer than its bytes take
on the link (hidden ffn / (ffn + hidden) > 8485 at 700 TFLOP/s and 55 GB/s), 2 of 4 layers offloaded; its bytes are
those moved out and back. `offload_bound` is a layer whose bytes take longer. `offload_graphed` is a captured layer that
leaves explicitly after its event, and eager products that last longer than the copy; its bytes are those that leave;
its peak is the pool of 4 captured layers, 2 of which leave. The peers: a plain pinned copy, the same step without,
torch's save_on_cpu(pin_memory=True), the graph without its event."""

import torch
from common import Bench, Case

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C

LAYERS, OFFLOADED = 4, 2
PIECES, PIECE_BYTES = 256, 1 << 20


class Way:
    """Out and back over the link, timed as the compute stream sees it when it waits at once."""

    def __init__(self, device, tensors):
        self.layer = _C.OffloadLayer(_C.OffloadEngine(device), True)
        self.marks = [-1] * len(tensors)

    def out(self, *tensors):
        self.layer.start(list(tensors), self.marks)
        self.layer.release()
        self.layer.reset()

    def back(self, *_):
        self.layer.start_reload()
        self.layer.park()


def link(bench, sizes):
    total = 2 * sum(sizes)
    tensors = tuple(bench.randn(n, dtype="bf16") for n in sizes)
    pinned = torch.empty(total, dtype=torch.uint8, pin_memory=bench.cuda)
    plain = torch.randint(256, (total,), dtype=torch.uint8, device=bench.device)
    for name, ours, copy in (
        ("offload_link", lambda way: way.out, lambda *_: pinned.copy_(plain, non_blocking=True)),
        ("offload_link_back", lambda way: way.back, lambda *_: plain.copy_(pinned, non_blocking=True)),
    ):
        case = Case("O", name, "bf16", ("layer",), "forward", bytes=total)
        if not bench.selects(case):
            continue
        way = Way(bench.device, tensors)
        if name.endswith("back"):
            way.layer.start(list(tensors), way.marks)
            way.layer.release()
        bench.compare(case, {"ours": ours(way), "pinned copy": copy}, lambda: tensors)


def pack(bench):
    case = Case("O", "offload_pack", "bf16", ("layer",), "forward", bytes=2 * PIECES * PIECE_BYTES)
    if not bench.selects(case):
        return
    tensors = [bench.randn(PIECE_BYTES // 2, dtype="bf16") for _ in range(PIECES)]
    packed = torch.empty(PIECES * PIECE_BYTES, dtype=torch.uint8, device=bench.device)
    flat = packed.view(torch.bfloat16)
    bench.compare(
        case,
        {"ours": lambda: _C.offload_pack(tensors, packed), "torch cat": lambda: torch.cat(tensors, out=flat)},
        lambda: (),
    )
    back = Case("O", "offload_unpack", "bf16", ("layer",), "forward", bytes=2 * PIECES * PIECE_BYTES)
    bench.compare(back, {"ours": lambda: _C.offload_unpack(packed, tensors)}, lambda: ())


def stack_of(layers, context=None, sync=None):
    def run(x):
        for layer in layers:
            if context is None:
                x = layer(x)
            else:
                with context:
                    x = layer(x)
                x = sync(x)
        return x

    return run


def save_on_cpu(layers):
    def run(x):
        for i, layer in enumerate(layers):
            if i < OFFLOADED:
                with torch.autograd.graph.save_on_cpu(pin_memory=True):
                    x = layer(x)
            else:
                x = layer(x)
        return x

    return run


def contender(run, layers):
    """Gradients keep their memory, so saved tensors determine the peak; accumulation is timed on both sides."""

    def step(x, dy):
        x.grad = None
        run(x).backward(dy)

    return step


def peak_mib(bench, step, make):
    x, dy = make()
    for _ in range(2):
        torch.cuda.synchronize(bench.device)
        torch.cuda.reset_peak_memory_stats(bench.device)
        start = torch.cuda.memory_allocated(bench.device)
        step(x, dy)
    return (torch.cuda.max_memory_allocated(bench.device) - start) / 2**20


def step(bench, op, hidden, ffn, tokens):
    kept = 2 * tokens * 2 * (hidden + ffn)  # saved by a layer: its norm's input and output, gate and up
    case = Case("O", op, "bf16", ("layer",), "forward+backward", bytes=2 * OFFLOADED * kept)
    peak = Case("O", f"{op}_peak", "bf16", ("layer",), "keeps")
    if not (bench.selects(case) or bench.selects(peak)):
        return
    options = {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}
    options |= {"params_dtype": torch.bfloat16, "device": bench.device}
    layers = [te.LayerNormMLP(hidden, ffn, **options) for _ in range(LAYERS)]
    context, sync = te.get_cpu_offload_context(True, OFFLOADED, LAYERS)
    contenders = {
        "ours": contender(stack_of(layers, context, sync), layers),
        "own bf16": contender(stack_of(layers), layers),
        "save_on_cpu": contender(save_on_cpu(layers), layers),
    }

    def make():
        return bench.randn(tokens, hidden, dtype="bf16", grad=True), bench.randn(tokens, hidden, dtype="bf16")

    if bench.selects(case):
        bench.compare(case, contenders, make)
    if bench.cuda and bench.selects(peak):
        figures = {name: peak_mib(bench, run, make) for name, run in contenders.items()}
        # The caller holds the first layer's input, so offloading it frees nothing. And where the peak is now, after
        # the last layer, the gradient that comes in is no longer the caller's.
        figures["predicted"] = figures["own bf16"] - (OFFLOADED * kept - 2 * 2 * tokens * hidden) / 2**20
        bench.record(peak, figures, "MiB")


class Graphed(torch.nn.Module):
    """A layer whose event marks its result as ready; after that, in the same graph, it leaves explicitly."""

    def __init__(self, inner, number=0, offload=None):
        super().__init__()
        self.inner, self.number, self.offload = inner, number, offload
        self.event = torch.cuda.Event(external=True)

    def forward(self, x):
        if self.offload is None:
            x = self.inner(x)
            self.event.record()
            return x
        context, sync, manual = self.offload
        with context:
            x = self.inner(x)
        self.event.record()
        x = sync(x)
        if self.number < OFFLOADED:
            manual.start_offload_layer(self.number)
            manual.release_activation_forward_gpu_memory(self.number)
        return x


def captured(bench, hidden, ffn, tokens, count, leave):
    """`count` captured layers; the first OFFLOADED of them leave."""
    options = {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}
    options |= {"params_dtype": torch.bfloat16, "device": bench.device}
    offload, hooks = None, {}
    if leave:
        offload = te.get_cpu_offload_context(True, None, count, manual_synchronization=True)
        context, each = offload[0], 2 * tokens * 2 * (hidden + ffn) + (1 << 20)
        context.offload_synchronizer.reserve_pinned(min(count, OFFLOADED) * each, bench.device)
        hooks = {"pre_warmup_hook": context.disable, "post_warmup_hook": context.enable}
    modules = tuple(Graphed(te.LayerNormMLP(hidden, ffn, **options), i, offload) for i in range(count))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(bench.device)
    samples = tuple((bench.randn(tokens, hidden, dtype="bf16", grad=True),) for _ in modules)
    te.make_graphed_callables(modules, samples, **hooks)
    del samples
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return modules, (torch.cuda.memory_reserved(bench.device) - before) / 2**20


def graphed(bench, hidden, ffn, tokens):
    kept = 2 * tokens * 2 * (hidden + ffn)
    case = Case("O", "offload_graphed", "bf16", ("layer",), "forward", bytes=kept)
    peak = Case("O", "offload_graphed_peak", "bf16", ("layer",), "keeps")
    if bench.selects(case):
        ours, plain = (captured(bench, hidden, ffn, tokens, 1, leave)[0][0] for leave in (True, False))
        stream, weight = torch.cuda.Stream(), bench.randn(hidden, hidden, dtype="bf16") * hidden**-0.5
        copy_us = kept / 55e3  # of pinned memory, at 55 GB/s
        products = max(1, round(1.2 * copy_us / (2 * tokens * hidden * hidden / 700e6)))  # at 700 TFLOP/s

        def compute(y):
            for _ in range(products):
                y = y @ weight
            return y

        contenders = {
            "ours": lambda x: compute(ours(x, cuda_graph_stream=stream, cuda_graph_event=ours.event)),
            "own without event": lambda x: compute(ours(x, cuda_graph_stream=stream)),
            "own bf16": lambda x: compute(plain(x, cuda_graph_stream=stream, cuda_graph_event=plain.event)),
        }
        bench.compare(case, contenders, lambda: (bench.randn(tokens, hidden, dtype="bf16"),))
        for module in (ours, plain):
            module.reset()
    if bench.selects(peak):
        figures = {}
        for name, leave in (("libraries", False), ("ours", True), ("own bf16", False)):
            modules, figures[name] = captured(bench, hidden, ffn, tokens, LAYERS, leave)
            for module in modules:
                module.reset()
            del modules
        del figures["libraries"]  # allocations for a capture's stream are not counted
        # A layer's input belongs to its graph, and stays. Weights are small compared with saved tensors, so the pool is
        # largest where the backward begins, with and without.
        figures["predicted"] = figures["own bf16"] - OFFLOADED * (kept - 2 * tokens * hidden) / 2**20
        bench.record(peak, figures, "MiB")


def main():
    bench = Bench(__doc__)
    rows = 8192 if bench.cuda else 64
    link(bench, (rows * 4096, rows * 28672, rows * 4096, *[rows] * 6))
    pack(bench)
    if bench.cuda:
        step(bench, "offload_step", 16384, 32768, 2048)
        step(bench, "offload_bound", 4096, 14336, 8192)
        graphed(bench, 1024, 8192, 16384)
    else:
        step(bench, "offload_step", 512, 1024, 1024)
    bench.finish()


if __name__ == "__main__":
    main()
