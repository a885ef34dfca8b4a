# Runs the programs of programs.py by captured callables and by eager twins, whose results are the reference. No test
# is here.
from contextlib import nullcontext

import torch
from support import assert_same_bits

import transformer_engine.pytorch as te

from .program_modules import HIDDEN, Tripped, build, twin
from .program_states import RECIPES, ROWS, _saved, assert_same, left_by, stream_on, unchecked
from .programs import TE_FAMILIES, Program, captures_group


class Runner:
    """Runs steps of a program by calls of (chunk, microbatch, layer), each with its modules."""

    def __init__(
        self, program: Program, modules, device, *, group=None, graphed=None, cloned=False, write=True, kept=False
    ):
        self.program, self.modules, self.device, self.group = program, modules, device, group
        self.graphed, self.cloned, self.write, self.rank = graphed, cloned, write, 0
        self.keeps_saved = kept  # backward reads the values of the forward, even if they were overwritten since
        self.stream = stream_on(device) if graphed is not None else None
        self.first = [sum(map(len, program.chunks[:c])) for c in range(len(program.chunks))]
        self.dtype = torch.float32 if program.recipe is None else torch.bfloat16

    def module(self, c, layer):
        return self.modules[self.first[c] + layer]

    def callable(self, c, m, layer):
        if self.graphed is None:
            return self.module(c, layer)
        count = len(self.program.chunks[c])
        return self.graphed[self.first[c] * self.program.microbatches + m * count + layer]

    # ---- calls ----

    def autocast(self, where):
        """The autocast around a call, or the step. Captured callables need none; eager modules do."""
        program = self.program
        around = program.around
        if around == "nothing":
            around = "call" if self.graphed is None else ""
        if program.recipe is None or where != around:
            return nullcontext()
        return te.autocast(enabled=True, recipe=RECIPES[program.recipe], amax_reduction_group=self.group)

    def keywords(self, c, m, layer, step, *, quiet=False):
        program = self.program
        if quiet and not program.cached:
            return {}
        if program.cached:
            first = m == 0
        elif program.recipe is not None and program.recipe.startswith("delayed"):
            return {}  # captured ones quantize the weights in each call, with the scales at that time
        elif step.first is None or (step.write is not None and program.recipe is not None):
            return {}
        else:  # the same for quantized weights: eager uses those of the first microbatch
            first = m == 0 and (step.first or program.recipe is not None)
        ours = program.chunks[c][layer].family in TE_FAMILIES
        return {"is_first_microbatch": first} if ours or self.graphed is not None else {}

    def call(self, c, m, layer, args, step):
        function, keywords = self.callable(c, m, layer), self.keywords(c, m, layer, step)
        if self.graphed is not None and step.stream:
            keywords["cuda_graph_stream"] = self.stream
        if self.program.checkpoint == "layer":
            y = te.checkpoint(function, *args, **keywords)
        else:
            y = function(*args, **keywords)
        return y if isinstance(y, tuple) else (y,)

    def forward(self, c, m, x, step, at):
        """All layers of a chunk: its results."""
        chunk, outs, firsts = self.program.chunks[c], (x,), None
        for i, layer in enumerate(chunk):
            x = outs[0]
            args = (x, firsts) if layer.joins else (x,)
            if self.cloned:
                args = tuple(a.clone() for a in args)
            outs = self.call(c, m, i, args, step)
            if self.cloned:
                outs = tuple(out.clone() for out in outs)
            if step.hooks and outs[0].requires_grad:
                outs[0].register_hook(self.keep)
            self.tensors[c, m, i] = [args[0] if not self.cloned else x, outs[0]]
            self.maybe_write(step, at, i, early=True)
            outs = (self.tensors[c, m, i][1], *outs[1:])
            firsts = outs[0] if firsts is None else firsts
            if i + 1 < len(chunk) and self.program.between == "sin":
                outs = (torch.sin(outs[0]), *outs[1:])
            elif i + 1 < len(chunk) and self.program.between == "residual":
                outs = (outs[0] + x, *outs[1:])
        return outs

    def keep(self, gradient):
        self.kept.append((gradient, gradient.clone()))

    # ---- actions of a user between the calls ----

    def maybe_write(self, step, at, layer, *, early):
        write = step.write
        if not self.write or write is None or write.entry != at or write.layer != layer or write.early != early:
            return
        c = int(self.program.entries[at]) - 1
        held = self.tensors[c, self.turn[1, c] - 1, layer]
        which = int(write.result)
        t = held[which]
        if write.kind == "a parameter":
            parameters = tuple(self.module(c, layer).parameters())
            unseen = torch.autograd._unsafe_preserve_version_counter(parameters)
            with torch.no_grad(), unseen if self.keeps_saved else nullcontext():
                for p in parameters:
                    p.mul_(1.5)
        elif write.kind == "mul_ without gradients":
            with torch.no_grad():
                t.mul_(1.5)
        elif write.kind == "mul_ of a detached one":
            t.detach().view(-1)[::3].mul_(1.5)
        elif write.kind == "mul_ of a view":
            t[..., 2:5].mul_(1.5)
        else:
            held[which] = t.mul_(1.5)

    def bad_call(self, step):
        """A refused call changes nothing. Eager twins skip it."""
        if self.graphed is None:
            return
        c, m = next(iter(step.ways))
        x = torch.ones(ROWS, HIDDEN, dtype=self.dtype, device=self.device, requires_grad=self.program.input_grads[c])
        args, keywords = (x,), self.keywords(c, m, 0, step)
        kind = step.bad[1]
        if kind == "shape":
            args = (x.detach()[1:].clone().requires_grad_(x.requires_grad),)
        elif kind == "dtype":
            args = (x.detach().double().requires_grad_(x.requires_grad),)
        elif kind == "missing":
            args = ()
        else:
            keywords = {**keywords, "nobody": 3}
        try:
            self.callable(c, m, 0)(*args, **keywords)
        except (TypeError, ValueError):
            return
        raise AssertionError(f"a bad call ({kind}) was let through")

    # ---- steps ----

    def step(self, step):
        """Runs one step; returns {name: value after it}."""
        with _saved(torch.clone) if self.keeps_saved else nullcontext():
            return self._step(step)

    def _step(self, step):
        program, self.found, self.kept, self.tensors = self.program, {}, [], {}
        generator = torch.Generator().manual_seed(step.seed + self.rank)

        def draw(c, scale=1.0):
            values = torch.randn(ROWS, HIDDEN, generator=generator) * scale
            return values.to(self.dtype).to(self.device)

        passes = list(step.ways)
        given = {p: (draw(p[0], 8.0 ** ((p[1] + step.seed) % 3)), draw(p[0])) for p in passes}
        quiet = draw(0, 100.0)
        torch.manual_seed(step.seed)
        if step.quiet is not None:
            c, m, i = step.quiet
            args = (quiet, quiet) if program.chunks[c][i].joins else (quiet,)
            with torch.no_grad(), self.autocast("call"), self.autocast("step"):
                args = tuple(a.requires_grad_(self.needs_grad(c, i)) for a in args)
                keywords = {} if step.evaluated else self.keywords(c, m, i, step, quiet=True)
                self.module(c, i).train(not step.evaluated)
                ys = self.callable(c, m, i)(*args, **keywords)
                self.module(c, i).train()
                ys = ys if isinstance(ys, tuple) else (ys,)
                self.found |= {f"quiet {n}": y.detach().clone() for n, y in enumerate(ys)}
        self.turn = {(kind, c): 0 for kind in (1, -1, 0) for c in range(len(program.chunks))}
        alive, waiting = {}, []
        with self.autocast("step"):
            for at, entry in enumerate(program.entries):
                if at == step.given_up:
                    break
                if step.bad is not None and step.bad[0] == at:
                    self.bad_call(step)
                c = int(abs(entry)) - 1
                kind = 1 if entry > 0 else 0 if entry % 1 else -1
                m, self.turn[kind, c] = self.turn[kind, c], self.turn[kind, c] + 1
                if kind == 1:
                    x = given[c, m][0].clone().requires_grad_(program.input_grads[c])
                    h = x * 1 if step.write is not None else x
                    with self.autocast("call"):
                        if program.checkpoint == "chunk":
                            keep = self.tensors
                            outs = te.checkpoint(lambda x, c=c, m=m, at=at: self.forward(c, m, x, step, at), h)
                            self.tensors = keep
                        else:
                            outs = self.forward(c, m, h, step, at)
                    for i in range(len(program.chunks[c])):
                        self.maybe_write(step, at, i, early=False)
                    if program.checkpoint != "chunk":
                        outs = (self.tensors[c, m, len(program.chunks[c]) - 1][1], *outs[1:])
                    alive[c, m] = x, outs
                    self.found |= {f"y {c} {m} {n}": y.detach().clone() for n, y in enumerate(outs)}
                elif kind == -1:
                    self.backward(c, m, *alive.pop((c, m)), given[c, m][1], step)
                    if program.delays(c) and step.ways[c, m] == "backward":
                        if c not in program.scheduled and not (step.late and not program.checkpoint):
                            self.weight_gradients(c, m)
                        elif c not in program.scheduled:
                            waiting.append((c, m))
                elif step.ways[c, m] == "backward":
                    self.weight_gradients(c, m)
        for c, m in waiting:
            self.weight_gradients(c, m)
        if step.given_up is not None:
            self.drop_weight_gradients()
        for i, (gradient, before) in enumerate(self.kept):
            assert_same_bits(gradient, before, f"gradient {i} that was kept")
        return self.found | left_by(self.modules)

    def needs_grad(self, c, layer):
        """Whether a layer's argument requires a gradient, as in the samples."""
        return needs_grad(self.program, c, layer)

    def backward(self, c, m, x, outs, dy, step):
        way, name = step.ways[c, m], f"dx {c} {m}"
        again = (c, m) in step.twice
        live = [y for y in outs if y.requires_grad]
        if not live:
            return
        for run in range(1 + again):
            retain = again and run == 0
            losses = [(y.float() * torch.sin(y.detach().float() * 3) * dy).sum() for y in live]
            loss = sum(losses)
            if way == "grad":
                (dx,) = torch.autograd.grad(loss, [x], retain_graph=retain, allow_unused=True)
            else:
                loss.backward(retain_graph=retain, inputs=[x] if way == "inputs" else None)
                dx = x.grad
            if dx is not None:
                self.kept.append((dx, dx.clone()))
                x.grad = None
            self.found[f"{name} {run}"] = None if dx is None else dx.clone()
        self.found |= {f"y {c} {m} {n} behind its backward": y.detach().clone() for n, y in enumerate(outs)}

    def weight_gradients(self, c, m):
        for i in reversed(range(len(self.program.chunks[c]))):
            layer = self.program.chunks[c][i]
            if not layer.delayed or layer.frozen:
                continue
            if self.graphed is not None:
                self.callable(c, m, i).backward_dw()
                continue
            parts = [part for part in self.module(c, i).modules() if hasattr(part, "runtime") and part.runtime.stores]
            for part in parts:
                part.backward_dw()

    def drop_weight_gradients(self):
        for part in self.graphed or self.modules.modules():
            if self.graphed is not None or hasattr(type(part), "drop_backward_dw"):
                part.drop_backward_dw()


