"""RMSNorm and LayerNorm, forward and backward, against plain PyTorch, eager and compiled (targets.py cases 5, 6, 7, 8).

Bytes per element of b bytes: forward 2b (reads x, writes y), with the residual 4b (reads both, writes y and their sum);
backward 3b (reads dy and x, writes dx), with the residual's gradient 4b. Statistics, gamma and the gradients of gamma
and beta are not counted. The peers' backward makes the same gradients: eager is autograd's own node, compiled the
formula by hand from the saved statistics. `_module` is the functional form through autograd: 5b.

Case 8 has FP8 outputs (1x128 blocks both ways, or per tensor): it reads x and the residual, writes their sum, two bytes
and the scales, 3b + 2 + 8/128; `own bf16` is our norm followed by our quantize."""

import torch
import torch.nn.functional as F
from bench_quantize import BLOCK, block_both, cast_transpose, cast_transpose_current
from common import TORCH_DTYPES, Bench, Case

from transformer_engine.pytorch import _C, functional

EPS = 1e-5
GPU_SHAPES = (("bf16", (16384, 4096)), ("bf16", (32768, 8192)), ("bf16", (8192, 16384)))
GPU_ADD_FORWARD = ("bf16", (16384, 8192))
GPU_QUANTIZED = ("bf16", (16384, 7168))
CPU_SHAPES = (("fp32", (2048, 1024)), ("bf16", (2048, 1024)))


def plain_norm(rms):
    def rms_norm(x, gamma, beta):
        return F.rms_norm(x, gamma.shape, gamma, EPS)

    def layer_norm(x, gamma, beta):
        return F.layer_norm(x, gamma.shape, gamma, beta, EPS)

    return rms_norm if rms else layer_norm


def add_then(norm):
    def add_norm(x, residual, gamma, beta):
        h = x + residual
        return norm(h, gamma, beta), h

    return add_norm


def backward_by_hand(rms):
    """(dx, dgamma, dbeta) in fp32 from the saved statistics, as ours, for torch.compile to fuse."""

    def backward(dy, residual_grad, x, gamma, mean, rstd):
        d, rstd = dy.float(), rstd[:, None]
        n = (x.float() if rms else x.float() - mean[:, None]) * rstd
        w = d * gamma.float()
        dx = w - n * (w * n).mean(-1, keepdim=True)
        if not rms:
            dx = dx - w.mean(-1, keepdim=True)
        dx = dx * rstd
        if residual_grad is not None:
            dx = dx + residual_grad.float()
        dbeta = None if rms else d.sum(0).to(gamma.dtype)
        return dx.to(x.dtype), (d * n).sum(0).to(gamma.dtype), dbeta

    return backward


def through_autograd(function):
    def step(x, dy, *parameters):
        for leaf in (x, *parameters):
            leaf.grad = None
        function(x, *parameters).backward(dy)

    return step


