# The child of same_bits.py: runs cases with the package of one folder and writes a line of JSON before and after each.
# The results of a case (outputs, gradients, tensors in saved-tensor hooks, state) become hashes; it compares nothing.
import argparse
import contextlib
import json
import os
import re
import signal
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # tests/, which holds the package `pytorch`

from pytorch.package.same_bits_cases import SLOW, chosen
from pytorch.package.same_bits_hashes import Saved, told

BATCH = 4
CASE_S = 120  # of one case, which takes milliseconds: what hangs may grow without end
SIZES = {None: (32, 48, 2), "": (32, 48, 2), "wide": (160, 288, 2), "odd": (24, 40, 2)}
ATTENTION = ("MultiheadAttention", "TransformerLayer")
_ADDRESS, _LINE = re.compile(r"0x[0-9a-f]+|\b\d{12,}\b"), re.compile(r"line \d+|\.py:\d+")


# ---- modules ----


def make_recipe(name):
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    e4m3 = te.DType.kFloat8E4M3

    class Own(te.Float8CurrentScalingQuantizer):
        """A quantizer of the caller's."""

    def hybrid(role):
        parts = [te.Float8CurrentScalingQuantizer(e4m3, None) for _ in range(2)]
        return te.HybridQuantizer(rowwise_quantizer=parts[0], columnwise_quantizer=parts[1])

    return {
        "none": lambda: None,
        "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
        "latest": lambda: recipe.DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"),
        "margin": lambda: recipe.DelayedScaling(amax_history_len=1, margin=1, fp8_format=recipe.Format.E4M3),
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
        "rows": lambda: recipe.Float8BlockScaling(w_block_scaling_dim=1),
        "custom": lambda: recipe.CustomRecipe(qfactory=lambda role: te.Float8CurrentScalingQuantizer(e4m3, None)),
        "own": lambda: recipe.CustomRecipe(qfactory=lambda role: Own(e4m3, None)),
        "hybrid": lambda: recipe.CustomRecipe(qfactory=hybrid),
        "requests": lambda: recipe.CustomRecipe(qfactory=lambda role: te.DelayedScalingRequest()),
    }[name]()


class Function(torch.nn.Module):
    """A function of te.functional with parameters, as a module."""

    def __init__(self, name, hidden, device, params_dtype, **options):
        from transformer_engine.pytorch import functional

        super().__init__()
        self.function, self.options = getattr(functional, name), options
        if name == "normalization":
            self.gamma = torch.nn.Parameter(torch.ones(hidden, device=device, dtype=params_dtype))
            self.beta = None
            if not options.setdefault("rms", False):
                self.beta = torch.nn.Parameter(torch.zeros(hidden, device=device, dtype=params_dtype))
        else:
            options.setdefault("kind", "gelu")

    def forward(self, x, residual=None):
        if "rms" in self.options:
            out, h = self.function(x, self.gamma, self.beta, residual=residual, **self.options)
            return out if residual is None else (out, h)
        return self.function(x, **self.options)


def build(case, device, recipe):
    import transformer_engine.pytorch as te

    hidden, ffn, heads = SIZES[case.of("size")]
    options = {"device": device, "params_dtype": getattr(torch, case.dtype)} | case.constructor()
    if case.of("limits"):
        options["activation_params"] = {"limit": 1.5, "alpha": 1.2, "glu_linear_offset": 0.5}
    split = options.get("parameters_split")
    if isinstance(split, dict):
        options["parameters_split"] = {name: rows * hidden // 32 for name, rows in split.items()}
    sizes = {
        "Linear": (hidden, hidden),
        "LayerNormLinear": (hidden, hidden),
        "LayerNormMLP": (hidden, ffn),
        "LayerNorm": (hidden,),
        "RMSNorm": (hidden,),
        "MultiheadAttention": (hidden, heads),
        "TransformerLayer": (hidden, ffn, heads),
    }.get(case.module)
    if case.module in ATTENTION:
        options |= {"attention_dropout": 0.0}
    if case.module == "TransformerLayer":
        options = {"hidden_dropout": 0.0} | options
    kept = {"preserve_high_precision_init_val": True} if case.of("primary") == "preserved" else {}
    quantized = contextlib.nullcontext()
    if case.of("primary"):
        quantized = te.quantized_model_init(recipe=recipe, **kept)
    with quantized:
        module = (
            Function(case.module, hidden, **options) if sizes is None else getattr(te, case.module)(*sizes, **options)
        )
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape).to(parameter) * 0.3)
    wanted = case.of("wanted")
    for name, parameter in module.named_parameters():
        kind = "biases" if name.endswith("bias") else "weights" if parameter.dim() == 2 else "vectors"
        if wanted in ("input", "nothing") or (wanted in ("weights", "biases") and kind != wanted):
            parameter.requires_grad_(False)
        if wanted == "vectors" and kind == "weights":
            parameter.requires_grad_(False)
    if case.of("main_grad"):
        give_main_grads(module, case.of("main_grad"))
    return module.eval() if wanted == "eval" else module


