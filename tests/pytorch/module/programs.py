# The parts of programs over modules: a small model that a seed chooses, ways to call it, and everything that a step
# leaves as plain tensors. oracles_*.py define which results have to be equal.
import contextlib
from dataclasses import dataclass, field, replace

import torch
from fp8_steps import all_scales
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from transformer_engine.pytorch.functional import activation_kinds
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

HIDDEN, FFN, SEQ, BATCH = 32, 48, 4, 2
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
CHANGED = ("modified by an inplace operation", "modified in place", "modified inplace", "changed in place")


def delayed(p):
    options = {"amax_history_len": p.choice((1, 2, 4)), "amax_compute_algo": p.choice(("max", "most_recent"))}
    if p.chance(0.2):
        options |= {"margin": 1, "fp8_format": Format.E4M3}
    return DelayedScaling(**options)


RECIPES = {
    "none": lambda p: None,
    "delayed": delayed,
    "current": lambda p: Float8CurrentScaling(),
    "block": lambda p: Float8BlockScaling(),
}
STATELESS = ("none", "current", "block")
FP8 = ("delayed", "current", "block")


class Chained(torch.nn.Sequential):
    """Passes is_first_microbatch on. fp8_output: of each Linear that has another layer after it."""

    fp8_output = False

    def forward(self, x, is_first_microbatch=None, around=None):
        """around(index, call): how the call of a layer is made."""
        for i, layer in enumerate(self):
            options = {"is_first_microbatch": is_first_microbatch}
            if self.fp8_output and isinstance(layer, te.Linear) and i + 1 < len(self):
                options["fp8_output"] = FP8GlobalStateManager.is_fp8_enabled()

            def call(t, layer=layer, options=options):
                return layer(t, **options)

            x = call(x) if around is None else around(i, call, x)
        return x


def layer_of(p, *, quantized, mlp_flags=True, only=None):
    """(name, options) of a layer."""
    family = p.choice(only or ("Linear", "LayerNormLinear", "LayerNormMLP", "LayerNormMLP", "TransformerLayer"))
    options = {"bias": p.chance(0.7)}
    if family == "Linear" and not quantized and p.chance(0.2):
        options["parameters_split"] = ("a", "b")
    if family != "Linear":
        options["normalization"] = p.choice(("LayerNorm", "RMSNorm"))
        options["zero_centered_gamma"] = p.chance(0.3)
    if "MLP" in family or family == "TransformerLayer":
        options["activation"] = p.choice(sorted(activation_kinds))
    if family == "LayerNormMLP" and mlp_flags:
        options["checkpoint"] = p.chance(0.3)
        options["recompute_norm_output"] = p.chance(0.2)
    return family, options


@dataclass(frozen=True)
class Model:
    """How a model is made, the same whenever it is."""

    seed: int
    layers: tuple
    quantized: object = None  # the recipe of quantized_model_init
    fuse: bool = False
    delay: bool = False
    fp8_output: bool = False

    def layer(self, family, options):
        shapes = {
            "Linear": (HIDDEN, HIDDEN),
            "LayerNormLinear": (HIDDEN, HIDDEN),
            "LayerNormMLP": (HIDDEN, FFN),
            "TransformerLayer": (HIDDEN, FFN, 2),
        }
        options = dict(options, device="cpu", fuse_wgrad_accumulation=self.fuse)
        if family == "TransformerLayer":
            options |= {"fuse_qkv_params": True, **NO_DROPOUT}
        else:
            options["delay_wgrad_compute"] = self.delay
        return getattr(te, family)(*shapes[family], **options)

    def build(self):
        torch.manual_seed(self.seed)
        quantized = te.quantized_model_init(enabled=self.quantized is not None, recipe=self.quantized)
        with quantized:
            model = Chained(*(self.layer(family, options) for family, options in self.layers))
        model.fp8_output = self.fp8_output
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn(parameter.shape) * 0.3)
                elif self.fuse:
                    parameter.main_grad = torch.full(parameter.shape, 0.25)
        return model


def model_of(p, recipe, *, quantized=None, most=2, **options):
    """quantized: whether the weights are held in FP8 alone; drawn if None."""
    if quantized is None:
        quantized = recipe is not None and p.chance(0.4)
    made = options.pop("made", {})
    layers = tuple(layer_of(p, quantized=quantized, **options) for _ in range(p.randint(1, most)))
    if any(family == "TransformerLayer" for family, _ in layers):
        made = {**made, "delay": False}
    if made.get("fuse"):  # which sums the parts of a split bias one by one, in another order
        for _, chosen in layers:
            chosen.pop("parameters_split", None)
    model = Model(p.getrandbits(31), layers, recipe if quantized else None, **made)
    p.say(f"model {model.layers} quantized={quantized} {made}")
    return model