class Run:
    """The rows of one norm at one shape."""

    def __init__(self, bench, dtype, shape, *, rms):
        self.bench, self.dtype, self.shape, self.rms = bench, dtype, shape, rms
        self.op = "rmsnorm" if rms else "layernorm"
        self.element = TORCH_DTYPES[dtype].itemsize * shape[0] * shape[1]
        self.gamma = bench.randn(shape[1], dtype=dtype)
        self.beta = None if rms else bench.randn(shape[1], dtype=dtype)
        self.plain = plain_norm(rms)

    def draw(self, grad=False):
        return self.bench.randn(*self.shape, dtype=self.dtype, grad=grad)

    def case(self, number, prefix, direction, elements, suffix=""):
        op = prefix + self.op + suffix
        return Case(number, op, self.dtype, self.shape, direction, bytes=elements * self.element)

    def peers(self, eager, compiled):
        return {"torch eager": eager} | self.bench.compiled(lambda: compiled)

    def forward(self):
        case, gamma, beta, rms = self.case("5", "", "forward", 2), self.gamma, self.beta, self.rms
        if self.bench.selects(case):
            ours = {"ours": lambda x: _C.normalization_fwd(x, None, gamma, beta, EPS, rms, False)}
            plain = {
                name: lambda x, peer=peer: peer(x, gamma, beta)
                for name, peer in self.peers(self.plain, self.plain).items()
            }
            self.bench.compare(case, ours | plain, lambda: (self.draw(),))

    def add_forward(self):
        case, gamma, beta, rms = self.case("6", "add_", "forward", 4), self.gamma, self.beta, self.rms
        if self.bench.selects(case):
            ours = {"ours": lambda x, r: _C.normalization_fwd(x, r, gamma, beta, EPS, rms, False)}
            add_norm = add_then(self.plain)
            plain = {
                name: lambda x, r, peer=peer: peer(x, r, gamma, beta)
                for name, peer in self.peers(add_norm, add_norm).items()
            }
            self.bench.compare(case, ours | plain, lambda: (self.draw(), self.draw()))

    def add_forward_quantized(self):
        gamma, beta, rms, device = self.gamma, self.beta, self.rms, self.bench.device
        scale = torch.tensor([32.0], device=device)
        for recipe, quantizer, quantized in (
            ("block", _C.Quantizer("block1d", pow_2_scales=True), block_both),
            ("delayed", _C.Quantizer("delayed", scale=scale, amax=torch.zeros(1, device=device)), cast_transpose),
            ("current", _C.Quantizer("current"), cast_transpose_current),
        ):
            scales = 8 / BLOCK if recipe == "block" else 0
            elements = self.shape[0] * self.shape[1]
            case = Case(
                "8",
                f"add_{self.op}_{recipe}",
                "fp8",
                self.shape,
                "forward",
                bytes=round(3 * self.element + (2 + scales) * elements),
            )
            if not self.bench.selects(case):
                continue

            def ours(x, r, q=quantizer):
                return _C.normalization_fwd_quantize(x, r, gamma, beta, EPS, rms, False, q, True, True, False)

            def unfused(x, r, q=quantizer):
                return _C.quantize(q, _C.normalization_fwd(x, r, gamma, beta, EPS, rms, False)[0], True, True)

            def plain(x, r, recipe=recipe, quantized=quantized):
                y, h = add_then(self.plain)(x, r, gamma, beta)
                return quantized(y, scale) if recipe == "delayed" else quantized(y), h

            contenders = {"ours": ours, f"own {self.dtype}": unfused} | self.peers(plain, plain)
            self.bench.compare(case, contenders, lambda: (self.draw(), self.draw()))

    def backward(self, *, residual):
        case = self.case("7", "add_" if residual else "", "backward", 4 if residual else 3)
        if not self.bench.selects(case):
            return
        gamma, rms = self.gamma, self.rms
        wanted = [True, True, not rms]

        def make():
            x = self.draw(grad=True)
            parameters = [p.detach().requires_grad_() for p in (self.gamma, self.beta) if p is not None]
            _, _, mean, rstd = _C.normalization_fwd(x.detach(), None, self.gamma, self.beta, EPS, rms, False)
            y = self.plain(x, parameters[0], parameters[1] if not rms else None)  # the graph that eager walks
            return self.draw(), self.draw() if residual else None, x, mean, rstd, y, parameters

        def eager(dy, residual_grad, x, mean, rstd, y, parameters):
            dx, *rest = torch.autograd.grad(y, (x, *parameters), dy, retain_graph=True)
            return dx if residual_grad is None else dx + residual_grad, rest

        def ours(dy, residual_grad, x, mean, rstd, y, parameters):
            return _C.normalization_bwd(dy, residual_grad, x, gamma, mean, rstd, rms, False, wanted)

        contenders = {"ours": ours, "torch eager": eager}
        for name, run in self.bench.compiled(lambda: backward_by_hand(rms)).items():
            contenders[name] = lambda dy, residual_grad, x, mean, rstd, y, parameters, run=run: run(
                dy, residual_grad, x.detach(), gamma, mean, rstd
            )
        self.bench.compare(case, contenders, make)

    def module(self):
        case = self.case("7", "", "forward+backward", 5, suffix="_module")
        if not self.bench.selects(case):
            return
        rms = self.rms

        def ours(x, gamma, beta=None):
            return functional.normalization(x, gamma, beta, rms=rms, eps=EPS)[0]

        def plain(x, gamma, beta=None):
            return self.plain(x, gamma, beta)

        def make():
            parameters = [p.detach().clone().requires_grad_() for p in (self.gamma, self.beta) if p is not None]
            return self.draw(grad=True), self.draw(), *parameters

        peers = {name: through_autograd(peer) for name, peer in self.peers(plain, plain).items()}
        self.bench.compare(case, {"ours": through_autograd(ours)} | peers, make)


def main():
    bench = Bench(__doc__)
    for dtype, shape in GPU_SHAPES if bench.cuda else CPU_SHAPES:
        for rms in (True, False):
            run = Run(bench, dtype, shape, rms=rms)
            run.forward()
            run.backward(residual=False)
            run.backward(residual=True)
            run.module()
    for dtype, shape in (GPU_ADD_FORWARD,) if bench.cuda else CPU_SHAPES:
        Run(bench, dtype, shape, rms=True).add_forward()
    for dtype, shape in (GPU_QUANTIZED,) if bench.cuda else CPU_SHAPES:
        Run(bench, dtype, shape, rms=True).add_forward_quantized()
    bench.finish()


if __name__ == "__main__":
    main()
