"""The paged stash (targets.py case 22): groups into pages and back, on the device and over the link, a queue of
products beside it, and the host's time.

A group is the saved tensors of an MoE layer: four bf16 tensors with half of the rows alive; the live part has the size
in the row's shape. A call stores several groups, each into an empty entry, and ends with one reset, which is timed; or
it loads them, with the pages kept (tail "keep"). Bytes: 2b for the device tier (read, written), b over the link. The
peers: a copy_ of one group's bytes for each group (`copy_ each`; `copy_` is one of all of them at once), a pinned copy,
pages of 64 rows copied tensor by tensor in Triton, and the copy that te.get_cpu_offload_context starts for a layer,
which moves all rows.

stash_beside: a queue of products, while another stream stores; `lengthened`: the difference, relative to the time of
the store alone. stash_call, reload_call: host time of PagedStash.stash() and reload() of one group. stash_group:
forward and backward of layers whose groups leave between schedulers; `stash_group_each`: the increment for each group
that leaves.
"""

import contextlib

import torch
from bench_offload import Way
from common import Bench, Case, training_step

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.stash import PagedStash

MIB = 1 << 20
WIDTHS = (2048, 2048, 1024, 1024)  # widths of a group's tensors, in elements of two bytes
ROW_BYTES = 2 * sum(WIDTHS)
KEEP = 0  # a load writes nothing after the live rows
PAGE_BYTES = 524288


def stream_of(bench):
    return torch.cuda.current_stream(bench.device).cuda_stream if bench.cuda else 0


