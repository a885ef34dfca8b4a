"""te.TransformerLayer at Llama-3-8B's size, forward and backward, against the same layer in plain PyTorch, eager and
compiled; what each keeps for backward; host time at a small size; attention's backends (targets.py case 24). In FP8
`_cached`: with weights that are quantized once. `_deterministic`: under torch.use_deterministic_algorithms without its
filling of new memory, all contenders but `own`.

Flops: 6 T for each weight element, and 3 * 4 * T^2 / 2 * heads * head_dim for causal attention; norms, rotary
embedding and activation are not counted. The peers' attention prefers cuDNN's kernels, as ours does."""

import os

import bench_tune
import torch
import torch.nn.functional as F
from common import TORCH_DTYPES, Bench, Case, keeps_mib, training_step
from fp8 import Quantized, pairs
from plain import Layer
from torch.nn.attention import SDPBackend, sdpa_kernel

import transformer_engine.pytorch as te

# seq, batch, hidden, ffn_hidden, heads, key-value heads
GPU = ("bf16", (8192, 1, 4096, 14336, 32, 8))
CPU = ("fp32", (256, 1, 256, 704, 8, 2))
CPU_FP8 = (32, 1, 64, 96, 4, 2)
SMALL = (16, 1, 256, 512, 4, 2)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the default size, which `_deterministic` has to name
BACKENDS = {
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def ours(size, device, dtype, **options):
    _, _, hidden, ffn_hidden, heads, groups = size
    return te.TransformerLayer(
        hidden,
        ffn_hidden,
        heads,
        num_gqa_groups=groups,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="causal",
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        params_dtype=dtype,
        device=device,
        **options,
    )


class Rotated(torch.nn.Module):
    """Our layer with its angles, called with hidden states alone. The angles are an argument of the layer, like x: as a
    buffer they do not count as kept, on either side."""

    def __init__(self, layer, angles):
        super().__init__()
        self.layer = layer
        self.register_buffer("angles", angles)

    def forward(self, x, **told):
        return self.layer(x, rotary_pos_emb=self.angles, **told)


def deterministic(step):
    """A step whose kernels repeat their bits."""

    def run(*args):
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        try:
            step(*args)
        finally:
            torch.use_deterministic_algorithms(False)

    return run


def layer_flops(size):
    seq, batch, hidden, ffn_hidden, heads, groups = size
    head = hidden // heads
    weights = hidden * (hidden + 2 * groups * head) + hidden * hidden + 3 * hidden * ffn_hidden
    return 6 * seq * batch * weights + 6 * batch * heads * seq * seq * head


def layers(bench, dtype, size):
    seq, batch, hidden, _, heads, _ = size
    torch_dtype, shape = TORCH_DTYPES[dtype], (seq, batch, hidden)
    angles = te.RotaryPositionEmbedding(hidden // heads).to(bench.device)(seq)
    mine = Rotated(ours(size, bench.device, torch_dtype), angles)
    peers = {"torch eager": Layer(size, angles, device=bench.device, dtype=torch_dtype)}
    peers |= bench.compiled(lambda: Layer(size, angles, device=bench.device, dtype=torch_dtype))
    frugal = Rotated(ours(size, bench.device, torch_dtype, recompute_norm_output=True), angles)
    variants = {"transformer_layer_recompute_norm": {"ours": frugal, f"own {dtype}": mine}}
    variants["transformer_layer"] = {"ours": mine} | peers

    def sets():
        return bench.randn(*shape, dtype=dtype, grad=True), bench.randn(*shape, dtype=dtype)

    case = Case("24", "transformer_layer_tuned", dtype, shape, "forward+backward", flops=layer_flops(size))
    if bench.cuda and bench.selects(case):
        bench_tune.compare(bench, case, mine, sets, peers)
    case = Case("24", "transformer_layer_deterministic", dtype, shape, "forward+backward", flops=layer_flops(size))
    if bench.selects(case):
        steps = {"ours": deterministic(training_step(mine)), f"own {dtype}": training_step(mine)}
        bench.compare(case, steps | {"torch eager": deterministic(training_step(peers["torch eager"]))}, sets)
    for op, modules in variants.items():
        case = Case("24", op, dtype, shape, "forward+backward", flops=layer_flops(size))
        if bench.selects(case):
            bench.compare(case, {name: training_step(module) for name, module in modules.items()}, sets)
        case = Case("24", op, dtype, shape, "keeps")
        if bench.selects(case):
            plain = {name: module for name, module in modules.items() if "compile" not in name}
            bench.record(case, {name: keeps_mib(module, sets()[0]) for name, module in plain.items()}, "MiB")


def layers_fp8(bench, size):
    seq, batch, hidden, _, heads, _ = size
    angles = te.RotaryPositionEmbedding(hidden // heads).to(bench.device)(seq)
    plain = Rotated(ours(size, bench.device, torch.bfloat16), angles)

    def sets():
        return bench.randn(seq, batch, hidden, dtype="bf16", grad=True), bench.randn(seq, batch, hidden, dtype="bf16")

    for name, suffix, cached in pairs():
        op, shape = f"transformer_layer_{name}{suffix}", (seq, batch, hidden)
        module = Quantized(plain, name, cached)
        case = Case("24", op, "fp8", shape, "forward+backward", flops=layer_flops(size))
        if bench.selects(case):
            bench.compare(case, {"ours": training_step(module), "own bf16": training_step(plain)}, sets)
        case = Case("24", op, "fp8", shape, "keeps")
        if not cached and bench.selects(case):
            kept = {"ours": keeps_mib(module, sets()[0]), "own bf16": keeps_mib(plain, sets()[0])}
            bench.record(case, kept, "MiB")


def attention(bench, dtype, size):
    """DotProductAttention as the layer calls it, beside each backend alone."""
    seq, batch, hidden, _, heads, groups = size
    head = hidden // heads
    module = te.DotProductAttention(heads, head, groups, attn_mask_type="causal", qkv_format="sbhd")

    def backend(kind):
        def run(q, k, v):
            q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
            grouped = kind != SDPBackend.EFFICIENT_ATTENTION  # it takes no groups: its keys are repeated
            if not grouped:
                k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
            with sdpa_kernel(kind):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            return out.permute(2, 0, 1, 3).flatten(2)

        return run

    def step(run):
        def both(q, k, v, d):
            q.grad = k.grad = v.grad = None
            run(q, k, v).backward(d)

        return both

    def inputs(grad):
        return tuple(bench.randn(seq, batch, n, head, dtype=dtype, grad=grad) for n in (heads, groups, groups))

    runs = {"ours": module} | {name: backend(kind) for name, kind in BACKENDS.items()}
    columns, flops = (seq * batch, heads + groups, head), 2 * batch * heads * seq * seq * head
    case = Case("24", "attention", dtype, columns, "forward", flops=flops)
    if bench.selects(case):
        bench.compare(case, {n: lambda q, k, v, run=r: run(q, k, v) for n, r in runs.items()}, lambda: inputs(False))
    case = Case("24", "attention", dtype, columns, "forward+backward", flops=3 * flops)
    if bench.selects(case):
        steps = {name: step(run) for name, run in runs.items()}
        bench.compare(case, steps, lambda: (*inputs(True), bench.randn(seq, batch, hidden, dtype=dtype)))


def host(bench, dtype, size):
    seq, batch, hidden, *_, heads, _ = size
    angles = te.RotaryPositionEmbedding(hidden // heads).to(bench.device)(seq)
    modules = {
        "ours": Rotated(ours(size, bench.device, TORCH_DTYPES[dtype]), angles),
        "torch eager": Layer(size, angles, device=bench.device, dtype=TORCH_DTYPES[dtype]),
    }
    case = Case("H", "transformer_layer", dtype, (seq, batch, hidden), "forward+backward", flops=layer_flops(size))
    if bench.selects(case):
        contenders = {name: training_step(module) for name, module in modules.items()}
        shape = (seq, batch, hidden)
        bench.compare_host(
            case, contenders, lambda: (bench.randn(*shape, dtype=dtype, grad=True), bench.randn(*shape, dtype=dtype))
        )


def main():
    bench = Bench(__doc__)
    dtype, size = GPU if bench.cuda else CPU
    layers(bench, dtype, size)
    layers_fp8(bench, size if bench.cuda else CPU_FP8)
    if bench.cuda:
        attention(bench, dtype, size)
        host(bench, dtype, SMALL)
    bench.finish()


if __name__ == "__main__":
    main()
