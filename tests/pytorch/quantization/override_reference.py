# A recipe's backward_override spelled out: the forward of FP8 products, the backward of unquantized ones, of the same
# operands or of the values of the quantized ones (computed by plain_fp8.py). Modules use it when its three functions
# replace theirs. No test here.
import torch
from fp8_products import product
from plain_fp8 import BLOCK_1D, BLOCK_2D, TENSOR, dequantize, quantize, scale_of
from plain_modules import as_tuple

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch import functional

RECIPES = {"current": Float8CurrentScaling, "block": Float8BlockScaling}
WORDS = ("high_precision", "dequantized")


class _WithValue(torch.autograd.Function):
    """`value` in place of t, with the gradient of t."""

    @staticmethod
    def forward(ctx, t, value):
        return value.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def largest(t):
    return t.detach().cpu().abs().max() if t.numel() else torch.zeros(())


def meaning(t, recipe, *, weight=False, by=None):
    """The values of the forward's FP8 form of t, in t's dtype. by: the tensor from which a per-tensor scale is made
    (t)."""
    scaling = TENSOR if recipe == "current" else BLOCK_2D if weight else BLOCK_1D
    scale = None if by is None or scaling != TENSOR else scale_of(largest(by), False, False, 0.0)
    data, scales, _, _ = quantize(t.detach().reshape(-1, t.shape[-1]), scaling, False, recipe == "block", scale=scale)
    return dequantize(data, scales, scaling, False, t.dtype).view(t.shape).to(t.device)


class Reference:
    """In place of functional.linear, normalization_linear and layernorm_mlp while `with` lasts."""

    def __init__(self, recipe, word):
        self.recipe, self.word = recipe, word
        self.quantization = product(recipe).native  # without an override
        self.real = {name: getattr(functional, name) for name in ("linear", "normalization_linear", "layernorm_mlp")}

    def __enter__(self):
        for name in self.real:
            setattr(functional, name, getattr(self, name))

    def __exit__(self, *_):
        for name, function in self.real.items():
            setattr(functional, name, function)

    def linear(self, x, weight, bias=None, *, read=None, tp_comm=None, **_):
        """read: what the forward's product reads in place of x. Ranks that gather it have one scale for all of it."""
        read = x if read is None else read
        with torch.no_grad():
            value = self.real["linear"](read, weight, bias, quantization=self.quantization, tp_comm=tp_comm)
        if self.word == "dequantized":
            by = largest(read)
            if tp_comm is not None and tp_comm.spec[:2] == [1, 1]:  # a column, whose tokens are divided
                torch.distributed.all_reduce(by, torch.distributed.ReduceOp.MAX)
            x = _WithValue.apply(x, meaning(x, self.recipe, by=by))
            weight = _WithValue.apply(weight, meaning(weight, self.recipe, weight=True))
        return _WithValue.apply(self.real["linear"](x, weight, bias, tp_comm=tp_comm), value)

    def normalization_linear(
        self, x, gamma, beta, weight, bias=None, *, residual=None, rms, eps, tp_comm=None, **options
    ):
        """The sum with a residual of zeros is x, and has its gradient added where the fused node has it."""
        norm = {"rms": rms, "eps": eps, "zero_centered_gamma": options.get("zero_centered_gamma", False)}
        residual = torch.zeros_like(x) if residual is None else residual
        normed, h = functional.normalization(x, gamma, beta, residual=residual, **norm)
        return self.linear(normed, weight, bias, tp_comm=tp_comm), normed, h

    def layernorm_mlp(self, x, gamma, beta, w1, b1, w2, b2, *, kind, params=(), fp8_pre_activation=False, **options):
        first, second = options.pop("tp_comms")
        inner, normed, h = self.normalization_linear(x, gamma, beta, w1, b1, tp_comm=first, **options)
        read = functional.activation(inner.detach(), kind, params)
        if fp8_pre_activation:  # the backward takes activation and slope of E4M3 in blocks of 1 x 128
            inner = _WithValue.apply(inner, meaning(inner, "block"))
        y = self.linear(functional.activation(inner, kind, params), w2, b2, read=read, tp_comm=second)
        return y, normed, h


HIDDEN, FFN, HEADS, TOKENS = 144, 160, 4, (25, 6)  # rows, depth and width beyond one block of 128
ATTENTION = {"attention_dropout": 0.0}


def linear(**options):
    return te.Linear(HIDDEN, FFN, **options)


def split_linear(**options):
    return te.Linear(HIDDEN, FFN, parameters_split={"a": 32, "b": 128}, **options)


def biasless_linear(**options):
    return te.Linear(HIDDEN, FFN, bias=False, **options)


def norm_linear(**options):
    return te.LayerNormLinear(HIDDEN, FFN, return_layernorm_output=True, **options)


def rms_linear(**options):
    return te.LayerNormLinear(HIDDEN, FFN, normalization="RMSNorm", zero_centered_gamma=True, **options)


def mlp(**options):
    return te.LayerNormMLP(HIDDEN, FFN, **options)


def glu_mlp(**options):
    return te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", normalization="RMSNorm", **options)


def attention(**options):
    return te.MultiheadAttention(HIDDEN, HEADS, input_layernorm=True, **ATTENTION, **options)


def transformer_layer(**options):
    return te.TransformerLayer(HIDDEN, FFN, HEADS, fuse_qkv_params=True, hidden_dropout=0.0, **ATTENTION, **options)


PRODUCTS = [linear, split_linear, biasless_linear, norm_linear, rms_linear, mlp, glu_mlp]
FAMILIES = [*PRODUCTS, attention, transformer_layer]


def build(family, device, dtype=torch.bfloat16, **options):
    module = family(params_dtype=dtype, device=device, **options)
    with torch.no_grad():
        for p in module.parameters():
            p.add_((torch.randn(p.shape) * 0.1).to(p))
    return module


def tokens(device, dtype=torch.bfloat16, shape=TOKENS, seed=3):
    values = torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to(device).requires_grad_()


def around(recipe, word):
    return te.autocast(recipe=RECIPES[recipe](backward_override=word))


def results(module, x, outputs):
    """{name: tensor} of outputs and gradients, after a backward of the same gradients of each output as ever."""
    outputs = [t for t in as_tuple(outputs) if t is not None and t.requires_grad and not t.is_leaf]
    generator = torch.Generator().manual_seed(7)
    torch.autograd.backward(outputs, [torch.randn(t.shape, generator=generator).to(t) for t in outputs])
    found = {f"output {i}": t.detach() for i, t in enumerate(outputs)} | {"input": x.grad}
    return found | {name: p.grad for name, p in module.named_parameters()}


def step(module, x, recipe, word, *, input_grad=True, **call):
    """A step under the recipe; gradients are taken from zero."""
    module.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_(input_grad)
    with around(recipe, word):
        outputs = module(x, **call)
    return results(module, x, outputs)


def referred(module, x, recipe, word, **call):
    """The same by the reference."""
    module.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    with Reference(recipe, word):
        outputs = module(x, **call)
    return results(module, x, outputs)
