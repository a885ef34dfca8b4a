# The cases of same_bits.py: every module with each of its options alone, by every dtype, recipe and way of calling, and
# a seeded cover of all pairs of options. Names and plain data; nothing is built here and no package is imported.
import itertools
import random
from dataclasses import dataclass, field

DTYPES = ("float32", "bfloat16", "float16")
RECIPES = ("none", "delayed", "current", "block", "custom")
MORE_RECIPES = ("latest", "own", "hybrid", "requests", "rows", "margin")  # in the cover alone
WAYS = ("eager", "recomputed", "reentrant", "captured", "offloaded", "compiled")
SLOW = ("offloaded", "compiled")  # of these a single option sees one dtype and recipe after the other, not all
COMPILED = ("none", "current", "block", "rows")  # the others have state, which is refused by name
# Axes whose values refuse each other: never together in the cover, where they would hide what else is in a row.
APART = [("primary", "split"), ("parallel", "last"), ("parallel", "post")]
KINDS = (
    "gelu",
    "geglu",
    "glu",
    "qgelu",
    "qgeglu",
    "relu",
    "reglu",
    "srelu",
    "sreglu",
    "silu",
    "swiglu",
    "clamped_swiglu",
)

# axis -> value's name -> options: the constructor's, and with "_" what the run does. The first value is the default.
YES_NO = ("", "yes")


def flag(name, *, on=True):
    return {"": {}, "yes" if on else "no": {name: on}}


def choice(name, *values):
    return {"": {}} | {str(value): {name: value} for value in values}


NORM = {"normalization": choice("normalization", "RMSNorm"), "centred": flag("zero_centered_gamma")}
CALL = {
    "shape": choice("_shape", "3d", "rows0", "rows1", "rows13", "rows130", "strided", "stride0"),
    "wanted": choice("_wanted", "input", "weights", "biases", "vectors", "nothing", "no_grad", "inference", "eval"),
    "size": choice("_size", "wide", "odd"),
    "torch": choice("_torch", "bfloat16", "float16"),
    "flow": choice("_flow", "micro", "flight", "steps", "retain"),
}
MICRO = {"first": choice("_first", "cached", "no")}
PRIMARY = {"primary": choice("_primary", "fp8", "preserved")}
SINK = {
    "main_grad": {"": {}}
    | {
        name: {"fuse_wgrad_accumulation": True, "_main_grad": name}
        for name in ("float32", "same", "added", "zeroed", "overwritten", "asked")
    }
}
DELAY = {"delay": flag("delay_wgrad_compute")}
SPLIT = {
    "split": {
        "": {},
        "2": {"parameters_split": ("a", "b")},
        "3": {"parameters_split": {"query": 16, "key_": 8, "value": 8}},
    }
}
BIAS = {"bias": flag("bias", on=False), "return_bias": flag("return_bias")}
PRODUCTS = SINK | DELAY | MICRO | PRIMARY | CALL
MODULES = {
    "Linear": BIAS | SPLIT | PRODUCTS | {"original": flag("save_original_input"), "fp8_output": flag("_fp8_output")},
    "LayerNormLinear": BIAS
    | NORM
    | SPLIT
    | PRODUCTS
    | {
        "output": flag("return_layernorm_output"),
        "again": flag("recompute_norm_output"),
        "fp8_output": flag("_fp8_output"),
    },
    "LayerNormMLP": BIAS
    | NORM
    | {"activation": choice("activation", *KINDS[1:]) | {"limits": {"activation": KINDS[-1], "_limits": True}}}
    | PRODUCTS
    | {
        "output": flag("return_layernorm_output"),
        "again": flag("recompute_norm_output"),
        "checkpoint": flag("checkpoint"),
        "preactivation": choice("save_preactivation", "fp8"),
        "residual": flag("_residual"),
    },
    "LayerNorm": {"centred": flag("zero_centered_gamma")} | CALL,
    "RMSNorm": {"centred": flag("zero_centered_gamma")} | CALL,
    "normalization": {"rms": flag("rms"), "centred": flag("zero_centered_gamma"), "residual": flag("_residual")} | CALL,
    "activation": {"kind": choice("kind", *KINDS[1:])} | CALL,
    "MultiheadAttention": {
        "bias": BIAS["bias"],
        "fused": flag("fuse_qkv_params"),
        "norm": flag("input_layernorm"),
        "output": {"": {}, "yes": {"input_layernorm": True, "return_layernorm_output": True}},
        "groups": choice("num_gqa_groups", 1),
        "mask": choice("attn_mask_type", "no_mask"),
        "qk_norm": choice("qk_norm_type", "RMSNorm"),
        "return_bias": BIAS["return_bias"],
        "main_grad": {
            name: options | ({"fuse_qkv_params": True} if options else {})
            for name, options in SINK["main_grad"].items()
        },
    }
    | MICRO
    | PRIMARY
    | CALL,
    "TransformerLayer": {
        "bias": BIAS["bias"],
        "fused": flag("fuse_qkv_params"),
        "activation": choice("activation", "swiglu", "srelu"),
        "dropout": choice("hidden_dropout", 0.2),
        "post": flag("apply_residual_connection_post_layernorm"),
        "last": flag("output_layernorm"),
        "parallel": flag("parallel_attention_mlp"),
        "again": flag("recompute_norm_output"),
        "main_grad": {
            name: options | ({"fuse_qkv_params": True} if options else {})
            for name, options in SINK["main_grad"].items()
        },
    }
    | NORM
    | MICRO
    | PRIMARY
    | CALL,
}


