# Drawn programs of a divided module, compared with the same module whole: options, recipe, over the group or in chunks
# over peers, what runs around, which gradients are wanted, layouts, microbatches and the order of their backwards,
# copies, a failure in the middle. No test is here: compare() returns the differences, as words.
import contextlib
import copy
import dataclasses
import functools
import pickle
import random

import torch
import torch.distributed as dist
from ranks import here

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C

from .parallel_cases import parameter_part
from .parallel_modules import RECIPES

HIDDEN, WIDE = 32, 64
AROUND = ("nothing", "te reentrant", "te", "torch", "on cpu", "offload", "autocast")
LAYOUTS = ("plain", "transposed", "strided", "flat", "deep", "view")


@dataclasses.dataclass
class Program:
    kind: str
    options: dict
    sequence: bool
    recipe: str
    primary: bool  # weights in FP8 alone
    around: str
    dtype: torch.dtype
    frozen: tuple  # every so many-th parameter, from which on
    needs_x: bool
    microbatches: int
    reverse: bool
    layout: str
    expanded: bool  # gradients of stride 0
    copied: str
    fails: str
    tokens: int  # of a rank, of dimension 0
    traced: bool
    chunked: bool  # over peers, in runs

    @property
    def inputs(self):
        """Along which dimension a rank has a part of the input; None: it has all."""
        return -1 if self.kind == "row" else 0 if self.sequence else None

    @property
    def outputs(self):
        return -1 if self.kind in ("column", "norm") else 0 if self.sequence else None

    @property
    def columns(self):
        """Sizes of the output's pieces that are divided one by one."""
        split = self.options.get("parameters_split")
        if not split:
            return []
        return list(split.values()) if isinstance(split, dict) else [WIDE // len(split)] * len(split)

    @property
    def pieces(self):
        gated = self.kind == "stack" or self.options.get("activation", "").endswith("glu")
        return dict.fromkeys(("fc1_weight", "fc1_bias", "2.fc1_weight", "2.fc1_bias"), 2) if gated else {}

    @property
    def tolerance(self):
        """Of a tensor's norm. In FP8 ranks have scales of their own where they have columns of their own."""
        if self.recipe != "none":
            return 0.3 if self.kind == "stack" else 0.1
        if self.options.get("save_preactivation"):
            return 0.05
        return 0.03 if self.dtype != torch.float32 or self.around == "autocast" else 2e-5


def draw(seed):
    r = random.Random(seed)
    kind = r.choice(("column", "row", "norm", "mlp", "stack"))
    options = {"bias": r.random() < 0.7}
    for name in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
        if r.random() < 0.3:
            options[name] = True
    if kind != "stack" and r.random() < 0.3:
        options["return_bias"] = True
    if kind in ("column", "norm") and r.random() < 0.3:
        options["parameters_split"] = r.choice((("q", "k", "v", "w"), {"q": 32, "k": 20, "v": 12}))
    if kind in ("norm", "mlp"):
        options["normalization"] = r.choice(("LayerNorm", "RMSNorm"))
        for name, often in (("zero_centered_gamma", 0.3), ("recompute_norm_output", 0.4)):
            options[name] = r.random() < often
        for name, often in (("return_layernorm_output", 0.3), ("return_layernorm_output_gathered", 0.5)):
            options[name] = r.random() < often
    if kind == "mlp":
        options["activation"] = r.choice(("gelu", "swiglu", "relu", "geglu"))
        options["checkpoint"] = r.random() < 0.4
        options["save_preactivation"] = r.choice((None, None, "fp8"))
    recipe = r.choice(("none", "none", "none", *RECIPES))
    if kind in ("column", "row") and r.random() < 0.2:
        options["save_original_input"] = True
        recipe = "current" if recipe == "delayed" or "dequantized" in recipe else recipe
    around = r.choice(AROUND)
    if recipe != "none" and around == "autocast":
        around = "nothing"
    primary = recipe in ("current", "block", "delayed") and r.random() < 0.25
    traced = around == "nothing" and not primary and recipe in ("none", "current", "block") and r.random() < 0.15
    if primary:
        options.pop("parameters_split", None)  # refused: several parameters that are scaled as one
    if traced:
        options.pop("delay_wgrad_compute", None)  # refused under torch.compile
    tokens = r.choice((1, 4, 6, 0)) if recipe == "none" else r.choice((8, 64, 128)) if "block" in recipe else 16
    every, first = r.choice((0, 0, 0, 2, 3)), r.randrange(3)
    return Program(
        kind=kind,
        options=options,
        sequence=r.random() < 0.7,
        recipe=recipe,
        primary=primary,
        around=around,
        dtype=torch.bfloat16 if r.random() < 0.25 else torch.float32,
        frozen=(every, first),
        needs_x=r.random() < 0.8,
        microbatches=r.choice((1, 1, 2, 3)),
        reverse=r.random() < 0.5,
        layout=r.choice(LAYOUTS),
        expanded=r.random() < 0.3,
        copied=r.choice(("no", "no", "deepcopy", "pickle")),
        fails=r.choice(("no", "no", "forward", "backward", "between")) if recipe != "delayed" else "no",
        tokens=tokens,
        traced=traced,
        chunked=random.Random(-1 - seed).random() < 0.5,
    )


def made(program, group, recompute=True):
    """The module, divided where there is a group."""
    torch.manual_seed(5)
    shared = {"device": here(), "params_dtype": program.dtype, **program.options}
    column, row, both = {}, {}, {}
    if group is not None:
        shared |= {"tp_group": group, "sequence_parallel": program.sequence}
        if program.chunked and here().type == "cpu":
            shared["tp_overlap"] = "chunked"
        keep = {} if recompute else {"tp_recompute_allgather": False}
        column, row, both = (
            {"parallel_mode": "column", **keep},
            {"parallel_mode": "row"},
            {"set_parallel_mode": True, **keep},
        )
    kinds = {
        "column": lambda: te.Linear(HIDDEN, WIDE, **column, **shared),
        "row": lambda: te.Linear(WIDE, HIDDEN, **row, **shared),
        "norm": lambda: te.LayerNormLinear(HIDDEN, WIDE, **column, **shared),
        "mlp": lambda: te.LayerNormMLP(HIDDEN, WIDE, **both, **{"activation": "swiglu", **shared}),
    }
    with contextlib.ExitStack() as stack:
        if program.primary:
            stack.enter_context(te.quantized_model_init(enabled=True, recipe=RECIPES[program.recipe]))
        if program.kind == "stack":
            return torch.nn.Sequential(*(kinds[kind]() for kind in ("norm", "row", "mlp", "norm", "row")))
        return kinds[program.kind]()


class Failing(Exception):
    """Raised in the middle of a step."""


def fail(*_):
    raise Failing


def laid(t, layout):
    """Equal values in other memory, or of another shape."""
    if layout == "transposed":
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        return torch.cat([t, t], -1)[..., : t.shape[-1]]
    if layout == "flat":
        return t.flatten(0, -2)
    if layout == "deep":
        return t.unsqueeze(1)
    if layout == "view":
        return torch.stack([t, t])[1]
    return t


def under(program):
    recipe = RECIPES[program.recipe]
    return te.autocast(enabled=recipe is not None, recipe=recipe)


def called(module, program, number):
    """The module under what runs around it."""
    first = {"is_first_microbatch": number == 0} if program.recipe != "none" and program.kind != "stack" else {}

    def inner(x):
        with under(program):
            return module(x, **first)

    def on_cpu(x):
        with torch.autograd.graph.save_on_cpu():
            return inner(x)

    def offloaded(x):
        sizes = {"num_layers": 1, "model_layers": 2}
        context, synchronize = te.get_cpu_offload_context(enabled=True, offload_activations=True, **sizes)
        with context:
            y = inner(x)
        return (synchronize(y[0]), *y[1:]) if isinstance(y, tuple) else synchronize(y)

    def low(x):
        with torch.autocast(here().type, torch.bfloat16):
            return inner(x)

    if program.traced:
        return torch.compile(inner, backend="aot_eager", fullgraph=True)
    return {
        "nothing": inner,
        "te": lambda x: te.checkpoint(inner, x, use_reentrant=False),
        "te reentrant": lambda x: te.checkpoint(inner, x, use_reentrant=True),
        "torch": lambda x: torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False),
        "on cpu": on_cpu,
        "offload": offloaded,
        "autocast": low,
    }[program.around]


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def steps(module, program, x, loss_of):
    """All forwards, then all backwards: the first outputs, and the gradients of the inputs."""
    leaves = [laid(x * (1 + 0.5 * i), program.layout).detach() for i in range(program.microbatches)]
    leaves = [leaf.requires_grad_(program.needs_x) for leaf in leaves]
    hidden = [leaf * 1 if program.needs_x else leaf for leaf in leaves]
    outputs = [as_tuple(called(module, program, i)(h)) for i, h in enumerate(hidden)]
    for i in reversed(range(len(outputs))) if program.reverse else range(len(outputs)):
        loss = loss_of(i, outputs[i])
        if loss.requires_grad:
            loss.backward()
    for part in module.modules():
        if getattr(part, "need_backward_dw", lambda: False)():
            part.backward_dw()
    return [out[0].detach().clone() for out in outputs], [leaf.grad for leaf in leaves]


