"""DotProductAttention over packed sequences, forward and backward, against torch's varlen_attn and its attention of the
padded batch (targets.py case 31); the same with a sink, beside none and torch's compiled flex_attention; host time at a
small size. Batches: with a sink, beside the same; heads of 192 and 128 beside torch's backends; what chunked attention
takes beside inputs and results; a Llama-3-8B layer whose batch is half padding beside the same without.

Tokens of 16 sequences with lengths like 1 / i, causal, one cu_seqlens tensor for both sides, max_seqlen given. Flops:
2 * 2 l^2 / 2 * heads * head_dim a sequence of l tokens and direction, three times for forward and backward; those of
padding are not counted."""

import torch
import torch.nn.functional as F
from common import Bench, Case
from torch.nn.attention import SDPBackend, sdpa_kernel

import transformer_engine.pytorch as te

# dtype, tokens, sequences, heads, key-value heads, head_dim
GPU = ("bf16", 16384, 16, 32, 8, 128)
GPU_SINK = ("bf16", 8192, 16, 64, 8, 64)
CPU = ("fp32", 512, 4, 4, 2, 32)
SMALL = ("bf16", 256, 4, 4, 2, 64)
STEP = "forward+backward"
BACKENDS = {"torch cudnn": SDPBackend.CUDNN_ATTENTION, "torch efficient": SDPBackend.EFFICIENT_ATTENTION}


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


# ---- flex_attention ----