@dataclass
class Way:
    """How a call is made."""

    recipe: object = None
    dtype: object = None  # of torch.autocast
    checkpoint: str = ""  # outer and inner: "r" reentrant, "n" not, "-" none
    autocast_inside: bool = False
    first: object = None
    hooks: dict = field(default_factory=dict)

    def __str__(self):
        recipe = type(self.recipe).__name__
        return f"{recipe} {self.dtype} checkpoint={self.checkpoint!r} inside={self.autocast_inside} first={self.first}"

    @contextlib.contextmanager
    def autocast(self):
        torchs = torch.autocast("cpu", self.dtype) if self.dtype is not None else contextlib.nullcontext()
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe), torchs:
            yield

    def call(self, model, x):
        outer, inner = (self.checkpoint + "--")[:2]
        first = self.first  # as it is now, for recomputations too

        def around(i, call, t):
            if i in self.hooks:
                t = self.hooks[i](t)
            return call(t) if inner == "-" else te.checkpoint(call, t, use_reentrant=inner == "r")

        def inside(t):
            return model(t, first, around)

        def checkpointed(t):
            return inside(t) if outer == "-" else te.checkpoint(inside, t, use_reentrant=outer == "r")

        def own_autocast(t):
            with self.autocast():
                return inside(t)

        if self.autocast_inside and outer != "-":
            return te.checkpoint(own_autocast, x, use_reentrant=outer == "r")
        with self.autocast():
            return checkpointed(x)


def way_of(p, recipe, *, checkpoint=True, **options):
    way = Way(recipe=recipe, **options)
    if p.chance(0.25):
        way.dtype = torch.bfloat16
    if checkpoint and p.chance(0.5):
        way.checkpoint = p.choice(("r", "n", "-r", "-n", "rr", "rn", "nr", "nn"))
        way.autocast_inside = p.chance(0.2)
    return way


def plain_way(way):
    return replace(way, checkpoint="", autocast_inside=False)


def recipe_of(p, names=("none", *FP8)):
    name = p.choice(names)
    recipe = RECIPES[name](p)
    p.say(f"recipe {name} {told(recipe)}")
    return recipe


def told(recipe):
    """The options of a recipe that programs choose."""
    options = ("amax_history_len", "amax_compute_algo", "margin", "fp8_format")
    return {name: getattr(recipe, name) for name in options if hasattr(recipe, "amax_history_len")}


def batch_of(p, requires_grad=True, scale=None):
    """(x, dy), the same for all models that get copies of them."""
    generator = torch.Generator().manual_seed(p.getrandbits(31))
    scale = p.choice((0.1, 1.0, 1.0, 8.0)) if scale is None else scale
    x, dy = (torch.randn(SEQ, BATCH, HIDDEN, generator=generator) * s for s in (scale, p.choice((0.01, 1.0, 30.0))))
    return x.requires_grad_(requires_grad), dy


def own(x):
    return x.detach().clone().requires_grad_(x.requires_grad)


def backward_dw(model):
    for module in model.modules():
        if isinstance(module, TransformerEngineBaseModule) and module.need_backward_dw():
            module.backward_dw()


def step(model, way, batch, *, dw=True):
    """{name: tensor} of a forward and a backward."""
    x, dy = own(batch[0]), batch[1]
    y = way.call(model, x)
    y.backward(dy.to(y.dtype))
    if dw:
        backward_dw(model)
    return {"y": y.detach(), "dx": x.grad}


def grads_of(model):
    found = {name: p.grad for name, p in model.named_parameters()}
    return found | {f"{name}.main_grad": p.main_grad for name, p in model.named_parameters() if hasattr(p, "main_grad")}


def weights_of(model):
    found = {name: p.detach() for name, p in model.named_parameters()}
    return {name: p.dequantize() if isinstance(p, te.QuantizedTensor) else p for name, p in found.items()}


def left(model):
    """{name: copy} of what steps leave in a model: gradients, scales and histories, values."""
    found = grads_of(model) | all_scales(model) | {f"value of {n}": v for n, v in weights_of(model).items()}
    return {name: None if t is None else t.detach().clone() for name, t in found.items()}


def assert_same(got, wanted, what=""):
    assert got.keys() == wanted.keys(), f"{what}: {sorted(got.keys() ^ wanted.keys())}"
    for name, t in wanted.items():
        assert (t is None) == (got[name] is None), f"{what} {name}: {got[name]}, wanted {t}"
        if t is not None:
            assert_same_bits(got[name], t, f"{what} {name}")


@torch.no_grad()
def descend(model, rate=0.05):
    """An optimizer step."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    torch.optim.SGD(parameters, rate, foreach=False).step() if parameters else None
    model.zero_grad()
