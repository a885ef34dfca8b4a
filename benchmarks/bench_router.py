"""The MoE router beside plain PyTorch, eager and compiled: choice, auxiliary scores and loss (targets.py case 27).

Bytes of `router`, for E experts: the logits are read and probs written in b bytes, a map of 1 byte and topk indices of
4. `router_module` is a training step of a router's three functions: choice, auxiliary scores and loss, with their
backwards."""

import torch
from common import TORCH_DTYPES, Bench, Case

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

# tokens, experts, topk
GPU_SHAPES = (("fp32", (8192, 128, 8)), ("bf16", (8192, 128, 8)), ("fp32", (8192, 8, 2)))
CPU_SHAPES = (("fp32", (1024, 128, 8)),)


def plain_choice(logits, topk):
    values, chosen = logits.float().topk(topk, -1)
    probs = torch.zeros_like(logits).scatter(-1, chosen, values.softmax(-1).to(logits.dtype))
    return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(-1, chosen, True)


def plain_loss(logits, topk):
    scores = logits.float().softmax(-1)
    chosen = scores.topk(topk, -1).indices
    counts = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, chosen, True).sum(0)
    return (scores.sum(0) * counts).sum() * (logits.size(-1) * 0.01 / (topk * logits.size(0) ** 2))


def fused_choice(logits, topk):
    return fused_topk_with_score_function(logits, topk, False, None, None, None, "softmax", None)


def fused_loss(logits, topk):
    routing_map, scores = fused_compute_score_for_moe_aux_loss(logits, topk, "softmax")
    return fused_moe_aux_loss(scores, routing_map.sum(0), logits.size(0), logits.size(-1), topk, 0.01)


def training_step(choice, loss, topk):
    def step(logits, incoming):
        logits.grad = None
        torch.autograd.backward((choice(logits, topk)[0], loss(logits, topk)), (incoming, None))

    return step


def run(bench, dtype, shape):
    tokens, experts, topk = shape
    size = tokens * (experts * (2 * TORCH_DTYPES[dtype].itemsize + 1) + 4 * topk)

    def eager(logits):
        return plain_choice(logits, topk)

    case = Case("27", "router", dtype, shape, "forward", bytes=size)
    if bench.selects(case):
        args = (None, topk, False, 0, 0, 1.0, "softmax", "bytes")
        contenders = {"ours": lambda x: _C.router_topk(x, *args), "torch eager": eager}
        contenders |= bench.compiled(lambda: eager)
        bench.compare(case, contenders, lambda: (bench.randn(tokens, experts, dtype=dtype),))

    case = Case("27", "router_module", dtype, shape, "forward+backward", bytes=2 * size)
    if bench.selects(case):
        contenders = {
            "ours": training_step(fused_choice, fused_loss, topk),
            "torch eager": training_step(plain_choice, plain_loss, topk),
        }
        if bench.cuda:
            compiled = bench.compile(plain_choice), bench.compile(plain_loss)
            contenders["torch compile"] = training_step(*compiled, topk)

        def inputs():
            logits = bench.randn(tokens, experts, dtype=dtype, grad=True)
            return logits, bench.randn(tokens, experts, dtype=dtype)

        bench.compare(case, contenders, inputs)


def main():
    bench = Bench(__doc__)
    for dtype, shape in GPU_SHAPES if bench.cuda else CPU_SHAPES:
        run(bench, dtype, shape)
    bench.finish()


if __name__ == "__main__":
    main()