def give_main_grads(module, how):
    for parameter in module.parameters():
        if parameter.dim() != 2:
            continue
        dtype = parameter.dtype if how == "same" else torch.float32
        main_grad = torch.full(parameter.shape, 0.25, dtype=dtype, device=parameter.device)
        if how == "asked":
            parameter.get_main_grad = lambda kept=main_grad: kept
        parameter.main_grad = main_grad
        if how in ("added", "zeroed"):
            parameter.grad_added_to_main_grad = False
        if how == "zeroed":
            parameter.zero_out_wgrad = True
        if how == "overwritten":
            parameter.overwrite_main_grad = True


# ---- inputs ----


def rows_of(case):
    """(shape, strided): attention has tokens of 4 sequences; what is offloaded has 256 Ki elements and more."""
    hidden, shape = SIZES[case.of("size")][0], case.of("shape", "")
    rows = int(shape.removeprefix("rows")) if shape.startswith("rows") else 16
    if case.way == "offloaded" and not shape.startswith("rows"):
        rows = -(-256 * 1024 // hidden // 64) * 64
    if case.module in ATTENTION:
        sequence = min(rows, 16) if shape != "rows13" else 13
        return (sequence, max(rows // 16, 1) if case.way == "offloaded" else BATCH, hidden)
    return (4, rows // 4, hidden) if shape == "3d" else (rows, hidden)


def random_input(case, device, generator):
    shape = rows_of(case)
    strided = case.of("shape") == "strided"
    made = torch.randn(shape[::-1] if strided else shape, generator=generator) * 1.5
    made = made.to(getattr(torch, case.dtype)).to(device)
    made = made.permute(*reversed(range(made.dim()))) if strided else made
    return made.requires_grad_(case.of("wanted") not in ("weights", "biases", "vectors", "nothing"))


def gradient_of(case, out, generator):
    if case.of("shape") == "stride0":
        return torch.full((), 0.75).to(out.dtype).to(out.device).expand(out.shape)
    return torch.randn(out.shape, generator=generator).to(out.dtype).to(out.device)


# ---- a case ----


class Run:
    """One case: what it leaves is in `results`, as far as it came."""

    def __init__(self, case, device):
        import transformer_engine.pytorch as te

        self.case, self.device, self.te, self.results = case, device, te, {}
        self.generator, self.saved, self.steps = torch.Generator().manual_seed(5), Saved(), 0

    def prepare(self):
        case, te = self.case, self.te
        self.recipe = make_recipe(case.recipe)
        layers = 3 if case.way == "offloaded" else 1
        self.modules = torch.nn.ModuleList(build(case, self.device, self.recipe) for _ in range(layers))
        self.module, self.call = self.modules[0], self.modules[0]
        if case.way == "captured":
            args = (random_input(case, self.device, self.generator),)
            captured = {"enabled": self.recipe is not None, "recipe": self.recipe}
            if case.of("first"):
                captured["cache_quantized_params"] = self.recipe is not None
            kwargs = self.extras()
            kwargs |= {"fp8_output": True} if case.of("fp8_output") else {}
            self.call = te.make_graphed_callables(
                self.module, args, num_warmup_iters=1, sample_kwargs=kwargs or None, allow_unused_input=True, **captured
            )
        if case.way == "compiled":
            torch._dynamo.reset()
            self.call = torch.compile(self.module, backend="aot_eager")
        if case.way == "offloaded":
            self.context, self.sync = te.get_cpu_offload_context(True, num_layers=2, model_layers=3)

    def extras(self):
        if not self.case.of("residual"):
            return {}
        return {"residual": random_input(self.case, self.device, self.generator)}

    def forward(self, x, first):
        kwargs = self.extras()
        self.given = [x, *kwargs.values()]
        if first is not None:
            kwargs["is_first_microbatch"] = first
        if self.case.of("fp8_output"):
            kwargs["fp8_output"] = True
        if self.case.way in ("recomputed", "reentrant"):
            return self.te.checkpoint(self.call, x, use_reentrant=self.case.way == "reentrant", **kwargs)
        if self.case.way != "offloaded":
            return self.call(x, **kwargs)
        outputs = []
        for module in self.modules:
            with self.context:
                made = module(x, **kwargs)
            made, rest = (made[0], list(made[1:])) if isinstance(made, (tuple, list)) else (made, [])
            x = self.sync(made)
            outputs += rest
        return [x, *outputs]

    def around(self):
        """Every context of a forward."""
        case, stack = self.case, contextlib.ExitStack()
        stack.enter_context(self.te.autocast(enabled=self.recipe is not None, recipe=self.recipe))
        if case.of("torch"):
            stack.enter_context(torch.autocast(self.device, getattr(torch, case.of("torch"))))
        if case.of("wanted") in ("no_grad", "inference"):
            stack.enter_context(torch.no_grad() if case.of("wanted") == "no_grad" else torch.inference_mode())
        if case.way not in ("captured", "offloaded"):  # whose own hooks would not see them
            stack.enter_context(self.saved.hooks())
        return stack

    def microbatch(self, index):
        """(outputs, their gradients, inputs); backward comes later."""
        wanted = self.case.of("first")
        first = None if wanted is None else wanted == "cached" and index == 0
        x = random_input(self.case, self.device, self.generator)
        with self.around():
            made = self.forward(x, first)
        outputs = [t for t in (made if isinstance(made, (tuple, list)) else [made]) if t is not None]
        for i, out in enumerate(outputs):
            self.note(f"output {i}", out)
        following = [out for out in outputs if out.requires_grad]
        return following, [gradient_of(self.case, out, self.generator) for out in following], self.given

    def backward(self, following, gradients, given, retain=False):
        for again in (True, False) if retain else (False,):
            if following:
                torch.autograd.backward(following, gradients, retain_graph=again)
            if self.case.options.get("delay_wgrad_compute") and following:
                for module in self.modules:
                    module.backward_dw()
        for i, x in enumerate(given):
            self.note(f"input {i} afterwards", x.detach())
            self.note(f"gradient of input {i}", x.grad)

    def note(self, what, value):
        name = what if self.steps == 0 else f"{what}, {self.steps}"
        while name in self.results:
            name += "'"
        self.results[name] = told(value)

    def step(self, microbatches, together=False, retain=False):
        waiting = []
        for index in range(microbatches):
            waiting.append(self.microbatch(index))
            if not together:
                self.backward(*waiting.pop(), retain=retain)
        for one in waiting:
            self.backward(*one, retain=retain)
        for name, parameter in self.modules.named_parameters():
            # a dummy beside main_grad has no values
            dummy = getattr(parameter, "grad_added_to_main_grad", False) and self.case.of("main_grad") != "zeroed"
            grad = None if parameter.grad is None else tuple(parameter.grad.shape) if dummy else parameter.grad
            self.note(f"gradient of {name}", grad)
            if hasattr(parameter, "main_grad"):
                self.note(f"main_grad of {name}", parameter.main_grad)
                self.note(f"flag of {name}", getattr(parameter, "grad_added_to_main_grad", None))

    @torch.no_grad()
    def update(self):
        for parameter in self.modules.parameters():
            grad = getattr(parameter, "main_grad", parameter.grad)
            if grad is not None:
                parameter.copy_(parameter.detach().float() - 0.5 * grad.float())
            parameter.grad = None
        self.steps += 1

    def state(self):
        for name, value in self.modules.state_dict().items():
            self.results[f"state {name}"] = told(value)
        for name, module in self.modules.named_modules():
            if getattr(module, "fp8_meta", None):
                self.results[f"fp8_meta of {name}"] = told(
                    {key: value for key, value in module.fp8_meta.items() if str(key).startswith("scaling")}
                )

    def all(self):
        flow = self.case.of("flow")
        self.prepare()
        self.step(
            2 if flow in ("micro", "flight") or self.case.of("first") else 1,
            together=flow == "flight",
            retain=flow == "retain",
        )
        if flow == "steps" or self.case.recipe in ("delayed", "latest", "margin", "requests"):
            self.update()
            self.step(2 if self.case.of("first") else 1)


def run(case, device, folder):
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    torch.manual_seed(11)
    one = Run(case, device)
    try:
        one.all()
    except Exception as error:
        text = str(error).split("\n\n")[0].replace(folder, "<package>")
        one.results["error type"] = type(error).__name__
        one.results["error text"] = _LINE.sub("line", _ADDRESS.sub("0x", text))
    with contextlib.suppress(AttributeError):
        one.state()
    if one.saved.entries:
        one.results |= one.saved.results()
    return one.results


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--part", default="0/1", help="i/n: each n-th case from the i-th")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--backwards", action="store_true")
    options = parser.parse_args()
    import transformer_engine.pytorch as te

    folder = os.path.abspath(options.package)
    if not os.path.abspath(te.__file__).startswith(folder + os.sep):
        sys.exit(
            f"same_bits: imported {te.__file__}, wanted the package in {folder}; does it hold transformer_engine/?"
        )
    warnings.simplefilter("ignore")
    # memory that is not written is NaN then, so that a read of it shows
    torch.use_deterministic_algorithms(True, warn_only=True)
    part, parts = map(int, options.part.split("/"))
    cases = chosen(options.only)[part::parts]
    # the compiled ones last: a process gets slower by them
    cases.sort(key=lambda case: case.way in SLOW)
    cases = cases[::-1] if options.backwards else cases
    for case in cases[options.skip :]:
        print(json.dumps({"case": case.name}), flush=True)
        signal.alarm(CASE_S)  # ends the process; same_bits.py starts another after this case
        print(json.dumps({"case": case.name, "results": run(case, options.device, folder)}), flush=True)


if __name__ == "__main__":
    main()