def needs_grad(program, c, layer):
    trained = any(not above.frozen for above in program.chunks[c][:layer])
    return program.input_grads[c] or trained


def samples(program, device):
    dtype = torch.float32 if program.recipe is None else torch.bfloat16
    found = []
    for c, chunk in enumerate(program.chunks):
        for _ in range(program.microbatches):
            for i, layer in enumerate(chunk):
                grads = [needs_grad(program, c, i)] + ([needs_grad(program, c, 1)] if layer.joins else [])
                found.append(
                    tuple(torch.randn(ROWS, HIDDEN, dtype=dtype, device=device).requires_grad_(g) for g in grads)
                )
    return tuple(found)


def capture(program, modules, device, group, **options):
    if program.recipe is not None:
        options |= {"enabled": True, "recipe": RECIPES[program.recipe], "cache_quantized_params": program.cached}
        if group is not None and captures_group(program.seed):
            options["amax_reduction_group"] = group
    if program.order is not None:
        options |= {"_order": list(program.order), "_num_layers_per_chunk": [len(chunk) for chunk in program.chunks]}
    return te.make_graphed_callables(
        tuple(modules),
        samples(program, device),
        num_warmup_iters=program.warmup,
        retain_graph_in_backward=program.retain,
        _reuse_graph_input_output_buffers=program.reuse,
        clone_param_grads_on_return=program.clone,
        **options,
    )


