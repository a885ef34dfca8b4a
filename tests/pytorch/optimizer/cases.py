"""Helpers of the optimizers' suites: the oracle of a step, parameters with gradients, comparisons of optimizers."""

import torch
from support import U32, assert_same_bits, randn, rounding

from transformer_engine.pytorch.optimizers import FusedAdam

SIZES = (0, 1, 7, 300, 4099)

# A scaled state's rounding: of a value of that magnitude, and of anything in a tensor of that amax.
SCALED = {torch.float16: (2.0**-11, 2.0**-24 / 32752), torch.uint8: (2.0**-4, 2.0**-10 / 448)}


def adam_oracle(g, p, m, v, *, lr, beta1, beta2, eps, weight_decay, step, decoupled=True, bias_correction=True):
    """((p, m, v), (their bounds)) in float64: float32 arithmetic with one rounding for each operation and constant.

    g: 3 u of its two terms in L2 mode. m: 4 u of its two. v: 5 u, and g's error twice. u: m's error through the
    quotient, 10 u and half of v's of the quotient. p: lr, decay and its product 4 u of the update, 2 u of p."""
    u, g_error = U32, 0.0
    if not decoupled:
        g, g_error = g + weight_decay * p, 3 * u * (g.abs() + (weight_decay * p).abs())
    m_error = 4 * u * ((beta1 * m).abs() + ((1 - beta1) * g).abs()) + g_error
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    v_error = 5 * u * v + 2 * (1 - beta2) * g.abs() * g_error
    c1, c2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    denominator = (v / c2).sqrt() + eps
    update = (m / c1) / denominator
    error = m_error / c1 / denominator + update.abs() * (10 * u + v_error / v / 2)
    decay = weight_decay * p if decoupled else torch.zeros_like(p)
    update = update + decay
    p_error = lr * (error + 4 * u * (update.abs() + decay.abs())) + 2 * u * p.abs()
    return (p - lr * update, m, v), (p_error, m_error, v_error)


def kept_error(magnitude, dtype, second=False):
    """The error of keeping a state in dtype: one rounding; for scaled ones 4 more of float32, by the scale. second:
    moments that are raised to the format's least, two of its smallest roundings."""
    if dtype not in SCALED or not magnitude.numel():
        return rounding(magnitude, dtype if dtype not in SCALED else torch.float32)
    relative, absolute = SCALED[dtype]
    return (
        magnitude.abs() * (relative + 4 * U32) + magnitude.abs().max() * absolute * (1 + second) * (1 + 4 * U32) + 1e-37
    )


def parameters(device, dtype=torch.float32, sizes=SIZES, seed=0):
    torch.manual_seed(seed)
    return [torch.nn.Parameter(randn(n, dtype=dtype, device=device)) for n in sizes]


def give_grads(params, step=0, scale=1.0):
    """The same gradients for the same step, for any parameters of these shapes."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        grad = torch.randn(p.shape, generator=generator) * scale
        p.grad = grad.to(p.device, p.dtype)


def trained(params, steps=3, first=0, **options):
    """An optimizer after so many steps."""
    optimizer = FusedAdam(params, **options)
    more_steps(optimizer, steps, first)
    return optimizer


def more_steps(optimizer, steps, first=0):
    for step in range(first, first + steps):
        give_grads([p for group in optimizer.param_groups for p in group["params"]], step)
        optimizer.step()


def everything(optimizer):
    """Copies of weights and states, by place."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    found = {f"{i} weight": p.detach().clone() for i, p in enumerate(params)}
    for i, p in enumerate(params):
        found |= {f"{i} {name}": t.clone() for name, t in optimizer.state.get(p, {}).items()}
        found |= {f"{i} scale of {name}": t.clone() for name, t in optimizer._scales.get(p, {}).items()}
    return found


def assert_same(got, wanted):
    assert got.keys() == wanted.keys() and wanted
    for name, t in wanted.items():
        assert_same_bits(got[name], t, name)
