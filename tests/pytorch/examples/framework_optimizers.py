# The owners of gradients of the framework in framework_gpt.py: one buffer of float32 that main_grad views, and an
# optimizer of it. No test here.
import torch

import transformer_engine.pytorch as te

ADAM = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


class _Buffer:
    def __init__(self, parameters, microbatches):
        self.parameters, self.microbatches = list(parameters), microbatches
        sizes = [p.numel() for p in self.parameters]
        self.buffer = torch.zeros(sum(sizes), device=self.parameters[0].device)
        self.nodes = []
        for p, part in zip(self.parameters, self.buffer.split(sizes)):
            p.main_grad, p.grad_added_to_main_grad = part.view(p.shape), False
            self.nodes.append(p.expand_as(p).grad_fn.next_functions[0][0])
            self.nodes[-1].register_hook(self._hook(p))

    def _hook(self, p):
        def hook(*_):
            if p.grad is not None and not p.grad_added_to_main_grad:
                p.main_grad.add_(p.grad)
            p.grad = None

        return hook

    def zero(self):
        self.buffer.zero_()
        for p in self.parameters:
            p.grad_added_to_main_grad = False


class Optimizer(_Buffer):
    """Copies of the weights in float32, stepped by torch's AdamW."""

    def __init__(self, parameters, microbatches):
        super().__init__(parameters, microbatches)
        self.masters = [p.detach().float().clone() for p in self.parameters]
        self.adam = torch.optim.AdamW(self.masters, **ADAM)

    def step(self):
        for master, p in zip(self.masters, self.parameters):
            master.grad = p.main_grad / self.microbatches
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=False)
        self.adam.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.parameters):
                p.copy_(master)


class ShardedOptimizer(_Buffer):
    """Each of so many ranks, all of which are this process, steps its slice of the buffer: parts of weights as
    `weight.detach().view(-1)[a:b]` in FusedAdam, which keeps the masters, with gradients that were reduced into the
    slice's own memory."""

    def __init__(self, parameters, microbatches, ranks):
        super().__init__(parameters, microbatches)
        total = self.buffer.numel()
        self.slices = [(total * r // ranks, total * (r + 1) // ranks) for r in range(ranks)]
        self.parts = [self._parts(first, last) for first, last in self.slices]
        every = [part for parts in self.parts for part, *_ in parts]
        self.adam = te.optimizers.FusedAdam(every, **ADAM, master_weights=True, use_decoupled_grad=True)

    def _parts(self, first, last):
        """(part of a weight, its elements of the slice)"""
        found, start = [], 0
        for p in self.parameters:
            begin, end = max(start, first), min(start + p.numel(), last)
            if begin < end:
                found.append((p.detach().view(-1)[begin - start : end - start], begin - first, end - first))
            start += p.numel()
        return found

    def step(self):
        reduced = [self.buffer[first:last] / self.microbatches for first, last in self.slices]
        factor = (1.0 / (torch.cat(reduced).norm() + 1e-6)).clamp(max=1.0)
        for parts, gradient in zip(self.parts, reduced):
            for part, begin, end in parts:
                part.decoupled_grad = gradient[begin:end] * factor
        self.adam.step()
