# Helpers of the suites of GroupedLinear: a module and a loop of Linears with the same parameters, and their steps. The
# suites of te.Linear check the arithmetic itself.
from contextlib import contextmanager, nullcontext

import torch
from plain_fp8 import PlainScales
from plain_fp8 import linear as plain_linear
from support import U32, assert_same_bits, assert_within, fp8_sum_error, rounding

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as R
from transformer_engine.pytorch import _C

RECIPES = {
    "none": None,
    "delayed": lambda: R.DelayedScaling(amax_history_len=4),
    "current": R.Float8CurrentScaling,
    "block": R.Float8BlockScaling,
}
K, N = 32, 48
SPLITS = [5, 0, 130, 1]


def build(groups=4, *, device, dtype=torch.float32, quantized=None, **options):
    """A GroupedLinear and as many Linears with the same parameters."""
    context = te.quantized_model_init(enabled=quantized is not None, recipe=quantized)
    values = [torch.randn(N, K) * (i + 1) for i in range(groups)]

    def fill(values):
        left = iter(values)
        return lambda p: p.copy_(next(left).to(p))

    with context:
        ours = te.GroupedLinear(groups, K, N, params_dtype=dtype, device=device, init_method=fill(values), **options)
        loop = [
            te.Linear(K, N, params_dtype=dtype, device=device, init_method=fill([value]), **options) for value in values
        ]
    with torch.no_grad():
        for i, linear in enumerate(loop):
            if linear.use_bias:
                bias = torch.randn(N)
                linear.bias.copy_(bias)
                getattr(ours, f"bias{i}").copy_(bias)
    return ours, loop


def give_main_grads(modules, dtype=torch.float32):
    for module in modules:
        for name, p in module.named_parameters():
            if "weight" in name:
                p.main_grad = torch.full(p.shape, 0.5, dtype=dtype, device=p.device)


def step(module, x, dy, splits, recipe=None, call=None):
    """(output, gradient of x) of one forward and backward; delayed weight gradients too."""
    x = x.detach().clone().requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, splits) if call is None else call(x)
    y.backward(dy)
    module.backward_dw()
    return y.detach(), x.grad


def step_of_loop(loop, x, dy, splits, recipe=None):
    outs, grads = [], []
    for linear, rows, gradient in zip(loop, x.split(splits), dy.split(splits), strict=True):
        y, dx = step(linear, rows, gradient, None, recipe, call=linear)
        outs.append(y)
        grads.append(dx)
    return torch.cat(outs), torch.cat(grads)


@contextmanager
def one_by_one():
    """Groups of lists are products of their own, cuBLASLt's on a GPU, whatever is faster."""
    before = _C.set_list_products("each")
    try:
        yield
    finally:
        _C.set_list_products(before)


def as_a_loop(recipe):
    """Lists whose groups have a scale each go one by one: grouped kernels sum them otherwise on CUDA."""
    return one_by_one() if recipe in ("delayed", "current") else nullcontext()


def assert_same_gradients(ours, loop, ulps=0):
    """Bit for bit, or each element within so many units of the last place of the largest."""
    for i, linear in enumerate(loop):
        for name, p in linear.named_parameters():
            own = getattr(ours, f"{name}{i}")
            for what in ("grad", "main_grad"):
                a, b = getattr(own, what, None), getattr(p, what, None)
                assert (a is None) == (b is None), f"{name}{i}.{what}"
                if a is not None and ulps == 0:
                    assert_same_bits(a, b, f"{name}{i}.{what}")
                elif a is not None:
                    most = ulps * torch.finfo(a.dtype).eps * float(b.abs().max())
                    assert_within(a, b, most, f"{name}{i}.{what}")


def plain_scales():
    return {"x": PlainScales(4), "weight": PlainScales(4), "dy": PlainScales(4, True)}


def check_experts(ours, x, dy, y, dx, recipe, scales, counts=SPLITS):
    """Results and gradients against float64 per expert; `scales` of each expert see its tensors."""
    first = 0
    for i, rows in enumerate(counts):
        part = slice(first, first + rows)
        first += rows
        weight, bias = (getattr(ours, f"{kind}{i}") for kind in ("weight", "bias"))
        if rows == 0:
            assert not weight.grad.any() and not bias.grad.any()
            scales[i]["weight"].see(weight.cpu())
            continue
        mine = x[part].cpu(), weight.detach().cpu(), dy[part].cpu()
        want = plain_linear(recipe, mine[0], mine[1], bias.detach().cpu(), mine[2], scales[i])
        got = {"y": y[part], "dx": dx[part], "dweight": weight.grad, "dbias": bias.grad}
        terms = {"y": K + 1, "dx": N, "dweight": rows, "dbias": rows}
        for name, (exact, magnitude) in want.items():
            where = "cpu" if name == "dbias" else x.device.type
            bound = fp8_sum_error(magnitude, terms[name], where, False) + 4 * U32 * magnitude
            assert_within(got[name].cpu(), exact, bound + rounding(exact, x.dtype) + bound * 2**-7, f"{name} {i}")
        for name, t in zip(("x", "weight", "dy"), mine, strict=True):
            scales[i][name].see(t)
