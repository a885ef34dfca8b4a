"""Tokens to the order of their experts and back, against index operations of plain PyTorch (targets.py case 17).

Bytes of a row of b bytes, k experts a token: permute reads T and writes T k of them, b T (1 + k); unpermute and the
backward the same, and the backward of the merge reads T k more. Maps and probabilities are not counted; the peers get
their maps beforehand. `map_by_rows` counts the bytes of its outputs."""

import torch
from common import TORCH_DTYPES, Bench, Case

import transformer_engine.pytorch as te
from transformer_engine.pytorch import functional

# tokens, experts a token, hidden, experts
GPU_SHAPES = (("bf16", (8192, 8, 7168, 256)),)
CPU_SHAPES = (("fp32", (1024, 4, 512, 32)), ("bf16", (1024, 4, 512, 32)))


def routing(bench, tokens, topk, experts):
    scores = torch.rand(tokens, experts, device=bench.device)
    mask = torch.zeros(tokens, experts, dtype=torch.bool, device=bench.device)
    return mask.scatter_(1, scores.topk(topk, dim=1).indices, True)


def run(bench, dtype, shape):
    tokens, topk, hidden, experts = shape
    mask = routing(bench, tokens, topk, experts)
    token = mask.t().nonzero()[:, 1]
    rows, columns = tokens * topk, (tokens, topk, hidden)
    one_pass = TORCH_DTYPES[dtype].itemsize * hidden * (tokens + rows)
    row_map = functional.permute_mask_map(mask)
    probs = torch.rand(tokens, experts, device=bench.device)

    def of_tokens():
        return (bench.randn(tokens, hidden, dtype=dtype),)

    def of_rows():
        return (bench.randn(rows, hidden, dtype=dtype),)

    def gathered(inp):
        return inp.index_select(0, token)

    def summed(inp):
        return inp.new_zeros(tokens, hidden).index_add_(0, token, inp)

    def peers(plain):
        return {"torch eager": plain} | ({"torch compile": bench.compile(plain)} if bench.cuda else {})

    case = Case("17", "permute", dtype, columns, "forward", bytes=one_pass)
    if bench.selects(case):
        ours = {"ours": lambda inp: functional.permute(inp, row_map, rows, of_mask=True)[0]}
        bench.compare(case, ours | peers(gathered), of_tokens)
    case = Case("17", "unpermute", dtype, columns, "forward", bytes=one_pass)
    if bench.selects(case):
        ours = {"ours": lambda inp: functional.unpermute(inp, row_map, of_mask=True)}
        bench.compare(case, ours | peers(summed), of_rows)
    case = Case("17", "permute", dtype, columns, "backward", bytes=one_pass)
    if bench.selects(case):  # the gradient of a permute
        ours = {"ours": lambda grad: functional.unpermute(grad, row_map, of_mask=True)}
        bench.compare(case, ours | peers(summed), of_rows)
    case = Case("17", "unpermute_merge", dtype, columns, "backward", bytes=one_pass + one_pass * topk // (1 + topk))
    if bench.selects(case):
        bwd = torch.ops.te.unpermute_bwd
        ours = {"ours": lambda grad, inp: bwd(grad, row_map, True, inp, probs, None, rows, True)}
        bench.compare(case, ours, lambda: (*of_tokens(), *of_rows()))


def run_maps(bench, shape):
    tokens, topk, _, experts = shape
    mask = routing(bench, tokens, topk, experts)
    ids = mask.nonzero()[:, 1].view(tokens, topk).int()
    case = Case("17", "map_by_rows", "fp32", (tokens, topk, experts), "forward", bytes=8 * tokens * topk)
    if bench.selects(case):
        ours = {"ours": lambda ids: functional.permute_row_map(ids, (0, experts), tokens * topk)[0]}
        peers = {"torch eager": lambda ids: ids.flatten().argsort(stable=True)}
        bench.compare(case, ours | peers, lambda: (ids.clone(),))
    case = Case("17", "map_of_a_mask", "fp32", (tokens, experts), "forward", bytes=4 * tokens * (2 * experts + 1))
    if bench.selects(case):
        ours = {"ours": functional.permute_mask_map}
        bench.compare(case, ours | {"torch eager": lambda mask: mask.t().nonzero()}, lambda: (mask.clone(),))


def run_module(bench, dtype, shape):
    """The functions of clients, forward and backward, with their maps."""
    tokens, topk, hidden, experts = shape
    mask = routing(bench, tokens, topk, experts)
    rows = tokens * topk
    passes = TORCH_DTYPES[dtype].itemsize * hidden * (4 * tokens + 5 * rows)
    case = Case("17", "permute_unpermute_module", dtype, (tokens, topk, hidden), "forward+backward", bytes=passes)
    if not bench.selects(case):
        return

    def step(inp, probs, grad):
        inp.grad = probs.grad = None
        out, _, row_id_map = te.moe_permute_with_probs(inp, probs, mask, rows)
        te.moe_unpermute(out, row_id_map, probs, restore_shape=inp.shape).backward(grad)

    def inputs():
        inp, grad = (bench.randn(tokens, hidden, dtype=dtype) for _ in range(2))
        return inp.requires_grad_(), torch.rand(tokens, experts, device=bench.device).requires_grad_(), grad

    bench.compare(case, {"ours": step}, inputs)


def main():
    bench = Bench(__doc__)
    for dtype, shape in GPU_SHAPES if bench.cuda else CPU_SHAPES:
        run(bench, dtype, shape)
        run_module(bench, dtype, shape)
    run_maps(bench, (GPU_SHAPES if bench.cuda else CPU_SHAPES)[0][1])
    bench.finish()


if __name__ == "__main__":
    main()