@dataclass(frozen=True)
class Case:
    """values: the name of each axis' value that is not the default."""

    module: str
    values: tuple = ()
    dtype: str = "float32"
    recipe: str = "none"
    way: str = "eager"
    options: dict = field(default_factory=dict, compare=False)

    @property
    def name(self):
        values = ", ".join(f"{axis}={value}" for axis, value in self.values) or "-"
        return " | ".join((self.module, values, self.dtype, self.recipe, self.way))

    def of(self, what, default=None):
        """An option of the run."""
        return self.options.get("_" + what, default)

    def constructor(self):
        return {name: value for name, value in self.options.items() if not name.startswith("_")}


def make(module, values, dtype, recipe, way):
    """values: axis -> value's name, defaults or not."""
    chosen = tuple((axis, value) for axis, value in values.items() if value)
    options = {}
    for axis, value in chosen:
        options |= MODULES[module][axis][value]
    return Case(module, chosen, dtype, recipe, way, options)


def without_products(module):
    return module in ("LayerNorm", "RMSNorm", "normalization", "activation")


def singles():
    """Each option alone. Modules without products have no recipes; the slow ways take turns."""
    turn = 0
    for module, axes in MODULES.items():
        recipes = RECIPES[:1] if without_products(module) else RECIPES
        alone = [{}] + [{axis: value} for axis, values in axes.items() for value in values if value]
        for values in alone:
            for dtype, recipe, way in itertools.product(DTYPES, recipes, (w for w in WAYS if w not in SLOW)):
                if way == "reentrant" and "return_bias" in values:
                    continue  # see together()
                if way == "eager" or not values or (turn := turn + 1) % 3 == 0:
                    yield make(module, values, dtype, recipe, way)
            for way in SLOW:
                combinations = list(itertools.product(DTYPES, recipes))
                if way == "compiled" and values:
                    combinations = [c for c in combinations if c[1] in COMPILED]
                if values:
                    combinations = [combinations[(turn := turn + 1) * 7 % len(combinations)]]
                for dtype, recipe in combinations:
                    yield make(module, values, dtype, recipe, way)


def together(row):
    """Whether no two of these values refuse each other."""
    if row.get("way") == "compiled" and (
        row.get("recipe", "none") not in COMPILED or any(row.get(axis) for axis in ("main_grad", "delay", "primary"))
    ):
        return False
    if row.get("way") == "reentrant" and row.get("return_bias"):
        return False  # torch makes a parameter that its reentrant checkpoint returns a result, and recurses for ever
    return not any(row.get(a) and row.get(b) for a, b in APART)


def covering(module, rng):
    """Rows in which any two values of two axes, dtype, recipe and way among them, meet: greedily, the best of some."""
    recipes = RECIPES[:1] if without_products(module) else RECIPES + MORE_RECIPES
    axes = {axis: list(values) for axis, values in MODULES[module].items()}
    axes |= {"dtype": list(DTYPES), "recipe": list(recipes), "way": list(WAYS[:4]) * 3 + list(SLOW)}
    names = list(axes)

    def pairs(row):
        return set(itertools.combinations(row.items(), 2))

    left = set()
    for a, b in itertools.combinations(names, 2):
        left |= {((a, v), (b, w)) for v in axes[a] for w in axes[b]}
    left = {pair for pair in left if together(dict(pair))}
    while left:
        first = min(left)
        rows = []
        while len(rows) < 12:
            row = {name: rng.choice(values) for name, values in axes.items()} | dict(first)
            rows += [row] if together(row) else []
        best = max(rows, key=lambda row: len(pairs(row) & left))
        left -= pairs(best)
        dtype, recipe, way = (best.pop(name) for name in ("dtype", "recipe", "way"))
        yield make(module, best, dtype, recipe, way)


def every_case(seed=0):
    cases = list(singles())
    for module in MODULES:
        cases += covering(module, random.Random(f"{seed} {module}"))
    return list({case.name: case for case in cases}.values())


def chosen(only=None, seed=0):
    """Those in whose name each word of one of these is; ^ is its beginning."""
    cases = every_case(seed)
    return [c for c in cases if only is None or any(all(word in "^" + c.name for word in o.split()) for o in only)]
