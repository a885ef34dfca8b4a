"""DotProductAttention over packed sequences, forward and backward, against torch's varlen_attn and its attention of the
padded batch (targets.py case 31); the same with a sink; host time at a small size.

Tokens of 16 sequences with lengths like 1 / i, causal, one cu_seqlens tensor for both sides, max_seqlen given. Flops:
2 * 2 l^2 / 2 * heads * head_dim a sequence of l tokens and direction, three times for forward and backward; those of
padding are not counted."""

import torch
import torch.nn.functional as F
from common import Bench, Case

import transformer_engine.pytorch as te

# dtype, tokens, sequences, heads, key-value heads, head_dim
GPU = ("bf16", 16384, 16, 32, 8, 128)
GPU_SINK = ("bf16", 8192, 16, 64, 8, 64)
CPU = ("fp32", 512, 4, 4, 2, 32)
SMALL = ("bf16", 256, 4, 4, 2, 64)


def zipf(tokens, sequences):
    """Lengths proportional to 1 / i that add up to `tokens`."""
    whole = sum(1 / i for i in range(1, sequences + 1))
    lengths = [max(1, int(tokens / whole / i)) for i in range(1, sequences + 1)]
    return [lengths[0] + tokens - sum(lengths), *lengths[1:]]


class Packs:
    """The inputs of a case, packed and padded, and its contenders: functions of q, k, v."""

    def __init__(self, bench, size):
        self.bench, (self.dtype, self.tokens, sequences, self.heads, self.groups, self.head) = bench, size
        self.lengths = zipf(self.tokens, sequences)
        sums = torch.tensor([0, *self.lengths]).cumsum(0)
        self.starts, self.longest = sums.to(bench.device, torch.int32), max(self.lengths)
        self.flops = 2 * sum(n * n for n in self.lengths) * self.heads * self.head

    def inputs(self, rows=None, grad=False):
        rows = rows or (self.tokens,)
        counts = (self.heads, self.groups, self.groups)
        made = [self.bench.randn(*rows, n, self.head, dtype=self.dtype, grad=grad) for n in counts]
        return (*made, self.bench.randn(*rows, self.heads, self.head, dtype=self.dtype)) if grad else tuple(made)

    def ours(self, **options):
        core = te.DotProductAttention(
            self.heads, self.head, self.groups, qkv_format="thd", attn_mask_type="padding_causal", **options
        ).to(self.bench.device)
        lengths = {"cu_seqlens_q": self.starts, "cu_seqlens_kv": self.starts}
        lengths |= {"max_seqlen_q": self.longest, "max_seqlen_kv": self.longest}
        return lambda q, k, v: core(q, k, v, **lengths).unflatten(-1, (self.heads, self.head))

    def varlen(self, q, k, v):
        from torch.nn.attention.varlen import varlen_attn

        bounds = (self.starts, self.starts, self.longest, self.longest)
        return varlen_attn(q, k, v, *bounds, window_size=(-1, 0))

    @staticmethod
    def padded(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def contenders(self, direction, make, **peers):
        """With the padded batch, whose inputs are its own."""
        grad, rows = direction == "forward+backward", (len(self.lengths), self.longest)
        wrap = step if grad else lambda run: run
        padded_sets = [self.inputs(rows, grad)]
        runs = {"ours": make, **peers}
        return {n: wrap(run) for n, run in runs.items()} | {"torch padded": (wrap(self.padded), padded_sets)}


def step(run):
    def both(q, k, v, d):
        q.grad = k.grad = v.grad = None
        run(q, k, v).backward(d)

    return both


def packed(bench, size):
    packs = Packs(bench, size)
    columns = (packs.tokens, packs.heads + packs.groups, packs.head)
    peers = {"torch varlen": packs.varlen} if bench.cuda else {}
    for direction, passes in (("forward", 1), ("forward+backward", 3)):
        case = Case("31", "packed_attention", packs.dtype, columns, direction, flops=passes * packs.flops)
        if bench.selects(case):
            contenders = packs.contenders(direction, packs.ours(), **peers)
            bench.compare(case, contenders, lambda grad=passes == 3: packs.inputs(grad=grad))


def sink(bench, size):
    """Beside the same attention without a sink."""
    packs = Packs(bench, size)
    columns = (packs.tokens, packs.heads + packs.groups, packs.head)
    case = Case("31", "packed_attention_sink", packs.dtype, columns, "forward+backward", flops=3 * packs.flops)
    if bench.selects(case):
        window = {"window_size": (128, 0)}
        made = {"ours": packs.ours(softmax_type="learnable", device=bench.device, **window)}
        made["own vanilla"] = packs.ours(**window)
        bench.compare(case, {name: step(run) for name, run in made.items()}, lambda: packs.inputs(grad=True))


def host(bench, size):
    packs = Packs(bench, size)
    columns = (packs.tokens, packs.heads + packs.groups, packs.head)
    case = Case("H", "packed_attention", packs.dtype, columns, "forward+backward", flops=3 * packs.flops)
    if bench.selects(case):
        made = {"ours": packs.ours(), "torch varlen": packs.varlen}
        bench.compare_host(case, {name: step(run) for name, run in made.items()}, lambda: packs.inputs(grad=True))


def main():
    bench = Bench(__doc__)
    packed(bench, GPU if bench.cuda else CPU)
    if bench.cuda:
        sink(bench, GPU_SINK)
        host(bench, SMALL)
    bench.finish()


if __name__ == "__main__":
    main()
