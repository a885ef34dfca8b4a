"""CPU offload (targets.py case O): the link, the kernels that gather small pieces, a step, and its peak memory.

Bytes: link b (pinned memory's are not counted), pack 2b (read and written). The link's layer keeps what a LayerNormMLP
of 8192 tokens, 4096 and 14336 wide does; the step's is one whose forward takes longer than its bytes take on the link
(hidden ffn / (ffn + hidden) > 8485 at 700 TFLOP/s and 55 GB/s), 2 of 4 layers offloaded; its bytes are those
moved out and back. `offload_bound` is a layer whose bytes take longer. The peers: a plain pinned copy, the same step
without, torch's save_on_cpu(pin_memory=True)."""

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
        if not bench.wants(case):
            continue
        way = Way(bench.device, tensors)
        if name.endswith("back"):
            way.layer.start(list(tensors), way.marks)
            way.layer.release()
        bench.compare(case, {"ours": ours(way), "pinned copy": copy}, lambda: tensors)


def pack(bench):
    case = Case("O", "offload_pack", "bf16", ("layer",), "forward", bytes=2 * PIECES * PIECE_BYTES)
    if not bench.wants(case):
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
    """Gradients stay where they are, so that the peak is made by saved tensors; accumulating is timed on both sides."""

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
    kept = 2 * tokens * 2 * (hidden + ffn)  # of a layer: its norm's input and output, gate and up
    case = Case("O", op, "bf16", ("layer",), "forward+backward", bytes=2 * OFFLOADED * kept)
    peak = Case("O", f"{op}_peak", "bf16", ("layer",), "keeps")
    if not (bench.wants(case) or bench.wants(peak)):
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

    if bench.wants(case):
        bench.compare(case, contenders, make)
    if bench.cuda and bench.wants(peak):
        figures = {name: peak_mib(bench, run, make) for name, run in contenders.items()}
        # The first layer's input is the caller's: that it leaves gives nothing back. And where the peak is now, behind
        # the last layer, the gradient that comes in is no longer the caller's.
        figures["predicted"] = figures["own bf16"] - (OFFLOADED * kept - 2 * 2 * tokens * hidden) / 2**20
        bench.record(peak, figures, "MiB")


def main():
    bench = Bench(__doc__)
    rows = 8192 if bench.cuda else 64
    link(bench, (rows * 4096, rows * 28672, rows * 4096, *[rows] * 6))
    pack(bench)
    if bench.cuda:
        step(bench, "offload_step", 16384, 32768, 2048)
        step(bench, "offload_bound", 4096, 14336, 8192)
    else:
        step(bench, "offload_step", 512, 1024, 1024)
    bench.finish()


if __name__ == "__main__":
    main()
