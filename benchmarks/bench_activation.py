"""SwiGLU forward and backward against plain PyTorch, eager and compiled (targets.py cases 1, 2 and 3).

Bytes per output element of b bytes: forward 3b (reads gate and up, writes one), backward 5b (reads dy, gate and up,
writes two), 6b when it re-emits the activation. `_module` is the functional form through autograd: 8b. Straight to FP8
in 1x128 blocks both ways: forward 2b + 2.06; backward, dx both ways and the activation in blocks along its columns,
3b + 5.16. The plain peers make the activation and its blocks, as bench_quantize.py does."""

import torch
from bench_quantize import BLOCK, block_both, block_columns
from common import TORCH_DTYPES, Bench, Case
from plain import swiglu

from transformer_engine.pytorch import _C, functional

GPU_SHAPES = (("bf16", (16384, 14336)),)
CPU_SHAPES = (("fp32", (2048, 2816)), ("bf16", (2048, 2816)))


def backward_by_hand(dy, x):
    """Only the gradient, for torch.compile to fuse; in fp32, as ours."""
    gate, up, dy = *(half.float() for half in x.chunk(2, -1)), dy.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dy * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat((dgate, dy * silu), -1).to(x.dtype)


def backward_and_activation_by_hand(dy, x):
    gate, up = (half.float() for half in x.chunk(2, -1))
    return backward_by_hand(dy, x), (gate * torch.sigmoid(gate) * up).to(x.dtype)


def backward_eager(dy, x):
    gate, up = x.chunk(2, -1)
    return torch.cat((torch.ops.aten.silu_backward(dy * up, gate), dy * torch.nn.functional.silu(gate)), -1)


def backward_and_activation_eager(dy, x):
    return backward_eager(dy, x), swiglu(x)


def through_autograd(function):
    def step(x, dy):
        x.grad = None
        function(x).backward(dy)

    return step


def peers(bench, eager, compiled):
    return {"torch eager": eager} | bench.compiled(lambda: compiled)


def run(bench, dtype, shape):
    rows, cols = shape
    element = TORCH_DTYPES[dtype].itemsize * rows * cols
    params = []  # swiglu has none

    def x():
        return bench.randn(rows, 2 * cols, dtype=dtype)

    def dy():
        return bench.randn(rows, cols, dtype=dtype)

    case = Case("1", "swiglu", dtype, shape, "forward", bytes=3 * element)
    if bench.selects(case):
        ours = {"ours": lambda x: _C.activation_fwd(x, "swiglu", params)}
        bench.compare(case, ours | peers(bench, swiglu, swiglu), lambda: (x(),))

    case = Case("2", "swiglu", dtype, shape, "backward", bytes=6 * element)
    if bench.selects(case):
        ours = {"ours": lambda dy, x: _C.activation_bwd(dy, x, "swiglu", params, True)}
        others = peers(bench, backward_and_activation_eager, backward_and_activation_by_hand)
        bench.compare(case, ours | others, lambda: (dy(), x()))

    case = Case("2", "swiglu_no_emit", dtype, shape, "backward", bytes=5 * element)
    if bench.selects(case):
        ours = {"ours": lambda dy, x: _C.activation_bwd(dy, x, "swiglu", params, False)}
        bench.compare(case, ours | peers(bench, backward_eager, backward_by_hand), lambda: (dy(), x()))

    case = Case("2", "swiglu_module", dtype, shape, "forward+backward", bytes=8 * element)
    if bench.selects(case):
        ours = {"ours": through_autograd(lambda x: functional.activation(x, "swiglu"))}
        plain = {name: through_autograd(peer) for name, peer in peers(bench, swiglu, swiglu).items()}
        bench.compare(case, ours | plain, lambda: (x().requires_grad_(), dy()))


def run_fp8(bench, dtype, shape):
    rows, cols = shape
    n, element, params = rows * cols, TORCH_DTYPES[dtype].itemsize, []
    quantizer = _C.Quantizer("block1d", pow_2_scales=True)
    blocks = 1 + 4 / BLOCK  # bytes an element of one direction

    def backward_by_hand_fp8(dy, x):
        dx, y = backward_and_activation_by_hand(dy, x)
        return *block_both(dx), *block_columns(y)

    def backward(dy, x):
        return _C.activation_bwd_quantize(
            dy, x, "swiglu", params, quantizer, (True, True), False, quantizer, None, (False, True)
        )

    case = Case("3", "swiglu_block", "fp8", shape, "forward", bytes=round(n * (2 * element + 2 * blocks)))
    if bench.selects(case):
        ours = {"ours": lambda x: _C.activation_fwd_quantize(x, "swiglu", params, quantizer, True, True)}
        plain = peers(bench, lambda x: block_both(swiglu(x)), lambda x: block_both(swiglu(x)))
        bench.compare(case, ours | plain, lambda: (bench.randn(rows, 2 * cols, dtype=dtype),))

    case = Case("3", "swiglu_block", "fp8", shape, "backward", bytes=round(n * (3 * element + 5 * blocks)))
    if bench.selects(case):
        plain = peers(bench, backward_by_hand_fp8, backward_by_hand_fp8)

        def inputs():
            return bench.randn(rows, cols, dtype=dtype), bench.randn(rows, 2 * cols, dtype=dtype)

        bench.compare(case, {"ours": backward} | plain, inputs)


def main():
    bench = Bench(__doc__)
    for dtype, shape in GPU_SHAPES if bench.cuda else CPU_SHAPES:
        run(bench, dtype, shape)
        run_fp8(bench, dtype, shape)
    bench.finish()


if __name__ == "__main__":
    main()