class Groups:
    """`count` groups of `size` live bytes, and a pool that holds them all in one tier."""

    def __init__(self, bench, size, count, blocks=48, host=False):
        self.bench, self.live = bench, size // ROW_BYTES
        self.size = self.live * ROW_BYTES
        self.counter = torch.tensor([self.live], device=bench.device)
        self.tensors = [[bench.randn(2 * self.live, w, dtype="bf16") for w in WIDTHS] for _ in range(count)]
        page_bytes = PAGE_BYTES if bench.cuda else 16384
        pages = count * (-(-(self.size + 128 * len(WIDTHS)) // page_bytes))
        self.pool = _C.StashPool(
            bench.device,
            page_bytes=page_bytes,
            device_pages=0 if host else pages,
            host_pages=pages if host else 0,
            policy=0,
            sm_budget=blocks,
            trap=False,
            debug=False,
            gate=torch.zeros(1, device=bench.device),
            stream=stream_of(bench),
        )
        self.memory = [[t.view(-1).view(torch.uint8) for t in tensors] for tensors in self.tensors]
        self.handles = [self.handle(memory) for memory in self.memory]
        self.groups = [_C.StashGroup(self.pool, handle, KEEP) for handle in self.handles]

    def handle(self, memory):
        handle = _C.StashHandle("group")
        for bytes_of, width in zip(memory, WIDTHS, strict=True):
            segment = _C.StashSegment(bytes_of)
            segment.add(0, 2 * self.live, 2 * width, self.counter, 1)
            handle.add(segment)
        return handle

    def store(self, *_):
        """Stores or loads all groups, then restores the pool."""
        stream = stream_of(self.bench)
        for number, group in enumerate(self.groups):
            group.store(number, stream)
        self.pool.reset(stream)

    def load(self, *_):
        stream = stream_of(self.bench)
        for group, handle in zip(self.groups, self.handles, strict=True):
            group.load(handle, True, stream)

    def hold(self):
        for number, group in enumerate(self.groups):
            group.store(number, stream_of(self.bench))

    def check(self):
        """A round trip that checks that the timed call is a copy, and finds room."""
        self.hold()
        before = [[t.clone() for t in tensors] for tensors in self.tensors]
        for tensors in self.tensors:
            for t in tensors:
                t.fill_(float("nan"))
        self.load()
        self.pool.reset(stream_of(self.bench))
        for tensors, wanted in zip(self.tensors, before, strict=True):
            for t, w in zip(tensors, wanted, strict=True):
                assert torch.equal(t[: self.live], w[: self.live]) and bool(t[self.live :].isnan().all())
                t.copy_(w)

    def close(self):
        if self.bench.cuda:
            torch.cuda.synchronize(self.bench.device)
        self.groups.clear()
        self.handles.clear()
        self.pool.close()
        self.memory.clear()
        self.tensors.clear()


def copies(bench, groups, pinned=None, back=False):
    """A plain copy of each group's live bytes."""

    def buffers(**options):
        return [torch.randint(256, (groups.size,), dtype=torch.uint8, **options) for _ in groups.tensors]

    sources = buffers(device=bench.device)
    targets = (
        [torch.empty_like(s) for s in sources]
        if pinned is None
        else [torch.empty(groups.size, dtype=torch.uint8, pin_memory=bench.cuda) for _ in sources]
    )
    pairs = list(zip(sources, targets, strict=True) if back else zip(targets, sources, strict=True))

    def run(*_):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

    return run


def in_triton(bench, groups):
    """(store, load), tensor by tensor."""
    from stash_triton import Pages

    heads = torch.zeros(len(groups.tensors), len(WIDTHS), 1, dtype=torch.int32, device=bench.device)
    pages = [
        [Pages(len(t), w, bench.device, head) for t, w, head in zip(tensors, WIDTHS, of, strict=True)]
        for tensors, of in zip(groups.tensors, heads, strict=True)
    ]
    count = groups.counter.to(torch.int32)

    def each(what):
        for tensors, of in zip(groups.tensors, pages, strict=True):
            for tensor, page in zip(tensors, of, strict=True):
                getattr(page, what)(tensor, count)

    def store(*_):
        each("store")
        heads.zero_()  # a reset: every page is free

    def load(*_):
        each("load")  # the pages that were recorded when they were taken; the position of the head does not matter

    store()
    return store, load


def device_tier(bench, mib, count, blocks):
    suffix = "" if blocks == 48 else f"_{blocks}"
    cases = [
        Case("22", f"{what}{suffix}", "bf16", (f"{mib}MiB",), "forward", bytes=2 * count * mib * MIB)
        for what in ("stash", "reload")
    ]
    if not any(map(bench.selects, cases)):
        return
    groups = Groups(bench, mib * MIB, count, blocks)
    groups.check()
    triton = in_triton(bench, groups) if bench.cuda and blocks == 48 else ()
    for i, (case, ours) in enumerate(zip(cases, (groups.store, groups.load), strict=True)):
        if not bench.selects(case):
            continue
        if i == 1:
            groups.hold()
        peers = {"copy_ each": copies(bench, groups)} | ({"triton page copy": triton[i]} if triton else {})
        bench.compare(case, {"ours": ours} | peers, lambda: ())
    groups.close()


def host_tier(bench, mib):
    cases = [
        Case("22", f"{what}_host", "bf16", (f"{mib}MiB",), "forward", bytes=mib * MIB) for what in ("stash", "reload")
    ]
    if not any(map(bench.selects, cases)):
        return
    groups = Groups(bench, mib * MIB, 1, host=True)
    groups.check()
    for back, (case, ours) in enumerate(zip(cases, (groups.store, groups.load), strict=True)):
        if not bench.selects(case):
            continue
        way = Way(bench.device, groups.tensors[0])
        if back:
            groups.hold()
            way.layer.start(groups.tensors[0], way.marks)
            way.layer.release()
        tensors = groups.tensors[0]
        offload = way.back if back else lambda *_, way=way, tensors=tensors: way.out(*tensors)
        peers = {"pinned copy": copies(bench, groups, pinned=True, back=bool(back)), "own offload": offload}
        bench.compare(case, {"ours": ours} | peers, lambda: ())
    groups.close()


def beside(bench, mib, count, host, size, products):
    """Products on this stream, and stores on another one that begin at the same time."""
    op = "stash_host_beside" if host else "stash_beside"
    case = Case("22", op, "bf16", (f"{count * mib}MiB",), "forward", flops=2 * products * size**3)
    if not bench.selects(case):
        return
    groups = Groups(bench, mib * MIB, count, host=host)
    a, b = (bench.randn(size, size, dtype="bf16") for _ in range(2))
    out = torch.empty_like(a)
    side = torch.cuda.Stream(bench.device) if bench.cuda else None

    def queue(*_):
        for _ in range(products):
            torch.mm(a, b, out=out)

    def both(*_):
        if side is None:
            groups.store()
            queue()
            return
        side.wait_stream(torch.cuda.current_stream(bench.device))
        with torch.cuda.stream(side):
            groups.store()
        queue()
        torch.cuda.current_stream(bench.device).wait_stream(side)

    took = bench.compare(case, {"ours": both, "own products": queue, "own stash": groups.store}, lambda: ())
    if "own products" in took:
        more = max(took["ours"] - took["own products"], 0.01)  # noise can be negative, and a row must be above 0
        lengthened = Case("22", f"{op}_lengthened", "bf16", case.shape, "forward", flops=case.flops)
        bench.record(lengthened, {"ours": more, "own stash": took["own stash"]}, "us")
        print(
            f"{op}: {more:.0f} us more of {took['own products']:.0f}, {more / took['own stash']:.2f} of the stash's own"
        )
    groups.close()


def calls(bench):
    """Host time of one group through PagedStash, each way."""
    shape, widths = (64,), (256,) * 4
    tensors = [bench.randn(shape[0], w, dtype="bf16") for w in widths]
    counter = torch.tensor([shape[0] // 2], device=bench.device)
    live = 2 * sum(widths) * shape[0] // 2
    most = 64  # stores between two resets
    stash = PagedStash(16384, device_pages=8 * most, device=bench.device)

    handles = []  # an unreferenced handle returns its pages, in a separate launch

    def store(*_):
        if len(handles) == most:
            stash.reset()
            handles.clear()
        handles.append(stash.stash("group", tensors, counter))

    case = Case("22", "stash_call", "bf16", (*shape, sum(widths)), "forward", bytes=2 * live)
    if bench.selects(case):
        bench.compare_host(case, {"ours": store}, lambda: ())
    stash.reset()
    handles.clear()
    handle = stash.stash("group", tensors, counter)
    case = Case("22", "reload_call", "bf16", (*shape, sum(widths)), "forward", bytes=2 * live)
    if bench.selects(case):
        bench.compare_host(case, {"ours": lambda *_: stash.reload(handle, keep=True)}, lambda: ())
    stash.close()


class Keeps(torch.autograd.Function):
    """Keeps its results, and computes almost nothing."""

    @staticmethod
    def forward(ctx, x, kept, counter, stash):
        if stash is not None:
            for t in kept:
                stash.mark_pageable(t, counter)
        ctx.save_for_backward(*kept)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        assert len(ctx.saved_tensors) > 0
        return grad, None, None, None


class Layers(torch.nn.Module):
    def __init__(self, bench, count, stash):
        super().__init__()
        self.count, self.stash = count, stash
        self.counter = torch.tensor([32], device=bench.device)

    def forward(self, x):
        for number in range(self.count):
            kept = [torch.empty(64, 256, dtype=torch.bfloat16, device=x.device) for _ in range(4)]
            if self.stash is not None:
                x = self.stash.pre_schedule(x)
            group = contextlib.nullcontext() if self.stash is None else self.stash.group(number, self.counter)
            with group:
                x = Keeps.apply(x, kept, self.counter, self.stash)
            if self.stash is not None:
                x = self.stash.post_schedule(x)
            else:
                x = x.view_as(x)
        return x


def groups_of_a_step(bench, count=9):
    case = Case("22", "stash_group", "bf16", (count, 64, 1024), "forward+backward", bytes=4 * (count - 1) * 32 * 2048)
    if not bench.selects(case):
        return
    stash = PagedStash(16384, device=bench.device)
    with_stash, without = Layers(bench, count, stash), Layers(bench, count, None)
    step = training_step(with_stash)

    def ours(x, dy):
        stash.reset()
        step(x, dy)

    took = bench.compare_host(
        case,
        {"ours": ours, "own without": training_step(without)},
        lambda: (bench.randn(64, 256, dtype="bf16", grad=True), bench.randn(64, 256, dtype="bf16")),
    )
    if "own without" in took:
        each = max((took["ours"] - took["own without"]) / (count - 1), 0.01)
        one = Case("22", "stash_group_each", "bf16", (64, 1024), "forward+backward", bytes=4 * 32 * 2048)
        bench.record(one, {"ours": each}, "us")
    verdict = stash.close()
    assert verdict is not None and verdict.ok and verdict.report["groups"] == count - 1, verdict


def main():
    bench = Bench(__doc__)
    sizes = ((32, 8), (256, 4), (1024, 2)) if bench.cuda else ((1, 2),)
    for mib, count in sizes:
        for blocks in (48, 24):
            device_tier(bench, mib, count, blocks)
        host_tier(bench, mib)
    if bench.cuda:
        beside(bench, 256, 4, False, 4096, 12)  # 0.6 ms of copies, 2.7 of products
        beside(bench, 256, 1, True, 4096, 28)  # 4.9 ms, 6.5
    else:
        beside(bench, 1, 2, False, 128, 4)
        beside(bench, 1, 1, True, 128, 4)
    calls(bench)
    groups_of_a_step(bench)
    bench.finish()


if __name__ == "__main__":
    main()