def run(program: Program, device, group=None, rank=0):
    """AssertionError if captured callables differ from eager, raised after all steps, which other ranks run too.
    Returns the outcome."""
    modules = build(program, device)
    eager = twin(modules)
    if program.fault:
        before, wire, hooks = left_by(modules), modules[0].wire, []
        options = {"pre_warmup_hook": lambda: hooks.append(1), "post_warmup_hook": lambda: hooks.append(-1)}
        wire.left = program.fault
        try:
            capture(program, modules, device, group, **options)
        except Tripped:
            assert hooks == [1, -1], f"hooks around a warm-up that failed: {hooks}"
            assert_same(left_by(modules), before, "after a capture that failed")
        else:
            wire.left = 0
            modules = twin(eager)
        wire.left = 0
    graphed = capture(program, modules, device, group)
    captured = Runner(program, modules, device, group=group, graphed=graphed)
    runners, problems = [captured, Runner(program, eager, device, group=group)], []
    for i, step in enumerate(program.steps):
        if step.write is not None and not problems:
            return _hostile(program, captured, eager, device, group, step)
        if step.write is not None:
            break
        found = []
        for runner in runners:
            runner.rank = rank
            found.append(runner.step(step))
        try:
            assert_same(*found, f"step {i}")
        except AssertionError as error:
            problems.append(error)
        for m in (modules, eager):
            _optimize(m, i, program.steps[i])
    if problems:
        raise problems[0]
    return "equal"


def _optimize(modules, i, step):
    with torch.no_grad():
        for p in modules.parameters():
            if p.requires_grad:
                p.mul_(1.0 + 0.1 * i)
            if not step.keep_grads:
                p.grad = None
            if hasattr(p, "grad_added_to_main_grad"):
                p.grad_added_to_main_grad = False


def _hostile(program, captured, eager, device, group, step):
    """The right values, or an error. Where eager raises, the reference is a run without shared memory, or without the
    write; for a parameter, which later calls read, a run in which the backward reads a copy made at the call."""
    if step.write.kind == "a parameter":
        oracles = [{}, {"kept": True}]
    else:
        oracles = [{}, {"cloned": True}, {"write": False}]
    twins = [twin(eager) for _ in oracles]
    unchecked(captured.graphed, captured.modules)
    try:
        got = captured.step(step)
    except RuntimeError:
        return "refused"
    for options, modules in zip(oracles, twins):
        try:
            want = Runner(program, modules, device, group=group, **options).step(step)
        except RuntimeError:
            continue
        assert_same(got, want, f"written to, {options}")
        return f"written to: {options}"
    raise AssertionError("no oracle")
