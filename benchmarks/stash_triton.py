"""A peer of benchmarks/bench_stash.py: pages of 64 rows, a launch for each tensor, in Triton; on CUDA alone. A free
list on the device gives the pages; the copies read it, and a separate launch advances it. Overflow is not checked."""

import torch
import triton
import triton.language as tl

ROWS = 64
PARTS = 4  # programs of a page
BLOCK = 2048


@triton.jit
def _copy_pages(data, pages, free, taken, head, count, width, STORE: tl.constexpr, ROWS: tl.constexpr,
                PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    page = tl.program_id(0)
    live = tl.load(count)
    if page * ROWS < live:
        if STORE:
            where = tl.load(free + tl.load(head) + page)
            tl.store(taken + page, where)
        else:
            where = tl.load(taken + page)
        here = data + page.to(tl.int64) * ROWS * width
        there = pages + where.to(tl.int64) * ROWS * width
        words = tl.minimum(live - page * ROWS, ROWS) * width
        part = tl.cdiv(words, PARTS * BLOCK) * BLOCK
        first = tl.program_id(1) * part
        for start in range(first, tl.minimum(first + part, words), BLOCK):
            at = start + tl.arange(0, BLOCK)
            if STORE:
                tl.store(there + at, tl.load(here + at, mask=at < words), mask=at < words)
            else:
                tl.store(here + at, tl.load(there + at, mask=at < words), mask=at < words)


@triton.jit
def _advance(head, count, sign, ROWS: tl.constexpr):
    tl.store(head, tl.load(head) + sign * tl.cdiv(tl.load(count), ROWS))


class Pages:
    """Pages of one width of rows, as many as `most` rows need. head: one int32, where the free list begins."""

    def __init__(self, most, width, device, head):
        self.count = triton.cdiv(most, ROWS)
        self.pages = torch.empty(self.count * ROWS, width, dtype=torch.bfloat16, device=device)
        self.free = torch.randperm(self.count, dtype=torch.int32, device=device)
        self.taken = torch.empty_like(self.free)
        self.head = head

    def _run(self, tensor, count, store):
        words = tensor.view(torch.int32)
        grid = (triton.cdiv(tensor.shape[0], ROWS), PARTS)
        _copy_pages[grid](words, self.pages.view(torch.int32), self.free, self.taken, self.head, count, words.shape[1],
                          STORE=store, ROWS=ROWS, PARTS=PARTS, BLOCK=BLOCK, num_warps=8)  # fmt: skip
        _advance[(1,)](self.head, count, 1 if store else -1, ROWS=ROWS)

    def store(self, tensor, count):
        self._run(tensor, count, True)

    def load(self, tensor, count):
        self._run(tensor, count, False)