def flex(lengths, window, sink):
    """Compiled, of q [batch, tokens, heads, d] of this total length, or without a batch: causal within sequences of
    these lengths, a window where it is given. The sink joins the softmax by the log-sum-exp."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(sink.device)

    def seen(_, __, i, j):
        near = (i >= j) & (document[i] == document[j])
        return near if window is None else near & (i - j <= window)

    total = sum(lengths)
    mask = create_block_mask(seen, None, None, total, total, device=sink.device)

    def attend(q, k, v):
        q, k, v = ((t if t.dim() == 4 else t[None]).transpose(1, 2) for t in (q, k, v))
        out, lse = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
        out = out * torch.sigmoid(lse - sink[:, None])[..., None].to(out.dtype)
        return out.transpose(1, 2)

    return torch.compile(attend, dynamic=False)


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
    """Beside the same attention without a sink, and flex_attention with one."""
    packs = Packs(bench, size)
    columns = (packs.tokens, packs.heads + packs.groups, packs.head)
    case = Case("31", "packed_attention_sink", packs.dtype, columns, "forward+backward", flops=3 * packs.flops)
    if bench.selects(case):
        window = {"window_size": (128, 0)}
        made = {"ours": packs.ours(softmax_type="learnable", device=bench.device, **window)}
        made["own vanilla"] = packs.ours(**window)
        learned = torch.zeros(packs.heads, device=bench.device, requires_grad=True)
        compiled = flex(packs.lengths, 128, learned)
        made["torch flex"] = lambda q, k, v: compiled(q, k, v).squeeze(0)
        bench.compare(case, {name: step(run) for name, run in made.items()}, lambda: packs.inputs(grad=True))


def host(bench, size):
    packs = Packs(bench, size)
    columns = (packs.tokens, packs.heads + packs.groups, packs.head)
    case = Case("H", "packed_attention", packs.dtype, columns, "forward+backward", flops=3 * packs.flops)
    if bench.selects(case):
        made = {"ours": packs.ours(), "torch varlen": packs.varlen}
        bench.compare_host(case, {name: step(run) for name, run in made.items()}, lambda: packs.inputs(grad=True))


# ---- batches ----


def batch_inputs(bench, tokens, heads, groups, dims, batch=1):
    counts = ((heads, dims[0]), (groups, dims[0]), (groups, dims[1]), (heads, dims[1]))
    made = [bench.randn(batch, tokens, n, width, dtype="bf16", grad=True) for n, width in counts]
    return *made[:3], made[3].detach().flatten(-2)


def core(heads, groups, dims, **options):
    options = {"qkv_format": "bshd", "attn_mask_type": "causal", **options}
    return te.DotProductAttention(heads, dims, groups, **options)


def by_backend(backend):
    def run(q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(-2)

    return run


def batch_sink(bench, tokens=8192, heads=64, groups=8, head=64):
    """Beside the same without a sink, and flex_attention with one."""
    flops = 3 * 2 * tokens * tokens * heads * head
    case = Case("31", "attention_sink", "bf16", (tokens, heads + groups, head), STEP, flops=flops)
    if bench.selects(case):
        made = {"own vanilla": core(heads, groups, head)}
        made = {"ours": core(heads, groups, head, softmax_type="learnable", device=bench.device), **made}
        compiled = flex([tokens], None, torch.zeros(heads, device=bench.device, requires_grad=True))
        made["torch flex"] = lambda q, k, v: compiled(q, k, v).flatten(-2)
        make = lambda: batch_inputs(bench, tokens, heads, groups, (head, head))  # noqa: E731
        bench.compare(case, {name: step(run) for name, run in made.items()}, make)


def two_widths(bench, tokens=8192, heads=16, dims=(192, 128)):
    case = Case("31", "attention", "bf16", (tokens, heads, *dims), STEP, flops=3 * tokens * tokens * heads * sum(dims))
    if bench.selects(case):
        made = {"ours": core(heads, heads, dims), **{name: by_backend(one) for name, one in BACKENDS.items()}}
        make = lambda: batch_inputs(bench, tokens, heads, heads, dims)  # noqa: E731
        bench.compare(case, {name: step(run) for name, run in made.items()}, make)


def chunked_peak(bench, tokens=8192, heads=32, groups=8, head=128):
    """MiB beside inputs, result and gradients."""
    case = Case("31", "chunked_attention_peak", "bf16", (tokens, heads + groups, head), "keeps")
    if bench.selects(case):
        run = core(heads, groups, head)
        q, k, v, d = batch_inputs(bench, tokens, heads, groups, (head, head))
        for _ in range(2):
            q.grad = k.grad = v.grad = None
            start = torch.cuda.memory_allocated(bench.device)
            torch.cuda.reset_peak_memory_stats(bench.device)
            run(q, k, v, softcap=30.0).backward(d)
        results = sum(t.nbytes for t in (q, k, v, d))
        peak = torch.cuda.max_memory_allocated(bench.device) - start - results
        bench.record(case, {"ours": peak / 2**20}, "MiB")


def half_padding(bench, tokens=4096, hidden=4096, ffn_hidden=14336, heads=32, groups=8):
    """Two sequences; the layer's products do not leave the padding out, as their peer's do not."""
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "normalization": "RMSNorm", "activation": "swiglu"}
    options |= {"bias": False, "params_dtype": torch.bfloat16, "attn_input_format": "bshd", "num_gqa_groups": groups}
    weights = hidden * (2 * hidden + 2 * hidden * groups // heads + 3 * ffn_hidden)
    flops = 6 * 2 * tokens * weights + 3 * 2 * 2 * tokens * tokens * hidden
    case = Case("31", "transformer_layer_half_padding", "bf16", (2, tokens, hidden), STEP, flops=flops)
    if not bench.selects(case):
        return
    lengths = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32, device=bench.device)
    told = {"ours": {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}, "own causal": {}}
    made = {}
    for name, call in told.items():
        mask = "padding_causal" if call else "causal"
        layer = te.TransformerLayer(hidden, ffn_hidden, heads, self_attn_mask_type=mask, **options).to(bench.device)

        def run(x, d, layer=layer, call=call):
            x.grad = None
            layer.zero_grad()
            layer(x, **call).backward(d)

        made[name] = run
    make = lambda: [bench.randn(2, tokens, hidden, dtype="bf16", grad=grad) for grad in (True, False)]  # noqa: E731
    bench.compare(case, made, make)


def main():
    bench = Bench(__doc__)
    packed(bench, GPU if bench.cuda else CPU)
    if bench.cuda:
        sink(bench, GPU_SINK)
        host(bench, SMALL)
        for case in (batch_sink, two_widths, chunked_peak, half_padding):
            case(bench)
    bench.finish()


if __name__ == "__main__":
    main()