def failing_step(module, program, x):
    """A step that does not reach its end; its leftovers are removed as a user would."""
    leaf = laid(x, program.layout).detach().requires_grad_()
    sums = {p: p.main_grad.clone() for p in module.parameters() if getattr(p, "main_grad", None) is not None}
    hooks = {"forward": (fail, lambda t: t), "backward": (lambda t: t, fail), "between": (lambda t: t, lambda t: t)}
    with contextlib.suppress(Failing):
        with torch.autograd.graph.saved_tensors_hooks(*hooks[program.fails]), under(program):
            out = as_tuple(module(leaf))[0]
        if program.fails == "between":
            raise Failing
        out.float().sum().backward()
    module.zero_grad(set_to_none=True)
    for part in module.modules():
        getattr(part, "drop_backward_dw", lambda: None)()
    for p, before in sums.items():
        p.main_grad.copy_(before)


def prepared(module, program):
    every, first = program.frozen
    for i, p in enumerate(module.parameters()):
        if every and (i - first) % every == 0:
            p.requires_grad_(False)
        if program.options.get("fuse_wgrad_accumulation") and p.dim() == 2:
            p.main_grad = torch.full(p.shape, 0.5, device=here())
    return module


class Case:
    """A program's tensors, and what a rank has of them."""

    def __init__(self, program, rank, ranks):
        self.program, self.rank, self.ranks = program, rank, ranks
        generator = torch.Generator().manual_seed(3)

        def randn(width):
            sizes = program.tokens * ranks, 1 if program.layout == "flat" else 2, width
            return torch.randn(sizes, generator=generator).to(here())

        self.x = randn(WIDE if program.kind == "row" else HIDDEN).to(program.dtype)
        self.dy = randn(WIDE if program.kind in ("column", "norm") else HIDDEN)
        if program.expanded and self.dy.numel():
            self.dy = self.dy[:1, :1].expand_as(self.dy)
        self.dn = randn(HIDDEN)

    def part(self, t, dim, columns=()):
        if dim is None or t is None:
            return t
        pieces = t.split(columns, -1) if dim == -1 and columns else [t]
        return torch.cat([piece.chunk(self.ranks, dim)[self.rank] for piece in pieces], dim)

    def loss(self, divided, number, outputs):
        program, (y, *rest) = self.program, outputs
        if program.options.get("return_bias"):
            bias = rest.pop(0)
            y = y if bias is None else y + bias
        dy = self.part(self.dy, program.outputs, program.columns) if divided else self.dy
        loss = (y.float() * dy.reshape(y.shape)).sum() * (1 + 0.25 * number)
        if program.options.get("return_layernorm_output"):
            dn, share = self.dn, 1.0
            if divided and program.sequence and program.options["return_layernorm_output_gathered"]:
                share = 2 * (self.rank + 1) / (self.ranks * (self.ranks + 1))  # each rank uses it in a part
            elif divided and program.sequence:
                dn = self.part(dn, 0)
            loss = loss + (rest[0].float() * dn.reshape(rest[0].shape)).sum() * share
        return loss

    def run(self, module, divided):
        program = self.program if divided else dataclasses.replace(self.program, traced=False)
        x = self.part(self.x, program.inputs).contiguous() if divided else self.x
        return steps(module, program, x, functools.partial(self.loss, divided))


