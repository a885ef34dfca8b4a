# Runs programs with an offload context or without, records their results, and compares the state of the context with
# the schedule in docs/guide/offload.md. programs.py draws them. No test is here.
import contextlib
import gc
import weakref

import torch

import transformer_engine.pytorch as te

from .layers import CHECKPOINTS, TOKENS, WIDTH, Layer
from .programs import CALLS, RECIPES, Refused


class Run:
    """One program, with a context (offload) or without. cloned: in-place writes are replaced by new tensors."""

    def __init__(self, program, device, offload, cloned=False):
        self.program, self.device, self.cloned = program, device, cloned
        torch.manual_seed(program.seed)
        self.layers = [Layer(spec, device, i not in program.numbered) for i, spec in enumerate(program.layers)]
        self.recipe = program.recipe and RECIPES[program.recipe]()
        self.records, self.alive, self.lost, self.failed, self.losses = [], {}, [], False, []
        self.context, self.sync, self.manual = contextlib.nullcontext(), lambda y: y, None
        self.synchronizer = None
        if offload:
            self.count = max(1, len(program.numbered))
            self.context, self.sync, *rest = te.get_cpu_offload_context(
                True,
                program.k,
                self.count,
                manual_synchronization=program.manual,
                retain_pinned_cpu_buffers=program.retain,
            )
            self.synchronizer, self.manual = self.context.offload_synchronizer, rest[0] if rest else None
            self.synchronizer.debug = program.debug

    def note(self, what, value):
        self.records.append((what, value.detach().clone() if isinstance(value, torch.Tensor) else value))

    def execute(self):
        for number, actions in enumerate(self.program.steps):
            for at, (kind, *arguments) in enumerate(actions):
                self.seed(1000 * number + at)
                getattr(self, kind)(*arguments)
            self.losses_backward()
            self.lost = list(self.alive.values()) if number % 2 else []
            self.alive.clear()
            self.update()
        return self

    def seed(self, seed):
        """torch.manual_seed() stores a stack trace for each missing device."""
        torch.default_generator.manual_seed(seed)
        if self.device == "cuda":
            torch.cuda.manual_seed(seed)

    def update(self):
        for i, layer in enumerate(self.layers):
            for name, p in layer.named_parameters():
                if p.grad is not None:
                    self.note(f"layer {i} {name}", p.grad)
                    with torch.no_grad():
                        p.sub_(0.02 * p.grad / (1 + p.grad.abs()))
                    p.grad = None

    # ---- actions ----

    def run_layers(self, one, first, end, writes=(), calls=None, fails=None):
        """Layers `first` to `end` of a microbatch."""
        around, i = self.program.around, first
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            while i < end:
                if around and i == around[0] and end >= around[1]:
                    one["y"] = CHECKPOINTS[around[2]](self.segment, one["y"])
                    for skipped in range(*around[:2]):
                        one["results"][skipped] = one["y"]
                    i = around[1]
                    continue
                one["y"] = self.layer(i, one["y"], one, fails if i == end - 1 else None)
                if i in writes:
                    one["y"] = one["y"] * 1.5 if self.cloned else one["y"].mul_(1.5)
                one["results"][i] = one["y"]
                for call in (calls or {}).get(i, ()):
                    self.call(*call)
                i += 1

    def segment(self, y):
        for i in range(*self.program.around[:2]):
            y = self.layer(i, y, None, None)
        return y

    def layer(self, i, y, one, fails):
        layer = self.layers[i]
        with self.context:
            if self.synchronizer is not None and one is not None and torch.is_grad_enabled() and one["counts"]:
                self.look(one)
            y = layer(y)
            if fails == "inside":
                raise ArithmeticError
        if layer.spec.pieces == 2:
            with self.context:
                y = layer.second(y)
        if fails == "before the end":
            raise ArithmeticError
        counted = self.synchronizer is not None and one is not None and one["counts"] and torch.is_grad_enabled()
        state = self.synchronizer.current_layer() if counted else None
        y = self.sync(y)
        if counted:
            self.look_at_bytes(layer, state, one["number"])
            one["number"] += 1
            one["step"], one["graph"] = weakref.ref(self.synchronizer.number.step), y.requires_grad
        if fails == "behind":
            raise ArithmeticError
        return y

    def begin(self, counts=True):
        x = torch.randn(TOKENS, WIDTH).to(self.device).requires_grad_(self.program.input_gradient)
        return {"x": x, "y": x * 1.0, "results": {}, "number": 0, "counts": counts, "graph": False}

    def fail(self, microbatch, at, layer, where, keeps, drops):
        one = self.alive.setdefault(microbatch, None) or self.begin()
        self.alive[microbatch], self.failed = one, True
        try:
            self.run_layers(one, at, layer + 1, fails=where)
        except ArithmeticError:
            pass
        else:
            raise AssertionError("nothing failed")
        has_graph = one["graph"]
        if not keeps:
            one.clear()
            del self.alive[microbatch]
        # If no context saw the exception and the graph is still alive, the program ends the step explicitly.
        if self.synchronizer is not None and where != "inside" and (keeps or drops or not has_graph):
            self.synchronizer.forget_step()

    def forward(self, microbatch, first, end, writes, calls):
        if first == 0:
            self.alive[microbatch] = self.begin()
        self.run_layers(self.alive[microbatch], first, end, writes, calls)

    def exit(self, microbatch, backward):
        """A forward that ends early."""
        one = self.alive.pop(microbatch)
        if backward and one["y"].requires_grad:
            self.go_back(lambda: one["y"].backward(torch.ones_like(one["y"])))
        if self.synchronizer is not None and not one["graph"]:
            self.synchronizer.forget_step()

    def aside(self):
        """A layer whose result has no backward at first, and a loss on it whose backward runs after other layers."""
        one = self.begin()
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe), self.context:
            y = self.layers[self.program.numbered[0]](one["y"])
        self.losses.append((y.square().mean(), one["x"]))
        self.sync(y.detach())
        for name in list(CALLS)[:2]:
            self.call(name, 0)
        if self.synchronizer is not None:
            self.synchronizer.forget_step()

    def losses_backward(self):
        for loss, x in self.losses:
            if loss.requires_grad:
                self.go_back(loss.backward)
                self.note("a loss", loss.reshape(1))
            if x.grad is not None:
                self.note("its input", x.grad)
        self.losses.clear()

    def evaluate(self, how, calls):
        if how == "disabled" and self.synchronizer is not None:
            self.context.disable()
        before = self.states()
        with {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(how, torch.enable_grad)():
            one = self.begin(counts=False)
            self.run_layers(one, 0, len(self.layers), (), {i: c[:2] for i, c in calls.items()})
        now = self.states()
        assert how == "disabled" or now == before, f"an evaluation has changed something: {before} became {now}"
        self.note(how, one["y"].clone())
        del one
        if how == "disabled" and self.synchronizer is not None:
            self.context.enable()

    def backward(self, microbatch, how, at, calls):
        one = self.alive.pop(microbatch)
        y, results = one["y"], one["results"]
        self.note("result", y)
        if not y.requires_grad or how == "dropped":
            return
        for i, listed in calls.items():
            if i in results and results[i].requires_grad:
                results[i].register_hook(lambda _, listed=listed: [self.call(*c) for c in listed] and None)
        gradient = torch.cos(y.detach())
        middle = results[at]
        if how in ("split", "part") and (middle is y or not middle.requires_grad):
            how = "whole"
        if how in ("split", "part"):
            found = []
            self.go_back(lambda: found.extend(torch.autograd.grad(y, middle, gradient, retain_graph=how == "part")))
            self.look_at_reloads(one, at)
            self.note("middle", found[0])
            if how == "split":
                self.go_back(lambda: middle.backward(found[0]))
        elif how.startswith("fails") and middle.requires_grad:
            self.failed, fails = True, [True]

            def hook(_):
                if fails.pop() if fails else False:
                    raise ArithmeticError

            middle.register_hook(hook)
            with contextlib.suppress(ArithmeticError):
                self.go_back(lambda: y.backward(gradient, retain_graph=how.endswith("again")))
            if how.endswith("again"):
                self.go_back(lambda: y.backward(gradient))
        else:
            self.go_back(lambda: y.backward(gradient, retain_graph=how == "twice"))
            if how == "twice":
                self.go_back(lambda: y.backward(gradient))
        if one["x"].grad is not None:
            self.note("input", one["x"].grad)

    def go_back(self, call):
        steps = self.states()
        try:
            call()
        except BaseException as error:
            self.settle()
            words = str(error)
            if "modified by an inplace operation" in words or "in-place operation has changed it" in words:
                raise Refused from None
            raise
        if self.synchronizer is not None:
            now = self.states()
            assert len(now) <= len(steps), f"a backward has begun a step: {steps} became {now}"

    def settle(self):
        """After a backward that failed. On CUDA a thread of autograd may hold the exception, its frames and so the
        graph a little longer than this one; it releases them when it runs another task."""
        if self.device == "cuda":
            torch.ones((), device="cuda", requires_grad=True).backward()

    # ---- the state of the context ----

    def states(self):
        if self.synchronizer is None:
            return []
        return [[layer.state for layer in step.layers] for step in self.synchronizer.steps()]

    def look(self, one):
        """In a layer: its number, and the states of the others under the default schedule."""
        number, n, k = one["number"], self.count, self.program.k
        assert int(self.synchronizer.number) == number, "a layer has another one's number"
        if self.manual is not None:
            return
        now = self.states()[-1]
        for i in range(min(k, number)):
            assert now[i] == ("offload_finished" if number >= n - k + i else "offload_started"), (number, i, now)

    def look_at_bytes(self, layer, state, number):
        known = layer.expected_bytes is not None and layer.spec.pieces == 1
        if known and self.manual is None and number < self.program.k:
            assert state.state == "offload_started" and state.bytes == layer.expected_bytes, "bytes that left"

    def look_at_reloads(self, one, at):
        """After a backward down to layer `at`: layers that were reloaded ahead of it are on the device."""
        program = self.program
        if self.synchronizer is None or self.manual is not None or program.around or not program.input_gradient:
            return
        n, k, layers = self.count, program.k, one["step"]().layers
        for i in range(min(k, at + 1)):
            ahead = any(number - (n - k - 1) == i for number in range(at + 1, n))
            left = "offload_finished" if n > n - k + i else "offload_started"
            assert layers[i].state == ("reload_started" if ahead else left), (at, i)

    def call(self, name, number):
        """A manual call: the documented layer, and no other, changes from one state to the next."""
        if self.manual is None:
            return
        steps, (wanted, becomes) = list(self.synchronizer.steps()), CALLS[name]
        layers = [step.layers[number] for step in steps]
        before = [layer.state for layer in layers]
        works = name == "start_reload_layer" or torch.is_grad_enabled()
        found, refuses = None, False
        if works and not layers:
            refuses = True
        elif works and name == "start_offload_layer":
            found = layers[-1] if before[-1] == wanted and number <= steps[-1].layer_index else None
            refuses = found is None
        elif works:
            there = [layer for layer in layers if layer.state == wanted]
            found = next((layer for layer in there if layer.bytes), there[0] if there else None)
            refuses = found is None
            if found is not None and not found.bytes and name == "start_reload_layer":
                found = None
        try:
            getattr(self.manual, name)(number)
        except RuntimeError as error:
            assert refuses and name.split("_")[0] in str(error), error
        else:
            assert not refuses, f"{name}({number}) did something: {before}"
        for layer, state in zip(layers, before, strict=True):
            assert layer.state == (becomes if layer is found else state), (name, number, before)

    def close(self):
        """No host memory and no step is left without a graph."""
        self.alive.clear()
        self.lost.clear()
        self.losses.clear()
        if self.synchronizer is None:
            return
        self.synchronizer.forget_step()
        if self.failed and (self.states() or self.synchronizer.pinned_usage()["slots"]):
            gc.collect()  # tracebacks refer to each other
        usage, left = self.synchronizer.pinned_usage(), self.states()
        assert not left, f"a step is left: {left}, {usage}"
        assert self.program.retain or (usage["slots"], usage["used"]) == (0, 0), usage