def compare(program, rank, ranks):
    wrong, case = [], Case(program, rank, ranks)
    whole = made(program, None)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(4)
        for p in whole.parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape, generator=generator).to(here()) * 0.1)
    outputs, gradients = case.run(prepared(whole, program), False)
    wanted, kept = dict(whole.named_parameters()), {}
    for recompute in (True, False) if program.kind != "row" and program.sequence else (True,):
        divided = made(program, dist.group.WORLD, recompute)

        def of(name, t, divided=divided):
            parameter = dict(divided.named_parameters())[name]
            return t if t is None else parameter_part(name, t, parameter, rank, ranks, program.pieces)

        with torch.no_grad():
            for name, p in divided.named_parameters():
                values = wanted[name].detach()
                p.copy_(of(name, values.dequantize() if isinstance(values, te.QuantizedTensor) else values))
        if program.copied != "no":
            divided = copy.deepcopy(divided) if program.copied == "deepcopy" else pickle.loads(pickle.dumps(divided))
        prepared(divided, program)
        if program.fails != "no":
            failing_step(divided, program, case.part(case.x, program.inputs).contiguous())
        y, dx = case.run(divided, True)
        te.distributed.allreduce_sequence_parallel_grads(divided, dist.group.WORLD)
        found = {f"y{i}": (t, case.part(outputs[i], program.outputs, program.columns)) for i, t in enumerate(y)}
        found |= {f"dx{i}": (t, case.part(gradients[i], program.inputs)) for i, t in enumerate(dx)}
        for name, p in divided.named_parameters():
            for kind in ("grad", "main_grad"):
                found[f"{name}.{kind}"] = getattr(p, kind, None), of(name, getattr(wanted[name], kind, None))
        words = [words for name, pair in found.items() for words in differs(name, *pair, program.tolerance)]
        wrong += [f"{'recompute' if recompute else 'keep'} {said}" for said in words]
        kept[recompute] = {name: got for name, (got, _) in found.items()}
    for name, t in kept[True].items() if len(kept) == 2 else ():
        wrong += [f"{words}, recompute beside keep" for words in differs(name, t, kept[False][name], 0.0)]
    return wrong


def differs(name, got, want, tolerance):
    if got is None or want is None:
        return [] if got is want else [f"{name}: {'nothing' if got is None else 'something'} here alone"]
    if got.shape != want.shape:
        return [f"{name}: {tuple(got.shape)} for {tuple(want.shape)}"]
    if got.numel() == 0 or torch.equal(got, want):
        return []
    error = (got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-2)
    return [] if error <= tolerance and tolerance else [f"{name}: relative error {error:.2e}"]


def run(seed, rank, ranks):
    torch._dynamo.reset()
    program = draw(seed)
    before = _C.set_cpu_products("loop" if program.chunked else "libtorch")
    try:
        return compare(program, rank, ranks)
    finally:
        _C.set_cpu_products(before)


def everything(rank, seeds):
    """[(seed, what is wrong)]."""
    found = []
    for seed in seeds:
        try:
            wrong = run(seed, rank, dist.get_world_size())
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        found += [(seed, wrong)] if wrong else []
    return found
